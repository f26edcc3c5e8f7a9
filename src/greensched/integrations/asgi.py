"""A pool in an ASGI service, Starlette's or FastAPI's. Needs the extra `asgi`.

    app = FastAPI(lifespan=asgi.lifespan(pool))
    app.add_middleware(asgi.PoolErrors)
    app.router.routes.extend(asgi.routes(pool))

and in an endpoint, around its work on the GPU, `async with asgi.while_connected(request):`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from greensched import Pool
from greensched.errors import (
    DeadlineExceeded,
    DeadlineImpossible,
    DeviceFault,
    DeviceLost,
    ForkedPool,
    NoPool,
    PoolClosed,
    PoolLost,
    QueueFull,
)
from greensched.integrations.health import fault_of

#: The response statuses of a pool's errors; all others are 500. Source of 499, which no client
#: receives: nginx uses it in its log.
STATUS: dict[type[Exception], int] = {
    QueueFull: 429,
    PoolClosed: 503,
    ForkedPool: 503,
    DeviceLost: 503,
    DeviceFault: 503,
    DeadlineImpossible: 503,
    PoolLost: 503,
    NoPool: 503,
    DeadlineExceeded: 504,
    ClientDisconnect: 499,
}


def lifespan(pool: Pool) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Pool]]]:
    """Open and close the pool with `Starlette(lifespan=...)` or `FastAPI(lifespan=...)`.

    Requests have the pool as `request.state.pool`. A server that stops finishes accepted requests
    first; leases that last longer may end within the pool's grace (`Pool.aclose`, 5 s).

    A pool opens once, so an application that starts again needs another. In a lifespan of your own,
    enter this one: `async with asgi.lifespan(pool)(app) as state: ...`.

    At the start of the server it raises as `Pool.open`.
    """

    @asynccontextmanager
    async def run(_: Any) -> AsyncGenerator[dict[str, Pool]]:
        async with pool:
            yield {"pool": pool}

    return run


# -- refusals ---------------------------------------------------------------------------------


class PoolErrors:
    """Middleware that turns a pool's errors into the responses of `STATUS`, as `{"detail": ...}`.

    A full queue is 429 with `Retry-After`: the pool's estimate in whole seconds, rounded up. A
    request that would miss its deadline is 503 with `Retry-After`: by how much it would. Errors
    that `STATUS` does not list, and errors after the response has begun, are raised on. An
    exception group (for example of an `asyncio.TaskGroup`) gets a response if all its errors are
    listed. It handles HTTP only: websocket endpoints handle errors themselves.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_and_record(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send_and_record)
        except Exception as error:
            response = None if has_begun else _response(error)
            if response is None:
                raise
        else:
            return
        await response(scope, receive, send)


def _response(error: Exception) -> Response | None:
    """Return the response to an error, or None if `STATUS` does not list it."""
    refusals = [(one, _status(one)) for one in _leaves(error)]
    if any(status is None for _, status in refusals):
        return None
    refusal, status = refusals[0]
    headers = {}
    if isinstance(refusal, QueueFull):
        headers["Retry-After"] = seconds = _whole_seconds(refusal.retry_after)
        refusal = QueueFull(refusal.waiting, int(seconds))  # the body says what the header does
    elif isinstance(refusal, DeadlineImpossible):
        headers["Retry-After"] = _whole_seconds(refusal.predicted - refusal.deadline)
    return JSONResponse({"detail": str(refusal)}, status or 500, headers)


def _whole_seconds(seconds: float) -> str:
    """Format seconds for HTTP: rounded up, at least 1."""
    return str(max(1, math.ceil(seconds)))


def _status(error: Exception) -> int | None:
    return next((status for kind, status in STATUS.items() if isinstance(error, kind)), None)


def _leaves(error: Exception) -> list[Exception]:
    """Return the errors in an exception group, at any depth, or the error itself."""
    if not isinstance(error, ExceptionGroup):
        return [error]
    return [leaf for one in error.exceptions for leaf in _leaves(one)]


# -- disconnected clients ---------------------------------------------------------------------


@asynccontextmanager
async def while_connected(request: Request) -> AsyncGenerator[None]:
    """Open a block that is cancelled when the client disconnects; a plain endpoint never is.

    A queued request in the block leaves the queue immediately; leased SMs are released once the
    kernels that run there have ended. A `def` endpoint, which runs on a thread, cannot use it.

    The body must have been read before (FastAPI reads declared bodies), or must not be read at all:
    the block receives the same messages. It is an anyio cancel scope: each `await` in it after the
    disconnect is cancelled, too, so close resources that need an `await` after the block.

    Raises:
        ClientDisconnect: after the block, if it was cancelled; `PoolErrors` handles it.
    """
    has_left, has_ended, error = False, False, None

    async def watch(block: anyio.CancelScope) -> None:
        nonlocal has_left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        has_left = True
        block.cancel()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, tasks.cancel_scope)
            try:
                yield
            except Exception as raised:  # raised below, so that it is not wrapped in a group
                error = raised
            has_ended = True
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error
        if has_left and not has_ended:
            raise ClientDisconnect
    finally:
        del error  # breaks the reference cycle: its traceback refers to this frame


# -- probes -----------------------------------------------------------------------------------


def routes(pool: Pool) -> list[Route]:
    """Return the probe routes `/healthz` and `/readyz` of an orchestrator.

    * `/readyz` is 200 while the pool grants leases and its devices respond. Each probe checks the
      devices, so it is 503 as soon as a GPU fails, even an idle one.
    * `/healthz` is 503 after a device fault, when the process must be replaced. Starting and
      draining pools are healthy.

    Neither waits or uses an SM, and both describe the state in `detail`.
    """

    async def readyz(_: Request) -> Response:
        fault = fault_of(pool)
        return _probe_response(fault or pool, is_healthy=fault is None and pool.is_ready)

    async def healthz(_: Request) -> Response:
        fault = fault_of(pool)
        is_lost = pool.fault is not None or isinstance(fault, DeviceFault)
        return _probe_response(fault or pool, is_healthy=not is_lost)

    return [Route("/healthz", healthz), Route("/readyz", readyz)]


def _probe_response(what: object, *, is_healthy: bool) -> Response:
    return JSONResponse({"detail": str(what)}, 200 if is_healthy else 503)
