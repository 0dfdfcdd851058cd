"""One device's share of a flight: queue its pieces on the copy stream, and see them land.

Assumptions, each held by the callers: only the flight's driver calls (never two threads at once); the copy stream waits
for the producer's event before the first piece; `keep` holds every tensor that a queued copy reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hostward import _layout
from hostward._devices import Backend, Event, as_bytes
from hostward._plan import AdmittedPlan, Move, Route
from hostward._sinks import Piece, Sink, Slot
from hostward._torch import torch
from hostward.errors import DeviceMemoryError


@dataclass(slots=True)
class _Batch:
    """Slots that become readable together: their event was recorded behind the last of them."""

    event: Event
    slots: list[Slot]


@dataclass(slots=True)
class Leg:
    """Copies of one flight on one device."""

    device: str
    backend: Backend
    index: int
    stream: torch.Stream | None
    pieces: Iterator[Piece]
    read: Callable[[Piece], torch.Tensor]
    keep: list[object] = field(default_factory=list)
    fed: bool = False
    _next: Piece | None = None
    _open: list[Slot] = field(default_factory=list)
    _batches: deque[_Batch] = field(default_factory=deque)

    def feed(self, sink: Sink) -> bool:
        """Queue pieces until none is left or the sink has no room; say whether anything was queued."""
        if self.fed:
            return False
        moved = False
        with self._on_stream():
            try:
                while (piece := self._peek()) is not None:
                    slot = sink.reserve(piece)
                    if slot is None:
                        return moved
                    if self._open and self._open[-1].group is not slot.group:
                        self._seal()
                    # Noted before it is queued: an interrupt between the two must not lose a slot that is written to.
                    self._open.append(slot)
                    slot.tensor.copy_(self.read(piece), non_blocking=self.backend.capabilities.async_copies)
                    self._next = None
                    moved = True
                self.fed = True
            finally:
                self._seal()
        return moved

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with self.backend.relaxed_capture(), self.backend.on(self.stream):
            yield

    def _peek(self) -> Piece | None:
        if self._next is None:
            self._next = next(self.pieces, None)
        return self._next

    def _seal(self) -> None:
        """Record the event of the open batch on the copy stream, which is current."""
        if self._open:
            self._batches.append(_Batch(self.backend.record(self.index), self._open))
            self._open = []

    def poll(self) -> Sequence[Slot]:
        """Return the slots whose event has fired since the last call. Batches fire in the order of their stream."""
        slots: list[Slot] = []
        while self._batches and self._batches[0].event.query():
            slots += self._batches.popleft().slots
        return slots

    def stop(self) -> None:
        """Queue nothing more. What an interrupt left without an event gets one now, so that it can be seen to land."""
        self.fed = True
        if self._open:
            with self._on_stream():
                self._seal()

    @property
    def landed(self) -> bool:
        """Whether everything that was queued has landed."""
        return not self._batches and not self._open


def pieces_of(moves: Sequence[tuple[int, Move]], limit: Callable[[int], int]) -> Iterator[Piece]:
    """Cut moves into pieces of at most `limit(move)` bytes (0: no bound), in C order."""
    for number, move in moves:
        itemsize = move.nbytes // max(1, _layout.numel(move.shape))
        most = limit(number) // itemsize or _layout.numel(move.shape)
        for block in _layout.blocks(move.shape, most):
            yield Piece(number, block, block.offset * itemsize, block.count * itemsize)


class Reader:
    """Turns a piece into contiguous device bytes, on the stream that is current: the last step before the link.

    Parameters
    ----------
    admitted
        The plan.
    tensors
        The leaves by number; only those that a move reads are looked at.
    """

    def __init__(self, admitted: AdmittedPlan, tensors: Sequence[torch.Tensor]) -> None:
        self._admitted = admitted
        self._tensors = tensors
        self._views: dict[int, torch.Tensor] = {}
        self._temporaries: dict[str, torch.Tensor] = {}

    def prepare(self, number: int) -> list[object]:
        """Take the move's view; make the temporary of a WHOLE move on the stream that is current.

        Returns what has to be kept alive until the copies have landed.
        """
        move = self._admitted.plan.moves[number]
        leaf = self._tensors[move.leaf]
        in_pieces = self._admitted.routes[number] is Route.PIECES
        self._views[number] = view = taken(leaf, move) if in_pieces else packed(leaf, move)
        return [leaf, view]

    def __call__(self, piece: Piece) -> torch.Tensor:
        """Return the piece's bytes. A packed piece is written to the one temporary, which stream order protects."""
        move = self._admitted.plan.moves[piece.move]
        part: torch.Tensor = _layout.select(self._views[piece.move], piece.block)
        if move.passes and self._admitted.routes[piece.move] is Route.PIECES:
            packed = self._temporary(move.device)[: piece.nbytes]
            packed.view(_dtype(move)).view(part.shape).copy_(part)
            return packed
        return as_bytes(part)

    def _temporary(self, device: str) -> torch.Tensor:
        """Return the device's one temporary for all pieces; each is done with it before the next, in stream order.

        Made while the copy stream is current, it belongs to that stream.
        """
        temporary = self._temporaries.get(device)
        if temporary is None:
            moves = zip(self._admitted.plan.moves, self._admitted.pieces, strict=True)
            nbytes = max(min(piece, move.nbytes) for move, piece in moves if move.device == device)
            temporary = self._temporaries[device] = _temporary((nbytes,), torch.uint8, torch.device(device))
        return temporary


def _temporary(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:  # too small to have been looked after, or somebody was faster
        raise DeviceMemoryError(
            "no room for a temporary on the device",
            needed=f"{_layout.numel(shape) * dtype.itemsize:,} bytes on {device}",
            do="free some device memory, or ask for order='K' and no dtype=, which moves dense leaves as they lie",
        ) from error


def _dtype(move: Move) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, move.dtype)
    return dtype


def packed(leaf: torch.Tensor, move: Move) -> torch.Tensor:
    """Return what a move carries, contiguous: through a temporary on the stream that is current, if it needs a pass."""
    view = taken(leaf, move)
    if not move.passes:
        return view
    return _temporary(move.shape, _dtype(move), leaf.device).copy_(view)


def taken(leaf: torch.Tensor, move: Move) -> torch.Tensor:
    """Return the view of a leaf, or of its storage's bytes, that a move carries."""
    leaf = leaf.detach()
    if move.span is not None:
        start, stop = move.span
        data = torch.empty(0, dtype=torch.uint8, device=leaf.device)
        return data.set_(leaf.untyped_storage(), start, (stop - start,), (1,))
    for dim in reversed(move.drop):
        leaf = leaf.select(dim, 0)
    return leaf.permute(move.perm)
