"""Sinks: where a flight's bytes go."""

from __future__ import annotations

from hostward._sinks._arrays import ArraySink
from hostward._sinks._base import Piece, Sink, Slot, Work
from hostward._sinks._convert import Array, numpy_view
from hostward._sinks._host import deliver_host, shared_array

__all__ = ["Array", "ArraySink", "Piece", "Sink", "Slot", "Work", "deliver_host", "numpy_view", "shared_array"]
