"""Every number that is derived from the samples, in one pure place.

A run writes what `derive` returns; ``hostward bench verify`` calls it again on the stored samples and
compares. Nothing derived may come from anywhere else.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Record = dict[str, Any]


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile (inclusive method: the samples are all there is)."""
    if len(samples) == 1:
        return (samples[0],) * 3
    q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return q1, statistics.median(samples), q3


def derive_way(way: Mapping[str, Any]) -> Record:
    """Return the derived fields of one way's record."""
    q1, median, q3 = spread(way["samples_s"])
    drops = way["drop_s"]
    return {"median_s": median, "q1_s": q1, "q3_s": q3, "drop_median_s": statistics.median(drops) if drops else None}


def derive_case(case: Mapping[str, Any]) -> Record:
    """Return the derived fields of one case's record: ``against``, ``against_auto``, ``figures``, ``met``.

    Only ``nbytes``, ``needs`` and, of each way, ``name``, ``role``, ``ours`` and ``samples_s`` are read.
    """
    median = {way["name"]: spread(way["samples_s"])[1] for way in case["ways"]}
    of_role = {way["role"]: median[way["name"]] for way in case["ways"]}
    others = [way["name"] for way in case["ways"] if not way["ours"]]
    primary, auto, link = of_role["primary"], of_role.get("auto"), of_role.get("link")

    def ratios(ours: float) -> dict[str, float]:
        return {name: median[name] / ours for name in others}

    figures: dict[str, float | None] = {
        "gb_per_s": case["nbytes"] / primary / 1e9,
        "gb_per_s_auto": case["nbytes"] / auto / 1e9 if auto else None,
        "share_of_link": link / primary if link else None,
        "share_of_link_auto": link / auto if link and auto else None,
    }
    against = ratios(primary)
    return {
        "against": against,
        "against_auto": ratios(auto) if auto else None,
        "figures": figures,
        "met": [_met(*need) for need in _needs(case["needs"], figures, against)],
    }


def _needs(
    needs: Mapping[str, Any], figures: Mapping[str, float | None], against: Mapping[str, float]
) -> list[tuple[str, float, float | None]]:
    wanted: list[tuple[str, float, float | None]] = []
    if needs["share_of_link"] is not None:
        wanted.append(("share_of_link", needs["share_of_link"], figures["share_of_link"]))
    wanted += [(f"against {name}", ratio, against.get(name)) for name, ratio in needs["against"].items()]
    return wanted


def _met(need: str, needed: float, got: float | None) -> Record:
    return {"need": need, "needed": needed, "got": got, "met": got is not None and got >= needed}
