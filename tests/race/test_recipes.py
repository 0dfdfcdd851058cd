"""Recipes that are wrong, and are seen to be wrong: the proof that our race tests can fail.

Each is what people write with plain torch to get data off a device without waiting. A stream is
held by a latch, so that what usually goes well goes wrong for certain, and not one value may be
right: reading a race is no matter of luck here. If a device stops showing one of these, tests that
rely on it have lost their teeth, and this file fails.

=========================  ===  ====  ==========================================================
recipe                     lag  cuda  what is wrong
=========================  ===  ====  ==========================================================
read_at_once               yes  yes   a non-blocking result is read before the copy has landed
side_stream_without_wait   yes  yes   the copy's stream never waited for the producer's
to_on_a_side_stream        yes  yes   the same with ``.to()``, which looks as if it waited
source_dropped             yes  yes   the source's memory is reused before the copy has read it
event_before_the_copy      yes  yes   the event says nothing about what is queued after it
event_of_another_device    yes  yes   nor about other devices (needs two)
buffer_reused              yes  yes   a view of a staging buffer is read before the next landing
conjugated, negated        yes  yes   torch fixes the values up on the host before they land
source_overwritten         yes  yes   the producer goes on writing while a side stream reads
dict_saved_at_once         yes  yes   the first, in the clothes of a checkpoint
wait_before_record         yes  yes   waiting for an event that is not recorded yet does nothing
upload_of_lent_memory      yes  yes   memory is filled anew before an upload has read it
=========================  ===  ====  ==========================================================
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from device.frame import Device

N = 1 << 20

# Values that occur nowhere else: recycled memory is full of those of earlier tests.
fresh = itertools.count(1001)


def fresh_tensor(device: Device, index: int = 0) -> torch.Tensor:
    return device.tensor(torch.full((N,), float(next(fresh))), index)


def pinned(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((N,), -1, dtype=dtype).pin_memory()


@dataclass(frozen=True)
class Outcome:
    """What a recipe got, what it should have got, and whether its stream was held meanwhile."""

    got: torch.Tensor
    right: torch.Tensor | float
    held: bool


@dataclass(frozen=True)
class Twin:
    run: Callable[[Device], Outcome]
    lag: bool
    cuda: bool
    needs: list[str] = field(default_factory=list)


TWINS: dict[str, Twin] = {}


def twin(*, lag: bool, cuda: bool, needs: tuple[str, ...] = ()) -> Callable[..., Callable[[Device], Outcome]]:
    """Enter a recipe into the table; `lag` and `cuda` say where it must be wrong."""

    def enter(run: Callable[[Device], Outcome]) -> Callable[[Device], Outcome]:
        TWINS[run.__name__] = Twin(run, lag, cuda, list(needs))
        return run

    return enter


# ---- read too early


@twin(lag=True, cuda=True)
def read_at_once(device: Device) -> Outcome:
    x = fresh_tensor(device)
    value = next(fresh)
    with device.hold() as latch:
        x.fill_(value)
        got = x.to("cpu", non_blocking=True).numpy().copy()
        return Outcome(torch.from_numpy(got), value, latch.pending)


@twin(lag=True, cuda=True)
def side_stream_without_wait(device: Device) -> Outcome:
    x, host, side = fresh_tensor(device), pinned(), device.stream()
    value = next(fresh)
    with device.hold() as latch:
        x.fill_(value)
        with side:
            host.copy_(x, non_blocking=True)
        side.synchronize()
        return Outcome(host.clone(), value, latch.pending)


@twin(lag=True, cuda=True)
def to_on_a_side_stream(device: Device) -> Outcome:
    x, side = fresh_tensor(device), device.stream()
    value = next(fresh)
    with device.hold() as latch:
        x.fill_(value)
        with side:
            host = x.to("cpu", non_blocking=True)
        side.synchronize()
        return Outcome(host.clone(), value, latch.pending)


@twin(lag=True, cuda=True)
def event_before_the_copy(device: Device) -> Outcome:
    x, host = fresh_tensor(device), pinned()
    value = next(fresh)
    x.fill_(value)
    event = device.event()
    with device.hold() as latch:
        host.copy_(x, non_blocking=True)
        event.synchronize()
        return Outcome(host.clone(), value, latch.pending)


@twin(lag=True, cuda=True, needs=("two_devices",))
def event_of_another_device(device: Device) -> Outcome:
    value = next(fresh)
    x, host = device.tensor(torch.full((N,), float(value)), 1), pinned()
    with device.hold(1) as latch:
        host.copy_(x, non_blocking=True)
        device.event(device.current_stream(0)).synchronize()
        return Outcome(host.clone(), value, latch.pending)


@twin(lag=True, cuda=True)
def buffer_reused(device: Device) -> Outcome:
    x, staging = fresh_tensor(device), pinned()
    staging.copy_(x, non_blocking=True)
    device.event().synchronize()
    view = staging.numpy()  # right so far, and kept
    value = next(fresh)
    with device.hold() as latch:
        x.fill_(value)
        staging.copy_(x, non_blocking=True)
        return Outcome(torch.from_numpy(view.copy()), value, latch.pending)


@twin(lag=True, cuda=True)
def dict_saved_at_once(device: Device) -> Outcome:
    state = {f"layer{i}": fresh_tensor(device) for i in range(3)}
    value = next(fresh)
    with device.hold() as latch:
        for parameter in state.values():
            parameter.fill_(value)
        file = io.BytesIO()
        torch.save({name: x.detach().to("cpu", non_blocking=True) for name, x in state.items()}, file)
        held = latch.pending
    file.seek(0)
    return Outcome(torch.cat(list(torch.load(file).values())), value, held)


@twin(lag=True, cuda=True)
def wait_before_record(device: Device) -> Outcome:
    x, host, side = fresh_tensor(device), pinned(), device.stream()
    event = torch.Event(device.torch_device())
    value = next(fresh)
    with device.hold() as latch:
        side.wait_event(event)
        x.fill_(value)
        event.record(device.current_stream())
        with side:
            host.copy_(x, non_blocking=True)
        side.synchronize()
        return Outcome(host.clone(), value, latch.pending)


# ---- read in time, and torn or replaced


@twin(lag=True, cuda=True)
def source_dropped(device: Device) -> Outcome:
    value = next(fresh)
    x, host, side = device.tensor(torch.full((N,), float(value))), pinned(), device.stream()
    address = x.data_ptr()
    with device.hold(side) as latch:
        with side:
            host.copy_(x, non_blocking=True)
        del x
        others = [fresh_tensor(device)]
        while others[-1].data_ptr() != address and len(others) < 64:  # CUDA may have other holes to fill first
            others.append(fresh_tensor(device))
        assert others[-1].data_ptr() == address
        held = latch.pending
    side.synchronize()
    return Outcome(host, value, held)


@twin(lag=True, cuda=True)
def source_overwritten(device: Device) -> Outcome:
    value = next(fresh)
    x, host, side = device.tensor(torch.full((N,), float(value))), pinned(), device.stream()
    side.wait_stream(device.current_stream())
    with device.hold(side) as latch:
        with side:
            host.copy_(x, non_blocking=True)
        x.fill_(next(fresh))
        device.event().synchronize()
        held = latch.pending
    side.synchronize()
    return Outcome(host, value, held)


@twin(lag=True, cuda=True)
def conjugated(device: Device) -> Outcome:
    cpu = torch.full((N,), complex(next(fresh), next(fresh)), dtype=torch.complex64)
    x, host = device.tensor(cpu), pinned(torch.complex64)
    with device.hold() as latch:
        host.copy_(x.conj(), non_blocking=True)
        held = latch.pending
    device.synchronize()
    return Outcome(host, cpu.conj().resolve_conj(), held)


@twin(lag=True, cuda=True)
def negated(device: Device) -> Outcome:
    x, host = fresh_tensor(device), pinned()
    with device.hold() as latch:
        host.copy_(torch._neg_view(x), non_blocking=True)
        held = latch.pending
    device.synchronize()
    return Outcome(host, -x.cpu(), held)


@twin(lag=True, cuda=True)
def upload_of_lent_memory(device: Device) -> Outcome:
    lent = pinned()[N // 2 :]  # torch knows a pinned block by its start, so nobody guards this half
    array = lent.numpy()
    value = next(fresh)
    array[:] = value
    with device.hold() as latch:
        uploaded = torch.from_numpy(array).to(device.torch_device(), non_blocking=True)
        array[:] = next(fresh)  # the lender takes it back
        held = latch.pending
    return Outcome(uploaded.cpu(), value, held)


# ---- the tests


@pytest.mark.parametrize("name", TWINS)
def test_the_recipe_is_wrong_in_every_value(device: Device, name: str) -> None:
    recipe = TWINS[name]
    device.require(*recipe.needs)
    if not getattr(recipe, device.type):
        pytest.skip(f"{name} is not wrong on {device.type}")
    outcome = recipe.run(device)
    assert outcome.held
    assert not (outcome.got == outcome.right).any()


def test_the_right_way_is_right(device: Device) -> None:
    """What makes the recipes wrong is what they leave out, and not the way they copy."""
    x, host, side = fresh_tensor(device), pinned(), device.stream()
    value = next(fresh)
    with device.hold() as latch:
        x.fill_(value)
        side.wait_stream(device.current_stream())
        with side:
            host.copy_(x, non_blocking=True)
        landed = device.event(side)
        assert latch.pending
        assert not landed.query()
    landed.synchronize()  # and `x` lives until here
    assert (host == value).all()


def test_conjugated_on_the_device_it_is_right(device: Device) -> None:
    cpu = torch.full((N,), complex(next(fresh), next(fresh)), dtype=torch.complex64)
    x, host = device.tensor(cpu), pinned(torch.complex64)
    with device.hold():
        host.copy_(x.conj().resolve_conj(), non_blocking=True)
        landed = device.event()
    landed.synchronize()
    assert (host == cpu.conj()).all()


def test_the_table_of_this_page_is_complete() -> None:
    rows = [line.split("  ")[0] for line in (__doc__ or "").splitlines() if "  yes  " in line]
    assert {name for row in rows for name in row.split(", ")} == set(TWINS)
