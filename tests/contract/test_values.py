"""What becomes of values on a device; `tests/unit/test_values.py` is the other half."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device
from support.table import KINDS, MOVES, quietly, rows, sample
from support.values import MOVABLE, any_bytes, as_array, assert_same, assert_same_numbers, name_of, numpy_dtype
from support.ways import small_ring

# ---- the table


@quietly
@pytest.mark.parametrize(("name", "kind", "outcome"), rows(on_cpu=False))
def test_the_table_holds_on_a_device(device: Device, name: str, kind: str, outcome: str) -> None:
    x = KINDS[kind].make(sample(name, device.tensor))
    if outcome != MOVES:
        with pytest.raises(hw.errors.LeafError) as caught:
            hw.to_numpy(x)
        assert str(caught.value) == f"to_numpy(): {outcome}"
        return
    want = as_array(KINDS[kind].make(sample(name, lambda cpu: cpu)))
    same = assert_same_numbers if x.is_conj() or x.is_neg() else assert_same
    for options in ({}, {}, {"memory": "pinned"}):  # the second time through the shortcut, where there is one
        same(hw.to_numpy(x, **options), want)
    same(hw.to_numpy({"x": [x, 1]})["x"][0], want)


# ---- out=

ROWS, COLUMNS = 96, 250  # 94 KiB of float32: too large for the direct way


def mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    return np.memmap(path / "mapped", dtype, "w+", shape=(ROWS, COLUMNS))


GOOD_OUT: dict[str, Callable[[Path, np.dtype], np.ndarray]] = {
    "contiguous": lambda path, dtype: np.empty((ROWS, COLUMNS), dtype),
    "Fortran order": lambda path, dtype: np.empty((COLUMNS, ROWS), dtype).T,
    "gaps": lambda path, dtype: np.empty((2 * ROWS, 3 * COLUMNS), dtype)[::2, 1::3],
    "negative strides": lambda path, dtype: np.empty((ROWS, COLUMNS), dtype)[::-1, ::-1],
    "a field": lambda path, dtype: np.zeros((ROWS, COLUMNS), [("a", "i1"), ("b", dtype)])["b"],
    "unaligned": lambda path, dtype: (
        np.empty(ROWS * COLUMNS * dtype.itemsize + 1, np.uint8)[1:].view(dtype).reshape(ROWS, COLUMNS)
    ),
    "memmap": mapped,
    "memmap, strided": lambda path, dtype: mapped(path, dtype)[::-1],
}


@pytest.mark.parametrize("make", GOOD_OUT.values(), ids=GOOD_OUT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex128], ids=name_of)
def test_out_of_any_strides_is_filled_and_returned(
    device: Device, tmp_path: Path, make: Any, dtype: torch.dtype
) -> None:
    cpu = any_bytes(dtype, ROWS, COLUMNS)
    x = device.tensor(cpu)
    for n in (ROWS, 2):
        out = make(tmp_path, numpy_dtype(dtype))[:n]
        assert hw.to_numpy(x[:n], out=out) is out
        assert_same(np.ascontiguousarray(out), as_array(cpu[:n]))
    out = make(tmp_path, numpy_dtype(dtype))
    other = np.empty((COLUMNS - 1, ROWS), numpy_dtype(dtype))
    hw.to_numpy([x, x[:, 1:].t()], out=[out, other])
    assert_same(np.ascontiguousarray(out), as_array(cpu))
    assert_same(other, as_array(cpu[:, 1:].t()))


@pytest.mark.parametrize("make", GOOD_OUT.values(), ids=GOOD_OUT)
def test_out_of_a_cast_through_a_tiny_ring(device: Device, tmp_path: Path, make: Any) -> None:
    cpu = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).short()
    x = device.tensor(cpu)
    with small_ring():
        out = make(tmp_path, np.dtype(np.float64))
        hw.to_numpy(x, out=out, dtype="float64")
        assert (out == cpu.numpy()).all()


@pytest.mark.parametrize("dtype", MOVABLE, ids=name_of)
def test_out_of_every_dtype(device: Device, dtype: torch.dtype) -> None:
    cpu = any_bytes(dtype, 9, 7)
    out = np.empty((7, 9), numpy_dtype(dtype)).T
    assert hw.to_numpy(device.tensor(cpu), out=out) is out
    assert_same(np.ascontiguousarray(out), as_array(cpu))


def test_pinned_memory_of_the_callers_is_written_by_the_device_itself(device: Device) -> None:
    cpu = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)
    host = torch.empty(ROWS, COLUMNS).pin_memory()
    out = host.numpy()
    assert hw.to_numpy(device.tensor(cpu), out=out) is out
    assert torch.equal(host, cpu)


_BUFFER = np.zeros((4, 8), np.float32)
READ_ONLY = np.zeros((2, 3), np.float32)
READ_ONLY.flags.writeable = False
BAD_OUT: dict[str, tuple[Callable[[torch.Tensor], Any], Any, str]] = {
    "shape": (lambda x: x, np.zeros(6, np.float32), "out= has another shape: got (6,), needed (2, 3)"),
    "dtype": (
        lambda x: [x],
        [np.zeros((2, 3))],
        "out= has another dtype (at tree[0]): got float64, needed float32\n"
        "  why: out= never implies a cast\n"
        "  do: np.empty(shape, 'float32'), or ask for dtype='float64'",
    ),
    "a tensor": (
        lambda x: x,
        torch.zeros(2, 3),
        "out= is no array: got a Tensor, needed an ndarray\n  do: pass t.numpy() for a CPU tensor t",
    ),
    "read-only": (lambda x: x, READ_ONLY, "out= is read-only\n  do: open a memmap with mode='r+', or pass a copy"),
    "structure": (
        lambda x: (x, x),
        [np.zeros((2, 3), np.float32)] * 2,
        "out= is built differently from the tree: got list of 2, needed tuple of 2\n"
        "  do: build out= like the tree: the same types and keys, in the same order",
    ),
    "overlaps itself": (
        lambda x: x,
        np.lib.stride_tricks.as_strided(_BUFFER, (2, 3), (4, 4)),
        "out= overlaps itself\n"
        "  why: one place in memory would have to hold several values\n"
        "  do: pass an array made by np.empty",
    ),
    "two overlap": (
        lambda x: {"a": x, "b": x[0], "c": x},
        {"a": _BUFFER[:2, :3], "b": np.zeros(3, np.float32), "c": _BUFFER[1:3, 2:5]},
        "out= shares memory with another of its arrays (at tree['a']): got the same bytes at tree['c']\n"
        "  why: one transfer would overwrite what another wrote or still reads\n"
        "  do: pass arrays that do not overlap",
    ),
    "an empty leaf's dtype": (
        lambda x: x[:0],
        np.zeros((0, 3)),
        "out= has another dtype: got float64, needed float32\n"
        "  why: out= never implies a cast\n"
        "  do: np.empty(shape, 'float32'), or ask for dtype='float64'",
    ),
}


@pytest.mark.parametrize(("take", "out", "text"), BAD_OUT.values(), ids=BAD_OUT)
def test_out_that_does_not_fit_is_an_error_before_a_byte_moves(device: Device, take: Any, out: Any, text: str) -> None:
    x = device.tensor(torch.ones(2, 3))
    if device.has("counters"):
        device.reset_counters()
    with pytest.raises(hw.errors.HostwardError) as caught:
        hw.to_numpy(take(x), out=out)
    assert str(caught.value) == f"to_numpy(): {text}"
    assert not _BUFFER.any()
    assert not device.has("counters") or device.counters().d2h == 0


def test_the_same_leaf_may_go_to_two_arrays(device: Device) -> None:
    for n in (6, 60_000):
        cpu = torch.arange(float(n))
        x = device.tensor(cpu)
        out = [np.empty(n, np.float32) for _ in range(2)]
        a = hw.to_numpy([x, x], out=out)
        assert a[0] is out[0]
        assert a[1] is out[1]
        assert (out[0] == cpu.numpy()).all()
        assert (out[1] == cpu.numpy()).all()


def test_empty_leaves_go_into_out(device: Device) -> None:
    x, out = device.tensor(torch.ones(2, 3)), np.empty((2, 0), np.float32)
    assert hw.to_numpy(x[:, :0], out=out) is out


# ---- copy=


def test_copy_false_of_a_device_leaf(device: Device) -> None:
    with pytest.raises(hw.errors.CopyNeededError) as caught:
        hw.to_numpy({"a": torch.ones(2), "b": [device.tensor(torch.ones(2))]}, copy=False)
    assert str(caught.value) == (
        f"to_numpy(): copy=False cannot be kept (at tree['b'][0]): got a tensor on {device.type}:0\n"
        "  why: an array in host memory cannot share a device's memory\n"
        "  do: copy=None shares only the leaves that are in host memory already"
    )


# ---- trees of everything


def test_a_tree_of_everything(device: Device) -> None:
    cpu = torch.arange(60_000.0).reshape(200, 300)
    x, array = device.tensor(cpu), np.arange(5)[::-1]
    tree = {
        "x": x,
        "parts": [x[0], (x.t(), x[:, 3:]), x[:0]],
        "half": x.half(),
        "cpu": cpu.t(),
        "array": array,
        "structured": np.zeros(2, [("a", "i4")]),
        "sum": x[0, :3].sum(),
        "meta": ("text", None, 3, np.float32(2)),
    }
    a = hw.to_numpy(tree)
    assert_same(a["x"], as_array(cpu))
    assert_same(a["parts"][0], as_array(cpu[0]))
    assert_same(a["parts"][1][0], as_array(cpu.t()))
    assert_same(a["parts"][1][1], as_array(cpu[:, 3:]))
    assert a["parts"][2].shape == (0, 300)
    assert_same(a["half"], as_array(cpu.half()))
    assert_same(a["cpu"], as_array(cpu.t()))
    assert a["array"].tolist() == [4, 3, 2, 1, 0]
    assert a["structured"].dtype == tree["structured"].dtype
    assert a["sum"] == 3
    assert a["meta"] == tree["meta"]
    assert hw.to_python({"x": x[:2, :2], "s": tree["sum"], "t": "text"}) == {
        "x": [[0.0, 1.0], [300.0, 301.0]],
        "s": 3.0,
        "t": "text",
    }
