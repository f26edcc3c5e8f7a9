"""Strategies without a pool: plain streams in the primary context, with or without gates."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from greensched.capacity.machine import Launch, Machine
from greensched.capacity.strategies import (
    CELL,
    Batching,
    Client,
    Clients,
    Fifo,
    Pieces,
    Strategy,
)
from greensched.device.device import Device
from greensched.device.resources import ContextOptions
from greensched.device.splitting import SMResourceOptions
from greensched.driver.simulated import Span


class StreamClient(Client):
    """Submits to its own stream, which nothing protects from other streams."""

    def __init__(
        self, machine: Machine, launch: Launch, device: int, service: str, strategy: Streams
    ) -> None:
        self.target_aware = strategy.target_aware
        self.blocks = strategy.blocks
        self.batching = strategy.batching
        role = machine.services[service].role
        self._in_turn = strategy.prioritised and role in ("prefill", "decode")
        self._machine = machine
        self._launch = launch
        self._left: deque[tuple[int, asyncio.Future[None]]] = deque()
        machine.listen(device, service, self._ended)

    async def run(self, pieces: Pieces) -> None:
        """Submit all pieces at once, or each when the previous one has ended.

        Pieces follow one another if streams have priorities and a piece stands for many kernels:
        between two kernels of a stream, a GPU starts waiting blocks of any other stream.
        """
        for batch in [(ns,) for ns in pieces] if self._in_turn else [pieces]:
            await self._submit(batch)

    async def _submit(self, pieces: Pieces) -> None:
        await self._machine.spend(self._machine.host.awaited)
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
    """B1, B2, B5: a stream for each class, on all SMs, or on fewer SMs for lower classes.

    With priorities, a pending kernel of a higher class starts before those of lower classes, and
    at the end of a wave of blocks it precedes the rest of a running kernel.
    """

    name: str = "streams"
    about: str = "B1 plain streams"
    #: The fraction of the SMs for classes below the highest, like MPS's active thread percentage.
    cap: float = 1.0
    #: Whether higher classes have streams of higher priority.
    prioritised: bool = False
    #: See the members of `Client`.
    target_aware: bool = False
    blocks: int = 0
    _launches: dict[tuple[int, str], Launch] = field(default_factory=dict, repr=False)

    @property
    def batching(self) -> Batching | None:
        """How its programs batch. None: prompts and tokens are independent."""
        return None

    def prepare(self, machine: Machine) -> None:
        """Make the streams."""
        levels = sorted({service.priority for service in machine.services.values()})
        for ordinal in machine.devices:
            device = Device(ordinal, driver=machine.driver)
            machine.made.callback(device.close)
            lower = device.create_stream
            if self.cap < 1:
                count = int(device.sm_count * self.cap) // CELL * CELL
                ((sm, *_), _rest) = device.resources.sm.split(SMResourceOptions(count=count))
                context = device.create_context(ContextOptions(resources=[sm]))
                machine.made.callback(context.close)
                lower = context.create_stream
            for name, service in machine.services.items():
                make = device.create_stream if service.priority == levels[-1] else lower
                # A smaller number is more urgent; the driver clamps it to its range.
                urgency = -levels.index(service.priority) if self.prioritised else 0
                stream = make(priority=urgency)
                machine.made.callback(stream.close)
                config = machine.configs[name][ordinal]
                launch = Launch(device, stream, machine.kernels[name], config)
                self._launches[ordinal, name] = launch

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Clients]:
        clients = {
            (ordinal, name): StreamClient(machine, launch, ordinal, name, self)
            for (ordinal, name), launch in self._launches.items()
        }
        yield lambda device, service: clients[device, service.name]


@dataclass
class Batched(Streams):
    """One engine on the whole device that batches prompts and tokens, as serving programs do.

    For a fair comparison it schedules by targets, a fused pass reads the weights once, and prompts
    share passes.
    """

    target_aware: bool = True
    budget: int = 0
    interval: int = 1
    together: bool = True

    @property
    def batching(self) -> Batching:
        """How its programs batch."""
        return Batching(self.budget, self.interval, self.together)


class SemaphoreClient(Client):
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
    """B4, B6: plain streams with a semaphore for each device; with one permit it is a mutex."""

    permits: int = 1

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Clients]:
        """Open clients behind a semaphore for each device."""
        gates = [asyncio.Semaphore(self.permits) for _ in machine.devices]
        async with super().open(machine) as clients:
            yield lambda device, service: SemaphoreClient(clients(device, service), gates[device])


class Gate:
    """Counts the running passes of a device by priority. Lower ones wait for higher ones."""

    def __init__(self, highest: int) -> None:
        self.busy: dict[int, int] = {}
        self._highest = highest
        self._changed: list[asyncio.Future[None]] = []

    def enter(self, priority: int) -> None:
        """Count a pass of this priority."""
        self.busy[priority] = self.busy.get(priority, 0) + 1

    def leave(self, priority: int) -> None:
        """Remove a pass from the count, and wake the waiting passes."""
        self.busy[priority] -= 1
        waiting, self._changed = self._changed, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def is_highest(self, priority: int) -> bool:
        """Say whether no class has a higher priority."""
        return priority >= self._highest

    async def wait(self, priority: int) -> None:
        """Wait until no pass of a higher priority is running."""
        while any(number for above, number in self.busy.items() if above > priority):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._changed.append(future)
            await future


class GatedClient(Client):
    """Submits no piece while a higher class is working."""

    def __init__(self, inner: Client, gate: Gate, priority: int) -> None:
        self.target_aware = inner.target_aware
        self.blocks = inner.blocks
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
    about: str = "B7 priority gate on plain streams; target-aware"
    target_aware: bool = True

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
            Streams(
                "priority",
                "B2 a stream of higher priority for higher classes; target-aware",
                prioritised=True,
                target_aware=True,
            ),
            Permits("mutex", "B4 in-process FIFO mutex", permits=1),
            Streams("mps", "B5 MPS-like: lower classes capped to a part of the SMs", cap=0.5),
            Permits("semaphore", "B6 asyncio.Semaphore on plain streams", permits=2),
            PriorityGate(),
            Batched("chunked", "B8 fused passes: tokens and chunks of prompts", budget=512),
            Batched("prefill-first", "B9 passes of prompts first, with decode steps between"),
            Fifo(),
        )
    }


#: The swept parameter of a strategy and its values; each run reports the best. `blocks` is swept
#: only with prompts and tokens, because no other class has blocks.
SWEPT: dict[str, tuple[str, tuple[float, ...]]] = {
    "mps": ("cap", (0.25, 0.5, 0.75)),
    "semaphore": ("permits", (2, 3, 4)),
    "gate": ("blocks", (1, 4, 16)),
    "chunked": ("budget", (256, 512, 1024, 2048)),
    "prefill-first": ("interval", (1, 4, 8)),
}
#: Strategies that need a language model.
OF_LANGUAGE_MODELS = ("chunked", "prefill-first")
