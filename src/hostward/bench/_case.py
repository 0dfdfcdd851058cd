"""What a case is: data on a device, ways to bring it to the host, and what has to come out.

A way is source text. The frame compiles that very text (`Way.compile`), so what a result file and a
table show is what was timed; there is no second copy of it to drift away.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from textwrap import dedent
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


class Role(Enum):
    """What a way is compared as.

    ``primary`` and ``auto`` are hostward's: every ratio of ``against`` refers to the primary one.
    ``link`` is the bare copy that hostward's rate is a share of; it counts among the others too.
    """

    PRIMARY = "primary"
    AUTO = "auto"
    LINK = "link"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to get the result.

    Parameters
    ----------
    name
        What tables call it; distinct within a case.
    code
        Python source. Its last line is an expression, which is the result, as in a notebook. It sees
        the case's data by name, and ``np``, ``torch``, ``hostward``.
    role
        What it is compared as.
    prepared
        Names of the case's data that exist only for this way (a pinned destination, say). Their
        bytes are no part of a call's peak, so they are shown beside it.
    note
        What a reader must know before comparing it with the others.
    """

    name: str
    code: str
    role: Role = Role.OTHER
    prepared: tuple[str, ...] = ()
    note: str = ""

    @property
    def ours(self) -> bool:
        """Whether this is hostward's own way."""
        return self.role in (Role.PRIMARY, Role.AUTO)

    @property
    def text(self) -> str:
        """The code without its common indentation: what is shown, and what is compiled."""
        return dedent(self.code).strip()

    def compile(self, data: Mapping[str, object]) -> Callable[[], Any]:
        """Make the function that runs exactly `text`, with `data` as its global names.

        Raises
        ------
        ValueError
            The last line is no expression.
        """
        from hostward._torch import torch

        space: dict[str, object] = {"np": np, "torch": torch, "hostward": import_module("hostward"), **data}
        exec(_as_function(self.text, self.name), space)
        made: Callable[[], Any] = space.pop("way")  # type: ignore[assignment]
        return made


def _as_function(text: str, name: str) -> CodeType:
    statements = ast.parse(text).body
    last = statements[-1] if statements else None
    if not isinstance(last, ast.Expr):
        raise ValueError(f"the last line of way {name!r} has to be an expression: {text!r}")
    module = ast.parse("def way():\n    pass\n")
    function = module.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [*statements[:-1], ast.copy_location(ast.Return(last.value), last)]
    return compile(ast.fix_missing_locations(module), f"<way {name}>", "exec")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a case's figures have to reach; a missed need is a finding of ``hostward bench verify``."""

    share_of_link: float | None = None
    against: Mapping[str, float] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """Return it as it stands in a result file."""
        return {"share_of_link": self.share_of_link, "against": dict(self.against)}


@dataclass(frozen=True, slots=True)
class Data:
    """What `Case.setup` made.

    `reference` is computed on the host, from the same numbers that were uploaded, and by NumPy alone:
    it never crossed the link that is being measured. `sources` names the tensors in `names` whose
    storage the busy test overwrites.
    """

    names: Mapping[str, Any]
    reference: np.ndarray[Any, np.dtype[Any]]
    sources: tuple[str, ...] = ("x",)


@dataclass(frozen=True, slots=True)
class Case:
    """One measured situation.

    Parameters
    ----------
    id, what
        The name in files and on the command line; one line for people.
    nbytes
        Bytes of the result on the host.
    setup
        Makes the data on a device.
    ways
        All ways, one of them ``primary``.
    needs
        What has to come out.
    calls_per_sample
        More than one where a single call is too short for the clock: a sample is then the mean of so
        many calls in a row, each result dropped when the next one replaces it.
    budget_s
        Time for all samples of all ways; it decides how many rounds are run, within the frame's bounds.
    note
        What is not comparable.
    """

    id: str
    what: str
    nbytes: int
    setup: Callable[[torch.device], Data]
    ways: tuple[Way, ...]
    needs: Needs = field(default_factory=Needs)
    calls_per_sample: int = 1
    budget_s: float = 8.0
    note: str = ""

    def __post_init__(self) -> None:
        names = [way.name for way in self.ways]
        others = {way.name for way in self.ways if not way.ours}
        roles = [way.role for way in self.ways]
        problems = {
            "two ways have the same name": len(set(names)) != len(names),
            "exactly one way is primary": roles.count(Role.PRIMARY) != 1,
            "one way at most is auto, and one the link": max(roles.count(Role.AUTO), roles.count(Role.LINK)) > 1,
            "a need names no way of the others": not set(self.needs.against) <= others,
            "a share of the link needs the link": self.needs.share_of_link is not None and Role.LINK not in roles,
        }
        for problem, found in problems.items():
            if found:
                raise ValueError(f"case {self.id!r}: {problem}")
