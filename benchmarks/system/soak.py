"""`make soak`: 200,000 leases on the simulated driver; memory, threads and files must not grow.

Rounds of 10,000 leases of many kinds, in virtual time, by two loops in two threads that share one
pool. The loops are new in each round, so that what outlives a loop would show too. Between rounds
no task holds anything, and the process is looked at. Exit code 1 if it has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.system.leases import KINDS, WEIGHTS
from greensched import Pool
from greensched.driver import simulated

LEASES = 200_000
ROUND = 10_000
#: From this lease on nothing may grow: every lane, thread and cache that is kept is there by then.
SETTLED = 20_000
MOST_BYTES = 2 << 20
LOOPS = 2
#: Tasks of each loop.
TASKS = 8
#: glibc keeps freed memory back for each thread, and goes on filling what it keeps for more than
#: 100,000 leases: 170 threads come to 6 MiB. With one arena for all, and no caches of threads,
#: what grows is what somebody holds.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}


@dataclass(frozen=True, slots=True)
class Look:
    """The process, after so many leases."""

    leases: int
    resident: int
    threads: int
    files: int

    @classmethod
    def now(cls, leases: int) -> Look:
        """With all garbage collected."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  iterdir keeps the folder open
        return cls(leases, pages * os.sysconf("SC_PAGE_SIZE"), threading.active_count(), files)


class Soak:
    """One pool on one simulated machine, for many rounds."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._clock = simulated.VirtualClock(seed)
        self._driver = simulated.open("h200", clock=self._clock)
        self._pool = Pool(driver=self._driver)
        self.kinds: Counter[str] = Counter()

    def run(self, leases: int) -> Iterator[Look]:
        """Looks at the process after each round."""
        self._clock.run(self._pool.open)
        for done in range(0, leases, ROUND):
            with ThreadPoolExecutor(LOOPS) as threads:
                for _ in threads.map(self._loop, [done] * LOOPS, range(LOOPS)):
                    pass  # raises what a loop raised
            self._start_threads()
            yield Look.now(done + ROUND)
        self._clock.run(self._pool.aclose)
        left = self._driver.live()
        assert not left, f"left on the device: {left}"

    def _start_threads(self) -> None:
        """Those of every lane there is: they start when first needed, at whatever lease that is.

        So each look sees the same number, unless one did not end with its lane.
        """
        manager = self._pool._manager
        for crew in manager.sites[0].crews.values():
            for thread in (crew._worker, crew._mover):
                thread.submit(lambda: None)

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


def grown(looks: list[Look]) -> dict[str, tuple[int, int]]:
    """By how much each thing has grown at most since all had settled, and by how much it may."""
    base = next(look for look in looks if look.leases >= SETTLED)
    after = [look for look in looks if look.leases > SETTLED]
    return {
        "memory (bytes)": (max(look.resident for look in after) - base.resident, MOST_BYTES),
        "threads": (max(look.threads for look in after) - base.threads, 0),
        "files": (max(look.files for look in after) - base.files, 0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.system.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    seed = parser.parse_args().seed
    print(f"seed {seed}; allocator: {ALLOCATOR}")
    print(f"{'leases':>8} {'resident MiB':>13} {'threads':>8} {'files':>6} {'s':>6}", flush=True)
    soak, start, looks = Soak(seed), time.perf_counter(), list[Look]()
    for look in soak.run(LEASES):
        looks.append(look)
        print(
            f"{look.leases:8} {look.resident / (1 << 20):13.2f} {look.threads:8} {look.files:6} "
            f"{time.perf_counter() - start:6.0f}",
            flush=True,
        )
    print(", ".join(f"{number} {kind}" for kind, number in soak.kinds.most_common()))
    growth = grown(looks)
    for what, (more, most) in growth.items():
        verdict = "PASS" if more <= most else "FAIL"
        print(f"from {SETTLED:,} leases on, {what} grew by {more:,} (<= {most:,}): {verdict}")
    return int(any(more > most for more, most in growth.values()))


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        command = [sys.executable, "-m", "benchmarks.system.soak", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ALLOCATOR)  # it is read at the start
    raise SystemExit(main())
