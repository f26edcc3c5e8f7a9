"""Serve sums by FastAPI on a GPU: POST a JSON list of numbers to /sum.

python examples/07_fastapi/app.py [port], and then, for example:
curl -H 'Content-Type: application/json' -d '[1, 2, 3.5]' localhost:8000/sum

Without a GPU: set GREENSCHED_DRIVER=simulated:h200.
"""

from __future__ import annotations

import sys

import numpy as np
import uvicorn
from fastapi import FastAPI, Request

from greensched import LaunchConfig, Partition, Pool
from greensched.integrations import asgi
from greensched.kernels import reduce_sum

#: An H200 serves 8 requests at a time on 16 SMs each. With at most 2 more in the queue, a request
#: takes less than twice the time that it takes alone. Further ones are refused at once, rather than
#: answered too late.
MAX_WAITING = 2
DEADLINE = 0.5  # seconds in the queue
DRAIN = 5.0  # seconds after SIGTERM in which requests are served, while /readyz answers 503


def create_app(pool: Pool) -> FastAPI:
    """Create the application over a pool; a test passes a simulated one."""
    app = FastAPI(lifespan=asgi.lifespan(pool, drain=DRAIN))  # opens the pool, and closes it
    app.add_middleware(asgi.PoolErrors)  # 429: queue full; 503: closing or device lost; 504: late
    app.router.routes.extend(asgi.routes(pool))  # /healthz and /readyz

    @app.get("/about")
    async def about() -> dict[str, str]:
        return {"about": "sums, on a GPU"}

    @app.post("/sum")
    async def total(numbers: list[float], request: Request) -> dict[str, float]:
        async with asgi.while_connected(request), pool.partition(16, deadline=DEADLINE) as p:
            return {"sum": await summed(p, np.array(numbers, np.float32))}

    return app


async def summed(p: Partition, values: np.ndarray) -> float:
    config = LaunchConfig(grid=max(1, values.size // 1024), block=256)
    with await p.upload(values) as x, await p.upload(np.zeros(1, np.float32)) as y:
        p.launch(config, reduce_sum, x, y, values.size)
        return float((await p.download(y))[0])


def service() -> FastAPI:
    """Create the application for `uvicorn --factory app:service`; each worker has its own pool."""
    pool = Pool(max_waiting=MAX_WAITING, prepare=[reduce_sum])
    return create_app(pool)


if __name__ == "__main__":
    uvicorn.run(service(), port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
