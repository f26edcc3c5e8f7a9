"""What a launch in a partition costs, beside one by hand: submitted, and awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter

from benchmarks.byhand import CONFIG, ITEMS, SMS, ByHand, arguments, by_hand
from benchmarks.measure import Comparison, Row, compare, table
from greensched import Buffer, Partition, Pool
from greensched import driver as drivers
from greensched.driver.base import Driver
from greensched.kernels import fill

#: Launches to a stopwatch, where one takes about as long as starting and stopping it; well below
#: what a driver's queue holds.
BURST = 20


async def measure(driver: Driver) -> list[Row]:
    """Median and p99 of each."""
    async with (
        Pool([0], driver=driver) as pool,
        by_hand(driver, pool) as hand,
        pool.partition(SMS) as p,
    ):
        with await p.empty(ITEMS) as buffer:
            await p.launch(fill, CONFIG, *arguments(buffer))
            comparisons = [
                await compared(p, buffer, hand)
                for compared in (_bound, _submitted, _polled, _threaded)
            ]
    return [c.row(part, "us") for c in comparisons for part in (0.5, 0.99)]


async def _bound(p: Partition, buffer: Buffer, hand: ByHand) -> Comparison:
    """Both packed once; the price of submitting alone, as the mean of a burst."""
    bound = p.bind(fill, CONFIG, *arguments(buffer))

    async def ours() -> float:
        start = perf_counter()
        for _ in range(BURST):
            bound()
        took = perf_counter() - start
        await bound.submit()
        return took / BURST

    async def theirs() -> float:
        start = perf_counter()
        for _ in range(BURST):
            hand.launch()
        took = perf_counter() - start
        hand.record()
        await hand.poll()
        return took / BURST

    return await compare("bound launch | raw launch, packed once", ours, theirs)


async def _submitted(p: Partition, buffer: Buffer, hand: ByHand) -> Comparison:
    """Both can tell afterwards when it is done: ours by its ticket, theirs by the event."""

    async def ours() -> float:
        start = perf_counter()
        for _ in range(BURST):
            job = p.launch(fill, CONFIG, *arguments(buffer))
        took = perf_counter() - start
        await job
        return took / BURST

    async def theirs() -> float:
        start = perf_counter()
        for _ in range(BURST):
            hand.pack_and_launch()
            hand.record()
        took = perf_counter() - start
        await hand.poll()
        return took / BURST

    return await compare("launch | raw launch + event", ours, theirs)


async def _polled(p: Partition, buffer: Buffer, hand: ByHand) -> Comparison:
    return await _awaited(p, buffer, hand, hand.poll, "polled event")


async def _threaded(p: Partition, buffer: Buffer, hand: ByHand) -> Comparison:
    wait = partial(asyncio.to_thread, hand.sync)
    return await _awaited(p, buffer, hand, wait, "event in to_thread")


async def _awaited(
    p: Partition, buffer: Buffer, hand: ByHand, wait: Callable[[], Awaitable[object]], by: str
) -> Comparison:
    """One launch at a time; by hand its end is heard of by some way to wait for the event."""

    async def ours() -> float:
        start = perf_counter()
        await p.launch(fill, CONFIG, *arguments(buffer))
        return perf_counter() - start

    async def theirs() -> float:
        start = perf_counter()
        hand.pack_and_launch()
        hand.record()
        await wait()
        return perf_counter() - start

    return await compare(f"launch, await | raw launch, {by}", ours, theirs)


if __name__ == "__main__":
    print(table(asyncio.run(measure(drivers.open("simulated:h200")))))
