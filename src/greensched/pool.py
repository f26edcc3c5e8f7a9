"""The public door: a pool of SMs over one or more devices, leased to async tasks.

The pool joins the head and the hands. The scheduler decides, under one short lock; whoever made
it decide delivers what it granted, outside the lock, each waiter through the door of its own
loop. A lease belongs to one loop from its grant until its work is done; what a closed loop leaves
behind is taken over by whichever loop next waits for it.

States: NEW, OPENING, OPEN, CLOSING, CLOSED; POISONED after a device fault; FORKED in a child.
Only OPEN grants.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import anyio

from greensched import driver as drivers
from greensched.channel import Channel
from greensched.completion import Completion
from greensched.device import Device
from greensched.driver.base import Driver
from greensched.errors import (
    DeadlineExceeded,
    DeviceTaken,
    ForkedPool,
    GreenschedError,
    InvalidRequest,
    Poisoned,
    PoolClosed,
    WouldBlock,
)
from greensched.holding import Holding
from greensched.kernels import Kernel
from greensched.launch import LaunchConfig
from greensched.loops import Door, Errand, Waiter, current_door
from greensched.partition import Partition
from greensched.planning.cells import Demand, demands
from greensched.planning.policy import Policy, policy_named
from greensched.planning.scheduler import Lease, Request, Scheduler, State, validate_bound
from greensched.site import Site
from greensched.typing import ServiceClass, Size
from greensched.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("greensched")

#: Seconds `aclose` waits for leases to end, unless told otherwise. A serving process has 30 s
#: between SIGTERM and SIGKILL by Kubernetes' default; a pool should not take most of it.
GRACE = 5.0
#: Requests queued at most, unless told otherwise: a second of work at 1 ms each.
MAX_WAITING = 1024
#: While requests wait, closed loops are looked for so often.
TEND_S = 0.050


class PoolState(enum.Enum):
    """Where a pool is in its life."""

    NEW = "not open"
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    POISONED = "poisoned"
    FORKED = "forked"


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool has and did. SMs over all devices; counts since it was opened.

    Attributes:
        completion: `"word"`: streams write tickets to memory; `"event"`: they cannot here.
    """

    state: PoolState
    devices: int
    sms_total: int
    sms_free: int
    sms_leased: int
    sms_draining: int
    leases: int
    waiting: int
    requested: int
    granted: int
    cancelled: int
    expired: int
    refused: int
    lanes: int
    lanes_made: int
    completion: str


@dataclass(frozen=True, slots=True)
class CloseReport:
    """How a pool ended: what it had to leave behind because it still had work after the grace."""

    abandoned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wish:
    """What a partition is asked for: checked, and not yet requested."""

    parts: tuple[Demand, ...]
    sizes: tuple[Size, ...]
    device: int | None
    priority: int
    deadline: float | None

    def __str__(self) -> str:
        return "sms=" + ", ".join(repr(size) for size in self.sizes)


class _Queued:
    """Who waits for a grant, and how he is told."""

    __slots__ = ("completion", "error", "thread", "waiter")

    def __init__(self, completion: Completion) -> None:
        self.completion = completion
        self.thread = threading.get_ident()
        self.waiter: Waiter = completion.door.create_waiter()
        self.error: GreenschedError | None = None

    def tell(self) -> bool:
        """Wakes him, from whatever thread; False if his loop is closed."""
        if threading.get_ident() == self.thread and not self.completion.door.is_closed:
            self.waiter.wake()
            return True
        return self.completion.door.call_threadsafe(self.waiter.wake)


class Pool:
    """SMs of one or more devices, leased to async tasks. Open it with `async with`.

    Making one touches neither CUDA nor a loop: it may be done at import, on any thread. Several
    loops, in several threads, may share it.

    Args:
        devices: ordinals; None: every visible device.
        driver: a driver, `"cuda"`, or `"simulated:h200"`; None: what the environment variable
            `GREENSCHED_DRIVER` says, else CUDA. A simulation is never chosen by itself.
        services: classes of users, for `partition(service=...)`.
        policy: who is next: `"fifo"`, or an object (`planning.policy.Policy`).
        max_waiting: requests queued at most; beyond, `QueueFull`.
    """

    def __init__(
        self,
        devices: Sequence[int] | None = None,
        *,
        driver: str | Driver | None = None,
        services: Sequence[ServiceClass] = (),
        policy: str | Policy = "fifo",
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._wanted = None if devices is None else _ordinals(devices)
        self._driver_spec = driver
        self._services = {service.name: service for service in services}
        self._policy = policy_named(policy)
        self._max_waiting = validate_bound(max_waiting)
        self._lock = threading.Lock()
        self._state = PoolState.NEW
        self._fault: BaseException | None = None
        self._driver: Driver
        self._scheduler: Scheduler
        self._builder: Worker
        self._opening: Errand[None]
        self._closing: Errand[CloseReport]
        self._sites: tuple[Site, ...] = ()
        self._completions: dict[Door, Completion] = {}
        self._holdings: set[Holding] = set()
        self._idle: list[_Queued] = []
        _pools.add(self)

    # -- opening -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Opens the devices, cuts them, and makes the lanes. Idempotent; waits for a thread.

        A cancellation stops the waiting only; the next `open` waits for the same opening.

        Raises:
            DriverUnavailable: no usable driver or device; says what to install or change.
            DeviceTaken: another pool of this process has the device.
            InvalidRequest: no such device.
            CUDAError: the driver refused something; nothing is left open.
        """
        with self._lock:
            if self._state is PoolState.NEW:
                self._begin_opening()
            elif self._state is not PoolState.OPENING:
                if self._state is PoolState.OPEN:
                    return
                raise self._refusal()
            opening = self._opening
        await opening.wait()

    def _begin_opening(self) -> None:
        self._driver = drivers.open(self._driver_spec)
        self._builder = Worker(self._driver, "greensched builder")
        self._opening = Errand(self._build)
        self._state = PoolState.OPENING
        self._builder.submit(self._opening.do)

    def _build(self) -> None:
        """On the builder: everything that blocks. A failed opening leaves nothing open."""
        sites: list[Site] = []
        taken: list[int] = []
        try:
            self._driver.initialise()
            count = self._driver.device_count()
            for ordinal in self._wanted if self._wanted is not None else range(count):
                device = Device(ordinal, driver=self._driver)
                _take_device(self._driver, ordinal)
                taken.append(ordinal)
                sites.append(Site(device, self))
        except BaseException:
            for site in sites:
                site.abandon()
            _release_devices(self._driver, taken)
            with self._lock:
                self._state = PoolState.NEW
            self._builder.dismiss()
            raise
        scheduler = Scheduler([s.cells for s in sites], self._policy, self._max_waiting)
        for site, warm in zip(sites, scheduler.warm, strict=True):
            for mask in site.crews:
                warm.setdefault(mask.bit_count(), {})[mask] = None
        with self._lock:
            self._sites, self._scheduler = tuple(sites), scheduler
            self._state = PoolState.OPEN

    async def __aenter__(self) -> Self:
        """Opens it; see `open`."""
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Closes it, within the default grace, also where the block was cancelled."""
        with anyio.CancelScope(shield=True):
            await self.aclose()

    # -- asking for SMs ----------------------------------------------------------------------------

    def partition(
        self,
        sms: Size,
        *,
        device: int | None = None,
        service: str | None = None,
        deadline: float | None = None,
    ) -> Partition:
        """A lease of SMs, to be used with `async with`, which waits for them.

        Args:
            sms: how many: `16`; `(8, 64)`: as many up to 64 as are free once 8 are; `ALL` of a
                device; `REST`: the same, alone. Rounded up to what the device can be cut into;
                `Partition.sm_count` says what was granted.
            device: where; None: anywhere in the pool.
            service: on whose behalf, by the name of a class given to the pool.
            deadline: seconds from the grant's request: not granted by then, `DeadlineExceeded`.
                Once granted it means nothing.

        Raises:
            InvalidSize, InvalidRequest: what can never be right.
        """
        return Partition(self, self._wish((sms,), device, service, deadline))

    def partitions(
        self,
        *sizes: Size,
        device: int | None = None,
        service: str | None = None,
        deadline: float | None = None,
    ) -> AbstractAsyncContextManager[tuple[Partition, ...]]:
        """Several leases on one device, granted together, in the order of the arguments.

        One request: nobody holds one part and waits for another. `REST` stands for every SM of
        the device that is not in the same request.
        """
        return _Together(self, self._wish(sizes, device, service, deadline))

    def partition_nowait(
        self, sms: Size, *, device: int | None = None, service: str | None = None
    ) -> Partition:
        """A lease granted at once, still to be used with `async with`; never waits.

        Raises:
            WouldBlock: no SMs are free, or no lane over them is made yet.
            Others: as `partition`, and its `__aenter__`.
        """
        wish = self._wish((sms,), device, service, None)
        completion = self.completion()
        with self._lock:
            request = self._request(wish, completion, wait=False)
            if self._sites[request.leases[0].device].find(request.leases[0].mask) is None:
                granted = self._scheduler.drained(self._driver.time(), request.leases[0])
            else:
                (channel,) = self._claim(request, completion)
                return Partition(self, wish, channel)
        self._deliver(granted)
        raise WouldBlock("the SMs are free, but no lane over just these is made yet")

    async def launch(
        self,
        kernel: Kernel,
        config: LaunchConfig,
        *args: object,
        sms: Size,
        device: int | None = None,
        service: str | None = None,
        deadline: float | None = None,
    ) -> None:
        """Leases SMs, launches a kernel there, waits for it, and gives the SMs back."""
        async with self.partition(sms, device=device, service=service, deadline=deadline) as p:
            await p.launch(kernel, config, *args)

    async def run(
        self,
        fn: Callable[..., T],
        /,
        *args: object,
        sms: Size,
        device: int | None = None,
        service: str | None = None,
        deadline: float | None = None,
    ) -> T:
        """Leases SMs, calls a blocking function there, waits for it, and gives the SMs back."""
        async with self.partition(sms, device=device, service=service, deadline=deadline) as p:
            return await p.run(fn, *args)

    def _wish(
        self,
        sizes: tuple[Size, ...],
        device: int | None,
        service: str | None,
        deadline: float | None,
    ) -> Wish:
        if device is not None and (type(device) is not int or device < 0):
            raise InvalidRequest(f"device={device!r} is no ordinal of a device")
        if service is not None and service not in self._services:
            known = ", ".join(self._services) or "none"
            raise InvalidRequest(f"no service {service!r}: this pool has {known}")
        if deadline is not None and not deadline > 0:
            raise InvalidRequest(f"deadline={deadline!r} is no number of seconds from now")
        priority = self._services[service].priority if service is not None else 0
        return Wish(demands(sizes), sizes, device, priority, deadline)

    # -- granting ----------------------------------------------------------------------------------

    async def acquire(self, wish: Wish) -> tuple[Channel, ...]:
        """Waits for a grant. For partitions. A cancellation leaves nothing behind."""
        completion = self.completion()
        if completion.door.always_yields:
            await completion.door.checkpoint()
        with self._lock:
            request = self._request(wish, completion, wait=True)
            if request.state is State.GRANTED and self._are_made(request):
                return self._claim(request, completion)
        if request.state is State.QUEUED:
            await self._wait(request, completion)
        return await self._prepare(request, completion)

    def _request(self, wish: Wish, completion: Completion, *, wait: bool) -> Request:
        """Asks the scheduler. Holds the lock."""
        if self._state is not PoolState.OPEN:
            raise self._refusal()
        now = self._driver.time()
        request = self._scheduler.request(
            now,
            wish.parts,
            devices=None if wish.device is None else (self._index(wish.device),),
            priority=wish.priority,
            deadline=None if wish.deadline is None else now + wish.deadline,
            holder=completion.door.current_task(),
            wait=wait,
        )
        if request.state is State.QUEUED:
            request.owner = _Queued(completion)
        return request

    async def _wait(self, request: Request, completion: Completion) -> None:
        """Waits in the queue; whoever leaves it by an exception leaves nothing behind."""
        queued = request.owner
        assert isinstance(queued, _Queued)
        completion.queued()
        try:
            await queued.waiter
        except BaseException:
            self._leave(request)
            raise
        finally:
            completion.waiting -= 1
        if queued.error is not None:
            raise queued.error

    async def _prepare(self, request: Request, completion: Completion) -> tuple[Channel, ...]:
        """Makes the lanes that are not made yet. Whoever leaves by an exception has nothing."""
        try:
            while True:
                with self._lock:
                    self.check()
                    if self._are_made(request):
                        return self._claim(request, completion)
                    missing = next(
                        lease for lease in request.leases if self._crew_of(lease) is None
                    )
                errand = Errand(lambda: self._make(missing.device, missing.mask))  # noqa: B023  awaited before the next turn
                completion.errand()
                self._builder.submit(errand.do)
                try:
                    await errand.wait()
                finally:
                    completion.delivered()
        except BaseException:
            self._leave(request)
            raise

    def _make(self, index: int, mask: int) -> None:
        """On the builder: makes a lane, and ends those that are too many."""
        site, warm = self._sites[index], self._scheduler.warm[index]
        site.make(mask)
        with self._lock:
            warm.setdefault(mask.bit_count(), {})[mask] = None
            gone = [(other, site.crews.pop(other)) for other in site.surplus() if other != mask]
            for other, _ in gone:
                del warm[other.bit_count()][other]
        for _, crew in gone:
            crew.close()

    def _crew_of(self, lease: Lease) -> Any:
        return self._sites[lease.device].crews.get(lease.mask)

    def _are_made(self, request: Request) -> bool:
        return all(self._crew_of(lease) is not None for lease in request.leases)

    def _claim(self, request: Request, completion: Completion) -> tuple[Channel, ...]:
        """The lanes of a grant are in this loop's hands from here on. Holds the lock."""
        channels = []
        for lease in request.leases:
            site = self._sites[lease.device]
            crew = site.find(lease.mask)
            assert crew is not None
            crew.is_leased = True
            holding = Holding(lease, crew, completion, self)
            self._holdings.add(holding)
            channels.append(Channel(holding, site, self.check))
        return tuple(channels)

    def _leave(self, request: Request) -> None:
        """Somebody does not want his request any more, queued or granted."""
        with self._lock:
            now = self._driver.time()
            granted = self._scheduler.cancel(now, request)
            if request.state is State.GRANTED:
                for lease in request.leases:
                    granted += self._scheduler.drained(now, lease)
        self._deliver(granted)

    def draining(self, holding: Holding) -> None:
        """A lease has ended, and its work has not: nobody holds it, and nobody gets it yet."""
        with self._lock:
            self._scheduler.release(holding.lease)

    def over(self, holding: Holding) -> None:
        """All work of a lease is done: its cells are free."""
        with self._lock:
            holding.crew.is_leased = False
            self._holdings.discard(holding)
            granted = self._scheduler.drained(self._driver.time(), holding.lease)
            idle = self._idle if not self._holdings else []
        self._deliver(granted)
        for queued in idle:
            queued.tell()

    def _deliver(self, granted: list[Request]) -> None:
        """Tells those who were granted; what a closed loop was granted goes to others."""
        while granted:
            request = granted.pop()
            queued = request.owner
            if isinstance(queued, _Queued) and not queued.tell():
                with self._lock:
                    for lease in request.leases:
                        granted += self._scheduler.drained(self._driver.time(), lease)

    def _tend(self) -> float:
        """While requests wait: passed deadlines, and loops that closed with leases in hand."""
        self._adopt(self.completion())
        with self._lock:
            now = self._driver.time()
            granted, expired = self._scheduler.tick(now)
            deadline = self._scheduler.next_deadline()
        for request in expired:
            self._refuse(request, DeadlineExceeded((request.deadline or now) - request.arrived))
        self._deliver(granted)
        return TEND_S if deadline is None else max(0.0, min(TEND_S, deadline - now))

    def _refuse(self, request: Request, error: GreenschedError) -> None:
        queued = request.owner
        if isinstance(queued, _Queued):
            queued.error = error
            queued.tell()

    def _adopt(self, completion: Completion) -> None:
        """Takes over what closed loops left: their leases end, their lanes drain."""
        with self._lock:
            if not any(door.is_closed for door in self._completions):
                return
            for door in [door for door in self._completions if door.is_closed]:
                del self._completions[door]
            orphans = [h for h in self._holdings if h.completion.door.is_closed]
        for holding in orphans:
            holding.adopt(completion)

    # -- for lanes and their threads ---------------------------------------------------------------

    def completion(self) -> Completion:
        """The running loop's view of the outstanding work.

        Raises:
            NoLoop: no loop is running on this thread.
            PoolClosed: the pool was never opened.
        """
        door = current_door()
        completion = self._completions.get(door)
        if completion is None:
            with self._lock:
                if self._state in (PoolState.NEW, PoolState.OPENING):
                    raise self._refusal()
                completion = Completion(door, self._driver, self.lost, self._tend)
                self._completions[door] = completion
            self._adopt(completion)
        return completion

    def check(self) -> None:
        """Raises what keeps a granted partition from working: closed, poisoned, forked."""
        if self._state is not PoolState.OPEN and self._state is not PoolState.CLOSING:
            raise self._refusal()

    def lost(self, fault: BaseException) -> None:
        """A device fault, met by anybody, on any thread: the first one ends everything."""
        with self._lock:
            if self._fault is not None or self._state is PoolState.CLOSED:
                return
            self._fault = fault
            self._state = PoolState.POISONED
            waiting = self._scheduler.close()
            completions = list(self._completions.values())
            for site in self._sites:
                site.fail(fault)
        logger.error("the GPU is unusable until this process is replaced: %s", fault)
        for request in waiting:
            self._refuse(request, Poisoned(fault))
        for completion in completions:
            completion.kick_threadsafe()

    def _refusal(self) -> GreenschedError:
        if self._fault is not None:
            return Poisoned(self._fault)
        if self._state is PoolState.FORKED:
            return ForkedPool("this pool")
        hint = ": use `async with pool:` or `await pool.open()`"
        state = self._state
        return PoolClosed("this pool", state.value + (hint if state is PoolState.NEW else ""))

    def _index(self, ordinal: int) -> int:
        for index, site in enumerate(self._sites):
            if site.device.ordinal == ordinal:
                return index
        mine = ", ".join(str(site.device.ordinal) for site in self._sites)
        raise InvalidRequest(f"device {ordinal} is not in this pool, which has {mine}")

    # -- closing -----------------------------------------------------------------------------------

    async def aclose(self, grace: float = GRACE) -> CloseReport:
        """Closes the pool: grants nothing more, lets leases end, then ends everything.

        Whoever is queued gets `PoolClosed`; whoever holds a lease may finish within the grace.
        What still has work then is abandoned as it is and reported. Idempotent. A cancellation
        ends the grace at once; the closing goes on, on a thread.

        Args:
            grace: seconds to wait for leases to end and lanes to drain.
        """
        with self._lock:
            if self._state is PoolState.NEW:
                self._state = PoolState.CLOSED
            if self._state is PoolState.CLOSED and not hasattr(self, "_closing"):
                return CloseReport()
            if self._state is PoolState.FORKED:
                return CloseReport()
            first = not hasattr(self, "_closing")
            waiting: list[Request] = []
            if first:
                self._closing = Errand(self._end)
                if self._state is PoolState.OPEN:
                    self._state = PoolState.CLOSING
                    waiting = self._scheduler.close()
        if first:
            for request in waiting:
                self._refuse(request, PoolClosed("this pool", "closing"))
            try:
                await self._wait_for_leases(grace)
            finally:
                self._builder.submit(self._closing.do)
        return await self._closing.wait()

    async def _wait_for_leases(self, grace: float) -> None:
        if self._state is PoolState.OPENING or self._fault is not None:
            return
        completion = self.completion()
        self._adopt(completion)
        with anyio.move_on_after(grace):
            while self._holdings:
                queued = _Queued(completion)
                self._idle.append(queued)
                await queued.waiter

    def _end(self) -> CloseReport:
        """On the builder: ends every site that has no work left."""
        with self._lock:
            poisoned = self._fault is not None
            self._state = PoolState.POISONED if poisoned else PoolState.CLOSED
            sites, self._sites = self._sites, self._sites
        abandoned: list[str] = []
        if poisoned:  # no more CUDA calls: the process is to be replaced
            abandoned = [repr(site.device) for site in sites]
        else:
            for site in sites:
                abandoned += site.close()
        _release_devices(self._driver, [site.device.ordinal for site in sites])
        self._builder.dismiss()
        if abandoned:
            logger.warning("the pool was closed with work in flight: %s", ", ".join(abandoned))
        return CloseReport(tuple(abandoned))

    def __del__(self) -> None:
        if self._state is PoolState.OPEN:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)

    # -- questions ---------------------------------------------------------------------------------

    @property
    def state(self) -> PoolState:
        """Where it is in its life."""
        return self._state

    @property
    def is_ready(self) -> bool:
        """Whether it grants: what a readiness probe should answer."""
        return self._state is PoolState.OPEN

    @property
    def fault(self) -> BaseException | None:
        """The first device fault, if there was one."""
        return self._fault

    @property
    def devices(self) -> tuple[Device, ...]:
        """Its devices, in the order they were given."""
        return tuple(site.device for site in self._sites)

    def statistics(self) -> PoolStatistics:
        """What it has and did, at one moment."""
        with self._lock:
            if not self._sites:
                raise self._refusal()
            s = self._scheduler.statistics()
            crews = [crew for site in self._sites for crew in site.crews.values()]
            return PoolStatistics(
                state=self._state,
                devices=len(self._sites),
                sms_total=sum(site.cells.total for site in self._sites),
                sms_free=s.sms_free,
                sms_leased=s.sms_leased,
                sms_draining=s.sms_draining,
                leases=len(self._holdings),
                waiting=s.waiting,
                requested=s.requested,
                granted=s.granted,
                cancelled=s.cancelled,
                expired=s.expired,
                refused=s.refused,
                lanes=len(crews),
                lanes_made=sum(site.lanes_made for site in self._sites),
                completion="event" if crews and crews[0].lane.uses_events else "word",
            )

    def __repr__(self) -> str:
        if not self._sites:
            return f"<Pool: {self._state.value}>"
        s = self.statistics()
        return (
            f"<Pool: {s.state.value}, {s.devices} devices, {s.sms_total} SMs: {s.sms_free} free, "
            f"{s.sms_leased} leased, {s.sms_draining} draining; {s.waiting} waiting>"
        )


class _Together:
    """The context manager of a joint grant."""

    def __init__(self, pool: Pool, wish: Wish) -> None:
        self._pool = pool
        self._wish = wish
        self._partitions: tuple[Partition, ...] = ()

    async def __aenter__(self) -> tuple[Partition, ...]:
        channels = await self._pool.acquire(self._wish)
        self._partitions = tuple(Partition(self._pool, self._wish, c) for c in channels)
        return self._partitions

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends all of them; then waits for them as each would."""
        failures: list[BaseException] = []
        for partition in self._partitions:
            try:
                await partition.__aexit__(kind, error, trace)
            except Exception as failure:
                failures.append(failure)
            except BaseException as cancelled:
                kind, error = type(cancelled), cancelled
                failures.insert(0, cancelled)
        if failures:
            for later in failures[1:]:
                failures[0].add_note(f"and then: {later!r}")
            raise failures[0]


# -- one pool to a device, and none in a forked child -----------------------------------------

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_taken: dict[tuple[int, int], Driver] = {}
_taken_lock = threading.Lock()


def _take_device(driver: Driver, ordinal: int) -> None:
    with _taken_lock:
        if (id(driver), ordinal) in _taken:
            raise DeviceTaken(ordinal)
        _taken[id(driver), ordinal] = driver


def _release_devices(driver: Driver, ordinals: Sequence[int]) -> None:
    with _taken_lock:
        for ordinal in ordinals:
            _taken.pop((id(driver), ordinal), None)


def _ordinals(devices: Sequence[int]) -> tuple[int, ...]:
    chosen = tuple(devices)
    if not chosen or len(set(chosen)) != len(chosen):
        raise InvalidRequest(f"devices={devices!r}: give each ordinal once, and at least one")
    return chosen


def _forked() -> None:
    """In a forked child: CUDA does not survive, and no lock may be taken."""
    for pool in tuple(_pools):
        pool._state = PoolState.FORKED
        for site in pool._sites:
            site.memory.is_closed = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
