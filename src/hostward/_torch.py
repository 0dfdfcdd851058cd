"""The one import of torch: a missing or too old torch is an error with the line to paste."""

from __future__ import annotations

from hostward.errors import MissingDependencyError

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":  # a broken installation is the user's to see, not "not installed"
        raise
    raise MissingDependencyError(
        "torch is not installed",
        why="hostward does not depend on torch, so that it never replaces your CPU or CUDA build",
        do="pip install 'hostward[torch]', or install the build that fits your machine",
    ) from error

if not hasattr(torch, "accelerator"):
    raise MissingDependencyError(
        "this torch is too old",
        got=torch.__version__,
        needed="2.6 or newer",
        why="streams and events are used through torch.accelerator, which came with 2.6",
        do="pip install 'torch>=2.6'",
    )

__all__ = ["torch"]
