"""Bound launches: prepared once, launched often, and ordered with all other work."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import greensched
from greensched import BoundLaunch, Buffer, LaunchConfig, Partition, PinnedBuffer
from greensched.driver.types import DEFAULT_MAX_SHARED_BYTES
from greensched.execution.lease import BATCH, MAX_BOUND_LAUNCHES
from greensched.kernels import fill, saxpy, spin
from greensched.typing import CaptureMode
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.waiting import still_waits, until

IS_VERSIONED = False

CONFIG = LaunchConfig(grid=4, block=128)


async def bound_fill(p: Partition, buffer: Buffer | PinnedBuffer) -> BoundLaunch:
    """Return a launch of `fill`, bound to a buffer of 8 elements."""
    await p.prepare(CONFIG, fill)
    return p.bind(CONFIG, fill, buffer, 1.0, 8)


@pytest.mark.runs_device_code
def test_bound_launches_count(backend: Backend) -> None:
    """Each call of a bound launch runs the kernel once, with its patched arguments."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.upload(np.ones(64, np.float32)) as x:
                with await p.upload(np.zeros(64, np.float32)) as y:
                    await p.prepare(CONFIG, saxpy)
                    bound = p.bind(CONFIG, saxpy, 1.0, x, y, x.size)
                    for _ in range(200):
                        bound()
                    assert (await p.download(y))[0] == 200
                    bound.set(0, 10.0)
                    bound()
                    await bound.submit()
                    assert (await p.download(y))[63] == 220

    backend.run(main)


@pytest.mark.runs_device_code
def test_what_was_bound_before_is_bound_anew(backend: Backend) -> None:
    """A new bound launch reuses a prepared one of an earlier lease, with its own values alone."""

    async def main() -> None:
        async with backend.pool(prepare=[fill]) as pool:
            async with pool.partition(8) as p:
                first = await p.upload(np.zeros(8, np.float32))
                old = p.bind(CONFIG, fill, first, 1.0, 8)
                await old.submit()
            gone = weakref.ref(first)
            with first:
                assert (await pool_download(pool, first) == 1).all()
            del first
            async with pool.partition(8) as p:
                with await p.upload(np.zeros(8, np.float32)) as x, await p.empty_like(x) as y:
                    with pytest.raises(greensched.ArgumentMismatch):
                        p.bind(CONFIG, fill, x, "one", 8)
                    with pytest.raises(greensched.ArgumentMismatch):
                        p.bind(CONFIG, fill, x, 1.0)
                    bounds = [p.bind(CONFIG, fill, x, 2.0, 8), p.bind(CONFIG, fill, y, 3.0, 8)]
                    for bound in bounds:
                        bound()
                    with pytest.raises(greensched.PartitionClosed):
                        old()
                    with pytest.raises(greensched.PartitionClosed):
                        old.set(1, 4.0)
                    assert (await p.download(x) == 2).all()
                    assert (await p.download(y) == 3).all()
            del old, bounds, bound
            gc.collect()
            await until(lambda: gone() is None)  # the mover, still telling of it, may have it

    backend.run(main)


@pytest.mark.runs_device_code
def test_what_is_closed_twice_is_bound_anew_once(backend: Backend) -> None:
    """A bound launch that is closed twice is reused by one other only."""

    async def main() -> None:
        async with backend.pool(prepare=[fill]) as pool:
            async with pool.partition(8) as p:
                x, y = await p.upload(np.zeros(8, np.float32)), await p.empty(8)
                p.bind(CONFIG, fill, x, 1.0, 8).close()
            async with pool.partition(8) as p:
                first, second = p.bind(CONFIG, fill, x, 2.0, 8), p.bind(CONFIG, fill, y, 3.0, 8)
                first()
                second()
                assert ((await p.download(x) == 2) & (await p.download(y) == 3)).all()
            x.close()
            y.close()

    backend.run(main)


async def pool_download(pool: greensched.Pool, buffer: Buffer) -> np.ndarray:
    async with pool.partition(8) as p:
        return await p.download(buffer)


def test_a_bound_launch_keeps_the_shared_memory_it_was_allowed(backend: Backend) -> None:
    """A launch of the same kernel with less shared memory breaks no earlier bound launch."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            most = pool.devices[0].facts.max_shared_bytes
            much = LaunchConfig(grid=1, block=32, shmem_size=most)
            less = LaunchConfig(grid=1, block=32, shmem_size=DEFAULT_MAX_SHARED_BYTES + 1)
            await p.prepare(much, spin)
            bound = p.bind(much, spin, 1000)
            await p.launch(less, spin, 1000)
            bound()
            await bound.submit()

    backend.run(main)


def test_bound_needs_its_kernel_loaded(backend: Backend) -> None:
    """Binding a kernel that is not loaded on these SMs raises, and says how to load it."""

    async def bind() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(8) as b:
                with pytest.raises(greensched.WouldBlock, match="prepare"):
                    p.bind(CONFIG, fill, b, 1.0, 8)
                bound = await bound_fill(p, b)
                with pytest.raises(greensched.ArgumentMismatch):
                    bound.set(1, "x")
                with pytest.raises(IndexError):
                    bound.set(9, 1)

    backend.run(bind)


def test_bound_ends_with_its_block(backend: Backend) -> None:
    """After its partition's block a bound launch raises PartitionClosed."""

    async def main() -> None:
        async with backend.pool() as pool:
            async with pool.partition(8) as p:
                b = await p.empty(8)
                bound = await bound_fill(p, b)
                bound()
            with b, pytest.raises(greensched.PartitionClosed):
                bound()
            with pytest.raises(greensched.PartitionClosed):
                bound.submit()

    backend.run(main)


def test_bound_ends_with_a_lost_lease(backend: Backend) -> None:
    """A bound launch of a collected partition raises PartitionClosed."""

    async def main() -> None:
        async with backend.pool() as pool:
            held = [pool.partition_nowait(8)]
            with await held[0].empty(8) as b:
                bound = await bound_fill(held[0], b)
                bound()
                with pytest.warns(ResourceWarning, match="never left") as seen:
                    held.clear()
                    await until(lambda: len(seen) > 0)  # a thread of ours may still hold it
                await until(lambda: pool.statistics().sms_leased == 0)
                async with pool.partition(greensched.ALL):
                    for launch in (bound, bound.submit, lambda: bound.set(0, b)):
                        with pytest.raises(greensched.PartitionClosed):
                            launch()

    backend.run(main)


@pytest.mark.parametrize("kind", ["empty", "empty_pinned"])
def test_bound_refuses_a_closed_buffer(backend: Backend, kind: str) -> None:
    """A bound launch whose buffer was closed raises BufferClosed instead of using it."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            b = await getattr(p, kind)(8)
            bound = await bound_fill(p, b)
            bound()
            b.close()
            for launch in (bound, bound.submit, bound):
                with pytest.raises(greensched.BufferClosed):
                    launch()

    backend.run(main)


def test_a_buffer_in_two_arguments_stays_in_use(backend: Backend) -> None:
    """Patching one of two arguments with the same buffer keeps the other in use."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p, pool.partition(8) as q:
            await p.prepare(CONFIG, saxpy)
            x, z = await p.empty(8), await p.empty(8)
            bound = p.bind(CONFIG, saxpy, 1.0, x, x, 8)  # read as one, written as the other
            bound.set(1, z)
            with await Gate.closed(p) as gate:
                bound()
                read = q.download(x)
                await still_waits(read)
                gate.open()
            await read
            x.close()
            with z, pytest.raises(greensched.BufferClosed):
                bound()

    backend.run(main)


def test_the_end_of_a_bound_launch_forgets_no_other_user(backend: Backend) -> None:
    """When a bound launch ends, later work on its buffer is still waited for."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as q, pool.partition(8) as r:
            with await r.empty(8) as buffer:
                async with pool.partition(8) as p:
                    bound = await bound_fill(p, buffer)
                    bound()
                    gate = await Gate.closed(q)
                    read = q.download(buffer)
                with gate:
                    write = r.copy(buffer, np.zeros(8, np.float32))
                    await still_waits(write)
                    gate.open()
                await read
                await write

    backend.run(main)


def test_pinned_memory_outlives_its_bound_launches(backend: Backend) -> None:
    """Pinned memory that is closed under a bound launch is reused only after the launch."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p, pool.partition(8) as q:
            await p.prepare(CONFIG, fill)
            first = await p.empty_pinned(2000)
            bound = p.bind(CONFIG, fill, first, 1.0, 2000)
            with await Gate.closed(p) as gate:
                bound()
                first.close()
                with await q.empty_pinned(2000) as other:
                    assert other.address != first.address
                    gate.open()
            (await p.empty(1)).close()  # behind the bound launch
            with await q.empty_pinned(2000) as other, await q.empty_pinned(2000) as again:
                assert first.address in (other.address, again.address)

    backend.run(main)


def test_the_end_of_the_block_waits_for_bound_launches(backend: Backend) -> None:
    """The block's end waits for launches without tickets of their own."""

    async def main() -> None:
        async with backend.pool() as pool:
            with pytest.raises(ZeroDivisionError):
                async with pool.partition(8) as p:
                    b = await p.empty(8)
                    bound = await bound_fill(p, b)
                    gate = await Gate.closed(p)
                    bound()
                    raise ZeroDivisionError
            with gate, b:
                assert pool.statistics().sms_draining == 8
                gate.open()
                async with pool.partition(greensched.ALL):
                    pass

    backend.run(main)


@pytest.mark.parametrize("jobs_between", [False, True])
def test_bound_launches_in_flight_are_bounded(backend: Backend, jobs_between: bool) -> None:
    """Beyond the limit each launch is refused until there is room, for which `ready` waits."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(8) as b:
                bound = await bound_fill(p, b)
                for _ in range(3 * MAX_BOUND_LAUNCHES):  # what is done counts no more
                    await p.drain()
                    bound()
                await bound.submit()
                with await Gate.closed(p) as gate:
                    for number in range(MAX_BOUND_LAUNCHES - BATCH):
                        bound()
                        if jobs_between and number % (BATCH - 1) == 0:
                            bound.submit()
                    with pytest.raises(greensched.WouldBlock):
                        for _ in range(2 * BATCH):
                            bound()
                    for _ in range(2 * BATCH):
                        with pytest.raises(greensched.WouldBlock):
                            bound()
                    await still_waits(p.drain())
                    gate.open()
                await p.drain()
                bound()
                await bound.submit()

    backend.run(main)


def test_other_partitions_are_ordered_with_bound_launches(backend: Backend) -> None:
    """Other work on a bound buffer runs after the launches, and the next launch after it."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as a, pool.partition(8) as b:
            with await a.empty(8) as buffer:
                bound = await bound_fill(a, buffer)
                with await Gate.closed(a) as gate:
                    bound()
                    read = b.download(buffer)
                    await still_waits(read)
                    gate.open()
                await read
                with await Gate.closed(b) as gate:
                    b.copy(buffer, np.zeros(8, np.float32))
                    job = bound.submit()
                    await still_waits(job)
                    gate.open()
                await job

    backend.run(main)


@pytest.mark.parametrize("submit", [False, True])
def test_bound_launches_of_two_partitions_are_ordered(backend: Backend, submit: bool) -> None:
    """Two launches that are bound to one buffer wait for each other's earlier launches."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p, pool.partition(8) as q:
            with await p.empty(8) as x, await p.empty(8) as unrelated:
                first, second = await bound_fill(p, x), await bound_fill(q, x)
                for here, there, a, b in ((p, q, first, second), (q, p, second, first)):
                    a()
                    b()
                    await there.copy(unrelated, unrelated)
                    with await Gate.closed(here) as gate:
                        a()
                        if submit:
                            job = b.submit()
                        else:
                            b()
                            job = there.copy(unrelated, unrelated)
                        await still_waits(job)
                        gate.open()
                    await job

    backend.run(main)


def test_bound_launches_that_only_read_are_not_ordered(backend: Backend) -> None:
    """Two launches that only read one buffer run concurrently in two partitions."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p, pool.partition(8) as q:
            with await p.empty(8) as x, await p.empty(8) as y, await q.empty(8) as z:
                await p.prepare(CONFIG, saxpy)
                await q.prepare(CONFIG, saxpy)
                first = p.bind(CONFIG, saxpy, 1.0, x, y, 8)
                second = q.bind(CONFIG, saxpy, 1.0, x, z, 8)
                with await Gate.closed(p) as gate:
                    first()
                    await second.submit()
                    gate.open()

    backend.run(main)


@pytest.mark.parametrize("lent", ["before it is bound", "afterwards"])
def test_a_capture_takes_in_no_bound_launch(backend: Backend, lent: str) -> None:
    """While the partition's exposed stream is capturing, a bound launch is refused."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(8) as b:
                stream = p.stream if lent == "before it is bound" else None
                bound = await bound_fill(p, b)
                stream = stream or p.stream
                driver = stream.context.driver
                driver.begin_capture(stream.handle, CaptureMode.RELAXED)
                for launch in (bound, bound.submit):
                    with pytest.raises(greensched.InvalidRequest, match="capturing"):
                        launch()
                driver.destroy_graph(driver.end_capture(stream.handle))
                bound()
                await bound.submit()

    backend.run(main)


def test_a_bound_launch_has_no_other_arguments(backend: Backend) -> None:
    """Arguments are counted from 0; another index is refused with the kernel's name."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(8) as b, await p.empty(8) as other:
                bound = await bound_fill(p, b)
                for index in (-1, -3, 3):
                    with pytest.raises(IndexError, match="fill"):
                        bound.set(index, other)

    backend.run(main)
