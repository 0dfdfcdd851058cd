"""The seam for what only CUDA has. ROCm's torch speaks the same API under the same name.

Everything here is probed: without a CUDA runtime library that ctypes finds, the device-neutral way of `TorchBackend`
stays, and only the promise about other threads' graph captures is lost (`docs/contract.md`, 8).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from hostward._devices._backend import Event, TorchBackend
from hostward._torch import torch

# cudaStreamCaptureModeRelaxed; CUDA Runtime API, section "Stream Management", enum cudaStreamCaptureMode.
_RELAXED = 2
# cudaStreamNonBlocking: no implicit order with the legacy default stream; same page, cudaStreamCreateWithFlags.
_NON_BLOCKING = 1
# cudaMemcpyDeviceToHost, cudaEventDisableTiming, cudaErrorNotReady; CUDA Runtime API, "Data types".
_DEVICE_TO_HOST, _DISABLE_TIMING, _NOT_READY = 2, 2, 600
_CALLS = (
    "cudaThreadExchangeStreamCaptureMode",
    "cudaStreamCreateWithFlags",
    "cudaGetLastError",
    "cudaMemcpyAsync",
    "cudaEventCreateWithFlags",
    "cudaEventRecord",
    "cudaEventQuery",
    "cudaEventDestroy",
    "cudaGetErrorString",
)


class CudaBackend(TorchBackend):
    """CUDA and ROCm."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def is_capturing(self, index: int) -> bool:
        if index == torch.cuda.current_device():
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(index):
            return torch.cuda.is_current_stream_capturing()

    def copy_small(self, x: torch.Tensor, host: torch.Tensor, offset: int, nbytes: int) -> Event:
        # Three runtime calls, where torch's copy, stream and event objects take twice as long. The legacy default
        # stream (0) belongs to the current device, so another device takes torch's way.
        runtime, index = _runtime(), x.device.index or 0
        if runtime is None or index != torch.cuda.current_device():
            return super().copy_small(x, host, offset, nbytes)
        stream = torch._C._cuda_getCurrentRawStream(index)
        event = _RawEvent(runtime)
        _check(
            runtime.cudaMemcpyAsync(
                ctypes.c_void_p(host.data_ptr() + offset),
                ctypes.c_void_p(x.data_ptr()),
                ctypes.c_size_t(nbytes),
                _DEVICE_TO_HOST,
                ctypes.c_void_p(stream),
            )
        )
        event.record(stream)
        return event

    def record(self, index: int) -> Event:
        # torch.cuda.Event and not torch.Event: made without a device, it binds to the stream it is recorded on.
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(index))
        return event

    def wait(self, stream: torch.Stream | None, event: Event) -> None:
        assert stream is not None and isinstance(event, torch.cuda.Event)
        stream.wait_event(event)

    def memory_free(self, index: int) -> int | None:
        free, _total = torch.cuda.mem_get_info(index)
        # What torch's allocator holds without using it is free for torch, though not for the driver. It may be
        # fragmented: the limit for temporaries is far below it on purpose.
        return int(free + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index))

    def _distinct_stream(self, index: int) -> torch.Stream:
        # An own stream: one from torch's pool of 32 may be handed to the user as well, and then waits for their work.
        runtime = _runtime()
        if runtime is None:
            return super()._distinct_stream(index)
        handle = ctypes.c_void_p()
        with torch.cuda.device(index):
            failed = runtime.cudaStreamCreateWithFlags(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING))
        if failed or handle.value is None:
            return super()._distinct_stream(index)
        own: torch.Stream = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            handle.value, device=torch.device("cuda", index)
        )
        return own  # never destroyed

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        runtime = _runtime()
        if runtime is None:
            yield
            return
        mode = ctypes.c_int(_RELAXED)
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # swaps: `mode` now holds the thread's own
        try:
            yield
        finally:
            runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def forget_error(self) -> None:
        runtime = _runtime()
        if runtime is not None:
            runtime.cudaGetLastError()  # reading it clears it


class _RawEvent:
    """A CUDA event without timing, asked through the runtime."""

    __slots__ = ("_handle", "_runtime")

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self._runtime = runtime
        self._handle = ctypes.c_void_p()
        _check(runtime.cudaEventCreateWithFlags(ctypes.byref(self._handle), _DISABLE_TIMING))

    def record(self, stream: int) -> None:
        _check(self._runtime.cudaEventRecord(self._handle, ctypes.c_void_p(stream)))

    def query(self) -> bool:
        result = self._runtime.cudaEventQuery(self._handle)
        if result == _NOT_READY:
            return False
        _check(result)
        return True

    def __del__(self) -> None:
        if self._handle:
            self._runtime.cudaEventDestroy(self._handle)  # allowed before it has fired; freed when it has


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"CUDA error {result} ({_text(result)})")


def _text(result: int) -> str:
    runtime = _runtime()
    assert runtime is not None
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return str(runtime.cudaGetErrorString(result).decode())


@cache
def _runtime() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded, if ctypes finds it by its name."""
    if torch.version.hip is not None:
        return None
    major = (torch.version.cuda or "").partition(".")[0]
    for name in (f"libcudart.so.{major}", f"libcudart.so.{major}.0", f"cudart64_{major}.dll"):
        try:
            runtime = ctypes.CDLL(name)
            for call in _CALLS:
                getattr(runtime, call).restype = ctypes.c_int
        except (OSError, AttributeError):
            continue
        return runtime
    return None
