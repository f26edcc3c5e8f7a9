"""What one does without a pool: plain streams on the primary context, and gates before them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from greensched.capacity.machine import Launch, Machine
from greensched.capacity.strategies import Client, Fifo, Pieces, Seats, Strategy
from greensched.device.device import Device
from greensched.device.resources import ContextOptions
from greensched.device.splitting import SMResourceOptions
from greensched.driver.simulated import Span


class StreamSeat:
    """A stream of one's own, and nothing that keeps others off."""

    def __init__(self, machine: Machine, launch: Launch, device: int, service: str) -> None:
        self._machine = machine
        self._launch = launch
        self._left: deque[tuple[int, asyncio.Future[None]]] = deque()
        machine.listen(device, service, self._ended)

    async def run(self, pieces: Pieces) -> None:
        """Submits all of it at once."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left.append((len(pieces), ended))
        for ns in pieces:
            self._launch(ns)
        await ended

    def _ended(self, _: Span) -> None:
        left, ended = self._left.popleft()
        if left > 1:
            self._left.appendleft((left - 1, ended))
        else:
            self._machine.finish(ended)


@dataclass
class Streams:
    """B1, B2, B5: a stream for each class; all SMs for all, or a cap for the lower classes.

    The simulated driver knows no priority among streams: with one stream for each class there is
    nothing that it could reorder, and a kernel that runs is never taken off its SMs.
    """

    name: str = "streams"
    about: str = "B1 plain streams"
    #: The part of the SMs that classes below the highest may use, as MPS's active threads.
    cap: float = 1.0
    _launches: dict[tuple[int, str], Launch] = field(default_factory=dict, repr=False)

    def prepare(self, machine: Machine) -> None:
        """Makes the streams."""
        top = max(service.priority for service in machine.services.values())
        for ordinal in machine.devices:
            device = Device(ordinal, driver=machine.driver)
            machine.keep(device)
            lower = device.create_stream
            if self.cap < 1:
                count = int(device.sm_count * self.cap) // 8 * 8
                ((sm, *_), _rest) = device.resources.sm.split(SMResourceOptions(count=count))
                context = device.create_context(ContextOptions(resources=[sm]))
                machine.keep(context)
                lower = context.create_stream
            for name, service in machine.services.items():
                stream = device.create_stream() if service.priority == top else lower()
                machine.keep(stream)
                config = machine.configs[name][ordinal]
                launch = Launch(device, stream, machine.kernels[name], config)
                self._launches[ordinal, name] = launch

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Seats]:
        """Seats on the streams."""
        seats = {
            (ordinal, name): StreamSeat(machine, launch, ordinal, name)
            for (ordinal, name), launch in self._launches.items()
        }
        yield lambda device, service: seats[device, service.name]


class Semaphored:
    """Whoever has a permit runs; the others stand in line, first in, first out."""

    def __init__(self, inner: Client, permits: asyncio.Semaphore) -> None:
        self._inner = inner
        self._permits = permits

    async def run(self, pieces: Pieces) -> None:
        """A pass for a permit."""
        async with self._permits:
            await self._inner.run(pieces)


@dataclass
class Permits(Streams):
    """B4, B6: plain streams behind a semaphore for each device; of one permit, it is a mutex."""

    permits: int = 1

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Seats]:
        """Seats behind the semaphores."""
        gates = [asyncio.Semaphore(self.permits) for _ in machine.devices]
        async with super().open(machine) as seats:
            yield lambda device, service: Semaphored(seats(device, service), gates[device])


class Gate:
    """Who is at work on a device, by priority; the lower ones begin nothing meanwhile."""

    def __init__(self, highest: int) -> None:
        self.busy: dict[int, int] = {}
        self._highest = highest
        self._changed: list[asyncio.Future[None]] = []

    def enter(self, priority: int) -> None:
        """Somebody of this priority wants the device."""
        self.busy[priority] = self.busy.get(priority, 0) + 1

    def leave(self, priority: int) -> None:
        """He is done."""
        self.busy[priority] -= 1
        waiting, self._changed = self._changed, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def is_highest(self, priority: int) -> bool:
        """Whether there is no class above."""
        return priority >= self._highest

    async def wait(self, priority: int) -> None:
        """Until nobody above is at work."""
        while any(number for above, number in self.busy.items() if above > priority):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._changed.append(future)
            await future


class Gated:
    """Begins no piece while a higher class is at work."""

    def __init__(self, inner: Client, gate: Gate, priority: int) -> None:
        self._inner = inner
        self._gate = gate
        self._priority = priority

    async def run(self, pieces: Pieces) -> None:
        """At work from the first piece to the last; each begins when it may."""
        self._gate.enter(self._priority)
        try:
            if self._gate.is_highest(self._priority):
                await self._inner.run(pieces)
                return
            for ns in pieces:
                await self._gate.wait(self._priority)
                await self._inner.run((ns,))
        finally:
            self._gate.leave(self._priority)


@dataclass
class PriorityGate(Streams):
    """B7: plain streams; a lower class submits a piece only while no higher one works (XSched)."""

    name: str = "gate"
    about: str = "B7 priority gate on plain streams"

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Seats]:
        """Seats behind the gates."""
        highest = max(service.priority for service in machine.services.values())
        gates = [Gate(highest) for _ in machine.devices]
        async with super().open(machine) as seats:
            yield lambda device, service: Gated(
                seats(device, service), gates[device], service.priority
            )


def baselines() -> dict[str, Strategy]:
    """The arms that are one object each; splits are found by a sweep."""
    return {
        arm.name: arm
        for arm in (
            Streams(),
            Streams("priority", "B2 priority streams (no other than B1 in this model)"),
            Permits("mutex", "B4 in-process FIFO mutex", permits=1),
            Streams("mps", "B5 MPS-like: lower classes capped to half the SMs", cap=0.5),
            Permits("semaphore", "B6 asyncio.Semaphore(2) on plain streams", permits=2),
            PriorityGate(),
            Fifo(),
        )
    }
