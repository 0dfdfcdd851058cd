"""`run`: from an admitted plan to a flight, in the caller's thread.

Stream order: on each device the producer is the caller's current stream. Device passes that fit into one temporary run
on it; then its event is recorded, the copy stream waits for that event, and only then the first copy is queued.
"""

from __future__ import annotations

from collections.abc import Sequence

from hostward._devices import backend_for
from hostward._engine._flight import Flight, as_raised, at_once
from hostward._engine._leg import Leg, Reader, pieces_of
from hostward._engine._pump import pump_for
from hostward._plan import AdmittedPlan
from hostward._sinks import Sink
from hostward._torch import torch


def run(admitted: AdmittedPlan, tensors: Sequence[torch.Tensor], sink: Sink) -> Flight:
    """Queue an admitted plan's copies, as many as the sink has room for, and return at once.

    Parameters
    ----------
    admitted
        What to do. Nothing is decided here.
    tensors
        The plan's leaves, by number. Held until the last copy has been seen to land.
    sink
        Where the bytes go; made for this plan.

    Returns
    -------
    Flight
        FEEDING or QUEUED. Call `Flight.wait`, or give it to the pump with `adopt`.

    Raises
    ------
    TransferError
        The device refused a pass or an event; no copy has been queued.
    DeviceMemoryError
        A temporary that was not worth asking for did not fit.

    Notes
    -----
    Never waits for a device whose asynchronous copies are proven. The current device and stream are as before.
    """
    reader = Reader(admitted, tensors)
    try:
        legs = [_leg(admitted, reader, device, sink) for device in admitted.devices]
    except RuntimeError as error:
        raise as_raised(error) from error
    flight = Flight(legs, sink, adopt)
    try:
        flight.advance(at_once)
    except BaseException as error:
        flight.abandon(error)
        raise
    return flight


def adopt(flight: Flight) -> None:
    """Let the pump of the flight's first device see it to its end."""
    if flight.home is not None:
        device, backend = flight.home
        pump_for(device, backend).adopt(flight)


def _leg(admitted: AdmittedPlan, reader: Reader, device: str, sink: Sink) -> Leg:
    where = torch.device(device)
    backend, index = backend_for(where.type), where.index or 0
    moves = [(number, move) for number, move in enumerate(admitted.plan.moves) if move.device == device]
    keep = [tensor for number, _ in moves for tensor in reader.prepare(number)]
    stream = backend.copy_stream(index)
    # Recorded behind the passes above, and before the wait below: a wait on an event that was never recorded is none.
    backend.wait(stream, backend.record(index))

    def limit(number: int) -> int:
        bounds = [bound for bound in (sink.piece_nbytes(number), admitted.pieces[number]) if bound]
        return min(bounds, default=0)

    return Leg(device, backend, index, stream, pieces_of(moves, limit), reader, keep)
