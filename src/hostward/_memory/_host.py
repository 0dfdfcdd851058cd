"""Host memory for results: ordinary or pinned bytes, seen by NumPy and by torch at once."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hostward._devices import Backend
from hostward._torch import torch
from hostward.errors import HostMemoryError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """The same bytes twice: `array` for the result, `tensor` for torch's copies. Freed with the last view of both."""

    array: Bytes
    tensor: torch.Tensor
    pinned: bool


def _normal_mode() -> AbstractContextManager[object]:
    """Leave inference mode: memory that outlives a call must not be of a mode that only this caller is in."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def ordinary(nbytes: int) -> HostBuffer:
    """Return `nbytes` of pageable memory, its pages not touched yet."""
    try:
        array = np.empty(nbytes, np.uint8)
    except MemoryError as error:
        raise HostMemoryError(
            "the result does not fit into host memory",
            needed=f"{nbytes:,} bytes",
            do="move fewer leaves at once, narrow them with dtype=, or give a memory-mapped out=",
        ) from error
    with _normal_mode():
        return HostBuffer(array, torch.from_numpy(array), pinned=False)


def pinned(nbytes: int, backend: Backend) -> HostBuffer:
    """Return page-locked memory, or ordinary memory where the system gives none (`HostBuffer.pinned` tells)."""
    try:
        with _normal_mode(), backend.relaxed_capture():  # pinning would break another thread's graph capture
            tensor = backend.pinned(nbytes)
    except RuntimeError:  # out of lockable memory, a container's limit, no driver: slower, never wrong
        backend.forget_error()
        return ordinary(nbytes)
    return HostBuffer(tensor.numpy(), tensor, pinned=tensor.is_pinned())


@cache
def total() -> int:
    """Return the machine's memory in bytes, as it was at first sight; 0 where nobody knows."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def available() -> int | None:
    """Return the bytes that the host can still give: the least of the machine's and the cgroup's, or ``None``."""
    found = [value for value in (_machine_available(), _cgroup_available()) if value is not None]
    return min(found) if found else None


def _machine_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _cgroup_available(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Read the limit of a container, where the cgroup file system shows the container's own group at its root."""
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", "0")))  # page cache gives way
