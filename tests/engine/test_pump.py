"""The pump: flights end without anyone waiting, nothing stays behind, and it costs nothing while there is nothing."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref

import pytest

from device.frame import Device
from engine.rig import WAIT_S, Script, ScriptedSink, SinkError, fly, load, numbers, scripted, wait_for
from hostward import _engine
from hostward._devices import backend_for
from hostward._engine import State, _flight, _pump
from hostward._engine._pump import Pump
from hostward.errors import HostwardResourceWarning, TransferError

N = 1000


@pytest.fixture
def pump(device: Device):
    """A pump of our own; closed afterwards, so that no thread stays."""
    pump = Pump("test", backend_for(device.type))
    yield pump
    pump.close(WAIT_S)
    assert not pump._pump.is_alive()
    assert not pump._worker.is_alive()


def ended(flight: _engine.Flight) -> None:
    until = time.monotonic() + WAIT_S
    while not flight.ended and time.monotonic() < until:
        threading.Event().wait(0.001)
    assert flight.ended


# ---- what it drives


def test_an_adopted_flight_ends_without_anyone_waiting(device: Device, pump: Pump) -> None:
    cargo = load(device, numbers(N))
    with device.hold() as latch:
        it = scripted(cargo, Script(hand_back=itertools.repeat(True)))
        pump.adopt(it.flight)
        assert not it.sink.ended.wait(0.05)
        assert latch.pending
    assert it.sink.ended.wait(WAIT_S)
    ended(it.flight)
    assert it.flight.state is State.DONE
    assert not it.sink.early
    assert it.sink.calls[-1] == "finish"


def test_slow_work_is_done_beside_the_pump(device: Device, pump: Pump) -> None:
    """One flight's host work blocks; another flight lands meanwhile."""
    cargo, go = load(device, numbers(N)), threading.Event()
    slow, quick = scripted(cargo), scripted(cargo, Script(fail={"landed": 1}))
    slow.sink.finish = lambda: go.wait(WAIT_S) and ScriptedSink.finish(slow.sink)
    pump.adopt(slow.flight)
    pump.adopt(quick.flight)
    ended(quick.flight)
    assert slow.flight.state is State.LANDED
    go.set()
    ended(slow.flight)
    assert slow.flight.state is State.DONE
    assert slow.sink.threads["finish"] == {"hostward worker test"}
    assert quick.sink.threads["abort"] == {"hostward pump test"}


def test_the_pump_feeds_as_room_comes(device: Device, pump: Pump) -> None:
    it = scripted(load(device, numbers(N)), Script(room=(n % 3 == 2 for n in itertools.count())))
    assert it.flight.state is State.FEEDING
    pump.adopt(it.flight)
    assert it.sink.ended.wait(WAIT_S)
    assert not it.sink.early
    assert len(it.sink.landed_pieces) == 16


def test_an_abandoned_flight_lets_go_only_after_its_bytes_have_landed(device: Device) -> None:
    cpu = numbers(N)
    x = device.tensor(cpu)
    with device.hold() as latch:
        flight, sink = fly([x], lambda admitted: ScriptedSink(admitted, [cpu.numpy().tobytes()]))
        alive = weakref.ref(x)
        del x
        flight.abandon(SinkError("nobody wants it"))
        assert not sink.ended.wait(0.05)
        gc.collect()
        assert alive() is not None
        assert latch.pending
    assert sink.ended.wait(WAIT_S)
    ended(flight)
    assert sink.calls[-1] == "abort"
    assert all(map(sink.has_landed, sink.reserved))
    error = wait_for(flight)
    assert isinstance(error, TransferError)
    assert str(error) == "nobody waits for this transfer any more: got SinkError"
    gc.collect()
    assert alive() is None


def test_abandoning_a_flight_that_has_ended_changes_nothing(device: Device) -> None:
    it = scripted(load(device, numbers(N)))
    it.flight.wait()
    it.flight.abandon(SinkError("too late"))
    assert it.flight.state is State.DONE
    assert it.flight.error is None
    assert it.sink.calls[-1] == "finish"


def test_a_flight_adopted_twice_ends_once(device: Device, pump: Pump) -> None:
    cargo = load(device, numbers(N))
    with device.hold():
        it = scripted(cargo)
        for _ in range(3):
            pump.adopt(it.flight)
    ended(it.flight)
    assert it.sink.count("finish") == 1


def test_a_flight_that_cannot_be_driven_does_not_end_the_others(device: Device, pump: Pump, monkeypatch) -> None:
    leaked: list[object] = []
    monkeypatch.setattr(_flight, "_leaked", leaked)
    cargo = load(device, numbers(N))
    broken, sound = scripted(cargo), scripted(cargo)

    def advance(run):
        raise LookupError

    broken.flight.advance = advance
    pump.adopt(broken.flight)
    ended(broken.flight)
    assert broken.flight.state is State.LEAKED
    assert isinstance(broken.flight.error, LookupError)
    assert len(leaked) == 1
    pump.adopt(sound.flight)
    ended(sound.flight)
    assert sound.flight.state is State.DONE


# ---- what stays behind


def test_an_idle_pump_holds_nothing(device: Device, pump: Pump) -> None:
    cargo = load(device, numbers(N))
    it = scripted(cargo, Script(hand_back=itertools.repeat(True)))
    pump.adopt(it.flight)
    ended(it.flight)
    gone = [weakref.ref(it.flight), weakref.ref(it.sink), weakref.ref(cargo.tensors[0])]
    del it, cargo
    until = time.monotonic() + WAIT_S
    while any(ref() is not None for ref in gone) and time.monotonic() < until:
        gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_an_idle_pump_takes_no_time(device: Device, pump: Pump) -> None:
    it = scripted(load(device, numbers(N)))
    pump.adopt(it.flight)
    ended(it.flight)
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in (pump._pump, pump._worker)]
    threading.Event().wait(0.05)  # for it to fall asleep
    before = [time.clock_gettime(clock) for clock in clocks]
    threading.Event().wait(0.3)
    assert [time.clock_gettime(clock) for clock in clocks] == before


def test_a_pump_that_waits_naps(device: Device, pump: Pump) -> None:
    """It asks again and again, but not all the time."""
    cargo = load(device, numbers(N))
    with device.hold():
        it = scripted(cargo)
        pump.adopt(it.flight)
        clock = time.pthread_getcpuclockid(pump._pump.ident)
        threading.Event().wait(0.05)
        before = time.clock_gettime(clock)
        threading.Event().wait(0.3)
        assert time.clock_gettime(clock) - before < 0.1
    ended(it.flight)


# ---- its end


def test_closing_waits_for_what_is_under_way(device: Device) -> None:
    pump = Pump("test", backend_for(device.type))
    cargo = load(device, numbers(N))
    with device.hold() as latch:
        it = scripted(cargo)
        pump.adopt(it.flight)
        threading.Timer(0.05, latch.open).start()
        pump.close(WAIT_S)
    assert it.flight.state is State.DONE
    assert not pump._pump.is_alive()


def test_closing_leaks_what_does_not_end(device: Device, monkeypatch) -> None:
    leaked: list[object] = []
    monkeypatch.setattr(_flight, "_leaked", leaked)
    pump = Pump("test", backend_for(device.type))
    cpu = numbers(N)
    x = device.tensor(cpu)
    with device.hold():
        flight, sink = fly([x], lambda admitted: ScriptedSink(admitted, [cpu.numpy().tobytes()]))
        alive = weakref.ref(x)
        del x
        pump.adopt(flight)
        with pytest.warns(HostwardResourceWarning, match="1 transfers had not ended when the interpreter did"):
            pump.close(0.05)
        assert flight.state is State.LEAKED
        assert isinstance(wait_for(flight), TransferError)
        assert not {"finish", "abort"} & set(sink.calls)
        del flight
        gc.collect()
        assert alive() is not None
    pump._pump.join(WAIT_S)
    assert not pump._pump.is_alive()


def test_closing_several_pumps_shares_one_limit(device: Device, monkeypatch) -> None:
    monkeypatch.setattr(_flight, "_leaked", [])
    pumps = {name: Pump(name, backend_for(device.type)) for name in "abc"}
    monkeypatch.setattr(_pump, "_pumps", dict(pumps))
    monkeypatch.setattr(_pump, "_EXIT_S", 0.2)
    cargo = load(device, numbers(N))
    with device.hold():
        for pump in pumps.values():
            pump.adopt(scripted(cargo).flight)
        since = time.monotonic()
        with pytest.warns(HostwardResourceWarning):
            _pump._close_all()
        assert time.monotonic() - since < 0.5
    for pump in pumps.values():
        pump._pump.join(WAIT_S)
        assert not pump._pump.is_alive()


def test_each_device_has_one_pump(device: Device, monkeypatch) -> None:
    monkeypatch.setattr(_pump, "_pumps", {})
    monkeypatch.setattr(_pump.atexit, "register", lambda call: None)
    backend = backend_for(device.type)
    a, b = _pump.pump_for("x:0", backend), _pump.pump_for("x:1", backend)
    assert _pump.pump_for("x:0", backend) is a is not b
    for pump in (a, b):
        pump.close(WAIT_S)
