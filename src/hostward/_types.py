"""Closed sets and frozen records that travel between the layers.

Strings are accepted at the public edge and normalised at once (`choice`), so a typo fails there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hostward.errors import OptionError

if TYPE_CHECKING:
    from hostward._dtypes import Request


class Order(Enum):
    """Memory order of results: C-contiguous, or the dense source's own strides."""

    C = "C"
    K = "K"


class Memory(Enum):
    """Where results live: ordinary memory, or a lease of pinned (page-locked) memory."""

    AUTO = "auto"
    PINNED = "pinned"


class CopyMode(Enum):
    """Whether results may share memory with their sources (``copy=``)."""

    ALWAYS = True
    IF_NEEDED = None
    NEVER = False


_E = TypeVar("_E", bound=Enum)


def choice(option: str, value: object, kind: type[_E]) -> _E:
    """Normalise an option's value to its enum member.

    Raises
    ------
    OptionError
        `value` is neither a member nor a member's value. ``1`` is not ``True`` here.
    """
    if isinstance(value, kind):
        return value
    for member in kind:
        if type(value) is type(member.value) and value == member.value:
            return member
    known = ", ".join(repr(member.value) for member in kind)
    raise OptionError(f"unknown value for {option}=", got=repr(value), needed=f"one of {known}")


class Source(NamedTuple):
    """What one leaf is, without the leaf: all that planning may look at.

    A named tuple, because it is built and hashed once for every leaf of every call.

    `device` is torch's name of the device; ``"numpy"`` for an ndarray. `dtype` is a name of the `_dtypes`
    table (torch's without ``torch.``), or NumPy's where the table has none. `offset` and `strides` are in
    elements. `storage` numbers the distinct storages of one call in order of first appearance, so two calls
    with the same alias pattern have equal sources.
    """

    device: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    storage: int = 0
    conj: bool = False
    neg: bool = False
    requires_grad: bool = False


class Options(NamedTuple):
    """The options of a call, normalised; part of the key under which its plan is cached."""

    request: Request
    order: Order
    copy: CopyMode
    memory: Memory
    bare: bool
    out: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device type has been shown to do; from the registry in `_devices`.

    `host`: its memory is the host's, no link is crossed. `async_copies`: non-blocking copies into
    pinned memory, ordered by events, are proven; without it every transfer blocks, and says so.
    """

    device_type: str
    host: bool = False
    async_copies: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """Free bytes seen at the moment of a call; all that `admit` decides by.

    `device_free` pairs a device with its free bytes, those in torch's cache included; a device that is
    missing was not asked, because the call needs no temporary worth asking for. `temporary_limit` bounds the
    device temporaries of one call on one device, `host_free` is what the host can still give (``None``: not
    known, or not asked).
    """

    device_free: tuple[tuple[str, int], ...] = ()
    temporary_limit: int = 256 << 20
    host_free: int | None = None
