"""Strategies: the compared ways to share devices among classes.

A strategy gives each class a client on each device. A client runs passes, which are sequences of
pieces of work. Strategies differ in what may happen between two pieces.

Plain streams, gates and mutexes use the device's primary context, like a program without this
library; the other strategies use the pool's public interface.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from greensched.capacity.machine import Machine
from greensched.capacity.workload import ServiceProfile
from greensched.errors import InvalidRequest
from greensched.execution.bound_launch import BoundLaunch
from greensched.leasing.partition import Partition
from greensched.pool import Pool
from greensched.typing import ALL, Size

#: SMs of a pool's cell, and of a cell at the finest granularity.
CELL, FINEST = 8, 2

#: For each piece of a pass, its nanoseconds on the whole device.
Pieces = Sequence[int]


@dataclass(frozen=True, slots=True)
class Batching:
    """How an engine batches prompts and tokens; see `engine`.

    Attributes:
        budget: The most tokens of a fused pass. 0: each pass has only prompts or only tokens.
        interval: The number of decode steps between two passes of prompts.
        together: Whether a pass of prompts has as many prompts as fit, rather than one.
    """

    budget: int = 0
    interval: int = 1
    together: bool = True


class Client:
    """Runs the work of one class on one device. Strategies inherit from it.

    Attributes:
        target_aware: Whether its server schedules by targets, see `servers.Prefill`.
        joins_pieces: Whether pieces of a loop may run as one.
        blocks: The segments of a pass; 0 for the class's.
        batching: How one engine batches prompts and tokens. None: they have a server each.
    """

    target_aware: bool = False
    joins_pieces: bool = False
    blocks: int = 0
    batching: Batching | None = None

    async def run(self, pieces: Pieces) -> None:
        """Run a pass to its end. Every strategy's client defines this."""
        raise NotImplementedError

    def record_latency(self, latency: float, weight: int) -> None:
        """Learn the latency of a number of requests or tokens."""

    async def idle(self) -> None:
        """Release what is held only while there is work, because there is none."""


#: Returns the client of a class on a device.
Clients = Callable[[int, ServiceProfile], Client]


class Strategy(Protocol):
    """A way to share devices."""

    @property
    def name(self) -> str:
        """The strategy's name in `--policy`."""

    @property
    def about(self) -> str:
        """A line that describes it in the report."""

    def prepare(self, machine: Machine) -> None:
        """Do everything that may block, before a loop runs."""

    def open(self, machine: Machine) -> AbstractAsyncContextManager[Clients]:
        """Open a block in which the clients can be used."""


# -- the pool ---------------------------------------------------------------------------------


def pool_of(machine: Machine, **options: Any) -> Pool:
    """Make a pool over all devices, with every class's kernel loaded wherever it may run."""
    pool = Pool(
        driver=machine.driver,
        prepare=list(machine.kernels.values()),
        granularity=machine.granularity,
        **options,
    )
    machine.granted = lambda: pool.statistics().granted
    return pool


class HeldLeaseClient(Client):
    """Runs all passes in one lease, which it always holds."""

    def __init__(
        self,
        machine: Machine,
        p: Partition,
        device: int,
        service: str,
        *,
        target_aware: bool = False,
    ) -> None:
        self.target_aware = target_aware
        #: On its own SMs a loop takes as long in one piece as in many, except for the host's time.
        self.joins_pieces = not machine.host.awaited.p50_us
        self._machine = machine
        self._bound: BoundLaunch = p.bind(
            machine.configs[service][device], machine.kernels[service], 0
        )

    async def run(self, pieces: Pieces) -> None:
        """Run a pass as one piece, which takes as long on SMs of its own."""
        await self._machine.spend(self._machine.host.awaited)
        self._bound.set(0, sum(pieces))
        await self._bound.submit()


class Split:
    """B3: a fixed split of each device, held from beginning to end.

    Args:
        sms: The SMs of the highest class and of those below it. The last class gets the rest of a
            device; if several are not named, they share the rest evenly.
        target_aware: Whether its servers schedule by targets, like those of `sized`.
    """

    def __init__(self, *sms: int, target_aware: bool = False) -> None:
        self.sms = sms
        self.target_aware = target_aware
        self.name = "-".join(map(str, ("split", *sms)))
        self.about = f"B3 fixed split, {', '.join(map(str, sms))} SMs for the first classes"

    def prepare(self, machine: Machine) -> None:
        """Do nothing."""

    def sizes(self, machine: Machine, device: int) -> Mapping[str, Size]:
        """Return the SMs of each class.

        Raises:
            InvalidRequest: No SM is left for a class.
        """
        ranked = sorted(machine.services.values(), key=lambda s: -s.priority)
        total, sizes = machine.sms[device], list(self.sms[: len(ranked) - 1])
        while len(sizes) < len(ranked):
            rest, others = total - sum(sizes), len(ranked) - len(sizes)
            sizes.append(rest if others == 1 else rest // others // CELL * CELL)
        if min(sizes) < 1:
            raise InvalidRequest(
                f"{self.name}: {total} SMs for {len(ranked)} classes would be split into {sizes}: "
                "leave at least 1 for each"
            )
        return {service.name: size for service, size in zip(ranked, sizes, strict=True)}

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Clients]:
        """Open clients on leases that are granted together."""
        clients: dict[tuple[int, str], Client] = {}
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(pool_of(machine))
            for device in machine.devices:
                sizes = self.sizes(machine, device)
                parts = await stack.enter_async_context(
                    pool.partitions(*sizes.values(), device=device)
                )
                for name, p in zip(sizes, parts, strict=True):
                    clients[device, name] = HeldLeaseClient(
                        machine, p, device, name, target_aware=self.target_aware
                    )
            yield lambda device, service: clients[device, service.name]


class Alone(Split):
    """B0: one class alone on whole devices."""

    def sizes(self, machine: Machine, _device: int) -> Mapping[str, Size]:
        """Return ALL for the only class."""
        return dict.fromkeys(machine.services, ALL)


class LeaseClient(Client):
    """Takes a lease for each piece, or for each pass if `whole`.

    The default size is the class's reserve, up to its cap.
    """

    whole = False

    def __init__(
        self,
        machine: Machine,
        pool: Pool,
        device: int,
        service: ServiceProfile,
        size: Size | None = None,
    ) -> None:
        self._machine = machine
        self._pool = pool
        self._kernel = machine.kernels[service.name]
        self._config = machine.configs[service.name][device]
        self._device = device
        self._service = service
        total = machine.sms[device]
        self._size: Size = size or (service.reserve or 8, min(total, service.cap or total))

    def lease_options(self, _ns: int) -> dict[str, Any]:
        """Return the options of the lease for this much work."""
        return {"sms": self._size}

    async def run(self, pieces: Pieces) -> None:
        """Run each piece, or the whole pass, in its own lease."""
        for batch in (pieces,) if self.whole else ((ns,) for ns in pieces):
            options = self.lease_options(sum(batch))
            async with self._pool.partition(device=self._device, **options) as p:
                await self._machine.spend(self._machine.host.lease)
                await self._machine.spend(self._machine.host.awaited)
                await p.launch(self._config, self._kernel, sum(batch))


@dataclass
class Fifo:
    """The pool without classes: a lease for each piece, first come, first served."""

    client_type: ClassVar[type[LeaseClient]] = LeaseClient

    name: str = "fifo"
    about: str = "the pool, first come, first served"

    def prepare(self, machine: Machine) -> None:
        """Do nothing."""

    def options(self, _machine: Machine) -> dict[str, Any]:
        """Return further options of the pool."""
        return {}

    @asynccontextmanager
    async def open(self, machine: Machine) -> AsyncIterator[Clients]:
        """Open a client for each class on each device."""
        async with pool_of(machine, **self.options(machine)) as pool:
            clients = {
                (device, name): self.client(machine, pool, device, service)
                for device in machine.devices
                for name, service in machine.services.items()
            }
            yield lambda device, service: clients[device, service.name]
            for client in clients.values():
                await client.idle()

    def client(
        self, machine: Machine, pool: Pool, device: int, service: ServiceProfile
    ) -> LeaseClient:
        """Make the client of a class on a device."""
        return self.client_type(machine, pool, device, service)
