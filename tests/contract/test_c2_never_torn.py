"""Clause 2, never torn: the value is the source's at the call, on the calling thread's current stream of its device.

Writes ordered before the call are in it, and those ordered after it are not: on the same stream, on a stream that waits
for an event recorded after the call, or by the host. What reads the source keeps it, however the call ends.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device, Latch
from hostward._devices import backend_for
from hostward._engine import _leg
from support.values import fresh
from support.watch import behind, eventually, in_threads, interrupted
from support.ways import WAYS, Way, async_ways, every_way, leaves

SIZES = {"tiny": 256, "large": 1 << 17}
every_size = pytest.mark.parametrize("n", SIZES.values(), ids=SIZES)


def only(result: Any, value: float) -> bool:
    return all(bool((np.abs(leaf) == abs(value)).all()) for leaf in leaves(result) if leaf.dtype != np.int32)


# ---- writes before the call


@every_way
def test_the_stream_is_the_callers_current_one(device: Device, way: Way) -> None:
    """A side stream is current and held; another one, the default, is idle and would give the old value."""
    x, value = way.base(device), next(fresh) % 250 + 1
    call, side = way.prepared(x), device.stream()
    with way.setting(device), device.hold(side) as latch:
        with side:
            x.fill_(value)

        def on_the_side() -> Any:
            with side:
                return call()

        result = behind(latch, on_the_side).got()
    for leaf in leaves(result):
        if leaf.dtype == np.complex64:
            assert (leaf == complex(value, -value)).all()
        elif leaf.dtype == np.int32:
            assert (leaf.view(np.float32) == value).all()
        else:
            assert (np.abs(leaf) == value).all()


def test_the_stream_is_that_of_the_sources_device(device: Device) -> None:
    """Device 0 is current; what counts is which stream is current on device 1."""
    device.require("two_devices")
    x, side = device.tensor(torch.zeros(1 << 17), 1), device.stream(1)
    with device.hold(side) as latch:
        with side:
            x.fill_(5)

        def call() -> Any:
            torch.accelerator.set_stream(side)
            torch.accelerator.set_device_index(0)
            return hw.to_numpy(x)

        assert only(behind(latch, call).got(), 5)


def test_another_stream_may_be_held(device: Device) -> None:
    """The call waits for its own stream, and not for others of the device."""
    x, side = device.tensor(torch.full((1 << 17,), 3.0)), device.stream()
    with device.hold(side) as latch:
        assert only(hw.to_numpy(x), 3)
        assert only(hw.to_numpy(x[:200]), 3)
        assert only(hw.to_numpy(x.view(2, -1).t()), 3)
        assert latch.pending


# ---- writes after the call


@every_way
def test_writes_on_the_same_stream_come_too_late(device: Device, way: Way) -> None:
    x = way.base(device)
    x.fill_(7)
    call = way.prepared(x)
    with way.setting(device):
        for value in range(8, 12):
            result = call()
            x.fill_(value)
            device.current_stream().synchronize()
            for leaf in leaves(result):
                if leaf.dtype not in (np.complex64, np.int32):
                    assert (np.abs(leaf) == value - 1).all()


@every_size
def test_writes_behind_an_event_recorded_after_the_call_come_too_late(device: Device, n: int) -> None:
    x, other = device.tensor(torch.full((n,), 1.0)), device.stream()
    result = hw.to_numpy(x)
    other.wait_event(device.event())
    with other:
        x.fill_(2)
    other.synchronize()
    assert only(result, 1)


@every_size
def test_writes_by_the_host_come_too_late(device: Device, n: int) -> None:
    x, new = device.tensor(torch.full((n,), 1.0)), torch.full((n,), 2.0).pin_memory()
    result = hw.to_numpy(x)
    x.copy_(new, non_blocking=True)
    device.synchronize()
    assert only(result, 1)


@every_size
def test_what_follows_in_the_memory_of_a_freed_source_comes_too_late(device: Device, n: int) -> None:
    results = []
    for value in range(1, 9):
        x = device.tensor(torch.full((n,), float(value)))
        results.append(hw.to_numpy([x, x[: n // 2], x.view(2, -1).t()]))
        del x
        device.tensor(torch.full((n,), -1.0))
    device.synchronize()
    assert all(only(result, value) for value, result in enumerate(results, 1))


@every_size
def test_threads_with_streams_of_their_own_read_their_own_values(device: Device, n: int) -> None:
    streams = [device.stream() for _ in range(3)]

    def many_steps(number: int, stream: torch.Stream) -> bool:
        with stream:
            x = torch.empty(n, device=device.torch_device())
            good = True
            for step in range(15):
                x.fill_(100 * number + step)
                results = hw.to_numpy([x, x.view(-1, 2).t()] if step % 2 else x)
                x.fill_(-1)
                good = good and only(results, 100 * number + step)
            return good

    calls = [lambda i=i, s=stream: many_steps(i + 1, s) for i, stream in enumerate(streams)]
    assert in_threads(calls) == [True] * 3


# ---- while the copies run


def addresses_after_an_interrupt(device: Device, latch: Latch) -> tuple[int, list[int]]:
    """Let Ctrl-C end a call whose copy is still held; return the source's address and those of tensors made then."""
    x = [device.tensor(torch.full((1 << 17,), 1.0))]
    address = x[0].data_ptr()
    interrupted(lambda: hw.to_numpy({"x": x.pop()}))
    gc.collect()
    others = addresses_of_others(device)
    assert latch.pending
    return address, others


def addresses_of_others(device: Device) -> list[int]:
    return [other.data_ptr() for other in [torch.empty(1 << 17, device=device.torch_device()) for _ in range(40)]]


def test_what_a_copy_reads_stays_alive_when_its_call_is_interrupted(device: Device) -> None:
    """Freed too early, the memory would go to the next tensor of this size, and the copy would read that one."""
    gc.collect()
    before = device.memory().live_blocks if device.has("memory") else 0
    with device.hold(backend_for(device.type).copy_stream(0)) as latch:
        address, others = addresses_after_an_interrupt(device, latch)
        assert address not in others
    if device.has("memory"):
        assert eventually(lambda: device.memory().live_blocks <= before)  # less: other tests' tensors went


# ---- the tests can fail


@pytest.mark.parametrize("name", ["large", "in pieces", "gapped", "out=", "a tree"])
def test_a_copy_stream_that_does_not_wait_is_noticed(
    device: Device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    way = WAYS[name]
    x, value = way.base(device), next(fresh)
    call = way.prepared(x)
    with way.setting(device):
        call()
        monkeypatch.setattr(backend_for(device.type), "wait", lambda stream, event: None)
        with device.hold() as latch:
            x.fill_(value)
            outcome = behind(latch, call)
    if name == "gapped":  # its pass runs on the producer's stream, so that the copy came before it
        assert outcome.early
    assert not only(outcome.value, value)


def test_a_wait_for_the_wrong_stream_is_noticed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default stream's event says nothing about the side stream, which is the producer."""
    backend, default, side = backend_for(device.type), device.current_stream(), device.stream()
    x = device.tensor(torch.zeros(1 << 17))
    hw.to_numpy(x)

    def record(index: int) -> Any:
        current = torch.accelerator.current_stream(index)
        event = torch.Event(device.torch_device())
        event.record(default if current.stream_id == side.stream_id else current)
        return event

    monkeypatch.setitem(vars(backend), "record", record)
    monkeypatch.setitem(vars(backend), "wait", lambda stream, event: stream.wait_event(event))
    with device.hold(side) as latch:
        with side:
            x.fill_(9)

        def call() -> Any:
            with side:
                return hw.to_numpy(x)

        outcome = behind(latch, call)
    assert outcome.early
    assert not only(outcome.value, 9)


def test_a_flight_that_lets_go_of_its_sources_is_noticed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = _leg.Reader.prepare

    def keeps_nothing(reader: Any, number: int) -> list[object]:
        prepare(reader, number)
        return []

    def forgets(leg: Any) -> None:
        stop(leg)
        leg.read = None

    stop = _leg.Leg.stop
    monkeypatch.setattr(_leg.Reader, "prepare", keeps_nothing)
    monkeypatch.setattr(_leg.Leg, "stop", forgets)
    with device.hold(backend_for(device.type).copy_stream(0)) as latch:
        x = [device.tensor(torch.full((1 << 17,), 1.0))]
        address = x[0].data_ptr()
        interrupted(lambda: hw.to_numpy({"x": x.pop()}))
        # Several at once: other tests may have left blocks of this size, which would be handed out first.
        assert eventually(lambda: gc.collect() >= 0 and address in addresses_of_others(device))
        assert latch.pending


@async_ways
def test_the_next_values_do_not_reach_an_array_that_was_given(device: Device, way: Way) -> None:
    """Chunks and granules are used again; what they carried before is not theirs any more."""
    x = way.base(device)
    call = way.prepared(x)
    with way.setting(device):
        results = []
        for value in range(1, 5):
            x.fill_(value)
            results.append([np.array(leaf) if way.out else leaf for leaf in leaves(call())])
    for value, result in enumerate(results, 1):
        for leaf in result:
            if leaf.dtype not in (np.complex64, np.int32):
                assert (np.abs(leaf) == value).all()
