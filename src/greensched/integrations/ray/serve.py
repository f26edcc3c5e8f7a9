"""A pool in a replica of Ray Serve: its GPU, its health, and how busy it is.

    @serve.deployment(ray_actor_options={"num_gpus": 1}, health_check_period_s=1)
    @serve.ingress(app)  # with the middleware asgi.PoolErrors
    class Images(PoolReplica): ...

examples/10_ray_serve is a whole one.
"""

from __future__ import annotations

from collections.abc import Callable

from greensched import Pool
from greensched.integrations.health import fault_of
from greensched.integrations.ray.gpus import own_gpu


class PoolReplica:
    """A replica with a pool over the one GPU that Ray gave it; a base for a deployment's class.

    Serve has it answer whom it has taken, then ends its process, and the pool with it.

    Attributes:
        pool: open as soon as there is a request.
    """

    async def __init__(self, make: Callable[..., Pool] = Pool) -> None:  # type: ignore[misc]  # Serve awaits it
        """Opens the pool; Serve awaits this before it sends requests.

        Args:
            make: makes the pool, given `devices=`: a `functools.partial` of `Pool`, say.

        Raises:
            InvalidRequest: the deployment's `ray_actor_options` have no `"num_gpus": 1`.
            Others: as `Pool.open`.
        """
        self.pool = make(devices=[own_gpu()])
        await self.pool.open()

    async def check_health(self) -> None:
        """Asks the GPU each time Serve asks this. Does not wait for SMs.

        Raises:
            DeviceFault, CUDAError: the GPU failed: Serve replaces the replica, and so the process,
                which is what helps.
        """
        fault = fault_of(self.pool)
        if fault is not None:
            raise fault

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For an autoscaling policy: Serve counts requests, and does not see SMs.

        Returns:
            `sms`: of each SM there is, how much is leased or drains; `waiting`: requests in the
            pool's queue.
        """
        has = self.pool.statistics()
        return {
            "sms": (has.sms_leased + has.sms_draining) / has.sms_total,
            "waiting": float(has.waiting),
        }
