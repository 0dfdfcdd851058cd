"""Clause 1, never early: no array can be reached before every byte of it has landed.

A stream is held, the producer's write is queued behind the hold, and the call runs in a thread of its own: it must not
come back while the stream is held, and afterwards every element has to be the new one. The same is done with recipes
and with mutants that come back at once, to see that the test would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device
from hostward._devices import backend_for
from support.values import fresh
from support.watch import Outcome, behind
from support.ways import WAYS, Way, every_way, leaves


def wrong(result: Any, value: float) -> int:
    """Count the elements that are not the producer's."""
    accepted = [value, -value, complex(value, -value), float(np.float16(value)), np.float32(value).view(np.int32)]
    return sum(int((~np.isin(leaf.astype(np.complex128), accepted)).sum()) for leaf in leaves(result))


def held_call(device: Device, x: torch.Tensor, call: Callable[[], Any], value: int) -> Outcome:
    """Queue the write and the call behind a hold of the current stream."""
    with device.hold() as latch:
        x.fill_(value)
        outcome = behind(latch, call)
    device.synchronize()
    return outcome


@every_way
def test_a_call_waits_for_its_bytes(device: Device, way: Way) -> None:
    x, value = way.base(device), next(fresh) % 250 + 1
    call = way.prepared(x)
    with way.setting(device):
        call()  # what is made once (ring, copy stream, shortcut) is made, and zeros have been read
        result = held_call(device, x, call, value).got()
    assert wrong(result, value) == 0


@every_way
def test_the_first_call_of_a_process_waits_too(device: Device, monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    for place in ("_memory._ring._rings", "_engine._direct._granules", "_single._known"):
        monkeypatch.setattr(f"hostward.{place}", {})
    x, value = way.base(device), next(fresh) % 250 + 1
    with way.setting(device):
        result = held_call(device, x, way.prepared(x), value).got()
    assert wrong(result, value) == 0


def test_nothing_can_be_reached_while_the_call_waits(device: Device) -> None:
    """Not even through out=: whatever stands there is the caller's, and no claim; the result itself is not there."""
    x = device.tensor(torch.zeros(512, 256))
    out = np.full((512, 256), -1, np.float32)
    with device.hold() as latch:
        x.fill_(7)
        outcome = behind(latch, lambda: hw.to_numpy(x, out=out))
    assert outcome.got() is out
    assert (out == 7).all()


def test_a_failed_call_gives_no_array(device: Device) -> None:
    device.require("failures")
    x = device.tensor(torch.ones(512, 256))
    for late in (False, True):
        device.fail_d2h(1, late=late)
        with pytest.raises(hw.errors.TransferError):
            hw.to_numpy([x, x[1:]])
        device.clear_faults()


# ---- the test can fail

RECIPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "non_blocking": lambda x: x.to("cpu", non_blocking=True).numpy(),
    "pinned copy": lambda x: torch.empty(x.shape, pin_memory=True).copy_(x, non_blocking=True).numpy(),
    "tree": lambda x: {"a": x.to("cpu", non_blocking=True).numpy(), "n": 1},
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_usual_recipes_come_back_early_and_wrong(device: Device, recipe: Callable[[torch.Tensor], Any]) -> None:
    x, value = WAYS["large"].base(device), next(fresh)
    recipe(x)  # torch has a pinned block to hand out again

    def read() -> Any:
        return [np.array(leaf) for leaf in leaves(recipe(x)) if leaf.ndim]

    outcome = held_call(device, x, read, value)
    assert outcome.error is None
    with pytest.raises(AssertionError, match="while its stream was held"):
        outcome.got()
    assert wrong(outcome.value, value) == x.numel()


class Fired:
    """An event that says too early that it has fired."""

    def query(self) -> bool:
        return True


@pytest.mark.parametrize("name", ["tiny", "tiny, pinned", "large", "large, pinned", "transposed", "a tree", "out="])
def test_an_event_that_fires_too_early_is_noticed(device: Device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    way = WAYS[name]
    x, value = way.base(device), next(fresh)
    call = way.prepared(x)
    call()
    backend = backend_for(device.type)
    copy_direct, wait = backend.copy_direct, backend.wait

    def copy_and_lie(*args: Any) -> Fired:
        copy_direct(*args)
        return Fired()

    # The producer's event stays an event; the one behind the copies lies.
    record, recorded = backend.record, []

    def first_is_real(index: int) -> Any:
        recorded.append(index)
        return record(index) if len(recorded) == 1 else Fired()

    monkeypatch.setitem(vars(backend), "copy_direct", copy_and_lie)
    monkeypatch.setitem(vars(backend), "record", first_is_real)
    monkeypatch.setitem(vars(backend), "wait", wait)
    outcome = held_call(device, x, call, value)
    assert outcome.error is None
    with pytest.raises(AssertionError, match="while its stream was held"):
        outcome.got()
