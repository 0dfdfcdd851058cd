"""Clause 5, bounded: temporaries and page-locked memory stay within limits that are checked before anything is made."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import hostward as hw
from device.frame import Device
from hostward._devices import backend_for
from hostward._engine import _direct
from hostward._memory import _ring
from hostward._types import Capacity
from support.values import as_array, assert_same
from support.watch import in_threads
from support.ways import WAYS, Way, every_way, small_ring, small_temporaries

MIB = 1 << 20
PAGE = 4096


def peak_of(device: Device, call: Callable[[], Any]) -> tuple[Any, int]:
    """Return a call's result, and the most device bytes that it had taken at one moment."""
    before = device.memory().allocated_bytes
    device.reset_counters()
    result = call()
    return result, device.memory().peak_bytes - before


def forbidden(device: Device) -> int:
    """How often torch's allocator ran out, or stalled the device and dropped its cache."""
    counters = device.counters()
    return counters.ooms + counters.alloc_retries + counters.empty_cache


# ---- device temporaries


@every_way
def test_the_peak_on_the_device_is_what_explain_prints(device: Device, way: Way) -> None:
    device.require("memory")
    x = way.base(device)
    with way.setting(device):
        call = way.prepared(x)
        call()
        name = "to_python" if way.call is hw.to_python else "to_numpy"
        options = dict(way.options)
        if way.out:
            options["out"] = call.keywords["out"]
        told = hw.explain(call.args[0], call=name, **options).temporary_nbytes
        _, peak = peak_of(device, call)
    assert abs(peak - told) < PAGE


PASSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "one": lambda x: x.t(),
    "two in pieces": lambda x: [x.t(), x[1:].t()],
    "whole, then pieces": lambda x: [x[:8].t(), x.t()],
    "pieces, then whole": lambda x: [x.t(), x[:8].t()],
    "many": lambda x: [x[i:].t() for i in range(6)],
    "pieces and none": lambda x: {"a": x, "b": x[:, ::2].t(), "c": x[:40]},
}


@pytest.mark.parametrize("take", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("limit", [8 << 10, 20 << 10, 100 << 10])
@pytest.mark.parametrize("memory", ["auto", "pinned"])
def test_temporaries_stay_within_the_limit(device: Device, take: Any, limit: int, memory: str) -> None:
    cpu = torch.arange(128 * 256.0).reshape(128, 256)
    x = device.tensor(cpu)
    with small_temporaries(limit, 4 << 10):
        plan = hw.explain(take(x), memory=memory)
        assert 0 < plan.temporary_nbytes <= limit
        if device.has("memory"):
            result, peak = peak_of(device, partial(hw.to_numpy, take(x), memory=memory))
            assert abs(peak - plan.temporary_nbytes) < PAGE
        else:
            result = hw.to_numpy(take(x), memory=memory)
    same_tree(result, take(cpu))


def same_tree(got: Any, want: Any) -> None:
    got, want = (torch.utils._pytree.tree_leaves(tree) for tree in (got, want))
    for one, other in zip(got, want, strict=True):
        assert_same(one, as_array(other))


def test_the_usual_temporary_is_noticed(device: Device) -> None:
    device.require("memory")
    x = device.tensor(torch.zeros(128, 256))
    _, peak = peak_of(device, lambda: x[::2].t().contiguous().cpu())
    assert peak >= 64 * 256 * 4 > 8 << 10


def test_the_default_limit_is_the_documented_one() -> None:
    assert Capacity().temporary_limit == 256 * MIB


# ---- a device with little memory


def leave_free(device: Device, nbytes: int) -> None:
    device.synchronize()
    torch.accelerator.empty_cache()  # what is free is free in one piece
    device.limit_memory(device.memory().reserved_bytes + nbytes)
    device.reset_counters()


def test_a_nearly_full_device_is_served_in_pieces(device: Device) -> None:
    device.require("limits", "counters")
    cpu = torch.arange(3.0 * MIB / 4).reshape(768, -1)  # 3 MiB
    x = device.tensor(cpu)
    leave_free(device, 3 * MIB // 2)
    plan = hw.explain(x.t())
    assert plan.admitted.fallbacks == (
        f"move 0: packed in pieces of 1,572,864 bytes, because a temporary of 3,145,728 bytes passes what is left of "
        f"1,572,864 bytes for temporaries on {device.type}:0",
    )
    assert f"  fallback: {plan.admitted.fallbacks[0]}" in str(plan).splitlines()
    assert_same(hw.to_numpy(x.t()), as_array(cpu.t()))
    assert forbidden(device) == 0


def test_several_leaves_share_what_is_free(device: Device) -> None:
    device.require("limits", "counters")
    cpu = torch.arange(2.0 * MIB / 4).reshape(512, -1)  # 2 MiB
    x = device.tensor(cpu)
    for free in (1, 2.5, 3, 3.5, 4.5):
        leave_free(device, int(free * MIB))
        same_tree(hw.to_numpy([x.t(), x[:256].t(), x[1:].t()]), [cpu.t(), cpu[:256].t(), cpu[1:].t()])
        assert forbidden(device) == 0


def test_a_full_device_is_an_error_before_anything_is_made(device: Device) -> None:
    device.require("limits", "counters")
    x = device.tensor(torch.zeros(768, 1024))
    leave_free(device, MIB // 2)
    with pytest.raises(hw.errors.DeviceMemoryError) as caught:
        hw.to_numpy({"x": [1, x.t()]})
    assert str(caught.value) == (
        f"to_numpy(): no room for a temporary on the device (at tree['x'][1]): got 524,288 free bytes on "
        f"{device.type}:0, needed 1,048,576 bytes to transpose piece by piece\n"
        "  do: free some device memory, or ask for order='K' and no dtype=, which moves dense leaves as they lie"
    )
    assert device.counters().d2h == 0
    assert device.counters().allocations == 0
    assert forbidden(device) == 0
    assert hw.to_numpy(x.t(), order="K").shape == (1024, 768)


def test_small_temporaries_that_do_not_fit_are_the_same_error(device: Device) -> None:
    """Below a MiB nobody asks first, because asking costs more than the copy."""
    device.require("limits")
    x = device.tensor(torch.zeros(300, 200))
    leave_free(device, 0)
    for tree in (x.t(), [x.t(), x]):
        with pytest.raises(hw.errors.DeviceMemoryError, match="no room for a temporary on the device"):
            hw.to_numpy(tree)
    assert hw.to_numpy(x).shape == (300, 200)


# ---- host memory


def test_a_result_that_cannot_fit_is_an_error_with_the_sizes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = device.tensor(torch.zeros(1024, 1024))
    if device.has("counters"):
        device.reset_counters()
    huge = x.expand(1 << 20, 1024, 1024)
    monkeypatch.setattr("hostward._call.available", lambda: 5_000_000)
    with pytest.raises(hw.errors.HostMemoryError) as caught:
        hw.to_numpy({"small": x[0], "huge": huge})
    # Beside the results, the expanded leaf's base needs a place to land in.
    assert str(caught.value).startswith(
        "to_numpy(): the result does not fit into host memory (at tree['huge']): got 5,000,000 free bytes, needed "
    )
    assert "4,398,046,511,104 of them for shape (1048576, 1024, 1024) of float32" in str(caught.value)
    if device.has("counters"):
        assert device.counters().d2h == 0
    monkeypatch.undo()
    a = hw.to_numpy(huge, order="K")
    assert a.shape == huge.shape
    assert a.strides[0] == 0


def test_free_host_memory_is_really_asked(device: Device) -> None:
    """No machine has the 16 TiB that this result needs."""
    with pytest.raises(hw.errors.HostMemoryError):
        hw.to_numpy(device.tensor(torch.zeros(1 << 10)).expand(1 << 32, 1 << 10))


# ---- page-locked memory


class PinnedBytes:
    """Counts a backend's pinned bytes: alive now, and the most at one moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
        backend = backend_for(device.type)
        self.make = backend.pinned
        self.lock = threading.Lock()
        self.alive = self.most = 0
        self.sizes: list[int] = []
        monkeypatch.setitem(vars(backend), "pinned", self)
        for place in ("_memory._ring._rings", "_engine._direct._granules"):
            monkeypatch.setattr(f"hostward.{place}", {})

    def __call__(self, nbytes: int) -> torch.Tensor:
        tensor = self.make(nbytes)
        self.sizes.append(nbytes)
        self.add(nbytes)
        weakref.finalize(tensor.untyped_storage(), self.add, -nbytes)
        return tensor

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.alive += nbytes
            self.most = max(self.most, self.alive)


def test_the_documented_bound_is_that_of_the_chunks() -> None:
    ring = _ring.SMALL[0] * _ring.SMALL[1] + _ring.LARGE[0] * _ring.LARGE[1]
    assert ring + _direct._GRANULE_NBYTES <= 101 * MIB


def test_the_ring_never_grows_beyond_its_chunks(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_ring((512, 2), (2048, 2)):
        monkeypatch.setattr(_direct, "_GRANULE_NBYTES", 0)
        pinned = PinnedBytes(monkeypatch, device)
        base = torch.arange(6000.0).reshape(60, 100)
        x = device.tensor(base)

        def calls() -> None:
            for step in range(12):
                same_tree(hw.to_numpy([x.t(), x[step:]]), [base.t(), base[step:]])
                same_tree(hw.to_numpy([x[:1, :60], x[1, :3]]), [base[:1, :60], base[1, :3]])

        in_threads([calls] * 4)
        assert 0 < pinned.most <= 2 * 512 + 2 * 2048


def test_an_unbounded_ring_is_noticed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_ring((512, 2), (2048, 2)):
        pinned = PinnedBytes(monkeypatch, device)
        monkeypatch.setattr(_ring.Ring, "take", _take_always_another)
        hw.to_numpy([device.tensor(torch.zeros(60, 100)), 1])
        assert pinned.most > 2 * 512 + 2 * 2048


def _take_always_another(self: Any, nbytes: int, owner: object) -> _ring.Chunk:
    chunk = _ring.Chunk(nbytes, owner, users=9)
    chunk.tensor = _ring.pinned(nbytes, self.backend).tensor
    return chunk


@pytest.mark.parametrize("name", ["large, pinned", "transposed, pinned", "overlapping, pinned", "narrowed, pinned"])
def test_pinned_results_take_what_they_are_and_the_ring(
    device: Device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pinned = PinnedBytes(monkeypatch, device)
    way = WAYS[name]
    results = torch.utils._pytree.tree_leaves(way.prepared(way.base(device))())
    own = sum(a.nbytes for a in results)
    assert own <= pinned.alive <= own + 4 * _ring.SMALL[0]
    chunks = [nbytes for nbytes in pinned.sizes if nbytes == _ring.SMALL[0]]
    assert sorted(pinned.sizes) == sorted([*chunks, *(a.nbytes for a in results)])  # no scratch among them
    del results
    assert pinned.alive <= 4 * _ring.SMALL[0]


def test_pinned_results_of_a_pinned_expansion(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = PinnedBytes(monkeypatch, device)
    cpu = torch.arange(70_000.0)
    a = hw.to_numpy([device.tensor(cpu).expand(3, -1)], memory="pinned")[0]
    assert (a == cpu.numpy()).all()
    assert sorted(pinned.sizes) == sorted([a.nbytes, _ring.SMALL[0]])


def test_where_nothing_can_be_pinned_calls_are_slower_and_right(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(backend_for(device.type), "pinned", refuse)
    for place in ("_memory._ring._rings", "_engine._direct._granules"):
        monkeypatch.setattr(f"hostward.{place}", {})
    cpu = torch.arange(60_000.0).reshape(200, 300)
    x = device.tensor(cpu)
    for memory in ("auto", "pinned"):
        same_tree(hw.to_numpy([x, x.t(), x[::2].t()], memory=memory), [cpu, cpu.t(), cpu[::2].t()])
        same_tree(hw.to_numpy(x[0], memory=memory), cpu[0])
        same_tree(hw.to_numpy(x, memory=memory), cpu)


def test_pinned_memory_that_runs_out_for_real(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    device.require("limits")
    for place in ("_memory._ring._rings", "_engine._direct._granules"):
        monkeypatch.setattr(f"hostward.{place}", {})
    cpu = torch.arange(60_000.0).reshape(200, 300)
    x = device.tensor(cpu)
    device.limit_pinned(device.host_memory().reserved_bytes)
    for memory in ("auto", "pinned"):
        a = hw.to_numpy([x, x.t()], memory=memory)
        same_tree(a, [cpu, cpu.t()])
        assert not torch.from_numpy(a[0]).is_pinned()


def test_results_of_a_loop_do_not_pile_up(device: Device) -> None:
    """A thousand sizes (trap 14), one after the other: nothing stays but the ring."""
    device.require("memory")
    x = device.tensor(torch.zeros(40_000))
    hw.to_numpy([x, x[1:]])
    before, host = device.memory().live_blocks, device.host_memory().reserved_bytes
    for n in range(1, 1000):
        hw.to_numpy([x[: 37 * n], x[n:], x[: 2 * n].view(2, -1).t()])
    assert device.memory().live_blocks <= before
    assert device.host_memory().reserved_bytes <= host + 2 * _ring.SMALL[0] * _ring.SMALL[1]
