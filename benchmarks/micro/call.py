"""What `p.run` of nothing costs, beside `asyncio.to_thread`: alone, and eight at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter

from benchmarks.lib.raw_calls import SMS
from benchmarks.lib.timing import Row, Work, compare
from greensched import Pool
from greensched.driver.interface import Driver

Call = Callable[[], Awaitable[object]]

CALLERS = 8
#: Calls of each caller, to a stopwatch.
CALLS = 10


async def measure(driver: Driver) -> list[Row]:
    """Median and p99 of one caller and of several on one lane."""
    async with Pool([0], driver=driver) as pool, pool.partition(SMS) as p:
        ours, theirs = partial(p.run, _nothing), partial(asyncio.to_thread, _nothing)
        comparisons = [
            await compare(
                f"run | to_thread, {many} at once", _calls(ours, many), _calls(theirs, many)
            )
            for many in (1, CALLERS)
        ]
    return [c.row(part, "us") for c in comparisons for part in (0.5, 0.99)]


def _nothing() -> None:
    pass


def _calls(call: Call, callers: int) -> Work:
    """The mean of a call."""

    async def caller() -> None:
        for _ in range(CALLS):
            await call()

    async def work() -> float:
        start = perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        return (perf_counter() - start) / (CALLS * callers)

    return work
