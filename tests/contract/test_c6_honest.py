"""Clause 6, honest: `explain` prints what the call then does, and every wait and fallback has a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device
from hostward import _call
from hostward._plan import Route
from support.values import as_array, assert_same
from support.ways import WAYS, Way, every_way, small_temporaries, unproven


def explained(way: Way, call: Any) -> Any:
    """Explain a prepared call with its own tree and options."""
    name = "to_python" if way.call is hw.to_python else "to_numpy"
    return hw.explain(*call.args, call=name, **call.keywords)


def link_nbytes(device: Device, call: Callable[[], Any]) -> int:
    """Return how many bytes a call brings over the link, all devices together."""
    before = [device.counters(index) for index in range(device.count)]
    call()
    return sum((device.counters(index) - before[index]).d2h_bytes for index in range(device.count))


# ---- the plan is what runs


@every_way
def test_the_bytes_on_the_link_are_what_explain_prints(device: Device, way: Way) -> None:
    device.require("counters")
    x = way.base(device)
    with way.setting(device):
        call = way.prepared(x)
        told = explained(way, call)
        for _ in range(2):  # the second time through the shortcut, where there is one
            assert link_nbytes(device, call) == told.link_nbytes
        assert sum(leaf.link_nbytes for leaf in told.leaves) == told.link_nbytes
        assert device.counters().empty_copies == 0


@every_way
def test_the_plan_that_runs_is_the_one_explained(device: Device, monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    ran: list[Any] = []
    run_call = _call.run_call
    monkeypatch.setattr("hostward._calls.run_call", lambda call: ran.append(call.admitted) or run_call(call))
    monkeypatch.setattr("hostward._single._known", {})
    with way.setting(device):
        call = way.prepared(way.base(device))
        told = explained(way, call)
        call()
    assert ran == [told.admitted]


@every_way
def test_explain_moves_and_makes_and_waits_for_nothing(device: Device, way: Way) -> None:
    x = way.base(device)
    with way.setting(device), device.hold() as latch:
        call = way.prepared(x)
        if device.has("counters"):
            device.reset_counters()
        text = str(explained(way, call))
        assert latch.pending
        if device.has("counters"):
            counters = device.counters()
            assert (counters.d2h, counters.d2d, counters.allocations, counters.host_waits) == (0, 0, 0, 0)
    assert text.splitlines()[-1].startswith("  total: link ")


def test_a_plan_for_another_moment_may_differ_and_says_so(device: Device) -> None:
    """The test above would notice: with other free bytes the routes are others."""
    x = device.tensor(torch.zeros(300, 200))
    before = hw.explain(x.t()).admitted
    with small_temporaries():
        after = hw.explain(x.t()).admitted
    assert before.plan == after.plan
    assert before.routes != after.routes
    assert after.routes == (Route.PIECES,)
    assert before.fallbacks == ()
    assert len(after.fallbacks) == 1


def test_the_host_bytes_are_those_of_the_results(device: Device) -> None:
    x = device.tensor(torch.zeros(300, 200))
    tree = {"a": x, "b": x.t(), "c": torch.zeros(7), "d": x[0, 0], "n": 3}
    told = hw.explain(tree)
    assert told.host_nbytes == sum(a.nbytes for a in hw.to_numpy(tree).values() if isinstance(a, np.ndarray))
    assert hw.explain(tree, copy=None).host_nbytes == told.host_nbytes - 28
    assert hw.explain(torch.zeros(4), copy=None).host_nbytes == 0


# ---- what crosses, and how often


ONCE: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "the same leaf three times": (lambda x: [x, {"a": x, "b": x.detach()}], 480_000),
    "overlapping leaves": (lambda x: [x[:200], x[100:]], 480_000),
    "a leaf and parts of it": (lambda x: [x[10], x, x[:, 5:], x.view(torch.uint8)], 480_000),
    "windows": (lambda x: x.view(-1).unfold(0, 100, 1), 480_000),
    "an expanded base": (lambda x: x[:1].expand(1000, 400), 1600),
    "an expanded number": (lambda x: [x[0, 0].expand(1000, 1000)], 4),
    "leaves that only touch": (lambda x: [x[:100], x[100:]], 480_000),
    "an empty leaf among others": (lambda x: [x[0], x[:0], x[:, 7:7]], 1600),
    "nothing but empty leaves": (lambda x: [x[:0], x[:, :0].t()], 0),
    "gaps": (lambda x: x[::2].t(), 240_000),
}


@pytest.mark.parametrize(("take", "nbytes"), ONCE.values(), ids=ONCE)
def test_shared_bytes_cross_once_and_empty_leaves_never(device: Device, take: Any, nbytes: int) -> None:
    cpu = torch.arange(120_000.0).reshape(300, 400)
    x = device.tensor(cpu)
    assert hw.explain(take(x)).link_nbytes == nbytes
    if device.has("counters"):
        assert link_nbytes(device, lambda: hw.to_numpy(take(x))) == nbytes
        assert device.counters().empty_copies == 0
        assert nbytes or device.counters().d2h == 0
    got, want = (torch.utils._pytree.tree_leaves(tree) for tree in (hw.to_numpy(take(x)), take(cpu)))
    for one, other in zip(got, want, strict=True):
        assert_same(one, as_array(other))


def test_narrowing_and_widening_cross_the_narrow_bytes(device: Device) -> None:
    x = device.tensor(torch.zeros(300, 400))
    assert hw.explain(x, dtype="float16").link_nbytes == 240_000
    assert hw.explain(x, dtype="float64").link_nbytes == 480_000
    assert hw.explain(x, dtype="int64").link_nbytes == 960_000  # float to int is no widening that the host may do


def test_the_usual_recipe_crosses_more_and_the_counter_sees_it(device: Device) -> None:
    device.require("counters")
    x = device.tensor(torch.zeros(300, 400))
    assert link_nbytes(device, lambda: [x[:200].cpu(), x[100:].cpu()]) == 640_000
    assert link_nbytes(device, lambda: x[:1].expand(1000, 400).cpu()) == 1_600_000


# ---- blocks, fallbacks


def test_a_call_says_that_it_waits(device: Device) -> None:
    x = device.tensor(torch.zeros(4))
    assert hw.explain(x).blocks == ("to_numpy() returns arrays, so it waits for their bytes",)
    assert hw.explain(x, call="to_python").blocks == ("to_python() returns arrays, so it waits for their bytes",)
    assert hw.explain(torch.zeros(4)).blocks == ()


def test_an_unproven_device_blocks_and_says_so_and_is_right(device: Device) -> None:
    cpu = (torch.arange(120_000.0) % 2000).reshape(300, 400)
    x = device.tensor(cpu)
    tree: Any = {"a": x, "b": x.t(), "c": x[0, :3], "d": [x[::2].t(), x[1:]], "e": x.view(-1).unfold(0, 9, 2)}
    reason = f"asynchronous copies are not proven on {device.type}:0"
    hw.to_numpy(x[0])  # known to the shortcut; it must not serve another backend
    with unproven(device):
        told = hw.explain(tree)
        assert told.blocks[1:] == (reason,)
        assert f"  blocks: {reason}" in str(told).splitlines()
        assert set(told.admitted.routes) == {Route.BLOCKING}
        if device.has("counters"):
            device.reset_counters()
        for options in ({}, {"memory": "pinned"}, {"order": "K"}, {"dtype": "float16"}, {"dtype": "float64"}):
            got = torch.utils._pytree.tree_leaves(hw.to_numpy(tree, **options))
            dtype = options.get("dtype", "float32")
            views = [cpu, cpu.t(), cpu[0, :3], cpu[::2].t(), cpu[1:], cpu.view(-1).unfold(0, 9, 2)]
            for a, view in zip(got, views, strict=True):
                assert_same(np.ascontiguousarray(a), as_array(view).astype(dtype))
        for leaf in (x, x[0], x[0, 0]):
            assert_same(hw.to_numpy(leaf), as_array(leaf.cpu()))
        if device.has("counters"):
            assert device.counters().d2h_async == 0
            assert device.counters().d2h_blocking > 0
    assert hw.explain(tree).blocks == ("to_numpy() returns arrays, so it waits for their bytes",)


def test_proven_devices_never_copy_blocking(device: Device) -> None:
    device.require("counters")
    for name, way in WAYS.items():
        if not way.is_async:
            continue
        x = way.base(device)
        with way.setting(device):
            call = way.prepared(x)
            device.reset_counters()
            call()
            assert device.counters().d2h_blocking == 0, name


def test_what_passes_by_reference_is_listed(device: Device) -> None:
    told = hw.explain({"a": 1, "x": device.tensor(torch.zeros(2)), "b": [None, "text"]})
    assert told.passed == (("['a']", "int"), ("['b'][0]", "NoneType"), ("['b'][1]", "str"))
    assert "  ['b'][1]: passes through by reference (str)" in str(told).splitlines()


# ---- explain raises what the call would raise


BAD: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "a leaf": (lambda x: {"a": [x, x.cpu().to_sparse()]}, {}),
    "a dtype": (lambda x: [x], {"dtype": "float17"}),
    "a lossy cast": (lambda x: torch.view_as_complex(x.view(-1, 2)), {"dtype": "float32"}),
    "copy=False": (lambda x: {"a": x}, {"copy": False}),
    "out=": (lambda x: {"a": x}, {"out": {"a": np.zeros(3)}}),
    "structure": (lambda x: {"a": x}, {"out": [np.zeros(3)]}),
    "order": (lambda x: x, {"order": "F"}),
}


@pytest.mark.parametrize(("take", "options"), BAD.values(), ids=BAD)
def test_explain_raises_what_the_call_would_raise(device: Device, take: Any, options: dict[str, Any]) -> None:
    tree = take(device.tensor(torch.zeros(4, 4)))
    errors = []
    for call in (hw.to_numpy, hw.explain):
        with pytest.raises(hw.errors.HostwardError) as caught:
            call(tree, **options)
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]).replace("to_numpy()", "explain()") == str(errors[1])


def test_explain_knows_its_own_options() -> None:
    x = torch.zeros(2)
    with pytest.raises(hw.errors.OptionError) as caught:
        hw.explain(x, call="to_pandas")
    assert str(caught.value) == "explain(): unknown call to explain: got 'to_pandas', needed one of to_numpy, to_python"
    with pytest.raises(hw.errors.OptionError) as caught:
        hw.explain(x, colour="red")
    assert str(caught.value) == "explain(): to_numpy() has no option colour=: needed copy, dtype, memory, order, out"
    with pytest.raises(hw.errors.OptionError) as caught:
        hw.explain(x, call="to_python", memory="pinned")
    assert str(caught.value) == "explain(): to_python() has no option memory=: needed none"
