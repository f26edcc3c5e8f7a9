"""Use a pool in LitServe: POST {"numbers": [1, 2, 3.5]} to /predict for their sum.

python examples/embedding/litserve_api.py [port]
"""

from __future__ import annotations

import atexit
import sys

import litserve
import numpy as np
from fastapi import HTTPException

from greensched import LaunchConfig, Pool, errors
from greensched.kernels import reduce_sum

#: As in greensched.integrations.asgi.
STATUS = {
    errors.QueueFull: 429,
    errors.PoolClosed: 503,
    errors.DeviceLost: 503,
    errors.DeadlineExceeded: 504,
}


class Sums(litserve.LitAPI):
    """Its methods run in a worker process, each with its own pool: give a GPU one worker."""

    def setup(self, device: str) -> None:
        """Open the pool in the worker process, where no event loop runs yet."""
        devices = [int(device.removeprefix("cuda:"))] if device.startswith("cuda:") else None
        self.pool = Pool(devices, max_waiting=2, prepare=[reduce_sum])
        self.pool.sync.open()
        atexit.register(self.pool.sync.close)

    async def decode_request(self, request: dict[str, list[float]]) -> np.ndarray:
        return np.array(request["numbers"], np.float32)

    async def predict(self, values: np.ndarray) -> float:
        """Run on the worker's event loop; the pool bounds how many run at a time."""
        try:
            async with self.pool.partition(16, deadline=0.5) as p:
                with await p.upload(values) as x, await p.upload(np.zeros(1, np.float32)) as y:
                    p.launch(LaunchConfig(grid=16, block=256), reduce_sum, x, y, values.size)
                    return float((await p.download(y))[0])
        except tuple(STATUS) as error:
            raise HTTPException(STATUS[type(error)], str(error)) from None

    async def encode_response(self, total: float) -> dict[str, float]:
        return {"sum": total}


if __name__ == "__main__":
    server = litserve.LitServer(Sums(enable_async=True), workers_per_device=1)
    server.run(port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000, generate_client_file=False)
