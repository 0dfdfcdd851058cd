"""How each kind of container is opened and closed again: the kinds without attributes of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hostward._tree._registries import Registration


class Kind(ABC):
    """How to open and close the containers of one exact type.

    ``open`` gives the children and a *meta*, a snapshot of all else that ``close`` needs to build a new container
    around other children. ``keys`` names the children as comparable values, or gives ``None`` where they are numbered;
    ``entry`` is the piece of path from the container to one child.
    """

    def __init__(self, cls: type) -> None:
        self.cls = cls

    @abstractmethod
    def open(self, container: Any) -> tuple[Sequence[object], Any]:
        """Return the children and the meta."""

    @abstractmethod
    def close(self, meta: Any, children: list[object]) -> object:
        """Return a new container; `children` is the callee's to keep."""

    def keys(self, meta: Any) -> Sequence[object] | None:
        """Return what names the children, or ``None`` where their number does."""
        return None

    def entry(self, meta: Any, position: int) -> str:
        """Return the piece of path to the child at `position`."""
        return f"[{position}]"


class Dict(Kind):
    """``dict`` itself."""

    def open(self, container: dict[object, object]) -> tuple[Sequence[object], list[object]]:
        return list(container.values()), list(container)

    def close(self, meta: list[object], children: list[object]) -> object:
        return dict(zip(meta, children, strict=True))

    def keys(self, meta: list[object]) -> Sequence[object]:
        return meta

    def entry(self, meta: list[object], position: int) -> str:
        return f"[{meta[position]!r}]"


class List(Kind):
    """``list`` itself."""

    def open(self, container: list[object]) -> tuple[Sequence[object], None]:
        return container.copy(), None

    def close(self, meta: None, children: list[object]) -> object:
        return children


class Tuple(Kind):
    """``tuple`` itself."""

    def open(self, container: tuple[object, ...]) -> tuple[Sequence[object], None]:
        return container, None

    def close(self, meta: None, children: list[object]) -> object:
        return tuple(children)


class StructSequence(Kind):
    """A C struct sequence: ``torch.return_types``, ``os.stat_result``. Fields outside the sequence are kept."""

    def __init__(self, cls: type) -> None:
        super().__init__(cls)
        # Unnamed fields have no place in __match_args__, which would shift the names after them.
        named: tuple[str, ...] = getattr(cls, "__match_args__", ())
        self._names = named if len(named) == getattr(cls, "n_sequence_fields", -1) else None

    def open(self, container: Any) -> tuple[Sequence[object], dict[str, object]]:
        _, (_, hidden) = container.__reduce__()
        return tuple(container), hidden

    def close(self, meta: dict[str, object], children: list[object]) -> object:
        return self.cls(children, meta)

    def entry(self, meta: dict[str, object], position: int) -> str:
        return f"[{position}]" if self._names is None else f".{self._names[position]}"


class Registered(Kind):
    """A type registered with torch's pytree or with optree: their functions take it apart and rebuild it."""

    def __init__(self, cls: type, registration: Registration) -> None:
        super().__init__(cls)
        self._registration = registration

    def open(self, container: Any) -> tuple[Sequence[object], tuple[Any, Any]]:
        children, context, entries = self._registration.flatten(container)
        return children, (context, entries)

    def close(self, meta: tuple[Any, Any], children: list[object]) -> object:
        return self._registration.unflatten(meta[0], children)

    def entry(self, meta: tuple[Any, Any], position: int) -> str:
        return self._registration.entry(meta[1], position)
