"""Bodies, streams, websockets, mounted applications and SIGTERM, at the ASGI interface.

A sleep here moves the simulated device's clock, and takes no time.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.types import ASGIApp, Message
from starlette.websockets import WebSocket

import greensched
from greensched import ALL, LaunchConfig, Partition, Pool
from greensched.integrations import asgi
from greensched.integrations.asgi.connection import MAX_KEPT
from greensched.integrations.testing import SimGPU, SimPool
from greensched.kernels import spin
from helpers.asgi import call
from helpers.waiting import until

MS = 1_000_000
CONFIG = LaunchConfig(grid=16, block=32)
SLACK = 0.001


def body_of(sent: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


def service(pool: Pool, endpoint: Any, path: str = "/", **options: Any) -> Starlette:
    route = Route(path, endpoint, methods=["POST"])
    app = Starlette(routes=[route, *asgi.routes(pool)], **options)
    app.add_middleware(asgi.PoolErrors)
    return app


# -- bodies -----------------------------------------------------------------------------------


WHOLE = bytes(range(256)) * 800
PARTS = [WHOLE[start : start + 50_000] for start in range(0, len(WHOLE), 50_000)]
BODY = [
    {"type": "http.request", "body": part, "more_body": part is not PARTS[-1]} for part in PARTS
]


@pytest.mark.parametrize("read", ["in the block", "behind the block", "streamed", "around blocks"])
async def test_no_byte_of_a_body_is_lost(sim_pool: SimPool, read: str) -> None:
    """A body of which the block reads parts early reaches the endpoint whole and in order."""

    async def endpoint(request: Request) -> Response:
        body = b""
        if read == "around blocks":
            async for part in request.stream():
                async with asgi.while_connected(request), asgi.while_connected(request):
                    await asyncio.sleep(0.0025)
                body += part
            return Response(body)
        async with asgi.while_connected(request):
            await asyncio.sleep(0.0025)  # two parts have come
            if read == "in the block":
                body = await request.body()
            elif read == "streamed":
                body = b"".join([part async for part in request.stream()])
            await asyncio.sleep(0.01)
        return Response(body or await request.body())

    async with sim_pool() as pool:
        sent = await call(service(pool, endpoint), messages=BODY, every=0.001)
        assert body_of(sent) == WHOLE


async def test_a_body_does_not_fill_the_memory(sim_gpu: SimGPU) -> None:
    """Reading pauses while more than its limit is unread, and then goes on."""
    read, read_early = 0, 0

    async def receive() -> Message:
        nonlocal read
        await asyncio.sleep(0.001)
        read += 1
        part = {"type": "http.request", "body": bytes(MAX_KEPT // 4), "more_body": True}
        return part if read <= 100 else {"type": "http.disconnect"}

    request = Request({"type": "http", "headers": []}, receive)
    with pytest.raises(ClientDisconnect):
        async with asgi.while_connected(request):
            await asyncio.sleep(0.1)
            read_early = read
            while True:
                await request.receive()
    assert (read_early, read) == (5, 101)


# -- streams ----------------------------------------------------------------------------------


async def three_parts(p: Partition) -> AsyncGenerator[bytes]:
    for _ in range(3):
        await p.launch(CONFIG, spin, 10 * MS)
        yield b"part "


async def test_a_stream_has_its_lease_before_its_headers(sim_pool: SimPool) -> None:
    """Eight streams of 16 SMs are served, and all others get 429 instead of a broken 200."""
    async with sim_pool(max_waiting=0) as pool:

        async def endpoint(request: Request) -> Response:
            return asgi.LeaseStream(pool.partition(16), three_parts)

        app = service(pool, endpoint)
        answers = await asyncio.gather(*(call(app) for _ in range(14)))
        served = [sent for sent in answers if sent[0]["status"] == 200]
        assert [body_of(sent) for sent in served] == [b"part part part "] * 8
        assert sorted(sent[0]["status"] for sent in answers)[8:] == [429] * 6
        assert pool.statistics().leases == 0


async def test_a_slow_reader_holds_its_sms_no_longer_than_the_patience(
    sim_gpu: SimGPU, sim_pool: SimPool, caplog: pytest.LogCaptureFixture
) -> None:
    """After the patience its lease ends, and only the buffered bytes are sent."""
    reads = anyio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await reads.wait()

    async def endless(p: Partition) -> AsyncGenerator[bytes]:
        while True:
            await p.launch(CONFIG, spin, 1 * MS)
            yield b"x" * 100

    async with sim_pool() as pool:

        async def endpoint(request: Request) -> Response:
            return asgi.LeaseStream(pool.partition(16), endless, buffer=1000, patience=0.05)

        request = asyncio.create_task(call(service(pool, endpoint), send=send))
        await until(lambda: pool.statistics().leases == 1)
        await until(lambda: pool.statistics().leases == 0)
        assert 0.05 < sim_gpu.time < 0.1
        reads.set()
        sent = await request
    assert len(body_of(sent)) == 1100
    assert all(message["more_body"] for message in sent[1:])
    assert "the lease of 16 SMs ends, and the stream is cut" in caplog.text


@pytest.mark.parametrize(("driver", "served", "free"), [("h200@13.0", 8, 0), ("h200@13.1", 7, 12)])
async def test_slow_readers_leave_the_sms_that_the_statistics_say(
    sim_gpu: SimGPU, driver: str, served: int, free: int
) -> None:
    """Nine readers on 132 SMs: what is said to be free is granted, and one SM more is 504.

    From 13.1 on, 8 and 12 SMs are left behind seven leases of 16, and fit into no partition.
    """
    reads = anyio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await reads.wait()

    async def parts(p: Partition) -> AsyncGenerator[bytes]:
        while not reads.is_set():
            await p.launch(CONFIG, spin, 1 * MS)
            yield b"x"

    async with Pool(driver=sim_gpu.open(driver)) as pool:

        async def stream(request: Request) -> Response:
            return asgi.LeaseStream(pool.partition(16), parts, buffer=1, patience=5)

        async def take(request: Request) -> Response:
            async with pool.partition(int(request.path_params["sms"]), deadline=0.01):
                return Response()

        readers = service(pool, stream)
        takers = service(pool, take, "/{sms}")
        tasks = [asyncio.create_task(call(readers, send=send)) for _ in range(9)]
        await until(lambda: pool.statistics().leases == served)
        s = pool.statistics()
        assert (s.waiting, s.sms_free) == (9 - served, free)
        if free:
            assert (await call(takers, f"/{free}"))[0]["status"] == 200
        assert (await call(takers, f"/{free + 1}"))[0]["status"] == 504
        reads.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("how", ["it is told", "sending fails"])
async def test_a_reader_that_leaves_frees_its_sms(
    sim_gpu: SimGPU, sim_pool: SimPool, how: str
) -> None:
    """A stream whose client leaves ends at once, and its SMs are free after the kernel."""
    leaves = anyio.Event()
    closed: list[str] = []

    async def send(message: Message) -> None:
        if how == "sending fails" and message["type"] == "http.response.body":
            raise OSError("gone")

    async def parts(p: Partition) -> AsyncGenerator[bytes]:
        try:
            async for part in three_parts(p):
                yield part
        finally:
            closed.append("generator")

    async with sim_pool() as pool:

        async def endpoint(request: Request) -> Response:
            return asgi.LeaseStream(pool.partition(16), parts)

        request = asyncio.create_task(call(service(pool, endpoint), leaves=leaves, send=send))
        await asyncio.sleep(0.015)
        leaves.set()
        await request
        assert sim_gpu.time < 0.015 + 2 * SLACK
        assert closed == ["generator"]
        async with pool.partition(ALL):
            assert sim_gpu.time < 0.021 + 2 * SLACK


async def test_an_error_of_a_generator_is_raised_as_it_is(sim_pool: SimPool) -> None:
    """A generator's error is not in a group, and its response is cut off."""

    async def fails(p: Partition) -> AsyncGenerator[str]:
        yield "begun"
        await asyncio.sleep(0.01)
        raise LookupError

    async with sim_pool() as pool:

        async def endpoint(request: Request) -> Response:
            return asgi.LeaseStream(pool.partition(16), fails)

        with pytest.raises(LookupError):
            await call(service(pool, endpoint))


@pytest.mark.parametrize(
    ("error", "status"),
    [(greensched.QueueFull(3, 0.2), 429), (greensched.PoolLost("f/0", "x"), 503)],
)
async def test_an_error_before_the_first_bytes_has_its_own_status(
    sim_pool: SimPool, error: Exception, status: int
) -> None:
    """No bytes have been sent, so the client gets the error's status and no 200."""

    async def fails(p: Partition) -> AsyncGenerator[bytes]:
        await asyncio.sleep(0.01)
        yield b""
        raise error

    async with sim_pool() as pool:

        async def endpoint(request: Request) -> Response:
            return asgi.LeaseStream(pool.partition(16), fails)

        sent = await call(service(pool, endpoint))
        assert [message["status"] for message in sent if "status" in message] == [status]


async def test_a_stream_of_nothing_is_a_whole_response(sim_pool: SimPool) -> None:
    """An empty stream sends its headers at its end."""

    async def nothing(p: Partition) -> AsyncGenerator[bytes]:
        return
        yield

    async with sim_pool() as pool:

        async def endpoint(request: Request) -> Response:
            return asgi.LeaseStream(pool.partition(16), nothing)

        sent = await call(service(pool, endpoint))
    assert (sent[0]["status"], sent[-1]["more_body"], body_of(sent)) == (200, False, b"")


@pytest.mark.parametrize("options", [{"buffer": 0}, {"patience": -1}, {"patience": float("nan")}])
async def test_bounds_of_a_stream_are_checked(sim_pool: SimPool, options: Any) -> None:
    """An invalid limit is refused before anything is queued."""
    async with sim_pool() as pool:
        with pytest.raises(greensched.InvalidRequest, match="buffer="):
            asgi.LeaseStream(pool.partition(16), three_parts, **options)
        socket = WebSocket({"type": "websocket"}, anyio.sleep_forever, anyio.sleep)
        with pytest.raises(greensched.InvalidRequest, match="buffer="):
            await asgi.stream_to_websocket(socket, pool.partition(16), three_parts, **options)
        assert pool.statistics().requested == 0


# -- refusals ---------------------------------------------------------------------------------


async def refuses(_: object) -> Response:
    raise greensched.QueueFull(3, 1.0)


@pytest.mark.parametrize("kind", [Starlette, FastAPI])
async def test_a_mounted_application_is_covered(sim_pool: SimPool, kind: Any) -> None:
    """A refusal in a mounted application is 429; other errors are 500."""

    async def fails(_: object) -> Response:
        raise LookupError

    inner = kind()
    inner.add_route("/refuses", refuses, methods=["POST"])
    inner.add_route("/fails", fails, methods=["POST"])
    outer = Starlette(routes=[Mount("/inner", inner)])
    outer.add_middleware(asgi.PoolErrors)
    sent = await call(outer, "/inner/refuses")
    assert [message.get("status") for message in sent] == [429, None]
    sent.clear()
    with pytest.raises(LookupError):
        await call(outer, "/inner/fails", send=record_into(sent))
    assert [message.get("status") for message in sent] == [500, None]


def record_into(sent: list[Message]) -> Callable[[Message], Any]:
    async def send(message: Message) -> None:
        sent.append(message)

    return send


@pytest.mark.parametrize("parts", [["broken"], ["bro", "", "ken"]])
async def test_an_answer_of_500_is_sent(sim_pool: SimPool, parts: list[str]) -> None:
    """An application's own 500 reaches the client, also in parts."""

    async def generate() -> AsyncGenerator[str]:
        for part in parts:
            yield part

    async def endpoint(_: Request) -> Response:
        return StreamingResponse(generate(), 500) if parts[1:] else PlainTextResponse(parts[0], 500)

    async with sim_pool() as pool:
        sent = await call(service(pool, endpoint))
    assert (sent[0]["status"], body_of(sent)) == (500, b"broken")


async def test_a_refused_background_task_is_logged(
    sim_pool: SimPool, caplog: pytest.LogCaptureFixture
) -> None:
    """After the response, the refusal is logged as a warning, counted and raised."""
    async with sim_pool(max_waiting=0) as pool:

        async def later() -> None:
            async with pool.partition(ALL):
                pass

        async def endpoint(_: Request) -> Response:
            return PlainTextResponse("done", background=BackgroundTask(later))

        async with pool.partition(ALL):
            task = asyncio.create_task(call(service(pool, endpoint)))
            with pytest.raises(greensched.QueueFull):
                await task
        assert pool.statistics().refused == 1
    assert caplog.record_tuples[-1][1] == logging.WARNING
    assert "after its response" in caplog.text


# -- websockets -------------------------------------------------------------------------------

CONNECT = {"type": "websocket.connect"}


def websockets(endpoint: Any) -> ASGIApp:
    app = Starlette(routes=[WebSocketRoute("/", endpoint)])
    app.add_middleware(asgi.PoolErrors)
    return app


@pytest.mark.parametrize("is_accepted", [False, True])
async def test_a_refused_websocket_is_closed_with_1013(sim_gpu: SimGPU, is_accepted: bool) -> None:
    """A refused websocket is closed with "try again later", accepted or not."""

    async def endpoint(websocket: WebSocket) -> None:
        if is_accepted:
            await websocket.accept()
        await refuses(websocket)

    sent = await call(websockets(endpoint), messages=[CONNECT])
    assert (sent[-1]["type"], sent[-1]["code"]) == ("websocket.close", 1013)
    assert "3 requests are waiting" in sent[-1]["reason"]
    assert len(sent) == 1 + is_accepted


async def test_a_websocket_that_leaves_frees_its_sms(sim_gpu: SimGPU, sim_pool: SimPool) -> None:
    """A websocket that does not receive ends when its client leaves."""
    got: list[str] = []
    leaves = anyio.Event()
    async with sim_pool() as pool:

        async def endpoint(websocket: WebSocket) -> None:
            await websocket.accept()
            async with asgi.while_connected(websocket), pool.partition(ALL):
                await asyncio.sleep(0.01)
                got.append(await websocket.receive_text())
                await anyio.sleep_forever()

        messages = [CONNECT, {"type": "websocket.receive", "text": "first"}]
        app = websockets(endpoint)
        task = asyncio.create_task(call(app, messages=messages, leaves=leaves))
        await until(lambda: bool(got))
        leaves.set()
        await task
        assert pool.statistics().leases == 0
    assert got == ["first"]


async def test_a_slow_websocket_holds_its_sms_no_longer_than_the_patience(
    sim_gpu: SimGPU, sim_pool: SimPool
) -> None:
    """After the patience its lease ends; the buffered messages and 1013 are sent when it reads."""
    reads = anyio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "websocket.send":
            await reads.wait()

    async def endless(p: Partition) -> AsyncGenerator[bytes | str]:
        while True:
            await p.launch(CONFIG, spin, 1 * MS)
            yield b"x" * 100
            yield "\N{GREEK SMALL LETTER MU}" * 50

    async with sim_pool() as pool:

        async def endpoint(websocket: WebSocket) -> None:
            await websocket.accept()
            await asgi.stream_to_websocket(
                websocket, pool.partition(16), endless, buffer=1000, patience=0.05
            )

        task = asyncio.create_task(call(websockets(endpoint), messages=[CONNECT], send=send))
        await until(lambda: pool.statistics().leases == 1)
        await until(lambda: pool.statistics().leases == 0)
        assert 0.05 < sim_gpu.time < 0.1
        reads.set()
        accepted, *messages, closed = await task
    assert accepted["type"] == "websocket.accept"
    assert [len(each.get("bytes") or each["text"].encode()) for each in messages] == [100] * 11
    assert (closed["type"], closed["code"]) == ("websocket.close", 1013)


async def test_a_stream_to_a_websocket_is_whole_or_refused(
    sim_gpu: SimGPU, sim_pool: SimPool
) -> None:
    """Each part is a message; a request that the pool refuses is closed with 1013."""
    async with sim_pool(sms=16, max_waiting=0) as pool:

        async def endpoint(websocket: WebSocket) -> None:
            await websocket.accept()
            await asgi.stream_to_websocket(websocket, pool.partition(16), three_parts)
            await websocket.close()

        app = websockets(endpoint)
        sent, refused = await asyncio.gather(*(call(app, messages=[CONNECT]) for _ in range(2)))
    assert [each["type"] for each in sent] == [
        "websocket.accept", *["websocket.send"] * 3, "websocket.close"
    ]  # fmt: skip
    assert [each.get("code") for each in refused] == [None, 1013]


@pytest.mark.parametrize("how", ["it is told", "sending fails"])
async def test_a_websocket_that_leaves_its_stream_frees_its_sms(
    sim_gpu: SimGPU, sim_pool: SimPool, how: str
) -> None:
    """The generator is cancelled, and the connection ends without an error."""
    leaves = anyio.Event()

    async def send(message: Message) -> None:
        if how == "sending fails" and message["type"] == "websocket.send":
            raise OSError("gone")

    async def endless(p: Partition) -> AsyncGenerator[str]:
        while True:
            yield "x"
            await asyncio.sleep(0.01)

    async with sim_pool() as pool:

        async def endpoint(websocket: WebSocket) -> None:
            await websocket.accept()
            await asgi.stream_to_websocket(websocket, pool.partition(ALL), endless)

        app = websockets(endpoint)
        task = asyncio.create_task(call(app, messages=[CONNECT], leaves=leaves, send=send))
        await asyncio.sleep(0.015)
        leaves.set()
        await task
        assert sim_gpu.time < 0.02
        assert pool.statistics().leases == 0


async def test_an_error_of_a_websocket_is_raised(sim_gpu: SimGPU) -> None:
    """Other errors reach the server, and so does a refusal after a close."""

    async def fails(websocket: WebSocket) -> None:
        raise LookupError

    async def closes(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()
        await refuses(websocket)

    for endpoint, error in ((fails, LookupError), (closes, greensched.QueueFull)):
        with pytest.raises(error):
            await call(websockets(endpoint), messages=[CONNECT])


# -- SIGTERM ----------------------------------------------------------------------------------


@pytest.mark.fault("D10", "E3")
@pytest.mark.parametrize("signals", [1, 2])
async def test_sigterm_turns_readiness_red_first(
    sim_gpu: SimGPU, sim_pool: SimPool, signals: int
) -> None:
    """Requests are served during the drain period; then the server's handler runs once."""
    told: list[float] = []
    former = signal.signal(signal.SIGTERM, lambda *_: told.append(sim_gpu.time))
    try:
        pool = sim_pool()

        async def endpoint(_: Request) -> Response:
            return PlainTextResponse("served")

        app = service(pool, endpoint)
        transport = httpx.ASGITransport(app)
        async with (
            asgi.lifespan(pool, drain=10)(app),
            httpx.AsyncClient(transport=transport, base_url="http://here") as client,
        ):
            assert (await client.get("/readyz")).status_code == 200
            for _ in range(signals):
                signal.raise_signal(signal.SIGTERM)
                for _ in range(50):
                    await asyncio.sleep(0)
            if signals == 1:
                assert (await client.get("/readyz")).status_code == 503
                assert (await client.get("/healthz")).status_code == 200
                assert (await client.post("/")).text == "served"
                assert not told
                await asyncio.sleep(10.1)
            assert len(told) == 1
            assert told[0] == pytest.approx(10 if signals == 1 else 0, abs=0.1)
        assert signal.getsignal(signal.SIGTERM) is not former
    finally:
        signal.signal(signal.SIGTERM, former)


@pytest.mark.parametrize("drain", [-1, float("nan")])
async def test_a_drain_period_is_checked(sim_pool: SimPool, drain: float) -> None:
    """The lifespan refuses an invalid drain period."""
    with pytest.raises(greensched.InvalidRequest, match="drain="):
        asgi.lifespan(sim_pool(), drain=drain)
