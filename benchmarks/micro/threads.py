"""What a lease costs threads without a loop, by `pool.sync`, beside as many tasks of a loop.

`python -m benchmarks.micro.threads` runs on the simulated driver: each lease of 16 of 132 SMs runs
one callable.
"""

from __future__ import annotations

import asyncio
import threading
from time import perf_counter

from benchmarks.lib.timing import Row, table
from greensched import Pool

SMS = 16
LEASES = 1000
ROUNDS = 5


def measure() -> list[Row]:
    """Return the time of each lease, the median of rounds that take turns."""
    return [_compare(number) for number in (1, 10, 50)]


def _compare(number: int) -> Row:
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(_by_threads(number))
        theirs.append(asyncio.run(_by_tasks(number)))
    at = ROUNDS // 2
    what = f"lease + run, {number} threads at once | {number} tasks"
    return Row(what, 1e6 * sorted(ours)[at], 1e6 * sorted(theirs)[at], "us")


def _by_threads(number: int) -> float:
    pool = Pool(driver="simulated:h200", max_waiting=number)

    def work(leases: int) -> None:
        for _ in range(leases):
            with pool.sync.partition(SMS) as p:
                p.run(int)

    def run(leases: int) -> float:
        threads = [threading.Thread(target=work, args=(leases,)) for _ in range(number)]
        start = perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (perf_counter() - start) / (leases * number)

    with pool.sync:
        run(2)  # the executors and their threads are made
        return run(LEASES // number)


async def _by_tasks(number: int) -> float:
    async def work(leases: int) -> None:
        for _ in range(leases):
            async with pool.partition(SMS) as p:
                await p.run(int)

    async def run(leases: int) -> float:
        start = perf_counter()
        await asyncio.gather(*(work(leases) for _ in range(number)))
        return (perf_counter() - start) / (leases * number)

    async with Pool(driver="simulated:h200", max_waiting=number) as pool:
        await run(2)
        return await run(LEASES // number)


if __name__ == "__main__":
    print(table(measure()))
