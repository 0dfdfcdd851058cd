"""Make .venv: hostward (editable), the extras asked for, and a torch. Standard library only.

A torch that the calling Python can import is used as it is: the new environment sees its packages,
and nothing replaces it. Where there is none, the one pinned in constraints.txt is installed, before
anything that might ask for another build of it.

With a folder of wheels (--wheels, HOSTWARD_WHEELS) nothing is downloaded, and the folder's versions
are taken rather than those of constraints.txt.

A second run is done at once, unless the Python, its torch, pyproject.toml or constraints.txt changed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STATE = VENV / "hostward-setup.json"
CONSTRAINTS = ROOT / "constraints.txt"
BUILD_TOOLS = ["hatchling", "editables"]  # an offline machine has no isolated build environment


@dataclass(frozen=True)
class Outer:
    """The calling Python: what .venv is made from, and the torch that it has, if any."""

    executable: str
    version: str
    torch: str | None
    folders: list[str]


def look_around() -> Outer:
    """Find the calling Python's torch and the folders its packages live in, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return Outer(sys.executable, sys.version, None, [])
    home = str(Path(spec.origin).parent.parent)
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return Outer(
        sys.executable, sys.version, importlib.metadata.version("torch"), list(dict.fromkeys([home, *packages]))
    )


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(outer: Outer, pinned: str, *, offline: bool) -> list[str]:
    """What pip must not move: the torch in sight, then the pins for all that is not in sight."""
    if outer.torch is None:
        return [] if offline else pinned.splitlines()
    lines = [f"torch=={outer.torch}"]
    if not offline:
        found = importlib.metadata.distributions(path=outer.folders)
        visible = {normal(each.metadata["Name"]) for each in found if each.metadata["Name"]}
        pins = [line for line in pinned.splitlines() if "==" in line and not line.startswith("#")]
        lines += [line for line in pins if normal(line.split("==")[0]) not in visible]
    return lines


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], cwd=ROOT, stdin=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"setup: failed: {' '.join(map(str, command))}")


def make(outer: Outer) -> None:
    """Make an empty .venv that sees the packages next to the outer torch, after its own."""
    say(f"making .venv with {outer.executable}")
    shutil.rmtree(VENV, ignore_errors=True)
    has_ensurepip = importlib.util.find_spec("ensurepip") is not None
    run(outer.executable, "-m", "venv", *([] if has_ensurepip else ["--without-pip"]), VENV)
    if outer.folders:
        # A venv made inside a venv does not see it, whatever --system-site-packages says.
        lib = VENV / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in outer.folders]
        (lib / "outer.pth").write_text("".join(lines))


def find_pip(outer: Outer) -> list[str | Path]:
    """Take .venv's own pip (or one it sees), else the outer one: Debian ships venv without ensurepip."""
    for pip in ([PYTHON, "-m", "pip"], [outer.executable, "-m", "pip", "--python", PYTHON]):
        if subprocess.run([*pip, "--version"], capture_output=True, stdin=subprocess.DEVNULL).returncode == 0:
            return pip
    shutil.rmtree(VENV)
    sys.exit(
        f"setup: {outer.executable} has neither ensurepip nor pip 22.3 or newer\n"
        "  do: on Debian or Ubuntu `apt-get install python3-venv`, or name another Python: PYTHON=/path/to/python"
    )


def install(outer: Outer, extras: list[str], wheels: Path | None) -> None:
    """Install torch (unless one is in sight), then hostward with its extras."""
    limits = VENV / "constraints.txt"
    limits.write_text("\n".join(constraints(outer, CONSTRAINTS.read_text(), offline=wheels is not None)) + "\n")
    source = ["--no-index", "--find-links", wheels] if wheels else []
    pip = [*find_pip(outer), "install", "--no-input", "--disable-pip-version-check", *source, "-c", limits]
    quiet = [] if sys.stdout.isatty() else ["-q"]
    if outer.torch is None:
        say("torch: " + (f"from {wheels}" if wheels else "as pinned in constraints.txt"))
        run(*pip, *quiet, "torch")
    named = f"[{','.join(extras)}]" if extras else ""
    say(f"hostward{named}")
    run(*pip, *quiet, *BUILD_TOOLS)
    run(*pip, "-q", "--no-build-isolation", "-e", f".{named}")
    run(PYTHON, "-c", "import torch, hostward; print('setup: torch', torch.__version__, 'from', torch.__path__[0])")


def main() -> None:
    parser = argparse.ArgumentParser(prog="sh scripts/setup", description="make .venv")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="extras of pyproject.toml: demo, test, dev, cuda")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="install from this folder only, offline")
    args = parser.parse_args()
    wheels = args.wheels or (Path(os.environ["HOSTWARD_WHEELS"]) if os.environ.get("HOSTWARD_WHEELS") else None)
    if wheels is not None and not wheels.is_dir():
        parser.error(f"no such folder of wheels: {wheels}")

    before = json.loads(STATE.read_text()) if STATE.exists() else {}
    if before and Path(sys.prefix) == VENV:  # called with .venv active: go on with the Python it was made from
        made_by = before["outer"]["executable"]
        os.execv(made_by, [made_by, *sys.argv])

    outer = look_around()
    files = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + CONSTRAINTS.read_bytes()).hexdigest()
    extras = sorted({*args.extras, *before.get("extras", [])})
    after = {"outer": asdict(outer), "files": files, "extras": extras}
    if before == after:
        return
    if before.get("outer") != after["outer"]:
        make(outer)
    STATE.unlink(missing_ok=True)
    install(outer, extras, wheels.resolve() if wheels else None)
    STATE.write_text(json.dumps(after, indent=1))


if __name__ == "__main__":
    main()
