"""Strategies that use a pool with service classes.

`classes` takes a lease for each pass or piece; `elastic` keeps its leases, with checkpoints
between pieces. The pool decides what is reserved, which class borrows it, whether a device is
split, and how many SMs meet a target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from greensched.capacity.machine import Machine
from greensched.capacity.strategies import CELL, FINEST, Fifo, LeaseClient, Pieces
from greensched.capacity.workload import ServiceProfile
from greensched.leasing.latency import LatencyCurve, ScaledCurve
from greensched.leasing.partition import Partition
from greensched.pool import Pool
from greensched.scheduling.services import ServiceClass
from greensched.typing import ALL


def size_of(machine: Machine, device: int, service: ServiceProfile) -> tuple[int, int]:
    """Return the least and most SMs of a class's requests: its reserve and its cap.

    Without a reserve the least is what the other classes' reserves leave, because a smaller request
    would be granted at that size and never grow.
    """
    total = machine.sms[device]
    reserved = sum(other.reserve for other in machine.services.values())
    least = service.reserve or max(CELL, (total - reserved) // CELL * CELL)
    most = service.cap or total
    return min(least, most), most


class ClassClient(LeaseClient):
    """Takes a lease of the class for each pass, or for each piece if it has no reserve."""

    def __init__(self, machine: Machine, pool: Pool, device: int, service: ServiceProfile) -> None:
        self._least, most = size_of(machine, device, service)
        super().__init__(machine, pool, device, service, (self._least, most))
        self.whole = bool(service.reserve)

    def lease_options(self, ns: int) -> dict[str, Any]:
        """Return its size, its class, and how long the work takes on the least size."""
        service = self._service
        cost = ns * service.curve.slowdown(self._least) / 1e9
        return {"sms": self._size, "service": service.name, "duration": cost}


@dataclass
class Classes(Fifo):
    """The pool with service classes, declared as an operator would for these services."""

    client_type = ClassClient

    name: str = "classes"
    about: str = "the pool with service classes: reserves, of which idle SMs are lent"

    def options(self, machine: Machine) -> dict[str, Any]:
        return {"services": [self.service_class(service) for service in machine.services.values()]}

    def service_class(self, service: ServiceProfile) -> ServiceClass:
        """Return a class; without a reserve it is preemptible at each piece, and may borrow."""
        wait = service.max_wait_for_reserve
        return ServiceClass(
            service.name,
            reserve=service.reserve,
            cap=service.cap or ALL,
            priority=service.priority,
            weight=service.weight,
            preemptible=not service.reserve,
            # Not the class's latency: here a lease is a pass, and no request may be refused.
            max_wait_for_reserve=service.latency / 2 if wait < 0 else wait,
        )


class ElasticClient(ClassClient):
    """Keeps a lease while there is work, with a checkpoint before each pass or piece."""

    def __init__(self, machine: Machine, pool: Pool, device: int, service: ServiceProfile) -> None:
        super().__init__(machine, pool, device, service)
        self._lease: Partition | None = None
        #: What the pool is told of the work that follows.
        self._cost: ScaledCurve | None = None
        self._deadline: float | None = None

    async def run(self, pieces: Pieces) -> None:
        """Run a pass; a class without a reserve has a checkpoint before each piece."""
        while pieces:
            pieces = await self._run_some(await self._ensure_lease(), pieces)

    async def _run_some(self, lease: Partition, pieces: Pieces) -> Pieces:
        """Run the pieces up to the next checkpoint; return the rest."""
        count = len(pieces) if self.whole else 1
        await self._machine.spend(self._machine.host.awaited)
        await lease.launch(self._config, self._kernel, sum(pieces[:count]))
        return pieces[count:]

    async def _ensure_lease(self) -> Partition:
        if self._lease is not None:
            await self._machine.spend(self._machine.host.checkpoint)
            await self._lease.checkpoint(self._cost, deadline=self._deadline)
            return self._lease
        name = self._service.name
        lease = self._pool.partition(
            self._size, device=self._device, service=name, duration=self._cost
        )
        await lease.__aenter__()
        self._lease = lease
        return lease

    async def idle(self) -> None:
        """Release the lease, because there is no more work."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.__aexit__(None, None, None)


@dataclass
class Elastic(Classes):
    """Service classes with elastic leases."""

    client_type = ElasticClient

    name: str = "elastic"
    about: str = "the pool with service classes and elastic leases: a checkpoint between pieces"


class SharedClient(ElasticClient):
    """As `ElasticClient`, but reports latencies to the pool, and runs whole passes when shared."""

    async def _run_some(self, lease: Partition, pieces: Pieces) -> Pieces:
        """Run the whole pass on a shared device, where no SMs can be given back in between."""
        if not lease.is_shared:
            return await super()._run_some(lease, pieces)
        await self._machine.spend(self._machine.host.awaited)
        jobs = [lease.launch(self._config, self._kernel, ns) for ns in pieces]
        await jobs[-1]
        return ()

    def record_latency(self, latency: float, weight: int) -> None:
        self._pool.observe(self._service.name, latency, weight)


@dataclass
class Shared(Elastic):
    """Service classes with elastic leases, on devices that are split only when necessary."""

    client_type = SharedClient

    name: str = "shared"
    about: str = "as elastic; devices are shared as long as every class meets its target so"

    def service_class(self, service: ServiceProfile) -> ServiceClass:
        """Return a class that may share SMs while it meets its target."""
        base = super().service_class(service)
        return replace(base, shared=True, cap=ALL, latency=service.latency or None)


class SizedClient(ElasticClient):
    """Keeps an elastic lease that the pool's policy sizes by the duration of the next pass.

    A class with a reserve has a target for each pass, and gives the pool a latency curve. Other
    classes get the rest.
    """

    target_aware = True

    def __init__(self, machine: Machine, pool: Pool, device: int, service: ServiceProfile) -> None:
        super().__init__(machine, pool, device, service)
        self._size = (CELL, machine.sms[device])
        sizes = range(FINEST, machine.sms[device] + 1, FINEST)
        #: By SMs, the time of work that takes one second on the whole device.
        self._curve = LatencyCurve({sms: [service.curve.slowdown(sms)] for sms in sizes})
        #: All tokens of a decode step are due together; new requests join at its beginning.
        self._deadline = service.latency or None if service.role == "decode" else None

    async def run(self, pieces: Pieces) -> None:
        """Run a pass or piece on SMs sized for it."""
        self._cost = self._curve.times(sum(pieces) / 1e9) if self.whole else None
        await super().run(pieces)

    def record_latency(self, latency: float, weight: int) -> None:
        if self.whole:
            self._pool.observe(self._service.name, latency, weight)


@dataclass
class Sized(Elastic):
    """Service classes with elastic leases, which the pool sizes by targets and curves."""

    client_type = SizedClient

    name: str = "sized"
    about: str = "as elastic, sized by curve and target (policy sized); target-aware"

    def options(self, machine: Machine) -> dict[str, Any]:
        """Return the classes and the policy."""
        return super().options(machine) | {"policy": "sized"}

    def service_class(self, service: ServiceProfile) -> ServiceClass:
        """Return a class without a reserve, because the policy gives it SMs for its target."""
        base = super().service_class(service)
        latency = service.latency if service.reserve else None
        return replace(base, reserve=0, cap=ALL, preemptible=False, latency=latency or None)
