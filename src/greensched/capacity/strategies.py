"""Arms: the ways to put classes on devices that are compared.

Each is a few lines of what a program would do.

An arm gives each class a *seat* on each device, and a seat runs passes: pieces of work, one behind
another. What it may do between two pieces is what tells the arms apart.

Plain streams, gates and mutexes use the device's primary context, as a program without this
library would; the others use the pool, by its public door.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from greensched.capacity.machine import Machine
from greensched.capacity.workload import ServiceProfile
from greensched.execution.bound_launch import BoundLaunch
from greensched.leasing.partition import Partition
from greensched.pool import Pool
from greensched.typing import ALL, Size

#: Nanoseconds on the whole device of each piece of a pass.
Pieces = Sequence[int]


class Client(Protocol):
    """A class's place on one device."""

    async def run(self, pieces: Pieces) -> None:
        """Runs a pass to its end."""


#: The seat of a class on a device.
Seats = Callable[[int, ServiceProfile], Client]


class Strategy(Protocol):
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


# -- the pool ---------------------------------------------------------------------------------


def pool_of(machine: Machine, **options: object) -> Pool:
    """A pool over all devices, with every class's kernel loaded wherever it may run."""
    kernels = list(machine.kernels.values())
    common = {"driver": machine.driver, "prepare": kernels, "granularity": machine.granularity}
    pool = Pool(**common, **options)  # type: ignore[arg-type]  # as the pool checks
    machine.granted = lambda: pool.statistics().granted
    return pool


class LeaseSeat:
    """A lease that is held all the time."""

    def __init__(
        self, machine: Machine, p: Partition, device: int, service: str, *, by_target: bool = False
    ) -> None:
        #: Its server minds targets: see `serving.Prefill`.
        self.by_target = by_target
        self._bound: BoundLaunch = p.bind(
            machine.configs[service][device], machine.kernels[service], 0
        )

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
    by_target: bool = False

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
        seats: dict[tuple[int, str], Client] = {}
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(pool_of(machine))
            for device in machine.devices:
                sizes = self.sizes(machine, device)
                parts = await stack.enter_async_context(
                    pool.partitions(*sizes.values(), device=device)
                )
                for name, p in zip(sizes, parts, strict=True):
                    seats[device, name] = LeaseSeat(
                        machine, p, device, name, by_target=self.by_target
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
        seats: dict[tuple[int, str], Client] = {}
        (service,) = machine.services
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(pool_of(machine))
            for device in machine.devices:
                p = await stack.enter_async_context(pool.partition(ALL, device=device))
                seats[device, service] = LeaseSeat(machine, p, device, service)
            yield lambda device, service: seats[device, service.name]


class GrantSeat:
    """A lease for each piece, or each pass, of whatever size is needed then."""

    #: Whether a pass keeps its lease.
    whole = False

    def __init__(
        self, machine: Machine, pool: Pool, device: int, service: ServiceProfile, size: Size = ALL
    ) -> None:
        self._pool = pool
        self._kernel = machine.kernels[service.name]
        self._config = machine.configs[service.name][device]
        self._device = device
        self._service = service
        self._size = size

    def asked(self, ns: int) -> dict[str, Any]:  # noqa: ARG002  others go by it
        """What is asked of the pool for so much work."""
        return {"sms": self._size}

    async def run(self, pieces: Pieces) -> None:
        """Piece by piece, each in its turn; or the whole pass in one lease."""
        for some in (pieces,) if self.whole else ((ns,) for ns in pieces):
            asked = self.asked(sum(some))
            async with self._pool.partition(device=self._device, **asked) as p:
                await p.launch(self._config, self._kernel, sum(some))

    async def close(self) -> None:
        """Nothing is left."""


@dataclass
class Fifo:
    """The pool as it is without classes: a lease for each piece, first in, first out."""

    name: str = "fifo"
    about: str = "the pool, first come, first served"

    def prepare(self, machine: Machine) -> None:
        """Nothing."""

    def options(self, machine: Machine) -> dict[str, Any]:  # noqa: ARG002  others do
        """What else the pool is told."""
        return {}

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Seats]:
        """A seat for each class on each device."""
        async with pool_of(machine, **self.options(machine)) as pool:
            seats = {
                (device, name): self.seat(machine, pool, device, service)
                for device in machine.devices
                for name, service in machine.services.items()
            }
            yield lambda device, service: seats[device, service.name]
            for seat in seats.values():
                await seat.close()

    def seat(self, machine: Machine, pool: Pool, device: int, service: ServiceProfile) -> GrantSeat:
        """It asks for its floor, and takes what is free up to all."""
        total = machine.sms[device]
        size = (service.reserve or 8, min(total, service.cap or total))
        return GrantSeat(machine, pool, device, service, size)
