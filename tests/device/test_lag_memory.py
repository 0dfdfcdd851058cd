"""Memory of the test device: reuse, poison, exact counts, limits; pinned memory and who may reuse it when."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import warnings
from dataclasses import dataclass

import pytest
import torch

from device.frame import DeviceMemory, HostMemory
from device.lag import POISON, LagDevice

N = 1000
BYTES = 4 * N


@dataclass(frozen=True)
class Since:
    """Memory in use since the test began: other tests of the process may have left tensors behind."""

    lag: LagDevice
    device_before: DeviceMemory
    host_before: HostMemory

    def device(self) -> DeviceMemory:
        return self.lag.memory() - self.device_before

    def host(self) -> HostMemory:
        return self.lag.host_memory() - self.host_before

    def limit(self, more: int) -> None:
        self.lag.limit_memory(self.device_before.reserved_bytes + more)


@pytest.fixture
def since(lag: LagDevice) -> Since:
    return Since(lag, lag.memory(), lag.host_memory())


# ---- device memory


def test_blocks_and_bytes_are_exact(lag: LagDevice, since: Since) -> None:
    x = torch.empty(N, device="lag")
    y = torch.empty(N, device="lag")
    assert since.device() == DeviceMemory(2, 2 * BYTES, 2 * BYTES, 2 * 4096, 2 * 4096, 0)
    assert (lag.counters(0).allocations, lag.counters(1).allocations) == (2, 0)
    del x
    assert (since.device().live_blocks, since.device().allocated_bytes) == (1, BYTES)
    assert since.device().peak_bytes == 2 * BYTES
    lag.reset_counters()
    assert since.device().peak_bytes == BYTES
    assert (lag.counters().allocations, lag.counters().frees) == (0, 0)
    del y
    assert lag.counters().frees == 1


def test_torch_reports_the_same(lag: LagDevice) -> None:
    x = torch.empty(N, device="lag")
    now = lag.memory()
    assert torch.accelerator.memory_allocated(0) == now.allocated_bytes
    assert torch.accelerator.memory_reserved(0) == now.reserved_bytes
    assert torch.lag.mem_get_info(0) == (now.limit - now.reserved_bytes, now.limit)
    del x


def test_a_tensor_of_nothing_takes_no_block(since: Since) -> None:
    x = torch.empty(0, device="lag")
    assert since.device().live_blocks == 0
    del x


def test_freed_memory_is_handed_out_again_at_once_on_its_own_stream(lag: LagDevice) -> None:
    x = torch.empty(N, device="lag")
    address = x.data_ptr()
    with lag.hold():  # stream order makes it safe there, so nothing has to have run
        del x
        assert torch.empty(N, device="lag").data_ptr() == address
        with lag.stream():
            assert torch.empty(N, device="lag").data_ptr() != address


def test_freed_memory_is_poisoned_when_its_stream_gets_there(lag: LagDevice) -> None:
    x = lag.tensor(torch.zeros(N, dtype=torch.uint8))
    host = [torch.empty(N, dtype=torch.uint8).pin_memory() for _ in range(2)]
    side = lag.stream()
    with lag.hold(side):
        with side:
            host[0].copy_(x, non_blocking=True)
        with lag.hold():
            del x  # while nothing runs: it is the stream that poisons
        lag.current_stream().synchronize()
    side.synchronize()
    assert (host[0] == POISON).all()


def test_poison_never_hits_the_next_owner(lag: LagDevice) -> None:
    x = lag.tensor(torch.zeros(N))
    with lag.hold():
        address = x.data_ptr()
        del x
        y = torch.full((N,), 5.0, device="lag")
        assert y.data_ptr() == address
    assert (y.cpu() == 5).all()


def test_a_recorded_stream_keeps_a_freed_block_away(lag: LagDevice) -> None:
    x = lag.tensor(torch.ones(N))
    address = x.data_ptr()
    host = torch.zeros(N).pin_memory()
    side = lag.stream()
    with lag.hold(side):
        with side:
            host.copy_(x, non_blocking=True)
        x.record_stream(side)
        del x
        assert torch.empty(N, device="lag").data_ptr() != address
    side.synchronize()
    assert (host == 1).all()
    assert torch.empty(N, device="lag").data_ptr() == address


def test_beyond_the_limit_the_cache_is_emptied_and_then_an_error_raised(lag: LagDevice, since: Since) -> None:
    since.limit(3 * 4096)
    x = torch.empty(2 * N, device="lag")
    address = x.data_ptr()
    del x  # cached: counts as reserved until somebody needs it
    assert since.device().reserved_bytes == 8192
    y = torch.empty(N, device="lag")
    assert lag.counters().alloc_retries == 0
    z = torch.empty(N, device="lag")
    assert (lag.counters().alloc_retries, lag.counters().ooms) == (1, 0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 8000 bytes on device 0"):
        torch.empty(2 * N, device="lag")
    assert (lag.counters().alloc_retries, lag.counters().ooms) == (2, 1)
    assert torch.empty(2 * N, device="lag:1").numel() == 2 * N  # the other device has its own limit
    lag.limit_memory(None)
    assert torch.empty(2 * N, device="lag").data_ptr() == address  # never unmapped
    del y, z


def test_running_out_of_memory_stalls_for_the_device(lag: LagDevice, since: Since) -> None:
    since.limit(4096)
    x = torch.empty(N, device="lag")
    latch = lag.hold()
    latch.open_on_wait()
    del x
    torch.empty(N - 200, device="lag")
    assert not latch.pending


def test_hostward_sees_cached_bytes_as_free(lag: LagDevice) -> None:
    devices = pytest.importorskip("hostward._devices", exc_type=ImportError)
    x = torch.empty(N, device="lag")
    y = torch.empty(2 * N, device="lag")
    del y
    now = lag.memory()
    plenty = 1 << 60  # ask for the exact number
    assert devices.backend_for("lag").memory_free(0, plenty) == now.limit - now.allocated_bytes
    del x


# ---- pinned memory


def test_pinned_bytes_are_exact_and_sizes_are_rounded_up_to_a_power_of_two(lag: LagDevice, since: Since) -> None:
    pinned = torch.empty(130 * 1024, dtype=torch.uint8, pin_memory=True)
    now = since.host()
    assert (now.live_blocks, now.pinned_bytes, now.reserved_bytes) == (1, 130 * 1024, 256 * 1024)
    del pinned
    now = since.host()
    assert (now.live_blocks, now.pinned_bytes, now.reserved_bytes, now.peak_bytes) == (0, 0, 256 * 1024, 256 * 1024)
    torch.accelerator.empty_host_cache()
    assert since.host().reserved_bytes == 0
    assert lag.counters().empty_cache == 1


def test_everything_that_pins_is_pinned(lag: LagDevice) -> None:
    x = lag.tensor(torch.zeros(N))
    assert torch.zeros(N).pin_memory().is_pinned()
    assert x.to("cpu", non_blocking=True).is_pinned()
    assert torch.empty(N, pin_memory=True)[5:].is_pinned()
    assert not torch.zeros(N).is_pinned()
    assert not x.cpu().is_pinned()


def test_a_pinned_block_waits_for_the_copies_that_use_it(lag: LagDevice, since: Since) -> None:
    x = lag.tensor(torch.ones(N))
    with lag.hold():
        host = x.to("cpu", non_blocking=True)
        address = host.data_ptr()
        del host
        assert since.host().parked_blocks == 1
        assert torch.empty(N, pin_memory=True).data_ptr() != address
    lag.synchronize()
    assert torch.empty(N, pin_memory=True).data_ptr() == address


def test_a_pinned_block_without_copies_is_reused_at_once(lag: LagDevice) -> None:
    with lag.hold():
        address = torch.empty(N, pin_memory=True).data_ptr()
        assert torch.empty(N, pin_memory=True).data_ptr() == address


def test_the_allocator_knows_nothing_of_wrapped_memory_inside_a_block(lag: LagDevice) -> None:
    x = lag.tensor(torch.ones(N))
    block = torch.empty(2 * N, pin_memory=True)
    address = block.data_ptr()
    with lag.hold():
        wrapped = torch.from_numpy(block.numpy()[N:])
        assert wrapped.is_pinned()
        wrapped.copy_(x, non_blocking=True)
        assert lag.counters().d2h_async == 1
        del wrapped, block
        assert torch.empty(2 * N, pin_memory=True).data_ptr() == address  # and the copy still to come


def test_pinning_fails_beyond_the_limit(lag: LagDevice, since: Since) -> None:
    lag.limit_pinned(since.host_before.reserved_bytes + since.host_before.registered_bytes + 8192)
    pinned = torch.empty(N, pin_memory=True)
    with pytest.raises(RuntimeError, match="cannot pin 8192 bytes"):
        torch.empty(2 * N, pin_memory=True)
    del pinned


# ---- memory registered by somebody else


@pytest.fixture
def pages() -> torch.Tensor:
    """Four whole pages of ordinary memory, from their start: torch asks about a storage's first byte."""
    return torch.frombuffer(mmap.mmap(-1, 4 * mmap.PAGESIZE), dtype=torch.uint8)


def test_registered_memory_is_pinned_and_written_late(lag: LagDevice, since: Since, pages: torch.Tensor) -> None:
    x = lag.tensor(torch.ones(100, dtype=torch.uint8))
    lag.lagdev.host_register(pages.data_ptr(), pages.numel())
    assert pages[50:].is_pinned()
    assert since.host().registered_bytes == pages.numel()
    with lag.hold() as latch:
        pages[50:150].copy_(x, non_blocking=True)
        assert latch.pending
        assert pages.sum() == 0
    lag.synchronize()
    assert pages.sum() == 100
    lag.lagdev.host_unregister(pages.data_ptr())
    assert not pages.is_pinned()
    assert lag.counters().busy_unregisters == 0


def test_registration_works_by_page(lag: LagDevice, pages: torch.Tensor) -> None:
    lag.lagdev.host_register(pages.data_ptr(), 100)
    with pytest.raises(RuntimeError, match="already registered"):
        lag.lagdev.host_register(pages.data_ptr() + 200, 100)
    lag.lagdev.host_unregister(pages.data_ptr())
    with pytest.raises(RuntimeError, match="not registered"):
        lag.lagdev.host_unregister(pages.data_ptr())


def test_unregistering_under_a_copy_waits_for_it_and_is_seen(lag: LagDevice, pages: torch.Tensor) -> None:
    x = lag.tensor(torch.ones(100, dtype=torch.uint8))
    lag.lagdev.host_register(pages.data_ptr(), pages.numel())
    latch = lag.hold()
    latch.open_on_wait()
    pages[:100].copy_(x, non_blocking=True)
    lag.lagdev.host_unregister(pages.data_ptr())
    assert not latch.pending
    assert lag.counters().busy_unregisters == 1
    assert pages.sum() == 100


def test_a_forked_child_does_not_inherit_pinned_memory(lag: LagDevice) -> None:
    pinned = torch.ones(N).pin_memory()
    with warnings.catch_warnings(action="ignore"):  # about forking with threads
        pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        ctypes.string_at(pinned.data_ptr(), 1)  # dies here
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV
