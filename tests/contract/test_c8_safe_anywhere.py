"""Clause 8, safe anywhere: any thread, several devices, every mode of torch, Ctrl-C, and the end of the process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hostward as hw
from device.frame import Device
from hostward._devices import backend_for
from support.values import as_array, assert_same, fresh
from support.watch import behind, eventually, in_threads, interrupted
from support.ways import WAYS, Way, async_ways, every_way, leaves, small_ring

TESTS = Path(__file__).resolve().parents[1]
CTRL_C_S = 0.05


def all_are(result: Any, value: float) -> bool:
    """Say whether every element is the value, whatever became of its sign and type."""
    found = []
    for leaf in leaves(result):
        if leaf.dtype == np.int32:
            leaf = leaf.view(np.float32)
        found.append(bool((np.abs(leaf.real) == value).all() and leaf.size))
    return bool(found) and all(found)


# ---- threads


@every_way
def test_a_fresh_thread_reads_the_same(device: Device, way: Way) -> None:
    x = way.base(device)
    x.fill_(6)
    with way.setting(device):
        results = in_threads([way.prepared(x)] * 3)
    for result in results:
        assert all_are(result, 6)


@pytest.mark.parametrize("ring", [nullcontext, small_ring], ids=["ring", "tiny ring"])
def test_many_threads_share_one_ring(device: Device, ring: Any) -> None:
    """More threads than chunks: they take turns, and none gets another's bytes."""
    names = ["tiny", "large", "transposed", "overlapping", "two dtypes", "tiny tree", "narrowed", "out="]

    def calls(name: str) -> bool:
        way, value = WAYS[name], next(fresh) % 200 + 1
        small = way.base(device)[:24]
        small.fill_(value)
        call = way.prepared(small)
        return all(all_are(call(), value) for _ in range(10))

    with ring():
        assert in_threads([partial(calls, name) for name in names]) == [True] * len(names)


def test_a_thread_that_waits_for_one_device_does_not_stop_calls_on_another(device: Device) -> None:
    """More waiting calls than the first device's ring has chunks: they must not keep those of the second."""
    device.require("two_devices")
    one, other = (device.tensor(torch.full((1 << 15,), 4.0), index) for index in (0, 1))
    with device.hold(1) as latch:
        waiting = [threading.Thread(target=hw.to_numpy, args=([one, other, one[1:]],)) for _ in range(6)]
        for thread in waiting:
            thread.start()
        thread = threading.Thread(target=lambda: [hw.to_numpy([one, one[5:]]) for _ in range(3)])
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert latch.pending
    for thread in waiting:
        thread.join()


# ---- several devices


def on_both(device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    device.require("two_devices")
    return device.tensor(torch.zeros(512, 256), 0), device.tensor(torch.zeros(512, 256), 1)


SPREAD: dict[str, Callable[[torch.Tensor], Any]] = {
    "tiny": lambda x: x[0, :9],
    "large": lambda x: x,
    "packed": lambda x: x.t(),
    "overlapping": lambda x: {"a": x, "b": x[3:]},
    "expanded": lambda x: x[:1].expand(70, 256),
}


@pytest.mark.parametrize("take", SPREAD.values(), ids=SPREAD)
@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("memory", ["auto", "pinned"])
def test_leaves_on_two_devices_wait_for_both(device: Device, take: Any, held: int, memory: str) -> None:
    x, y = on_both(device)
    call = partial(hw.to_numpy, [take(x), take(y), take(x)], memory=memory)
    call()
    with device.hold(held) as latch:
        x.fill_(3)
        y.fill_(3)
        result = behind(latch, call).got()
    assert all_are(result, 3)


@pytest.mark.parametrize("take", SPREAD.values(), ids=SPREAD)
@pytest.mark.parametrize("memory", ["auto", "pinned"])
def test_device_1_from_a_thread_whose_current_device_is_0(device: Device, take: Any, memory: str) -> None:
    """Trap 9: the producer is the source's device, and not the one that happens to be current."""
    _, y = on_both(device)
    with device.hold(1) as latch:
        y.fill_(5)
        result = behind(latch, partial(hw.to_numpy, take(y), memory=memory)).got()
    assert all_are(result, 5)


def test_the_usual_recipe_for_two_devices_is_wrong(device: Device) -> None:
    """It waits for the current device only."""
    x, y = on_both(device)
    [leaf.to("cpu", non_blocking=True) for leaf in (x, y)]

    def recipe() -> Any:
        result = [leaf.to("cpu", non_blocking=True) for leaf in (x, y)]
        torch.accelerator.current_stream(0).synchronize()
        return [leaf.numpy().copy() for leaf in result]

    with device.hold(1) as latch:
        x.fill_(3)
        y.fill_(3)
        outcome = behind(latch, recipe)
    assert outcome.early
    assert (outcome.value[1] != 3).all()


# ---- modes of torch


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch fill all memory that it makes, and refuse what gives other results each time."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[Device], Any]] = {
    "no_grad": lambda device: torch.no_grad(),
    "inference": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda device: device.torch_device(),
    "default device 1": lambda device: device.torch_device(device.count - 1),
    "meta": lambda device: torch.device("meta"),
    "deterministic": lambda device: deterministic(),
}


@every_way
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_every_mode_gives_the_same_also_to_later_calls(
    device: Device, monkeypatch: pytest.MonkeyPatch, way: Way, mode: Any
) -> None:
    """What is made inside a mode and kept (chunks, granules) serves calls outside of it, and the other way round."""
    for place in ("_memory._ring._rings", "_engine._direct._granules", "_single._known"):
        monkeypatch.setattr(f"hostward.{place}", {})
    x = way.base(device)
    x.fill_(2)
    with way.setting(device):
        call = way.prepared(x)
        with mode(device):
            assert all_are(call(), 2)
        assert all_are(call(), 2)
        with mode(device):
            assert all_are(call(), 2)


def test_default_device_does_not_take_away_pinned_memory(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("_memory._ring._rings", "_engine._direct._granules"):
        monkeypatch.setattr(f"hostward.{place}", {})
    x = device.tensor(torch.ones(300, 400))
    with device.torch_device():
        for leaf in (x, x[0], x.t()):
            a = hw.to_numpy(leaf, memory="pinned")
            assert torch.from_numpy(a).is_pinned()
        hw.to_numpy([x, x[1:]])
    if device.has("counters"):
        assert device.counters().d2h_blocking == 0


def test_inference_tensors_and_tensors_of_a_graph(device: Device) -> None:
    with torch.inference_mode():
        x = device.tensor(torch.ones(300, 400))
    y = device.tensor(torch.ones(300, 400)).requires_grad_(True) * 2
    for leaf, value in ((x, 1), (y, 2)):
        for view in (leaf, leaf.t(), leaf[0], [leaf, leaf[1:]]):
            assert all_are(hw.to_numpy(view), value)


TRANSFORMS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("n", [5, 1 << 16], ids=["tiny", "large"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_functional_transforms_are_refused_inside(device: Device, transform: Any, n: int) -> None:
    x = device.tensor(torch.ones(2, n))
    hw.to_numpy(x)  # a plain tensor of this kind is known to the shortcut
    hw.to_numpy(x[0])
    hw.to_numpy([x, x[0]])

    def with_its_own(y: torch.Tensor) -> torch.Tensor:
        hw.to_numpy(y)
        return y.sum()

    def with_another(y: torch.Tensor) -> torch.Tensor:
        hw.to_numpy(x)
        return y.sum()

    with pytest.raises(hw.errors.LeafError) as caught:
        transform(with_its_own, x)
    assert caught.value.got == "a tensor inside torch.func (vmap, grad, ...)"
    with pytest.raises(hw.errors.LeafError) as caught:
        transform(with_another, x)
    assert caught.value.got == "a tensor inside a function that torch.func transforms (vmap, grad, ...)"
    for tree in (x, x[0], [x, x[0]]):  # nothing of it stays
        assert all_are(hw.to_numpy(tree), 1)


def test_fake_mode_is_refused(device: Device) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = device.tensor(torch.ones(5))
    hw.to_numpy(x)
    with FakeTensorMode():
        with pytest.raises(hw.errors.LeafError, match="a tensor inside of FakeTensorMode"):
            hw.to_numpy(x)
        with pytest.raises(hw.errors.LeafError, match=r"at tree\['b'\]"):
            hw.to_numpy({"a": np.ones(2), "b": x})
        assert hw.to_numpy({"a": np.ones(2)})["a"].tolist() == [1, 1]
    assert all_are(hw.to_numpy(x), 1)


# What torch's compiler warns of in its own code, or in the test's, is not what these are about.
quiet_compiler = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@quiet_compiler
def test_compile_breaks_the_graph_and_values_change(device: Device) -> None:
    """Trap 8: what is compiled must not keep an old value, nor drop the wait."""
    seen: list[Any] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        seen.append(hw.to_numpy({"y": y, "t": y.t(), "n": hw.to_python(y[0, 0])}))
        return y + 1

    compiled = torch.compile(step, backend="eager")
    for value in (1.0, 2.0, 5.0):
        x = torch.full((40, 50), value).to(device.torch_device())
        assert bool((compiled(x).cpu() == 2 * value + 1).all())
        a = seen.pop()
        assert (a["y"] == 2 * value).all()
        assert (a["t"] == 2 * value).all()
        assert a["n"] == 2 * value
    torch.compiler.reset()


@quiet_compiler
def test_compile_of_a_full_graph_is_torchs_own_error(device: Device) -> None:
    compiled = torch.compile(lambda x: hw.to_numpy(x * 2), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(torch.ones(3).to(device.torch_device()))
    torch.compiler.reset()


# ---- a graph that is being captured


@pytest.mark.parametrize(
    "tree", [lambda x: x, lambda x: {"a": [x, 1]}, lambda x: x.t()], ids=["bare", "tree", "packed"]
)
def test_a_capture_is_refused_with_the_way_out(device: Device, monkeypatch: pytest.MonkeyPatch, tree: Any) -> None:
    x = device.tensor(torch.ones(3, 4))
    hw.to_numpy(tree(x))
    monkeypatch.setattr(backend_for(device.type), "is_capturing", lambda index: True)
    if device.has("counters"):
        device.reset_counters()
    for call, name in ((hw.to_numpy, "to_numpy()"), (hw.to_python, "to_python()"), (hw.explain, "explain()")):
        with pytest.raises(hw.errors.CaptureError) as caught:
            call(tree(x))
        assert str(caught.value) == (
            f"{name}: the current stream of {device.type}:0 is capturing a graph\n"
            "  why: a copy to the host cannot be waited for while its graph is only being recorded\n"
            "  do: call it on the graph's outputs after replay()"
        )
    if device.has("counters"):
        assert device.counters().d2h + device.counters().d2d == 0
    assert hw.to_numpy(torch.ones(2)).tolist() == [1, 1]  # host leaves move nothing


# ---- Ctrl-C


@async_ways
def test_ctrl_c_comes_back_at_once_and_the_copy_ends_in_the_background(device: Device, way: Way) -> None:
    x = way.base(device)
    with way.setting(device):
        call = way.prepared(x)
        call()
        latencies = []
        for value in (1, 2, 3):
            with device.hold() as latch:
                x.fill_(value)
                latencies.append(interrupted(call))
                assert latch.pending
            assert all_are(call(), value)  # what the interrupted call kept (chunks, streams) is in order
        assert min(latencies) < CTRL_C_S


@pytest.mark.parametrize("name", ["large", "transposed", "a tree", "overlapping", "in pieces", "tiny", "large, pinned"])
def test_ctrl_c_gives_everything_back(device: Device, name: str) -> None:
    """More often than there are chunks in the ring, and without the garbage collector."""
    device.require("memory")
    way = WAYS[name]
    x = way.base(device)
    with way.setting(device):
        call = way.prepared(x)
        call()
        device.synchronize()
        before = device.memory().live_blocks
        gc.disable()
        try:
            for _ in range(6):
                with device.hold():
                    interrupted(call, 0.005)
            assert all_are([call(), np.zeros(3)][0], 0)
            assert eventually(lambda: device.memory().live_blocks == before)
        finally:
            gc.enable()


def test_a_wait_that_ignores_ctrl_c_is_noticed(device: Device) -> None:
    x = device.tensor(torch.ones(1 << 16))
    latch = device.hold()
    opener = threading.Timer(0.2, latch.open)
    opener.start()
    event = device.event()
    x.to("cpu", non_blocking=True)

    def deaf() -> None:
        event.synchronize()
        raise KeyboardInterrupt  # the handler runs when the wait is over

    with pytest.raises((KeyboardInterrupt, AssertionError)):
        assert interrupted(deaf) < CTRL_C_S
    opener.join()


# ---- the end of the process

PROLOGUE = f"""
import signal, sys, threading, time
sys.path[:0] = {[str(TESTS), str(TESTS.parent / "src")]!r}
if sys.argv[1] == "lag":
    from device import build, lag
    device = lag.install(build.build().path)
else:
    from device import cuda
    device = cuda.make()
import torch
import hostward as hw
from support.watch import interrupted
x = device.tensor(torch.ones(512, 256))
hw.to_numpy([x, x.t()])
"""

ENDINGS: dict[str, tuple[str, bool, str]] = {
    "after calls": ("kept = [hw.to_numpy(x, memory='pinned'), hw.to_numpy(x[0])]", False, ""),
    "after Ctrl-C": (
        "latch = device.hold(); interrupted(lambda: hw.to_numpy([x, x.t()])); latch.open()",
        False,
        "",
    ),
    "with a thread in a call": (
        "latch = device.hold(); threading.Timer(0.3, latch.open).start()\n"
        "threading.Thread(target=hw.to_numpy, args=([x, x.t()],)).start()",
        False,
        "",
    ),
    "with a copy that never ends": (
        "import hostward._engine._pump as pump; pump._EXIT_S = 0.2\n"
        "latch = device.hold(); interrupted(lambda: hw.to_numpy([x, x.t()]))",
        True,
        "HostwardResourceWarning: 1 transfers had not ended when the interpreter did; their memory was left alone",
    ),
}


@pytest.mark.parametrize(("script", "lag_only", "said"), ENDINGS.values(), ids=ENDINGS)
def test_the_process_ends(device: Device, script: str, lag_only: bool, said: str) -> None:
    if lag_only:
        device.require("open_on_wait")  # CUDA itself waits for its streams at exit
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", PROLOGUE + script, device.type],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert said in done.stderr
    assert said or done.stderr == ""


def test_a_process_that_hangs_is_noticed(device: Device) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", "import threading; threading.Event().wait()"], timeout=0.5)


# ---- results outlive everything


def test_results_are_right_after_all_that_made_them_is_gone(device: Device) -> None:
    cpu = torch.arange(120_000.0).reshape(300, 400)
    x = device.tensor(cpu)
    kept = [hw.to_numpy(x, memory="pinned"), hw.to_numpy([x, x[1:]])[1], hw.to_numpy(x[0]), hw.to_numpy(x.t())]
    del x
    gc.collect()
    for _ in range(20):
        hw.to_numpy(device.tensor(torch.zeros(300, 400)), memory="pinned")
        hw.to_numpy([device.tensor(torch.zeros(300, 400)), 1])
    for a, view in zip(kept, (cpu, cpu[1:], cpu[0], cpu.t()), strict=True):
        assert_same(a, as_array(view))
