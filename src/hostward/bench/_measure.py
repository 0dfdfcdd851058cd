"""Timing: first calls, warm-up, then rounds in which every way takes one sample.

A sample starts with the device idle and ends when the call has returned a readable array. The result
is dropped after the clock was read, and that is timed apart: freeing a gigabyte of ordinary memory
takes a while, and counting it would only make the other ways look worse.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

Call = Callable[[], Any]

WARM_UP_ROUNDS = 2
FEWEST_ROUNDS = 5
MOST_ROUNDS = 30


@dataclass(slots=True)
class Samples:
    """What the clock said about one way, in seconds a call; `drop_s` stays empty where calls are batched."""

    samples_s: list[float] = field(default_factory=list)
    drop_s: list[float] = field(default_factory=list)


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Collect once, then keep the garbage collector out of the samples; restores what was set before."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def once(call: Call) -> tuple[float, Any]:
    """Time one call and return its result too."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def sample(call: Call, calls: int) -> tuple[float, float | None]:
    """Return seconds for a call, and for dropping its result (``None`` where `calls` > 1)."""
    if calls == 1:
        start = time.perf_counter()
        result = call()
        returned = time.perf_counter()
        del result
        return returned - start, time.perf_counter() - returned
    start = time.perf_counter()
    for _ in repeat(None, calls):
        result = call()
    took = time.perf_counter() - start
    del result
    return took / calls, None


def rounds_for(budget_s: float, round_s: float, *, quick: bool) -> int:
    """Return how many rounds fit into `budget_s`, never fewer than 5 nor more than 30."""
    if quick:
        return FEWEST_ROUNDS
    return max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(budget_s / max(round_s, 1e-9))))


def interleave(
    calls: Mapping[str, Call],
    synchronize: Callable[[], None],
    *,
    calls_per_sample: int,
    budget_s: float,
    quick: bool,
) -> dict[str, Samples]:
    """Take the samples of all ways, round by round.

    Each pair of rounds starts with another way and its second one runs backwards, so no way always
    follows the same neighbour. Warm-up rounds come first; the last of them says how long a round takes.
    """
    taken = {name: Samples() for name in calls}
    with quiet_gc():
        for _ in range(WARM_UP_ROUNDS):
            round_s = _round(calls, list(calls), synchronize, calls_per_sample, None)
        for number in range(rounds_for(budget_s, round_s, quick=quick)):
            _round(calls, turn(list(calls), number), synchronize, calls_per_sample, taken)
    return taken


def turn(names: list[str], number: int) -> list[str]:
    """Return the order of round `number`: one step further every two rounds, backwards in odd ones."""
    at = number // 2 % len(names)
    order = names[at:] + names[:at]
    return order[::-1] if number % 2 else order


def _round(
    calls: Mapping[str, Call],
    order: list[str],
    synchronize: Callable[[], None],
    calls_per_sample: int,
    taken: dict[str, Samples] | None,
) -> float:
    start = time.perf_counter()
    for name in order:
        synchronize()
        call_s, drop_s = sample(calls[name], calls_per_sample)
        if taken is not None:
            taken[name].samples_s.append(round(call_s, 9))
            if drop_s is not None:
                taken[name].drop_s.append(round(drop_s, 9))
    synchronize()
    return time.perf_counter() - start
