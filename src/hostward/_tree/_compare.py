"""Compare two flattened trees, for ``out=``."""

from __future__ import annotations

from itertools import zip_longest
from typing import Final, NamedTuple

from hostward._tree._walk import Flat, Node
from hostward.errors import TreeError


class _Pair(NamedTuple):
    """One place in both trees: the slots (see `Node`) that stand there, and where that is in the first tree."""

    a: int
    b: int
    parent: Node | None
    position: int

    def path(self) -> str:
        return "" if self.parent is None else self.parent.child_path(self.position)


def same_structure(a: Flat, b: Flat, *, name: str = "out=") -> None:
    """Check that tree `b` is built as tree `a` is, so that leaf i of one belongs to leaf i of the other.

    Containers must have the same exact type, the same keys in the same order, and the same sharing: what is one
    container in two places of `a` is so in `b`. Leaves may be anything.

    Parameters
    ----------
    a, b
        The tree that sets the structure, and the one to check.
    name
        What the caller knows `b` as.

    Raises
    ------
    TreeError
        At the path of the first difference, with what `b` has (got) and what `a` has (needed).
    """
    partner: dict[int, int] = {}  # a's containers, by slot, to b's
    taken: dict[int, int] = {}  # and back
    pairs = [_Pair(_root(a), _root(b), None, 0)]
    while pairs:
        pair = pairs.pop()
        x, y = pair.a, pair.b
        difference: tuple[str, str] | None = None
        if x >= 0 or y >= 0:
            difference = None if x >= 0 and y >= 0 else (_describe(b, y), _describe(a, x))
        elif x in partner or y in taken:
            if partner.get(x) != y:
                difference = _sharing(b, taken.get(y)), _sharing(a, x if x in partner else None)
        else:
            partner[x], taken[y] = y, x
            one, other = a.nodes[~x], b.nodes[~y]
            difference = _node_difference(a, b, x, y)
            pairs += [
                _Pair(i, j, one, position)
                for position, (i, j) in reversed(list(enumerate(zip(one.children, other.children, strict=False))))
                if i < 0 or j < 0  # two leaves cannot differ
            ]
        if difference is not None:
            got, needed = difference
            raise TreeError(
                f"{name} is built differently from the tree",
                path=pair.path(),
                got=got,
                needed=needed,
                do=f"build {name} like the tree: the same types and keys, in the same order",
            )


_NOTHING: Final = object()


def _node_difference(a: Flat, b: Flat, x: int, y: int) -> tuple[str, str] | None:
    """Return what `b` has and what `a` has, if the containers themselves differ."""
    one, other = a.nodes[~x], b.nodes[~y]
    if one.kind.cls is not other.kind.cls:
        return _describe(b, y), _describe(a, x)
    keys, other_keys = one.kind.keys(one.meta), other.kind.keys(other.meta)
    if keys is None or other_keys is None:
        return None if one.count == other.count else (_describe(b, y), _describe(a, x))
    if keys == other_keys:
        return None
    for i, (key, other_key) in enumerate(zip_longest(keys, other_keys, fillvalue=_NOTHING)):
        if key != other_key:
            got = "nothing" if other_key is _NOTHING else other.kind.entry(other.meta, i)
            needed = "nothing" if key is _NOTHING else one.kind.entry(one.meta, i)
            return f"{got} as entry {i}", needed
    return None


def _describe(flat: Flat, slot: int) -> str:
    if slot >= 0:
        return f"a leaf, {_name(type(flat.leaves[slot]))}" if flat.leaves else "a leaf"
    node = flat.nodes[~slot]
    return f"{_name(node.kind.cls)} of {node.count}"


def _sharing(flat: Flat, slot: int | None) -> str:
    return "a container of its own" if slot is None else f"the container at tree{flat.nodes[~slot].path()} again"


def _name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _root(flat: Flat) -> int:
    return 0 if flat.bare else ~(len(flat.nodes) - 1)
