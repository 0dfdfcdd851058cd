"""Memory peaks of one way, in a run of their own that is not timed.

The caches of torch (and hostward's pools, where it offers to trim them) are emptied first, so what a
way keeps for its next call counts as well: a steady state that lives from a gigabyte kept aside shows
that gigabyte here.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hostward.bench._device import Device
from hostward.bench._sampler import Sampler

SHORTEST_S = 0.05


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes above the state before the call; ``None`` where nobody knows.

    `host_peak` is the larger of `host_peak_rss` and `host_peak_used`; `host_interval_s` the longest
    time between two readings of them.
    """

    host_peak: int | None
    host_peak_rss: int | None
    host_peak_used: int | None
    host_interval_s: float
    pinned_peak: int | None
    gpu_peak: int | None

    def as_record(self) -> dict[str, Any]:
        """Return it as it stands in a result file."""
        return asdict(self)


def measure_peaks(call: Callable[[], Any], device: Device, sampler: Sampler) -> Peaks:
    """Run a way for at least 50 ms (once, if a call takes longer), watched; the last result is alive at the end."""
    gc.collect()
    device.synchronize()
    device.free_caches()
    read_device = device.watch_memory()
    sampler.begin()
    end = time.perf_counter() + SHORTEST_S
    result = call()
    while time.perf_counter() < end:
        del result
        result = call()
    host = sampler.end()
    pinned, gpu = read_device()
    del result
    return Peaks(host.nbytes, host.rss, host.used, host.interval_s, pinned, gpu)
