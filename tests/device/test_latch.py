"""Latches hold what is queued behind them and nothing else: on the test device and on GPUs alike."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given

from device import frame
from device.frame import Device
from device.schedules import schedules

N = 1000


def test_work_behind_a_latch_waits_for_the_host(device: Device) -> None:
    x = device.tensor(torch.zeros(N))
    host = torch.full((N,), -1.0).pin_memory()
    with device.hold() as latch:
        x.fill_(7)
        host.copy_(x, non_blocking=True)
        landed = device.event()
        assert latch.pending
        assert not landed.query()
        assert (host == -1).all()
    landed.synchronize()
    assert (host == 7).all()
    assert not latch.pending


def test_work_before_a_latch_is_done_without_it(device: Device) -> None:
    x = device.tensor(torch.zeros(N))
    host = torch.full((N,), -1.0).pin_memory()
    host.copy_(x, non_blocking=True)
    before = device.event()
    with device.hold() as latch:
        before.synchronize()
        assert latch.pending
        assert (host == 0).all()


def test_other_streams_go_on(device: Device) -> None:
    x = device.tensor(torch.ones(N))
    host = torch.zeros(N).pin_memory()
    with device.hold() as latch:
        side = device.stream()
        with side:
            host.copy_(x, non_blocking=True)
        side.synchronize()
        assert latch.pending
        assert (host == 1).all()


def test_the_named_stream_is_held_and_the_current_one_is_not(device: Device) -> None:
    x = device.tensor(torch.ones(N))
    host = torch.zeros(N).pin_memory()
    side = device.stream()
    with device.hold(side) as latch:
        host.copy_(x, non_blocking=True)
        device.event().synchronize()
        assert (host == 1).all()
        assert latch.pending
        assert not side.query()


def test_an_event_wait_carries_the_hold_to_another_stream(device: Device) -> None:
    side = device.stream()
    with device.hold():
        side.wait_event(device.event())
        behind = device.event(side)
        assert not behind.query()
    behind.synchronize()


def test_opening_twice_is_harmless(device: Device) -> None:
    with device.hold() as latch:
        latch.open()
        latch.open()
    assert not latch.pending


def test_any_thread_may_open_while_the_test_is_blocked(device: Device) -> None:
    with device.hold() as latch:
        event = device.event()
        about_to_block = threading.Event()

        def open_it() -> None:
            about_to_block.wait()
            latch.open()

        opener = threading.Thread(target=open_it)
        opener.start()
        about_to_block.set()
        event.synchronize()  # would never return if it kept the interpreter lock
        opener.join()


@pytest.mark.parametrize("count", [3])
def test_a_held_device_does_not_hold_the_other(device: Device, count: int) -> None:
    device.require("two_devices")
    other = device.tensor(torch.ones(N), 1)
    host = torch.zeros(N).pin_memory()
    with device.hold(0) as latch:
        for _ in range(count):
            host.copy_(other, non_blocking=True)
        device.event(device.current_stream(1)).synchronize()
        assert latch.pending
        assert (host == 1).all()


@given(order=schedules(4))
def test_latches_open_in_every_order(device: Device, order: tuple[int, ...]) -> None:
    device.require("many_latches")
    with device.clean():
        streams: list[torch.Stream] = []
        while len(streams) < 4:  # the pool hands streams out again
            stream = device.stream()
            if stream not in streams:
                streams.append(stream)
        latches = [device.hold(stream) for stream in streams]
        events = [device.event(stream) for stream in streams]
        for place, index in enumerate(order):
            latches[index].open()
            events[index].synchronize()
            still_closed = order[place + 1 :]
            assert not any(events[later].query() for later in still_closed)


def test_the_end_of_the_test_opens_what_the_test_forgot(device: Device) -> None:
    with device.clean():
        latch = device.hold()
        event = device.event()
        assert not event.query()
    assert not latch.pending
    assert event.query()


def test_a_test_that_waits_for_its_own_latch_fails_and_does_not_hang(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "LATCH_LIMIT_S", 0.05)

    def waits_for_itself() -> None:
        with device.clean():
            device.hold()
            device.event().synchronize()

    with pytest.raises(pytest.fail.Exception, match="waited for held work"):
        waits_for_itself()


def test_streams_and_device_are_put_back(device: Device) -> None:
    before = device.current_stream()
    with device.clean():
        torch.accelerator.set_stream(device.stream())
        assert device.current_stream() != before
    assert device.current_stream() == before


def test_unknown_features_are_errors(device: Device) -> None:
    with pytest.raises(KeyError, match="no feature 'poisson'"):
        device.has("poisson")
