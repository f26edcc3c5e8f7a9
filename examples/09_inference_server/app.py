"""Serve a transformer: POST {"prompt": [1, 2, 3], "tokens": 8} to /generate; tokens are streamed.

python examples/09_inference_server/app.py [port] [--streams], and then, for example:
curl -N -d '{"prompt": [1, 2, 3], "tokens": 8}' localhost:8000/generate

Prefill (reading a prompt) fills a GPU for tens of milliseconds. Decode (one more token for every
sequence) is short, and every client waits for it. They are two service classes, each with its own
SMs. With --streams all work runs on all SMs, on plain streams; compare.py compares the two.

Without a GPU: set GREENSCHED_DRIVER=simulated:h200.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import uvicorn
from model import Transformer, load
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from greensched import Device, Pool, ServiceClass, driver
from greensched.driver.simulated import SimulatedDriver
from greensched.integrations import asgi

MAX_WAITING = 16  # prompts; further ones are refused at once


def classes(sms: int, *, streams: bool) -> list[ServiceClass]:
    """Return the classes that share these SMs; either way prompts are read one at a time."""
    if streams:
        return [
            ServiceClass("decode", shared=True),
            ServiceClass("prefill", shared=True, cap=sms, max_waiting=MAX_WAITING),
        ]
    return [
        ServiceClass("decode", reserve=quarter(sms), priority=1),
        ServiceClass("prefill", max_waiting=MAX_WAITING),
    ]


def quarter(sms: int) -> int:
    """Return a quarter of a GPU, in multiples of 8 SMs."""
    return max(8, sms // 32 * 8)


class Sequence:
    """The tokens of one client: the newest, and those not sent yet."""

    def __init__(self, slot: int, first: int, place: int, left: int) -> None:
        self.slot = slot
        #: The newest token, its position, and how many more tokens are requested.
        self.token, self.place, self.left = first, place, left
        #: Tokens to send; None: there are no more; an error: why there are no more.
        self.news: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.give(first)

    def give(self, token: int) -> None:
        self.token, self.left = token, self.left - 1
        self.news.put_nowait(token)
        if not self.left:
            self.news.put_nowait(None)


class Engine:
    """Assign slots of the model's cache to sequences, and run the loop that extends all of them."""

    def __init__(self, pool: Pool, model: Transformer, sms: int) -> None:
        self._pool, self._model = pool, model
        self._decode_sms, self._prefill_sms = quarter(sms), (quarter(sms), sms)
        self._free = list(range(model.shape.slots))
        self._active: list[Sequence] = []
        self._is_wanted = asyncio.Event()

    async def begin(self, prompt: list[int], tokens: int) -> Sequence:
        """Read a prompt and return its sequence, which grows until `left` is 0.

        Raises:
            HTTPException: 429, no slot is free.
            QueueFull: too many prompts wait.
        """
        if not self._free:
            raise HTTPException(429, "every slot is taken", headers={"Retry-After": "1"})
        slot = self._free.pop()
        try:
            async with self._pool.partition(self._prefill_sms, service="prefill") as p:
                job = p.run(self._model.prefill, slot, prompt)
                with anyio.CancelScope(shield=True):  # the slot stays assigned while the job runs
                    first = await job
        except BaseException:
            self._free.append(slot)
            raise
        sequence = Sequence(slot, first, len(prompt), tokens)
        self._active.append(sequence)
        self._is_wanted.set()
        return sequence

    async def decode(self) -> None:
        """Extend every sequence by one token, repeatedly; free the slots of ended ones."""
        try:
            while True:
                for sequence in [s for s in self._active if s.left <= 0]:
                    self._active.remove(sequence)
                    self._free.append(sequence.slot)
                growing = list(self._active)
                if not growing:
                    self._is_wanted.clear()
                    await self._is_wanted.wait()
                    continue
                await self._step(growing)
        except Exception as error:
            for sequence in self._active:
                sequence.news.put_nowait(error)
            raise

    async def _step(self, growing: list[Sequence]) -> None:
        newest = {s.slot: (s.token, s.place) for s in growing}
        async with self._pool.partition(self._decode_sms, service="decode") as p:
            tokens = await p.run(self._model.step, newest)
        for sequence, token in zip(growing, tokens, strict=True):
            sequence.place += 1
            if sequence.left > 0:  # its client is still connected
                sequence.give(token)


class Tokens(StreamingResponse):
    """A sequence as server-sent events. When the response ends, the sequence ends."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        super().__init__(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        while (token := await self._sequence.news.get()) is not None:
            if isinstance(token, Exception):
                raise token
            yield f'data: {{"token": {token}}}\n\n'
        yield "data: [DONE]\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._sequence.left = 0


async def generate(request: Request) -> Response:
    engine, shape = request.state.engine, request.state.model.shape
    try:
        asked = await request.json()
        prompt, tokens = asked["prompt"], asked["tokens"]
        right = bool(prompt) and all(0 <= token < shape.vocabulary for token in prompt)
        right = right and 0 < tokens <= shape.context - len(prompt)
    except (ValueError, KeyError, TypeError):
        right = False
    if not right:
        raise HTTPException(400, f"give a prompt of tokens and a number of tokens that fit {shape}")
    async with asgi.while_connected(request):
        sequence = await engine.begin(prompt, tokens)
    return Tokens(sequence)


def service(*, streams: bool) -> Starlette:
    """Create the application with its pool and model."""
    chosen = driver.open()  # CUDA, or what GREENSCHED_DRIVER names
    device = Device(0, driver=chosen)
    sms = device.sm_count
    pool = Pool([0], driver=chosen, services=classes(sms, streams=streams))

    async def about(_: Request) -> Response:
        return JSONResponse({"device": device.name, "sms": sms})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with asgi.lifespan(pool)(app) as state, anyio.create_task_group() as tasks:
            model = load(is_simulated=isinstance(chosen, SimulatedDriver))
            engine = Engine(pool, model, sms)
            tasks.start_soon(engine.decode)
            yield {**state, "engine": engine, "model": model}
            tasks.cancel_scope.cancel()

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/about", about),
        *asgi.routes(pool),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.add_middleware(asgi.PoolErrors)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int, nargs="?", default=8000)
    parser.add_argument("--streams", action="store_true", help="use plain streams, no partitions")
    options = parser.parse_args()
    uvicorn.run(
        service(streams=options.streams), port=options.port, log_level="info", access_log=False
    )
