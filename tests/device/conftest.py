"""The fixture of the test device's own tests."""

from __future__ import annotations

import pytest

from device.frame import Device
from device.lag import LagDevice


@pytest.fixture
def lag(device: Device) -> LagDevice:
    """Give the test device, where it is the one that the tests run on."""
    if not isinstance(device, LagDevice):
        pytest.skip("the test device's own tests: run with --device lag")
    return device
