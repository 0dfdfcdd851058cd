"""Devices: what the engine needs of torch's streams, events and memory, by device type."""

from __future__ import annotations

from hostward._devices._backend import Backend, BlockingBackend, Event, HostBackend, TorchBackend, as_bytes
from hostward._devices._cuda import CudaBackend
from hostward._devices._registry import backend_for, capability_table, register

__all__ = [
    "Backend",
    "BlockingBackend",
    "CudaBackend",
    "Event",
    "HostBackend",
    "TorchBackend",
    "as_bytes",
    "backend_for",
    "capability_table",
    "register",
]
