"""``out=``: the caller's arrays, checked against the plan before a byte moves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from hostward import _dtypes, _layout, _tree
from hostward._describe import Described
from hostward._plan import Plan
from hostward._sinks import Array
from hostward.errors import OutputError


def targets_of(flat: _tree.Flat, out: object) -> list[Any]:
    """Return the leaves of ``out=``, one for each leaf of the tree.

    Raises
    ------
    TreeError
        The structures differ, with the path of the first difference.
    """
    other = _tree.flatten(out)
    _tree.same_structure(flat, other)
    return other.leaves


def check(flat: _tree.Flat, found: Described, plan: Plan, targets: Sequence[Any]) -> list[Any]:
    """Check every target, and return those of the plan's leaves in the plan's order.

    Raises
    ------
    OutputError
        A target is no array, has another shape or dtype, is read-only, or shares memory with another target, with
        itself or with a source.
    """
    chosen = [targets[position] for position in found.first]
    for deliver, position in zip(plan.delivers, found.first, strict=True):
        target, path = targets[position], flat.path(position)
        if not isinstance(target, np.ndarray):
            do = "pass t.numpy() for a CPU tensor t" if hasattr(target, "numpy") else "pass an ndarray or a memmap"
            raise OutputError("out= is no array", path=path, got=_kind(target), needed="an ndarray", do=do)
        dtype = _numpy(deliver.dtype) if deliver.dtype in _dtypes.TABLE else found.objects[deliver.leaf].dtype
        if target.shape != deliver.shape:
            raise OutputError("out= has another shape", path=path, got=str(target.shape), needed=str(deliver.shape))
        if target.dtype != dtype:
            raise OutputError(
                "out= has another dtype",
                path=path,
                got=str(target.dtype),
                needed=str(dtype),
                why="out= never implies a cast",
                do=f"np.empty(shape, {str(dtype)!r}), or ask for dtype={target.dtype.name!r}",
            )
        if not target.flags.writeable:
            raise OutputError("out= is read-only", path=path, do="open a memmap with mode='r+', or pass a copy")
    _check_overlap(flat, found, chosen)
    return chosen


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _numpy(name: str) -> np.dtype[Any]:
    return _dtypes.numpy_dtype(_dtypes.lookup(name))


def _check_overlap(flat: _tree.Flat, found: Described, targets: Sequence[Array]) -> None:
    for number, target in enumerate(targets):
        # In bytes, with the element's own as one more dim: elements may overlap by a part.
        strides = (*(abs(s) for s in target.strides), 1)
        if _layout.self_overlaps((*target.shape, target.itemsize), strides):
            raise OutputError(
                "out= overlaps itself",
                path=flat.path(found.first[number]),
                why="one place in memory would have to hold several values",
                do="pass an array made by np.empty",
            )
    # Leaves in host memory are read while targets are written. Device memory has nothing in common with an array.
    leaves = [number for number, source in enumerate(found.sources) if source.device in ("cpu", "numpy")]
    arrays = [*targets, *(_as_array(found.objects[number]) for number in leaves)]
    ranges = [np.lib.array_utils.byte_bounds(array) if array.size else (0, 0) for array in arrays]
    for group in _layout.union_groups(ranges):
        for a in (member for member in group.members if member < len(targets)):
            for b in (member for member in group.members if member > a):
                if _share(arrays[a], arrays[b]):
                    is_target = b < len(targets)
                    other = b if is_target else leaves[b - len(targets)]
                    raise OutputError(
                        "out= shares memory with " + ("another of its arrays" if is_target else "a leaf"),
                        path=flat.path(found.first[a]),
                        got=f"the same bytes at tree{flat.path(found.first[other])}",
                        why="one transfer would overwrite what another wrote or still reads",
                        do="pass arrays that do not overlap",
                    )


def _as_array(leaf: Any) -> Array:
    """Return the memory of a leaf, to be looked at and not into; whatever NumPy thinks of the leaf's dtype."""
    if isinstance(leaf, np.ndarray):
        return leaf
    shape, itemsize = tuple(leaf.shape), leaf.element_size()
    place = (ctypes.c_char * (_layout.extent(shape, leaf.stride()) * itemsize)).from_address(leaf.data_ptr())
    return np.ndarray(shape, f"V{itemsize}", place, strides=[stride * itemsize for stride in leaf.stride()])


def _share(a: Array, b: Array) -> bool:
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]  # any int, says NumPy's page
    except np.exceptions.TooHardError:
        return True  # not proven apart
