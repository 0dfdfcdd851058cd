"""The frame's own promises: skips with one reason, failures where a device was promised, no hanging runs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from device import build
from device.lag import LagDevice

HERE = Path(__file__).parent


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1], timeout=50, check=False)


ONE_TEST = f"{HERE}/test_latch.py::test_opening_twice_is_harmless"


def test_without_a_device_tests_are_skipped_with_one_reason() -> None:
    done = run_pytest(ONE_TEST)
    assert done.returncode == 0
    assert "no device: run with --device lag or --device cuda" in done.stdout
    assert "1 skipped" in done.stdout


def test_a_required_device_that_is_missing_is_a_failure() -> None:
    done = run_pytest(ONE_TEST, "--require-device")
    assert done.returncode == 1
    assert "Failed: no device: run with --device lag or --device cuda" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_says_so() -> None:
    assert "no device: torch sees no GPU" in run_pytest(ONE_TEST, "--device=cuda").stdout


def test_a_run_that_hangs_is_ended_with_the_stacks_of_its_threads(lag: LagDevice) -> None:
    done = run_pytest(f"{HERE}/hanging.py", "--device=lag", "--watchdog=0.5")
    assert done.returncode == 1
    assert "Timeout (0:00:00.500000)!" in done.stderr
    assert "in test_hangs" in done.stderr


# ---- the build


@pytest.fixture
def no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(build.REQUIRED, raising=False)


@pytest.mark.usefixtures("no_promise")
def test_another_torch_is_a_named_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "pinned_torch", lambda: "9.9.9")
    result = build.build()
    assert result.path is None
    assert result.reason == f"test device: needs torch 9.9.9, found {importlib.metadata.version('torch')}"


@pytest.mark.usefixtures("no_promise")
def test_a_failed_build_is_a_named_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "obstacle", lambda: "")
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(build, "_compile", lambda folder: subprocess.CompletedProcess([], 1, "error: no such header"))
    result = build.build()
    assert result.path is None
    assert result.reason == "test device: the build failed\nerror: no such header"
    assert [file.name for file in (tmp_path / "cache").iterdir()] == []


def test_what_was_promised_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "obstacle", lambda: "test device: needs a C++ compiler")
    monkeypatch.setenv(build.REQUIRED, "1")
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler \(HOSTWARD_REQUIRE_TEST_DEVICE=1 makes"):
        build.build()


def test_the_pin_is_read_from_the_constraints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "REPOSITORY", tmp_path)
    assert build.pinned_torch() == build.FALLBACK_PIN
    (tmp_path / "constraints.txt").write_text("numpy==2.0\ntorch==2.99.1+cpu  # why\n")
    assert build.pinned_torch() == "2.99.1"


def test_what_is_built_is_not_built_again(lag: LagDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(build, "_compile")
    path = build.build().path
    assert path is not None
    assert path.is_file()
