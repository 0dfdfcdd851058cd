"""Any plan, carried out by NumPy on plain bytes, gives what its leaves say; and all it depends on is in its key.

`carried_out` does what a plan says and nothing else: it knows no rule. So a plan that asks for the wrong bytes, leaves
out a pass or lands something in the wrong place shows as wrong values here, without a device.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from hostward import _dtypes, _layout
from hostward._plan import AdmittedPlan, Plan, Route, Way, admit, asks_device, make_plan
from hostward._plan._admit import SMALLEST_PIECE_NBYTES, UNASKED_NBYTES
from hostward._types import Capabilities, Capacity, CopyMode, Memory, Options, Order, Source
from hostward.errors import CopyNeededError, DeviceMemoryError, DtypeError, HostMemoryError

Array = np.ndarray[Any, Any]

STORAGE_NBYTES = 512
DTYPES = ["bool", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]
DEVICES = ["fast:0", "fast:0", "fast:0", "fast:1", "slow:0", "cpu"]  # most of them where they can share bytes
REQUESTS = [
    None,
    "float16",
    "float32",
    "float64",
    "complex128",
    "int64",
    {"floating": "float16"},
    {"int16": "int64", "floating": "float64"},
    {"bool": "uint8"},
]
ABLE = (
    ("cpu", Capabilities("cpu", host=True)),
    ("fast", Capabilities("fast", async_copies=True)),
    ("slow", Capabilities("slow")),
)


def numpy_dtype(name: str) -> np.dtype[Any]:
    return _dtypes.numpy_dtype(_dtypes.lookup(name))


# ---- what there is to plan


@st.composite
def sources(draw: Any, devices: list[str] = DEVICES) -> Source:
    """A leaf somewhere in one of three storages: dense, permuted, gapped, expanded, overlapping itself, empty."""
    dtype = draw(st.sampled_from(DTYPES))
    room = STORAGE_NBYTES // numpy_dtype(dtype).itemsize
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    kind = draw(st.sampled_from(["dense", "dense", "permuted", "gapped", "any"]))
    strides = list(_layout.contiguous_strides(shape))
    if kind in ("permuted", "gapped"):
        order = draw(st.permutations(range(len(shape))))
        step = draw(st.integers(2, 3)) if kind == "gapped" else 1
        for dim in order:
            strides[dim] = step
            step *= max(1, shape[dim])
    elif kind == "any":
        strides = [draw(st.integers(0, 6)) for _ in shape]
    assume(_layout.extent(shape, strides) <= room)
    offset = draw(st.integers(0, min(12, room - _layout.extent(shape, strides))))
    is_complex = dtype.startswith("complex")
    return Source(
        draw(st.sampled_from(devices)),
        dtype,
        shape,
        tuple(strides),
        offset,
        draw(st.sampled_from([0, 0, 0, 1, 2])),
        is_complex and draw(st.booleans()),
        dtype.startswith(("float", "complex")) and draw(st.integers(0, 4)) == 0,
        draw(st.booleans()),
    )


@st.composite
def options(draw: Any, count: int) -> Options:
    return Options(
        _dtypes.normalise_request(draw(st.sampled_from(REQUESTS))),
        draw(st.sampled_from(Order)),
        draw(st.sampled_from([CopyMode.ALWAYS, CopyMode.IF_NEEDED])),
        draw(st.sampled_from(Memory)),
        count == 1 and draw(st.booleans()),
        draw(st.integers(0, 4)) == 0,
    )


@dataclass
class Asked:
    """The arguments of `make_plan`."""

    sources: tuple[Source, ...]
    options: Options
    able: Any = ABLE

    def plan(self) -> Plan:
        try:
            return make_plan(self.sources, self.options, self.able)
        except DtypeError:  # a cast that would lose an imaginary part
            assume(False)
            raise


@st.composite
def rows(draw: Any) -> Source:
    """A run of one storage, of any dtype: two of them overlap more often than not."""
    dtype = draw(st.sampled_from(DTYPES))
    itemsize = numpy_dtype(dtype).itemsize
    first, count = draw(st.integers(0, 40)) // itemsize, draw(st.integers(1, 80)) // itemsize + 1
    return Source("fast:0", dtype, (count,), (1,), first, 0)


@st.composite
def asked(draw: Any, most: int = 5) -> Asked:
    # The same leaf twice is one leaf: whether a gradient hangs on it makes no other.
    leaves = draw(st.sampled_from([sources(), sources(), rows()]))
    found = draw(st.lists(leaves, min_size=1, max_size=most, unique_by=lambda s: s._replace(requires_grad=False)))
    chosen = draw(options(len(found)))
    if chosen.out:
        chosen = chosen._replace(order=Order.C)  # as every call does: the targets have strides of their own
    return Asked(tuple(found), chosen)


# ---- a plan, carried out


def storages(seed: int) -> dict[tuple[str, int], Array]:
    dice = np.random.default_rng(seed)
    return {
        (device, number): dice.integers(0, 2, STORAGE_NBYTES, np.uint8)  # ones and zeros: bools, and no NaN
        for device in DEVICES
        for number in range(3)
    }


def values(source: Source, memory: dict[tuple[str, int], Array]) -> Array:
    """What a leaf holds: its elements where they lie, with the bits that torch would still have to look at."""
    flat = memory[source.device, source.storage].view(numpy_dtype(source.dtype))
    return as_strided(flat[source.offset :], source.shape, [s * flat.itemsize for s in source.strides])


def resolved(source: Source, memory: dict[tuple[str, int], Array]) -> Array:
    found = values(source, memory)
    found = np.conj(found) if source.conj else found
    return -found if source.neg else found


def cast(array: Array, dtype: str) -> Array:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return array.astype(numpy_dtype(dtype))


def carried_out(plan: Plan, memory: dict[tuple[str, int], Array]) -> list[Array]:
    landed = [_landed(plan, number, memory) for number in range(len(plan.moves))]
    results = []
    for deliver in plan.delivers:
        source = plan.sources[deliver.leaf]
        if deliver.move is None:
            results.append(cast(resolved(source, memory), deliver.dtype).reshape(deliver.shape))
            continue
        move = plan.moves[deliver.move]
        if deliver.view is not None:
            view, itemsize = deliver.view, numpy_dtype(deliver.view.dtype).itemsize
            assert deliver.way is Way.GATHER
            assert view.offset % itemsize == 0, "an element that is not aligned"
            last = view.offset + _layout.extent(view.shape, view.strides) * itemsize
            assert 0 <= view.offset <= last <= move.nbytes, "a view of bytes that do not land"
            flat = np.frombuffer(landed[deliver.move][:last], numpy_dtype(view.dtype), offset=view.offset)
            base = as_strided(flat, view.shape, [s * itemsize for s in view.strides])
            assert view.shape == deliver.base
        else:
            assert move.lands_in == deliver.leaf, "nobody brings it"
            dtype = deliver.dtype if move.span is not None else move.dtype
            base = np.frombuffer(landed[deliver.move], numpy_dtype(dtype)).reshape(deliver.base)
        result = cast(base, deliver.dtype)
        result = result.transpose(deliver.axes) if deliver.axes else result
        if deliver.way is Way.BROADCAST:
            result = np.broadcast_to(np.expand_dims(result, move.drop), deliver.shape)
        results.append(result)
    return results


def _landed(plan: Plan, number: int, memory: dict[tuple[str, int], Array]) -> bytes:
    move = plan.moves[number]
    source = plan.sources[move.leaf]
    assert move.device == source.device
    if move.span is not None:
        start, stop = move.span
        assert not move.passes
        assert 0 <= start < stop <= STORAGE_NBYTES
        return memory[source.device, source.storage][start:stop].tobytes()
    view = values(source, memory)
    index = tuple(0 if dim in move.drop else slice(None) for dim in range(view.ndim))
    view = view[index].transpose(move.perm) if view.ndim else view
    kept = [dim for dim in range(len(source.shape)) if dim not in move.drop]
    strides = [source.strides[kept[p]] for p in move.perm]
    if not move.passes:
        assert _layout.is_contiguous(move.shape, strides), "bytes that cross as they lie are one run"
        assert not (source.conj or source.neg)
        assert move.dtype == source.dtype
    for name in move.passes:
        if name == "resolve conj":
            view = np.conj(view)
        elif name == "resolve neg":
            view = -view
        elif name.startswith("cast"):
            view = cast(view, move.dtype)
        else:
            assert name in ("transpose", "pack")
    data = np.ascontiguousarray(view).tobytes()
    assert view.shape == move.shape
    assert view.dtype == numpy_dtype(move.dtype)
    assert len(data) == move.nbytes
    return data


def same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


# ---- laws


@settings(max_examples=400)
@given(it=asked(), seed=st.integers(0, 1 << 32))
def test_a_plan_gives_every_leafs_values(it: Asked, seed: int) -> None:
    plan, memory = it.plan(), storages(seed)
    for source, deliver, result in zip(it.sources, plan.delivers, carried_out(plan, memory), strict=True):
        target = it.options.request.target(_dtypes.lookup(source.dtype), bare=it.options.bare)
        assert deliver.dtype == target.name
        assert deliver.shape == source.shape
        assert same(result, cast(resolved(source, memory), target.name))


@settings(max_examples=300)
@given(it=asked())
def test_the_cost_is_that_of_the_moves(it: Asked) -> None:
    plan = it.plan()
    sizes = {name: _dtypes.lookup(name).itemsize for name in [*DTYPES, "complex128"]}
    assert plan.link_nbytes == sum(_layout.numel(m.shape) * sizes[m.dtype] for m in plan.moves)
    assert plan.link_nbytes <= sum(
        make_plan((source,), it.options._replace(bare=it.options.bare), ABLE).link_nbytes for source in it.sources
    ), "together they cross no dearer than one by one"
    new = [d for d in plan.delivers if d.way is not Way.HOST_SHARE]
    made = sum(_layout.numel(d.base) * sizes[d.dtype] for d in new)
    assert plan.result_nbytes == (0 if it.options.out else made)
    scratch = [m for m in plan.moves if m.lands_in is None]
    assert plan.scratch_nbytes == sum(m.nbytes for m in scratch)
    assert all((m.temporary == m.nbytes) == bool(m.passes) for m in plan.moves)
    for d in plan.delivers:
        source = plan.sources[d.leaf]
        device_leaf = source.device != "cpu"
        assert (d.way is Way.EMPTY) == (device_leaf and 0 in source.shape)
        assert (d.move is not None) == (device_leaf and 0 not in source.shape)
    owners = [m.lands_in for m in plan.moves if m.lands_in is not None]
    assert len(owners) == len(set(owners)), "two moves write one result"
    assert {d.move for d in plan.delivers if d.move is not None} == set(range(len(plan.moves))), "a move for nobody"


@settings(max_examples=200)
@given(source=sources(["fast:0"]), request=st.sampled_from(REQUESTS))
def test_one_leaf_never_carries_more_than_the_smaller_dtype_of_its_base(source: Source, request: object) -> None:
    chosen = Options(_dtypes.normalise_request(request), Order.C, CopyMode.ALWAYS, Memory.AUTO, True)
    plan = Asked((source,), chosen).plan()
    dtype = _dtypes.lookup(source.dtype)
    target = chosen.request.target(dtype, bare=True)
    kept = [n for n, s in zip(source.shape, source.strides, strict=True) if s != 0 or n == 1]
    exact = _dtypes.is_exact_cast(dtype, target)
    smaller = min(dtype.itemsize, target.itemsize) if exact else target.itemsize
    assert plan.link_nbytes <= _layout.numel(kept) * (dtype.itemsize if source.neg else smaller)


@settings(max_examples=200)
@given(it=asked())
def test_k_order_keeps_dense_strides(it: Asked) -> None:
    it = replace(it, options=it.options._replace(order=Order.K, out=False))
    memory = storages(0)
    plan = it.plan()
    for source, deliver, result in zip(it.sources, plan.delivers, carried_out(plan, memory), strict=True):
        if deliver.move is None or not _layout.is_dense(source.shape, source.strides):
            continue
        itemsize = numpy_dtype(deliver.dtype).itemsize
        for n, got, wanted in zip(source.shape, result.strides, source.strides, strict=True):
            assert n == 1 or got == wanted * itemsize


@settings(max_examples=200)
@given(it=asked())
def test_routes_are_those_that_the_engine_can_go(it: Asked) -> None:
    plan = it.plan()
    for move, routes in zip(plan.moves, plan.routes, strict=True):
        proven = dict(ABLE)[move.device.partition(":")[0]].async_copies
        assert (routes == (Route.BLOCKING,)) == (not proven)
        if proven:
            assert (Route.PIECES in routes) == bool(move.passes)
            assert routes[0] in (Route.WHOLE, Route.DIRECT)
        if Route.DIRECT in routes:
            # One call, one copy, and what lands is the array's own memory as it is.
            (deliver,) = plan.delivers
            assert (deliver.way, deliver.dtype, move.span) == (Way.FLAT, move.dtype, None)
            assert not plan.options.out


@settings(max_examples=300)
@given(
    mib=st.lists(st.integers(1, 700).map(lambda n: n / 2), min_size=1, max_size=6),
    devices=st.lists(st.sampled_from(["fast:0", "fast:1"]), min_size=6, max_size=6),
    limit=st.integers(2, 600).map(lambda n: n << 19),
    free=st.integers(0, 1200).map(lambda n: n << 19),
)
def test_temporaries_never_pass_the_limit_nor_what_is_free(
    mib: list[float], devices: list[str], limit: int, free: int
) -> None:
    tree = tuple(
        Source(device, "float32", (int(n * (1 << 18)),), (2,), 0, number)
        for number, (n, device) in enumerate(zip(mib, devices, strict=False))
    )
    plan = make_plan(tree, Options(_dtypes.normalise_request(None), Order.C, CopyMode.ALWAYS, Memory.AUTO, False), ABLE)
    capacity = Capacity((("fast:0", free),), limit)
    needed = sum(move.temporary for move in plan.moves if move.device == "fast:0")
    if free < min(needed, SMALLEST_PIECE_NBYTES):
        with pytest.raises(DeviceMemoryError) as caught:
            admit(plan, capacity)
        assert plan.sources[caught.value.leaf].device == "fast:0"
        return
    admitted = admit(plan, capacity)
    assert admitted.temporary("fast:0") <= min(free, limit)
    assert admitted.temporary("fast:1") <= limit
    _check_admitted(plan, admitted)


def _check_admitted(plan: Plan, admitted: AdmittedPlan) -> None:
    for route, allowed, piece in zip(admitted.routes, plan.routes, admitted.pieces, strict=True):
        assert route in allowed
        assert (piece > 0) == (route is Route.PIECES)
    assert len(admitted.fallbacks) == admitted.routes.count(Route.PIECES)


@settings(max_examples=100)
@given(it=asked(), free=st.integers(0, 3000))
def test_host_memory_is_refused_exactly_when_it_is_short(it: Asked, free: int) -> None:
    plan = it.plan()
    needed = plan.result_nbytes + plan.scratch_nbytes
    if needed <= free:
        admit(plan, Capacity(host_free=free))
        return
    with pytest.raises(HostMemoryError) as caught:
        admit(plan, Capacity(host_free=free))
    assert caught.value.leaf in range(len(plan.delivers))


@settings(max_examples=100)
@given(it=asked())
def test_small_temporaries_are_not_worth_asking_for(it: Asked) -> None:
    plan = it.plan()
    for device in DEVICES:
        asked_for = sum(move.temporary for move in plan.moves if move.device == device)
        assert asks_device(plan, device) == (asked_for > UNASKED_NBYTES)


# ---- the key of the cache

FLIPS: dict[str, Any] = {
    "device": lambda s: s._replace(device="fast:1" if s.device != "fast:1" else "fast:0"),
    "host": lambda s: s._replace(device="cpu" if s.device != "cpu" else "fast:0"),
    "unproven": lambda s: s._replace(device="slow:0" if s.device != "slow:0" else "fast:0"),
    "dtype": lambda s: s._replace(dtype="int32" if s.dtype != "int32" else "float32"),
    "itemsize": lambda s: s._replace(dtype="int16" if s.dtype != "int16" else "uint8"),
    "shape": lambda s: s._replace(shape=(*s.shape[:-1], s.shape[-1] + 1) if s.shape else s.shape),
    "rank": lambda s: s._replace(shape=(*s.shape, 1), strides=(*s.strides, 1)),
    "strides": lambda s: s._replace(strides=tuple(reversed(s.strides))),
    "gap": lambda s: s._replace(strides=tuple(2 * stride for stride in s.strides)),
    "expanded": lambda s: s._replace(strides=(0, *s.strides[1:]) if s.strides else ()),
    "offset": lambda s: s._replace(offset=s.offset + 1),
    "storage": lambda s: s._replace(storage=(s.storage + 1) % 3),
    "conj": lambda s: s._replace(conj=not s.conj),
    "neg": lambda s: s._replace(neg=not s.neg),
    "requires_grad": lambda s: s._replace(requires_grad=not s.requires_grad),
}
OPTION_FLIPS: dict[str, Any] = {
    "dtype=": lambda o: o._replace(request=_dtypes.normalise_request("float16" if o.request.plain is None else None)),
    "order=": lambda o: o._replace(order=Order.K if o.order is Order.C else Order.C),
    "copy=": lambda o: o._replace(copy=CopyMode.IF_NEEDED if o.copy is CopyMode.ALWAYS else CopyMode.ALWAYS),
    "memory=": lambda o: o._replace(memory=Memory.PINNED if o.memory is Memory.AUTO else Memory.AUTO),
    "bare": lambda o: o._replace(bare=not o.bare),
    "out=": lambda o: o._replace(out=not o.out),
}


def planned(sources: tuple[Source, ...], options: Options, able: Any = ABLE) -> Plan | type[Exception]:
    """Plan anew, whatever the cache holds."""
    try:
        return make_plan.__wrapped__(sources, options, able)
    except (DtypeError, CopyNeededError) as error:
        return type(error)


@pytest.mark.parametrize("flip", FLIPS)
@settings(max_examples=40)
@given(it=asked(most=3), data=st.data())
def test_a_leaf_that_differs_gets_a_plan_of_its_own(flip: str, it: Asked, data: st.DataObject) -> None:
    """The cache gives what planning anew would give, right after it has been filled for the other leaf."""
    number = data.draw(st.integers(0, len(it.sources) - 1))
    other = list(it.sources)
    other[number] = FLIPS[flip](other[number])
    flipped = tuple(other)
    for first, then in ((it.sources, flipped), (flipped, it.sources)):
        make_plan.cache_clear()
        before = planned(first, it.options)
        if isinstance(before, Plan):
            assert make_plan(first, it.options, ABLE) == before
        after = planned(then, it.options)
        if isinstance(after, Plan):
            assert make_plan(then, it.options, ABLE) == after
        if first != then and isinstance(before, Plan) and isinstance(after, Plan):
            assert make_plan(first, it.options, ABLE) is not make_plan(then, it.options, ABLE)


@pytest.mark.parametrize("flip", OPTION_FLIPS)
@settings(max_examples=40)
@given(it=asked(most=3))
def test_an_option_that_differs_gets_a_plan_of_its_own(flip: str, it: Asked) -> None:
    make_plan.cache_clear()
    other = OPTION_FLIPS[flip](it.options)
    assert other != it.options
    for chosen in (it.options, other):
        expected = planned(it.sources, chosen)
        if isinstance(expected, Plan):
            assert make_plan(it.sources, chosen, ABLE) == expected


@settings(max_examples=60)
@given(it=asked(most=3), kind=st.sampled_from(["fast", "slow", "cpu"]))
def test_a_capability_that_differs_gets_a_plan_of_its_own(it: Asked, kind: str) -> None:
    make_plan.cache_clear()
    able = dict(ABLE)
    able[kind] = replace(able[kind], host=False, async_copies=not able[kind].async_copies)
    for table in (ABLE, tuple(able.items())):
        expected = planned(it.sources, it.options, table)
        if isinstance(expected, Plan):
            assert make_plan(it.sources, it.options, table) == expected


@settings(max_examples=150)
@given(source=sources(["fast:0"]), data=st.data())
def test_what_the_shortcut_leaves_out_of_its_key_changes_no_plan(source: Source, data: st.DataObject) -> None:
    """`_single` knows a tensor by dtype, shape, strides, device, conj and neg: not by where its bytes lie."""
    chosen = Options(
        _dtypes.normalise_request(None), Order.C, CopyMode.ALWAYS, data.draw(st.sampled_from(Memory)), True
    )
    other = source._replace(
        offset=source.offset + data.draw(st.integers(0, 3)),
        storage=data.draw(st.integers(0, 9)),
        requires_grad=data.draw(st.booleans()),
    )
    plans = [Asked((one,), chosen).plan() for one in (source, other)]
    moves = [[replace(move, notes=(), span=None) for move in plan.moves] for plan in plans]
    assert plans[0].routes == plans[1].routes
    if plans[0].routes == ((Route.DIRECT,),):
        assert moves[0] == moves[1]
        assert replace(plans[0].delivers[0], notes=()) == replace(plans[1].delivers[0], notes=())


@pytest.mark.parametrize("flip", [name for name in FLIPS if name not in ("offset", "storage", "requires_grad")])
def test_what_the_shortcut_has_in_its_key_is_needed(flip: str) -> None:
    """For each there is a leaf whose plan it changes."""
    base = Source("fast:0", "complex64", (3, 4), (4, 1))
    changed = []
    for source in (base, base._replace(dtype="float32", shape=(5,), strides=(1,))):
        chosen = Options(_dtypes.normalise_request(None), Order.C, CopyMode.ALWAYS, Memory.AUTO, True)
        plans = [planned((one,), chosen) for one in (source, FLIPS[flip](source))]
        parts = [(p.moves, p.delivers, p.routes) if isinstance(p, Plan) else p for p in plans]
        changed.append(parts[0] != parts[1])
    assert any(changed)


def test_the_interpreter_notices_a_wrong_plan() -> None:
    """The checker, seen to fail: each of these plans is wrong in one thing."""
    source = Source("fast:0", "float32", (4, 3), (1, 4), 2)
    chosen = Options(_dtypes.normalise_request(None), Order.C, CopyMode.ALWAYS, Memory.AUTO, True)
    plan, memory = make_plan((source,), chosen, ABLE), storages(1)
    right = resolved(source, memory)
    assert same(carried_out(plan, memory)[0], right)
    (move,), (deliver,) = plan.moves, plan.delivers
    for wrong in (
        replace(plan, moves=(replace(move, passes=()),)),
        replace(plan, moves=(replace(move, lands_in=None),)),
        replace(plan, moves=(replace(move, nbytes=44),)),
        replace(plan, moves=(replace(move, perm=(1, 0)),)),
    ):
        with pytest.raises(AssertionError):
            carried_out(wrong, memory)
    for wrong in (
        replace(plan, delivers=(replace(deliver, axes=(1, 0)),)),
        replace(plan, sources=(source._replace(offset=3),)),
        replace(plan, moves=(replace(move, perm=(1, 0), shape=(3, 4)),)),
    ):
        assert not same(carried_out(wrong, memory)[0], right)
