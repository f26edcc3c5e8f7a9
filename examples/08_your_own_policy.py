"""Write a policy: service classes take turns, and no request waits for ever.

python examples/08_your_own_policy.py

Without a GPU: GREENSCHED_DRIVER=simulated:h200 python examples/08_your_own_policy.py
"""

from __future__ import annotations

import asyncio
import sys

from greensched import ALL, Pool, ServiceClass
from greensched.scheduling.policy import ClassView, RequestView


class RoundRobin:
    """Serve the class with the fewest grants. Called inside decisions, so it must not block."""

    def class_rank(self, service: ClassView) -> tuple[float, ...]:
        """Return the rank of a class; the smallest goes first. Called at every decision."""
        return (-service.priority, service.granted)

    def rank(self, request: RequestView) -> tuple[float, ...]:
        """Return the rank of a request in its class. Called once for each request."""
        return (-request.priority, request.order)

    def may_overtake(self, first: RequestView, now: float) -> bool:
        """Return whether others may overtake the first request while it does not fit."""
        return now - first.arrived < 0.050  # seconds


async def main() -> bool:
    services = [ServiceClass("many"), ServiceClass("few")]
    served: list[str] = []

    async def request(pool: Pool, service: str) -> None:
        async with pool.partition(ALL, service=service):
            served.append(service)

    async with (
        Pool([0], services=services, policy=RoundRobin()) as pool,
        asyncio.TaskGroup() as tasks,
        pool.partition(ALL),
    ):
        for service in ["many"] * 6 + ["few"] * 2:
            tasks.create_task(request(pool, service))
        await asyncio.sleep(0)  # all of them queue while the GPU is leased
    print("6 requests of many arrived, then 2 of few; served:", *served)
    return served == ["many", "few", "many", "few", "many", "many", "many", "many"]


if __name__ == "__main__":
    correct = asyncio.run(main())
    print("the classes took turns" if correct else "WRONG: the classes did not take turns")
    sys.exit(0 if correct else 1)
