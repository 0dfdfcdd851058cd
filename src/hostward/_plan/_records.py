"""What a plan consists of. Frozen, free of tensors, and printable: the engine adds no decision to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hostward._types import Options, Source


class Route(Enum):
    """How one move crosses the link."""

    DIRECT = "direct"  # on the caller's stream: a call with one leaf that is tiny, or whose result is pinned
    WHOLE = "whole"  # on the copy stream; at most one device temporary for all of it, made on the producer's stream
    PIECES = "pieces"  # packed piece by piece on the copy stream, through one bounded temporary
    BLOCKING = "blocking"  # torch's own blocking copy: the device's asynchronous copies are not proven


class Way(Enum):
    """How one leaf's array comes to be."""

    FLAT = "flat"  # what crosses is the array's own memory, element by element; widened on the way
    GATHER = "gather"  # copied out of what landed, once all of it has
    BROADCAST = "broadcast"  # a read-only view that repeats what landed
    HOST_COPY = "host copy"  # the leaf is in host memory already: copied there
    HOST_SHARE = "shared"  # ... and handed out as it is
    EMPTY = "empty"  # no elements: never reaches the driver


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes that cross one link.

    Either a view of leaf `leaf` (broadcast dimensions `drop` indexed at 0, the others permuted by `perm`), or,
    with `span`, a byte range of its storage. What arrives is C-ordered: `shape` elements of `dtype`. `passes`
    names what a device pass has to do first (``()``: the bytes cross as they lie). `lands_in` is the leaf whose
    result is the landing place, ``None`` for scratch memory.
    """

    device: str
    leaf: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    drop: tuple[int, ...] = ()
    perm: tuple[int, ...] = ()
    span: tuple[int, int] | None = None
    passes: tuple[str, ...] = ()
    lands_in: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def temporary(self) -> int:
        """Device bytes of a temporary for the whole move."""
        return self.nbytes if self.passes else 0


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of landed bytes; `offset` in bytes, `strides` in elements of `dtype`."""

    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Deliver:
    """How leaf `leaf` becomes an array.

    `base` is the C-contiguous shape that is allocated, `axes` the transpose that turns it into the result
    (``()``: none), `shape` the result's. `view` says what a GATHER reads.
    """

    leaf: int
    way: Way
    dtype: str
    shape: tuple[int, ...]
    base: tuple[int, ...]
    nbytes: int
    axes: tuple[int, ...] = ()
    move: int | None = None
    view: View | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call will do, for any machine state: one `Deliver` a leaf, and the moves behind them."""

    sources: tuple[Source, ...]
    options: Options
    moves: tuple[Move, ...]
    delivers: tuple[Deliver, ...]
    routes: tuple[tuple[Route, ...], ...]  # for each move, in order of preference

    @property
    def link_nbytes(self) -> int:
        """Bytes that cross a link."""
        return sum(move.nbytes for move in self.moves)

    @property
    def result_nbytes(self) -> int:
        """Bytes of new host memory that the results take."""
        if self.options.out:
            return 0
        return sum(deliver.nbytes for deliver in self.delivers if deliver.way is not Way.HOST_SHARE)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of host memory used on the way and given back."""
        return sum(move.nbytes for move in self.moves if move.lands_in is None)


@dataclass(frozen=True, slots=True)
class AdmittedPlan:
    """A plan and the route that each of its moves takes, chosen for the free bytes seen at one call."""

    plan: Plan
    routes: tuple[Route, ...]
    pieces: tuple[int, ...]  # most bytes of one piece of each move, 0: as large as the sink takes
    blocks: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()

    def temporary(self, device: str) -> int:
        """Most device bytes that this call's temporaries take at one moment."""
        whole = 0
        piece = 0
        for move, route, size in zip(self.plan.moves, self.routes, self.pieces, strict=True):
            if move.device == device and move.passes:
                if route is Route.PIECES:
                    piece = max(piece, size)
                else:
                    whole += move.nbytes
        return whole + piece

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that take part, in order of first appearance."""
        return tuple(dict.fromkeys(move.device for move in self.plan.moves))
