"""A pool in an ASGI service, Starlette's or FastAPI's. Needs the extra `asgi`.

    app = FastAPI(lifespan=asgi.lifespan(pool))
    app.add_middleware(asgi.PoolErrors)
    app.router.routes.extend(asgi.routes(pool))

and in an endpoint, around what it does on the GPU, `async with asgi.while_connected(request):`.
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

#: What a pool refuses, and what a client is told. Source of 499: nginx, for its log; nobody reads
#: it. All else is the program's own fault: 500.
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
    """For `Starlette(lifespan=...)` and `FastAPI(lifespan=...)`: opens the pool, and closes it.

    Requests have it as `request.state.pool`. A server that is told to stop answers whom it has
    taken first; what is leased even then may end within the pool's grace (`Pool.aclose`, 5 s).

    A pool is opened once, so an application that is started again needs another. Beside a lifespan
    of your own, enter this one in it: `async with asgi.lifespan(pool)(app) as state: ...`.

    Raises, where the server starts: what `Pool.open` does.
    """

    @asynccontextmanager
    async def run(_: Any) -> AsyncGenerator[dict[str, Pool]]:
        async with pool:
            yield {"pool": pool}

    return run


# -- refusals ---------------------------------------------------------------------------------


class PoolErrors:
    """Middleware that answers what a pool refuses, as `STATUS` has it, with `{"detail": ...}`.

    A full queue is 429 with `Retry-After`: whole seconds, the pool's own estimate rounded up. What
    is refused at once because it would be late is 503 with the same: by how much it would be. What
    an endpoint raises after its response has begun, and what `STATUS` does not list, is raised on.
    Exception groups (of an `asyncio.TaskGroup`, say) are answered if all in them is listed. HTTP
    alone: a websocket's endpoint sees to its own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            await self.app(scope, receive, note)
        except Exception as error:
            answer = None if has_begun else _answer(error)
            if answer is None:
                raise
        else:
            return
        await answer(scope, receive, send)


def _answer(error: Exception) -> Response | None:
    """The response to an error; None: it is not ours."""
    refusals = [(one, _status(one)) for one in _leaves(error)]
    if any(status is None for _, status in refusals):
        return None
    refusal, status = refusals[0]
    headers = {}
    if isinstance(refusal, QueueFull):
        headers["Retry-After"] = _whole_seconds(refusal.retry_after)
    elif isinstance(refusal, DeadlineImpossible):
        headers["Retry-After"] = _whole_seconds(refusal.predicted - refusal.deadline)
    return JSONResponse({"detail": str(refusal)}, status or 500, headers)


def _whole_seconds(seconds: float) -> str:
    """As HTTP has them: rounded up, and at least one."""
    return str(max(1, math.ceil(seconds)))


def _status(error: Exception) -> int | None:
    return next((status for kind, status in STATUS.items() if isinstance(error, kind)), None)


def _leaves(error: Exception) -> list[Exception]:
    """What an exception group holds, however deep; else the error itself."""
    if not isinstance(error, ExceptionGroup):
        return [error]
    return [leaf for one in error.exceptions for leaf in _leaves(one)]


# -- clients that leave -----------------------------------------------------------------------


@asynccontextmanager
async def while_connected(request: Request) -> AsyncGenerator[None]:
    """A block that is cancelled when the client leaves. Else nobody tells a plain endpoint.

    Whoever waits for SMs in it loses his place at once; SMs at work come back when the kernels
    that run there have ended. A `def` endpoint, which runs on a thread, cannot use it.

    The body must have been read before (FastAPI has read declared ones), or is not read at all: the
    block listens where it comes from. It is a cancel scope of anyio: what is awaited in it after
    the client has left is cancelled, too, so close what needs an `await` behind it.

    Raises:
        ClientDisconnect: behind the block, where it was cancelled; `PoolErrors` takes it.
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
            except Exception as raised:  # as it is, and not in a group
                error = raised
            has_ended = True
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error
        if has_left and not has_ended:
            raise ClientDisconnect
    finally:
        del error  # its traceback holds this frame


# -- probes -----------------------------------------------------------------------------------


def routes(pool: Pool) -> list[Route]:
    """`/healthz` and `/readyz`, for an orchestrator that restarts, and that sends requests.

    * `/readyz` is 200 while the pool grants and its devices answer. They are asked each time, so it
      is 503 from the moment a GPU fails, whether or not anybody uses it then.
    * `/healthz` is 503 once only a new process helps: after a device fault. Starting and draining
      are healthy.

    Neither waits, neither takes an SM, and both say in `detail` what is the matter.
    """

    async def readyz(_: Request) -> Response:
        fault = fault_of(pool)
        return _told(fault or pool, is_well=fault is None and pool.is_ready)

    async def healthz(_: Request) -> Response:
        fault = fault_of(pool)
        is_spoilt = pool.fault is not None or isinstance(fault, DeviceFault)
        return _told(fault or pool, is_well=not is_spoilt)

    return [Route("/healthz", healthz), Route("/readyz", readyz)]


def _told(what: object, *, is_well: bool) -> Response:
    return JSONResponse({"detail": str(what)}, 200 if is_well else 503)
