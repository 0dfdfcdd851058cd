"""The documentation is true: its Python runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "changes").glob("*.md")),
]
NO_RUN = "<!-- no-run -->"

BLOCK = re.compile(r"^(?P<before>[^\n]*)\n(?:[ \t]*\n)*```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)(?P<target>[^)#\s]+)(?:#[^)]*)?\)")
OWN_PATH = re.compile(r"`(?P<target>(?:src|tests|docs|scripts|benchmarks)/[\w./-]+)`")
COMMAND = re.compile(r"`hostward (?P<name>[a-z]+)")


def blocks(text: str) -> list[tuple[int, str]]:
    """The Python blocks that are to run, with the line each starts on."""
    return [
        (text.count("\n", 0, found.start("code") - 1) + 1, found["code"])
        for found in BLOCK.finditer("\n" + text)
        if found["before"].strip() != NO_RUN
    ]


def run_page(page: Path, device: str) -> None:
    """Run a page's blocks one after the other in one namespace, as a reader would."""
    namespace: dict[str, object] = {"device": device}
    for line, code in blocks(page.read_text()):
        # Padding gives tracebacks the page's own line numbers.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


def dead_links(page: Path) -> list[str]:
    text = page.read_text()
    found = [link["target"] for link in LINK.finditer(text) if not (page.parent / link["target"]).exists()]
    return found + [path["target"] for path in OWN_PATH.finditer(text) if not (ROOT / path["target"]).exists()]


def commands(text: str) -> set[str]:
    return {found["name"] for found in COMMAND.finditer(text)}


def known_commands() -> set[str]:
    done = subprocess.run([sys.executable, "-m", "hostward", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"^ +([a-z]+)  ", done.stdout, re.MULTILINE))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page.read_text())], ids=name)
def test_python_blocks_run(page: Path) -> None:
    import torch

    run_page(page, "cuda" if torch.cuda.is_available() else "cpu")


def test_readme_has_python_blocks() -> None:
    assert len(blocks((ROOT / "README.md").read_text())) >= 2


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=name)
def test_commands_exist(page: Path) -> None:
    named = commands(page.read_text())
    assert named
    assert named - known_commands() == set()


def test_scripts_named_in_readme_exist() -> None:
    named = set(re.findall(r"\bsh scripts/([a-z-]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= named
    assert [script for script in named if not (ROOT / "scripts" / script).exists()] == []


PLANTED = f"""
[gone](docs/gone.md) and [there](here.md#part) and [web](https://example.org/x),
`src/gone.py`, `hostward frobnicate`.

{NO_RUN}

```python
raise RuntimeError("left out")
```

```python
seen = [device]
```

text
```python
seen.append(1 / 0)
```
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    page = tmp_path / "here.md"
    page.write_text(PLANTED)
    return page


def test_a_block_that_fails_is_seen(planted: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(planted, "cpu")
    line = caught.traceback[-1].lineno + 1
    assert PLANTED.splitlines()[line - 1] == "seen.append(1 / 0)"


def test_a_dead_link_is_found(planted: Path) -> None:
    assert dead_links(planted) == ["docs/gone.md", "src/gone.py"]


def test_an_unknown_command_is_found(planted: Path) -> None:
    assert commands(planted.read_text()) - known_commands() == {"frobnicate"}
