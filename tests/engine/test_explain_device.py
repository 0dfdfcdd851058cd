"""`explain` on leaves of a device: its whole text, what the usual call would cost, and that the engine does so."""

from __future__ import annotations

from textwrap import dedent, indent
from typing import Any

import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device
from engine.rig import decided, fly
from hostward._devices import BlockingBackend, _registry, backend_for
from hostward._memory import chunk_nbytes
from hostward._sinks import ArraySink

A = torch.arange(1_200_000.0).reshape(1200, 1000)

# What is taken of `A` on device 0 (DEV in the text), the options, the text behind the first line.
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "tiny": (
        lambda a: a[0, :12],
        {},
        """\
          x: float32 [12] on DEV -> float32 [12]
              crosses as it lies; on the caller's stream, written by the device into pinned memory, and copied from \
there into ordinary memory
              link 48 B, device temporary 0 B, host 48 B
          blocks: to_numpy() returns arrays, so it waits for their bytes
          total: link 48 B, device temporaries 0 B, host 48 B""",
    ),
    "pinned": (
        lambda a: a,
        {"memory": "pinned"},
        """\
          x: float32 [1200, 1000] on DEV -> float32 [1200, 1000]
              crosses as it lies; on the caller's stream, written by the device into pinned memory
              link 4,800,000 B, device temporary 0 B, host 4,800,000 B
          blocks: to_numpy() returns arrays, so it waits for their bytes
          total: link 4,800,000 B, device temporaries 0 B, host 4,800,000 B""",
    ),
    "transposed": (
        lambda a: a.t(),
        {},
        """\
          x: float32 [1000, 1200] on DEV -> float32 [1000, 1200]
              transpose on the device, in one temporary; through pinned chunks of 33,554,432 B into ordinary memory
              link 4,800,000 B, device temporary 4,800,000 B, host 4,800,000 B
              .detach().cpu().numpy(): keeps the source's strides: code that needs C order copies again, on one host \
thread
          blocks: to_numpy() returns arrays, so it waits for their bytes
          total: link 4,800,000 B, device temporaries 4,800,000 B, host 4,800,000 B""",
    ),
    "transposed, K order": (
        lambda a: a.t(),
        {"order": "K"},
        """\
          x: float32 [1000, 1200] on DEV -> float32 [1000, 1200]
              crosses as it lies; through pinned chunks of 33,554,432 B into ordinary memory
              link 4,800,000 B, device temporary 0 B, host 4,800,000 B
          blocks: to_numpy() returns arrays, so it waits for their bytes
          total: link 4,800,000 B, device temporaries 0 B, host 4,800,000 B""",
    ),
    "narrowed": (
        lambda a: a,
        {"dtype": "float16"},
        """\
          x: float32 [1200, 1000] on DEV -> float16 [1200, 1000]
              cast float32 to float16 on the device, in one temporary; through pinned chunks of 33,554,432 B into \
ordinary memory
              link 2,400,000 B, device temporary 2,400,000 B, host 2,400,000 B
              .detach().cpu().numpy(): link 4,800,000 B
              .detach().cpu().numpy(): the cast to float16 runs on the host, after the link has carried the wide bytes
          blocks: to_numpy() returns arrays, so it waits for their bytes
          total: link 2,400,000 B, device temporaries 2,400,000 B, host 2,400,000 B""",
    ),
    "widened, and a gradient": (
        lambda a: a.clone().requires_grad_(),
        {"dtype": "float64"},
        """\
          x: float32 [1200, 1000] on DEV -> float64 [1200, 1000]
              crosses as it lies; through pinned chunks of 33,554,432 B into ordinary memory
              link 4,800,000 B, device temporary 0 B, host 9,600,000 B
              note: widened to float64, exactly, on the host
              note: gradient dropped
              .detach().cpu().numpy(): the cast to float64 runs on the host, into a second host array
          blocks: to_numpy() returns arrays, so it waits for their bytes
          total: link 4,800,000 B, device temporaries 0 B, host 9,600,000 B""",
    ),
    "expanded": (
        lambda a: a[0].expand(50, 1000),
        {},
        """\
          x: float32 [50, 1000] on DEV -> float32 [50, 1000]
              crosses as it lies; through pinned chunks of 1,048,576 B into ordinary memory; copied out of what landed
              link 4,000 B, device temporary 0 B, host 200,000 B
              note: broadcast dimensions (0,) cross once
              .detach().cpu().numpy(): link 200,000 B, device temporary 200,000 B
          blocks: to_numpy() returns arrays, so it waits for their bytes
          total: link 4,000 B, device temporaries 0 B, host 204,000 B""",
    ),
    "gapped and transposed": (
        lambda a: a[:, ::2].t(),
        {},
        """\
          x: float32 [500, 1200] on DEV -> float32 [500, 1200]
              pack on the device, in one temporary; through pinned chunks of 33,554,432 B into ordinary memory
              link 2,400,000 B, device temporary 2,400,000 B, host 2,400,000 B
              .detach().cpu().numpy(): with non_blocking=True it would block all the same, through a pageable temporary
          blocks: to_numpy() returns arrays, so it waits for their bytes
          total: link 2,400,000 B, device temporaries 2,400,000 B, host 2,400,000 B""",
    ),
    "conjugated": (
        lambda a: torch.complex(a, a).conj(),
        {},
        """\
          x: complex64 [1200, 1000] on DEV -> complex64 [1200, 1000]
              resolve conj on the device, in one temporary; through pinned chunks of 33,554,432 B into ordinary memory
              link 9,600,000 B, device temporary 9,600,000 B, host 9,600,000 B
              .detach().cpu().numpy(): raises: numpy() refuses a tensor with its conjugate bit set
          blocks: to_numpy() returns arrays, so it waits for their bytes
          total: link 9,600,000 B, device temporaries 9,600,000 B, host 9,600,000 B""",
    ),
    "a tree": (
        lambda a: {"all": a, "part": a[5:], "e": a.new_empty(0, 3), "h": torch.ones(3), "n": 1, "b": a.bfloat16()},
        {},
        """\
          ['all']: float32 [1200, 1000] on DEV -> float32 [1200, 1000]
              crosses as it lies; through pinned chunks of 33,554,432 B into ordinary memory
              link 4,800,000 B, device temporary 0 B, host 4,800,000 B
              note: 2 overlapping leaves cross once
          ['part']: float32 [1195, 1000] on DEV -> float32 [1195, 1000]
              comes with the leaf above; copied out of what landed
              link 0 B, device temporary 0 B, host 4,780,000 B
          ['e']: float32 [0, 3] on DEV -> float32 [0, 3]
              no elements: nothing moves
          ['h']: float32 [3] on cpu -> float32 [3]
              in host memory already: copied there
          ['b']: bfloat16 [1200, 1000] on DEV -> bfloat16 [1200, 1000]
              crosses as it lies; through pinned chunks of 33,554,432 B into ordinary memory
              link 2,400,000 B, device temporary 0 B, host 2,400,000 B
              .detach().cpu().numpy(): raises: numpy() refuses torch.bfloat16
          ['n']: passes through by reference (int)
          blocks: to_numpy() returns arrays, so it waits for their bytes
          total: link 7,200,000 B, device temporaries 0 B, host 11,980,012 B""",
    ),
    "into out=": (
        lambda a: a[0, :12],
        {"out": np.empty(12, np.float32)},
        """\
          x: float32 [12] on DEV -> float32 [12]
              crosses as it lies; through pinned chunks of 1,048,576 B into out=
              link 48 B, device temporary 0 B, host 0 B
          blocks: to_numpy() returns arrays, so it waits for their bytes
          total: link 48 B, device temporaries 0 B, host 0 B""",
    ),
}


@pytest.mark.parametrize(("take", "options", "text"), CASES.values(), ids=CASES)
def test_the_whole_text(device: Device, take: Any, options: dict[str, Any], text: str) -> None:
    a = device.tensor(A)
    first = f"to_numpy(order={options.get('order', 'C')!r}, memory={options.get('memory', 'auto')!r})\n"
    expected = first + indent(dedent(text.replace("DEV", f"{device.type}:0")), "  ")
    assert str(hw.explain(take(a), **options)) == expected


def test_pieces_are_a_fallback_that_is_told(device: Device) -> None:
    device.require("limits")
    a = device.tensor(A)
    device.limit_memory(device.memory().reserved_bytes + (3 << 20))
    text = str(hw.explain(a.t()))
    assert "transpose on the device, in pieces of 3,1" in text
    assert "  fallback: move 0: packed in pieces of 3,1" in text
    assert "because a temporary of 4,800,000 bytes passes what is left of 3,1" in text


def test_an_unproven_device_blocks_and_says_why(device: Device) -> None:
    a = device.tensor(A)
    before = backend_for(device.type)
    _registry.register(BlockingBackend(device.type))
    try:
        found = hw.explain([a, a.t()])
    finally:
        _registry.register(before)
    assert found.blocks == (
        "to_numpy() returns arrays, so it waits for their bytes",
        f"asynchronous copies are not proven on {device.type}:0",
    )
    assert found.leaves[0].steps == ("crosses as it lies", "by torch's blocking copy")
    assert found.temporary_nbytes == 4_800_000


@pytest.mark.parametrize("memory", ["auto", "pinned"])
@pytest.mark.parametrize(
    "take",
    [
        pytest.param(lambda a: [a, a[0]], id="overlapping"),
        pytest.param(lambda a: [a, a[0].half()], id="large and small"),
        pytest.param(lambda a: [a[:1].clone(), a[0, 0].expand(7)], id="small"),
        pytest.param(lambda a: [a.half(), a.t()], id="large"),
    ],
)
def test_the_chunks_told_are_the_chunks_used(device: Device, take: Any, memory: str) -> None:
    tree = take(device.tensor(A))
    options = {"memory": memory, "dtype": "float32"}
    text = str(hw.explain(tree, **options))
    sink = ArraySink(decided(tree, **options).admitted)
    assert ("through pinned chunks of" in text) == bool(sink._left.total())
    if sink._left.total():
        assert f"through pinned chunks of {chunk_nbytes(sink._left.total()):,} B" in text


def test_what_is_told_is_what_is_run(device: Device) -> None:
    """Not a second opinion: the same record."""
    a = device.tensor(A)
    tree = [a, a.t(), a[0].expand(9, 1000)]
    call = decided(tree)
    assert hw.explain(tree).admitted == call.admitted
    flight, sink = fly(tree)
    flight.wait()
    assert set(sink.results) == {leaf.leaf for leaf in call.admitted.plan.delivers}
