"""One call, decided and then run: tree -> leaves -> `Source` -> `Plan` -> `Flight` -> tree."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hostward import _dtypes, _engine, _out, _tree
from hostward._describe import Described, describe
from hostward._devices import backend_for, capability_table
from hostward._memory import available, total
from hostward._plan import AdmittedPlan, Plan, Route, admit, asks_device, make_plan
from hostward._sinks import Array, ArraySink, deliver_host
from hostward._torch import torch
from hostward._types import Capacity, CopyMode, Memory, Options, Order, choice
from hostward.errors import CaptureError, HostwardError

# Results below this share of the machine are not checked against the host's free memory: reading that takes 50 us, and
# half a millisecond where the caches are cold.
_HOST_CHECK_SHARE = 16


@dataclass(slots=True)
class Call:
    """A call that has been decided and not begun: what `explain` prints and what the engine runs."""

    flat: _tree.Flat
    found: Described
    admitted: AdmittedPlan
    targets: Sequence[Array] | None


def prepare(tree: object, options: Options, out: object = None) -> Call:
    """Describe, plan and admit; touches no bytes and allocates none."""
    flat = _tree.flatten(tree)
    options = options._replace(bare=flat.bare, out=out is not None)
    if options.out:  # the targets have strides of their own
        options = options._replace(order=Order.C)
    targets = _out.targets_of(flat, out) if options.out else None
    found = describe(flat, targets)
    try:
        plan = make_plan(tuple(found.sources), options, _capabilities(found))
        chosen = _out.check(flat, found, plan, targets) if targets is not None else None
        _refuse_capture(plan)
        admitted = admit(plan, _capacity(plan))
    except HostwardError as error:
        if error.leaf is not None:
            error.located(path=flat.path(found.first[error.leaf]))
        raise
    return Call(flat, found, admitted, chosen)


def _capabilities(found: Described) -> Any:
    types = frozenset(source.device.partition(":")[0] for source in found.sources) - {"numpy"}
    return capability_table(types)


def _capacity(plan: Plan) -> Capacity:
    free, limit = [], Capacity().temporary_limit
    for device in dict.fromkeys(move.device for move in plan.moves):
        if asks_device(plan, device):
            where = torch.device(device)
            room = backend_for(where.type).memory_free(where.index or 0, limit)
            if room is not None:
                free.append((device, room))
    needed = plan.result_nbytes + plan.scratch_nbytes
    return Capacity(device_free=tuple(free), host_free=available() if asks_host(needed) else None)


def asks_host(nbytes: int) -> bool:
    """Say whether a result of `nbytes` is worth asking how much memory the host has left."""
    return nbytes * _HOST_CHECK_SHARE > total()


def _refuse_capture(plan: Plan) -> None:
    for device in dict.fromkeys(move.device for move in plan.moves):
        where = torch.device(device)
        if backend_for(where.type).is_capturing(where.index or 0):
            raise capture_error(device)


def capture_error(device: str) -> CaptureError:
    """Return the error for a call inside of a graph capture."""
    return CaptureError(
        f"the current stream of {device} is capturing a graph",
        why="a copy to the host cannot be waited for while its graph is only being recorded",
        do="call it on the graph's outputs after replay()",
    )


def run_call(call: Call) -> list[Array]:
    """Run a decided call in this thread; return the array of each of the plan's leaves."""
    with ExitStack() as relaxed:  # whatever is allocated, pinned or asked here, no capture of another thread may break
        for kind in {device.partition(":")[0] for device in call.admitted.devices}:
            relaxed.enter_context(backend_for(kind).relaxed_capture())
        return _run(call)


def _run(call: Call) -> list[Array]:
    admitted, found, targets = call.admitted, call.found, call.targets
    plan = admitted.plan
    if admitted.routes == (Route.DIRECT,):
        return [_direct(admitted, found.objects[0])]
    arrays: list[Array | None] = [None] * len(plan.delivers)
    sink = ArraySink(admitted, targets)
    flight = _engine.run(admitted, found.objects, sink) if plan.moves else None
    try:
        for deliver in plan.delivers:  # host leaves, while the others travel
            if deliver.move is None:
                target = targets[deliver.leaf] if targets is not None else None
                arrays[deliver.leaf] = deliver_host(deliver, found.objects[deliver.leaf], target)
        if flight is not None:
            flight.wait()
    except BaseException as error:
        if flight is not None:
            flight.abandon(error)
        raise
    for leaf, array in sink.results.items():
        arrays[leaf] = array if targets is None else targets[leaf]
    return [array for array in arrays if array is not None]


def _direct(admitted: AdmittedPlan, leaf: torch.Tensor) -> Array:
    plan = admitted.plan
    deliver, move = plan.delivers[0], plan.moves[0]
    backend = backend_for(leaf.device.type)
    dtype = _dtypes.numpy_dtype(_dtypes.lookup(deliver.dtype))
    own = plan.options.memory is not Memory.PINNED
    array = _engine.fetch(_engine.packed(leaf, move), dtype, move.nbytes, backend, own=own)
    return array.transpose(deliver.axes) if deliver.axes else array


def rebuilt(call: Call, arrays: Sequence[Any]) -> Any:
    """Return the caller's tree with each leaf's array, or whatever stands for it, in its place."""
    which, leaves = call.found.which, call.flat.leaves
    return call.flat.rebuild([leaves[i] if n < 0 else arrays[n] for i, n in enumerate(which)])


def options_of(*, dtype: object = None, order: object = "C", copy: object = True, memory: object = "auto") -> Options:
    """Normalise the public options; a typo fails here."""
    return Options(
        _dtypes.normalise_request(dtype),
        choice("order", order, Order),
        choice("copy", copy, CopyMode),
        choice("memory", memory, Memory),
        bare=False,
    )
