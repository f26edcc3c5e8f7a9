"""`make soak MINUTES=10`: mixed load with faults on simulated devices; nothing may grow.

Rounds of leases of many kinds, in virtual time, by two loops in two threads that share one pool.
The loops are new in each round, so that what outlives a loop would show; one more closes over a
lease. Beside them each round opens and closes pools on devices of their own, on which a kernel
faults or hangs, or a driver call fails. Between two rounds no task holds anything, and the process
is sampled. Exit code 1 if anything grew in the second half: the slope of a line through its samples
judges, not the last one.

`ARGS=--gpu` runs the same leases on GPU 0, in real time. Its faults are kernels that hang, requests
for more memory than there is, and loops that close over a lease. There are no other pools: a GPU
has one in each process, and a kernel's fault ends all work of the process there (`make test-gpu`
has those).
"""

from __future__ import annotations

import abc
import argparse
import asyncio
import gc
import logging
import os
import random
import re
import statistics
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from greensched import (
    ALL,
    REST,
    DeadlineExceeded,
    DeviceHung,
    GreenschedError,
    LaunchConfig,
    OutOfMemory,
    Pool,
    PoolState,
    WouldBlock,
)
from greensched.driver import simulated
from greensched.driver.blocking import DRIVER_CALLS
from greensched.driver.simulated import Crash, Fail, Fault, Hang, cost
from greensched.kernels import saxpy, spin
from greensched.typing import Size

#: Leases of a round on the pool that lives throughout, and of each pool that does not.
ROUND = 2_000
ROUND_OF_OTHERS = 80
LOOPS = 2
#: Tasks of each loop.
TASKS = 8
#: 4 MiB of each green context are lost until its pool closes, as on driver 580. The account of
#: buffers (`device_bytes`) leaves them out, and this memory lasts for a soak of days.
MODEL = replace(simulated.PRESETS["h200"], memory_bytes=1 << 50)
#: A sample is printed at most this often.
PRINT_EVERY_S = 30.0
#: Virtual seconds after which work hangs, for which hung work runs, and after which a load ends.
HANG_AFTER, HUNG, LOAD = 1.0, 3.0, 10.0
#: glibc keeps freed memory for each thread, and goes on filling what it keeps for more than 100,000
#: leases: 170 threads come to 6 MiB. With one arena for all, and no caches of threads, only memory
#: that is in use grows.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
#: By how much the line through the samples of the second half may rise, from its first to its last.
#: An executor owns a dozen objects, and is made when its set of cells is first needed.
MOST_RISE = {"resident": 2 << 20, "threads": 0.5, "files": 0.5, "device_bytes": 0, "objects": 25}

#: A thread of an executor: "greensched DEVICE:CELLS PURPOSE".
_EXECUTOR_THREAD = re.compile(r"(greensched \d+:[0-9a-f]+) ")


@dataclass(frozen=True, slots=True)
class Sample:
    """The process, after so many leases, and what it has on its device.

    On a simulated device these are bytes for buffers, and all objects; on a GPU bytes in use, and
    executors.
    """

    leases: int
    resident: int
    threads: int
    files: int
    device_bytes: int
    objects: int

    @classmethod
    def now(cls, leases: int, pool: Pool, device_bytes: int, objects: int) -> Sample:
        """Sample the process, with all garbage collected."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  iterdir keeps the folder open
        names = [thread.name for thread in threading.enumerate()]
        executors = pool.statistics().executors
        return cls(
            leases,
            pages * os.sysconf("SC_PAGE_SIZE"),
            unexplained(names, executors),
            files,
            device_bytes,
            objects,
        )


def unexplained(names: list[str], executors: int) -> int:
    """Count the threads, without those that existing executors account for.

    An executor starts each of its threads when it first needs it, at whatever lease that is. A name
    that occurs twice, and a set of cells without an executor, are threads that did not end.
    """
    owned = [found[1] for name in names if (found := _EXECUTOR_THREAD.match(name))]
    twice = len(names) - len(set(names))
    return len(names) - len(owned) + twice + max(0, len(set(owned)) - executors)


class Soak(abc.ABC):
    """One pool on one device, for many rounds.

    Args:
        seed: Of the leases that are drawn.
        pool: The pool, not yet open.
    """

    #: How much each thing may rise in the second half of the samples.
    most_rise: Mapping[str, float]

    def __init__(self, seed: int, pool: Pool) -> None:
        self._seed = seed
        self._pool = pool
        self.kinds: Counter[str] = Counter()
        #: Pools that were opened and closed beside this one.
        self.others = 0
        #: How the loads of those pools ended, and leases of this one that ended with an error.
        self.ends: Counter[str] = Counter()

    def rounds(self) -> Iterator[Sample]:
        """Run round after round, and sample the process after each."""
        self._run(self._pool.open)
        number = 0
        try:
            while True:
                with ThreadPoolExecutor(LOOPS) as threads:
                    for _ in threads.map(self._loop, [number] * LOOPS, range(LOOPS)):
                        pass  # raises what a loop raised
                self._close_over_a_lease()
                self._between(number)
                number += 1
                yield Sample.now(self.kinds.total(), self._pool, *self._on_device())
        finally:
            self._run(self._pool.aclose)

    @abc.abstractmethod
    def _run(self, main: Callable[..., Coroutine[Any, Any, object]], *args: Any) -> None:
        """Run a coroutine function on a new loop of this thread."""

    @abc.abstractmethod
    def _new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return a loop on the device's clock."""

    @abc.abstractmethod
    def _between(self, number: int) -> None:
        """Do what a round does after its leases."""

    @abc.abstractmethod
    def _on_device(self) -> tuple[int, int]:
        """Return bytes and objects of the device, for a `Sample`."""

    async def _lease(self, kind: Kind, pool: Pool, rng: random.Random) -> None:
        """Take one lease of a kind from the pool."""
        await kind(pool, rng)

    def _loop(self, number: int, loop: int) -> None:
        seeds = [f"{self._seed} {number} {loop} {task}" for task in range(TASKS)]
        self._run(self._tasks, self._pool, ROUND // LOOPS // TASKS, seeds)

    async def _tasks(self, pool: Pool, leases: int, seeds: Sequence[str]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for seed in seeds:
                tasks.create_task(self._task(pool, leases, random.Random(seed)))

    async def _task(self, pool: Pool, leases: int, rng: random.Random) -> None:
        for _ in range(leases):
            (kind,) = rng.choices(KINDS, WEIGHTS)
            self.kinds[kind.__name__] += 1
            await self._lease(kind, pool, rng)

    def _close_over_a_lease(self) -> None:
        """Close a loop whose task is inside a block: the pool takes its lease over."""

        async def enter() -> None:
            partition = self._pool.partition(8)
            await partition.__aenter__()
            partition.launch(CONFIG, spin, 1000)

        loop = self._new_event_loop()
        loop.run_until_complete(enter())
        loop.close()


class SimulatedSoak(Soak):
    """A soak of a simulated machine in virtual time, with other pools that come and go."""

    most_rise = MOST_RISE

    def __init__(self, seed: int) -> None:
        self._clock = simulated.VirtualClock(seed)
        self._driver = simulated.open([MODEL], clock=self._clock)
        super().__init__(
            seed, Pool(driver=self._driver, hang_after=HANG_AFTER, prepare=[spin, saxpy])
        )

    def rounds(self) -> Iterator[Sample]:
        try:
            yield from super().rounds()
        finally:
            left = self._driver.live()
            assert not left, f"left on the device: {left}"

    def _run(self, main: Callable[..., Coroutine[Any, Any, object]], *args: Any) -> None:
        self._clock.run(main, *args)

    def _new_event_loop(self) -> asyncio.AbstractEventLoop:
        return self._clock.new_event_loop()

    def _between(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        for faults in scripts(rng):
            self._other_pool(rng, faults)

    def _on_device(self) -> tuple[int, int]:
        return self._driver.machine.memory[0].pools, self._driver.live().total()

    def _other_pool(self, rng: random.Random, faults: Sequence[Fault]) -> None:
        """Open a pool on a device with faults, load it, and close it."""
        self.others += 1
        clock = simulated.VirtualClock(rng.randrange(1 << 30))
        driver = simulated.open("h20", clock=clock, faults=faults)
        clock.run(self._load, Pool(driver=driver, hang_after=HANG_AFTER), rng)
        driver.close()

    async def _load(self, pool: Pool, rng: random.Random) -> None:
        async def task(rng: random.Random) -> None:
            for _ in range(ROUND_OF_OTHERS // TASKS):
                try:
                    await self._task(pool, 1, rng)
                except GreenschedError as error:
                    self.ends[type(error).__name__] += 1

        try:
            await pool.open()
        except GreenschedError as error:
            self.ends[f"{type(error).__name__} at open"] += 1
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LOAD), asyncio.TaskGroup() as tasks:
                for _ in range(TASKS):
                    tasks.create_task(task(random.Random(rng.random())))
        try:
            await pool.aclose(grace=0.1)
        except GreenschedError as error:
            self.ends[f"{type(error).__name__} at close"] += 1
        assert pool.state in (PoolState.CLOSED, PoolState.POISONED), pool
        self.ends[pool.state.value] += 1


class GPUSoak(Soak):
    """A soak of GPU 0 in real time, with the kernels that hang among its leases."""

    #: Two executors may be made, of about 6 MiB each: their sets of cells were not needed before.
    most_rise = MOST_RISE | {"device_bytes": 12 << 20, "objects": 2}

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Pool(hang_after=HANG_AFTER, prepare=[spin, saxpy]))

    def _run(self, main: Callable[..., Coroutine[Any, Any, object]], *args: Any) -> None:
        asyncio.run(main(*args))

    def _new_event_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    def _between(self, _number: int) -> None:
        """Wait until no kernel hangs any more."""
        while self._pool.statistics().executors_hung:
            time.sleep(0.05)

    def _on_device(self) -> tuple[int, int]:
        device = self._pool.devices[0]
        with device.primary:
            free, total = device.driver.memory_info()
        return total - free, self._pool.statistics().executors

    async def _lease(self, kind: Kind, pool: Pool, rng: random.Random) -> None:
        """Take one lease; what waits behind a kernel that hangs is told that it hangs, too."""
        try:
            await super()._lease(kind, pool, rng)
        except DeviceHung:
            self.ends[f"{DeviceHung.__name__} in {kind.__name__}"] += 1


def scripts(rng: random.Random) -> list[list[Fault]]:
    """Return the faults of the pools of one round: none, a fault, a hang, and a failed call."""
    call = rng.choice([name for name in DRIVER_CALLS if name != "initialise"])
    status = rng.choice(["INVALID_VALUE", "OUT_OF_MEMORY", "ILLEGAL_ADDRESS"])
    nth = 1 + int(rng.expovariate(0.02))
    return [
        [],
        [Crash("spin", rng.randint(1, 100))],
        [Hang("spin", rng.randint(1, 100))],
        [Fail(call, nth, status, nth + rng.choice([0, 0, 5, 10**9]))],
    ]


def rises(samples: Sequence[Sample]) -> dict[str, float]:
    """Return how much the line through the second half of the samples rises, of each thing."""
    half = samples[len(samples) // 2 :]
    leases = [each.leases for each in half]
    return {
        name: statistics.linear_regression(leases, [getattr(each, name) for each in half]).slope
        * (leases[-1] - leases[0])
        for name in MOST_RISE
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


async def hung(pool: Pool, rng: random.Random) -> None:
    """Wait for a kernel that hangs, and ends later."""
    with suppress(DeviceHung):
        async with pool.partition(rng.randint(1, 16)) as p:
            await p.launch(CONFIG, spin, int(HUNG * 1e9))


async def out_of_memory(pool: Pool, rng: random.Random) -> None:
    """Ask for more memory than the device has; the lease goes on."""
    async with pool.partition(size(rng)) as p:
        with suppress(OutOfMemory):
            await p.empty(1 << 51, np.uint8)
        await p.launch(CONFIG, spin, duration(rng))


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
    hung: 1,
    out_of_memory: 2,
}
KINDS, WEIGHTS = tuple(_KINDS), tuple(_KINDS.values())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.system.soak",
        description="Run leases with faults; memory, threads, files and objects must not grow.",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="(default: %(default)g)")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1000), help="of the leases (default: random)"
    )
    parser.add_argument("--gpu", action="store_true", help="on GPU 0, in real time")
    arguments = parser.parse_args()
    logging.getLogger("greensched").setLevel(logging.CRITICAL)  # faults are intended
    warnings.simplefilter("ignore", ResourceWarning)
    print(f"seed {arguments.seed}; allocator: {ALLOCATOR}")
    print("  leases  resident MiB  threads  files  device MiB      s")
    soak: Soak = (GPUSoak if arguments.gpu else SimulatedSoak)(arguments.seed)
    samples: list[Sample] = []
    began = printed = time.monotonic()
    rounds = soak.rounds()
    while (now := time.monotonic()) - began < arguments.minutes * 60 or len(samples) < 4:
        samples.append(sample := next(rounds))
        if now - printed >= PRINT_EVERY_S or len(samples) == 1:
            printed = now
            print(
                f"{sample.leases:8} {sample.resident / (1 << 20):13.2f} {sample.threads:8} "
                f"{sample.files:6} {sample.device_bytes / (1 << 20):11.1f} {now - began:6.0f}",
                flush=True,
            )
    rounds.close()
    print(f"{len(samples)} rounds, {soak.others} pools opened and closed beside them")
    for counted in (soak.kinds, soak.ends):
        print(", ".join(f"{number} {what}" for what, number in counted.most_common()))
    most, risen = soak.most_rise, rises(samples)
    for name, rise in risen.items():
        verdict = "PASS" if rise <= most[name] else "FAIL"
        print(f"second half: {name} rose by {rise:,.1f} (<= {most[name]:,}): {verdict}")
    return int(any(rise > most[name] for name, rise in risen.items()))


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        command = [sys.executable, "-m", "benchmarks.system.soak", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ALLOCATOR)  # glibc reads it at the start
    raise SystemExit(main())
