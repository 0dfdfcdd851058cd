"""What the engine's tests share: a decided call, a flight that has been fed and not waited for, a scripted sink."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from device.frame import Device
from hostward import _engine
from hostward._call import Call, options_of, prepare
from hostward._engine import Flight, State
from hostward._memory import _ring
from hostward._plan import AdmittedPlan
from hostward._sinks import ArraySink, Piece, Sink, Slot, Work

WAIT_S = 10.0  # for what another thread does; far below the watchdog's limit
UNWRITTEN = 0xA5

# Values that occur nowhere else: recycled memory is full of those of earlier tests.
fresh = itertools.count(1)


def numbers(*shape: int) -> torch.Tensor:
    """A CPU tensor of int32 values that no other tensor has."""
    start = next(fresh) * 1_000_003
    return (torch.arange(int(np.prod(shape)), dtype=torch.int64) + start).to(torch.int32).reshape(shape)


def decided(tree: object, **options: object) -> Call:
    """The call that `to_numpy` would run."""
    return prepare(tree, options_of(**options))


def fly(tree: object, sink: Callable[[AdmittedPlan], Sink] = ArraySink, **options: object) -> tuple[Flight, Sink]:
    """Run a call up to the point where `to_numpy` would wait. Nothing but the flight holds the tree's tensors."""
    call = decided(tree, **options)
    made = sink(call.admitted)
    return _engine.run(call.admitted, call.found.objects, made), made


class SinkError(Exception):
    """What a scripted sink raises."""


@dataclass
class Script:
    """What a sink shall do. Iterators are asked once per call of the method they belong to."""

    piece_nbytes: int = 256
    room: Iterator[bool] = field(default_factory=lambda: itertools.repeat(True))
    hand_back: Iterator[bool] = field(default_factory=lambda: itertools.repeat(False))
    group: Iterator[object] = field(default_factory=lambda: itertools.repeat("one"))
    fail: dict[str, int] = field(default_factory=dict)  # method -> the call that raises, counted from 1


class ScriptedSink:
    """Pinned bytes for every piece; keeps a record of what the engine did with it, and looks for early reads.

    `expected` holds each move's bytes. A slot that is said to have landed and has other bytes goes to `early`.
    """

    def __init__(self, admitted: AdmittedPlan, expected: list[bytes], script: Script | None = None) -> None:
        self.script = script or Script()
        self.expected = [np.frombuffer(data, np.uint8) for data in expected]
        assert [move.nbytes for move in admitted.plan.moves] == [len(data) for data in expected]
        self.host = [torch.full((len(data),), UNWRITTEN, dtype=torch.uint8).pin_memory() for data in expected]
        self.calls: list[str] = []
        self.reserved: list[Piece] = []
        self.landed_pieces: list[Piece] = []
        self.worked: list[Piece] = []
        self.early: list[Piece] = []
        self.threads: dict[str, set[str]] = {}
        self.ended = threading.Event()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.threads.setdefault(name, set()).add(threading.current_thread().name)
        if self.script.fail.get(name) == self.calls.count(name):
            raise SinkError(name)

    def count(self, name: str) -> int:
        return self.calls.count(name)

    def has_landed(self, piece: Piece) -> bool:
        """Whether the piece's bytes are there now, whoever has been told so."""
        part = slice(piece.offset, piece.offset + piece.nbytes)
        return np.array_equal(self.host[piece.move].numpy()[part], self.expected[piece.move][part])

    def piece_nbytes(self, move: int) -> int:
        return self.script.piece_nbytes

    def reserve(self, piece: Piece) -> Slot | None:
        self._called("reserve")
        if not next(self.script.room):
            return None
        self.reserved.append(piece)
        part = slice(piece.offset, piece.offset + piece.nbytes)
        return Slot(piece, self.host[piece.move][part], next(self.script.group))

    def landed(self, slot: Slot) -> Work | None:
        self._called("landed")
        self.landed_pieces.append(slot.piece)
        if not self.has_landed(slot.piece):
            self.early.append(slot.piece)

        def work() -> None:
            self._called("work")
            self.worked.append(slot.piece)

        return work if next(self.script.hand_back) else None

    def finish(self) -> None:
        self._called("finish")
        self.ended.set()

    def leak(self) -> None:
        self.calls.append("leak")

    def abort(self, error: BaseException) -> None:
        self._called("abort")
        self.ended.set()
        self.error = error


@dataclass
class Scripted:
    """A flight of one or more int32 tensors into a `ScriptedSink`."""

    flight: Flight
    sink: ScriptedSink

    def drive(self, run: Callable[[Work], None] = _engine.at_once) -> None:
        """Drive until nothing moves any more."""
        while self.flight.advance(run):
            pass

    def drive_to_end(self, run: Callable[[Work], None] = _engine.at_once) -> None:
        while not self.flight.ended:
            self.flight.advance(run)


@dataclass
class Load:
    """Tensors on the device, and the bytes that shall arrive. Made before a stream is held: an upload waits for it."""

    tensors: list[torch.Tensor]
    expected: list[bytes]


def load(device: Device, *data: torch.Tensor) -> Load:
    """Upload CPU tensors, the n-th to device n (modulo what there is)."""
    tensors = [device.tensor(cpu, n % device.count) for n, cpu in enumerate(data)]
    return Load(tensors, [cpu.contiguous().numpy().tobytes() for cpu in data])


def scripted(cargo: Load, script: Script | None = None) -> Scripted:
    """Start a flight into a scripted sink."""
    flight, sink = fly(cargo.tensors, lambda admitted: ScriptedSink(admitted, cargo.expected, script))
    assert isinstance(sink, ScriptedSink)
    return Scripted(flight, sink)


def wait_for(flight: Flight) -> BaseException | None:
    """Wait, and give back what it raised."""
    try:
        flight.wait()
    except BaseException as error:
        return error
    assert flight.state is State.DONE
    return None


def shrink_rings(monkeypatch, small: tuple[int, int] = (4 << 10, 4), large: tuple[int, int] = (16 << 10, 3)) -> None:
    """Give every device a new ring of chunks that a test can fill."""
    monkeypatch.setattr(_ring, "SMALL", small)
    monkeypatch.setattr(_ring, "LARGE", large)
    monkeypatch.setattr(_ring, "_rings", {})


def ring_of(device: Device, index: int = 0) -> _ring.Ring:
    return _ring.ring_for(device.type, index)


def idle(ring: _ring.Ring) -> bool:
    """Whether every chunk of the ring is free."""
    return all(len(ring._free.get(nbytes, [])) == len(alive) for nbytes, alive in ring._alive.items())


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run `work(n)` in `count` threads that start together; raise the first error, and on a thread that hangs."""
    start = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(n: int) -> None:
        try:
            start.wait(WAIT_S)
            work(n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
