"""`p.idle()`: a holder that waits for work returns its SMs, and gets them back in time."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from greensched import (
    ALL,
    InvalidRequest,
    LaunchConfig,
    Partition,
    PartitionClosed,
    Pool,
    PoolClosed,
    ServiceClass,
    WouldBlock,
)
from greensched.driver import simulated
from greensched.kernels import fill
from helpers.backend import Backend
from helpers.waiting import until

IS_VERSIONED = False

CONFIG = LaunchConfig(grid=4, block=128)


async def whole_device(pool: Pool) -> None:
    """Lease every SM for a moment."""
    async with pool.partition(ALL) as p:
        assert p.sm_count == pool.statistics().sms_total


def test_a_partition_of_several_cannot_be_idle_alone(backend: Backend) -> None:
    """A member of a joint grant is refused, and all members keep their SMs."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partitions(8, (8, 16)) as parts:
            for p in parts:
                with pytest.raises(InvalidRequest, match="request it by itself"):
                    async with p.idle():
                        pass
                await p.run(int)
            assert pool.statistics().leases == 2

    backend.run(main)


@pytest.mark.parametrize("size", [16, (16, ALL)])
def test_others_have_its_sms_meanwhile(backend: Backend, size: object) -> None:
    """Others can lease the device during the block; afterwards work and bound launches go on."""

    async def main() -> None:
        async with (
            backend.pool(prepare=[fill]) as pool,
            pool.partition(size, duration=1.0) as p,  # type: ignore[arg-type]  # a size
        ):
            out = await p.upload(np.zeros(8, np.float32))
            bound = p.bind(CONFIG, fill, out, 7.0, 8)
            p.launch(CONFIG, fill, out, 1.0, 8)  # entering waits for it
            async with p.idle():
                await whole_device(pool)
                assert pool.statistics().leases == 1
                for refused in (p.checkpoint, bound.submit, p.drain):
                    with pytest.raises(WouldBlock, match="idle block"):
                        await refused()  # type: ignore[misc]  # each can be awaited
                with pytest.raises(WouldBlock, match="idle block"):
                    bound()
                with pytest.raises(WouldBlock, match="idle block"):
                    async with p.idle():
                        pass
            assert p.sm_count >= 16
            await bound.submit()
            await p.download(out)
            async with p.idle():
                pass
            bound()
            assert await p.run(int) == 0

    backend.run(main)


def test_a_block_that_fails_leaves_the_partition_usable(backend: Backend) -> None:
    """The partition gets its SMs again, and the error is raised."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(16) as p:
            with pytest.raises(KeyError):
                async with p.idle():
                    raise KeyError
            assert await p.run(int) == 0
            assert p.sm_count == 16

    backend.run(main)


@pytest.mark.parametrize("inside", [True, False])
def test_a_cancelled_block_ends_the_lease(backend: Backend, inside: bool) -> None:
    """After a cancellation, in the block or at its end, nothing is held or queued."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(16) as p, anyio.create_task_group() as t:
            entered, release = anyio.Event(), anyio.Event()

            async def hold() -> None:
                async with pool.partition(ALL):
                    entered.set()
                    await release.wait()

            with anyio.CancelScope() as scope:
                async with p.idle():
                    t.start_soon(hold)
                    await entered.wait()
                    if inside:
                        scope.cancel()
                        await anyio.sleep(0)
                    else:
                        t.start_soon(cancel_once_it_waits, pool, scope)
            assert scope.cancelled_caught
            release.set()
            await until(lambda: pool.statistics().leases == 0)
            assert pool.statistics().waiting == 0
            with pytest.raises(PartitionClosed):
                p.run(int)
            await whole_device(pool)

    async def cancel_once_it_waits(pool: Pool, scope: anyio.CancelScope) -> None:
        await until(lambda: pool.statistics().waiting == 1)
        scope.cancel()

    backend.run(main)


def test_the_end_of_the_pool_is_reported(backend: Backend) -> None:
    """A closing pool does not wait for an idle holder, whose block raises at its end."""

    async def main() -> None:
        pool = backend.pool()
        await pool.open()
        with pytest.raises(PoolClosed):
            async with pool.partition(16) as p, p.idle():
                report = await pool.aclose(grace=5)
                assert not report.abandoned

    backend.run(main)


def test_its_least_is_back_within_the_budget_of_its_class() -> None:
    """A class that borrowed its reserve returns it at the next checkpoint."""
    clock = simulated.VirtualClock()
    driver = simulated.open("h200", clock=clock)
    classes = [
        ServiceClass("decode", reserve=32, priority=1, max_wait_for_reserve=0.020),
        ServiceClass("batch", preemptible=True, checkpoint_interval=0.010),
    ]
    waits: list[float] = []
    sizes: set[int] = set()

    async def borrow(pool: Pool) -> None:
        async with pool.partition((8, 128), service="batch") as p:
            while len(waits) < 5:
                await anyio.sleep(0.010)
                sizes.add(await p.checkpoint())

    async def decode(p: Partition) -> None:
        for _ in range(5):
            async with p.idle():
                await anyio.sleep(0.1)
                began = anyio.current_time()
            waits.append(anyio.current_time() - began)
            assert p.sm_count >= 32
            await anyio.sleep(0.05)

    async def main() -> None:
        async with Pool(driver=driver, services=classes) as pool, anyio.create_task_group() as t:
            async with pool.partition((32, 64), service="decode") as p:
                t.start_soon(borrow, pool)
                await decode(p)

    clock.run(main)
    assert max(sizes) > 132 - 32  # it had borrowed the reserve
    assert max(waits) <= 0.020
    assert not driver.live()
    driver.close()
