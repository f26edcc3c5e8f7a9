"""A policy of your own: service classes take turns, and nobody waits for ever.

python examples/08_your_own_policy.py
"""

from __future__ import annotations

import asyncio
import sys

from greensched import ALL, Pool, ServiceClass
from greensched.cli.demo import choose_driver
from greensched.scheduling.policy import ClassView, RequestView


class TakingTurns:
    """Whose class was served least often is next. Asked under a lock: it only looks."""

    def class_rank(self, service: ClassView) -> tuple[float, ...]:
        """Whose class stands smaller goes first; asked at every decision."""
        return (-service.priority, service.granted)

    def rank(self, request: RequestView) -> tuple[float, ...]:
        """The order in a class; asked once for each request."""
        return (-request.priority, request.order)

    def may_overtake(self, first: RequestView, now: float) -> bool:
        """Whether others may go before the first of all, for whom there is no room yet."""
        return now - first.arrived < 0.050  # seconds


async def main() -> bool:
    services = [ServiceClass("many"), ServiceClass("few")]
    served: list[str] = []

    async def ask(pool: Pool, service: str) -> None:
        async with pool.partition(ALL, service=service):
            served.append(service)

    async with (
        Pool([0], driver=choose_driver(), services=services, policy=TakingTurns()) as pool,
        asyncio.TaskGroup() as tasks,
        pool.partition(ALL),
    ):
        for service in ["many"] * 6 + ["few"] * 2:
            tasks.create_task(ask(pool, service))
        await asyncio.sleep(0)  # they all ask while the GPU is taken
    print("6 of many came, then 2 of few; served:", *served)
    return served == ["many", "few", "many", "few", "many", "many", "many", "many"]


if __name__ == "__main__":
    right = asyncio.run(main())
    print("they took turns" if right else "WRONG: they did not take turns")
    sys.exit(0 if right else 1)
