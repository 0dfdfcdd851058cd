"""Laws of the repository itself."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import hostward

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [path for path in sorted((ROOT / "scripts").iterdir()) if path.is_file() and not path.suffix]
LIMIT = 400


def sh_errors(path: Path) -> str:
    shell = shutil.which("dash") or "sh"
    return subprocess.run([shell, "-n", str(path)], capture_output=True, text=True).stderr


def too_long(src: Path) -> list[str]:
    return [path.name for path in sorted(src.rglob("*.py")) if len(path.read_text().splitlines()) > LIMIT]


def test_a_change_is_told_to_users() -> None:
    fragments = [path.name for path in (ROOT / "changes").glob("*.md")]
    assert fragments
    assert [name for name in fragments if not re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", name)] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_posix_sh(script: Path) -> None:
    assert script.read_text().startswith("#!/bin/sh\n")
    assert sh_errors(script) == ""


def test_a_broken_script_is_found(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nif true; then\n")
    assert sh_errors(broken) != ""


def test_no_module_is_too_long() -> None:
    assert too_long(ROOT / "src") == []


def test_a_long_module_is_found(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("x = 1\n" * (LIMIT + 1))
    (tmp_path / "short.py").write_text("x = 1\n" * LIMIT)
    assert too_long(tmp_path) == ["long.py"]


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", hostward.__version__)
    try:
        installed = importlib.metadata.version("hostward")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("hostward is on the path, but not installed")
    assert installed == hostward.__version__


def test_every_named_requirement_of_the_package_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["torch"], *extras["demo"], *extras["test"], *extras["dev"]]
    names = {re.split(r"[\[<>=! ]", each)[0] for each in wanted} - {"hostward"}
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert names - pinned == set()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", ROOT / "scripts" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "environment", module)
    spec.loader.exec_module(module)
    return module


PINS = "# why\ntorch==2.13.0\nml_dtypes==0.7.0\nruff==0.17.6\n"


@pytest.mark.parametrize(
    ("torch", "offline", "expected"),
    [
        pytest.param(None, False, PINS.splitlines(), id="nothing in sight: the pins"),
        pytest.param(None, True, [], id="offline: the folder decides"),
        pytest.param(
            "2.11.0+cu130", False, ["torch==2.11.0+cu130", "ruff==0.17.6"], id="torch in sight stays, and its company"
        ),
        pytest.param("2.11.0+cu130", True, ["torch==2.11.0+cu130"], id="torch in sight stays, offline"),
    ],
)
def test_setup_never_moves_a_torch_in_sight(
    environment: ModuleType, tmp_path: Path, torch: str | None, offline: bool, expected: list[str]
) -> None:
    for name, version in (("torch", "2.11.0+cu130"), ("ml-dtypes", "0.5.4")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    outer = environment.Outer("python3", "3.12", torch, [str(tmp_path)] if torch else [])
    assert environment.constraints(outer, PINS, offline=offline) == expected
