"""Scenarios for the checks: two kinds of work on one device."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from greensched.capacity.latency_tables import SpeedupCurve
from greensched.capacity.machine import Machine
from greensched.capacity.measured import WITHIN
from greensched.capacity.metrics import WeightedValues
from greensched.capacity.strategies import Client, Strategy
from greensched.capacity.workload import ServiceProfile


@dataclass(frozen=True, slots=True)
class Check:
    """A published figure and the simulation's prediction of it."""

    what: str
    published: float
    found: float
    given: str

    @property
    def is_reproduced(self) -> bool:
        """Say whether the prediction is within a quarter of the figure."""
        return abs(self.found / self.published - 1) <= WITHIN

    def __str__(self) -> str:
        verdict = "reproduced" if self.is_reproduced else "NOT reproduced"
        return f"{self.what:56} {self.published:8.2f} {self.found:8.2f}  {verdict}"


#: A kernel that needs a fraction of a device and always takes the same time.
TINY = SpeedupCurve("tiny", (1, 144), (1.0, 1.0), fills=False, source="by definition")


def work(sms: int) -> SpeedupCurve:
    """Return the curve of work that scales linearly with SMs, on a device of this many SMs."""
    return SpeedupCurve("work", (1, sms), (float(sms), 1.0), source="by definition")


Drive = Callable[[Machine, Callable[[str], Client]], Awaitable[None]]


def play(machine: Machine, strategy: Strategy, drive: Drive) -> None:
    """Run a coroutine to its end on a strategy's clients of device 0."""

    async def main() -> None:
        async with strategy.open(machine) as clients:
            end = machine.begin()
            await drive(machine, lambda name: clients(0, machine.services[name]))
            end()

    strategy.prepare(machine)
    try:
        machine.clock.run(main)
    finally:
        machine.close()


async def beside(work: Awaitable[None], loop: Awaitable[None]) -> None:
    """Run the work, and beside it a loop that is cancelled when the work ends."""
    task = asyncio.ensure_future(loop)
    await work
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def forever(client: Client, lengths: Iterator[int], done: list[int] | None = None) -> None:
    """Run one piece after another, and record each in `done`."""
    for ns in lengths:
        await client.run((ns,))
        if done is not None:
            done.append(ns)


def same(ns: int) -> Iterator[int]:
    """Yield the same length endlessly."""
    while True:
        yield ns


def pair(low: SpeedupCurve, high: SpeedupCurve, **more: int) -> dict[str, ServiceProfile]:
    """Return a class of requests, and a looping class of lower priority."""
    return {
        "critical": ServiceProfile(name="critical", role="request", curve=high, priority=1, **more),
        "other": ServiceProfile(name="other", role="loop", curve=low),
    }


def percentile(values: Sequence[float], part: float) -> float:
    """Return the least value with this fraction of all values at or below it."""
    return WeightedValues.of(values, [1] * len(values)).percentile(part)
