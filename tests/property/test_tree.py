"""Random trees, shared containers among them, against a recursive definition and against torch's order."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree

from hostward._tree import flatten, same_structure
from hostward.errors import TreeError

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Plain:
    x: object
    y: object


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    y: object


class MyDict(dict):
    pass


class MyList(list):
    pass


KEYS = st.one_of(st.text(max_size=3), st.integers(-3, 3), st.booleans(), st.tuples(st.integers(0, 1)), st.none())
LEAVES = st.one_of(st.none(), st.integers(), st.text(max_size=2), st.sampled_from([1.5, b"x", range(2)]))


def grow(children, *more):
    pairs = st.dictionaries(KEYS, children, max_size=4)
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        pairs,
        pairs.map(OrderedDict),
        pairs.map(lambda items: defaultdict(int, items)),
        st.lists(children, max_size=4).map(lambda items: deque(items, 4)),
        st.builds(Point, children, children),
        *(kind(children) for kind in more),
    )


OURS = (
    lambda children: st.builds(Plain, children, children),
    lambda children: st.builds(Frozen, children, children),
    lambda children: st.dictionaries(KEYS, children, max_size=3).map(MyDict),
    lambda children: st.dictionaries(KEYS, children, max_size=3).map(UserDict),
    lambda children: st.lists(children, max_size=3).map(MyList),
    lambda children: st.lists(children, max_size=3).map(UserList),
)
TREES = st.recursive(LEAVES, lambda children: grow(children, *OURS), max_leaves=20)
TORCH_TREES = st.recursive(LEAVES, grow, max_leaves=20)


@st.composite
def graphs(draw):
    """Trees whose containers stand in several places: each new one is made of those before it."""
    pool = [draw(LEAVES)]
    for _ in range(draw(st.integers(1, 8))):
        parts = draw(st.lists(st.sampled_from(pool), max_size=4))
        kind = draw(st.sampled_from([list, tuple, lambda p: dict(enumerate(p)), MyList, UserList]))
        pool.append(kind(parts))
    return pool[-1]


def children_of(tree):
    """The children as (piece of path, child), or None for a leaf: the definition."""
    if isinstance(tree, dict | UserDict):
        return [(f"[{key!r}]", child) for key, child in tree.items()]
    if isinstance(tree, Point | Plain | Frozen):
        return [(".x", tree.x), (".y", tree.y)]
    if isinstance(tree, list | tuple | deque | UserList):
        return [(f"[{i}]", child) for i, child in enumerate(tree)]
    return None


def walk(tree, path="", seen=None):
    """Paths and leaves, a shared container once."""
    children = children_of(tree)
    if children is None:
        yield path, tree
    elif id(tree) not in seen:
        seen.add(id(tree))
        for entry, child in children:
            yield from walk(child, path + entry, seen)


def equal(a, b):
    """Whether two trees have equal leaves under equal keys in containers of the same exact types."""
    one, other = children_of(a), children_of(b)
    if type(a) is not type(b) or (one is None) != (other is None):
        return False
    if one is None:
        return a == b
    if isinstance(a, dict | UserDict) and list(a) != list(b):
        return False
    return len(one) == len(other) and all(equal(x, y) for (_, x), (_, y) in zip(one, other, strict=True))


def pattern(tree, numbers):
    """The tree's containers as numbers in order of first appearance: what is shared with what."""
    children = children_of(tree)
    if children is None or (isinstance(tree, tuple) and not tree):
        return None
    number = numbers.setdefault(id(tree), len(numbers))
    return number, [pattern(child, numbers) for _, child in children]


@given(st.one_of(TREES, graphs()))
def test_leaves_and_paths_are_those_of_the_definition(tree):
    flat = flatten(tree)
    expected = list(walk(tree, seen=set()))
    assert [(flat.path(i), leaf) for i, leaf in enumerate(flat.leaves)] == expected
    assert flat.bare == (children_of(tree) is None)


@given(st.one_of(TREES, graphs()))
def test_rebuilding_gives_an_equal_tree_of_new_containers(tree):
    flat = flatten(tree)
    new = flat.rebuild(flat.leaves)
    assert equal(new, tree)
    assert pattern(new, {}) == pattern(tree, {})
    same_structure(flat, flatten(new))
    old, kept = {}, {}
    pattern(tree, old), pattern(new, kept)
    assert not set(old) & set(kept)


@given(st.one_of(TREES, graphs()))
def test_new_leaves_land_on_the_paths(tree):
    flat = flatten(tree)
    new = flat.rebuild([("leaf", i) for i in range(len(flat.leaves))])
    for i in range(len(flat.leaves)):
        assert eval(f"tree{flat.path(i)}", {"tree": new}) == ("leaf", i)


@given(TORCH_TREES)
def test_the_order_is_torchs(tree):
    """No container occurs twice in these trees, but for the empty tuple, which has no leaves."""
    assert flatten(tree).leaves == _pytree.tree_leaves(tree)


@given(st.one_of(TREES, graphs()), st.data())
def test_same_structure_finds_the_one_place(tree, data):
    flat = flatten(tree)
    if not flat.leaves:
        return
    leaves = list(flat.leaves)
    i = data.draw(st.integers(0, len(leaves) - 1))
    leaves[i] = [leaves[i]]
    with pytest.raises(TreeError) as caught:
        same_structure(flat, flatten(flat.rebuild(leaves)))
    assert (caught.value.path, caught.value.got) == (flat.path(i), "list of 1")


@settings(max_examples=300)
@given(TREES, TREES)
def test_same_structure_is_the_definition(a, b):
    one, other = flatten(a), flatten(b)
    numbered = one.rebuild(range(len(one.leaves)))
    same = len(one.leaves) == len(other.leaves) and equal(numbered, other.rebuild(range(len(other.leaves))))
    with nullcontext() if same else pytest.raises(TreeError):
        same_structure(one, other)
