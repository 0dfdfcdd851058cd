"""Subclasses of built-in containers, and dataclasses: items, fields and attributes.

No code of a user's class is called where a built-in base's or plain attribute access will do: ``__init__``,
``__setitem__`` or ``__setattr__`` of a subclass may do anything, such as convert or reject.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from types import MemberDescriptorType
from typing import Any, Final, NamedTuple

from hostward._tree._kinds import Kind


class Items(NamedTuple):
    """How a built-in base reads its own items, and makes a new, filled instance of a subclass, past all overrides."""

    make: Callable[[type, Any, list[object], list[object]], Any]  # (cls, extra, keys, values)
    values: Callable[[Any], Iterable[object]]
    keys: Callable[[Any], Iterable[object]] | None = None
    extra: str | None = None  # an attribute that `make` needs


def _make_dict(cls: type, extra: Any, keys: list[object], values: list[object]) -> Any:
    new: Any = dict.__new__(cls)
    dict.update(new, zip(keys, values, strict=True))
    return new


def _make_ordered(cls: type, extra: Any, keys: list[object], values: list[object]) -> Any:
    new: Any = OrderedDict.__new__(cls)
    for key, value in zip(keys, values, strict=True):  # OrderedDict.update would call the subclass's __setitem__
        OrderedDict.__setitem__(new, key, value)
    return new


def _make_default(cls: type, extra: Any, keys: list[object], values: list[object]) -> Any:
    new: Any = defaultdict.__new__(cls)
    defaultdict.__init__(new, extra, zip(keys, values, strict=True))
    return new


def _make_list(cls: type, extra: Any, keys: list[object], values: list[object]) -> Any:
    new: Any = list.__new__(cls)
    list.extend(new, values)
    return new


def _make_tuple(cls: type, extra: Any, keys: list[object], values: list[object]) -> Any:
    return tuple.__new__(cls, values)


def _make_deque(cls: type, extra: Any, keys: list[object], values: list[object]) -> Any:
    new: Any = deque.__new__(cls)
    deque.__init__(new, values, extra)
    return new


def _make_plain(cls: type, extra: Any, keys: list[object], values: list[object]) -> Any:
    # The nearest class written in C allocates: object, as a rule, but BaseException's heirs need theirs.
    base: Any = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)
    return base.__new__(cls)


_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE, Include/object.h

ITEMS: Final[dict[type, Items]] = {
    OrderedDict: Items(_make_ordered, OrderedDict.values, OrderedDict.keys),  # dict.keys would ignore move_to_end
    defaultdict: Items(_make_default, dict.values, dict.keys, extra="default_factory"),
    dict: Items(_make_dict, dict.values, dict.keys),
    list: Items(_make_list, list.__iter__),
    tuple: Items(_make_tuple, tuple.__iter__),
    deque: Items(_make_deque, deque.__iter__, extra="maxlen"),
}
NO_ITEMS: Final = Items(_make_plain, lambda container: ())


class _Meta(NamedTuple):
    keys: list[object]  # of the items, if they have any
    n_items: int
    fields: list[str]  # attributes that are children, after the items
    kept: dict[str, object]  # __dict__ but for the fields
    slots: dict[str, object]  # the same for __slots__
    follows: dict[str, int]  # kept attributes that are the very object of a child, by the child's position
    is_own_dict: bool  # `self.__dict__ = self`
    extra: object  # default_factory, maxlen


class Instance(Kind):
    """A subclass of a built-in container, a dataclass, or both: items and fields are children, the rest is kept.

    Kept attributes are handed on as they are, also where they hold arrays; but one that *is* an item or a field (a
    dict with attribute access often stores both) becomes what that child becomes.
    """

    def __init__(self, cls: type, items: Items, fields: Iterable[str], names: Sequence[str] | None = None) -> None:
        super().__init__(cls)
        self._items = items
        self._fields = tuple(fields)
        self._names = names  # a named tuple's
        self._slots = tuple(_slot_names(cls))

    def open(self, container: Any) -> tuple[Sequence[object], _Meta]:
        items = self._items
        keys = [] if items.keys is None else list(items.keys(container))
        children = list(items.values(container))
        n_items = len(children)
        fields = [name for name in self._fields if hasattr(container, name)]  # init=False ones may be unset
        children += [getattr(container, name) for name in fields]
        attributes = getattr(container, "__dict__", {})
        is_own_dict = attributes is container
        kept = {} if is_own_dict else {k: v for k, v in attributes.items() if k not in self._fields}
        slots = {k: getattr(container, k) for k in self._slots if k not in self._fields and hasattr(container, k)}
        follows: dict[str, int] = {}
        if kept or slots:
            position = dict(zip(map(id, children), range(len(children)), strict=True))
            follows = {k: position[id(v)] for k, v in (kept | slots).items() if id(v) in position}
        extra = None if items.extra is None else getattr(container, items.extra)
        return children, _Meta(keys, n_items, fields, kept, slots, follows, is_own_dict, extra)

    def close(self, meta: _Meta, children: list[object]) -> object:
        new = self._items.make(self.cls, meta.extra, meta.keys, children[: meta.n_items])
        follows = {k: children[i] for k, i in meta.follows.items()}
        # object.__setattr__: frozen dataclasses refuse their own, attribute dicts store an item instead.
        if meta.is_own_dict:
            object.__setattr__(new, "__dict__", new)
        if meta.kept:
            new.__dict__.update({k: follows.get(k, v) for k, v in meta.kept.items()})
        for name, value in meta.slots.items():
            object.__setattr__(new, name, follows.get(name, value))
        for name, value in zip(meta.fields, children[meta.n_items :], strict=True):
            object.__setattr__(new, name, value)
        return new

    def keys(self, meta: _Meta) -> Sequence[object] | None:
        if self._items.keys is None and not meta.fields:
            return None
        return [*(meta.keys or range(meta.n_items)), *meta.fields]

    def entry(self, meta: _Meta, position: int) -> str:
        if position >= meta.n_items:
            return f".{meta.fields[position - meta.n_items]}"
        if self._names is not None:
            return f".{self._names[position]}"
        return f"[{meta.keys[position]!r}]" if meta.keys else f"[{position}]"


class User(Instance):
    """``UserDict`` and ``UserList``: the items live in the container ``data``, which the path does not mention."""

    def entry(self, meta: _Meta, position: int) -> str:
        entry = super().entry(meta, position)
        return "" if entry == ".data" else entry


def _slot_names(cls: type) -> list[str]:
    """Return the names in ``__slots__`` of the class and its bases, as mangled."""
    owners = [vars(base) for base in cls.__mro__ if "__slots__" in vars(base)]
    return [name for owner in owners for name, member in owner.items() if isinstance(member, MemberDescriptorType)]
