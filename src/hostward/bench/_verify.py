"""Check a result file: shape, every derived figure against the samples, and what has to be true."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hostward.bench._case import Case
from hostward.bench._figures import Record, derive_case, derive_way
from hostward.bench._measure import FEWEST_ROUNDS
from hostward.bench._schema import problems

RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: in which case and figure, what the file says, what it should say.

    `recomputed` is what the samples, or the case's definition, give. Both are ``None`` where only
    `problem` says something.
    """

    case: str
    figure: str
    problem: str
    stored: Any = None
    recomputed: Any = None

    def __str__(self) -> str:
        values = "" if self.stored is self.recomputed is None else f": {self.stored!r}, recomputed {self.recomputed!r}"
        return f"{self.case or 'file'}: {self.figure}: {self.problem}{values}"


def verify(document: Record, cases: Mapping[str, Case]) -> list[Finding]:
    """Return everything that is wrong with a result file; an empty list if nothing is.

    Parameters
    ----------
    document
        A result file, as `_result.read` returns it.
    cases
        The cases as they are defined now, by id. A stored case has to be one of them, with the same
        code, needs and size: numbers of code that has changed since are no numbers of this code.
    """
    shape = [Finding(_case_at(document, each.at), each.at, f"schema: {each.text}") for each in problems(document)]
    if shape:
        return shape  # nothing below can be trusted to find its fields
    return list(_of_document(document, cases))


def _of_document(document: Record, cases: Mapping[str, Case]) -> Iterator[Finding]:
    ids = [case["id"] for case in document["cases"]]
    for name in sorted({name for name in ids if ids.count(name) > 1}):
        yield Finding(name, "id", "stands in the file more than once")
    for case in document["cases"]:
        definition = cases.get(case["id"])
        if definition is None:
            yield Finding(case["id"], "id", "no such case is defined")
        else:
            yield from _changed_since(case, definition)
        roles = [way["role"] for way in case["ways"]]
        if roles.count("primary") != 1:
            yield Finding(case["id"], "ways", "exactly one way has to be the primary one")
            continue
        yield from _derived(case)
        yield from _demands(case)


def _changed_since(case: Record, definition: Case) -> Iterator[Finding]:
    stored = {
        "what": case["what"],
        "nbytes": case["nbytes"],
        "needs": case["needs"],
        "ways": [(way["name"], way["role"], way["code"]) for way in case["ways"]],
    }
    defined = {
        "what": definition.what,
        "nbytes": definition.nbytes,
        "needs": definition.needs.as_record(),
        "ways": [(way.name, way.role.value, way.text) for way in definition.ways],
    }
    for figure, value in stored.items():
        if value != defined[figure]:
            yield Finding(case["id"], figure, "is not what the case defines (measure again)", value, defined[figure])


def _derived(case: Record) -> Iterator[Finding]:
    for way in case["ways"]:
        for figure, value in derive_way(way).items():
            yield from _compare(case["id"], f"ways[{way['name']}].{figure}", way[figure], value)
    for figure, value in derive_case(case).items():
        yield from _compare(case["id"], figure, case[figure], value)


def _compare(case: str, figure: str, stored: Any, recomputed: Any) -> Iterator[Finding]:
    if isinstance(stored, dict) and isinstance(recomputed, dict):
        for name in dict.fromkeys([*recomputed, *stored]):
            if name not in stored:
                yield Finding(case, f"{figure}[{name}]", "is missing", None, recomputed[name])
            else:
                yield from _compare(case, f"{figure}[{name}]", stored[name], recomputed.get(name))
    elif isinstance(stored, list) and isinstance(recomputed, list):
        if len(stored) != len(recomputed):
            yield Finding(case, figure, "has another number of entries", len(stored), len(recomputed))
        for number, (one, other) in enumerate(zip(stored, recomputed, strict=False)):
            yield from _compare(case, f"{figure}[{number}]", one, other)
    elif not _same(stored, recomputed):
        yield Finding(case, figure, "does not follow from the samples", stored, recomputed)


def _same(stored: Any, recomputed: Any) -> bool:
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in (stored, recomputed)):
        return math.isclose(stored, recomputed, rel_tol=RELATIVE_TOLERANCE)
    return bool(stored == recomputed and type(stored) is type(recomputed))


def _demands(case: Record) -> Iterator[Finding]:
    name, samples = case["id"], case["run"]["samples"]
    if samples < FEWEST_ROUNDS:
        yield Finding(name, "run.samples", f"fewer than {FEWEST_ROUNDS} samples", samples, None)
    for way in case["ways"]:
        place = f"ways[{way['name']}]"
        if way["ours"] != (way["role"] in ("primary", "auto")):
            yield Finding(name, f"{place}.ours", "does not fit its role", way["ours"], way["role"])
        if len(way["samples_s"]) != samples:
            yield Finding(name, f"{place}.samples_s", "not as many as the run says", len(way["samples_s"]), samples)
        if way["ours"]:
            yield from _demands_of_ours(name, place, way)
    for need in derive_case(case)["met"]:
        if not need["met"]:
            yield Finding(name, f"needs {need['need']}", "MISSED", need["needed"], need["got"])


def _demands_of_ours(name: str, place: str, way: Record) -> Iterator[Finding]:
    if not way["bytes_ok"]:
        yield Finding(name, f"{place}.bytes_ok", "hostward returned wrong bytes", False, True)
    if not way["c_order"]:
        yield Finding(name, f"{place}.c_order", "hostward's result is not C-contiguous", False, True)
    if way["wrong_when_busy"]:
        yield Finding(name, f"{place}.wrong_when_busy", "hostward read too early", way["wrong_when_busy"], 0.0)


def _case_at(document: Record, place: str) -> str:
    """Return the id of the case that a place such as ``cases[2].nbytes`` lies in, as far as it has one."""
    if not place.startswith("cases["):
        return ""
    number = int(place[len("cases[") : place.index("]")])
    case = document["cases"][number]
    return str(case.get("id", place)) if isinstance(case, dict) else place
