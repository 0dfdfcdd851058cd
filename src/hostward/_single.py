"""The shortcut for the commonest calls: one tensor that goes the direct way as it lies, with default options.

No other algorithm: it remembers for which tensors the plan is the direct route, and skips deciding that again. A
property test holds it equal to the long way. All that the plan of a single leaf depends on is in the key; where the
bytes lie (storage, offset) is not, because one leaf has nothing to overlap with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hostward import _dtypes, _engine
from hostward._call import Call, asks_host, capture_error
from hostward._devices import Backend, backend_for
from hostward._plan import Route
from hostward._refuse import mode_refusal
from hostward._sinks import Array
from hostward._torch import torch
from hostward._types import Memory

_REMEMBERED = 1024


class _Known(NamedTuple):
    backend: Backend
    device: torch.device
    number: int
    dtype: np.dtype[np.generic]
    nbytes: int
    own: bool


_known: dict[object, _Known] = {}


def shortcut(x: Any, memory: object) -> Array | None:
    """Return the array of a tensor known to go the direct way, or ``None`` for the long way."""
    try:
        known = _known[x.dtype, x.shape, x.stride(), x.device, x.is_conj(), x.is_neg(), memory]
    except (KeyError, TypeError, RuntimeError):  # not seen yet; no tensor options; sparse tensors have no strides
        return None
    backend = known.backend
    if backend_for(backend.device_type) is not backend or _is_special(x):
        return None
    if backend.is_capturing(known.number):
        raise capture_error(str(known.device))
    return _engine.fetch(x, known.dtype, known.nbytes, backend, own=known.own)


def _is_special(x: torch.Tensor) -> bool:
    """Say whether a tensor that looks like one that is known has no plain memory behind it (see `_refuse`)."""
    try:
        # data_ptr() refuses wrapped tensors and those without memory, and says 0 where it has been freed.
        if x.data_ptr() == 0 or x.untyped_storage().nbytes() < x.nbytes:
            return True
    except RuntimeError:
        return True
    return mode_refusal() is not None


def remember(x: Any, memory: object, call: Call) -> None:
    """Note that a tensor took the direct way with default options, if that is all there was to it."""
    plan = call.admitted.plan
    if call.admitted.routes != (Route.DIRECT,) or plan.delivers[0].axes or plan.moves[0].passes:
        return
    if asks_host(plan.moves[0].nbytes):
        return  # whether it fits has to be asked each time
    if len(_known) >= _REMEMBERED:
        _known.clear()
    key = (x.dtype, x.shape, x.stride(), x.device, x.is_conj(), x.is_neg(), memory)
    dtype = _dtypes.numpy_dtype(_dtypes.lookup(plan.delivers[0].dtype))
    _known[key] = _Known(
        backend_for(x.device.type),
        x.device,
        x.device.index or 0,
        dtype,
        plan.moves[0].nbytes,
        plan.options.memory is not Memory.PINNED,
    )
