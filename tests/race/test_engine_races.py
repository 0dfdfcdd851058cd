"""The races of `test_recipes`, through the engine: not one wrong byte. And engines with one thing broken, all caught.

A check makes one race certain by holding a stream, and asserts that every byte is right. It is run as it is, for each
way that bytes can go, and then by each mutant of the engine that it is there for: there it has to fail. A mutant that
no check notices means that the suite has lost its teeth.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device
from engine.rig import WAIT_S, decided, fly, in_threads, shrink_rings
from hostward import _engine
from hostward._devices import backend_for
from hostward._engine import State, _direct
from hostward._engine._flight import Flight
from hostward._engine._leg import Leg, Reader
from hostward._plan import Route, admit
from hostward._sinks import ArraySink
from hostward._sinks._arrays import _ring
from hostward._types import Capacity
from support.watch import behind

N = 1 << 18  # a MiB: large enough that CUDA's allocator hands a freed block out again as it is
ROWS = 512

# Values that occur nowhere else: recycled memory is full of those of earlier tests.
fresh = itertools.count(5001)


def filled(device: Device, index: int = 0, n: int = N) -> torch.Tensor:
    return device.tensor(torch.full((n,), float(next(fresh))), index)


def wrong(arrays: object, value: float) -> int:
    """How many elements are not `value`."""
    found = arrays if isinstance(arrays, list | tuple) else [arrays]
    return sum(int((np.asarray(array) != value).sum()) for array in found)


def settled(flight: Flight, sink: ArraySink) -> list[np.ndarray]:
    flight.wait()
    assert flight.state is State.DONE
    return list(sink.results.values())


@contextmanager
def current(streams: list[torch.Stream]):
    """Make streams current for this thread, at most one of each device; the current device stays."""
    before = [torch.accelerator.current_stream(stream.device.index) for stream in streams]
    index = torch.accelerator.current_device_index()
    for stream in streams:
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(index)
    try:
        yield
    finally:
        for stream in before:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(index)


# ---- the ways that bytes can go: all results have one value in every element

WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "direct": lambda x: hw.to_numpy(x[:100]),
    "direct again": lambda x: [hw.to_numpy(x[:100]), hw.to_numpy(x[:100])],
    "pinned": lambda x: hw.to_numpy(x, memory="pinned"),
    "ring": lambda x: hw.to_numpy(x),
    "temporary": lambda x: hw.to_numpy(x.view(ROWS, -1).t()),
    "narrowed": lambda x: hw.to_numpy(x, dtype="float64"),
    "tree": lambda x: hw.to_numpy([x, x.view(ROWS, -1)[:, 3], x.view(ROWS, -1).t()]),
    "pinned tree": lambda x: hw.to_numpy([x, x.view(ROWS, -1).t()], memory="pinned"),
    "overlapping": lambda x: hw.to_numpy([x[:-7], x[5:]]),
    "expanded": lambda x: hw.to_numpy(x[:4, None].expand(4, 500)),
    "numbers": lambda x: np.array(hw.to_python([x[0], x[1:5]])[1]),
}
every_way = pytest.mark.parametrize("way", WAYS)


def pieces(x: torch.Tensor) -> list[np.ndarray]:
    """Pack in pieces, as where device memory is short: one temporary for all of them."""
    tree = [x.view(ROWS, -1).t(), x.view(2 * ROWS, -1).t()]
    call = decided(tree)
    plan = admit(call.admitted.plan, Capacity(temporary_limit=1 << 20))
    assert plan.routes == (Route.PIECES, Route.PIECES)
    sink = ArraySink(plan)
    return settled(_engine.run(plan, call.found.objects, sink), sink)


# ---- the producer


def producer_on_the_current_stream(device: Device, call: Callable[[torch.Tensor], object]) -> None:
    x, value = filled(device), next(fresh)
    with device.hold() as latch:
        x.fill_(value)
        assert wrong(behind(latch, partial(call, x)).got(), value) == 0


def producer_on_a_side_stream_that_is_current(device: Device, call: Callable[[torch.Tensor], object]) -> None:
    x, value, side = filled(device), next(fresh), device.stream()
    with device.hold(side) as latch:
        with side:
            x.fill_(value)

        def go() -> object:
            with current([side]):
                return call(x)

        assert wrong(behind(latch, go).got(), value) == 0


def producer_on_device_1_of_a_fresh_thread(device: Device, call: Callable[[torch.Tensor], object]) -> None:
    device.require("two_devices")
    x, value = filled(device, 1), next(fresh)
    with device.hold(1) as latch:
        x.fill_(value)

        def go() -> object:
            assert torch.accelerator.current_device_index() == 0
            return call(x)

        assert wrong(behind(latch, go).got(), value) == 0


PRODUCERS = [
    producer_on_the_current_stream,
    producer_on_a_side_stream_that_is_current,
    producer_on_device_1_of_a_fresh_thread,
]


@every_way
@pytest.mark.parametrize("check", PRODUCERS, ids=lambda check: check.__name__)
def test_the_producer_is_waited_for(device: Device, check: Callable[..., None], way: str) -> None:
    check(device, WAYS[way])


@pytest.mark.parametrize("memory", ["auto", "pinned"])
@pytest.mark.parametrize("last", [0, 1])
def test_leaves_on_two_devices_are_held_apart(device: Device, memory: str, last: int) -> None:
    two_holds(device, memory, last)


def two_holds(device: Device, memory: str = "auto", last: int = 1) -> None:
    """Each device's stream is held for itself; one goes on, and nothing may be given yet."""
    device.require("two_devices", "many_latches")
    tensors, value = [filled(device, index) for index in (0, 1, 1, 0)], next(fresh)
    latches = [device.hold(index) for index in (0, 1)]
    for x in tensors:
        x.fill_(value)
    flight, sink = fly(tensors, memory=memory)
    assert all(latch.pending for latch in latches)
    latches[1 - last].open()
    device.synchronize(1 - last)
    while flight.advance(_engine.at_once):
        pass
    assert latches[last].pending
    assert not flight.ended
    assert not sink.results
    latches[last].open()
    assert wrong(settled(flight, sink), value) == 0


# ---- the source


def source_let_go_of(
    device: Device, memory: str = "auto", take: Callable[[torch.Tensor], object] = lambda x: x
) -> None:
    """The flight is under way and held; nobody else knows the source any more, and its memory would be used again."""
    value = next(fresh)
    x = device.tensor(torch.full((N,), float(value)))
    with device.hold(backend_for(device.type).copy_stream(0)) as latch:
        flight, sink = fly([take(x), 1], memory=memory)
        assert latch.pending
        del x
        others = [filled(device) for _ in range(8)]
        assert latch.pending
    assert wrong(settled(flight, sink), value) == 0
    assert len(others) == 8


@pytest.mark.parametrize("memory", ["auto", "pinned"])
@pytest.mark.parametrize(
    "take", [lambda x: x, lambda x: x[100:], lambda x: x.view(ROWS, -1).t()], ids=["whole", "view", "temporary"]
)
def test_a_source_that_is_let_go_of_is_kept(device: Device, memory: str, take: Callable[..., torch.Tensor]) -> None:
    source_let_go_of(device, memory, take)


@every_way
def test_a_source_that_another_thread_lets_go_of_is_kept(device: Device, way: str) -> None:
    """The tree is emptied while the call is under way; the memory would go to the next who asks."""
    value = next(fresh)
    tree = [device.tensor(torch.full((N,), float(value)))]
    started = threading.Event()

    def go() -> object:
        x = tree[0]
        started.set()
        return WAYS[way](x)

    def let_go() -> None:
        assert started.wait(WAIT_S)
        tree.clear()

    with device.hold() as latch:
        thread = threading.Thread(target=let_go)
        thread.start()
        outcome = behind(latch, go)
        thread.join()
    others = [filled(device) for _ in range(4)]
    assert wrong(outcome.got(), value) == 0
    assert len(others) == 4


@every_way
def test_a_write_that_is_queued_after_the_call_comes_too_late(device: Device, way: str) -> None:
    value = next(fresh)
    x = device.tensor(torch.full((N,), float(value)))
    result = WAYS[way](x)
    x.fill_(next(fresh))
    device.synchronize()
    again = WAYS[way](filled(device))
    assert wrong(result, value) == 0
    assert again is not None


# ---- landing


def holds_its_copies(device: Device) -> type[ArraySink]:
    """A sink that holds the copy stream right before the first copy is queued on it."""

    class Holding(ArraySink):
        latch = None

        def reserve(self, piece):
            if self.latch is None:
                self.latch = device.hold()  # the engine has made the copy stream current
            return super().reserve(piece)

    return Holding


def copies_held(device: Device, memory: str = "auto") -> None:
    """All that is in front of the copies is done, and they are not: nothing has landed yet."""
    tensors, value = [filled(device, n=3000), filled(device, n=2000)], next(fresh)
    for x in tensors:
        x.fill_(value)
    flight, sink = fly(tensors, holds_its_copies(device), memory=memory)
    device.current_stream().synchronize()
    with sink.latch:
        for _ in range(20):
            flight.advance(_engine.at_once)
        assert sink.latch.pending
        assert not flight.ended, "it has ended before its copies"
        assert not sink.results
    assert wrong(settled(flight, sink), value) == 0


@pytest.mark.parametrize("memory", ["auto", "pinned"])
def test_nothing_has_landed_before_the_copies_have(device: Device, memory: str) -> None:
    copies_held(device, memory)


def direct_copy_held(device: Device) -> None:
    """The same on the direct way."""
    x, value = filled(device, n=100), next(fresh)
    x.fill_(value)
    hw.to_numpy(x)
    value = next(fresh)
    with device.hold() as latch:
        x.fill_(value)
        assert wrong(behind(latch, lambda: hw.to_numpy(x)).got(), value) == 0


def ring_under_slow_work(device: Device) -> None:
    """The host copies out much later than the bytes land, and in any order: a chunk must not be filled meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        shrink_rings(patch)
        cpu = torch.arange(60_000, dtype=torch.float32) + next(fresh) * 100_000
        x = device.tensor(cpu)
        flight, sink = fly([x, 1])
        waiting: list[Callable[[], None]] = []
        while not flight.ended:
            device.synchronize()
            while flight.advance(waiting.append):
                device.synchronize()
            if waiting:
                waiting.pop(len(waiting) // 2)()
        flight.wait()
        assert np.array_equal(sink.results[0], cpu.numpy())


def test_a_chunk_is_not_filled_before_it_has_been_copied_out(device: Device) -> None:
    ring_under_slow_work(device)


def one_temporary_for_all_pieces(device: Device) -> None:
    """The first copy out of the temporary is held: no later piece may be packed into it meanwhile."""
    n = 1 << 20
    cpu = torch.arange(n, dtype=torch.float32).view(1024, -1) + next(fresh)
    x = device.tensor(cpu)
    call = decided([x.t(), 1])
    plan = admit(call.admitted.plan, Capacity(temporary_limit=1 << 20))
    assert plan.routes == (Route.PIECES,)
    sink = ArraySink(plan)
    with device.hold(backend_for(device.type).copy_stream(0)) as latch:
        flight = _engine.run(plan, call.found.objects, sink)
        device.current_stream().synchronize()
        assert latch.pending
    assert np.array_equal(settled(flight, sink)[0], cpu.t().numpy())


def test_pieces_do_not_overwrite_each_other(device: Device) -> None:
    one_temporary_for_all_pieces(device)


def test_packing_in_pieces_waits_for_the_producer(device: Device) -> None:
    x, value = filled(device, n=1 << 19), next(fresh)
    with device.hold() as latch:
        x.fill_(value)
        assert wrong(behind(latch, partial(pieces, x)).got(), value) == 0


# ---- what is the caller's


def streams_as_before(device: Device) -> None:
    """What the caller queues after the call is on the stream it was on before."""
    sides = [device.stream(index) for index in range(device.count)]
    with current(sides):
        x = filled(device)
        hw.to_numpy([x, x[:5]])
        assert [device.current_stream(index) for index in range(device.count)] == sides
        assert torch.accelerator.current_device_index() == 0


def device_as_before(device: Device) -> None:
    device.require("two_devices")
    streams_as_before(device)


@pytest.mark.parametrize("threads", [1, 8])
def test_the_callers_streams_are_as_before(device: Device, threads: int) -> None:
    streams_as_before(device)
    if threads > 1:
        in_threads(threads, lambda n: streams_as_before(device))


# ---- mutants

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, tuple[Callable[[Patch, type], None], list[Callable[[Device], None]]]] = {}


def mutant(*checks: Callable[[Device], None]) -> Callable[..., Callable[[Patch, type], None]]:
    """Enter a mutation and the checks that have to notice it, each by itself."""

    def enter(mutate: Callable[[Patch, type], None]) -> Callable[[Patch, type], None]:
        MUTANTS[mutate.__name__] = mutate, list(checks)
        return mutate

    return enter


def by_ring(check: Callable[..., None]) -> Callable[[Device], None]:
    return partial(check, call=WAYS["ring"])


def by_tree(check: Callable[..., None]) -> Callable[[Device], None]:
    return partial(check, call=WAYS["tree"])


@mutant(by_ring(producer_on_the_current_stream), by_tree(producer_on_a_side_stream_that_is_current), two_holds)
def no_wait_for_the_producer(patch: Patch, backend: type) -> None:
    patch.setattr(backend, "wait", lambda self, stream, event: None)


@mutant(by_ring(producer_on_a_side_stream_that_is_current), by_tree(producer_on_a_side_stream_that_is_current))
def the_default_stream_is_taken_for_the_producers(patch: Patch, backend: type) -> None:
    record = backend.record
    defaults = [torch.accelerator.current_stream(index) for index in range(torch.accelerator.device_count())]

    def record_default(self, index):
        if torch.accelerator.current_stream(index) == self.copy_stream(index):
            return record(self, index)
        with current([defaults[index]]):
            return record(self, index)

    patch.setattr(backend, "record", record_default)


@mutant(by_ring(producer_on_device_1_of_a_fresh_thread), two_holds)
def the_producers_event_is_of_device_0(patch: Patch, backend: type) -> None:
    record = backend.record

    def record_elsewhere(self, index):
        copying = torch.accelerator.current_stream(index) == self.copy_stream(index)
        return record(self, index if copying else 0)

    patch.setattr(backend, "record", record_elsewhere)


@mutant(source_let_go_of, partial(source_let_go_of, memory="pinned"))
def the_source_is_not_kept(patch: Patch, backend: type) -> None:
    feed = Leg.feed

    def feed_and_forget(self, sink):
        moved = feed(self, sink)
        if self.fed:
            self.keep.clear()
            self.read = None
        return moved

    patch.setattr(Leg, "feed", feed_and_forget)


@mutant(partial(source_let_go_of, take=lambda x: x.view(ROWS, -1).t()))
def the_temporary_is_not_kept(patch: Patch, backend: type) -> None:
    feed = Leg.feed

    def feed_and_forget(self, sink):
        moved = feed(self, sink)
        if self.fed:
            self.keep[:] = [kept for kept in self.keep if not kept.is_contiguous()]
            self.read = None
        return moved

    patch.setattr(Leg, "feed", feed_and_forget)


@mutant(copies_held, partial(copies_held, memory="pinned"))
def the_event_is_recorded_before_the_copies(patch: Patch, backend: type) -> None:
    feed = Leg.feed

    def feed_behind(self, sink):
        with self._on_stream():
            early, before = self.backend.record(self.index), len(self._batches)
        moved = feed(self, sink)
        for batch in list(self._batches)[before:]:
            batch.event = early
        return moved

    patch.setattr(Leg, "feed", feed_behind)


@mutant(copies_held, by_ring(producer_on_the_current_stream), two_holds)
def events_count_as_fired(patch: Patch, backend: type) -> None:
    def poll(self):
        slots = [slot for batch in self._batches for slot in batch.slots]
        self._batches.clear()
        return slots

    patch.setattr(Leg, "poll", poll)


@mutant(copies_held, by_ring(producer_on_the_current_stream))
def a_flight_ends_when_all_is_queued(patch: Patch, backend: type) -> None:
    patch.setattr(Leg, "landed", property(lambda self: self.fed))


@mutant(ring_under_slow_work)
def a_chunk_is_given_back_before_it_is_copied_out(patch: Patch, backend: type) -> None:
    landed = ArraySink.landed

    def landed_and_given(self, slot):
        work = landed(self, slot)
        if work is None:
            return None
        _ring(self._plan.moves[slot.piece.move].device).give(slot.group)

        def late():
            slot.group.users += 1  # what the work will take off again
            work()

        return late

    patch.setattr(ArraySink, "landed", landed_and_given)


@mutant(one_temporary_for_all_pieces)
def pieces_are_packed_on_the_producers_stream(patch: Patch, backend: type) -> None:
    read, on = Reader.__call__, backend.on
    producer: list[torch.Stream] = []

    @contextmanager
    def on_noting(self, stream):
        producer[:] = [torch.accelerator.current_stream(stream.device.index)]
        with on(self, stream):
            yield

    def read_there(self, piece):
        move = self._admitted.plan.moves[piece.move]
        self._temporary(move.device)  # made where it belongs
        with current(producer):
            return read(self, piece)

    patch.setattr(backend, "on", on_noting)
    patch.setattr(Reader, "__call__", read_there)


@mutant(streams_as_before)
def the_stream_is_not_put_back(patch: Patch, backend: type) -> None:
    @contextmanager
    def on(self, stream):
        torch.accelerator.set_stream(stream)
        yield

    patch.setattr(backend, "on", on)


@mutant(device_as_before)
def the_device_is_not_put_back(patch: Patch, backend: type) -> None:
    on = backend.on

    @contextmanager
    def on_leaving(self, stream):
        with on(self, stream):
            yield
        torch.accelerator.set_device_index(torch.accelerator.device_count() - 1)

    patch.setattr(backend, "on", on_leaving)


@mutant(direct_copy_held, partial(producer_on_the_current_stream, call=WAYS["direct"]))
def the_direct_way_does_not_wait(patch: Patch, backend: type) -> None:
    patch.setattr(_direct, "_wait", lambda event: None)


CASES = [(name, number) for name, (_, checks) in MUTANTS.items() for number in range(len(checks))]


@pytest.mark.parametrize(("name", "number"), CASES, ids=[f"{name}-{number}" for name, number in CASES])
def test_mutant_is_caught(device: Device, name: str, number: int) -> None:
    mutate, checks = MUTANTS[name]
    check = checks[number]
    check(device)  # right without it
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, type(backend_for(device.type)))
        with pytest.raises(AssertionError):
            check(device)
        device.open_latches()
        device.synchronize()
    check(device)  # and again
