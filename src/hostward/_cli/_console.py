"""What the commands share: the help formatter, consoles, the JSON envelope, progress."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

HELP_WIDTH = 100
PIPE_WIDTH = 132  # of tables in a file or a pipe; rich's own guess of 80 would break them


class HelpFormatter(argparse.HelpFormatter):
    """argparse's formatter at one width, whatever the terminal: help is also a page (``docs/cli.md``)."""

    def __init__(self, prog: str, **options: object) -> None:
        super().__init__(prog, max_help_position=28, width=HELP_WIDTH)


class Parser(argparse.ArgumentParser):
    """A parser whose help, and that of the commands under it, has `HelpFormatter`'s shape."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is not known here, and not in the parser above, which would show its own usage."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print usage, what is wrong and what to do; exit with 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\n  do: `{self.prog} --help` says what there is\n")


def make_console(*, stderr: bool = False) -> Console:
    """Return a rich console that leaves a closed pipe to `main` (rich itself would exit with 1)."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            raise BrokenPipeError

    console = _Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def print_json(command: str, schema_version: int, body: Mapping[str, object]) -> None:
    """Print a command's one JSON object; NaN and infinity have no place in it."""
    document = {"command": command, "schema_version": schema_version, **body}
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar of `total` steps on stderr, where that is a terminal.

    Yields
    ------
    callable
        Call it with a step's description when the step begins; the last one ends with the block.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        begun = 0

        def begin(description: str) -> None:
            nonlocal begun
            progress.update(task, description=f"{description:<44}", completed=begun)
            begun += 1

        yield begin
        progress.update(task, completed=total)
