"""Clause 4, exact: the same bytes without a cast, torch's result on the source's device with one.

Samples are random bytes, so NaNs of every payload are among them, and infinities, subnormals and negative zeros.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device
from hostward import _plan
from hostward._memory import _ring
from support.values import (
    BASE,
    ML,
    MOVABLE,
    PLAIN,
    VIEWS,
    any_bytes,
    any_cast_values,
    as_array,
    assert_same,
    assert_same_values,
    name_of,
    numpy_dtype,
)
from support.ways import small_temporaries

every_dtype = pytest.mark.parametrize("dtype", MOVABLE, ids=name_of)
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
FLOATS = [torch.float16, torch.float32, torch.float64, *ML]


# ---- without a cast


@every_dtype
@pytest.mark.parametrize("order", ["C", "K"])
@pytest.mark.parametrize("where", ["device", "cpu"])
def test_every_dtype_in_every_layout_keeps_its_bytes(
    device: Device, dtype: torch.dtype, order: str, where: str
) -> None:
    base = any_bytes(dtype, *BASE)
    x = base if where == "cpu" else device.tensor(base)
    for name, view in VIEWS.items():
        got = hw.to_numpy(view(x), order=order)
        assert_same(np.ascontiguousarray(got).reshape(got.shape), as_array(view(base)))
        assert got.dtype == numpy_dtype(dtype), name


@every_dtype
@pytest.mark.parametrize("memory", ["auto", "pinned"])
def test_large_leaves_keep_their_bytes(device: Device, dtype: torch.dtype, memory: str) -> None:
    cpu = any_bytes(dtype, 300, 400)
    x = device.tensor(cpu)
    views = [lambda t: t, lambda t: t.t(), lambda t: t[::2].t(), lambda t: t[:, 5:]]
    for view in views:
        assert_same(hw.to_numpy(view(x), memory=memory), as_array(view(cpu)))
    for got, view in zip(hw.to_numpy([view(x) for view in views], memory=memory), views, strict=True):
        assert_same(got, as_array(view(cpu)))


BOUNDARIES = [_plan.DIRECT_NBYTES, _ring.SMALL[0], 2 * _ring.SMALL[0], _ring.LARGE[0] + _ring.SMALL[0]]


@pytest.mark.parametrize("nbytes", [size + more for size in BOUNDARIES for more in (-1, 0, 1, 64)])
def test_sizes_around_every_boundary_of_the_engine(device: Device, nbytes: int) -> None:
    cpu = any_bytes(torch.uint8, nbytes)
    x = device.tensor(cpu)
    want = cpu.numpy()
    assert_same(hw.to_numpy(x), want)
    for got, expected in zip(
        hw.to_numpy([x, x[: nbytes // 3], x[1:]]), [want, want[: nbytes // 3], want[1:]], strict=True
    ):
        assert_same(got, expected)
    assert_same(hw.to_numpy(x.expand(2, -1)), np.stack([want] * 2))


def test_thousands_of_leaves(device: Device) -> None:
    cpu = any_bytes(torch.int32, 3000, 7)
    x = device.tensor(cpu)
    got = hw.to_numpy({str(i): (row.clone() if i % 3 else row, i) for i, row in enumerate(x)})
    for i, row in enumerate(cpu.numpy()):
        assert_same(got[str(i)][0], row)
        assert got[str(i)][1] == i


@pytest.mark.parametrize("dtype", ML, ids=name_of)
def test_ml_dtypes_arrive_without_asking(device: Device, dtype: torch.dtype) -> None:
    a = hw.to_numpy(device.tensor(any_bytes(dtype, 256)))
    assert a.dtype == np.dtype(getattr(ml_dtypes, name_of(dtype)))
    with pytest.raises(TypeError):
        any_bytes(dtype, 256).numpy()  # the usual way


def test_nan_payloads_survive_and_the_test_would_notice(device: Device) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, 0xFFC12345 - (1 << 32), 0x7FFFFFFF], dtype=torch.int32)
    x = device.tensor(bits.view(torch.float32))
    assert hw.to_numpy(x).view(np.int32).tolist() == bits.tolist()
    assert hw.to_numpy(x.expand(300, 4).t()).view(np.int32)[:, 7].tolist() == bits.tolist()
    there_and_back = x.cpu().half().float().numpy()
    assert there_and_back.view(np.int32).tolist() != bits.tolist()
    with pytest.raises(AssertionError):
        assert_same(there_and_back, bits.view(torch.float32).numpy())
    assert_same_values(there_and_back, bits.view(torch.float32).numpy())


# ---- conjugated and negated views


def conj_and_neg(x: torch.Tensor) -> list[torch.Tensor]:
    z = torch.view_as_complex(x)
    return [z.conj(), z.conj().imag, torch._neg_view(x), z.conj()[::2].t(), torch._neg_view(z.conj())]


@pytest.mark.parametrize("rows", [3, 200], ids=["tiny", "large"])
def test_conjugated_and_negated_views_are_resolved(device: Device, rows: int) -> None:
    # From 1 on: whether a resolved zero is -0 or +0 is the device's own business.
    cpu = torch.arange(1.0, rows * 150 * 2 + 1).reshape(rows, 150, 2)
    want = [as_array(view) for view in conj_and_neg(cpu)]
    views = conj_and_neg(device.tensor(cpu))
    for view, expected in zip(views, want, strict=True):
        assert_same_values(hw.to_numpy(view), expected)
    for got, expected in zip(hw.to_numpy(views), want, strict=True):
        assert_same_values(got, expected)
    for got, expected in zip(hw.to_numpy(conj_and_neg(cpu)), want, strict=True):
        assert_same_values(got, expected)
    assert_same_values(hw.to_numpy(views[0], dtype="complex128"), want[0].astype(np.complex128))
    with small_temporaries(4 << 10, 1 << 10):
        assert_same_values(hw.to_numpy(views[0]), want[0])


def test_the_usual_recipe_for_a_conjugated_view_is_wrong(device: Device) -> None:
    z = torch.view_as_complex(torch.arange(3000.0).reshape(-1, 2))
    x, host = device.tensor(z), torch.zeros(1500, dtype=torch.complex64).pin_memory()
    with device.hold():
        host.copy_(x.conj(), non_blocking=True)
    device.synchronize()
    with pytest.raises(AssertionError):
        assert_same_values(host.numpy(), as_array(z.conj()))


# ---- casts


def castable(a: torch.dtype, b: torch.dtype) -> bool:
    return a not in COMPLEX or b in COMPLEX or b is torch.bool


def torchs_cast(x: torch.Tensor, target: torch.dtype) -> np.ndarray | None:
    """Return what the device itself makes of it, or ``None`` where it has no such cast."""
    try:
        return as_array(x.to(target).cpu())
    except RuntimeError:
        return None


@pytest.mark.parametrize("source", [*MOVABLE, torch.complex32], ids=name_of)
@pytest.mark.parametrize("where", ["device", "cpu"])
def test_every_cast_is_torchs(device: Device, source: torch.dtype, where: str) -> None:
    cpu = any_cast_values(source, 5, 7)
    x = cpu if where == "cpu" else device.tensor(cpu)
    for target in MOVABLE:
        if not castable(source, target):
            with pytest.raises(hw.errors.DtypeError):
                hw.to_numpy(x, dtype=target)
            continue
        want = torchs_cast(x, target)
        if want is None:
            continue
        assert_same(hw.to_numpy(x, dtype=target), want)
        assert_same(hw.to_numpy(x.t(), dtype=target), want.T.copy())
        assert_same(hw.to_numpy([x, 1], dtype={source: target})[0], want)


@pytest.mark.parametrize("source", [torch.float16, *ML], ids=name_of)
@pytest.mark.parametrize("target", FLOATS, ids=name_of)
def test_casts_of_all_values_of_a_small_dtype(device: Device, source: torch.dtype, target: torch.dtype) -> None:
    """Rounding, overflow, infinities and NaN are the device's; widening on the host changes nothing."""
    bits = torch.arange(1 << 8 * source.itemsize, dtype=torch.int32)
    cpu = bits.to(torch.uint8 if source.itemsize == 1 else torch.uint16).view(source)
    x = device.tensor(cpu)
    want = torchs_cast(x, target)
    if want is None:
        pytest.skip(f"torch does not cast {source} to {target} on this device")
    assert_same_values(hw.to_numpy(x, dtype=target), want)


@pytest.mark.parametrize("source", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("target", FLOATS, ids=name_of)
def test_casts_of_any_bits(device: Device, source: torch.dtype, target: torch.dtype) -> None:
    x = device.tensor(any_bytes(source, 300, 100))
    want = torchs_cast(x, target)
    if want is None:
        pytest.skip(f"torch does not cast {source} to {target} on this device")
    assert_same_values(hw.to_numpy(x, dtype=target), want)
    with small_temporaries(8 << 10, 2 << 10):
        assert_same_values(hw.to_numpy(x.t(), dtype=target), want.T.copy())


@pytest.mark.parametrize("n", [30, 30_000], ids=["tiny", "large"])
def test_integers_widen_exactly(device: Device, n: int) -> None:
    for source, target in [("int8", "int64"), ("uint8", "uint64"), ("int32", "float64"), ("uint16", "float32")]:
        cpu = any_bytes(getattr(torch, source), n)
        x = device.tensor(cpu)
        assert_same(hw.to_numpy(x, dtype=target), as_array(cpu).astype(target))
        assert_same(hw.to_numpy([x, x[1:]], dtype={source: target})[1], as_array(cpu).astype(target)[1:])


def test_numpy_leaves_are_cast_as_tensors_are() -> None:
    for source in [np.float32, np.float64, np.int16, np.bool_]:
        for target in ["float16", "bfloat16", "float64", "int32", "bool", "complex64", "float8_e5m2"]:
            leaf = (2.0 ** (np.arange(12) % 3)).astype(source).reshape(3, 4).T
            want = as_array(torch.from_numpy(np.ascontiguousarray(leaf)).to(getattr(torch, target)))
            assert_same(hw.to_numpy(leaf, dtype=target), want)


# ---- which leaves a dtype concerns


def test_a_plain_dtype_converts_a_bare_tensor_and_in_a_tree_floats_only(device: Device) -> None:
    ids, mask, x = (device.tensor(torch.tensor(v)) for v in ([1, 2], [True, False], [0.5, 2.5]))
    assert hw.to_numpy(ids, dtype="float16").dtype == np.float16
    a = hw.to_numpy({"ids": ids, "mask": mask, "x": x, "z": torch.view_as_complex(x)}, dtype=torch.float16)
    assert [leaf.dtype.name for leaf in a.values()] == ["int64", "bool", "float16", "complex64"]
    a = hw.to_numpy([ids, mask, x], dtype={"int64": "int32", "floating": np.float64})
    assert [leaf.dtype.name for leaf in a] == ["int32", "bool", "float64"]


@pytest.mark.parametrize(
    "spec",
    [
        *("float16", "torch.float16", "half", "f2", torch.float16, np.float16, np.dtype("float16")),
        *({"floating": "f2"}, {torch.float32: np.float16}, {"float32": "half", "int64": int}),
    ],
    ids=str,
)
def test_forms_of_dtype(device: Device, spec: Any) -> None:
    x = device.tensor(torch.tensor([1.5, 70000.0]))
    assert hw.to_numpy(x, dtype=spec).tolist() == [1.5, float("inf")]


def test_python_numbers_are_exact(device: Device) -> None:
    leaves: list[Any] = [torch.tensor(value) for value in ([1.5, -0.0], [(1 << 63) - 1], [True], 7, 0.1)]
    leaves += [torch.tensor([(1 << 64) - 1], dtype=torch.uint64), torch.tensor(0.1, dtype=torch.bfloat16)]
    leaves += [torch.tensor([1 + 2j], dtype=torch.complex32), torch.tensor(3.0, dtype=torch.float8_e5m2)]
    got = hw.to_python([device.tensor(leaf) for leaf in leaves])
    assert got == [leaf.tolist() for leaf in leaves]
    assert [type(x) for x in got] == [type(leaf.tolist()) for leaf in leaves]


def test_plain_dtypes_are_those_that_numpy_has() -> None:
    assert [dtype for dtype in PLAIN if not hasattr(np, name_of(dtype).replace("bool", "bool_"))] == []


@pytest.mark.parametrize("source", [torch.complex64, torch.complex128], ids=name_of)
@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32", "float64", "int16", "float8_e5m2", "bool"])
@pytest.mark.parametrize("rows", [2, 300], ids=["tiny", "large"])
def test_casts_of_negative_views_keep_their_sign(device: Device, source: torch.dtype, target: str, rows: int) -> None:
    """`z.conj().imag` is one, and torch's own copy into another dtype gets some of them wrong."""
    cpu = any_cast_values(source, rows, 100) * (1 + 1j)
    want = as_array((-cpu.imag).clone().to(getattr(torch, target)))
    for z in (cpu, device.tensor(cpu)):
        x = z.conj().imag
        assert x.is_neg()
        assert_same(hw.to_numpy(x, dtype=target), want)
        assert_same(hw.to_numpy(x.t(), dtype=target), want.T.copy())
        assert_same(hw.to_numpy([x, z], dtype={"floating": target})[0], want)
        out = np.empty_like(want)[::-1]
        assert_same(np.ascontiguousarray(hw.to_numpy(x, dtype=target, out=out)), want)


@pytest.mark.parametrize("rows", [2, 300], ids=["tiny", "large"])
def test_casts_of_conjugated_views(device: Device, rows: int) -> None:
    for source, target in [(torch.complex128, "complex64"), (torch.complex64, "complex128")]:
        cpu = any_cast_values(source, rows, 100) * (1 + 2j)
        want = as_array(cpu.conj().resolve_conj().to(getattr(torch, target)))
        for z in (cpu, device.tensor(cpu)):
            assert_same(hw.to_numpy(z.conj(), dtype=target), want)
            assert_same(hw.to_numpy(z.mH, dtype=target), want.T.copy())
