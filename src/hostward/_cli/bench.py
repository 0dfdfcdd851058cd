"""``hostward bench``: measure this machine, check a result file, make the README's table of it."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hostward._cli._bench_report import LEGEND, NOT_COMPARABLE, print_case, print_conditions, print_text, table_of
from hostward._cli._console import HelpFormatter, make_console, print_json
from hostward.errors import HostwardError, OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from hostward.bench import Case, Session

SCHEMA_VERSION = 1

_CLEAN, _FINDINGS, _FAILED = 0, 1, 2

_NO_GPU = (
    "no case could run: no GPU. Every case moves data from a CUDA device to the host, and torch sees none here; "
    "nothing was measured, and nothing is made up."
)

_DESCRIPTION = """\
Measure how fast arrays get from the GPU to the host: hostward beside the usual ways and beside the bare link, in one
process, samples interleaved, bytes compared before and after, memory peaks watched from outside, and every way called
once behind a held stream to see whether it reads too early. The whole set takes two to three minutes.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser, with ``verify`` and ``table`` below it."""
    parser = subparsers.add_parser(
        "bench",
        help="measure this machine's link, and hostward and the usual ways on it",
        description=_DESCRIPTION,
        epilog="Exit code: 0 done (also without a GPU, where no case can run), 2 a case or the tool failed.",
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run=run, action=None)
    parser.add_argument("--case", metavar="ID", nargs="+", action="extend", help="only these cases (default: all)")
    parser.add_argument(
        "--json",
        metavar="FILE",
        dest="file",
        help="write the results to FILE; cases that it holds already and that are not run now stay in it; - prints "
        "them on stdout instead of tables",
    )
    parser.add_argument("--quick", action="store_true", help="five samples a way, whatever the time allows")
    parser.add_argument("--list", action="store_true", help="say what the cases are, and measure nothing")
    parser.add_argument(
        "--commit", metavar="ID", help="the commit to record, where hostward is imported from no git checkout"
    )
    actions = parser.add_subparsers(metavar="ACTION", title="actions on a result file")
    _add_verify(actions)
    _add_table(actions)


def _add_verify(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "verify",
        help="recompute every figure of a result file from its samples",
        description="Recompute every figure of a result file from its samples, check its shape, that hostward's bytes "
        "are right, that it measured the cases as they are defined now, and that every need is met.",
        epilog="Exit code: 0 nothing found, 1 findings, 2 the file cannot be read.",
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(action=_verify, action_name="verify")
    parser.add_argument("result", metavar="FILE", type=Path, help="what `hostward bench --json FILE` wrote")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")


def _add_table(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "table",
        help="print a result file as the README's table, or put it there",
        description="Print a result file as a Markdown table. With --write, put it between the lines "
        "<!-- bench:begin --> and <!-- bench:end --> of a page; with --check, compare with what stands there.",
        epilog="Exit code: 0 done, 1 --check found another table, 2 the tool failed.",
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(action=_table, action_name="table")
    parser.add_argument("result", metavar="FILE", type=Path, help="what `hostward bench --json FILE` wrote")
    parser.add_argument("--write", metavar="PAGE", type=Path, help="the page to rewrite")
    parser.add_argument(
        "--check",
        metavar="PAGE",
        type=Path,
        nargs="?",
        const=True,
        help="compare and write nothing; without PAGE the one of --write",
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the rows as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the action; returns the exit code."""
    if args.action is not None:
        _refuse_measuring(args)
        return int(args.action(args))
    from hostward.bench.cases import select

    cases = select(args.case)
    return _list(args, cases) if args.list else _measure(args, cases)


def _refuse_measuring(args: argparse.Namespace) -> None:
    """Refuse options of a measurement in front of an action, which measures nothing and would ignore them."""
    given = {
        "--case": args.case,
        "--json": args.file,
        "--quick": args.quick,
        "--list": args.list,
        "--commit": args.commit,
    }
    for option, value in given.items():
        if value:
            name = args.action_name
            raise OptionError(
                f"{option} in front of {name} belongs to a measurement, and {name} makes none",
                do=f"leave it out; `hostward bench {name} --help` says what {name} knows",
            )


def _list(args: argparse.Namespace, cases: list[Case]) -> int:
    if args.file == "-":
        listed = [
            {"id": case.id, "what": case.what, "nbytes": case.nbytes, "needs": case.needs.as_record()}
            | {"ways": [{"name": way.name, "code": way.text, "role": way.role.value} for way in case.ways]}
            for case in cases
        ]
        print_json("bench --list", SCHEMA_VERSION, {"cases": listed})
        return _CLEAN
    if args.file is not None:
        raise OptionError("--list measures nothing to put into a file", got=f"--json {args.file}", needed="--json -")
    table = table_of("case", "what", ">result", ">ways", "needs")
    for case in cases:
        needs = [f"share of the link {case.needs.share_of_link:g}"] if case.needs.share_of_link else []
        needs += [f"{ratio:g} x {name}" for name, ratio in case.needs.against.items()]
        table.add_row(case.id, case.what, f"{case.nbytes:,}", str(len(case.ways)), "; ".join(needs))
    console = make_console()
    console.print(table, markup=False)
    console.print("All of them need a CUDA device.", style="dim")
    return _CLEAN


def _measure(args: argparse.Namespace, cases: list[Case]) -> int:
    from hostward import bench

    device = bench.find_gpu()
    console, quiet = make_console(), args.file == "-"
    if device is None:
        return _without_gpu(args, console)
    path = _result_path(args.file)
    records: list[dict[str, Any]] = []
    failed = False
    with bench.Session(
        device, quick=args.quick, command=_command(args), commit=args.commit, progress=_progress()
    ) as session:
        if path is not None:
            bench.read_for(path, session.machine)  # before minutes are spent on what cannot be written
        if not quiet:
            print_conditions(console, session.machine, args.quick)
        for case in cases:
            record = _one(session, case)
            if record is None:
                failed = True
                continue
            records.append(record)
            if path is not None:
                bench.write(path, bench.merge(bench.read_for(path, session.machine), session.document(records)))
            if not quiet:
                print_case(console, record)
        if quiet:
            print_json("bench", SCHEMA_VERSION, session.document(records))
        else:
            print_text(console, f"\n{LEGEND}\n{NOT_COMPARABLE}")
    return _FAILED if failed else _CLEAN


def _result_path(file: str | None) -> Path | None:
    if file in (None, "-"):
        return None
    path = Path(file)
    if not path.parent.is_dir():
        raise OptionError(f"there is no folder for {path.name}", got=f"--json {file}", do="make it, or name another")
    return path


def _one(session: Session, case: Case) -> dict[str, Any] | None:
    """Measure a case; a failure is reported and costs the other cases nothing."""
    try:
        return session.measure(case)
    except HostwardError as error:
        print(f"hostward bench: {error}", file=sys.stderr)
        if error.__cause__ is not None and not isinstance(error.__cause__, HostwardError):
            traceback.print_exception(error.__cause__, file=sys.stderr)  # no user error: somebody has to mend it
        return None


def _without_gpu(args: argparse.Namespace, console: Console) -> int:
    from hostward.bench import HostDevice
    from hostward.bench._machine import describe_machine

    machine = describe_machine(HostDevice())
    if args.file == "-":
        print_json("bench", SCHEMA_VERSION, {"machine": machine, "cases": [], "notice": _NO_GPU})
        return _CLEAN
    print_conditions(console, machine, args.quick)
    print_text(console, f"\n{_NO_GPU}" + ("" if args.file is None else f" {args.file} was not written."))
    return _CLEAN


def _verify(args: argparse.Namespace) -> int:
    from hostward import bench
    from hostward.bench.cases import CASES

    document = bench.read(args.result)
    findings = bench.verify(document, CASES)
    if args.as_json:
        found = [asdict(finding) for finding in findings]
        print_json("bench verify", SCHEMA_VERSION, {"file": args.result.name, "findings": found})
    else:
        for finding in findings:
            print(finding)
        cases = document.get("cases", [])
        print(f"{args.result.name}: {_count(cases, 'case')}, {_count(findings, 'finding')}")
    return _FINDINGS if findings else _CLEAN


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _table(args: argparse.Namespace) -> int:
    from hostward import bench

    document = bench.read(args.result)
    broken = next(bench.problems(document), None)
    if broken is not None:
        raise OptionError(
            f"no table can be made of {args.result.name}",
            why=f"it does not have the shape of a result file: {broken.at}: {broken.text}",
            do="hostward bench verify FILE lists everything that is wrong with it",
        )
    text = bench.markdown(document)
    if args.check is not None:
        page = args.write if args.check is True else args.check
        if page is None:
            raise OptionError("--check has no page to compare with", do="name it: --check README.md")
        current = bench.is_current(page, text)
        print(f"{page.name}: {'up to date' if current else 'holds another table than the results give'}")
        return _CLEAN if current else _FINDINGS
    if args.write is not None:
        changed = bench.write_into(args.write, text)
        print(f"{args.write.name}: {'table rewritten' if changed else 'already up to date'}")
    elif args.as_json:
        print_json("bench table", SCHEMA_VERSION, {"rows": bench.rows(document)})
    else:
        sys.stdout.write(text)
    return _CLEAN


def _command(args: argparse.Namespace) -> str:
    """Return what was asked for, without the file: results hold no paths."""
    chosen = ["--case", *args.case] if args.case else []
    return " ".join(["hostward bench", *chosen, *(["--quick"] if args.quick else [])])


def _progress() -> Any:
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:5.1f} s] {text}", file=sys.stderr, flush=True)

    return say
