"""One background thread per device that sees flights to their end where nobody waits for them.

Guarantees: `adopt` never blocks and takes no lock (a `SimpleQueue`, whose `put` is re-entrant), so a finaliser may call
it; the pump asks events in relaxed capture mode, so it cannot break a graph capture of another thread; at interpreter
exit it is joined with a time limit, and what has not ended by then is leaked on purpose.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import warnings
from contextlib import AbstractContextManager

from hostward._devices import Backend
from hostward._engine._flight import Flight
from hostward._sinks import Work
from hostward.errors import HostwardResourceWarning, TransferError

_EXIT_S = 5.0
_POLL_MIN_S = 50e-6
_POLL_MAX_S = 0.005


class Pump:
    """Drives the flights given to it.

    Parameters
    ----------
    name
        The device, for the threads' names.
    backend
        Its backend, for the capture mode.
    """

    def __init__(self, name: str, backend: Backend) -> None:
        self._inbox: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._flights: list[Flight] = []
        self._backend = backend
        self._closing = False
        self._pump = threading.Thread(target=self._run, name=f"hostward pump {name}", daemon=True)
        self._worker = threading.Thread(target=self._do_work, name=f"hostward worker {name}", daemon=True)
        self._pump.start()
        self._worker.start()

    def adopt(self, flight: Flight) -> None:
        """Drive the flight from now on."""
        self._inbox.put(flight)

    def _run(self) -> None:
        with self._relaxed():
            nap = _POLL_MIN_S
            while True:
                nap = _POLL_MIN_S if self._turn() else min(2 * nap, _POLL_MAX_S)
                if self._closing and not self._flights:
                    return
                self._receive(nap if self._flights else None)

    def _relaxed(self) -> AbstractContextManager[object]:
        return self._backend.relaxed_capture()

    def _turn(self) -> bool:
        moved = False
        for flight in self._flights:
            try:
                moved = flight.advance(self._work.put) or moved
            except Exception as error:  # a flight that nobody can drive must not end the others' driver
                flight.leak(error)
        self._flights = [flight for flight in self._flights if not flight.ended]
        return moved

    def _receive(self, timeout: float | None) -> None:
        try:
            flight = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return
        if flight is None:
            self._closing = True
        elif flight not in self._flights:
            self._flights.append(flight)

    def _do_work(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # an idle worker must not hold a result

    def close(self, timeout_s: float) -> None:
        """End when all flights have; after `timeout_s` leak those that have not."""
        until = time.monotonic() + timeout_s
        self._inbox.put(None)
        self._pump.join(timeout_s)
        self._work.put(None)
        self._worker.join(max(0.0, until - time.monotonic()))
        stuck = [flight for flight in self._flights if not flight.ended]
        for flight in stuck:
            flight.leak(TransferError("the interpreter ended before the transfer did"))
        if stuck:
            warnings.warn(
                f"{len(stuck)} transfers had not ended when the interpreter did; their memory was left alone",
                HostwardResourceWarning,
                stacklevel=2,
            )


_pumps: dict[str, Pump] = {}
_lock = threading.RLock()


def pump_for(device: str, backend: Backend) -> Pump:
    """Return the device's pump; its threads start with the first flight that needs them."""
    with _lock:
        pump = _pumps.get(device)
        if pump is None:
            if not _pumps:
                atexit.register(_close_all)
            pump = _pumps[device] = Pump(device, backend)
        return pump


def _close_all() -> None:
    with _lock:
        pumps = list(_pumps.values())
        _pumps.clear()
    until = time.monotonic() + _EXIT_S
    for pump in pumps:
        pump.close(max(0.0, until - time.monotonic()))
