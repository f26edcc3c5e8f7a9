"""A pool in each replica of Ray Serve: GPUs, health, load, and deployment options.

    @serve.deployment(**serve_options(slots=8, max_waiting=64))
    @serve.ingress(app)  # with the middleware asgi.PoolErrors
    class Images(PoolReplica): ...

examples/10_ray_serve is a complete example.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve.request_router import FIFOMixin, RequestRouter

from greensched import Pool
from greensched.errors import InvalidRequest
from greensched.integrations.health import fault_of
from greensched.integrations.ray.gpus import own_gpus
from greensched.integrations.ray.metrics import PoolMetrics
from greensched.integrations.ray.pool_actor import EXIT

logger = logging.getLogger("greensched")

#: Seconds between two checks of the GPU. A replica on a failed GPU refuses requests faster than
#: other replicas serve them, so it attracts requests until it exits.
CHECK = 0.01
#: Seconds between two updates of the metrics.
METRICS_S = 1.0
#: The fraction of a GPU's SMs that `scale_by_sms` keeps in demand. The rest absorbs bursts during
#: the seconds in which a further replica starts.
IN_DEMAND = 0.8


class LeastBusyRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """Send each request to the less busy of two random replicas, wherever they are.

    Serve's own router prefers replicas on the proxy's node until they are full. With a GPU on
    each node, other GPUs would be idle meanwhile.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[Any],
        pending_request: Any = None,  # noqa: ARG002  Serve gives it by name
    ) -> list[list[Any]]:
        """Return two replicas; the one with fewer requests gets the request."""
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]


def serve_options(slots: int, max_waiting: int, gpus: int = 1) -> dict[str, Any]:
    """Return the options of `serve.deployment` for a pool in each replica.

    A replica accepts as many requests as its pool can run and queue. If it accepted more, its pool
    would refuse with 429 requests that another replica could run. As many again wait in the
    proxy, and Serve answers further ones with 503.

    Args:
        slots: The requests that run at once: the GPU's SMs divided by a request's, rounded down.
        max_waiting: the same as for `Pool`.
        gpus: the GPUs of each replica.

    Raises:
        InvalidRequest: A value is not a whole number, or too small.
    """
    for name, value, least in (("slots", slots, 1), ("max_waiting", max_waiting, 0)):
        if type(value) is not int or value < least:
            raise InvalidRequest(f"{name}={value!r}: give a whole number of at least {least}")
    return {
        "ray_actor_options": {"num_gpus": gpus},
        "max_ongoing_requests": slots + max_waiting,
        "max_queued_requests": slots + max_waiting,
        "health_check_period_s": 1,
        "request_router_config": {"request_router_class": LeastBusyRouter},
    }


def scale_by_sms(context: Any) -> tuple[float, dict[str, Any]]:
    """Choose the number of replicas by the SMs that requests hold and wait for.

    A policy for `autoscaling_config`; Serve applies its bounds, factors and delays:

        "policy": {"policy_function": "greensched.integrations.ray.serve:scale_by_sms"}
    """
    demand = context.aggregated_metrics.get("sms_in_demand", {})
    if len(demand) < context.current_num_replicas:  # a new replica has not reported yet
        return context.target_num_replicas, {}
    return max(1, math.ceil(sum(demand.values()) / IN_DEMAND)), {}


class PoolReplica:
    """A replica with a pool on the GPUs that Ray assigned. Base class for a deployment's class.

    When Serve stops it, it finishes accepted requests, then the process ends with its pool. If a
    GPU fails, the process exits at once, with status 74, and Serve starts another.

    Attributes:
        pool: the pool, open before the first request.
    """

    async def __init__(self, make: Callable[..., Pool] = Pool) -> None:  # type: ignore[misc]  # Serve awaits it
        """Open the pool; Serve awaits this before it sends requests.

        Args:
            make: makes the pool from `devices=`, for example a `functools.partial` of `Pool`.

        Raises:
            InvalidRequest: The deployment's `ray_actor_options` have no whole `"num_gpus"`.
            Others: As for `Pool.open`.
        """
        self.pool = make(devices=own_gpus())
        await self.pool.open()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Export the metrics, and exit the process at once if a GPU fails."""
        metrics = PoolMetrics(serve.get_replica_context().replica_id.unique_id)
        while True:
            for _ in range(int(METRICS_S / CHECK)):
                self._exit_if_failed()
                await asyncio.sleep(CHECK)
            metrics.update(self.pool)

    def _exit_if_failed(self) -> None:
        fault = fault_of(self.pool)
        if fault is not None:
            logger.error("the replica's process exits because its GPU failed: %s", fault)
            os._exit(EXIT)

    async def check_health(self) -> None:
        """Check the GPU without waiting for SMs; end the process if it has failed."""
        self._exit_if_failed()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the load to an autoscaling policy, because Serve counts requests, not SMs.

        Returns:
            `sms`: the fraction of SMs that are leased or draining. `waiting`: queued requests.
            `sms_in_demand`: the fraction of SMs that running and queued requests need, if a queued
            request needs as much as a running one.
        """
        statistics = self.pool.statistics()
        used = (statistics.sms_leased + statistics.sms_draining) / statistics.sms_total
        return {
            "sms": used,
            "waiting": float(statistics.waiting),
            "sms_in_demand": used * (1 + statistics.waiting / max(1, statistics.leases)),
        }
