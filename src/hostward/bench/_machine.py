"""What a result has to say about the machine and the software. No host names, no paths, no users."""

from __future__ import annotations

import csv
import importlib
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hostward.bench._device import Device

#: Results may be gathered in one file only where these are equal.
IDENTITY = ("cpu_model", "cpu_count", "gpu", "gpu_count")

_NVIDIA_SMI = ("driver_version", "pcie.link.gen.max", "pcie.link.gen.current", "pcie.link.width.current")


def describe_machine(device: Device) -> dict[str, Any]:
    """Return the machine's record; measures the link, which takes about a second."""
    link_rate = device.link_gb_per_s()
    # After the copies: an idle link may report a lower generation than it has under load.
    return {**_host(), **_gpu(device), **software(), "link_gb_per_s": link_rate}


def same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two machine records have the same processor and the same GPUs."""
    return all(one.get(key) == other.get(key) for key in IDENTITY)


def software() -> dict[str, Any]:
    """Return versions; ``None`` for what is not there."""
    from hostward._torch import torch

    return {
        "hostward": version("hostward"),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def version(package: str) -> str | None:
    """Return the version that the imported package states."""
    stated = getattr(importlib.import_module(package), "__version__", None)
    return None if stated is None else str(stated)


def source_commit(stated: str | None = None) -> dict[str, Any] | None:
    """Return the commit that the imported package is at, or what the caller states where git knows nothing.

    A package that merely lies inside somebody else's repository (an environment in a project folder)
    is not tracked there, and that repository's commit would say nothing.
    """
    here = Path(__file__)
    if _git(here, "ls-files", "--error-unmatch", here.name) is not None:
        commit, changes = _git(here, "rev-parse", "HEAD"), _git(here, "status", "--porcelain")
        if commit:
            return {"commit": commit.strip(), "dirty": bool(changes), "stated": False}
    return {"commit": stated, "dirty": None, "stated": True} if stated else None


def now() -> str:
    """Return the date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _host() -> dict[str, Any]:
    cpu = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", cpu, re.M)
    total = re.search(r"^MemTotal:\s+(\d+)", _read("/proc/meminfo"), re.M)
    huge = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled"))
    flags = re.search(r"^flags\s*:\s*(.+)$", cpu, re.M)
    return {
        "cpu_model": model[1].strip() if model else platform.machine(),
        "cpu_count": os.cpu_count(),
        "memory_nbytes": int(total[1]) * 1024 if total else None,
        "transparent_huge_pages": huge[1] if huge else None,
        "virtual": "hypervisor" in flags[1].split() if flags else None,
    }


def _gpu(device: Device) -> dict[str, Any]:
    unknown = dict.fromkeys(("gpu", "gpu_nbytes", "driver", "link_generation_max", "link_generation", "link_width"))
    if device.torch_device.type != "cuda":
        return {**unknown, "gpu_count": 0}
    from hostward._torch import torch

    cuda = torch.cuda
    properties = cuda.get_device_properties(device.torch_device)
    known = {"gpu": properties.name, "gpu_nbytes": properties.total_memory, "gpu_count": cuda.device_count()}
    # By its UUID, as NVML and nvidia-smi do not number devices the way a restricted process does.
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-")
    which = f"GPU-{uuid}" if uuid else str(device.torch_device.index or 0)
    return {**unknown, **known, **(_from_nvml(which) or _from_nvidia_smi(which) or {})}


def _from_nvml(which: str) -> dict[str, Any] | None:
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        by_uuid = which.startswith("GPU-")
        handle = nvml.nvmlDeviceGetHandleByUUID(which) if by_uuid else nvml.nvmlDeviceGetHandleByIndex(int(which))
        driver = nvml.nvmlSystemGetDriverVersion()
        return {
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
            "link_generation_max": nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
            "link_generation": nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            "link_width": nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        }
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _from_nvidia_smi(which: str) -> dict[str, Any] | None:
    text = _run("nvidia-smi", "-i", which, f"--query-gpu={','.join(_NVIDIA_SMI)}", "--format=csv,noheader,nounits")
    row = next(csv.reader([text or ""], skipinitialspace=True), [])
    if len(row) != len(_NVIDIA_SMI):
        return None
    numbers = [int(cell) if cell.strip().isdigit() else None for cell in row[1:]]
    names = ("link_generation_max", "link_generation", "link_width")
    return {"driver": row[0].strip(), **dict(zip(names, numbers, strict=True))}


def _git(file: Path, *arguments: str) -> str | None:
    return _run("git", "-C", str(file.parent), *arguments)


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
