"""Result files: read, merged by case, written whole or not at all.

One file gathers the cases of one machine. Measuring a case again replaces that case and no other.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostward.bench._figures import Record
from hostward.bench._machine import IDENTITY, same_machine
from hostward.bench._schema import SCHEMA, problems
from hostward.errors import OptionError


def read(path: Path) -> Record:
    """Read a result file.

    Raises
    ------
    OptionError
        There is no such file, it is no JSON object, or it has another schema.
    """
    again = "give a file that `hostward bench --json FILE` wrote"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read the result file {path}", why=error.strerror, do=again) from error
    except ValueError as error:
        raise OptionError(f"{path} is no result file", why=f"it is not JSON: {error}", do=again) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise OptionError(f"{path} is no result file", got=f"schema {schema!r}", needed=f"schema {SCHEMA}", do=again)
    assert isinstance(document, dict)
    return document


def read_for(path: Path, machine: Record) -> Record | None:
    """Read the file that results of `machine` will be merged into; ``None`` where there is none yet.

    Raises
    ------
    OptionError
        As `read`, and where the file is damaged or holds results of another machine.
    """
    if not path.exists():
        return None
    document = read(path)
    broken = next(problems(document), None)
    if broken is not None:
        raise OptionError(
            f"nothing can be merged into {path.name}",
            why=f"it does not have the shape of a result file: {broken.at}: {broken.text}",
            do="give another file with --json, or see all that is wrong with it: hostward bench verify FILE",
        )
    refuse_other_machine(document["machine"], machine, path.name)
    return document


def refuse_other_machine(theirs: Record, ours: Record, name: str) -> None:
    """Raise `OptionError` where two machine records do not belong into one file."""
    if same_machine(theirs, ours):
        return
    unlike = [key for key in IDENTITY if theirs.get(key) != ours.get(key)]
    raise OptionError(
        f"{name} holds results of another machine",
        got=", ".join(f"{key} {ours.get(key)!r}" for key in unlike),
        needed=", ".join(f"{key} {theirs.get(key)!r}" for key in unlike),
        why="one file gathers the cases of one machine, so that every number in it can be compared with the others",
        do="give another file with --json",
    )


def document_of(machine: Record, command: str, git: Record | None, cases: Sequence[Record]) -> Record:
    """Put a result file together."""
    return {"schema": SCHEMA, "machine": machine, "command": command, "git": git, "cases": list(cases)}


def merge(old: Record | None, new: Record) -> Record:
    """Return `new` with the cases of `old` that it does not replace, each case in its old place.

    ``machine``, ``command`` and ``git`` are those of the newer run; what belongs to a case (versions,
    driver, commit, date) stands in the case.

    Raises
    ------
    OptionError
        The two are of different machines.
    """
    if old is None:
        return new
    refuse_other_machine(old["machine"], new["machine"], "the result file")
    cases = {case["id"]: case for case in old["cases"]} | {case["id"]: case for case in new["cases"]}
    return {**new, "cases": list(cases.values())}


def write(path: Path, document: Record) -> None:
    """Write a result file so that a reader sees the old one or the new one, never half of one.

    Raises
    ------
    OptionError
        The file cannot be written.
    """
    try:
        write_whole(path, dumps(document))
    except OSError as error:
        raise OptionError(f"cannot write {path}", why=error.strerror, do="give a place that can be written") from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file's text through a temporary file in the same folder."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def dumps(document: Any) -> str:
    """Return indented JSON with each list of numbers on one line, so that a file can be read and compared."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[[\d\s,.eE+-]+\]", lambda found: "[" + " ".join(found[0][1:-1].split()) + "]", text) + "\n"
