"""How CUDA streams are held, without CUDA: a driver that writes down what it is asked for."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from device import cuda


class RecordingDriver:
    """Host memory is a buffer; waits are noted; host functions run on a thread, as CUDA runs them."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int, int]] = []  # stream, address, value
        self.threads: list[threading.Thread] = []
        self.status = 0

    def host_alloc(self, where: Any, nbytes: int, flags: int) -> int:
        assert flags == 0x01 | 0x02  # portable, mapped
        self.memory = ctypes.create_string_buffer(b"\xff" * nbytes, nbytes)
        where._obj.value = ctypes.addressof(self.memory)
        return 0

    def device_pointer(self, where: Any, host: ctypes.c_void_p, flags: int) -> int:
        assert flags == 0
        where._obj.value = host.value
        return 0

    def wait_value(self, stream: int, address: ctypes.c_uint64, value: int, flags: int) -> int:
        assert flags == 0  # until the word is greater or equal
        self.waits.append((stream, address.value, value))
        return self.status

    def launch_host_func(self, stream: int, function: ctypes.c_void_p, data: ctypes.c_void_p) -> int:
        assert function.value is not None
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value)
        self.threads.append(threading.Thread(target=call, args=(data,), daemon=True))
        self.threads[-1].start()
        return 0

    def passes(self, wait: int) -> bool:
        _, address, value = self.waits[wait]
        return ctypes.c_int32.from_address(address).value - value >= 0


@pytest.fixture
def driver() -> RecordingDriver:
    return RecordingDriver()


def test_a_flag_holds_its_stream_until_it_is_opened(driver: RecordingDriver) -> None:
    holder = cuda._FlagHolder(driver)
    first, second = holder.hold(11), holder.hold(22)
    assert [stream for stream, _, _ in driver.waits] == [11, 22]
    assert (driver.passes(0), driver.passes(1)) == (False, False)
    second()
    assert (driver.passes(0), driver.passes(1)) == (False, True)
    first()
    assert driver.passes(0)


def test_words_are_used_again_without_being_reset(driver: RecordingDriver) -> None:
    holder = cuda._FlagHolder(driver)
    for _ in range(2 * holder.WORDS):
        holder.hold(1)()
    opened = len(driver.waits)
    still_held = holder.hold(1)
    assert not driver.passes(opened)
    assert all(driver.passes(wait) for wait in range(opened))  # a stream that looks late passes, too
    still_held()


def test_a_driver_that_refuses_is_found_out(driver: RecordingDriver) -> None:
    holder = cuda._FlagHolder(driver)
    assert holder.works_on(7)
    driver.status = 801  # CUDA_ERROR_NOT_SUPPORTED
    assert not holder.works_on(7)
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32 failed with CUDA driver error 801"):
        holder.hold(7)


def test_a_semaphore_holds_a_host_function(driver: RecordingDriver) -> None:
    holder = cuda._SemaphoreHolder(driver)
    opener = holder.hold(1)
    assert driver.threads[0].is_alive()
    opener()
    driver.threads[0].join(timeout=10)
    assert not driver.threads[0].is_alive()
