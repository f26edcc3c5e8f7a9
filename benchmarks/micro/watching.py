"""What it costs that a pool can be watched: by Prometheus, by `top`, by records without a watcher.

`python -m benchmarks.micro.watching` runs on the simulated driver.

Both sides are pools in one process and one loop, each on a simulated GPU of its own; `paired`
compares the CPU time of the process. What `top` takes of a service is its part of each lease, since
a pool with a socket times its leases, and one answer each second: the CPU time of the answer,
which a client in a process of its own reads, and of a lease after it, which is decided on anew.
What records cost where nothing watches is less than any clock shows: lines of code are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import linecache
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from time import process_time
from types import FrameType
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.lib.raw_calls import CONFIG, ITEMS, SMS, arguments
from benchmarks.lib.timing import Row, Work, judged, paired, table
from benchmarks.micro.lease import CLASSES, OTHER_SMS
from greensched import Pool
from greensched.integrations.prometheus import export
from greensched.kernels import saxpy
from greensched.observability.snapshot_client import find_sockets

#: Does something many times in a pool, and returns how often.
Operation = Callable[[Pool], Awaitable[int]]

#: Operations between two readings of the clock: about a millisecond.
LEASES, LAUNCHES = 400, 10
#: Answers that are measured, and seconds between two of `top`.
ANSWERS, INTERVAL = 100, 1.0
#: Each line that tests whether to record something has one of these names.
TESTS = "watched", "notes_jobs", "on_resize"
#: Bars on the ratios.
PROMETHEUS, TOP, RECORDS = 1.05, 1.02, 1.01
CLIENT = """
import pathlib, sys
from greensched.observability.snapshot_client import read_snapshot
for line in sys.stdin:
    read_snapshot(pathlib.Path(sys.argv[1]))
    print(flush=True)
"""


async def measure() -> list[Row]:
    """Return a row for each operation and each way to watch."""
    rows = []
    for what, work in OPERATIONS.items():
        sides = partial(_sides, work, _export)
        rows.append(
            await paired(f"{what}, exported to Prometheus | not exported", sides, PROMETHEUS)
        )
    for what in OF_TOP_AND_RECORDS:
        work = OPERATIONS[what]
        sides = partial(_sides, work, Pool.time_leases)  # as `Pool(socket=True)` does
        row = await paired(f"{what}, top attached | no socket", sides, TOP)
        rows.append(_with_answers(row, await _answer(work)))
    return [*rows, *[await _lines(what) for what in OF_TOP_AND_RECORDS]]


# -- operations ----------------------------------------------------------------------------------


async def _leases(pool: Pool) -> int:
    for _ in range(LEASES):
        async with pool.partition(SMS):
            pass
    return LEASES


async def _leases_of_a_class(pool: Pool) -> int:
    for _ in range(LEASES):
        async with pool.partition(SMS, service=CLASSES[0].name):
            pass
    return LEASES


async def _leases_in_turn(pool: Pool) -> int:
    for _ in range(LEASES // 2):
        async with pool.partition(SMS):
            pass
        async with pool.partition(OTHER_SMS):
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


OPERATIONS: dict[str, Operation] = {
    "lease": _leases,
    "lease of a class": _leases_of_a_class,
    "lease, two sizes in turn": _leases_in_turn,
    "lease, launch, await": _launches,
}
#: Those with a bar on `top`, and one on records.
OF_TOP_AND_RECORDS = "lease", "lease, launch, await"


# -- ways to watch -------------------------------------------------------------------------------


def _export(pool: Pool) -> None:
    registry = CollectorRegistry()
    export(pool, registry=registry)
    generate_latest(registry)


@asynccontextmanager
async def _sides(
    work: Operation, watch: Callable[[Pool], None], block: int
) -> AsyncIterator[tuple[Work, Work]]:
    """Open two pools, of which one is watched: the first or the second that was made."""
    async with _pool(work) as first, _pool(work) as second:
        ours, theirs = (first, second)[:: 1 if block % 2 else -1]
        watch(ours)
        yield partial(_burst, work, ours), partial(_burst, work, theirs)


def _pool(work: Operation, *, socket: bool = False) -> Pool:
    services = CLASSES if work is _leases_of_a_class else ()
    return Pool(driver="simulated:h200", services=services, socket=socket)


async def _burst(work: Operation, pool: Pool) -> float:
    """Return the CPU seconds of an operation."""
    start = process_time()
    count = await work(pool)
    return (process_time() - start) / count


async def _answer(work: Operation) -> float:
    """Return the CPU seconds that an answer takes of a pool, with what follows from it."""
    found = []
    async with _pool(work, socket=True) as pool:
        await work(pool)
        with _client() as read:
            for _ in range(ANSWERS):
                async with pool.partition(SMS):
                    pass
                start = process_time()
                read()
                async with pool.partition(SMS):
                    pass
                found.append(process_time() - start)
    return median(found)


@contextmanager
def _client() -> Iterator[Callable[[], None]]:
    """Start a client of the one socket; what it yields has it read a snapshot, and waits."""
    (path,) = find_sockets(os.getpid())
    command = [sys.executable, "-c", CLIENT, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        asked, answered = client.stdin, client.stdout
        assert asked is not None
        assert answered is not None

        def read() -> None:
            asked.write("\n")
            asked.flush()
            answered.readline()

        yield read
        asked.close()
    if client.returncode:
        raise RuntimeError("the client of the socket failed")


def _with_answers(row: Row, answer: float) -> Row:
    """Add what the answers take of each second to the ratios of a row."""
    part = answer / INTERVAL
    assert row.interval is not None
    low, high = (each + part for each in row.interval)
    return judged(replace(row, ours=row.ours + part * row.theirs, interval=(low, high)), TOP)


# -- records -------------------------------------------------------------------------------------


async def _lines(what: str) -> Row:
    """Return how many lines of greensched an operation runs, and how many without records.

    Those of the simulated driver do not count.
    """
    run: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        path = frame.f_code.co_filename
        if "/greensched/" not in path or "/driver/" in path:
            return None
        if event == "line":
            line = linecache.getline(path, frame.f_lineno)
            run["records" if any(test in line for test in TESTS) else "other"] += 1
        return trace

    work = OPERATIONS[what]
    async with _pool(work) as pool:
        for _ in range(2):  # loads and caches what an operation needs
            await work(pool)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            await work(pool)
        finally:
            sys.settrace(before)
    ours, theirs = run.total(), run["other"]
    row = Row(f"{what}, records off | no records", ours, theirs, "lines", (ours / theirs,) * 2)
    return judged(row, RECORDS)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.watching",
        description="Measure what watching a pool adds to its leases and launches.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    rows = asyncio.run(measure())
    print(json.dumps([row.as_dict() for row in rows]) if options.json else table(rows))


if __name__ == "__main__":
    main()
