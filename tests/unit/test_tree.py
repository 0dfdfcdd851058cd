"""Which types are containers, how they come back, what paths say, and what is refused."""

from __future__ import annotations

import collections
import dataclasses
import enum
import os
import sys
import time
import typing
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple

import numpy as np
import optree
import pytest
import torch
from torch.utils import _pytree as torch_pytree

from hostward._tree import flatten, same_structure
from hostward.errors import TreeError


class Leaf:
    """A leaf that equals itself only."""

    def __init__(self, name="x"):
        self.name = name

    def __repr__(self):
        return f"<{self.name}>"


A, B, C, D = (Leaf(name) for name in "abcd")
NEW = {A: Leaf("new a"), B: Leaf("new b"), C: Leaf("new c"), D: Leaf("new d")}


class NoInit:
    def __init__(self, *args, **kwargs):
        raise AssertionError("__init__ was called")

    def __setattr__(self, name, value):
        raise AssertionError("__setattr__ was called")

    def __setitem__(self, key, value):
        raise AssertionError("__setitem__ was called")


class StrictDict(NoInit, dict):
    pass


class StrictOrdered(NoInit, OrderedDict):
    pass


class StrictList(NoInit, list):
    def append(self, value):
        raise AssertionError


class StrictTuple(NoInit, tuple):
    def __new__(cls, *args):
        raise AssertionError("__new__ was called")


class SlotDict(dict):
    __slots__ = ("__private", "note", "unset")

    def __init__(self, **items):
        super().__init__(items)
        self.note, self.__private = "kept", "too"

    def private(self):
        return self.__private


class AttrDict(dict):
    """The pattern of many configuration libraries."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "__dict__", self)

    __setattr__ = dict.__setitem__


class BothDict(dict):
    """Items that are attributes, too."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__.update(items)
        self.note = "kept"


Point = namedtuple("Point", "x y")


class Sub(Point):
    """A named tuple with attributes."""


class Typed(typing.NamedTuple):
    first: object
    second: object = None


@dataclasses.dataclass
class Plain:
    a: object
    b: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: object
    b: object = None


@dataclasses.dataclass(slots=True, frozen=True)
class Slotted:
    a: object
    b: object = None


@dataclasses.dataclass
class Partial:
    a: object
    later: object = dataclasses.field(init=False)
    kind: typing.ClassVar[str] = "class"
    given: dataclasses.InitVar[int] = 0

    def __post_init__(self, given):
        self.extra = given
        self.also_a = self.a


@dataclasses.dataclass
class Output(OrderedDict):
    """A record and a dict of its fields in one, as in many model libraries."""

    logits: object = None
    loss: object = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def __setitem__(self, key, value):
        raise AssertionError


@dataclasses.dataclass
class Failure(Exception):
    value: object


class Batch(UserDict):
    def __init__(self, data, note):
        super().__init__(data)
        self.note = note


class Colour(tuple, enum.Enum):
    RED = (1, 0)


@dataclasses.dataclass
class ArrayLike:
    data: object

    def __array__(self, dtype=None, copy=None):
        return np.zeros(1)


def made(cls, base, *args):
    """An instance, made without its __init__."""
    new = base.__new__(cls, *args)
    return new


def strict_dict():
    new = made(StrictDict, dict)
    dict.update(new, {"x": A, 1: B})
    new.__dict__["note"] = "kept"
    return new


def strict_ordered():
    new = made(StrictOrdered, OrderedDict)
    for key, value in (("x", A), ("y", B)):
        OrderedDict.__setitem__(new, key, value)
    new.move_to_end("x")
    return new


def strict_list():
    new = made(StrictList, list)
    list.extend(new, [A, B])
    new.__dict__["note"] = "kept"
    return new


def strict_tuple():
    new = made(StrictTuple, tuple, (A, B))
    new.__dict__["note"] = "kept"
    return new


def sub():
    new = Sub(A, B)
    new.note = "kept"
    return new


def partial():
    new = Partial(A, given=7)
    return new


CONTAINERS = [
    # tree, paths in order of the leaves
    pytest.param({"x": A, 1: B, (2, "z"): C}, ["['x']", "[1]", "[(2, 'z')]"], id="dict"),
    pytest.param({"z": A, "a": B}, ["['z']", "['a']"], id="dict-not-sorted"),
    pytest.param([A, B], ["[0]", "[1]"], id="list"),
    pytest.param((A, B), ["[0]", "[1]"], id="tuple"),
    pytest.param({"a": [{"b": A}, (B,)], "c": C}, ["['a'][0]['b']", "['a'][1][0]", "['c']"], id="nested"),
    pytest.param([A, [B], C, [[D]]], ["[0]", "[1][0]", "[2]", "[3][0][0]"], id="mixed"),
    pytest.param({}, [], id="empty-dict"),
    pytest.param([(), {}, []], [], id="empty-nested"),
    pytest.param(OrderedDict(z=A, a=B), ["['z']", "['a']"], id="OrderedDict"),
    pytest.param(defaultdict(list, z=A), ["['z']"], id="defaultdict"),
    pytest.param(Counter({"x": 3, "y": 2}), ["['x']", "['y']"], id="Counter"),
    pytest.param(deque([A, B], maxlen=3), ["[0]", "[1]"], id="deque"),
    pytest.param(UserDict(x=A, y=[B]), ["['x']", "['y'][0]"], id="UserDict"),
    pytest.param(UserList([A, B]), ["[0]", "[1]"], id="UserList"),
    pytest.param(Batch({"x": A}, "kept"), ["['x']"], id="UserDict-subclass"),
    pytest.param(Point(A, B), [".x", ".y"], id="namedtuple"),
    pytest.param(sub(), [".x", ".y"], id="namedtuple-subclass"),
    pytest.param(Typed(A), [".first", ".second"], id="NamedTuple"),
    pytest.param(Plain(A, [B]), [".a", ".b[0]"], id="dataclass"),
    pytest.param(Frozen(A, B), [".a", ".b"], id="dataclass-frozen"),
    pytest.param(Slotted(A, B), [".a", ".b"], id="dataclass-slots"),
    pytest.param(partial(), [".a"], id="dataclass-partly-set"),
    pytest.param(Failure(A), [".value"], id="dataclass-exception"),
    pytest.param(Output(A, B), ["['logits']", "['loss']", ".logits", ".loss"], id="dataclass-and-dict"),
    pytest.param(Output(A), ["['logits']", ".logits", ".loss"], id="dataclass-and-dict-partly"),
    pytest.param(strict_dict(), ["['x']", "[1]"], id="dict-subclass"),
    pytest.param(strict_ordered(), ["['y']", "['x']"], id="OrderedDict-subclass"),
    pytest.param(strict_list(), ["[0]", "[1]"], id="list-subclass"),
    pytest.param(strict_tuple(), ["[0]", "[1]"], id="tuple-subclass"),
    pytest.param(SlotDict(x=A), ["['x']"], id="dict-subclass-slots"),
    pytest.param(AttrDict(x=A), ["['x']"], id="dict-that-is-its-own-attributes"),
    pytest.param(BothDict(x=A, y=[B]), ["['x']", "['y'][0]"], id="dict-with-items-as-attributes"),
    pytest.param(
        time.struct_time(range(9)), [f".{name}" for name in time.struct_time.__match_args__], id="struct-sequence"
    ),
    pytest.param(os.terminal_size((80, 25)), [".columns", ".lines"], id="terminal_size"),
    pytest.param(os.stat(os.curdir), [f"[{i}]" for i in range(10)], id="stat_result"),
]


def swap(tree):
    """What `rebuild` should give, for the built-in kinds: an independent, slow and recursive way."""
    if isinstance(tree, Leaf):
        return NEW[tree]
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, swap(value)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(map(swap, tree))
    return tree


class TestContainers:
    @pytest.mark.parametrize(("tree", "paths"), CONTAINERS)
    def test_paths_lead_to_the_leaves(self, tree, paths):
        flat = flatten(tree)
        assert [flat.path(i) for i in range(len(flat.leaves))] == paths
        assert not flat.bare
        for path, leaf in zip(paths, flat.leaves, strict=True):
            assert eval(f"tree{path}", {"tree": tree}) is leaf

    @pytest.mark.parametrize(("tree", "paths"), CONTAINERS)
    def test_comes_back_with_other_leaves(self, tree, paths):
        flat = flatten(tree)
        new = flat.rebuild([NEW.get(leaf, leaf) if isinstance(leaf, Leaf) else leaf for leaf in flat.leaves])
        assert type(new) is type(tree)
        assert new is not tree or tree == ()
        for path, leaf in zip(paths, flat.leaves, strict=True):
            there = eval(f"tree{path}", {"tree": new})
            assert there is (NEW[leaf] if isinstance(leaf, Leaf) else leaf)
        if type(tree) in (dict, list, tuple, OrderedDict):
            assert new == swap(tree)

    @pytest.mark.parametrize(("tree", "paths"), CONTAINERS)
    def test_two_rebuilds_share_no_container(self, tree, paths):
        flat = flatten(tree)
        first, second = flat.rebuild(flat.leaves), flat.rebuild(flat.leaves)
        assert not containers_in(first) & containers_in(second)
        assert not containers_in(first) & containers_in(tree)

    def test_attributes_are_kept(self):
        def again(tree):
            flat = flatten(tree)
            return flat.rebuild([NEW.get(leaf, leaf) for leaf in flat.leaves])

        assert again(strict_dict()).note == again(strict_list()).note == again(strict_tuple()).note == "kept"
        assert again(sub()).note == again(Batch({"x": A}, "kept")).note == "kept"
        slots = again(SlotDict(x=A))
        assert slots.note == "kept" and slots.private() == "too" and not hasattr(slots, "unset")
        assert again(defaultdict(list, z=A)).default_factory is list
        assert again(deque([A], maxlen=3)).maxlen == 3
        found = again(partial())
        assert (found.extra, found.also_a, hasattr(found, "later")) == (7, NEW[A], False)

    def test_attributes_that_are_items_follow_them(self):
        flat = flatten(BothDict(x=A, y=[B]))
        new = flat.rebuild([C, D])
        assert new.x is C and new.y is new["y"] and new.y == [D] and new.note == "kept"
        flat = flatten(AttrDict(x=A))
        new = flat.rebuild([B])
        assert new.x is B and vars(new) is new and list(new) == ["x"]
        slots = SlotDict(x=A)
        slots.note = A
        new = flatten(slots).rebuild([B])
        assert new.note is B

    def test_attributes_are_not_shared_with_the_original(self):
        tree = strict_dict()
        flat = flatten(tree)
        first, second = flat.rebuild(flat.leaves), flat.rebuild(flat.leaves)
        first.__dict__["note"] = "changed"
        assert tree.note == second.note == "kept"

    def test_fields_outside_a_struct_sequence_are_kept(self):
        stat = os.stat(os.curdir)
        flat = flatten(stat)
        new = flat.rebuild(flat.leaves)
        assert new.st_mtime_ns == stat.st_mtime_ns and new == stat

    def test_order_after_move_to_end(self):
        tree = OrderedDict(a=A, b=B)
        tree.move_to_end("a")
        flat = flatten(tree)
        assert flat.leaves == [B, A] and list(flat.rebuild([C, D]).items()) == [("b", C), ("a", D)]


def containers_in(tree):
    """The ids of all mutable containers that attribute and item access reach."""
    found, todo = set(), [tree]
    while todo:
        node = todo.pop()
        if id(node) in found or isinstance(node, Leaf | str | int | float | None):
            continue
        if not isinstance(node, tuple):
            found.add(id(node))
        todo += node.values() if isinstance(node, dict | UserDict) else []
        todo += node if isinstance(node, list | tuple | deque | UserList) else []
        if isinstance(node, UserDict | UserList):
            todo.append(node.data)
        if dataclasses.is_dataclass(node):
            todo += [getattr(node, f.name) for f in dataclasses.fields(node) if hasattr(node, f.name)]
    return found


class TestLeaves:
    @pytest.mark.parametrize(
        "value",
        [
            pytest.param(None, id="None"),
            pytest.param(3, id="int"),
            pytest.param("text", id="str"),
            pytest.param(b"text", id="bytes"),
            pytest.param({1, 2}, id="set"),
            pytest.param(range(3), id="range"),
            pytest.param(slice(1, 2), id="slice"),
            pytest.param(np.zeros(3), id="ndarray"),
            pytest.param(np.float32(1), id="numpy-scalar"),
            pytest.param(np.zeros(2, "f4,i4").view(np.recarray), id="recarray"),
            pytest.param(torch.zeros(3), id="tensor"),
            pytest.param(torch.nn.Parameter(torch.zeros(3)), id="parameter"),
            pytest.param(torch.Size([1, 2]), id="torch.Size"),
            pytest.param(torch.float32, id="torch.dtype"),
            pytest.param(Colour.RED, id="enum-of-tuples"),
            pytest.param(sys.version_info, id="sys.version_info"),
            pytest.param(Plain, id="dataclass-itself"),
            pytest.param(list[int], id="generic-alias"),
            pytest.param(ArrayLike(A), id="dataclass-that-is-an-array"),
            pytest.param(Leaf(), id="object"),
        ],
    )
    def test_passes_as_it_is(self, value):
        bare = flatten(value)
        assert bare.bare and bare.leaves == [value] and bare.path(0) == "" and bare.rebuild([A]) is A
        flat = flatten([value])
        assert not flat.bare and flat.leaves[0] is value and flat.path(0) == "[0]"
        assert flat.rebuild(flat.leaves)[0] is value


class TestTorchTypes:
    def test_return_types(self):
        result = torch.max(torch.tensor([[1.0, 3.0], [4.0, 2.0]]), 0)
        flat = flatten({"best": result})
        assert [flat.path(i) for i in range(2)] == ["['best'].values", "['best'].indices"]
        new = flat.rebuild([A, B])["best"]
        assert type(new) is type(result) and new.values is A and new.indices is B

    def test_state_dict_keeps_its_metadata(self):
        state = torch.nn.Linear(2, 1).state_dict()
        flat = flatten(state)
        new = flat.rebuild([A, B])
        assert new == OrderedDict(weight=A, bias=B) and new._metadata == state._metadata

    def test_packed_sequence(self):
        packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(2)])
        flat = flatten(packed)
        assert flat.path(0) == ".data"
        assert type(flat.rebuild(flat.leaves)) is type(packed)


class Box:
    def __init__(self, **parts):
        self.parts = parts


class Strict:
    def __init__(self, error):
        self.error = error

    @staticmethod
    def refuse(children, error):
        raise error


@pytest.fixture
def torch_registered():
    torch_pytree.register_pytree_node(
        Box,
        lambda box: (list(box.parts.values()), list(box.parts)),
        lambda parts, keys: Box(**dict(zip(keys, parts, strict=True))),
    )
    torch_pytree.register_pytree_node(Strict, lambda strict: ([], strict.error), Strict.refuse)
    yield
    for kind in (Box, Strict):
        del torch_pytree.SUPPORTED_NODES[kind]
        if torch_pytree._cxx_pytree_imported:  # then torch has registered it there as well
            optree.unregister_pytree_node(kind, namespace="torch")


def flatten_box(box):
    return list(box.parts.values()), list(box.parts), list(box.parts)


@pytest.fixture(params=["a-namespace", "everywhere"])
def optree_registered(request):
    everywhere = optree.registry.__dict__["__GLOBAL_NAMESPACE"]
    namespace = everywhere if request.param == "everywhere" else request.param
    optree.register_pytree_node(
        Box,
        flatten_box,
        lambda keys, parts: Box(**dict(zip(keys, parts, strict=True))),
        path_entry_type=optree.GetAttrEntry,
        namespace=namespace,
    )
    yield
    optree.unregister_pytree_node(Box, namespace=namespace)


class TestRegistrations:
    def test_unregistered_is_a_leaf(self):
        assert flatten(Box(a=A)).bare

    def test_torch(self, torch_registered):
        flat = flatten({"box": Box(a=A, b=[B])})
        assert flat.leaves == [A, B]
        assert [flat.path(i) for i in range(2)] == ["['box'][<child 0>]", "['box'][<child 1>][0]"]
        new = flat.rebuild([C, D])["box"]
        assert type(new) is Box and new.parts == {"a": C, "b": [D]}

    def test_optree(self, optree_registered):
        flat = flatten({"box": Box(a=A, b=[B])})
        assert [flat.path(i) for i in range(2)] == ["['box'].a", "['box'].b[0]"]
        new = flat.rebuild([C, D])["box"]
        assert type(new) is Box and new.parts == {"a": C, "b": [D]}

    def test_torch_names_its_children(self):
        @dataclasses.dataclass
        class Record:
            x: object
            y: object
            unused: object = None

        torch_pytree.register_dataclass(Record)
        flat = flatten([Record(A, B)])
        assert [flat.path(i) for i in range(2)] == ["[0].x", "[0].y"]
        assert flat.rebuild([C, D]) == [Record(C, D)]
        torch_pytree.SUPPORTED_NODES.pop(Record)

    def test_wins_over_our_own_handling(self):
        class Hidden(dict):
            """Registered without children: its tensors are nobody's business."""

        assert flatten(Hidden(a=A)).leaves == [A]
        torch_pytree.register_pytree_node(Hidden, lambda box: ([], dict(box)), lambda parts, items: Hidden(items))
        flat = flatten(Hidden(a=A))
        assert flat.leaves == [] and flat.rebuild([]) == {"a": A}
        torch_pytree.SUPPORTED_NODES.pop(Hidden)

    def test_does_not_change_the_built_in_containers(self):
        assert {dict, list, tuple, OrderedDict, defaultdict, deque} <= set(torch_pytree.SUPPORTED_NODES)
        assert optree.tree_leaves({"z": 1, "a": None}) == [1]  # it sorts keys and drops None
        assert flatten({"z": 1, "a": None}).leaves == [1, None]
        assert flatten(defaultdict(list, z=1, a=None)).leaves == [1, None]

    def test_constants_of_torch_pass(self):
        @dataclasses.dataclass(frozen=True)
        class Config:
            norm: str

        torch_pytree.register_constant(Config)
        config = Config("l2")
        flat = flatten([config])
        assert flat.leaves == [] and flat.rebuild([])[0] is config
        torch_pytree.SUPPORTED_NODES.pop(Config)

    def test_rebuilding_fails(self, torch_registered):
        original = ValueError("three wheels")
        flat = flatten({"boxes": [Box(a=A)], "first": Strict(original)})
        with pytest.raises(TreeError) as caught:
            flat.rebuild([B])
        assert caught.value.__cause__ is original
        assert str(caught.value) == (
            "cannot rebuild Strict (at tree['first'])\n"
            "  why: ValueError: three wheels\n"
            "  do: correct the functions that it is registered with (torch's pytree or optree), "
            "or pass its parts in a dict or a list"
        )

    def test_taking_apart_fails(self, torch_registered):
        box = Box(a=A)
        del box.parts
        with pytest.raises(TreeError) as caught:
            flatten([A, {"box": box}])
        assert isinstance(caught.value.__cause__, AttributeError)
        assert str(caught.value).startswith("cannot take apart Box (at tree[1]['box'])\n  why: AttributeError: ")

    def test_our_own_rebuilding_fails(self):
        class Key:
            alive = True

            def __hash__(self):
                if not self.alive:
                    raise ValueError("gone")
                return 1

            def __repr__(self):
                return "Key()"

        key = Key()
        flat = flatten([OrderedDict({key: A})])
        assert flat.path(0) == "[0][Key()]"
        key.alive = False
        with pytest.raises(TreeError) as caught:
            flat.rebuild([B])
        assert isinstance(caught.value.__cause__, ValueError)
        assert str(caught.value) == (
            "cannot rebuild OrderedDict (at tree[0])\n"
            "  why: ValueError: gone\n"
            "  do: register it with torch's pytree or optree, or pass its parts in a dict or a list"
        )


class TestSharing:
    def test_one_container_in_two_places_stays_one(self):
        shared = [A, {"x": B}]
        flat = flatten({"first": shared, "second": (shared, C)})
        assert flat.leaves == [A, B, C]
        assert flat.path(1) == "['first'][1]['x']"
        new = flat.rebuild([C, D, A])
        assert new["first"] is new["second"][0] and new["first"] == [C, {"x": D}]

    def test_the_path_is_that_of_the_first_place(self):
        shared = [A]
        flat = flatten([[B], shared, [[shared]], shared])
        assert [flat.path(i) for i in range(2)] == ["[0][0]", "[1][0]"]
        # The second place is complete before the first one's container is.
        flat = flatten([shared, [shared]])
        assert flat.path(0) == "[0][0]"

    def test_equal_is_not_the_same(self):
        flat = flatten([[A], [A]])
        new = flat.rebuild([B, C])
        assert new == [[B], [C]] and new[0] is not new[1]

    def test_containers_made_up_while_flattening_do_not_mix(self):
        class Fresh:
            pass

        torch_pytree.register_pytree_node(
            Fresh, lambda fresh: ([[A], [B]], None), lambda children, _: ("fresh", *children)
        )
        flat = flatten([Fresh() for _ in range(50)])
        assert len(flat.leaves) == 100
        assert flat.rebuild(range(100)) == [("fresh", [2 * i], [2 * i + 1]) for i in range(50)]
        torch_pytree.SUPPORTED_NODES.pop(Fresh)


def cyclic(kind):
    if kind == "itself":
        tree = []
        tree.append(tree)
    elif kind == "deeper":
        tree = {"a": [A]}
        tree["a"].append({"up": tree["a"]})
    elif kind == "root":
        tree = {"a": [A, {}]}
        tree["a"][1]["root"] = tree
    else:
        tree = Plain(A)
        tree.b = (tree,)
    return tree


class TestCycles:
    @pytest.mark.parametrize(
        ("kind", "path", "name", "known"),
        [
            pytest.param("itself", "[0]", "list", "", id="itself"),
            pytest.param("deeper", "['a'][1]['up']", "list", "['a']", id="deeper"),
            pytest.param("root", "['a'][1]['root']", "dict", "", id="root"),
            pytest.param("dataclass", ".b[0]", "Plain", "", id="dataclass"),
        ],
    )
    def test_is_refused(self, kind, path, name, known):
        with pytest.raises(TreeError) as caught:
            flatten(cyclic(kind))
        assert caught.value.path == path
        assert str(caught.value) == (
            f"the tree contains itself (at tree{path})\n"
            f"  why: this {name} is the one at tree{known}, so the result would never end\n"
            "  do: pass the parts that you need, or break the cycle"
        )


class TestDepthAndSize:
    def test_ten_thousand_levels(self):
        tree = A
        for level in range(10_000):
            tree = [tree] if level % 2 else {"down": tree}
        flat = flatten(tree)
        assert flat.leaves == [A]
        assert flat.path(0) == "[0]['down']" * 5_000
        new = flat.rebuild([B])
        same_structure(flat, flatten(new))
        for _ in range(5_000):
            new = new[0]["down"]
        assert new is B

    def test_ten_thousand_levels_of_a_cycle(self):
        tree = inner = []
        for _ in range(10_000):
            inner.append([])
            inner = inner[0]
        inner.append(tree)
        with pytest.raises(TreeError) as caught:
            flatten(tree)
        assert caught.value.path == "[0]" * 10_001

    def test_ten_thousand_leaves(self):
        tree = {f"layer.{i}.weight": Leaf() for i in range(10_000)}
        flat = flatten(tree)
        assert flat.path(9_999) == "['layer.9999.weight']"
        assert flat.rebuild(flat.leaves) == tree
        del tree["layer.0.weight"]
        assert len(flat.rebuild(flat.leaves)) == 10_000


class TestFlat:
    def test_is_a_snapshot(self):
        tree = {"a": [A, B], "c": SlotDict(x=C)}
        flat = flatten(tree)
        tree["a"].append(D)
        tree["c"]["y"], tree["c"].note = D, "changed"
        tree["d"] = D
        new = flat.rebuild(flat.leaves)
        assert new == {"a": [A, B], "c": {"x": C}} and new["c"].note == "kept"

    def test_leaves_may_be_let_go(self):
        flat = flatten({"a": [A, B]})
        flat.leaves.clear()
        assert flat.rebuild([C, D]) == {"a": [C, D]} and flat.path(1) == "['a'][1]"

    @pytest.mark.parametrize("tree", [A, [A], [A, [B]]], ids=["bare", "list", "nested"])
    def test_wants_as_many_leaves(self, tree):
        flat = flatten(tree)
        needed = len(flat.leaves)
        with pytest.raises(TreeError) as caught:
            flat.rebuild([A, B, C])
        assert str(caught.value) == f"cannot rebuild the tree: got 3 leaves, needed {needed}"

    def test_new_leaves_are_not_looked_into(self):
        assert flatten([A]).rebuild([[B]]) == [[B]]

    def test_a_path_of_no_leaf(self):
        with pytest.raises(IndexError):
            flatten([A]).path(1)


SAME = [
    pytest.param(A, np.zeros(1), id="bare"),
    pytest.param({"a": A, "b": [B, (C,)]}, {"a": 1, "b": [None, ("x",)]}, id="nested"),
    pytest.param([], [], id="empty"),
    pytest.param(Point(A, B), Point(1, 2), id="namedtuple"),
    pytest.param(Plain(A, B), Plain(1, 2), id="dataclass"),
    pytest.param(UserDict(a=A), UserDict(a=1), id="UserDict"),
]
DIFFERENT = [
    # a, b, path, got, needed
    pytest.param([A], A, "", "a leaf, test_tree.Leaf", "list of 1", id="leaf-for-container"),
    pytest.param(A, (B,), "", "tuple of 1", "a leaf, test_tree.Leaf", id="container-for-leaf"),
    pytest.param({"x": [A]}, {"x": 3}, "['x']", "a leaf, int", "list of 1", id="inner-leaf"),
    pytest.param({"x": A}, {"x": [3]}, "['x']", "list of 1", "a leaf, test_tree.Leaf", id="inner-container"),
    pytest.param([A, B], (A, B), "", "tuple of 2", "list of 2", id="tuple-for-list"),
    pytest.param([A, B], [A], "", "list of 1", "list of 2", id="too-short"),
    pytest.param([A, [B]], [A, [B, C]], "[1]", "list of 2", "list of 1", id="too-long"),
    pytest.param({"a": A}, OrderedDict(a=A), "", "collections.OrderedDict of 1", "dict of 1", id="other-dict"),
    pytest.param({"a": A, "b": B}, {"a": A, "c": B}, "", "['c'] as entry 1", "['b']", id="other-key"),
    pytest.param({"a": A, "b": B}, {"b": B, "a": A}, "", "['b'] as entry 0", "['a']", id="other-order"),
    pytest.param({"a": A}, {"a": A, "b": B}, "", "['b'] as entry 1", "nothing", id="extra-key"),
    pytest.param({"a": A, "b": B}, {"a": A}, "", "nothing as entry 1", "['b']", id="missing-key"),
    pytest.param(Plain(A), Frozen(A), "", "test_tree.Frozen of 2", "test_tree.Plain of 2", id="other-dataclass"),
    pytest.param([[A], {"a": B}], [[A], {"z": B}], "[1]", "['z'] as entry 0", "['a']", id="second-child"),
    pytest.param([[A], [B]], [(A,), {"z": B}], "[0]", "tuple of 1", "list of 1", id="first-of-two"),
    pytest.param([[[A]], [B]], [[(A,)], (B,)], "[0][0]", "tuple of 1", "list of 1", id="in-reading-order"),
]


class TestSameStructure:
    @pytest.mark.parametrize(("a", "b"), SAME)
    def test_same(self, a, b):
        same_structure(flatten(a), flatten(b))
        same_structure(flatten(b), flatten(a))

    @pytest.mark.parametrize(("a", "b", "path", "got", "needed"), DIFFERENT)
    def test_different(self, a, b, path, got, needed):
        with pytest.raises(TreeError) as caught:
            same_structure(flatten(a), flatten(b))
        place = f" (at tree{path})" if path else ""
        assert str(caught.value).replace(__name__, "test_tree") == (
            f"out= is built differently from the tree{place}: got {got}, needed {needed}\n"
            "  do: build out= like the tree: the same types and keys, in the same order"
        )

    def test_sharing_is_part_of_the_structure(self):
        shared, other = [A], [B]
        same_structure(flatten([shared, shared]), flatten([other, other]))
        with pytest.raises(TreeError) as caught:
            same_structure(flatten([shared, shared]), flatten([[A], [B]]))
        assert (caught.value.path, caught.value.got) == ("[1]", "a container of its own")
        assert caught.value.needed == "the container at tree[0] again"
        with pytest.raises(TreeError) as caught:
            same_structure(flatten([[A], [B]]), flatten([shared, shared]), name="other=")
        assert caught.value.what == "other= is built differently from the tree"
        assert (caught.value.got, caught.value.needed) == ("the container at tree[0] again", "a container of its own")

    def test_after_the_leaves_were_let_go(self):
        flat = flatten({"x": [A]})
        flat.leaves.clear()
        with pytest.raises(TreeError, match="got a leaf, int"):
            same_structure(flat, flatten({"x": 3}))
        flat = flatten({"x": A})
        flat.leaves.clear()
        with pytest.raises(TreeError, match="needed a leaf\n"):
            same_structure(flat, flatten({"x": [3]}))


def test_imports_neither_torch_nor_optree():
    import subprocess

    program = """
import sys
from hostward._tree import flatten
flat = flatten({"a": [1]})
assert flat.rebuild(flat.leaves) == {"a": [1]}
assert not {"torch", "optree", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_standard_librarys_containers_are_all_decided():
    containers = {"ChainMap", "Counter", "OrderedDict", "UserDict", "UserList", "UserString", "defaultdict", "deque"}
    assert set(collections.__all__) == containers | {"namedtuple"}
    assert flatten(collections.ChainMap({"a": A})).bare and flatten(collections.UserString("a")).bare
