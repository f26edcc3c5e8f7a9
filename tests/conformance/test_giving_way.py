"""Elastic leases that give up all SMs at a checkpoint and continue afterwards."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from greensched import (
    LaunchConfig,
    Partition,
    PartitionClosed,
    Pool,
    PoolClosed,
    ServiceClass,
    WouldBlock,
)
from greensched.kernels import fill
from helpers.backend import Backend
from helpers.waiting import until

IS_VERSIONED = False

CONFIG = LaunchConfig(grid=4, block=128)
CLASSES = [ServiceClass("low"), ServiceClass("high", priority=1)]


async def most_of_it(pool: Pool, entered: anyio.Event, release: anyio.Event) -> None:
    """Hold more than half of the device for a class of higher priority."""
    total = pool.statistics().sms_total
    async with pool.partition(total * 2 // 3, service="high"):
        entered.set()
        await release.wait()


def more_than_half(pool: Pool) -> tuple[int, int]:
    total = pool.statistics().sms_total
    return total * 2 // 3, total


@pytest.mark.runs_device_code
def test_a_lease_gives_way_and_goes_on(backend: Backend) -> None:
    """Its checkpoint waits while a higher class has the SMs; work and bound launches go on after.

    Until then neither may use an executor that another lease may have.
    """

    async def main() -> None:
        async with (
            backend.pool(services=CLASSES, prepare=[fill]) as pool,
            anyio.create_task_group() as tasks,
        ):
            async with pool.partition(more_than_half(pool), service="low") as p:
                out = await p.upload(np.zeros(8, np.float32))
                bound = p.bind(CONFIG, fill, out, 7.0, 8)
                await bound.submit()
                entered, release, has_sms = anyio.Event(), anyio.Event(), anyio.Event()

                async def checkpoint() -> None:
                    assert await p.checkpoint() >= pool.statistics().sms_total // 2
                    has_sms.set()

                tasks.start_soon(most_of_it, pool, entered, release)
                await until(lambda: pool.statistics().waiting == 1)
                tasks.start_soon(checkpoint)
                await entered.wait()
                with pytest.raises(WouldBlock, match="await its checkpoint"):
                    p.empty(8)
                with pytest.raises(WouldBlock, match="await its checkpoint"):
                    bound()
                assert pool.statistics().waiting == 1
                release.set()
                await has_sms.wait()
                bound.set(1, 9.0)
                await bound.submit()
                assert (await p.download(out)).tolist() == [9.0] * 8
            assert pool.statistics().sms_free == pool.statistics().sms_total

    backend.run(main)


@pytest.mark.parametrize("ends", ["block", "cancel", "close"])
def test_a_lease_that_gave_way_ends_without_sms(backend: Backend, ends: str) -> None:
    """By its block, a cancellation or the pool's end; nothing is returned twice."""

    async def main() -> None:
        async with backend.pool(services=CLASSES) as pool, anyio.create_task_group() as tasks:
            raised: list[BaseException] = []
            entered, release = anyio.Event(), anyio.Event()
            scope = anyio.CancelScope()

            async def checkpoint(p: Partition) -> None:
                with scope:
                    try:
                        await p.checkpoint()
                    except (PartitionClosed, PoolClosed) as error:
                        raised.append(error)

            async with pool.partition(more_than_half(pool), service="low") as p:
                tasks.start_soon(most_of_it, pool, entered, release)
                await until(lambda: pool.statistics().waiting == 1)
                tasks.start_soon(checkpoint, p)
                await entered.wait()
                if ends == "cancel":
                    scope.cancel()
                    await until(lambda: pool.statistics().waiting == 0)
                    with pytest.raises(PartitionClosed):
                        p.empty(8)
                elif ends == "close":
                    tasks.start_soon(pool.aclose)
                    await until(lambda: bool(raised))
                    assert isinstance(raised[0], PoolClosed)
            release.set()
            if ends == "block":
                await until(lambda: bool(raised))
                assert isinstance(raised[0], PartitionClosed)
            await until(lambda: pool.statistics().leases == 0)
            if ends != "close":
                assert pool.statistics().sms_free == pool.statistics().sms_total

    backend.run(main)
