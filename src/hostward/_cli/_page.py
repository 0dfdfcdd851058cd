"""The command-line page, ``docs/cli.md``, written from ``--help``: ``python -m hostward._cli._page > docs/cli.md``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator

from hostward._cli import build_parser

_SGR = re.compile(r"\x1b\[[0-9;]*m")


def help_page(parser: argparse.ArgumentParser) -> str:
    """Return the command-line page: the help of `parser` and of every command under it, as Markdown."""
    lines = [
        "# Command line",
        "",
        "This page is what `--help` prints; a test keeps it so. To write it anew:",
        "",
        "```sh",
        "python -m hostward._cli._page > docs/cli.md",
        "```",
        "",
        "`--json` prints one JSON object with a `schema_version` on stdout and nothing else there; of `hostward bench` "
        "itself that is `--json -`. Progress and errors go to stderr. Colour and progress bars are off where the "
        "output is no terminal. Exit codes beyond those below: 130 Ctrl-C, 141 the reader of a pipe has gone.",
    ]
    for title, each in _parsers(parser):
        lines += ["", f"## `{title}`", "", "```text", _plain(each.format_help()).rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield parser.prog, parser
    for action in parser._actions:  # argparse has no public way to its subparsers
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)


def _plain(text: str) -> str:
    return _SGR.sub("", text)  # Python 3.14 colours help where FORCE_COLOR is set


if __name__ == "__main__":
    sys.stdout.write(help_page(build_parser()))
