"""Two users on one GPU: simulations of the measured workloads W1, W2, W7 and W8.

They have the loops, arrivals and seeds of `benchmarks/gpu/sharing.py`, which takes its classes from
here. The inputs are the kernels' grids, their times alone, the split, and the host's costs
(`hosts`); everything else follows.
"""

from __future__ import annotations

import abc
import asyncio
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from benchmarks.model.hosts import Host
from greensched.capacity.baselines import Streams
from greensched.capacity.latency_tables import SpeedupCurve
from greensched.capacity.machine import Machine
from greensched.capacity.strategies import Client, pool_of
from greensched.capacity.workload import ServiceProfile
from greensched.device.launch import LaunchConfig
from greensched.execution.bound_launch import BoundLaunch
from greensched.leasing.partition import Partition
from greensched.pool import Pool
from greensched.scheduling.services import ServiceClass
from greensched.typing import ALL, Cost, Size

#: The number of measured slices of each arm.
ROUNDS = 5
#: Mean pause between two requests of W1, in seconds.
PAUSE_S = 0.0005
#: The fraction of a checkpoint interval after which a busy user reaches its checkpoint.
OF_SEGMENT = 0.6
#: Pieces that a busy user keeps in flight.
DEPTH = 2
#: Bytes a second that an SM draws at 4 bytes a thread: copies on 8 SMs of an H100 (bandwidth.json).
NARROW = 38.8e9
#: Watts of an SM in arithmetic without tensor cores (same source).
ARITHMETIC_W = 2.7

CostOf = Callable[[int], Cost]


@dataclass(frozen=True)
class GridWork(SpeedupCurve):
    """Kernels of one grid, each with a cost by SMs. A piece is the number of a kernel, from 1."""

    grid: int = 1
    block: int = 256
    kinds: tuple[CostOf, ...] = ()

    def config(self, _sms: int, _threads: int = 2048, _waves: int = 1) -> LaunchConfig:
        """Return the grid and the block, which do not depend on the device."""
        return LaunchConfig(grid=self.grid, block=self.block)

    def cost(self, seconds: float, sms: int) -> Cost:
        """Return the cost of the kernel whose number is given as nanoseconds."""
        return self.kinds[round(seconds * 1e9) - 1](sms)


def grid_work(name: str, grid: int, block: int, *kinds: CostOf) -> GridWork:
    """Return kernels of one grid."""
    return GridWork(name, (1,), (1.0,), grid=grid, block=block, kinds=kinds)


def rounds_of(grid: int, resident: int, wave_us: float) -> CostOf:
    """Return the cost of blocks of fixed duration, of which an SM runs some at once."""
    return lambda sms: Cost(fixed_ns=1e3 * wave_us * math.ceil(grid / (resident * sms)))


def arithmetic(grid: int, block_us: float) -> CostOf:
    """Return the cost of blocks of arithmetic, which an SM runs one after another."""

    def cost(sms: int) -> Cost:
        took = 1e3 * block_us * math.ceil(grid / sms)
        return Cost(sm_ns=took * min(grid, sms), sm_watts=ARITHMETIC_W)

    return cost


def moves(nbytes: float, sm_bandwidth: float | None = None) -> CostOf:
    """Return the cost of moving bytes."""
    return lambda _sms: Cost(sm_ns=1.0, dram_bytes=nbytes, sm_bandwidth=sm_bandwidth)


@dataclass(frozen=True)
class Setting:
    """One workload as it was measured on one GPU.

    Attributes:
        gpu: The device, as for `--gpus`.
        critical, other: The kernels of the users.
        request: The kernels of a request of the critical user; `piece`: of the other's piece.
        split: SMs of the critical user.
        seconds: The length of a slice.
        host: The host's costs.
        load: Requests a second of the critical user. 0: one after another, timed to their start.
        other_requests: Whether the other user has requests, too.
        services: The classes of each arm of ours.
        rounds: The number of slices of each arm.
        pause: Mean seconds between two requests that come one after another.
        to_end: Whether such a request is timed to its kernel's end instead of its start.
    """

    gpu: str
    critical: GridWork
    other: GridWork
    request: tuple[int, ...]
    piece: tuple[int, ...]
    split: int
    seconds: float
    host: Host
    load: float = 0.0
    other_requests: bool = False
    services: dict[str, list[ServiceClass]] = field(default_factory=dict)
    rounds: int = ROUNDS
    pause: float = PAUSE_S
    to_end: bool = False


@dataclass
class Found:
    """The result of an arm: microseconds of the critical user, and of the other user's pieces."""

    critical: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value below which this fraction of the values lies, interpolated."""
    return float(np.quantile(values, part))


# -- classes of the arms of ours ----------------------------------------------------------------


def kept(sms: int) -> list[ServiceClass]:
    """Return a critical class with a reserve that is never lent, and a class on the rest."""
    return [
        ServiceClass("critical", reserve=sms, priority=10),
        ServiceClass("other", preemptible=True, checkpoint_interval=0.010),
    ]


def lent(sms: int, seconds: float = 0.004) -> list[ServiceClass]:
    """Return classes with a reserve that is lent while idle."""
    return [
        ServiceClass("critical", reserve=sms, priority=10, max_wait_for_reserve=seconds),
        ServiceClass("other", preemptible=True, checkpoint_interval=seconds),
    ]


def shared(sms: int) -> list[ServiceClass]:
    """Return classes that share all SMs while both meet their latencies."""
    return [
        ServiceClass("critical", reserve=sms, priority=10, latency=0.050, shared=True),
        ServiceClass("other", latency=0.050, shared=True),
    ]


# -- places -------------------------------------------------------------------------------------


@dataclass
class Place(abc.ABC):
    """Runs a user's work on a stream or in a lease."""

    machine: Machine
    setting: Setting
    user: str
    rng: random.Random

    @abc.abstractmethod
    async def request(self) -> float:
        """Make one request; return the seconds to the start of its kernel."""

    @abc.abstractmethod
    async def keep_busy(self, until: float, done: list[float]) -> None:
        """Work without pause, and record when each piece was done."""

    @property
    def _pieces(self) -> tuple[int, ...]:
        return self.setting.request if self.user == "critical" else self.setting.piece

    def _now(self) -> float:
        return self.machine.now() / 1e9

    def _begun(self, asked: float) -> float:
        """Return the seconds from a request until its kernel began, excluding host time."""
        trace = self.machine.traces[0]
        run = next(run for run in reversed(trace) if run.service == self.user)
        latency = self.machine.driver.devices[0].model.launch_latency_ns
        return (run.start - latency) / 1e9 - asked

    def _bind(self, p: Partition) -> BoundLaunch:
        return p.bind(self.machine.configs[self.user][0], self.machine.kernels[self.user], 1)

    def _submit(self, bound: BoundLaunch) -> Awaitable[None]:
        """Launch all pieces of the work; return the last one, to be awaited."""
        *firsts, last = self._pieces
        for kind in firsts:
            bound.set(0, kind)
            bound()
        bound.set(0, last)
        return bound.submit()


@dataclass
class OnStream(Place):
    """A plain stream."""

    client: Client

    async def request(self) -> float:
        """Make one request; return the seconds to the start of its kernel."""
        asked = self._now()
        await self.client.run(self._pieces)
        return self._begun(asked)

    async def keep_busy(self, until: float, done: list[float]) -> None:
        """Work without pause."""

        async def one() -> None:
            while self._now() < until:
                await self.client.run(self._pieces)
                done.append(self._now())

        await asyncio.gather(*(one() for _ in range(DEPTH)))


@dataclass
class Held(Place):
    """A lease that is held all the time."""

    p: Partition
    #: Whether launches are the pool's bound ones, or raw ones on a green context's stream.
    is_bound: bool

    def __post_init__(self) -> None:
        self._bound = self._bind(self.p)

    async def request(self) -> float:
        """Make one request; return the seconds to the start of its kernel."""
        asked = self._now()
        if self.is_bound:
            await asyncio.sleep(self.setting.host.submission.seconds(self.rng))
        await self._submit(self._bound)
        return self._begun(asked)

    async def keep_busy(self, until: float, done: list[float]) -> None:
        """Work without pause."""
        in_flight: deque[Awaitable[None]] = deque()
        while self._now() < until:
            in_flight.append(self._submit(self._bound))
            if len(in_flight) >= DEPTH:
                await in_flight.popleft()
                done.append(self._now())
        while in_flight:
            await in_flight.popleft()


@dataclass
class Leased(Place):
    """A lease for each request; a busy user has one lease, with checkpoints."""

    pool: Pool
    sms: Size
    segment: float = 0.010

    async def request(self) -> float:
        """Take a lease, make one request, and return the lease; return the seconds to its start."""
        host, asked = self.setting.host, self._now()
        async with self.pool.partition(self.sms, service=self.user) as p:
            took = host.lease.seconds(self.rng) + host.submission.seconds(self.rng)
            if len(self._pieces) > 1:
                took += host.request.seconds(self.rng)
                took += len(self._pieces) * host.launch.seconds(self.rng)
            await asyncio.sleep(took)
            await self._submit(self._bind(p))
            return self._begun(asked)

    async def keep_busy(self, until: float, done: list[float]) -> None:
        """Work without pause, with a checkpoint before a launch that exceeds the segment."""
        host, pieces = self.setting.host, self._pieces
        async with self.pool.partition(self.sms, service=self.user) as p:
            bound = self._bind(p)
            in_flight: deque[tuple[int, Awaitable[None]]] = deque()

            async def ended() -> None:
                index, job = in_flight.popleft()
                await job
                if index == len(pieces) - 1:
                    done.append(self._now())

            looked, launched, each, index = self._now(), 0, 0.0, 0
            while (now := self._now()) < until:
                needed = now - looked + each * (len(in_flight) + 1)
                if launched and needed > self.segment:
                    while in_flight:
                        await ended()
                    await asyncio.sleep(host.checkpoint.seconds(self.rng))
                    await p.checkpoint()
                    now = self._now()
                    each, looked, launched = (now - looked) / launched, now, 0
                bound.set(0, pieces[index])
                in_flight.append((index, bound.submit()))
                launched, index = launched + 1, (index + 1) % len(pieces)
                if len(in_flight) >= DEPTH:
                    await ended()
            while in_flight:
                await ended()


# -- one arm ------------------------------------------------------------------------------------


def run(setting: Setting, arm: str) -> Found:
    """Simulate one arm: `streams`, `priority`, `split`, or one of ours, by name."""
    profiles = {
        name: ServiceProfile(name=name, role="loop", curve=curve, priority=priority)
        for name, curve, priority in (
            ("critical", setting.critical, 1),
            ("other", setting.other, 0),
        )
    }
    machine = Machine(setting.gpu, profiles, {}, 1)
    plain = arm in ("streams", "priority")
    strategy = Streams(name=arm, prioritised=arm == "priority")
    if plain:
        strategy.prepare(machine)
    found = Found()

    async def main() -> None:
        end = machine.begin()
        opened = (
            _on_streams(machine, setting, strategy) if plain else _on_leases(machine, setting, arm)
        )
        async with opened as (critical, other):
            for number in range(1, setting.rounds + 1):
                await _slice(machine, setting, critical, other, found, 10 * number)
        end()

    try:
        machine.clock.run(main)
    finally:
        machine.close()
    return found


Places = AsyncIterator[tuple[Place, Place]]


@asynccontextmanager
async def _on_streams(machine: Machine, setting: Setting, strategy: Streams) -> Places:
    """Open the places of the critical and the other user on streams."""

    def place(user: str) -> Place:
        client = clients(0, machine.services[user])
        return OnStream(machine, setting, user, random.Random(user), client)

    async with strategy.open(machine) as clients:
        yield place("critical"), place("other")


@asynccontextmanager
async def _on_leases(machine: Machine, setting: Setting, arm: str) -> Places:
    """Open the places on leases: a fixed split, or the classes of an arm of ours."""
    critical, other = (
        (machine, setting, user, random.Random(f"{arm} {user}")) for user in ("critical", "other")
    )
    services = setting.services.get(arm)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(pool_of(machine, services=services or []))
        if services is None:
            rest = machine.sms[0] - setting.split
            p, q = await stack.enter_async_context(pool.partitions(setting.split, rest))
            yield Held(*critical, p, is_bound=False), Held(*other, q, is_bound=False)
            return
        segment = next(s.checkpoint_interval for s in services if s.name == "other") or 0.010
        busy = Leased(*other, pool, (8, ALL), OF_SEGMENT * segment)
        if arm == "lease held":
            p = await stack.enter_async_context(pool.partition(setting.split, service="critical"))
            yield Held(*critical, p, is_bound=True), busy
            return
        yield Leased(*critical, pool, setting.split), busy


async def _slice(
    machine: Machine, setting: Setting, critical: Place, other: Place, found: Found, seed: int
) -> None:
    """Run both users for the length of a slice."""
    begin = machine.now() / 1e9 + 0.005
    end = begin + setting.seconds
    first = begin + 0.1 * setting.seconds
    done: list[float] = []
    async with asyncio.TaskGroup() as users:
        if setting.other_requests:
            users.create_task(
                _open(machine, other, found.other, setting.load, begin, end, seed + 1)
            )
        else:
            users.create_task(other.keep_busy(end + 0.01, done))
        if setting.load:
            users.create_task(
                _open(machine, critical, found.critical, setting.load, first, end, seed)
            )
        else:
            users.create_task(_closed(machine, critical, found.critical, first, end, seed, setting))
    if len(done) > 1:
        found.other.append(1e6 * (done[-1] - done[0]) / (len(done) - 1))
    await asyncio.sleep(0.005)


async def _until(machine: Machine, when: float) -> None:
    await asyncio.sleep(max(0.0, when - machine.now() / 1e9))


async def _closed(
    machine: Machine,
    place: Place,
    out: list[float],
    begin: float,
    end: float,
    seed: int,
    setting: Setting,
) -> None:
    """Make one request after another, with pauses; time each to its start or its end."""
    rng, noise = random.Random(seed), random.Random(f"host {seed}")
    await _until(machine, begin)
    while (asked := machine.now() / 1e9) < end:
        took = await place.request()
        if setting.to_end:
            latency = machine.driver.devices[0].model.launch_latency_ns
            took = (machine.now() - latency) / 1e9 - asked
        out.append(1e6 * (took + setting.host.start.seconds(noise)))
        pause = rng.expovariate(1 / setting.pause) if setting.pause else 0.0
        await _until(machine, machine.now() / 1e9 + pause)


async def _open(
    machine: Machine,
    place: Place,
    out: list[float],
    rate: float,
    begin: float,
    end: float,
    seed: int,
) -> None:
    """Make requests at Poisson times, one at a time; time each from its due time."""
    rng, due = random.Random(seed), begin
    while (due := due + rng.expovariate(rate)) < end:
        await _until(machine, due)
        if machine.now() / 1e9 >= end:
            out.append(1e6 * (end - due))
            continue
        await place.request()
        out.append(1e6 * (machine.now() / 1e9 - due))
