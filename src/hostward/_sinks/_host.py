"""Leaves that are in host memory already: copied or shared, never through the engine."""

from __future__ import annotations

import numpy as np

from hostward import _dtypes, _layout
from hostward._memory import ordinary
from hostward._plan import Deliver, Way
from hostward._sinks._convert import Array, numpy_view, put
from hostward._torch import torch


def deliver_host(deliver: Deliver, leaf: torch.Tensor | Array, out: Array | None) -> Array:
    """Return the array of a leaf whose way is EMPTY, HOST_COPY or HOST_SHARE.

    Parameters
    ----------
    deliver
        What the plan says.
    leaf
        A CPU tensor or an ndarray; for EMPTY, of any device.
    out
        The caller's array; it gets the values and is returned.
    """
    if deliver.way is Way.HOST_SHARE:
        return shared_array(leaf, deliver.dtype)
    if deliver.way is Way.EMPTY:
        return out if out is not None else numpy_view(ordinary(0).array, deliver.dtype, deliver.base)
    if out is not None:
        _copy(leaf, np.asarray(out), deliver.dtype)
        return out
    base = _fresh(leaf, deliver)
    result = base.transpose(deliver.axes) if deliver.axes else base
    drop: tuple[int, ...] = ()
    if len(deliver.base) < len(deliver.shape):  # order="K" keeps broadcast dimensions unexpanded
        drop = _layout.broadcast_dims(tuple(leaf.shape), _strides(leaf))
    index = tuple(0 if dim in drop else slice(None) for dim in range(len(deliver.shape)))
    _copy(leaf[(*index, ...)], result, deliver.dtype)  # the dots: NumPy would give a scalar for a 0-d array
    return np.broadcast_to(np.expand_dims(result, drop), deliver.shape) if drop else result


def _strides(leaf: torch.Tensor | Array) -> tuple[int, ...]:
    return leaf.strides if isinstance(leaf, np.ndarray) else tuple(leaf.stride())


def _fresh(leaf: torch.Tensor | Array, deliver: Deliver) -> Array:
    if isinstance(leaf, np.ndarray) and deliver.dtype not in _dtypes.TABLE:
        return np.empty(deliver.base, leaf.dtype)  # structured, datetime, object, ...: kept as it is
    return numpy_view(ordinary(deliver.nbytes).array, deliver.dtype, deliver.base)


def _copy(leaf: torch.Tensor | Array, target: Array, dtype: str) -> None:
    if isinstance(leaf, np.ndarray):
        with np.errstate(all="ignore"):  # torch's casts overflow silently; so does this one
            np.copyto(target, leaf, casting="unsafe")
    else:
        put(target, leaf.detach(), dtype)


def shared_array(leaf: torch.Tensor | Array, dtype: str) -> Array:
    """Return a CPU tensor's memory as an array; read-only where elements repeat."""
    if isinstance(leaf, np.ndarray):
        return leaf
    leaf = leaf.detach()
    wanted = _dtypes.numpy_dtype(_dtypes.lookup(dtype))
    if wanted.isbuiltin == 1:
        array = leaf.numpy()
    else:  # ml_dtypes: Tensor.numpy() refuses them, but hands out their bits
        array = leaf.view(getattr(torch, f"int{8 * wanted.itemsize}")).numpy().view(wanted)
    if _layout.broadcast_dims(tuple(leaf.shape), tuple(leaf.stride())):
        array = array.view()
        array.flags.writeable = False  # a write to one element would show in all that repeat it
    return array
