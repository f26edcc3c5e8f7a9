"""Open and close a pool with an ASGI application, and report its state to an orchestrator."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from weakref import WeakSet

import anyio
from anyio.abc import TaskStatus
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from greensched import Pool
from greensched.errors import DeviceFault, InvalidRequest
from greensched.integrations.asgi.task_group import open_task_group
from greensched.integrations.health import fault_of

#: Pools that still serve after their process got SIGTERM, while `/readyz` answers 503.
_draining: WeakSet[Pool] = WeakSet()


def lifespan(
    pool: Pool, *, drain: float = 0
) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Pool]]]:
    """Open and close the pool with `Starlette(lifespan=...)` or `FastAPI(lifespan=...)`.

    Requests find the pool at `request.state.pool`. A server that stops finishes accepted requests
    first; leases that last longer may end within the pool's grace (`Pool.aclose`, 5 s).

    With `drain`, SIGTERM first makes `/readyz` answer 503. Requests are served for `drain` more
    seconds, while load balancers remove the process. Then the server's own handler of SIGTERM runs.
    A second SIGTERM ends the wait. This needs a server that installs its handler with
    `signal.signal` before the application starts, on the main thread, as uvicorn does. On another
    thread it has no effect.

    A pool opens once, so an application that starts again needs another pool. To use your own
    lifespan, enter this one in it: `async with asgi.lifespan(pool)(app) as state: ...`.

    When the server starts, it raises what `Pool.open` raises.

    Raises:
        InvalidRequest: `drain` is negative or not a number. Raised by this call.
    """
    if not drain >= 0:
        raise InvalidRequest(f"drain={drain!r}: give seconds, 0 or more")

    @asynccontextmanager
    async def run(_: Any) -> AsyncGenerator[dict[str, Pool]]:
        async with pool:
            if drain and threading.current_thread() is threading.main_thread():
                async with _drained_first(pool, drain):
                    yield {"pool": pool}
            else:
                yield {"pool": pool}

    return run


@asynccontextmanager
async def _drained_first(pool: Pool, seconds: float) -> AsyncGenerator[None]:
    """Open a block in which SIGTERM reaches its earlier handler only after a period of draining."""
    former = signal.getsignal(signal.SIGTERM)

    async def pass_on_later(*, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            task_status.started()
            await anext(signals)
            _draining.add(pool)
            with anyio.move_on_after(seconds):
                await anext(signals)
        signal.signal(signal.SIGTERM, former)
        signal.raise_signal(signal.SIGTERM)

    try:
        async with open_task_group() as tasks:
            await tasks.start(pass_on_later)
            yield
            tasks.cancel_scope.cancel()
    finally:
        signal.signal(signal.SIGTERM, former)
        _draining.discard(pool)


# -- probes -----------------------------------------------------------------------------------


def routes(pool: Pool) -> list[Route]:
    """Return the routes `/healthz` and `/readyz` for an orchestrator's probes.

    * `/readyz` is 200 while the pool grants leases and its devices respond. Each probe checks the
      devices, so it is 503 as soon as a GPU fails, even an idle one. It is 503 from SIGTERM on,
      with `lifespan(drain=...)`.
    * `/healthz` is 503 after a device fault, when the process must be replaced. Starting and
      draining pools are healthy.

    Neither probe waits or uses an SM, and both describe the state in `detail`.
    """

    async def readyz(_: Request) -> Response:
        fault = fault_of(pool)
        is_ready = fault is None and pool.is_ready and pool not in _draining
        return _probe_response(fault or pool, is_healthy=is_ready)

    async def healthz(_: Request) -> Response:
        fault = fault_of(pool)
        is_lost = pool.fault is not None or isinstance(fault, DeviceFault)
        return _probe_response(fault or pool, is_healthy=not is_lost)

    return [Route("/healthz", healthz), Route("/readyz", readyz)]


def _probe_response(what: object, *, is_healthy: bool) -> Response:
    return JSONResponse({"detail": str(what)}, 200 if is_healthy else 503)
