"""The engine: queue copies, see them land, never early, never torn."""

from __future__ import annotations

from hostward._engine._direct import fetch
from hostward._engine._engine import adopt, run
from hostward._engine._flight import Flight, State, at_once
from hostward._engine._leg import packed

__all__ = ["Flight", "State", "adopt", "at_once", "fetch", "packed", "run"]
