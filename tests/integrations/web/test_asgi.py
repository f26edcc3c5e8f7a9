"""A pool behind Starlette and FastAPI, at the ASGI interface, in virtual time.

A sleep here moves the simulated device's clock, and takes no time. Over real sockets:
test_asgi_servers.py.
"""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message

import greensched
from greensched import ALL, LaunchConfig, Pool, PoolState
from greensched.driver.simulated import Crash, Fail, Hang, cost
from greensched.driver.status import from_status
from greensched.integrations import asgi
from greensched.integrations.testing import SimGPU, SimPool
from greensched.kernels import spin
from helpers.asgi import call
from helpers.waiting import until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Starlette's, of httpx: it would rather have its successor
    from starlette.testclient import TestClient

MS = 1_000_000
CONFIG = LaunchConfig(grid=16, block=32)
#: What the simulated device and a few turns of the loop take.
SLACK = 0.001

Endpoint = Callable[[Request], Any]


def starlette_app(pool: Pool, endpoint: Endpoint) -> ASGIApp:
    app = Starlette(routes=asgi.routes(pool), lifespan=asgi.lifespan(pool))
    app.add_route("/answer", endpoint, methods=["GET", "POST"])
    app.add_middleware(asgi.PoolErrors)
    return app


def fastapi_app(pool: Pool, endpoint: Endpoint) -> ASGIApp:
    app = FastAPI(lifespan=asgi.lifespan(pool))
    app.add_middleware(asgi.PoolErrors)
    app.router.routes.extend(asgi.routes(pool))

    async def work(request: Request) -> Response:  # FastAPI asks what it returns
        return await endpoint(request)  # type: ignore[no-any-return]

    app.add_api_route("/answer", work, methods=["GET", "POST"], response_model=None)
    return app


def fastapi_app_with_others(pool: Pool, endpoint: Endpoint) -> ASGIApp:
    """Return an application with function middleware inside and outside of ours."""
    app = FastAPI(lifespan=asgi.lifespan(pool))

    async def passes(request: Request, call_next: Any) -> Any:
        return await call_next(request)

    app.middleware("http")(passes)
    app.add_middleware(asgi.PoolErrors)
    app.middleware("http")(passes)
    app.router.routes.extend(asgi.routes(pool))
    app.add_route("/answer", endpoint, methods=["GET", "POST"])
    return app


#: Each makes an application with an endpoint at /answer.
APPS = {
    "starlette": starlette_app,
    "fastapi": fastapi_app,
    "fastapi among others": fastapi_app_with_others,
}


@pytest.fixture(params=APPS)
def make_app(request: pytest.FixtureRequest) -> Callable[[Pool, Endpoint], ASGIApp]:
    return APPS[request.param]


async def spin_for_10_ms(request: Request) -> Response:
    """Run a kernel of 10 ms, as a user's endpoint does."""
    async with asgi.while_connected(request), request.state.pool.partition(ALL, deadline=1) as p:
        await p.launch(CONFIG, spin, 10 * MS)
    return PlainTextResponse("done")


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncGenerator[httpx.AsyncClient]:
    """Start an application and yield a client of it."""
    async with app.router.lifespan_context(app) as state:  # type: ignore[attr-defined]

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": dict(state)}, receive, send)

        transport = httpx.ASGITransport(with_state, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            yield client


def status(sent: list[Message]) -> int:
    return int(sent[0]["status"])


# -- refusals ---------------------------------------------------------------------------------


async def test_it_answers(sim_gpu: SimGPU, sim_pool: SimPool, make_app: Any) -> None:
    """Requests are served one by one on the pool that the lifespan opens and closes."""
    pool = sim_pool()
    async with serving(make_app(pool, spin_for_10_ms)) as client:
        answers = await asyncio.gather(*(client.get("/answer") for _ in range(5)))
        assert [answer.text for answer in answers] == ["done"] * 5
        assert 0.05 <= sim_gpu.time < 0.05 + SLACK
    assert pool.state is PoolState.CLOSED
    sim_gpu.assert_ran(spin, times=5)


@pytest.mark.fault("B8")
async def test_a_full_queue_is_429(sim_pool: SimPool, make_app: Any) -> None:
    """A full queue is 429 with `Retry-After` in whole seconds; other requests are served."""
    async with serving(make_app(sim_pool(max_waiting=2), spin_for_10_ms)) as client:
        answers = await asyncio.gather(*(client.get("/answer") for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 429, 429]
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["Retry-After"]) >= 1
            assert "2 requests are waiting" in answer.json()["detail"]


async def test_a_deadline_that_passes_is_504(sim_pool: SimPool, make_app: Any) -> None:
    """A request without SMs at its deadline gets 504 then."""
    pool = sim_pool()
    async with serving(make_app(pool, spin_for_10_ms)) as client, pool.partition(ALL):
        answer = await asyncio.create_task(client.get("/answer"))
    assert answer.status_code == 504
    assert "1 s" in answer.json()["detail"]


async def test_a_request_that_would_be_late_is_503(
    sim_gpu: SimGPU, sim_pool: SimPool, make_app: Any
) -> None:
    """A request that would miss its deadline gets 503 at once, with `Retry-After`."""

    async def endpoint(request: Request) -> Response:
        async with request.state.pool.partition(ALL, deadline=2, duration=1.5) as p:
            await p.launch(CONFIG, spin, 1500 * MS)
        return PlainTextResponse("done")

    async with serving(make_app(sim_pool(), endpoint)) as client:
        at_work = asyncio.create_task(client.get("/answer"))
        await asyncio.sleep(0.1)
        late = await client.get("/answer")  # done in 2.9 s, and due in 2
        assert sim_gpu.time < 0.1 + SLACK
        assert (late.status_code, late.headers["Retry-After"]) == (503, "1")
        assert (await at_work).status_code == 200


async def test_a_closed_pool_is_503(sim_pool: SimPool, make_app: Any) -> None:
    """While the pool drains, queued and new requests get 503."""
    pool = sim_pool()
    async with serving(make_app(pool, spin_for_10_ms)) as client:
        async with pool.partition(ALL):
            waits = asyncio.create_task(client.get("/answer"))
            await until(lambda: pool.statistics().waiting == 1)
            closing = asyncio.create_task(pool.aclose())
            assert (await waits).status_code == 503
            assert (await client.get("/answer")).status_code == 503
        await closing
        assert (await client.get("/answer")).status_code == 503


async def test_a_poisoned_pool_is_503(sim_pool: SimPool, make_app: Any) -> None:
    """The request with the faulting kernel and all later ones say that the GPU is unusable."""
    async with serving(make_app(sim_pool(faults=[Crash("spin")]), spin_for_10_ms)) as client:
        for _ in range(2):
            answer = await client.get("/answer")
            assert answer.status_code == 503
            assert "ILLEGAL_ADDRESS" in answer.json()["detail"]


RAISED = {
    "the program's own": (lambda: KeyError("x"), 500),
    "a request that can never be": (lambda: greensched.TooManySMs(500, 132), 500),
    "a group of refusals": (
        lambda: ExceptionGroup("", [ExceptionGroup("", [greensched.DeadlineExceeded(1)])]),
        504,
    ),
    "a group with another": (
        lambda: ExceptionGroup("", [greensched.DeadlineExceeded(1), KeyError("x")]),
        500,
    ),
    "a fault as it was met": (lambda: from_status(719, "launch"), 503),
    "a refusal of the driver": (lambda: from_status(1, "launch"), 500),
}


@pytest.mark.parametrize("kind", RAISED)
async def test_what_is_answered(sim_pool: SimPool, make_app: Any, kind: str) -> None:
    """Each refusal of a pool has its status, also in a group; other errors are 500."""
    make, wanted = RAISED[kind]

    async def endpoint(_: Request) -> Response:
        raise make()

    async with serving(make_app(sim_pool(), endpoint)) as client:
        assert (await client.get("/answer")).status_code == wanted


async def test_the_body_and_the_header_agree(
    sim_pool: SimPool, make_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have `retry_after` in whole seconds, rounded up."""
    monkeypatch.setattr(random, "uniform", lambda least, _: least)

    async def endpoint(_: Request) -> Response:
        raise greensched.QueueFull(3, 1.234)

    async with serving(make_app(sim_pool(), endpoint)) as client:
        answer = await client.get("/answer")
    assert answer.headers["Retry-After"] == "2"
    assert answer.json() == {"detail": "3 requests are waiting already; retry in 2 s"}


@pytest.mark.fault("B14")
async def test_clients_refused_together_return_apart(sim_pool: SimPool, make_app: Any) -> None:
    """Retry-After is spread over twice the least time, and is never less."""

    async def endpoint(_: Request) -> Response:
        raise greensched.QueueFull(3, 100.0)

    async with serving(make_app(sim_pool(), endpoint)) as client:
        told = [int((await client.get("/answer")).headers["Retry-After"]) for _ in range(20)]
    assert all(100 <= seconds <= 200 for seconds in told)
    assert len(set(told)) > 1


async def test_an_error_behind_the_first_byte_is_raised(sim_pool: SimPool, make_app: Any) -> None:
    """Once a response has begun, the server gets the error itself."""

    async def body() -> AsyncGenerator[bytes]:
        yield b"begun"
        raise greensched.QueueFull(1, 1.0)

    async def endpoint(_: Request) -> Response:
        return StreamingResponse(body())

    pool = sim_pool()
    app = make_app(pool, endpoint)
    with pytest.raises((greensched.QueueFull, ExceptionGroup)):
        await call(app, "/answer", pool=pool)


# -- clients that leave -----------------------------------------------------------------------


async def test_a_client_that_leaves_the_queue(sim_pool: SimPool, make_app: Any) -> None:
    """A client that leaves the queue frees its place at once, and none of its work runs."""
    pool, leaves = sim_pool(), anyio.Event()
    async with serving(app := make_app(pool, spin_for_10_ms)), pool.partition(ALL):
        request = asyncio.create_task(call(app, "/answer", pool=pool, leaves=leaves))
        await until(lambda: pool.statistics().waiting == 1)
        leaves.set()
        assert status(await request) == 499
        assert pool.statistics().waiting == 0
        assert pool.statistics().cancelled == 1


@pytest.mark.fault("A13")
async def test_a_client_that_leaves_its_kernel(
    sim_gpu: SimGPU, sim_pool: SimPool, make_app: Any
) -> None:
    """The request ends at once, and its SMs are free when the running kernel ends."""
    pool, leaves = sim_pool(), anyio.Event()
    async with serving(app := make_app(pool, spin_for_10_ms)):
        request = asyncio.create_task(call(app, "/answer", pool=pool, leaves=leaves))
        await asyncio.sleep(0.004)
        leaves.set()
        await request
        assert sim_gpu.time < 0.004 + SLACK
        assert pool.statistics().sms_draining == 132
        async with pool.partition(ALL):
            (ran,) = sim_gpu.assert_ran(spin, times=1)
            assert ran.end <= sim_gpu.time < ran.end + SLACK


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_on_either_kind_of_loop(
    sim_gpu: SimGPU, sim_pool: SimPool, make_app: Any, backend: Any
) -> None:
    """On trio, answers, refusals and disconnects are the same."""
    pool = sim_pool(max_waiting=0)
    app, statuses = make_app(pool, spin_for_10_ms), []

    async def client(leaves: anyio.Event) -> None:
        statuses.append(status(await call(app, "/answer", pool=pool, leaves=leaves)))

    async def main() -> None:
        async with pool, anyio.create_task_group() as clients:
            leaves, stays = anyio.Event(), anyio.Event()
            clients.start_soon(client, leaves)
            await anyio.sleep(0.004)
            await client(stays)
            leaves.set()
            await until(lambda: pool.statistics().leases == 0)
            await client(stays)
            assert 0.020 < sim_gpu.time < 0.020 + SLACK

    sim_gpu.run(main, backend=backend)
    assert statuses == [429, 499, 200]


@pytest.mark.fault("A13")
@pytest.mark.parametrize("seed", range(5))
async def test_clients_that_leave_at_random(
    sim_gpu: SimGPU, sim_pool: SimPool, make_app: Any, seed: int
) -> None:
    """Of 60 clients that leave at random, each frees its SMs when its kernel ends."""
    pool, rng = sim_pool(max_waiting=60), random.Random(seed)

    async def endpoint(request: Request) -> Response:
        async with asgi.while_connected(request), request.state.pool.partition(16) as p:
            for _ in range(3):
                await p.launch(CONFIG, spin, rng.randrange(1, 20) * MS)
        return PlainTextResponse("done")

    async def client(app: ASGIApp) -> None:
        leaves = anyio.Event()
        await asyncio.sleep(rng.random() * 0.1)
        request = asyncio.create_task(call(app, "/answer", pool=pool, leaves=leaves))
        await asyncio.wait([request], timeout=rng.random() * 0.1)
        leaves.set()
        left = sim_gpu.time
        assert status(await request) in (200, 499)
        assert sim_gpu.time < left + SLACK

    async with serving(app := make_app(pool, endpoint)):
        await asyncio.gather(*(client(app) for _ in range(60)))
        last = sim_gpu.time
        async with pool.partition(ALL):  # all work has ended, and none was added
            ended = max((ran.end for ran in sim_gpu.launches()), default=last)
            assert sim_gpu.time < max(last, ended) + SLACK
            assert ended < last + 0.020


async def test_twice_the_capacity(sim_gpu: SimGPU, sim_pool: SimPool, make_app: Any) -> None:
    """At twice its capacity a service answers in twice the time at most, or says 429 at once.

    A fifth of the clients leave at random: their SMs are held while their kernel runs, and no more.
    """
    seconds, rng = 0.050, random.Random(1)
    at_once, number = 132 // 16, 800
    pool = sim_pool(max_waiting=at_once // 4)
    latencies: dict[int, list[float]] = {200: [], 429: [], 499: []}
    draining: list[tuple[float, int]] = []

    async def endpoint(request: Request) -> Response:
        async with asgi.while_connected(request), request.state.pool.partition(16) as p:
            await p.launch(CONFIG, spin, int(seconds * 1e9))
        return PlainTextResponse("done")

    async def client(app: ASGIApp) -> None:
        leaves, came = anyio.Event(), sim_gpu.time
        request = asyncio.create_task(call(app, "/answer", pool=pool, leaves=leaves))
        if rng.random() < 0.2:
            await asyncio.wait([request], timeout=rng.random() * 2 * seconds)
            leaves.set()
        latencies[status(await request)].append(sim_gpu.time - came)

    async def look() -> None:
        while True:
            draining.append((sim_gpu.time, pool.statistics().sms_draining))
            await asyncio.sleep(seconds / 20)

    async with serving(app := make_app(pool, endpoint)), asyncio.TaskGroup() as tasks:
        looking = asyncio.create_task(look())
        for _ in range(number):
            await asyncio.sleep(rng.expovariate(2 * at_once / seconds))
            tasks.create_task(client(app))
        await until(lambda: not pool.statistics().leases)
        looking.cancel()
    assert max(latencies[200]) < 2 * seconds
    assert max(latencies[429]) < SLACK
    assert min(map(len, latencies.values())) > 20
    ran = [(one.start, one.end) for one in sim_gpu.launches(spin)]
    assert any(sms for _, sms in draining)
    for when, sms in draining:
        assert sms <= 16 * sum(start <= when < end + SLACK for start, end in ran)


async def test_a_connected_client_is_not_disturbed(sim_pool: SimPool, make_app: Any) -> None:
    """The block's value and errors pass unchanged, and later code is not cancelled."""
    done: list[str] = []

    async def after() -> None:
        await asyncio.sleep(0.1)
        done.append("background")

    async def endpoint(request: Request) -> Response:
        given = await request.body()
        with pytest.raises(LookupError):
            async with asgi.while_connected(request):
                raise LookupError
        async with asgi.while_connected(request):
            result = await request.state.pool.run(cost(0.01)(len), given, sms=8)
        return PlainTextResponse(str(result), background=BackgroundTask(after))

    async with serving(make_app(sim_pool(), endpoint)) as client:
        assert (await client.post("/answer", content=b"12345")).text == "5"
    assert done == ["background"]


async def test_a_block_of_a_client_that_has_left(sim_pool: SimPool) -> None:
    """An earlier disconnect cancels the first wait; finished work is not undone."""
    leaves = anyio.Event()
    leaves.set()
    seen: list[str] = []

    async def endpoint(request: Request) -> Response:
        async with asgi.while_connected(request):
            seen.append("ended")
        with pytest.raises(ClientDisconnect):
            async with asgi.while_connected(request):
                await anyio.sleep_forever()
        with pytest.raises(asyncio.CancelledError):  # a cancellation of the task from elsewhere
            async with asgi.while_connected(request):
                raise asyncio.CancelledError
        return PlainTextResponse("")

    pool = sim_pool()
    async with serving(app := starlette_app(pool, endpoint)):
        await call(app, "/answer", pool=pool, leaves=leaves)
    assert seen == ["ended"]


# -- probes -----------------------------------------------------------------------------------


async def probes(client: httpx.AsyncClient) -> tuple[int, int]:
    """Return the answers of /healthz and /readyz."""
    healthz, readyz = [await client.get(path) for path in ("/healthz", "/readyz")]
    return healthz.status_code, readyz.status_code


@pytest.mark.fault("E2")
async def test_probes_follow_the_pool(sim_pool: SimPool, make_app: Any) -> None:
    """It is ready while it grants; a closing or closed pool is not ready, but healthy."""
    pool = sim_pool()
    async with serving(make_app(pool, spin_for_10_ms)) as client:
        assert await probes(client) == (200, 200)
        async with pool.partition(ALL) as p:
            p.launch(CONFIG, spin, 100 * MS)
            assert await probes(client) == (200, 200)  # busy is no reason either
            closing = asyncio.create_task(pool.aclose())
            await asyncio.sleep(0)
            assert await probes(client) == (200, 503)
        await closing
        assert await probes(client) == (200, 503)


@pytest.mark.fault("C2")
async def test_a_fault_of_a_job_is_seen_within_a_second(
    sim_gpu: SimGPU, sim_pool: SimPool, make_app: Any
) -> None:
    """A kernel that faults turns both probes red, even if its client left long ago."""
    leaves = anyio.Event()
    pool = sim_pool(faults=[Crash("spin")])
    async with serving(app := make_app(pool, spin_for_10_ms)) as client:
        request = asyncio.create_task(call(app, "/answer", pool=pool, leaves=leaves))
        await asyncio.sleep(0.005)
        leaves.set()
        await request
        assert await probes(client) == (200, 200)
        await asyncio.sleep(0.006)  # the kernel takes 10 ms, and faults then
        assert sim_gpu.time < 0.02
        assert await probes(client) == (503, 503)


@pytest.mark.parametrize("sms", [16, 132])
async def test_work_that_hangs_is_said_by_the_probes(
    sms: int, sim_gpu: SimGPU, sim_pool: SimPool, make_app: Any
) -> None:
    """Readiness reports lost SMs, and is red once all are lost; the job is answered."""

    async def endpoint(request: Request) -> Response:
        async with request.state.pool.partition(sms) as p:
            await p.launch(CONFIG, spin, MS)
        return PlainTextResponse("done")

    pool = sim_pool(faults=[Hang("spin")], hang_after=0.1, prepare=[spin])
    async with serving(make_app(pool, endpoint)) as client:
        response = await client.get("/answer")
        assert response.status_code == 503
        assert "spin on device 0 has not ended" in response.text
        assert await probes(client) == (200, 503 if sms == 132 else 200)
        detail = (await client.get("/readyz")).json()["detail"]
        assert ("; 1 hung" if sms == 16 else "has not ended") in detail


@pytest.mark.fault("E2")
async def test_a_gpu_that_dies_idle_is_seen(sim_gpu: SimGPU, make_app: Any) -> None:
    """A device that fails while idle turns both probes red at once."""
    driver = sim_gpu.open("h200x2")
    async with serving(make_app(Pool(driver=driver), spin_for_10_ms)) as client:
        assert await probes(client) == (200, 200)
        second = driver.devices[1]
        with driver.machine.timeline.lock:  # as another library's kernel would have it
            driver.machine.timeline.fail(second, from_status(700, "another kernel"))
        assert await probes(client) == (503, 503)
        assert "another kernel" in (await client.get("/readyz")).json()["detail"]


@pytest.mark.fault("I15")
async def test_a_driver_call_that_fails_is_no_lost_device(sim_gpu: SimGPU, make_app: Any) -> None:
    """A pool whose device answers wrongly is not ready, but healthy."""
    driver = sim_gpu.open("h200")
    async with serving(make_app(Pool(driver=driver), spin_for_10_ms)) as client:
        calls = driver.script.calls["create_event"]
        driver.script.add(Fail("create_event", calls + 1, "OUT_OF_MEMORY", last=calls + 2))
        assert await probes(client) == (200, 503)
        assert await probes(client) == (200, 200)


async def test_probes_of_a_pool_not_opened(sim_pool: SimPool) -> None:
    """A pool that is not open yet is healthy, and not ready."""
    app = Starlette(routes=asgi.routes(sim_pool()))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        assert await probes(client) == (200, 503)


# -- a test client ----------------------------------------------------------------------------


def test_a_test_client_is_on_virtual_time(
    sim_gpu: SimGPU, sim_pool: SimPool, make_app: Any
) -> None:
    """Starlette's TestClient starts and stops it on virtual time, with `sim_gpu`'s options."""

    async def endpoint(request: Request) -> Response:
        await asyncio.sleep(1000)
        return await spin_for_10_ms(request)

    app = make_app(sim_pool(), endpoint)
    with TestClient(app, backend_options=sim_gpu.backend_options) as client:
        assert client.get("/answer").text == "done"
        assert client.get("/readyz").status_code == 200
    assert sim_gpu.time > 1000
