"""A pool behind ASGI over real sockets: uvicorn on asyncio and on uvloop, and httpx."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request

from greensched import ALL, LaunchConfig, Pool
from greensched.driver import simulated
from greensched.integrations import asgi
from greensched.kernels import spin
from greensched.typing import Cost
from helpers.waiting import until

CONFIG = LaunchConfig(grid=16, block=32)


def application(pool: Pool) -> FastAPI:
    app = FastAPI(lifespan=asgi.lifespan(pool))
    app.add_middleware(asgi.PoolErrors)
    app.router.routes.extend(asgi.routes(pool))

    @app.get("/spin/{nanoseconds}")
    async def run_spin(nanoseconds: int, request: Request, deadline: float | None = None) -> str:
        async with asgi.while_connected(request), pool.partition(ALL, deadline=deadline) as p:
            await p.launch(CONFIG, spin, nanoseconds)
        return "done"

    @app.get("/plain/{number}")
    def plain(number: int) -> int:
        with pool.sync.partition(16, deadline=1) as p:
            return p.run(abs, number)

    return app


@asynccontextmanager
async def serving(pool: Pool) -> AsyncGenerator[httpx.AsyncClient]:
    """Start a server on its own port, yield a client, and stop the server by a signal."""
    server = uvicorn.Server(uvicorn.Config(application(pool), port=0, log_config=None))
    running = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield client
    finally:
        server.should_exit = True
        await running


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Run a program on the loop that uvicorn would choose."""
    options = {"use_uvloop": request.param == "uvloop"}
    return lambda main: anyio.run(main, backend_options=options)


@pytest.fixture
def gpu() -> Iterator[simulated.SimulatedDriver]:
    """Yield a simulated GPU on the real clock, and check that nothing is alive afterwards."""
    driver = simulated.open()
    yield driver
    gc.collect()
    assert not driver.live()


def test_it_serves(run: Callable[..., None], gpu: simulated.SimulatedDriver) -> None:
    """Requests, probes and refusals are the same over a socket."""
    pool = Pool(driver=gpu, max_waiting=1)

    async def main() -> None:
        async with serving(pool) as client:
            assert (await client.get("/spin/1000")).json() == "done"
            assert (await client.get("/readyz")).status_code == 200
            async with pool.partition(ALL):
                late = await client.get("/spin/1000", params={"deadline": 0.01})
                assert late.status_code == 504
                waits = asyncio.create_task(client.get("/spin/1000"))
                await until(lambda: pool.statistics().waiting == 1)
                refused = await client.get("/spin/1000")
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
            assert (await waits).status_code == 200
            await pool.aclose()
            assert (await client.get("/spin/1000")).status_code == 503
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/healthz")).status_code == 200

    run(main)


def test_a_plain_endpoint(run: Callable[..., None], gpu: simulated.SimulatedDriver) -> None:
    """A `def` endpoint runs on a thread without a loop and uses `pool.sync`."""
    pool = Pool(driver=gpu)

    async def main() -> None:
        async with serving(pool) as client:
            answers = await asyncio.gather(*(client.get(f"/plain/{-n}") for n in range(20)))
            assert [answer.json() for answer in answers] == list(range(20))
            async with pool.partition(ALL):
                assert (await client.get("/plain/1")).status_code == 504
            assert pool.statistics().leases == 0

    run(main)


def test_a_client_that_hangs_up(
    run: Callable[..., None], gpu: simulated.SimulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its SMs drain at once, and are free when its running kernel ends."""
    began, may_end = threading.Event(), threading.Event()

    def is_over() -> bool:
        began.set()  # a request arrived, so it runs
        return may_end.is_set()

    monkeypatch.setattr(spin.spec, "cost", lambda *_: Cost(until=is_over))
    pool = Pool(driver=gpu)

    async def main() -> None:
        async with serving(pool) as client:
            request = asyncio.create_task(client.get("/spin/1000"))
            await until(began.is_set)
            assert pool.statistics().sms_leased == 132
            request.cancel()
            await until(lambda: pool.statistics().sms_draining == 132)
            may_end.set()
            await until(lambda: pool.statistics().sms_free == 132)
            assert (await client.get("/spin/1000")).status_code == 200

    run(main)


def test_a_dead_gpu_is_seen(run: Callable[..., None]) -> None:
    """The first probe after the failure is red, and the server goes on answering."""
    driver = simulated.open(faults=[simulated.Crash("spin")])

    async def main() -> None:
        async with serving(Pool(driver=driver)) as client:
            assert (await client.get("/readyz")).status_code == 200
            assert (await client.get("/spin/1000")).status_code == 503
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/healthz")).status_code == 503

    run(main)


WORKERS = """
import os
from fastapi import FastAPI
from greensched import Pool
from greensched.integrations import asgi

pool = Pool()
app = FastAPI(lifespan=asgi.lifespan(pool))

@app.get("/")
async def process():
    async with pool.partition(16):
        return {"process": os.getpid(), "parent": os.getppid(), "leases": pool.statistics().leases}
"""


def test_each_worker_has_a_pool_of_its_own(tmp_path: Path) -> None:
    """Each worker process opens its own pool, and all end quietly."""
    (tmp_path / "service.py").write_text(WORKERS)
    with subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "service:app", "--port", "0", "--workers", "2"],
        cwd=tmp_path,
        env=os.environ | {"GREENSCHED_DRIVER": "simulated:h200"},
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stderr is not None
        said = ""
        while said.count("Application startup complete") < 2:
            line = server.stderr.readline()
            assert line, said
            said += line
        address = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert address is not None, said
        seen = [httpx.get(address[0], timeout=20).json() for _ in range(20)]
        server.send_signal(signal.SIGTERM)
        said += server.stderr.read()
    assert {one["leases"] for one in seen} == {1}
    assert server.pid not in {one["process"] for one in seen}
    assert said.count("Application shutdown complete") == 2, said
    assert "Traceback" not in said, said
