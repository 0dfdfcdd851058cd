"""Video frames, channels first on the device and channels last on the host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hostward.bench._case import Case, Data, Needs, Role, Way

if TYPE_CHECKING:
    import torch

_USUAL = "np.ascontiguousarray(.cpu().permute(0, 2, 3, 1).numpy())"

WAYS = (
    Way(
        'to_numpy(x.permute(0, 2, 3, 1), memory="pinned")',
        'hostward.to_numpy(x.permute(0, 2, 3, 1), memory="pinned")',
        Role.PRIMARY,
    ),
    Way("to_numpy(x.permute(0, 2, 3, 1))", "hostward.to_numpy(x.permute(0, 2, 3, 1))", Role.AUTO),
    Way(_USUAL, "np.ascontiguousarray(x.cpu().permute(0, 2, 3, 1).numpy())"),
    Way(
        ".permute(0, 2, 3, 1).contiguous().cpu().numpy()",
        "x.permute(0, 2, 3, 1).contiguous().cpu().numpy()",
        note="the transpose by hand on the device",
    ),
    Way(
        '.permute(0, 2, 3, 1).contiguous().to("cpu", non_blocking=True), then a wait',
        """
        h = x.permute(0, 2, 3, 1).contiguous().to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()
        h.numpy()
        """,
        note="the best by hand; a pinned result from torch's cache",
    ),
)


def build(shape: tuple[int, int, int, int] = (64, 3, 1080, 1920)) -> Case:
    """Return the case for frames of `shape`, channels first."""
    return Case(
        id="hwc-64x1080p-u8",
        what="64 frames 1080p uint8, CHW to HWC",
        nbytes=math.prod(shape),
        setup=lambda device: _setup(device, shape),
        ways=WAYS,
        needs=Needs(against={_USUAL: 60}),
    )


def _setup(device: torch.device, shape: tuple[int, int, int, int]) -> Data:
    from hostward._torch import torch

    host = np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
    return Data({"x": torch.from_numpy(host).to(device, copy=True)}, np.ascontiguousarray(host.transpose(0, 2, 3, 1)))
