"""A session: one device, one machine record, and cases measured one after the other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from hostward.bench._busy import Busy, control_share, run_busy
from hostward.bench._bytes import Match, compare
from hostward.bench._case import Case, Data, Way
from hostward.bench._device import Device
from hostward.bench._figures import Record, derive_case, derive_way
from hostward.bench._latch import Gate
from hostward.bench._machine import describe_machine, now, source_commit
from hostward.bench._measure import WARM_UP_ROUNDS, Call, Samples, interleave, once
from hostward.bench._peaks import Peaks, measure_peaks
from hostward.bench._result import document_of
from hostward.bench._sampler import Sampler
from hostward.errors import HostwardError

MOST_TOUCHED_NBYTES = 12 << 30

Progress = Callable[[str], None]


class Session:
    """Measures cases on one device; a context manager, since a watcher process belongs to it.

    Parameters
    ----------
    device
        Where the data lies.
    quick
        Take the fewest samples that a median can be taken of.
    command
        What the user ran, without paths; goes into the results.
    commit
        The commit to record where the package is no git checkout.
    progress
        Told what is going on, in a few words.

    Notes
    -----
    Host memory is touched once at the start: a machine that only grows into its memory as it is used
    would charge that to whichever way comes first. The link is measured here too.
    """

    def __init__(
        self,
        device: Device,
        *,
        quick: bool = False,
        command: str = "hostward bench",
        commit: str | None = None,
        progress: Progress = lambda text: None,
    ) -> None:
        self._device, self._quick, self._command, self._progress = device, quick, command, progress
        self._git = source_commit(commit)
        progress("touching host memory")
        self._touched = touch_host_memory(device)
        progress("measuring the link")
        self.machine = describe_machine(device)
        progress("checking that a stream can be held")
        self._gate, self._control = _working_gate(device)
        self._sampler = Sampler()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._sampler.close()
        if self._gate is not None:
            self._gate.close()

    def measure(self, case: Case) -> Record:
        """Run one case: first calls, bytes, samples, bytes again, peaks, busy stream. Return its record.

        Raises
        ------
        HostwardError
            A way raised, or the case's reference does not have the size it states.
        """
        self._say(case, "making the data")
        data = case.setup(self._device.torch_device)
        if data.reference.nbytes != case.nbytes:
            got, needed = f"{data.reference.nbytes:,} bytes", f"{case.nbytes:,}"
            raise HostwardError(f"case {case.id}: the reference has another size", got=got, needed=needed)
        calls = {way.name: way.compile(data.names) for way in case.ways}
        try:
            return self._record(case, data, calls)
        finally:
            calls.clear()
            del data
            gc.collect()
            self._device.free_caches()

    def document(self, cases: list[Record]) -> Record:
        """Return the result file of this session's cases."""
        return document_of(self.machine, self._command, self._git, cases)

    def _record(self, case: Case, data: Data, calls: Mapping[str, Call]) -> Record:
        device = self._device
        self._say(case, "first calls, comparing bytes")
        first_s: dict[str, float] = {}
        matches: dict[str, list[Match]] = {name: [] for name in calls}
        for name, call in calls.items():
            device.synchronize()
            seconds, result = _first_call(case, name, call)
            first_s[name] = round(seconds, 9)
            matches[name].append(compare(result, data.reference))
            del result
        self._say(case, "taking samples")
        samples = interleave(
            calls,
            device.synchronize,
            calls_per_sample=case.calls_per_sample,
            budget_s=case.budget_s,
            quick=self._quick,
        )
        self._say(case, "comparing bytes again")
        for name, call in calls.items():
            matches[name].append(compare(call(), data.reference))
        self._say(case, "memory peaks")
        peaks = {name: measure_peaks(call, device, self._sampler) for name, call in calls.items()}
        busy: dict[str, Busy | None] = dict.fromkeys(calls)
        if self._gate is not None:
            self._say(case, "behind a held stream")
            device.free_caches()
            busy = {name: run_busy(call, data, self._gate) for name, call in calls.items()}
        ways = []
        for way in case.ways:
            key = way.name
            ways.append(way_record(way, data, first_s[key], samples[key], matches[key], peaks[key], busy[key]))
        record = {
            "id": case.id,
            "what": case.what,
            "note": case.note,
            "nbytes": case.nbytes,
            "run": self._conditions(case, len(ways[0]["samples_s"])),
            "needs": case.needs.as_record(),
            "ways": ways,
        }
        return {**record, **derive_case(record)}

    def _conditions(self, case: Case, samples: int) -> Record:
        same = ("hostward", "torch", "cuda", "torch_threads", "numpy", "python", "kernel", "driver", "link_gb_per_s")
        return {
            "date": now(),
            "command": self._command,
            "git": self._git,
            **{key: self.machine[key] for key in same},
            "mode": "quick" if self._quick else "full",
            "samples": samples,
            "calls_per_sample": case.calls_per_sample,
            "warm_up_rounds": WARM_UP_ROUNDS,
            "touched_nbytes": self._touched,
            "busy_control": self._control,
        }

    def _say(self, case: Case, text: str) -> None:
        self._progress(f"{case.id}: {text}")


def way_record(
    way: Way, data: Data, first_s: float, samples: Samples, matches: list[Match], peaks: Peaks, busy: Busy | None
) -> Record:
    """Put one way's record together."""
    record: dict[str, Any] = {
        "name": way.name,
        "code": way.text,
        "role": way.role.value,
        "ours": way.ours,
        "note": way.note,
        "first_s": first_s,
        "samples_s": samples.samples_s,
        "drop_s": samples.drop_s,
        "bytes_ok": all(match.ok for match in matches),
        "c_order": all(match.c_order for match in matches),
        "wrong_when_busy": busy.wrong_share if busy else None,
        "returned_early": busy.returned_early if busy else None,
        "prepared_nbytes": sum(data.names[name].nbytes for name in way.prepared),
        **peaks.as_record(),
    }
    return {**record, **derive_way(record)}


def touch_host_memory(device: Device) -> int:
    """Write to every page of a quarter of the free memory (12 GiB at most), give it back, return its size."""
    from hostward._memory import available
    from hostward._torch import torch

    if device.torch_device.type == "cpu":
        return 0
    nbytes = min(MOST_TOUCHED_NBYTES, (available() or 0) // 4)
    if nbytes:
        torch.from_numpy(np.empty(nbytes, np.uint8)).fill_(1)  # by all of torch's threads
    return nbytes


def _working_gate(device: Device) -> tuple[Gate | None, float | None]:
    """Return a gate and the control's wrong share; no gate where the control did not read only wrong values."""
    gate = device.open_gate()
    if gate is None:
        return None, None
    share = control_share(gate, device.torch_device)
    if share == 1.0:
        return gate, share
    gate.close()
    return None, share


def _first_call(case: Case, name: str, call: Call) -> tuple[float, Any]:
    """Time a way's first call; an exception gets the names that a reader needs."""
    try:
        return once(call)
    except Exception as error:
        raise HostwardError(f"case {case.id}: the way {name} failed", why=f"{type(error).__name__}: {error}") from error
