"""Flatten and rebuild, both without recursion.

A tree becomes a list of `Node`s in the order in which its containers are complete: children before their parents. So
rebuilding is one pass over the list, and a container that stands in two places is simply named twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hostward._tree._classify import EXACT, classify
from hostward._tree._kinds import Kind, Registered
from hostward.errors import TreeError


class Node:
    """One container, taken apart.

    Its children are `slots`: a leaf by its number, a container by ``~index``. Where all children are leaves, `slots`
    is ``None`` and they are the `count` leaves from number `first` on, which spares the common flat dict a list.
    """

    __slots__ = ("count", "first", "index", "kind", "meta", "parent", "position", "slots")

    def __init__(self, kind: Kind, meta: Any, parent: Node | None, position: int) -> None:
        self.kind = kind
        self.meta = meta
        self.parent = parent  # where it was found first: sharing makes further places
        self.position = position
        self.index = -1  # its place among the complete nodes; below 0 while it is open
        self.slots: list[int] | None = None
        self.first = 0
        self.count = 0

    @property
    def children(self) -> Sequence[int]:
        """All children as slots."""
        return range(self.first, self.first + self.count) if self.slots is None else self.slots

    def path(self) -> str:
        """Return the path from the root."""
        entries: list[str] = []
        node = self
        while node.parent is not None:
            entries.append(node.parent.kind.entry(node.parent.meta, node.position))
            node = node.parent
        return "".join(reversed(entries))

    def child_path(self, position: int) -> str:
        """Return the path from the root to the child at `position`."""
        return self.path() + self.kind.entry(self.meta, position)


class _Kinds(dict[type, Kind | None]):
    """Kinds by exact type, found out once per call: registrations come and go between calls."""

    def __missing__(self, cls: type) -> Kind | None:
        kind = self[cls] = classify(cls)
        return kind


class Flat:
    """A tree, taken apart: its leaves, and what it takes to put others in their place.

    Attributes
    ----------
    leaves
        In the order of the containers; those of a shared container once. The list is the caller's: to let go of the
        leaves while the structure lives on, clear it.
    bare
        The tree is a single leaf.
    nodes
        The containers, children before parents; the last one is the root.
    """

    __slots__ = ("_n_leaves", "_owners", "bare", "leaves", "nodes")

    def __init__(self, leaves: list[object], nodes: list[Node]) -> None:
        self.leaves = leaves
        self.nodes = nodes
        self.bare = not nodes
        self._n_leaves = len(leaves)
        self._owners: list[tuple[Node, int]] | None = None

    def rebuild(self, new_leaves: Sequence[object]) -> object:
        """Return a new tree of the same structure around `new_leaves`.

        Raises
        ------
        TreeError
            The number of leaves differs, or a type cannot be built anew (the original error is the cause).
        """
        leaves = list(new_leaves)
        if len(leaves) != self._n_leaves:
            raise TreeError("cannot rebuild the tree", got=f"{len(leaves)} leaves", needed=f"{self._n_leaves}")
        built: list[object] = []
        for node in self.nodes:
            if node.slots is None:
                children = leaves[node.first : node.first + node.count]
            else:
                children = [leaves[i] if i >= 0 else built[~i] for i in node.slots]
            try:
                built.append(node.kind.close(node.meta, children))
            except Exception as error:
                raise _failed("rebuild", node.kind, node.path(), error) from error
        return built[-1] if built else leaves[0]

    def path(self, i: int) -> str:
        """Return where leaf `i` stands, as Python would index it; ``""`` for a bare leaf.

        In a shared container it is the first of its places. The first call looks through the whole tree.
        """
        if self.bare:
            return ""
        if self._owners is None:
            owners: list[Any] = [None] * self._n_leaves
            for node in self.nodes:
                for position, slot in enumerate(node.children):
                    if slot >= 0:
                        owners[slot] = (node, position)
            self._owners = owners
        node, position = self._owners[i]
        return node.child_path(position)


class _Walk:
    """The state of one `flatten`."""

    def __init__(self) -> None:
        self.kinds = _Kinds(EXACT)
        self.leaves: list[object] = []
        self.nodes: list[Node] = []
        self.seen: dict[int, Node] = {}
        self.alive: list[object] = []  # a container made up by a flatten function must not die: its id is in `seen`
        self.open: list[tuple[Node, list[int], Iterator[object]]] = []

    def enter(self, container: object, kind: Kind, parent: Node | None, position: int) -> Node:
        """Open a container. The node is complete at once if no child is a container, else it is on the stack."""
        try:
            children, meta = kind.open(container)
        except Exception as error:
            path = "" if parent is None else parent.child_path(position)
            raise _failed("take apart", kind, path, error) from error
        node = self.seen[id(container)] = Node(kind, meta, parent, position)
        self.alive.append(container)
        for cls in set(map(type, children)):
            if self.kinds[cls] is not None:
                node.slots = []
                self.open.append((node, node.slots, iter(children)))
                return node
        node.first = len(self.leaves)
        self.leaves += children
        self.complete(node, len(children))
        return node

    def complete(self, node: Node, count: int) -> None:
        node.count = count
        node.index = len(self.nodes)
        self.nodes.append(node)

    def run(self) -> None:
        """Work off the stack. A child's slot is noted when it is complete, so slots come in the children's order."""
        kinds, leaves, seen = self.kinds, self.leaves, self.seen
        while self.open:
            node, slots, children = self.open[-1]
            for child in children:  # an iterator: after a descent it goes on where it stood
                kind = kinds[type(child)]
                if kind is None:
                    slots.append(len(leaves))
                    leaves.append(child)
                    continue
                known = seen.get(id(child))
                if known is None:
                    known = self.enter(child, kind, node, len(slots))
                    if known.index < 0:
                        break  # its children come first
                elif known.index < 0:
                    raise _cycle(node.child_path(len(slots)), known)
                slots.append(~known.index)
            else:
                self.open.pop()
                self.complete(node, len(slots))
                if self.open:
                    self.open[-1][1].append(~node.index)


def flatten(tree: object) -> Flat:
    """Take a tree apart.

    Parameters
    ----------
    tree
        Any object. What is no container is a leaf, so any object is a tree.

    Raises
    ------
    TreeError
        The tree contains itself, or a registered type's own flatten function failed (it is the cause).
    """
    walk = _Walk()
    kind = walk.kinds[type(tree)]
    if kind is None:
        return Flat([tree], [])
    walk.enter(tree, kind, None, 0)
    walk.run()
    return Flat(walk.leaves, walk.nodes)


def _cycle(path: str, known: Node) -> TreeError:
    return TreeError(
        "the tree contains itself",
        path=path,
        why=f"this {known.kind.cls.__name__} is the one at tree{known.path()}, so the result would never end",
        do="pass the parts that you need, or break the cycle",
    )


def _failed(what: str, kind: Kind, path: str, error: Exception) -> TreeError:
    name = kind.cls.__qualname__
    if isinstance(kind, Registered):
        do = "correct the functions that it is registered with (torch's pytree or optree)"
    else:
        do = "register it with torch's pytree or optree"
    return TreeError(
        f"cannot {what} {name}",
        path=path,
        why=f"{type(error).__name__}: {error}",
        do=f"{do}, or pass its parts in a dict or a list",
    )
