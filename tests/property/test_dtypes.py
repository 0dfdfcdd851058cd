"""`is_exact_cast` against the values themselves: every bit pattern of the narrow dtypes, the extremes of the wide."""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostward._dtypes import _VALUES, TABLE, Kind, is_exact_cast, numpy_dtype

REAL = [d for d in TABLE.values() if d.refusal is None and d.kind is not Kind.COMPLEX]
NARROW = [d for d in REAL if d.itemsize <= 2]
WIDE = [d for d in REAL if d.itemsize > 2]
PARTS = {"complex64": "float32", "complex128": "float64"}

Value = Fraction | str


def exactly(x: object) -> Value:
    """A number that compares exactly, or one of -0, nan, inf, -inf."""
    if isinstance(x, int):
        return Fraction(x)
    value = float(x)  # no dtype here is wider than float64
    if value == 0 and math.copysign(1, value) < 0:
        return "-0"
    return Fraction(value) if math.isfinite(value) else str(value)


@functools.cache
def values_of(name: str) -> frozenset[Value]:
    """Every value of a narrow dtype, from every bit pattern; of a wide one, those that most easily do not fit."""
    dtype = numpy_dtype(TABLE[name])
    if TABLE[name].kind is Kind.BOOL:
        return frozenset([Fraction(0), Fraction(1)])
    if dtype.itemsize <= 2:
        bits = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
        with np.errstate(invalid="ignore"):  # bfloat16 has signalling NaNs
            return frozenset(map(exactly, bits.astype("i8" if dtype.kind in "iu" else "f8").tolist()))
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        numbers = [info.min, info.max, info.max // 2, 0, 1, 255, 256, 257, 1 << 24, (1 << 24) + 1]
        return frozenset(Fraction(n) for n in numbers if info.min <= n <= info.max)
    finfo = np.finfo(dtype)
    one = dtype.type(1)
    numbers = [finfo.max, finfo.min, finfo.smallest_subnormal, finfo.tiny, one + finfo.eps, one, one * 0, -one * 0]
    return frozenset(map(exactly, [*numbers, -(one * 0), np.inf, -np.inf, np.nan]))


def holds(name: str, value: Value) -> bool:
    """Whether a dtype has this very value."""
    dtype = numpy_dtype(TABLE[name])
    if dtype.itemsize <= 2:
        return value in values_of(name)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return isinstance(value, Fraction) and value.denominator == 1 and info.min <= value <= info.max
    if isinstance(value, str):
        return True
    try:
        rounded = float(value)
    except OverflowError:
        return False
    with np.errstate(over="ignore"):
        return exactly(dtype.type(rounded)) == value


@pytest.mark.parametrize("a", REAL, ids=lambda d: d.name)
@pytest.mark.parametrize("b", REAL, ids=lambda d: d.name)
def test_exact_means_that_every_value_is_there(a, b):
    assert is_exact_cast(a, b) == all(holds(b.name, value) for value in values_of(a.name))


@pytest.mark.parametrize("a", NARROW, ids=lambda d: d.name)
def test_the_table_of_values_is_that_of_the_bit_patterns(a):
    found = values_of(a.name)
    numbers = [value for value in found if isinstance(value, Fraction)]
    # Each is an odd number times a power of two.
    powers = {v: (v.numerator & -v.numerator).bit_length() - v.denominator.bit_length() for v in numbers if v}
    odd = [abs(v / Fraction(2) ** power) for v, power in powers.items()]
    specials = {value for value in found if isinstance(value, str)} - {"-inf"} | ({"0"} if 0 in numbers else set())
    assert _VALUES[a.name] == (
        max(int(n).bit_length() for n in odd),
        min(powers.values()),
        min(numbers),
        max(numbers),
        specials,
    )


@given(st.sampled_from(WIDE), st.binary(min_size=8, max_size=8))
def test_no_value_of_a_wide_dtype_is_lost(a, bits):
    value = exactly(np.frombuffer(bits, numpy_dtype(a))[0].item())
    for b in REAL:
        assert holds(b.name, value) or not is_exact_cast(a, b)


@pytest.mark.parametrize("a", REAL, ids=lambda d: d.name)
@pytest.mark.parametrize("b", PARTS)
def test_a_complex_target_is_as_good_as_its_parts(a, b):
    assert is_exact_cast(a, TABLE[b]) == is_exact_cast(a, TABLE[PARTS[b]])
    assert not is_exact_cast(TABLE[b], a)


@pytest.mark.parametrize(
    ("a", "b", "exact"),
    [
        pytest.param("complex64", "complex128", True, id="wider"),
        pytest.param("complex128", "complex64", False, id="narrower"),
        pytest.param("complex32", "complex64", True, id="half"),
        pytest.param("bcomplex32", "complex64", True, id="brain"),
        pytest.param("bcomplex32", "complex32", False, id="brain-to-half"),
        pytest.param("qint8", "int8", False, id="opaque"),
        pytest.param("int8", "qint8", False, id="to-opaque"),
        pytest.param("qint8", "qint8", True, id="same-opaque"),
    ],
)
def test_complex_and_opaque(a, b, exact):
    assert is_exact_cast(TABLE[a], TABLE[b]) == exact


def test_exact_is_an_order():
    dtypes = list(TABLE.values())
    assert all(is_exact_cast(d, d) for d in dtypes)
    exact = {(a, b) for a, b in itertools.product(dtypes, dtypes) if is_exact_cast(a, b)}
    assert all((a, c) in exact for a, b in exact for b2, c in exact if b == b2)
    assert all(a == b or (b, a) not in exact for a, b in exact)


@pytest.mark.parametrize("a", NARROW, ids=lambda d: d.name)
@pytest.mark.parametrize("b", [d for d in TABLE.values() if d.refusal is None], ids=lambda d: d.name)
def test_an_exact_cast_on_the_host_comes_back(a, b):
    """NumPy's own casts, which widen on the host, keep what `is_exact_cast` promises, bit by bit (NaNs as NaNs)."""
    if not is_exact_cast(a, b):
        return
    dtype, target = numpy_dtype(a), numpy_dtype(b)
    bits = np.array([False, True]) if a.kind is Kind.BOOL else np.arange(1 << 8 * a.itemsize, dtype=f"u{a.itemsize}")
    with np.errstate(invalid="ignore"):  # bfloat16 has signalling NaNs
        there = bits.view(dtype).astype(target)
        back = (there.real if b.kind is Kind.COMPLEX else there).astype(dtype)
    # NaN alone differs from itself. ml_dtypes has no isnan for all of its dtypes.
    nan = bits.view(dtype) != bits.view(dtype)
    np.testing.assert_array_equal(back.view(bits.dtype)[~nan], bits[~nan])
    assert (back[nan] != back[nan]).all()
