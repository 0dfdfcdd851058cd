"""The fixture of tests that only CUDA can show."""

from __future__ import annotations

import pytest

from device.frame import Device


@pytest.fixture
def gpu(device: Device) -> Device:
    """Give the GPUs of this machine."""
    if device.type != "cuda":
        pytest.skip("only CUDA has this: run with --device cuda")
    return device
