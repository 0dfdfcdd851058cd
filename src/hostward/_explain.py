"""`explain`: the admitted plan in words."""

from __future__ import annotations

from dataclasses import dataclass

from hostward._call import Call
from hostward._memory import chunk_nbytes
from hostward._plan import AdmittedPlan, Deliver, Move, Naive, Plan, Route, Way, naive
from hostward._types import Memory, Order


@dataclass(frozen=True, slots=True)
class LeafExplanation:
    """One leaf of the tree. `link_nbytes` counts a move that several leaves share at the first of them."""

    path: str
    source: str
    result: str
    steps: tuple[str, ...]
    link_nbytes: int
    temporary_nbytes: int
    host_nbytes: int
    notes: tuple[str, ...]
    naive: Naive | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The plan that a call would run; ``str()`` is for people, the fields are for programs."""

    call: str
    admitted: AdmittedPlan
    leaves: tuple[LeafExplanation, ...]
    passed: tuple[tuple[str, str], ...]  # path and type of every leaf that passes through by reference
    blocks: tuple[str, ...]

    @property
    def link_nbytes(self) -> int:
        """Bytes that cross a link."""
        return self.admitted.plan.link_nbytes

    @property
    def temporary_nbytes(self) -> int:
        """Most bytes of device temporaries at one moment, over all devices."""
        return sum(self.admitted.temporary(device) for device in self.admitted.devices)

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory for the results and, while the call runs, for scratch."""
        return self.admitted.plan.result_nbytes + self.admitted.plan.scratch_nbytes

    def __str__(self) -> str:
        options = self.admitted.plan.options
        lines = [f"{self.call}(order={options.order.value!r}, memory={options.memory.value!r})"]
        for leaf in self.leaves:
            lines += [f"  {leaf.path or 'x'}: {leaf.source} -> {leaf.result}"]
            lines += [f"      {'; '.join(leaf.steps)}"]
            if leaf.naive is not None:
                lines += [
                    f"      link {leaf.link_nbytes:,} B, device temporary {leaf.temporary_nbytes:,} B, "
                    f"host {leaf.host_nbytes:,} B"
                ]
            lines += [f"      note: {note}" for note in leaf.notes]
            lines += [f"      .detach().cpu().numpy(): {text}" for text in _naive_text(leaf)]
        lines += [f"  {path or 'x'}: passes through by reference ({kind})" for path, kind in self.passed]
        lines += [f"  fallback: {text}" for text in self.admitted.fallbacks]
        lines += [f"  blocks: {text}" for text in self.blocks]
        lines += [
            f"  total: link {self.link_nbytes:,} B, device temporaries {self.temporary_nbytes:,} B, "
            f"host {self.host_nbytes:,} B" + ("" if self.link_nbytes else "; no link is crossed")
        ]
        return "\n".join(lines)


def _naive_text(leaf: LeafExplanation) -> list[str]:
    if leaf.naive is None:
        return []
    more = []
    if leaf.naive.link_nbytes > leaf.link_nbytes > 0:
        more.append(f"link {leaf.naive.link_nbytes:,} B")
    if leaf.naive.temporary_nbytes > leaf.temporary_nbytes:
        more.append(f"device temporary {leaf.naive.temporary_nbytes:,} B")
    return ([", ".join(more)] if more else []) + list(leaf.naive.problems)


def explanation(name: str, call: Call) -> Explanation:
    """Put a decided call into words."""
    admitted, plan = call.admitted, call.admitted.plan
    told: set[int] = set()
    leaves = []
    for deliver, source, position in zip(plan.delivers, plan.sources, call.found.first, strict=True):
        move = plan.moves[deliver.move] if deliver.move is not None else None
        counted = deliver.move is not None and deliver.move not in told
        told |= {deliver.move} if deliver.move is not None else set()
        judged = None
        if move is not None:
            judged = naive(source, deliver.dtype, c_order=plan.options.order is Order.C)
        leaves.append(
            LeafExplanation(
                call.flat.path(position),
                f"{source.dtype} {list(source.shape)} on {source.device}",
                f"{deliver.dtype} {list(deliver.shape)}",
                _steps(admitted, deliver, counted),
                move.nbytes if move is not None and counted else 0,
                _temporary(admitted, deliver.move, counted),
                0 if plan.options.out or deliver.way is Way.HOST_SHARE else deliver.nbytes,
                deliver.notes + (move.notes if move is not None and counted else ()),
                judged,
            )
        )
    passed = tuple(
        (call.flat.path(i), type(call.flat.leaves[i]).__name__) for i, n in enumerate(call.found.which) if n < 0
    )
    waits = (f"{name}() returns arrays, so it waits for their bytes",) if plan.moves else ()
    return Explanation(name, admitted, tuple(leaves), passed, waits + admitted.blocks)


def _temporary(admitted: AdmittedPlan, move: int | None, counted: bool) -> int:
    if move is None or not counted or not admitted.plan.moves[move].passes:
        return 0
    return admitted.pieces[move] or admitted.plan.moves[move].nbytes


def _steps(admitted: AdmittedPlan, deliver: Deliver, first: bool) -> tuple[str, ...]:
    if deliver.move is None:
        return (_HOST_WAYS[deliver.way],)
    plan = admitted.plan
    move, route = plan.moves[deliver.move], admitted.routes[deliver.move]
    steps = []
    if not first:
        steps.append("comes with the leaf above")
    else:
        steps += [_passes(move, route, admitted.pieces[deliver.move])] if move.passes else ["crosses as it lies"]
        steps.append(_landing(admitted, move, route))
    if deliver.view is not None:
        steps.append("copied out of what landed")
    return tuple(steps)


_HOST_WAYS = {
    Way.EMPTY: "no elements: nothing moves",
    Way.HOST_COPY: "in host memory already: copied there",
    Way.HOST_SHARE: "in host memory already: shared",
}


def _passes(move: Move, route: Route, piece: int) -> str:
    how = f"in pieces of {piece:,} B" if route is Route.PIECES else "in one temporary"
    return f"{', '.join(move.passes)} on the device, {how}"


def _landing(admitted: AdmittedPlan, move: Move, route: Route) -> str:
    options = admitted.plan.options
    if route is Route.DIRECT:
        there = "" if options.memory is Memory.PINNED else ", and copied from there into ordinary memory"
        return "on the caller's stream, written by the device into pinned memory" + there
    if route is Route.BLOCKING:
        return "by torch's blocking copy"
    if _is_written_by_the_device(admitted.plan, move):
        return "written by the device into pinned memory"
    moves = admitted.plan.moves
    chunk = chunk_nbytes(sum(other.nbytes for other in moves if not _is_written_by_the_device(admitted.plan, other)))
    return f"through pinned chunks of {chunk:,} B into " + ("out=" if options.out else "ordinary memory")


def _is_written_by_the_device(plan: Plan, move: Move) -> bool:
    """Say whether a move needs no ring, as far as a plan knows: `out=` may be pinned, or no pinned memory to be had."""
    if plan.options.memory is not Memory.PINNED or plan.options.out or move.lands_in is None:
        return False
    return move.span is not None or move.dtype == plan.delivers[move.lands_in].dtype
