"""What waiting costs: thousands of tasks in the queue, and costs that must not grow.

`python -m benchmarks.micro.queue [--driver NAME] [--jobs N]`. The references are
`asyncio.Semaphore` and `asyncio.Lock` with as many waiters. On the simulated driver (the default)
the device is a thread of this process, which a heartbeat would wait for: only the rows about the
queue are measured there. `--driver cuda` measures all of them, on a GPU or on a stand-in whose
kernels take no time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import tracemalloc
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import replace
from time import perf_counter, thread_time

import numpy as np

from benchmarks.lib.raw_calls import CONFIG, ITEMS, SMS, arguments
from benchmarks.lib.timing import Comparison, Row, Samples, table
from benchmarks.micro import partitions
from greensched import Job, Partition, Pool, PoolClosed, WouldBlock
from greensched import driver as drivers
from greensched.driver.interface import Driver
from greensched.kernels import saxpy, spin

#: Tasks that wait.
MANY = 10_000
#: Tasks that wait and are all cancelled, and the bar on the longest turn of the loop meanwhile.
MASS, MOST_TURN_S = 100_000, 0.010
#: The bar on the longest turn while the pool closes over as many.
MOST_CLOSING_TURN_S = 0.050
#: Jobs in flight meanwhile; each takes a millisecond (JOB_S), on a stand-in, too.
IN_FLIGHT, JOB_S = 1000, 1e-3
JOB = partitions.SPIN[partitions.LENGTHS_MS.index(1e3 * JOB_S)]
#: Tasks of `MANY` that are cancelled, one at a time.
CANCELLED = 200
#: With fewer rounds, where objects lie in memory moves the median of a run by 0.03 of the ratio.
ROUNDS = 15
#: Beats of a millisecond in a window; windows of each kind.
BEATS, WINDOWS = 500, 6
#: Jobs done at the end.
JOBS = 1_000_000


async def measure(driver: Driver, jobs: int = JOBS) -> list[Row]:
    """Return the rows with their bars."""
    prepared = [saxpy, spin, JOB]
    async with Pool([0], driver=driver, prepare=prepared, max_waiting=max(MANY, MASS)) as pool:
        rows = [
            await _queued_and_granted(pool),
            *[await _cancelled(pool, which) for which in _CHOICES],
            await _all_cancelled(pool),
        ]
        if driver.name == "cuda":
            rows += [
                *await _memory(pool),
                await _heartbeat(pool),
                await _all_partitions(pool),
                await _many_jobs(pool, jobs),
            ]
    return [*rows, await _all_refused(driver)]


# -- waiting, being granted, and being cancelled ----------------------------------------------


async def _lease(pool: Pool) -> None:
    async with pool.partition(SMS):
        pass


async def _acquire(lock: asyncio.Semaphore | asyncio.Lock) -> None:
    async with lock:
        pass


async def _waiting(step: Callable[[], Awaitable[None]], number: int) -> list[asyncio.Task[None]]:
    """Return so many tasks, all of them waiting."""
    tasks = [asyncio.create_task(step()) for _ in range(number)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks), "a task did not wait"
    return tasks


async def _queued_and_granted(pool: Pool) -> Row:
    """All wait, then each is granted what the one before it returns."""
    found = Comparison(f"queue and grant, {MANY} waiting | semaphore")

    async def through(
        step: Callable[[], Awaitable[None]], everything: AbstractAsyncContextManager[object]
    ) -> Samples:
        async with everything:
            start = perf_counter()
            tasks = await _waiting(step, MANY)
        await asyncio.gather(*tasks)
        return np.array([(perf_counter() - start) / MANY])

    for number in range(ROUNDS + 1):
        gc.collect()
        semaphore = asyncio.Semaphore(1)
        ours = await through(lambda: _lease(pool), pool.partition(pool.devices[0].sm_count))
        gc.collect()
        theirs = await through(lambda: _acquire(semaphore), semaphore)  # noqa: B023  awaited here
        if number:
            found.ours.append(ours)
            found.theirs.append(theirs)
    row = found.row(0.5, "us", most=2.0)
    return replace(row, bar=f"{row.bar} (was 1.3 x, with leases handed over undecided)")


#: Which task is cancelled, as an index into those that wait in their order; and the bar on it.
_CHOICES: dict[str, tuple[Callable[[random.Random, int], int], float]] = {
    "last in": (lambda _, left: left - 1, 0.25),
    "at random": (lambda rng, left: rng.randrange(left), 0.4),
    "first in": (lambda *_: 0, 1.1),
}


async def _cancelled(pool: Pool, which: str) -> Row:
    """Cancel one task, until it has ended."""
    choose, most = _CHOICES[which]
    found = Comparison(f"cancelling one of {MANY}, {which} | asyncio.Lock")

    async def cancel(step: Callable[[], Awaitable[None]], number: int) -> Samples:
        rng = random.Random(number)
        tasks = await _waiting(step, MANY)
        samples = []
        for _ in range(CANCELLED):
            task = tasks.pop(choose(rng, len(tasks)))
            start = perf_counter()
            task.cancel()
            await asyncio.wait([task])
            samples.append(perf_counter() - start)
        await _cancel(tasks)
        return np.array(samples)

    async with pool.partition(pool.devices[0].sm_count):
        lock = asyncio.Lock()
        async with lock:
            for number in range(ROUNDS):
                found.ours.append(await cancel(lambda: _lease(pool), number))
                found.theirs.append(await cancel(lambda: _acquire(lock), number))
    return found.row(0.5, "us", most=most)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _all_cancelled(pool: Pool) -> Row:
    """Cancel all tasks that wait, one in each turn of the loop, and return the longest turn.

    In processor seconds of the loop's thread: another process may interrupt any turn. The garbage
    collector is off, because a full collection of so many tasks takes longer than the bar.
    """

    async def longest_turn(step: Callable[[], Awaitable[None]]) -> float:
        tasks = await _waiting(step, MASS)
        random.Random(1).shuffle(tasks)
        gc.collect()
        gc.disable()
        try:
            longest = 0.0
            for task in tasks:
                start = thread_time()
                task.cancel()
                await asyncio.sleep(0)
                longest = max(longest, thread_time() - start)
        finally:
            gc.enable()
        await asyncio.gather(*tasks, return_exceptions=True)
        return longest

    async with pool.partition(pool.devices[0].sm_count):
        longest = await longest_turn(lambda: _lease(pool))
    what = f"{MASS:,} that wait are cancelled, one a turn: longest turn | allowed"
    return Row(
        what, 1e3 * longest, 1e3 * MOST_TURN_S, "ms", bar=f"<= {1e3 * MOST_TURN_S:g} ms",
        passed=longest <= MOST_TURN_S,
    )  # fmt: skip


async def _all_refused(driver: Driver) -> Row:
    """Close a pool over tasks that wait, and return the longest turn until all were told.

    In processor seconds, and without the garbage collector, as in `_all_cancelled`.
    """
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        start = thread_time()
        while True:
            await asyncio.sleep(0)
            now = thread_time()
            longest, start = max(longest, now - start), now

    pool = Pool([0], driver=driver, max_waiting=MASS)
    await pool.open()
    async with pool.partition(pool.devices[0].sm_count):
        tasks = await _waiting(lambda: _lease(pool), MASS)
        gc.collect()
        gc.disable()
        beating = asyncio.create_task(beat())
        closing = asyncio.create_task(pool.aclose(60))
        told = await asyncio.gather(*tasks, return_exceptions=True)
        beating.cancel()
        gc.enable()
    await closing
    assert all(isinstance(one, PoolClosed) for one in told)
    what = f"{MASS:,} that wait are refused as the pool closes: longest turn | allowed"
    return Row(
        what, 1e3 * longest, 1e3 * MOST_CLOSING_TURN_S, "ms",
        bar=f"<= {1e3 * MOST_CLOSING_TURN_S:g} ms", passed=longest <= MOST_CLOSING_TURN_S,
    )  # fmt: skip


async def _memory(pool: Pool) -> list[Row]:
    """Count the bytes of each waiting task, beyond one that waits for a lock; and of a done job."""
    lock = asyncio.Lock()

    async def taken(step: Callable[[], Awaitable[None]]) -> float:
        await asyncio.sleep(0.01)  # tasks that were cancelled before are gone
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        tasks = await _waiting(step, MANY)
        gc.collect()
        each = (tracemalloc.get_traced_memory()[0] - before) / MANY
        await _cancel(tasks)
        return each

    tracemalloc.start()
    try:
        async with pool.partition(pool.devices[0].sm_count), lock:
            await taken(lambda: _lease(pool))
            ours, theirs = await taken(lambda: _lease(pool)), await taken(lambda: _acquire(lock))
        async with pool.partition(SMS) as p:
            with await p.empty(ITEMS) as buffer:
                bound = p.bind(CONFIG, saxpy, *arguments(buffer))
                await bound.submit()
                gc.collect()
                before = tracemalloc.get_traced_memory()[0]
                for _ in range(MANY):
                    await bound.submit()
                gc.collect()
                job = (tracemalloc.get_traced_memory()[0] - before) / MANY
    finally:
        tracemalloc.stop()
    return [
        Row("bytes for each task that waits | for a lock", ours, theirs, "B",
            bar="<= 2048 B more", passed=ours - theirs <= 2048),
        Row("bytes for each finished job | one byte", job, 1.0, "B", bar="< 1 B", passed=job < 1),
    ]  # fmt: skip


# -- the loop meanwhile -----------------------------------------------------------------------


async def _beats() -> Samples:
    found, last = [], perf_counter()
    for _ in range(BEATS):
        await asyncio.sleep(1e-3)
        now = perf_counter()
        found.append(now - last)
        last = now
    return np.array(found)


async def _heartbeat(pool: Pool) -> Row:
    """Compare the gaps of a millisecond's beat on an idle loop and on a full one."""
    found = Comparison(f"{MANY} waiting, {IN_FLIGHT} in flight: a beat | idle loop's")
    for _ in range(WINDOWS):
        found.theirs.append(await _beats())
        over, leases = asyncio.Event(), []
        async with AsyncExitStack() as held:
            with suppress(WouldBlock):  # as many as fit
                while True:
                    leases.append(await held.enter_async_context(pool.partition_nowait(SMS)))
            each = -(-IN_FLIGHT // len(leases))
            workers = [asyncio.create_task(_keep_in_flight(p, each, over)) for p in leases]
            await asyncio.sleep(0.05)
            tasks = await _waiting(lambda: _lease(pool), MANY)
            found.ours.append(await _beats())
            over.set()
            await _cancel(tasks)
            await asyncio.gather(*workers)
    return found.row(0.99, "ms", most=2.0)


async def _keep_in_flight(p: Partition, each: int, over: asyncio.Event) -> None:
    """Keep so many jobs in flight, and await one after another."""
    bound = p.bind(CONFIG, JOB, round(JOB_S * 1e9))
    in_flight: deque[Job[None]] = deque()
    while not over.is_set():
        while len(in_flight) < each:
            in_flight.append(bound.submit())
        await in_flight.popleft()


# -- costs that must not grow -----------------------------------------------------------------


async def _all_partitions(pool: Pool) -> Row:
    """Compare leases with a launch of all cells of 8 SMs in turn with those of one cell."""
    found = Comparison("lease, launch, await: all partitions in turn | one")
    count = pool.devices[0].sm_count // 8

    async def one() -> float:
        start = perf_counter()
        async with pool.partition(8) as p:
            await p.launch(CONFIG, spin, 0)
        return perf_counter() - start

    async def turn() -> float:
        """Lease the next cell each time: those before it are held meanwhile."""
        held, took = [], []
        for _ in range(count - 1):
            took.append(await one())
            lease = pool.partition(8)
            held.append(lease)
            await lease.__aenter__()
        for lease in held:
            await lease.__aexit__(None, None, None)
        return float(np.mean(took))

    await turn()
    for _ in range(30):
        found.ours.append(np.array([await turn()]))
        found.theirs.append(np.array([np.mean([await one() for _ in range(count)])]))
    return _flat(found, "us")


async def _many_jobs(pool: Pool, jobs: int) -> Row:
    """Compare the last of a million jobs with the first, in units of an idle semaphore just then.

    Seconds lie between them, in which a shared machine may change its pace.
    """
    found = Comparison(f"submit and await, in semaphores: at {jobs:,} jobs done | at first")
    semaphore = asyncio.Semaphore(1)
    async with pool.partition(SMS) as p:
        with await p.empty(ITEMS) as buffer:
            bound = p.bind(CONFIG, saxpy, *arguments(buffer))

            async def thousand() -> Samples:
                start = perf_counter()
                for _ in range(1000):
                    await bound.submit()
                between = perf_counter()
                for _ in range(1000):
                    await _acquire(semaphore)
                return np.array([(between - start) / (perf_counter() - between)])

            rounds = [await thousand() for _ in range(max(jobs // 1000, 20))]
    found.theirs += rounds[1:11]
    found.ours += rounds[-10:]
    return _flat(found, "x")


def _flat(found: Comparison, unit: str) -> Row:
    row = found.row(0.5, unit, most=1.2)
    return replace(row, bar=f"flat: {row.bar}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.queue",
        description="Measure what waiting costs, with thousands of tasks in the queue.",
    )
    parser.add_argument(
        "--driver", default="simulated:h200", help="cuda, or a simulated one (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=JOBS, help="jobs to be done in all (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = asyncio.run(measure(drivers.open(options.driver), options.jobs))
    print(json.dumps([row.as_dict() for row in found]) if options.json else table(found))


if __name__ == "__main__":
    main()
