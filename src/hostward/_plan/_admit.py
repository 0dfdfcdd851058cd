"""Choose one route for every move by the free bytes of this moment. Pure: the bytes are given."""

from __future__ import annotations

from hostward._plan._records import AdmittedPlan, Move, Plan, Route
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
    left = {device: min(capacity.temporary_limit, room) for device, room in free.items()}
    routes: list[Route] = []
    pieces: list[int] = []
    fallbacks: list[str] = []
    blocks: list[str] = []
    for number, (move, allowed) in enumerate(zip(plan.moves, plan.routes, strict=True)):
        room = left.get(move.device, capacity.temporary_limit)
        route, piece = allowed[0], 0
        if move.temporary > room and Route.PIECES in allowed:
            route, piece = Route.PIECES, _piece(move, min(room, PIECE_NBYTES), free.get(move.device))
            fallbacks.append(
                f"move {number}: packed in pieces of {piece:,} bytes, because a temporary of {move.temporary:,} bytes "
                f"passes the {room:,} bytes left for temporaries on {move.device}"
            )
        elif Route.PIECES in allowed:
            left[move.device] = room - move.temporary
        if route is Route.BLOCKING:
            blocks.append(f"asynchronous copies are not proven on {move.device}")
        routes.append(route)
        pieces.append(piece)
    return AdmittedPlan(plan, tuple(routes), tuple(pieces), tuple(dict.fromkeys(blocks)), tuple(fallbacks))


def _piece(move: Move, room: int, free: int | None) -> int:
    """Return the size of one piece: what is left, but never less than what packing at all needs."""
    if free is not None and free < SMALLEST_PIECE_NBYTES:
        raise DeviceMemoryError(
            "no room for a temporary on the device",
            leaf=move.leaf,
            got=f"{free:,} free bytes on {move.device}",
            needed=f"{SMALLEST_PIECE_NBYTES:,} bytes to {' and '.join(move.passes)} piece by piece",
            do="free some device memory, or ask for order='K' and no dtype=, which moves dense leaves as they lie",
        )
    return max(SMALLEST_PIECE_NBYTES, room)


def _check_host(plan: Plan, capacity: Capacity) -> None:
    needed = plan.result_nbytes + plan.scratch_nbytes
    if capacity.host_free is None or needed <= capacity.host_free:
        return
    largest = max(plan.delivers, key=lambda deliver: deliver.nbytes)
    raise HostMemoryError(
        "the result does not fit into host memory",
        leaf=largest.leaf,
        got=f"{capacity.host_free:,} free bytes",
        needed=f"{needed:,} bytes, {largest.nbytes:,} of them for shape {largest.shape} of {largest.dtype}",
        do="move fewer leaves at once, narrow them with dtype=, give a memory-mapped out=, "
        "or ask for order='K', which keeps broadcast dimensions unexpanded",
    )
