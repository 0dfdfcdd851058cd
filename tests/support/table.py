"""The value table: what becomes of every torch dtype in every kind of tensor. It is the test.

`TABLE` maps (dtype, kind) to `MOVES` or to the full text of the error. `DTYPES` and `KINDS` are its margins: where a
kind is refused whatever its dtype, the kind's text stands in its row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from support.values import BASE, MOVABLE, VIEWS, any_bytes, name_of

MOVES = "moves"

ToDevice = Callable[[torch.Tensor], torch.Tensor]


def leaf_text(got: str, why: str, do: str) -> str:
    return f"this tensor cannot become an array as it is: got {got}\n  why: {why}\n  do: {do}"


# ---- the dtypes

_VIEW = "pass `x.view(torch.uint8)` for the bytes"
_SCALE = "its integers mean nothing without the tensor's scale and zero point"
_INTEGERS = "pass `x.dequantize()` for the values or `x.int_repr()` for the integers"
_BITS = "its bits have no meaning of their own"
_STORED = "torch has no arithmetic for it, only a place to keep the bytes"
_COMPLEX = 'ask for dtype="complex64", or pass `torch.view_as_real(x)`'

_REFUSED = {
    "complex32": ("NumPy has no complex numbers of two float16", _COMPLEX),
    "bcomplex32": ("NumPy has no complex numbers of two bfloat16", _COMPLEX),
    "float4_e2m1fn_x2": ("two 4-bit floats share each byte", _VIEW),
    "float8_e8m0fnu_x4": ("four 8-bit scales share each element", _VIEW),
    **dict.fromkeys(["qint8", "quint8", "qint32", "quint4x2", "quint2x4"], (_SCALE, _INTEGERS)),
    **dict.fromkeys(["bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"], (_BITS, _VIEW)),
    **dict.fromkeys([f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)], (_STORED, _VIEW)),
}

DTYPES: dict[str, str] = {
    **{name_of(dtype): MOVES for dtype in MOVABLE},
    **{name: f"NumPy has no dtype for torch.{name}\n  why: {why}\n  do: {do}" for name, (why, do) in _REFUSED.items()},
}
EXISTING = [name for name in DTYPES if hasattr(torch, name)]
QUANTIZED = [name for name in DTYPES if name.startswith(("qint", "quint"))]


def sample(name: str, to: ToDevice) -> torch.Tensor:
    """Make a base of BASE's shape, on the device that `to` copies to."""
    dtype = getattr(torch, name)
    if name in QUANTIZED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch._empty_affine_quantized(BASE, scale=1.0, zero_point=0, dtype=dtype)
    if DTYPES[name] == MOVES or name == "complex32":
        return to(any_bytes(dtype, *BASE))
    return torch.empty(BASE, dtype=dtype, device=to(torch.empty(0)).device)


# ---- the kinds


class Kept(torch.Tensor):
    """A subclass that keeps torch's operations."""


class Logged(torch.Tensor):
    """A subclass with a `__torch_function__` of its own, which must not be asked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def _wrapping(name: str) -> type[torch.Tensor]:
    def new(cls: type[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called: its pointers were looked at")

    members = {"__new__": staticmethod(new), "__torch_dispatch__": classmethod(dispatch)}
    return type(torch.Tensor)(name, (torch.Tensor,), members)


Redefined, DTensor = _wrapping("Redefined"), _wrapping("DTensor")


@dataclass(frozen=True)
class Kind:
    """One kind of tensor: how it is made from a base, and what becomes of it (`MOVES`: the dtype decides)."""

    make: Callable[[torch.Tensor], Any]
    outcome: str = MOVES
    only: tuple[str, ...] = ()  # dtypes that have it; () for all
    on_cpu_alone: bool = False  # torch has it nowhere else, or not on every device


FLOATING = ("float16", "float32", "float64", "bfloat16", "complex64", "complex128")
COMPLEX = ("complex64", "complex128")
SAMPLES = ("float32", "int64", "bfloat16", "bool", "complex64")


def _vmapped(x: torch.Tensor) -> Any:
    caught = []
    torch.func.vmap(lambda row: (caught.append(row), row)[1])(x)
    return caught[0]


def _grad(x: torch.Tensor) -> Any:
    caught = []
    torch.func.grad(lambda y: (caught.append(y), y.sum())[1])(x)
    return caught[0]


def _fake(x: torch.Tensor) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(x)


def _freed(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.untyped_storage().resize_(0)
    return y


def _inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def _lazy(x: torch.Tensor) -> Any:
    return torch.nn.parameter.UninitializedParameter(dtype=x.dtype, device=x.device)


_NESTED = ("its rows differ in length", "x.unbind(), or torch.nested.to_padded_tensor(x, padding)")
_SUBCLASS = (
    "a subclass that redefines what its operations do may keep its values anywhere",
    "take its plain tensor",
)
_FUNC = (
    "a tensor inside torch.func (vmap, grad, ...)",
    "it stands for many values, or for one under a transform",
    "return it from the transformed function and convert the result",
)
_SHARD = (
    "it is this process's shard of a distributed tensor",
    "x.full_tensor() for all of it, x.to_local() for this shard",
)
_FREED = (
    "a tensor whose memory has been taken away",
    "its storage was resized: sharded parameters are, while nobody needs them whole",
    "gather it first, or convert it before its storage is resized",
)
_PARTS = "x.to_dense(), or move x.values() and its index tensors"

KINDS: dict[str, Kind] = {
    **{name: Kind(view) for name, view in VIEWS.items()},
    "channels_last": Kind(lambda x: x.unflatten(0, (2, 3)).permute(0, 3, 1, 2)),
    "strided by hand": Kind(lambda x: x.as_strided((4, 3, 2), (7, 7, 7), 5)),
    "conj": Kind(lambda x: x.conj(), only=COMPLEX),
    "conj, imag": Kind(lambda x: x.conj().imag, only=COMPLEX),
    "neg": Kind(torch._neg_view, only=FLOATING),
    "Parameter": Kind(lambda x: torch.nn.Parameter(x, requires_grad=x.is_floating_point())),
    "requires grad": Kind(lambda x: x.clone().requires_grad_(True), only=FLOATING),
    "result of a graph": Kind(lambda x: x.clone().requires_grad_(True)[1:], only=FLOATING),
    "inference": Kind(_inference, only=SAMPLES),
    "subclass": Kind(lambda x: x.as_subclass(Kept)),
    "subclass with __torch_function__": Kind(lambda x: x.as_subclass(Logged)),
    "sparse_coo": Kind(
        lambda x: x.to_sparse(),
        leaf_text(
            "a sparse_coo tensor", "NumPy has no sparse arrays", "x.to_dense(), or move x.indices() and x.values()"
        ),
        SAMPLES,
        on_cpu_alone=True,
    ),
    "sparse_csr": Kind(
        lambda x: x[0].to_sparse_csr(),
        leaf_text("a sparse_csr tensor", "NumPy has no sparse arrays", _PARTS),
        ("float32", "int64"),
        on_cpu_alone=True,
    ),
    "sparse_bsr": Kind(
        lambda x: x[0].to_sparse_bsr((2, 2)),
        leaf_text("a sparse_bsr tensor", "NumPy has no sparse arrays", _PARTS),
        ("float32", "int64"),
        on_cpu_alone=True,
    ),
    "nested, strided": Kind(
        lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]), leaf_text("a nested tensor", *_NESTED), ("float32",)
    ),
    "nested, jagged": Kind(
        lambda x: torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged),
        leaf_text("a NestedTensor", *_NESTED),
        ("float32",),
    ),
    "mkldnn": Kind(
        lambda x: x.to_mkldnn(),
        leaf_text("a tensor of layout _mkldnn", "its memory has no strides", "x.to_dense()"),
        ("float32",),
        on_cpu_alone=True,
    ),
    "masked": Kind(
        lambda x: torch.masked.masked_tensor(x, x > 0),
        leaf_text("a MaskedTensor", "NumPy's arrays carry no mask", "x.get_data() and x.get_mask()"),
        ("float32",),
        on_cpu_alone=True,
    ),
    "meta": Kind(
        lambda x: x.to("meta"),
        leaf_text("a meta tensor", "it has a shape but no values", "load or compute the values first"),
        SAMPLES,
    ),
    "fake": Kind(
        _fake,
        leaf_text(
            "a FakeTensor", "it has a shape but no values", "call it outside of FakeTensorMode, on the real tensor"
        ),
        SAMPLES,
    ),
    "vmapped": Kind(_vmapped, leaf_text(*_FUNC), SAMPLES),
    "under grad": Kind(_grad, leaf_text(*_FUNC), ("float32",)),
    "functional": Kind(
        torch._to_functional_tensor,
        leaf_text(
            "a tensor without memory of its own", "it stands for zeros, or for a tensor inside a trace", "x.clone()"
        ),
        SAMPLES,
    ),
    "zero tensor": Kind(
        lambda x: torch._efficientzerotensor(3, dtype=x.dtype, device=x.device),
        leaf_text(
            "a tensor without memory of its own", "it stands for zeros, or for a tensor inside a trace", "x.clone()"
        ),
        ("float32",),
        on_cpu_alone=True,
    ),
    "uninitialized": Kind(
        _lazy,
        leaf_text("UninitializedParameter", "a lazy parameter has no shape yet", "run the module once first"),
        ("float32",),
    ),
    "subclass with __torch_dispatch__": Kind(lambda x: Redefined(x), leaf_text("a Redefined", *_SUBCLASS), SAMPLES),
    "DTensor": Kind(lambda x: DTensor(x), leaf_text("a DTensor", *_SHARD), ("float32",)),
    "freed": Kind(_freed, leaf_text(*_FREED), SAMPLES),
}

# Quantized tensors have few views; what is refused for its dtype is refused in any.
_FEW = ("contiguous", "0-d", "empty", "offset")


def _cells() -> dict[tuple[str, str], str]:
    cells = {}
    for name, outcome in DTYPES.items():
        for kind_name, kind in KINDS.items():
            possible = not kind.only or name in kind.only
            if possible and (name not in QUANTIZED or kind_name in _FEW):
                cells[name, kind_name] = outcome if kind.outcome == MOVES else kind.outcome
    return cells


TABLE: dict[tuple[str, str], str] = _cells()


def rows(*, on_cpu: bool) -> list[Any]:
    """Return the cells as parameters (name, kind, outcome), for the dtypes of this torch."""
    return [
        pytest.param(name, kind, outcome, id=f"{name}-{kind}")
        for (name, kind), outcome in TABLE.items()
        if name in EXISTING and (on_cpu or not (KINDS[kind].on_cpu_alone or name in QUANTIZED))
    ]


quietly = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support:UserWarning",
    "ignore:Sparse :UserWarning",
    "ignore:The PyTorch API of nested tensors:UserWarning",
    "ignore:The PyTorch API of MaskedTensors:UserWarning",
    "ignore:.*torch.jit.script.*:DeprecationWarning",
)
