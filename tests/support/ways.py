"""Every way through the engine, as calls on one base tensor: what holds for one way has to hold for all.

The base is float32 of shape (ROWS, 256), or (4, 256) where the name says tiny, so that ``fill_`` can be the producer
and every element of the result is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device
from hostward import _devices
from hostward._types import Capacity

ROWS = 512  # half a MiB: too large for the direct way
COLUMNS = 256


@contextmanager
def small_temporaries(limit: int = 16 << 10, piece: int = 4 << 10) -> Iterator[None]:
    """Bound a call's device temporaries by a few KiB, so that what needs a pass goes in pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hostward._call.Capacity", partial(Capacity, temporary_limit=limit))
        patch.setattr("hostward._plan._admit.SMALLEST_PIECE_NBYTES", piece)
        patch.setattr("hostward._plan._admit.PIECE_NBYTES", piece)
        patch.setattr("hostward._plan._admit.UNASKED_NBYTES", 0)
        yield


@contextmanager
def small_ring(small: tuple[int, int] = (256, 2), large: tuple[int, int] = (1024, 2)) -> Iterator[None]:
    """Let the pinned ring consist of a few chunks of a few hundred bytes: it is full all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hostward._memory._ring.SMALL", small)
        patch.setattr("hostward._memory._ring.LARGE", large)
        patch.setattr("hostward._memory._ring._rings", {})
        yield


@contextmanager
def unproven(device: Device) -> Iterator[None]:
    """Let hostward know nothing about the device's asynchronous copies."""
    proven = _devices.backend_for(device.type)
    _devices.register(_devices.BlockingBackend(device.type))
    try:
        yield
    finally:
        _devices.register(proven)


def _same(x: torch.Tensor) -> Any:
    return x


@dataclass(frozen=True)
class Way:
    """One way: what is asked of a base tensor, and what the machine is like meanwhile."""

    take: Callable[[torch.Tensor], Any] = _same
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = ROWS
    setting: Callable[[Device], AbstractContextManager[None]] = lambda device: nullcontext()
    call: Callable[..., Any] = hw.to_numpy
    out: bool = False
    is_async: bool = True  # the copies are: false where torch's blocking copy makes them

    def base(self, device: Device, index: int = 0) -> torch.Tensor:
        """Return a base of zeros on the device."""
        return device.tensor(torch.zeros(self.rows, COLUMNS), index)

    def prepared(self, base: torch.Tensor) -> Callable[[], Any]:
        """Return the call, ready to run; everything that is needed beside the base is made now."""
        tree, options = self.take(base), dict(self.options)
        if self.out:
            options["out"] = torch.utils._pytree.tree_map(_target, tree)
        return partial(self.call, tree, **options)


def _target(x: Any) -> Any:
    return np.empty(tuple(x.shape), str(x.dtype).removeprefix("torch.")) if isinstance(x, torch.Tensor) else x


def _conj(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.reshape(-1, 2)).conj()


WAYS: dict[str, Way] = {
    "tiny": Way(rows=4),
    "tiny, pinned": Way(rows=4, options={"memory": "pinned"}),
    "tiny, packed": Way(lambda x: x[::2].t(), rows=4),
    "tiny tree": Way(lambda x: {"a": x, "b": [x[1], x[2, 3]]}, rows=4),
    "large": Way(),
    "large, pinned": Way(options={"memory": "pinned"}),
    "transposed": Way(lambda x: x.t()),
    "transposed, pinned": Way(lambda x: x.t(), options={"memory": "pinned"}),
    "kept order": Way(lambda x: x.t(), options={"order": "K"}),
    "gapped": Way(lambda x: x[:, ::2]),
    "narrowed": Way(options={"dtype": "float16"}),
    "widened": Way(options={"dtype": "float64"}),
    "narrowed, pinned": Way(lambda x: [x, x.t()], options={"dtype": "float16", "memory": "pinned"}),
    "conjugated": Way(_conj),
    "negated": Way(torch._neg_view),
    "expanded": Way(lambda x: x[:300, None].expand(300, 4, COLUMNS)),
    "expanded, kept order": Way(lambda x: x[:300, None].expand(300, 4, COLUMNS), options={"order": "K"}),
    "windows": Way(lambda x: x.view(-1).unfold(0, 8, 4)),
    "overlapping": Way(lambda x: [x, x[1:], x[:, 3:]]),
    "overlapping, pinned": Way(lambda x: [x[:-1], x[1:]], options={"memory": "pinned"}),
    "two dtypes": Way(lambda x: (x, x.view(torch.int32))),
    "a tree": Way(lambda x: {"a": x, "b": (x.t(), 3, torch.ones(4)), "c": x[::3], "d": x[:1, :9]}),
    "out=": Way(lambda x: [x, x[:100].t()], out=True),
    "tiny out=": Way(rows=4, out=True),
    "in pieces": Way(lambda x: x.t(), setting=lambda device: small_temporaries()),
    "narrowed in pieces": Way(
        lambda x: [x.t(), x[:, 1:], x], {"dtype": "float16"}, setting=lambda device: small_temporaries()
    ),
    "pieces, pinned": Way(lambda x: x.t(), {"memory": "pinned"}, setting=lambda device: small_temporaries()),
    "small ring": Way(lambda x: [x, x.t()], setting=lambda device: small_ring((4 << 10, 2), (32 << 10, 2))),
    "numbers": Way(lambda x: [x[0, 0], x[:, 3], x.t()[0]], call=hw.to_python, rows=300),
    "unproven": Way(lambda x: [x, x.t()], setting=unproven, is_async=False),
}

every_way = pytest.mark.parametrize("way", [pytest.param(way, id=name) for name, way in WAYS.items()])
async_ways = pytest.mark.parametrize("way", [pytest.param(way, id=name) for name, way in WAYS.items() if way.is_async])


def leaves(result: Any) -> list[np.ndarray]:
    """Return the parts of a result that came from the base: everything but whole numbers and CPU leaves of ones."""
    found = [np.asarray(leaf) for leaf in torch.utils._pytree.tree_leaves(result) if not isinstance(leaf, int)]
    return [leaf for leaf in found if not (leaf.shape == (4,) and (leaf == 1).all())]
