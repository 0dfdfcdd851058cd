"""Streams, events and free memory of one device type, through torch's device-neutral API.

`TorchBackend` is right for any accelerator whose copies are ordered by streams and events. `BlockingBackend` is for
device types of which nothing is proven: every copy blocks, and the plan says so. What only CUDA has is in `_cuda`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from hostward._torch import torch
from hostward._types import Capabilities


class Event(Protocol):
    """What the engine needs of an event: a question that never waits."""

    def query(self) -> bool:
        """Say whether everything queued before the event was recorded has been done."""
        ...


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as one row of bytes, without a copy."""
    # Not x.view(-1), which leaves a single element the stride that it happens to have, and no bytes have that one.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


class Backend:
    """What the engine asks of a device type. One object for each type, shared by all threads.

    Every method takes the device's index. None waits for the device, and none leaves another device or stream
    current than it found.
    """

    capabilities: Capabilities

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities

    @property
    def device_type(self) -> str:
        """torch's name of the device type."""
        return self.capabilities.device_type

    def copy_stream(self, index: int) -> torch.Stream | None:
        """Return the dedicated stream for copies to the host that belongs to the caller's current stream.

        There are a few of them, made on first use, so that copies behind one busy stream do not hold up those behind
        another; more streams than that share them.
        """
        raise NotImplementedError

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Make `stream` current for the calling thread, and put back stream and device afterwards."""
        raise NotImplementedError

    def record(self, index: int) -> Event:
        """Record an event on the calling thread's current stream of the device."""
        raise NotImplementedError

    def wait(self, stream: torch.Stream | None, event: Event) -> None:
        """Make `stream` wait on the device for `event`, which has been recorded (else it would wait for nothing)."""
        raise NotImplementedError

    def copy_direct(self, x: torch.Tensor, host: torch.Tensor, offset: int, nbytes: int) -> Event:
        """Copy a contiguous tensor to `host[offset : offset + nbytes]` on the caller's stream; return the event behind.

        The caller keeps both alive until the event has fired.
        """
        host[offset : offset + nbytes].copy_(as_bytes(x.detach()), non_blocking=True)
        return self.record(x.device.index or 0)

    def is_capturing(self, index: int) -> bool:
        """Say whether the calling thread's current stream of the device is recording a graph."""
        return False

    def memory_free(self, index: int, enough: int) -> int | None:
        """Return the device bytes that can be had without a failed allocation, or ``None`` where nobody knows.

        Any number from `enough` on means the same to the caller, so it may be the first one that is easily found.
        """
        return None

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return host bytes into which this device copies asynchronously; owned by the caller."""
        raise NotImplementedError

    def forget_error(self) -> None:
        """Clear the error that a failed pin leaves behind, which the next launch would report as its own."""

    def relaxed_capture(self) -> AbstractContextManager[object]:
        """Let this thread ask events and allocate without breaking a graph capture of another thread."""
        return nullcontext()


_LANES = 4  # copy streams of one device
_REMEMBERED = 1024  # producers' streams whose copy stream is remembered


class TorchBackend(Backend):
    """An accelerator with proven asynchronous copies, on `torch.Stream`, `torch.Event` and `torch.accelerator`.

    Parameters
    ----------
    device_type
        torch's name, for example ``"cuda"``.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__(Capabilities(device_type, async_copies=True))
        self._copy_streams: dict[int, list[torch.Stream]] = {}
        self._lanes: dict[tuple[int, int], torch.Stream] = {}  # by device and producer's stream
        self._lock = threading.RLock()

    def copy_stream(self, index: int) -> torch.Stream:
        producer = torch.accelerator.current_stream(index)
        lane = self._lanes.get((index, producer.stream_id))
        if lane is None:
            with self._lock:
                lane = self._lane(index, producer)
        return lane

    def _lane(self, index: int, producer: torch.Stream) -> torch.Stream:
        own = self._copy_streams.setdefault(index, [])
        for stream in own:
            if stream.stream_id == producer.stream_id:
                return stream
        if len(self._lanes) >= _REMEMBERED:
            self._lanes.clear()
        lane = self._lanes.get((index, producer.stream_id))
        if lane is None:
            known = sum(device == index for device, _ in self._lanes)
            if len(own) <= min(known, _LANES - 1):
                own.append(self._distinct_stream(index))
            lane = self._lanes[index, producer.stream_id] = own[known % len(own)]
        return lane

    def _distinct_stream(self, index: int) -> torch.Stream:
        # torch hands out its 32 pooled streams in turn, so a "new" one may be in use; the caller's must not be ours.
        taken = {stream.stream_id for stream in self._copy_streams.get(index, [])}
        taken.add(torch.accelerator.current_stream(index).stream_id)
        for _ in range(64):
            stream = torch.Stream(torch.device(self.device_type, index))
            if stream.stream_id not in taken:
                break
        return stream

    @contextmanager
    def on(self, stream: torch.Stream | None) -> Iterator[None]:
        assert stream is not None
        # set_stream also makes the stream's device current: note both, and restore both in this order.
        device = torch.accelerator.current_device_index()
        before = torch.accelerator.current_stream(stream.device.index)
        try:  # set_stream inside: an interrupt may fall right behind it
            torch.accelerator.set_stream(stream)
            yield
        finally:  # by C functions, which an interrupt cannot keep from doing what they were called for
            try:
                torch._C._accelerator_setStream(before)
            finally:
                torch._C._accelerator_setDeviceIndex(device)

    def record(self, index: int) -> Event:
        event = torch.Event(torch.device(self.device_type, index))
        event.record(torch.accelerator.current_stream(index))
        return event

    def wait(self, stream: torch.Stream | None, event: Event) -> None:
        assert stream is not None and isinstance(event, torch.Event)
        stream.wait_event(event)

    def memory_free(self, index: int, enough: int) -> int | None:
        module = getattr(torch, self.device_type, None)
        if module is None or not hasattr(module, "mem_get_info"):
            return None
        return int(module.mem_get_info(index)[0])

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class _Done:
    """The event of a device that has just been waited for."""

    def query(self) -> bool:
        return True


class BlockingBackend(Backend):
    """A device type of which nothing is proven: torch's blocking copies, in the caller's order."""

    def __init__(self, device_type: str) -> None:
        super().__init__(Capabilities(device_type))

    def copy_stream(self, index: int) -> None:
        return None

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, index: int) -> Event:
        return _Done()

    def wait(self, stream: torch.Stream | None, event: Event) -> None:
        return None

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class HostBackend(Backend):
    """The CPU: nothing crosses a link, so the engine never sees it."""

    def __init__(self) -> None:
        super().__init__(Capabilities("cpu", host=True))
