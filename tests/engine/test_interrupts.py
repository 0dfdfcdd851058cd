"""Ctrl-C, signal handlers and finalisers at every single place where Python would let them in."""

from __future__ import annotations

import gc
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device
from engine.rig import WAIT_S, idle, numbers, ring_of, shrink_rings
from engine.signals import points
from hostward._engine import _direct, _flight, _pump

# The tracer's interrupt may fall into the closing of a generator, where nothing can be raised; a signal's cannot.
pytestmark = pytest.mark.filterwarnings("ignore:.*generator object:pytest.PytestUnraisableExceptionWarning")

# Places in front of the device: nothing is queued before.
WITHIN = ("_engine", "_sinks", "_memory", "_devices", "_call.py", "_single.py")


@dataclass
class Case:
    """What is moved, on which way."""

    tensors: list[torch.Tensor]
    expected: list[np.ndarray]
    options: dict[str, object]
    bare: bool = False

    def call(self) -> list[np.ndarray]:
        if self.bare:
            return [hw.to_numpy(self.tensors[0], **self.options)]
        return hw.to_numpy(self.tensors, **self.options)

    def check(self, arrays: list[np.ndarray]) -> None:
        for array, expected in zip(arrays, self.expected, strict=True):
            assert np.array_equal(array, expected)


def case(device: Device, name: str) -> Case:
    if name == "direct":
        cpu = [numbers(30)]
        return Case([device.tensor(cpu[0])], [cpu[0].numpy()], {}, bare=True)
    # More than one chunk of the small rings, a temporary, and a second device where there is one.
    cpu = [numbers(3000), numbers(2000)] if name == "pinned" else [numbers(50, 40), numbers(3000)]
    tensors = [device.tensor(x, n % device.count) for n, x in enumerate(cpu)]
    if name == "pinned":
        return Case(tensors, [x.numpy() for x in cpu], {"memory": "pinned"})
    tensors[0] = tensors[0].t()
    return Case(tensors, [cpu[0].t().numpy(), cpu[1].numpy()], {})


@pytest.fixture(params=["staged", "pinned", "direct"])
def way(request, device: Device, monkeypatch) -> str:
    shrink_rings(monkeypatch)
    monkeypatch.setattr(_direct, "_granules", {})
    monkeypatch.setattr(_direct, "_unfinished", {})
    made = case(device, request.param)
    for _ in range(2):
        made.check(made.call())  # memory is there, plans are cached
    return request.param


@pytest.fixture
def moved(device: Device, way: str) -> Case:
    return case(device, way)


def count(moved: Case) -> int:
    for _ in range(2):  # Python 3.12 reports opcodes from a process's second tracing on
        with points(lambda n: None, WITHIN) as tracer:
            moved.check(moved.call())
    return tracer.points


def settle(device: Device, where: object = None) -> None:
    """Wait until nothing is under way any more, in the background neither."""
    device.open_latches()
    device.synchronize()
    since = time.monotonic()
    while time.monotonic() - since < WAIT_S:
        busy = [pump for pump in _pump._pumps.values() if pump._flights or not pump._inbox.empty()]
        if not busy and all(idle(ring_of(device, index)) for index in range(device.count)):
            return
        if time.monotonic() - since > 1:
            gc.collect()
        time.sleep(0.0005)
    raise AssertionError(f"a flight or a chunk was lost, {where}")


def interrupt_at(n: int):
    def at_point(point: int) -> None:
        if point == n:
            raise KeyboardInterrupt

    return at_point


def test_ctrl_c_at_every_point_of_a_call_that_lands(device: Device, moved: Case) -> None:
    """Whatever it hits: the error comes out, nothing is lost, and the next call is right."""
    streams = [device.current_stream(index) for index in range(device.count)]
    current = torch.accelerator.current_device_index()
    last = count(moved)
    interrupted = 0
    for n in range(1, last + 1):
        try:
            with points(interrupt_at(n), WITHIN) as tracer:
                moved.check(moved.call())
        except KeyboardInterrupt:
            interrupted += 1
        assert [device.current_stream(index) for index in range(device.count)] == streams, tracer.places[n - 1 :][:1]
        assert torch.accelerator.current_device_index() == current, tracer.places[n - 1 :][:1]
        settle(device, tracer.places[n - 1 :][:1])
        if n % 10 == 0:
            moved.check(moved.call())
    assert interrupted > last // 2  # how often it asks the events differs
    moved.check(moved.call())


def test_ctrl_c_at_every_point_of_a_call_whose_copies_are_held(device: Device, monkeypatch, way: str) -> None:
    """As long as a copy is queued, what it reads is there, wherever the call was left."""
    device.require("counters", "memory")
    indices = range(device.count)
    wait = _Stop()
    for module in (_direct, _flight):
        monkeypatch.setattr(module, "pause", wait)
    n, reached = 0, 0
    while n == reached:
        n += 1
        _direct._unfinished.clear()  # each is looked at by the next call, which would then have more points
        before = [device.memory(index).live_blocks for index in indices]
        moved = case(device, way)
        device.reset_counters()
        latches = [device.hold(index) for index in indices]
        with pytest.raises(KeyboardInterrupt), points(interrupt_at(n), WITHIN) as tracer:
            moved.call()
        reached = tracer.points  # less than n: it came as far as the wait
        queued = [device.counters(index).d2h for index in indices]
        moved.tensors.clear()
        gc.collect(0)
        for index in indices:
            assert device.memory(index).live_blocks > before[index] or not queued[index], tracer.places[n - 1 :][:1]
        assert all(latch.pending for latch in latches)
        settle(device, tracer.places[n - 1 :][:1])
    assert n > 20


class _Stop:
    """In the place of a nap: the copies are held, so nothing comes after it."""

    def __call__(self, since: float, sleep: object) -> None:
        if threading.current_thread() is threading.main_thread():
            sys.settrace(None)  # one Ctrl-C is enough
            raise KeyboardInterrupt


def test_a_call_from_a_finaliser_or_signal_handler_at_every_point(device: Device, moved: Case) -> None:
    """No lock is held where one may come, and neither call sees the other's bytes."""
    cpu = [numbers(700), numbers(20)]
    inner = [device.tensor(x) for x in cpu]

    def at_point(point: int) -> None:
        if point == wanted:
            for array, expected in zip(hw.to_numpy(inner), cpu, strict=True):
                assert np.array_equal(array, expected)
            assert np.array_equal(hw.to_numpy(inner[1]), cpu[1])

    for wanted in range(1, count(moved) + 1):  # noqa: B007  (`at_point` asks for it)
        with points(at_point, WITHIN):
            moved.check(moved.call())
    settle(device)
