"""Elastic leases: what a checkpoint waits for, gives back and takes up."""

from __future__ import annotations

import gc
import time
import weakref

import anyio
import anyio.abc
import numpy as np
import pytest

import greensched
from greensched import Buffer, LaunchConfig, Partition, Pool, ServiceClass
from greensched.kernels import fill, saxpy
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.waiting import still_waits, until

IS_VERSIONED = False

CONFIG = LaunchConfig(grid=4, block=128)


async def hold(pool: Pool, sms: int, release: anyio.Event, **options: object) -> None:
    async with pool.partition(sms, **options):  # type: ignore[arg-type]
        await release.wait()


def test_a_checkpoint_gives_back_and_takes_up(backend: Backend) -> None:
    """A lease shrinks to its minimum for a waiting request, and later takes up idle SMs."""

    async def main() -> None:
        async with backend.pool() as pool, anyio.create_task_group() as tasks:
            release = anyio.Event()
            async with pool.partition((8, 1024)) as p:
                most = p.sm_count
                assert await p.checkpoint() == most == p.sm_count
                tasks.start_soon(hold, pool, 8, release)
                await until(lambda: pool.statistics().waiting == 1)
                fewer = await p.checkpoint()
                assert 8 <= fewer == p.sm_count < most
                await until(lambda: pool.statistics().leases == 2)
                release.set()
                await until(lambda: pool.statistics().leases == 1)
                assert await p.checkpoint() >= most - p.max_cluster_size
            assert pool.statistics().sms_free == pool.statistics().sms_total

    backend.run(main)


def test_a_lease_of_one_size_keeps_it(backend: Backend) -> None:
    """A checkpoint of a lease with one size waits for its work and changes nothing."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            lease, sms = p._open_lease(), p.sm_count
            assert await p.checkpoint() == sms
            assert p._open_lease() is lease

    backend.run(main)


def test_a_checkpoint_awaits_the_work_first(backend: Backend) -> None:
    """No SM moves while a job runs, and a cancelled checkpoint changes nothing."""

    async def main() -> None:
        async with backend.pool() as pool, anyio.create_task_group() as tasks:
            release = anyio.Event()
            async with pool.partition((8, 1024)) as p:
                sms = p.sm_count
                with await Gate.closed(p) as gate:
                    job = p.empty(8)
                    tasks.start_soon(hold, pool, 8, release)
                    await until(lambda: pool.statistics().waiting == 1)
                    await still_waits(p.checkpoint())
                    assert p.sm_count == sms
                    assert pool.statistics().waiting == 1
                    gate.open()
                    await p.checkpoint()
                    assert job.done()
                    (await job).close()
                assert p.sm_count < sms
                release.set()

    backend.run(main)


def test_a_checkpoint_ends_with_another_one_of_the_partition(backend: Backend) -> None:
    """Of two tasks at a checkpoint, one moves the partition, and both then return."""

    async def main() -> None:
        async with backend.pool() as pool, anyio.create_task_group() as tasks:
            release = anyio.Event()
            async with pool.partition((8, 1024)) as p:
                sms = p.sm_count

                async def first() -> None:
                    await p.checkpoint()
                    p.run(lambda: None)

                with await Gate.closed(p) as gate:
                    job = p.empty(8)
                    tasks.start_soon(hold, pool, 8, release)
                    await until(lambda: pool.statistics().waiting == 1)
                    tasks.start_soon(first)
                    await anyio.sleep(0.001)
                    tasks.start_soon(p.checkpoint)
                    await still_waits(job)
                    gate.open()
                    await until(lambda: p.sm_count < sms)
                (await job).close()
                release.set()

    backend.run(main)


def test_progress_is_reported_without_the_lock_at_a_checkpoint() -> None:
    """A progress callback at a checkpoint may use the pool, because no lock is held."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, anyio.create_task_group() as tasks:
            release = anyio.Event()
            async with pool.partition((8, 1024)) as p:
                executor = p._open_lease().executor
                tasks.start_soon(hold, pool, 8, release)
                await until(lambda: pool.statistics().waiting == 1)
                locked: list[bool] = []

                def progress(*_: int) -> None:
                    locked.append(pool._manager.lock._is_owned())

                job = p.upload(np.ones(8), progress=progress)
                while not job.done():
                    time.sleep(0)  # noqa: ASYNC251  after an await, the loop would call `progress` first
                await p.checkpoint()
                assert p._open_lease().executor is not executor
                assert locked == [False]
                (await job).close()
                release.set()

    anyio.run(main)


@pytest.mark.runs_device_code
def test_bound_launches_and_buffers_follow(backend: Backend) -> None:
    """After a move bound launches run on the new SMs, and buffers keep their contents."""

    async def main() -> None:
        async with backend.pool() as pool, anyio.create_task_group() as tasks:
            release = anyio.Event()
            async with pool.partition((8, 1024)) as p:
                with await p.upload(np.ones(64, np.float32)) as x:
                    with await p.upload(np.zeros(64, np.float32)) as y:
                        await p.prepare(CONFIG, saxpy)
                        bound = p.bind(CONFIG, saxpy, 1.0, x, y, x.size)
                        bound()
                        before = p._open_lease().executor
                        tasks.start_soon(hold, pool, 8, release)
                        await until(lambda: pool.statistics().waiting == 1)
                        await p.checkpoint()
                        assert p._open_lease().executor is not before
                        bound()
                        bound.set(0, 10.0)
                        await bound.submit()
                        await p.launch(CONFIG, saxpy, 100.0, x, y, x.size)
                        bound()
                        assert (await p.download(y))[63] == 1 + 1 + 10 + 100 + 10
                        release.set()
                        await until(lambda: pool.statistics().leases == 1)
                        await p.checkpoint()
                        bound()
                        assert (await p.download(y))[0] == 132
            with pytest.raises(greensched.PartitionClosed):
                bound()

    backend.run(main)


class Refusing:
    """A library's array that can begin to refuse its export."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.dtype = buffer.dtype
        self.refuses = False

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.buffer.device_id

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int] | None = None) -> object:
        if self.refuses:
            raise RuntimeError("not now")
        return self.buffer.__dlpack__(stream=stream, max_version=max_version)


async def moved(pool: Pool, tasks: anyio.abc.TaskGroup, p: Partition) -> anyio.Event:
    """Lease all SMs, and give some to another lease until that one ends."""
    before, release = p._open_lease().executor, anyio.Event()
    tasks.start_soon(hold, pool, 8, release)
    await until(lambda: pool.statistics().waiting == 1)
    await p.checkpoint()
    assert p._open_lease().executor is not before
    return release


def test_an_array_that_is_refused_on_other_sms_is_the_next_launchs_failure(
    backend: Backend,
) -> None:
    """The checkpoint still moves and loses no waiter; the block's end releases the array."""

    async def main() -> None:
        async with backend.pool(prepare=[fill]) as pool, anyio.create_task_group() as tasks:
            async with pool.partition((8, 1024)) as p:
                x = await p.empty(8)
                gone = weakref.ref(array := Refusing(x))
                bound = p.bind(CONFIG, fill, array, 1.0, 8)
                await bound.submit()
                array.refuses = True
                release = await moved(pool, tasks, p)
                await until(lambda: pool.statistics().leases == 2)
                for launch in (bound, bound.submit):
                    with pytest.raises(greensched.InvalidArray, match="not now"):
                        launch()
                array.refuses = False
                await bound.submit()
                del array
            release.set()
            gc.collect()
            await until(lambda: gone() is None)
            x.close()

    backend.run(main)


def test_what_never_was_launched_on_other_sms_is_not_ready_there(backend: Backend) -> None:
    """A bound launch that moved to SMs without its kernel leaves no prepared launch there."""

    async def main() -> None:
        async with backend.pool() as pool, anyio.create_task_group() as tasks:
            async with pool.partition((8, 1024)) as p:
                x = await p.empty(8)
                await p.prepare(CONFIG, fill)
                p.bind(CONFIG, fill, x, 1.0, 8)
                release = await moved(pool, tasks, p)
                executor = p._open_lease().executor
            async with pool.partition(executor.sm_count) as p:
                assert p._open_lease().executor is executor
                with pytest.raises(greensched.WouldBlock, match="prepare"):
                    p.bind(CONFIG, fill, x, 1.0, 8)
            release.set()
            x.close()

    backend.run(main)


def test_what_libraries_were_given_is_waited_for(backend: Backend) -> None:
    """Work without tickets on the lease's exposed stream is done before the SMs move."""

    async def main() -> None:
        async with backend.pool() as pool:
            async with pool.partition((8, 1024)) as p:
                stream = p.stream
                with await p.empty_pinned(1, np.uint32) as word:
                    p.context.driver.wait_value(stream.handle, word.address, 1)
                    await still_waits(p.checkpoint())
                    word.array[0] = 1
                    await p.checkpoint()
                    assert stream.is_done

    backend.run(main)


def test_a_failed_job_shows_at_the_end(backend: Backend) -> None:
    """A failure before a checkpoint is raised at the end of the block, as without one."""

    async def main() -> None:
        async with backend.pool() as pool, anyio.create_task_group() as tasks:
            release = anyio.Event()
            with pytest.raises(ZeroDivisionError):
                async with pool.partition((8, 1024)) as p:
                    p.run(lambda: 1 / 0)
                    tasks.start_soon(hold, pool, 8, release)
                    await until(lambda: pool.statistics().waiting == 1)
                    await p.checkpoint()
                    release.set()

    backend.run(main)


def test_feeding_goes_on_over_a_checkpoint(backend: Backend) -> None:
    """A feed goes on over checkpoints, on any SMs that the partition has."""

    async def main() -> None:
        async with backend.pool() as pool, anyio.create_task_group() as tasks:
            release = anyio.Event()
            tasks.start_soon(hold, pool, 8, release)
            await until(lambda: pool.statistics().leases == 1)
            async with pool.partition((8, 1024)) as p:
                seen = 0
                async for buffer in p.prefetch(np.full(8, i, np.float32) for i in range(6)):
                    assert buffer.size == 8
                    seen += 1
                    release.set()
                    await p.checkpoint()
                assert seen == 6

    backend.run(main)


def test_an_owner_waits_for_a_checkpoint_alone(backend: Backend) -> None:
    """All lent SMs of a reserve return at the borrower's next checkpoint."""
    services = [
        ServiceClass("decode", reserve=16, priority=10, max_wait_for_reserve=0.020),
        ServiceClass("batch", preemptible=True, checkpoint_interval=0.010),
    ]

    async def decode(pool: Pool) -> None:
        async with pool.partition(16, service="decode") as q:
            assert q.sm_count >= 16
            assert pool.statistics().services["decode"].sms_lent == 0

    async def main() -> None:
        async with backend.pool(services=services) as pool:
            async with pool.partition((8, 1024), service="batch") as p:
                lent = pool.statistics().services["decode"].sms_lent
                assert lent >= 16
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(decode, pool)
                    await until(lambda: pool.statistics().waiting == 1)
                    await p.checkpoint()
                assert await p.checkpoint() >= lent
                assert pool.statistics().services["decode"].sms_lent == lent

    backend.run(main)


def test_a_checkpoint_outside_the_block_is_refused(backend: Backend) -> None:
    """A checkpoint before or after the block is refused."""

    async def main() -> None:
        async with backend.pool() as pool:
            p = pool.partition((8, 64))
            with pytest.raises(greensched.PartitionClosed):
                await p.checkpoint()
            async with p:
                buffer = await p.empty(8)
                await p.launch(CONFIG, fill, buffer, 1.0, 8)
            buffer.close()
            with pytest.raises(greensched.PartitionClosed):
                await p.checkpoint()

    backend.run(main)
