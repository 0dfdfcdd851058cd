"""The seam between the engine and whatever keeps the bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hostward._layout import Block
from hostward._torch import torch

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one move: `block` of its C-ordered box, `nbytes` long, `offset` bytes from its start."""

    move: int
    block: Block
    offset: int
    nbytes: int


@dataclass(slots=True)
class Slot:
    """Host bytes for one piece. Slots of one `group` become readable together, by one event."""

    piece: Piece
    tensor: torch.Tensor
    group: object = None


class Sink(Protocol):
    """Where bytes go. Only a flight's driver calls it, outside locks."""

    def piece_nbytes(self, move: int) -> int:
        """Return the most bytes of one piece that the sink takes, 0 for no bound."""
        ...

    def reserve(self, piece: Piece) -> Slot | None:
        """Return host memory for the piece, or ``None`` for now. Never blocks."""
        ...

    def landed(self, slot: Slot) -> Work | None:
        """Take note that the slot's bytes are there; return what is left to do on the host, if anything."""
        ...

    def finish(self) -> None:
        """Make the results: every piece has landed and its work has been done."""
        ...

    def abort(self, error: BaseException) -> None:
        """Let go of everything: the flight failed, and nothing can write here any more."""
        ...

    def leak(self) -> None:
        """Nobody can say any more whether something still writes here: count no more on what is in use.

        Whoever calls this keeps the sink for ever.
        """
        ...
