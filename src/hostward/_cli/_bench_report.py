"""What ``hostward bench`` prints for people: the conditions, a table for each case, what may be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NOT_COMPARABLE = (
    "Not comparable: medians of other machines (page faults of fresh host memory differ most, and virtual machines "
    "pay more for them), first calls (what earlier ways and cases left warm stays warm), loops that keep all results."
)


LEGEND = (
    "x ours: the way's median over that of hostward's first row. first: its first call in this run. bytes: compared in "
    "full with a reference from the host; F: right, but not in C order. busy: wrong values when called behind a held "
    "stream. MB: peaks above the state before the call, + what was made beforehand. ?: not measured."
)


def print_conditions(console: Console, machine: dict[str, Any], quick: bool) -> None:
    """Print the machine, driver, versions and mode: before any number."""

    def known(key: str) -> str:
        return "unknown" if machine[key] is None else str(machine[key])

    memory = f"{machine['memory_nbytes'] / 1e9:.0f} GB memory" if machine["memory_nbytes"] else "memory unknown"
    virtual = {True: "virtual machine", False: "bare metal", None: "virtual or not: unknown"}[machine["virtual"]]
    gpu = "none"
    if machine["gpu"]:
        gpu = f"{machine['gpu']} ({machine['gpu_count']} here), driver {known('driver')}, CUDA {known('cuda')}"
    link = f"PCIe generation {known('link_generation')} of {known('link_generation_max')}, width {known('link_width')}"
    if machine["link_gb_per_s"]:
        link += f"; measured {machine['link_gb_per_s']:.1f} GB/s, 1 GiB into pinned memory"
    versions = ", ".join(f"{name} {known(name)}" for name in ("hostward", "torch", "numpy", "python"))
    rows = {
        "processor": f"{machine['cpu_model']}, {machine['cpu_count']} cores, {memory}, {virtual}",
        "system": f"kernel {known('kernel')}, transparent huge pages {known('transparent_huge_pages')}",
        "GPU": gpu,
        "link": link if machine["gpu"] else "none",
        "versions": f"{versions}, {machine['torch_threads']} torch threads",
        "mode": "quick: 5 samples a way" if quick else "full: 5 to 30 samples a way, as time allows, interleaved",
    }
    for name, text in rows.items():
        print_text(console, f"{name:<10} {text}")


def print_case(console: Console, record: dict[str, Any]) -> None:
    """Print a case's record: its ways, its needs, and what is not comparable in it."""
    from hostward.bench import digits, quartiles, seconds

    run_, against = record["run"], record["against"]
    calls = f", {run_['calls_per_sample']} calls a sample" if run_["calls_per_sample"] > 1 else ""
    print_text(console, f"\n{record['id']}: {record['what']}; {run_['samples']} samples a way{calls}")
    primary = next(way for way in record["ways"] if way["role"] == "primary")["median_s"]
    table = table_of(
        *("way", ">median", ">quartiles", ">GB/s", ">x ours", ">first", "bytes", ">busy: wrong"),
        *(">MB: host", ">pinned", ">GPU"),
    )
    for way in record["ways"]:
        table.add_row(
            way["name"],
            seconds(way["median_s"]),
            quartiles(way["q1_s"], way["median_s"], way["q3_s"]),
            digits(record["nbytes"] / way["median_s"] / 1e9),
            digits(against.get(way["name"], way["median_s"] / primary)),
            seconds(way["first_s"]),
            ("ok" if way["bytes_ok"] else "WRONG") + ("" if way["c_order"] else ", F"),
            "?" if way["wrong_when_busy"] is None else f"{way['wrong_when_busy']:.0%}",
            _mega(way["host_peak"]),
            _mega(way["pinned_peak"]) + (f" + {_mega(way['prepared_nbytes'])}" if way["prepared_nbytes"] else ""),
            _mega(way["gpu_peak"]),
        )
    console.print(table, markup=False)
    for need in record["met"]:
        got = "unknown" if need["got"] is None else digits(need["got"])
        print_text(console, f"{need['need']}: {got}, needed {need['needed']:g}: {'met' if need['met'] else 'MISSED'}")
    notes = [record["note"], *(f"{way['name']}: {way['note']}" for way in record["ways"] if way["note"])]
    for note in filter(None, notes):
        print_text(console, f"  {note}", style="dim")


def _mega(nbytes: int | None) -> str:
    return "?" if nbytes is None else f"{nbytes / 1e6:.1f}"


def table_of(*titles: str) -> Table:
    """Return an empty table; ``>`` in front of a title sets its column flush right."""
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title.lstrip(">"), justify="right" if title.startswith(">") else "left", overflow="fold")
    return table


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print text as it is: no markup, no breaks."""
    console.print(text, markup=False, soft_wrap=True, style=style or None)
