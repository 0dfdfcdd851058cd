"""A flight's way through its states, whatever its sink says, and what is kept alive until when."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device.frame import Device
from device.schedules import schedules
from engine.rig import (
    WAIT_S,
    Script,
    ScriptedSink,
    SinkError,
    fly,
    in_threads,
    load,
    numbers,
    scripted,
    wait_for,
)
from hostward import _engine
from hostward._engine import State, _flight
from hostward._engine._leg import Leg
from hostward.errors import TransferError

N = 1000  # of int32: 16 pieces of a scripted sink


# ---- the states, one by one


def test_a_flight_that_fits_is_queued_when_run_returns(device: Device) -> None:
    cargo = load(device, numbers(N))
    with device.hold() as latch:
        it = scripted(cargo)
        assert it.flight.state is State.QUEUED
        assert latch.pending
        assert not it.flight.advance(_engine.at_once)
        assert it.sink.count("reserve") == 16
        assert not {"landed", "finish", "abort"} & set(it.sink.calls)
    assert wait_for(it.flight) is None
    assert it.sink.calls == ["reserve"] * 16 + ["landed"] * 16 + ["finish"]
    assert not it.sink.early


def test_a_flight_without_room_goes_on_feeding(device: Device) -> None:
    cargo = load(device, numbers(N))
    room = itertools.chain([True, True, False, True, False], itertools.repeat(True))
    with device.hold():
        it = scripted(cargo, Script(room=room))
        assert it.flight.state is State.FEEDING
        assert len(it.sink.reserved) == 2
        assert it.flight.advance(_engine.at_once)
        assert it.flight.state is State.FEEDING
        assert len(it.sink.reserved) == 3
        assert it.flight.advance(_engine.at_once)
        assert it.flight.state is State.QUEUED
        assert len(it.sink.reserved) == 16
    assert wait_for(it.flight) is None
    assert it.sink.landed_pieces == it.sink.reserved


def test_landed_lasts_as_long_as_the_last_work(device: Device) -> None:
    cargo = load(device, numbers(N))
    it = scripted(cargo)
    device.synchronize()
    handed_out = []
    it.drive(handed_out.append)
    assert it.flight.state is State.LANDED
    assert it.sink.count("finish") == 0
    assert not it.flight.ended
    (finish,) = handed_out
    finish()
    assert it.flight.state is State.LANDED
    assert it.flight.advance(handed_out.append)
    assert it.flight.state is State.DONE
    assert it.sink.calls[-1] == "finish"


def test_work_that_is_not_done_holds_the_flight_back(device: Device) -> None:
    cargo = load(device, numbers(N))
    it = scripted(cargo, Script(hand_back=itertools.repeat(True)))
    device.synchronize()
    handed_out = []
    it.drive(handed_out.append)
    assert len(handed_out) == 16
    for work in handed_out[:-1]:
        work()
        assert not it.flight.advance(handed_out.append)
        assert it.flight.state is State.QUEUED
    handed_out[15]()
    assert it.flight.advance(handed_out.append)
    assert it.flight.state is State.LANDED


def test_two_devices_land_in_any_order(device: Device) -> None:
    cargo = load(device, numbers(N), numbers(N))
    device.require("two_devices")
    with device.hold(1) as later:
        with device.hold(0) as sooner:
            it = scripted(cargo)
            assert it.flight.state is State.QUEUED
            sooner.open()
            device.synchronize(0)
            it.drive()
            assert it.sink.count("landed") == 16
            assert it.flight.state is State.QUEUED
        assert later.pending
    assert wait_for(it.flight) is None
    assert not it.sink.early


def test_waiting_again_gives_the_same(device: Device) -> None:
    cargo = load(device, numbers(N))
    it = scripted(cargo)
    it.flight.wait()
    it.flight.wait()
    assert not it.flight.advance(_engine.at_once)
    assert it.sink.count("finish") == 1


# ---- any sink, any driver


@st.composite
def scripts(draw):
    """A sink that says no at random, hands out work at random and lets slots become readable in random groups."""
    dice = random.Random(draw(st.integers(0, 1 << 32)))
    busy, lazy = draw(st.floats(0, 0.9)), draw(st.floats(0, 1))
    groups = draw(st.integers(1, 4))
    return Script(
        piece_nbytes=draw(st.sampled_from([4, 64, 100, 256, 1 << 20])),
        room=(dice.random() >= busy for _ in itertools.count()),
        hand_back=(dice.random() < lazy for _ in itertools.count()),
        group=(dice.randrange(groups) for _ in itertools.count()),
    )


@settings(max_examples=60)
@given(
    script=scripts(),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    order=schedules(2),
    seed=st.integers(0, 1 << 32),
)
def test_any_sink_and_any_driver_give_every_byte_once(device: Device, script, sizes, order, seed) -> None:
    cargo = load(device, *map(numbers, sizes))
    dice = random.Random(seed)
    waiting = []
    with device.clean():
        latches = [device.hold(index) for index in range(device.count)]
        it = scripted(cargo, script)
        for latch in [latches[i % device.count] for i in order]:
            for _ in range(3):
                it.flight.advance(dice.choice([_engine.at_once, waiting.append]))
            latch.open()
        for latch in latches:
            latch.open()
        while not it.flight.ended:
            it.flight.advance(dice.choice([_engine.at_once, waiting.append]))
            if waiting and dice.random() < 0.5:
                waiting.pop(dice.randrange(len(waiting)))()
    sink = it.sink
    assert it.flight.state is State.DONE
    assert not waiting
    assert not sink.early
    assert all(map(sink.has_landed, sink.reserved))
    assert sink.count("finish") == 1
    assert sink.count("abort") == 0
    for number, size in enumerate(sizes):
        mine = [piece for piece in sink.reserved if piece.move == number]
        assert [piece.offset for piece in mine] == list(itertools.accumulate([0] + [p.nbytes for p in mine]))[:-1]
        assert sum(piece.nbytes for piece in mine) == 4 * size
        assert all(piece.nbytes <= script.piece_nbytes for piece in mine)
        assert [piece for piece in sink.landed_pieces if piece.move == number] == mine
    assert len(sink.worked) == sink.count("work") == len(set(sink.worked))


# ---- errors


def fails(device: Device, where: str, nth: int = 3) -> Script:
    if where == "copy":
        device.require("failures")
        device.fail_d2h(nth)
    return Script(fail={where: nth}, hand_back=itertools.repeat(where == "work"))


@pytest.mark.parametrize("where", ["reserve", "copy"])
def test_an_error_while_feeding_ends_the_flight_only_when_all_is_still(device: Device, where: str) -> None:
    """Two pieces are queued and held: until they have landed, nothing may be let go of."""
    cargo = load(device, numbers(N))
    with device.hold() as latch:
        it = scripted(cargo, fails(device, where))
        before = len(it.sink.reserved)
        for _ in range(5):
            it.flight.advance(_engine.at_once)
        assert not it.flight.ended
        assert "abort" not in it.sink.calls
        assert latch.pending
        assert len(it.sink.reserved) == before, "nothing more is queued after an error"
    error = wait_for(it.flight)
    assert isinstance(error, SinkError if where == "reserve" else TransferError)
    assert it.flight.state is State.FAILED
    assert it.sink.count("abort") == 1
    assert not {"landed", "finish"} & set(it.sink.calls)
    assert all(map(it.sink.has_landed, it.sink.reserved[:2])), "abort came before the bytes"
    assert it.sink.error is it.flight.error


@pytest.mark.parametrize("where", ["landed", "work", "finish"])
def test_an_error_after_landing_ends_the_flight(device: Device, where: str) -> None:
    cargo = load(device, numbers(N))
    with device.hold():
        it = scripted(cargo, fails(device, where, 1 if where == "finish" else 3))
        assert it.flight.state is State.QUEUED
    error = wait_for(it.flight)
    assert isinstance(error, SinkError)
    assert it.flight.state is State.FAILED
    assert it.sink.count("abort") == 1
    assert it.sink.calls[-1] == "abort"
    assert it.sink.count("finish") == (where == "finish")


def test_an_error_on_one_device_waits_for_the_other(device: Device) -> None:
    cargo = load(device, numbers(N), numbers(N))
    device.require("two_devices")
    with device.hold(1) as latch:
        it = scripted(cargo, Script(fail={"landed": 1}))
        device.synchronize(0)
        it.drive()
        assert isinstance(it.flight.error, SinkError)
        assert latch.pending
        assert not it.flight.ended
        assert "abort" not in it.sink.calls
    assert isinstance(wait_for(it.flight), SinkError)
    assert it.sink.count("abort") == 1
    assert all(map(it.sink.has_landed, it.sink.reserved))


def test_work_that_is_out_when_an_error_comes_is_waited_for(device: Device) -> None:
    cargo = load(device, numbers(N))
    it = scripted(cargo, Script(fail={"work": 2}, hand_back=itertools.repeat(True)))
    device.synchronize()
    handed_out = []
    it.drive(handed_out.append)
    for work in handed_out[:3]:
        work()
    it.drive(handed_out.append)
    assert it.sink.count("work") == 2, "after an error the rest is skipped"
    assert "abort" not in it.sink.calls
    for work in handed_out[3:]:
        work()
    it.drive(handed_out.append)
    assert it.flight.state is State.FAILED
    assert it.sink.count("abort") == 1


def test_an_abort_that_fails_too_does_not_hide_the_error(device: Device) -> None:
    cargo = load(device, numbers(N))
    it = scripted(cargo, Script(fail={"finish": 1, "abort": 1}))
    error = wait_for(it.flight)
    assert isinstance(error, SinkError)
    assert str(error) == "finish"
    assert error.__notes__ == ["letting go of the results failed as well: SinkError('abort')"]
    assert it.flight.state is State.FAILED


def test_a_failed_copy_is_a_transfer_error_with_its_cause(device: Device) -> None:
    cargo = load(device, numbers(N))
    it = scripted(cargo, fails(device, "copy"))
    error = wait_for(it.flight)
    assert isinstance(error, TransferError)
    assert isinstance(error.__cause__, RuntimeError)
    assert str(error).splitlines()[0] == ("the device failed during the transfer: got lag: this copy was made to fail")


def test_a_device_that_fails_late_leaks_rather_than_dangles(device: Device, monkeypatch) -> None:
    """After such an error nobody can say whether the copies still run: sources and slots are kept for ever."""
    cargo = load(device, numbers(N))
    device.require("failures")
    leaked: list[object] = []
    monkeypatch.setattr(_flight, "_leaked", leaked)
    device.fail_d2h(3, late=True)
    it = scripted(cargo)
    device.synchronize()
    error = wait_for(it.flight)
    assert isinstance(error, TransferError)
    assert it.flight.state is State.FAILED
    assert "abort" not in it.sink.calls, "abort says that nothing writes any more"
    ((leg, sink),) = leaked
    assert isinstance(leg, Leg)
    assert sink is it.sink
    assert any(isinstance(kept, torch.Tensor) for kept in leg.keep)
    device.clear_faults()
    again = scripted(cargo)
    assert wait_for(again.flight) is None


def test_a_late_failure_of_one_device_waits_for_the_other(device: Device, monkeypatch) -> None:
    cargo = load(device, numbers(N), numbers(N))
    device.require("failures", "two_devices")
    leaked: list[object] = []
    monkeypatch.setattr(_flight, "_leaked", leaked)
    with device.hold(1) as latch:
        device.fail_d2h(1, late=True)
        it = scripted(cargo)
        device.synchronize(0)
        it.drive()
        assert latch.pending
        assert not it.flight.ended
    assert isinstance(wait_for(it.flight), TransferError)
    assert len(leaked) == 1


def test_an_event_that_cannot_be_recorded_ends_the_flight(device: Device, monkeypatch) -> None:
    """Then nobody can see the open batch land, so it is leaked."""
    cargo = load(device, numbers(N))
    leaked: list[object] = []
    monkeypatch.setattr(_flight, "_leaked", leaked)
    backend = type(_engine._engine.backend_for(device.type))
    recorded = backend.record
    calls = itertools.count()

    def record(self, index):
        if next(calls) == 0:  # the producer's
            return recorded(self, index)
        raise RuntimeError("no more events")

    monkeypatch.setattr(backend, "record", record)
    it = scripted(cargo)
    assert isinstance(wait_for(it.flight), TransferError)
    assert len(leaked) == 1
    assert "abort" not in it.sink.calls


def test_an_error_before_the_first_copy_is_a_transfer_error_too(device: Device, monkeypatch) -> None:
    cargo = load(device, numbers(N))
    backend = type(_engine._engine.backend_for(device.type))

    def record(self, index):
        raise RuntimeError("no events at all")

    monkeypatch.setattr(backend, "record", record)
    with pytest.raises(TransferError, match="no events at all") as caught:
        scripted(cargo)
    assert isinstance(caught.value.__cause__, RuntimeError)


# ---- what is kept, and what is as before


def test_sources_live_until_the_bytes_have_landed_and_no_longer(device: Device) -> None:
    cpu = numbers(N)
    x = device.tensor(cpu)
    with device.hold() as latch:
        flight, sink = fly([x], lambda admitted: ScriptedSink(admitted, [cpu.numpy().tobytes()]))
        alive = weakref.ref(x)
        del x
        gc.collect()
        assert latch.pending
        assert alive() is not None
    flight.wait()
    gc.collect()
    assert alive() is None
    assert not sink.early


@pytest.mark.parametrize("where", ["reserve", "landed", "work", "finish"])
def test_sources_are_let_go_of_after_an_error_too(device: Device, where: str) -> None:
    cpu = numbers(N)
    script = Script(fail={where: 1}, hand_back=itertools.repeat(where == "work"))
    x = device.tensor(cpu)
    with device.hold():
        flight = fly([x], lambda admitted: ScriptedSink(admitted, [cpu.numpy().tobytes()], script))[0]
        alive = weakref.ref(x)
        del x
        assert alive() is not None
    assert isinstance(wait_for(flight), SinkError)
    del flight  # its error's traceback holds the frames that the tensors went through
    gc.collect()
    assert alive() is None


def test_device_memory_is_given_back_exactly(device: Device) -> None:
    """A transposed source has a temporary: that goes too, and not before its copy has run."""
    device.require("memory")
    before = device.memory().live_blocks
    cpu = numbers(40, 25)
    expected = cpu.t().contiguous().numpy().tobytes()
    x = device.tensor(cpu)
    with device.hold():
        flight, _ = fly([x.t()], lambda admitted: ScriptedSink(admitted, [expected]))
        del x
        assert device.memory().live_blocks == before + 2
    assert wait_for(flight) is None
    assert device.memory().live_blocks == before


@pytest.mark.parametrize("fail", [None, "reserve", "landed", "finish"])
def test_streams_and_device_are_as_before(device: Device, fail: str | None) -> None:
    cargo = load(device, numbers(N), numbers(N))
    sides = [device.stream(index) for index in range(device.count)]
    for stream in sides:
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(0)
    script = Script(fail={fail: 1} if fail else {})
    it = scripted(cargo, script)
    for _ in range(2):
        assert [device.current_stream(index) for index in range(device.count)] == sides
        assert torch.accelerator.current_device_index() == 0
        wait_for(it.flight)


# ---- waiting


def test_run_never_waits(device: Device) -> None:
    cargo = load(device, numbers(N))
    device.require("counters")
    device.forbid_device_sync()
    with device.hold() as latch:
        device.reset_counters()
        it = scripted(cargo)
        assert latch.pending
        assert device.counters().host_waits == 0
    it.flight.wait()
    assert device.counters().device_syncs == 0


def interrupt_while_it_waits(monkeypatch, module=_flight) -> dict[str, float]:
    """Send the main thread a SIGINT once it has been seen to wait; the dict says when."""
    pauses = itertools.count()
    paused, sent = threading.Event(), {}

    def pause(since, sleep):
        if next(pauses) == 20:
            paused.set()
        real(since, sleep)

    def send():
        if paused.wait(WAIT_S):
            sent["at"] = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)

    real = module.pause
    monkeypatch.setattr(module, "pause", pause)
    threading.Thread(target=send, daemon=True).start()
    return sent


def test_ctrl_c_reaches_the_caller_and_the_pump_takes_over(device: Device, monkeypatch) -> None:
    cpu = numbers(N)
    x = device.tensor(cpu)
    with device.hold() as latch:
        flight, sink = fly([x], lambda admitted: ScriptedSink(admitted, [cpu.numpy().tobytes()]))
        alive = weakref.ref(x)
        del x
        sent = interrupt_while_it_waits(monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            flight.wait()
        assert time.monotonic() - sent["at"] < 0.5  # the contract says 50 ms; this machine may be busy
        assert latch.pending
        assert not flight.ended
        assert not sink.ended.is_set()
        assert alive() is not None, "a copy may still read it"
    assert sink.ended.wait(WAIT_S)
    assert sink.calls[-1] == "abort"
    assert all(map(sink.has_landed, sink.reserved))
    assert sink.threads["abort"] != sink.threads["reserve"]
    ended(flight)
    assert flight.state is State.FAILED
    gc.collect()
    assert alive() is None


def ended(flight: _engine.Flight) -> None:
    """Wait for what the pump does right behind the sink's last call."""
    until = time.monotonic() + WAIT_S
    while not flight.ended and time.monotonic() < until:
        threading.Event().wait(0.001)
    assert flight.ended


def test_ctrl_c_stops_feeding(device: Device, monkeypatch) -> None:
    cargo = load(device, numbers(N))
    room = itertools.chain([True, True], itertools.repeat(False))
    it = scripted(cargo, Script(room=room))
    interrupt_while_it_waits(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        it.flight.wait()
    it.sink.script.room = itertools.repeat(True)
    assert it.sink.ended.wait(WAIT_S)
    assert len(it.sink.reserved) == 2
    assert it.sink.count("abort") == 1


def test_two_waiters_on_one_flight(device: Device) -> None:
    cargo = load(device, numbers(N))
    with device.hold() as latch:
        it = scripted(cargo, Script(hand_back=itertools.repeat(True)))
        threading.Timer(0.05, latch.open).start()
        in_threads(2, lambda n: it.flight.wait())
    assert it.flight.state is State.DONE
    assert it.sink.count("finish") == 1
    assert it.sink.count("work") == it.sink.count("landed") == 16


@pytest.mark.parametrize("fail", [None, "landed", "work", "finish"])
def test_waiters_and_the_pump_drive_one_flight_at_once(device: Device, fail: str | None) -> None:
    """However they share the work, each of the sink's methods runs as often as it should, and never two at a time."""
    cargo = load(device, numbers(N), numbers(N))
    for _ in range(20):
        script = Script(fail={fail: 1} if fail else {}, hand_back=itertools.repeat(True))
        script.room = (n % 3 != 0 for n in itertools.count())
        it = scripted(cargo, script)
        _engine.adopt(it.flight)
        _engine.adopt(it.flight)
        found: list[BaseException | None] = []
        in_threads(2, lambda n, it=it, found=found: found.append(wait_for(it.flight)))
        assert it.flight.ended
        assert it.sink.count("finish") == (fail in (None, "finish"))
        assert it.sink.count("abort") == (fail is not None)
        assert [type(error) for error in found] == [SinkError if fail else type(None)] * 2
        assert not it.sink.early
        if fail is None:
            assert len(it.sink.landed_pieces) == len(set(it.sink.landed_pieces)) == len(it.sink.reserved) == 32


def test_a_leaked_flight_never_looks_done(device: Device, monkeypatch) -> None:
    cargo = load(device, numbers(N))
    monkeypatch.setattr(_flight, "_leaked", [])
    with device.hold():
        it = scripted(cargo)
        it.flight.leak(TransferError("the interpreter ended"))
        assert it.flight.state is State.LEAKED
        with pytest.raises(TransferError, match="the interpreter ended"):
            it.flight.wait()
    assert "finish" not in it.sink.calls
