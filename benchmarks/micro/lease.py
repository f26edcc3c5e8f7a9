"""What a lease of a warm lane costs, beside a semaphore; with a launch in it; and of a class."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from time import perf_counter

from benchmarks.lib.raw_calls import CONFIG, ITEMS, SMS, arguments, by_hand
from benchmarks.lib.timing import Comparison, Row, compare, table
from greensched import Pool, ServiceClass
from greensched import driver as drivers
from greensched.driver.interface import Driver
from greensched.kernels import saxpy

CLASSES = (
    ServiceClass("critical", reserve=SMS, priority=10),
    ServiceClass("other", preemptible=True, checkpoint_interval=0.010),
)


async def measure(driver: Driver) -> list[Row]:
    """Median and p99 of both."""
    async with Pool([0], driver=driver) as pool:
        comparisons = [
            await _bare("lease", pool.partition),
            await _bare("lease at once (partition_nowait)", pool.partition_nowait),
            await _with_launch(driver, pool),
        ]
    async with Pool([0], driver=driver, services=CLASSES) as pool:
        leased = partial(pool.partition, service="critical")
        comparisons.append(await _bare("lease of a class with a floor", leased))
    return [c.row(part, "us") for c in comparisons for part in (0.5, 0.99)]


async def _bare(
    what: str, lease: Callable[[int], AbstractAsyncContextManager[object]]
) -> Comparison:
    semaphore = asyncio.Semaphore(1)

    async def ours() -> float:
        start = perf_counter()
        async with lease(SMS):
            pass
        return perf_counter() - start

    async def theirs() -> float:
        start = perf_counter()
        async with semaphore:
            pass
        return perf_counter() - start

    return await compare(f"{what} | semaphore", ours, theirs)


async def _with_launch(driver: Driver, pool: Pool) -> Comparison:
    semaphore = asyncio.Semaphore(1)
    async with by_hand(driver, pool) as hand:
        async with pool.partition(SMS) as p:
            buffer = await p.empty(ITEMS)

        async def ours() -> float:
            start = perf_counter()
            async with pool.partition(SMS) as q:
                await q.launch(CONFIG, saxpy, *arguments(buffer))
            return perf_counter() - start

        async def theirs() -> float:
            start = perf_counter()
            async with semaphore:
                hand.pack_and_launch()
                hand.record()
                await hand.poll()
            return perf_counter() - start

        with buffer:
            return await compare(
                "lease, launch, await | semaphore, launch, polled event", ours, theirs
            )


if __name__ == "__main__":
    print(table(asyncio.run(measure(drivers.open("simulated:h200")))))
