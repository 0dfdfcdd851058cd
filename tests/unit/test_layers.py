"""Imports in src/ point down the picture of docs/architecture.md, never up."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"

# From the bottom up. Modules of one row may import each other in one direction.
ROWS = (
    ("errors",),
    ("_dtypes", "_layout", "_tree"),
    ("_types",),
    ("_torch",),
    ("_public", "_refuse"),
    ("_describe", "_plan"),
    ("_devices", "_memory"),
    ("_sinks", "_engine"),
    ("_out",),
    ("_call",),
    ("_explain", "_single"),
    ("_calls",),
    ("",),  # the package itself: the public names, for those built on them
    ("bench", "demo"),
    ("_cli",),
    ("__main__",),
)
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row}
PURE = ("errors", "_types", "_dtypes", "_layout", "_tree", "_plan")


def part_of(path: Path, src: Path) -> str:
    """The layer's name that a file belongs to: ``_engine`` for ``hostward/_engine/_pump.py``."""
    first = path.relative_to(src / "hostward").parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def package_of(path: Path, src: Path) -> list[str]:
    return list(path.relative_to(src).parent.parts)


def imports(path: Path, src: Path) -> Iterator[tuple[int, str, bool]]:
    """Each module that a file imports, as (line, dotted name, at module level)."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(scope)
    }
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        runs_at_import = id(node) not in inside and id(node) not in typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, runs_at_import
        elif isinstance(node, ast.ImportFrom):
            above = package_of(path, src)[: -(node.level - 1) or None] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}" if module == "hostward" else module, runs_at_import


def arrows(src: Path) -> Iterator[tuple[str, str, str]]:
    """Each import inside the package, as (place, from layer, to layer)."""
    for path in sorted(src.rglob("*.py")):
        here = part_of(path, src)
        for line, name, _ in imports(path, src):
            head, *rest = name.split(".")
            if head == "hostward":
                there = rest[0] if rest and rest[0] in RANK | modules(src) else ""
                if there != here:
                    yield f"{path.relative_to(src)}:{line}", here, there


def modules(src: Path) -> dict[str, None]:
    """All layers that have a file."""
    return dict.fromkeys(part_of(path, src) for path in src.rglob("*.py"))


def violations(src: Path) -> list[str]:
    found = [f"{name}: not in the picture" for name in modules(src) if name not in RANK]
    seen: dict[tuple[str, str], str] = {}
    for place, here, there in arrows(src):
        seen[here, there] = place
        if here == "" or here not in RANK or there not in RANK:
            continue  # __init__ names the public functions without loading them
        if RANK[there] > RANK[here]:
            found.append(f"{place}: {here} imports {there or 'hostward'}, which stands above it")
        elif RANK[there] == RANK[here] and (there, here) in seen:
            found.append(f"{place}: {here} and {there} import each other")
    return found


def torch_at_import(src: Path, layers: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(src)}:{line}"
        for path in sorted(src.rglob("*.py"))
        if part_of(path, src) in layers
        for line, name, at_import in imports(path, src)
        if at_import and (name.split(".")[0] == "torch" or name.startswith("hostward._torch"))
    ]


def names_of_the_test_device(src: Path) -> list[str]:
    return [
        f"{path.relative_to(src)}:{number}"
        for path in sorted(src.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\blag(dev)?\b", line, re.IGNORECASE)
    ]


def test_no_arrow_points_up() -> None:
    assert violations(SRC) == []


def test_pure_modules_do_not_import_torch() -> None:
    assert torch_at_import(SRC, PURE) == []


def test_src_does_not_know_the_test_device() -> None:
    assert names_of_the_test_device(SRC) == []


def test_pure_modules_load_where_torch_is_not_installed() -> None:
    present = [f"hostward.{name}" for name in PURE if name in modules(SRC)]
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(present)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A tree of sources with one violation of each kind."""
    files = {
        "__init__.py": "from hostward import errors\n",
        "errors.py": "",
        "_plan/__init__.py": "import torch\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
        "_plan/_routes.py": "from .. import _engine\n",
        "_torch.py": "import torch\n",
        "_describe.py": "from hostward._torch import torch\ndef f():\n    import torch\n    from . import _calls\n",
        "_engine/__init__.py": "from hostward._sinks import _arrays\n",
        "_engine/_pump.py": "import hostward\n",
        "_sinks.py": "from hostward._engine import Flight\nNAME = 'lag:0'\nflag = 'lagging'\n",
        "_calls.py": "from hostward.errors import LeafError\n",
        "_new.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "hostward" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_planted_arrows_are_found(planted: Path) -> None:
    assert violations(planted) == [
        "_new: not in the picture",
        "hostward/_describe.py:4: _describe imports _calls, which stands above it",
        "hostward/_engine/_pump.py:1: _engine imports hostward, which stands above it",
        "hostward/_plan/_routes.py:1: _plan imports _engine, which stands above it",
        "hostward/_sinks.py:1: _sinks and _engine import each other",
    ]


def test_a_planted_torch_import_is_found(planted: Path) -> None:
    assert torch_at_import(planted, ("_plan", "_describe")) == [
        "hostward/_describe.py:1",
        "hostward/_plan/__init__.py:1",
    ]


def test_a_planted_device_name_is_found(planted: Path) -> None:
    assert names_of_the_test_device(planted) == ["hostward/_sinks.py:2"]
