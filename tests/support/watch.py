"""Run a call in a thread of its own while a stream is held, and see when it comes back."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from device.frame import Latch

STAYS_S = 0.05  # a call that has not come back in this time is waiting for what is held


@dataclass
class Outcome:
    """What a call gave, and whether the stream was still held when it did."""

    value: Any = None
    error: BaseException | None = None
    early: bool = False

    def got(self) -> Any:
        """Return the value of a call that waited, or raise its error."""
        if self.error is not None:
            raise self.error
        assert not self.early, "it came back while its stream was held"
        return self.value


def behind(latch: Latch, call: Callable[[], Any]) -> Outcome:
    """Start `call` in a fresh thread, give it time to come back too early, then open the latch and wait for it."""
    outcome = Outcome()
    back = threading.Event()

    def run() -> None:
        try:
            outcome.value = call()
        except BaseException as error:
            outcome.error = error
        outcome.early = latch.pending
        back.set()

    thread = threading.Thread(target=run)
    thread.start()
    back.wait(STAYS_S)
    latch.open()
    thread.join()
    return outcome


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run calls in a thread each, at the same time; return what they gave, or raise what the first one raised."""
    outcomes = [Outcome() for _ in calls]
    start = threading.Barrier(len(calls))

    def run(outcome: Outcome, call: Callable[[], Any]) -> None:
        start.wait()
        try:
            outcome.value = call()
        except BaseException as error:
            outcome.error = error

    threads = [threading.Thread(target=run, args=each) for each in zip(outcomes, calls, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcome.got() for outcome in outcomes]


def interrupted(call: Callable[[], Any], after_s: float = 0.03) -> float:
    """Run a call that Ctrl-C has to end; return how many seconds after the key it came back."""
    main, pressed = threading.main_thread(), []

    def press() -> None:
        pressed.append(time.monotonic())
        signal.pthread_kill(main.ident, signal.SIGINT)  # type: ignore[arg-type]

    timer = threading.Timer(after_s, press)
    timer.start()
    try:
        call()
    except KeyboardInterrupt:
        return time.monotonic() - pressed[0]
    finally:
        timer.join()
    raise AssertionError("it came back before Ctrl-C")


def eventually(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    """Say whether the condition comes true while threads in the background work on it."""
    deadline, pause = time.monotonic() + limit_s, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.001)
    return True
