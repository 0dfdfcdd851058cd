"""Choose one route for every move by the free bytes of this moment. Pure: the bytes are given."""

from __future__ import annotations

from hostward._plan._records import AdmittedPlan, Move, Plan, Route, Way
from hostward._types import Capacity
from hostward.errors import DeviceMemoryError, HostMemoryError

# A temporary for packing in pieces: large enough for the link's full rate, small enough to fit beside a full GPU.
PIECE_NBYTES = 32 << 20
SMALLEST_PIECE_NBYTES = 1 << 20
# Below this a call's temporaries and results are not worth asking the driver and the kernel how much is free.
UNASKED_NBYTES = 1 << 20


def asks_device(plan: Plan, device: str) -> bool:
    """Say whether `admit` wants to know this device's free bytes."""
    return sum(move.temporary for move in plan.moves if move.device == device) > UNASKED_NBYTES


def admit(plan: Plan, capacity: Capacity) -> AdmittedPlan:
    """Pick the first route of each move that fits; what fits is shared by the moves of a device, in order.

    Raises
    ------
    HostMemoryError
        The results and the scratch memory are larger than what the host can give.
    DeviceMemoryError
        Not even the smallest piece fits into the device's free memory.
    """
    _check_host(plan, capacity)
    free = dict(capacity.device_free)
    limit = capacity.temporary_limit
    rooms = {move.device: min(limit, free.get(move.device, limit)) for move in plan.moves}
    left = {device: _for_whole(plan, device, room) for device, room in rooms.items()}
    routes: list[Route] = []
    for move, allowed in zip(plan.moves, plan.routes, strict=True):
        if move.temporary <= left[move.device]:
            left[move.device] -= move.temporary
            routes.append(allowed[0])
        else:
            routes.append(allowed[-1])
    pieces = [0] * len(routes)
    fallbacks: list[str] = []
    for number, (move, route) in enumerate(zip(plan.moves, routes, strict=True)):
        if route is Route.PIECES:  # one after the other, so all of a device may have what the others leave
            pieces[number] = piece = _piece(move, left[move.device], free.get(move.device))
            fallbacks.append(
                f"move {number}: packed in pieces of {piece:,} bytes, because a temporary of {move.temporary:,} bytes "
                f"passes what is left of {rooms[move.device]:,} bytes for temporaries on {move.device}"
            )
    blocking = [move.device for move, route in zip(plan.moves, routes, strict=True) if route is Route.BLOCKING]
    blocks = [f"asynchronous copies are not proven on {device}" for device in dict.fromkeys(blocking)]
    return AdmittedPlan(plan, tuple(routes), tuple(pieces), tuple(blocks), tuple(fallbacks))


def _for_whole(plan: Plan, device: str, room: int) -> int:
    """Return the bytes for whole temporaries: where not all fit, the smallest piece is kept back for the others."""
    needed = sum(move.temporary for move in plan.moves if move.device == device)
    return room if needed <= room else room - SMALLEST_PIECE_NBYTES


def _piece(move: Move, left: int, free: int | None) -> int:
    """Return the size of one piece: what was kept back and what is left, up to what the link needs."""
    if free is not None and free < SMALLEST_PIECE_NBYTES:
        raise DeviceMemoryError(
            "no room for a temporary on the device",
            leaf=move.leaf,
            got=f"{free:,} free bytes on {move.device}",
            needed=f"{SMALLEST_PIECE_NBYTES:,} bytes to {' and '.join(move.passes)} piece by piece",
            do="free some device memory, or ask for order='K' and no dtype=, which moves dense leaves as they lie",
        )
    return min(move.nbytes, PIECE_NBYTES, SMALLEST_PIECE_NBYTES + max(0, left))


def _check_host(plan: Plan, capacity: Capacity) -> None:
    needed = plan.result_nbytes + plan.scratch_nbytes
    if capacity.host_free is None or needed <= capacity.host_free:
        return
    largest = max(plan.delivers, key=lambda deliver: deliver.nbytes * (deliver.way is not Way.HOST_SHARE))
    part = f", {largest.nbytes:,} of them for shape {largest.shape} of {largest.dtype}" if plan.result_nbytes else ""
    raise HostMemoryError(
        "the result does not fit into host memory",
        leaf=largest.leaf,
        got=f"{capacity.host_free:,} free bytes",
        needed=f"{needed:,} bytes{part}",
        do="move fewer leaves at once, narrow them with dtype=, give a memory-mapped out=, "
        "or ask for order='K', which keeps broadcast dimensions unexpanded",
    )
