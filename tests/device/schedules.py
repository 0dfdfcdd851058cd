"""Every order in which n latches can open, drawn by hypothesis.

Which of several held streams goes on first decides what a race looks like. Timing would leave that
to luck; here it is drawn, and the same seed gives the same orders on every machine (the profile is
loaded in ``tests/conftest.py``).
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

PROFILE = "hostward"


def schedules(n: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw an order for ``n`` latches: a permutation of ``range(n)``; shrinks towards counting up."""
    return st.permutations(range(n)).map(tuple)


def load_profile() -> None:
    settings.register_profile(
        PROFILE,
        derandomize=True,
        database=None,
        deadline=None,  # machines differ, and so does the first use of a kernel
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile(PROFILE)
