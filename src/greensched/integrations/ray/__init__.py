"""Pools on every GPU of a Ray cluster, and in Ray Serve. Needs the extra `ray`, and asyncio.

    ray.init()
    async with Fleet("images", partial(Pool, prepare=[kernel])) as fleet:
        y = await fleet.submit(job, x, sms=16, deadline=0.5, idempotent=True)
        async with fleet.partition(32) as session:
            y = await session.run(job, x)

Ray places one actor on each GPU, restarts it after a failure, and transports the messages; the
actor's pool decides over the SMs. docs/how-to/ray.md describes it.
"""

from __future__ import annotations

from importlib.util import find_spec

from greensched.errors import MissingPackage

if find_spec("ray") is None:
    raise MissingPackage(__name__, "ray", "ray")

from greensched.integrations.ray.fleet import Fleet
from greensched.integrations.ray.gpus import own_gpus
from greensched.integrations.ray.pool_actor import Health
from greensched.integrations.ray.protocol import Snapshot
from greensched.integrations.ray.session import Session

__all__ = ["Fleet", "Health", "Session", "Snapshot", "own_gpus"]
