"""A pool in a replica of Ray Serve: its GPU, its health and its load.

    @serve.deployment(ray_actor_options={"num_gpus": 1}, health_check_period_s=1)
    @serve.ingress(app)  # with the middleware asgi.PoolErrors
    class Images(PoolReplica): ...

examples/10_ray_serve is a complete example.
"""

from __future__ import annotations

from collections.abc import Callable

from greensched import Pool
from greensched.integrations.health import fault_of
from greensched.integrations.ray.gpus import own_gpu


class PoolReplica:
    """A replica with a pool on the GPU that Ray assigned; a base for a deployment's class.

    At its end Serve lets it finish accepted requests, then ends the process and with it the pool.

    Attributes:
        pool: the pool, open before the first request.
    """

    async def __init__(self, make: Callable[..., Pool] = Pool) -> None:  # type: ignore[misc]  # Serve awaits it
        """Open the pool; Serve awaits this before it sends requests.

        Args:
            make: makes the pool from `devices=`, for example a `functools.partial` of `Pool`.

        Raises:
            InvalidRequest: the deployment's `ray_actor_options` have no `"num_gpus": 1`.
            Others: as `Pool.open`.
        """
        self.pool = make(devices=[own_gpu()])
        await self.pool.open()

    async def check_health(self) -> None:
        """Check the GPU, without waiting for SMs.

        Raises:
            DeviceFault, CUDAError: the GPU failed. Serve then replaces the replica and its process,
                as is necessary.
        """
        fault = fault_of(self.pool)
        if fault is not None:
            raise fault

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the load to an autoscaling policy: Serve counts requests and does not see SMs.

        Returns:
            `sms`: the fraction of SMs that are leased or draining; `waiting`: queued requests.
        """
        has = self.pool.statistics()
        return {
            "sms": (has.sms_leased + has.sms_draining) / has.sms_total,
            "waiting": float(has.waiting),
        }
