"""Build the test device; ``python tests/device/build.py`` prints the path of the library.

The C++ interfaces it stands on are no stable API, so it is built for the one torch that
development pins, and for no other. Whoever promised to have it (``HOSTWARD_REQUIRE_TEST_DEVICE=1``)
gets an error where anybody else gets a named reason to skip.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

NAME = "lagdev"  # must be the module's own name: PYBIND11_MODULE makes an init function of it
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
CACHE = REPOSITORY / ".build" / NAME
FALLBACK_PIN = "2.13.0"
FLAGS = ["-O1", "-g0", "-Wall"]
REQUIRED = "HOSTWARD_REQUIRE_TEST_DEVICE"


@dataclass(frozen=True)
class Build:
    """The library's path, or why there is none."""

    path: Path | None
    reason: str = ""


def sources() -> list[Path]:
    return sorted((HERE / "csrc").glob("*.cpp"))


def pinned_torch() -> str:
    """The version that ``constraints.txt`` pins, without a local part."""
    constraints = REPOSITORY / "constraints.txt"
    text = constraints.read_text() if constraints.is_file() else ""
    found = re.search(r"^torch==([0-9.]+)", text, re.MULTILINE)
    return found[1] if found else FALLBACK_PIN


def obstacle() -> str:
    """Why the device is not built here at all; empty: nothing is in the way."""
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "test device: torch is not installed"
    if installed.split("+")[0] != pinned_torch():
        return f"test device: needs torch {pinned_torch()}, found {installed}"
    if shutil.which("c++") is None and "CXX" not in os.environ:
        return "test device: needs a C++ compiler"
    return ""


def key() -> str:
    """Everything the binary depends on."""
    digest = hashlib.sha256()
    for part in (importlib.metadata.version("torch"), sysconfig.get_config_var("SOABI"), *FLAGS):
        digest.update(f"{part}\0".encode())
    for file in sorted((HERE / "csrc").iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def build() -> Build:
    """Build the library unless the cache has it.

    Raises
    ------
    RuntimeError
        There is no library, and the environment promised one.
    """
    reason = obstacle()
    result = Build(None, reason) if reason else _cached_or_compiled()
    if result.path is None and os.environ.get(REQUIRED) == "1":
        raise RuntimeError(f"{result.reason} ({REQUIRED}=1 makes this an error)")
    return result


def _cached_or_compiled() -> Build:
    final = CACHE / key()
    library = final / f"{NAME}.so"
    if library.is_file():
        return Build(library)
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE.parent / ".gitignore").write_text("*\n")
    # Compiled aside and moved into place, so that two processes may build at once and one that
    # is killed leaves no half-made library (nor torch's lock file, which would hang the next).
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="compiling-") as scratch:
        done = _compile(Path(scratch))
        if done.returncode:
            return Build(None, f"test device: the build failed\n{done.stdout[-8000:]}")
        try:
            os.rename(scratch, final)
        except OSError:
            if not library.is_file():  # else another process was faster
                raise
        else:
            os.mkdir(scratch)  # for the context manager to remove
    return Build(library)


def _compile(folder: Path) -> subprocess.CompletedProcess[str]:
    # In a process of its own: torch loads what it has built, and loading this library changes the
    # process for good (see `lag.install`).
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # ninja
    return subprocess.run(
        [sys.executable, __file__, "--compile-into", str(folder)],
        env={"MAX_JOBS": "2", **os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _compile_into(folder: str) -> None:
    from torch.utils import cpp_extension

    cpp_extension.load(
        name=NAME,
        sources=[str(path) for path in sources()],
        extra_cflags=FLAGS,
        build_directory=folder,
        verbose=True,
    )


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--compile-into"]:
        _compile_into(arguments[1])
        return 0
    result = build()
    print(result.path or result.reason)
    return 0 if result.path else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
