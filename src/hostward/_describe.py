"""From leaves to `Source` descriptions: the one place that reads a leaf's metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hostward import _dtypes, _layout
from hostward._refuse import FREED, NO_MEMORY, mode_refusal, refused, tensor_refusal
from hostward._torch import torch
from hostward._tree import Flat
from hostward._types import Source
from hostward.errors import HostwardError, LeafError

# Types that are plain values wherever they occur; asked first, because trees are full of them.
_PLAIN = frozenset([type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device])
_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter])
# Named dimensions, which no view knows; torch has given them up.
_has_names: Callable[[torch.Tensor], bool] = getattr(torch.Tensor, "has_names", lambda x: False)
_device_names: dict[torch.device, str] = {}
_dtype_names: dict[torch.dtype, str] = {}


@dataclass(slots=True)
class Described:
    """The leaves of one call.

    `sources` and `objects` hold each distinct leaf once; `which` gives, for every leaf of the tree, its number there,
    or -1 for a plain value that passes through. `first` is the tree position of each distinct leaf.
    """

    sources: list[Source] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    which: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)


def describe(flat: Flat, targets: list[Any] | None = None) -> Described:
    """Describe every leaf that becomes an array.

    Parameters
    ----------
    flat
        The flattened tree.
    targets
        The leaves of ``out=``, one for each leaf. The same leaf with two targets counts as two.

    Raises
    ------
    LeafError
        A leaf cannot become an array, with its path.
    """
    found = Described()
    seen: dict[object, int] = {}
    storages: dict[tuple[str, int], int] = {}
    imported: dict[int, torch.Tensor] = {}  # other frameworks' arrays by identity: each export is another tensor
    for position, leaf in enumerate(flat.leaves):
        try:
            known = _source(leaf, storages, imported)
        except HostwardError as error:
            raise error.located(path=flat.path(position)) from error.__cause__
        if known is None:
            found.which.append(-1)
            continue
        source, movable = known
        # Whether a gradient hangs on it does not make it another array.
        key: object = (source._replace(requires_grad=False), id(leaf) if source.device == "numpy" else None)
        if targets is not None:
            key = (key, id(targets[position]))
        number = seen.setdefault(key, len(found.sources))
        if number == len(found.sources):
            found.sources.append(source)
            found.objects.append(movable)
            found.first.append(position)
        found.which.append(number)
    if storages and (refusal := mode_refusal()) is not None:
        tensor = next(i for i, source in enumerate(found.sources) if source.device != "numpy")
        raise refusal.located(path=flat.path(found.first[tensor]))
    return found


def _source(
    leaf: Any, storages: dict[tuple[str, int], int], imported: dict[int, torch.Tensor]
) -> tuple[Source, Any] | None:
    kind = type(leaf)
    if kind in _PLAIN:
        return None
    if kind in _TENSORS or isinstance(leaf, torch.Tensor):
        return _tensor(leaf, storages)
    if isinstance(leaf, np.ndarray):
        return _array(leaf)
    if isinstance(leaf, (np.generic, type)):
        return None
    if hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__"):
        if id(leaf) not in imported:
            imported[id(leaf)] = _imported(leaf)
        return _tensor(imported[id(leaf)], storages)
    return None


def _tensor(x: torch.Tensor, storages: dict[tuple[str, int], int]) -> tuple[Source, torch.Tensor]:
    refusal = tensor_refusal(x)
    if refusal is not None:
        raise refusal
    if type(x) not in _TENSORS:
        x = x.as_subclass(torch.Tensor)
    if _has_names(x):
        x = getattr(x, "rename")(None)  # noqa: B009  (gone with the names)
    device = device_name(x.device)
    memory = x.untyped_storage()
    _check_memory(x, memory)
    storage = storages.setdefault((device, memory._cdata), len(storages))
    source = Source(
        device,
        dtype_name(x.dtype),
        tuple(x.shape),
        x.stride(),
        int(x.storage_offset()),
        storage,
        x.is_conj(),
        x.is_neg(),
        x.requires_grad,
    )
    return source, x


def _check_memory(x: torch.Tensor, memory: torch.UntypedStorage) -> None:
    try:
        memory.data_ptr()  # raises for a storage that only stands there
    except RuntimeError:
        raise refused(*NO_MEMORY) from None
    nbytes = memory.nbytes()
    if nbytes < x.nbytes and not x.is_quantized:  # the others of these repeat elements; quint4x2 packs two in a byte
        shape, strides = tuple(x.shape), x.stride()
        if nbytes < _layout.byte_range(int(x.storage_offset()), shape, strides, x.element_size())[1] and 0 not in shape:
            raise refused(*FREED)


def _array(a: np.ndarray[Any, Any]) -> tuple[Source, np.ndarray[Any, Any]]:
    if isinstance(a, np.ma.MaskedArray):
        raise LeafError(
            "this array cannot be copied as it is",
            got="a MaskedArray",
            why="its mask would be lost",
            do="a.filled(value), or pass a.data and a.mask",
        )
    a = np.asarray(a)
    name = a.dtype.name
    if name not in _dtypes.TABLE or not a.dtype.isnative:
        name = str(a.dtype)
    elif _dtypes.TABLE[name].refusal is not None:
        name = f"ml_dtypes.{name}"  # int4 and its like: torch has no more than the name, NumPy has the values
    # Strides that are no whole number of elements (a field of a structured array) are neither dense nor broadcast.
    size = max(1, a.itemsize)
    strides = tuple(s // size if s % size == 0 else -1 for s in a.strides)
    return Source("numpy", name, a.shape, strides), a


def _imported(leaf: Any) -> torch.Tensor:
    """Take another framework's array (CuPy, JAX, anything with DLPack) as a tensor over the same memory."""
    try:
        if hasattr(leaf, "__dlpack__"):
            return torch.utils.dlpack.from_dlpack(leaf)
        return torch.as_tensor(leaf, device="cuda")
    except Exception as error:
        raise LeafError(
            "this array could not be taken over",
            got=f"a {type(leaf).__module__}.{type(leaf).__qualname__}",
            why=f"its DLPack export failed: {error}",
            do="convert it to a torch tensor or a NumPy array first",
        ) from error


def device_name(device: torch.device) -> str:
    """Return torch's name of a device, remembered: building it costs more than the rest of a description."""
    name = _device_names.get(device)
    if name is None:
        name = _device_names[device] = str(device)
    return name


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in the table."""
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name
