"""Arms: the ways to put classes on devices that are compared.

Each is a few lines of what a program would do.

An arm gives each class a *seat* on each device, and a seat runs passes: pieces of work, one behind
another. What it may do between two pieces is what tells the arms apart.

Plain streams, gates and mutexes use the device's primary context, as a program without this
library would; the others use the pool, by its public door.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from greensched.bound import Bound
from greensched.device import Device
from greensched.driver.simulated import Span
from greensched.partition import Partition
from greensched.pool import Pool
from greensched.resources import ContextOptions
from greensched.simulation.machine import Launch, Machine
from greensched.simulation.workload import Service
from greensched.splitting import SMResourceOptions
from greensched.typing import ALL, Size

#: Nanoseconds on the whole device of each piece of a pass.
Pieces = Sequence[int]


class Seat(Protocol):
    """A class's place on one device."""

    async def run(self, pieces: Pieces) -> None:
        """Runs a pass to its end."""


#: The seat of a class on a device.
Seats = Callable[[int, Service], Seat]


class Arm(Protocol):
    """A way to share devices."""

    @property
    def name(self) -> str:
        """What `--policy` calls it."""

    @property
    def about(self) -> str:
        """A line for people."""

    def prepare(self, machine: Machine) -> None:
        """Whatever blocks, before a loop runs."""

    def open(self, machine: Machine) -> AbstractAsyncContextManager[Seats]:
        """A block in which its seats can be used."""


# -- plain streams ----------------------------------------------------------------------------


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

    def __init__(self, inner: Seat, permits: asyncio.Semaphore) -> None:
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

    def __init__(self, inner: Seat, gate: Gate, priority: int) -> None:
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


# -- the pool ---------------------------------------------------------------------------------


def pool_of(machine: Machine, **options: object) -> Pool:
    """A pool over all devices, with every class's kernel loaded wherever it may run."""
    kernels = list(machine.kernels.values())
    pool = Pool(driver=machine.driver, prepare=kernels, **options)  # type: ignore[arg-type]  # as the pool checks
    machine.granted = lambda: pool.statistics().granted
    return pool


class LeaseSeat:
    """A lease that is held all the time."""

    def __init__(
        self, machine: Machine, p: Partition, device: int, service: str, *, late_last: bool = False
    ) -> None:
        #: Prompts that cannot be in time go behind all that can.
        self.late_last = late_last
        self._bound: Bound = p.bind(machine.kernels[service], machine.configs[service][device], 0)

    async def run(self, pieces: Pieces) -> None:
        """All of it at once: on SMs of its own a pass takes as long in one piece."""
        self._bound.set(0, sum(pieces))
        await self._bound.submit()


@dataclass
class Split:
    """B3: a fixed split of each device, held from beginning to end.

    `first` SMs are for the highest class; the others share the rest evenly.
    """

    first: int
    name: str = ""
    about: str = ""
    late_last: bool = False

    def __post_init__(self) -> None:
        self.name = self.name or f"split-{self.first}"
        self.about = self.about or f"B3 fixed split, {self.first} SMs for the first class"

    def prepare(self, machine: Machine) -> None:
        """Nothing."""

    def sizes(self, machine: Machine, device: int) -> dict[str, int]:
        """SMs of each class: whole cells."""
        ranked = sorted(machine.services.values(), key=lambda s: -s.priority)
        if len(ranked) == 1:
            return {ranked[0].name: machine.sms[device]}
        rest, others = machine.sms[device] - self.first, len(ranked) - 1
        each = rest if others == 1 else rest // others // 8 * 8
        return {s.name: self.first if s is ranked[0] else each for s in ranked}

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Seats]:
        """Seats on leases that are granted together."""
        seats: dict[tuple[int, str], Seat] = {}
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(pool_of(machine))
            for device in machine.devices:
                sizes = self.sizes(machine, device)
                parts = await stack.enter_async_context(
                    pool.partitions(*sizes.values(), device=device)
                )
                for name, p in zip(sizes, parts, strict=True):
                    seats[device, name] = LeaseSeat(
                        machine, p, device, name, late_last=self.late_last
                    )
            yield lambda device, service: seats[device, service.name]


@dataclass
class Alone(Split):
    """B0: one class by itself on whole devices."""

    first: int = 0
    name: str = "alone"
    about: str = "B0 each class alone on the whole device"

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Seats]:
        """Its seats on everything."""
        seats: dict[tuple[int, str], Seat] = {}
        (service,) = machine.services
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(pool_of(machine))
            for device in machine.devices:
                p = await stack.enter_async_context(pool.partition(ALL, device=device))
                seats[device, service] = LeaseSeat(machine, p, device, service)
            yield lambda device, service: seats[device, service.name]


class GrantSeat:
    """A lease for each piece, of whatever size the arm says then."""

    def __init__(
        self,
        machine: Machine,
        pool: Pool,
        device: int,
        service: Service,
        size: Callable[[int], Size],
        *,
        whole: bool = False,
    ) -> None:
        self._pool = pool
        self._kernel = machine.kernels[service.name]
        self._config = machine.configs[service.name][device]
        self._device = device
        self._size = size
        self._whole = whole
        #: Somebody wants to run here, or does.
        self.busy = 0

    async def run(self, pieces: Pieces) -> None:
        """Piece by piece, each in its turn; or the whole pass in one lease."""
        self.busy += 1
        try:
            for some in (pieces,) if self._whole else ((ns,) for ns in pieces):
                size = self._size(sum(some))
                async with self._pool.partition(size, device=self._device) as p:
                    await p.launch(self._kernel, self._config, sum(some))
        finally:
            self.busy -= 1


@dataclass
class Fifo:
    """The pool as it is without classes: a lease for each piece, first in, first out."""

    name: str = "fifo"
    about: str = "the pool, first come, first served"

    def prepare(self, machine: Machine) -> None:
        """Nothing."""

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Seats]:
        """Seats that ask for their floor, and take what is free up to all."""
        async with pool_of(machine) as pool:
            seats = {
                (device, name): self.seat(machine, pool, device, service)
                for device in machine.devices
                for name, service in machine.services.items()
            }
            yield lambda device, service: seats[device, service.name]

    def seat(self, machine: Machine, pool: Pool, device: int, service: Service) -> Seat:
        """It asks for its floor, and takes what is free up to all."""
        total = machine.sms[device]
        size = (service.reserve or 8, min(total, service.cap or total))
        return GrantSeat(machine, pool, device, service, lambda _: size)


# -- by name ----------------------------------------------------------------------------------


def baselines() -> dict[str, Arm]:
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
