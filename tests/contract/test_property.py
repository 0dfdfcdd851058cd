"""Laws on random input: any strided views of any storages, with any options, under any limits, are the right bytes.

The ring's chunks are drawn, too: with a few hundred bytes each, every transfer goes in pieces, chunks are used again
and again, and there is no room most of the time. The same holds for the device's temporaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hostward as hw
from device.frame import Device
from hostward import _call, _single
from support.values import MOVABLE, as_array, assert_same, assert_same_values, numpy_dtype
from support.ways import small_ring, small_temporaries

STORAGE_NBYTES = 768
COMPLEX = [torch.complex64, torch.complex128]
WIDER = {torch.float16: torch.float32, torch.float32: torch.float64, torch.bfloat16: torch.float32}
NARROWER = {torch.float32: torch.float16, torch.float64: torch.float32}
WIDER[torch.complex64] = torch.complex128
NARROWER[torch.complex128] = torch.complex64


@dataclass(frozen=True)
class Leaf:
    """A view of storage number `storage`, to be made on any device; shown in full when an example fails."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    flip: str = ""

    def of(self, storages: list[torch.Tensor]) -> torch.Tensor:
        data = storages[self.storage].view(self.dtype)
        x = data.as_strided(self.shape, self.strides, self.offset)
        if self.flip == "conj" and x.is_complex():
            return x.conj()
        if self.flip == "neg" and (x.is_floating_point() or x.is_complex()) and x.dtype.itemsize > 1:
            return torch._neg_view(x)
        return x

    def looks(self, storages: list[torch.Tensor]) -> Leaf:
        """Return the leaf without a flip that its dtype does not have: equal looks make equal leaves."""
        x = self.of(storages)
        return replace(self, flip=self.flip if x.is_conj() or x.is_neg() else "")


@st.composite
def leaves(draw: Any, dtypes: list[torch.dtype] = MOVABLE) -> Leaf:
    dtype = draw(st.sampled_from(dtypes))
    room = STORAGE_NBYTES // dtype.itemsize
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7]), max_size=4)))
    strides, used = [], 1
    if draw(st.sampled_from([False, False, True])):  # a long run, which others lie in
        shape, strides = (draw(st.integers(room // 2, room)),), [1]
    elif draw(st.booleans()):  # dense, or dense with gaps, in some order of the dims
        order = draw(st.permutations(range(len(shape))))
        by_dim = {}
        for dim in order:
            by_dim[dim] = used
            used *= max(1, shape[dim]) + draw(st.sampled_from([0, 0, 0, 1]))
        strides = [by_dim[dim] for dim in range(len(shape))]
    else:
        strides = [draw(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 13])) for _ in shape]
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    while extent > room:  # too long: the longest dim gives way
        dim = max(range(len(shape)), key=lambda d: (shape[d] - 1) * strides[d])
        strides[dim] //= 2
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    offset = draw(st.integers(0, room - extent))
    flip = draw(st.sampled_from(["", "", "", "conj", "neg"]))
    return Leaf(draw(st.integers(0, 1)), dtype, shape, tuple(strides), offset, flip)


limits = st.fixed_dictionaries(
    {
        "ring": st.sampled_from([None, ((256, 2), (1024, 2)), ((64, 1), (128, 1)), ((192, 1), (320, 3))]),
        "temporaries": st.sampled_from([None, (64, 64), (256, 64), (1 << 20, 128)]),
    }
)


def under(limit: dict[str, Any]) -> ExitStack:
    stack = ExitStack()
    if limit["ring"]:
        stack.enter_context(small_ring(*limit["ring"]))
    if limit["temporaries"]:
        stack.enter_context(small_temporaries(*limit["temporaries"]))
    return stack


def storages(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(0, 256, (2, STORAGE_NBYTES), dtype=torch.uint8, generator=generator)
    return [row.clone() for row in random]


def bools_are_bools(data: list[torch.Tensor], drawn: list[Leaf]) -> None:
    """A bool has two values; a storage that is seen as bools holds nothing else."""
    for leaf in drawn:
        if leaf.dtype is torch.bool:
            data[leaf.storage] &= 1


def same(got: np.ndarray, want: np.ndarray, *, exact: bool) -> None:
    plain = np.ascontiguousarray(got).reshape(got.shape)
    (assert_same if exact else assert_same_values)(plain, want)


@contextmanager
def as_told(device: Device, told: Any) -> Iterator[None]:
    """See that what happens in here takes the bytes that were told, device by device."""
    if not device.has("memory"):
        yield
        return
    before = [device.memory(index).allocated_bytes for index in range(device.count)]
    device.reset_counters()
    yield
    counters = [device.counters(index) for index in range(device.count)]
    assert sum(each.d2h_bytes for each in counters) == told.link_nbytes
    assert sum(each.d2h_blocking + each.empty_copies + each.device_syncs for each in counters) == 0
    for index, allocated in enumerate(before):
        temporary = told.admitted.temporary(f"{device.type}:{index}")
        assert device.memory(index).peak_bytes - allocated == temporary


# ---- without a cast


@settings(max_examples=250)
@given(
    drawn=st.lists(leaves(), min_size=1, max_size=4),
    again=st.booleans(),
    order=st.sampled_from("CK"),
    memory=st.sampled_from(["auto", "pinned"]),
    limit=limits,
    spread=st.booleans(),
    seed=st.integers(0, 9),
)
@example([Leaf(0, torch.int8, (3,), (0,), 4)], False, "K", "auto", {"ring": None, "temporaries": None}, False, 0)
@example(
    [Leaf(0, torch.int8, (33,), (1,), 7), Leaf(0, torch.float64, (4,), (1,), 1)],
    True,
    "C",
    "pinned",
    {"ring": ((64, 1), (128, 1)), "temporaries": (64, 64)},
    True,
    1,
)
def test_any_views_are_the_references_bytes(
    device: Device,
    drawn: list[Leaf],
    again: bool,
    order: str,
    memory: str,
    limit: dict[str, Any],
    spread: bool,
    seed: int,
) -> None:
    on_cpu = storages(seed)
    bools_are_bools(on_cpu, drawn)
    drawn = [*drawn, drawn[0]] if again else drawn
    with device.clean(), under(limit):
        on_device = [device.tensor(data, i if spread and device.count > 1 else 0) for i, data in enumerate(on_cpu)]
        tree = [leaf.of(on_device) for leaf in drawn]
        want = [as_array(leaf.of(on_cpu)) for leaf in drawn]
        told = hw.explain(tree, order=order, memory=memory)
        with as_told(device, told):
            got = hw.to_numpy(tree, order=order, memory=memory)
        for a, b, leaf in zip(got, want, drawn, strict=True):
            same(a, b, exact=not leaf.flip)
        assert not again or got[0] is got[-1]
        for (a, one), (b, other) in combinations(zip(got, drawn, strict=True), 2):
            tie = one.looks(on_cpu) == other.looks(on_cpu)
            assert a is b if tie else not np.shares_memory(a, b)
        for a, leaf in zip(got, drawn, strict=True):
            repeats = order == "K" and any(n > 1 and s == 0 for n, s in zip(leaf.shape, leaf.strides, strict=True))
            assert a.flags.writeable != (repeats and a.size > 0)
            assert a.flags.c_contiguous or order == "K"


@settings(max_examples=120)
@given(
    drawn=st.lists(leaves(), min_size=1, max_size=3),
    limit=limits,
    seed=st.integers(0, 9),
    step=st.sampled_from([1, 2, -1]),
)
def test_any_views_go_into_out(device: Device, drawn: list[Leaf], limit: dict[str, Any], seed: int, step: int) -> None:
    on_cpu = storages(seed)
    bools_are_bools(on_cpu, drawn)
    with device.clean(), under(limit):
        on_device = [device.tensor(data) for data in on_cpu]
        out = []
        for leaf in drawn:
            shape = (*leaf.shape[:-1], leaf.shape[-1] * abs(step)) if leaf.shape else ()
            array = np.empty(shape, numpy_dtype(leaf.dtype))
            out.append(array[..., ::step] if leaf.shape else array)
        got = hw.to_numpy([leaf.of(on_device) for leaf in drawn], out=out)
        for a, b, leaf in zip(got, out, drawn, strict=True):
            assert a is b
            same(a, as_array(leaf.of(on_cpu)), exact=not leaf.flip)


# ---- with casts


@settings(max_examples=150)
@given(
    drawn=st.lists(leaves([*WIDER, *NARROWER, torch.int32]), min_size=1, max_size=3),
    casts=st.sampled_from([WIDER, NARROWER]),
    order=st.sampled_from("CK"),
    memory=st.sampled_from(["auto", "pinned"]),
    limit=limits,
    seed=st.integers(0, 9),
)
def test_any_casts_are_torchs(
    device: Device,
    drawn: list[Leaf],
    casts: dict[torch.dtype, torch.dtype],
    order: str,
    memory: str,
    limit: dict[str, Any],
    seed: int,
) -> None:
    on_cpu = storages(seed)
    with device.clean(), under(limit):
        on_device = [device.tensor(data) for data in on_cpu]
        tree = [leaf.of(on_device) for leaf in drawn]
        told = hw.explain(tree, dtype=casts, order=order, memory=memory)
        with as_told(device, told):
            got = hw.to_numpy(tree, dtype=casts, order=order, memory=memory)
        for a, leaf in zip(got, drawn, strict=True):
            x = leaf.of(on_cpu)
            same(a, as_array(x.to(casts.get(leaf.dtype, leaf.dtype))), exact=False)


# ---- host leaves


@settings(max_examples=150)
@given(
    drawn=st.lists(leaves(), min_size=1, max_size=3),
    order=st.sampled_from("CK"),
    copy=st.sampled_from([True, None]),
    seed=st.integers(0, 9),
)
def test_any_cpu_views_are_the_references_bytes(drawn: list[Leaf], order: str, copy: bool | None, seed: int) -> None:
    on_cpu = storages(seed)
    bools_are_bools(on_cpu, drawn)
    tree = [leaf.of(on_cpu) for leaf in drawn]
    got = hw.to_numpy(tree, order=order, copy=copy)
    for a, x, leaf in zip(got, tree, drawn, strict=True):
        same(a, as_array(x), exact=not leaf.flip)
        own = on_cpu[leaf.storage].numpy()
        if copy:
            assert not np.shares_memory(a, own)
        elif a.size and not x.is_conj() and not x.is_neg() and (order == "K" or x.is_contiguous()):
            assert np.shares_memory(a, own)


# ---- the shortcut is no other algorithm


@settings(max_examples=120)
@given(leaf=leaves(), memory=st.sampled_from(["auto", "pinned"]), seeds=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_the_shortcut_equals_the_long_way(device: Device, leaf: Leaf, memory: str, seeds: tuple[int, int]) -> None:
    """The second call may take it; so may the call on another storage, at another offset, with the same look."""
    first, second = (storages(seed) for seed in seeds)
    bools_are_bools(first, [leaf])
    bools_are_bools(second, [leaf])
    with device.clean(), pytest.MonkeyPatch.context() as patch:
        known: dict[object, Any] = {}
        patch.setattr(_single, "_known", known)
        one, other = (leaf.of([device.tensor(data) for data in on_cpu]) for on_cpu in (first, second))
        moved = torch.empty_like(one) if one.dim() == 0 else other.clone()
        calls = [partial(hw.to_numpy, x, memory=memory) for x in (one, one, other)]
        long, short, another = (call() for call in calls)
        same(long, as_array(leaf.of(first)), exact=not leaf.flip)
        same(short, as_array(leaf.of(first)), exact=not leaf.flip)
        same(another, as_array(leaf.of(second)), exact=not leaf.flip)
        del moved
        assert bool(known) == (_single.shortcut(one, memory) is not None)
        in_a_tree = hw.to_numpy([one, 0], memory=memory)[0]
        assert in_a_tree.tobytes() == short.tobytes()
        assert (in_a_tree.dtype, in_a_tree.shape, in_a_tree.strides) == (short.dtype, short.shape, short.strides)
        assert not np.shares_memory(long, short)


def test_the_shortcut_is_taken(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the law above says nothing."""
    monkeypatch.setattr(_single, "_known", {})
    x = device.tensor(torch.arange(12.0).reshape(3, 4))
    assert _single.shortcut(x, "auto") is None
    hw.to_numpy(x)
    assert _single.shortcut(x, "auto") is not None
    for other in (x.t(), x[:2], x.int(), x.reshape(4, 3), torch._neg_view(x), torch.arange(12.0).reshape(3, 4)):
        assert _single.shortcut(other, "auto") is None
    assert _single.shortcut(x, "pinned") is None
    monkeypatch.setattr("hostward._call.prepare", None)
    monkeypatch.setattr("hostward._calls.prepare", None)
    assert hw.to_numpy(x).tolist() == x.tolist()
    for options in ({"order": "K"}, {"dtype": "float32"}, {"copy": None}):
        with pytest.raises(TypeError):
            hw.to_numpy(x, **options)


# ---- the laws can fail


def test_a_plan_under_too_short_a_key_is_noticed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 53: a plan of other offsets would read other elements."""
    data = torch.arange(64, dtype=torch.uint8)
    x = device.tensor(data)
    plans: dict[Any, Any] = {}
    make_plan = _call.make_plan

    def too_short(sources: Any, options: Any, capabilities: Any) -> Any:
        key = (options, tuple((source.dtype, source.shape, source.strides) for source in sources))
        return plans.setdefault(key, make_plan(sources, options, capabilities))

    monkeypatch.setattr(_call, "make_plan", too_short)
    hw.to_numpy([x[:20], x[10:30]])
    got = hw.to_numpy([x[:20], x[15:35]])
    with pytest.raises(AssertionError):
        assert_same(got[1], as_array(data[15:35]))
