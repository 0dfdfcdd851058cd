"""Clause 3, always yours: writable, C-contiguous, independent; unless an option says otherwise.

Independence is shown by writing to one side and looking at the other, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device
from support.values import BASE, VIEWS, any_bytes, as_array, assert_same, assert_yours
from support.ways import Way, every_way, leaves, small_temporaries

every_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


def cpu_base() -> torch.Tensor:
    return torch.arange(6 * 8 * 10, dtype=torch.float32).reshape(BASE)


def seen_from_the_other_side(a: np.ndarray, write: Callable[[], object]) -> bool:
    """Say whether a write elsewhere changes the array."""
    before = a.tobytes()
    write()
    return a.tobytes() != before


# ---- default options


@every_view
@pytest.mark.parametrize("where", ["device", "cpu"])
def test_a_result_is_writable_c_contiguous_and_independent(device: Device, view: Any, where: str) -> None:
    base = cpu_base() if where == "cpu" else device.tensor(cpu_base())
    x = view(base)
    a, b = hw.to_numpy(x), hw.to_numpy(x)
    assert_yours(a)
    assert_same(a, as_array(view(cpu_base())))
    if a.size:
        assert not seen_from_the_other_side(b, lambda: a.fill(-1))
        assert_same(hw.to_numpy(x), b)  # the source did not change
        assert not seen_from_the_other_side(b, lambda: base.fill_(-2))


@every_way
def test_every_way_gives_arrays_of_their_own(device: Device, way: Way) -> None:
    x = way.base(device)
    call = way.prepared(x)
    with way.setting(device):
        first = [np.array(leaf) for leaf in leaves(call())] if way.out else leaves(call())
        second = leaves(call())
        for a, b in zip(first, second, strict=True):
            assert "order" in way.options or way.call is hw.to_python or (a.flags.writeable and a.flags.c_contiguous)
            assert not np.shares_memory(a, b)


@pytest.mark.parametrize(
    "leaf",
    [
        pytest.param(np.arange(12.0).reshape(3, 4), id="contiguous"),
        pytest.param(np.arange(12.0).reshape(3, 4).T, id="transposed"),
        pytest.param(np.arange(12.0)[::-2], id="backwards"),
        pytest.param(np.array(3.0), id="0-d"),
        pytest.param(np.broadcast_to(np.arange(3.0), (4, 3)), id="broadcast, read-only"),
        pytest.param(np.zeros(3, [("a", "i4"), ("b", "f8")]), id="structured"),
    ],
)
def test_numpy_leaves_are_copied_too(leaf: np.ndarray) -> None:
    a = hw.to_numpy([leaf])[0]
    assert_yours(a)
    assert_same(a, np.ascontiguousarray(leaf).reshape(leaf.shape))
    assert not np.shares_memory(a, leaf)


def test_the_usual_recipe_shares_a_cpu_tensors_memory() -> None:
    """What the tests above would notice."""
    x = cpu_base()
    a = x.detach().cpu().numpy()
    assert seen_from_the_other_side(a, lambda: x.fill_(-1))
    assert not x.permute(2, 1, 0).detach().cpu().numpy().flags.c_contiguous
    assert not x[:1].expand(3, 8, 10).numpy().flags.c_contiguous


# ---- order="K"


@every_view
@pytest.mark.parametrize("where", ["device", "cpu"])
def test_k_order_keeps_strides_and_expansion(device: Device, view: Any, where: str) -> None:
    source = view(cpu_base())
    x = source if where == "cpu" else view(device.tensor(cpu_base()))
    a = hw.to_numpy(x, order="K")
    assert_same(np.ascontiguousarray(a).reshape(a.shape), as_array(source))
    assert not np.shares_memory(a, source.numpy())
    repeats = any(size > 1 and stride == 0 for size, stride in zip(source.shape, source.stride(), strict=True))
    assert a.flags.writeable != repeats
    copied = source.numpy().copy(order="K")  # NumPy's own idea of it
    for size, mine, its, stride in zip(a.shape, a.strides, copied.strides, source.stride(), strict=True):
        if size > 1 and a.size:
            assert (mine == 0) == (stride == 0)
            assert repeats or mine == its


def test_k_order_of_channels_last(device: Device) -> None:
    cpu = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    a = hw.to_numpy(device.tensor(cpu), order="K")
    assert a.strides == tuple(4 * stride for stride in cpu.stride())
    assert_same(np.ascontiguousarray(a), as_array(cpu))


# ---- copy=


def test_copy_none_shares_what_need_not_move(device: Device) -> None:
    cpu, array = cpu_base(), np.arange(4)
    tree = {"cpu": cpu, "array": array, "moved": device.tensor(cpu), "turned": cpu.permute(2, 1, 0), "n": 1}
    a = hw.to_numpy(tree, copy=None)
    assert a["array"] is array
    assert seen_from_the_other_side(a["cpu"], lambda: cpu.fill_(-1))
    assert not seen_from_the_other_side(a["turned"], lambda: cpu.fill_(-2))
    assert not seen_from_the_other_side(a["moved"], lambda: cpu.fill_(-3))
    assert a["turned"].flags.c_contiguous
    assert a["moved"].flags.writeable


def test_copy_none_casts_into_memory_of_its_own() -> None:
    cpu = cpu_base()
    a = hw.to_numpy(cpu, copy=None, dtype="float64")
    assert not seen_from_the_other_side(a, lambda: cpu.fill_(-1))


def test_copy_none_in_k_order_shares_any_strides() -> None:
    cpu = cpu_base()
    turned, expanded = hw.to_numpy([cpu.permute(2, 1, 0), cpu[:1].expand(4, 8, 10)], copy=None, order="K")
    assert turned.flags.writeable
    assert not expanded.flags.writeable  # one write would show in four places
    assert seen_from_the_other_side(turned, lambda: cpu.fill_(-1))


def test_copy_none_of_bfloat16_shares_its_bits() -> None:
    cpu = torch.arange(9.0).bfloat16()
    a = hw.to_numpy(cpu, copy=None)
    assert a.dtype.name == "bfloat16"
    assert seen_from_the_other_side(a, lambda: cpu.fill_(-1))


def test_copy_false_shares_or_raises(device: Device) -> None:
    cpu = cpu_base()
    a = hw.to_numpy(cpu, copy=False)
    assert seen_from_the_other_side(a, lambda: cpu.fill_(-1))
    with pytest.raises(hw.errors.CopyNeededError):
        hw.to_numpy({"a": cpu, "b": device.tensor(cpu)}, copy=False)


# ---- out=


def test_out_arrays_are_the_result(device: Device, tmp_path: Path) -> None:
    cpu = cpu_base()
    x = device.tensor(cpu)
    mapped = np.memmap(tmp_path / "a.bin", np.float32, "w+", shape=BASE)
    strided = np.zeros((10, 8, 12), np.float32)[:, ::-1, 1:-1:2].transpose(2, 1, 0)[:5]
    out = {"mapped": mapped, "strided": strided, "small": np.empty((), np.float32), "n": None}
    a = hw.to_numpy({"mapped": x, "strided": x[:5], "small": x[0, 0, 0], "n": "text"}, out=out)
    assert a is not out
    assert a["mapped"] is mapped
    assert a["strided"] is strided
    assert a["small"] is out["small"]
    assert a["n"] == "text"
    assert_same(a["mapped"], as_array(cpu))
    assert_same(a["strided"], as_array(cpu[:5]))
    assert_same(a["small"], as_array(cpu[0, 0, 0]))
    mapped.flush()
    assert (tmp_path / "a.bin").read_bytes() == as_array(cpu).tobytes()


def test_out_takes_host_leaves_too(device: Device) -> None:
    cpu, array = cpu_base(), np.arange(6.0)[::-1]
    structured = np.array([(1, 2.0), (3, 4.0)], [("a", "i4"), ("b", "f8")])
    out = [np.empty(BASE, np.float32), np.empty(6), np.empty_like(structured)]
    a = hw.to_numpy([cpu, array, structured], out=out)
    assert all(one is other for one, other in zip(a, out, strict=True))
    assert_same(a[0], as_array(cpu))
    assert_same(a[1], array.copy())
    assert_same(a[2], structured)


def test_out_of_bfloat16(device: Device) -> None:
    cpu = any_bytes(torch.bfloat16, 70, 900)
    want = as_array(cpu)
    for out in (np.empty_like(want), np.empty((900, 70), want.dtype).T, np.empty_like(want)[::-1]):
        assert hw.to_numpy(device.tensor(cpu), out=out) is out
        assert_same(np.ascontiguousarray(out), want)


# ---- memory="pinned"


@pytest.mark.parametrize("n", [1, 300, 1 << 17], ids=["tiny", "small", "large"])
def test_pinned_results_are_pinned_and_nobody_elses(device: Device, n: int) -> None:
    results = []
    for value in range(40):
        results.append(hw.to_numpy(device.tensor(torch.full((n,), float(value))), memory="pinned"))
        if value % 3:
            results.pop(0)  # its memory is given back, and may be handed out again
    for a in results:
        assert_yours(a)
        assert torch.from_numpy(a).is_pinned()
    values = [a[0] for a in results]
    assert len(set(values)) == len(results)
    for i, a in enumerate(results):
        assert (a == values[i]).all()
        a.fill(-1)  # shows in none of the others


def test_results_are_not_pinned_unless_asked_for(device: Device) -> None:
    """Pinned memory is short, and its uploads are asynchronous: nobody gets it unawares."""
    x = device.tensor(torch.arange(60_000.0).reshape(200, 300))
    for tree in (x, x[0], x[0, 0], x.t(), [x, x[1:], x[0]], x.expand(2, 200, 300)):
        for a in torch.utils._pytree.tree_leaves([hw.to_numpy(tree), hw.to_numpy(tree)]):
            assert not torch.from_numpy(a).is_pinned()


def test_pinned_holds_for_every_leaf_and_every_call(device: Device) -> None:
    cpu = torch.arange(3000.0).reshape(50, 60)
    x = device.tensor(cpu)
    tree = {"a": x, "b": x.t(), "c": x[::2].t(), "d": x[0], "e": x[:, 1:]}
    for _ in range(2):
        for name, a in hw.to_numpy(tree, memory="pinned").items():
            assert torch.from_numpy(a).is_pinned(), name
        for leaf in tree.values():
            assert torch.from_numpy(hw.to_numpy(leaf, memory="pinned")).is_pinned()
    with small_temporaries(2 << 10, 1 << 10):
        assert torch.from_numpy(hw.to_numpy(x.t(), memory="pinned")).is_pinned()


# ---- the same leaf, and leaves that only overlap


def test_the_same_leaf_twice_is_the_same_array_twice(device: Device) -> None:
    for x in (device.tensor(cpu_base()), cpu_base()):
        tree = [x, x, x[1:], x[1:], x.detach(), x.requires_grad_(True), x.view(BASE)]
        a = hw.to_numpy(tree)
        assert a[0] is a[1]
        assert a[0] is a[4]
        assert a[0] is a[5]
        assert a[0] is a[6]
        assert a[2] is a[3]
        assert a[0] is not a[2]


def test_the_same_numpy_leaf_twice_is_the_same_array_twice() -> None:
    leaf = np.arange(3)
    a = hw.to_numpy({"a": leaf, "b": [leaf], "c": leaf[:]})
    assert a["a"] is a["b"][0]
    assert a["a"] is not a["c"]


class Exporter:
    """Another framework's array."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def test_the_same_array_of_another_framework_twice_is_the_same_array_twice() -> None:
    x = cpu_base()
    one, other = Exporter(x), Exporter(x)
    a = hw.to_numpy([one, one, other])
    assert a[0] is a[1]
    assert_same(a[0], as_array(x))
    assert not seen_from_the_other_side(a[2], lambda: a[0].fill(-1))


TIES_BROKEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "offset": lambda x: x[1:5],
    "shape": lambda x: x[:4].reshape(4, 80)[:, :].reshape(4, 80),
    "strides": lambda x: x[:4].permute(0, 2, 1),
    "dtype": lambda x: x[:4].view(torch.int32),
    "neg": lambda x: torch._neg_view(x[:4]),
    "another storage": lambda x: x[:4].clone(),
}


@pytest.mark.parametrize("other", TIES_BROKEN.values(), ids=TIES_BROKEN)
def test_everything_that_makes_another_array_breaks_a_tie(device: Device, other: Any) -> None:
    cpu = cpu_base()
    x = device.tensor(cpu)
    a = hw.to_numpy([x[:4], other(x), x[:4]])
    assert a[0] is a[2]
    assert a[0] is not a[1]
    assert_same(a[1], as_array(other(cpu)))
    assert not seen_from_the_other_side(a[1], lambda: a[0].fill(-1))


def test_conj_breaks_a_tie(device: Device) -> None:
    cpu = torch.view_as_complex(torch.arange(12.0).reshape(6, 2))
    x = device.tensor(cpu)
    a = hw.to_numpy([x, x.conj(), x, x.conj()])
    assert a[0] is a[2]
    assert a[1] is a[3]
    assert_same(a[0], as_array(cpu))
    assert_same(a[1], as_array(cpu.conj()))


def test_overlapping_leaves_are_independent(device: Device) -> None:
    cpu = cpu_base()
    x = device.tensor(cpu)
    views = [
        x,
        x[1:],
        x[:, 2:5],
        x.view(torch.uint8)[0],
        x.reshape(-1).unfold(0, 7, 3),
        x[0].t(),
        x[:1].expand(3, 8, 10),
    ]
    want = [as_array(view) for view in (cpu, cpu[1:], cpu[:, 2:5], cpu.view(torch.uint8)[0])]
    want += [as_array(view) for view in (cpu.reshape(-1).unfold(0, 7, 3), cpu[0].t(), cpu[:1].expand(3, 8, 10))]
    a = hw.to_numpy(views)
    for got, expected in zip(a, want, strict=True):
        assert_yours(got)
        assert_same(got, expected)
    for i, got in enumerate(a):
        got.fill(0)
        for other, expected in list(zip(a, want, strict=True))[i + 1 :]:
            assert_same(other, expected)


def test_views_of_one_landing_would_be_noticed(device: Device) -> None:
    """The cheap way to serve overlapping leaves: one buffer, seen twice."""
    x = device.tensor(torch.arange(10.0))
    made = hw.to_numpy(x)
    a = [made, made[1:]]
    assert seen_from_the_other_side(a[1], lambda: a[0].fill(-1))


# ---- what is no array


def test_plain_values_and_unknown_objects_pass_by_reference(device: Device) -> None:
    class Thing:
        pass

    thing, text = Thing(), "a text"
    scalar = np.float32(3)
    tree = {"x": device.tensor(torch.ones(2)), "t": thing, "s": text, "n": None, "f": 1.5, "np": scalar, "c": Thing}
    a = hw.to_numpy(tree)
    assert list(a) == list(tree)
    assert a["t"] is thing
    assert a["s"] is text
    assert a["n"] is None
    assert a["np"] is scalar
    assert a["c"] is Thing
    passed = dict(hw.explain(tree).passed)
    assert passed == {
        "['t']": "Thing",
        "['s']": "str",
        "['n']": "NoneType",
        "['f']": "float",
        "['np']": "float32",
        "['c']": "type",
    }


def test_containers_are_new_and_the_callers_stay_as_they_are(device: Device) -> None:
    x = device.tensor(torch.ones(2))
    inner = [x, 1]
    tree = {"a": inner, "b": inner}
    a = hw.to_numpy(tree)
    assert a is not tree
    assert a["a"] is not inner
    assert a["a"] is a["b"]
    assert tree == {"a": [x, 1], "b": [x, 1]}
    assert inner[0] is x
