"""The interpreter ends with flights under way: exit code 0, nothing on standard error, and soon."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from device.frame import Device

TESTS = Path(__file__).resolve().parents[1]
EXITS = int(os.environ.get("HOSTWARD_TEST_EXITS", "6"))  # more of them where there is time
CUDA_EXITS = 3  # each of them starts a context, which takes seconds
LIMIT_S = 60.0

# Different in every process: how many flights, who drives them, which are wanted, when their streams go on (or never).
SCRIPT = f"""
import random, sys, threading
sys.path[:0] = {[str(TESTS), str(TESTS.parent / "src")]!r}
seed, kind = int(sys.argv[1]), sys.argv[2]
if kind == "lag":
    from device import build, lag
    device = lag.install(build.build().path)
else:
    from device import cuda
    device = cuda.make()
from engine.rig import fly, load, numbers
from hostward import _engine
from hostward._engine import _pump

dice = random.Random(seed)
never = kind == "lag" and seed % 4 == 0  # CUDA itself waits for its streams at exit
_pump._EXIT_S = 0.2 if never else 10.0
cargo = load(device, numbers(5000), numbers(3000, 3))
latches = [device.hold(index) for index in range(device.count)]
for number in range(dice.randint(1, 5)):
    tree = [cargo.tensors[0], cargo.tensors[1].t()]
    dice.shuffle(tree)
    flight, _ = fly(tree, memory=dice.choice(["auto", "pinned"]))
    if dice.random() < 0.5:
        flight.abandon(ArithmeticError())
    else:
        _engine.adopt(flight)
del cargo, tree
for latch in latches if not never else ():
    opener = threading.Timer(dice.choice([0, 0.001, 0.05]), latch.open)
    opener.daemon = dice.random() < 0.5
    opener.start()
if dice.random() < 0.5:
    sys.exit(0)
"""


def end(kind: str, seed: int) -> tuple[int, int, str]:
    """Run one process to its end; return its exit code and what it said."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(seed), kind], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return seed, done.returncode, done.stdout + done.stderr


def test_exit_with_flights_under_way(device: Device) -> None:
    exits = min(EXITS, CUDA_EXITS) if device.type == "cuda" else EXITS
    with ThreadPoolExecutor(exits if device.type == "cuda" else 2) as pool:
        ends = list(pool.map(lambda seed: end(device.type, seed), range(exits)))
    assert ends == [(seed, 0, "") for seed in range(exits)]
