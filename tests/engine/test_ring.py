"""The ring: its limits, who gets which chunk, what comes back after errors, and that nobody waits for ever."""

from __future__ import annotations

import gc
import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hostward as hw
from device.frame import Device
from engine.rig import WAIT_S, decided, idle, in_threads, numbers, ring_of, shrink_rings
from hostward import _engine
from hostward._memory import Chunk, Ring, _host, _ring, chunk_nbytes
from hostward._sinks import ArraySink
from hostward.errors import TransferError

SMALL, LARGE = (4 << 10, 4), (16 << 10, 3)


@pytest.fixture(autouse=True)
def small_rings(monkeypatch) -> None:
    shrink_rings(monkeypatch, SMALL, LARGE)


@pytest.fixture
def ring(device: Device) -> Ring:
    return ring_of(device)


def drain(ring: Ring, nbytes: int) -> list[Chunk]:
    """Take all there are."""
    chunks = []
    while (chunk := ring.take(nbytes)) is not None:
        chunks.append(chunk)
    return chunks


# ---- one thread


@pytest.mark.parametrize(("nbytes", "count"), [SMALL, LARGE])
def test_so_many_chunks_and_no_more(ring: Ring, nbytes: int, count: int) -> None:
    chunks = drain(ring, nbytes)
    assert len(chunks) == count
    assert ring.take(nbytes) is None
    assert all(chunk.tensor.is_pinned() and chunk.tensor.nbytes == nbytes for chunk in chunks)
    ring.give(chunks[2])
    assert ring.take(nbytes) is chunks[2]
    assert ring.take(nbytes) is None


def test_the_sizes_do_not_share_their_limits(ring: Ring) -> None:
    assert len(drain(ring, SMALL[0])) == SMALL[1]
    assert len(drain(ring, LARGE[0])) == LARGE[1]


def test_the_chunk_given_last_is_taken_first(ring: Ring) -> None:
    """Its pages are warm."""
    a, b, c = (ring.take(LARGE[0]) for _ in range(3))
    for chunk in (b, c, a):
        ring.give(chunk)
    assert [ring.take(LARGE[0]) for _ in range(3)] == [a, c, b]


def test_a_chunk_comes_back_with_its_last_user(ring: Ring) -> None:
    chunk = ring.take(SMALL[0])
    assert ring.use(chunk, 100) is not None
    assert ring.use(chunk, 100) is not None
    for _ in range(2):
        ring.give(chunk)
        assert not idle(ring)
    ring.give(chunk)
    assert idle(ring)
    again = ring.take(SMALL[0])
    assert again is chunk
    assert ring.use(again, SMALL[0]).storage_offset() == 0, "it starts empty"


@given(sizes=st.lists(st.integers(1, 2000), max_size=12))
def test_uses_are_aligned_apart_and_within_the_chunk(device: Device, sizes: list[int]) -> None:
    ring = Ring(ring_of(device).backend)
    chunk, end = ring.take(SMALL[0]), 0
    for size in sizes:
        part = ring.use(chunk, size)
        start = -(-end // 64) * 64
        if start + size > SMALL[0]:
            assert part is None
            assert chunk.used == end, "a refusal changes nothing"
            continue
        assert (part.storage_offset(), part.nbytes) == (start, size)
        end = start + size


def test_the_smallest_chunk_that_holds_it_all() -> None:
    assert [chunk_nbytes(n) for n in (0, 1, SMALL[0], SMALL[0] + 1, 1 << 40)] == [SMALL[0]] * 3 + [LARGE[0]] * 2


# ---- what is lost comes back


def test_a_lost_chunk_is_replaced(ring: Ring) -> None:
    chunks = drain(ring, SMALL[0])
    del chunks[1]
    gc.collect()
    assert len(drain(ring, SMALL[0])) == 1


def test_reclaim_takes_back_the_owners_and_no_others(ring: Ring) -> None:
    mine, yours = object(), object()
    chunks = [ring.take(SMALL[0], owner) for owner in (mine, yours, mine, mine)]
    ring.use(chunks[0], 10)
    ring.give(chunks[3])
    taken_again = ring.take(SMALL[0], yours)
    assert taken_again is chunks[3]
    ring.reclaim(mine)
    assert {id(chunk) for chunk in drain(ring, SMALL[0])} == {id(chunks[0]), id(chunks[2])}
    assert chunks[0].used == 0


def test_memory_that_cannot_be_had_costs_no_place(ring: Ring, monkeypatch) -> None:
    """Although the error, and with it every chunk in its traceback, is kept."""
    kept = []

    def refuse(nbytes, backend):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(_ring, "pinned", refuse)
        for _ in range(2 * SMALL[1]):
            try:
                ring.take(SMALL[0])
            except MemoryError as error:
                kept.append(error)
    assert len(kept) == 2 * SMALL[1]
    assert len(drain(ring, SMALL[0])) == SMALL[1]


@pytest.mark.parametrize("elements", [500, 20_000], ids=["small", "large"])
@pytest.mark.parametrize("where", ["copy", "landed", "work"])
def test_errors_that_are_kept_do_not_starve_the_ring(device: Device, monkeypatch, elements: int, where: str) -> None:
    """Their tracebacks hold whatever the flights held."""
    tree = [device.tensor(numbers(elements)), device.tensor(numbers(elements))]
    kept = []
    for _ in range(6):
        with monkeypatch.context() as patch:
            if where == "copy":
                device.require("failures")
                device.fail_d2h()
            else:
                patch.setattr(ArraySink, "landed" if where == "landed" else "_copy_out", _raise)
            with pytest.raises((TransferError, ArithmeticError)) as caught:
                hw.to_numpy(tree)
            kept.append(caught.value)
    assert idle(ring_of(device))
    watched = []
    in_threads(1, lambda n: watched.append(hw.to_numpy(tree)))
    for array, x in zip(watched[0], tree, strict=True):
        assert np.array_equal(array, x.cpu().numpy())


def _raise(*_: object) -> None:
    raise ArithmeticError


# ---- threads


@pytest.mark.parametrize(("nbytes", "count"), [SMALL, LARGE])
def test_sixteen_threads_never_pass_the_limit(ring: Ring, nbytes: int, count: int) -> None:
    """Each counts up while it has a chunk, and writes its number there."""
    lock, most, now = threading.Lock(), [0], [0]

    def work(n: int) -> None:
        dice = random.Random(n)
        done = 0
        while done < 50:
            chunk = ring.take(nbytes, n)
            if chunk is None:
                continue
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            part = ring.use(chunk, dice.randrange(1, nbytes))
            part.fill_(n)
            assert (part == n).all()
            with lock:
                now[0] -= 1
            if dice.random() < 0.2:
                ring.reclaim(n)
            else:
                ring.give(chunk)
                ring.give(chunk)
            done += 1

    in_threads(16, work)
    assert most[0] <= count
    assert len(ring._alive[nbytes]) <= count
    assert idle(ring)


def test_two_flights_that_need_each_others_ring_both_end(device: Device, monkeypatch) -> None:
    """Each holds the last chunk of one device, fully queued, and asks for one of the other's."""
    device.require("two_devices")
    kept = [ring_of(device, index).take(SMALL[0]) for index in (0, 1) for _ in range(SMALL[1] - 1)]
    met = threading.Barrier(2)

    class Meeting(ArraySink):
        """Lets both flights fill their first device before either asks for its second."""

        reserved = 0

        def reserve(self, piece):
            self.reserved += 1
            if self.reserved == 2:
                met.wait(WAIT_S)
            return super().reserve(piece)

    cpu = [numbers(500), numbers(500)]
    x, y = (device.tensor(data, index) for index, data in enumerate(cpu))
    arrays = {}

    def fly(n: int) -> None:
        call = decided([x, y] if n == 0 else [y, x])
        sink = Meeting(call.admitted)
        _engine.run(call.admitted, call.found.objects, sink).wait()
        arrays[n] = sink.results

    in_threads(2, fly)
    for n in (0, 1):
        assert np.array_equal(arrays[n][n], cpu[0])
        assert np.array_equal(arrays[n][1 - n], cpu[1])
    assert len(kept) == 6


def test_one_flight_needs_no_more_than_one_chunk(device: Device) -> None:
    """Slower, but never stuck: the ring may be almost empty."""
    ring = ring_of(device)
    kept = [ring.take(LARGE[0]) for _ in range(LARGE[1] - 1)]
    cpu = numbers(100_000)
    x = device.tensor(cpu)
    found = []
    in_threads(1, lambda n: found.append(hw.to_numpy(x)))
    assert np.array_equal(found[0], cpu)
    assert len(kept) == 2


# ---- no pinned memory


@pytest.mark.parametrize("memory", ["auto", "pinned"])
@pytest.mark.parametrize("elements", [10, 500, 100_000])
def test_without_pinned_memory_all_is_slower_and_right(device: Device, memory: str, elements: int) -> None:
    device.require("limits")
    cpu = [numbers(elements), numbers(elements)]
    tree = [device.tensor(x) for x in cpu]
    device.limit_pinned(device.host_memory().reserved_bytes)
    call = decided(tree, memory=memory)
    sink = ArraySink(call.admitted)
    _engine.run(call.admitted, call.found.objects, sink).wait()
    for number, expected in enumerate(cpu):
        assert np.array_equal(sink.results[number], expected)
    told = [f"{4 * elements:,} bytes in ordinary memory, because no pinned memory could be had"] * 2
    assert sink.fallbacks == (told if memory == "pinned" else [])


def test_a_failed_pin_forgets_its_error(device: Device, monkeypatch) -> None:
    """CUDA would report it at the next launch, as that one's own."""
    backend = ring_of(device).backend
    forgotten = []

    class Refusing(type(backend)):
        def __init__(self) -> None:
            self.capabilities = backend.capabilities

        def pinned(self, nbytes):
            raise RuntimeError("no lockable memory")

        def forget_error(self):
            forgotten.append(True)

    buffer = _host.pinned(100, Refusing())
    assert forgotten == [True]
    assert not buffer.pinned
    assert (buffer.array.nbytes, buffer.tensor.nbytes) == (100, 100)


# ---- signal handlers and finalisers


def test_a_finaliser_in_the_middle_of_take_may_call_too(device: Device, monkeypatch) -> None:
    """Garbage is collected wherever memory is asked for, and its finalisers may move tensors of their own."""
    cpu = numbers(500)
    x = device.tensor(cpu)
    ring = ring_of(device)
    found = []

    class Garbage:
        def __del__(self) -> None:
            if not found:
                found.append(None)
                found[0] = hw.to_numpy([x])[0]

    made = _ring.Chunk

    def chunk(*args, **kwargs):  # made inside of the ring's lock
        Garbage()
        return made(*args, **kwargs)

    monkeypatch.setattr(_ring, "Chunk", chunk)
    outer = []
    in_threads(1, lambda n: outer.append(ring.take(SMALL[0])))
    assert np.array_equal(found[0], cpu)
    assert isinstance(outer[0], made)
