"""The direct way: a call's only leaf, on the caller's own stream.

It serves tiny leaves, where a second stream costs more than the copy, and pinned results of any size, where the time
before the copy is all that is lost to the link. Tiny leaves share a pinned *granule*, because asking torch's pinned
allocator for each takes longer than its copy: with ``memory="pinned"`` the result is a view of the granule (which lives
until the last view dies), else a copy of it.

Guarantee: pinned bytes are not let go of while a copy into them may be under way, whatever interrupts the wait.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from hostward._devices import Backend, Event
from hostward._engine._flight import as_raised
from hostward._engine._naps import pause
from hostward._memory import HostBuffer, pinned
from hostward._plan import DIRECT_NBYTES
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


_lock = threading.RLock()
_granules: dict[str, _Granule] = {}
# Copies whose waiter was interrupted, and what they touch; kept for ever where no event tells when they end.
_unfinished: dict[object, tuple[Event | None, object, object]] = {}


def fetch(x: torch.Tensor, dtype: np.dtype[np.generic], nbytes: int, backend: Backend, *, own: bool) -> Array:
    """Return a contiguous device tensor's values, read behind everything queued on the caller's stream.

    Parameters
    ----------
    x
        Contiguous, without conj and neg, on a device of `backend`.
    dtype
        The NumPy dtype of the same bytes.
    nbytes
        The tensor's size.
    backend
        Of the tensor's device.
    own
        Whether the result gets ordinary memory of its own, or stays in the pinned memory where it landed.
    """
    if _unfinished:
        _let_go()
    event = buffer = None
    try:
        buffer, offset = _reserve(nbytes, backend)
        event = backend.copy_direct(x, buffer.tensor, offset, nbytes)
        if not event.query():
            with backend.relaxed_capture():
                _wait(event)
    except BaseException as error:
        if buffer is not None:
            _unfinished[object()] = event, buffer, x
        if isinstance(error, RuntimeError):
            raise as_raised(error) from error
        raise
    array: Array = np.ndarray(x.shape, dtype, buffer.array, offset)
    return array.copy() if own else array


def _let_go() -> None:
    """Let go of what interrupted copies touched, where they have ended; a dead device never says so."""
    for key, (event, _, _) in list(_unfinished.items()):
        if event is not None and _has_fired(event):
            _unfinished.pop(key, None)  # another thread may have been faster


def _has_fired(event: Event) -> bool:
    try:
        return event.query()
    except RuntimeError:
        return False


def _reserve(nbytes: int, backend: Backend) -> tuple[HostBuffer, int]:
    if nbytes > DIRECT_NBYTES:
        return pinned(nbytes, backend), 0
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
