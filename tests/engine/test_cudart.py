"""The runtime's events, without the runtime: a handle is never in two copies' hands."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable

import pytest
import torch

from engine.rig import WAIT_S, in_threads
from hostward._devices import _cudart

NOT_READY = 600


class Library:
    """What ctypes would give for libcudart: the calls that are used, with handles 1, 2, 3, ..."""

    def __init__(self) -> None:
        self.handles = itertools.count(1)
        self.recorded: list[int] = []
        self.fired: set[int] = set()
        self.asked: Callable[[], object] = lambda: None
        self.fails: dict[str, int] = {}
        self.polls, self.busy_for = 0, 1 << 30
        for name in ("cudaThreadExchangeStreamCaptureMode", "cudaStreamCreateWithFlags", "cudaGetLastError"):
            setattr(self, name, lambda *_: 0)

        def cudaEventCreateWithFlags(handle, flags):  # noqa: N802
            handle._obj.value = next(self.handles)
            return self.fails.get("create", 0)

        def cudaEventRecord(handle, stream):  # noqa: N802
            self.recorded.append(handle)
            self.fired.discard(handle)
            return self.fails.get("record", 0)

        def cudaEventQuery(handle):  # noqa: N802
            self.asked()
            return self.fails.get("query", 0) or (0 if handle in self.fired else NOT_READY)

        def cudaStreamQuery(stream):  # noqa: N802
            self.polls += 1
            return self.fails.get("stream", 0) or (0 if self.polls > self.busy_for else NOT_READY)

        def cudaMemcpyAsync(*_):  # noqa: N802
            self.polls = 0
            return self.fails.get("copy", 0)

        def cudaGetErrorString(code):  # noqa: N802
            return b"a text"

        self.cudaEventCreateWithFlags = cudaEventCreateWithFlags
        self.cudaEventRecord = cudaEventRecord
        self.cudaEventQuery = cudaEventQuery
        self.cudaMemcpyAsync = cudaMemcpyAsync
        self.cudaStreamQuery = cudaStreamQuery
        self.cudaGetErrorString = cudaGetErrorString


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def runtime(library: Library) -> _cudart.Runtime:
    return _cudart.Runtime(library)  # type: ignore[arg-type]


def copied(runtime: _cudart.Runtime, device: int = 0) -> _cudart.RawEvent:
    return runtime.copy_to_host(0, torch.zeros(4), 16, 7, device)


def test_a_handle_is_used_again_once_it_has_been_seen_to_fire(runtime: _cudart.Runtime, library: Library) -> None:
    first, second = copied(runtime), copied(runtime)
    assert not first.query()
    assert library.recorded == [1, 2]
    library.fired |= {1}
    assert first.query()
    third = copied(runtime)
    assert library.recorded == [1, 2, 1]
    assert first.query(), "it has fired, whatever became of its handle"
    assert not third.query()
    assert not second.query()


@pytest.mark.parametrize("busy_for", [0, 1, 5])
def test_a_copy_that_lands_at_once_needs_no_event(runtime: _cudart.Runtime, library: Library, busy_for: int) -> None:
    library.busy_for = busy_for
    assert copied(runtime).query()
    assert library.polls == busy_for + 1
    assert library.recorded == []


def test_each_device_has_its_own(runtime: _cudart.Runtime, library: Library) -> None:
    event = copied(runtime, 0)
    library.fired |= {1}
    assert event.query()
    copied(runtime, 1)
    assert library.recorded == [1, 2]


def test_two_threads_that_see_it_fire_give_it_back_once(runtime: _cudart.Runtime, library: Library) -> None:
    event = copied(runtime)
    library.fired |= {1}
    both = threading.Barrier(2)
    library.asked = lambda: both.wait(WAIT_S)
    seen = []
    in_threads(2, lambda n: seen.append(event.query()))
    assert seen == [True, True]
    library.asked = lambda: None
    for _ in range(3):
        copied(runtime)
    assert sorted(library.recorded[1:]) == [1, 2, 3]


@pytest.mark.parametrize("call", ["create", "copy", "record", "query", "stream"])
def test_an_error_is_raised_with_its_text(runtime: _cudart.Runtime, library: Library, call: str) -> None:
    library.fails = {call: 700}
    with pytest.raises(RuntimeError, match="CUDA error 700: a text"):
        copied(runtime).query()
    library.fails = {}
    copied(runtime)
    taken = call in ("create", "record", "query")
    assert library.recorded[-1] == (2 if taken else 1), "a handle that nobody saw fire is not used again"


def test_the_relaxed_mode_ends_as_it_began(runtime: _cudart.Runtime, library: Library) -> None:
    mode = ctypes.c_int(1)

    def exchange(pointer):
        pointer._obj.value, mode.value = mode.value, pointer._obj.value
        return 0

    library.cudaThreadExchangeStreamCaptureMode = exchange
    runtime = _cudart.Runtime(library)  # type: ignore[arg-type]
    with runtime.relaxed_capture():
        assert mode.value == 2
        with runtime.relaxed_capture():
            assert mode.value == 2
        assert mode.value == 2
    assert mode.value == 1
    with pytest.raises(ZeroDivisionError), runtime.relaxed_capture():
        mode.value // 0
    assert mode.value == 1
