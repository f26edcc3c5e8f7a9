"""Split each operation of the hot path into stages, and time each stage.

`python -m benchmarks.micro.profile [--driver NAME] [--json] [--plot FILE]`. A run of it, and how to
repeat it on the stand-in, are in docs/internals/profile.md.

A profiler would add its own cost to each call, most to the shortest, so nothing is instrumented. An
operation is timed as a row of *prefixes*: calls of the driver and of public functions that do ever
more of it, the last of which is the operation itself. A stage is what a prefix takes more than the
one before it, so the stages add up to the operation. All prefixes of an operation are measured in
turns, by one clock around an awaited function; the time of an empty one is subtracted. What is left
to do after a prefix (returning a lease, say) is done after the clock is read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.lib import timing
from benchmarks.lib.plot import picture
from benchmarks.lib.raw_calls import (
    CONFIG,
    ITEMS,
    SMS,
    RawCalls,
    arguments,
    packed,
    raw_calls,
)
from greensched import Partition, Pool
from greensched import driver as drivers
from greensched.capacity.plot import pyplot, write
from greensched.driver.interface import Driver
from greensched.kernels import saxpy

Do = Callable[[], Awaitable[Any]]
Finish = Callable[[Any], Awaitable[object]]


async def nothing(_: object = None) -> None:
    """Do nothing of an operation, and leave nothing to do."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of an operation.

    Attributes:
        stage: what it does more than the prefix before it.
        do: does it once.
        finish: gets what that returned, and does the rest of the operation; it is not timed.
    """

    stage: str
    do: Do
    finish: Finish = nothing


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation by its prefixes, and what a user writes for it without greensched."""

    name: str
    prefixes: Sequence[Prefix]
    raw: Prefix


# -- the operations ---------------------------------------------------------------------------


@asynccontextmanager
async def operations(driver: Driver) -> AsyncIterator[list[Operation]]:
    """Provide the operations, each with a buffer of its own, and raw calls on other SMs.

    A buffer that a bound launch uses makes other launches keep their order behind it.
    """
    async with (
        Pool([0], driver=driver, prepare=[saxpy]) as pool,
        raw_calls(driver, pool) as raw,
        pool.partition(SMS) as p,
        pool.partition(SMS) as q,  # launches of a lease that has called a function take longer
    ):
        async with pool.partition(SMS) as r:
            third = await r.empty(ITEMS)
        with (
            await p.empty(ITEMS) as first,
            await p.empty(ITEMS) as second,
            third,
            ThreadPoolExecutor(1) as thread,
        ):
            yield [
                *_launches(driver, p, (arguments(first), arguments(second)), raw),
                _lease(pool, arguments(third), raw),
                _run(q, thread),
            ]


def _launches(
    driver: Driver, p: Partition, values: tuple[tuple[Any, ...], ...], raw: RawCalls
) -> list[Operation]:
    """`bound()`, `bound.submit()` and `p.launch`: what they end in are the driver's own calls."""
    bound = p.bind(CONFIG, saxpy, *values[0])
    stream = driver.foreign_stream(raw.stream)
    kernel = p.context.loader.loaded(saxpy)
    keep = packed(p.device_id, values[0][1])
    launch = driver.bind_launch(stream, kernel, CONFIG.grid3, CONFIG.block3, 0, keep.address)

    async def launched(_: object = keep) -> None:  # the arguments are read at each launch
        launch()

    async def marked() -> None:
        launch()
        raw.mark()

    async def called() -> None:
        bound()

    async def submitted() -> Any:
        return bound.submit()

    async def checked() -> Any:
        return p.launch(CONFIG, saxpy, *values[1])

    async def wait(_: object) -> None:
        raw.record()
        await raw.poll()

    async def settle(_: object) -> None:
        await bound.submit()

    first = Prefix("the driver: cuLaunchKernel", launched, wait)
    second = Prefix("the driver: cuStreamWriteValue32, the ticket", marked, wait)
    job = Prefix("a Job; failures caught; watched", submitted, settle)
    raw_launch, raw_pair = _raw_launches(raw)
    return [
        Operation("bound()", [first, Prefix("thread, capture, order", called, settle)], raw_launch),
        Operation("bound.submit()", [first, second, job], raw_pair),
        Operation(
            "p.launch(...)",
            [first, second, job, Prefix("4 arguments checked, noted, packed", checked, settle)],
            raw_pair,
        ),
    ]


def _lease(pool: Pool, values: tuple[object, ...], raw: RawCalls) -> Operation:
    """Lease, launch, await, return."""
    semaphore = asyncio.Semaphore(1)

    async def requested() -> None:
        pool.partition(SMS)

    async def granted() -> Partition:
        return await pool.partition(SMS).__aenter__()

    async def launched() -> Partition:
        p = await pool.partition(SMS).__aenter__()
        p.launch(CONFIG, saxpy, *values)
        return p

    async def awaited() -> Partition:
        p = await pool.partition(SMS).__aenter__()
        await p.launch(CONFIG, saxpy, *values)
        return p

    async def returned() -> None:
        async with pool.partition(SMS) as p:
            await p.launch(CONFIG, saxpy, *values)

    async def give_back(p: Partition) -> None:
        await p.__aexit__(None, None, None)

    async def with_semaphore() -> None:
        async with semaphore:
            raw.pack_and_launch()
            raw.record()
            await raw.poll()

    return Operation(
        "lease, launch, await, return",
        [
            Prefix("pool.partition(16): the request", requested),
            Prefix("granted: an idle lease is reused", granted, give_back),
            Prefix("p.launch(...)", launched, give_back),
            Prefix("await, of a job that is done", awaited, give_back),
            Prefix("returned: it is idle again", returned),
        ],
        Prefix("semaphore, raw launch, polled event", with_semaphore),
    )


def _run(p: Partition, thread: ThreadPoolExecutor) -> Operation:
    """`await p.run(f)`, of a function that does nothing."""
    there = partial(asyncio.get_running_loop().run_in_executor, thread)
    context, driver = p.context, p.context.driver
    stream = p.stream.handle

    def entered() -> None:
        with context:
            pass

    def entered_and_asked() -> None:
        with context:
            driver.query_stream(stream)

    async def to_thread() -> None:
        await there(_empty)

    async def in_context() -> None:
        await there(entered)

    async def asked() -> None:
        await there(entered_and_asked)

    async def whole() -> None:
        await p.run(_empty)

    async def by_asyncio() -> None:
        await asyncio.to_thread(_empty)

    return Operation(
        "await p.run(f)",
        [
            Prefix("to a thread and back", to_thread),
            Prefix("the green context made current, and left", in_context),
            Prefix("its stream asked", asked),
            Prefix("a Job, checks, context variables, hooks", whole),
        ],
        Prefix("asyncio.to_thread", by_asyncio),
    )


def _empty() -> None:
    pass


def _raw_launches(raw: RawCalls) -> tuple[Prefix, Prefix]:
    async def launch() -> None:
        raw.launch()

    async def launch_and_mark() -> None:
        raw.launch()
        raw.mark()

    async def wait(_: object) -> None:
        raw.record()
        await raw.poll()

    return (
        Prefix("raw launch, packed once", launch, wait),
        Prefix("raw launch, packed once, and mark", launch_and_mark, wait),
    )


# -- timing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stage:
    """Microseconds of a stage, and their 95 % bootstrap interval over rounds."""

    name: str
    us: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Split:
    """An operation in stages, which add up to it; `raw_us` is the whole of the raw calls."""

    name: str
    stages: list[Stage]
    raw: str
    raw_us: float

    @property
    def us(self) -> float:
        """The microseconds of all stages."""
        return sum(stage.us for stage in self.stages)


async def split(operation: Operation) -> Split:
    """Time all prefixes of an operation and its raw calls in turns."""
    ways = [Prefix("", nothing), *operation.prefixes, operation.raw]
    rounds = []
    for number in range(timing.ROUNDS + 1):
        turn = list(enumerate(ways))[:: 1 if number % 2 else -1]
        rounds.append({place: await _median(way) for place, way in turn})
    # In microseconds, by round and by way; the first round is thrown away.
    found = np.array([[one[place] for place in range(len(ways))] for one in rounds[1:]]) * 1e6
    stages = _steps(found)
    rng = np.random.default_rng(1)
    drawn = rng.integers(len(found), size=(timing.RESAMPLINGS, len(found)))
    low, high = np.quantile([_steps(found[rows]) for rows in drawn], (0.025, 0.975), axis=0)
    return Split(
        operation.name,
        [
            Stage(prefix.stage, float(stages[i]), (float(low[i]), float(high[i])))
            for i, prefix in enumerate(operation.prefixes)
        ],
        operation.raw.stage,
        float(np.median(found[:, -1]) - np.median(found[:, 0])),
    )


def _steps(found: Any) -> Any:
    """Return what each prefix takes more than the one before it, by medians over rounds."""
    return np.diff(np.median(found[:, :-1], axis=0))


async def _median(way: Prefix) -> float:
    took = []
    for _ in range(timing.PER_ROUND):
        start = perf_counter()
        given = await way.do()
        took.append(perf_counter() - start)
        await way.finish(given)
    return float(np.median(took))


async def measure_all(driver: Driver) -> list[Split]:
    """Split each operation."""
    async with operations(driver) as found:
        return [await split(operation) for operation in found]


# -- output -----------------------------------------------------------------------------------


def table(splits: Sequence[Split]) -> str:
    """Return a page's table: stages in microseconds with intervals, and their part of the whole."""
    lines = ["| stage | us | 95 % | part |", "|---|---|---|---|"]
    for one in splits:
        lines.append(f"| **{one.name}** | **{one.us:.2f}** | | |")
        for stage in one.stages:
            low, high = stage.interval
            part = 100 * stage.us / one.us
            lines.append(
                f"| {stage.name} | {stage.us:.2f} | {low:.2f} to {high:.2f} | {part:.0f} % |"
            )
        lines.append(f"| *without greensched: {one.raw}* | {one.raw_us:.2f} | | |")
    return "\n".join(lines)


def save(splits: Sequence[Split], machine: str, path: Path) -> None:
    """Draw a bar for each operation, with its stages; a line shows the raw calls.

    Raises:
        MissingPackage: matplotlib is not installed; says what to install.
        InvalidRequest: the file cannot be written.
    """
    figure, axes = pyplot().subplots(
        len(splits), figsize=(10, 1.5 * len(splits) + 0.5), squeeze=False
    )
    for axis, one in zip(axes[:, 0], splits, strict=True):
        begin = 0.0
        for stage in one.stages:
            label = f"{stage.name}: {stage.us:.2f}"
            axis.barh(0, max(stage.us, 0.0), left=begin, label=label)
            begin += stage.us
        axis.axvline(one.raw_us, color="black", label=f"{one.raw}: {one.raw_us:.2f}")
        axis.set_yticks([])
        axis.set_title(f"{one.name}: {one.us:.2f} us", fontsize="small", loc="left")
        axis.tick_params(labelsize="x-small")
        axis.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle(machine, fontsize="x-small")
    write(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.profile",
        description="Split each operation of the hot path into stages, and time each stage.",
    )
    parser.add_argument("--driver", default="cuda", help="cuda, or a simulated one (default: cuda)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw it")
    options = parser.parse_args()
    load = timing.MachineLoad()
    found = asyncio.run(measure_all(drivers.open(options.driver)))
    machine = str(load)
    if options.json:
        print(json.dumps({"machine": machine, "operations": [asdict(one) for one in found]}))
    else:
        print(f"{machine}\n\n{table(found)}")
    if options.plot is not None:
        save(found, machine, options.plot)


if __name__ == "__main__":
    main()
