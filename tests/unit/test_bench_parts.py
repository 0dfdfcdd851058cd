"""The parts of the benchmark frame, one by one: text that runs, bytes, clocks, peaks, the latch, shapes."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch

from hostward.bench import Case, Data, HostDevice, Needs, Role, Way
from hostward.bench import _measure as measure
from hostward.bench._busy import control_share, run_busy
from hostward.bench._bytes import compare
from hostward.bench._figures import derive_case, derive_way, spread
from hostward.bench._latch import TimedFlag
from hostward.bench._machine import describe_machine, same_machine, source_commit
from hostward.bench._peaks import measure_peaks
from hostward.bench._sampler import Sampler
from hostward.bench._schema import MACHINE, Each, Maybe, OneOf, Positive, Values, problems
from hostward.bench._table import digits, seconds
from hostward.bench.cases import CASES, cast_f32_f16, gapped_permuted, hwc_1080p, one_1gib, one_4kib

# --- ways: the text is what runs


def test_a_way_runs_the_text_it_shows() -> None:
    way = Way("sum", "\n        a = x + 1\n        a * 2\n    ")
    assert way.text == "a = x + 1\na * 2"
    assert way.compile({"x": 3})() == 8


def test_a_way_sees_torch_numpy_and_hostward() -> None:
    assert Way("names", "np.__name__, torch.__name__, hostward.__name__").compile({})() == (
        "numpy",
        "torch",
        "hostward",
    )


@pytest.mark.parametrize("code", ["y = x", "", "for _ in x: pass"])
def test_a_way_without_a_result_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="has to be an expression"):
        Way("none", code).compile({"x": 1})


def _setup(device: torch.device) -> Data:
    raise AssertionError("never set up")


@pytest.mark.parametrize(
    ("ways", "needs", "problem"),
    [
        pytest.param([("a", Role.OTHER)], Needs(), "exactly one way is primary", id="no-primary"),
        pytest.param([("a", Role.PRIMARY), ("b", Role.PRIMARY)], Needs(), "exactly one", id="two-primary"),
        pytest.param([("a", Role.PRIMARY), ("a", Role.OTHER)], Needs(), "same name", id="same-name"),
        pytest.param([("a", Role.PRIMARY), ("b", Role.LINK), ("c", Role.LINK)], Needs(), "at most", id="two-links"),
        pytest.param([("a", Role.PRIMARY)], Needs(against={"b": 2}), "names no way", id="need-of-nothing"),
        pytest.param([("a", Role.PRIMARY)], Needs(share_of_link=0.9), "needs the link", id="share-without-link"),
    ],
)
def test_a_case_that_cannot_be_compared_is_refused(ways: list[tuple[str, Role]], needs: Needs, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Case("c", "what", 1, _setup, tuple(Way(name, "1", role) for name, role in ways), needs)


# --- the cases of the command, on a few bytes and without a GPU

SMALL = [
    pytest.param(one_1gib.build(1024), id="one-1GiB-pinned"),
    pytest.param(cast_f32_f16.build(1024), id="cast"),
    pytest.param(hwc_1080p.build((2, 3, 8, 6)), id="hwc"),
    pytest.param(gapped_permuted.build(16), id="gapped"),
    pytest.param(one_4kib.build(1024), id="one-4KiB"),
]


WAIT = "torch.cuda.current_stream().synchronize()"


@pytest.mark.parametrize("case", SMALL)
def test_every_way_of_each_case_returns_the_reference(case: Case) -> None:
    data = case.setup(torch.device("cpu"))
    assert data.reference.nbytes == case.nbytes
    assert data.reference.flags.c_contiguous
    for way in case.ways:
        lines = [line for line in way.text.splitlines() if line != WAIT]  # there is nothing to wait for here
        match = compare(Way(way.name, "\n".join(lines)).compile(data.names)(), data.reference)
        assert match.ok, way.name
        assert match.c_order or not way.ours, way.name


@pytest.mark.parametrize("case", SMALL)
def test_every_way_that_does_not_block_waits(case: Case) -> None:
    for way in case.ways:
        assert ("non_blocking" in way.text) is (WAIT in way.text.splitlines()), way.name


def test_the_cases_have_their_ids_sizes_and_needs() -> None:
    assert {name: (case.nbytes, case.needs.as_record()) for name, case in CASES.items()} == {
        "one-1GiB-pinned": (1 << 30, {"share_of_link": 0.97, "against": {".cpu().numpy()": 25}}),
        "cast-f32-f16-268MB": (134_217_728, {"share_of_link": None, "against": {".cpu().half().numpy()": 40}}),
        "hwc-64x1080p-u8": (
            398_131_200,
            {
                "share_of_link": None,
                "against": {"np.ascontiguousarray(.cpu().permute(0, 2, 3, 1).numpy())": 60},
            },
        ),
        "gapped-permuted-64MB": (1 << 26, {"share_of_link": None, "against": {".cpu().numpy()": 20}}),
        "one-4KiB": (4096, {"share_of_link": None, "against": {".cpu().numpy()": 0.75}}),
    }


def test_a_source_of_random_bits_holds_nan_payloads() -> None:
    data = one_1gib.build(1 << 14).setup(torch.device("cpu"))
    assert np.isnan(data.reference).any()


def test_listing_verifying_and_tables_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from hostward.bench import cases, verify; cases.select(None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- bytes


def test_equal_bytes_match_whatever_the_layout() -> None:
    reference = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert compare(reference.copy(), reference).ok
    turned = compare(np.asfortranarray(reference), reference)
    assert turned.ok
    assert not turned.c_order


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "float32", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 0, 4)])
def test_each_wrong_element_is_counted(dtype: str, shape: tuple[int, ...]) -> None:
    reference = np.ones(shape, dtype)
    wrong = np.zeros(shape, dtype)
    assert compare(reference.copy(), reference).wrong == 0
    assert compare(wrong, reference).wrong == reference.size
    if reference.size:
        wrong = reference.copy()
        wrong[(0,) * len(shape)] = 0
        assert compare(wrong, reference).wrong == 1


def test_blocks_cover_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostward.bench._bytes.BLOCK_NBYTES", 16)
    reference = np.arange(35, dtype=np.int32).reshape(7, 5)
    wrong = reference.copy()
    wrong[0, 0], wrong[6, 4] = -1, -1
    assert compare(wrong, reference).wrong == 2


def test_bytes_count_and_not_values() -> None:
    nan, zero = np.full(3, np.nan, np.float32), np.zeros(3, np.float32)
    assert compare(nan.copy(), nan).ok
    assert compare(-zero, zero).wrong_share == 1.0


@pytest.mark.parametrize("result", [None, np.zeros(4, np.float64), np.zeros((2, 2), np.float32), [0.0] * 4])
def test_another_kind_of_result_is_wrong_everywhere(result: object) -> None:
    assert compare(result, np.zeros(4, np.float32)).wrong_share == 1.0


# --- clocks


def test_rounds_stay_within_bounds() -> None:
    assert measure.rounds_for(8.0, 1.0, quick=False) == 8
    assert measure.rounds_for(8.0, 100.0, quick=False) == measure.FEWEST_ROUNDS
    assert measure.rounds_for(8.0, 0.0, quick=False) == measure.MOST_ROUNDS
    assert measure.rounds_for(8.0, 0.01, quick=True) == measure.FEWEST_ROUNDS


def test_every_round_has_every_way_and_no_fixed_neighbour() -> None:
    names = ["a", "b", "c", "d"]
    rounds = [measure.turn(names, number) for number in range(8)]
    assert all(sorted(order) == names for order in rounds)
    before_b = {order[order.index("b") - 1] for order in rounds if order.index("b")}
    assert len(before_b) > 1
    assert {order[0] for order in rounds} == set(names)


def test_samples_are_interleaved_after_warm_up() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    taken = measure.interleave(calls, lambda: None, calls_per_sample=1, budget_s=0.0, quick=False)
    assert {name: len(each.samples_s) for name, each in taken.items()} == {"a": 5, "b": 5}
    assert len(order) == 2 * (measure.WARM_UP_ROUNDS + 5)
    assert all(sorted(order[at : at + 2]) == ["a", "b"] for at in range(0, len(order), 2))


def test_a_batch_is_divided_by_its_calls() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    took, drop = measure.sample(call, 200)
    assert calls == 200
    assert drop is None
    assert 0 < took < 1e-3


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_before(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with suppress(KeyError), measure.quiet_gc():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


# --- figures, against numbers worked out by hand


def test_figures_follow_from_the_samples() -> None:
    def way(name: str, role: str, *samples: float) -> dict[str, Any]:
        return {"name": name, "role": role, "ours": role in ("primary", "auto"), "samples_s": samples, "drop_s": []}

    ways = [
        way("p", "primary", 2.0, 1.0, 3.0),
        way("a", "auto", 4.0),
        way("l", "link", 1.5, 1.5),
        way("o", "other", 50.0, 70.0),
    ]
    needs = {"share_of_link": 0.8, "against": {"o": 30}}
    assert derive_case({"nbytes": 4_000_000_000, "needs": needs, "ways": ways}) == {
        "against": {"l": 0.75, "o": 30.0},
        "against_auto": {"l": 0.375, "o": 15.0},
        "figures": {"gb_per_s": 2.0, "gb_per_s_auto": 1.0, "share_of_link": 0.75, "share_of_link_auto": 0.375},
        "met": [
            {"need": "share_of_link", "needed": 0.8, "got": 0.75, "met": False},
            {"need": "against o", "needed": 30, "got": 30.0, "met": True},
        ],
    }
    assert derive_way(ways[0]) == {"median_s": 2.0, "q1_s": 1.5, "q3_s": 2.5, "drop_median_s": None}
    assert spread([5.0]) == (5.0, 5.0, 5.0)


# --- memory peaks


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    with Sampler() as watcher:
        yield watcher


def test_the_watcher_sees_memory_from_outside(sampler: Sampler) -> None:
    sampler.begin()
    idle = sampler.end()
    sampler.begin()
    touched = np.ones(64 << 20, np.uint8)
    peak = sampler.end()
    assert peak.rss is not None
    assert peak.nbytes is not None
    assert touched.nbytes * 0.95 < peak.rss < touched.nbytes * 1.5
    assert peak.nbytes >= peak.rss
    assert idle.rss is not None
    assert idle.rss < touched.nbytes / 4


def test_a_peak_counts_the_result_and_what_was_freed_before_the_end(sampler: Sampler) -> None:
    def call() -> np.ndarray[Any, Any]:
        first = np.ones(32 << 20, np.uint8)
        return np.concatenate([first, first])

    peaks = measure_peaks(call, HostDevice(), sampler)
    assert peaks.host_peak_rss is not None
    assert peaks.host_peak_rss > 0.9 * 96 * (1 << 20)
    assert (peaks.pinned_peak, peaks.gpu_peak) == (None, None)


def test_a_watcher_that_died_is_an_error() -> None:
    with Sampler(pid=1) as watcher:
        watcher._process.kill()
        watcher._process.wait()
        with pytest.raises(RuntimeError, match="ended by itself"):
            watcher.begin()


# --- the latch's flag; what needs a GPU is run on one


@pytest.fixture
def flag() -> Iterator[TimedFlag]:
    memory = (ctypes.c_uint64 * 1)()
    flag = TimedFlag(ctypes.addressof(memory))
    yield flag
    flag.close()


def test_the_flag_rises_although_the_interpreter_is_locked(flag: TimedFlag) -> None:
    flag.lower()
    flag.raise_in(0.02)
    ctypes.PyDLL(None).usleep(ctypes.c_uint(200_000))  # keeps the lock for the whole time
    assert flag.is_up()  # raised by then: no other Python thread has run since


def test_a_stopped_flag_stays_down_until_it_is_raised(flag: TimedFlag) -> None:
    for _ in range(2):
        flag.lower()
        flag.raise_in(60.0)
        assert flag.stop()
        assert not flag.is_up()
        flag.raise_now()
        assert flag.is_up()
        assert not flag.stop()


def test_a_timer_that_has_fired_leaves_nothing_behind(flag: TimedFlag) -> None:
    flag.raise_in(1e-3)
    assert flag._reader is not None
    flag._reader.join(timeout=10)
    assert flag.is_up()
    flag.lower()
    flag.raise_in(60.0)
    assert flag.stop()


def test_a_flag_can_be_raised_without_a_timer(flag: TimedFlag) -> None:
    flag.lower()
    flag.raise_now()
    assert flag.is_up()
    flag.lower()
    assert not flag.is_up()


# --- behind a held stream


class NeverHolds:
    """A gate that leaks: everything queued runs at once."""

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def hold(self) -> None: ...
    def open_in(self, delay_s: float) -> None: ...
    def keep_shut(self) -> bool:
        return False

    def open(self) -> None: ...


def _data() -> Data:
    reference = np.arange(100, dtype=np.float32)
    return Data({"x": torch.from_numpy(reference.copy())}, reference)


def test_a_way_that_reads_what_was_written_is_right() -> None:
    data = _data()
    busy = run_busy(Way("copy", "x.numpy().copy()").compile(data.names), data, NeverHolds())
    assert (busy.wrong_share, busy.returned_early) == (0.0, False)


def test_a_way_that_returns_older_bytes_is_seen() -> None:
    data = _data()
    old: list[Any] = []

    def call() -> Any:
        old.append(data.names["x"].numpy().copy())
        return old[0]  # what the first of the poisoning calls read

    assert run_busy(call, data, NeverHolds()).wrong_share == 1.0


def test_sources_hold_their_bytes_again_after_a_way_raised() -> None:
    data = _data()

    def call() -> Any:
        raise KeyError

    with pytest.raises(KeyError):
        run_busy(call, data, NeverHolds())
    assert compare(data.names["x"].numpy(), data.reference).ok


def test_a_gate_that_holds_nothing_fails_its_control() -> None:
    assert control_share(NeverHolds(), torch.device("cpu")) != 1.0


# --- the machine


def test_a_machine_record_has_its_shape_and_names_nobody() -> None:
    machine = describe_machine(HostDevice())
    assert list(problems(machine, MACHINE)) == []
    assert machine["gpu"] is None
    text = json.dumps(machine)
    assert "/" not in text.replace("+", "").replace(machine["cpu_model"], "")


def test_what_may_change_does_not_make_another_machine() -> None:
    machine = describe_machine(HostDevice())
    assert same_machine(machine, {**machine, "kernel": "other", "link_gb_per_s": 1.0, "driver": "other"})
    assert not same_machine(machine, {**machine, "gpu": "other"})
    assert not same_machine(machine, {**machine, "cpu_count": machine["cpu_count"] + 1})


def test_a_stated_commit_is_marked_as_stated() -> None:
    found = source_commit("abc")
    assert found is not None
    assert found["stated"] is (found["commit"] == "abc")


# --- shapes


@pytest.mark.parametrize(
    ("value", "shape", "places"),
    [
        pytest.param({"a": 1}, {"a": int}, [], id="fits"),
        pytest.param({}, {"a": int}, ["a"], id="missing"),
        pytest.param({"a": 1, "b": 2}, {"a": int}, ["b"], id="unknown"),
        pytest.param({"a": True}, {"a": int}, ["a"], id="a-bool-is-no-number"),
        pytest.param({"a": 1}, {"a": bool}, ["a"], id="a-number-is-no-bool"),
        pytest.param(1, float, [], id="whole-number"),
        pytest.param(None, Maybe(float), [], id="null"),
        pytest.param("x", Maybe(float), [""], id="not-null"),
        pytest.param([1, "x"], Each(int), ["[1]"], id="item"),
        pytest.param([], Each(int, fewest=1), [""], id="too-few"),
        pytest.param({"k": "x"}, Values(float), ["k"], id="values"),
        pytest.param([], Values(float), [""], id="no-object"),
        pytest.param("c", OneOf(("a", "b")), [""], id="one-of"),
        pytest.param(True, OneOf((1,)), [""], id="true-is-not-one"),
        pytest.param([1.0, 0.0], Each(Positive()), ["[1]"], id="zero"),
        pytest.param(float("nan"), Positive(), [""], id="nan"),
        pytest.param(float("inf"), Positive(), [""], id="infinite"),
    ],
)
def test_the_checker_finds_what_does_not_fit(value: object, shape: object, places: list[str]) -> None:
    assert [found.at for found in problems(value, shape)] == places


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.5, "2.50 s"), (0.85, "850 ms"), (0.0196, "19.6 ms"), (1.35e-3, "1.35 ms"), (21.04e-6, "21.0 us"), (None, "-")],
)
def test_times_are_readable(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.984, "0.98"), (9.99, "9.99"), (9.996, "10.0"), (99.96, "100"), (1234.5, "1234")]
)
def test_three_digits(value: float, text: str) -> None:
    assert digits(value) == text
