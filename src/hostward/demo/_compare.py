"""The same maps brought to the host in other ways, for time and for bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import hostward as hw
from hostward.demo._maps import Maps

Arrays = Mapping[str, NDArray[Any]]

HOSTWARD = "hostward"

_LEAST_CALLS, _ENOUGH_S = 3, 2.0


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one way took, over calls whose results were dropped before the next.

    Parameters
    ----------
    way
        Its name.
    median_s, least_s, most_s, calls
        The calls after one to warm up.
    gb_per_s
        Bytes of the result over `median_s`, in 1e9 bytes a second.
    """

    way: str
    median_s: float
    least_s: float
    most_s: float
    calls: int
    gb_per_s: float


def ways(maps: Maps) -> dict[str, Callable[[], Arrays]]:
    """Return every way to the same arrays: C order, channels last, float16 features, uint8 frames.

    `hostward` comes first. The second is the line most people write, with the layout and the dtype made on
    the host. The third does both on the device by hand before the same line.
    """
    tree = maps.tree()
    return {
        HOSTWARD: lambda: hw.to_numpy(tree, dtype="float16"),
        ".detach().cpu().numpy()": lambda: {name: _on_host(x) for name, x in tree.items()},
        "by hand, .cpu().numpy()": lambda: {name: _by_hand(x) for name, x in tree.items()},
    }


def _on_host(x: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = x.detach().cpu().numpy()
    return np.array(array, dtype=np.float16 if x.is_floating_point() else None, order="C")


def _by_hand(x: Tensor) -> NDArray[Any]:
    x = x.detach().to(torch.float16) if x.is_floating_point() else x.detach()
    array: NDArray[Any] = x.contiguous().cpu().numpy()
    return array


def same_bytes(ours: Arrays, theirs: Arrays) -> bool:
    """Tell whether two deliveries agree in names, dtypes, shapes and every byte."""
    return ours.keys() == theirs.keys() and all(_same(array, theirs[name]) for name, array in ours.items())


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return np.array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


def measure(way: str, call: Callable[[], Arrays], settle: Callable[[], None], calls: int = 7) -> Timing:
    """Time one way, after one call to warm up.

    Parameters
    ----------
    settle
        Waits until the device is idle, so that a call is timed and not the work queued before it.
    calls
        How many at most; a way that takes long is called at least `_LEAST_CALLS` times.
    """
    nbytes = sum(array.nbytes for array in call().values())
    took: list[float] = []
    while len(took) < calls and (len(took) < _LEAST_CALLS or sum(took) < _ENOUGH_S):
        settle()
        start = time.perf_counter()
        arrays = call()
        took.append(time.perf_counter() - start)
        del arrays  # its memory may serve the next call, whatever the way
    return Timing(way, median(took), min(took), max(took), len(took), nbytes / median(took) / 1e9)
