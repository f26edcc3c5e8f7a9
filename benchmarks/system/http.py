"""`python -m benchmarks.system.http [--seconds 60]`: the FastAPI example at twice its capacity.

examples/07_fastapi behind uvicorn, on a simulated H200 and the real clock; the clients are another
process, and speak HTTP. First one client alone, then as many as fit, to find the capacity; then
twice that for so many seconds, beside readers that are too slow. In the middle of it the server
gets SIGTERM, and another one starts once it has stopped. At last the clients' process is killed
several times under the same load. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from benchmarks.lib import clients
from benchmarks.lib.server import serving
from benchmarks.lib.timing import MachineLoad, Row, table
from benchmarks.system.soak import unexplained
from greensched import Partition, Pool, WouldBlock
from greensched.driver import simulated
from greensched.integrations import asgi
from greensched.kernels import reduce_sum
from greensched.typing import Cost

EXAMPLE = Path(__file__).parents[2] / "examples" / "07_fastapi" / "app.py"
#: Device seconds of each request, as the modelled device is told: they make the capacity, not the
#: host.
SECONDS_EACH = 0.1
#: Clients that take a stream and read it too slowly; the seconds for which the service lets a
#: stream wait for its client; and a stream's bytes: more than the sockets on the way hold.
SLOW, PATIENCE = 4, 0.1
PIECE, PIECES = bytes(1 << 16), 512
#: Seconds between SIGTERM and the moment at which the server stops.
DRAIN_S = 1.0
#: Parts of the time under load: for one client alone, and for finding the capacity.
ALONE, FINDING = 0.25, 0.15
#: Kills of the clients for each second under load; one at least.
KILLS = 1 / 3
#: The bar: seconds after the end of the running jobs until the SMs are free.
MOST_S = 0.050
#: The statuses of requests that no server answered.
NONE = (clients.REFUSED, clients.BROKEN)
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
    # A stream that is cut is logged, by the server as well.
    logging.getLogger("greensched").setLevel(logging.ERROR)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    machine = MachineLoad()
    rows = measure(seconds)
    print(f"{machine}\n{table(rows)}")
    return int(any(row.passed is False for row in rows))


def measure(seconds: float) -> list[Row]:
    """Return the rows, with their bars."""
    cost, reduce_sum.spec.cost = reduce_sum.spec.cost, lambda *_: Cost(fixed_ns=SECONDS_EACH * 1e9)
    driver = simulated.open("h200")
    # uvicorn raises its signals again once it has stopped, for the handler that was there before.
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        load = Load(driver, _example())
        gc.freeze()  # otherwise a full collection visits all modules, and takes 80 ms
        rows = asyncio.run(load.run(seconds))
        gc.collect()
        left = sum(driver.live().values())
        driver.close()
    finally:
        reduce_sum.spec.cost = cost
        signal.signal(signal.SIGTERM, handler)
    what = "alive on the GPU: once the pool is closed | before"
    return [*rows, Row(what, left, load.alive, "", bar="== 0", passed=left == 0)]


@dataclass(frozen=True, slots=True)
class Restart:
    """When the server was stopped by SIGTERM: seconds of the clock of all processes."""

    signalled: float
    #: `/readyz` answered 503; the server took no connections any more; another one took some.
    red: float
    closed: float
    opened: float
    #: Requests that the server answered after `/readyz` did so.
    served: int


class Load:
    """The example on a device, and clients of it."""

    def __init__(self, driver: simulated.SimulatedDriver, example: ModuleType) -> None:
        self.driver, self.example = driver, example
        self.most = example.MAX_WAITING
        example.DRAIN = DRAIN_S
        #: Requests that run at once; objects alive on the device at the end, while the pool was
        #: open.
        self.at_once = self.alive = 0
        #: Requests that reached the application, of all servers, by their path.
        self.reached: Counter[str] = Counter()
        #: The start and the end of each kernel, in seconds of the driver's clock.
        self.ran: list[tuple[float, float]] = []
        driver.on_span(self._note)
        #: When each stream's kernel had ended; seconds from then on until its lease had.
        self._computed: dict[Partition | None, float] = {}
        self.held: list[float] = []

    def _note(self, span: simulated.Span) -> None:
        if span.kind == "kernel":
            self.ran.append((span.start / 1e9, span.end / 1e9))

    async def _start_server(self, stack: contextlib.AsyncExitStack, port: int = 0) -> str:
        """Serve the example with a pool of its own, and streams; return the address."""
        self.pool = Pool(driver=self.driver, max_waiting=self.most, prepare=[reduce_sum])
        app = self.example.create_app(self.pool)
        app.add_api_route(clients.STREAM, self._stream, response_class=Response)

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                self.reached[scope["path"]] += 1
            await app(scope, receive, send)

        address, self.server = await stack.enter_async_context(serving(counted, port))
        return address

    async def _stream(self) -> Response:
        leased = self._timed(self.pool.partition(16, deadline=self.example.DEADLINE))
        return asgi.LeaseStream(leased, self._pieces, patience=PATIENCE)

    @contextlib.asynccontextmanager
    async def _timed(
        self, partition: contextlib.AbstractAsyncContextManager[Partition]
    ) -> AsyncGenerator[Partition]:
        held = None
        try:
            async with partition as held:
                yield held
        finally:
            began = self._computed.pop(held, None)
            if began is not None:
                self.held.append(time.monotonic() - began)

    async def _pieces(self, p: Partition) -> AsyncGenerator[bytes]:
        await self.example.summed(p, np.zeros(1, np.float32))
        self._computed[p] = time.monotonic()
        for _ in range(PIECES):
            yield PIECE

    async def run(self, seconds: float) -> list[Row]:
        """Run all of it; see the module."""
        async with (
            httpx.AsyncClient(headers={"Connection": "close"}) as self.prober,
            contextlib.AsyncExitStack() as first,
            contextlib.AsyncExitStack() as second,
        ):
            address = await self._start_server(first)
            self.at_once = self.pool.statistics().sms_total // 16
            alone = _accepted((await _found(address, ALONE * seconds, together=1)).answers)
            together = self.at_once + self.most
            full = await _found(address, FINDING * seconds, together=together)
            capacity = together / float(np.mean(_accepted(full.answers)))  # Little's law
            before = await self._sample()
            self.reached.clear()
            loaded = asyncio.create_task(_found(address, seconds, rate=2 * capacity, slow=SLOW))
            await asyncio.sleep(seconds / 2)
            restart = await self._restart(address, first, second)
            found = await loaded
            reached = self.reached[clients.PATH] + self.reached[clients.STREAM]
            after = await self._sample()
            rows = [
                Row(
                    "requests a second: capacity | as the device is modelled",
                    capacity,
                    self.at_once / SECONDS_EACH,
                    "",
                ),
                *self._judge(found, alone, seconds, capacity),
                *_judge_restart(restart, found, reached),
                self._judge_streams(found.streams),
                _held("open or alive after the load", after, before),
                await self._kill(address, max(1, round(KILLS * seconds)), 2 * capacity),
            ]
            last = await self._sample()
            self.alive = sum(self.driver.live().values())
            return [*rows, _held("the same after the kills", last, before)]

    async def _restart(
        self, address: str, old: contextlib.AsyncExitStack, new: contextlib.AsyncExitStack
    ) -> Restart:
        """Stop the server by SIGTERM, and start another one on its port."""
        signal.raise_signal(signal.SIGTERM)
        signalled = time.monotonic()
        while (await self.prober.get(f"{address}/readyz")).is_success:
            pass
        red, answered = time.monotonic(), self.server.server_state.total_requests
        while not self.server.should_exit:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(SAMPLE_S)
        closed, served = time.monotonic(), self.server.server_state.total_requests - answered
        await old.aclose()
        await self._start_server(new, httpx.URL(address).port or 0)
        return Restart(signalled, red, closed, time.monotonic(), served)

    def _judge(
        self, found: clients.Found, alone: list[float], seconds: float, capacity: float
    ) -> list[Row]:
        accepted, alone_p99 = _accepted(found.answers), _p99(alone)
        p99 = _p99(accepted)
        return [
            Row(
                "requests a second: offered | capacity", len(found.answers) / seconds, capacity, ""
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

    def _judge_streams(self, streams: list[clients.Answer]) -> Row:
        """Return how long slow readers had their SMs after the stream's kernel."""
        longest = max(self.held)
        cut = sum(each >= PATIENCE for each in self.held)
        return Row(
            f"streams of {SLOW} slow readers ({_told(streams)}), {cut} of {len(self.held)} cut: "
            "SMs held after the kernel, longest | patience",
            1e3 * longest,
            1e3 * PATIENCE,
            "ms",
            bar=f"some cut, and <= + {1e3 * MOST_S:g} ms",
            passed=PATIENCE <= longest <= PATIENCE + MOST_S,
        )

    async def _sample(self) -> dict[str, int]:
        """Count what is open or alive while no request is in progress."""
        while self.server.server_state.connections or self.pool.statistics().leases:  # noqa: ASYNC110
            await asyncio.sleep(SAMPLE_S)  # uvicorn has no event for a closed connection
        await self._use_every_executor()
        await asyncio.to_thread(gc.collect)  # starts the loop's own thread for such calls, too
        statistics = self.pool.statistics()
        return {
            **{f"{kind} on the GPU": number for kind, number in self.driver.live().items()},
            "requests that wait": statistics.waiting,
            "SMs that are not free": statistics.sms_total - statistics.sms_free,
            "tasks": len(asyncio.all_tasks()),
            "threads": unexplained(
                [thread.name for thread in threading.enumerate()], statistics.executors
            ),
            "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208  iterdir keeps it open
        }

    async def _use_every_executor(self) -> None:
        """Have each executor make what it keeps from its first use on."""
        partitions = []
        async with contextlib.AsyncExitStack() as held:
            with contextlib.suppress(WouldBlock):
                while True:
                    p = await held.enter_async_context(self.pool.partition_nowait(16))
                    partitions.append(p)
            await asyncio.gather(
                *(self.example.summed(p, np.zeros(1, np.float32)) for p in partitions)
            )

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


async def _found(address: str, seconds: float, **options: float) -> clients.Found:
    process = await _start(address, seconds=seconds, **options)
    printed, _ = await process.communicate()
    return clients.Found.read(printed)


def _judge_restart(restart: Restart, found: clients.Found, reached: int) -> list[Row]:
    """Return the rows of SIGTERM, and of what clients were answered.

    A connection may be refused, or broken before its request was read, from the moment at which the
    server closes its socket until another server has one. Before and after, each request is
    answered. No request that reached the application may be lost, whenever that was.
    """
    answers = [*found.answers, *found.streams]
    wrong = [
        each
        for each in answers
        if each.status not in ((200, 429, 503) if _is_up(restart, each) else (200, 429, 503, *NONE))
    ]
    lost = reached - sum(each.status not in NONE for each in answers)
    drained = restart.closed - restart.red
    return [
        Row(
            f"answers ({_told(answers)}): wrong | all",
            len(wrong),
            len(answers),
            "",
            bar="== 0, wrong is all but 200, 429, 503, and none while no server listens",
            passed=not wrong,
        ),
        Row(
            "requests that reached the application: not answered | all",
            lost,
            reached,
            "",
            bar="== 0",
            passed=lost == 0,
        ),
        Row(
            f"SIGTERM: served after readiness turned red ({restart.served}), for | drain",
            drained,
            DRAIN_S,
            "s",
            bar="served, then closed",
            passed=restart.served > 0 and restart.red < restart.closed,
        ),
        Row(
            "SIGTERM: no server listens | from the signal until another one does",
            restart.opened - restart.closed,
            restart.opened - restart.signalled,
            "s",
        ),
    ]


def _is_up(restart: Restart, answer: clients.Answer) -> bool:
    """Say whether a server listened all the time of a request."""
    began = answer.ended - answer.took
    return answer.ended < restart.closed or began > restart.opened


def _told(answers: list[clients.Answer]) -> str:
    statuses = Counter(answer.status for answer in answers)
    names = {clients.REFUSED: "refused", clients.BROKEN: "broken"}
    return ", ".join(f"{n} x {names.get(status, status)}" for status, n in sorted(statuses.items()))


def _accepted(answers: list[clients.Answer]) -> list[float]:
    return [answer.took for answer in answers if answer.status == 200]


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
