"""hostward: anything on a GPU into NumPy arrays, race-free and at link speed.

Importing this module is cheap: torch, NumPy and ml_dtypes are loaded by the first call that needs
them. `hostward.errors` holds every exception and warning.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from hostward import errors

if TYPE_CHECKING:
    from hostward._calls import explain, to_numpy, to_python

__version__ = "0.1.0"

__all__ = ["__version__", "errors", "explain", "to_numpy", "to_python"]

_HOME = {"explain": "hostward._calls", "to_numpy": "hostward._calls", "to_python": "hostward._calls"}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use (PEP 562)."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
