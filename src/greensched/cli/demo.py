"""The demo: a small service under load, in four arrangements of one GPU.

Clients send images to be blurred, at Poisson times; a batch job multiplies matrices without
pause. The question is what the batch job does to the clients. Every result is compared with
numpy's.

On a simulated GPU two latencies are kept apart: on the *device's timeline* (modelled time, which
no slowness of the host can lengthen), and in the client's hands, where the host that computes the
results takes part. On a GPU there is one.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from greensched import driver as drivers
from greensched.device.buffers import Buffer
from greensched.device.launch import LaunchConfig, launch
from greensched.device.streams import Stream
from greensched.driver.interface import Driver
from greensched.driver.simulated import SimulatedDriver, Span
from greensched.errors import DriverUnavailable, InvalidRequest
from greensched.kernels import gaussian_blur, matmul
from greensched.leasing.partition import Partition
from greensched.pool import Pool
from greensched.typing import ALL, REST

Image = npt.NDArray[np.float32]
#: Told the part done, from 0 to 1, and what is being done.
Progress = Callable[[float, str], None]

#: What the demo and the examples run on where there is no GPU.
STAND_IN = "simulated:h200"
#: The critical class gets so many SMs.
CRITICAL_SMS = 16
#: Requests a second, on average: each takes well under a millisecond of the device.
RATE = 40.0
SIGMA = 4.0
#: Sides of the clients' images, in pixels.
SIDES = (96, 128, 160, 192, 224, 256)
#: The batch job multiplies matrices of (M, K) and (K, M), adding the product up so many times:
#: some 6 ms on the rest of an H200, at a few milliseconds of the host that simulates it. Tiles of
#: 32 x 32 make 2304 blocks, of which an H200 holds 1056 at once: it is full, as a batch job's is.
M, K = 1536, 64
PASSES = 256
MATMUL = LaunchConfig(grid=(M // 32, M // 32), block=(16, 16))
#: Jobs the batch keeps in flight, so that the device never waits for the host.
DEPTH = 2


@dataclass(slots=True)
class Row:
    """What one arrangement gave. Latencies in seconds; `device_*` on the device's timeline."""

    name: str
    critical_sms: int = 0
    batch_sms: int = 0
    latencies: list[float] = field(default_factory=list)
    device_latencies: list[float] = field(default_factory=list)
    batch_jobs: int = 0
    seconds: float = 0.0
    verified: int = 0
    results: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: times in milliseconds, device times only where there are any."""
        late = [a - b for a, b in zip(self.latencies, self.device_latencies, strict=False)]
        return {
            "arrangement": self.name,
            "critical_sms": self.critical_sms,
            "batch_sms": self.batch_sms,
            "requests": len(self.latencies),
            "latency_p50_ms": percentile(self.latencies, 0.5),
            "latency_p99_ms": percentile(self.latencies, 0.99),
            "device_p50_ms": percentile(self.device_latencies, 0.5),
            "device_p99_ms": percentile(self.device_latencies, 0.99),
            "host_late_p99_ms": percentile(late, 0.99),
            "batch_jobs_per_s": round(self.batch_jobs / self.seconds, 1) if self.seconds else 0.0,
            "verified": self.verified,
            "results": self.results,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """The demo's result: the device, whether it was simulated, and a row for each arrangement."""

    device: str
    simulated: bool
    rows: tuple[Row, ...]

    @property
    def wrong(self) -> int:
        """Results that differed from numpy's."""
        return sum(row.results - row.verified for row in self.rows)


async def run(
    driver: Driver,
    *,
    seconds: float,
    image: Image | None = None,
    seed: int = 1,
    progress: Progress = lambda _done, _what: None,
) -> Outcome:
    """Runs the four arrangements, `seconds` each.

    Args:
        driver: CUDA or a simulation.
        seconds: of load, for each arrangement.
        image: what every client sends, (height, width, channels); None: each its own.
        seed: of the clients' times and images.
        progress: told the part done, from 0 to 1, and what is being done.
    """
    async with Pool([0], driver=driver) as pool:
        service = Service(pool, driver, image, seed)
        await service.warm_up()
        arrangements = (
            service.critical_on_all,
            service.critical_alone,
            service.both_on_all,
            service.apart,
        )
        rows = []
        for done, arrangement in enumerate(arrangements):

            def told(part: float, name: str, done: int = done) -> None:
                progress((done + part) / len(arrangements), name)

            rows.append(await arrangement(seconds, told))
        name = pool.devices[0].name
    return Outcome(name, isinstance(driver, SimulatedDriver), tuple(rows))


class Service:
    """The clients, the batch job, and the four ways to put them on one GPU."""

    def __init__(self, pool: Pool, driver: Driver, image: Image | None, seed: int) -> None:
        self._pool = pool
        self._device = _Device(driver)
        self._seed = seed
        rng = np.random.default_rng(seed)
        own = [rng.random((side, side, 1), np.float32) for side in SIDES]
        self._images = [image] if image is not None else own
        self._blurred = [blurred(sent) for sent in self._images]
        self._factors = [rng.random(shape, np.float32) for shape in ((M, K), (K, M))]
        self._product = PASSES * (self._factors[0] @ self._factors[1])

    async def warm_up(self) -> None:
        """Loads both kernels wherever they will run, so that nobody's latency has it in it."""
        for sizes in ((ALL,), (CRITICAL_SMS, REST)):
            async with self._pool.partitions(*sizes) as partitions:
                for p in partitions:
                    await self._request(p, self._images[0])
                    async with self._matrices(p) as (a, b, c):
                        await p.launch(MATMUL, matmul, a, b, c, M, M, K, 1)

    # -- the four arrangements -------------------------------------------------------------------

    async def critical_on_all(self, seconds: float, progress: Progress) -> Row:
        """The clients alone, on the whole GPU."""
        async with self._pool.partition(ALL) as p:
            return await self._serve(
                Row("critical alone, all SMs", p.sm_count), p, seconds, progress
            )

    async def critical_alone(self, seconds: float, progress: Progress) -> Row:
        """The clients alone, on the SMs they have in the last arrangement."""
        async with self._pool.partition(CRITICAL_SMS) as p:
            name = f"critical alone, {p.sm_count} SMs"
            return await self._serve(Row(name, p.sm_count), p, seconds, progress)

    async def both_on_all(self, seconds: float, progress: Progress) -> Row:
        """Both on every SM, on two streams: what one does without partitions."""
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
        """Each in a partition of its own, granted together."""
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
        """Open loop: requests come at their times, whether or not the last one is answered."""
        times = random.Random(self._seed)
        turn = asyncio.Lock()
        with self._device.listening(p) as spans:
            begin = time.perf_counter()
            due = 0.0
            async with asyncio.TaskGroup() as clients:
                while (due := due + times.expovariate(RATE)) < seconds:
                    await _until(begin + due)
                    which = row.results % len(self._images)
                    row.results += 1
                    clients.create_task(self._client(row, p, which, turn, begin + due))
                    progress(due / seconds, row.name)
            row.seconds = time.perf_counter() - begin
            row.device_latencies = device_latencies(spans)
        return row

    async def _client(
        self, row: Row, p: Partition, which: int, turn: asyncio.Lock, due: float
    ) -> None:
        async with turn:  # one request at a time on the device: it has one partition
            out = await self._request(p, self._images[which])
        row.latencies.append(time.perf_counter() - due)
        row.verified += bool(np.allclose(out, self._blurred[which], rtol=1e-3, atol=1e-4))

    async def _request(self, p: Partition, image: Image) -> Image:
        """What a service does for a request: upload, kernel, download, in one go."""
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
        """Multiplies without pause: the next job is in flight before the last is awaited."""
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
        """The same on a plain stream, whose events a thread waits for."""
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
        found = await p.download(product)
        right = await asyncio.to_thread(np.allclose, found, self._product, rtol=1e-3)  # 10 ms of it
        row.verified += bool(right)


async def _until(when: float) -> None:
    """To the microsecond: a loop's timers are up to a millisecond late, which is not the GPU's."""
    await asyncio.sleep(max(0.0, when - time.perf_counter() - 0.002))
    while time.perf_counter() < when:  # noqa: ASYNC110  the time is what it waits for
        await asyncio.sleep(0)


def choose_driver(spec: str | None = None) -> Driver:
    """What `spec` or `GREENSCHED_DRIVER` names; else CUDA, or a simulated GPU, and it says so.

    For the demo and the examples. A program's `Pool()` never chooses: what is not there must be
    an error.
    """
    driver = drivers.open(spec)
    if spec is not None or os.environ.get(drivers.VARIABLE):
        return driver
    try:
        driver.initialise()
    except DriverUnavailable as error:
        told = f"No GPU here: {error.problem}.\nThis runs on a simulated one ({STAND_IN})."
        print(told, file=sys.stderr)
        return drivers.open(STAND_IN)
    return driver


# -- the device's timeline --------------------------------------------------------------------


class _Device:
    """Hears what the simulated device did, and when; a real one says nothing."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @contextmanager
    def listening(self, p: Partition) -> Iterator[list[Span]]:
        """Collects what happens on a partition's stream."""
        spans: list[Span] = []
        driver = self._driver
        if not isinstance(driver, SimulatedDriver):
            yield spans
            return
        mine = p.stream.__cuda_stream__()[1]

        def hear(span: Span) -> None:
            if driver.address_of(span.stream) == mine:
                spans.append(span)

        driver.on_span(hear)
        try:
            yield spans
        finally:
            driver.on_span(None)


def device_latencies(spans: list[Span]) -> list[float]:
    """Seconds of the device's timeline that each request took, up to the end of its download.

    Of each operation, from when it could have begun (it was submitted, and the one before it was
    done) to its end: waiting for SMs and engines counts, waiting for the host does not.
    """
    latencies, total, before = [], 0, 0
    for span in spans:
        total += span.end - max(span.enqueued, before)
        before = span.end
        if span.name == "to host":
            latencies.append(total / 1e9)
            total = 0
    return latencies


# -- images and figures -----------------------------------------------------------------------


def blurred(image: Image, sigma: float = SIGMA) -> Image:
    """A Gaussian blur by numpy, written apart from the kernel's reference, to judge it by."""
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


def read_image(path: Path) -> Image:
    """An image as floats (height, width, channels), at most 512 pixels a side; bytes as 0 to 1.

    Raises:
        InvalidRequest: no such file, not an image, or Pillow is needed and not installed.
    """
    try:
        if path.suffix == ".npy":
            array = np.load(path)
        else:
            from PIL import Image as Pillow  # type: ignore[import-not-found,unused-ignore]  # optional

            array = np.asarray(Pillow.open(path).convert("RGB"))
    except ImportError:
        raise InvalidRequest(
            f"reading {path} takes Pillow: pip install pillow, or give .npy"
        ) from None
    except (OSError, EOFError, ValueError) as error:
        raise InvalidRequest(f"{path} is no image: {error}") from None
    if not isinstance(array, np.ndarray):  # an archive of several
        array.close()
        raise InvalidRequest(f"{path} is no image: it holds several arrays")
    if array.ndim not in (2, 3) or array.dtype.kind not in "buif" or not array.size:
        raise InvalidRequest(
            f"{path} holds {array.dtype} {array.shape}: give (height, width[, channels])"
        )
    scale = 255.0 if array.dtype == np.uint8 else 1.0
    step = -(-max(array.shape[:2]) // 512)
    return np.ascontiguousarray(np.atleast_3d(array)[::step, ::step], np.float32) / np.float32(
        scale
    )


def percentile(seconds: list[float], part: float) -> float | None:
    """In milliseconds; None of nothing."""
    if not seconds:
        return None
    return round(
        1e3 * sorted(seconds)[min(len(seconds) - 1, math.ceil(part * len(seconds)) - 1)], 3
    )
