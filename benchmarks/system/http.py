"""`python -m benchmarks.system.http [--seconds 60]`: the FastAPI example at twice its capacity.

examples/07_fastapi behind uvicorn, on a simulated H200 and the real clock; the clients are another
process, and speak HTTP. First one client alone, then as many as fit, to find the capacity; then
twice that for so many seconds. At last the clients' process is killed several times under the same
load. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import json
import os
import random
import sys
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import uvicorn

from benchmarks.lib import clients
from benchmarks.lib.server import serving
from benchmarks.lib.timing import MachineLoad, Row, table
from greensched import Pool, WouldBlock
from greensched.driver import simulated
from greensched.kernels import reduce_sum
from greensched.typing import Cost

EXAMPLE = Path(__file__).parents[2] / "examples" / "07_fastapi" / "app.py"
#: Device seconds of each request, as the modelled device is told: they make the capacity, not the
#: host.
SECONDS_EACH = 0.1
#: Parts of the time under load: for one client alone, and for finding the capacity.
ALONE, FINDING = 0.25, 0.15
#: Kills of the clients for each second under load; one at least.
KILLS = 1 / 3
#: The bar: seconds after the end of the running jobs until the SMs are free.
MOST_S = 0.050
#: Seconds between two samples of whether SMs are free.
SAMPLE_S = 0.0005


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.system.http",
        description="Run the FastAPI example at twice its capacity.",
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="at twice the capacity (default: 60)"
    )
    seconds = parser.parse_args().seconds
    machine = MachineLoad()
    rows = measure(seconds)
    print(f"{machine}\n{table(rows)}")
    return int(any(row.passed is False for row in rows))


def measure(seconds: float) -> list[Row]:
    """Return the rows, with their bars."""
    cost, reduce_sum.spec.cost = reduce_sum.spec.cost, lambda *_: Cost(fixed_ns=SECONDS_EACH * 1e9)
    driver = simulated.open("h200")
    try:
        load = Load(driver, _example())
        rows = asyncio.run(load.run(seconds))
        gc.collect()
        left = sum(driver.live().values())
        driver.close()
    finally:
        reduce_sum.spec.cost = cost
    what = "alive on the GPU: once the pool is closed | before"
    return [*rows, Row(what, left, load.alive, "", bar="== 0", passed=left == 0)]


class Load:
    """The example on a device, and clients of it."""

    def __init__(self, driver: simulated.SimulatedDriver, example: ModuleType) -> None:
        self.driver, self.most = driver, example.MAX_WAITING
        self.pool = Pool(driver=driver, max_waiting=self.most, prepare=[reduce_sum])
        self.app = example.create_app(self.pool)
        self.summed = example.summed
        #: Requests that run at once; objects alive on the device at the end, while the pool was
        #: open.
        self.at_once = self.alive = 0
        #: The start and the end of each kernel, in seconds of the driver's clock.
        self.ran: list[tuple[float, float]] = []
        driver.on_span(self._note)

    def _note(self, span: simulated.Span) -> None:
        if span.kind == "kernel":
            self.ran.append((span.start / 1e9, span.end / 1e9))

    async def run(self, seconds: float) -> list[Row]:
        """Run all of it; see the module."""
        async with serving(self.app) as (address, server):
            self.at_once = self.pool.statistics().sms_total // 16
            alone = _accepted(await _answers(address, ALONE * seconds, together=1))
            together = self.at_once + self.most
            found = _accepted(await _answers(address, FINDING * seconds, together=together))
            capacity = together / float(np.mean(found))  # Little's law
            before = await self._sample(server)
            answers = await _answers(address, seconds, rate=2 * capacity)
            after = await self._sample(server)
            rows = [
                Row(
                    "requests a second: capacity | as the device is modelled",
                    capacity,
                    self.at_once / SECONDS_EACH,
                    "",
                ),
                *self._judge(answers, alone, seconds, capacity),
                _held("open or alive after the load", after, before),
                await self._kill(address, max(1, round(KILLS * seconds)), 2 * capacity),
            ]
            last = await self._sample(server)
            self.alive = sum(self.driver.live().values())
            return [*rows, _held("the same after the kills", last, before)]

    def _judge(
        self, answers: clients.Answers, alone: list[float], seconds: float, capacity: float
    ) -> list[Row]:
        statuses = Counter(status for status, _ in answers)
        told = ", ".join(f"{statuses[status]} x {status}" for status in sorted(statuses))
        wrong = sum(number for status, number in statuses.items() if status not in (200, 429, 503))
        accepted, alone_p99 = _accepted(answers), _p99(alone)
        p99 = _p99(accepted)
        return [
            Row("requests a second: offered | capacity", len(answers) / seconds, capacity, ""),
            Row(
                f"answers ({told}): wrong | all",
                wrong,
                len(answers),
                "",
                bar="== 0, wrong is all but 200, 429, 503",
                passed=wrong == 0,
            ),
            Row(
                "accepted, median | one client alone",
                1e3 * float(np.median(accepted)),
                1e3 * float(np.median(alone)),
                "ms",
            ),
            Row(
                f"accepted, p99 of {len(accepted)} | alone, of {len(alone)}",
                1e3 * p99,
                1e3 * alone_p99,
                "ms",
                bar="<= 2 x",
                passed=p99 <= 2 * alone_p99,
            ),
        ]

    async def _sample(self, server: uvicorn.Server) -> dict[str, int]:
        """Count what is open or alive while no request is in progress."""
        while server.server_state.connections or self.pool.statistics().leases:  # noqa: ASYNC110
            await asyncio.sleep(SAMPLE_S)  # uvicorn has no event for a closed connection
        await self._use_every_executor()
        await asyncio.to_thread(gc.collect)  # starts the loop's own thread for such calls, too
        statistics = self.pool.statistics()
        return {
            **{f"{kind} on the GPU": number for kind, number in self.driver.live().items()},
            "requests that wait": statistics.waiting,
            "SMs that are not free": statistics.sms_total - statistics.sms_free,
            "tasks": len(asyncio.all_tasks()),
            **Counter(f"thread {thread.name!r}" for thread in threading.enumerate()),
            "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208  iterdir keeps it open
        }

    async def _use_every_executor(self) -> None:
        """Start the threads of each executor, which begin with its first use, and reuse memory."""
        partitions = []
        async with contextlib.AsyncExitStack() as held:
            with contextlib.suppress(WouldBlock):
                while True:
                    p = await held.enter_async_context(self.pool.partition_nowait(16))
                    await p.run(int)
                    # Starts the submit thread, which else begins when memory grows.
                    await p.checkpoint()
                    partitions.append(p)
            # Long enough that threads sleep meanwhile: the load may not have used each of them.
            await asyncio.gather(*(self.summed(p, np.zeros(1, np.float32)) for p in partitions))

    async def _kill(self, address: str, number: int, rate: float) -> Row:
        """Return how long after the end of their jobs the SMs of killed clients were free.

        The server learns of a disconnect some turns of its loop later, and may begin a queued
        client's job meanwhile. The row says how many jobs began so late, and the time until the
        last of them began counts, too.
        """
        rng, late, begun_late = random.Random(1), [], 0
        for _ in range(number):
            process = await _start(address, seconds=60, rate=rate)
            while self.pool.statistics().waiting < self.most:  # noqa: ASYNC110  it has begun
                await asyncio.sleep(SAMPLE_S)
            await asyncio.sleep(rng.random())
            process.kill()
            gone = await asyncio.to_thread(self._gone, process.pid)
            while self.pool.statistics().leases:  # noqa: ASYNC110  another lease's end has no event
                await asyncio.sleep(SAMPLE_S)
            free = self.driver.time()
            begun = [start for start, _ in self.ran if start > gone]
            begun_late += len(begun)
            ended = max([gone, *(end for _, end in self.ran)])
            late.append(max([gone, *begun]) - gone + free - ended)
            await process.wait()
        what = (
            f"clients killed {number} times, {begun_late} jobs begun since: "
            "SMs free, less their jobs | allowed, longest"
        )
        worst = max(late)
        bar = f"<= {1e3 * MOST_S:g} ms"
        return Row(what, 1e3 * worst, 1e3 * MOST_S, "ms", bar=bar, passed=worst <= MOST_S)

    def _gone(self, pid: int) -> float:
        """Wait until a killed process has closed its sockets; return when."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return self.driver.time()


async def _start(address: str, **options: float) -> asyncio.subprocess.Process:
    given = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "benchmarks.lib.clients", address, *given]
    root = EXAMPLE.parents[2]
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=root)


async def _answers(address: str, seconds: float, **options: float) -> clients.Answers:
    process = await _start(address, seconds=seconds, **options)
    said, _ = await process.communicate()
    return [(status, took) for status, took in json.loads(said)]


def _accepted(answers: clients.Answers) -> list[float]:
    return [took for status, took in answers if status == 200]


def _p99(times: list[float]) -> float:
    return float(np.quantile(times, 0.99, method="inverted_cdf"))


def _held(what: str, after: dict[str, int], before: dict[str, int]) -> Row:
    """Return a row that passes if no count has grown; it names those that have."""
    more = {name: n - before.get(name, 0) for name, n in after.items() if n > before.get(name, 0)}
    named = ", ".join(f"{number} {name} more" for name, number in more.items())
    counts = sum(after.values()), sum(before.values())
    return Row(f"{what} | before", *counts, "", bar=named or "no more", passed=not more)


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("fastapi_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    raise SystemExit(main())
