"""A critical kernel beside one that fills the GPU: in partitions, and in other arrangements.

`python -m benchmarks.gpu.isolation [--driver NAME] [--json]`. Not on the stand-in, whose kernels
take no SMs from each other.

The batch is a product of matrices on every SM of its stream, always several queued. The critical
kernel is a smaller one, as large as its 16 SMs. Launching, and seeing the end by a word that the
stream writes, are the same in all arrangements; they differ in the streams:

* **partitions**: of a pool, 16 SMs, and the others but 8;
* **plain streams**, **priority streams**: two streams of the primary context, on every SM; in the
  second the critical one has the highest priority, and the batch the lowest;
* **cuda.core**: two groups of one split and a green context over each, by its `SMResource.split`;
* **torch**: two `GreenContext.create`, of as many SMs as the partitions. Each splits the device
  anew, and nothing in torch ensures that the two are disjoint.

An arrangement is measured with its batch and without it, in turns.

Then dispatch: a kernel that does nothing in a partition, from its submission until a host that
polls sees its ticket, with the batch on the other SMs and without it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Self

import numpy as np

from benchmarks.lib.timing import Comparison, Row, Samples, Work, table
from greensched import Device, LaunchConfig, PinnedBuffer, Pool, Program
from greensched import driver as drivers
from greensched.device.arguments import KernelArguments
from greensched.driver.interface import Driver
from greensched.kernels import matmul
from greensched.typing import Cost

SMS = 16
#: Rows of the matrices, and passes over them: 16 blocks for the critical kernel, one for each of
#: its SMs, and 4096 for the batch: several waves on any GPU of today, which take milliseconds.
CRITICAL, BATCH = (128, 16), (2048, 2)
#: Batch kernels queued while the critical one is measured.
QUEUED = 4
ROUNDS, PER_ROUND = 25, 40
#: SMs that are left free for leases: one cell of today's devices.
LEFT = 8

nothing = Program('extern "C" __global__ void nothing() {}', name="nothing.cu").kernel("nothing")


@nothing.reference
def _nothing(*_: object) -> None: ...


@nothing.cost
def _nothing_cost(*_: object) -> Cost:
    return Cost(sm_ns=1000)


class MarkedLaunch:
    """A kernel launched on a stream, and a word by which its end is seen."""

    def __init__(
        self, driver: Driver, stream: Any, kernel: Any, config: LaunchConfig, values:
        KernelArguments, word: PinnedBuffer, index: int,
    ) -> None:  # fmt: skip
        self._launch = driver.bind_launch(
            stream, kernel, config.grid3, config.block3, 0, values.address
        )
        self._values = values  # packed, and read at each launch
        self._mark = driver.bind_mark(stream, word.address + 4 * index)
        self._word, self._index = word.array, index
        self._word[index] = 0
        self._issued = 0

    def submit(self) -> None:
        self._issued += 1
        self._launch()
        self._mark(self._issued)

    @property
    def in_flight(self) -> int:
        return self._issued - int(self._word[self._index])

    def finish(self) -> None:
        while self.in_flight:
            pass


@dataclass(slots=True)
class Arrangement:
    """The streams, and what was measured: with the batch as ours, without it as the reference."""

    comparison: Comparison
    critical: MarkedLaunch
    batch: MarkedLaunch


def fill(batch: MarkedLaunch) -> None:
    """Keep the batch's queue full."""
    while batch.in_flight < QUEUED:
        batch.submit()


def one(critical: MarkedLaunch) -> float:
    """Return the seconds from the submission until the end is seen."""
    start = perf_counter()
    critical.submit()
    critical.finish()
    return perf_counter() - start


def measure_both(arrangement: Arrangement, *, beside: bool) -> Samples:
    found = []
    for _ in range(PER_ROUND):
        if beside:
            fill(arrangement.batch)
        found.append(one(arrangement.critical))
    arrangement.batch.finish()
    return np.array(found)


class Bench:
    """The streams of every arrangement, and the memory that their kernels use."""

    def __init__(self, driver: Driver, pool: Pool, stack: AsyncExitStack) -> None:
        self.driver = driver
        self.pool = pool
        self.stack = stack
        self.device: Device = pool.devices[0]
        self.arrangements: list[Arrangement] = []
        self._words = 0

    async def __aenter__(self) -> Self:
        most = self.device.sm_count - SMS - LEFT
        leases = self.pool.partitions(SMS, most // LEFT * LEFT)
        self.p, self.rest = await self.stack.enter_async_context(leases)
        self.word = await self.p.empty_pinned(64, np.uint32)
        self.small = await self._matrices(*CRITICAL)
        self.large = await self._matrices(*BATCH)
        for part in (self.p, self.rest):
            await part.prepare(LaunchConfig(grid=1, block=256), matmul)
            await part.prepare(LaunchConfig(grid=1, block=32), nothing)
        return self

    async def __aexit__(self, *_: object) -> None:
        for buffer in (*self.small[:3], *self.large[:3], self.word):
            buffer.close()

    async def _matrices(self, rows: int, passes: int) -> tuple[Any, ...]:
        """Return the arguments of a product."""
        ones = np.ones((rows, rows), np.float32)
        matrices = [await self.p.upload(ones) for _ in range(3)]
        return (*matrices, rows, rows, rows, passes)

    def marked(self, stream: Any, product: tuple[Any, ...]) -> MarkedLaunch:
        values = KernelArguments(matmul, self.device.ordinal)
        values.fill(product)
        config = LaunchConfig(grid=(product[3] // 32) ** 2, block=256)
        kernel = self.device.loader.loaded(matmul)
        self._words += 1
        return MarkedLaunch(self.driver, stream, kernel, config, values, self.word, self._words)

    def add(self, name: str, critical: Any, batch: Any) -> None:
        what = f"{name}: beside the batch | without it"
        arrangement = Arrangement(
            Comparison(what), self.marked(critical, self.small), self.marked(batch, self.large)
        )
        self.arrangements.append(arrangement)

    async def add_all(self) -> None:
        self.add("partitions", self.p.stream.handle, self.rest.stream.handle)
        await asyncio.to_thread(self._add_others)  # creating streams may block

    def _add_others(self) -> None:
        low, high = self._priorities()
        for name, priorities in (("plain streams", (0, 0)), ("priority streams", (high, low))):
            streams = [self.device.create_stream(priority=priority) for priority in priorities]
            for stream in streams:
                self.stack.push_async_callback(asyncio.to_thread, stream.close)
            self.add(name, *(stream.handle for stream in streams))
        if self.driver.name == "cuda":
            self._add_cuda_core()
            self._add_torch()

    def _priorities(self) -> tuple[int, int]:
        with self.device:
            return self.driver.priority_range()

    def _add_cuda_core(self) -> None:
        try:
            core = importlib.import_module("cuda.core")
        except ImportError:
            return
        device = core.Device(0)
        device.set_current()
        (group,), rest = device.resources.sm.split(core.SMResourceOptions(count=SMS))
        streams = []
        for resource in (group, rest):
            context = device.create_context(core.ContextOptions(resources=[resource]))
            stream = context.create_stream()
            self.stack.push_async_callback(asyncio.to_thread, context.close)
            self.stack.push_async_callback(asyncio.to_thread, stream.close)
            streams.append(self.driver.foreign_stream(int(stream.handle)))
        self.add(f"cuda.core ({rest.sm_count} SMs for the batch)", *streams)

    def _add_torch(self) -> None:
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            return
        if not torch.cuda.is_available():
            return
        streams = []
        for sms in (SMS, self.rest.sm_count // 8 * 8):
            green = torch.cuda.green_contexts.GreenContext.create(num_sms=sms, device_id=0)
            green.set_context()
            stream = torch.cuda.current_stream()
            green.pop_context()
            self.stack.callback(lambda *_: None, green, stream)  # keeps them alive
            streams.append(self.driver.foreign_stream(stream.cuda_stream))
        self.add("torch green contexts", *streams)

    def run(self) -> list[Row]:
        """Return rows of the critical kernel. First launches block: not on a loop's thread."""
        for number in range(ROUNDS + 1):
            for arrangement in self.arrangements[:: 1 if number % 2 else -1]:
                for beside in (True, False):
                    found = measure_both(arrangement, beside=beside)
                    if number:  # the first round warms up
                        side = (
                            arrangement.comparison.ours if beside else arrangement.comparison.theirs
                        )
                        side.append(found)
        rows = []
        for arrangement in self.arrangements:
            most = 1.05 if arrangement is self.arrangements[0] else None
            rows += [
                arrangement.comparison.row(0.5, "us"),
                arrangement.comparison.row(0.99, "us", most=most),
            ]
        return rows

    async def dispatch(self) -> list[Row]:
        """Return rows of a kernel that does nothing: in a held lease, and with a lease each."""
        config = LaunchConfig(grid=1, block=32)
        bound = self.p.bind(config, nothing)
        batch = self.marked(self.rest.stream.handle, self.large)

        async def held() -> float:
            start = perf_counter()
            job = bound.submit()
            while not job.done():
                pass
            return perf_counter() - start

        async def leased() -> float:
            start = perf_counter()
            async with self.pool.partition(LEFT) as q:
                job = q.launch(config, nothing)
                while not job.done():
                    pass
                return perf_counter() - start

        async with self.pool.partition(LEFT) as q:
            await q.prepare(config, nothing)
        what = "a kernel of nothing, submitted and seen"
        return [
            *await _dispatched(what, held, held, batch, 20e-6),
            *await _dispatched(f"leased, {what}", leased, held, batch, 80e-6),
        ]


async def _dispatched(
    what: str, beside: Work, alone: Work, batch: MarkedLaunch, most: float
) -> list[Row]:
    """Measure with the batch, and in a held lease without it: the bar is on the difference."""
    found = Comparison(f"{what}: beside the batch | held, without it")
    for number in range(ROUNDS + 1):
        for side, work, is_beside in (
            (found.ours, beside, True),
            (found.theirs, alone, False),
        ):
            samples = []
            for _ in range(PER_ROUND):
                if is_beside:
                    fill(batch)
                samples.append(await work())
            batch.finish()
            if number:
                side.append(np.array(samples))
    ours, theirs = found.at(0.99)
    last = replace(
        found.row(0.99, "us"), bar=f"<= + {most * 1e6:g} us", passed=ours <= theirs + most
    )
    return [found.row(0.5, "us"), last]


async def measure(driver: Driver) -> list[Row]:
    """Return the median and p99 of each arrangement, with the batch and without; then dispatch."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(Pool([0], driver=driver, prepare=[matmul, nothing]))
        async with Bench(driver, pool, stack) as bench:
            await bench.add_all()
            return [*await asyncio.to_thread(bench.run), *await bench.dispatch()]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.isolation", description="Measure isolation."
    )
    parser.add_argument("--driver", default="cuda", help="cuda, or a simulated one (default: cuda)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = asyncio.run(measure(drivers.open(options.driver)))
    print(json.dumps([row.as_dict() for row in found]) if options.json else table(found))


if __name__ == "__main__":
    main()
