"""Host memory, watched from outside by a process of its own.

Two readings, because each misses something: ``RssAnon + RssShmem`` of the watched process does not
see page-locked memory that the driver allocated, and the change of the machine's available memory
sees everybody else too. This file is also the program that the watcher runs, with ``python -I -S``:
it may import the standard library only.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

INTERVAL_S = 0.002
BASELINE_READINGS = 10


@dataclass(frozen=True, slots=True)
class HostPeak:
    """Bytes above the baseline at the highest reading, and the longest time between two readings.

    `rss` is the process's own anonymous and shared memory, `used` the machine's total less what is
    available. ``None``: the kernel does not say.
    """

    rss: int | None
    used: int | None
    interval_s: float

    @property
    def nbytes(self) -> int | None:
        """The larger of the two, as each of them may miss something."""
        known = [value for value in (self.rss, self.used) if value is not None]
        return max(known) if known else None


class Sampler:
    """A process that reads this one's memory every 2 ms, between `begin` and `end`.

    The baseline is the highest of ten readings taken before `begin` returns, so that noise is not
    counted as a peak.
    """

    def __init__(self, pid: int | None = None, interval_s: float = INTERVAL_S) -> None:
        arguments = [sys.executable, "-I", "-S", __file__, str(pid or os.getpid()), str(interval_s)]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def begin(self) -> None:
        """Take the baseline; returns once the watcher is reading."""
        self._ask(b"b")

    def end(self) -> HostPeak:
        """Take one last reading and return the peak since `begin`."""
        return HostPeak(**json.loads(self._ask(b"e")))

    def close(self) -> None:
        """End the watcher."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _ask(self, command: bytes) -> bytes:
        to, back = self._pipes()
        try:
            to.write(command)
            line = back.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise RuntimeError(f"the memory watcher ended by itself, exit code {self._process.wait()}")
        return line

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


def _field_sum(path: Path, names: tuple[bytes, ...]) -> int | None:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.split(b":")[0] in names]
    return sum(found) if len(found) == len(names) else None


def _used() -> int | None:
    total = _field_sum(Path("/proc/meminfo"), (b"MemTotal",))
    available = _field_sum(Path("/proc/meminfo"), (b"MemAvailable",))
    # A difference, not MemAvailable alone: some virtual machines grow their total while they run.
    return None if total is None or available is None else total - available


def _reading(pid: int) -> tuple[int | None, int | None]:
    return _field_sum(Path(f"/proc/{pid}/status"), (b"RssAnon", b"RssShmem")), _used()


def _highest(readings: list[tuple[int | None, int | None]]) -> list[int | None]:
    columns = [[value for value in column if value is not None] for column in zip(*readings, strict=True)]
    return [max(known) if len(known) == len(readings) else None for known in columns]


def _watch(pid: int, interval_s: float) -> None:
    """Serve ``b`` (begin) and ``e`` (end) on standard input until it closes."""
    base: list[int | None] = []
    peak: list[int | None] = []
    running, longest, last = False, 0.0, 0.0
    while True:
        ready, _, _ = select.select([0], [], [], interval_s if running else None)
        command = os.read(0, 1) if ready else b""
        if ready and not command:
            return
        if command == b"b":
            readings = []
            for _ in range(BASELINE_READINGS):
                readings.append(_reading(pid))
                time.sleep(interval_s)
            base = peak = _highest(readings)
            running, longest, last = True, 0.0, time.monotonic()
            _say("{}")
            continue
        rss, used = _reading(pid)
        peak = _highest([(peak[0], peak[1]), (rss, used)])
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if command == b"e":
            above = [None if top is None or low is None else top - low for top, low in zip(peak, base, strict=True)]
            _say(json.dumps({"rss": above[0], "used": above[1], "interval_s": round(longest, 6)}))
            running = False


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _watch(int(sys.argv[1]), float(sys.argv[2]))
