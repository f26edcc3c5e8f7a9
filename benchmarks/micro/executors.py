"""How soon the tasks of eight lanes hear of their jobs: all at once, beside each lane alone.

`python -m benchmarks.micro.executors [--driver NAME] [--json]`. Eight partitions, each with jobs
of a length of its own, which its task awaits one after another. A wake is the time from submitting
a job until the task goes on, less the time that the job spins on the device: so the microseconds of
a launch are in it, on every arm. In turns:

* **alone**: one lane after another, while the others have nothing to do;
* **all at once**;
* **all at once, beside one that hangs**: the kernel of a ninth lane does not end. On a GPU it waits
  for a word that the host writes when the turn is over. Nine lanes are more than the eight hardware
  queues that a process has unless told otherwise, and on an H200 one of them waited for the kernel
  that hung: so there are 32 here. A simulator looks for such a word all the time, which would be
  measured, too; there a kernel never ends, by a fault, so this arm has eight
  lanes of a machine of its own, which asks a look each 50 ms of the loop in the other turns.

A stand-in takes a kernel's time from its name, so each lane has a kernel of its own; and from
`STUBCUDA_KERNEL_TABLE=latch:600000` that the ninth lane's outlasts a turn. A simulated device is a
thread of this process: it needs the GIL to end a job, and what it is late by is in the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from time import perf_counter

import numpy as np

from benchmarks.lib.timing import Comparison, Row, Samples, table
from greensched import LaunchConfig, Partition, Pool, Program
from greensched import driver as drivers
from greensched.driver import simulated
from greensched.driver.simulated import Hang
from greensched.kernels import Kernel, latch
from greensched.typing import Cost

#: Milliseconds of the jobs of each lane.
LENGTHS_MS = 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0
#: SMs of the lanes, and of the one that hangs: a cell of today's devices each.
SMS = (8,) * 9
ONE = LaunchConfig(grid=1, block=32)
Work = tuple[Partition, Kernel, float]
#: Seconds of a lane alone, and of all at once, to a turn: twenty of the longest jobs.
WINDOW_S = 0.4
#: Turns, after one that is thrown away.
ROUNDS = 8
#: Most of a lane's median beside its own alone. Source: what was asked for.
MOST = 1.2

_SPIN = """
extern "C" __global__ void spin_us{us}(unsigned long long ns) {{
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
}}
"""


def _kernels() -> list[Kernel]:
    """One for each lane, that spins for so many nanoseconds."""
    names = [round(1000 * length) for length in LENGTHS_MS]
    program = Program("".join(_SPIN.format(us=us) for us in names), name="lanes.cu")
    kernels = [program.kernel(f"spin_us{us}") for us in names]
    for kernel in kernels:
        kernel.reference(lambda _, ns: None)  # noqa: ARG005  nothing is to be seen of it
        kernel.cost(lambda _, ns: Cost(fixed_ns=float(ns)))
    return kernels


SPIN = _kernels()


async def measure(name: str) -> list[Row]:
    """The median of each lane, beside others and alone, with its bar.

    Args:
        name: of the driver: `cuda`, or a simulated one.
    """
    what = [f"wake of {length:g} ms jobs" for length in LENGTHS_MS]
    together = [Comparison(f"{lane}: eight lanes at once | alone") for lane in what]
    beside = [Comparison(f"{lane}: eight at once, a ninth hangs | alone") for lane in what]
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before the driver starts
    driver = drivers.open(name)
    async with (
        Pool([0], driver=driver, prepare=[*SPIN, latch]) as pool,
        pool.partitions(*SMS) as lanes,
        _one_that_hangs(name, lanes) as beside_it,
    ):
        for number in range(ROUNDS + 1):
            alone = [(await _wakes([work]))[0] for work in _works(lanes)]
            for arm, found in (
                (together, await _wakes(_works(lanes))),
                (beside, await beside_it()),
            ):
                for comparison, ours, theirs in zip(arm, found, alone, strict=True):
                    if number:
                        comparison.ours.append(ours)
                        comparison.theirs.append(theirs)
    driver.close()
    return [comparison.row(0.5, "us", most=MOST) for comparison in (*together, *beside)]


def _works(lanes: Sequence[Partition]) -> list[Work]:
    """What each of the eight lanes launches, and for how many seconds."""
    return [
        (p, kernel, length * 1e-3)
        for p, kernel, length in zip(lanes[:-1], SPIN, LENGTHS_MS, strict=True)
    ]


async def _wakes(works: Sequence[Work]) -> list[Samples]:
    """Of each lane, how late its task heard of its jobs, in seconds."""
    until = perf_counter() + WINDOW_S
    return await asyncio.gather(*(_lane(*work, until) for work in works))


async def _lane(p: Partition, spin: Kernel, seconds: float, until: float) -> Samples:
    ns, found = round(seconds * 1e9), []
    await p.launch(ONE, spin, ns)  # a lane's first job starts its threads
    while True:
        start = perf_counter()
        await p.launch(ONE, spin, ns)
        found.append((end := perf_counter()) - start - seconds)
        if end > until:
            return np.array(found)


@asynccontextmanager
async def _one_that_hangs(
    name: str, lanes: Sequence[Partition]
) -> AsyncIterator[Callable[[], Awaitable[list[Samples]]]]:
    """What measures eight lanes beside a ninth whose kernel does not end."""
    if name == "cuda":
        yield partial(_held, lanes)
        return
    machine = simulated.open(name.removeprefix("simulated:"), faults=[Hang("latch")])
    pool = Pool([0], driver=machine, prepare=[*SPIN, latch])
    await pool.open()
    try:
        with suppress(_Over):
            async with pool.partitions(*SMS) as others:
                with await others[-1].empty_pinned(1, np.uint32) as word:
                    others[-1].launch(ONE, latch, word, 0)
                yield partial(_wakes, _works(others))
                raise _Over
    finally:
        report = await pool.aclose(grace=0.0)
    assert len(report.abandoned) == 1, "the ninth lane was to hang, and no other"


class _Over(Exception):
    """Leaves the lanes without waiting for the one that hangs."""


async def _held(lanes: Sequence[Partition]) -> list[Samples]:
    """Beside a kernel that ends when the turn is over."""
    with await lanes[-1].empty_pinned(1, np.uint32) as word:
        word.array[0] = 0
        job = lanes[-1].launch(ONE, latch, word, 0)
        try:
            found = await _wakes(_works(lanes))
            assert not job.is_done, "the ninth lane was to outlast the turn"
            return found
        finally:
            word.array[0] = 1
            await job


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.executors", description=__doc__
    )
    parser.add_argument("--driver", default="cuda", help="cuda, or a simulated one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = asyncio.run(measure(options.driver))
    print(json.dumps([row.as_dict() for row in found]) if options.json else table(found))


if __name__ == "__main__":
    main()
