"""The direct way: pinned granules, and what is kept when a call is left early."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device
from engine.rig import WAIT_S, decided, in_threads, numbers
from hostward._devices import backend_for
from hostward._engine import _direct
from hostward._plan import DIRECT_NBYTES, Route
from hostward.errors import TransferError


@pytest.fixture(autouse=True)
def new_granules(monkeypatch) -> None:
    monkeypatch.setattr(_direct, "_granules", {})
    monkeypatch.setattr(_direct, "_unfinished", {})


def fetch(device: Device, x: torch.Tensor, *, own: bool) -> np.ndarray:
    return _direct.fetch(x, np.dtype(np.int32), x.nbytes, backend_for(device.type), own=own)


def granule(device: Device) -> _direct._Granule:
    return _direct._granules[device.type]


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


# ---- where the bytes land


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 1, 4)])
def test_values_and_shapes(device: Device, shape: tuple[int, ...]) -> None:
    cpu = numbers(*shape)
    x = device.tensor(cpu)
    for own in (True, False):
        array = fetch(device, x, own=own)
        assert array.shape == shape
        assert array.dtype == np.int32
        assert np.array_equal(array, cpu)
        assert array.flags.c_contiguous
        assert array.flags.writeable


def test_results_of_their_own_are_not_in_the_granule(device: Device) -> None:
    x = device.tensor(numbers(10))
    array = fetch(device, x, own=True)
    start = address(granule(device).buffer.array)
    assert not start <= address(array) < start + _direct._GRANULE_NBYTES
    assert array.base is None


def test_pinned_results_share_a_granule_and_no_bytes(device: Device) -> None:
    tensors = [device.tensor(numbers(n)) for n in (1, 16, 17, 1000, 3)]
    arrays = [fetch(device, x, own=False) for x in tensors]
    places = sorted((address(a), address(a) + a.nbytes) for a in arrays)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))
    assert all(start % 64 == 0 for start, _ in places)
    assert places[-1][1] - places[0][0] < _direct._GRANULE_NBYTES
    for array in arrays:
        assert torch.from_numpy(array).is_pinned()
    arrays[1][:] = -1
    for array, x in zip(arrays, tensors, strict=True):
        assert np.array_equal(array, x.cpu()) == (array is not arrays[1])


def test_a_full_granule_is_left_to_its_views(device: Device, monkeypatch) -> None:
    monkeypatch.setattr(_direct, "_GRANULE_NBYTES", 4096)
    x = device.tensor(numbers(200))
    kept, granules = [], set()
    for _ in range(20):
        kept.append(fetch(device, x, own=False))
        granules.add(id(granule(device).buffer))
        assert granule(device).used <= 4096
    assert len(granules) > 1
    assert all(np.array_equal(array, x.cpu()) for array in kept)
    memory = weakref.ref(kept[0].base)
    del kept[0]
    assert memory() is not None, "others are in it"
    kept.clear()
    gc.collect()
    assert memory() is None


def test_the_largest_that_shares(device: Device) -> None:
    for nbytes in (_direct.DIRECT_NBYTES, _direct.DIRECT_NBYTES + 4):
        array = fetch(device, device.tensor(numbers(nbytes // 4)), own=False)
        inside = _direct._granules and np.shares_memory(array, granule(device).buffer.array)
        assert bool(inside) == (nbytes == _direct.DIRECT_NBYTES)
        _direct._granules.clear()


def test_without_pinned_memory_it_is_slower_and_right(device: Device) -> None:
    device.require("limits")
    cpu = numbers(100)
    x = device.tensor(cpu)
    device.limit_pinned(0)
    for own in (True, False):
        assert np.array_equal(fetch(device, x, own=own), cpu)
    assert not granule(device).buffer.pinned


# ---- which calls go this way


@pytest.mark.parametrize(
    ("nbytes", "memory", "direct"),
    [
        pytest.param(4, "auto", True, id="tiny"),
        pytest.param(DIRECT_NBYTES, "auto", True, id="largest"),
        pytest.param(DIRECT_NBYTES + 4, "auto", False, id="larger"),
        pytest.param(1 << 20, "pinned", True, id="pinned"),
    ],
)
def test_the_route(device: Device, monkeypatch, nbytes: int, memory: str, direct: bool) -> None:
    fetched = []
    real = _direct.fetch
    monkeypatch.setattr("hostward._engine.fetch", lambda *args, **kwargs: fetched.append(1) or real(*args, **kwargs))
    cpu = numbers(nbytes // 4)
    x = device.tensor(cpu)
    assert (decided(x, memory=memory).admitted.routes == (Route.DIRECT,)) == direct
    for _ in range(2):
        assert np.array_equal(hw.to_numpy(x, memory=memory), cpu)
    assert len(fetched) == (2 if direct else 0)


# ---- waiting, and leaving early


def test_it_waits_for_the_callers_stream_only(device: Device) -> None:
    x = device.tensor(numbers(100))
    side = device.stream()
    with device.hold(side) as latch:
        assert np.array_equal(fetch(device, x, own=True), x.cpu())
        assert latch.pending


def interrupted(device: Device, monkeypatch, x: torch.Tensor, *, own: bool = True) -> None:
    """Leave a held call by a SIGINT that comes while it naps."""
    pauses, paused = itertools.count(), threading.Event()
    real = _direct.pause

    def pause(since, sleep):
        if next(pauses) == 10:
            paused.set()
        real(since, sleep)

    def send():
        if paused.wait(WAIT_S):
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(_direct, "pause", pause)
        threading.Thread(target=send, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            fetch(device, x, own=own)


def test_an_interrupted_copy_keeps_source_and_granule_until_it_has_ended(device: Device, monkeypatch) -> None:
    x, other = device.tensor(numbers(100)), device.tensor(numbers(10))
    with device.hold() as latch:
        alive = weakref.ref(x)
        since = time.monotonic()
        interrupted(device, monkeypatch, x)
        assert time.monotonic() - since < 5
        memory = weakref.ref(granule(device).buffer.tensor)
        _direct._granules.clear()
        del x
        gc.collect()
        assert latch.pending
        assert alive() is not None
        assert memory() is not None
    device.synchronize()
    fetch(device, other, own=True)
    gc.collect()
    assert not _direct._unfinished
    assert alive() is None
    assert memory() is None


def test_calls_after_an_interrupted_one_are_right_while_it_is_held(device: Device, monkeypatch) -> None:
    """The late landing writes where nobody else is."""
    x, y = device.tensor(numbers(100)), device.tensor(numbers(100))
    expected, side = y.cpu().numpy(), device.stream()
    with device.hold() as latch:
        interrupted(device, monkeypatch, x, own=False)
        with side:
            arrays = [fetch(device, y, own=False) for _ in range(5)]
        assert len(_direct._unfinished) == 1
        assert latch.pending
    device.synchronize()
    assert all(np.array_equal(array, expected) for array in arrays)


def test_threads_that_let_go_and_add_at_once_lose_nothing(device: Device) -> None:
    """A list that is filtered while another thread appends would forget what was appended."""
    lock, waiting, added = threading.Lock(), [], []

    class Copy:
        """An event that fires when it is told to."""

        def __init__(self) -> None:
            self.fired = False

        def query(self) -> bool:
            time.sleep(0)  # let another thread run
            return self.fired

    def work(n: int) -> None:
        for step in range(60):
            copy = Copy()
            _direct._unfinished[object()] = copy, copy, copy
            with lock:
                added.append(copy)
                waiting.append(copy)
                if step % 3 == 0:
                    waiting.pop(0).fired = True
            del copy
            _direct._let_go()

    in_threads(4, work)
    kept = {event for event, _, _ in _direct._unfinished.values()}
    assert {copy for copy in added if not copy.fired} <= kept
    for copy in added:
        copy.fired = True
    _direct._let_go()
    assert not _direct._unfinished


@pytest.mark.parametrize("late", [False, True], ids=["at the call", "on the stream"])
def test_a_device_that_fails_is_a_transfer_error(device: Device, late: bool) -> None:
    device.require("failures")
    x = device.tensor(numbers(100))
    device.fail_d2h(late=late)
    with pytest.raises(TransferError, match="the device failed during the transfer: got lag") as caught:
        hw.to_numpy(x)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert len(_direct._unfinished) == 1, "kept: nobody can say whether the copy still runs"
    device.clear_faults()
    assert np.array_equal(hw.to_numpy(x), x.cpu())


def test_sixteen_threads_share_the_granules(device: Device, monkeypatch) -> None:
    """Full ones are replaced under way, and no two calls land in one place."""
    monkeypatch.setattr(_direct, "_GRANULE_NBYTES", 8192)
    cpu = [numbers(10 * n + 1) for n in range(16)]
    tensors = [device.tensor(x, n % device.count) for n, x in enumerate(cpu)]
    kept: list[list[np.ndarray]] = [[] for _ in range(16)]

    def work(n: int) -> None:
        for step in range(40):
            kept[n].append(fetch(device, tensors[n], own=step % 2 == 0))
            if step % 7 == 6:
                kept[n].clear()

    in_threads(16, work)
    for n, arrays in enumerate(kept):
        assert all(np.array_equal(array, cpu[n]) for array in arrays)
