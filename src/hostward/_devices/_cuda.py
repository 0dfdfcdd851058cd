"""The seam for what only CUDA has. ROCm's torch speaks the same API under the same name.

Everything here is probed: without a CUDA runtime library that ctypes finds, the device-neutral way of `TorchBackend`
stays, and only the promise about other threads' graph captures is lost (`docs/contract.md`, 8).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from hostward._devices._backend import Event, TorchBackend
from hostward._devices._cudart import runtime
from hostward._torch import torch


class CudaBackend(TorchBackend):
    """CUDA and ROCm."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def is_capturing(self, index: int) -> bool:
        if index == torch.cuda.current_device():
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(index):
            return torch.cuda.is_current_stream_capturing()

    def copy_direct(self, x: torch.Tensor, host: torch.Tensor, offset: int, nbytes: int) -> Event:
        # A few runtime calls, where torch's copy, stream and event objects take twice as long. The legacy default
        # stream (0) belongs to the current device, so a tensor on another one takes torch's way.
        cuda, index = runtime(), x.get_device()
        if cuda is None or index != torch.cuda.current_device():
            return super().copy_direct(x, host, offset, nbytes)
        stream = torch._C._cuda_getCurrentRawStream(index)
        return cuda.copy_to_host(host.data_ptr() + offset, x, nbytes, stream, index)

    def record(self, index: int) -> Event:
        # torch.cuda.Event and not torch.Event: made without a device, it binds to the stream it is recorded on.
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(index))
        return event

    def wait(self, stream: torch.Stream | None, event: Event) -> None:
        assert stream is not None and isinstance(event, torch.cuda.Event)
        stream.wait_event(event)

    def memory_free(self, index: int, enough: int) -> int | None:
        free = int(torch.cuda.mem_get_info(index)[0])
        if free < enough:
            # What torch's allocator holds without using it is free for torch, though not for the driver; but not the
            # rests of blocks that are partly in use, which no large temporary fits into. Asking takes 20 times longer.
            held = torch.cuda.memory_stats(index)
            free += held.get("reserved_bytes.all.current", 0)
            free -= held.get("active_bytes.all.current", 0) + held.get("inactive_split_bytes.all.current", 0)
        return free

    def _distinct_stream(self, index: int) -> torch.Stream:
        # An own stream: one from torch's pool of 32 may be handed to the user as well, and then waits for their work.
        cuda = runtime()
        handle = None
        if cuda is not None:
            with torch.cuda.device(index):
                handle = cuda.new_stream()
        if handle is None:
            return super()._distinct_stream(index)
        own: torch.Stream = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            handle, device=torch.device("cuda", index)
        )
        return own  # never destroyed

    def relaxed_capture(self) -> AbstractContextManager[object]:
        cuda = runtime()
        return nullcontext() if cuda is None else cuda.relaxed_capture()

    def forget_error(self) -> None:
        cuda = runtime()
        if cuda is not None:
            cuda.forget_error()
