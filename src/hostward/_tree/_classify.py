"""Which types are containers, and of which kind: the order of precedence."""

from __future__ import annotations

import dataclasses
from collections import UserDict, UserList
from enum import Enum
from typing import Final

from hostward._tree import _registries
from hostward._tree._instances import ITEMS, NO_ITEMS, Instance, User
from hostward._tree._kinds import Dict, Kind, List, Registered, StructSequence, Tuple

EXACT: Final[dict[type, Kind | None]] = {
    dict: Dict(dict),
    list: List(list),
    tuple: Tuple(tuple),
    **dict.fromkeys((type(None), bool, int, float, complex, str, bytes)),
}


def classify(cls: type) -> Kind | None:
    """Return how to open containers of this exact type, or ``None`` for a leaf."""
    if cls in ITEMS:  # before the registries: they hold the built-in containers, too
        return Instance(cls, ITEMS[cls], ())
    if (cls.__module__, cls.__name__) == ("torch", "Size") or Enum in cls.__mro__:
        return None  # a shape is one value; enum members are the only ones of their class
    if _is_struct_sequence(cls):  # before the registries: torch registers all of its own, without names
        # sys.version_info and its like have no __new__: nobody can make a second one, so they are values.
        return StructSequence(cls) if "__new__" in vars(cls) else None
    if (registration := _registries.find(cls)) is not None:
        return Registered(cls, registration)
    return _instance(cls)


def _instance(cls: type) -> Kind | None:
    is_dataclass = hasattr(cls, "__dataclass_fields__")
    fields = [field.name for field in dataclasses.fields(cls)] if is_dataclass else []
    for base in cls.__mro__:
        if base in ITEMS:
            named = getattr(cls, "_fields", None) if base is tuple else None
            return Instance(cls, ITEMS[base], fields, named if isinstance(named, tuple) else None)
        if base is UserDict or base is UserList:
            return User(cls, NO_ITEMS, dict.fromkeys(["data", *fields]))
    if is_dataclass and not _is_array(cls):
        return Instance(cls, NO_ITEMS, fields)
    return None


def _is_struct_sequence(cls: type) -> bool:
    return cls.__bases__ == (tuple,) and hasattr(cls, "n_sequence_fields")


def _is_array(cls: type) -> bool:
    return hasattr(cls, "__array__") or hasattr(cls, "__dlpack__")
