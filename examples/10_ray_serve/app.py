"""Serve sums by Ray Serve, a pool and a GPU for each replica: POST a JSON list of numbers to /sum.

python examples/10_ray_serve/app.py, or, in its folder, serve run app:application; and then
curl -H 'Content-Type: application/json' -d '[1, 2, 3.5]' localhost:8000/sum

A full queue answers 429 with Retry-After, or 503 where the proxy's is full. A replica whose GPU
failed exits, and Serve starts another.

Without a GPU: set GREENSCHED_DRIVER=simulated:h200.
"""

# No `from __future__ import annotations`: Ray sends the class to the replica, where FastAPI could
# not resolve annotations that are strings.
import os

import numpy as np
import ray
from fastapi import FastAPI, Request
from ray import serve

from greensched import LaunchConfig, Pool
from greensched.integrations import asgi
from greensched.integrations.ray.serve import PoolReplica, serve_options
from greensched.kernels import reduce_sum

SMS = 16  # of each request
SLOTS = 8  # requests that run at once: 132 SMs of an H100 or H200
MAX_WAITING = 64  # requests in the queue of a replica
DEADLINE = 0.5  # seconds in the queue

app = FastAPI()
app.add_middleware(asgi.PoolErrors)


def make_pool(devices: list[int]) -> Pool:
    """Make the pool of a replica; called in its process, on the GPU that Ray gave it."""
    return Pool(devices, max_waiting=MAX_WAITING, prepare=[reduce_sum])


@serve.deployment(**serve_options(SLOTS, MAX_WAITING))
@serve.ingress(app)
class Sums(PoolReplica):
    @app.post("/sum")
    async def total(self, numbers: list[float], request: Request) -> dict[str, float]:
        values = np.array(numbers, np.float32)
        config = LaunchConfig(grid=max(1, values.size // 1024), block=256)
        async with asgi.while_connected(request), self.pool.partition(SMS, deadline=DEADLINE) as p:
            with await p.upload(values) as x, await p.upload(np.zeros(1, np.float32)) as y:
                p.launch(config, reduce_sum, x, y, values.size)
                return {"sum": float((await p.download(y))[0]), "process": os.getpid()}


application = Sums.bind(make_pool)

if __name__ == "__main__":
    ray.init(num_gpus=1)  # a simulated GPU counts, too
    serve.run(application, blocking=True)
