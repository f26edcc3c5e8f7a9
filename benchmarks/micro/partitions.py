"""How soon the tasks of eight partitions learn of their jobs: all at once, beside each alone.

`python -m benchmarks.micro.partitions [--driver NAME] [--json]`. Eight partitions of one pool have
jobs of a length of their own each, which a task awaits one after another. A *wake* is the time from
submitting a job until its task runs again, less the time that the job spins on the device; so the
microseconds of a launch are in it in every mode. The modes are measured in turns:

* **alone**: one partition after another, while the others are idle;
* **eight at once**;
* **eight at once, a ninth hangs**: the kernel of a ninth partition does not end. On a GPU it waits
  for a word that the host writes at the end of the turn. Nine streams are more than the eight
  hardware queues that a process has by default, and on an H200 one of them waited for the kernel
  that hung, so 32 are asked for. A simulator would look at such a word all the time, and that
  would be measured, too: there the kernel never ends, by a fault, and this mode has a device of its
  own, which takes one poll each 50 ms of the loop in the other modes.

A stand-in takes a kernel's time from its name, so each partition has a kernel of its own; and from
`STUBCUDA_KERNEL_TABLE=latch:600000` that the ninth one's outlasts a turn. A simulated device is a
thread of this process that needs the GIL to end a job: its delay is in the figures.
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

#: Milliseconds of the jobs of each partition.
LENGTHS_MS = 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0
#: SMs of the eight partitions, and of the ninth: one cell of today's devices each.
SMS = (8,) * 9
CONFIG = LaunchConfig(grid=1, block=32)
#: A partition, its kernel, and the kernel's seconds.
Load = tuple[Partition, Kernel, float]
#: Seconds of a partition alone, and of all at once, in a turn: twenty of the longest jobs.
WINDOW_S = 0.4
#: Turns, after one that is thrown away.
ROUNDS = 8
#: The bar: a partition's median beside its own alone.
MOST = 1.2

_SPIN = """
extern "C" __global__ void spin_us{us}(unsigned long long ns) {{
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
}}
"""


def _kernels() -> list[Kernel]:
    """Return a kernel for each partition, which spins for so many nanoseconds."""
    names = [round(1000 * length) for length in LENGTHS_MS]
    program = Program("".join(_SPIN.format(us=us) for us in names), name="partitions.cu")
    kernels = [program.kernel(f"spin_us{us}") for us in names]
    for kernel in kernels:
        kernel.reference(lambda _, ns: None)  # noqa: ARG005  it has no result
        kernel.cost(lambda _, ns: Cost(fixed_ns=float(ns)))
    return kernels


SPIN = _kernels()


async def measure(name: str) -> list[Row]:
    """Return the median of each partition, beside others and alone, with its bar.

    Args:
        name: the driver: `cuda`, or a simulated one.
    """
    what = [f"wake of {length:g} ms jobs" for length in LENGTHS_MS]
    at_once = [Comparison(f"{wake}: eight partitions at once | alone") for wake in what]
    with_hang = [Comparison(f"{wake}: eight at once, a ninth hangs | alone") for wake in what]
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before the driver starts
    driver = drivers.open(name)
    async with (
        Pool([0], driver=driver, prepare=[*SPIN, latch]) as pool,
        pool.partitions(*SMS) as partitions,
        _with_a_hang(name, partitions) as measure_with_hang,
    ):
        for number in range(ROUNDS + 1):
            alone = [(await _wakes([load]))[0] for load in _loads(partitions)]
            for mode, found in (
                (at_once, await _wakes(_loads(partitions))),
                (with_hang, await measure_with_hang()),
            ):
                for comparison, ours, theirs in zip(mode, found, alone, strict=True):
                    if number:
                        comparison.ours.append(ours)
                        comparison.theirs.append(theirs)
    driver.close()
    return [comparison.row(0.5, "us", most=MOST) for comparison in (*at_once, *with_hang)]


def _loads(partitions: Sequence[Partition]) -> list[Load]:
    """Return what each of the eight partitions launches, and for how many seconds."""
    return [
        (p, kernel, length * 1e-3)
        for p, kernel, length in zip(partitions[:-1], SPIN, LENGTHS_MS, strict=True)
    ]


async def _wakes(loads: Sequence[Load]) -> list[Samples]:
    """Return the seconds of each partition's wakes."""
    until = perf_counter() + WINDOW_S
    return await asyncio.gather(*(_wakes_of(*load, until) for load in loads))


async def _wakes_of(p: Partition, kernel: Kernel, seconds: float, until: float) -> Samples:
    ns, found = round(seconds * 1e9), []
    await p.launch(CONFIG, kernel, ns)  # a partition's first job starts its threads
    while True:
        start = perf_counter()
        await p.launch(CONFIG, kernel, ns)
        found.append((end := perf_counter()) - start - seconds)
        if end > until:
            return np.array(found)


@asynccontextmanager
async def _with_a_hang(
    name: str, partitions: Sequence[Partition]
) -> AsyncIterator[Callable[[], Awaitable[list[Samples]]]]:
    """Provide a function that measures eight partitions beside a ninth that hangs."""
    if name == "cuda":
        yield partial(_with_a_latch, partitions)
        return
    machine = simulated.open(name.removeprefix("simulated:"), faults=[Hang("latch")])
    pool = Pool([0], driver=machine, prepare=[*SPIN, latch])
    await pool.open()
    try:
        with suppress(_Over):
            async with pool.partitions(*SMS) as others:
                with await others[-1].empty_pinned(1, np.uint32) as word:
                    others[-1].launch(CONFIG, latch, word, 0)
                yield partial(_wakes, _loads(others))
                raise _Over
    finally:
        report = await pool.aclose(grace=0.0)
    assert len(report.abandoned) == 1, "only the ninth partition was to hang"


class _Over(Exception):
    """Leaves the partitions without waiting for the one that hangs."""


async def _with_a_latch(partitions: Sequence[Partition]) -> list[Samples]:
    """Measure beside a kernel that ends with the turn."""
    with await partitions[-1].empty_pinned(1, np.uint32) as word:
        word.array[0] = 0
        job = partitions[-1].launch(CONFIG, latch, word, 0)
        try:
            found = await _wakes(_loads(partitions))
            assert not job.done(), "the ninth partition's kernel was to outlast the turn"
            return found
        finally:
            word.array[0] = 1
            await job


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.partitions",
        description="Measure how soon the tasks of eight partitions learn of their jobs.",
    )
    parser.add_argument("--driver", default="cuda", help="cuda, or a simulated one (default: cuda)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = asyncio.run(measure(options.driver))
    print(json.dumps([row.as_dict() for row in found]) if options.json else table(found))


if __name__ == "__main__":
    main()
