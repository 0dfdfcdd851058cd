"""What makes a function a public call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hostward._torch import torch
from hostward.errors import HostwardError

P = ParamSpec("P")
R = TypeVar("R")


def public(call: Callable[P, R]) -> Callable[P, R]:
    """Make a function a public call: its name is in its errors, and `torch.compile` does not look inside."""
    name = f"{call.__name__}()"
    untraced: list[Callable[P, R]] = []

    @functools.wraps(call)
    def outer(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if "torch._dynamo" in sys.modules:
                if not untraced:  # no functools.cache: torch.compile, which traces this far, warns of it
                    untraced.append(torch.compiler.disable(call))  # type: ignore[no-untyped-call]
                return untraced[0](*args, **kwargs)
            return call(*args, **kwargs)
        except HostwardError as error:
            raise error.located(call=name)  # noqa: B904  (the same error, with the call's name filled in)

    # The mark that torch.compiler.disable sets: a compiled caller breaks its graph here, and under fullgraph=True
    # gets torch's own error. The function itself would import torch._dynamo, two seconds, for everybody.
    outer._torchdynamo_disable = True  # type: ignore[attr-defined]
    return outer
