"""The direct way: one tiny leaf, on the caller's own stream, where a second stream costs more than the copy.

The bytes land in a pinned *granule* that many such leaves share, because asking torch's pinned allocator for each of
them takes longer than the copy. With ``memory="pinned"`` the result is a view of the granule (which lives until the
last view dies), else a copy of it.

Guarantee: a granule is not let go of while a copy into it may be under way, whatever interrupts the wait.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from hostward._devices import Backend, Event
from hostward._engine._naps import pause
from hostward._memory import HostBuffer, pinned
from hostward._sinks import Array
from hostward._torch import torch

_GRANULE_NBYTES = 1 << 20
_ALIGNMENT = 64


class _Granule:
    """Pinned bytes that are handed out from the start, once."""

    __slots__ = ("buffer", "used")

    def __init__(self, backend: Backend) -> None:
        self.buffer: HostBuffer = pinned(_GRANULE_NBYTES, backend)
        self.used = 0


_lock = threading.Lock()
_granules: dict[str, _Granule] = {}
_unfinished: list[tuple[Event, object, object]] = []  # copies whose waiter was interrupted, and what they touch


def fetch(x: torch.Tensor, dtype: np.dtype[np.generic], nbytes: int, backend: Backend, *, own: bool) -> Array:
    """Return a contiguous device tensor's values, read behind everything queued on the caller's stream.

    Parameters
    ----------
    x
        Contiguous, at most a granule long, without conj and neg, on a device of `backend`.
    dtype
        The NumPy dtype of the same bytes.
    nbytes
        The tensor's size.
    backend
        Of the tensor's device.
    own
        Whether the result gets ordinary memory of its own, or stays in the pinned granule.
    """
    buffer, offset = _reserve(nbytes, backend)
    event = backend.copy_small(x, buffer.tensor, offset, nbytes)
    try:
        if not event.query():
            _wait(event)
    except BaseException:
        _unfinished.append((event, buffer, x))
        raise
    array: Array = np.ndarray(x.shape, dtype, buffer.array, offset)
    return array.copy() if own else array


def _reserve(nbytes: int, backend: Backend) -> tuple[HostBuffer, int]:
    if _unfinished:
        _unfinished[:] = [copy for copy in _unfinished if not copy[0].query()]
    with _lock:
        granule = _granules.get(backend.device_type)
        if granule is None or granule.used + nbytes > _GRANULE_NBYTES:
            granule = _granules[backend.device_type] = _Granule(backend)
        offset = granule.used
        granule.used = -(-(offset + nbytes) // _ALIGNMENT) * _ALIGNMENT
        return granule.buffer, offset


def _wait(event: Event) -> None:
    since = time.monotonic()
    while not event.query():
        pause(since, time.sleep)
