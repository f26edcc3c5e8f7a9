"""What `p.run` of an empty function costs, beside `asyncio.to_thread` and a thread of one's own.

A dedicated thread is the tightest reference: `loop.run_in_executor` of a `ThreadPoolExecutor` of
one thread, where `to_thread` copies the context variables and picks one of several threads.
`python -m benchmarks.micro.call` runs on the simulated driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter

from benchmarks.lib.raw_calls import SMS
from benchmarks.lib.timing import Row, Work, compare, table
from greensched import Pool
from greensched import driver as drivers
from greensched.driver.interface import Driver

Call = Callable[[], Awaitable[object]]

CALLERS = 8
#: Calls of each caller, for each reading of the clock.
CALLS = 10


async def measure(driver: Driver) -> list[Row]:
    """Return the median and p99 of one caller, and of several on one partition."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as thread:
        async with Pool([0], driver=driver) as pool, pool.partition(SMS) as p:
            ours = partial(p.run, _nothing)
            references = {
                "to_thread": partial(asyncio.to_thread, _nothing),
                "a thread of one's own": partial(loop.run_in_executor, thread, _nothing),
            }
            comparisons = [
                await compare(
                    f"run | {name}, {many} at once", _calls(ours, many), _calls(theirs, many)
                )
                for name, theirs in references.items()
                for many in (1, CALLERS)
            ]
    return [c.row(part, "us") for c in comparisons for part in (0.5, 0.99)]


def _nothing() -> None:
    pass


def _calls(call: Call, callers: int) -> Work:
    """Time the calls of so many callers at once; the mean of one call."""

    async def caller() -> None:
        for _ in range(CALLS):
            await call()

    async def work() -> float:
        start = perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        return (perf_counter() - start) / (CALLS * callers)

    return work


if __name__ == "__main__":
    print(table(asyncio.run(measure(drivers.open("simulated:h200")))))
