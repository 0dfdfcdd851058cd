"""One array seen from both sides: NumPy's for the result, torch's for copies that cast and run on many threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hostward import _dtypes
from hostward._devices import as_bytes
from hostward._torch import torch

Array = npt.NDArray[Any]


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a table name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def numpy_view(data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> Array:
    """Return `data` as an array of `dtype` and `shape`, without a copy; writable if `data` is."""
    return data.view(_dtypes.numpy_dtype(_dtypes.lookup(dtype))).reshape(shape)


def torch_view(array: Array, dtype: str) -> torch.Tensor | None:
    """Return a tensor over the array's memory, or ``None`` where torch cannot describe it (negative strides)."""
    array = np.asarray(array)
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        return None
    wanted = torch_dtype(dtype)
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    # ml_dtypes: torch.from_numpy does not know them, but knows their bits.
    return torch.from_numpy(array.view(np.dtype(f"u{array.itemsize}"))).view(wanted)


def put(target: Array, values: torch.Tensor, dtype: str) -> None:
    """Write `values` into `target` of the same shape; a cast from `values` to `dtype` is torch's."""
    seen = torch_view(target, dtype)
    if seen is not None:
        seen.copy_(values.resolve_neg())  # else torch would forget the sign in some casts
    else:
        cast = values.to(torch_dtype(dtype)).resolve_conj().resolve_neg().contiguous()
        np.copyto(target, numpy_view(as_bytes(cast).numpy(), dtype, tuple(values.shape)))
