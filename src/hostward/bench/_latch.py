"""Hold a CUDA stream until a flag in host memory is raised: what makes an early read certain to show.

Guarantees:

* What is queued on the held stream after `Gate.hold` does not run before the flag is up.
* The flag goes up after the delay of `Gate.open_in` whatever the interpreter does meanwhile. A blocking
  way waits for the stream inside torch, perhaps with the interpreter's lock taken; a timer written in
  Python could then never run. So the *kernel* raises the flag: a thread sits in ``read(2)`` on a
  ``timerfd``, without the lock, and the eight bytes which that call delivers land in the flag itself.
* `Gate.keep_shut` stops the timer, so a way that came back early is examined while its copy still waits.

Assumptions: Linux, and a driver that offers ``cuStreamWaitValue32`` on mapped host memory. Where either
is missing `open_gate` returns ``None``, which means "not measured".

Sources: CUDA Driver API, "Stream Memory Operations" and ``cuMemHostAlloc``; ``timerfd_create(2)``.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CLOCK_MONOTONIC = 1
_TFD_CLOEXEC = 0o2000000
_MEMHOSTALLOC_PORTABLE_AND_MAPPED = 0x01 | 0x02
_WAIT_VALUE_GEQ = 0x0
_UP = 1


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _TimerSpec(ctypes.Structure):
    _fields_ = [("interval", _Time), ("value", _Time)]


class TimedFlag:
    """Eight bytes of the caller's memory, 0 until the kernel's timer makes them 1.

    Parameters
    ----------
    address
        Where the flag is: aligned, writable, alive as long as this object.

    Raises
    ------
    OSError
        The system has no ``timerfd``.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self._flag = ctypes.c_uint64.from_address(address)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._reader: threading.Thread | None = None
        if not hasattr(self._libc, "timerfd_create"):
            raise OSError("no timerfd on this system")
        self._timer = int(self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_CLOEXEC))
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._flag.value = 0

    def is_up(self) -> bool:
        """Whether the flag has been raised."""
        return bool(self._flag.value)

    def lower(self) -> None:
        """Put the flag down; only between two uses."""
        self._finish()
        self._flag.value = 0

    def raise_in(self, delay_s: float) -> None:
        """Start the timer. On return a thread waits in the kernel, without the interpreter's lock."""
        self._set(delay_s)
        entered = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(entered,), name="hostward-bench-latch", daemon=True)
        self._reader.start()
        entered.wait()
        # The thread says so just before the call that lets go of the lock: leave it the lock for that.
        time.sleep(0.002)

    def stop(self) -> bool:
        """Stop the timer; return True while the flag is still down."""
        self._set(0.0)
        return not self.is_up()

    def raise_now(self) -> None:
        """Raise the flag, whatever the timer is doing."""
        self._finish()
        self._flag.value = _UP

    def close(self) -> None:
        """Raise the flag for good and give the timer back."""
        if self._timer >= 0:
            self.raise_now()
            self._libc.close(self._timer)
            self._timer = -1

    def _finish(self) -> None:
        if self._reader is not None:
            self._set(1e-9)  # where the timer has fired, this tick is dropped by the next `_set`
            self._reader.join()
            self._reader = None

    def _set(self, delay_s: float) -> None:
        whole = int(delay_s)
        spec = _TimerSpec(_Time(0, 0), _Time(whole, round((delay_s - whole) * 1e9)))
        if self._libc.timerfd_settime(self._timer, 0, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _read(self, entered: threading.Event) -> None:
        entered.set()
        while self._libc.read(self._timer, ctypes.c_void_p(self._address), ctypes.c_size_t(8)) != 8:
            pass  # interrupted by a signal


class Gate:
    """Holds a stream of its own on one CUDA device; `stream` makes that stream the current one.

    Not thread-safe. `open` is idempotent and has to be reached on every path (``finally``): a stream
    that stays held blocks whoever synchronises the device next.
    """

    def __init__(self, device: torch.device) -> None:
        from hostward._torch import torch

        torch.zeros(1, device=device)  # the driver calls below need the device's context
        self._torch, self._device = torch, device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._host = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(self._host), ctypes.c_size_t(64), _MEMHOSTALLOC_PORTABLE_AND_MAPPED)
        mapped = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(mapped), self._host, 0)
        self._mapped = mapped
        assert self._host.value is not None
        self._flag = TimedFlag(self._host.value)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Make the gate's stream current, ordered after all work of the device so far."""
        self._torch.cuda.synchronize(self._device)
        with self._torch.cuda.device(self._device), self._torch.cuda.stream(self._stream):
            yield

    def hold(self) -> None:
        """Make the stream wait for the flag; what is queued from now on runs after it."""
        self._flag.lower()
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        self._call("cuStreamWaitValue32_v2", stream, self._mapped, ctypes.c_uint32(_UP), _WAIT_VALUE_GEQ)

    def open_in(self, delay_s: float) -> None:
        """Open after `delay_s`, even while the interpreter's lock is taken."""
        self._flag.raise_in(delay_s)

    def keep_shut(self) -> bool:
        """Stop the timer; return True if the stream is still held."""
        return self._flag.stop()

    def open(self) -> None:
        """Open now and wait until the device is idle."""
        self._flag.raise_now()
        self._torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Open for good and give the flag's memory back; after a second call nothing happens."""
        if self._host:
            self.open()
            self._flag.close()
            self._driver.cuMemFreeHost(self._host)
            self._host = ctypes.c_void_p()

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._driver, name, None)
        status = -1 if function is None else int(function(*arguments))
        if status:
            raise OSError(f"{name}: {'not offered by this driver' if function is None else f'error {status}'}")


def open_gate(device: torch.device) -> Gate | None:
    """Return a gate for a CUDA device, or ``None`` where a stream cannot be held this way."""
    try:
        gate = Gate(device)
    except OSError:
        return None
    try:
        with gate.stream():
            gate.hold()  # the one call that a driver may refuse
            gate.open()
    except OSError:
        gate.close()
        return None
    return gate
