"""What ``x.detach().cpu().numpy()`` would do with a leaf: its cost in bytes, and where it fails. For `explain`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hostward import _dtypes, _layout
from hostward._types import Source


@dataclass(frozen=True, slots=True)
class Naive:
    """The usual call's bytes on the link and of its device temporary, and what is wrong with it (``()``: nothing)."""

    link_nbytes: int
    temporary_nbytes: int
    problems: tuple[str, ...]


def naive(source: Source, target: str, *, c_order: bool) -> Naive:
    """Judge the usual call for one device leaf.

    Source: what `Tensor.copy_` and `Tensor.numpy` do, read in PyTorch's sources and measured (docs/adr/0004).
    """
    dtype = _dtypes.lookup(source.dtype)
    nbytes = _layout.numel(source.shape) * dtype.itemsize
    dense = _layout.is_dense(source.shape, source.strides)
    problems = []
    if source.conj or source.neg:
        bit = "conjugate" if source.conj else "negative"
        problems.append(f"raises: numpy() refuses a tensor with its {bit} bit set")
    elif dtype.refusal is not None or not hasattr(np, dtype.name.replace("bool", "bool_")):
        problems.append(f"raises: numpy() refuses torch.{dtype.name}")
    if c_order and dense and not _layout.is_contiguous(source.shape, source.strides):
        problems.append("keeps the source's strides: code that needs C order copies again, on one host thread")
    if target != source.dtype:
        smaller = _dtypes.lookup(target).itemsize < dtype.itemsize
        side = "after the link has carried the wide bytes" if smaller else "into a second host array"
        problems.append(f"the cast to {target} runs on the host, {side}")
    if not dense and not _layout.is_contiguous(source.shape, tuple(sorted(source.strides, reverse=True))):
        order = [s for n, s in zip(source.shape, source.strides, strict=True) if n != 1 and s != 0]
        if order != sorted(order, reverse=True):
            problems.append("with non_blocking=True it would block all the same, through a pageable temporary")
    return Naive(nbytes, 0 if dense else nbytes, tuple(problems))
