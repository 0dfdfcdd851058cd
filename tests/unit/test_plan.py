"""The planner's rules as tables: descriptions in, moves and deliveries out. No device, no tensor, no torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from hostward import _dtypes, _layout
from hostward._plan import (
    DIRECT_NBYTES,
    UNASKED_NBYTES,
    Deliver,
    Move,
    Plan,
    Route,
    View,
    Way,
    admit,
    asks_device,
    make_plan,
    naive,
)
from hostward._plan._admit import PIECE_NBYTES, SMALLEST_PIECE_NBYTES
from hostward._types import Capabilities, Capacity, CopyMode, Memory, Options, Order, Source
from hostward.errors import CopyNeededError, DeviceMemoryError, DtypeError, HostMemoryError

MIB = 1 << 20

# Made-up device types: one whose copies are proven, one of which nothing is known.
ABLE = (
    ("cpu", Capabilities("cpu", host=True)),
    ("fast", Capabilities("fast", async_copies=True)),
    ("slow", Capabilities("slow")),
)


def leaf(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None, **fields: object) -> Source:
    """One leaf on ``fast:0`` in a storage of its own, C-contiguous unless told otherwise."""
    fields.setdefault("storage", next(_storages))
    strides = _layout.contiguous_strides(shape) if strides is None else strides
    return Source(str(fields.pop("device", "fast:0")), dtype, shape, strides, **fields)


_storages = iter(range(1 << 30))


def plan(
    *sources: Source,
    dtype: object = None,
    order: Order = Order.C,
    copy: CopyMode = CopyMode.ALWAYS,
    memory: Memory = Memory.AUTO,
    out: bool = False,
    bare: bool | None = None,
) -> Plan:
    bare = len(sources) == 1 if bare is None else bare
    options = Options(_dtypes.normalise_request(dtype), order, copy, memory, bare, out)
    return make_plan(sources, options, ABLE)


def transposed(rows: int, columns: int, **fields: object) -> Source:
    return leaf(columns, rows, strides=(1, columns), **fields)


# ---- one leaf: what crosses, after which pass, and how the array comes of it

BIG = 300, 400  # of float32: more than goes the direct way

ONE_LEAF = {
    "contiguous": (leaf(*BIG), {}, "float32 300x400 as it lies -> flat"),
    "0-d": (leaf(), {}, "float32 () as it lies -> flat"),
    "size-1 dims have any strides": (leaf(1, *BIG, strides=(7, 400, 1)), {}, "float32 1x300x400 as it lies -> flat"),
    "narrow on the device": (
        leaf(*BIG),
        {"dtype": "float16"},
        "float16 300x400 after cast float32 to float16 -> flat",
    ),
    "widen on the host": (
        leaf(*BIG, dtype="float16"),
        {"dtype": "float64"},
        "float16 300x400 as it lies -> flat float64",
    ),
    "widen a bool": (leaf(*BIG, dtype="bool"), {"dtype": "int64"}, "bool 300x400 as it lies -> flat int64"),
    "widen bfloat16": (
        leaf(*BIG, dtype="bfloat16"),
        {"dtype": "float32"},
        "bfloat16 300x400 as it lies -> flat float32",
    ),
    "wider but not exact, so on the device": (
        leaf(*BIG, dtype="int32"),
        {"dtype": "float32"},
        "float32 300x400 after cast int32 to float32 -> flat",
    ),
    "wider in bytes and not exact": (
        leaf(*BIG, dtype="int64"),
        {"dtype": "complex128"},
        "complex128 300x400 after cast int64 to complex128 -> flat",
    ),
    "same size, another dtype": (
        leaf(*BIG, dtype="float16"),
        {"dtype": "bfloat16"},
        "bfloat16 300x400 after cast float16 to bfloat16 -> flat",
    ),
    "C: transposed on the device": (transposed(*BIG), {}, "float32 400x300 after transpose -> flat"),
    "K: a transposed one as it lies": (
        transposed(*BIG),
        {"order": Order.K},
        "float32 300x400 as it lies -> flat axes (1, 0)",
    ),
    "K: permuted dense, three dims": (
        leaf(8, 3, 64, strides=(64, 512, 1)),
        {"order": Order.K},
        "float32 3x8x64 as it lies -> flat axes (1, 0, 2)",
    ),
    "K: gapped is packed in its own order": (
        leaf(400, 300, strides=(1, 512)),
        {"order": Order.K},
        "float32 300x400 after pack -> flat axes (1, 0)",
    ),
    "C: gapped is packed": (leaf(300, 200, strides=(400, 2)), {}, "float32 300x200 after pack -> flat"),
    "narrowed and transposed in one pass": (
        transposed(*BIG),
        {"dtype": "float16"},
        "float16 400x300 after cast float32 to float16, transpose -> flat",
    ),
    "widened after a transpose": (
        transposed(*BIG, dtype="float16"),
        {"dtype": "float32"},
        "float16 400x300 after transpose -> flat float32",
    ),
    "expanded, C: the base crosses": (
        leaf(500, 300, strides=(0, 1)),
        {},
        "float32 300 as it lies -> gather",
    ),
    "expanded, K: a read-only view": (
        leaf(500, 300, strides=(0, 1)),
        {"order": Order.K},
        "float32 300 as it lies -> broadcast",
    ),
    "expanded to nothing else": (leaf(5, 7, strides=(0, 0)), {}, "float32 () as it lies -> gather"),
    "expanded in the middle": (leaf(30, 500, 40, strides=(40, 0, 1)), {}, "float32 30x40 as it lies -> gather"),
    "expanded and transposed, C": (
        leaf(40, 500, 30, strides=(1, 0, 40)),
        {},
        "float32 40x30 after transpose -> gather",
    ),
    "expanded and transposed, K": (
        leaf(40, 500, 30, strides=(1, 0, 40)),
        {"order": Order.K},
        "float32 30x40 as it lies -> broadcast axes (1, 0)",
    ),
    "conjugated": (leaf(*BIG, dtype="complex64", conj=True), {}, "complex64 300x400 after resolve conj -> flat"),
    "negated": (leaf(*BIG, neg=True), {}, "float32 300x400 after resolve neg -> flat"),
    "both": (
        leaf(*BIG, dtype="complex64", conj=True, neg=True),
        {},
        "complex64 300x400 after resolve conj, resolve neg -> flat",
    ),
    "conjugated, expanded, transposed": (
        leaf(40, 500, 30, strides=(1, 0, 40), dtype="complex64", conj=True),
        {},
        "complex64 40x30 after resolve conj, transpose -> gather",
    ),
    "windows that overlap": (leaf(400, 300, strides=(1, 1)), {}, "uint8 2796 of bytes 0..2796 as it lies -> gather"),
    "windows that overlap, widened": (
        leaf(400, 300, strides=(1, 1), dtype="float16"),
        {"dtype": "float32"},
        "uint8 1398 of bytes 0..1398 as it lies -> gather float32",
    ),
    "windows that overlap, narrowed: a cast makes bytes of its own": (
        leaf(400, 300, strides=(1, 1)),
        {"dtype": "float16"},
        "float16 400x300 after cast float32 to float16, pack -> flat",
    ),
}


def told(made: Plan) -> str:
    """One line for a plan of one leaf."""
    (deliver,), (move,) = made.delivers, made.moves
    shape = "x".join(map(str, move.shape)) or "()"
    span = f" of bytes {move.span[0]}..{move.span[1]}" if move.span else ""
    how = f"after {', '.join(move.passes)}" if move.passes else "as it lies"
    landed = made.sources[0].dtype if move.span else move.dtype
    dtype = f" {deliver.dtype}" if deliver.dtype != landed else ""
    axes = f" axes {deliver.axes}" if deliver.axes else ""
    return f"{move.dtype} {shape}{span} {how} -> {deliver.way.value}{dtype}{axes}"


@pytest.mark.parametrize(("source", "options", "expected"), ONE_LEAF.values(), ids=ONE_LEAF)
def test_one_leaf(source: Source, options: dict[str, object], expected: str) -> None:
    made = plan(source, **options)
    assert told(made) == expected
    (deliver,), (move,) = made.delivers, made.moves
    assert deliver.shape == source.shape
    assert move.device == source.device
    assert move.nbytes == made.link_nbytes == _layout.numel(move.shape) * _dtypes.lookup(move.dtype).itemsize
    assert move.temporary == (move.nbytes if move.passes else 0)
    assert move.lands_in == (0 if deliver.way in (Way.FLAT, Way.BROADCAST) else None)
    assert made.scratch_nbytes == (move.nbytes if deliver.way is Way.GATHER else 0)
    size = _dtypes.lookup(deliver.dtype).itemsize
    assert deliver.nbytes == made.result_nbytes == _layout.numel(deliver.base) * size


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 7), (2, 0, 3)])
@pytest.mark.parametrize("strides", ["contiguous", "zero", "odd"])
@pytest.mark.parametrize("device", ["fast:0", "slow:0"])
def test_no_elements_no_move(shape: tuple[int, ...], strides: str, device: str) -> None:
    made = {"contiguous": None, "zero": (0,) * len(shape), "odd": tuple(range(5, 5 + len(shape)))}[strides]
    for options in ({}, {"dtype": "float16"}, {"order": Order.K}, {"out": True}):
        got = plan(leaf(*shape, strides=made, device=device), leaf(3), bare=False, **options)
        assert got.delivers[0].way is Way.EMPTY
        assert (got.delivers[0].shape, got.delivers[0].nbytes, got.delivers[0].move) == (shape, 0, None)
        assert [move.leaf for move in got.moves] == [1]


def test_notes() -> None:
    def notes(source: Source, **options: object) -> tuple[str, ...]:
        made = plan(source, **options)
        return made.delivers[0].notes + made.moves[0].notes

    assert notes(leaf(3)) == ()
    assert notes(leaf(3, dtype="float16"), dtype="float32") == ("widened to float32, exactly, on the host",)
    assert notes(leaf(3, neg=True), dtype="float16") == ("cast to float16 on the host",)
    assert notes(leaf(3, requires_grad=True)) == ("gradient dropped",)
    assert notes(leaf(4, 3, strides=(0, 1))) == ("broadcast dimensions (0,) cross once",)
    assert notes(leaf(4, 3, strides=(0, 1)), order=Order.K) == (
        "read-only: repeats 12 bytes",
        "broadcast dimensions (0,) cross once",
    )
    assert notes(leaf(4, 3, strides=(1, 1))) == ("overlapping windows cross once",)


# ---- routes

ROUTES = {
    "tiny": ((leaf(10),), {}, [(Route.DIRECT,)]),
    "the largest tiny one": ((leaf(DIRECT_NBYTES // 4),), {}, [(Route.DIRECT,)]),
    "one element more": ((leaf(DIRECT_NBYTES // 4 + 1),), {}, [(Route.WHOLE,)]),
    "tiny, in a tree of one": ((leaf(10),), {"bare": False}, [(Route.DIRECT,)]),
    "two tiny ones": ((leaf(10), leaf(10)), {}, [(Route.WHOLE,), (Route.WHOLE,)]),
    "tiny, beside one in host memory": ((leaf(10), leaf(10, device="cpu")), {}, [(Route.WHOLE,)]),
    "tiny, into out=": ((leaf(10),), {"out": True}, [(Route.WHOLE,)]),
    "tiny, widened on the host": ((leaf(10, dtype="float16"),), {"dtype": "float32"}, [(Route.WHOLE,)]),
    "tiny, expanded": ((leaf(9, 3, strides=(0, 1)),), {}, [(Route.WHOLE,)]),
    "tiny, expanded, K": ((leaf(9, 3, strides=(0, 1)),), {"order": Order.K}, [(Route.WHOLE,)]),
    "tiny, windows": ((leaf(9, 3, strides=(1, 1)),), {}, [(Route.WHOLE,)]),
    "tiny, transposed": ((transposed(3, 4),), {}, [(Route.DIRECT, Route.PIECES)]),
    "tiny, narrowed": ((leaf(10),), {"dtype": "float16"}, [(Route.DIRECT, Route.PIECES)]),
    "pinned, of any size": ((leaf(1 << 28),), {"memory": Memory.PINNED}, [(Route.DIRECT,)]),
    "pinned, transposed": ((transposed(*BIG),), {"memory": Memory.PINNED}, [(Route.DIRECT, Route.PIECES)]),
    "pinned, two": ((leaf(9), leaf(9)), {"memory": Memory.PINNED}, [(Route.WHOLE,), (Route.WHOLE,)]),
    "pinned, expanded": ((leaf(9, 3, strides=(0, 1)),), {"memory": Memory.PINNED}, [(Route.WHOLE,)]),
    "transposed": ((transposed(*BIG),), {}, [(Route.WHOLE, Route.PIECES)]),
    "unproven": ((leaf(10, device="slow:0"),), {}, [(Route.BLOCKING,)]),
    "unproven, transposed": ((transposed(*BIG, device="slow:0"),), {}, [(Route.BLOCKING,)]),
    "unproven, pinned": ((leaf(10, device="slow:0"),), {"memory": Memory.PINNED}, [(Route.BLOCKING,)]),
    "both kinds": ((leaf(10), leaf(10, device="slow:1")), {}, [(Route.WHOLE,), (Route.BLOCKING,)]),
    "nothing moves": ((leaf(10, device="cpu"), leaf(0)), {}, []),
}


@pytest.mark.parametrize(("sources", "options", "expected"), ROUTES.values(), ids=ROUTES)
def test_routes(sources: tuple[Source, ...], options: dict[str, object], expected: list[tuple[Route, ...]]) -> None:
    assert list(plan(*sources, **options).routes) == expected


# ---- leaves that share bytes


def views(*parts: Source | tuple, dtype: str = "float32", device: str = "fast:0") -> tuple[Source, ...]:
    """Leaves of one storage: each (offset, shape, strides) or (offset, shape, strides, dtype)."""
    found = []
    for offset, shape, strides, *more in parts:
        found.append(Source(device, more[0] if more else dtype, shape, strides, offset, 77))
    return tuple(found)


SHARED = {
    # leaves, options, spans of the moves (None: a move of its own), the leaf that each lands in
    "two halves of the columns": (
        views((0, (100, 2), (4, 1)), (2, (100, 2), (4, 1))),
        {},
        [((0, 1600), None)],
    ),
    "neighbours only touch": (views((0, (100,), (1,)), (100, (100,), (1,))), {}, [(None, 0), (None, 1)]),
    "overlapping by one": (views((0, (100,), (1,)), (99, (100,), (1,))), {}, [((0, 796), None)]),
    "the whole and a part: lands in the whole": (
        views((0, (100, 4), (4, 1)), (5, (20,), (1,))),
        {},
        [((0, 1600), 0)],
    ),
    "a part and the whole": (views((5, (20,), (1,)), (0, (100, 4), (4, 1))), {}, [((0, 1600), 1)]),
    "two shapes of the whole": (views((0, (100, 4), (4, 1)), (0, (400,), (1,))), {}, [((0, 1600), 0)]),
    "with out= nothing lands in a leaf": (
        views((0, (100, 4), (4, 1)), (5, (20,), (1,))),
        {"out": True},
        [((0, 1600), None)],
    ),
    "far apart: the union would carry more": (
        views((0, (10,), (1000,)), (1, (10,), (1000,))),
        {},
        [(None, 0), (None, 1)],
    ),
    "a gap of one more than they share": (
        views((0, (2,), (3,)), (2, (2,), (2,))),
        {},
        [(None, 0), (None, 1)],
    ),
    "a gap, and exactly no more bytes": (views((0, (2,), (2,)), (2, (2,), (1,))), {}, [((0, 16), None)]),
    "a transposed one goes by itself": (
        views((0, (100, 4), (4, 1)), (0, (4, 100), (1, 4)), (5, (20,), (1,))),
        {},
        [((0, 1600), 0), (None, 1)],
    ),
    "K: a transposed one does not": (
        views((0, (100, 4), (4, 1)), (0, (4, 100), (1, 4))),
        {"order": Order.K},
        [((0, 1600), 0)],
    ),
    "narrowed ones go by themselves": (
        views((0, (100,), (1,)), (50, (100,), (1,))),
        {"dtype": "float16"},
        [(None, 0), (None, 1)],
    ),
    "widened ones share": (
        views((0, (100,), (1,)), (50, (100,), (1,))),
        {"dtype": "float64"},
        [((0, 600), None)],
    ),
    "conjugated ones go by themselves": (
        tuple(
            source._replace(conj=source.offset == 1)
            for source in views((0, (50,), (1,)), (1, (20,), (1,)), (2, (20,), (1,)), dtype="complex64")
        ),
        {},
        [((0, 400), 0), (None, 1)],
    ),
    "an expanded one shares under C": (
        views((0, (100,), (1,)), (10, (5, 50), (0, 1))),
        {},
        [((0, 400), 0)],
    ),
    "and moves its base under K": (
        views((0, (100,), (1,)), (10, (5, 50), (0, 1))),
        {"order": Order.K},
        [(None, 0), (None, 1)],
    ),
    "empty ones are in no group": (
        views((0, (100,), (1,)), (10, (0, 5), (5, 1)), (20, (20,), (1,))),
        {},
        [((0, 400), 0)],
    ),
    "two groups in one storage": (
        views((0, (10,), (1,)), (5, (10,), (1,)), (500, (10,), (1,)), (505, (10,), (1,))),
        {},
        [((0, 60), None), ((2000, 2060), None)],
    ),
    "a chain": (
        views((0, (10,), (1,)), (9, (10,), (1,)), (18, (10,), (1,))),
        {},
        [((0, 112), None)],
    ),
    "several dtypes, the start aligned for all": (
        views((3, (10,), (1,), "int16"), (1, (10,), (1,), "int32"), (1, (4,), (1,), "int64")),
        {},
        [((0, 44), None)],
    ),
    "on unproven devices too": (
        views((0, (100,), (1,)), (50, (100,), (1,)), device="slow:0"),
        {},
        [((0, 600), None)],
    ),
}


@pytest.mark.parametrize(("sources", "options", "expected"), SHARED.values(), ids=SHARED)
def test_leaves_that_share_bytes(
    sources: tuple[Source, ...], options: dict[str, object], expected: list[tuple[tuple[int, int] | None, int | None]]
) -> None:
    made = plan(*dict.fromkeys(sources), bare=False, **options)
    assert [(move.span, move.lands_in) for move in made.moves] == expected
    alone = sum(plan(source, bare=False, **options).link_nbytes for source in dict.fromkeys(sources))
    assert made.link_nbytes <= alone
    for move in made.moves:
        if move.span is not None:
            assert (move.shape, move.dtype, move.nbytes) == ((move.span[1] - move.span[0],), "uint8", move.shape[0])
            assert not move.passes, "bytes cross as they lie"


def test_other_storages_and_devices_share_nothing() -> None:
    a, b = views((0, (100,), (1,)), (50, (100,), (1,)))
    for other in (b._replace(storage=78), b._replace(device="fast:1"), b._replace(device="slow:0")):
        made = plan(a, other)
        assert [move.span for move in made.moves] == [None, None]
    made = plan(a._replace(device="cpu"), b._replace(device="cpu"))
    assert made.moves == ()


def test_a_member_reads_its_own_elements_out_of_what_landed() -> None:
    made = plan(*views((3, (16,), (1,), "int16"), (1, (4, 2), (2, 1), "int32")))
    (move,) = made.moves
    assert move.span == (4, 38)
    assert [deliver.view for deliver in made.delivers] == [
        View("int16", 2, (16,), (1,)),
        View("int32", 0, (4, 2), (2, 1)),
    ]


def test_the_note_counts_the_leaves() -> None:
    made = plan(*views((0, (10,), (1,)), (5, (10,), (1,)), (7, (3,), (1,))))
    assert made.moves[0].notes == ("3 overlapping leaves cross once",)


# ---- leaves in host memory

HOST = {
    "copied": (leaf(3, device="cpu"), {}, Way.HOST_COPY, (3,), ()),
    "an ndarray": (leaf(3, device="numpy"), {}, Way.HOST_COPY, (3,), ()),
    "shared": (leaf(3, device="cpu"), {"copy": CopyMode.IF_NEEDED}, Way.HOST_SHARE, (3,), ()),
    "shared or an error": (leaf(3, device="cpu"), {"copy": CopyMode.NEVER}, Way.HOST_SHARE, (3,), ()),
    "cast, so copied": (
        leaf(3, device="cpu"),
        {"copy": CopyMode.IF_NEEDED, "dtype": "float16"},
        Way.HOST_COPY,
        (3,),
        (),
    ),
    "transposed, so copied": (
        transposed(3, 4, device="cpu"),
        {"copy": CopyMode.IF_NEEDED},
        Way.HOST_COPY,
        (4, 3),
        (),
    ),
    "transposed, K: shared": (
        transposed(3, 4, device="cpu"),
        {"copy": CopyMode.IF_NEEDED, "order": Order.K},
        Way.HOST_SHARE,
        (4, 3),
        (),
    ),
    "transposed, K: copied as it lies": (
        transposed(3, 4, device="cpu"),
        {"order": Order.K},
        Way.HOST_COPY,
        (3, 4),
        (1, 0),
    ),
    "expanded, K: the base is copied": (
        leaf(9, 3, strides=(0, 1), device="cpu"),
        {"order": Order.K},
        Way.HOST_COPY,
        (3,),
        (),
    ),
    "reversed, K": (leaf(4, 3, strides=(-3, 1), device="numpy"), {"order": Order.K}, Way.HOST_COPY, (4, 3), ()),
    "conjugated, so copied": (
        leaf(3, dtype="complex64", conj=True, device="cpu"),
        {"copy": CopyMode.IF_NEEDED},
        Way.HOST_COPY,
        (3,),
        (),
    ),
    "into out=": (leaf(3, device="cpu"), {"copy": CopyMode.IF_NEEDED, "out": True}, Way.HOST_COPY, (3,), ()),
    "empty": (leaf(0, device="cpu"), {}, Way.HOST_COPY, (0,), ()),
    "a dtype that only NumPy has": (leaf(3, dtype="datetime64[s]", device="numpy"), {}, Way.HOST_COPY, (3,), ()),
    "the same in a tree with dtype=": (
        leaf(3, dtype="datetime64[s]", device="numpy"),
        {"dtype": "float16", "bare": False},
        Way.HOST_COPY,
        (3,),
        (),
    ),
}


@pytest.mark.parametrize(("source", "options", "way", "base", "axes"), HOST.values(), ids=HOST)
def test_leaves_in_host_memory(
    source: Source, options: dict[str, object], way: Way, base: object, axes: object
) -> None:
    made = plan(source, **options)
    assert made.moves == ()
    assert made.link_nbytes == made.scratch_nbytes == 0
    (deliver,) = made.delivers
    assert (deliver.way, deliver.base, deliver.axes) == (way, base, axes)
    assert (made.result_nbytes == 0) == (way is Way.HOST_SHARE or bool(options.get("out")) or deliver.nbytes == 0)


@pytest.mark.parametrize(
    ("source", "options", "why"),
    [
        (leaf(3), {}, "an array in host memory cannot share a device's memory"),
        (leaf(3, device="cpu"), {"dtype": {"float32": "float16"}}, "a cast from float32 to float16"),
        (transposed(3, 4, device="cpu"), {}, "the source is not C-contiguous"),
        (leaf(3, neg=True, device="cpu"), {}, "a conjugate or negative view has to be resolved"),
        (
            transposed(3, 4, neg=True, device="cpu"),
            {"dtype": {"float32": "float16"}},
            "a cast from float32 to float16 and a conjugate or negative view has to be resolved "
            "and the source is not C-contiguous",
        ),
    ],
)
def test_copy_false_that_cannot_be_kept(source: Source, options: dict[str, object], why: str) -> None:
    fine = leaf(3, device="cpu", dtype="int32")
    with pytest.raises(CopyNeededError) as caught:
        plan(fine, source, copy=CopyMode.NEVER, **options)
    assert caught.value.why == why
    assert caught.value.leaf == 1


def test_copy_false_and_out_cannot_both_be() -> None:
    with pytest.raises(CopyNeededError) as caught:
        plan(leaf(3, device="cpu"), copy=CopyMode.NEVER, out=True)
    assert caught.value.why == "out= was given"


def test_dtypes_that_numpy_has_not() -> None:
    with pytest.raises(DtypeError) as caught:
        plan(leaf(3), leaf(3, dtype="complex32"))
    assert caught.value.leaf == 1
    assert str(caught.value) == (
        "NumPy has no dtype for torch.complex32\n"
        "  why: NumPy has no complex numbers of two float16\n"
        '  do: ask for dtype="complex64", or pass `torch.view_as_real(x)`'
    )
    assert plan(leaf(3, dtype="complex32"), dtype="complex64").delivers[0].dtype == "complex64"
    with pytest.raises(DtypeError, match="the imaginary part would be lost"):
        plan(leaf(3, dtype="complex64"), dtype="float32")


# ---- dtype= in a tree


def test_a_plain_dtype_is_for_floats_only_in_a_tree() -> None:
    sources = leaf(3), leaf(3, dtype="int32"), leaf(3, dtype="bool"), leaf(3, dtype="complex64")
    assert [d.dtype for d in plan(*sources, dtype="float16").delivers] == ["float16", "int32", "bool", "complex64"]
    assert plan(leaf(3, dtype="int32"), dtype="float16").delivers[0].dtype == "float16"
    assert plan(leaf(3, dtype="int32"), dtype="float16", bare=False).delivers[0].dtype == "int32"


def test_a_mapping_is_for_what_it_names() -> None:
    sources = leaf(3), leaf(3, dtype="bfloat16"), leaf(3, dtype="int64")
    request = {"bfloat16": "float64", "floating": "float16", "int64": "int32"}
    assert [d.dtype for d in plan(*sources, dtype=request).delivers] == ["float16", "float64", "int32"]


# ---- admission: which route, for these free bytes


def packers(*mib: float, device: str = "fast:0") -> list[Source]:
    """Gapped leaves that need a temporary of so many MiB each."""
    return [leaf(int(n * MIB / 4), strides=(2,), device=device) for n in mib]


W, P = Route.WHOLE, Route.PIECES
ADMITTED = {
    # temporaries in MiB, limit, free (None: not asked), routes, MiB of one piece
    "all fit": ([10, 20], 256, 1000, [W, W], 0),
    "all fit exactly": ([100, 156], 256, 1000, [W, W], 0),
    "not asked": ([10, 20], 256, None, [W, W], 0),
    "one too large": ([300], 256, 1000, [P], 32),
    "one too large for what is free": ([30], 256, 20, [P], 20),
    "barely anything free": ([30], 256, 1, [P], 1),
    "the second too large": ([200, 100], 256, 1000, [W, P], 32),
    "the first too large, the second fits": ([300, 100], 256, 1000, [P, W], 32),
    "the last MiB is kept back": ([255.5, 5], 256, 1000, [P, W], 32),
    "what is left is the piece": ([30, 30], 256, 40, [W, P], 10),
    "nothing but the piece is left": ([39, 30], 256, 40, [W, P], 1),
    "several in pieces share one": ([300, 400, 20], 256, 1000, [P, P, W], 32),
    "limits of a few bytes": ([2], 0, 1000, [P], 1),
}


@pytest.mark.parametrize(("mib", "limit", "free", "routes", "piece"), ADMITTED.values(), ids=ADMITTED)
def test_admission(mib: list[float], limit: int, free: int | None, routes: list[Route], piece: int) -> None:
    made = plan(*packers(*mib), bare=False, memory=Memory.AUTO, out=True)
    seen = () if free is None else (("fast:0", free * MIB),)
    got = admit(made, Capacity(seen, limit * MIB))
    assert list(got.routes) == routes
    assert list(got.pieces) == [piece * MIB if route is P else 0 for route in routes]
    assert len(got.fallbacks) == routes.count(P)
    assert not got.blocks
    room = min(limit, limit if free is None else free) * MIB
    assert got.temporary("fast:0") <= max(room, SMALLEST_PIECE_NBYTES)


def test_a_fallback_says_what_and_why() -> None:
    got = admit(plan(*packers(300)), Capacity((("fast:0", 1000 * MIB),)))
    assert got.fallbacks == (
        "move 0: packed in pieces of 33,554,432 bytes, because a temporary of 314,572,800 bytes "
        "passes what is left of 268,435,456 bytes for temporaries on fast:0",
    )


def test_devices_have_budgets_of_their_own() -> None:
    sources = packers(200) + packers(200, device="fast:1") + packers(200)
    got = admit(plan(*sources), Capacity((("fast:0", 1000 * MIB), ("fast:1", 100 * MIB))))
    assert got.routes == (W, P, P)
    assert got.devices == ("fast:0", "fast:1")
    assert [got.temporary(device) for device in got.devices] == [232 * MIB, 32 * MIB]


def test_no_room_for_the_smallest_piece_is_an_error() -> None:
    made = plan(leaf(10), transposed(1024, 1024))
    with pytest.raises(DeviceMemoryError) as caught:
        admit(made, Capacity((("fast:0", 1_000_000),)))
    assert caught.value.leaf == 1
    assert str(caught.value) == (
        "no room for a temporary on the device: got 1,000,000 free bytes on fast:0, "
        "needed 1,048,576 bytes to transpose piece by piece\n"
        "  do: free some device memory, or ask for order='K' and no dtype=, which moves dense leaves as they lie"
    )
    assert admit(made, Capacity((("fast:0", SMALLEST_PIECE_NBYTES),))).pieces == (0, SMALLEST_PIECE_NBYTES)


def test_leaves_without_a_pass_never_care() -> None:
    made = plan(leaf(1 << 28), leaf(1 << 28))
    assert admit(made, Capacity((("fast:0", 0),), temporary_limit=0)).routes == (W, W)


def test_the_device_is_asked_only_where_it_matters() -> None:
    small, large = plan(*packers(0.5, 0.5)), plan(*packers(0.5, 0.6))
    assert UNASKED_NBYTES == MIB
    assert not asks_device(small, "fast:0")
    assert asks_device(large, "fast:0")
    assert not asks_device(large, "fast:1")
    assert not asks_device(plan(leaf(1 << 30)), "fast:0")


def test_the_direct_way_gives_way_to_pieces() -> None:
    made = plan(*packers(100), memory=Memory.PINNED)
    assert admit(made, Capacity((("fast:0", 1000 * MIB),))).routes == (Route.DIRECT,)
    got = admit(made, Capacity((("fast:0", 10 * MIB),)))
    assert (got.routes, got.pieces) == ((P,), (10 * MIB,))


def test_unproven_devices_block_and_say_so_once() -> None:
    got = admit(plan(leaf(3, device="slow:0"), leaf(4, device="slow:0"), leaf(4, device="slow:1"), leaf(3)), Capacity())
    assert got.routes == (Route.BLOCKING,) * 3 + (Route.WHOLE,)
    assert got.blocks == (
        "asynchronous copies are not proven on slow:0",
        "asynchronous copies are not proven on slow:1",
    )


@pytest.mark.parametrize(
    ("sources", "options", "needed", "part"),
    [
        pytest.param((leaf(1000), leaf(500)), {}, 6000, ", 4,000 of them for shape (1000,) of float32", id="results"),
        pytest.param(
            (leaf(1000, 10, strides=(0, 1)),),
            {},
            40_040,
            ", 40,000 of them for shape (1000, 10) of float32",
            id="and scratch",
        ),
        pytest.param(
            (leaf(1000, 10, strides=(0, 1)),),
            {"order": Order.K},
            40,
            ", 40 of them for shape (1000, 10) of float32",
            id="a base",
        ),
        pytest.param(
            (leaf(1000, device="cpu"), leaf(10)),
            {"copy": CopyMode.IF_NEEDED},
            40,
            ", 40 of them for shape (10,) of float32",
            id="shared ones are free",
        ),
        pytest.param((leaf(1000, 10, strides=(0, 1)),), {"out": True}, 40, "", id="out= is there"),
    ],
)
def test_what_does_not_fit_into_host_memory(
    sources: tuple[Source, ...], options: dict[str, object], needed: int, part: str
) -> None:
    made = plan(*sources, **options)
    assert made.result_nbytes + made.scratch_nbytes == needed
    admit(made, Capacity(host_free=needed))
    admit(made, Capacity(host_free=None))
    with pytest.raises(HostMemoryError) as caught:
        admit(made, Capacity(host_free=needed - 1))
    assert caught.value.leaf == len(sources) - 1 or part.startswith(", 4,000")
    assert str(caught.value) == (
        f"the result does not fit into host memory: got {needed - 1:,} free bytes, needed {needed:,} bytes{part}\n"
        "  do: move fewer leaves at once, narrow them with dtype=, give a memory-mapped out=, "
        "or ask for order='K', which keeps broadcast dimensions unexpanded"
    )


def test_the_largest_leaf_is_named() -> None:
    with pytest.raises(HostMemoryError) as caught:
        admit(plan(leaf(3), leaf(1000), leaf(5)), Capacity(host_free=0))
    assert caught.value.leaf == 1
    assert "4,000 of them for shape (1000,) of float32" in str(caught.value)


# ---- plans as values


def test_a_plan_prints_all_there_is_to_it() -> None:
    """And nothing else: no addresses, nothing that differs between two runs."""
    source = Source("fast:0", "float32", (400, 300), (1, 400), 0, 0)
    made = plan(source, order=Order.C)
    assert repr(made) == (
        "Plan(sources=(Source(device='fast:0', dtype='float32', shape=(400, 300), strides=(1, 400), offset=0, "
        "storage=0, conj=False, neg=False, requires_grad=False),), options=Options(request=Request(plain=None, "
        "exact=(), floating=None), order=<Order.C: 'C'>, copy=<CopyMode.ALWAYS: True>, memory=<Memory.AUTO: 'auto'>, "
        "bare=True, out=False), moves=(Move(device='fast:0', leaf=0, shape=(400, 300), dtype='float32', "
        "nbytes=480000, drop=(), perm=(0, 1), span=None, passes=('transpose',), lands_in=0, notes=()),), "
        "delivers=(Deliver(leaf=0, way=<Way.FLAT: 'flat'>, dtype='float32', shape=(400, 300), base=(400, 300), "
        "nbytes=480000, axes=(), move=0, view=None, notes=()),), "
        "routes=((<Route.WHOLE: 'whole'>, <Route.PIECES: 'pieces'>),))"
    )
    assert repr(admit(made, Capacity())) == (
        f"AdmittedPlan(plan={made!r}, routes=(<Route.WHOLE: 'whole'>,), pieces=(0,), blocks=(), fallbacks=())"
    )


def test_plans_are_frozen_hashable_and_equal() -> None:
    sources = leaf(3), transposed(3, 4), *views((0, (10,), (1,)), (5, (10,), (1,)))
    a, b = plan(*sources), make_plan.__wrapped__(sources, plan(*sources).options, ABLE)
    assert a == b
    assert a is not b
    assert hash(a) == hash(b)
    assert admit(a, Capacity()) == admit(b, Capacity())
    for record in (a, a.moves[0], a.delivers[0], admit(a, Capacity())):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, dataclasses.fields(record)[0].name, None)


def test_equal_descriptions_get_the_very_same_plan() -> None:
    source = leaf(123, 7)
    assert plan(source) is plan(Source(*source))


@pytest.mark.parametrize("record", [Move, Deliver, View, Plan])
def test_records_hold_nothing_but_values(record: type) -> None:
    """A plan is kept in a cache for long: it must not keep a tensor."""
    known = {"str", "int", "bool", "tuple", "None", "Way", "Route", "View", "Move", "Deliver", "Source", "Options"}
    for field in dataclasses.fields(record):
        words = set(str(field.type).replace("[", " ").replace("]", " ").replace(",", " ").replace("|", " ").split())
        assert words <= known | {"..."}, field


def test_planning_needs_no_torch() -> None:
    script = "import sys, hostward._plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


# ---- what the usual call would do

NAIVE = {
    # source, target, (link, temporary), what is wrong with it
    "contiguous": (leaf(1000), "float32", (4000, 0), []),
    "transposed": (transposed(30, 40), "float32", (4800, 0), ["keeps the source's strides"]),
    "gapped": (leaf(1000, strides=(2,)), "float32", (4000, 4000), []),
    "gapped and transposed": (
        leaf(40, 30, strides=(1, 50)),
        "float32",
        (4800, 4800),
        ["with non_blocking=True it would block"],
    ),
    "expanded": (leaf(500, 30, strides=(0, 1)), "float32", (60_000, 60_000), []),
    "narrowed": (leaf(1000), "float16", (4000, 0), ["the cast to float16 runs on the host, after the link"]),
    "widened": (
        leaf(1000, dtype="float16"),
        "float32",
        (2000, 0),
        ["the cast to float32 runs on the host, into a sec"],
    ),
    "bfloat16": (leaf(1000, dtype="bfloat16"), "bfloat16", (2000, 0), ["raises: numpy() refuses torch.bfloat16"]),
    "bool": (leaf(1000, dtype="bool"), "bool", (1000, 0), []),
    "conjugated": (
        leaf(9, dtype="complex64", conj=True),
        "complex64",
        (72, 0),
        ["raises: numpy() refuses a tensor with"],
    ),
    "negated": (leaf(9, neg=True), "float32", (36, 0), ["raises: numpy() refuses a tensor with its negative bit set"]),
}


@pytest.mark.parametrize(("source", "target", "cost", "problems"), NAIVE.values(), ids=NAIVE)
def test_the_usual_call(source: Source, target: str, cost: tuple[int, int], problems: list[str]) -> None:
    judged = naive(source, target, c_order=True)
    assert (judged.link_nbytes, judged.temporary_nbytes) == cost
    assert len(judged.problems) == len(problems)
    for found, expected in zip(judged.problems, problems, strict=True):
        assert found.startswith(expected)


def test_the_constants_are_what_the_contract_says() -> None:
    assert (Capacity().temporary_limit, PIECE_NBYTES, SMALLEST_PIECE_NBYTES) == (256 * MIB, 32 * MIB, MIB)
