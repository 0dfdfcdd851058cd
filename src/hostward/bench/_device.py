"""What the frame needs of a device, for CUDA and for the host.

The host one exists so that the frame runs, and is tested, where there is no GPU; the cases of the
``hostward bench`` command are never run on it.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from hostward.bench._latch import Gate, open_gate
from hostward.bench._measure import WARM_UP_ROUNDS, once

if TYPE_CHECKING:
    import torch

LINK_NBYTES = 1 << 30
LINK_SAMPLES = 7

ReadPeaks = Callable[[], tuple[int | None, int | None]]


class Device(Protocol):
    """One device that cases run on."""

    torch_device: torch.device

    def synchronize(self) -> None:
        """Wait until everything queued on the device has run."""

    def free_caches(self) -> None:
        """Give back what allocators keep for later, on the device and on the host."""

    def watch_memory(self) -> ReadPeaks:
        """Start watching; the returned function gives the (pinned, device) peak bytes since then."""

    def link_gb_per_s(self) -> float | None:
        """Measure the rate of a bare copy of 1 GiB into pinned memory; ``None`` without a link."""

    def open_gate(self) -> Gate | None:
        """Return what can hold a stream, or ``None``."""


class HostDevice:
    """The CPU as a device: no link, no streams, nothing to hold."""

    def __init__(self) -> None:
        from hostward._torch import torch

        self.torch_device = torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def free_caches(self) -> None:
        """Give back what hostward's pools keep."""
        _trim_own_pools()

    def watch_memory(self) -> ReadPeaks:
        """Nobody counts here."""
        return lambda: (None, None)

    def link_gb_per_s(self) -> float | None:
        """There is no link."""
        return None

    def open_gate(self) -> Gate | None:
        """There is no stream."""
        return None


class CudaDevice:
    """One CUDA device, through torch."""

    def __init__(self, index: int) -> None:
        from hostward._torch import torch

        self._torch, self._cuda = torch, torch.cuda
        self.torch_device = torch.device("cuda", index)
        self._cuda.set_device(self.torch_device)

    def synchronize(self) -> None:
        """Wait for the whole device: this is the benchmark's own idle point, not a way's."""
        self._cuda.synchronize(self.torch_device)

    def free_caches(self) -> None:
        """Empty torch's device and pinned caches, and hostward's pools."""
        _trim_own_pools()
        self._cuda.empty_cache()
        empty_pinned = getattr(self._torch._C, "_host_emptyCache", None)
        if empty_pinned is not None:
            empty_pinned()

    def watch_memory(self) -> ReadPeaks:
        """Reset torch's peak counters; features are probed, not versions compared."""
        device = self.torch_device
        self._cuda.reset_peak_memory_stats(device)
        allocated = self._cuda.memory_allocated(device)
        pinned = self._pinned_bytes("current")
        if pinned is not None:
            self._cuda.reset_peak_host_memory_stats()

        def read() -> tuple[int | None, int | None]:
            peak = self._pinned_bytes("peak")
            above = None if peak is None or pinned is None else max(peak - pinned, 0)
            return above, self._cuda.max_memory_allocated(device) - allocated

        return read

    def link_gb_per_s(self) -> float | None:
        """Copy 1 GiB into pinned memory a few times; the median's rate in GB/s."""
        seconds = self._time_link()
        self.free_caches()
        return LINK_NBYTES / statistics.median(seconds[WARM_UP_ROUNDS:]) / 1e9

    def open_gate(self) -> Gate | None:
        """Return a gate, where the driver can hold a stream."""
        return open_gate(self.torch_device)

    def _time_link(self) -> list[float]:
        source = self._torch.ones(LINK_NBYTES, dtype=self._torch.uint8, device=self.torch_device)
        pinned = self._torch.empty(LINK_NBYTES, dtype=self._torch.uint8, pin_memory=True)

        def copy() -> None:
            pinned.copy_(source, non_blocking=True)
            self._cuda.current_stream(self.torch_device).synchronize()

        self.synchronize()
        return [once(copy)[0] for _ in range(WARM_UP_ROUNDS + LINK_SAMPLES)]

    def _pinned_bytes(self, what: str) -> int | None:
        """Bytes that torch's pinned allocator took from the driver; ``None`` before it counted them.

        Source: ``torch.cuda.host_memory_stats``. What is now ``allocated_bytes`` was called
        ``reserved_bytes`` up to torch 2.9.
        """
        stats: dict[str, Any] = getattr(self._cuda, "host_memory_stats", dict)()
        for key in (f"reserved_bytes.{what}", f"allocated_bytes.{what}"):
            if key in stats:
                return int(stats[key])
        return None


def find_gpu() -> CudaDevice | None:
    """Return the current CUDA device, or ``None`` where torch sees no usable one."""
    from hostward._torch import torch

    cuda = torch.cuda
    return CudaDevice(cuda.current_device()) if cuda.is_available() else None


def _trim_own_pools() -> None:
    trim = getattr(getattr(importlib.import_module("hostward"), "memory", None), "trim", None)
    if trim is not None:
        trim()
