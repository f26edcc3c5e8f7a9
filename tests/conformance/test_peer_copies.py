"""Copies between a pool's devices: directly with peer access, and otherwise through the host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest

import greensched
from greensched import LaunchConfig, Partition, Pool, WouldBlock, WrongDevice
from greensched.device.staging import CHUNK
from greensched.device.staging_ring import SLOT
from greensched.kernels import fill
from helpers.backend import Backend, Devices
from helpers.devices import DEVICE
from helpers.gate import Gate
from helpers.waiting import still_waits

IS_VERSIONED = False

#: Two devices with a way between them, also of CUDA 13.1, and two kinds of pair without one.
PAIRS = ((DEVICE, DEVICE), "h20x2@13.1", "rtx4090x2", "h20+h200")
#: Those that are the same on every loop and clock, so they run on one.
ONCE = PAIRS[1:3]
RNG = np.random.default_rng(11)
ONES = np.ones(CHUNK // 4 + 100, np.float32)

pytestmark = pytest.mark.parametrize("pair", PAIRS, ids=["alike", *PAIRS[1:]])


def two(backend: Backend, pair: Devices) -> Pool:
    """Yield a pool over two devices; skip combinations that others cover."""
    if pair in ONCE and (backend.kind, backend.loop) != ("real", "asyncio"):
        pytest.skip(
            f"{pair} copies in the same way everywhere: it runs on asyncio and the real clock"
        )
    if not backend.is_simulated and pair != PAIRS[0]:
        pytest.skip(
            "only a simulated machine has this pair: on a real one its own devices run, once"
        )
    return backend.pair(pair)


@asynccontextmanager
async def both(backend: Backend, pair: Devices) -> AsyncIterator[tuple[Partition, Partition]]:
    """Yield a partition of each of the two devices."""
    async with two(backend, pair) as pool:
        async with pool.partition(8, device=0) as p, pool.partition(8, device=1) as q:
            yield p, q


@pytest.mark.parametrize("size", [0, 3, SLOT, SLOT + 1, CHUNK, 2 * CHUNK + SLOT + 1])
def test_what_is_copied_to_another_device_and_back_arrives(
    backend: Backend, pair: Devices, size: int
) -> None:
    """An array of any size returns from the other device, copied by either partition."""
    array = RNG.integers(0, 256, size, np.uint8)

    async def main() -> None:
        async with both(backend, pair) as (p, q):
            buffers = [await p.upload(array), await q.empty_like(array), await q.empty_like(array)]
            with buffers[0] as here, buffers[1] as there, buffers[2] as also:
                await p.copy(there, here)
                await q.copy(also, here)
                await p.copy(here, np.zeros_like(array))
                np.testing.assert_array_equal(await q.download(there), array)
                np.testing.assert_array_equal(await q.download(also), array)
                await q.copy(here, there)
                np.testing.assert_array_equal(await p.download(here), array)
                await p.copy(here, np.zeros_like(array))
                await p.copy(here, also)
                np.testing.assert_array_equal(await p.download(here), array)

    backend.run(main)


@pytest.mark.parametrize("value", [np.ones(8, np.float32), ONES], ids=["small", "large"])
def test_a_copy_waits_for_the_writer_on_the_other_device(
    backend: Backend, pair: Devices, value: np.ndarray
) -> None:
    """A copy sees all earlier writes and no later ones."""

    async def main() -> None:
        async with both(backend, pair) as (p, q):
            with await p.upload(value * 0) as here, await q.upload(value * 0) as there:
                await p.copy(here, there)  # so that it is known whether there is a way
                with await Gate.closed(q) as gate:
                    q.copy(there, value)
                    copied = p.copy(here, there)
                    q.copy(there, value * 2)
                    await still_waits(copied)
                    gate.open()
                np.testing.assert_array_equal(await p.download(here), value)
                np.testing.assert_array_equal(await q.download(there), value * 2)

    backend.run(main)


def test_the_other_device_waits_for_a_copy(backend: Backend, pair: Devices) -> None:
    """Work on the buffer's own device runs after the copy into it."""

    async def main() -> None:
        async with both(backend, pair) as (p, q):
            with await p.upload(ONES) as here, await q.upload(ONES * 0) as there:
                await p.copy(here, here)
                with await Gate.closed(p) as gate:
                    p.copy(there, here)
                    read = q.download(there)
                    with pytest.raises(WouldBlock):
                        _ = there.__cuda_array_interface__
                    await still_waits(read)
                    gate.open()
                np.testing.assert_array_equal(await read, ONES)

    backend.run(main)


def test_devices_copy_in_both_directions_at_once(backend: Backend, pair: Devices) -> None:
    """Executors of both devices upload, copy across and download concurrently."""

    async def there_and_back(pool: Pool, number: int) -> None:
        array = ONES + number
        async with pool.partition(8, device=number % 2) as p:
            async with pool.partition(8, device=1 - number % 2) as q:
                with await p.upload(array) as mine, await q.empty_like(array) as theirs:
                    await p.copy(theirs, mine)
                    with await q.upload(array * 0) as other:
                        await q.copy(other, theirs)
                        await q.copy(mine, other)
                    np.testing.assert_array_equal(await p.download(mine), array)

    async def main() -> None:
        async with two(backend, pair) as pool, anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(there_and_back, pool, number)

    backend.run(main)


def test_neither_of_this_device_is_refused(backend: Backend, pair: Devices) -> None:
    """A copy needs a buffer of the partition's device, and equal shapes."""

    async def main() -> None:
        async with both(backend, pair) as (p, q):
            with await q.empty(8) as a, await q.empty(8) as b, await p.empty(9) as mine:
                with pytest.raises(WrongDevice, match="device 1, but is used on device 0"):
                    p.copy(a, b)
                with pytest.raises(greensched.InvalidArray, match="differ in shape"):
                    p.copy(mine, b)
                b.close()
                with pytest.raises(greensched.BufferClosed):
                    p.copy(mine, b)

    backend.run(main)


def test_a_buffer_of_the_other_device_is_not_launched_on(backend: Backend, pair: Devices) -> None:
    """A launch refuses it, even if this device wrote it last."""

    async def main() -> None:
        config = LaunchConfig(grid=1, block=8)
        async with both(backend, pair) as (p, q):
            with await p.upload(ONES[:8]) as here, await q.upload(ONES[:8]) as there:
                await p.launch(config, fill, here, 2.0, 8)
                await p.copy(there, here)
                with pytest.raises(WrongDevice, match="device 1, but is used on device 0"):
                    p.launch(config, fill, there, 3.0, 8)

    backend.run(main)
