"""Which backend serves which device type. Other device types register themselves here; none is named in `src/`."""

from __future__ import annotations

import threading

from hostward._devices._backend import Backend, BlockingBackend, HostBackend
from hostward._devices._cuda import CudaBackend
from hostward._plan._rules import CapabilityTable

_backends: dict[str, Backend] = {}
_lock = threading.RLock()


def register(backend: Backend) -> None:
    """Serve `backend.device_type` by `backend` from now on; transfers under way keep the one they have."""
    with _lock:
        _backends[backend.device_type] = backend


def backend_for(device_type: str) -> Backend:
    """Return the backend of a device type; an unknown type gets one that blocks and says so."""
    backend = _backends.get(device_type)
    if backend is None:
        with _lock:
            backend = _backends.setdefault(device_type, BlockingBackend(device_type))
    return backend


def capability_table(device_types: frozenset[str]) -> CapabilityTable:
    """Return what the given device types can do, in an order that makes equal tables equal keys."""
    return tuple((kind, backend_for(kind).capabilities) for kind in sorted(device_types))


register(HostBackend())
register(CudaBackend())
