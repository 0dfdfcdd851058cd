"""The README's table, generated from a result file between two markers; never typed."""

from __future__ import annotations

from pathlib import Path

from hostward.bench._figures import Record
from hostward.bench._result import write_whole
from hostward.errors import OptionError

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def rows(document: Record) -> list[Record]:
    """Return the table's rows: one for each case and other way, and one for the share of the link."""
    return [row for case in document["cases"] for row in _case_rows(case)]


def markdown(document: Record) -> str:
    """Return the Markdown between the markers: conditions first, then the table, then what it does not say."""
    lines = [*_conditions(document), "", _line("case", "against", "it takes", "hostward", "ratio", "auto", "needed")]
    lines.append(_line("---", "---", "--:", "--:", "--:", "--:", "--:"))
    before = ""
    for row in rows(document):
        case = "" if row["what"] == before else row["what"]
        before = row["what"]
        lines.append(
            _line(
                case,
                _code(row["against"]) + ("" if row["bytes_ok"] else " (wrong bytes)"),
                seconds(row["other_s"]),
                seconds(row["ours_s"]),
                _ratio(row["ratio"]),
                _ratio(row["ratio_auto"]),
                _needed(row),
            )
        )
    notes = list(dict.fromkeys(case["note"] for case in document["cases"] if case["note"]))
    return "\n".join([*lines, "", *_legend(document), *(f"- {note}" for note in notes)]) + "\n"


def replace_between(text: str, table: str, name: str) -> str:
    """Return `text` with `table` between the markers.

    Raises
    ------
    OptionError
        The markers are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise OptionError(
            f"{name} has no place for the table", needed=f"{BEGIN} and {END}, once each", do="put the two lines in"
        )
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{table}{END}{rest.split(END)[1]}"


def is_current(path: Path, table: str) -> bool:
    """Whether `path` holds exactly `table` between its markers."""
    text = _text_of(path)
    return replace_between(text, table, path.name) == text


def write_into(path: Path, table: str) -> bool:
    """Put `table` between the markers of `path`; return whether that changed anything."""
    text = _text_of(path)
    new = replace_between(text, table, path.name)
    if new != text:
        write_whole(path, new)
    return new != text


def seconds(value: float | None) -> str:
    """Return a time with three digits, in the unit that reads best."""
    if value is None:
        return "-"
    factor, unit = _unit(value)
    return f"{digits(value * factor)} {unit}"


def quartiles(low: float, median: float, high: float) -> str:
    """Return a spread in the unit that `seconds` gives the median."""
    factor, _ = _unit(median)
    return f"{digits(low * factor)} to {digits(high * factor)}"


def digits(value: float) -> str:
    """Return three significant digits without an exponent; whole numbers from 100 on."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def _unit(value: float) -> tuple[float, str]:
    return (1.0, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "us")


def _case_rows(case: Record) -> list[Record]:
    ways = {way["name"]: way for way in case["ways"]}
    primary = next(way for way in case["ways"] if way["role"] == "primary")
    needed = {each["need"]: each for each in case["met"]}
    found = []
    for name, ratio in case["against"].items():
        link = ways[name]["role"] == "link"
        need = needed.get("share_of_link" if link else f"against {name}", {"needed": None, "met": None})
        auto = case["figures"]["share_of_link_auto"] if link else (case["against_auto"] or {}).get(name)
        found.append(
            {
                "case": case["id"],
                "what": case["what"],
                "against": name,
                "other_s": ways[name]["median_s"],
                "ours_s": primary["median_s"],
                "ratio": case["figures"]["share_of_link"] if link else ratio,
                "ratio_auto": auto,
                "needed": need["needed"],
                "met": need["met"],
                "bytes_ok": ways[name]["bytes_ok"],
            }
        )
    return found


def _conditions(document: Record) -> list[str]:
    machine = document["machine"]
    runs = [case["run"] for case in document["cases"]]
    link = machine["link_gb_per_s"]
    width = f", PCIe {machine['link_generation']} x{machine['link_width']}" if machine["link_width"] else ""
    parts = [
        f"{machine['gpu'] or 'no GPU'}{width}{f', {digits(link)} GB/s into pinned memory' if link else ''}",
        f"{machine['cpu_model']}, {machine['cpu_count']} cores{' (virtual machine)' if machine['virtual'] else ''}",
        _each("driver", runs, "driver"),
        _each("torch", runs, "torch"),
        _each("hostward", runs, "hostward"),
        f"{_span([run['samples'] for run in runs])} samples of each way, interleaved"
        + (" (quick mode)" if any(run["mode"] == "quick" for run in runs) else ""),
        ", ".join(sorted({run["date"][:10] for run in runs})),
    ]
    return ["; ".join(part for part in parts if part) + "."]


def _legend(document: Record) -> list[str]:
    return [
        'Medians, steady state, result dropped between calls. "ratio" is the other way\'s time over that of '
        "hostward's primary way; in the link's row it is the share of the link's rate that hostward reaches. "
        '"auto" is the same for `memory="auto"`, where the case has it. The bytes of every result were compared in '
        "full with a reference from the host.",
        "",
        "Not comparable: other machines, other hosts' page faults (they dominate what fresh ordinary memory costs, "
        "and virtual machines pay more for them), first calls, and calls whose results are all kept.",
    ]


def _each(label: str, runs: list[Record], key: str) -> str:
    values = sorted({str(run[key]) for run in runs if run[key] is not None})
    return f"{label} {', '.join(values)}" if values else ""


def _span(counts: list[int]) -> str:
    return "no" if not counts else str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"


def _needed(row: Record) -> str:
    return "" if row["needed"] is None else f"{row['needed']:g}{'' if row['met'] else ' MISSED'}"


def _ratio(value: float | None) -> str:
    return "" if value is None else digits(value)


def _code(text: str) -> str:
    return f"`{text}`"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot read {path}", why=error.strerror, do="give an existing Markdown file") from error
