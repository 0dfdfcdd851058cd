"""A few pinned chunks per device, through which anything reaches ordinary memory at nearly the link's rate.

Guarantees: at most `SMALL` and `LARGE` chunks exist per device; a chunk is in one flight's hands at a time; those of a
flight that failed come back (`reclaim`), and one that nobody can give back any more is garbage collected, so that the
ring makes another. `take` never blocks. Any thread may call, and a signal handler or finaliser of the same thread too.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

from hostward._devices import Backend, backend_for
from hostward._memory._host import pinned
from hostward._torch import torch

# Chunk sizes and how many of each. Large: 2 x 32 MiB reach 0.88 of the link into touched memory, smaller chunks less
# (docs/adr/0004); the third lets the device run while the host still copies out. Small: so that fetching a loss never
# pins 32 MiB.
SMALL = (1 << 20, 4)
LARGE = (32 << 20, 3)
_ALIGNMENT = 64  # a cache line, and more than any element needs


@dataclass(eq=False, slots=True, weakref_slot=True)
class Chunk:
    """One piece of pinned memory, filled from its start; `users` count what still has to be read out of it."""

    nbytes: int
    tensor: torch.Tensor = field(init=False)
    owner: object = None  # whose `take` it was, for `reclaim`
    used: int = 0
    users: int = 0


@dataclass(eq=False)
class Ring:
    """The chunks of one device."""

    backend: Backend
    _lock: threading.RLock = field(default_factory=threading.RLock)  # re-entrant: see above
    _free: dict[int, list[Chunk]] = field(default_factory=dict)
    _alive: dict[int, weakref.WeakSet[Chunk]] = field(default_factory=dict)

    def take(self, nbytes: int, owner: object = None) -> Chunk | None:
        """Return an empty chunk of `nbytes`, one of `chunk_nbytes`, or ``None`` while all are in use.

        It has one user: whoever fills it. Each piece in it adds one (`use`). `reclaim` knows the `owner`, any object.
        """
        count = dict((SMALL, LARGE))[nbytes]
        with self._lock:
            free = self._free.setdefault(nbytes, [])
            if free:
                chunk = free.pop()  # the one used last: its pages are warm
                chunk.owner, chunk.used, chunk.users = owner, 0, 1
                return chunk
            alive = self._alive.setdefault(nbytes, weakref.WeakSet())
            chunk = Chunk(nbytes)
            alive.add(chunk)  # counted before its memory is made, so that two threads cannot pass the limit
            if len(alive) > count:
                alive.discard(chunk)
                return None
        try:
            chunk.tensor = pinned(nbytes, self.backend).tensor
        except BaseException:
            with self._lock:
                alive.discard(chunk)  # at once: the error's traceback may keep the chunk for long
            raise
        chunk.owner, chunk.users = owner, 1
        return chunk

    def use(self, chunk: Chunk, nbytes: int) -> torch.Tensor | None:
        """Return the chunk's next `nbytes` and add a user, or ``None`` where they do not fit any more."""
        start = -(-chunk.used // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > chunk.nbytes:
            return None
        with self._lock:
            chunk.used, chunk.users = start + nbytes, chunk.users + 1
        return chunk.tensor[start : start + nbytes]

    def give(self, chunk: Chunk) -> None:
        """Take one user off the chunk; the last one gives it back."""
        with self._lock:
            chunk.users -= 1
            if chunk.users == 0:
                self._put_back(chunk)

    def reclaim(self, owner: object) -> None:
        """Take back all chunks of an owner that gave up; no copy may be under way in them, and no user left.

        Not left to the garbage collector: the traceback of the error would keep them for as long as its owner likes.
        """
        with self._lock:
            for alive in self._alive.values():
                for chunk in list(alive):
                    if chunk.owner is owner:  # of a free chunk: ``None``
                        self._put_back(chunk)

    def disown(self, owner: object) -> None:
        """Count an owner's chunks no more: a device that gave no answer may write to them for ever."""
        with self._lock:
            for alive in self._alive.values():
                for chunk in [chunk for chunk in alive if chunk.owner is owner]:
                    alive.discard(chunk)

    def _put_back(self, chunk: Chunk) -> None:
        chunk.owner, chunk.users = None, 0
        self._free[chunk.nbytes].append(chunk)


def chunk_nbytes(nbytes: int) -> int:
    """Return the size of the chunks that a transfer of `nbytes` goes through."""
    return SMALL[0] if nbytes <= SMALL[0] else LARGE[0]


_rings: dict[tuple[str, int], Ring] = {}
_rings_lock = threading.RLock()


def ring_for(device_type: str, index: int) -> Ring:
    """Return the device's ring, made on first use."""
    with _rings_lock:
        ring = _rings.get((device_type, index))
        if ring is None:
            ring = _rings[device_type, index] = Ring(backend_for(device_type))
        return ring
