"""Two kinds of work on one device, put there on purpose, for the checks of what is known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from greensched.capacity.latency_tables import SpeedupCurve
from greensched.capacity.machine import Machine
from greensched.capacity.metrics import Weighed
from greensched.capacity.strategies import Client, Strategy
from greensched.capacity.workload import ServiceProfile

#: What counts as reproduced.
WITHIN = 0.25


@dataclass(frozen=True, slots=True)
class Check:
    """One published figure and what the simulation makes of the same situation."""

    what: str
    published: float
    found: float
    given: str

    @property
    def is_reproduced(self) -> bool:
        """Whether it is within a quarter."""
        return abs(self.found / self.published - 1) <= WITHIN

    def __str__(self) -> str:
        verdict = "reproduced" if self.is_reproduced else "NOT reproduced"
        return f"{self.what:56} {self.published:8.2f} {self.found:8.2f}  {verdict}"


#: One kernel that needs a fraction of a device and always takes as long.
TINY = SpeedupCurve("tiny", (1, 144), (1.0, 1.0), fills=False, source="by definition")


def work(sms: int) -> SpeedupCurve:
    """Work that twice the SMs do in half the time, on a device of so many."""
    return SpeedupCurve("work", (1, sms), (float(sms), 1.0), source="by definition")


Drive = Callable[[Machine, Callable[[str], Client]], Awaitable[None]]


def play(machine: Machine, arm: Strategy, drive: Drive) -> None:
    """Runs a coroutine on an arm's seats of device 0, until it ends."""

    async def main() -> None:
        async with arm.open(machine) as seats:
            end = machine.begin()
            await drive(machine, lambda name: seats(0, machine.services[name]))
            end()

    arm.prepare(machine)
    try:
        machine.clock.run(main)
    finally:
        machine.close()


async def beside(work: Awaitable[None], loop: Awaitable[None]) -> None:
    """The work, and a loop that ends with it."""
    task = asyncio.ensure_future(loop)
    await work
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def forever(seat: Client, lengths: Iterator[int], done: list[int] | None = None) -> None:
    """One piece after another; what is done is noted."""
    for ns in lengths:
        await seat.run((ns,))
        if done is not None:
            done.append(ns)


def same(ns: int) -> Iterator[int]:
    """The same length for ever."""
    while True:
        yield ns


def pair(low: SpeedupCurve, high: SpeedupCurve, **more: int) -> dict[str, ServiceProfile]:
    """A class of requests before one that loops."""
    return {
        "critical": ServiceProfile(name="critical", role="request", curve=high, priority=1, **more),
        "other": ServiceProfile(name="other", role="loop", curve=low),
    }


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest that so large a part does not exceed."""
    return Weighed.of(values, [1] * len(values)).percentile(part)
