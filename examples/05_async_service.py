"""A service: POST an image as .npy to /blur; it is blurred on 16 SMs leased for the request.

python examples/05_async_service.py [port], and then, for example:
curl --data-binary @image.npy "localhost:8000/blur?sigma=4&deadline=0.5" -o blurred.npy
"""

from __future__ import annotations

import asyncio
import io
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import greensched
from greensched import LaunchConfig, Pool
from greensched.cli.demo import choose_driver
from greensched.kernels import gaussian_blur

MAX_WAITING = 64  # beyond, clients are told to come back: better than an answer too late
STATUS = {
    greensched.InvalidRequest: 400,
    greensched.QueueFull: 429,
    greensched.PoolClosed: 503,
    greensched.DeviceLost: 503,
    greensched.DeadlineExceeded: 504,
    ClientDisconnect: 499,  # for the log: nobody reads it
}


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Any]]:
    async with Pool(driver=choose_driver(), max_waiting=MAX_WAITING) as pool:
        yield {"pool": pool}


async def blur(request: Request) -> Response:
    try:
        image = np.lib.format.read_array(io.BytesIO(await request.body()))
        sigma = float(request.query_params.get("sigma", "2"))
        deadline = float(request.query_params.get("deadline", "2"))
    except (ValueError, MemoryError) as error:  # a header may say anything
        raise greensched.InvalidRequest(f"not a .npy file, or no number: {error}") from None
    if image.ndim not in (2, 3) or image.dtype.kind not in "buif":
        raise greensched.InvalidRequest("give numbers of shape (height, width[, channels])")

    pool = request.state.pool
    work = asyncio.create_task(blurred(pool, image.astype(np.float32), sigma, deadline))
    gone = asyncio.create_task(disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        file = io.BytesIO()
        np.save(file, await work)
        return Response(file.getvalue(), media_type="application/octet-stream")
    finally:
        # A client that left loses its place in the queue at once; SMs at work come back by
        # themselves when their kernel has ended.
        work.cancel()
        gone.cancel()


async def blurred(pool: Pool, image: np.ndarray, sigma: float, deadline: float) -> np.ndarray:
    height, width, channels = np.atleast_3d(image).shape
    config = LaunchConfig(grid=math.ceil(image.size / 256), block=256)
    async with pool.partition(16, deadline=deadline) as p:
        with await p.upload(image) as src, await p.empty_like(src) as dst:
            p.launch(config, gaussian_blur, src, dst, height, width, channels, sigma)
            return await p.download(dst)


async def disconnected(request: Request) -> None:
    """Returns when the client has left: behind the body nothing else is received."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def readyz(request: Request) -> Response:
    pool = request.state.pool  # not ready: closing, or a device fault, and then for good
    return PlainTextResponse(f"{pool!r}\n", 200 if pool.is_ready else 503)


async def refused(_: Request, error: Exception) -> Response:
    headers = {}
    if isinstance(error, greensched.QueueFull):
        headers["Retry-After"] = str(math.ceil(error.retry_after))  # HTTP has whole seconds
    status = next(code for kind, code in STATUS.items() if isinstance(error, kind))
    return PlainTextResponse(f"{error}\n", status, headers)


app = Starlette(
    routes=[Route("/blur", blur, methods=["POST"]), Route("/readyz", readyz)],
    exception_handlers=dict.fromkeys(STATUS, refused),
    lifespan=lifespan,
)

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
