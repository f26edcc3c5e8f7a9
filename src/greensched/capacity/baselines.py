"""Strategies without a pool: plain streams on the primary context, and gates before them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from greensched.capacity.machine import Launch, Machine
from greensched.capacity.strategies import Client, Clients, Fifo, Pieces, Strategy
from greensched.device.device import Device
from greensched.device.resources import ContextOptions
from greensched.device.splitting import SMResourceOptions
from greensched.driver.simulated import Span


class StreamClient:
    """Submits to a stream of its own; nothing protects it from other streams."""

    def __init__(self, machine: Machine, launch: Launch, device: int, service: str) -> None:
        self._machine = machine
        self._launch = launch
        self._left: deque[tuple[int, asyncio.Future[None]]] = deque()
        machine.listen(device, service, self._ended)

    async def run(self, pieces: Pieces) -> None:
        """Submit all pieces at once."""
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
    """B1, B2, B5: a stream for each class, on all SMs, or with a cap for the lower classes.

    The simulated driver ignores stream priorities: with one stream for each class there is nothing
    to reorder, and a running kernel is never preempted.
    """

    name: str = "streams"
    about: str = "B1 plain streams"
    #: The fraction of the SMs for classes below the highest, as MPS's active thread percentage.
    cap: float = 1.0
    _launches: dict[tuple[int, str], Launch] = field(default_factory=dict, repr=False)

    def prepare(self, machine: Machine) -> None:
        """Make the streams."""
        top = max(service.priority for service in machine.services.values())
        for ordinal in machine.devices:
            device = Device(ordinal, driver=machine.driver)
            machine.close_at_end(device)
            lower = device.create_stream
            if self.cap < 1:
                count = int(device.sm_count * self.cap) // 8 * 8
                ((sm, *_), _rest) = device.resources.sm.split(SMResourceOptions(count=count))
                context = device.create_context(ContextOptions(resources=[sm]))
                machine.close_at_end(context)
                lower = context.create_stream
            for name, service in machine.services.items():
                stream = device.create_stream() if service.priority == top else lower()
                machine.close_at_end(stream)
                config = machine.configs[name][ordinal]
                launch = Launch(device, stream, machine.kernels[name], config)
                self._launches[ordinal, name] = launch

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Clients]:
        """Open clients on the streams."""
        clients = {
            (ordinal, name): StreamClient(machine, launch, ordinal, name)
            for (ordinal, name), launch in self._launches.items()
        }
        yield lambda device, service: clients[device, service.name]


class SemaphoreClient:
    """Waits for a permit before each pass, first come, first served."""

    def __init__(self, inner: Client, permits: asyncio.Semaphore) -> None:
        self._inner = inner
        self._permits = permits

    async def run(self, pieces: Pieces) -> None:
        """Run a pass under one permit."""
        async with self._permits:
            await self._inner.run(pieces)


@dataclass
class Permits(Streams):
    """B4, B6: plain streams behind a semaphore for each device; of one permit, it is a mutex."""

    permits: int = 1

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Clients]:
        """Open clients behind a semaphore for each device."""
        gates = [asyncio.Semaphore(self.permits) for _ in machine.devices]
        async with super().open(machine) as clients:
            yield lambda device, service: SemaphoreClient(clients(device, service), gates[device])


class Gate:
    """Counts the passes at work on a device by priority; lower ones wait for higher ones."""

    def __init__(self, highest: int) -> None:
        self.busy: dict[int, int] = {}
        self._highest = highest
        self._changed: list[asyncio.Future[None]] = []

    def enter(self, priority: int) -> None:
        """Count a pass of this priority."""
        self.busy[priority] = self.busy.get(priority, 0) + 1

    def leave(self, priority: int) -> None:
        """Count it out, and wake the waiting passes."""
        self.busy[priority] -= 1
        waiting, self._changed = self._changed, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def is_highest(self, priority: int) -> bool:
        """Say whether no class has a higher priority."""
        return priority >= self._highest

    async def wait(self, priority: int) -> None:
        """Wait until no pass of a higher priority is at work."""
        while any(number for above, number in self.busy.items() if above > priority):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._changed.append(future)
            await future


class GatedClient:
    """Submits no piece while a higher class is at work."""

    def __init__(self, inner: Client, gate: Gate, priority: int) -> None:
        self._inner = inner
        self._gate = gate
        self._priority = priority

    async def run(self, pieces: Pieces) -> None:
        """Run a pass; each piece waits for the higher classes."""
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
    async def open(self, machine: Machine) -> AsyncIterator[Clients]:
        """Open clients behind a gate for each device."""
        highest = max(service.priority for service in machine.services.values())
        gates = [Gate(highest) for _ in machine.devices]
        async with super().open(machine) as clients:
            yield lambda device, service: GatedClient(
                clients(device, service), gates[device], service.priority
            )


def baselines() -> dict[str, Strategy]:
    """Return the baselines by name; fixed splits are made separately."""
    return {
        strategy.name: strategy
        for strategy in (
            Streams(),
            Streams("priority", "B2 priority streams (no other than B1 in this model)"),
            Permits("mutex", "B4 in-process FIFO mutex", permits=1),
            Streams("mps", "B5 MPS-like: lower classes capped to half the SMs", cap=0.5),
            Permits("semaphore", "B6 asyncio.Semaphore(2) on plain streams", permits=2),
            PriorityGate(),
            Fifo(),
        )
    }
