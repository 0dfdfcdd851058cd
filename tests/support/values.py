"""Sample values, and the reference that results are held against: plain torch and NumPy on the CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch

# All dtypes that become arrays as they are. The table in `_dtypes` is on trial here, so it is not asked.
PLAIN = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]
ML = [
    torch.bfloat16,
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),
]
MOVABLE = [*PLAIN, *ML]

# Whole numbers that occur nowhere else: recycled memory is full of those of earlier tests.
fresh = itertools.count(1001)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    name = name_of(dtype)
    return np.dtype(getattr(ml_dtypes, name) if dtype in ML else name)


def any_bytes(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bytes as elements on the CPU: NaNs of every payload occur. A bool has only two values."""
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, device="cpu").bool()
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator, device="cpu")
    return data.view(dtype).reshape(shape)


def any_cast_values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Values that every dtype has, so that every cast of them is defined: 1, 2 and 4."""
    powers = (2 ** (torch.arange(math.prod(shape), device="cpu") % 3)).reshape(shape)
    if dtype is torch.bool:
        return powers > 1
    return powers.to(torch.float64).to(dtype)


def as_array(x: torch.Tensor) -> np.ndarray:
    """Return a CPU tensor's elements in C order, without hostward."""
    x = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if x.dtype in ML:
        bits = x.view({1: torch.uint8, 2: torch.int16}[x.dtype.itemsize])
        return bits.numpy().view(numpy_dtype(x.dtype))
    return x.numpy()


def assert_same(got: object, want: np.ndarray) -> None:
    """Compare dtype, shape and every byte."""
    assert isinstance(got, np.ndarray), type(got)
    assert type(got) is np.ndarray or isinstance(got, np.memmap)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert np.asarray(got).tobytes() == want.tobytes()


def assert_same_values(got: np.ndarray, want: np.ndarray) -> None:
    """Compare dtype, shape and every value; a NaN is a NaN, whatever its payload."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    a, b = got.reshape(-1), want.reshape(-1)
    if a.dtype.kind == "c":  # part by part
        a, b = (each.copy().view(each.real.dtype) for each in (a, b))
    with np.errstate(invalid="ignore"):  # signalling NaNs
        nan = a != a
        assert np.array_equal(nan, b != b)
    assert a[~nan].tobytes() == b[~nan].tobytes()


def assert_same_numbers(got: object, want: np.ndarray) -> None:
    """Compare dtype, shape and every number: whether a resolved view holds -0 or +0, and which NaN, is the device's."""
    assert isinstance(got, np.ndarray), type(got)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    a, b = np.ascontiguousarray(got).reshape(-1), np.ascontiguousarray(want).reshape(-1)
    if a.dtype.kind == "c":  # part by part
        a, b = a.view(a.real.dtype), b.view(b.real.dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        assert ((a == b) | ((a != a) & (b != b))).all()


def assert_yours(a: np.ndarray) -> None:
    """The shape of clause 3: writable and C-contiguous."""
    assert a.flags.writeable
    assert a.flags.c_contiguous
    assert a.flags.aligned


def flip_bits(a: np.ndarray) -> None:
    """Change every bit of an array's elements, whatever they are."""
    flipped = (~np.frombuffer(a.tobytes(), np.uint8)).tobytes()
    a[...] = np.frombuffer(flipped, a.dtype).reshape(a.shape)


View = Callable[[torch.Tensor], torch.Tensor]

# Views of a base of shape (6, 8, 10): what each is to the planner stands in its name.
VIEWS: dict[str, View] = {
    "contiguous": lambda b: b,
    "offset": lambda b: b[1:],
    "0-d": lambda b: b[3, 4, 5],
    "one element": lambda b: b[3:4, 4:5, 5:6],
    "empty": lambda b: b[:, 2:2],
    "transposed": lambda b: b[0].t(),
    "permuted": lambda b: b.permute(2, 0, 1),
    "channels last": lambda b: b.permute(0, 2, 1),
    "gaps in rows": lambda b: b[::2],
    "gaps in columns": lambda b: b[:, :, :7],
    "gapped, permuted": lambda b: b[:, ::2].permute(2, 1, 0),
    "expanded": lambda b: b[:1].expand(5, 8, 10),
    "expanded inside": lambda b: b[:, 1:2, :].expand(6, 4, 10),
    "expanded, permuted": lambda b: b[:, 1:2, :].expand(6, 4, 10).permute(1, 2, 0),
    "one element, expanded": lambda b: b[2, 3, 4].expand(7, 9),
    "windows": lambda b: b.reshape(-1).unfold(0, 5, 2),
    "windows, transposed": lambda b: b.reshape(-1).unfold(0, 5, 2).t(),
    "windows with gaps": lambda b: b.reshape(-1).unfold(0, 3, 7),
    "size 1, odd strides": lambda b: b.as_strided((1, 8, 1, 10), (7, 10, 3, 1)),
}
BASE = (6, 8, 10)
