"""Do something at the n-th place where Python would run a signal handler, or collect garbage, inside of hostward.

CPython looks for pending signals when a function starts, when a call of a C function returns and at every jump back
(the "eval breaker" of Python/ceval.c, 3.11 to 3.14). `at_point` is called there, and may raise KeyboardInterrupt as
the usual handler of SIGINT does. Only the calling thread is traced.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import hostward

ROOT = str(Path(hostward.__file__).parent)
_CHECKED = ("CALL", "JUMP_BACKWARD", "RESUME", "PRECALL")


class _Tracer:
    def __init__(self, at_point: Callable[[int], None], within: tuple[str, ...]) -> None:
        self.points = 0
        self.where = ""  # the last point
        self._at_point = at_point
        self._within = tuple(f"{ROOT}/{part}" for part in within)
        self._last: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_lines = False
        if frame.f_code.co_filename.startswith(self._within):
            frame.f_trace_opcodes = True
            return self._inside
        return self._outside

    def _outside(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            self._returned(frame)
        return self._outside

    def _inside(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            before = self._last.get(frame, "RESUME")
            self._last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if before.startswith(_CHECKED) and not self._last[frame].startswith(_CHECKED):
                self.points += 1
                self.where = f"{frame.f_code.co_filename.removeprefix(ROOT)}:{frame.f_lineno}"
                self._at_point(self.points)
        elif event == "return":
            self._last.pop(frame, None)
            self._returned(frame)
        return self._inside

    def _returned(self, frame: FrameType) -> None:
        # Python functions return to their caller without a look at the signals.
        if frame.f_back in self._last:
            self._last[frame.f_back] = "RETURN_VALUE"


@contextmanager
def points(at_point: Callable[[int], None], within: tuple[str, ...] = ("",)) -> Iterator[_Tracer]:
    """Call `at_point(n)` at each point in the files of hostward whose path begins with one of `within`."""
    tracer = _Tracer(at_point, within)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield tracer
    finally:
        sys.settrace(before)
