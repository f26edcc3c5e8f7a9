"""Use a pool in BentoML: POST {"numbers": [1, 2, 3.5]} to /total for their sum.

cd examples/embedding && bentoml serve bentoml_service:Sums
"""

from __future__ import annotations

from http import HTTPStatus

import bentoml
import numpy as np

from greensched import LaunchConfig, Pool, errors
from greensched.kernels import reduce_sum

#: As in greensched.integrations.asgi. BentoML handles exceptions itself, so a middleware would not
#: see them.
STATUS = {
    errors.QueueFull: HTTPStatus.TOO_MANY_REQUESTS,
    errors.PoolClosed: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.DeviceLost: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
}


@bentoml.service(workers=1)  # a worker is a process with its own pool
class Sums:
    def __init__(self) -> None:
        self.pool = Pool(max_waiting=2, prepare=[reduce_sum])

    @bentoml.on_startup
    async def open(self) -> None:
        await self.pool.open()

    @bentoml.on_shutdown
    async def close(self) -> None:
        await self.pool.aclose()

    def __is_ready__(self) -> bool:
        """Answer /readyz."""
        return self.pool.is_ready

    def __is_alive__(self) -> bool:
        """Answer /livez: after a device fault the process must be replaced."""
        return self.pool.fault is None

    @bentoml.api
    async def total(self, numbers: list[float]) -> float:
        values = np.array(numbers, np.float32)
        try:
            async with self.pool.partition(16, deadline=0.5) as p:
                with await p.upload(values) as x, await p.upload(np.zeros(1, np.float32)) as y:
                    p.launch(LaunchConfig(grid=16, block=256), reduce_sum, x, y, values.size)
                    return float((await p.download(y))[0])
        except tuple(STATUS) as error:
            code = STATUS[type(error)]
            raise bentoml.exceptions.BentoMLException(str(error), error_code=code) from None
