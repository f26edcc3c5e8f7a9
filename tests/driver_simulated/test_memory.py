"""Memory: bounds, lifetimes, pools and copies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from greensched.driver.simulated import PRESETS
from greensched.driver.simulated.address_space import POISON_LIMIT, POOL_STEP, STREAM_BYTES
from greensched.driver.types import StreamHandle
from greensched.errors import CUDAError, DriverMisuse, OutOfMemory

from .machine import Machine, on_thread

Make = Callable[..., Machine]
MIB = 2**20
#: 100 MiB for pools, and what a stream takes.
TOTAL = 100 * MIB + STREAM_BYTES
SMALL = replace(PRESETS["t4"], memory_bytes=TOTAL)


def download(machine: Machine, address: int, nbytes: int, stream: StreamHandle) -> bytes:
    memory = machine.pinned(nbytes)
    machine.driver.copy_to_host(memory.address, address, nbytes, stream)
    machine.driver.synchronize_stream(stream)
    return bytes(memory.view)


# -- bytes --------------------------------------------------------------------------------------


def test_copies_move_bytes(machine: Machine) -> None:
    """Copies to, within and from the device move the right bytes at every offset."""
    driver, stream = machine.driver, machine.stream()
    data = np.random.default_rng(1).integers(0, 256, 1000, np.uint8)
    source = machine.pinned(1000)
    source.view[:] = data.tobytes()
    one, two = machine.device_memory(1000, stream), machine.device_memory(1000, stream)
    driver.copy_to_device(one, source.address, 1000, stream)
    driver.copy(two, one, 1000, stream)
    driver.copy(two + 10, one + 500, 100, stream)
    expected = data.copy()
    expected[10:110] = data[500:600]
    assert download(machine, two, 1000, stream) == expected.tobytes()
    assert download(machine, two + 600, 400, stream) == expected[600:].tobytes()


def test_fresh_device_memory_is_poisoned(machine: Machine) -> None:
    """Unwritten memory reads as 0xFF (NaN, -1), so that reading it shows."""
    stream = machine.stream()
    for nbytes in (1, 64, POISON_LIMIT):
        address = machine.device_memory(nbytes, stream)
        assert download(machine, address, nbytes, stream) == b"\xff" * nbytes
    again = machine.device_memory(64, stream)
    machine.driver.set_bytes(again, 0, 64, stream)
    machine.driver.free(again, stream)
    fresh = machine.device_memory(64, stream)
    assert download(machine, fresh, 64, stream) == b"\xff" * 64


def test_pinned_memory_is_zeroed_and_seen_by_both(machine: Machine) -> None:
    """It has one address on both sides, and begins with zeros."""
    memory = machine.pinned(100)
    assert bytes(memory.view) == bytes(100)
    assert memory.address == memory.device_address
    assert memory.nbytes == len(memory.view) == 100
    machine.driver.set_bytes(memory.device_address + 10, 7, 5, machine.stream())
    machine.finish()
    assert bytes(memory.view) == bytes(10) + b"\x07" * 5 + bytes(85)


def test_setting_bytes(machine: Machine) -> None:
    """Only the given range is filled."""
    stream = machine.stream()
    address = machine.device_memory(16, stream)
    machine.driver.set_bytes(address, 0, 16, stream)
    machine.driver.set_bytes(address + 4, 0xAB, 8, stream)
    assert download(machine, address, 16, stream) == bytes(4) + b"\xab" * 8 + bytes(4)
    for wrong in (-1, 256):
        with pytest.raises(DriverMisuse, match="not a byte"):
            machine.driver.set_bytes(address, wrong, 16, stream)


# -- bounds and ends ----------------------------------------------------------------------------


def test_nothing_reaches_beyond_its_allocation(machine: Machine) -> None:
    """A copy or fill outside of its allocation is refused."""
    driver, stream = machine.driver, machine.stream()
    address, memory = machine.device_memory(100, stream), machine.pinned(200)
    machine.device_memory(100, stream)  # the next one is never adjacent
    for at, nbytes in ((address, 101), (address + 1, 100), (address - 1, 1), (address + 100, 1)):
        for call in (
            lambda: driver.set_bytes(at, 0, nbytes, stream),  # noqa: B023
            lambda: driver.copy_to_device(at, memory.address, nbytes, stream),  # noqa: B023
            lambda: driver.copy_to_host(memory.address, at, nbytes, stream),  # noqa: B023
            lambda: driver.copy(address, at, nbytes, stream),  # noqa: B023
        ):
            with pytest.raises(DriverMisuse, match="out of bounds"):
                call()
    driver.set_bytes(address + 100, 0, 0, stream)


def test_copies_take_pinned_memory_only(machine: Machine) -> None:
    """Pageable host memory is refused, because a real driver would block."""
    stream = machine.stream()
    address, pageable = machine.device_memory(64, stream), np.zeros(64, np.uint8)
    for call in (
        lambda: machine.driver.copy_to_device(address, pageable.ctypes.data, 64, stream),
        lambda: machine.driver.copy_to_host(pageable.ctypes.data, address, 64, stream),
    ):
        with pytest.raises(DriverMisuse, match="pageable host memory blocks"):
            call()


def test_memory_is_not_used_after_its_end(machine: Machine) -> None:
    """A freed address is invalid at once and is never reused."""
    driver, stream = machine.driver, machine.stream()
    address = machine.device_memory(64, stream)
    driver.free(address, stream)
    for call in (
        lambda: driver.free(address, stream),
        lambda: driver.set_bytes(address, 0, 1, stream),
    ):
        with pytest.raises(DriverMisuse, match="freed"):
            call()
    assert machine.device_memory(64, stream) != address
    memory = machine.pinned(64)
    driver.free_host(memory)
    with pytest.raises(DriverMisuse, match="freed"):
        driver.free_host(memory)


def test_memory_ends_where_it_was_made(machine: Machine) -> None:
    """Pinned memory and pool memory are freed by their own calls only."""
    driver, stream = machine.driver, machine.stream()
    memory, address = machine.pinned(64), machine.device_memory(64, stream)
    with pytest.raises(DriverMisuse, match="is pinned memory"):
        driver.free(memory.address, stream)
    with pytest.raises(DriverMisuse, match="is device memory"):
        driver.free_host(replace(memory, address=address))
    with pytest.raises(DriverMisuse, match="no live allocation"):
        driver.free(address + 8, stream)
    driver.copy_to_device(address, memory.address, 64, stream)
    driver.free(address, stream)
    driver.free_host(memory)


def test_work_in_flight_keeps_its_bytes(machine: Machine) -> None:
    """A copy whose source is freed meanwhile still moves the bytes."""
    driver, stream = machine.driver, machine.stream()
    address = machine.device_memory(4, stream)
    gate = machine.hold(stream)
    driver.set_bytes(address, 9, 4, stream)
    target = machine.pinned(4)
    driver.copy_to_host(target.address, address, 4, stream)
    driver.free(address, stream)
    gate.value = 1
    machine.finish()
    assert bytes(target.view) == b"\x09" * 4


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_is_no_size(machine: Machine, nbytes: int) -> None:
    """Zero and negative sizes are invalid values."""
    stream = machine.stream()
    with pytest.raises(CUDAError, match="INVALID_VALUE"):
        machine.device_memory(nbytes, stream)
    with pytest.raises(CUDAError, match="INVALID_VALUE"):
        machine.pinned(nbytes)


# -- pools --------------------------------------------------------------------------------------


def test_a_pool_keeps_what_it_has(machine: Machine) -> None:
    """It grows in steps, reuses freed memory, and returns all at its end."""
    driver, stream = machine.driver, machine.stream()
    before = driver.memory_info()
    assert before == (PRESETS["h200"].memory_bytes - STREAM_BYTES, PRESETS["h200"].memory_bytes)
    addresses = [machine.device_memory(MIB, stream) for _ in range(33)]
    assert driver.reserved_bytes(machine.pool) == POOL_STEP * 2
    assert driver.memory_info()[0] == before[0] - POOL_STEP * 2
    for address in addresses:
        driver.free(address, stream)
    machine.finish()
    for _ in range(50):
        driver.free(machine.device_memory(MIB, stream), stream)
    machine.finish()
    assert driver.reserved_bytes(machine.pool) == POOL_STEP * 2
    driver.destroy_memory_pool(machine.pool)
    assert driver.memory_info() == before


def test_a_pool_does_not_end_in_use(machine: Machine) -> None:
    """A pool with live memory cannot be destroyed."""
    stream = machine.stream()
    address = machine.device_memory(64, stream)
    with pytest.raises(DriverMisuse, match="in use"):
        machine.driver.destroy_memory_pool(machine.pool)
    machine.driver.free(address, stream)
    machine.finish()
    machine.driver.destroy_memory_pool(machine.pool)


def test_memory_comes_back_behind_the_stream(machine: Machine) -> None:
    """Freed bytes return when the stream gets there."""
    driver, stream = machine.driver, machine.stream()
    address = machine.device_memory(POOL_STEP, stream)

    def body() -> None:
        gate = machine.hold(stream)
        driver.free(address, stream)
        machine.device_memory(POOL_STEP, stream)
        assert driver.reserved_bytes(machine.pool) == 2 * POOL_STEP
        gate.value = 1
        driver.synchronize_stream(stream)
        machine.device_memory(POOL_STEP, stream)
        assert driver.reserved_bytes(machine.pool) == 2 * POOL_STEP

    machine.inside(body)


def test_running_out_of_memory_leaves_everything_usable(make: Make) -> None:
    """The error has the requested and available bytes, and takes nothing."""
    machine = make([SMALL])
    driver, stream = machine.driver, machine.stream()
    first = machine.device_memory(90 * MIB, stream)
    with pytest.raises(OutOfMemory) as caught:
        machine.device_memory(20 * MIB, stream)
    error = caught.value
    assert (error.asked, error.free, error.total) == (20 * MIB, 10 * MIB, TOTAL)
    assert driver.memory_info() == (10 * MIB, TOTAL)
    last = machine.device_memory(10 * MIB, stream)  # less than a step, and all there is
    assert driver.memory_info() == (0, TOTAL)
    for address in (first, last):
        driver.free(address, stream)
    machine.finish()
    driver.free(machine.device_memory(100 * MIB, stream), stream)
    assert driver.live()["allocation"] == 0


def test_contexts_and_streams_take_memory(make: Make) -> None:
    """Without memory they are refused, and once some returns they fit."""
    machine = make([SMALL])
    driver, stream = machine.driver, machine.stream()
    address = machine.device_memory(100 * MIB, stream)
    before = driver.live()
    for make_one in (machine.green, machine.stream):
        with pytest.raises(OutOfMemory, match=", 0 bytes free"):
            make_one()
    assert driver.live() == before
    driver.free(address, stream)
    machine.finish()
    driver.destroy_memory_pool(machine.pool)
    machine.stream(machine.green())


def test_devices_have_memory_of_their_own(make: Make) -> None:
    """A pool takes memory of its device, whatever stream orders the allocation."""
    machine = make([SMALL, SMALL])
    driver, stream = machine.driver, machine.stream()
    other = driver.create_memory_pool(1)
    address = driver.allocate(other, 90 * MIB, stream)
    assert driver.memory_info() == (100 * MIB, TOTAL)
    driver.free(address, stream)
    machine.finish()
    driver.destroy_memory_pool(other)
    assert not driver.live()["allocation"]


def test_pools_count_right_from_many_threads(make: Make) -> None:
    """With several threads no byte is lost or counted twice."""
    machine = make(clock=None)
    driver, pool = machine.driver, machine.pool

    def churn() -> set[int]:
        driver.set_current(machine.primary)
        stream = driver.create_stream(None)
        seen = set()
        for _ in range(200):
            addresses = [driver.allocate(pool, 512, stream) for _ in range(3)]
            seen.update(addresses)
            for address in addresses:
                driver.free(address, stream)
        driver.synchronize_stream(stream)
        return seen

    def several() -> list[set[int]]:
        with ThreadPoolExecutor(4) as executor:
            return [future.result() for future in [executor.submit(churn) for _ in range(4)]]

    seen = on_thread(several)
    assert sum(map(len, seen)) == len(set().union(*seen)) == 4 * 200 * 3
    assert driver.live()["allocation"] == 0
    driver.destroy_memory_pool(pool)  # refused if a byte of it counted as used
