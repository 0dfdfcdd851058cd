"""A leg: how moves are cut, which slots become readable together, and the one temporary for all pieces."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device.frame import Device
from engine.rig import Script, decided, load, numbers, scripted
from hostward import _engine
from hostward._engine._leg import pieces_of
from hostward._plan import Move, Route, admit
from hostward._sinks import ArraySink
from hostward._types import Capacity

# ---- cutting


def move(*shape: int, itemsize: int = 4) -> Move:
    return Move("fast:0", 0, shape, "float32", math.prod(shape) * itemsize)


@pytest.mark.parametrize(
    ("shape", "limit", "sizes"),
    [
        pytest.param((10,), 0, [40], id="no bound"),
        pytest.param((10,), 40, [40], id="as large as the bound"),
        pytest.param((10,), 39, [20, 20], id="dealt out evenly"),
        pytest.param((10,), 16, [12, 12, 16], id="whole elements"),
        pytest.param((), 4, [4], id="0-d"),
        pytest.param((), 1, [4], id="never less than one element"),
        pytest.param((2, 3), 12, [12, 12], id="whole rows"),
        pytest.param((2, 3), 8, [4, 8, 4, 8], id="parts of rows"),
    ],
)
def test_pieces(shape: tuple[int, ...], limit: int, sizes: list[int]) -> None:
    found = list(pieces_of([(5, move(*shape))], lambda number: limit))
    assert [piece.nbytes for piece in found] == sizes
    assert [piece.offset for piece in found] == [sum(sizes[:n]) for n in range(len(sizes))]
    assert {piece.move for piece in found} == {5}


@given(
    shapes=st.lists(st.lists(st.integers(1, 6), max_size=4).map(tuple), max_size=4),
    limits=st.lists(st.integers(4, 300), min_size=4, max_size=4),
    itemsize=st.sampled_from([1, 2, 4]),
)
def test_pieces_tile_every_move_in_order(shapes, limits, itemsize) -> None:
    moves = [(number, move(*shape, itemsize=itemsize)) for number, shape in enumerate(shapes)]
    found = list(pieces_of(moves, lambda number: limits[number]))
    assert [piece.move for piece in found] == sorted(piece.move for piece in found)
    for number, one in moves:
        mine = [piece for piece in found if piece.move == number]
        assert all(0 < piece.nbytes <= limits[number] for piece in mine)
        assert all(a.offset + a.nbytes == b.offset for a, b in itertools.pairwise(mine))
        assert mine[0].offset == 0
        assert mine[-1].offset + mine[-1].nbytes == one.nbytes


# ---- events


@pytest.mark.parametrize(
    ("groups", "batches"),
    [("aaaa", 1), ("aabb", 2), ("abab", 4), ("abba", 3)],
)
def test_slots_of_one_group_share_an_event(device: Device, groups: str, batches: int) -> None:
    cargo = load(device, numbers(256))
    with device.hold():
        it = scripted(cargo, Script(group=iter(groups)))
        (leg,) = it.flight._legs
        assert [len(batch.slots) for batch in leg._batches] == [len(list(run)) for _, run in itertools.groupby(groups)]
        assert len(leg._batches) == batches
    it.flight.wait()


def test_each_batch_is_told_as_soon_as_it_has_landed(device: Device) -> None:
    """Whatever is queued behind it."""
    room = itertools.chain([True, True, False], itertools.repeat(True))
    it = scripted(load(device, numbers(256)), Script(room=room))
    device.synchronize()
    with device.hold(it.flight._legs[0].stream):
        it.flight.advance(_engine.at_once)
        assert len(it.sink.landed_pieces) == 2
        assert len(it.sink.reserved) == 4
        assert not it.flight.ended
    it.flight.wait()
    assert len(it.sink.landed_pieces) == 4


# ---- packing in pieces

MIB = 1 << 20


@pytest.mark.parametrize("leaves", [1, 3])
def test_there_is_one_temporary_and_it_is_given_back(device: Device, leaves: int) -> None:
    device.require("memory")
    cpu = [torch.arange(1 << 20, dtype=torch.float32).view(1024, -1) + n for n in range(leaves)]
    tree = [device.tensor(x).t() for x in cpu]
    call = decided([*tree, 1])
    admitted = admit(call.admitted.plan, Capacity(temporary_limit=MIB))
    assert admitted.routes == (Route.PIECES,) * leaves
    sink = ArraySink(admitted)
    device.reset_counters()
    before = device.memory()
    _engine.run(admitted, call.found.objects, sink).wait()
    after = device.memory()
    assert after.peak_bytes - before.allocated_bytes == MIB == admitted.temporary(f"{device.type}:0")
    assert after.live_blocks == before.live_blocks
    for number, x in enumerate(cpu):
        assert np.array_equal(sink.results[number], x.t().numpy())


@settings(max_examples=25)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 5)),
    order=st.permutations(range(3)),
    step=st.integers(1, 3),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex64]),
    flags=st.tuples(st.booleans(), st.booleans()),
    limit=st.integers(16, 200),
)
def test_pieces_of_any_layout_are_packed_right(device: Device, shape, order, step, dtype, flags, limit) -> None:
    """Whole and in pieces give the same bytes, for pieces of any size."""
    cpu = torch.arange(math.prod(shape) * step).to(dtype).view(*shape[:2], -1)[..., ::step].permute(order)
    x = device.tensor(torch.arange(math.prod(shape) * step).to(dtype)).view(*shape[:2], -1)[..., ::step].permute(order)
    if dtype.is_complex and flags[0]:
        cpu, x = cpu.conj(), x.conj()
    if dtype.is_floating_point and flags[1]:
        cpu, x = torch._neg_view(cpu), torch._neg_view(x)
    call = decided([x, 1])
    (one,) = call.admitted.plan.moves
    if one.passes:
        pieces = admit(call.admitted.plan, Capacity(temporary_limit=0))
        assert pieces.routes == (Route.PIECES,)
        pieces = replace(pieces, pieces=(limit,))
        sink = ArraySink(pieces)
        _engine.run(pieces, call.found.objects, sink).wait()
    else:
        sink = ArraySink(call.admitted)
        _engine.run(call.admitted, call.found.objects, sink).wait()
    assert sink.results[0].tobytes() == cpu.resolve_conj().resolve_neg().contiguous().numpy().tobytes()
