"""What a launch in a partition costs, beside one by hand: submitted, asked for, and awaited."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import Any

from benchmarks.lib.raw_calls import CONFIG, ITEMS, SMS, ByHand, arguments, by_hand
from benchmarks.lib.timing import Comparison, Row, Work, compare, table
from greensched import Buffer, Job, Partition, Pool
from greensched import driver as drivers
from greensched.driver.interface import Driver
from greensched.kernels import saxpy

#: Launches to a stopwatch, where one takes about as long as starting and stopping it; well below
#: what a driver's queue holds.
BURST = 20
#: Jobs in flight, and how many are submitted in all, for the rate of a full lane.
IN_FLIGHT, JOBS = 64, 256


async def measure(driver: Driver) -> list[Row]:
    """Median and p99 of each."""
    async with (
        Pool([0], driver=driver) as pool,
        by_hand(driver, pool) as hand,
        pool.partition(SMS) as p,
    ):
        with await p.empty(ITEMS) as buffer, await p.empty(ITEMS) as other:
            await p.prepare(CONFIG, saxpy)
            bench = _Bench(p, buffer, other, hand)
            comparisons = [
                await bench.bound(),
                await bench.patched(),
                await bench.patched_with(other),
                await bench.submitted(),
                await bench.launched(),
                await bench.asked(),
                await bench.done_already(),
                await bench.full(),
                await bench.batched(),
                await bench.awaited(hand.poll, "polled event"),
                await bench.awaited(partial(asyncio.to_thread, hand.sync), "event in to_thread"),
            ]
    return [c.row(part, "us") for c in comparisons for part in (0.5, 0.99)]


class _Bench:
    """Both sides of each comparison."""

    def __init__(self, p: Partition, buffer: Buffer, other: Buffer, hand: ByHand) -> None:
        self.p = p
        self.bound_values = arguments(buffer)
        self.bind = p.bind(CONFIG, saxpy, *self.bound_values)
        #: Of launches that are not bound: a buffer that no bound launch uses.
        self.values = arguments(other)
        self.hand = hand

    def _ours(self, work: Callable[[], object]) -> Work:
        """The mean of a burst; what it submitted is waited for beside the stopwatch."""

        async def ours() -> float:
            start = perf_counter()
            for _ in range(BURST):
                work()
            took = perf_counter() - start
            await self.bind.submit()
            return took / BURST

        return ours

    def _theirs(self, *steps: Callable[[], object]) -> Work:
        async def theirs() -> float:
            start = perf_counter()
            for _ in range(BURST):
                for step in steps:
                    step()
            took = perf_counter() - start
            self.hand.record()
            await self.hand.poll()
            return took / BURST

        return theirs

    async def bound(self) -> Comparison:
        """Both packed once; the price of submitting alone."""
        what = "bound launch | raw launch, packed once"
        return await compare(what, self._ours(self.bind), self._theirs(self.hand.launch))

    async def patched(self) -> Comparison:
        """Four arguments set before each launch, the numbers new and the buffers the same.

        Beside a launch that sets none: numbers are what changes from step to step, mostly.
        """
        numbers = itertools.count()
        _, x, y, items = self.bound_values

        def launch() -> None:
            bind_set = self.bind.set
            bind_set(0, float(next(numbers)))
            bind_set(1, x)
            bind_set(2, y)
            bind_set(3, items)
            self.bind()

        what = "bound launch, 4 arguments set | raw launch, packed once"
        return await compare(what, self._ours(launch), self._theirs(self.hand.launch))

    async def patched_with(self, other: Buffer) -> Comparison:
        """The same, with two other buffers each time: whose order must be looked after."""
        turns = itertools.cycle([arguments(other), self.bound_values])

        def launch() -> None:
            for index, value in enumerate(next(turns)):
                self.bind.set(index, value)
            self.bind()

        what = "bound launch, 2 other buffers set | raw launch, packed once"
        found = await compare(what, self._ours(launch), self._theirs(self.hand.launch))
        for index, value in enumerate(self.bound_values):
            self.bind.set(index, value)
        return found

    async def submitted(self) -> Comparison:
        """Both are marked behind; ours is a job."""
        what = "bound.submit | raw launch + mark"
        theirs = self._theirs(self.hand.launch, self.hand.mark)
        return await compare(what, self._ours(self.bind.submit), theirs)

    async def launched(self) -> Comparison:
        """With every check, beside a launch packed once and its mark."""

        def launch() -> object:
            return self.p.launch(CONFIG, saxpy, *self.values)

        theirs = self._theirs(self.hand.launch, self.hand.mark)
        return await compare("launch | raw launch + mark", self._ours(launch), theirs)

    async def asked(self) -> Comparison:
        """Whether something is done that is; no function of Python's around either."""
        job, query = self.bind.submit(), self.hand.query
        await job
        self.hand.record()
        await self.hand.poll()

        async def ours() -> float:
            start = perf_counter()
            for _ in range(BURST):
                _ = job.is_done
            return (perf_counter() - start) / BURST

        async def theirs() -> float:
            start = perf_counter()
            for _ in range(BURST):
                _ = query()
            return (perf_counter() - start) / BURST

        return await compare("is_done | event query", ours, theirs)

    async def done_already(self) -> Comparison:
        """Submitted and awaited one at a time, beside a launch and a mark that nobody awaits."""

        async def ours() -> float:
            start = perf_counter()
            for _ in range(BURST):
                await self.bind.submit()
            return (perf_counter() - start) / BURST

        theirs = self._theirs(self.hand.launch, self.hand.mark)
        return await compare("bound.submit, await | raw launch + mark", ours, theirs)

    async def batched(self) -> Comparison:
        """As many launches, and a job that is awaited behind so many of them; by hand as below."""

        async def ours() -> float:
            start = perf_counter()
            flying: Job[None] | None = None
            for _ in range(JOBS // IN_FLIGHT):
                for _ in range(IN_FLIGHT - 1):
                    self.bind()
                before, flying = flying, self.bind.submit()
                if before is not None:
                    await before
            assert flying is not None
            await flying
            return (perf_counter() - start) / JOBS

        what = f"bound launches, a job behind {IN_FLIGHT} | raw launches"
        return await compare(what, ours, self._many_by_hand)

    async def _many_by_hand(self) -> float:
        start = perf_counter()
        for _ in range(JOBS):
            self.hand.launch()
        self.hand.record()
        await self.hand.poll()
        return (perf_counter() - start) / JOBS

    async def full(self) -> Comparison:
        """Jobs of a lane that always has many, each awaited; by hand, one look at the end."""

        async def ours() -> float:
            start = perf_counter()
            flying = deque[Any]()
            for _ in range(JOBS):
                flying.append(self.bind.submit())
                if len(flying) == IN_FLIGHT:
                    await flying.popleft()
            for job in flying:
                await job
            return (perf_counter() - start) / JOBS

        what = f"a job, {IN_FLIGHT} in flight | raw launches"
        return await compare(what, ours, self._many_by_hand)

    async def awaited(self, wait: Callable[[], Awaitable[object]], by: str) -> Comparison:
        """One launch at a time; by hand its end is heard of by some way to wait for the event."""

        async def ours() -> float:
            start = perf_counter()
            await self.p.launch(CONFIG, saxpy, *self.values)
            return perf_counter() - start

        async def theirs() -> float:
            start = perf_counter()
            self.hand.pack_and_launch()
            self.hand.record()
            await wait()
            return perf_counter() - start

        return await compare(f"launch, await | raw launch, {by}", ours, theirs)


if __name__ == "__main__":
    print(table(asyncio.run(measure(drivers.open("simulated:h200")))))
