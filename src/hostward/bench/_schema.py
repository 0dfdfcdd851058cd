"""The result file's shape, version 1, and a small checker for it.

A shape is a type (``float`` takes whole numbers too, ``bool`` is no number), ``{name: shape}`` for an
object with exactly those fields, `Each` for a list, `Values` for an object with any names, `Maybe` for
what may be null, `Positive` and `OneOf`. Field names are documented in ``docs/benchmarks.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Maybe:
    """The shape, or null."""

    shape: Any


@dataclass(frozen=True, slots=True)
class Each:
    """A list whose items have the shape; at least `fewest` of them."""

    shape: Any
    fewest: int = 0


@dataclass(frozen=True, slots=True)
class Values:
    """An object whose values have the shape, under any names."""

    shape: Any


@dataclass(frozen=True, slots=True)
class Positive:
    """A finite number above zero."""


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of these values."""

    values: tuple[Any, ...]


_TEXT, _NUMBER, _COUNT = Maybe(str), Maybe(float), Maybe(int)

GIT = Maybe({"commit": str, "dirty": Maybe(bool), "stated": bool})

MACHINE: dict[str, Any] = {
    **dict.fromkeys(("cpu_model", "kernel", "python", "hostward", "torch", "numpy"), str),
    **dict.fromkeys(("gpu", "driver", "cuda", "transparent_huge_pages"), _TEXT),
    **dict.fromkeys(("cpu_count", "gpu_count", "torch_threads"), int),
    **dict.fromkeys(("memory_nbytes", "gpu_nbytes", "link_generation_max", "link_generation", "link_width"), _COUNT),
    "virtual": Maybe(bool),
    "link_gb_per_s": _NUMBER,
}

RUN: dict[str, Any] = {
    **dict.fromkeys(("date", "command", "hostward", "torch", "numpy", "python", "kernel"), str),
    **dict.fromkeys(("cuda", "driver"), _TEXT),
    **dict.fromkeys(("samples", "calls_per_sample", "warm_up_rounds", "torch_threads"), int),
    "mode": OneOf(("full", "quick")),
    "git": GIT,
    "touched_nbytes": int,
    "link_gb_per_s": _NUMBER,
    "busy_control": _NUMBER,
}

NEEDS: dict[str, Any] = {"share_of_link": _NUMBER, "against": Values(float)}

WAY: dict[str, Any] = {
    **dict.fromkeys(("name", "code", "note"), str),
    **dict.fromkeys(("first_s", "median_s", "q1_s", "q3_s", "host_interval_s"), float),
    **dict.fromkeys(("ours", "bytes_ok", "c_order"), bool),
    **dict.fromkeys(("drop_median_s", "wrong_when_busy"), _NUMBER),
    **dict.fromkeys(("host_peak", "host_peak_rss", "host_peak_used", "pinned_peak", "gpu_peak"), _COUNT),
    "role": OneOf(("primary", "auto", "link", "other")),
    "samples_s": Each(Positive(), fewest=1),
    "drop_s": Each(float),
    "returned_early": Maybe(bool),
    "prepared_nbytes": int,
}

CASE: dict[str, Any] = {
    **dict.fromkeys(("id", "what", "note"), str),
    "nbytes": int,
    "run": RUN,
    "needs": NEEDS,
    "ways": Each(WAY, fewest=1),
    "against": Values(float),
    "against_auto": Maybe(Values(float)),
    "figures": dict.fromkeys(("gb_per_s", "gb_per_s_auto", "share_of_link", "share_of_link_auto"), _NUMBER),
    "met": Each({"need": str, "needed": float, "got": _NUMBER, "met": bool}),
}

DOCUMENT: dict[str, Any] = {
    "schema": OneOf((SCHEMA,)),
    "machine": MACHINE,
    "command": str,
    "git": GIT,
    "cases": Each(CASE),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Where a value does not have its shape (``cases[0].ways[1].samples_s``), and how."""

    at: str
    text: str


def problems(value: object, shape: Any = None, at: str = "") -> Iterator[Problem]:
    """Yield every place where `value` does not have `shape` (a whole result file by default)."""
    shape = DOCUMENT if shape is None else shape
    match shape:
        case Maybe(inner):
            if value is not None:
                yield from problems(value, inner, at)
        case OneOf(values):
            if value not in values or isinstance(value, bool):
                yield Problem(at, f"got {value!r}, needed one of {', '.join(map(repr, values))}")
        case Positive():
            if not _is(value, float) or not 0 < cast(float, value) < math.inf:
                yield Problem(at, f"got {value!r}, needed a number above 0")
        case Each(inner, fewest):
            if not isinstance(value, list) or len(value) < fewest:
                yield Problem(at, f"got {_kind(value)}, needed a list of at least {fewest}")
            else:
                for number, item in enumerate(value):
                    yield from problems(item, inner, f"{at}[{number}]")
        case Values() | dict():
            yield from _object_problems(value, shape, at)
        case _:
            if not _is(value, shape):
                yield Problem(at, f"got {_kind(value)}, needed {shape.__name__}")


def _object_problems(value: object, shape: Any, at: str) -> Iterator[Problem]:
    if not isinstance(value, dict):
        yield Problem(at, f"got {_kind(value)}, needed an object")
        return
    fields = dict.fromkeys(value, shape.shape) if isinstance(shape, Values) else shape
    for name in sorted(fields.keys() | value.keys()):
        place = f"{at}.{name}" if at else name
        if name not in value:
            yield Problem(place, "missing")
        elif name not in fields:
            yield Problem(place, f"unknown in schema {SCHEMA}")
        else:
            yield from problems(value[name], fields[name], place)


def _is(value: object, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def _kind(value: object) -> str:
    return {"NoneType": "null", "dict": "an object", "list": "a list"}.get(type(value).__name__, type(value).__name__)
