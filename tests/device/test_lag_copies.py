"""Copies of the test device: as late as CUDA's, blocking where CUDA's block, wrong where CUDA's are wrong.

The rows of "returns early" and "hidden block" are those measured on a GPU; that they come out the
same here is what makes the test device worth believing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from device.lag import LagDevice

Move = Callable[[torch.Tensor], torch.Tensor]

DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.complex32, torch.complex64, torch.complex128),
]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every byte pattern may occur, but for bool, which has two."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return (torch.arange(count) % 3 == 0).reshape(shape)
    nbytes = count * dtype.itemsize
    return ((torch.arange(nbytes) * 37 + 11) % 251).to(torch.uint8).view(dtype).reshape(shape)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def async_to_host(x: torch.Tensor) -> torch.Tensor:
    return x.to("cpu", non_blocking=True)


# ---- which copies return early


def nhwc(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(2, 4, 8, 16).to(memory_format=torch.channels_last)


def async_f16(x: torch.Tensor) -> torch.Tensor:
    return x.to("cpu", torch.float16, non_blocking=True)


RETURNS_EARLY: dict[str, tuple[Move, Move]] = {
    "contiguous": (lambda x: x, async_to_host),
    "transposed": (lambda x: x.t(), async_to_host),
    "channels last": (nhwc, async_to_host),
    "cast of contiguous": (lambda x: x, async_f16),
    "gaps in columns": (lambda x: x[:, :20], async_to_host),
    "gaps in rows": (lambda x: x[::2], async_to_host),
    "expanded": (lambda x: x[:1].expand(50, 32), async_to_host),
}
HIDDEN_BLOCK: dict[str, tuple[Move, Move]] = {
    "gaps, transposed": (lambda x: x[::2].t(), async_to_host),
    "channels last, gaps": (lambda x: nhwc(x)[:, :2], async_to_host),
    "transposed, cast": (lambda x: x.t(), async_f16),
    "channels last, cast": (nhwc, async_f16),
    "into pageable memory": (lambda x: x, lambda x: torch.empty(x.shape).copy_(x, non_blocking=True)),
    "blocking into pinned": (lambda x: x, lambda x: torch.empty(x.shape, pin_memory=True).copy_(x)),
}


@pytest.mark.parametrize(("view", "move"), [pytest.param(*row, id=name) for name, row in RETURNS_EARLY.items()])
def test_these_copies_return_early(lag: LagDevice, view: Move, move: Move) -> None:
    cpu = torch.arange(32 * 32, dtype=torch.float32).reshape(32, 32)
    x = view(lag.tensor(cpu))
    with lag.hold() as latch:
        host = move(x)
        assert latch.pending
        assert host.is_pinned()
    lag.synchronize()
    assert torch.equal(host, view(cpu).to(host.dtype))
    assert host.stride() == torch.empty_like(view(cpu)).stride()


@pytest.mark.parametrize(("view", "move"), [pytest.param(*row, id=name) for name, row in HIDDEN_BLOCK.items()])
def test_these_copies_wait_for_the_stream(lag: LagDevice, view: Move, move: Move) -> None:
    cpu = torch.arange(32 * 32, dtype=torch.float32).reshape(32, 32)
    x = view(lag.tensor(cpu))
    latch = lag.hold()
    latch.open_on_wait()
    host = move(x)
    assert not latch.pending
    assert torch.equal(host, view(cpu).to(host.dtype))
    assert lag.counters().d2h_blocking >= 1


# ---- values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2]], ids=["dense", "t", "gaps"])
def test_every_dtype_arrives_byte_for_byte(lag: LagDevice, dtype: torch.dtype, view: Move) -> None:
    cpu = values(dtype, 6, 8)
    on_device = view(lag.tensor(cpu))
    assert torch.equal(as_bytes(on_device.cpu()), as_bytes(view(cpu)))
    assert torch.equal(as_bytes(on_device.clone().cpu()), as_bytes(view(cpu)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts_on_the_device_are_late_and_right(lag: LagDevice, dtype: torch.dtype) -> None:
    cpu = torch.tensor([0.0, 1.0, 2.0, 4.0])
    x = lag.tensor(torch.zeros(4))
    source = lag.tensor(cpu)
    with lag.hold():
        x.copy_(source)
        temporary = torch.empty(4, dtype=dtype, device="lag").copy_(x)
        host = async_to_host(temporary)
    lag.synchronize()
    assert torch.equal(as_bytes(host), as_bytes(cpu.to(dtype)))


DEVICE_COPIES: dict[str, Move] = {
    "permuted": lambda z: z.permute(1, 0),
    "gaps": lambda z: z[:, ::2],
    "expanded": lambda z: z[:1].expand(5, 8),
    "conjugated": lambda z: z.conj(),
    "negated": lambda z: z.conj().imag,
    "conjugated, permuted": lambda z: z.conj().t(),
}


@pytest.mark.parametrize("view", [pytest.param(view, id=name) for name, view in DEVICE_COPIES.items()])
@pytest.mark.parametrize("cast", [False, True], ids=["same dtype", "cast"])
def test_packing_on_the_device_is_late_and_right(lag: LagDevice, view: Move, cast: bool) -> None:
    cpu = torch.complex(torch.arange(48.0), -torch.arange(48.0)).reshape(6, 8)
    z = lag.tensor(torch.zeros_like(cpu))
    source = lag.tensor(cpu)
    expected = view(cpu).resolve_conj().resolve_neg()
    if cast:
        expected = expected.to(torch.complex128 if expected.is_complex() else torch.float64)
    with lag.hold():
        z.copy_(source)  # the producer, late
        packed = torch.empty(expected.shape, dtype=expected.dtype, device="lag").copy_(view(z))
        host = async_to_host(packed)
        assert not torch.equal(host, expected)
    lag.synchronize()
    assert torch.equal(host, expected)
    assert lag.counters().fallbacks == 0


def test_copies_between_devices_wait_for_both_current_streams(lag: LagDevice) -> None:
    x = lag.tensor(torch.ones(10), 0)
    y = lag.tensor(torch.zeros(10), 1)
    with lag.hold(1):
        y.copy_(x)
        after = lag.event(lag.current_stream(0))
        assert not after.query()  # the source's stream waits for the target's too
    assert (y.cpu() == 1).all()
    assert (lag.counters(0).d2d, lag.counters(1).d2d) == (1, 0)


def test_uploads_are_late_from_pinned_memory_and_block_from_ordinary(lag: LagDevice) -> None:
    pinned = torch.ones(10).pin_memory()
    x = lag.tensor(torch.zeros(10))
    lag.reset_counters()
    with lag.hold():
        x.copy_(pinned, non_blocking=True)
        pinned.fill_(2)  # the mistake: the upload has not read it yet
    assert x.cpu().tolist() == [2.0] * 10
    latch = lag.hold()
    latch.open_on_wait()
    x.copy_(torch.full((10,), 3.0), non_blocking=True)
    assert not latch.pending
    counted = lag.counters()
    assert (counted.h2d_async, counted.h2d_async_bytes) == (1, 40)
    assert (counted.h2d_blocking, counted.h2d_blocking_bytes) == (1, 40)


# ---- the fix-up on the host


def test_a_conjugated_source_is_fixed_up_before_the_copy_lands(lag: LagDevice) -> None:
    cpu = torch.tensor([1 + 2j, 3 - 4j])
    x = lag.tensor(cpu)
    host = torch.zeros(2, dtype=cpu.dtype).pin_memory()
    with lag.hold():
        host.copy_(x.conj(), non_blocking=True)
    lag.synchronize()
    assert torch.equal(host, cpu)  # landed after the fix-up: not conjugated
    assert torch.equal(x.conj().cpu(), cpu.conj())  # blocking: right


# ---- what is counted


def test_copies_to_the_host_are_counted_by_number_bytes_and_kind(lag: LagDevice) -> None:
    x = lag.tensor(torch.zeros(10), 1)
    lag.reset_counters()
    async_to_host(x)
    async_to_host(x[:5])
    x.cpu()
    x[3].item()
    x.clone()
    counted = lag.counters(1)
    assert (counted.d2h_async, counted.d2h_async_bytes) == (2, 60)
    assert (counted.d2h_blocking, counted.d2h_blocking_bytes) == (2, 44)
    assert (counted.d2h, counted.d2h_bytes) == (4, 104)
    assert (counted.d2d, counted.d2d_bytes) == (1, 40)
    assert lag.counters(0).d2h == 0
    assert (lag.counters(1) - counted).d2h == 0


def test_a_detour_through_a_temporary_is_one_copy_over_the_link(lag: LagDevice) -> None:
    x = lag.tensor(torch.zeros(10, 10))
    lag.reset_counters()
    async_to_host(x[:, :5])
    counted = lag.counters()
    assert (counted.d2h_async, counted.d2h_async_bytes, counted.d2d_bytes) == (1, 200, 200)


def test_copies_of_nothing_move_nothing_and_are_seen(lag: LagDevice) -> None:
    x = torch.empty(0, 3, device="lag")
    assert async_to_host(x).shape == (0, 3)
    counted = lag.counters()
    assert (counted.empty_copies, counted.d2h) == (1, 0)
