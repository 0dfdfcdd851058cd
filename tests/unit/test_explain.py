"""`explain` on leaves in host memory: its whole text, its fields, and its own errors. Devices: `tests/engine`."""

from __future__ import annotations

import dataclasses
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

import hostward as hw
from hostward.errors import CopyNeededError, DtypeError, LeafError, OptionError, OutputError, TreeError

X = torch.arange(12.0).reshape(3, 4)


class Opaque:
    """Something that no table knows."""


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a bare tensor": (
        X,
        {},
        """\
        to_numpy(order='C', memory='auto')
          x: float32 [3, 4] on cpu -> float32 [3, 4]
              in host memory already: copied there
          total: link 0 B, device temporaries 0 B, host 48 B; no link is crossed""",
    ),
    "shared": (
        X,
        {"copy": None, "memory": "pinned"},
        """\
        to_numpy(order='C', memory='pinned')
          x: float32 [3, 4] on cpu -> float32 [3, 4]
              in host memory already: shared
          total: link 0 B, device temporaries 0 B, host 0 B; no link is crossed""",
    ),
    "with a gradient, cast": (
        X.clone().requires_grad_(),
        {"dtype": "float16"},
        """\
        to_numpy(order='C', memory='auto')
          x: float32 [3, 4] on cpu -> float16 [3, 4]
              in host memory already: copied there
              note: gradient dropped
          total: link 0 B, device temporaries 0 B, host 24 B; no link is crossed""",
    ),
    "expanded, K order": (
        X[0].expand(500, 4),
        {"order": "K"},
        """\
        to_numpy(order='K', memory='auto')
          x: float32 [500, 4] on cpu -> float32 [500, 4]
              in host memory already: copied there
          total: link 0 B, device temporaries 0 B, host 16 B; no link is crossed""",
    ),
    "a tree of all kinds": (
        {
            "w": X,
            "same": X,
            "ids": np.arange(4),
            "cfg": {"lr": 0.1, "name": "run", "no": None},
            "other": (Opaque(), int),
        },
        {"dtype": "float64"},
        """\
        to_numpy(order='C', memory='auto')
          ['w']: float32 [3, 4] on cpu -> float64 [3, 4]
              in host memory already: copied there
          ['ids']: int64 [4] on numpy -> int64 [4]
              in host memory already: copied there
          ['cfg']['lr']: passes through by reference (float)
          ['cfg']['name']: passes through by reference (str)
          ['cfg']['no']: passes through by reference (NoneType)
          ['other'][0]: passes through by reference (Opaque)
          ['other'][1]: passes through by reference (type)
          total: link 0 B, device temporaries 0 B, host 128 B; no link is crossed""",
    ),
    "into out=": (
        [X],
        {"out": [np.empty((3, 4), np.float32)]},
        """\
        to_numpy(order='C', memory='auto')
          [0]: float32 [3, 4] on cpu -> float32 [3, 4]
              in host memory already: copied there
          total: link 0 B, device temporaries 0 B, host 0 B; no link is crossed""",
    ),
    "to_python": (
        {"loss": X.sum(), "step": 3},
        {"call": "to_python"},
        """\
        to_python(order='C', memory='auto')
          ['loss']: float32 [] on cpu -> float32 []
              in host memory already: shared
          ['step']: passes through by reference (int)
          total: link 0 B, device temporaries 0 B, host 0 B; no link is crossed""",
    ),
    "nothing": (
        [],
        {},
        """\
        to_numpy(order='C', memory='auto')
          total: link 0 B, device temporaries 0 B, host 0 B; no link is crossed""",
    ),
    "no tensor": (
        "text",
        {},
        """\
        to_numpy(order='C', memory='auto')
          x: passes through by reference (str)
          total: link 0 B, device temporaries 0 B, host 0 B; no link is crossed""",
    ),
}


@pytest.mark.parametrize(("tree", "options", "text"), CASES.values(), ids=CASES)
def test_the_whole_text(tree: Any, options: dict[str, Any], text: str) -> None:
    assert str(hw.explain(tree, **options)) == dedent(text)


def test_the_fields_are_for_programs() -> None:
    found = hw.explain({"w": X, "n": 1}, dtype="float16")
    assert (found.call, found.link_nbytes, found.temporary_nbytes, found.host_nbytes) == ("to_numpy", 0, 0, 24)
    (leaf,) = found.leaves
    assert dataclasses.asdict(leaf) == {
        "path": "['w']",
        "source": "float32 [3, 4] on cpu",
        "result": "float16 [3, 4]",
        "steps": ("in host memory already: copied there",),
        "link_nbytes": 0,
        "temporary_nbytes": 0,
        "host_nbytes": 24,
        "notes": (),
        "naive": None,
    }
    assert found.passed == (("['n']", "int"),)
    assert found.blocks == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.call = "to_python"  # type: ignore[misc]


def test_the_same_leaf_twice_is_told_once() -> None:
    found = hw.explain([X, X, X.t().t()])
    assert [leaf.path for leaf in found.leaves] == ["[0]"]
    assert found.host_nbytes == 48


def test_nothing_is_changed() -> None:
    x = X.clone()
    hw.explain([x], out=[np.full((3, 4), 7, np.float32)])
    target = np.full((3, 4), 7, np.float32)
    hw.explain(x, out=target, call="to_numpy")
    assert (target == 7).all()
    assert torch.equal(x, X)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"call": "nope"}, "explain(): unknown call to explain: got 'nope', needed one of to_numpy, to_python"),
        ({"layout": 1}, "explain(): to_numpy() has no option layout=: needed copy, dtype, memory, order, out"),
        ({"b": 1, "a": 2}, "explain(): to_numpy() has no option a=: needed copy, dtype, memory, order, out"),
        ({"call": "to_python", "dtype": "float16"}, "explain(): to_python() has no option dtype=: needed none"),
        ({"call": "to_python", "out": X}, "explain(): to_python() has no option out=: needed none"),
        ({"order": "F"}, "explain(): unknown value for order=: got 'F', needed one of 'C', 'K'"),
        ({"copy": 1}, "explain(): unknown value for copy=: got 1, needed one of True, None, False"),
        ({"memory": "gpu"}, "explain(): unknown value for memory=: got 'gpu', needed one of 'auto', 'pinned'"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError) as caught:
        hw.explain(X, **options)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("tree", "options", "error"),
    [
        pytest.param({"a": torch.zeros(2, 2).to_sparse()}, {}, LeafError, id="sparse"),
        pytest.param(X, {"dtype": "complex32"}, DtypeError, id="dtype"),
        pytest.param(X.t(), {"copy": False}, CopyNeededError, id="copy"),
        pytest.param([X], {"out": {}}, TreeError, id="structure"),
        pytest.param(X, {"out": np.empty(3)}, OutputError, id="out"),
    ],
)
def test_it_raises_what_the_call_would(tree: Any, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as told:
        hw.explain(tree, **options)
    with pytest.raises(error) as raised:
        hw.to_numpy(tree, **options)
    assert str(told.value).removeprefix("explain(): ") == str(raised.value).removeprefix("to_numpy(): ")
