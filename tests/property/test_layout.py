"""Stride arithmetic against NumPy, torch, and the definitions done the slow way."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from hostward import _layout
from hostward._layout import Block, Group

SIZES = st.integers(0, 5)
SHAPES = st.lists(SIZES, max_size=4).map(tuple)


@st.composite
def layouts(draw, sizes=SIZES, max_stride=30):
    """Any shape with any strides: dense, gapped, broadcast, overlapping."""
    shape = draw(st.lists(sizes, max_size=4).map(tuple))
    return shape, tuple(draw(st.integers(0, max_stride)) for _ in shape)


@st.composite
def permuted(draw):
    """A dense layout of permuted dims, with anything for the strides of its dims of size 1."""
    shape = draw(SHAPES)
    order = draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    for dim, stride in zip(order, _layout.contiguous_strides([shape[i] for i in order]), strict=True):
        strides[dim] = stride if shape[dim] != 1 else draw(st.integers(0, 30))
    return shape, tuple(strides)


def touched(shape, strides):
    """The elements, index by index in C order: the definition."""
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, shape))]


def tensor_of(shape, strides):
    return torch.zeros(max(1, _layout.extent(shape, strides))).as_strided(shape, strides)


@given(SHAPES)
def test_contiguous_strides_are_torchs(shape):
    strides = _layout.contiguous_strides(shape)
    assert strides == torch.empty(shape).stride()
    assert _layout.is_contiguous(shape, strides)
    assert _layout.numel(shape) == torch.empty(shape).numel()


@given(st.one_of(layouts(), layouts(st.integers(0, 2), 3), permuted()))
def test_is_contiguous_is_torchs(layout):
    assert _layout.is_contiguous(*layout) == tensor_of(*layout).is_contiguous()


@settings(max_examples=300)
@given(st.one_of(layouts(), layouts(st.integers(0, 2), 3), permuted()))
def test_extent_and_byte_range(layout):
    elements = touched(*layout)
    extent = max(elements) - min(elements) + 1 if elements else 0
    assert _layout.extent(*layout) == extent
    assert _layout.byte_range(7, *layout, 4) == (28, 28 + 4 * extent)


@settings(max_examples=300)
@given(st.one_of(layouts(), layouts(st.integers(0, 3), 6), permuted()))
def test_dense_means_that_each_element_of_a_range_is_touched_once(layout):
    elements = touched(*layout)
    dense = sorted(elements) == list(range(len(elements)))
    assert _layout.is_dense(*layout) == dense
    order = _layout.dense_permutation(*layout)
    assert (order is not None) == dense
    if order is not None:
        assert tensor_of(*layout).permute(order).is_contiguous()


@given(permuted())
def test_permuted_is_dense(layout):
    assert _layout.is_dense(*layout)


@settings(max_examples=300)
@given(st.one_of(layouts(st.integers(1, 4)), permuted()))
def test_k_order_is_numpys(layout):
    """`order="K"` of NumPy puts the elements where ours says, also for broadcast sources."""
    shape, strides = layout
    order = _layout.k_order(shape, strides)
    assert sorted(order) == list(range(len(shape)))
    view = as_strided(np.zeros(_layout.extent(shape, strides) or 1, np.int8), shape, strides)
    copied = np.empty_like(view, order="K", subok=False)
    ours = np.empty([shape[i] for i in order], np.int8).transpose(np.argsort(order))
    counted = [i for i, size in enumerate(shape) if size > 1]
    assert copied.size == 0 or [copied.strides[i] for i in counted] == [ours.strides[i] for i in counted]


@pytest.mark.parametrize(
    ("shape", "strides", "order"),
    [
        pytest.param((), (), (), id="0d"),
        pytest.param((2, 3), (3, 1), (0, 1), id="contiguous"),
        pytest.param((2, 3), (1, 2), (1, 0), id="transposed"),
        pytest.param((2, 3, 4, 5), (60, 1, 15, 3), (0, 2, 3, 1), id="channels-last"),
        pytest.param((1, 3, 4, 5), (1, 1, 15, 3), (0, 2, 3, 1), id="size-1-stays"),
        pytest.param((4, 1, 3), (1, 99, 4), (2, 1, 0), id="size-1-in-the-middle"),
        pytest.param((4, 3), (0, 1), (1, 0), id="broadcast-comes-last"),
        pytest.param((4, 3, 2), (2, 2, 2), (0, 1, 2), id="ties-stay"),
        pytest.param((0, 3), (1, 7), (0, 1), id="empty"),
    ],
)
def test_k_order(shape, strides, order):
    assert _layout.k_order(shape, strides) == order


@given(layouts())
def test_broadcast_dims(layout):
    expected = tuple(i for i, (n, s) in enumerate(zip(*layout, strict=True)) if n > 1 and s == 0)
    assert _layout.broadcast_dims(*layout) == expected


@settings(max_examples=300)
@given(st.one_of(layouts(), layouts(st.integers(0, 5), 8), permuted()))
def test_self_overlaps_is_exact_for_small_layouts(layout):
    elements = touched(*layout)
    assert _layout.self_overlaps(*layout) == (len(set(elements)) < len(elements))


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        pytest.param((1 << 20, 1 << 20), (1 << 20, 1), False, id="huge-dense"),
        pytest.param((1 << 20, 1 << 20), ((1 << 20) - 1, 1), True, id="huge-by-one"),
        pytest.param((1000, 400), (160, 1), True, id="unfold-overlapping"),
        pytest.param((1000, 160), (160, 1), False, id="unfold-touching"),
        pytest.param((8, 1000, 160), (10**9, 160, 1), False, id="unfold-batched"),
        pytest.param((1 << 20, 2), (2, (1 << 21) + 1), False, id="interleaved"),
        pytest.param((1 << 20, 2), (2, 1 << 20), True, id="interleaved-clash"),
        pytest.param((3, 1 << 40), (0, 1), True, id="expanded"),
        pytest.param((1 << 40, 0), (0, 0), False, id="empty"),
        pytest.param((3, 2, 2), (6, 10, 15), False, id="entangled-apart"),
        pytest.param((6, 4, 3), (6, 10, 15), True, id="entangled-pair-clash"),
        pytest.param((2, 2, 2), (2, 3, 5), True, id="entangled-triple-clash"),
        pytest.param((2, 2, 2), (2 << 30, 3 << 30, 5 << 30), True, id="entangled-triple-clash-scaled"),
        pytest.param((3, 2, 2), (6 << 30, 10 << 30, 15 << 30), False, id="entangled-scaled"),
        # All eight sums differ, but they spread over too many elements to try.
        pytest.param((2, 2, 2), (1 << 30, (1 << 30) + 1, (1 << 30) + 3), True, id="conservative"),
    ],
)
def test_self_overlaps(shape, strides, overlaps):
    assert _layout.self_overlaps(shape, strides) == overlaps


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(-2, 12)), max_size=14))
def test_union_groups_is_the_quadratic_definition(spans):
    ranges = [(start, start + length) for start, length in spans]
    group_of = list(range(len(ranges)))
    for _ in ranges:
        for (i, a), (j, b) in itertools.product(enumerate(ranges), repeat=2):
            if max(a[0], b[0]) < min(a[1], b[1]):
                group_of[i] = group_of[j] = min(group_of[i], group_of[j])
    by_group = {}
    for i, (start, stop) in enumerate(ranges):
        if start < stop:
            by_group.setdefault(group_of[i], []).append(i)
    expected = [
        Group(tuple(members), min(ranges[i][0] for i in members), max(ranges[i][1] for i in members))
        for members in by_group.values()
    ]
    assert _layout.union_groups(ranges) == sorted(expected, key=lambda group: group.start)


@pytest.mark.parametrize(
    ("ranges", "groups"),
    [
        pytest.param([], [], id="none"),
        pytest.param([(3, 3), (5, 2)], [], id="empty-ranges"),
        pytest.param([(0, 4), (4, 8)], [Group((0,), 0, 4), Group((1,), 4, 8)], id="touching-is-apart"),
        pytest.param([(4, 9), (0, 5), (8, 10)], [Group((0, 1, 2), 0, 10)], id="chained"),
        pytest.param([(0, 10), (2, 3), (9, 12)], [Group((0, 1, 2), 0, 12)], id="nested"),
        pytest.param([(2, 5), (2, 5)], [Group((0, 1), 2, 5)], id="twice"),
    ],
)
def test_union_groups(ranges, groups):
    assert _layout.union_groups(ranges) == groups


@settings(max_examples=300)
@given(SHAPES, st.integers(1, 140))
def test_blocks_tile_the_box(shape, limit):
    blocks = list(_layout.blocks(shape, limit))
    box = np.arange(math.prod(shape)).reshape(shape)
    position = 0
    for block in blocks:
        assert block.offset == position
        assert 1 <= block.count <= limit
        part = _layout.select(box, block)
        assert np.shares_memory(part, box)
        np.testing.assert_array_equal(part.ravel(), np.arange(position, position + block.count))
        assert torch.equal(_layout.select(torch.from_numpy(box), block), torch.from_numpy(part))
        position += block.count
    assert position == math.prod(shape)


@settings(max_examples=300)
@given(SHAPES, st.integers(1, 140))
def test_blocks_are_even_and_no_deeper_than_needed(shape, limit):
    blocks = list(_layout.blocks(shape, limit))
    if not shape or not blocks:
        return
    (depth,) = {len(block.index) for block in blocks}
    assert depth == 0 or math.prod(shape[depth:]) > limit
    rows = {block.stop - block.start for block in blocks}
    assert max(rows) - min(rows) <= 1
    whole = math.prod(shape[depth + 1 :])
    per_index = sum(block.index == blocks[0].index for block in blocks)
    assert per_index == math.ceil(shape[depth] / (limit // whole))


@pytest.mark.parametrize(
    ("shape", "limit", "blocks"),
    [
        pytest.param((), 1, [Block((), 0, 1, 0, 1)], id="0d"),
        pytest.param((3, 0), 1, [], id="empty"),
        pytest.param((0,), 0, [], id="empty-needs-no-limit"),
        pytest.param((2, 3), 6, [Block((), 0, 2, 0, 6)], id="whole"),
        pytest.param(
            (10, 2),
            8,
            [Block((), 0, 3, 0, 6), Block((), 3, 6, 6, 6), Block((), 6, 10, 12, 8)],
            id="even-rows",
        ),
        pytest.param(
            (2, 3),
            2,
            [Block((i,), *rows, 3 * i + rows[0], rows[1] - rows[0]) for i in (0, 1) for rows in ((0, 1), (1, 3))],
            id="deeper",
        ),
    ],
)
def test_blocks(shape, limit, blocks):
    assert list(_layout.blocks(shape, limit)) == blocks


def test_blocks_needs_a_limit():
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        list(_layout.blocks((2,), 0))


def test_select_of_a_0d_array_can_be_written_to():
    box = np.zeros(())
    (block,) = _layout.blocks((), 8)
    _layout.select(box, block)[...] = 3
    assert box == 3
