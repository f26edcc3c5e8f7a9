"""Serve HTTP: POST an image as .npy to /blur; each request leases 16 SMs and blurs it there.

python examples/05_async_service.py [port], and then, for example:
curl --data-binary @image.npy "localhost:8000/blur?sigma=4&deadline=0.5" -o blurred.npy

Without a GPU: set GREENSCHED_DRIVER=simulated:h200.
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
from greensched.kernels import gaussian_blur

MAX_WAITING = 64  # requests; further ones are refused at once, rather than answered too late
STATUS = {
    greensched.InvalidRequest: 400,
    greensched.QueueFull: 429,
    greensched.PoolClosed: 503,
    greensched.DeviceLost: 503,
    greensched.DeadlineExceeded: 504,
    ClientDisconnect: 499,  # only the log shows it
}


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Any]]:
    async with Pool(max_waiting=MAX_WAITING) as pool:
        yield {"pool": pool}


async def blur(request: Request) -> Response:
    try:
        image = np.lib.format.read_array(io.BytesIO(await request.body()))
        sigma = float(request.query_params.get("sigma", "2"))
        deadline = float(request.query_params.get("deadline", "2"))
    except (ValueError, MemoryError) as error:  # the header of the file is untrusted
        raise greensched.InvalidRequest(f"not a .npy file, or not a number: {error}") from None
    if image.ndim not in (2, 3) or image.dtype.kind not in "buif":
        raise greensched.InvalidRequest(
            "the array must hold numbers, with shape (height, width[, channels])"
        )

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
        # If the client has disconnected, its request leaves the queue at once; SMs that already
        # run its kernel are freed when the kernel has ended.
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
    """Return when the client has disconnected: after the body, nothing else is received."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def readyz(request: Request) -> Response:
    pool = request.state.pool  # not ready: closing, or lost to a device fault
    return PlainTextResponse(f"{pool!r}\n", 200 if pool.is_ready else 503)


async def refused(_: Request, error: Exception) -> Response:
    headers = {}
    if isinstance(error, greensched.QueueFull):
        headers["Retry-After"] = str(math.ceil(error.retry_after))  # HTTP takes whole seconds
    status = next(code for kind, code in STATUS.items() if isinstance(error, kind))
    return PlainTextResponse(f"{error}\n", status, headers)


app = Starlette(
    routes=[Route("/blur", blur, methods=["POST"]), Route("/readyz", readyz)],
    exception_handlers=dict.fromkeys(STATUS, refused),
    lifespan=lifespan,
)

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
