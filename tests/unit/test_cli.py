"""The command line: exit codes, texts for people, help that is documented."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hostward import __version__, _cli
from hostward._cli import build_parser, main
from hostward._cli._console import make_console, print_json, steps
from hostward._cli._page import help_page
from hostward.errors import MissingDependencyError, OptionError

ROOT = Path(__file__).resolve().parents[2]
# The package under test, also where it is not installed and the folder is another.
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=50, cwd=cwd, env=ENV)


class Command:
    """A command whose `run` does what a test says."""

    def __init__(self, outcome: BaseException | int) -> None:
        self.outcome = outcome

    def add_parser(self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        subparsers.add_parser("probe").set_defaults(run=self.run)

    def run(self, args: argparse.Namespace) -> int:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(_cli, "COMMANDS", (Command(request.param),))


@pytest.mark.parametrize(
    ("argv", "code", "stream", "text"),
    [
        pytest.param(["--version"], 0, "out", f"hostward {__version__}\n", id="version"),
        pytest.param(["--help"], 0, "out", "usage: hostward", id="help"),
        pytest.param(["demo", "--help"], 0, "out", "usage: hostward demo", id="help-of-a-command"),
        pytest.param([], 2, "err", "usage: hostward", id="no-command"),
        pytest.param(["nonsense"], 2, "err", "invalid choice: 'nonsense'", id="unknown-command"),
        pytest.param(["demo", "--nonsense"], 2, "err", "unrecognized arguments: --nonsense", id="unknown-option"),
    ],
)
def test_exit_code_and_stream(
    argv: list[str], code: int, stream: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    captured = capsys.readouterr()
    assert text in getattr(captured, stream)
    assert not getattr(captured, "err" if stream == "out" else "out")


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        pytest.param(["nonsense"], "hostward", id="command"),
        pytest.param(["demo", "--nonsense"], "hostward demo", id="option"),
        pytest.param(["bench", "--nonsense", "verify", "x.json"], "hostward bench", id="option-before-an-action"),
        pytest.param(["bench", "verify", "x.json", "--nonsense"], "hostward bench verify", id="option-of-an-action"),
        pytest.param(["bench", "verify"], "hostward bench verify", id="argument-missing"),
    ],
)
def test_a_wrong_argument_names_the_help_to_ask(
    argv: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: {command} [-h]")
    assert err.endswith(f"\n  do: `{command} --help` says what there is\n")


@pytest.mark.parametrize(
    ("outcome", "code", "err"),
    [
        pytest.param(0, 0, "", id="clean"),
        pytest.param(1, 1, "", id="findings"),
        pytest.param(
            OptionError("no such thing", got="x", why="because", do="this"),
            2,
            "hostward probe: no such thing: got x\n  why: because\n  do: this\n",
            id="error-of-ours",
        ),
        pytest.param(
            MissingDependencyError("scikit-learn is not installed", do="pip install 'hostward[demo]'"),
            2,
            "hostward probe: scikit-learn is not installed\n  do: pip install 'hostward[demo]'\n",
            id="missing-part",
        ),
        pytest.param(
            ModuleNotFoundError("No module named 'rich.text'", name="rich.text"),
            2,
            "hostward probe: rich is not installed\n"
            "  why: hostward needs it, and its installation brings it: this one is not complete\n"
            "  do: pip install rich\n",
            id="missing-requirement",
        ),
        pytest.param(KeyboardInterrupt(), 130, "hostward probe: interrupted\n", id="ctrl-c"),
    ],
    indirect=["outcome"],
)
@pytest.mark.usefixtures("outcome")
def test_outcome_of_a_command(code: int, err: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe"]) == code
    assert capsys.readouterr().err == err


@pytest.mark.parametrize(
    "outcome", [ZeroDivisionError("a bug"), ModuleNotFoundError("a bug", name="hostward._gone")], indirect=True
)
@pytest.mark.usefixtures("outcome")
def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises((ZeroDivisionError, ModuleNotFoundError), match="a bug"):
        main(["probe"])


PRINTS_MUCH = """
import sys
from hostward import _cli
from hostward._cli._console import make_console

class Talker:
    def add_parser(self, subparsers):
        subparsers.add_parser("talk").set_defaults(run=self.run)

    def run(self, args):
        console = make_console()
        for _ in range(10_000):
            console.print("word " * 20)
        return 0

_cli.COMMANDS = (Talker(),)
sys.exit(_cli.main(["talk"]))
"""


@pytest.mark.parametrize("line", [["-m", "hostward", "--help"], ["-c", PRINTS_MUCH]], ids=["argparse", "rich"])
def test_closed_pipe_is_quiet(line: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {**ENV, "PYTHONUNBUFFERED": ""}  # unbuffered, argparse itself swallows the error
    try:
        done = subprocess.run(
            [sys.executable, *line], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=50, env=buffered
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_rich_leaves_a_closed_pipe_to_main() -> None:
    console = make_console()
    with pytest.raises(BrokenPipeError):
        console.on_broken_pipe()


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from hostward._cli import main; main(['--help']); main(['demo', '--help'])\n"
        "print(sorted({'torch', 'numpy', 'rich', 'sklearn', 'PIL'} & set(sys.modules)))"
    )
    done = python("-c", code)
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("missing", "text", "line"),
    [
        pytest.param(["torch"], "torch is not installed", "pip install 'hostward[demo,torch]'", id="torch"),
        pytest.param(["sklearn"], "scikit-learn is not installed", "pip install 'hostward[demo]'", id="scikit-learn"),
        pytest.param(
            ["PIL", "sklearn"], "scikit-learn and pillow are not installed", "pip install 'hostward[demo]'", id="two"
        ),
    ],
)
def test_missing_part_of_the_demo(missing: list[str], text: str, line: str, tmp_path: Path) -> None:
    # A None in sys.modules is how Python itself marks a module as not importable.
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
        "from hostward._cli import main; sys.exit(main(['demo', '--out', 'made']))"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"hostward demo: {text}\n  why: ")
    assert done.stderr.endswith(f"\n  do: {line}\n")
    assert list(tmp_path.iterdir()) == []


def test_every_command_says_what_it_does_and_runs() -> None:
    parser = build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    assert {"demo", "bench"} <= set(commands.choices)
    assert [action.dest for action in commands._choices_actions if not action.help] == []
    for name, command in commands.choices.items():
        assert command.description, name
        assert callable(command.get_default("run")), name


def test_the_page_is_what_help_prints() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == help_page(build_parser()), "docs/cli.md is old: python -m hostward._cli._page > docs/cli.md"


def test_the_page_does_not_follow_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    page = help_page(build_parser())
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert help_page(build_parser()) == page


def test_json_is_one_line_and_has_a_version(capsys: pytest.CaptureFixture[str]) -> None:
    print_json("probe", 3, {"rate": 1.5})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"command": "probe", "schema_version": 3, "rate": 1.5}
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json("probe", 3, {"rate": float("nan")})


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with steps(2) as begin:
        begin("one")
        begin("two")
    assert capsys.readouterr() == ("", "")
