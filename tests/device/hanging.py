"""A test that hangs for good, for `test_frame.py`: its name keeps it out of every other run."""

from __future__ import annotations

from device.lag import LagDevice


def test_hangs(lag: LagDevice) -> None:
    lag.lagdev.latch_hold(0, 0)  # behind the frame's back, which would open it in the end
    lag.current_stream().synchronize()
