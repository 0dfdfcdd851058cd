"""A flight: one call's copies, from the first queued byte to the results. `docs/architecture.md` has the state machine.

Guarantees
    * `DONE` and `FAILED` are reached once, whoever drives.
    * Sources, temporaries and slots are let go only after every event that was recorded has been seen to fire. Where
      that cannot be seen any more (a device error that stays), they are kept for ever: leaked rather than freed under a
      copy that may still run.
    * No lock is held while a sink, a destructor or torch runs; the drive token is tried, never waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import Enum

from hostward._engine._leg import Leg
from hostward._engine._naps import pause
from hostward._sinks import Sink, Slot, Work
from hostward.errors import HostwardError, TransferError

Run = Callable[[Work], None]

_leaked: list[object] = []  # what a dead device may still read or write; see `Flight`


class State(Enum):
    """Where a flight stands."""

    FEEDING = "feeding"
    QUEUED = "queued"
    LANDED = "landed"
    DONE = "done"
    FAILED = "failed"
    LEAKED = "leaked"


_ENDS = (State.DONE, State.FAILED, State.LEAKED)


class Flight:
    """The copies of one call, on all its devices.

    Made and fed by `Engine.run`. `wait` drives it in the caller's thread; the pump drives it where nobody waits.

    Parameters
    ----------
    legs
        One for each device that takes part; none if no byte has to cross a link.
    sink
        Where the bytes go.
    adopt
        Hands a flight to the pump.
    """

    def __init__(self, legs: Sequence[Leg], sink: Sink, adopt: Callable[[Flight], None]) -> None:
        self.state = State.FEEDING
        self.error: BaseException | None = None
        self._legs = list(legs)
        self._sink: Sink | None = sink
        self._adopt = adopt
        self.home = (legs[0].device, legs[0].backend) if legs else None
        # The drive token: the thread that drives. `setdefault` takes it in one step that no signal can split, so that
        # `abandon` knows whether this thread still holds it.
        self._driver: dict[str, int] = {}
        self._at_work = 0  # host work in other threads, handed out and not yet done
        self._work_lock = threading.Lock()

    @property
    def ended(self) -> bool:
        """Whether nothing moves any more."""
        return self.state in _ENDS

    # --- driving ------------------------------------------------------------------------------------------------------

    def advance(self, run: Run) -> bool:
        """Move on as far as possible without waiting; say whether anything moved.

        Parameters
        ----------
        run
            Runs a sink's host work: at once (a waiter), or later in a thread of its own (the pump).
        """
        me = threading.get_ident()
        if self.ended or self._driver.setdefault("thread", me) != me:
            return False
        try:
            return not self.ended and self._advance(run)
        finally:
            self._driver.clear()

    def _advance(self, run: Run) -> bool:
        moved = False
        for leg in list(self._legs):
            try:
                landed = leg.poll()
                if self.error is not None:
                    leg.stop()
            except Exception as error:
                self._lose(leg, error)
                return True
            try:
                moved = self._feed(leg, landed, run) or moved
            except Exception as error:
                self._fail(error)
                moved = True
        if self.state is State.FEEDING and all(leg.fed for leg in self._legs):
            self.state = State.QUEUED
        if self.state in (State.QUEUED, State.LANDED) and self._settled:
            moved = True
            if self.error is None and self.state is State.QUEUED:
                self.state = State.LANDED
                self._hand_out(self._finish, run)
            if self._settled:  # the work may have been done at once
                self._end()
        return moved

    @property
    def _settled(self) -> bool:
        return self._at_work == 0 and all(leg.landed for leg in self._legs)

    def _feed(self, leg: Leg, landed: Sequence[Slot], run: Run) -> bool:
        sink = self._sink
        if self.error is not None or sink is None:
            return bool(landed)
        for slot in landed:
            work = sink.landed(slot)
            if work is not None:
                self._hand_out(work, run)
        return leg.feed(sink) or bool(landed)

    def _hand_out(self, work: Work, run: Run) -> None:
        if run is at_once:  # under the drive token, so that nobody asks meanwhile whether work is left
            self._do(work)
            return
        with self._work_lock:
            self._at_work += 1

        def counted() -> None:
            try:
                self._do(work)
            finally:
                with self._work_lock:
                    self._at_work -= 1

        run(counted)

    def _do(self, work: Work) -> None:
        try:
            if self.error is None:
                work()
        except Exception as error:
            self._fail(error)

    def _finish(self) -> None:
        if self._sink is not None:
            self._sink.finish()

    def _fail(self, error: BaseException) -> None:
        """Note the first error. The driver then queues nothing more and waits for what is queued."""
        if self.error is None:
            self.error = error

    def _lose(self, leg: Leg, error: Exception) -> None:
        """Give up on a leg of which nobody can say any more whether its copies still run."""
        self._fail(error)
        _leaked.append((leg, self._sink))
        self._legs.remove(leg)
        if self._sink is not None:
            self._sink.leak()
        self._sink = None
        self.state = State.QUEUED

    def _end(self) -> None:
        """Nothing can touch sources or slots any more: let go of them."""
        if self.error is not None and self._sink is not None:
            try:
                self._sink.abort(self.error)
            except Exception as error:
                self.error.add_note(f"letting go of the results failed as well: {error!r}")
        self._sink, self._legs = None, []
        self.state = State.DONE if self.error is None else State.FAILED

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Drive the flight in this thread until it has ended.

        Raises
        ------
        TransferError
            The device failed.
        HostwardError
            What the sink raised.
        KeyboardInterrupt
            Within a few milliseconds; the pump then sees the flight to its end, and its results are dropped.
        """
        try:
            with ExitStack() as stack:
                for backend in {id(leg.backend): leg.backend for leg in self._legs}.values():
                    stack.enter_context(backend.relaxed_capture())
                self._drive()
        except BaseException as error:
            self.abandon(error)
            raise
        if self.error is not None:
            raise as_raised(self.error)

    def _drive(self) -> None:
        since = time.monotonic()
        while not self.ended:
            if self.advance(at_once):
                since = time.monotonic()
            else:
                pause(since, time.sleep)

    def abandon(self, error: BaseException) -> None:
        """Stop feeding, drop the results, and let the pump wait for what is queued."""
        if not self.ended:
            # Not the error itself: its traceback leads back here, and the cycle would keep the sources for long.
            self._fail(TransferError("nobody waits for this transfer any more", got=type(error).__name__))
            if self._driver.get("thread") == threading.get_ident():  # interrupted right behind taking it
                self._driver.clear()
            self._adopt(self)

    def leak(self, error: BaseException) -> None:
        """Keep everything for ever: nobody can see it to its end."""
        _leaked.append((self._legs, self._sink))
        if self._sink is not None:
            self._sink.leak()
        self._fail(error)
        self.state = State.LEAKED


def at_once(work: Work) -> None:
    """Run host work in the thread that drives."""
    work()


def as_raised(error: BaseException) -> BaseException:
    """Return the error as the caller sees it; a device's own becomes the cause of a `TransferError`."""
    if not isinstance(error, RuntimeError) or isinstance(error, HostwardError):
        return error
    raised = TransferError(
        "the device failed during the transfer",
        got=str(error).partition("\n")[0],
        why="nothing was returned: an array whose bytes have not all landed never is",
        do="see the cause above; after a sticky CUDA error only a new process helps",
    )
    # Without its traceback, which leads back to the flight: the cycle would keep the sources for long.
    raised.__cause__ = error.with_traceback(None)
    return raised
