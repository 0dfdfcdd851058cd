"""Where host bytes live: ordinary and pinned buffers, and the ring that carries between them."""

from __future__ import annotations

from hostward._memory._host import Bytes, HostBuffer, available, ordinary, pinned, total
from hostward._memory._ring import Chunk, Ring, chunk_nbytes, ring_for

__all__ = [
    "Bytes",
    "Chunk",
    "HostBuffer",
    "Ring",
    "available",
    "chunk_nbytes",
    "ordinary",
    "pinned",
    "ring_for",
    "total",
]
