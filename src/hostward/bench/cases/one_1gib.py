"""One large contiguous tensor: how near to the link, and how far from ``.cpu()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hostward.bench._case import Case, Data, Needs, Role, Way

if TYPE_CHECKING:
    import torch

WAYS = (
    Way('to_numpy(x, memory="pinned")', 'hostward.to_numpy(x, memory="pinned")', Role.PRIMARY),
    Way("to_numpy(x)", "hostward.to_numpy(x)", Role.AUTO),
    Way(
        "pinned.copy_(x), the bare link",
        """
        pinned.copy_(x, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        pinned.numpy()
        """,
        Role.LINK,
        prepared=("pinned",),
        note="writes the same pinned memory each time: no result of its own",
    ),
    Way(".cpu().numpy()", "x.cpu().numpy()"),
    Way(".detach().cpu().numpy()", "x.detach().cpu().numpy()"),
    Way(
        '.to("cpu", non_blocking=True), then a wait',
        """
        h = x.to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()
        h.numpy()
        """,
        note="a pinned result from torch's cache, as long as no more of them are alive than before",
    ),
)


def build(count: int = 1 << 28) -> Case:
    """Return the case for `count` float32 values."""
    return Case(
        id="one-1GiB-pinned",
        what="1 GiB float32, contiguous",
        nbytes=4 * count,
        setup=lambda device: _setup(device, count),
        ways=WAYS,
        needs=Needs(share_of_link=0.97, against={".cpu().numpy()": 25}),
        budget_s=14.0,
        note="One large contiguous tensor into pinned memory that is already there runs at the link's rate in torch "
        "too: nothing can beat it, and hostward does not try to.",
    )


def _setup(device: torch.device, count: int) -> Data:
    from hostward._torch import torch

    # Raw random bits, NaN payloads among them: the bytes have to come out as they are.
    reference = np.random.default_rng(1).integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    x = torch.from_numpy(reference).to(device, copy=True)
    pinned = torch.empty(count, pin_memory=device.type == "cuda")
    return Data({"x": x, "pinned": pinned}, reference)
