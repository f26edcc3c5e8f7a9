"""A FastAPI application with a GPU behind one endpoint: POST a JSON list of numbers to /sum.

python examples/07_fastapi/app.py [port], and then, for example:
curl -H 'Content-Type: application/json' -d '[1, 2, 3.5]' localhost:8000/sum
"""

from __future__ import annotations

import sys

import numpy as np
import uvicorn
from fastapi import FastAPI, Request

from greensched import LaunchConfig, Partition, Pool
from greensched.cli.demo import choose_driver
from greensched.integrations import asgi
from greensched.kernels import reduce_sum

#: An H200 has 16 SMs for 8 at once. With 2 more at most that wait, an answer takes less than twice
#: what it takes alone; beyond, clients are told to come back: better than an answer too late.
MAX_WAITING = 2
DEADLINE = 0.5  # seconds in the queue


def create_app(pool: Pool) -> FastAPI:
    """The application over a pool; a test gives it one of its own."""
    app = FastAPI(lifespan=asgi.lifespan(pool))  # opens the pool, and closes it
    app.add_middleware(asgi.PoolErrors)  # queue full: 429; draining, GPU dead: 503; late: 504
    app.router.routes.extend(asgi.routes(pool))  # /healthz and /readyz

    @app.get("/about")
    async def about() -> dict[str, str]:
        return {"what": "sums, on a GPU"}

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
    """For `uvicorn --factory app:service`; each worker has a pool of its own."""
    pool = Pool(driver=choose_driver(), max_waiting=MAX_WAITING, prepare=[reduce_sum])
    return create_app(pool)


if __name__ == "__main__":
    uvicorn.run(service(), port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
