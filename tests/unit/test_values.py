"""What becomes of every value, without a device: the value table, NumPy's leaves, options, ``out=``, trees."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import hostward as hw
from support.table import DTYPES, KINDS, MOVES, quietly, rows, sample
from support.values import as_array, assert_same

# ---- the table


@quietly
@pytest.mark.parametrize(("name", "kind", "outcome"), rows(on_cpu=True))
def test_the_table_holds_on_the_cpu(name: str, kind: str, outcome: str) -> None:
    x = KINDS[kind].make(sample(name, lambda cpu: cpu))
    if outcome != MOVES:
        with pytest.raises(hw.errors.LeafError) as caught:
            hw.to_numpy(x)
        assert str(caught.value) == f"to_numpy(): {outcome}"
        return
    want = as_array(x)
    for options in ({}, {"copy": None}, {"order": "K"}, {"order": "K", "copy": None}):
        got = hw.to_numpy(x, **options)
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert got.tobytes() == want.tobytes()
    assert_same(hw.to_numpy({"x": [x, 1]})["x"][0], want)


def test_the_table_knows_every_dtype_of_this_torch() -> None:
    names = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert names - set(DTYPES) == set()


# ---- NumPy's leaves

STRUCTURED = np.array([(1, 2.0), (3, 4.0), (5, 6.0)], [("a", "i4"), ("b", "f8")])
NUMPY: dict[str, np.ndarray] = {
    "structured": STRUCTURED,
    "a field": STRUCTURED["b"],
    "a packed field": np.zeros(3, [("a", "i1"), ("b", "f8")])["b"],
    "record": np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "object": np.array([1, "a", None], object),
    "datetime": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "timedelta": np.arange(3, dtype="m8[ms]"),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "void": np.zeros(2, "V5"),
    "no bytes": np.zeros(2, "V0"),
    "byteswapped": np.arange(5, dtype=">f4"),
    "long double": np.arange(3, dtype=np.longdouble),
    "int4 of ml_dtypes": np.arange(3).astype(ml_dtypes.int4),
    "bfloat16 of ml_dtypes": np.arange(3).astype(ml_dtypes.bfloat16),
    "complex": np.arange(3) * 1j,
    "negative strides": np.arange(12.0).reshape(3, 4)[::-1, ::-2],
    "transposed": np.arange(12.0).reshape(3, 4).T,
    "0-d": np.array(3.5),
    "0-d object": np.array(None, object),
    "0-d structured": STRUCTURED[1:2].reshape(()),
    "empty": np.zeros((3, 0, 2)),
    "read-only": np.broadcast_to(np.float32(2), (3, 4)),
    "broadcast inside": np.broadcast_to(np.arange(3.0)[:, None, None], (3, 4, 2)),
    "unaligned": np.zeros(17, np.uint8)[1:].view(np.float32),
    "matrix": np.arange(4.0).reshape(2, 2).view(np.matrix),
    "windows": np.lib.stride_tricks.sliding_window_view(np.arange(9.0), 4),
}


@pytest.mark.parametrize("leaf", NUMPY.values(), ids=NUMPY)
@pytest.mark.parametrize("order", ["C", "K"])
def test_numpy_leaves_come_back_as_arrays_of_their_own(leaf: np.ndarray, order: str) -> None:
    a = hw.to_numpy({"a": [leaf]}, order=order)["a"][0]
    want = np.asarray(leaf)
    assert type(a) is np.ndarray
    assert a.dtype == want.dtype
    assert a.shape == want.shape
    assert a.tolist() == want.tolist()
    assert not np.shares_memory(a, want)
    assert a.flags.writeable or order == "K"
    assert a.flags.c_contiguous or order == "K"
    assert a.flags.aligned
    assert hw.to_numpy(leaf, order=order).tolist() == want.tolist()


@pytest.mark.parametrize("leaf", NUMPY.values(), ids=NUMPY)
def test_numpy_leaves_are_shared_where_the_caller_says_so(leaf: np.ndarray) -> None:
    for copy in (None, False):
        a = hw.to_numpy(leaf, order="K", copy=copy)
        assert a is leaf or (type(leaf) is not np.ndarray and np.shares_memory(a, leaf))
    if leaf.flags.c_contiguous and leaf.itemsize:
        assert hw.to_numpy([leaf], copy=False)[0].ctypes.data == leaf.ctypes.data


@pytest.mark.parametrize("leaf", NUMPY.values(), ids=NUMPY)
def test_numpy_leaves_go_into_out(leaf: np.ndarray) -> None:
    out = np.empty(leaf.shape, leaf.dtype)
    assert hw.to_numpy(leaf, out=out) is out
    assert out.tolist() == leaf.tolist()


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(hw.errors.LeafError) as caught:
        hw.to_numpy({"m": np.ma.array([1, 2], mask=[0, 1])})
    assert str(caught.value) == (
        "to_numpy(): this array cannot be copied as it is (at tree['m']): got a MaskedArray\n"
        "  why: its mask would be lost\n"
        "  do: a.filled(value), or pass a.data and a.mask"
    )


def test_what_torch_cannot_cast_is_refused_bare_and_left_alone_in_a_tree() -> None:
    swapped = np.arange(3, dtype=">f4")
    with pytest.raises(hw.errors.DtypeError) as caught:
        hw.to_numpy(swapped, dtype="float16")
    assert str(caught.value) == (
        "to_numpy(): cannot cast >f4 to float16\n"
        "  why: torch has no such dtype, so there is no cast to follow\n"
        "  do: pass x.astype('float16')"
    )
    assert hw.to_numpy([swapped], dtype="float16")[0].dtype == swapped.dtype


# ---- other frameworks' arrays


class Exporter:
    """Exports a tensor's memory, as another framework's array does; or fails to."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        if self.tensor is None:
            raise BufferError("the array is on a device of the future")
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return (1, 0)


def test_dlpack_arrays_come_as_tensors_over_the_same_memory() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert_same(hw.to_numpy(Exporter(x.t())), as_array(x.t()))
    shared = hw.to_numpy([Exporter(x)], copy=None)[0]
    x.fill_(7)
    assert (shared == 7).all()


def test_a_failing_export_is_an_error_with_its_reason() -> None:
    with pytest.raises(hw.errors.LeafError) as caught:
        hw.to_numpy([1, Exporter(None)])
    assert str(caught.value) == (
        f"to_numpy(): this array could not be taken over (at tree[1]): got a {Exporter.__module__}.Exporter\n"
        "  why: its DLPack export failed: the array is on a device of the future\n"
        "  do: convert it to a torch tensor or a NumPy array first"
    )
    assert isinstance(caught.value.__cause__, BufferError)


# ---- options

X = torch.arange(6.0).reshape(2, 3)
Z = torch.view_as_complex(torch.arange(8.0).reshape(2, 2, 2))
_SPECS = "a name such as 'float16', a NumPy, ml_dtypes or torch dtype, or bool, int, float, complex"
_KEEP = "\n  do: copy=None, or order='K' and no dtype= to take the leaf as it is"

BAD_OPTIONS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "order": (X, {"order": "F"}, "unknown value for order=: got 'F', needed one of 'C', 'K'"),
    "order, lower case": (X, {"order": "c"}, "unknown value for order=: got 'c', needed one of 'C', 'K'"),
    "order, None": (X, {"order": None}, "unknown value for order=: got None, needed one of 'C', 'K'"),
    "copy, 1": (X, {"copy": 1}, "unknown value for copy=: got 1, needed one of True, None, False"),
    "copy, text": (X, {"copy": "no"}, "unknown value for copy=: got 'no', needed one of True, None, False"),
    "memory": (X, {"memory": "gpu"}, "unknown value for memory=: got 'gpu', needed one of 'auto', 'pinned'"),
    "memory, a list": (X, {"memory": []}, "unknown value for memory=: got [], needed one of 'auto', 'pinned'"),
    "dtype": (X, {"dtype": "float17"}, f"unknown value for dtype=: got 'float17', needed {_SPECS}"),
    "dtype, a number": (X, {"dtype": 16}, f"unknown value for dtype=: got 16, needed {_SPECS}"),
    "dtype, floating": (X, {"dtype": "floating"}, f"unknown value for dtype=: got 'floating', needed {_SPECS}"),
    "dtype, a set": (X, {"dtype": {"float16"}}, f"unknown value for dtype=: got {{'float16'}}, needed {_SPECS}"),
    "dtype, object": (X, {"dtype": object}, f"unknown value for dtype=: got <class 'object'>, needed {_SPECS}"),
    "dtype, ambiguous": (
        X,
        {"dtype": "float"},
        "ambiguous value for dtype=: got 'float'\n"
        "  why: torch reads it as float32, NumPy as float64\n"
        "  do: say dtype='float32' or dtype='float64'",
    ),
    "dtype, none of NumPy's": (
        X,
        {"dtype": torch.complex32},
        "dtype= asks for complex32, and NumPy has no such dtype\n"
        "  why: NumPy has no complex numbers of two float16\n"
        "  do: ask for a dtype that NumPy or ml_dtypes has, such as 'complex64', 'float32' or 'uint8'",
    ),
    "dtype, lossy": (
        {"z": Z},
        {"dtype": {"complex64": "float32"}},
        "cannot cast torch.complex64 to torch.float32\n"
        "  why: the imaginary part would be lost\n"
        "  do: pass `x.real` or `x.abs()`",
    ),
    "dtype, lossy for a leaf": (
        Z,
        {"dtype": "float32"},
        "cannot cast torch.complex64 to torch.float32\n"
        "  why: the imaginary part would be lost\n"
        "  do: pass `x.real` or `x.abs()`",
    ),
    "dtype, twice": (
        X,
        {"dtype": {"float32": "float16", torch.float32: "float64"}},
        "dtype= maps float32 twice: got float16 and float64, needed one target",
    ),
    "copy=False, a cast": (
        {"a": [X]},
        {"copy": False, "dtype": "float16"},
        "copy=False cannot be kept (at tree['a'][0])\n  why: a cast from float32 to float16" + _KEEP,
    ),
    "copy=False, strides": (
        X.t(),
        {"copy": False},
        "copy=False cannot be kept\n  why: the source is not C-contiguous" + _KEEP,
    ),
    "copy=False, conj": (
        Z.conj(),
        {"copy": False},
        "copy=False cannot be kept\n  why: a conjugate or negative view has to be resolved" + _KEEP,
    ),
    "copy=False, everything": (
        Z.conj().t(),
        {"copy": False, "dtype": "complex128"},
        "copy=False cannot be kept\n  why: a cast from complex64 to complex128 and a conjugate or negative view has to "
        "be resolved and the source is not C-contiguous" + _KEEP,
    ),
}


@pytest.mark.parametrize(("tree", "options", "text"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_say_what_is_wrong(tree: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(hw.errors.HostwardError) as caught:
        hw.to_numpy(tree, **options)
    assert str(caught.value) == f"to_numpy(): {text}"


def test_unknown_options_are_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'device'"):
        hw.to_numpy(X, device="cpu")
    with pytest.raises(TypeError, match="positional argument"):
        hw.to_numpy(X, "float16")
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtype'"):
        hw.to_python(X, dtype="float16")


# ---- out=

_BUFFER = np.zeros((4, 8), np.float32)
READ_ONLY = np.zeros((2, 3), np.float32)
READ_ONLY.flags.writeable = False
_MINE = torch.from_numpy(_BUFFER)
_OVERLAP = (
    "\n  why: one transfer would overwrite what another wrote or still reads\n  do: pass arrays that do not overlap"
)
_SELF = "\n  why: one place in memory would have to hold several values\n  do: pass an array made by np.empty"

BAD_OUT: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "a tensor": (
        X,
        torch.zeros(2, 3),
        {},
        "out= is no array: got a Tensor, needed an ndarray\n  do: pass t.numpy() for a CPU tensor t",
    ),
    "a list": (
        X,
        [[0.0] * 3] * 2,
        {},
        "out= is built differently from the tree: got list of 2, needed a leaf, torch.Tensor\n"
        "  do: build out= like the tree: the same types and keys, in the same order",
    ),
    "a number": (X, 3, {}, "out= is no array: got a int, needed an ndarray\n  do: pass an ndarray or a memmap"),
    "shape": (
        {"a": X},
        {"a": np.zeros((3, 2), np.float32)},
        {},
        "out= has another shape (at tree['a']): got (3, 2), needed (2, 3)",
    ),
    "dtype": (
        X,
        np.zeros((2, 3)),
        {},
        "out= has another dtype: got float64, needed float32\n"
        "  why: out= never implies a cast\n"
        "  do: np.empty(shape, 'float32'), or ask for dtype='float64'",
    ),
    "dtype of a cast": (
        X,
        np.zeros((2, 3), np.float32),
        {"dtype": "float16"},
        "out= has another dtype: got float32, needed float16\n"
        "  why: out= never implies a cast\n"
        "  do: np.empty(shape, 'float16'), or ask for dtype='float32'",
    ),
    "byte order": (
        X,
        np.zeros((2, 3), ">f4"),
        {},
        "out= has another dtype: got >f4, needed float32\n"
        "  why: out= never implies a cast\n"
        "  do: np.empty(shape, 'float32'), or ask for dtype='float32'",
    ),
    "read-only": (X, READ_ONLY, {}, "out= is read-only\n  do: open a memmap with mode='r+', or pass a copy"),
    "structure": (
        {"a": X, "b": X},
        {"a": np.zeros((2, 3), np.float32)},
        {},
        "out= is built differently from the tree: got nothing as entry 1, needed ['b']\n"
        "  do: build out= like the tree: the same types and keys, in the same order",
    ),
    "broadcast": (
        X,
        np.broadcast_to(np.float32(0), (2, 3)),
        {},
        "out= is read-only\n  do: open a memmap with mode='r+', or pass a copy",
    ),
    "overlaps itself": (
        {"a": X},
        {"a": np.lib.stride_tricks.as_strided(np.zeros(9, np.float32), (2, 3), (4, 4))},
        {},
        "out= overlaps itself (at tree['a'])" + _SELF,
    ),
    "overlaps itself by parts of elements": (
        X[0],
        np.lib.stride_tricks.as_strided(np.zeros(9, np.float32), (3,), (2,)),
        {},
        "out= overlaps itself" + _SELF,
    ),
    "two overlap": (
        [X[0], X[1]],
        [_BUFFER[0, :3], _BUFFER[0, 2:5]],
        {},
        "out= shares memory with another of its arrays (at tree[0]): got the same bytes at tree[1]" + _OVERLAP,
    ),
    "overlaps a CPU source": (
        [_MINE[0], 1],
        [_BUFFER[0], None],
        {},
        "out= shares memory with a leaf (at tree[0]): got the same bytes at tree[0]" + _OVERLAP,
    ),
    "overlaps another leaf's source": (
        {"a": X[0], "b": _MINE.t()},
        {"a": _BUFFER[2, 1:4], "b": np.zeros((8, 4), np.float32)},
        {},
        "out= shares memory with a leaf (at tree['a']): got the same bytes at tree['b']" + _OVERLAP,
    ),
    "overlaps a NumPy source": (
        [_BUFFER[::-1]],
        [_BUFFER],
        {},
        "out= shares memory with a leaf (at tree[0]): got the same bytes at tree[0]" + _OVERLAP,
    ),
}


@pytest.mark.parametrize(("tree", "out", "options", "text"), BAD_OUT.values(), ids=BAD_OUT)
def test_out_that_does_not_fit_is_an_error_before_a_byte_moves(
    tree: Any, out: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(hw.errors.HostwardError) as caught:
        hw.to_numpy(tree, out=out, **options)
    assert str(caught.value) == f"to_numpy(): {text}"
    assert not _BUFFER.any()


def test_out_with_copy_false_is_an_error() -> None:
    with pytest.raises(hw.errors.CopyNeededError) as caught:
        hw.to_numpy(X, out=np.empty((2, 3), np.float32), copy=False)
    assert caught.value.why == "out= was given"


GOOD_OUT: dict[str, Callable[[], np.ndarray]] = {
    "contiguous": lambda: np.empty((2, 3), np.float32),
    "Fortran order": lambda: np.empty((3, 2), np.float32).T,
    "gaps": lambda: np.empty((4, 9), np.float32)[::2, ::3],
    "negative strides": lambda: np.empty((2, 3), np.float32)[::-1, ::-1],
    "a field": lambda: np.zeros((2, 3), [("a", "i1"), ("b", "f4")])["b"],
    "unaligned": lambda: np.zeros(25, np.uint8)[1:].view(np.float32).reshape(2, 3),
    "an array subclass": lambda: np.zeros((2, 3), np.float32).view(np.matrix),
}


@pytest.mark.parametrize("make", GOOD_OUT.values(), ids=GOOD_OUT)
@pytest.mark.parametrize("leaf", [X, X.numpy(), X.t().contiguous().t()], ids=["tensor", "array", "strided"])
def test_out_of_any_strides_is_filled_and_returned(make: Any, leaf: Any) -> None:
    out = make()
    assert hw.to_numpy(leaf, out=out) is out
    assert out.tolist() == X.tolist()


def test_interleaved_columns_do_not_overlap() -> None:
    """Their ranges of addresses do; their bytes do not."""
    buffer = np.arange(32.0).reshape(4, 8)
    source = torch.from_numpy(buffer)[:, :4]
    hw.to_numpy(source, out=buffer[:, 4:])
    assert (buffer[:, 4:] == buffer[:, :4]).all()


def test_the_same_leaf_may_go_to_two_arrays() -> None:
    out = [np.empty((2, 3), np.float32) for _ in range(2)]
    a = hw.to_numpy([X, X], out=out)
    assert a[0] is out[0]
    assert a[1] is out[1]
    assert (out[0] == out[1]).all()
    same = np.empty((2, 3), np.float32)
    a = hw.to_numpy([X, X], out=[same, same])
    assert a[0] is a[1] is same


# ---- trees and plain values


Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    name: str = "f"


def test_trees_keep_their_types_and_what_is_no_array() -> None:
    marker = object()
    tree = {
        "list": [X, 1],
        "tuple": (X, None),
        "named": Point(X, marker),
        "ordered": OrderedDict(b=X, a=X.t()),
        "frozen": Frozen(X),
        "text": "text",
        "size": X.shape,
        "dtype": X.dtype,
        "empty": {},
        ("key", 1): deque([X], maxlen=4),
    }
    a = hw.to_numpy(tree)
    assert list(a) == list(tree)
    assert [type(value) for value in a.values()] == [type(value) for value in tree.values()]
    assert a["named"].y is marker
    assert list(a["ordered"]) == ["b", "a"]
    assert a["frozen"].name == "f"
    assert a[("key", 1)].maxlen == 4
    assert a["size"] is tree["size"]
    first = a["list"][0]
    assert all(leaf is first for leaf in (a["tuple"][0], a["named"].x, a["ordered"]["b"], a["frozen"].x))
    assert_same(first, X.numpy())
    assert_same(a["ordered"]["a"], X.numpy().T.copy())


@pytest.mark.parametrize(
    "value", [None, 3, 2.5, "text", b"bytes", True, object(), int, np.float32(1), range(3), {1, 2}]
)
def test_plain_values_pass_by_reference(value: Any) -> None:
    assert hw.to_numpy(value) is value
    assert hw.to_numpy([value])[0] is value
    assert hw.to_python([value])[0] is value


def test_deep_trees_and_cycles() -> None:
    tree: Any = X
    for _ in range(10_000):
        tree = [tree]
    a = hw.to_numpy(tree)
    for _ in range(10_000):
        a = a[0]
    assert_same(a, X.numpy())
    cycle: list[Any] = [X]
    cycle.append({"again": cycle})
    with pytest.raises(hw.errors.TreeError) as caught:
        hw.to_numpy(cycle)
    assert str(caught.value).startswith("to_numpy(): the tree contains itself (at tree[1]['again'])\n")


def test_errors_name_the_path_and_the_call() -> None:
    tree = {"a": (1, [X, Frozen(X.to("meta"))])}
    for call, name in ((hw.to_numpy, "to_numpy()"), (hw.to_python, "to_python()"), (hw.explain, "explain()")):
        with pytest.raises(hw.errors.LeafError) as caught:
            call(tree)
        assert str(caught.value).startswith(
            f"{name}: this tensor cannot become an array as it is (at tree['a'][1][1].x)"
        )
        assert caught.value.path == "['a'][1][1].x"
        assert caught.value.call == name
    with pytest.raises(hw.errors.DtypeError) as caught:
        hw.to_numpy({"a": (1, [X, torch.zeros(2).to(torch.complex32)])})
    assert caught.value.path == "['a'][1][1]"


def test_to_python_gives_numbers_and_nested_lists() -> None:
    tree = {"n": torch.tensor(3), "x": X, "b": np.array([True]), "e": torch.zeros(2, 0), "h": torch.tensor(0.5).half()}
    a = hw.to_python(tree)
    assert a == {"n": 3, "x": X.tolist(), "b": [True], "e": [[], []], "h": 0.5}
    assert [type(a["n"]), type(a["x"][0][0]), type(a["b"][0]), type(a["h"])] == [int, float, bool, float]
    assert hw.to_python(np.array([1, 2]).astype(ml_dtypes.int4)) == [1, 2]
    assert type(hw.to_python(np.array(1).astype(ml_dtypes.int4))) is int
    assert type(hw.to_python(torch.tensor(1.5).bfloat16())) is float
