"""The test device ``lag``: two slow devices in host memory, seen from Python.

What it is. A real torch device: `Tensor.to`, `copy_`, `pin_memory`, `torch.Stream`, `torch.Event`
and `torch.accelerator` run torch's own code on it. Fills and copies are late: they run when their
stream gets there, on a thread of its own. All other operators run on the CPU, after a wait for the
current stream. `device/csrc/` says, file by file, which of CUDA's rules it keeps.

What to know. Freed memory is never unmapped: it is overwritten with 0xDD on its own stream and
handed out again to the next request of that size on that stream, at once. So a source that is let
go too early shows as poison or as another tensor's values, and never as a crash.

What it cannot show. Speed, graphs, DLPack, and all that only CUDA has: see the GPU suite.

Installing it holds for the whole process: the device becomes *the* accelerator. Tests that use it
run in a pytest process of their own (``--device lag``), and never on a machine with a GPU.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import torch

from device.frame import Counters, Device, DeviceMemory, HostMemory, Latch

TYPE = "lag"
POISON = 0xDD


def install(library: Path) -> LagDevice:
    """Load the library, make the device known to torch and to hostward, and return it."""
    if torch.cuda.is_available():
        raise RuntimeError("the test device never runs where there is a GPU: torch has one accelerator")
    lagdev = _load(library)
    lagdev.register_with_torch()
    torch.utils.rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, _device_module(lagdev))
    torch.utils.generate_methods_for_privateuse1_backend(for_module=False, for_storage=False)
    _register_with_hostward()
    return LagDevice(lagdev)


def _load(library: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("lagdev", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lagdev"] = module
    spec.loader.exec_module(module)
    return module


def _device_module(lagdev: types.ModuleType) -> types.ModuleType:
    """Make what torch looks for at ``torch.lag``."""
    module = types.ModuleType(f"torch.{TYPE}")

    def mem_get_info(index: int | None = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(index)

    module.__dict__.update(
        is_available=lambda: True,
        device_count=lambda: lagdev.DEVICES,
        current_device=torch.accelerator.current_device_index,
        set_device=torch.accelerator.set_device_index,
        current_stream=torch.accelerator.current_stream,
        synchronize=torch.accelerator.synchronize,
        empty_cache=torch.accelerator.empty_cache,
        mem_get_info=mem_get_info,
        manual_seed_all=lambda seed: None,  # random numbers are made on the CPU
        _is_in_bad_fork=lagdev.in_forked_child,
    )
    return module


def _register_with_hostward() -> None:
    if importlib.util.find_spec("hostward") is None:
        return  # the device's own tests run without it
    from hostward import _devices

    class LagBackend(_devices.TorchBackend):
        def memory_free(self, index: int, enough: int) -> int | None:
            # What the allocator holds without using it can be had too, as in CUDA's backend.
            free, _total = torch.accelerator.get_memory_info(index)
            cached = torch.accelerator.memory_reserved(index) - torch.accelerator.memory_allocated(index)
            return free + cached

    _devices.register(LagBackend(TYPE))


class LagLatch(Latch):
    def __init__(self, lagdev: types.ModuleType, stream: torch.Stream) -> None:
        self._lagdev = lagdev
        self._id = lagdev.latch_hold(stream.device_index, stream.stream_id)
        super().__init__(
            do_open=lambda: lagdev.latch_open(self._id),
            is_pending=lambda: not lagdev.latch_is_open(self._id),
        )

    def open_on_wait(self, queries: int = 100) -> None:
        self._lagdev.latch_open_on_wait(self._id, queries)


class LagDevice(Device):
    """The test device."""

    type = TYPE

    def __init__(self, lagdev: types.ModuleType) -> None:
        everything = {"counters", "memory", "limits", "failures", "poison", "open_on_wait", "many_latches"}
        super().__init__(lagdev.DEVICES, everything)
        self.lagdev = lagdev

    def synchronize(self, index: int | None = None) -> None:
        for one in range(self.count) if index is None else [index]:
            self.lagdev.drain(one)

    def _hold(self, stream: torch.Stream) -> Latch:
        return LagLatch(self.lagdev, stream)

    def counters(self, index: int = 0) -> Counters:
        return Counters(**self.lagdev.counters(index))

    def memory(self, index: int = 0) -> DeviceMemory:
        return DeviceMemory(**self.lagdev.device_memory(index))

    def host_memory(self) -> HostMemory:
        return HostMemory(**self.lagdev.host_memory())

    def reset_counters(self) -> None:
        self.lagdev.counters_reset()
        for index in range(self.count):
            self.lagdev.device_memory_reset_peak(index)
        self.lagdev.host_memory_reset_peak()

    def limit_memory(self, nbytes: int | None, index: int = 0) -> None:
        self.lagdev.device_memory_set_limit(index, nbytes)

    def limit_pinned(self, nbytes: int | None) -> None:
        self.lagdev.host_memory_set_limit(nbytes)

    def fail_d2h(self, nth: int = 1, *, late: bool = False) -> None:
        self.lagdev.fail_d2h(nth, late)

    def clear_faults(self) -> None:
        self.lagdev.clear_faults()

    def forbid_device_sync(self) -> None:
        self.lagdev.forbid_device_sync(True)

    def _reset(self) -> None:
        self.lagdev.latch_open_all()
        self.lagdev.forbid_device_sync(False)
        self.lagdev.fail_d2h(0, False)
        self.synchronize()
        self.lagdev.clear_faults()
        self.limit_pinned(None)
        self.lagdev.host_memory_trim()
        for index in range(self.count):
            self.limit_memory(None, index)
            self.lagdev.device_memory_trim(index)
        self.reset_counters()
