"""`make soak`: 200,000 leases on the simulated driver; memory, threads and files must not grow.

Rounds of 10,000 leases of many kinds, in virtual time, by two loops in two threads that share one
pool. The loops are new in each round, so that what outlives a loop would show. Between two rounds
no task holds anything, and the process is sampled. Exit code 1 if it has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from greensched import ALL, REST, DeadlineExceeded, LaunchConfig, Pool, WouldBlock
from greensched.driver import simulated
from greensched.driver.simulated import cost
from greensched.kernels import saxpy, spin
from greensched.typing import Size

LEASES = 200_000
ROUND = 10_000
#: From this lease on nothing may grow: all executors, threads and caches exist by then.
SETTLED = 20_000
MOST_BYTES = 2 << 20
LOOPS = 2
#: Tasks of each loop.
TASKS = 8
#: glibc keeps freed memory for each thread, and goes on filling what it keeps for more than 100,000
#: leases: 170 threads come to 6 MiB. With one arena for all, and no caches of threads, only memory
#: that is in use grows.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}

#: A thread of an executor: "greensched DEVICE:CELLS PURPOSE".
_EXECUTOR_THREAD = re.compile(r"(greensched \d+:[0-9a-f]+) ")


@dataclass(frozen=True, slots=True)
class Sample:
    """The process, after so many leases."""

    leases: int
    resident: int
    threads: int
    files: int

    @classmethod
    def now(cls, leases: int, executors: int) -> Sample:
        """Sample the process, with all garbage collected."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  iterdir keeps the folder open
        names = [thread.name for thread in threading.enumerate()]
        return cls(leases, pages * os.sysconf("SC_PAGE_SIZE"), unexplained(names, executors), files)


def unexplained(names: list[str], executors: int) -> int:
    """Count the threads, without those that existing executors account for.

    An executor starts each of its threads when it first needs it, at whatever lease that is. A name
    that occurs twice, and a set of cells without an executor, are threads that did not end.
    """
    owned = [found[1] for name in names if (found := _EXECUTOR_THREAD.match(name))]
    twice = len(names) - len(set(names))
    return len(names) - len(owned) + twice + max(0, len(set(owned)) - executors)


class Soak:
    """One pool on one simulated machine, for many rounds."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._clock = simulated.VirtualClock(seed)
        self._driver = simulated.open("h200", clock=self._clock)
        self._pool = Pool(driver=self._driver)
        self.kinds: Counter[str] = Counter()

    def run(self, leases: int) -> Iterator[Sample]:
        """Run so many leases; sample the process after each round."""
        self._clock.run(self._pool.open)
        for done in range(0, leases, ROUND):
            with ThreadPoolExecutor(LOOPS) as threads:
                for _ in threads.map(self._loop, [done] * LOOPS, range(LOOPS)):
                    pass  # raises what a loop raised
            yield Sample.now(done + ROUND, self._pool.statistics().executors)
        self._clock.run(self._pool.aclose)
        left = self._driver.live()
        assert not left, f"left on the device: {left}"

    def _loop(self, done: int, number: int) -> None:
        self._clock.run(self._tasks, done, number)

    async def _tasks(self, done: int, number: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for task in range(TASKS):
                tasks.create_task(self._task(random.Random(f"{self._seed} {done} {number} {task}")))

    async def _task(self, rng: random.Random) -> None:
        for _ in range(ROUND // LOOPS // TASKS):
            (kind,) = rng.choices(KINDS, WEIGHTS)
            self.kinds[kind.__name__] += 1
            await kind(self._pool, rng)


def grown(samples: list[Sample]) -> dict[str, tuple[int, int]]:
    """Return by how much each thing has grown at most since `SETTLED`, and by how much it may."""
    base = next(sample for sample in samples if sample.leases >= SETTLED)
    after = [sample for sample in samples if sample.leases > SETTLED]
    return {
        "memory (bytes)": (max(each.resident for each in after) - base.resident, MOST_BYTES),
        "threads": (max(each.threads for each in after) - base.threads, 0),
        "files": (max(each.files for each in after) - base.files, 0),
    }


# -- the kinds of leases ----------------------------------------------------------------------

Kind = Callable[[Pool, random.Random], Awaitable[None]]

CONFIG = LaunchConfig(grid=1, block=32)
#: Items of the arrays that are copied: 16 KiB.
ITEMS = 4096


class Intended(Exception):
    """Raised by leases that are meant to end with an error."""


def size(rng: random.Random) -> Size:
    """Return mostly an exact number of SMs, sometimes a range, now and then all of them."""
    draw = rng.random()
    if draw < 0.02:
        return ALL
    least = rng.randint(1, 64)
    return (least, rng.randint(least, 128)) if draw < 0.2 else least


def duration(rng: random.Random) -> int:
    """Return a kernel's nanoseconds: 10 us on average, sometimes a hundred times that."""
    return int(rng.expovariate(1e-4)) * (100 if rng.random() < 0.02 else 1)


async def launched(pool: Pool, rng: random.Random) -> None:
    async with pool.partition(size(rng)) as p:
        await p.launch(CONFIG, spin, duration(rng))


async def launched_without_await(pool: Pool, rng: random.Random) -> None:
    """Launch several times; the end of the block waits for all."""
    async with pool.partition(size(rng)) as p:
        for _ in range(rng.randint(1, 8)):
            p.launch(CONFIG, spin, duration(rng))


async def launched_by_the_pool(pool: Pool, rng: random.Random) -> None:
    await pool.launch(CONFIG, spin, duration(rng), sms=size(rng))


async def bound(pool: Pool, rng: random.Random) -> None:
    async with pool.partition(size(rng)) as p:
        await p.prepare(CONFIG, spin)
        launch = p.bind(CONFIG, spin, duration(rng))
        for _ in range(rng.randint(1, 100)):
            launch()
        launch.set(0, duration(rng))
        await launch.submit()


async def copied(pool: Pool, rng: random.Random) -> None:
    """Upload twice, launch, download."""
    array = np.full(ITEMS, rng.random(), np.float32)
    async with pool.partition(size(rng)) as p:
        with await p.upload(array) as x, await p.upload(array) as y:
            p.launch(CONFIG, saxpy, 2.0, x, y, ITEMS)
            out = await p.download(y)
    assert np.allclose(out, 3 * array)


async def called(pool: Pool, rng: random.Random) -> None:
    async with pool.partition(size(rng)) as p:
        p.launch(CONFIG, spin, duration(rng))
        assert await p.run(cost(duration(rng) / 1e9)(sum), [1, 2, 3]) == 6


async def several_partitions(pool: Pool, rng: random.Random) -> None:
    async with pool.partitions(rng.choice((8, 16, 32)), REST) as partitions:
        for p in partitions:
            p.launch(CONFIG, spin, duration(rng))


async def cancelled(pool: Pool, rng: random.Random) -> None:
    """Cancel after a random time: in the queue, or with a kernel running."""
    with suppress(TimeoutError):
        async with asyncio.timeout(duration(rng) / 1e9):
            async with pool.partition(size(rng)) as p:
                await p.launch(CONFIG, spin, 10 * duration(rng))


async def cancelled_in_a_call(pool: Pool, rng: random.Random) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(duration(rng) / 1e9):
            await pool.run(cost(duration(rng) / 1e9)(len), (), sms=size(rng))


async def too_late(pool: Pool, rng: random.Random) -> None:
    """Request all SMs, with a deadline that is seldom met."""
    with suppress(DeadlineExceeded):
        async with pool.partition(ALL, deadline=(1 + duration(rng)) / 1e9) as p:
            await p.launch(CONFIG, spin, duration(rng))


async def at_once_or_not(pool: Pool, rng: random.Random) -> None:
    with suppress(WouldBlock):
        async with pool.partition_nowait(size(rng)) as p:
            await p.launch(CONFIG, spin, duration(rng))


async def failed(pool: Pool, rng: random.Random) -> None:
    """Raise in the block while a kernel runs, or in a call."""

    def fail() -> None:
        raise Intended

    with suppress(Intended):
        async with pool.partition(size(rng)) as p:
            p.launch(CONFIG, spin, duration(rng))
            if rng.random() < 0.5:
                raise Intended
            await p.run(fail)


#: How often each is drawn: launches most, calls least, because each takes a thread of ours.
_KINDS: dict[Kind, int] = {
    launched: 30,
    launched_without_await: 10,
    launched_by_the_pool: 10,
    bound: 5,
    copied: 5,
    called: 3,
    several_partitions: 5,
    cancelled: 15,
    cancelled_in_a_call: 2,
    too_late: 5,
    at_once_or_not: 8,
    failed: 2,
}
KINDS, WEIGHTS = tuple(_KINDS), tuple(_KINDS.values())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.system.soak",
        description="Run 200,000 leases; memory, threads and files must not grow.",
    )
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1000), help="of the leases (default: random)"
    )
    seed = parser.parse_args().seed
    print(f"seed {seed}; allocator: {ALLOCATOR}")
    print(f"{'leases':>8} {'resident MiB':>13} {'threads':>8} {'files':>6} {'s':>6}", flush=True)
    soak, start, samples = Soak(seed), time.perf_counter(), list[Sample]()
    for sample in soak.run(LEASES):
        samples.append(sample)
        print(
            f"{sample.leases:8} {sample.resident / (1 << 20):13.2f} {sample.threads:8} "
            f"{sample.files:6} {time.perf_counter() - start:6.0f}",
            flush=True,
        )
    print(", ".join(f"{number} {kind}" for kind, number in soak.kinds.most_common()))
    growth = grown(samples)
    for what, (more, most) in growth.items():
        verdict = "PASS" if more <= most else "FAIL"
        print(f"from {SETTLED:,} leases on, {what} grew by {more:,} (<= {most:,}): {verdict}")
    return int(any(more > most for more, most in growth.values()))


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        command = [sys.executable, "-m", "benchmarks.system.soak", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ALLOCATOR)  # glibc reads it at the start
    raise SystemExit(main())
