"""Wrong when busy: what a way returns while the work that makes the true values is still waiting.

Asserted from nothing but a run. The source's memory holds the complement of the true bytes, the stream
is held, the copy that writes the true bytes is queued behind, the way is called, and what it returned
is compared in full. A way that came back while the stream was held is examined before it is let go; for
a way that waits, the stream opens by itself after a short delay.

A gate that holds nothing would make every way look right. So a known offender is run first
(`control_share`): unless all its values are wrong, nothing is claimed about the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hostward.bench._bytes import compare
from hostward.bench._case import Data, Way

if TYPE_CHECKING:
    import torch

DELAY_S = 0.25
POISON_CALLS = 2
CONTROL = Way('.to("cpu", non_blocking=True).numpy()', 'x.to("cpu", non_blocking=True).numpy()')


class Holds(Protocol):
    """What the busy test needs of a device; `_latch.Gate` is the CUDA one."""

    def stream(self) -> AbstractContextManager[None]: ...
    def hold(self) -> None: ...
    def open_in(self, delay_s: float) -> None: ...
    def keep_shut(self) -> bool: ...
    def open(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Busy:
    """`wrong_share`: elements with wrong bytes, 0 to 1. `returned_early`: while the stream was held."""

    wrong_share: float
    returned_early: bool


def run_busy(call: Callable[[], Any], data: Data, gate: Holds, delay_s: float = DELAY_S) -> Busy:
    """Call a way behind a held stream and compare what it returned.

    The sources hold their true bytes again afterwards, also when the way raised.

    Notes
    -----
    The way runs twice on the complement first, and those results are dropped: recycled host memory
    then holds wrong bytes, and a copy that has not landed cannot pass for one that has.
    """
    with gate.stream():
        bytes_of = [_storage_bytes(data.names[name]) for name in data.sources]
        true = [flat.clone() for flat in bytes_of]
        for flat in bytes_of:
            flat.bitwise_not_()
        gate.open()
        try:
            for _ in range(POISON_CALLS):
                call()
            gate.open()
            gate.hold()
            _write(bytes_of, true)
            gate.open_in(delay_s)
            result = call()
            early = gate.keep_shut()
            return Busy(compare(result, data.reference).wrong_share, early)
        finally:
            gate.open()
            _write(bytes_of, true)
            gate.open()


def control_share(gate: Holds, device: torch.device) -> float:
    """Return the wrong share of a way known to read too early; anything but 1.0 means: the gate leaks."""
    from hostward._torch import torch

    reference = np.arange(1, (1 << 20) + 1, dtype=np.float32)
    data = Data({"x": torch.from_numpy(reference).to(device, copy=True)}, reference)
    return run_busy(CONTROL.compile(data.names), data, gate).wrong_share


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    from hostward._torch import torch

    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _write(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value, non_blocking=True)
