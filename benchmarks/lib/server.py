"""Serve an application on a port of its own, in this process and on this loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp


@asynccontextmanager
async def serving(app: ASGIApp, port: int = 0) -> AsyncGenerator[tuple[str, uvicorn.Server]]:
    """Provide its address, and its server, which stops after the block as by a signal.

    With port 0 the system chooses one.
    """
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None))
    running = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}", server
    server.should_exit = True
    await running
