"""One table of torch's dtypes: the NumPy dtype or the refusal, the item size, which casts are exact.

Torch is not imported here, so the table works by name (`TABLE`, `lookup`), and a ``torch.dtype`` is recognised by its
text. `ml_dtypes` is imported when the first bfloat16 or float8 array is made: that takes most of a second.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from hostward.errors import DtypeError, OptionError


class Kind(Enum):
    """What an element is, as far as casts care. ``OPAQUE``: torch itself has no casts for it."""

    BOOL = "bool"
    INT = "int"
    UINT = "uint"
    FLOAT = "float"
    COMPLEX = "complex"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class DType:
    """One torch dtype.

    Equal names are equal dtypes: there is one `DType` per name, so the other fields follow from it.

    Attributes
    ----------
    name
        Torch's name without ``torch.``.
    itemsize
        Bytes per element; 0 where several elements share a byte (``quint4x2``, ``quint2x4``).
    refusal
        ``None`` where NumPy (or ml_dtypes) has the dtype; else what to call instead.
    why
        The reason for the refusal.
    """

    name: str
    itemsize: int = field(compare=False)
    kind: Kind = field(compare=False)
    refusal: str | None = field(default=None, compare=False)
    why: str | None = field(default=None, compare=False, repr=False)


_ASK_COMPLEX64: Final = 'ask for dtype="complex64", or pass `torch.view_as_real(x)`'
_ML_DTYPES: Final = frozenset(
    ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)


def _table() -> dict[str, DType]:
    """All dtypes of torch 2.6 to 2.14 (c10/core/ScalarType.h, later torch/headeronly/core/ScalarType.h)."""
    rows = [DType("bool", 1, Kind.BOOL)]
    rows += [DType(f"int{8 * n}", n, Kind.INT) for n in (1, 2, 4, 8)]
    rows += [DType(f"uint{8 * n}", n, Kind.UINT) for n in (1, 2, 4, 8)]
    rows += [DType(f"float{8 * n}", n, Kind.FLOAT) for n in (2, 4, 8)]
    rows += [DType(f"complex{8 * n}", n, Kind.COMPLEX) for n in (8, 16)]
    rows += [DType(name, 2 if name == "bfloat16" else 1, Kind.FLOAT) for name in sorted(_ML_DTYPES)]
    for name, part in (("complex32", "float16"), ("bcomplex32", "bfloat16")):
        rows.append(DType(name, 4, Kind.COMPLEX, _ASK_COMPLEX64, f"NumPy has no complex numbers of two {part}"))

    def opaque(names: list[str], itemsize: int, refusal: str, why: str) -> None:
        rows.extend(DType(name, itemsize, Kind.OPAQUE, refusal, why) for name in names)

    values = "pass `x.dequantize()` for the values or `x.int_repr()` for the integers"
    scaled = "its integers mean nothing without the tensor's scale and zero point"
    opaque(["qint8", "quint8"], 1, values, scaled)
    opaque(["qint32"], 4, values, scaled)
    # Torch reports an item size of 1 for these two, but counts two and four elements to the byte.
    opaque(["quint4x2", "quint2x4"], 0, values, scaled)

    view = "pass `x.view(torch.uint8)` for the bytes"
    opaque(["float4_e2m1fn_x2"], 1, view, "two 4-bit floats share each byte")
    opaque(["float8_e8m0fnu_x4"], 4, view, "four 8-bit scales share each element")
    opaque(["bits8", "bits1x8", "bits2x4", "bits4x2"], 1, view, "its bits have no meaning of their own")
    opaque(["bits16"], 2, view, "its bits have no meaning of their own")
    narrow = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
    opaque(narrow, 1, view, "torch has no arithmetic for it, only a place to keep the bytes")
    return {row.name: row for row in rows}


TABLE: Final[Mapping[str, DType]] = MappingProxyType(_table())


def lookup(name: str) -> DType:
    """Return the dtype that torch calls ``torch.<name>``.

    Raises
    ------
    DtypeError
        The table has no such name: torch is newer than this version of hostward.
    """
    try:
        return TABLE[name]
    except KeyError:
        raise DtypeError(
            "unknown torch dtype",
            got=f"torch.{name}",
            why="this version of hostward knows the dtypes of torch 2.6 to 2.14",
            do="pass `x.view(torch.uint8)` for the bytes, or `x.to(torch.float32)` for the values",
        ) from None


@functools.cache
def _numpy_dtype(name: str) -> np.dtype[np.generic]:
    if name not in _ML_DTYPES:
        return np.dtype(name)
    import ml_dtypes  # here, not above: 0.75 s that only these dtypes need

    dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def numpy_dtype(d: DType) -> np.dtype[np.generic]:
    """Return the NumPy dtype with the same bytes (from ml_dtypes for bfloat16 and float8).

    Raises
    ------
    DtypeError
        There is none; ``do`` says what to call instead.
    """
    if d.refusal is not None:
        raise DtypeError(f"torch.{d.name} has no NumPy dtype", why=d.why, do=d.refusal)
    return _numpy_dtype(d.name)


# ---------------------------------------------------------------------------------------------------------------------
# What a caller may write for a dtype.

_ALIASES: Final[Mapping[str, str]] = {
    "half": "float16",
    "double": "float64",
    "short": "int16",
    "long": "int64",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "bit": "uint1",
}
_AMBIGUOUS: Final[Mapping[str, tuple[str, str]]] = {"float": ("float32", "float64"), "int": ("int32", "int64")}
_PYTHON: Final[Mapping[type, str]] = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
# NumPy's families of scalar types: np.dtype() would make something up for them.
_FAMILIES: Final = frozenset({np.generic, np.number, np.integer, np.inexact, np.flexible, np.character}) | frozenset(
    {np.signedinteger, np.unsignedinteger, np.floating, np.complexfloating}
)
_NEEDED: Final = "a name such as 'float16', a NumPy, ml_dtypes or torch dtype, or bool, int, float, complex"


def from_any(spec: object) -> DType:
    """Return the dtype that `spec` means.

    Parameters
    ----------
    spec
        A name (torch's, with or without ``torch.``, or NumPy's), a ``np.dtype``, a NumPy or ml_dtypes scalar type, a
        ``torch.dtype``, or Python's ``bool``, ``int``, ``float``, ``complex`` with NumPy's meaning (64-bit parts).

    Raises
    ------
    OptionError
        `spec` is none of these, or an ambiguous name: ``"float"`` has 32 bits for torch and 64 for NumPy.
    """
    if isinstance(spec, DType):
        return spec
    if isinstance(spec, type) and spec in _PYTHON:
        return TABLE[_PYTHON[spec]]
    if isinstance(spec, str):
        return _from_name(spec)
    if isinstance(spec, np.dtype):
        return _from_numpy(spec, spec)
    if isinstance(spec, type) and issubclass(spec, np.generic) and spec not in _FAMILIES:
        return _from_numpy(np.dtype(spec), spec)
    if f"{type(spec).__module__}.{type(spec).__name__}" == "torch.dtype":
        return lookup(str(spec).removeprefix("torch."))
    raise _unknown(spec)


def _from_name(spec: str) -> DType:
    name = spec.removeprefix("torch.")
    if name in TABLE:
        return TABLE[name]
    if name in _AMBIGUOUS:
        torch_name, numpy_name = _AMBIGUOUS[name]
        if name != spec:
            return TABLE[torch_name]
        raise OptionError(
            "ambiguous value for dtype=",
            got=repr(spec),
            why=f"torch reads it as {torch_name}, NumPy as {numpy_name}",
            do=f"say dtype={torch_name!r} or dtype={numpy_name!r}",
        )
    if name in _ALIASES:
        return TABLE[_ALIASES[name]]
    if name != spec:
        raise _unknown(spec)
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):  # NumPy parses the text, and fails in all three ways
        raise _unknown(spec) from None
    return _from_numpy(dtype, spec)


def _from_numpy(dtype: np.dtype[np.generic], spec: object) -> DType:
    if not dtype.isnative:
        raise OptionError(
            "unknown value for dtype=",
            got=repr(spec),
            needed="a dtype in this machine's byte order",
            why="no device works in swapped bytes",
            do=f"say dtype={dtype.name!r}, and swap the result on the host: `a.astype({dtype.str!r})`",
        )
    if dtype.name not in TABLE:  # structured, text, dates, objects, float128, or one of ml_dtypes' that torch lacks
        raise _unknown(spec)
    return TABLE[dtype.name]


def _unknown(spec: object) -> OptionError:
    return OptionError("unknown value for dtype=", got=repr(spec), needed=_NEEDED)


# ---------------------------------------------------------------------------------------------------------------------
# Casts.


class _Values(NamedTuple):
    """The values of a dtype (of one part of a complex): ``m * 2**step``, with ``m`` of at most `digits` bits.

    `low` and `high` are the finite extremes; `specials` are the values outside this rule that a dtype may lack.
    """

    digits: int
    step: int
    low: float
    high: float
    specials: frozenset[str]


def _integers(bits: int, signed: bool) -> _Values:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return _Values(high.bit_length(), 0, low, high, frozenset(["0"]))


def _floats(digits: int, step: int, high: float, *lacks: str) -> _Values:
    return _Values(digits, step, -high, high, frozenset(["0", "-0", "nan", "inf"]).difference(lacks))


# float8: https://onnx.ai/onnx/technical/float8.html. "fn": finite, so no infinities; "uz": no negative zero.
_F16, _F32 = _floats(11, -24, 65504.0), _floats(24, -149, (2 - 2.0**-23) * 2.0**127)
_BF16, _F64 = _floats(8, -133, (2 - 2.0**-7) * 2.0**127), _floats(53, -1074, sys.float_info.max)
_VALUES: Final[Mapping[str, _Values]] = {
    "bool": _integers(1, signed=False),
    **{f"int{bits}": _integers(bits, signed=True) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": _integers(bits, signed=False) for bits in (8, 16, 32, 64)},
    "float8_e4m3fn": _floats(4, -9, 448.0, "inf"),
    "float8_e4m3fnuz": _floats(4, -10, 240.0, "inf", "-0"),
    "float8_e5m2": _floats(3, -16, 57344.0),
    "float8_e5m2fnuz": _floats(3, -17, 57344.0, "inf", "-0"),
    "float8_e8m0fnu": _Values(1, -127, 2.0**-127, 2.0**127, frozenset(["nan"])),  # powers of two: no zero, no sign
    "float16": _F16,
    "bfloat16": _BF16,
    "float32": _F32,
    "float64": _F64,
    "complex32": _F16,
    "bcomplex32": _BF16,
    "complex64": _F32,
    "complex128": _F64,
}


def is_exact_cast(a: DType, b: DType) -> bool:
    """Say whether every value of `a` is a value of `b`, the sign of zero, infinities and NaN included."""
    if a == b:
        return True
    if Kind.OPAQUE in (a.kind, b.kind) or (a.kind is Kind.COMPLEX and b.kind is not Kind.COMPLEX):
        return False
    x, y = _VALUES[a.name], _VALUES[b.name]
    fits = x.digits <= y.digits and x.step >= y.step and y.low <= x.low and x.high <= y.high
    return fits and x.specials <= y.specials


def cast_error(a: DType, b: DType) -> DtypeError | None:
    """Return the error that refuses a cast from `a` to `b` (its path is the caller's to fill in), or ``None``.

    To ``bool`` everything but opaque dtypes may go: ``x != 0``, as in torch.
    """
    what = f"cannot cast torch.{a.name} to torch.{b.name}"
    if a == b or (a.kind is Kind.COMPLEX and b.kind is Kind.BOOL):
        return None
    if a.kind is Kind.OPAQUE:
        return DtypeError(what, why=a.why, do=a.refusal)
    if b.kind is Kind.OPAQUE:
        return DtypeError(what, why=b.why, do="ask for a dtype that NumPy or ml_dtypes has, such as 'float32'")
    if a.kind is Kind.COMPLEX and b.kind is not Kind.COMPLEX:
        return DtypeError(what, why="the imaginary part would be lost", do="pass `x.real` or `x.abs()`")
    return None


def is_cast_defined(a: DType, b: DType) -> bool:
    """Say whether a cast from `a` to `b` is one that hostward makes; `cast_error` says why not."""
    return cast_error(a, b) is None


# ---------------------------------------------------------------------------------------------------------------------
# The public option ``dtype=``.


@dataclass(frozen=True, slots=True)
class Request:
    """The option ``dtype=``, normalised: hashable, and equal for equal wishes, so it may be part of a cache key.

    Attributes
    ----------
    plain
        For a bare tensor of any dtype, and for the floating leaves of a tree.
    exact, floating
        The mapping's pairs, sorted by name, and its ``"floating"`` entry. An exact pair wins.
    """

    plain: DType | None = None
    exact: tuple[tuple[DType, DType], ...] = ()
    floating: DType | None = None

    def target(self, source: DType, bare: bool) -> DType:
        """Return the dtype that a leaf of dtype `source` is delivered in; `bare`: it is the whole tree."""
        is_float = source.kind is Kind.FLOAT
        if self.plain is not None:
            return self.plain if bare or is_float else source
        for key, target in self.exact:
            if key == source:
                return target
        return self.floating if is_float and self.floating is not None else source


def normalise_request(option: object) -> Request:
    """Normalise ``dtype=``: ``None``, a dtype, or a mapping ``{from: to}`` whose keys may be ``"floating"``.

    To spare one dtype from ``"floating"``, map it to itself.

    Raises
    ------
    OptionError
        Not a dtype nor a mapping of dtypes, or two keys that mean the same dtype disagree.
    DtypeError
        NumPy has no such target, or a pair asks for a cast that is refused for every tensor.
    """
    if option is None:
        return Request()
    if not isinstance(option, Mapping):
        return Request(plain=_target(option))
    floating = _target(option["floating"]) if "floating" in option else None
    exact: dict[DType, DType] = {}
    for key, value in option.items():
        if isinstance(key, str) and key == "floating":
            continue
        source, target = from_any(key), _target(value)
        if exact.setdefault(source, target) != target:
            raise OptionError(
                f"dtype= maps {source.name} twice", got=f"{exact[source].name} and {target.name}", needed="one target"
            )
        if error := cast_error(source, target):
            raise error
    return Request(exact=tuple(sorted(exact.items(), key=lambda pair: pair[0].name)), floating=floating)


def _target(spec: object) -> DType:
    target = from_any(spec)
    if target.refusal is not None:
        raise DtypeError(
            f"dtype= asks for {target.name}, and NumPy has no such dtype",
            why=target.why,
            do="ask for a dtype that NumPy or ml_dtypes has, such as 'complex64', 'float32' or 'uint8'",
        )
    return target


def requested(spec: object, source: DType, *, bare: bool) -> DType:
    """Return the dtype that a leaf of dtype `source` is delivered in under ``dtype=spec``."""
    return normalise_request(spec).target(source, bare)
