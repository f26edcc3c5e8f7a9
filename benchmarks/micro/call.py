"""What `p.run` costs, beside `asyncio.to_thread` and a thread of one's own.

A dedicated thread is the tightest reference: `loop.run_in_executor` of a `ThreadPoolExecutor` of
one thread, where `to_thread` copies the context variables and picks one of several threads. The
function is empty; or it is the step of an engine, which launches and waits for its stream: the same
on both sides, on a stream of a partition each.
`python -m benchmarks.micro.call [--driver NAME] [--json]` runs on the simulated driver by default.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter

from benchmarks.lib.raw_calls import CONFIG, ITEMS, SMS, arguments, packed
from benchmarks.lib.timing import Comparison, Row, Work, compare, table
from greensched import Partition, Pool, current_call
from greensched import driver as drivers
from greensched.driver.interface import Driver
from greensched.kernels import saxpy

Call = Callable[[], Awaitable[object]]

CALLERS = 8
#: Calls of each caller, for each reading of the clock.
CALLS = 10
#: What a checkpoint behind a call may take where nothing changes.
CHECKPOINT_S = 10e-6


async def measure(driver: Driver) -> list[Row]:
    """Return the median and p99 of one caller, of several on one partition, and of a step."""
    comparisons = [*await _empty(driver), *await _steps(driver)]
    return [c.row(part, "us") for c in comparisons for part in (0.5, 0.99)]


async def _empty(driver: Driver) -> list[Comparison]:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as thread:
        async with Pool([0], driver=driver) as pool, pool.partition(SMS) as p:
            ours = partial(p.run, _nothing)
            references = {
                "to_thread": partial(asyncio.to_thread, _nothing),
                "a thread of one's own": partial(loop.run_in_executor, thread, _nothing),
            }
            return [
                await compare(
                    f"run | {name}, {many} at once", _calls(ours, many), _calls(theirs, many)
                )
                for name, theirs in references.items()
                for many in (1, CALLERS)
            ]


async def _steps(driver: Driver) -> list[Comparison]:
    """Compare steps: called, called behind a checkpoint, and called on a lease of their own."""
    loop = asyncio.get_running_loop()
    async with Pool([0], driver=driver) as pool, _step(pool) as step, _step(pool) as other:
        primary = pool.devices[0].primary.handle
        with ThreadPoolExecutor(1, initializer=driver.set_current, initargs=(primary,)) as thread:
            theirs = _calls(partial(loop.run_in_executor, thread, other), 1)
            async with pool.partition(SMS) as p:

                async def checkpoint_and_run() -> None:
                    await p.checkpoint()
                    await p.run(step)

                found = [
                    await compare("step, run | a thread", _calls(partial(p.run, step), 1), theirs),
                    await compare("step, checkpoint + run | a thread",
                                  _calls(checkpoint_and_run, 1), theirs),
                    await _checkpoints(p, step),
                ]  # fmt: skip

            async def lease_and_run() -> None:
                async with pool.partition(SMS) as q:
                    await q.run(step)

            name = "step, lease + run | a thread"
            return [*found, await compare(name, _calls(lease_and_run, 1), theirs)]


async def _checkpoints(p: Partition, step: Callable[[], object]) -> Comparison:
    """Compare a checkpoint behind a call, at which nothing changes, with what it may take."""

    async def ours() -> float:
        await p.run(step)
        start = perf_counter()
        await p.checkpoint()
        return perf_counter() - start

    async def allowed() -> float:
        return CHECKPOINT_S

    return await compare("checkpoint behind a run | allowed", ours, allowed)


@asynccontextmanager
async def _step(pool: Pool) -> AsyncIterator[Callable[[], None]]:
    """Provide a step of an engine: a launch on a partition's call stream, which it waits for.

    The partition is held meanwhile, so that two steps have SMs and a stream each.
    """
    async with pool.partition(SMS) as p:
        with await p.empty(ITEMS) as buffer:
            await p.launch(CONFIG, saxpy, *arguments(buffer))  # loads the kernel
            kernel = p.context.loader.loaded(saxpy)
            assert kernel is not None
            call = await p.run(current_call)
            assert call is not None
            values = packed(p.device_id, buffer)
            launch = p.device.driver.bind_launch(
                call.stream.handle, kernel, CONFIG.grid3, CONFIG.block3, 0, values.address
            )
            sync = call.stream.sync

            def step(keep: object = values) -> None:  # noqa: ARG001  read by each launch
                launch()
                sync()

            yield step


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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.call",
        description="Measure blocking calls beside threads.",
    )
    parser.add_argument(
        "--driver", default="simulated:h200", help="cuda, or a simulated one (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = asyncio.run(measure(drivers.open(options.driver)))
    print(json.dumps([row.as_dict() for row in found]) if options.json else table(found))


if __name__ == "__main__":
    main()
