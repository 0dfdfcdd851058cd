"""Measurements whose numbers can be checked: what ``hostward bench`` runs, stores, verifies and prints.

`Case` and `Way` say what is measured, `Session` measures, `verify` recomputes a result file, `markdown`
makes a table of it. Records come back; printing is the command line's. See ``docs/benchmarks.md``.
"""

from __future__ import annotations

from hostward.bench._case import Case, Data, Needs, Role, Way
from hostward.bench._device import CudaDevice, Device, HostDevice, find_gpu
from hostward.bench._result import dumps, merge, read, read_for, write
from hostward.bench._run import Session
from hostward.bench._schema import SCHEMA, problems
from hostward.bench._table import digits, is_current, markdown, quartiles, rows, seconds, write_into
from hostward.bench._verify import Finding, verify

__all__ = [
    "SCHEMA",
    "Case",
    "CudaDevice",
    "Data",
    "Device",
    "Finding",
    "HostDevice",
    "Needs",
    "Role",
    "Session",
    "Way",
    "digits",
    "dumps",
    "find_gpu",
    "is_current",
    "markdown",
    "merge",
    "problems",
    "quartiles",
    "read",
    "read_for",
    "rows",
    "seconds",
    "verify",
    "write",
    "write_into",
]
