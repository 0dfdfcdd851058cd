"""The public calls."""

from __future__ import annotations

from typing import Any

from hostward import _dtypes
from hostward._call import options_of, prepare, rebuilt, run_call
from hostward._explain import Explanation, explanation
from hostward._public import public
from hostward._single import remember, shortcut
from hostward._torch import torch
from hostward.errors import OptionError

_EXPLAINABLE = ("to_numpy", "to_python")


@public
def to_numpy(
    tree: Any,
    *,
    dtype: Any = None,
    order: str = "C",
    copy: bool | None = True,
    out: Any = None,
    memory: str = "auto",
) -> Any:
    """Return `tree` with every tensor replaced by a NumPy array of the values it has at the call.

    Parameters
    ----------
    tree
        A tensor on any device, an ndarray, an array of another framework that exports DLPack, or a tree of them:
        dict, list, tuple, named tuple, dataclass, their subclasses, and every type registered with torch's pytree or
        optree. Other leaves pass through by reference.
    dtype
        ``None``: each leaf keeps its dtype; bfloat16 and float8 arrive as `ml_dtypes` arrays. A dtype (name,
        ``np.dtype``, ``torch.dtype``): a bare tensor is converted, in a tree the floating leaves only. A mapping
        ``{from: to}``, where ``"floating"`` is a key too. Narrowing runs on the device, exact widening on the host.
    order
        ``"C"``: results are C-contiguous. ``"K"``: a dense source keeps its own strides, an expanded one becomes a
        read-only broadcast view.
    copy
        ``True``: results share nothing with the sources. ``None``: leaves in host memory are shared where nothing has
        to change. ``False``: shared, or an error.
    out
        A tree of the same structure with the arrays to write to, of the results' own shapes and dtypes; memmaps and
        arrays of any strides are fine. Undefined content after an error.
    memory
        ``"auto"``: results in ordinary memory, filled through a small pinned ring. ``"pinned"``: results in
        page-locked memory, at the link's rate; do not keep them long, and keep one alive until an asynchronous upload
        from it has ended.

    Returns
    -------
    Same structure as `tree`
        Arrays that are yours: writable, independent of the source and of each other (the same leaf twice is the same
        array twice). Readable at once. With `out`, its arrays.

    Raises
    ------
    LeafError
        A leaf is no plain memory (sparse, nested, meta, fake, quantized, under ``vmap``, ...); says what to call.
    DtypeError
        NumPy has no such dtype, or the cast would lose an imaginary part.
    OptionError, TreeError, OutputError
        A bad option, a cycle or two structures that differ, an `out` that does not fit.
    CopyNeededError
        ``copy=False``, and the bytes have to move.
    CaptureError
        The current stream of a source's device is capturing a CUDA graph.
    HostMemoryError, DeviceMemoryError
        The result does not fit into host memory; no temporary fits on the device.
    TransferError
        The device failed. Nothing is returned.

    Notes
    -----
    Stream order: the value is that of each source after everything queued so far on the calling thread's current
    stream *of the source's device*. The call waits for its own copies and never synchronises a device; the current
    device and stream are as before. Any thread. Ctrl-C is seen within milliseconds, except on devices whose copies
    block (`explain` says so).

    Cost: the result's bytes on the host, at most 101 MiB of pinned memory per device for the ring, and device
    temporaries of at most 256 MiB. `explain` prints them for a given tree. Gradients are dropped.

    Source: the contract (docs/contract.md); the rules' measurements (docs/adr/0004-plan-rules.md).

    Examples
    --------
    >>> import torch, hostward as hw
    >>> hw.to_numpy({"logits": torch.ones(2, 2), "step": 3})
    {'logits': array([[1., 1.],
           [1., 1.]], dtype=float32), 'step': 3}
    """
    plain = type(tree) is torch.Tensor and dtype is None and order == "C" and copy is True and out is None
    if plain:
        known = shortcut(tree, memory)
        if known is not None:
            return known
    call = prepare(tree, options_of(dtype=dtype, order=order, copy=copy, memory=memory), out)
    arrays = run_call(call)
    if plain:
        remember(tree, memory, call)
    return rebuilt(call, arrays)


@public
def to_python(tree: Any) -> Any:
    """Return `tree` with every tensor and array replaced by Python numbers.

    Parameters
    ----------
    tree
        As for `to_numpy`.

    Returns
    -------
    Same structure as `tree`
        A leaf without dimensions becomes an ``int``, ``float``, ``bool`` or ``complex``, another one nested lists of
        them. Exact: every torch number is a Python number.

    Raises
    ------
    LeafError, TreeError, CaptureError, TransferError
        As for `to_numpy`.

    Notes
    -----
    All leaves travel in one flight, and the call waits once, where ``.item()`` waits for each.

    Examples
    --------
    >>> import torch, hostward as hw
    >>> hw.to_python({"loss": torch.tensor(0.5), "hits": torch.tensor([3, 4])})
    {'loss': 0.5, 'hits': [3, 4]}
    """
    # complex32 has no NumPy dtype, but every one of its values is a complex64.
    call = prepare(tree, options_of(dtype={"complex32": "complex64"}, copy=None))
    return rebuilt(call, [_numbers(array) for array in run_call(call)])


def _numbers(array: Any) -> Any:
    if array.dtype.isbuiltin != 1 and array.dtype.name in _dtypes.TABLE:  # ml_dtypes: tolist() gives its own scalars
        is_float = _dtypes.TABLE[array.dtype.name].kind is _dtypes.Kind.FLOAT
        array = array.astype("float64" if is_float else "int64")
    return array.tolist()


@public
def explain(tree: Any, *, call: str = "to_numpy", **options: Any) -> Explanation:
    """Return the plan that a call would run now, without running it; ``print`` it.

    Parameters
    ----------
    tree
        What the call would get.
    call
        ``"to_numpy"`` or ``"to_python"``.
    **options
        The call's options.

    Returns
    -------
    Explanation
        A frozen record. Its text says for each leaf the way it goes, the bytes on the link, the device temporary, the
        host memory, what blocks and why, and what ``x.detach().cpu().numpy()`` would have cost or done wrong.

    Raises
    ------
    HostwardError
        What the call itself would raise before it moves a byte.

    Notes
    -----
    Moves nothing, allocates nothing and waits for nothing. The route of a leaf that needs a large temporary depends on
    the device's free bytes, which are read now: another call may see others.

    Examples
    --------
    >>> import torch, hostward as hw
    >>> hw.explain(torch.ones(2, 3).t()).link_nbytes
    0
    """
    if call not in _EXPLAINABLE:
        raise OptionError("unknown call to explain", got=repr(call), needed=f"one of {', '.join(_EXPLAINABLE)}")
    fixed = {"dtype": {"complex32": "complex64"}, "copy": None} if call == "to_python" else {}
    known = {"copy", "dtype", "memory", "order", "out"} if call == "to_numpy" else set()
    unknown = sorted(set(options) - known)
    if unknown:
        raise OptionError(f"{call}() has no option {unknown[0]}=", needed=", ".join(sorted(known)) or "none")
    out = options.pop("out", None)
    decided = prepare(tree, options_of(**fixed, **options), out)
    return explanation(call, decided)
