"""A transposed view with gaps: neither side is dense, so torch packs it and fixes the order by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hostward.bench._case import Case, Data, Needs, Role, Way

if TYPE_CHECKING:
    import torch

WAYS = (
    Way('to_numpy(x, memory="pinned")', 'hostward.to_numpy(x, memory="pinned")', Role.PRIMARY),
    Way("to_numpy(x)", "hostward.to_numpy(x)", Role.AUTO),
    Way(".cpu().numpy()", "x.cpu().numpy()", note="keeps the source's order of axes: the result is not C-contiguous"),
    Way(
        "np.ascontiguousarray(.cpu().numpy())",
        "np.ascontiguousarray(x.cpu().numpy())",
        note="the same result as hostward's, in C order",
    ),
    Way(
        ".contiguous().cpu().numpy()",
        "x.contiguous().cpu().numpy()",
        note="packed by hand on the device, in C order",
    ),
    Way(
        '.contiguous().to("cpu", non_blocking=True), then a wait',
        """
        h = x.contiguous().to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()
        h.numpy()
        """,
        note="the best by hand, in C order; a pinned result from torch's cache",
    ),
)


def build(side: int = 4096) -> Case:
    """Return the case for a result of `side` x `side` float32 values."""
    return Case(
        id="gapped-permuted-64MB",
        what="64 MiB float32, y[::2].t()",
        nbytes=4 * side * side,
        setup=lambda device: _setup(device, side),
        ways=WAYS,
        needs=Needs(against={".cpu().numpy()": 20}),
        budget_s=5.0,
        note="y[::2].t(): hostward's results are C-contiguous; plain .cpu() keeps the transposed strides and so does "
        "less. The rows with ascontiguousarray and contiguous return the same as hostward.",
    )


def _setup(device: torch.device, side: int) -> Data:
    from hostward._torch import torch

    host = np.random.default_rng(4).integers(0, 1 << 32, (2 * side, side), dtype=np.uint32).view(np.float32)
    y = torch.from_numpy(host).to(device, copy=True)
    return Data({"x": y[::2].t()}, np.ascontiguousarray(host[::2].T))
