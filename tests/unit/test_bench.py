"""The benchmark frame as a whole: a tiny case is measured for real, its file merged, verified, printed, and edited.

Nothing here stands in for a measurement: the case runs on the host, on a few bytes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hostward import bench
from hostward._cli import main
from hostward.bench import Case, Data, HostDevice, Needs, Role, Session, Way
from hostward.bench import cases as case_list
from hostward.bench._table import BEGIN, END
from hostward.errors import HostwardError, OptionError

Document = dict[str, Any]


def _setup(device: torch.device) -> Data:
    reference = np.random.default_rng(0).integers(0, 1 << 32, 1 << 14, dtype=np.uint32)
    x = torch.from_numpy(reference).to(device, copy=True)
    return Data({"x": x, "kept": torch.empty_like(x)}, reference)


TINY = Case(
    id="tiny",
    what="64 KiB on the host",
    nbytes=4 << 14,
    setup=_setup,
    ways=(
        Way("copy", "x.numpy().copy()", Role.PRIMARY),
        Way("array", "np.array(x.numpy())", Role.AUTO),
        Way("kept.copy_(x)", "kept.copy_(x)\nkept.numpy()", Role.LINK, prepared=("kept",), note="no result of its own"),
        Way(".clone().numpy()", "x.clone().numpy()"),
        Way("a view of zeros", "np.zeros_like(x.numpy())"),
    ),
    needs=Needs(share_of_link=1e-6, against={".clone().numpy()": 1e-6}),
    budget_s=0.0,
    note="Runs on the host.",
)
KNOWN = {"tiny": TINY}


@pytest.fixture(scope="module")
def measured() -> Document:
    """A result file of the tiny case, in small and in batches."""
    batched = replace(TINY, id="batched", calls_per_sample=3)
    with Session(HostDevice(), command="hostward bench --case tiny", commit="abc") as session:
        return session.document([session.measure(TINY), session.measure(batched)])


@pytest.fixture
def document(measured: Document) -> Document:
    result = copy.deepcopy(measured)
    result["cases"] = result["cases"][:1]
    return result


# --- what a run writes


def test_a_run_has_the_documented_shape(measured: Document) -> None:
    assert list(bench.problems(json.loads(bench.dumps(measured)))) == []


def test_a_run_says_what_was_measured(document: Document) -> None:
    case = document["cases"][0]
    run, ways = case["run"], {way["name"]: way for way in case["ways"]}
    assert (run["samples"], run["mode"], run["calls_per_sample"]) == (5, "full", 1)
    assert all(len(way["samples_s"]) == len(way["drop_s"]) == 5 for way in ways.values())
    assert [way["code"] for way in case["ways"]] == [way.text for way in TINY.ways]
    assert ways["kept.copy_(x)"]["prepared_nbytes"] == 4 << 14
    assert {name: way["bytes_ok"] for name, way in ways.items() if not way["bytes_ok"]} == {"a view of zeros": False}
    assert all(way["first_s"] > 0 for way in ways.values())
    assert all(way["host_peak"] is not None for way in ways.values())


def test_what_cannot_be_known_without_a_gpu_is_null(document: Document) -> None:
    assert document["machine"]["link_gb_per_s"] is None
    assert document["cases"][0]["run"]["busy_control"] is None
    for way in document["cases"][0]["ways"]:
        assert (way["wrong_when_busy"], way["returned_early"]) == (None, None)
        assert (way["pinned_peak"], way["gpu_peak"]) == (None, None)


def test_batches_have_no_drops_of_their_own(measured: Document) -> None:
    for way in measured["cases"][1]["ways"]:
        assert way["drop_s"] == []
        assert way["drop_median_s"] is None


def test_a_way_that_fails_is_named() -> None:
    broken = replace(TINY, ways=(*TINY.ways, Way("broken", "x.no_such_name")))
    with (
        Session(HostDevice()) as session,
        pytest.raises(HostwardError, match="case tiny: the way broken failed") as caught,
    ):
        session.measure(broken)
    assert isinstance(caught.value.__cause__, AttributeError)


def test_a_size_that_is_not_the_stated_one_is_refused() -> None:
    with Session(HostDevice()) as session, pytest.raises(HostwardError, match="another size"):
        session.measure(replace(TINY, nbytes=1))


# --- merging


def test_measuring_again_replaces_that_case_alone(measured: Document) -> None:
    again = copy.deepcopy(measured)
    again["cases"] = [{**again["cases"][0], "what": "newer"}]
    again["command"] = "hostward bench --quick"
    merged = bench.merge(measured, again)
    assert [case["what"] for case in merged["cases"]] == ["newer", TINY.what]
    assert [case["id"] for case in merged["cases"]] == ["tiny", "batched"]
    assert merged["command"] == "hostward bench --quick"


def test_the_first_results_stand_as_they_are(measured: Document) -> None:
    assert bench.merge(None, measured) == measured


def test_results_of_another_machine_are_refused(document: Document, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    other = {**document, "machine": {**document["machine"], "gpu": "another GPU", "gpu_count": 8}}
    bench.write(path, other)
    with pytest.raises(OptionError) as caught:
        bench.read_for(path, document["machine"])
    assert str(caught.value) == (
        "other.json holds results of another machine: got gpu None, gpu_count 0, "
        "needed gpu 'another GPU', gpu_count 8\n"
        "  why: one file gathers the cases of one machine, so that every number in it can be compared with the others\n"
        "  do: give another file with --json"
    )
    with pytest.raises(OptionError):
        bench.merge(other, document)


def test_nothing_is_merged_into_a_damaged_file(document: Document, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    del document["cases"][0]["figures"]
    bench.write(path, document)
    with pytest.raises(OptionError, match=r"cases\[0\]\.figures: missing"):
        bench.read_for(path, document["machine"])


def test_a_file_comes_back_as_it_was_written(measured: Document, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    bench.write(path, measured)
    assert bench.read(path) == measured
    assert bench.read_for(tmp_path / "none.json", measured["machine"]) is None
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]
    samples = [line.strip() for line in path.read_text().splitlines() if '"samples_s"' in line]
    assert len(samples) == 10
    assert all(line.startswith('"samples_s": [') and line.endswith("],") for line in samples)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "it is not JSON"), ("[]", "schema None"), ('{"schema": 2}', "schema 2"), (None, "No such file")],
)
def test_what_is_no_result_file_is_refused(text: str | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match=problem):
        bench.read(path)


# --- verifying


def test_a_real_result_is_clean(document: Document) -> None:
    assert bench.verify(json.loads(bench.dumps(document)), KNOWN) == []


def _edit(place: str, change: Callable[[Any], Any] | None) -> Callable[[Document], None]:
    *path, last = [int(key) if key.isdigit() else key for key in place.split("/")]

    def edit(document: Document) -> None:
        target: Any = document["cases"][0]
        for key in path:
            target = target[key]
        if change is None:
            del target[last]
        else:
            target[last] = change(target[last])

    return edit


def more(value: float) -> float:
    return value * 1.001


EDITS = [
    *[(f"ways/{number}/{name}", more) for number in range(4) for name in ("median_s", "q1_s", "q3_s", "drop_median_s")],
    *[(f"figures/{name}", more) for name in ("gb_per_s", "gb_per_s_auto", "share_of_link", "share_of_link_auto")],
    *[(f"{name}/{way}", more) for name in ("against", "against_auto") for way in ("kept.copy_(x)", ".clone().numpy()")],
    *[(f"met/{number}/got", more) for number in range(2)],
    ("met/0/needed", more),
    ("met/0/met", lambda value: not value),
    ("met", lambda value: value[:1]),
    ("against", lambda value: {**value, "none": 3.0}),
    ("against", lambda value: {name: value[name] for name in list(value)[1:]}),
    ("against_auto", lambda value: None),
    ("figures/share_of_link", lambda value: None),
    ("needs/share_of_link", lambda value: value / 2),
    ("needs/against", lambda value: {}),
    ("nbytes", lambda value: value * 2),
    ("what", lambda value: "something else"),
    ("ways/0/code", lambda value: "x.numpy()"),
    ("ways/0/samples_s", lambda value: [sample * 2 for sample in value]),
    ("ways/0/samples_s", lambda value: value[:-1]),
    ("ways/0/role", lambda value: "other"),
    ("ways/3/ours", lambda value: True),
    ("ways/0/bytes_ok", lambda value: False),
    ("ways/1/c_order", lambda value: False),
    ("ways/0/wrong_when_busy", lambda value: 0.5),
    ("run/samples", lambda value: 4),
    ("run/samples", lambda value: 6),
    ("run/mode", lambda value: "fast"),
    ("id", lambda value: "unknown"),
    *[(name, None) for name in ("figures", "against", "against_auto", "met", "ways/0/median_s", "run/date")],
    ("ways/0/extra", lambda value: 1),
]


@pytest.mark.parametrize(("place", "change"), EDITS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_edited_figure_is_found(document: Document, place: str, change: Any) -> None:
    if place == "ways/0/extra":
        document["cases"][0]["ways"][0]["extra"] = 1
    else:
        _edit(place, change)(document)
    findings = bench.verify(document, KNOWN)
    assert findings
    assert {finding.case for finding in findings} <= {"tiny", "unknown"}


def test_a_finding_names_case_figure_stored_and_recomputed(document: Document) -> None:
    stored = document["cases"][0]["against"][".clone().numpy()"]
    document["cases"][0]["against"][".clone().numpy()"] = 1000.0
    [finding] = bench.verify(document, KNOWN)
    assert (finding.case, finding.figure) == ("tiny", "against[.clone().numpy()]")
    assert (finding.stored, finding.recomputed) == (1000.0, stored)
    assert str(finding) == (
        f"tiny: against[.clone().numpy()]: does not follow from the samples: 1000.0, recomputed {stored!r}"
    )


def test_a_missed_need_is_a_finding() -> None:
    hard = replace(TINY, needs=Needs(share_of_link=1e9))
    with Session(HostDevice(), quick=True) as session:
        document = session.document([session.measure(hard)])
    [finding] = bench.verify(document, {"tiny": hard})
    assert (finding.figure, finding.problem) == ("needs share_of_link", "MISSED")
    assert document["cases"][0]["run"]["mode"] == "quick"
    assert "MISSED" in bench.markdown(document)


def test_a_case_that_stands_twice_is_a_finding(document: Document) -> None:
    document["cases"] *= 2
    assert [finding.problem for finding in bench.verify(document, KNOWN)] == ["stands in the file more than once"]


@pytest.mark.parametrize("broken", [{}, {"schema": 1}, {"schema": 1, "cases": 3}, {"schema": 1, "cases": [None]}])
def test_what_has_no_shape_is_found_and_nothing_else_is_tried(broken: Document) -> None:
    findings = bench.verify(broken, KNOWN)
    assert findings
    assert all(finding.problem.startswith("schema: ") for finding in findings)


# --- the table


def test_the_table_has_a_row_for_each_other_way(document: Document) -> None:
    rows = bench.rows(document)
    assert [row["against"] for row in rows] == ["kept.copy_(x)", ".clone().numpy()", "a view of zeros"]
    case = document["cases"][0]
    assert rows[0]["ratio"] == case["figures"]["share_of_link"]
    assert rows[1]["ratio"] == case["against"][".clone().numpy()"]
    assert rows[1]["ratio_auto"] == case["against_auto"][".clone().numpy()"]
    assert [row["needed"] for row in rows] == [1e-6, 1e-6, None]


def test_the_table_says_its_conditions_first_and_what_is_wrong(document: Document) -> None:
    text = bench.markdown(document)
    assert text.index(document["machine"]["cpu_model"]) < text.index("| case |")
    assert "5 samples of each way" in text
    assert "`a view of zeros` (wrong bytes)" in text
    assert "Not comparable" in text
    assert "- Runs on the host." in text


def test_the_table_goes_between_the_markers(document: Document, tmp_path: Path) -> None:
    page, text = tmp_path / "page.md", bench.markdown(document)
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert not bench.is_current(page, text)
    assert bench.write_into(page, text)
    assert page.read_text() == f"before\n{BEGIN}\n{text}{END}\nafter\n"
    assert bench.is_current(page, text)
    assert not bench.write_into(page, text)


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_page_without_its_markers_is_refused(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(OptionError, match="no place for the table"):
        bench.write_into(page, "table")
    assert page.read_text() == text


# --- the command line

Out = pytest.CaptureFixture[str]


@pytest.fixture
def result(document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A result file of the tiny case, which the command line knows."""
    monkeypatch.setitem(case_list.CASES, "tiny", TINY)
    path = tmp_path / "results.json"
    bench.write(path, document)
    return path


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command measure on the host what it would measure on a GPU."""
    monkeypatch.setattr(bench, "find_gpu", HostDevice)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_gpu", lambda: None)


def test_list_names_every_case(capsys: Out) -> None:
    assert main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in case_list.CASES)
    assert "need a CUDA device" in out


def test_list_as_json(capsys: Out) -> None:
    assert main(["bench", "--list", "--json", "-"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["schema_version"] == 1
    assert [case["id"] for case in listed["cases"]] == list(case_list.CASES)


def test_list_does_not_overwrite_results(result: Path, capsys: Out) -> None:
    before = result.read_text()
    assert main(["bench", "--list", "--json", str(result)]) == 2
    assert result.read_text() == before
    assert "--list measures nothing" in capsys.readouterr().err


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_nothing_is_made_up(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "results.json"
    assert main(["bench", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "no case could run: no GPU" in out
    assert "median" not in out
    assert not path.exists()


@pytest.mark.usefixtures("on_host")
def test_a_folder_that_is_not_there_is_found_before_anything_is_measured(tmp_path: Path, capsys: Out) -> None:
    assert main(["bench", "--case", "one-4KiB", "--json", str(tmp_path / "none" / "results.json")]) == 2
    said = capsys.readouterr()
    assert "there is no folder for results.json" in said.err
    assert "measuring" not in said.err


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_as_json(capsys: Out) -> None:
    assert main(["bench", "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["cases"] == []
    assert said["notice"].startswith("no case could run: no GPU")


@pytest.mark.usefixtures("on_host")
def test_a_run_prints_conditions_before_numbers_and_merges(result: Path, capsys: Out) -> None:
    before = bench.read(result)
    assert main(["bench", "--case", "tiny", "--quick", "--json", str(result)]) == 0
    said = capsys.readouterr()
    assert said.out.index("processor") < said.out.index("mode") < said.out.index("median")
    assert "share_of_link" in said.out
    assert "WRONG" in said.out
    assert "Not comparable" in said.out
    assert "tiny: taking samples" in said.err
    after = bench.read(result)
    assert len(after["cases"]) == 1
    assert after["cases"][0]["run"]["mode"] == "quick"
    assert after["cases"][0]["ways"][0]["samples_s"] != before["cases"][0]["ways"][0]["samples_s"]
    assert after["command"] == "hostward bench --case tiny --quick"
    assert main(["bench", "verify", str(result)]) == 0


@pytest.mark.usefixtures("on_host", "result")
def test_a_run_as_json_prints_nothing_else(capsys: Out) -> None:
    assert main(["bench", "--case", "tiny", "--quick", "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [case["id"] for case in said["cases"]] == ["tiny"]


@pytest.mark.usefixtures("on_host")
def test_a_case_that_fails_costs_the_others_nothing(result: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    broken = replace(TINY, id="broken", ways=(*TINY.ways, Way("gone", "x.no_such_name")))
    monkeypatch.setattr(case_list, "CASES", {"broken": broken, "tiny": TINY})
    assert main(["bench", "--quick", "--json", str(result)]) == 2
    said = capsys.readouterr()
    assert "case broken: the way gone failed" in said.err
    assert "AttributeError" in said.err
    assert [case["id"] for case in bench.read(result)["cases"]] == ["tiny"]


def test_an_unknown_case_is_refused(capsys: Out) -> None:
    assert main(["bench", "--case", "nope"]) == 2
    assert "unknown case: got 'nope', needed one of one-1GiB-pinned" in capsys.readouterr().err


def test_verify_exit_codes(result: Path, capsys: Out) -> None:
    assert main(["bench", "verify", str(result)]) == 0
    assert capsys.readouterr().out == "results.json: 1 case, 0 findings\n"
    document = bench.read(result)
    document["cases"][0]["figures"]["share_of_link"] = 2.0
    bench.write(result, document)
    assert main(["bench", "verify", str(result)]) == 1
    assert capsys.readouterr().out.startswith("tiny: figures[share_of_link]: does not follow from the samples: 2.0, ")
    assert main(["bench", "verify", "--json", str(result)]) == 1
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["case"], finding["figure"], finding["stored"]) == ("tiny", "figures[share_of_link]", 2.0)
    assert main(["bench", "verify", str(result.with_name("none.json"))]) == 2
    assert "cannot read the result file" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--json", "x.json"], ["--quick"], ["--list"], ["--commit", "abc"]])
def test_an_action_refuses_what_it_would_ignore(option: list[str], result: Path, capsys: Out) -> None:
    assert main(["bench", *option, "verify", str(result)]) == 2
    assert f"{option[0]} in front of verify belongs to a measurement" in capsys.readouterr().err


def test_table_prints_writes_and_checks(result: Path, tmp_path: Path, capsys: Out) -> None:
    assert main(["bench", "table", str(result)]) == 0
    text = capsys.readouterr().out
    assert text == bench.markdown(bench.read(result))
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    check = ["bench", "table", str(result), "--check", str(page)]
    write = ["bench", "table", str(result), "--write", str(page)]
    assert main(check) == 1
    assert main([*write, "--check"]) == 1
    assert main(write) == 0
    assert page.read_text() == f"{BEGIN}\n{text}{END}\n"
    assert main(check) == 0
    assert main(["bench", "table", str(result), "--check"]) == 2
    capsys.readouterr()
    assert main(["bench", "table", "--json", str(result)]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 3


def test_no_table_is_made_of_a_damaged_file(result: Path, document: Document, capsys: Out) -> None:
    del document["cases"][0]["met"]
    bench.write(result, document)
    assert main(["bench", "table", str(result)]) == 2
    assert "no table can be made of results.json" in capsys.readouterr().err
