"""The direct way: one tiny leaf, on the caller's own stream, where a second stream costs more than the copy."""

from __future__ import annotations

import time

from hostward._devices import Backend, Event
from hostward._engine._naps import pause
from hostward._torch import torch


def fetch(tensor: torch.Tensor, backend: Backend, index: int, *, pinned: bool) -> torch.Tensor:
    """Return `tensor` as a CPU tensor, read behind everything queued on the caller's stream.

    On an idle stream torch's blocking copy is as fast as anything. Behind a busy one it would hold the thread where
    Ctrl-C does not reach it, so the stream's event is waited for first.
    """
    if pinned:
        host = tensor.to("cpu", non_blocking=True)  # into torch's pinned pool
        wait(backend.record(index))
        return host
    if not backend.is_idle(index):
        wait(backend.record(index))
    return tensor.cpu()


def wait(event: Event) -> None:
    """Wait for an event so that Ctrl-C is seen within milliseconds."""
    since = time.monotonic()
    while not event.query():
        pause(since, time.sleep)
