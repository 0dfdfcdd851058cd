"""One small tensor: what a call costs when there is next to nothing to move."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hostward.bench._case import Case, Data, Needs, Role, Way

if TYPE_CHECKING:
    import torch

WAYS = (
    Way('to_numpy(x, memory="pinned")', 'hostward.to_numpy(x, memory="pinned")', Role.PRIMARY),
    Way("to_numpy(x)", "hostward.to_numpy(x)", Role.AUTO),
    Way(".cpu().numpy()", "x.cpu().numpy()"),
)


def build(count: int = 1024) -> Case:
    """Return the case for `count` float32 values."""
    return Case(
        id="one-4KiB",
        what="4 KiB float32, contiguous",
        nbytes=4 * count,
        setup=lambda device: _setup(device, count),
        ways=WAYS,
        needs=Needs(against={".cpu().numpy()": 0.75}),
        calls_per_sample=200,
        budget_s=3.0,
        note="4 KiB: a sample is the mean of 200 calls in a row, each result dropped when the next one replaces it; "
        "the call is what it takes, so GB/s says nothing here.",
    )


def _setup(device: torch.device, count: int) -> Data:
    from hostward._torch import torch

    reference = np.random.default_rng(5).integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    return Data({"x": torch.from_numpy(reference).to(device, copy=True)}, reference)
