"""``hostward demo``: the main job on real photographs, with what moved and how fast."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hostward._cli._console import make_console, print_json, steps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hostward.demo._run import Result

SCHEMA_VERSION = 1

_CLEAN, _FINDINGS = 0, 1

_DESCRIPTION = """\
Run two photographs through a bank of Gabor filters in torch, on the GPU if there is one, bring the feature maps
and the frames to the host through hostward, cluster them with scikit-learn, and write the arrays as .npy and a
picture of the segments. Then say what moved and how fast, against .detach().cpu().numpy() on the same data in
the same run, with the bytes compared. Without a GPU everything runs on the CPU; then no link is crossed and no
speed is shown. Nothing is downloaded.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "demo",
        help="photographs through a filter bank to NumPy, scikit-learn, files and a picture",
        description=_DESCRIPTION,
        epilog="Needs torch, scikit-learn and pillow. Exit code: 0 clean, 1 the bytes differ, 2 the demo failed.",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path("hostward-demo"),
        help="folder for the files, made if missing; an earlier demo's files are overwritten, others left alone "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        help="auto, cpu, cuda or cuda:N; auto takes a GPU if torch finds one (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo and report; 1 where a byte differs between hostward and the usual ways."""
    from hostward.demo import STEPS, require_parts

    require_parts()
    with steps(STEPS + 1) as begin:
        begin("loading torch and scikit-learn")
        from hostward.demo._run import run as run_demo

        result = run_demo(args.out, args.device, begin)
    if args.json:
        print_json("demo", SCHEMA_VERSION, as_json(result))
    else:
        _report(result, make_console())
    return _CLEAN if result.same_bytes else _FINDINGS


def as_json(result: Result) -> dict[str, object]:
    """Return the result's fields as JSON has them; see ``docs/demo.md`` for each."""
    return {**asdict(result), "files": [{"path": str(path), "nbytes": path.stat().st_size} for path in result.files]}


def _report(result: Result, console: Console) -> None:
    from rich.text import Text

    from hostward.demo._maps import LINES

    def section(title: str, *parts: str | Table) -> None:
        console.print(Text(f"\n{title}", style="bold"))
        for part in parts:
            if isinstance(part, str):
                console.print(Text(part), soft_wrap=True)  # no markup, no breaks: paths stay whole
            else:
                console.print(part)

    console.print(Text(", ".join(f"{name} {version}" for name, version in result.versions.items()), style="dim"))
    section(f"What moved, from {result.device_name}", _pieces(result))
    section("The plan: print(hw.explain(tree, dtype='float16'))", result.plan)
    section("How fast", *([_speed(result)] if result.timings else []), *_speed_notes(result))
    section("What scikit-learn made of it", *(_segments(result, name) for name in result.segments))
    section("Written", *(f"{path}  ({_mega(path.stat().st_size)} MB)" for path in result.files))
    section("The lines that did it", LINES.rstrip())
    section(
        "Next",
        "hostward bench        measures this machine's link, and hostward on it",
        "hostward demo --json  the same as one JSON object",
        "docs/demo.md          what happens in each step",
    )


def _pieces(result: Result) -> Table:
    table = _table("piece", "on the device", "on the host, C order", ">bytes")
    for piece in result.pieces:
        there = f"{piece.device_dtype} {_shape(piece.device_shape)}"
        here = f"{piece.dtype} {_shape(piece.shape)}"
        table.add_row(f"tree{piece.path}", there, here, f"{piece.nbytes:,}")
    table.add_row("stats", "small tensors", "Python numbers", "")
    return table


def _speed(result: Result) -> Table:
    table = _table("way", ">median", ">least to most", ">calls", ">GB/s", ">x hostward")
    ours = result.timings[0].median_s
    for timing in result.timings:
        table.add_row(
            timing.way,
            f"{timing.median_s * 1e3:.1f} ms",
            f"{timing.least_s * 1e3:.1f} to {timing.most_s * 1e3:.1f}",
            str(timing.calls),
            f"{timing.gb_per_s:.2f}",
            f"{timing.median_s / ours:.1f}",
        )
    return table


def _speed_notes(result: Result) -> list[str]:
    same = "Every byte is the same" if result.same_bytes else "THE BYTES DIFFER"
    if not result.timings:
        return [
            "Everything ran on the CPU: no link was crossed, so there is no speed to compare.",
            f"{same} as from .detach().cpu().numpy() and from casts and transposes by hand.",
        ]
    nbytes = sum(piece.nbytes for piece in result.pieces)
    return [
        f"{same} in all {len(result.timings)} ways.",
        f"GB/s: {_mega(nbytes)} MB of arrays over the median; x hostward: so many times as long.",
        "The second way casts and transposes in NumPy afterwards, the third on the device before, as hostward does.",
        "After a call to warm up, on an idle device, results dropped between calls. The photographs stand "
        f"{result.copies} times on the device.",
        f"The demo's own delivery, the first of this process and with the stats: {result.first_s or 0:.3f} s.",
    ]


def _segments(result: Result, name: str) -> str:
    numbers, pixels = result.numbers[name], result.segments[name]
    shares = ", ".join(f"{count / sum(pixels):.0%}" for count in pixels)
    return (
        f"{name}: segments of {shares}, found in {result.variance_kept[name]:.0%} of the variance; "
        f"strongest edges at {numbers['strongest_edges_deg']:g} degrees, mean energy {numbers['mean_energy']:.4f}"
    )


def _table(*titles: str) -> Table:
    """Return an empty table without lines; ``>`` in front of a title sets its column flush right."""
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title.lstrip(">"), justify="right" if title.startswith(">") else "left")
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(extent) for extent in shape)


def _mega(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"
