"""A narrowing cast: on the device it halves the bytes on the link, after the copy it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hostward.bench._case import Case, Data, Needs, Role, Way

if TYPE_CHECKING:
    import torch

WAYS = (
    Way(
        'to_numpy(x, dtype="float16", memory="pinned")',
        'hostward.to_numpy(x, dtype="float16", memory="pinned")',
        Role.PRIMARY,
    ),
    Way('to_numpy(x, dtype="float16")', 'hostward.to_numpy(x, dtype="float16")', Role.AUTO),
    Way(".cpu().half().numpy()", "x.cpu().half().numpy()"),
    Way('.to("cpu", torch.float16).numpy()', 'x.to("cpu", torch.float16).numpy()'),
    Way(".half().cpu().numpy()", "x.half().cpu().numpy()", note="the cast by hand on the device"),
    Way(
        '.half().to("cpu", non_blocking=True), then a wait',
        """
        h = x.half().to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()
        h.numpy()
        """,
        note="the best by hand; a pinned result from torch's cache",
    ),
)


def build(count: int = 67_108_864) -> Case:
    """Return the case for `count` float32 values."""
    return Case(
        id="cast-f32-f16-268MB",
        what="268 MB float32 to float16",
        nbytes=2 * count,
        setup=lambda device: _setup(device, count),
        ways=WAYS,
        needs=Needs(against={".cpu().half().numpy()": 40}),
        note="GB/s counts the bytes of the result; a cast after the copy moves twice as many.",
    )


def _setup(device: torch.device, count: int) -> Data:
    from hostward._torch import torch

    host = np.random.default_rng(2).standard_normal(count, dtype=np.float32)
    return Data({"x": torch.from_numpy(host).to(device, copy=True)}, host.astype(np.float16))
