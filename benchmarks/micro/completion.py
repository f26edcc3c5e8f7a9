"""How soon a task learns that its job is done: on an idle loop, and on a busy one.

`python -m benchmarks.micro.completion [--seconds S] [--waits N]` runs jobs that spin for `S`
seconds, on a GPU or a simulated one; a stand-in takes the time from its environment. The reference
is a thread that blocks in the driver, `asyncio.to_thread(event.synchronize)`.

A busy loop has a task that computes for a given time in each turn of the loop. Measured there: the
time from the job's end until its task runs, and the time of a call and of an upload of 1 MiB, whose
reference is an empty call in a thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter

import numpy as np

from benchmarks.lib.raw_calls import SMS, RawCalls, raw_calls
from benchmarks.lib.timing import SCALES, Comparison, Row, Work, compare, table
from greensched import LaunchConfig, Partition, Pool
from greensched import driver as drivers
from greensched.device.arguments import KernelArguments
from greensched.driver.interface import Driver
from greensched.kernels import spin

CONFIG = LaunchConfig(grid=1, block=32)
#: Seconds of a busy loop's turns.
TURNS = 80e-6, 1e-3
#: Waits behind a busy loop, in rounds of `ROUND`. The reference gets a fiftieth as many, and none
#: after `MOST_STARVED_S` seconds: behind turns of 1 ms on an H200's host one wait took that long.
#: Each row says how many there were.
WAITS, ROUND, MOST_STARVED_S = 10_000, 100, 20.0
#: The bars on the p99 behind a busy loop: so many turns and seconds; and seconds of a call and of
#: an upload.
MOST_TURNS, MOST_S, MOST_OTHERS_S = 3, 2e-3, 20e-3
#: Jobs whose processor time is added up.
JOBS = 200
MIB = np.zeros(2**20, np.uint8)


async def measure(driver: Driver, seconds: float, waits: int = WAITS) -> list[Row]:
    """Await jobs of so many seconds on an idle loop and on busy ones; add up the processor time."""
    async with (
        Pool([0], driver=driver, prepare=[spin]) as pool,
        raw_calls(driver, pool) as raw,
        pool.partition(SMS) as p,
    ):
        bench = _Bench(p, raw, seconds, waits)
        rows = [await bench.idle(), await bench.processor()]
        for turn in TURNS:
            rows += await bench.busy(turn)
    return rows


class _Bench:
    def __init__(self, p: Partition, raw: RawCalls, seconds: float, waits: int) -> None:
        self.p = p
        self.waits = waits
        self.raw = raw
        self.seconds = seconds
        self.ns = int(seconds * 1e9)
        self.driver = p.context.driver
        self._values = KernelArguments(spin, p.device_id)
        self._values.fill((self.ns,))
        self._launch = self.driver.bind_launch(
            self.driver.foreign_stream(raw.stream), p.context.loader.loaded(spin),
            CONFIG.grid3, CONFIG.block3, 0, self._values.address,
        )  # fmt: skip

    async def ours(self) -> None:
        await self.p.launch(CONFIG, spin, self.ns)

    async def theirs(self) -> None:
        self._launch()
        self.raw.record()
        await asyncio.to_thread(self.raw.sync)

    async def polled(self) -> None:
        self._launch()
        self.raw.record()
        await self.raw.poll()

    async def idle(self) -> Row:
        """Await jobs on a loop that has nothing else to do."""
        is_long = self.seconds > self.driver.spin_budget
        what = f"a job of {self.seconds * 1e6:g} us, awaited | event in to_thread"
        found = await compare(what, _timed(self.ours), _timed(self.theirs))
        return found.row(0.5, "us", most=1.05 if is_long else None)

    async def processor(self) -> Row:
        """Compare the processor time of waiting with that of a poll in each turn of the loop."""
        shares = []
        for wait in (self.ours, self.polled):
            began, busy = perf_counter(), time.process_time()
            for _ in range(JOBS):
                await wait()
            shares.append((time.process_time() - busy) / (perf_counter() - began))
        what = f"a job of {self.seconds * 1e6:g} us, processor time | polled event"
        return Row(what, 100 * shares[0], 100 * shares[1], "%")

    async def busy(self, turn: float) -> list[Row]:
        """Await jobs, calls and uploads on a loop whose turns take so many seconds."""
        name = f"turns of {turn * 1e6:g} us"
        thread = partial(asyncio.to_thread, _nothing)
        behind = partial(_waited, self.waits)
        async with _busy(turn):
            what = f"{name}: awaited, beyond the job's time | event in to_thread"
            waits = await behind(what, self.ours, self.theirs, less=self.seconds)
            run = partial(self.p.run, _nothing)
            calls = await behind(f"{name}: run of nothing | to_thread", run, thread)
            copies = await behind(f"{name}: upload of 1 MiB | to_thread", self._upload, thread)
        most = MOST_TURNS * turn + MOST_S
        return [
            _bounded(waits.row(0.99, "ms"), most),
            _bounded(calls.row(0.99, "ms"), MOST_OTHERS_S),
            _bounded(copies.row(0.99, "ms"), MOST_OTHERS_S),
        ]

    async def _upload(self) -> None:
        (await self.p.upload(MIB)).close()


def _nothing() -> None:
    pass


def _timed(step: Callable[[], Awaitable[object]], less: float = 0.0) -> Work:
    async def work() -> float:
        start = perf_counter()
        await step()
        return perf_counter() - start - less

    return work


def _bounded(row: Row, most: float) -> Row:
    limit = most * SCALES[row.unit]
    return replace(row, bar=f"<= {limit:g} {row.unit}", passed=row.ours <= limit)


async def _waited(
    waits: int,
    what: str,
    ours: Callable[[], Awaitable[object]],
    theirs: Callable[[], Awaitable[object]],
    less: float = 0.0,
) -> Comparison:
    """Wait so many times for ours, and in every fifth round a few times for the reference."""
    found, starved = Comparison(what), 0.0
    work, reference = _timed(ours, less), _timed(theirs, less)
    for number in range(-(-waits // ROUND)):
        found.ours.append(np.array([await work() for _ in range(ROUND)]))
        if number % 5 == 0:
            samples = []
            while len(samples) < ROUND // 10 and starved < MOST_STARVED_S:
                samples.append(await reference())
                starved += samples[-1]
            if samples:
                found.theirs.append(np.array(samples))
    found.what += f" ({sum(map(len, found.theirs))} of these)"
    return found


@asynccontextmanager
async def _busy(turn: float) -> AsyncIterator[None]:
    """Keep the loop busy: a task computes for so many seconds in each turn."""

    async def work() -> None:
        while True:
            until = perf_counter() + turn
            while perf_counter() < until:
                pass
            await asyncio.sleep(0)

    worker = asyncio.create_task(work())
    try:
        yield
    finally:
        worker.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.completion",
        description="Measure how soon a task learns that its job is done.",
    )
    parser.add_argument("--driver", default="cuda", help="cuda, or a simulated one (default: cuda)")
    parser.add_argument(
        "--seconds", type=float, default=_kernel_seconds(), help="time of a job (default: 500 us)"
    )
    parser.add_argument(
        "--waits",
        type=int,
        default=WAITS,
        help="behind each busy loop (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = asyncio.run(measure(drivers.open(options.driver), options.seconds, options.waits))
    print(json.dumps([row.as_dict() for row in found]) if options.json else table(found))


def _kernel_seconds() -> float:
    """Return the time of a kernel as a stand-in was told it; else half a millisecond."""
    return float(os.environ.get("STUBCUDA_KERNEL_US", "500")) * 1e-6


if __name__ == "__main__":
    main()
