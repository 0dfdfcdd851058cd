"""The seam for what only CUDA has. ROCm's torch speaks the same API under the same name.

Everything here is probed: without cuda-bindings and without a CUDA runtime library that ctypes finds, the device-neutral
way of `TorchBackend` stays, and only the promise about other threads' graph captures is lost (`docs/contract.md`, 8).
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
_CALLS = ("cudaThreadExchangeStreamCaptureMode", "cudaStreamCreateWithFlags", "cudaGetLastError")


class CudaBackend(TorchBackend):
    """CUDA and ROCm."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def is_capturing(self, index: int) -> bool:
        if index == torch.cuda.current_device():
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(index):
            return torch.cuda.is_current_stream_capturing()

    def is_idle(self, index: int) -> bool:
        return torch.cuda.current_stream(index).query()

    def record(self, index: int) -> Event:
        # torch.cuda.Event and not torch.Event: made without a device, it binds to the stream it is recorded on.
        event = torch.cuda.Event()
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
        return torch.cuda.ExternalStream(handle.value, device=torch.device("cuda", index))  # never destroyed

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
