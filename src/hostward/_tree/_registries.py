"""Types that the user registered with torch's pytree or with optree, where those are imported already.

Neither is imported here. Both keep their registries in private modules, which have kept their form from torch 2.6 and
optree 0.13 on; should it change, a registered type is no longer found, and the tests here fail.

Source: torch/utils/_pytree.py (``NodeDef``), optree/registry.py (``PyTreeNodeRegistryEntry``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Registration:
    """Three functions, whatever the registry's own order of arguments.

    `flatten` gives the children, the context that `unflatten` wants back, and what `entry` needs to write the piece
    of path to the child at a position.
    """

    flatten: Callable[[Any], tuple[Sequence[object], Any, Any]]
    unflatten: Callable[[Any, list[object]], object]
    entry: Callable[[Any, int], str]


def find(cls: type) -> Registration | None:
    """Return the registration of exactly this type, torch's before optree's."""
    return _find_torch(cls) or _find_optree(cls)


def _find_torch(cls: type) -> Registration | None:
    definition = getattr(sys.modules.get("torch.utils._pytree"), "SUPPORTED_NODES", {}).get(cls)
    if definition is None:
        return None

    def flatten(container: Any) -> tuple[Sequence[object], Any, Any]:
        children, context = definition.flatten_fn(container)
        return list(children), context, _torch_keys(definition.flatten_with_keys_fn, container)

    def unflatten(context: Any, children: list[object]) -> object:
        return definition.unflatten_fn(children, context)

    def entry(keys: Any, position: int) -> str:
        return str(keys[position])

    return Registration(flatten, unflatten, _or_number(entry))


def _torch_keys(flatten_with_keys: Callable[[Any], tuple[Any, Any]] | None, container: Any) -> list[object] | None:
    """Return the children's keys, which only serve paths: a failure here must not fail the call.

    The context that comes with them is dropped: the one that ``register_dataclass`` gives fits no ``unflatten``.
    """
    if flatten_with_keys is None:
        return None
    try:
        return [key for key, _ in flatten_with_keys(container)[0]]
    except Exception:
        return None


def _find_optree(cls: type) -> Registration | None:
    registry = getattr(sys.modules.get("optree.registry"), "_NODETYPE_REGISTRY", {})
    definition = registry.get(cls)
    if definition is None:
        # Registered in namespaces only: the first one will do, for each of them knows how to rebuild the type.
        named = (key for key in list(registry) if isinstance(key, tuple) and key[1] is cls)
        definition = registry.get(next(named, None))
    if definition is None:
        return None

    def flatten(container: Any) -> tuple[Sequence[object], Any, Any]:
        children, context, *entries = definition.flatten_func(container)
        return list(children), context, tuple(entries[0] or ()) if entries else ()

    def unflatten(context: Any, children: list[object]) -> object:
        return definition.unflatten_func(context, tuple(children))

    def entry(entries: Any, position: int) -> str:
        step = definition.path_entry_type(entries[position], cls, definition.kind)
        return str(step.codify(""))

    return Registration(flatten, unflatten, _or_number(entry))


def _or_number(entry: Callable[[Any, int], str]) -> Callable[[Any, int], str]:
    """Fall back to a position that does not look like an index; a path must not fail, it is part of an error."""

    def safe(entries: Any, position: int) -> str:
        try:
            return entry(entries, position)
        except Exception:
            return f"[<child {position}>]"

    return safe
