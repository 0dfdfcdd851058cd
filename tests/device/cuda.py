"""Real GPUs behind the frame: how the host holds a CUDA stream, and lets it go.

A held stream waits for a word of host memory (`cuStreamWaitValue32`): no kernel spins, no timer
runs, and opening is one store by the host, which needs neither CUDA nor the interpreter lock of the
thread that is blocked. Where the driver refuses that, a host function waits for a semaphore
(`cuLaunchHostFunc` with the C library's own ``sem_wait``, so Python is not involved either); CUDA
runs host functions one after the other, hence latches then open only in the order they were made.

What to know when writing tests with it:

- A stream takes about a thousand pieces of work before the host blocks: do not queue more behind a
  latch.
- Loading a kernel for the first time may wait for the whole device, and would wait for the latch.
  Hence the settings below, and one round of the usual kernels before the first test.

Source: CUDA Driver API, "Stream Memory Operations" (cuStreamWaitValue32), "Memory Management"
(cuMemHostAlloc, cuMemHostGetDevicePointer), "Execution Control" (cuLaunchHostFunc); CUDA C++
Programming Guide, "Lazy Loading" and "CUDA Environment Variables".
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import torch

from device.frame import Device, Latch

Opener = Callable[[], None]

# Streams that share a hardware queue wait for each other, so a held one would hold others: have as
# many queues as there can be. And load every kernel at the start. Both are read when CUDA starts.
SETTINGS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}

_WAIT_VALUE_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: until (int32_t)(*addr - value) >= 0
_HOST_ALLOC_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: for the contexts of all devices
_HOST_ALLOC_DEVICEMAP = 2  # CU_MEMHOSTALLOC_DEVICEMAP


class _Driver:
    """The few calls of libcuda that are needed, with their signatures."""

    def __init__(self) -> None:
        lib = ctypes.CDLL("libcuda.so.1")
        pointer, unsigned, address = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64
        self.wait_value = self._call(lib, "cuStreamWaitValue32_v2", pointer, address, ctypes.c_uint32, unsigned)
        self.host_alloc = self._call(lib, "cuMemHostAlloc", ctypes.POINTER(pointer), ctypes.c_size_t, unsigned)
        self.device_pointer = self._call(
            lib, "cuMemHostGetDevicePointer_v2", ctypes.POINTER(address), pointer, unsigned
        )
        self.launch_host_func = self._call(lib, "cuLaunchHostFunc", pointer, pointer, pointer)

    @staticmethod
    def _call(lib: ctypes.CDLL, name: str, *argtypes: object) -> Callable[..., int]:
        function = getattr(lib, name)
        function.argtypes = argtypes
        function.restype = ctypes.c_int
        return function


def _check(status: int, call: str) -> None:
    if status != 0:
        raise RuntimeError(f"{call} failed with CUDA driver error {status}")


class _FlagHolder:
    """Streams wait for words of mapped host memory.

    Words are never reset, since a stream may not have looked yet: each hold of a word waits for a
    value one higher than the hold before, and a word is used again only after the host opened it.
    """

    WORDS = 256
    STRIDE = 64  # a cache line each

    def __init__(self, driver: _Driver) -> None:
        self._driver = driver
        host = ctypes.c_void_p()
        flags = _HOST_ALLOC_PORTABLE | _HOST_ALLOC_DEVICEMAP
        # Once, at the start: pinning memory while a stream is held might wait for that stream.
        _check(driver.host_alloc(ctypes.byref(host), self.WORDS * self.STRIDE, flags), "cuMemHostAlloc")
        assert host.value is not None
        self._host = host.value  # never freed: a stream may look at it until the process ends
        ctypes.memset(self._host, 0, self.WORDS * self.STRIDE)
        self._free = list(range(self.WORDS))
        self._values = [0] * self.WORDS

    def hold(self, handle: int) -> Opener:
        word = self._free.pop(0)
        self._values[word] += 1
        value = self._values[word]
        _check(self._wait(handle, word, value), "cuStreamWaitValue32")

        def open_it() -> None:
            ctypes.c_uint32.from_address(self._host + word * self.STRIDE).value = value
            self._free.append(word)

        return open_it

    def works_on(self, handle: int) -> bool:
        """Try a wait that is over at once."""
        return self._wait(handle, 0, 0) == 0

    def _wait(self, handle: int, word: int, value: int) -> int:
        # Asked for again each time, since the answer belongs to the current device.
        mapped = ctypes.c_uint64()
        host = ctypes.c_void_p(self._host + word * self.STRIDE)
        _check(self._driver.device_pointer(ctypes.byref(mapped), host, 0), "cuMemHostGetDevicePointer")
        return self._driver.wait_value(handle, mapped, value, _WAIT_VALUE_GEQ)


class _SemaphoreHolder:
    """A host function on the stream waits for a semaphore of the C library."""

    SEMAPHORE_BYTES = 64  # sizeof(sem_t) is 32 on 64-bit Linux

    def __init__(self, driver: _Driver) -> None:
        self._driver = driver
        libc = ctypes.CDLL(None)
        for name, *argtypes in (
            ("sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint),
            ("sem_post", ctypes.c_void_p),
            ("sem_wait", ctypes.c_void_p),
        ):
            getattr(libc, name).argtypes = argtypes
        self._libc = libc
        self._semaphores: list[object] = []  # kept for ever: CUDA may look at them late

    def hold(self, handle: int) -> Opener:
        semaphore = ctypes.create_string_buffer(self.SEMAPHORE_BYTES)
        self._semaphores.append(semaphore)
        self._libc.sem_init(semaphore, 0, 0)
        wait = ctypes.cast(self._libc.sem_wait, ctypes.c_void_p)
        at = ctypes.cast(semaphore, ctypes.c_void_p)
        _check(self._driver.launch_host_func(handle, wait, at), "cuLaunchHostFunc")
        return lambda: self._libc.sem_post(semaphore)


class CudaDevice(Device):
    """The GPUs of this machine."""

    type = "cuda"

    def __init__(self) -> None:
        for index in range(torch.cuda.device_count()):
            self._warm_up(index)
        driver = _Driver()
        flags = _FlagHolder(driver)
        probed = [self._probe(flags, index) for index in range(torch.cuda.device_count())]
        self._holder: _FlagHolder | _SemaphoreHolder = flags if all(probed) else _SemaphoreHolder(driver)
        super().__init__(torch.cuda.device_count(), {"many_latches"} if all(probed) else set())

    def synchronize(self, index: int | None = None) -> None:
        for one in range(self.count) if index is None else [index]:
            torch.cuda.synchronize(one)

    def _hold(self, stream: torch.Stream) -> Latch:
        cuda_stream = _as_cuda_stream(stream)
        marker = torch.cuda.Event()
        with torch.cuda.device(stream.device):  # driver calls mean the current device's context
            do_open = self._holder.hold(cuda_stream.cuda_stream)
            marker.record(cuda_stream)
        return Latch(do_open, is_pending=lambda: not marker.query())

    @staticmethod
    def _probe(flags: _FlagHolder, index: int) -> bool:
        with torch.cuda.device(index):
            stream = torch.cuda.Stream()
            works = flags.works_on(stream.cuda_stream)
            stream.synchronize()
        return works

    @staticmethod
    def _warm_up(index: int) -> None:
        """Run the kernels that tests queue behind latches, and fill both memory caches a little."""
        device = torch.device("cuda", index)
        for dtype in (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64):
            x = torch.zeros(64, 64, device=device).to(dtype)
            x.fill_(1)
            x.zero_()
            (x + 1).t().contiguous().to(torch.complex64 if dtype.is_complex else torch.float32)
            x.to("cpu", non_blocking=True)
            x.t()[::2].to("cpu")
        z = torch.zeros(64, dtype=torch.complex64, device=device)
        z.conj().clone()
        z.imag.neg().clone()
        kept = [torch.empty(1 << power, dtype=torch.uint8, pin_memory=True) for power in range(6, 24) for _ in range(4)]
        torch.cuda.synchronize(index)
        del kept


def _as_cuda_stream(stream: torch.Stream) -> torch.cuda.Stream:
    """Give a device-neutral stream its CUDA face: the same stream, with a handle for the driver."""
    if isinstance(stream, torch.cuda.Stream):
        return stream
    return torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def make() -> CudaDevice | None:
    """Start CUDA with the settings that latches need, and return its face; nothing without a GPU."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    return CudaDevice() if torch.cuda.is_available() else None
