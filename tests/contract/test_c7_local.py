"""Clause 7, local: a call leaves no trace but its result: no synchronise, no setting, no stream, no resized storage."""

from __future__ import annotations

import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device
from hostward import _engine
from hostward._call import options_of, prepare
from hostward._devices import backend_for
from hostward._sinks import ArraySink
from support.watch import behind
from support.ways import WAYS, Way, every_way, leaves

# ---- synchronises


@every_way
def test_no_call_synchronises_a_device(device: Device, way: Way) -> None:
    device.require("counters")
    x = way.base(device)
    with way.setting(device):
        call = way.prepared(x)
        device.forbid_device_sync()
        device.reset_counters()
        call()
        call()
        for index in range(device.count):
            assert device.counters(index).device_syncs == 0
            assert device.counters(index).empty_cache == 0
        if way.is_async:  # not even a stream: events are asked, so that Ctrl-C is heard
            assert device.counters().stream_syncs == 0
            assert device.counters().event_syncs == 0


def test_a_device_wide_synchronise_is_noticed(device: Device) -> None:
    device.require("counters")
    device.forbid_device_sync()
    with pytest.raises(RuntimeError, match="synchronise"):
        torch.accelerator.synchronize()


def test_a_call_waits_for_its_own_stream_only(device: Device) -> None:
    """A device-wide synchronise would wait for the held side stream, and so for ever."""
    side = device.stream()
    x = device.tensor(torch.ones(1 << 17))
    with device.hold(side) as latch:
        for tree in (x, x[:9], {"a": x, "b": x[::2], "c": x.view(4, -1).t()}):
            hw.to_numpy(tree)
            hw.to_numpy(tree, memory="pinned")
        assert latch.pending


# ---- settings


def settings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": torch.initial_seed(),
        "random": torch.get_rng_state().tolist(),
        "errors of NumPy": np.geterr(),
        "print options": np.get_printoptions(),
        "warnings": list(warnings.filters),
        "current device": torch.accelerator.current_device_index(),
        "current stream": torch.accelerator.current_stream(),
        "gc": (gc.isenabled(), gc.get_threshold()),
    }


@every_way
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda mode: mode.__name__
)
def test_process_and_thread_are_as_before(device: Device, way: Way, mode: Any) -> None:
    x = way.base(device)
    with way.setting(device), mode():
        call = way.prepared(x)
        before = settings()
        call()
        assert settings() == before


def test_a_changed_setting_is_noticed() -> None:
    before, threads = settings(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert settings() != before
    finally:
        torch.set_num_threads(threads)


# ---- the current device and stream


@every_way
def test_the_current_stream_is_as_before(device: Device, way: Way) -> None:
    x, side = way.base(device), device.stream()
    with way.setting(device), side:
        call = way.prepared(x)
        before = torch.accelerator.current_stream()
        call()
        assert torch.accelerator.current_stream() == before == side


@every_way
@pytest.mark.parametrize(("current", "source"), [(0, 1), (1, 0), (1, 1)])
def test_the_current_device_is_as_before(device: Device, way: Way, current: int, source: int) -> None:
    device.require("two_devices")
    x = way.base(device, source)
    torch.accelerator.set_device_index(current)
    streams = [device.current_stream(index) for index in range(device.count)]
    with way.setting(device):
        way.prepared(x)()
    assert torch.accelerator.current_device_index() == current
    assert [device.current_stream(index) for index in range(device.count)] == streams


def test_a_stream_that_stays_current_is_noticed(device: Device) -> None:
    before = settings()
    torch.accelerator.set_stream(device.stream())
    assert settings() != before


def test_device_and_stream_are_as_before_when_a_call_fails(device: Device) -> None:
    device.require("failures")
    x, side = device.tensor(torch.ones(1 << 17)), device.stream()
    with side:
        for late in (False, True):
            for tree in (x, x[:5], [x, x[1:]]):
                device.fail_d2h(1, late=late)
                with pytest.raises(hw.errors.TransferError):
                    hw.to_numpy(tree)
                assert device.current_stream() == side
                device.clear_faults()


def test_the_callers_thread_alone_is_concerned(device: Device) -> None:
    """The stream is held, so the call is under way while this thread looks at its own streams."""
    x, seen = device.tensor(torch.ones(1 << 17)), []
    before = settings()
    with device.hold() as latch:
        behind(latch, lambda: hw.to_numpy(x))
        seen.append(settings())
    assert seen == [before]


# ---- sources


@every_way
def test_sources_are_not_touched(device: Device, way: Way) -> None:
    x = way.base(device)
    x.fill_(3)
    with way.setting(device):
        call = way.prepared(x)
        before = (x.data_ptr(), x.untyped_storage().nbytes(), x._version, x.shape, x.stride(), x.requires_grad)
        call()
        after = (x.data_ptr(), x.untyped_storage().nbytes(), x._version, x.shape, x.stride(), x.requires_grad)
    assert after == before
    assert bool((x.cpu() == 3).all())


def test_gradients_are_dropped_and_the_graph_stays(device: Device) -> None:
    x = device.tensor(torch.ones(300, 100)).requires_grad_(True)
    y = (x * 2).t()
    a = hw.to_numpy({"x": x, "y": y, "z": y[0, 0]})
    assert (a["y"] == 2).all()
    y.sum().backward()
    assert bool((x.grad.cpu() == 2).all())


# ---- nothing stays


@every_way
def test_nothing_stays_on_the_device(device: Device, way: Way) -> None:
    device.require("memory")
    x = way.base(device)
    with way.setting(device):
        call = way.prepared(x)
        call()
        before = device.memory().live_blocks
        call()
        assert device.memory().live_blocks == before


def test_nothing_stays_on_the_device_when_a_call_fails(device: Device) -> None:
    device.require("failures")
    gc.disable()
    try:
        x = device.tensor(torch.ones(300, 400))
        hw.to_numpy([x, x.t()])
        before = device.memory().live_blocks
        for _ in range(6):  # as many as there are chunks in the ring, and more
            device.fail_d2h(1)
            with pytest.raises(hw.errors.TransferError):
                hw.to_numpy([x.t(), x[1:].t(), x])
            assert device.memory().live_blocks == before
    finally:
        gc.enable()


def test_what_a_broken_device_may_still_touch_is_never_freed(device: Device) -> None:
    """Leak rather than dangle: nobody can say any more when the copy ends."""
    device.require("failures")
    x = [device.tensor(torch.ones(1 << 17))]
    address = x[0].data_ptr()
    device.fail_d2h(1, late=True)
    with pytest.raises(hw.errors.TransferError):
        hw.to_numpy({"x": x.pop()})
    device.clear_faults()
    gc.collect()
    others = [torch.empty(1 << 17, device=device.torch_device()) for _ in range(8)]
    assert address not in [other.data_ptr() for other in others]


def test_threads_are_started_for_interrupted_calls_only(device: Device) -> None:
    before = {thread.name for thread in threading.enumerate() if "hostward" in thread.name}
    x = device.tensor(torch.ones(300, 400))
    for tree in (x, x[0], [x.t(), x]):
        hw.to_numpy(tree)
    assert {thread.name for thread in threading.enumerate() if "hostward" in thread.name} == before


@pytest.mark.parametrize("name", ["large", "a tree", "transposed"])
def test_a_busy_stream_does_not_hold_up_the_copies_behind_another(device: Device, name: str) -> None:
    way = WAYS[name]
    x = way.base(device)
    call = way.prepared(x)
    want = call()
    busy = device.stream()
    small = device.tensor(torch.ones(50_000))
    started = threading.Event()

    def behind_the_busy_stream() -> object:
        with busy:
            started.set()
            return hw.to_numpy({"small": small, "n": small[1:]})

    with device.hold(busy) as latch, ThreadPoolExecutor(1) as pool:
        held = pool.submit(behind_the_busy_stream)
        assert started.wait(10)
        got = call()
        assert latch.pending, "void: the other stream was not busy any more"
        latch.open()
        assert (held.result(20)["n"] == 1).all()
    for a, b in zip(leaves(got), leaves(want), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


def test_one_copy_stream_for_all_is_noticed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_for(device.type)
    only = backend.copy_stream(0)
    monkeypatch.setitem(vars(backend), "copy_stream", lambda index: only)
    busy, x = device.stream(), device.tensor(torch.ones(50_000))
    hw.to_numpy([x, 1])
    waits = []

    with device.hold(busy) as latch, ThreadPoolExecutor(1) as pool:

        def pause(since: float, sleep: object) -> None:
            waits.append(since)
            if len(waits) == 500:  # far longer than a call on an idle stream asks
                latch.open()

        monkeypatch.setattr("hostward._engine._flight.pause", pause)
        queued = threading.Event()
        held = pool.submit(behind_a_stream, busy, x, queued)
        assert queued.wait(10)
        hw.to_numpy([x, 2])
        assert not latch.pending
        held.result(20)


def behind_a_stream(stream: torch.Stream, x: torch.Tensor, queued: threading.Event) -> None:
    with stream:
        call = prepare([x, 1], options_of())
        sink = ArraySink(call.admitted)
        flight = _engine.run(call.admitted, call.found.objects, sink)
        queued.set()
        flight.wait()
