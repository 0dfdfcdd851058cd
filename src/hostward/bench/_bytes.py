"""Whole buffers, compared byte for byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

BLOCK_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Match:
    """How a result compares with the reference.

    `wrong` of `total` elements have other bytes. A result of another type, dtype or shape is wrong in
    every element. `c_order` says how the result lies in memory; the comparison itself does not care.
    """

    wrong: int
    total: int
    c_order: bool

    @property
    def ok(self) -> bool:
        """Whether every byte is right."""
        return self.wrong == 0

    @property
    def wrong_share(self) -> float:
        """Share of wrong elements, 0 to 1."""
        return self.wrong / self.total if self.total else 0.0


def compare(result: object, reference: np.ndarray[Any, np.dtype[Any]]) -> Match:
    """Compare all elements of `result` with `reference`, in blocks so that no full-size copy is made.

    Bytes count, not values: NaN equals the same NaN, and ``-0.0`` does not equal ``0.0``.
    """
    total = max(reference.size, 1)
    if not isinstance(result, np.ndarray) or result.shape != reference.shape or result.dtype != reference.dtype:
        return Match(total, total, isinstance(result, np.ndarray) and result.flags.c_contiguous)
    got, want = np.atleast_1d(result), np.atleast_1d(reference)
    row_nbytes = max(want.dtype.itemsize * math.prod(want.shape[1:]), 1)
    step = max(BLOCK_NBYTES // row_nbytes, 1)
    wrong = sum(_differ(got[at : at + step], want[at : at + step]) for at in range(0, len(want), step))
    return Match(wrong, reference.size, result.flags.c_contiguous)


def _differ(got: np.ndarray[Any, np.dtype[Any]], want: np.ndarray[Any, np.dtype[Any]]) -> int:
    itemsize = want.dtype.itemsize
    kind: Any = f"u{itemsize}" if itemsize in (1, 2, 4, 8) else np.uint8
    differ = _flat(got).view(kind) != _flat(want).view(kind)
    if kind is np.uint8:
        differ = differ.reshape(-1, itemsize).any(axis=1)
    return int(np.count_nonzero(differ))


def _flat(block: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    return np.ascontiguousarray(block).reshape(-1)
