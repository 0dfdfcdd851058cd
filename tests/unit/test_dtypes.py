"""The table of dtypes, what a caller may write for one, and the option ``dtype=``."""

from __future__ import annotations

import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from hostward import _dtypes
from hostward._dtypes import TABLE, DType, Kind, Request
from hostward.errors import DtypeError, OptionError

TORCH = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
ALIASES = {n: str(d)[6:] for n, d in vars(torch).items() if isinstance(d, torch.dtype) and str(d) != f"torch.{n}"}
SHARE_A_BYTE = {"quint4x2", "quint2x4"}


class TestTable:
    @pytest.mark.parametrize("name", sorted(TORCH))
    def test_knows_every_dtype_of_this_torch(self, name):
        dtype, known = TORCH[name], TABLE[name]
        assert known.name == name
        assert known.itemsize == (0 if name in SHARE_A_BYTE else dtype.itemsize)
        if known.kind is not Kind.OPAQUE:
            assert (known.kind is Kind.FLOAT) == dtype.is_floating_point
            assert (known.kind is Kind.COMPLEX) == dtype.is_complex

    def test_holds_nothing_made_up(self):
        newer = {"float8_e8m0fnu", "float4_e2m1fn_x2", "bcomplex32", "float8_e8m0fnu_x4"}  # since 2.7, 2.8, 2.14
        assert set(TABLE) - set(TORCH) <= newer

    @pytest.mark.parametrize("name", sorted(n for n in TORCH if TABLE[n].refusal is None))
    def test_numpy_dtype_has_the_same_bytes(self, name):
        dtype = _dtypes.numpy_dtype(TABLE[name])
        assert (dtype.name, dtype.itemsize) == (name, TABLE[name].itemsize)
        bits = torch.arange(16, dtype=torch.uint8).view(TORCH[name])
        values = bits.view(torch.uint8).numpy().view(dtype).astype(np.complex128)
        np.testing.assert_array_equal(values, bits.to(torch.complex128).numpy())

    def test_equal_by_name_and_pickled(self):
        assert pickle.loads(pickle.dumps(TABLE["bool"])) == TABLE["bool"] != TABLE["int8"]
        assert hash(TABLE["bool"]) == hash(DType("bool", 1, Kind.BOOL))

    def test_unknown_name(self):
        with pytest.raises(DtypeError) as caught:
            _dtypes.lookup("float1")
        assert str(caught.value) == (
            "unknown torch dtype: got torch.float1\n"
            "  why: this version of hostward knows the dtypes of torch 2.6 to 2.14\n"
            "  do: pass `x.view(torch.uint8)` for the bytes, or `x.to(torch.float32)` for the values"
        )


COMPLEX = 'ask for dtype="complex64", or pass `torch.view_as_real(x)`'
VALUES = "pass `x.dequantize()` for the values or `x.int_repr()` for the integers"
SCALED = "its integers mean nothing without the tensor's scale and zero point"
BYTES = "pass `x.view(torch.uint8)` for the bytes"
NARROW = "torch has no arithmetic for it, only a place to keep the bytes"
BITS = "its bits have no meaning of their own"


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "why", "do"),
        [
            pytest.param("complex32", "NumPy has no complex numbers of two float16", COMPLEX, id="complex32"),
            pytest.param("bcomplex32", "NumPy has no complex numbers of two bfloat16", COMPLEX, id="bcomplex32"),
            *(pytest.param(n, SCALED, VALUES, id=n) for n in ["qint8", "quint8", "qint32", "quint4x2", "quint2x4"]),
            pytest.param("float4_e2m1fn_x2", "two 4-bit floats share each byte", BYTES, id="float4"),
            pytest.param("float8_e8m0fnu_x4", "four 8-bit scales share each element", BYTES, id="e8m0x4"),
            *(pytest.param(n, BITS, BYTES, id=n) for n in ["bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"]),
            *(pytest.param(f"{s}int{n}", NARROW, BYTES, id=f"{s}int{n}") for s in ("", "u") for n in range(1, 8)),
        ],
    )
    def test_says_what_to_call(self, name, why, do):
        with pytest.raises(DtypeError) as caught:
            _dtypes.numpy_dtype(TABLE[name])
        assert str(caught.value) == f"torch.{name} has no NumPy dtype\n  why: {why}\n  do: {do}"
        assert TABLE[name].refusal == do

    def test_the_advice_works(self):
        halves = torch.zeros(3, 2, dtype=torch.float16)
        assert torch.view_as_real(torch.view_as_complex(halves)).dtype == torch.float16
        for name in ("float4_e2m1fn_x2", "bits8", "bits16", "bits4x2", "int4", "uint1"):
            assert torch.zeros(4, dtype=torch.uint8).view(TORCH[name]).view(torch.uint8).numpy().nbytes == 4
        with pytest.warns(UserWarning, match="deprecated"):
            quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8)
        assert quantized.int_repr().tolist() == [2, 2, 2] and quantized.dequantize().tolist() == [1, 1, 1]


class TestFromAny:
    @pytest.mark.parametrize(
        ("spec", "name"),
        [
            *(pytest.param(n, n, id=n) for n in TABLE),
            *(pytest.param(d, n, id=str(d)) for n, d in TORCH.items()),
            *(pytest.param(a, n, id=a) for a, n in ALIASES.items() if a not in ("float", "int")),
            *(pytest.param(f"torch.{a}", n, id=f"torch.{a}") for a, n in ALIASES.items()),
            pytest.param("single", "float32", id="numpy-single"),
            pytest.param("f2", "float16", id="numpy-f2"),
            pytest.param("?", "bool", id="numpy-bool"),
            pytest.param("complex", "complex128", id="numpy-complex"),
            pytest.param(float, "float64", id="python-float"),
            pytest.param(int, "int64", id="python-int"),
            pytest.param(bool, "bool", id="python-bool"),
            pytest.param(complex, "complex128", id="python-complex"),
            pytest.param(np.float16, "float16", id="scalar-type"),
            pytest.param(np.longlong, "int64", id="scalar-type-c"),
            pytest.param(np.dtype("u4"), "uint32", id="np.dtype"),
            pytest.param(np.dtype("=f8"), "float64", id="np.dtype-native"),
            pytest.param(ml_dtypes.bfloat16, "bfloat16", id="ml-type"),
            pytest.param(np.dtype(ml_dtypes.float8_e5m2fnuz), "float8_e5m2fnuz", id="ml-dtype"),
            pytest.param(TABLE["int8"], "int8", id="DType"),
        ],
    )
    def test_recognises(self, spec, name):
        assert _dtypes.from_any(spec) is TABLE[name]

    @pytest.mark.parametrize(
        ("spec", "got"),
        [
            pytest.param("flaot32", "'flaot32'", id="typo"),
            pytest.param("", "''", id="empty"),
            pytest.param("(2", "'(2'", id="numpy-cannot-parse"),
            pytest.param("f4,i4", "'f4,i4'", id="structured-name"),
            pytest.param("torch.f4", "'torch.f4'", id="numpy-name-of-torch"),
            pytest.param(np.dtype("f4,i4"), "dtype([('f0', '<f4'), ('f1', '<i4')])", id="structured"),
            pytest.param(np.dtype((np.float32, 3)), "dtype(('<f4', (3,)))", id="subarray"),
            pytest.param(np.dtype("U5"), "dtype('<U5')", id="text"),
            pytest.param(np.dtype("M8[s]"), "dtype('<M8[s]')", id="dates"),
            pytest.param(object, "<class 'object'>", id="object"),
            pytest.param(np.floating, "<class 'numpy.floating'>", id="family"),
            pytest.param(np.longdouble, "<class 'numpy.longdouble'>", id="longdouble"),
            pytest.param(ml_dtypes.float4_e2m1fn, "<class 'ml_dtypes.float4_e2m1fn'>", id="not-in-torch"),
            pytest.param(torch.float32.is_floating_point, "True", id="no-dtype"),
            pytest.param(32, "32", id="number"),
            pytest.param([], "[]", id="unhashable"),
        ],
    )
    def test_refuses(self, spec, got):
        with pytest.raises(OptionError) as caught:
            _dtypes.from_any(spec)
        assert str(caught.value) == (
            f"unknown value for dtype=: got {got}, needed a name such as 'float16', "
            "a NumPy, ml_dtypes or torch dtype, or bool, int, float, complex"
        )

    @pytest.mark.parametrize("by_name", [False, True])
    def test_refuses_swapped_bytes(self, by_name):
        dtype = np.dtype("f4").newbyteorder()
        swapped = dtype.str
        spec = swapped if by_name else dtype
        with pytest.raises(OptionError) as caught:
            _dtypes.from_any(spec)
        assert str(caught.value) == (
            f"unknown value for dtype=: got {spec!r}, needed a dtype in this machine's byte order\n"
            "  why: no device works in swapped bytes\n"
            f"  do: say dtype='float32', and swap the result on the host: `a.astype({swapped!r})`"
        )

    @pytest.mark.parametrize(("spec", "bits"), [("float", "float"), ("int", "int")])
    def test_refuses_names_with_two_meanings(self, spec, bits):
        with pytest.raises(OptionError) as caught:
            _dtypes.from_any(spec)
        assert str(caught.value) == (
            f"ambiguous value for dtype=: got '{spec}'\n"
            f"  why: torch reads it as {bits}32, NumPy as {bits}64\n"
            f"  do: say dtype='{bits}32' or dtype='{bits}64'"
        )

    def test_a_dtype_of_a_newer_torch(self):
        class Newer:
            __module__, __qualname__ = "torch", "dtype"

            def __str__(self):
                return "torch.float1"

        Newer.__name__ = "dtype"
        with pytest.raises(DtypeError, match="got torch.float1"):
            _dtypes.from_any(Newer())


CASTS = [
    pytest.param("complex64", "complex64", None, id="same"),
    pytest.param("complex64", "bool", None, id="complex-to-bool"),
    pytest.param("complex32", "complex64", None, id="complex-wider"),
    pytest.param("float64", "int8", None, id="float-to-int"),
    pytest.param("int64", "float8_e5m2", None, id="int-to-float"),
    pytest.param("uint4", "uint4", None, id="opaque-same"),
    pytest.param(
        "complex64",
        "float32",
        "cannot cast torch.complex64 to torch.float32\n"
        "  why: the imaginary part would be lost\n  do: pass `x.real` or `x.abs()`",
        id="complex-to-real",
    ),
    pytest.param(
        "qint8",
        "float32",
        f"cannot cast torch.qint8 to torch.float32\n  why: {SCALED}\n  do: {VALUES}",
        id="from-opaque",
    ),
    pytest.param(
        "float32",
        "bits8",
        f"cannot cast torch.float32 to torch.bits8\n  why: {BITS}\n"
        "  do: ask for a dtype that NumPy or ml_dtypes has, such as 'float32'",
        id="to-opaque",
    ),
]


@pytest.mark.parametrize(("a", "b", "text"), CASTS)
def test_casts_defined(a, b, text):
    error = _dtypes.cast_error(TABLE[a], TABLE[b])
    assert (None if error is None else str(error)) == text
    assert _dtypes.is_cast_defined(TABLE[a], TABLE[b]) == (text is None)


@pytest.mark.parametrize("a", [n for n in TORCH if TABLE[n].kind is Kind.OPAQUE and n not in ("qint32",)])
def test_torch_casts_no_opaque_dtype(a):
    """Seen from torch's side: were one of them to learn casts, its row should move."""
    tensor = torch.zeros(1, dtype=torch.uint8)
    if TORCH[a].itemsize == 1 and not a.startswith("q"):
        with pytest.raises((RuntimeError, NotImplementedError)):
            tensor.view(TORCH[a]).to(torch.float32)


REQUESTS = [
    # option, source, in a tree, bare
    pytest.param(None, "float32", "float32", "float32", id="none"),
    pytest.param({}, "float32", "float32", "float32", id="empty-mapping"),
    pytest.param("float16", "float32", "float16", "float16", id="plain-float"),
    pytest.param("float16", "bfloat16", "float16", "float16", id="plain-bfloat16"),
    pytest.param("float16", "float8_e4m3fn", "float16", "float16", id="plain-float8"),
    pytest.param("float16", "int64", "int64", "float16", id="plain-ids"),
    pytest.param("float16", "uint8", "uint8", "float16", id="plain-image"),
    pytest.param("float16", "bool", "bool", "float16", id="plain-mask"),
    pytest.param("complex128", "complex64", "complex64", "complex128", id="plain-complex"),
    pytest.param("float16", "qint8", "qint8", "float16", id="plain-opaque"),
    pytest.param({"floating": "float16"}, "float32", "float16", "float16", id="floating"),
    pytest.param({"floating": "float16"}, "int32", "int32", "int32", id="floating-not-ids"),
    pytest.param({"floating": "float16"}, "complex64", "complex64", "complex64", id="floating-not-complex"),
    pytest.param({"int64": "int32"}, "int64", "int32", "int32", id="exact"),
    pytest.param({"int64": "int32"}, "int32", "int32", "int32", id="exact-other"),
    pytest.param({"complex32": "complex64"}, "complex32", "complex64", "complex64", id="exact-complex32"),
    pytest.param(
        {"floating": "float16", torch.float32: np.float64}, "float32", "float64", "float64", id="exact-beats-floating"
    ),
    pytest.param({"floating": "float16", "float32": "float32"}, "float32", "float32", "float32", id="spared"),
]


class TestRequest:
    @pytest.mark.parametrize(("option", "source", "in_tree", "bare"), REQUESTS)
    def test_target(self, option, source, in_tree, bare):
        assert _dtypes.requested(option, TABLE[source], bare=False) is TABLE[in_tree]
        assert _dtypes.requested(option, TABLE[source], bare=True) is TABLE[bare]

    def test_equal_wishes_are_equal_keys(self):
        a = _dtypes.normalise_request({"int64": "int32", "float32": "f2", "floating": float})
        b = _dtypes.normalise_request({"floating": "double", torch.float32: np.float16, np.int64: "torch.int"})
        assert a == b and len({a, b}) == 1
        assert _dtypes.normalise_request({}) == _dtypes.normalise_request(None) == Request()
        assert _dtypes.normalise_request({"float32": "float16"}) != _dtypes.normalise_request("float16")

    def test_a_key_twice(self):
        assert _dtypes.normalise_request({"float32": "float16", np.float32: "half"}).exact
        with pytest.raises(OptionError) as caught:
            _dtypes.normalise_request({"float32": "float16", np.float32: "bfloat16"})
        assert str(caught.value) == "dtype= maps float32 twice: got float16 and bfloat16, needed one target"

    @pytest.mark.parametrize(
        "option",
        ["complex32", {"floating": "complex32"}, {"complex64": "complex32"}],
        ids=["plain", "floating", "exact"],
    )
    def test_refuses_targets_that_numpy_lacks(self, option):
        with pytest.raises(DtypeError) as caught:
            _dtypes.normalise_request(option)
        assert str(caught.value) == (
            "dtype= asks for complex32, and NumPy has no such dtype\n"
            "  why: NumPy has no complex numbers of two float16\n"
            "  do: ask for a dtype that NumPy or ml_dtypes has, such as 'complex64', 'float32' or 'uint8'"
        )

    def test_refuses_pairs_that_no_tensor_could_follow(self):
        with pytest.raises(DtypeError, match="cannot cast torch.complex64 to torch.float32"):
            _dtypes.normalise_request({"complex64": "float32"})

    @pytest.mark.parametrize(
        "option", [{"floating": None}, {"float32": None}, {None: "float32"}, {"float": "float16"}, [("float32", "f2")]]
    )
    def test_refuses_what_is_no_dtype(self, option):
        with pytest.raises(OptionError):
            _dtypes.normalise_request(option)


def test_neither_torch_nor_ml_dtypes_is_imported_before_it_is_needed():
    program = """
import sys
from hostward import _dtypes
_dtypes.normalise_request({"bfloat16": "float32", "floating": "float8_e5m2"})
_dtypes.numpy_dtype(_dtypes.lookup("float32"))
assert not {"torch", "ml_dtypes"} & set(sys.modules)
_dtypes.numpy_dtype(_dtypes.lookup("bfloat16"))
assert "ml_dtypes" in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
