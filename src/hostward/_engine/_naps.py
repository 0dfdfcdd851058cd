"""How a waiting thread passes the time: it spins as long as a small copy takes, then naps in growing steps."""

from __future__ import annotations

import time
from collections.abc import Callable

_SPIN_S = 50e-6  # the events of small copies fire within this, and a nap would double their time
_NAP_SHARE = 0.01  # of the time waited so far: what a nap may add to a transfer
_NAP_MAX_S = 0.002  # Ctrl-C and other threads wait no longer than this


def pause(since: float, sleep: Callable[[float], object]) -> None:
    """Return at once while the wait is young, else after a nap; `since` is when it began (`time.monotonic`)."""
    waited = time.monotonic() - since
    if waited > _SPIN_S:
        sleep(min(_NAP_MAX_S, _NAP_SHARE * waited))
