"""The handful of CUDA runtime calls that torch does not offer, by ctypes: all have trivial signatures.

Source: CUDA Runtime API, "Stream Management", "Event Management", "Memory Management", "Error Handling".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any

from hostward._torch import torch

_CAPTURE_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_STREAM_NON_BLOCKING = 1  # cudaStreamNonBlocking: no implicit order with the legacy default stream
_EVENT_NO_TIMING = 2  # cudaEventDisableTiming
_DEVICE_TO_HOST = 2  # cudaMemcpyDeviceToHost
_QUERIES = 16  # together about as long as a copy of a few KiB takes
_NOT_READY = 600  # cudaErrorNotReady

Call = Callable[..., Any]


class Runtime:
    """The calls, found in one library.

    Raises
    ------
    AttributeError
        The library lacks one of them.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        def call(name: str, *arguments: Any, returns: Any = c_int) -> Call:
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, returns
            return function  # type: ignore[no-any-return]

        self._exchange = call("cudaThreadExchangeStreamCaptureMode", POINTER(c_int))
        self._new_stream = call("cudaStreamCreateWithFlags", POINTER(c_void_p), c_uint)
        self._new_event = call("cudaEventCreateWithFlags", POINTER(c_void_p), c_uint)
        self.record = call("cudaEventRecord", c_void_p, c_void_p)
        self.query = call("cudaEventQuery", c_void_p)
        self._query_stream = call("cudaStreamQuery", c_void_p)
        self.copy = call("cudaMemcpyAsync", c_void_p, c_void_p, c_size_t, c_int, c_void_p)
        self._last_error = call("cudaGetLastError")
        self._text = call("cudaGetErrorString", c_int, returns=c_char_p)
        self._idle_events: dict[int, list[int]] = {}

    def check(self, result: int) -> None:
        """Raise a failed call's error."""
        if result:
            raise RuntimeError(f"CUDA error {result}: {self._text(result).decode()}")

    def forget_error(self) -> None:
        """Read the last error, which clears it."""
        self._last_error()

    def new_stream(self) -> int | None:
        """Create a non-blocking stream on the current device; ``None`` if the driver refuses."""
        handle = c_void_p()
        return None if self._new_stream(ctypes.byref(handle), _STREAM_NON_BLOCKING) else handle.value

    def relaxed_capture(self) -> RelaxedCapture:
        """Put the calling thread into relaxed capture mode for a while."""
        return RelaxedCapture(self._exchange)

    def copy_to_host(
        self, address: int, x: torch.Tensor, nbytes: int, stream: int, device: int
    ) -> RawEvent | FiredEvent:
        """Queue a copy on a stream of the current device, and return an event behind it.

        All of it in relaxed capture mode. A tiny copy on an idle stream has landed before an event could be recorded,
        so the stream is asked a few times first; a stream that goes on being busy gets an event.
        """
        exchange, mode = self._exchange, ctypes.byref(c_int(_CAPTURE_RELAXED))
        exchange(mode)
        try:
            result = self.copy(address, x.data_ptr(), nbytes, _DEVICE_TO_HOST, stream)
            if result:
                self.check(result)
            for _ in range(_QUERIES):
                result = self._query_stream(stream)
                if not result:
                    return _FIRED
                if result != _NOT_READY:
                    self.check(result)
            return self._event_on(stream, device)
        finally:
            exchange(mode)

    def _event_on(self, stream: int, device: int) -> RawEvent:
        idle = self._idle_events.setdefault(device, [])
        try:
            handle = idle.pop()
        except IndexError:
            new = c_void_p()
            self.check(self._new_event(ctypes.byref(new), _EVENT_NO_TIMING))
            assert new.value is not None
            handle = new.value
        event = RawEvent(self, handle, idle)
        self.check(self.record(handle, stream))
        return event


class FiredEvent:
    """The event of a copy that has been seen to land."""

    __slots__ = ()

    def query(self) -> bool:
        """See `Event.query`."""
        return True


_FIRED = FiredEvent()


class RelaxedCapture:
    """A context in which the calling thread's calls cannot invalidate another thread's capture."""

    __slots__ = ("_exchange", "_mode")

    def __init__(self, exchange: Call) -> None:
        self._exchange, self._mode = exchange, ctypes.byref(c_int(_CAPTURE_RELAXED))

    def __enter__(self) -> None:
        self._exchange(self._mode)  # swaps: `_mode` now holds the thread's own

    def __exit__(self, *_: object) -> None:
        self._exchange(self._mode)


class RawEvent:
    """An event that is asked through the runtime; its handle is used again once it has been seen to fire."""

    __slots__ = ("_fired", "_handle", "_idle", "_runtime")

    def __init__(self, runtime: Runtime, handle: int, idle: list[int]) -> None:
        self._runtime, self._handle, self._idle, self._fired = runtime, handle, idle, False

    def query(self) -> bool:
        """See `Event.query`."""
        if self._fired:
            return True
        result = self._runtime.query(self._handle)
        if result == _NOT_READY:
            return False
        if result:
            self._runtime.check(result)
        if not self._fired:  # two threads may have asked at once, about a call that was interrupted
            self._fired = True
            self._idle.append(self._handle)
        return True


@cache
def runtime() -> Runtime | None:
    """Return the CUDA runtime that torch has loaded, or ``None`` where ctypes does not find it by its name."""
    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.partition(".")[0]
    for name in (f"libcudart.so.{major}", f"libcudart.so.{major}.0", f"cudart64_{major}.dll"):
        try:
            return Runtime(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
    return None
