"""Our arms: leases that are sized by what a class needs now, from its table and its target.

`rightsized` asks the pool for a lease for each pass. The classes above best effort get the least
SMs on which the pass is in time, by table and guard; whoever stands below takes what they leave,
and everything goes to whoever is alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from greensched.partition import Partition
from greensched.planning.services import ServiceClass
from greensched.pool import Pool
from greensched.simulation.arms import Fifo, GrantSeat, Pieces
from greensched.simulation.machine import Machine
from greensched.simulation.workload import Service
from greensched.typing import ALL

#: The part of a target that a plan may use: the rest is for what a neighbour does to it (1.04 at
#: the most that was measured of decoding) and for a start that is late.
MOST = 0.95
#: Where planning begins: whoever comes just after a step began waits for two of them.
SAFE = MOST / 2
#: At least so much is planned with, whatever was late.
LEAST = 0.2
#: After so many latencies the part is looked at: a tenth less where more than four fifths of what
#: may be late (1 in 100) was, a twentieth more where less than half of it was.
LOOK = 500
MANY, FEW = 0.008, 0.005
#: SMs that a pool hands out together, at least; and what a class below keeps at least.
CELL = 8


class Room:
    """One device as the seats of an arm see it: who is at work, and how many SMs each needs."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.needs: dict[str, int] = {}
        self.ranks: dict[str, int] = {}

    def above(self, service: Service) -> int:
        """SMs that the classes above it need now."""
        return sum(n for name, n in self.needs.items() if self.ranks[name] > service.priority)

    def below(self, service: Service) -> bool:
        """Whether anybody else is at work."""
        return any(name != service.name for name in self.needs)


class Pace:
    """How much of its target a class's plans use, by what became of them."""

    def __init__(self, latency: float) -> None:
        self.part = SAFE
        self._latency = latency
        self._late = self._seen = 0

    def told(self, latency: float, weight: int) -> None:
        """So many had this latency."""
        self._seen += weight
        if latency > self._latency:
            self._late += weight
        if self._seen >= LOOK:
            share = self._late / self._seen
            if share > MANY:
                self.part = max(LEAST, self.part * 0.9)
            elif share < FEW:
                self.part = min(MOST, self.part * 1.05)
            self._late = self._seen = 0


class SizedSeat(GrantSeat):
    """A lease for each pass of a class with a target, and for each piece of one below."""

    #: Prompts that cannot be in time go behind all that can.
    late_last = True

    def __init__(
        self, machine: Machine, pool: Pool, device: int, service: Service, room: Room, top: bool
    ) -> None:
        super().__init__(machine, pool, device, service)
        self._room = room
        self.whole = top
        self._sizes = tuple(range(CELL, room.total - CELL + 1, CELL))
        room.ranks[service.name] = service.priority
        self._pace = Pace(service.latency)
        self.told = self._pace.told

    def _need(self, ns: int) -> int:
        """The least SMs on which so much work is in time; most of the device where none is."""
        service = self._service
        if not service.latency:
            return service.reserve or CELL
        slowdown = self._pace.part * service.latency * 1e9 / ns
        return service.curve.least(slowdown, self._sizes)

    def asked(self, ns: int) -> dict[str, Any]:  # noqa: ARG002  others go by it
        """What it needs, and all if nobody else is at work; below, what those above leave."""
        room = self._room
        if not self.whole:
            return {"sms": (CELL, max(CELL, room.total - room.above(self._service)))}
        least = room.needs[self._service.name]
        return {"sms": (least, least if room.below(self._service) else room.total)}

    async def run(self, pieces: Pieces) -> None:
        """A pass."""
        needs, name = self._room.needs, self._service.name
        needs[name] = self._need(sum(pieces)) if self.whole else CELL
        try:
            await super().run(pieces)
        finally:
            del needs[name]


@dataclass
class RightSized(Fifo):
    """A lease for each pass, as large as its target needs."""

    name: str = "rightsized"
    about: str = "the pool; a lease for each pass, sized by table and target; late prompts last"
    _rooms: dict[int, Room] = field(default_factory=dict, repr=False)

    def prepare(self, machine: Machine) -> None:
        """Nobody is at work."""
        self._rooms = {device: Room(machine.sms[device]) for device in machine.devices}

    def seat(self, machine: Machine, pool: Pool, device: int, service: Service) -> GrantSeat:
        """Seats of a device know of each other."""
        top = service.priority == max(s.priority for s in machine.services.values())
        return SizedSeat(machine, pool, device, service, self._rooms[device], top)


def size_of(machine: Machine, device: int, service: Service) -> tuple[int, int]:
    """Its floor, up to its cap. Who has none asks for what the floors of others leave, at least.

    A smaller least would be granted, too, and nobody has to give it any more after that.
    """
    total = machine.sms[device]
    floors = sum(other.reserve for other in machine.services.values())
    least = service.reserve or max(CELL, (total - floors) // CELL * CELL)
    most = service.cap or total
    return min(least, most), most


class ClassSeat(GrantSeat):
    """A lease for each pass of a class with a target, and for each piece of another, by class.

    Who is next, what is kept for whom and who may borrow it is the pool's.
    """

    def __init__(self, machine: Machine, pool: Pool, device: int, service: Service) -> None:
        self._least, most = size_of(machine, device, service)
        super().__init__(machine, pool, device, service, (self._least, most))
        # Whoever has a floor keeps a lease for the pass; others give theirs back at each piece.
        self.whole = bool(service.reserve)

    def asked(self, ns: int) -> dict[str, Any]:
        """Its size, and what it will take on the least of it."""
        service = self._service
        cost = ns * service.curve.slowdown(self._least) / 1e9
        return {"sms": self._size, "service": service.name, "cost": cost}


@dataclass
class Classes(Fifo):
    """The pool with service classes, as an operator would write them down from the services."""

    name: str = "classes"
    about: str = "the pool with service classes: floors, and loans of what is idle of them"

    def options(self, machine: Machine) -> dict[str, Any]:
        """The classes."""
        return {"services": [self.written(service) for service in machine.services.values()]}

    def seat(self, machine: Machine, pool: Pool, device: int, service: Service) -> GrantSeat:
        """On a lease for each pass or piece."""
        return ClassSeat(machine, pool, device, service)

    def written(self, service: Service) -> ServiceClass:
        """What the operator says. Who has no floor gives back at each piece, and may borrow."""
        return ServiceClass(
            service.name,
            reserve=service.reserve,
            cap=service.cap or ALL,
            priority=service.priority,
            weight=service.weight,
            revocable=not service.reserve,
            # Not its latency: a lease here is a pass, and a request is refused by nobody.
            budget=service.latency / 2 if service.budget < 0 else service.budget,
        )


class ElasticSeat(ClassSeat):
    """An elastic lease for as long as there is work; a checkpoint before each pass or piece."""

    def __init__(self, machine: Machine, pool: Pool, device: int, service: Service) -> None:
        super().__init__(machine, pool, device, service)
        self._lease: Partition | None = None
        self._runs = 0

    async def run(self, pieces: Pieces) -> None:
        """Whoever has a floor keeps its SMs for a pass; the others look at each piece."""
        self._runs += 1
        while pieces:
            pieces = await self._some(await self._leased(), pieces)
        self._leaving = asyncio.ensure_future(self._leave_unless_more(self._runs))

    async def _some(self, lease: Partition, pieces: Pieces) -> Pieces:
        """Does what is done between two checkpoints; returns what is left."""
        some = len(pieces) if self.whole else 1
        await lease.launch(self._kernel, self._config, sum(pieces[:some]))
        return pieces[some:]

    async def _leased(self) -> Partition:
        if self._lease is not None:
            await self._lease.checkpoint()
            return self._lease
        lease = self._pool.partition(self._size, device=self._device, service=self._service.name)
        await lease.__aenter__()
        self._lease = lease
        return lease

    async def _leave_unless_more(self, runs: int) -> None:
        """Gives the lease back once its server has found nothing more to do in its next turn."""
        for _ in range(3):
            await asyncio.sleep(0)
        lease = self._lease
        if self._runs == runs and lease is not None:
            self._lease = None
            await lease.__aexit__(None, None, None)

    async def close(self) -> None:
        """Gives the lease back."""
        self._runs += 1
        if self._lease is not None:
            await self._lease.__aexit__(None, None, None)


@dataclass
class Elastic(Classes):
    """Service classes with elastic leases."""

    name: str = "elastic"
    about: str = "the pool with service classes and elastic leases: a checkpoint between pieces"

    def seat(self, machine: Machine, pool: Pool, device: int, service: Service) -> GrantSeat:
        """On a lease that lasts."""
        return ElasticSeat(machine, pool, device, service)


class UnsplitSeat(ElasticSeat):
    """The same, and the pool is told what became of it. All at once where there is no split."""

    async def _some(self, lease: Partition, pieces: Pieces) -> Pieces:
        """On all SMs it is a stream beside others, and there is nothing to give back meanwhile."""
        if not lease.is_unsplit:
            return await super()._some(lease, pieces)
        jobs = [lease.launch(self._kernel, self._config, ns) for ns in pieces]
        await jobs[-1]
        return ()

    def told(self, latency: float, weight: int) -> None:
        """So many requests or tokens had this latency."""
        self._pool.observe(self._service.name, latency, weight)


@dataclass
class Unsplit(Elastic):
    """Service classes with elastic leases, on devices that are split only where that is needed."""

    name: str = "unsplit"
    about: str = "as elastic, and all SMs for all as long as every class has its target so"

    def seat(self, machine: Machine, pool: Pool, device: int, service: Service) -> GrantSeat:
        """On a lease that lasts."""
        return UnsplitSeat(machine, pool, device, service)

    def written(self, service: Service) -> ServiceClass:
        """Nobody minds neighbours on his SMs while he has his target."""
        said = super().written(service)
        return replace(said, unsplit=True, cap=ALL, latency=service.latency or None)
