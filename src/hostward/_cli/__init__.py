"""The command line: parsing, exit codes, and nothing that computes.

Exit codes: 0 clean, 1 findings, 2 the tool failed (a wrong argument too), 130 Ctrl-C, 141 the
reader of a pipe has gone.

A command is a module with two functions: ``add_parser(subparsers)`` adds its parser and sets
``run=`` on it, ``run(args) -> int`` does the work and returns the exit code. Only `run` may import
what is heavy or optional, so ``hostward --help`` works on a machine where torch is broken.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from hostward import __version__
from hostward._cli import bench, demo
from hostward._cli._console import Parser
from hostward.errors import HostwardError, MissingDependencyError

__all__ = ["build_parser", "main"]

CLEAN, FAILED, INTERRUPTED, PIPE_CLOSED = 0, 2, 130, 141

COMMANDS = (demo, bench)

_CORE = ("ml_dtypes", "numpy", "rich")  # what an installation brings; see `_not_installed`


def build_parser() -> argparse.ArgumentParser:
    """Build the whole parser; cheap, imports neither torch nor NumPy."""
    parser = Parser(
        prog="hostward",
        description="Anything on a GPU into NumPy arrays: race-free and at link speed.",
        epilog="Exit code: 0 clean, 1 findings, 2 the tool failed.",
    )
    parser.add_argument("--version", action="version", version=f"hostward {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv
        Arguments without the program's name; ``None`` takes those of the process.

    Returns
    -------
    int
        The exit code. What the user can put right is a text on stderr and 2; a bug keeps its traceback.
    """
    parser = build_parser()
    command = "hostward"
    try:
        try:
            args = parser.parse_args(argv)
        except SystemExit as exit_:  # --help, --version, or a wrong argument whose text is printed
            _flush()
            return exit_.code if isinstance(exit_.code, int) else FAILED
        if args.command is None:
            parser.print_help(sys.stderr)
            return FAILED
        command = f"hostward {args.command}"
        run: Callable[[argparse.Namespace], int] = args.run
        code = run(args)
        _flush()
        return code
    except HostwardError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return FAILED
    except ModuleNotFoundError as error:
        print(f"{command}: {_not_installed(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return PIPE_CLOSED


def _not_installed(error: ModuleNotFoundError) -> MissingDependencyError:
    """Return the text for one of our own requirements; anything else that is missing is a bug, and raised."""
    name = (error.name or "").partition(".")[0]
    if name not in _CORE:
        raise error
    return MissingDependencyError(
        f"{name} is not installed",
        why="hostward needs it, and its installation brings it: this one is not complete",
        do=f"pip install {name}",
    )


def _flush() -> None:
    # Here a closed pipe is an exception that can be caught; at interpreter exit it is a message.
    sys.stdout.flush()


def _drop_stdout() -> None:
    """Point stdout at nothing, so the interpreter's own flush at exit has nobody to complain to.

    Source: https://docs.python.org/3/library/signal.html#note-on-sigpipe
    """
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, sys.stdout.fileno())
    finally:
        os.close(devnull)
