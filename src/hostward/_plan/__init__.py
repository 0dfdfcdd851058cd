"""Planning: `Source` descriptions, options and capabilities become a `Plan`, then an `AdmittedPlan`."""

from __future__ import annotations

from hostward._plan._admit import UNASKED_NBYTES, admit, asks_device
from hostward._plan._naive import Naive, naive
from hostward._plan._records import AdmittedPlan, Deliver, Move, Plan, Route, View, Way
from hostward._plan._rules import DIRECT_NBYTES, make_plan

__all__ = [
    "DIRECT_NBYTES",
    "UNASKED_NBYTES",
    "AdmittedPlan",
    "Deliver",
    "Move",
    "Naive",
    "Plan",
    "Route",
    "View",
    "Way",
    "admit",
    "asks_device",
    "make_plan",
    "naive",
]
