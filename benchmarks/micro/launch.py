"""What a launch in a partition costs, beside raw calls: submitted, asked about, and awaited.

`python -m benchmarks.micro.launch` runs on the simulated driver.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import repeat
from time import perf_counter

from benchmarks.lib.raw_calls import CONFIG, ITEMS, SMS, RawCalls, arguments, raw_calls
from benchmarks.lib.timing import Comparison, Row, Work, compare, table
from greensched import Buffer, Job, Partition, Pool
from greensched import driver as drivers
from greensched.driver.interface import Driver
from greensched.kernels import saxpy

#: Launches for each reading of the clock: one takes about as long as the reading. Well below what
#: a driver's queue holds.
BURST = 20
#: Jobs in flight, and how many are submitted in all, for the rate of a full stream.
IN_FLIGHT, JOBS = 64, 256


async def measure(driver: Driver) -> list[Row]:
    """Return the median and p99 of each."""
    async with (
        Pool([0], driver=driver) as pool,
        raw_calls(driver, pool) as raw,
        pool.partition(SMS) as p,
    ):
        with await p.empty(ITEMS) as buffer, await p.empty(ITEMS) as other:
            await p.prepare(CONFIG, saxpy)
            bench = _Bench(p, buffer, other, raw)
            comparisons = [
                await bench.bound(),
                await bench.arguments_set(),
                await bench.buffers_set(other),
                await bench.submitted(),
                await bench.launched(),
                await bench.asked(),
                await bench.awaited_each(),
                await bench.in_flight(),
                await bench.batched(),
                await bench.awaited(raw.poll, "polled event"),
                await bench.awaited(partial(asyncio.to_thread, raw.sync), "event in to_thread"),
            ]
    return [c.row(part, "us") for c in comparisons for part in (0.5, 0.99)]


class _Bench:
    """Both sides of each comparison."""

    def __init__(self, p: Partition, buffer: Buffer, other: Buffer, raw: RawCalls) -> None:
        self.p = p
        self.bound_values = arguments(buffer)
        self.bind = p.bind(CONFIG, saxpy, *self.bound_values)
        #: Of launches that are not bound: a buffer that no bound launch uses.
        self.values = arguments(other)
        self.raw = raw

    def _ours(self, call: Callable[[], object]) -> Work:
        """Time a burst; what it submitted is awaited after the clock is read."""

        async def ours() -> float:
            start = perf_counter()
            for _ in repeat(None, BURST):
                call()
            took = perf_counter() - start
            await self.bind.submit()
            return took / BURST

        return ours

    def _launches(self) -> Work:
        """Time a burst of raw launches."""
        launch, record, poll = self.raw.launch, self.raw.record, self.raw.poll

        async def theirs() -> float:
            start = perf_counter()
            for _ in repeat(None, BURST):
                if launch()[0]:
                    raise RuntimeError("launch failed")
            took = perf_counter() - start
            record()
            await poll()
            return took / BURST

        return theirs

    def _marked_launches(self) -> Work:
        """Time a burst of raw launches, each with a mark behind it."""
        launch, mark, record, poll = (
            self.raw.launch, self.raw.mark, self.raw.record, self.raw.poll,
        )  # fmt: skip

        async def theirs() -> float:
            start = perf_counter()
            for _ in repeat(None, BURST):
                if launch()[0]:
                    raise RuntimeError("launch failed")
                if mark()[0]:
                    raise RuntimeError("mark failed")
            took = perf_counter() - start
            record()
            await poll()
            return took / BURST

        return theirs

    async def bound(self) -> Comparison:
        """Compare launches whose arguments were packed once: the price of submitting alone."""
        what = "bound launch | raw launch, packed once"
        return await compare(what, self._ours(self.bind), self._launches())

    async def arguments_set(self) -> Comparison:
        """Compare launches that set four arguments before: new numbers, the same buffers.

        The raw launch sets none.
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
        return await compare(what, self._ours(launch), self._launches())

    async def buffers_set(self, other: Buffer) -> Comparison:
        """Compare launches that set two other buffers, whose order has to be kept."""
        turns = itertools.cycle([arguments(other), self.bound_values])

        def launch() -> None:
            for index, value in enumerate(next(turns)):
                self.bind.set(index, value)
            self.bind()

        what = "bound launch, 2 other buffers set | raw launch, packed once"
        found = await compare(what, self._ours(launch), self._launches())
        for index, value in enumerate(self.bound_values):
            self.bind.set(index, value)
        return found

    async def submitted(self) -> Comparison:
        """Compare launches with a number written behind each; ours returns a job."""
        what = "bound.submit | raw launch + mark"
        return await compare(what, self._ours(self.bind.submit), self._marked_launches())

    async def launched(self) -> Comparison:
        """Compare a launch with every check with a raw launch, packed once, and its mark."""
        launch = partial(self.p.launch, CONFIG, saxpy, *self.values)
        what = "launch | raw launch + mark"
        return await compare(what, self._ours(launch), self._marked_launches())

    async def asked(self) -> Comparison:
        """Compare a query of a job that is done with one of an event that is reached."""
        job, query = self.bind.submit(), self.raw.query
        await job
        self.raw.record()
        await self.raw.poll()

        async def ours() -> float:
            start = perf_counter()
            for _ in repeat(None, BURST):
                _ = job.done()
            return (perf_counter() - start) / BURST

        async def theirs() -> float:
            start = perf_counter()
            for _ in repeat(None, BURST):
                query()
            return (perf_counter() - start) / BURST

        return await compare("is_done | event query", ours, theirs)

    async def awaited_each(self) -> Comparison:
        """Compare jobs that are awaited one at a time with launches and marks that are not."""
        submit = self.bind.submit

        async def ours() -> float:
            start = perf_counter()
            for _ in repeat(None, BURST):
                await submit()
            return (perf_counter() - start) / BURST

        return await compare(
            "bound.submit, await | raw launch + mark", ours, self._marked_launches()
        )

    async def batched(self) -> Comparison:
        """Compare many launches with a job behind each 64 with an event at the end."""
        launch, record, poll = self.raw.launch, self.raw.record, self.raw.poll
        bound, submit = self.bind, self.bind.submit

        async def ours() -> float:
            start = perf_counter()
            last: Job[None] | None = None
            for _ in range(JOBS // IN_FLIGHT):
                for _ in repeat(None, IN_FLIGHT - 1):
                    bound()
                before, last = last, submit()
                if before is not None:
                    await before
            assert last is not None
            await last
            return (perf_counter() - start) / JOBS

        async def theirs() -> float:
            start = perf_counter()
            for _ in repeat(None, JOBS):
                if launch()[0]:
                    raise RuntimeError("launch failed")
            record()
            await poll()
            return (perf_counter() - start) / JOBS

        return await compare(
            f"bound launches, a job behind {IN_FLIGHT} | raw launches", ours, theirs
        )

    async def in_flight(self) -> Comparison:
        """Compare jobs of a full stream, each awaited, with a mark each and an event last."""
        launch, mark, record, poll = (
            self.raw.launch, self.raw.mark, self.raw.record, self.raw.poll,
        )  # fmt: skip
        submit = self.bind.submit

        async def ours() -> float:
            start = perf_counter()
            in_flight = deque[Job[None]]()
            for _ in repeat(None, JOBS):
                in_flight.append(submit())
                if len(in_flight) == IN_FLIGHT:
                    await in_flight.popleft()
            for job in in_flight:
                await job
            return (perf_counter() - start) / JOBS

        async def theirs() -> float:
            start = perf_counter()
            for _ in repeat(None, JOBS):
                if launch()[0]:
                    raise RuntimeError("launch failed")
                if mark()[0]:
                    raise RuntimeError("mark failed")
            record()
            await poll()
            return (perf_counter() - start) / JOBS

        return await compare(f"a job, {IN_FLIGHT} in flight | raw launch + mark", ours, theirs)

    async def awaited(self, wait: Callable[[], Awaitable[object]], by: str) -> Comparison:
        """Compare one launch at a time, awaited, with an event waited for in some way."""
        launch, values = self.p.launch, self.values
        pack_and_launch, record = self.raw.pack_and_launch, self.raw.record

        async def ours() -> float:
            start = perf_counter()
            await launch(CONFIG, saxpy, *values)
            return perf_counter() - start

        async def theirs() -> float:
            start = perf_counter()
            pack_and_launch()
            record()
            await wait()
            return perf_counter() - start

        return await compare(f"launch, await | raw launch, {by}", ours, theirs)


if __name__ == "__main__":
    print(table(asyncio.run(measure(drivers.open("simulated:h200")))))
