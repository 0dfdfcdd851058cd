"""What really crosses the link and what torch's allocator really holds, seen by CUDA's own tools.

The profiler's records of copies come from CUPTI. The allocator counts twice: *requested* bytes are those that were
asked for, *allocated* bytes those of the blocks that were given. A block is rounded up to 512 B, and one above 1 MiB
keeps a rest of less than 1 MiB that is not worth splitting off; so the first are compared to a page, and the second
within that.

Source: c10/cuda/CUDACachingAllocator.cpp (``kMinBlockSize``, ``kSmallSize``, ``should_split``); PyTorch docs,
``torch.cuda.memory_stats``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import hostward as hw
from device.frame import Device
from support.values import as_array, assert_same
from support.watch import behind
from support.ways import Way, async_ways, every_way, small_temporaries

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*[Pp]rofiler:UserWarning", "ignore:Synchronization debug mode:UserWarning"
)

MIB = 1 << 20
PAGE = 4096


def copies_of(path: Path, call: Callable[[], Any]) -> list[tuple[str, int]]:
    """Return name and bytes of every copy to the host that a call makes, as CUPTI saw it."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    trace = path / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    return [
        (event["name"], event["args"]["bytes"])
        for event in events
        if event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"]
    ]


_sees: list[bool] = []  # whether the profiler records copies at all, once it has been tried


@pytest.fixture
def cupti(gpu: Device, tmp_path: Path) -> Path:
    """Give a folder for traces, where there are any."""
    if not _sees:
        x = torch.ones(1000, device="cuda")
        _sees.append(copies_of(tmp_path, lambda: x.cpu()) != [])
    if not _sees[0]:
        pytest.skip("the profiler records no copies here: CUPTI is missing or not allowed")
    return tmp_path


def explained(way: Way, call: Any) -> Any:
    name = "to_python" if way.call is hw.to_python else "to_numpy"
    return hw.explain(*call.args, call=name, **call.keywords)


@async_ways
def test_the_link_carries_exactly_what_explain_prints(gpu: Device, cupti: Path, way: Way) -> None:
    x = way.base(gpu)
    with way.setting(gpu):
        call = way.prepared(x)
        call()
        told = explained(way, call)
        seen = copies_of(cupti, call)
    assert sum(nbytes for _, nbytes in seen) == told.link_nbytes
    assert {name for name, _ in seen} == {"Memcpy DtoH (Device -> Pinned)"}


def test_the_profiler_would_notice_more_bytes_and_pageable_memory(gpu: Device, cupti: Path) -> None:
    x = torch.ones(500, 400, device="cuda")
    seen = copies_of(cupti, lambda: [x.cpu(), x[1:].cpu()])
    assert sum(nbytes for _, nbytes in seen) > hw.explain([x, x[1:]]).link_nbytes
    assert {name for name, _ in seen} == {"Memcpy DtoH (Device -> Pageable)"}


def peak_of(call: Callable[[], Any]) -> tuple[int, int]:
    """Return the most requested and allocated bytes at one moment, above what there was before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    call()
    after = torch.cuda.memory_stats()
    kinds = ("requested_bytes", "allocated_bytes")
    requested, allocated = (after[f"{kind}.all.peak"] - before[f"{kind}.all.current"] for kind in kinds)
    return requested, allocated


@every_way
def test_the_allocators_peak_is_what_explain_prints(gpu: Device, way: Way) -> None:
    x = way.base(gpu)
    with way.setting(gpu):
        call = way.prepared(x)
        call()
        told = explained(way, call)
        requested, allocated = peak_of(call)
    assert abs(requested - told.temporary_nbytes) < PAGE
    blocks = sum(leaf.temporary_nbytes > 0 for leaf in told.leaves)
    assert told.temporary_nbytes - PAGE <= allocated <= told.temporary_nbytes + blocks * MIB


def test_large_temporaries_stay_within_the_limit(gpu: Device) -> None:
    """300 MiB that need packing: more than the 256 MiB that a call may take."""
    x = torch.randint(0, 255, (300, MIB), dtype=torch.uint8, device="cuda")
    want = x.cpu()
    told = hw.explain(x.t())
    assert told.temporary_nbytes <= 256 * MIB
    got: list[Any] = []
    requested, allocated = peak_of(lambda: got.append(hw.to_numpy(x.t())))
    assert abs(requested - told.temporary_nbytes) < PAGE
    assert allocated <= 256 * MIB
    assert_same(got[0], as_array(want.t()))


def test_the_usual_temporary_is_noticed(gpu: Device) -> None:
    x = torch.ones(4096, 1024, device="cuda")
    requested, _ = peak_of(lambda: x[::2].t().cpu())
    assert requested > 4 * MIB


def test_a_nearly_full_gpu_is_served_in_pieces_and_never_runs_out(gpu: Device) -> None:
    x = torch.arange(100 * MIB // 4, dtype=torch.int32, device="cuda").view(4096, -1)
    want = as_array(x.cpu().t())
    hw.to_numpy(x[:64].t())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - 48 * MIB, dtype=torch.uint8, device="cuda")
    try:
        before = torch.cuda.memory_stats()
        told = hw.explain(x.t())
        got = hw.to_numpy(x.t())
        after = torch.cuda.memory_stats()
    finally:
        del hog
        torch.cuda.empty_cache()
    assert len(told.admitted.fallbacks) == 1
    for name in ("num_ooms", "num_alloc_retries"):
        assert after[name] == before[name]
    assert_same(got, want)


# ---- hidden synchronises


@async_ways
def test_no_call_synchronises(gpu: Device, way: Way) -> None:
    x = way.base(gpu)
    with way.setting(gpu):
        call = way.prepared(x)
        call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_synchronise_is_noticed(gpu: Device) -> None:
    x = torch.ones(10, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            x.cpu()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- the rows of "which calls really return early": the usual copies block or pack there, ours are right in all

ROWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]] = {
    "contiguous": (lambda x: x, {}),
    "transposed": (lambda x: x.t(), {}),
    "NHWC": (lambda x: x.view(-1, 4, 8, 16).permute(0, 2, 3, 1), {}),
    "cast of contiguous": (lambda x: x, {"dtype": "float16"}),
    "gaps in columns": (lambda x: x[:, :300], {}),
    "gaps in rows": (lambda x: x[::2], {}),
    "expanded": (lambda x: x[:1].expand(700, -1), {}),
    "gaps, transposed": (lambda x: x[::2].t(), {}),
    "NHWC, gaps": (lambda x: x.view(-1, 4, 8, 16).permute(0, 2, 3, 1)[:, :2], {}),
    "transposed, cast": (lambda x: x.t(), {"dtype": "float16"}),
    "NHWC, cast": (lambda x: x.view(-1, 4, 8, 16).permute(0, 2, 3, 1), {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize(("view", "options"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("memory", ["auto", "pinned"])
@pytest.mark.parametrize("order", ["C", "K"])
def test_every_row_is_right_behind_a_held_stream(gpu: Device, view: Any, options: Any, memory: str, order: str) -> None:
    cpu = (torch.arange(512 * 512) % 2003).float().view(512, 512)
    x, new = torch.zeros(512, 512, device="cuda"), gpu.tensor(cpu)
    hw.to_numpy(view(x), memory=memory, order=order, **options)
    with gpu.hold() as latch:
        x.copy_(new)
        outcome = behind(latch, lambda: hw.to_numpy(view(x), memory=memory, order=order, **options))
    dtype = getattr(torch, options.get("dtype", "float32"))
    want = as_array(view(cpu).to(dtype))
    got = outcome.got()
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "in pieces"])
def test_conjugated_and_negated_views_behind_a_held_stream(gpu: Device, pieces: bool) -> None:
    """The usual copies are wrong there even after a synchronise: the host-side fix-up runs before the bytes land."""
    # No zeros: which sign a resolved one has is the device's.
    cpu = torch.view_as_complex((1 + torch.arange(600 * 400 * 2) % 2003).float().view(600, 400, 2))
    x, new = torch.zeros(600, 400, dtype=torch.complex64, device="cuda"), gpu.tensor(cpu)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda z: z.conj(),
        lambda z: z.mH,
        lambda z: z.conj().imag,
        lambda z: torch._neg_view(z.real),
        lambda z: z.conj()[::2].t(),
    ]
    for view in views:
        for options in ({}, {"memory": "pinned"}, {"order": "K"}):
            call = lambda view=view, options=options: hw.to_numpy(view(x), **options)  # noqa: E731
            call()
            x.zero_()
            with gpu.hold() as latch:
                x.copy_(new)
                if pieces:
                    with small_temporaries():
                        got = behind(latch, call).got()
                else:
                    got = behind(latch, call).got()
            want = as_array(view(cpu))
            assert got.tobytes() == want.tobytes()
    host = torch.zeros(600, 400, dtype=torch.complex64).pin_memory()
    with gpu.hold():
        x.copy_(new)
        host.copy_(x.conj(), non_blocking=True)
    torch.cuda.synchronize()
    assert not torch.equal(host, cpu.conj().resolve_conj())


def test_zero_tensors_are_refused(gpu: Device) -> None:
    """They have no memory at all, and look like tensors that the shortcut knows."""
    hw.to_numpy(torch.ones(3, device="cuda"))
    for tree in (torch._efficientzerotensor(3, device="cuda"), [torch._efficientzerotensor(3, device="cuda")]):
        with pytest.raises(hw.errors.LeafError, match="a tensor without memory of its own"):
            hw.to_numpy(tree)
