"""Arrays of other frameworks on the GPU: taken over without a copy, read behind their producer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device
from support.watch import behind


class Interface:
    """An array that speaks nothing but the CUDA Array Interface, as Numba's do."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.tensor.__cuda_array_interface__


class Exporter:
    """An array that speaks DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("wrap", [Interface, Exporter])
@pytest.mark.parametrize("n", [10, 1 << 18], ids=["tiny", "large"])
def test_arrays_of_other_frameworks_wait_for_their_producer(gpu: Device, wrap: Any, n: int) -> None:
    x = torch.zeros(n, device="cuda")
    hw.to_numpy({"a": wrap(x)})
    with gpu.hold() as latch:
        x.fill_(3)
        outcome = behind(latch, lambda: hw.to_numpy({"a": wrap(x), "b": [wrap(x.view(2, -1).t())]}))
    got = outcome.got()
    assert (got["a"] == 3).all()
    assert got["b"][0].shape == (n // 2, 2)
    assert (got["b"][0] == 3).all()


@pytest.mark.parametrize("wrap", [Interface, Exporter])
def test_the_same_array_twice_crosses_once(gpu: Device, wrap: Any) -> None:
    x = wrap(torch.arange(100_000.0, device="cuda"))
    a = hw.to_numpy([x, {"again": x}])
    assert a[0] is a[1]["again"]
    assert hw.explain([x, x]).link_nbytes == 400_000


def test_cupy(gpu: Device) -> None:
    cupy = pytest.importorskip("cupy")
    x = cupy.arange(60_000, dtype=cupy.float32).reshape(200, 300)
    want = cupy.asnumpy(x)
    for leaf, expected in ((x, want), (x.T, want.T), (x[::2, 5:], want[::2, 5:]), (x[3], want[3])):
        got = hw.to_numpy(leaf)
        assert got.dtype == expected.dtype
        assert np.array_equal(got, expected)
    assert hw.to_numpy({"x": x})["x"].flags.writeable


def test_jax(gpu: Device) -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(60_000, dtype="float32").reshape(200, 300)
    if "cuda" not in str(x.device).lower() and "gpu" not in str(x.device).lower():
        pytest.skip("this jax has no GPU")
    want = np.asarray(x)
    for leaf, expected in ((x, want), (x * 2, want * 2), (x[3], want[3]), (x.astype("bfloat16"), None)):
        got = hw.to_numpy([leaf])[0]
        assert np.array_equal(got, np.asarray(leaf) if expected is None else expected)
