"""Our arms: what a program asks of a pool with service classes.

`classes` asks for a lease for each pass or piece, `elastic` for leases that last, with a checkpoint
between pieces. What is kept for whom, who may borrow it, whether a device is split, and how many
SMs are enough for a target, is the pool's to say.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from greensched.capacity.machine import Machine
from greensched.capacity.strategies import Fifo, GrantSeat, Pieces
from greensched.capacity.workload import ServiceProfile
from greensched.leasing.latency import LatencyCurve, ScaledCurve
from greensched.leasing.partition import Partition
from greensched.pool import Pool
from greensched.scheduling.services import ServiceClass
from greensched.typing import ALL

#: SMs that a pool hands out together, at least; and where it cuts as finely as can be.
CELL, FINEST = 8, 2


def size_of(machine: Machine, device: int, service: ServiceProfile) -> tuple[int, int]:
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

    def __init__(self, machine: Machine, pool: Pool, device: int, service: ServiceProfile) -> None:
        self._least, most = size_of(machine, device, service)
        super().__init__(machine, pool, device, service, (self._least, most))
        # Whoever has a floor keeps a lease for the pass; others give theirs back at each piece.
        self.whole = bool(service.reserve)

    def asked(self, ns: int) -> dict[str, Any]:
        """Its size, and what it will take on the least of it."""
        service = self._service
        cost = ns * service.curve.slowdown(self._least) / 1e9
        return {"sms": self._size, "service": service.name, "duration": cost}


@dataclass
class Classes(Fifo):
    """The pool with service classes, as an operator would write them down from the services."""

    name: str = "classes"
    about: str = "the pool with service classes: floors, and loans of what is idle of them"

    def options(self, machine: Machine) -> dict[str, Any]:
        """The classes."""
        return {"services": [self.written(service) for service in machine.services.values()]}

    def seat(self, machine: Machine, pool: Pool, device: int, service: ServiceProfile) -> GrantSeat:
        """On a lease for each pass or piece."""
        return ClassSeat(machine, pool, device, service)

    def written(self, service: ServiceProfile) -> ServiceClass:
        """What the operator says. Who has no floor gives back at each piece, and may borrow."""
        wait = service.max_wait_for_reserve
        return ServiceClass(
            service.name,
            reserve=service.reserve,
            cap=service.cap or ALL,
            priority=service.priority,
            weight=service.weight,
            preemptible=not service.reserve,
            # Not its latency: a lease here is a pass, and a request is refused by nobody.
            max_wait_for_reserve=service.latency / 2 if wait < 0 else wait,
        )


class ElasticSeat(ClassSeat):
    """An elastic lease for as long as there is work; a checkpoint before each pass or piece."""

    def __init__(self, machine: Machine, pool: Pool, device: int, service: ServiceProfile) -> None:
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
        await lease.launch(self._config, self._kernel, sum(pieces[:some]))
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

    def seat(self, machine: Machine, pool: Pool, device: int, service: ServiceProfile) -> GrantSeat:
        """On a lease that lasts."""
        return ElasticSeat(machine, pool, device, service)


class SharedSeat(ElasticSeat):
    """The same, and the pool is told what became of it. All at once where there is no split."""

    async def _some(self, lease: Partition, pieces: Pieces) -> Pieces:
        """On all SMs it is a stream beside others, and there is nothing to give back meanwhile."""
        if not lease.is_shared:
            return await super()._some(lease, pieces)
        jobs = [lease.launch(self._config, self._kernel, ns) for ns in pieces]
        await jobs[-1]
        return ()

    def told(self, latency: float, weight: int) -> None:
        """So many requests or tokens had this latency."""
        self._pool.observe(self._service.name, latency, weight)


@dataclass
class Shared(Elastic):
    """Service classes with elastic leases, on devices that are split only where that is needed."""

    name: str = "shared"
    about: str = "as elastic, and all SMs for all as long as every class has its target so"

    def seat(self, machine: Machine, pool: Pool, device: int, service: ServiceProfile) -> GrantSeat:
        """On a lease that lasts."""
        return SharedSeat(machine, pool, device, service)

    def written(self, service: ServiceProfile) -> ServiceClass:
        """Nobody minds neighbours on his SMs while he has his target."""
        said = super().written(service)
        return replace(said, shared=True, cap=ALL, latency=service.latency or None)


class SizedSeat(ElasticSeat):
    """An elastic lease of whatever size the pool's policy says, which is told what is to come.

    A class with a floor is one with a target for each pass: the pool is told what a pass takes on
    each size, by a table that learns. The others have what it leaves.
    """

    #: Its server minds targets: see `serving.Prefill`.
    by_target = True

    def __init__(self, machine: Machine, pool: Pool, device: int, service: ServiceProfile) -> None:
        super().__init__(machine, pool, device, service)
        self._size = (CELL, machine.sms[device])
        sizes = range(FINEST, machine.sms[device] + 1, FINEST)
        #: Of a second of work on the whole device.
        self._curve = LatencyCurve({sms: [service.curve.slowdown(sms)] for sms in sizes})
        self._cost: ScaledCurve | None = None
        #: Of a step all tokens are due together: whoever is new begins with it.
        self._deadline = service.latency or None if service.role == "decode" else None

    async def run(self, pieces: Pieces) -> None:
        """A pass or piece on SMs for just that."""
        self._cost = self._curve.times(sum(pieces) / 1e9) if self.whole else None
        await super().run(pieces)

    async def _leased(self) -> Partition:
        if self._lease is not None:
            await self._lease.checkpoint(self._cost, deadline=self._deadline)
            return self._lease
        name = self._service.name
        lease = self._pool.partition(
            self._size, device=self._device, service=name, duration=self._cost
        )
        await lease.__aenter__()
        self._lease = lease
        return lease

    def told(self, latency: float, weight: int) -> None:
        """So many requests or tokens had this latency."""
        if self.whole:
            self._pool.observe(self._service.name, latency, weight)


@dataclass
class Sized(Elastic):
    """Service classes with elastic leases, sized by the pool as their targets and curves say."""

    name: str = "sized"
    about: str = "as elastic, sized by table and target (policy sized); minds targets"

    def options(self, machine: Machine) -> dict[str, Any]:
        """The classes, and the policy."""
        return super().options(machine) | {"policy": "sized"}

    def seat(self, machine: Machine, pool: Pool, device: int, service: ServiceProfile) -> GrantSeat:
        """On a lease that lasts."""
        return SizedSeat(machine, pool, device, service)

    def written(self, service: ServiceProfile) -> ServiceClass:
        """No floors: who has a target has SMs for it."""
        said = super().written(service)
        latency = service.latency if service.reserve else None
        return replace(said, reserve=0, cap=ALL, preemptible=False, latency=latency or None)
