"""One face for the test device and for real GPUs, so that one test runs on both.

Guarantees
----------
- A stream held by a latch does nothing more until the host opens the latch. Nothing is timed.
- Latches are opened when the test ends, however it ends, and by themselves after `LATCH_LIMIT_S`:
  a test that waits for work it holds itself fails with that as its reason instead of hanging.
- After every test the device is as before: streams drained and back to the default, latches open,
  limits and failures lifted, counters at zero.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import pytest
import torch

LATCH_LIMIT_S = 20.0

# What a device may offer, beyond streams, events, copies and latches, which all of them do.
FEATURES = {
    "counters": "says what it was asked to do: copies, bytes, waits, synchronises",
    "memory": "says how many device and pinned bytes are in use, and forgets nothing",
    "limits": "device and pinned memory can be bounded, to see what happens when it runs out",
    "failures": "copies can be made to fail",
    "poison": "freed memory is overwritten on its stream",
    "two_devices": "there is more than one",
    "open_on_wait": "a latch can open by itself once the host is seen to wait",
    "many_latches": "latches open in any order; without it only in the order they were made",
}


@dataclass(frozen=True)
class _Record:
    """Numbers seen at one moment; the difference of two is what happened in between."""

    def __sub__(self, earlier: Self) -> Self:
        names = [field.name for field in fields(self)]
        return type(self)(*(getattr(self, name) - getattr(earlier, name) for name in names))


@dataclass(frozen=True)
class Counters(_Record):
    """What one device was asked to do since the last reset. Counted at the call, not at the landing.

    ``async`` copies returned while queued; ``blocking`` ones made the host wait, because they were
    not `non_blocking` or their host side is pageable. Copies that serve an operator which runs on
    the CPU (`fallbacks`) are in none of the copy counters.
    """

    d2h_async: int
    d2h_async_bytes: int
    d2h_blocking: int
    d2h_blocking_bytes: int
    h2d_async: int
    h2d_async_bytes: int
    h2d_blocking: int
    h2d_blocking_bytes: int
    d2d: int
    d2d_bytes: int
    empty_copies: int  # of zero elements, and still handed to the device
    fills: int
    fallbacks: int
    allocations: int
    frees: int
    alloc_retries: int  # stalled the device and dropped its cache
    ooms: int
    empty_cache: int  # calls by the program, of device or pinned memory
    device_syncs: int
    stream_syncs: int
    event_syncs: int
    event_queries: int
    stream_queries: int
    host_waits: int  # of any kind, that found something to wait for
    busy_unregisters: int  # host memory unregistered under a queued copy

    @property
    def d2h(self) -> int:
        return self.d2h_async + self.d2h_blocking

    @property
    def d2h_bytes(self) -> int:
        return self.d2h_async_bytes + self.d2h_blocking_bytes


@dataclass(frozen=True)
class DeviceMemory(_Record):
    """Bytes asked for (`allocated_bytes`, `peak_bytes`), and taken with the cache (`reserved_*`)."""

    live_blocks: int
    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    reserved_peak: int
    limit: int


@dataclass(frozen=True)
class HostMemory(_Record):
    """Pinned memory by torch: bytes asked for (`pinned_bytes`), and with rounding and cache."""

    live_blocks: int
    pinned_bytes: int
    reserved_bytes: int
    registered_bytes: int  # registered by others
    peak_bytes: int  # of reserved and registered together
    parked_blocks: int  # freed, not yet passed by the streams that used them


class Latch:
    """A hold on one stream. Leaving the ``with`` block opens it.

    Attributes
    ----------
    expired
        It was opened by its time limit: the test waited for work that it held itself.
    """

    def __init__(self, do_open: Callable[[], None], is_pending: Callable[[], bool]) -> None:
        self._do_open = do_open
        self._is_pending = is_pending
        self._lock = threading.Lock()
        self._opened = False
        self.expired = False
        self._timer = threading.Timer(LATCH_LIMIT_S, self._expire)
        self._timer.daemon = True
        self._timer.start()

    @property
    def pending(self) -> bool:
        """True while the stream is held: nothing queued behind the latch has run."""
        return not self._opened and self._is_pending()

    def open(self) -> None:
        """Let the stream go on. May be called twice, and from any thread."""
        self._timer.cancel()
        with self._lock:
            if not self._opened:
                self._opened = True
                self._do_open()

    def open_on_wait(self, queries: int = 100) -> None:
        """Open by itself once the host blocks, or once it has asked `queries` times in vain.

        For calls that have to wait: the latch stays closed until the call was seen waiting.
        """
        pytest.skip("this device cannot see the host wait")

    def _expire(self) -> None:
        with self._lock:
            if not self._opened:
                self._opened = self.expired = True  # before the test goes on, which asks for it
                self._do_open()

    def __enter__(self) -> Latch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.open()


class Device:
    """What tests see of a device type. One object for the whole run."""

    type: ClassVar[str]

    def __init__(self, count: int, features: set[str]) -> None:
        assert features <= FEATURES.keys()
        self.count = count
        self._features = features | ({"two_devices"} if count > 1 else set())
        self._latches: list[Latch] = []

    def __repr__(self) -> str:
        return f"<{self.count} x {self.type}>"

    # ---- what there is

    def has(self, feature: str) -> bool:
        """Say whether the device offers one of `FEATURES`."""
        if feature not in FEATURES:
            raise KeyError(f"no feature {feature!r}; known: {', '.join(FEATURES)}")
        return feature in self._features

    def require(self, *features: str) -> None:
        """Skip the test, with a named reason, unless the device offers all of `features`."""
        for feature in features:
            if not self.has(feature):
                pytest.skip(f"{self.type}: {feature}: {FEATURES[feature]}")

    # ---- tensors and streams

    def torch_device(self, index: int = 0) -> torch.device:
        return torch.device(self.type, index)

    def tensor(self, data: torch.Tensor, index: int = 0) -> torch.Tensor:
        """Copy a CPU tensor to the device; its strides are kept, and it has landed on return."""
        on_device = data.to(self.torch_device(index))
        self.current_stream(index).synchronize()
        return on_device

    def current_stream(self, index: int = 0) -> torch.Stream:
        return torch.accelerator.current_stream(self.torch_device(index))

    def stream(self, index: int = 0) -> torch.Stream:
        """Draw a stream from the pool that is neither current nor hostward's own copy stream."""
        taken = {self.current_stream(index).stream_id, *self._copy_stream_ids(index)}
        for _ in range(64):  # the pool has 32
            stream = torch.Stream(self.torch_device(index))
            if stream.stream_id not in taken:
                return stream
        raise AssertionError("the pool has no free stream")

    def event(self, stream: torch.Stream | None = None, *, timing: bool = False) -> torch.Event:
        """Record an event on a stream, by default the current one of device 0."""
        stream = stream or self.current_stream()
        event = torch.Event(stream.device, enable_timing=timing)
        event.record(stream)
        return event

    def synchronize(self, index: int | None = None) -> None:
        """Wait for everything on one device, or on all; not counted as the program's doing."""
        raise NotImplementedError

    # ---- latches

    def hold(self, where: int | torch.Stream = 0) -> Latch:
        """Hold a stream: the given one, or the current one of the device with that index."""
        stream = self.current_stream(where) if isinstance(where, int) else where
        latch = self._hold(stream)
        self._latches.append(latch)
        return latch

    def open_latches(self) -> None:
        for latch in self._latches:
            latch.open()

    def _hold(self, stream: torch.Stream) -> Latch:
        raise NotImplementedError

    # ---- what only the test device has (`has` says so; elsewhere the test is skipped)

    def counters(self, index: int = 0) -> Counters:
        self.require("counters")
        raise NotImplementedError

    def memory(self, index: int = 0) -> DeviceMemory:
        self.require("memory")
        raise NotImplementedError

    def host_memory(self) -> HostMemory:
        self.require("memory")
        raise NotImplementedError

    def reset_counters(self) -> None:
        """Set all counters to zero, and the peaks to what is in use now."""
        self.require("counters")

    def limit_memory(self, nbytes: int | None, index: int = 0) -> None:
        """Bound the device's memory, cached blocks included, until the end of the test."""
        self.require("limits")

    def limit_pinned(self, nbytes: int | None) -> None:
        """Bound pinned and registered host memory; beyond it, pinning fails."""
        self.require("limits")

    def fail_d2h(self, nth: int = 1, *, late: bool = False) -> None:
        """Make the n-th next copy to the host fail: at the call, or, if `late`, on its stream.

        A late failure breaks the device: queries and waits raise until `clear_faults`.
        """
        self.require("failures")

    def clear_faults(self) -> None:
        self.require("failures")

    def forbid_device_sync(self) -> None:
        """Let device-wide synchronises raise until the end of the test."""
        self.require("counters")

    # ---- hygiene

    @contextmanager
    def clean(self) -> Iterator[Device]:
        """Leave the device as it was found. The fixture does this; so may each hypothesis example."""
        streams = [self.current_stream(index) for index in range(self.count)]
        current = torch.accelerator.current_device_index()
        try:
            yield self
        finally:
            self.open_latches()
            expired = any(latch.expired for latch in self._latches)
            self._latches.clear()
            self._reset()
            for stream in streams:
                torch.accelerator.set_stream(stream)
            torch.accelerator.set_device_index(current)
        if expired:
            pytest.fail(f"a latch was opened by its limit of {LATCH_LIMIT_S:.0f} s: the test waited for held work")

    def _reset(self) -> None:
        self.synchronize()

    def _copy_stream_ids(self, index: int) -> set[int]:
        if importlib.util.find_spec("hostward") is None:
            return set()  # the device's own tests run without it
        from hostward._devices import backend_for

        backend = backend_for(self.type)
        if backend.copy_stream(index) is None:
            return set()
        return {stream.stream_id for stream in backend._copy_streams[index]}
