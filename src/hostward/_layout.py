"""Stride arithmetic: dense, gapped, broadcast and overlapping layouts, unions of ranges, splitting into blocks.

Shapes, strides and offsets are in elements, as in torch, and strides are never negative. A dim of size 1 has a stride
that says nothing, and a tensor without elements touches nothing: both are ignored wherever it matters. Plain integers
in, plain integers out; nothing here knows a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Final

# `self_overlaps` looks for a clash among three and more entangled dims in a bit set of at most this many elements.
_EXACT_EXTENT: Final = 1 << 22


def numel(shape: Sequence[int]) -> int:
    """Return the number of elements."""
    return math.prod(shape)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous tensor, as torch gives them (a size of 0 counts as 1)."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Say whether the elements lie in C order without gaps."""
    expected = 1
    contiguous = True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1:
            contiguous = contiguous and stride == expected
            expected *= size
    return contiguous


def k_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that puts the dims in descending order of stride: NumPy's ``order="K"``.

    The sort is stable, so dims of equal stride stay in order, and broadcast dims (stride 0) come last. A dim of size 1
    stays where it is; a contiguous tensor therefore always gives the identity.
    """
    dims = range(len(shape))
    if is_contiguous(shape, strides):
        return tuple(dims)
    ordered = iter(sorted((i for i in dims if shape[i] != 1), key=lambda i: -strides[i]))
    return tuple(i if shape[i] == 1 else next(ordered) for i in dims)


def dense_permutation(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the permutation of the dims that makes the tensor C-contiguous, or ``None`` if none does."""
    order = k_order(shape, strides)
    # Dense strides are distinct where sizes exceed 1, so if any permutation does it, the descending one does.
    if is_contiguous([shape[i] for i in order], [strides[i] for i in order]):
        return order
    return None


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Say whether the tensor touches each element of one unbroken range once, in whatever order."""
    return dense_permutation(shape, strides) is not None


def broadcast_dims(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dims that repeat the same elements: stride 0 and a size above 1."""
    return tuple(i for i, (size, stride) in enumerate(zip(shape, strides, strict=True)) if stride == 0 and size > 1)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one touched, both included; 0 if there are none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def byte_range(offset: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return the half-open range of bytes, within the storage, that the tensor touches (an empty one if empty)."""
    return offset * itemsize, (offset + extent(shape, strides)) * itemsize


def self_overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Say whether two different indices touch the same element, as after ``expand`` or an overlapping ``unfold``.

    Exact, except where three or more dims are entangled over more than 4 Mi elements: there the answer is ``True``
    although it may be ``False``. It is never ``False`` where elements overlap.

    Notes
    -----
    The general problem is NP-complete (see ``numpy.shares_memory``). What makes it easy in practice: a dim whose stride
    clears everything that the smaller ones reach cannot clash, and is set aside; two dims clash exactly if the least
    common multiple of their strides is within reach of both.
    """
    if 0 in shape:
        return False
    dims = sorted(((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1))
    while dims and dims[-1][0] >= extent([n for _, n in dims[:-1]], [s for s, _ in dims[:-1]]):
        dims.pop()
    if not dims:
        return False
    if any(stride == 0 for stride, _ in dims):
        return True
    for i, (s, n) in enumerate(dims):
        if any(math.lcm(s, t) <= min((n - 1) * s, (m - 1) * t) for t, m in dims[i + 1 :]):
            return True
    return len(dims) > 2 and _clash(dims)


def _clash(dims: list[tuple[int, int]]) -> bool:
    """Mark every element that any index touches, one bit each, and count: too few bits mean a clash."""
    scale = math.gcd(*(stride for stride, _ in dims))
    dims = [(stride // scale, size) for stride, size in dims]
    if extent([size for _, size in dims], [stride for stride, _ in dims]) > _EXACT_EXTENT:
        return True
    touched = 1
    for stride, size in dims:
        copies = 1
        while copies < size:  # doubling: as many shifts as `size` has bits
            more = min(copies, size - copies)
            touched |= touched << (stride * more)
            copies += more
    return touched.bit_count() < math.prod(size for _, size in dims)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranges that hang together: `members` index into the input, ascending; ``[start, stop)`` is their union."""

    members: tuple[int, ...]
    start: int
    stop: int


def union_groups(ranges: Sequence[tuple[int, int]]) -> list[Group]:
    """Return the connected components of overlapping half-open ranges, by ascending start, in O(n log n).

    Ranges that only touch do not overlap; a range without bytes is in no group.
    """
    groups: list[Group] = []
    members: list[int] = []
    first = last = 0
    for start, stop, i in sorted((start, stop, i) for i, (start, stop) in enumerate(ranges) if start < stop):
        if members and start >= last:
            groups.append(Group(tuple(sorted(members)), first, last))
            members = []
        if not members:
            first, last = start, stop
        members.append(i)
        last = max(last, stop)
    if members:
        groups.append(Group(tuple(sorted(members)), first, last))
    return groups


@dataclass(frozen=True, slots=True)
class Block:
    """One run of a C-ordered box: rows ``[start, stop)`` of dim ``len(index)``, under the fixed leading `index`.

    `offset` and `count` are its place in flat C order, in elements. A 0-d box is one block with ``index=()``,
    ``start=0``, ``stop=1`` and no dim to slice; `select` knows that.
    """

    index: tuple[int, ...]
    start: int
    stop: int
    offset: int
    count: int


def blocks(shape: Sequence[int], limit: int) -> Iterator[Block]:
    """Split a C-ordered box into runs of at most `limit` elements, in order; together they tile it exactly.

    A run is made of whole rows of the outermost dim whose rows fit, and the rows are dealt out evenly: of 10 rows
    with room for 4 come 3, 3 and 4, never 4, 4 and 2. A box without elements has no blocks.

    Raises
    ------
    ValueError
        `limit` is less than 1, and there are elements.
    """
    if 0 in shape:
        return
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if not shape:
        yield Block((), 0, 1, 0, 1)
        return
    depth, row = 0, math.prod(shape[1:])
    while row > limit:
        depth += 1
        row //= shape[depth]
    rows = shape[depth]
    pieces = -(-rows // (limit // row))
    cuts = [rows * i // pieces for i in range(pieces + 1)]
    offset = 0
    for index in product(*map(range, shape[:depth])):
        for start, stop in pairwise(cuts):
            count = (stop - start) * row
            yield Block(index, start, stop, offset, count)
            offset += count


def select(view: Any, block: Block) -> Any:
    """Return the part of `view` (a tensor, an array: anything with `ndim` and slicing) that `block` names; a view."""
    if view.ndim == 0:
        return view[...]
    return view[(*block.index, slice(block.start, block.stop))]
