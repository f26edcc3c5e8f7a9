"""The demo: a small service under load, in four arrangements of one GPU.

Clients send images to be blurred, at Poisson times, while a batch job multiplies matrices without
a pause. The demo shows what the batch job does to the clients' latencies, and compares every result
with numpy's.

On a GPU, a latency is what a client measures. On a simulated GPU it is time on the device's
timeline: the host computes the results there, and its speed says nothing about a GPU.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from greensched import driver as drivers
from greensched.cli.terminal import Progress, print_table
from greensched.device.buffers import Buffer
from greensched.device.launch import LaunchConfig, launch
from greensched.device.streams import Stream
from greensched.driver.interface import Driver
from greensched.driver.simulated import SimulatedDriver, Span
from greensched.errors import DriverUnavailable
from greensched.kernels import gaussian_blur, matmul
from greensched.leasing.latency import quantile
from greensched.leasing.partition import Partition
from greensched.pool import Pool
from greensched.typing import ALL, REST

Image = npt.NDArray[np.float32]

#: The simulated GPU for machines without a GPU.
SIMULATED = "simulated:h200"
#: SMs of the clients' partition.
CRITICAL_SMS = 16
#: Mean requests per second. Each takes well under a millisecond of the device.
RATE = 40.0
SIGMA = 4.0
#: Side lengths of the clients' images, in pixels.
SIDES = (96, 128, 160, 192, 224, 256)
#: The batch job multiplies (M, K) by (K, M) and accumulates the product PASSES times: about 6 ms on
#: the SMs that the clients leave of an H200, and a few milliseconds of the simulating host. Tiles
#: of 32 x 32 make 2304 blocks; an H200 holds 1056 at a time, so the grid fills it.
M, K = 1536, 64
PASSES = 256
MATMUL = LaunchConfig(grid=(M // 32, M // 32), block=(16, 16))
#: Batch jobs in flight, so that the device never waits for the host.
DEPTH = 2


@dataclass(slots=True)
class Row:
    """The figures of one arrangement; latencies in seconds."""

    name: str
    critical_sms: int = 0
    batch_sms: int = 0
    latencies: list[float] = field(default_factory=list)
    batch_jobs: int = 0
    seconds: float = 0.0
    verified: int = 0
    results: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON, with times in milliseconds."""
        ordered = sorted(self.latencies)
        return {
            "arrangement": self.name,
            "critical_sms": self.critical_sms,
            "batch_sms": self.batch_sms,
            "requests": len(self.latencies),
            "latency_p50_ms": round(1e3 * quantile(ordered, 0.5), 3) if ordered else None,
            "latency_p99_ms": round(1e3 * quantile(ordered, 0.99), 3) if ordered else None,
            "batch_jobs_per_s": round(self.batch_jobs / self.seconds, 1) if self.seconds else 0.0,
            "verified": self.verified,
            "results": self.results,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the demo: the device, whether it is simulated, and one row per arrangement."""

    device: str
    simulated: bool
    rows: tuple[Row, ...]

    @property
    def wrong(self) -> int:
        """How many results differed from numpy's."""
        return sum(row.results - row.verified for row in self.rows)


async def run(
    driver: Driver,
    *,
    seconds: float,
    seed: int = 1,
    trace: Path | None = None,
    progress: Progress = lambda _done, _what: None,
) -> Outcome:
    """Run the four arrangements, `seconds` each.

    Args:
        driver: the CUDA driver or a simulated one.
        seconds: seconds of load for each arrangement.
        seed: The seed of the clients' times and images.
        trace: The file for a trace of the arrangements, or None.
        progress: Called with the fraction done, from 0 to 1, and the name of the arrangement.
    """
    async with Pool([0], driver=driver) as pool:
        tracing = nullcontext() if trace is None else pool.trace(trace)
        service = Service(pool, driver, seed)
        await service.warm_up()
        arrangements = (
            service.critical_on_all,
            service.critical_alone,
            service.both_on_all,
            service.apart,
        )
        rows = []
        async with tracing:
            for done, arrangement in enumerate(arrangements):

                def report(fraction: float, name: str, done: int = done) -> None:
                    progress((done + fraction) / len(arrangements), name)

                rows.append(await arrangement(seconds, report))
        name = pool.devices[0].name
    return Outcome(name, isinstance(driver, SimulatedDriver), tuple(rows))


class Service:
    """The clients, the batch job, and the four ways to put them on one GPU."""

    def __init__(self, pool: Pool, driver: Driver, seed: int) -> None:
        self._pool = pool
        self._driver = driver
        self._seed = seed
        rng = np.random.default_rng(seed)
        self._images = [rng.random((side, side, 1), np.float32) for side in SIDES]
        self._blurred = [blurred(image) for image in self._images]
        self._factors = [rng.random(shape, np.float32) for shape in ((M, K), (K, M))]
        self._product = PASSES * (self._factors[0] @ self._factors[1])

    async def warm_up(self) -> None:
        """Load both kernels on every partition, so that no latency includes loading."""
        for sizes in ((ALL,), (CRITICAL_SMS, REST)):
            async with self._pool.partitions(*sizes) as partitions:
                for p in partitions:
                    await self._request(p, self._images[0])
                    async with self._matrices(p) as (a, b, c):
                        await p.launch(MATMUL, matmul, a, b, c, M, M, K, 1)

    # -- the four arrangements -------------------------------------------------------------------

    async def critical_on_all(self, seconds: float, progress: Progress) -> Row:
        """Run the clients alone, on all SMs."""
        async with self._pool.partition(ALL) as p:
            return await self._serve(
                Row("critical alone, all SMs", p.sm_count), p, seconds, progress
            )

    async def critical_alone(self, seconds: float, progress: Progress) -> Row:
        """Run the clients alone, on as many SMs as in the last arrangement."""
        async with self._pool.partition(CRITICAL_SMS) as p:
            name = f"critical alone, {p.sm_count} SMs"
            return await self._serve(Row(name, p.sm_count), p, seconds, progress)

    async def both_on_all(self, seconds: float, progress: Progress) -> Row:
        """Run clients and batch job on all SMs, on two streams, as a program without partitions."""
        async with self._pool.partition(ALL) as p:
            row = Row("both on all SMs", p.sm_count, p.sm_count)
            stream = await p.run(p.context.create_stream)
            stop = asyncio.Event()
            async with self._matrices(p) as buffers, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._batch_on_stream(p, stream, buffers, row, stop))
                await self._serve(row, p, seconds, progress)
                stop.set()
            await p.run(stream.close)
            return row

    async def apart(self, seconds: float, progress: Progress) -> Row:
        """Run clients and batch job in separate partitions, which are granted together."""
        async with self._pool.partitions(CRITICAL_SMS, REST) as (p, rest):
            row = Row(f"{p.sm_count} SMs + the rest", p.sm_count, rest.sm_count)
            stop = asyncio.Event()
            async with self._matrices(rest) as buffers, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._batch(rest, buffers, row, stop))
                await self._serve(row, p, seconds, progress)
                stop.set()
            return row

    # -- clients ---------------------------------------------------------------------------------

    async def _serve(self, row: Row, p: Partition, seconds: float, progress: Progress) -> Row:
        """Send requests at their times, whether or not earlier ones are answered (open loop)."""
        times = random.Random(self._seed)
        order = asyncio.Lock()
        with collected_spans(self._driver, p) as spans:
            begin = time.perf_counter()
            due = 0.0
            async with asyncio.TaskGroup() as clients:
                while (due := due + times.expovariate(RATE)) < seconds:
                    await _until(begin + due)
                    which = row.results % len(self._images)
                    row.results += 1
                    clients.create_task(self._client(row, p, which, order, begin + due))
                    progress(due / seconds, row.name)
            row.seconds = time.perf_counter() - begin
        if isinstance(self._driver, SimulatedDriver):
            row.latencies = device_latencies(spans)
        return row

    async def _client(
        self, row: Row, p: Partition, which: int, order: asyncio.Lock, due: float
    ) -> None:
        async with order:  # one partition serves one request at a time
            out = await self._request(p, self._images[which])
        row.latencies.append(time.perf_counter() - due)
        row.verified += bool(np.allclose(out, self._blurred[which], rtol=1e-3, atol=1e-4))

    async def _request(self, p: Partition, image: Image) -> Image:
        """Serve one request: upload, kernel, download."""
        height, width, channels = image.shape
        config = LaunchConfig(grid=math.ceil(height * width / 256), block=256)
        with await p.upload(image) as src, await p.empty_like(src) as dst:
            p.launch(config, gaussian_blur, src, dst, height, width, channels, SIGMA)
            return await p.download(dst)

    # -- the batch job ---------------------------------------------------------------------------

    @asynccontextmanager
    async def _matrices(self, p: Partition) -> AsyncIterator[tuple[Buffer, Buffer, Buffer]]:
        a, b = [await p.upload(factor) for factor in self._factors]
        c = await p.empty((M, M))
        with a, b, c:
            yield a, b, c

    async def _batch(
        self, p: Partition, buffers: tuple[Buffer, Buffer, Buffer], row: Row, stop: asyncio.Event
    ) -> None:
        """Multiply without a pause: the next job is in flight before the last one is awaited."""
        in_flight = deque[Any]()
        while not stop.is_set():
            in_flight.append(p.launch(MATMUL, matmul, *buffers, M, M, K, PASSES))
            if len(in_flight) >= DEPTH:
                await in_flight.popleft()
                row.batch_jobs += 1
        while in_flight:
            await in_flight.popleft()
            row.batch_jobs += 1
        await self._check_product(p, buffers[2], row)

    async def _batch_on_stream(
        self,
        p: Partition,
        stream: Stream,
        buffers: tuple[Buffer, Buffer, Buffer],
        row: Row,
        stop: asyncio.Event,
    ) -> None:
        """Multiply on a plain stream; a thread waits for its events."""
        filled = p.stream.record()
        stream.wait(filled)
        filled.close()
        events = deque[Any]()
        while not stop.is_set():
            launch(stream, MATMUL, matmul, *buffers, M, M, K, PASSES)
            events.append(stream.record())
            if len(events) >= DEPTH:
                await asyncio.to_thread(events[0].sync)
                events.popleft().close()
                row.batch_jobs += 1
        while events:
            await asyncio.to_thread(events[0].sync)
            events.popleft().close()
            row.batch_jobs += 1
        await self._check_product(p, buffers[2], row)

    async def _check_product(self, p: Partition, product: Buffer, row: Row) -> None:
        row.results += 1
        result = await p.download(product)
        # The comparison takes about 10 ms: too long for the event loop's thread.
        equal = await asyncio.to_thread(np.allclose, result, self._product, rtol=1e-3)
        row.verified += bool(equal)


async def _until(when: float) -> None:
    """Wait with a precision of microseconds; a loop's timers are up to 1 ms late."""
    await asyncio.sleep(max(0.0, when - time.perf_counter() - 0.002))
    while time.perf_counter() < when:  # noqa: ASYNC110  a time has no event to wait for
        await asyncio.sleep(0)


def choose_driver(spec: str | None) -> tuple[Driver, str]:
    """Return the driver of the demo, and one sentence that says which it is and why.

    `spec` or `GREENSCHED_DRIVER` names it. Without either the demo runs on the GPU, or, if there is
    none, on a simulated one. Only the demo falls back like this: `Pool()` raises instead.
    """
    spec = spec or os.environ.get(drivers.VARIABLE)
    driver = drivers.open(spec)
    if spec:
        return driver, f"This demo runs on {spec}, as requested."
    try:
        driver.initialise()
    except DriverUnavailable as error:
        reason = f"because this machine has no usable GPU: {error.problem}."
        return drivers.open(SIMULATED), f"This demo runs on a simulated GPU ({SIMULATED}), {reason}"
    return driver, "This demo runs on this machine's GPU."


# -- the table ------------------------------------------------------------------------------------

#: The columns of the table, each with the function that reads it from a row.
COLUMNS = {
    "arrangement": "arrangement",
    "SMs": "critical_sms",
    "p50 ms": "latency_p50_ms",
    "p99 ms": "latency_p99_ms",
    "batch SMs": "batch_sms",
    "jobs/s": "batch_jobs_per_s",
}


def print_rows(outcome: Outcome, rows: list[dict[str, Any]]) -> None:
    """Print the rows of an outcome, with an explanation."""
    title = outcome.device
    if outcome.simulated:
        title += ": latencies on the device's timeline"
    print_table([*COLUMNS], [[row[key] for key in COLUMNS.values()] for row in rows], title)
    print(f"\n{_comparison(rows)}")
    if outcome.simulated:
        print(
            "The times of a simulated GPU are modelled. On a GPU, partitions also share memory\n"
            "bandwidth, the L2 cache and power."
        )
    verified, results = (sum(row[key] for row in rows) for key in ("verified", "results"))
    print(f"\nverified {verified} of {results} results against numpy")


def _comparison(rows: list[dict[str, Any]]) -> str:
    _, alone, shared, apart = (row["latency_p99_ms"] for row in rows)
    if not (alone and shared and apart):
        return "The run was too short for percentiles: give more --seconds."
    return (
        "The clients' p99 beside the batch job, as a multiple of their p99 alone on their own "
        "SMs:\n"
        f"{apart / alone:.2f} x on their own SMs, {shared / alone:.2f} x where both share all SMs."
    )


# -- the device's timeline --------------------------------------------------------------------


@contextmanager
def collected_spans(driver: Driver, p: Partition) -> Iterator[list[Span]]:
    """Collect the operations on a partition's stream; nothing if the driver is not simulated."""
    spans: list[Span] = []
    if not isinstance(driver, SimulatedDriver):
        yield spans
        return
    stream = p.stream.__cuda_stream__()[1]

    def collect(span: Span) -> None:
        if driver.address_of(span.stream) == stream:
            spans.append(span)

    driver.on_span(collect)
    try:
        yield spans
    finally:
        driver.on_span(None)


def device_latencies(spans: list[Span]) -> list[float]:
    """Return how long each request took on the device's timeline, in seconds.

    A request ends with its download. Each of its operations counts from when it could have begun
    (submitted, and its predecessor complete) to its end. So waiting for SMs and copy engines
    counts, but waiting for the host does not.
    """
    latencies, total, previous_end = [], 0, 0
    for span in spans:
        total += span.end - max(span.enqueued, previous_end)
        previous_end = span.end
        if span.name == "to host":
            latencies.append(total / 1e9)
            total = 0
    return latencies


# -- images and figures -----------------------------------------------------------------------


def blurred(image: Image, sigma: float = SIGMA) -> Image:
    """Blur by numpy, independently of the kernel's reference, to check the kernel's results."""
    radius = math.ceil(3 * sigma)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    weights /= weights.sum()
    result = image.astype(np.float64)
    for axis in (0, 1):
        padding = [(radius, radius) if a == axis else (0, 0) for a in range(3)]
        padded = np.pad(result, padding, mode="edge")
        shifted = (
            np.take(padded, range(i, i + image.shape[axis]), axis) for i in range(len(weights))
        )
        result = sum(weight * part for weight, part in zip(weights, shifted, strict=True))
    return result.astype(np.float32)
