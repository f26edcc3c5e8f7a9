"""What a lease costs, beside a semaphore: repeated, two sizes in turn, with a launch, of a class.

`python -m benchmarks.micro.lease` runs on the simulated driver, and also measures a lease of a pool
over two devices beside one of a pool over one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from time import perf_counter

from benchmarks.lib.raw_calls import CONFIG, ITEMS, SMS, arguments, raw_calls
from benchmarks.lib.timing import Comparison, Row, Work, compare, table
from greensched import ALL, Pool, ServiceClass
from greensched import driver as drivers
from greensched.driver.interface import Driver
from greensched.kernels import saxpy

#: The second of two sizes that are taken in turn: a lease that is kept for one is none for the
#: other.
OTHER_SMS = 8
#: Leases that wait at once.
QUEUED = 20
CLASSES = (
    ServiceClass("critical", reserve=SMS, priority=10),
    ServiceClass("other", preemptible=True, checkpoint_interval=0.010),
)
Lease = Callable[[int], AbstractAsyncContextManager[object]]


async def measure(driver: Driver) -> list[Row]:
    """Return the median and p99 of each."""
    async with Pool([0], driver=driver) as pool:
        comparisons = [
            await _repeated("lease", pool.partition),
            await _repeated("lease at once (partition_nowait)", pool.partition_nowait),
            await _in_turn("lease, two sizes in turn", pool.partition),
            await _with_launch(driver, pool),
        ]
    async with Pool([0], driver=driver, services=CLASSES) as pool:
        of_a_class = partial(pool.partition, service="critical")
        comparisons.append(await _repeated("lease of a class with a reserve", of_a_class))
        comparisons.append(await _in_turn("lease of a class, two sizes in turn", of_a_class))
    return [c.row(part, "us") for c in comparisons for part in (0.5, 0.99)]


async def two_devices() -> list[Row]:
    """Return what a lease costs where a pool has a choice of two simulated devices."""

    def in_turn(pool: Pool) -> Work:
        async def work() -> float:
            start = perf_counter()
            async with pool.partition(SMS):
                pass
            async with pool.partition(OTHER_SMS):
                pass
            return (perf_counter() - start) / 2

        return work

    def queued(pool: Pool) -> Work:
        async def user() -> None:
            async with pool.partition(ALL):
                await asyncio.sleep(0)

        async def work() -> float:
            start = perf_counter()
            await asyncio.gather(*(user() for _ in range(QUEUED)))
            return (perf_counter() - start) / QUEUED

        return work

    opened = [drivers.open(f"simulated:h200x{number}") for number in (2, 1)]
    async with Pool(driver=opened[0]) as two, Pool(driver=opened[1]) as one:
        comparisons = [
            await compare(f"{what}, two devices | one device", work(two), work(one))
            for what, work in (("two sizes in turn", in_turn), (f"{QUEUED} queued", queued))
        ]
    return [c.row(0.5, "us", most=1.1) for c in comparisons]


async def _repeated(what: str, lease: Lease) -> Comparison:
    async def ours() -> float:
        start = perf_counter()
        async with lease(SMS):
            pass
        return perf_counter() - start

    semaphore = asyncio.Semaphore(1)

    async def theirs() -> float:
        start = perf_counter()
        async with semaphore:
            pass
        return perf_counter() - start

    return await compare(f"{what} | semaphore", ours, theirs)


async def _in_turn(what: str, lease: Lease) -> Comparison:
    """Each of two sizes once; the mean of both."""

    async def ours() -> float:
        start = perf_counter()
        async with lease(SMS):
            pass
        async with lease(OTHER_SMS):
            pass
        return (perf_counter() - start) / 2

    semaphore = asyncio.Semaphore(1)

    async def theirs() -> float:
        start = perf_counter()
        async with semaphore:
            pass
        async with semaphore:
            pass
        return (perf_counter() - start) / 2

    return await compare(f"{what} | semaphore", ours, theirs)


async def _with_launch(driver: Driver, pool: Pool) -> Comparison:
    semaphore = asyncio.Semaphore(1)
    async with raw_calls(driver, pool) as raw:
        pack_and_launch, record, poll = raw.pack_and_launch, raw.record, raw.poll
        async with pool.partition(SMS) as p:
            buffer = await p.empty(ITEMS)
        values = arguments(buffer)

        async def ours() -> float:
            start = perf_counter()
            async with pool.partition(SMS) as q:
                await q.launch(CONFIG, saxpy, *values)
            return perf_counter() - start

        async def theirs() -> float:
            start = perf_counter()
            async with semaphore:
                pack_and_launch()
                record()
                await poll()
            return perf_counter() - start

        with buffer:
            return await compare(
                "lease, launch, await | semaphore, launch, polled event", ours, theirs
            )


if __name__ == "__main__":
    print(table(asyncio.run(measure(drivers.open("simulated:h200")))))
    print(table(asyncio.run(two_devices())))
