"""`python -m benchmarks.system.http [--seconds 60]`: the FastAPI example at twice its capacity.

examples/07_fastapi behind uvicorn, on a simulated H200 and the real clock; the clients are another
process, and speak HTTP. First one client alone, then as many as it can take, to find what it is
capable of; then twice that for so many seconds. At last its clients are killed again and again, the
process with all of them, in the middle of the same load. Exit code 1 if a bar is missed.
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
#: Seconds of the device for each request, as the modelled device is told: that is what makes the
#: capacity, and not the host.
SECONDS_EACH = 0.1
#: Of the time under load: one client alone, and those who find the capacity.
ALONE, FINDING = 0.25, 0.15
#: How often the clients are killed, for each second under load; once at least.
KILLS = 1 / 3
#: After the running jobs' end, in seconds at most (issue 6).
MOST_S = 0.050
#: Seconds between two looks at whether SMs are free.
LOOK_S = 0.0005


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.system.http", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="at twice the capacity")
    seconds = parser.parse_args().seconds
    machine = MachineLoad()
    rows = measure(seconds)
    print(f"{machine}\n{table(rows)}")
    return int(any(row.passed is False for row in rows))


def measure(seconds: float) -> list[Row]:
    """The bars of issue 6, and what they are judged by."""
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
        #: Requests at work at once; what was alive on the device at last, while the pool was open.
        self.at_once = self.alive = 0
        #: The start and the end of each kernel, in seconds of the driver's clock.
        self.ran: list[tuple[float, float]] = []
        driver.on_span(self._note)

    def _note(self, span: simulated.Span) -> None:
        if span.kind == "kernel":
            self.ran.append((span.start / 1e9, span.end / 1e9))

    async def run(self, seconds: float) -> list[Row]:
        """All of it; see the module."""
        async with serving(self.app) as (address, server):
            self.at_once = self.pool.statistics().sms_total // 16
            alone = _accepted(await _answers(address, ALONE * seconds, together=1))
            together = self.at_once + self.most
            found = _accepted(await _answers(address, FINDING * seconds, together=together))
            capacity = together / float(np.mean(found))  # Little's law
            before = await self._look(server)
            answers = await _answers(address, seconds, rate=2 * capacity)
            after = await self._look(server)
            rows = [
                Row(
                    "requests a second: it is capable of | as the device is modelled",
                    capacity,
                    self.at_once / SECONDS_EACH,
                    "",
                ),
                *self._judge(answers, alone, seconds, capacity),
                _held("open or alive after the load", after, before),
                await self._kill(address, max(1, round(KILLS * seconds)), 2 * capacity),
            ]
            last = await self._look(server)
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
            Row("requests a second: came | capable of", len(answers) / seconds, capacity, ""),
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

    async def _look(self, server: uvicorn.Server) -> dict[str, int]:
        """What is open or alive while nobody asks for anything."""
        while server.server_state.connections or self.pool.statistics().leases:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)  # uvicorn tells nobody that a connection is closed
        await self._use_every_lane()
        await asyncio.to_thread(gc.collect)  # the loop's own thread for such calls is there, too
        statistics = self.pool.statistics()
        return {
            **{f"{kind} on the GPU": number for kind, number in self.driver.live().items()},
            "requests that wait": statistics.waiting,
            "SMs that are not free": statistics.sms_total - statistics.sms_free,
            "tasks": len(asyncio.all_tasks()),
            **Counter(f"thread {thread.name!r}" for thread in threading.enumerate()),
            "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208  iterdir keeps it open
        }

    async def _use_every_lane(self) -> None:
        """A lane's threads begin with its first use, and memory comes back when some is taken."""
        lanes = []
        async with contextlib.AsyncExitStack() as held:
            with contextlib.suppress(WouldBlock):
                while True:
                    p = await held.enter_async_context(self.pool.partition_nowait(16))
                    await p.run(int)
                    await p.checkpoint()  # by the mover, which else comes when memory must grow
                    lanes.append(p)
            # For long enough that threads sleep meanwhile: who came so far may not have used each.
            await asyncio.gather(*(self.summed(p, np.zeros(1, np.float32)) for p in lanes))

    async def _kill(self, address: str, number: int, rate: float) -> Row:
        """How long after their running jobs' end the SMs of killed clients were free."""
        rng, late = random.Random(1), []
        for _ in range(number):
            process = await _start(address, seconds=60, rate=rate)
            while self.pool.statistics().waiting < self.most:  # noqa: ASYNC110  it has begun
                await asyncio.sleep(LOOK_S)
            await asyncio.sleep(rng.random())
            process.kill()
            gone = await asyncio.to_thread(self._gone, process.pid)
            while self.pool.statistics().leases:  # noqa: ASYNC110  nobody is told of another's end
                await asyncio.sleep(LOOK_S)
            free = self.driver.time()
            late.append(free - max([gone, *(end for start, end in self.ran if start <= gone)]))
            await process.wait()
        what = f"clients killed {number} times: SMs free, after their jobs' end | allowed, worst"
        worst = max(late)
        bar = f"<= {1e3 * MOST_S:g} ms"
        return Row(what, 1e3 * worst, 1e3 * MOST_S, "ms", bar=bar, passed=worst <= MOST_S)

    def _gone(self, pid: int) -> float:
        """When a killed process has let go of its sockets. Waits for that."""
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
    """Nothing more than before; what there is more is named."""
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
