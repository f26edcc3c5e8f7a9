"""Ten thousand tasks that wait for SMs, and costs that should stay the same.

Beside `asyncio.Semaphore` and `asyncio.Lock` with as many waiters. No device is worth mentioning
here: `--driver cuda` runs on a GPU, or on a stand-in with zero-cost kernels. Without it the device
is simulated, by a thread of this process, which a beat waits for: of beats it then says nothing.
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
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.lib.raw_calls import CONFIG, ITEMS, SMS, arguments
from benchmarks.lib.timing import Comparison, Row, Samples, table
from benchmarks.micro import executors as lanes
from greensched import Job, Partition, Pool, WouldBlock
from greensched import driver as drivers
from greensched.driver.interface import Driver
from greensched.kernels import saxpy, spin

#: Tasks that wait.
MANY = 10_000
#: Jobs in flight meanwhile; each takes a millisecond (JOB_S), on a stand-in too.
IN_FLIGHT, JOB_S = 1000, 1e-3
JOB = lanes.SPIN[lanes.LENGTHS_MS.index(1e3 * JOB_S)]
#: Of 10,000: so many are cancelled, one at a time.
CANCELLED = 200
#: Fewer, and what lies where in memory moves the median of a run by 0.03 of the ratio.
ROUNDS = 15
#: Beats of a millisecond, to a window; windows of each kind.
BEATS, WINDOWS = 500, 6
#: Jobs done at the end.
JOBS = 1_000_000


async def measure(driver: Driver, jobs: int = JOBS) -> list[Row]:
    """Rows with their bars."""
    async with Pool([0], driver=driver, prepare=[saxpy, spin, JOB], max_waiting=MANY) as pool:
        return [
            await _queued_and_granted(pool),
            *[await _cancelled(pool, which) for which in _CHOICES],
            *await _memory(pool),
            await _heartbeat(pool),
            await _lanes(pool),
            await _many_jobs(pool, jobs),
        ]


# -- ways to wait -----------------------------------------------------------------------------


async def _for_sms(pool: Pool) -> None:
    async with pool.partition(SMS):
        pass


async def _for(lock: asyncio.Semaphore | asyncio.Lock) -> None:
    async with lock:
        pass


async def _waiting(
    step: Callable[[], Awaitable[None]], number: int = MANY
) -> list[asyncio.Task[None]]:
    """So many tasks, all of them waiting."""
    tasks = [asyncio.create_task(step()) for _ in range(number)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks), "somebody did not wait"
    return tasks


async def _queued_and_granted(pool: Pool) -> Row:
    """All wait, then all have their turn, as soon as who has everything lets go of it."""
    found = Comparison(f"queue and grant, {MANY} waiting | semaphore")

    async def through(
        step: Callable[[], Awaitable[None]], everything: AbstractAsyncContextManager[object]
    ) -> Samples:
        async with everything:
            start = perf_counter()
            tasks = await _waiting(step)
        await asyncio.gather(*tasks)
        return np.array([(perf_counter() - start) / MANY])

    for number in range(ROUNDS + 1):
        gc.collect()
        semaphore = asyncio.Semaphore(1)
        ours = await through(lambda: _for_sms(pool), pool.partition(pool.devices[0].sm_count))
        gc.collect()
        theirs = await through(lambda: _for(semaphore), semaphore)  # noqa: B023  awaited here
        if number:
            found.ours.append(ours)
            found.theirs.append(theirs)
    return found.row(0.5, "us", most=1.3)


#: Who is cancelled, as an index into those who wait, by when they came; and the bar on it.
_CHOICES: dict[str, tuple[Callable[[random.Random, int], int], float]] = {
    "last in": (lambda _, left: left - 1, 0.25),
    "at random": (lambda rng, left: rng.randrange(left), 0.4),
    "first in": (lambda *_: 0, 1.1),
}


async def _cancelled(pool: Pool, which: str) -> Row:
    """One of them, until his task has ended."""
    choose, most = _CHOICES[which]
    found = Comparison(f"cancelling one of {MANY}, {which} | asyncio.Lock")

    async def cancel(step: Callable[[], Awaitable[None]], number: int) -> Samples:
        rng = random.Random(number)
        tasks = await _waiting(step)
        samples = []
        for _ in range(CANCELLED):
            task = tasks.pop(choose(rng, len(tasks)))
            start = perf_counter()
            task.cancel()
            await asyncio.wait([task])
            samples.append(perf_counter() - start)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return np.array(samples)

    async with pool.partition(pool.devices[0].sm_count):
        lock = asyncio.Lock()
        async with lock:
            for number in range(ROUNDS):
                found.ours.append(await cancel(lambda: _for_sms(pool), number))
                found.theirs.append(await cancel(lambda: _for(lock), number))
    return found.row(0.5, "us", most=most)


async def _memory(pool: Pool) -> list[Row]:
    """Bytes for each that waits, beyond a task that waits for a lock; and for each finished job."""
    lock = asyncio.Lock()

    async def taken(step: Callable[[], Awaitable[None]]) -> float:
        await asyncio.sleep(0.01)  # whoever was cancelled before is gone
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        tasks = await _waiting(step)
        gc.collect()
        each = (tracemalloc.get_traced_memory()[0] - before) / MANY
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return each

    tracemalloc.start()
    try:
        async with pool.partition(pool.devices[0].sm_count), lock:
            await taken(lambda: _for_sms(pool))
            ours, theirs = await taken(lambda: _for_sms(pool)), await taken(lambda: _for(lock))
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
    """Gaps of a millisecond's beat: an idle loop's, and while all that waits and works."""
    found = Comparison(f"{MANY} waiting, {IN_FLIGHT} in flight: a beat | idle loop's")
    for _ in range(WINDOWS):
        found.theirs.append(await _beats())
        over, leases = asyncio.Event(), []
        async with AsyncExitStack() as held:
            with suppress(WouldBlock):  # as many as fit
                while True:
                    leases.append(await held.enter_async_context(pool.partition_nowait(SMS)))
            each = -(-IN_FLIGHT // len(leases))
            workers = [asyncio.create_task(_flying(p, each, over)) for p in leases]
            await asyncio.sleep(0.05)
            tasks = await _waiting(lambda: _for_sms(pool))
            found.ours.append(await _beats())
            over.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*workers)
    return found.row(0.99, "ms", most=2.0)


async def _flying(p: Partition, each: int, over: asyncio.Event) -> None:
    """Always has so many jobs in flight, and awaits one after another."""
    bound = p.bind(CONFIG, JOB, round(JOB_S * 1e9))
    flight: deque[Job[None]] = deque()
    while not over.is_set():
        while len(flight) < each:
            flight.append(bound.submit())
        await flight.popleft()


# -- flat -------------------------------------------------------------------------------------


async def _lanes(pool: Pool) -> Row:
    """Leases with a launch, of all sets of 8 SMs in turn, beside those of one set."""
    found = Comparison("lease, launch, await: all lanes in turn | one lane")
    count = pool.devices[0].sm_count // 8

    async def one() -> float:
        start = perf_counter()
        async with pool.partition(8) as p:
            await p.launch(CONFIG, spin, 0)
        return perf_counter() - start

    async def turn() -> float:
        """The next set: those before it are held meanwhile."""
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
    return replace(found.row(0.5, "us"), bar="flat: <= 1.2 x", passed=_flat(found))


async def _many_jobs(pool: Pool, jobs: int) -> Row:
    """The last of a million jobs, beside the first, in what an idle semaphore takes just then.

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
                    await _for(semaphore)
                return np.array([(between - start) / (perf_counter() - between)])

            rounds: list[Any] = [await thousand() for _ in range(max(jobs // 1000, 20))]
    found.theirs += rounds[1:11]
    found.ours += rounds[-10:]
    return replace(found.row(0.5, "x"), bar="flat: <= 1.2 x", passed=_flat(found))


def _flat(found: Comparison) -> bool:
    ours, theirs = found.at(0.5)
    return ours <= 1.2 * theirs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.queue", description=__doc__)
    parser.add_argument("--driver", default="simulated:h200", help="cuda, or a simulated one")
    parser.add_argument("--jobs", type=int, default=JOBS, help="to be done in all")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = asyncio.run(measure(drivers.open(options.driver), options.jobs))
    print(json.dumps([row.as_dict() for row in found]) if options.json else table(found))


if __name__ == "__main__":
    main()
