"""Do something at the n-th place where Python would run a signal handler, or collect garbage, within a call.

CPython looks for pending signals when a function starts, when a call of a C function returns and at every jump back
(the "eval breaker" of Python/ceval.c, 3.11 to 3.14). `at_point` is called there, and may raise KeyboardInterrupt as
the usual handler of SIGINT does. Only the calling thread is traced.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hostward

ROOT = str(Path(hostward.__file__).parent)
# Python code that hostward's own goes through on its way to C: a signal may come there as well.
BELOW = (contextlib.__file__, *(str(Path(torch.__file__).parent / part) for part in ("accelerator/", "cuda/")))
_CHECKED = ("CALL", "JUMP_BACKWARD", "RESUME", "PRECALL")


class _Tracer:
    def __init__(self, at_point: Callable[[int], None], within: tuple[str, ...]) -> None:
        self.points = 0
        self.places: list[str] = []
        self._at_point = at_point
        self._within = (*(f"{ROOT}/{part}" for part in within), *BELOW)
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
            # A function has looked at the signals when its first instruction runs; making a generator runs none of it.
            before = self._last.get(frame, "" if frame.f_code.co_flags & inspect.CO_GENERATOR else "RESUME")
            self._last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if before.startswith(_CHECKED) and not self._last[frame].startswith(_CHECKED):
                self.points += 1
                self.places.append(
                    f"{frame.f_code.co_filename.removeprefix(f'{ROOT}/')}:{frame.f_lineno} {frame.f_code.co_name}"
                )
                try:
                    self._at_point(self.points)
                except BaseException:
                    self._last.clear()  # Python stops tracing now, and we would keep the frames
                    raise
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
