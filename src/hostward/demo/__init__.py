"""The main job on real input: photographs, a Gabor filter bank on the device, scikit-learn on the host.

`run` in ``_run`` does it all; the modules beside it are its parts and print nothing. They need torch,
scikit-learn (which ships the photographs) and Pillow; importing this package needs none of them.
"""

from __future__ import annotations

from importlib.util import find_spec

from hostward.errors import MissingDependencyError

__all__ = ["STEPS", "require_parts"]

STEPS = 7  # how often `hostward.demo._run.run` calls `on_step`; here, so that a progress bar can start before torch

_PARTS = {"torch": "torch", "sklearn": "scikit-learn", "PIL": "pillow"}


def require_parts() -> None:
    """Check that what the demo is built on is installed, before anything is imported or written.

    Raises
    ------
    MissingDependencyError
        One or more of torch, scikit-learn and Pillow cannot be found. Nothing is imported here: a part that is
        there but broken shows its own error when it is used.
    """
    missing = [name for module, name in _PARTS.items() if not _found(module)]
    if not missing:
        return
    extras = "demo,torch" if "torch" in missing else "demo"
    raise MissingDependencyError(
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
        why="the demo runs torch on the photographs that scikit-learn ships, and draws with pillow",
        do=f"pip install 'hostward[{extras}]'",
    )


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a finder that refuses it, as import hooks may
        return False
