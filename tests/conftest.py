"""Which device the tests run on, and what every test may count on there.

``--device none`` (the default) skips the tests that need one. ``--device lag`` runs them on the test
device, which takes over the whole process; ``--device cuda`` on the GPUs of this machine. Tests ask
for the `device` fixture (`device.frame.Device`) and are the same for both.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# `device` is a package beside this file; pytest's importlib mode puts nothing on the path.
sys.path.insert(0, str(Path(__file__).parent))

from device.schedules import load_profile

if TYPE_CHECKING:
    from device.frame import Device

DEVICE = pytest.StashKey["Device | str"]()  # a str: the reason why there is none
STDERR = pytest.StashKey[int]()

load_profile()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hostward")
    group.addoption("--device", choices=["none", "lag", "cuda"], default="none", help="where device tests run")
    group.addoption("--require-device", action="store_true", help="fail, not skip, where there is no device")
    # A test that blocks inside C++ cannot be interrupted by Python: then the stacks of all threads are printed
    # and the run ends. Latches open by themselves well before that (`frame.LATCH_LIMIT_S`).
    group.addoption("--watchdog", type=float, default=60.0, metavar="SECONDS", help="for each test with a device")


def pytest_configure(config: pytest.Config) -> None:
    # Before anything imports torch and uses it: the test device has to be there from the start.
    config.stash[DEVICE] = _make_device(config.getoption("--device"))
    config.stash[STDERR] = os.dup(2)  # the real one: tests run with theirs captured
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts its background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests of Ctrl-C need to hear it
    # torch says so once a process, wherever the first complex32 tensor is made; we test it on purpose.
    config.addinivalue_line("filterwarnings", "ignore:ComplexHalf support is experimental:UserWarning")


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.cancel_dump_traceback_later()
    stderr = config.stash.get(STDERR, None)
    if stderr is not None:
        os.close(stderr)


def _make_device(kind: str) -> Device | str:
    if kind == "lag":
        from device import build, lag

        try:
            built = build.build()
        except RuntimeError as error:  # promised, and not there
            raise pytest.UsageError(str(error)) from error
        return lag.install(built.path) if built.path else built.reason
    if kind == "cuda":
        from device import cuda

        return cuda.make() or "no device: torch sees no GPU"
    return "no device: run with --device lag or --device cuda"


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Give the device under test (`device.frame.Device`); afterwards it is as it was before."""
    found = request.config.stash[DEVICE]
    if isinstance(found, str):
        if request.config.getoption("--require-device"):
            pytest.fail(found)
        pytest.skip(found)
    limit = request.config.getoption("--watchdog")
    faulthandler.dump_traceback_later(limit, exit=True, file=request.config.stash[STDERR])
    try:
        with found.clean():
            yield found
    finally:
        faulthandler.cancel_dump_traceback_later()
