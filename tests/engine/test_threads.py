"""Sixteen threads, two devices, held streams that open in any order: right bytes, a bounded ring, and no deadlock."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hostward as hw
from device.frame import Device
from device.schedules import schedules
from engine.rig import WAIT_S, idle, numbers, ring_of, shrink_rings
from hostward._engine import _direct

THREADS = 16
STREAMS = 4

VIEWS = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x[:, ::2],
    lambda x: x[:1, :3],
    lambda x: x[0, 0].expand(5, 7),
]


class Job:
    """One thread's tree. Its values are written behind the hold; until then the memory is full of others."""

    def __init__(self, device: Device, dice: random.Random, stream: list[torch.Stream]) -> None:
        self.stream = stream
        self.memory = dice.choice(["auto", "pinned"])
        self.bare = dice.random() < 0.3
        self.parts = []
        for _ in range(1 if self.bare else dice.randint(1, 4)):
            cpu, index, view = numbers(40, dice.randint(3, 200)), dice.randrange(device.count), dice.choice(VIEWS)
            before = device.tensor(torch.full_like(cpu, -1), index)
            self.parts.append((cpu, device.tensor(cpu, index), before, view))

    def __call__(self) -> None:
        for stream in self.stream:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(0)
        for _, after, before, _ in self.parts:
            before.copy_(after)
        tree = [view(before) for _, _, before, view in self.parts]
        found = hw.to_numpy(tree[0] if self.bare else tree, memory=self.memory)
        for array, (cpu, _, _, view) in zip([found] if self.bare else found, self.parts, strict=True):
            assert np.array_equal(array, view(cpu).numpy())


@settings(max_examples=12)
@given(order=schedules(2 * STREAMS), seed=st.integers(0, 1 << 32))
def test_all_bytes_are_right_in_any_order(device: Device, order: tuple[int, ...], seed: int) -> None:
    device.require("many_latches")
    dice = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch, device.clean():
        shrink_rings(patch)
        patch.setattr(_direct, "_granules", {})
        streams = [_distinct(device, index) for index in range(device.count)]
        jobs = [Job(device, dice, [own[n % STREAMS] for own in streams]) for n in range(THREADS)]
        latches = [device.hold(stream) for own in streams for stream in own]
        start, errors = threading.Barrier(THREADS + 1), []

        def run(job: Job) -> None:
            start.wait(WAIT_S)
            try:
                job()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        start.wait(WAIT_S)
        for n in order:
            threads[dice.randrange(THREADS)].join(0.002)
            latches[n % len(latches)].open()
        for thread in threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in threads), "deadlock"
        if errors:
            raise errors[0]
        for index in range(device.count):
            ring = ring_of(device, index)
            assert idle(ring)
            assert len(ring._alive.get(4 << 10, ())) <= 4
            assert len(ring._alive.get(16 << 10, ())) <= 3


def _distinct(device: Device, index: int) -> list[torch.Stream]:
    found: dict[int, torch.Stream] = {}
    while len(found) < STREAMS:
        stream = device.stream(index)
        found[stream.stream_id] = stream
    return list(found.values())


def test_threads_that_are_left_early_leave_the_others_right(device: Device) -> None:
    """Half of the calls fail in the middle of their flight, again and again, on a ring of a few chunks."""
    device.require("failures")
    with pytest.MonkeyPatch.context() as patch:
        shrink_rings(patch)
        cpu = [numbers(3000) for _ in range(8)]
        trees = [[device.tensor(x, (n + i) % device.count) for i in (0, 1)] for n, x in enumerate(cpu)]
        failed, right = [], []

        def work(n: int) -> None:
            for _ in range(15):
                if n % 2:
                    device.fail_d2h()
                try:
                    arrays = hw.to_numpy(trees[n])
                except hw.errors.TransferError as error:
                    failed.append(error)
                else:
                    assert all(np.array_equal(array, cpu[n]) for array in arrays)
                    right.append(n)

        threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in threads), "deadlock"
        assert len(failed) + len(right) == 8 * 15
        assert failed
        assert right
        assert all(idle(ring_of(device, index)) for index in range(device.count))
