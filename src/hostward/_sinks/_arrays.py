"""Arrays as the destination: fresh ones in ordinary or pinned memory, and the caller's own (``out=``).

A move lands *directly* where its target is pinned, contiguous and of the dtype that crosses. Everything else goes
through the ring: torch's CPU threads copy (and widen) each piece to its place while the next one travels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hostward import _layout
from hostward._devices import as_bytes, backend_for
from hostward._memory import Chunk, HostBuffer, Ring, chunk_nbytes, ordinary, pinned, ring_for
from hostward._plan import AdmittedPlan, Deliver, Move, View, Way
from hostward._sinks._base import Piece, Slot, Work
from hostward._sinks._convert import Array, numpy_view, put, torch_dtype, torch_view
from hostward._torch import torch
from hostward._types import Memory


@dataclass(slots=True)
class _Landing:
    """Where one move arrives: `target` has the move's shape and the result's `dtype`; the device writes `direct`."""

    target: Array
    dtype: str
    seen: torch.Tensor | None  # `target` as torch sees it
    direct: torch.Tensor | None  # its bytes, if the device may write them itself


class ArraySink:
    """Collects one call's device leaves into arrays. All memory is taken here, before anything is queued.

    After `finish`, `results` holds the array of each leaf that has a move, by its number in the plan.

    Parameters
    ----------
    admitted
        The plan. Only its moves and the delivers that depend on them concern this sink.
    outs
        The caller's array for each leaf, in the plan's order; ``None`` for fresh arrays.

    Raises
    ------
    HostMemoryError
        The memory cannot be had.
    """

    def __init__(self, admitted: AdmittedPlan, outs: Sequence[Array] | None = None) -> None:
        self._plan = admitted.plan
        self.results: dict[int, Array] = {}
        self.fallbacks: list[str] = []
        self._owner = object()  # of this sink's chunks
        self._open: dict[str, Chunk] = {}
        self._buffers: dict[int, HostBuffer] = {}  # by leaf, those made here
        self._scratch: dict[int, HostBuffer] = {}  # by move
        self._bases = {d.leaf: self._base(d, outs) for d in self._plan.delivers if d.move is not None}
        self._landings = [self._landing(number, move) for number, move in enumerate(self._plan.moves)]
        self._left: Counter[str] = Counter()  # bytes that still have to go through each device's ring
        for move, landing in zip(self._plan.moves, self._landings, strict=True):
            self._left[move.device] += move.nbytes if landing.direct is None else 0
        self._chunk_nbytes = chunk_nbytes(self._left.total())

    def _buffer(self, nbytes: int, device: str) -> HostBuffer:
        if self._plan.options.memory is not Memory.PINNED:
            return ordinary(nbytes)
        buffer = pinned(nbytes, backend_for(_device_type(device)))
        if not buffer.pinned:
            self.fallbacks.append(f"{nbytes:,} bytes in ordinary memory, because no pinned memory could be had")
        return buffer

    def _base(self, deliver: Deliver, outs: Sequence[Array] | None) -> Array:
        if outs is not None:
            return np.asarray(outs[deliver.leaf])  # a memmap as the plain array over its pages
        assert deliver.move is not None
        buffer = self._buffers[deliver.leaf] = self._buffer(deliver.nbytes, self._plan.moves[deliver.move].device)
        return numpy_view(buffer.array, deliver.dtype, deliver.base)

    def _landing(self, number: int, move: Move) -> _Landing:
        leaf = move.lands_in
        buffer = self._buffers.get(leaf) if leaf is not None else ordinary(move.nbytes)  # scratch is never pinned
        if leaf is None or move.span is not None:
            assert buffer is not None
            self._scratch[number] = buffer
            target, dtype = numpy_view(buffer.array, move.dtype, move.shape), move.dtype
        else:
            target, dtype = self._bases[leaf], self._plan.delivers[leaf].dtype
        seen = torch_view(target, dtype)
        direct = None
        if dtype == move.dtype and seen is not None and seen.is_contiguous():
            is_pinned = buffer.pinned if buffer is not None else seen.is_pinned()
            direct = as_bytes(seen) if is_pinned else None
        return _Landing(target, dtype, seen, direct)

    def piece_nbytes(self, move: int) -> int:
        """See `Sink.piece_nbytes`: a chunk of the ring, or no bound where the device writes the result itself."""
        return self._chunk_nbytes if self._landings[move].direct is None else 0

    def reserve(self, piece: Piece) -> Slot | None:
        """See `Sink.reserve`."""
        direct = self._landings[piece.move].direct
        if direct is not None:
            return Slot(piece, direct[piece.offset : piece.offset + piece.nbytes])
        device = self._plan.moves[piece.move].device
        ring = _ring(device)
        chunk = self._open.get(device)
        tensor = ring.use(chunk, piece.nbytes) if chunk is not None else None
        if tensor is None:
            self._close(device)
            chunk = ring.take(self._chunk_nbytes, self._owner)
            if chunk is None:
                return None
            self._open[device] = chunk
            tensor = ring.use(chunk, piece.nbytes)
            assert tensor is not None, "a piece is never larger than a chunk"
        self._left[device] -= piece.nbytes
        if not self._left[device]:
            self._close(device)  # not at the end: whoever waits for one device's ring must not hold another's
        return Slot(piece, tensor, chunk)

    def _close(self, device: str) -> None:
        chunk = self._open.pop(device, None)
        if chunk is not None:
            _ring(device).give(chunk)

    def landed(self, slot: Slot) -> Work | None:
        """See `Sink.landed`: pieces in the ring are copied out, others are in place."""
        return None if slot.group is None else partial(self._copy_out, slot)

    def _copy_out(self, slot: Slot) -> None:
        piece = slot.piece
        move, landing = self._plan.moves[piece.move], self._landings[piece.move]
        values = slot.tensor.view(torch_dtype(move.dtype))
        if landing.seen is not None:
            target = _layout.select(landing.seen, piece.block)
            target.copy_(values.view(target.shape))
        else:
            place = _layout.select(landing.target, piece.block)
            put(place, values.view(place.shape), landing.dtype)
        assert isinstance(slot.group, Chunk)
        _ring(move.device).give(slot.group)

    def finish(self) -> None:
        """See `Sink.finish`: gather what overlapped, then show every base in its leaf's shape."""
        for deliver in self._plan.delivers:
            if deliver.move is None:
                continue
            base = self._bases[deliver.leaf]
            if deliver.view is not None:
                put(base, _strided(self._landed_bytes(deliver.move), deliver.view), deliver.dtype)
            self.results[deliver.leaf] = self._shaped(deliver, base)

    def _landed_bytes(self, move: int) -> torch.Tensor:
        return self._scratch[move].tensor

    def _shaped(self, deliver: Deliver, base: Array) -> Array:
        result = base.transpose(deliver.axes) if deliver.axes else base
        if deliver.way is Way.BROADCAST:
            assert deliver.move is not None
            drop = self._plan.moves[deliver.move].drop
            result = np.broadcast_to(np.expand_dims(result, drop), deliver.shape)
        return result

    def abort(self, error: BaseException) -> None:
        """See `Sink.abort`: nothing is written any more, so the ring can have its chunks back."""
        for device in self._left:
            _ring(device).reclaim(self._owner)
        self._open.clear()
        self._landings.clear()
        self._bases.clear()
        self._buffers.clear()
        self._scratch.clear()

    def leak(self) -> None:
        """See `Sink.leak`: the ring makes other chunks instead of those in use here."""
        for device in self._left:
            _ring(device).disown(self._owner)


def _device_type(device: str) -> str:
    return device.partition(":")[0]


def _ring(device: str) -> Ring:
    where = torch.device(device)
    return ring_for(where.type, where.index or 0)


def _strided(landed: torch.Tensor, view: View) -> torch.Tensor:
    """Return the view of landed bytes that one leaf is; every dtype's elements are aligned in it by the plan."""
    dtype = torch_dtype(view.dtype)
    empty = torch.empty(0, dtype=dtype, device="cpu")
    start = landed.storage_offset() + view.offset
    return empty.set_(landed.untyped_storage(), start // dtype.itemsize, view.shape, view.strides)
