"""The test device itself: streams, events, latches, operators and views, and that its counters count."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from device.frame import Counters
from device.lag import LagDevice

TESTS = Path(__file__).parents[1]


# ---- devices and streams


def test_torch_sees_two_devices(lag: LagDevice) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("lag")
    assert torch.accelerator.device_count() == lag.count == 2
    assert torch.zeros(2, device="lag:1").device == lag.torch_device(1)


def test_a_fresh_thread_has_device_0_and_default_streams(lag: LagDevice) -> None:
    torch.accelerator.set_device_index(1)
    torch.accelerator.set_stream(lag.stream(1))
    seen: list[tuple[int, int]] = []

    def look() -> None:
        seen.append((torch.accelerator.current_device_index(), torch.accelerator.current_stream(1).stream_id))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [(0, 0)]


def test_the_pool_of_streams_wraps_around(lag: LagDevice) -> None:
    drawn = [torch.Stream("lag:0").stream_id for _ in range(lag.lagdev.POOL_STREAMS + 1)]
    assert drawn[0] == drawn[-1]
    assert sorted(drawn[1:]) == list(range(1, 33))  # and never the default stream


def test_two_handles_of_one_pooled_stream_wait_for_each_other(lag: LagDevice) -> None:
    first = torch.Stream("lag:0")
    second = [torch.Stream("lag:0") for _ in range(32)][-1]
    with lag.hold(first):
        assert not second.query()


def test_a_stream_is_done_when_all_its_work_is(lag: LagDevice) -> None:
    stream = lag.current_stream()
    with lag.hold():
        assert not stream.query()
    stream.synchronize()
    assert stream.query()


def test_wait_stream_orders_two_streams(lag: LagDevice) -> None:
    x = lag.tensor(torch.zeros(100))
    host = torch.empty(100).pin_memory()
    side = lag.stream()
    with lag.hold() as latch:
        x.fill_(7)
        side.wait_stream(lag.current_stream())
        with side:
            host.copy_(x, non_blocking=True)
        assert not side.query()
        latch.open()
        side.synchronize()
    assert (host == 7).all()


# ---- events


def test_an_event_that_was_never_recorded_is_ready_and_waiting_for_it_does_nothing(lag: LagDevice) -> None:
    event = torch.Event("lag:0")
    with lag.hold():
        side = lag.stream()
        side.wait_event(event)
        side.synchronize()
        assert event.query()
        event.record(lag.current_stream())  # too late for the wait above
        assert side.query()
        assert not event.query()


def test_recording_again_does_not_move_earlier_waits(lag: LagDevice) -> None:
    event = lag.event()
    side = lag.stream()
    side.wait_event(event)
    with lag.hold():
        event.record(lag.current_stream())
        side.synchronize()
        assert not event.query()


def test_events_measure_time_if_asked_to(lag: LagDevice) -> None:
    start, end = lag.event(timing=True), lag.event(timing=True)
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(ValueError, match="enable_timing"):
        lag.event().elapsed_time(end)


def test_an_event_on_one_device_says_nothing_about_the_other(lag: LagDevice) -> None:
    with lag.hold(1):
        held = lag.event(lag.current_stream(1))
        lag.event(lag.current_stream(0)).synchronize()
        assert not held.query()


# ---- latches that open by themselves, and the interpreter lock


def test_open_on_wait_opens_when_a_call_blocks(lag: LagDevice) -> None:
    x = lag.tensor(torch.zeros(100))
    latch = lag.hold()
    latch.open_on_wait()
    x.fill_(7)
    assert latch.pending
    assert x.sum().item() == 700
    assert not latch.pending


def test_open_on_wait_opens_after_so_many_queries_in_vain(lag: LagDevice) -> None:
    latch = lag.hold()
    latch.open_on_wait(queries=3)
    event = lag.event()
    assert [event.query() for _ in range(3)] == [False] * 3
    event.synchronize()
    assert lag.counters().event_queries == 3


@pytest.mark.parametrize("wait", ["event", "stream", "pageable copy", "device"])
def test_waits_do_not_keep_the_interpreter_lock(lag: LagDevice, wait: str) -> None:
    x = lag.tensor(torch.zeros(100))
    blocking: dict[str, Callable[[], object]] = {
        "event": lambda: lag.event().synchronize(),
        "stream": lambda: lag.current_stream().synchronize(),
        "pageable copy": lambda: x.cpu(),
        "device": lambda: torch.accelerator.synchronize(0),
    }
    latch = lag.hold()
    started = threading.Event()

    def open_it() -> None:
        started.wait()
        latch.open()

    opener = threading.Thread(target=open_it)
    opener.start()
    started.set()
    blocking[wait]()
    opener.join()


# ---- operators


def test_fills_are_late_and_other_operators_wait_for_the_current_stream_only(lag: LagDevice) -> None:
    x = lag.tensor(torch.zeros(100))
    lag.reset_counters()
    side = lag.stream()
    with lag.hold(side) as latch:
        x.fill_(3)
        x.zero_()
        assert ((x + 1).cpu() == 1).all()
        assert latch.pending
    counted = lag.counters()
    assert (counted.fills, counted.fallbacks) == (2, 1)
    assert (counted.d2h, counted.h2d_blocking) == (1, 0)  # the fallback's own copies are not the program's


VIEWS = {
    "view": lambda x: x.view(6, 4),
    "view dtype": lambda x: x.view(torch.uint8),
    "reshape": lambda x: x.reshape(24),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, 2),
    "slice": lambda x: x[:, 1:, ::2],
    "select": lambda x: x[1],
    "expand": lambda x: x[:1].expand(5, 3, 4),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (5, 3), 1),
    "squeeze": lambda x: x[None].squeeze(0),
    "flatten": lambda x: x.flatten(),
    "chunk": lambda x: x.chunk(2)[1],
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "detach": lambda x: x.detach(),
    "alias": lambda x: torch.ops.aten.alias(x),
    "movedim": lambda x: x.movedim(0, 2),
    "real of complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 3, 2, 2))),
    "conj": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)).conj(),
    "imag of conj": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)).conj().imag,
}


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in VIEWS.items()])
def test_views_share_memory_and_touch_no_data(lag: LagDevice, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    on_cpu = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    x = lag.tensor(on_cpu)
    with lag.hold():
        view = make(x)
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert lag.counters().fallbacks == 0
    assert torch.equal(view.cpu().resolve_conj().resolve_neg(), make(on_cpu).resolve_conj().resolve_neg())


def test_storages_grow_and_shrink_late(lag: LagDevice) -> None:
    before = lag.memory().allocated_bytes  # what other tests in this process leaked on purpose
    x = lag.tensor(torch.zeros(10))
    with lag.hold():
        x.fill_(7)
        x.resize_(20)
        x[10:].fill_(8)
        assert lag.memory().allocated_bytes == before + 80
    assert x.cpu().tolist() == [7.0] * 10 + [8.0] * 10
    x.untyped_storage().resize_(0)
    assert lag.memory().allocated_bytes == before


def test_tensors_can_be_pointed_at_other_storages(lag: LagDevice) -> None:
    x = lag.tensor(torch.arange(6.0))
    y = torch.empty(0, device="lag")
    assert y.set_(x.untyped_storage()).cpu().tolist() == list(range(6))
    assert y.set_(x.untyped_storage(), 2, (2,), (2,)).cpu().tolist() == [2.0, 4.0]
    assert y.set_(x[1:3]).cpu().tolist() == [1.0, 2.0]
    assert y.set_().numel() == 0


def test_autograd_modules_and_deep_copies_work(lag: LagDevice) -> None:
    import copy

    model = copy.deepcopy(torch.nn.Linear(3, 1).to("lag"))
    model(torch.ones(2, 3, device="lag")).sum().backward()
    assert model.weight.grad.cpu().tolist() == [[2.0, 2.0, 2.0]]
    assert {name: value.device.type for name, value in model.state_dict().items()} == {"weight": "lag", "bias": "lag"}


def test_device_memory_is_no_numpy_array(lag: LagDevice) -> None:
    x = lag.tensor(torch.zeros(3))
    with pytest.raises(TypeError, match="lag"):
        x.numpy()
    with pytest.raises(ValueError, match="lag"):
        x.__dlpack_device__()


# ---- counters, synchronises, failures


def test_the_names_of_the_counters_are_those_of_the_device(lag: LagDevice) -> None:
    assert {field.name for field in fields(Counters)} == lag.lagdev.counters(0).keys()


def test_synchronises_are_counted_by_kind_and_waits_only_where_there_was_work(lag: LagDevice) -> None:
    lag.event().synchronize()
    lag.current_stream().synchronize()
    lag.reset_counters()
    lag.event()
    lag.current_stream().synchronize()
    torch.accelerator.synchronize(0)
    lag.synchronize()  # the frame's own is nobody's doing
    torch.lag.empty_cache()
    counted = lag.counters()
    assert (counted.stream_syncs, counted.device_syncs, counted.empty_cache) == (1, 1, 1)
    latch = lag.hold()
    latch.open_on_wait()
    lag.current_stream().synchronize()
    assert (lag.counters() - counted).host_waits == 1


def test_device_wide_synchronises_can_be_forbidden(lag: LagDevice) -> None:
    lag.forbid_device_sync()
    with pytest.raises(RuntimeError, match="forbidden by the test"):
        torch.accelerator.synchronize(1)
    lag.current_stream(1).synchronize()


def test_the_nth_next_copy_fails_when_it_is_issued(lag: LagDevice) -> None:
    x = lag.tensor(torch.ones(10))
    lag.fail_d2h(2)
    assert x.to("cpu", non_blocking=True).is_pinned()
    with pytest.raises(RuntimeError, match="was made to fail"):
        x.to("cpu", non_blocking=True)
    assert x.cpu().sum() == 10


def test_a_copy_that_fails_on_its_stream_breaks_the_device_until_it_is_cleared(lag: LagDevice) -> None:
    x = lag.tensor(torch.ones(10))
    lag.fail_d2h(late=True)
    with lag.hold():
        host = x.to("cpu", non_blocking=True)
        event = lag.event()
        assert not event.query()
    for ask in (event.synchronize, event.query, lag.current_stream().synchronize, lambda: x.cpu()):
        with pytest.raises(torch.AcceleratorError, match=r"work failed on device 0: lag: this copy was made to fail"):
            ask()
    lag.clear_faults()
    assert event.query()
    assert x.cpu().sum() == 10
    del host


# ---- processes


def run_in_own_process(body: str) -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.path.insert(0, {str(TESTS)!r})\nimport torch\nfrom device import build, lag\n"
    code = start + "device = lag.install(build.build().path)\n" + body
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)


def test_the_interpreter_exits_quietly_with_work_pending(lag: LagDevice) -> None:
    done = run_in_own_process(
        "x = torch.zeros(1 << 20, device='lag')\n"
        "for _ in range(50): x.fill_(1)\n"
        "side = device.stream()\n"
        "latch = lag.LagLatch(device.lagdev, side)\n"
        "with side: y = x.to('cpu', non_blocking=True)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_forked_child_is_told_and_may_let_go_of_tensors(lag: LagDevice) -> None:
    done = run_in_own_process(
        "import os, warnings\n"
        "warnings.simplefilter('ignore')  # about forking with threads: that is the point\n"
        "x = torch.ones(10, device='lag')\n"
        "device.synchronize()  # a thread in the middle of something would leave its locks to the child\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: x.cpu()\n"
        "    except RuntimeError as error: print(str(error).splitlines()[0], flush=True)\n"
        "    print(torch.lag._is_in_bad_fork(), flush=True)\n"
        "    del x\n"
        "    sys.exit(0)\n"
        "print(os.waitpid(pid, 0)[1])\n"
    )
    assert done.stdout.splitlines() == ["lag: the device cannot be used in a forked child process", "True", "0"]
    assert (done.returncode, done.stderr) == (0, "")
