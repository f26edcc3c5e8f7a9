"""What it costs that a pool can be watched: by `greensched top`, and by records without a watcher.

`python -m benchmarks.micro.watching` runs on the simulated driver.

Both sides are pools in one process and one loop, each on a simulated GPU of its own. A screen of
`top` comes once in a second, so a round of that side is a second, in which a client in a process of
its own reads one snapshot, and its sample is the mean of the round. Times are CPU times of the
whole process, with the thread of the socket: other processes of the machine lengthen them little.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter, process_time

import numpy as np

from benchmarks.lib.raw_calls import CONFIG, ITEMS, SMS, arguments
from benchmarks.lib.timing import Comparison, Row, table
from greensched import Pool
from greensched.kernels import saxpy
from greensched.observability.snapshot_client import find_sockets

#: Does something many times in a pool, and returns how often.
Operation = Callable[[Pool], Awaitable[int]]

#: Operations between two readings of the clock: some milliseconds.
LEASES, LAUNCHES = 1000, 50
#: Seconds of a round, and rounds of each side: with a client, and without.
ATTACHED = 1.0, 8
ALONE = 0.1, 60
#: Bars on the ratio of medians. Where the interval includes less, a miss may be chance.
TOP, RECORDS = 1.02, 1.01
CLIENT = """
import pathlib, sys
from greensched.observability.snapshot_client import read_snapshot
for line in sys.stdin:
    read_snapshot(pathlib.Path(sys.argv[1]))
"""


async def measure() -> list[Row]:
    """Return the medians of each."""
    async with (
        Pool(driver="simulated:h200", socket=True) as ours,
        Pool(driver="simulated:h200") as theirs,
    ):
        with _client() as read:
            attached = [
                await _compare(f"{what}, top attached | no socket", work, pools, ATTACHED, read)
                for what, work in OPERATIONS.items()
                for pools in [(ours, theirs)]
            ]
        ours.watch(print)()
        alone = [
            await _compare(f"{what}, a watcher has gone | no watcher", work, pools, ALONE)
            for what, work in OPERATIONS.items()
            for pools in [(ours, theirs)]
        ]
    bars = [TOP] * len(attached) + [RECORDS] * len(alone)
    return [_judged(one, most) for one, most in zip(attached + alone, bars, strict=True)]


async def _leases(pool: Pool) -> int:
    for _ in range(LEASES):
        async with pool.partition(SMS):
            pass
    return LEASES


async def _launches(pool: Pool) -> int:
    async with pool.partition(SMS) as p:
        buffer = await p.empty(ITEMS)
    with buffer:
        values = arguments(buffer)
        for _ in range(LAUNCHES):
            async with pool.partition(SMS) as p:
                await p.launch(CONFIG, saxpy, *values)
    return LAUNCHES


OPERATIONS: dict[str, Operation] = {"lease": _leases, "lease, launch, await": _launches}


@contextmanager
def _client() -> Iterator[Callable[[], None]]:
    """Start a client of the one socket; what it yields has it read a snapshot."""
    (path,) = find_sockets(os.getpid())
    command = [sys.executable, "-c", CLIENT, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        pipe = client.stdin

        def read() -> None:
            pipe.write("\n")
            pipe.flush()

        yield read
        pipe.close()
    if client.returncode:
        raise RuntimeError("the client of the socket failed")


async def _compare(
    what: str,
    work: Operation,
    pools: tuple[Pool, Pool],
    rounds: tuple[float, int],
    read: Callable[[], object] = lambda: None,
) -> Comparison:
    """Measure both pools in turns, so long and so often; `read` begins each round of ours."""
    comparison, (seconds, number) = Comparison(what), rounds
    for each in range(-1, number):
        sides = [(pools[0], comparison.ours), (pools[1], comparison.theirs)]
        for pool, found in sides[:: 1 if each % 2 else -1]:
            if pool is pools[0]:
                read()
            sample = await _round(work, pool, seconds)
            if each >= 0:  # the first round of each is thrown away
                found.append(np.array([sample]))
    return comparison


async def _round(work: Operation, pool: Pool, seconds: float) -> float:
    """Return the mean CPU seconds of an operation, over so many seconds."""
    count, start, end = 0, process_time(), perf_counter() + seconds
    while not count or perf_counter() < end:
        count += await work(pool)
    return (process_time() - start) / count


def _judged(comparison: Comparison, most: float) -> Row:
    """Return the median's row; a bar that lies inside the interval is not missed."""
    row = comparison.row(0.5, "us", most=most)
    assert row.interval is not None
    return replace(row, passed=row.interval[0] <= most)


def main() -> None:
    rows = asyncio.run(measure())
    as_json = "--json" in sys.argv
    print(json.dumps([row.as_dict() for row in rows]) if as_json else table(rows))


if __name__ == "__main__":
    main()
