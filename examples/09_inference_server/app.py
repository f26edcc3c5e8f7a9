"""Serve a language model: POST {"prompt": [1, 2, 3], "tokens": 8} to /generate; tokens stream.

python examples/09_inference_server/app.py [port] [--model NAME], and then, for example:
curl -N -d '{"prompt": [1, 2, 3], "tokens": 8}' localhost:8000/generate

Reading a prompt (prefill) fills a GPU for tens of milliseconds. One more token for every sequence
(a decode step) is short, and every client waits for it. Three ways to serve both:

--partitions   each has its own SMs, by leases whose sizes follow the load (the default)
--streams      each has a stream, on all SMs
--chunked 256  prompts are read in chunks, each in one pass with a decode step

The model is a Llama 3 of 8 billion random weights, or a causal language model of Hugging Face
(--model qwen3, or a folder with weights; needs transformers). Without a GPU: set
GREENSCHED_DRIVER=simulated:h200, and a small model in numpy takes the time of the large one.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import small
import uvicorn
from engine import (
    Engine,
    Place,
    Sequence,
    fused,
    leased,
    prepare,
    separate,
    sized,
    sized_classes,
)
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from greensched import ALL, Device, Pool, ServiceClass, driver
from greensched.driver.simulated import SimulatedDriver
from greensched.integrations import asgi

MAX_WAITING = 64  # prompts; further ones are refused with 429


class Server:
    """A model, the pool on whose SMs it runs, and the way it is served.

    Args:
        pool_driver: CUDA, or a simulated driver.
        options: of the command line.
    """

    def __init__(self, pool_driver: Any, options: argparse.Namespace) -> None:
        self.device = Device(0, driver=pool_driver)
        self._is_simulated = isinstance(pool_driver, SimulatedDriver)
        self._options = options
        self._sms = options.decode_sms or quarter(self.device.sm_count)
        if options.streams or options.chunked:
            classes = [ServiceClass(name, shared=True) for name in ("decode", "prefill")]
        else:
            check(self._sms, self.device.sm_count)
            classes = sized_classes(self._sms, self.device.sm_count)
        self.pool = Pool([0], driver=pool_driver, services=classes)

    def load(self) -> Any:
        """Return the model; it takes seconds."""
        if self._is_simulated:
            return small.Small()
        from model import load  # it imports torch

        return load(self._options.model)

    async def serve(self, model: Any, engine: Engine, ready: asyncio.Event) -> None:
        """Capture the graphs, then serve the engine until cancelled."""
        if self._options.chunked:
            graphs = functools.partial(model.fused_graphs, self._options.chunked)
            place = leased(self.pool, "decode", graphs, lambda: ALL)
            await enter(place)
            ready.set()
            await fused(engine, place, self._options.chunked)
        elif self._options.streams:
            places = [
                leased(self.pool, "decode", model.decode_graphs, lambda: ALL),
                leased(self.pool, "prefill", model.prefill_graphs, lambda: ALL),
            ]
            await enter(*places)
            ready.set()
            await separate(engine, *places)
        else:
            sizes = self._sms, self.device.sm_count
            await prepare(self.pool, model)
            ready.set()
            await separate(engine, *sized(self.pool, model, engine, *sizes))


async def enter(*places: Place) -> None:
    """Enter places one after another, which captures their graphs."""
    for place in places:
        async with place():
            pass


def quarter(sms: int) -> int:
    """Return a quarter of a GPU, in multiples of 8 SMs."""
    return max(8, sms // 32 * 8)


def check(sms: int, total: int) -> None:
    """Exit if a decode step and a prompt cannot have `sms` SMs and the others at the same time.

    Raises:
        SystemExit: The message says which numbers are possible.
    """
    possible = range(8, total - 7, 8)  # a split has groups of 8 SMs
    if sms not in possible:
        raise SystemExit(
            f"--decode-sms {sms}: this GPU has {total} SMs: give a multiple of 8 from "
            f"{possible[0]} to {possible[-1]}"
        )


class Tokens(StreamingResponse):
    """A sequence as server-sent events. When the response ends, the sequence ends."""

    def __init__(self, first: int | None, sequence: Sequence) -> None:
        self._sequence = sequence
        super().__init__(self._events(first), media_type="text/event-stream")

    async def _events(self, token: int | Exception | None) -> AsyncIterator[str]:
        while token is not None:
            if isinstance(token, Exception):
                raise token
            yield f'data: {{"token": {token}}}\n\n'
            token = await self._sequence.news.get()
        yield "data: [DONE]\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._sequence.cancel()


async def generate(request: Request) -> Response:
    engine: Engine = request.state.engine
    sequence = parse(await request.body(), engine)
    engine.submit(sequence)
    try:
        async with asgi.while_connected(request):
            first = await sequence.news.get()
    except BaseException:
        sequence.cancel()
        raise
    if isinstance(first, Exception):
        raise first
    return Tokens(first, sequence)


def parse(body: bytes, engine: Engine) -> Sequence:
    """Return the sequence that a request asks for.

    Raises:
        HTTPException: 400: the body is not a valid request.
    """
    shape = engine.shape
    try:
        asked = json.loads(body)
        prompt, tokens = asked["prompt"], asked["tokens"]
        temperature = float(asked.get("temperature", 0))
        right = bool(prompt) and all(0 <= token < shape.vocabulary for token in prompt)
        right = right and 0 < tokens <= shape.context - len(prompt) and 0 <= temperature <= 100
    except (ValueError, KeyError, TypeError, AttributeError):
        right = False
    if not right:
        raise HTTPException(
            400,
            f"give a prompt of tokens below {shape.vocabulary}, and a number of tokens: together "
            f"at most {shape.context}",
        )
    return Sequence(prompt, tokens, temperature)


def service(options: argparse.Namespace) -> Starlette:
    """Create the application with its pool and model."""
    server = Server(driver.open(), options)  # CUDA, or what GREENSCHED_DRIVER names

    async def about(_: Request) -> Response:
        return JSONResponse({"device": server.device.name, "sms": server.device.sm_count})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with asgi.lifespan(server.pool)(app) as state:
            model = await asyncio.to_thread(server.load)
            gc.freeze()  # a collection of all that was loaded would delay tokens by 20 ms
            engine, ready = Engine(model.shape, MAX_WAITING), asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(
                    guarded(server.serve(model, engine, ready), engine, ready)
                )
                await ready.wait()
                yield {**state, "engine": engine}
                serving.cancel()

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/about", about),
        *asgi.routes(server.pool),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.add_middleware(asgi.PoolErrors)
    return app


async def guarded(serving: Coroutine[Any, Any, None], engine: Engine, ready: asyncio.Event) -> None:
    """Serve; if that fails, tell the clients why: they get 503 where the pool is the reason.

    If it fails before there are clients, the server does not start.
    """
    try:
        await serving
    except Exception as error:
        engine.fail(error)
        if not ready.is_set():
            raise


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser()
    made.add_argument("port", type=int, nargs="?", default=8000)
    made.add_argument("--model", help="a folder, or a name of Hugging Face; default: Llama 3 8B")
    ways = made.add_mutually_exclusive_group()
    ways.add_argument("--partitions", action="store_true", help="own SMs for each; the default")
    ways.add_argument("--streams", action="store_true", help="a stream for each, on all SMs")
    ways.add_argument(
        "--chunked", type=positive, metavar="TOKENS", help="one pass for both, of this size"
    )
    made.add_argument(
        "--decode-sms", type=positive, metavar="SMS", help="of a decode step beside a prompt"
    )
    return made


def positive(text: str) -> int:
    """Return a number of at least 1, of an argument of the command line."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    options = parser().parse_args()
    uvicorn.run(service(options), port=options.port, log_level="info", access_log=False)
