"""The desk: where the head's decisions meet the loops. One for each open pool.

The scheduler decides, under one short lock; whoever made it decide delivers what it granted,
outside the lock, each waiter through the door of its own loop. A lease belongs to one loop from
its grant until its work is done; what a closed loop leaves behind is taken over by whichever loop
next waits for it, and what it was granted goes to others.

Nothing is lost by a cancellation: a request that was queued leaves the queue, and one that was
granted in the meantime gives its cells back.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from greensched._asynclib import get_ident
from greensched.device.quota import MemoryQuota
from greensched.driver.interface import Driver
from greensched.errors import (
    DeadlineExceeded,
    DeviceLost,
    ForkedPool,
    GreenschedError,
    PoolClosed,
)
from greensched.execution.completion import CompletionPoller
from greensched.execution.eventloop import current_adapter
from greensched.execution.eventloop.base import LoopAdapter, Waiter
from greensched.execution.executor import Executor
from greensched.execution.lease import Lease
from greensched.execution.threads import WorkerThread
from greensched.leasing.device_pool import DevicePool, index_of
from greensched.leasing.grant_waiter import (
    expect,
    heard,
    is_left,
    let_go,
    take_handed,
    tell,
    tell_all,
    waits_no_more,
)
from greensched.leasing.lease_cache import LeaseCache
from greensched.leasing.requests import LeaseRequest, checked_deadline, checked_duration
from greensched.leasing.status import PoolState, PoolStatistics, collect_statistics, update_quotas
from greensched.scheduling.allocator import Placement
from greensched.scheduling.policy import Policy
from greensched.scheduling.requests import Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass

logger = logging.getLogger("greensched")

#: While requests wait, closed loops are looked for so often.
TEND_S = 0.050
#: Looked up for every lease: a name of a module is found faster than members of an enum.
OPEN: Final = PoolState.OPEN
FORKED: Final = PoolState.FORKED
WORKING: Final = (PoolState.OPENING, OPEN, PoolState.CLOSING)


class LeaseManager:
    """Grants leases, and keeps account of who holds what, until the pool ends.

    Made closed; `start` opens it.
    """

    def __init__(self, driver: Driver, builder: WorkerThread, lock: threading.Lock) -> None:
        self.driver = driver
        self._time = driver.time
        self.builder = builder
        self.lock = lock
        self.state = PoolState.OPENING
        self.sites: tuple[DevicePool, ...] = ()
        self.scheduler: Scheduler
        self.leases: set[Lease] = set()
        #: Of classes whose memory is bounded, or was.
        self._allowances: dict[str, MemoryQuota] = {}
        self._completions: dict[LoopAdapter, CompletionPoller] = {}
        #: Who asked last.
        self._latest: CompletionPoller | None = None
        #: Executors the builder is to make, by device and cells.
        self._making: set[tuple[int, int]] = set()
        #: Where it makes one right now.
        self._making_at: DevicePool | None = None
        self._waiting_for_none: list[tuple[LoopAdapter, Waiter]] = []
        #: Requests of tasks that were collected while they waited: the next caller gives them up.
        self._forsaken: deque[Request] = deque()
        self._parking = LeaseCache(self.lock, self._free, self._tell_freed, driver.time)
        #: A lease that was parked, as `ask` would give it; and how one is left that can be.
        self.take, self.park = self._parking.take, self._parking.park

    def start(
        self,
        sites: Sequence[DevicePool],
        policy: Policy,
        max_waiting: int,
        services: Sequence[ServiceClass],
        placement: Placement,
    ) -> None:
        """Opens the desk over the sites.

        Raises:
            InvalidRequest: the floors of the classes do not fit on the devices.
        """
        scheduler = Scheduler(
            [site.cells for site in sites],
            policy,
            max_waiting,
            lambda index, mask: mask in sites[index].executors,
            services=services,
            placement=placement,
        )
        for site, warm in zip(sites, scheduler.ready_masks, strict=True):
            for mask in site.executors:
                warm.setdefault(mask.bit_count(), {})[mask] = None
        update_quotas(self._allowances, services)
        with self.lock:
            self.sites, self.scheduler = tuple(sites), scheduler
            for site in sites:
                site.device.health.on_failure = self.device_failed
            if self.state is PoolState.OPENING:  # else it is closed as soon as it is open
                self.state = OPEN
                self._parking.start(self.scheduler)
        self._have_made()

    # -- asking ----------------------------------------------------------------------------------

    def opened(self) -> LeaseManager:
        """Itself. A pool says its desk by that."""
        return self

    def ask(self, wish: LeaseRequest, completion: CompletionPoller) -> tuple[Lease, ...] | Request:
        """A grant at once, or a request that is queued, whose owner is told when to `claim`.

        Whoever does not wait for it any more has it `leave`.

        Raises:
            TooManySMs, WouldDeadlock: it can never be, or not any more.
            QueueFull, DeadlineImpossible: it cannot be now.
            PoolClosed, DeviceLost, ForkedPool: nothing is granted any more.
        """
        self._give_up_forsaken()
        with self.lock:
            request = self._request(wish, completion, wait=True)
            others = self.scheduler.resized(request)
            leases = self._claim(request, completion) if request.grants else ()
            if not leases:
                expect(request, completion)
        self._deliver(others)
        if leases:
            return leases
        completion.request_queued(request.deadline)
        return request

    def claim(self, request: Request) -> tuple[Lease, ...]:
        """What was granted to one that was told.

        Raises:
            DeadlineExceeded, TooManySMs, CUDAError: why it was not.
            PoolClosed, DeviceLost, ForkedPool: nothing is granted any more.
        """
        completion = heard(request)
        with self.lock:
            self.check()
            leases = self._claim(request, completion)
        let_go(request)
        return leases

    def acquire_nowait(self, wish: LeaseRequest) -> tuple[Lease, ...]:
        """A grant at once, on executors that are made; raises `WouldBlock` and what `ask` does."""
        completion = self.current_poller()
        self._adopt(completion)  # nobody else may come by to do it
        self._give_up_forsaken()
        with self.lock:
            request = self._request(wish, completion, wait=False)
            others = self.scheduler.resized(request)
            leases = self._claim(request, completion)
        self._deliver(others)
        return leases

    def unpark(self) -> None:
        """The scheduler knows again who holds what, and what is free. Holds the lock."""
        parking = self._parking
        if not (parking.put or parking.is_taken):
            return
        leases, taken = parking.clear()
        self.scheduler.count_again(taken)
        for lease in leases:
            lease.executor.is_leased = False
            self.leases.discard(lease)
            granted = self.scheduler.drained(self._time(), lease.grant)
            assert not granted, "something was parked while somebody waited"
        for lease in self.leases:
            if lease.pending_holder is not None:
                self.scheduler.pass_on(lease.grant, lease.pending_holder)
                lease.pending_holder = None

    def _request(self, wish: LeaseRequest, completion: CompletionPoller, *, wait: bool) -> Request:
        """Asks the scheduler. Holds the lock."""
        if self.state is not OPEN:
            raise self.refusal()
        self.unpark()
        now = self._time()
        return self.scheduler.request(
            now,
            wish.parts,
            service=wish.service,
            devices=None if wish.device is None else (index_of(self.sites, wish.device),),
            near=None if wish.near is None else index_of(self.sites, wish.near),
            deadline=None if wish.deadline is None else now + wish.deadline,
            duration=wish.duration,
            holder=completion.loop.current_holder(),
            wait=wait,
        )

    def _have_made(self) -> None:
        """Has the builder make what requests lack, each once. Never blocks."""
        while self.scheduler.missing_executors:
            with self.lock, suppress(KeyError):  # another thread was first
                (index, mask), _ = self.scheduler.missing_executors.popitem()
                if (index, mask) not in self._making and self.state is OPEN:
                    self._making.add((index, mask))
                    self.builder.submit(partial(self._make, index, mask))

    def _make(self, index: int, mask: int) -> None:
        """On the builder: makes an executor; tells who is granted by that, or why it cannot be."""
        failure: Exception | None = None
        surplus: list[Executor] = []
        site = self.sites[index]
        with self.lock:
            if not self._works:  # any more
                return
            self._making_at = site
        try:
            executor = site.make(mask)
        except Exception as error:  # whatever it is: somebody waits to be told
            failure = error
        with self.lock:
            self._making_at = None
            self._making.discard((index, mask))
            if self.state is PoolState.CLOSED:  # meanwhile: this is left with all else there
                if failure is None:
                    executor.abandon()
                return
            if failure is None:
                surplus = self._add(index, executor)
                granted = self.scheduler.made(self._time())
            else:
                lacking = [
                    r for r in self.scheduler.queued() if (index, mask) in r.missing_executors
                ]
                granted = [other for request in lacking for other in self._drop(request)]
        if failure is not None:
            for request in lacking:
                tell(request, failure)
        self._deliver(granted)
        for old in surplus:
            old.close()

    def _add(self, index: int, executor: Executor) -> list[Executor]:
        """An executor can be granted from here on; returns those to end. Holds the lock."""
        site, warm, mask = self.sites[index], self.scheduler.ready_masks[index], executor.mask
        site.add(executor)
        warm.setdefault(mask.bit_count(), {})[mask] = None
        leases = [lease for request in self._unclaimed() for lease in request.grants]
        keep = {mask} | {lease.mask for lease in leases if lease.device == index}
        surplus = []
        for other in site.surplus(keep):
            surplus.append(site.executors.pop(other))
            del warm[other.bit_count()][other]
        return surplus

    def _claim(self, request: Request, completion: CompletionPoller) -> tuple[Lease, ...]:
        """The executors of a grant are in this loop's hands from here on. Holds the lock."""
        grants, request.grants = request.grants, ()  # no circle, which the collector would free
        handed = take_handed(request)
        if handed is not None:
            handed.thread = get_ident()  # where this loop runs by now
            return (handed,)
        leases = []
        for grant in grants:
            site = self.sites[grant.device]
            quota = self._allowances.get(request.class_state.name)
            lease = Lease(grant, site.take(grant.mask), completion, site, self, quota)
            self.leases.add(lease)
            leases.append(lease)
        return tuple(leases)

    def _unclaimed(self) -> list[Request]:
        """Whose requests are granted, and they had no turn to claim that. Holds the lock."""
        held = [lease.request for live in self.scheduler.allocator.grants for lease in live]
        return [request for request in dict.fromkeys(held) if request.grants]

    def checkpoint(self, lease: Lease, duration: object, deadline: object) -> None:
        """A lease without work gives cells back, or takes some up.

        Raises:
            PoolClosed, DeviceLost, ForkedPool: it is over. InvalidRequest: no duration, or no
            deadline.
        """
        told = (checked_duration(duration), checked_deadline(deadline))
        with self.lock:
            self.check()
            self.unpark()
            executor, grant = lease.executor, lease.grant
            before = grant.mask
            granted = self.scheduler.checkpoint(self._time(), grant, *told)
            if grant.mask != before:
                executor.is_leased = False
                lease.move_to(self.sites[grant.device].take(grant.mask))
        self._deliver(granted)
        if lease.executor is not executor:
            lease.move_bound_launches(executor)

    def reconfigure(self, services: Sequence[ServiceClass] | None, policy: Policy | None) -> None:
        """Other classes, or another policy; whoever can be granted because of that is.

        Raises:
            PoolClosed, DeviceLost, ForkedPool: nothing is granted any more.
            InvalidRequest: the floors of the classes do not fit; nothing has changed.
        """
        with self.lock:
            if self.state is not OPEN:
                raise self.refusal()
            self.unpark()
            granted = self.scheduler.reconfigure(self._time(), services, policy)
            if services is not None:
                update_quotas(self._allowances, services)
            self._parking.start(self.scheduler)
        self._deliver(granted)

    def observe(self, service: str, latency: float, count: int) -> None:
        """So many of a class had this latency; whoever can be granted because of that is."""
        with self.lock:
            self.check()
            granted = self.scheduler.observe(self._time(), service, latency, count)
        self._deliver(granted)

    def statistics(self) -> PoolStatistics:
        """What the pool has and did, at one moment."""
        with self.lock:
            self.unpark()
            return collect_statistics(self.state, self.sites, len(self.leases), self.scheduler)

    # -- giving back -----------------------------------------------------------------------------

    def forsake(self, request: Request) -> None:
        """The collector ended who waited: the next caller gives it up."""
        waits_no_more(request)
        self._forsaken.append(request)

    def leave(self, request: Request) -> None:
        """Somebody does not want his request any more, queued or granted."""
        self._give_up(request)
        let_go(request)

    def _give_up(self, request: Request) -> None:
        if self.state is FORKED:
            return
        with self.lock:
            granted = self._drop(request)
        self._deliver(granted)

    def _give_up_forsaken(self) -> None:
        """Sees to what finalisers left, which must not: they may run while the lock is held.

        The collector calls them at any allocation, on any thread, so they append and no more.
        """
        while self._forsaken:
            with suppress(IndexError):  # another thread was first
                self._give_up(request := self._forsaken.popleft())
                let_go(request)

    def _drop(self, request: Request) -> list[Request]:
        """Ends a request that is queued, or granted and not claimed. Holds the lock.

        Once, whoever comes first. Returns who is granted because of it.
        """
        now = self._time()
        granted = self.scheduler.cancel(now, request)
        leases, request.grants = request.grants, ()
        handed = take_handed(request)
        if handed is not None:
            return self._free(handed)
        for lease in leases:
            granted += self.scheduler.drained(now, lease)
        return granted

    def lease_draining(self, lease: Lease) -> None:
        """A lease has ended, and its work has not: nobody holds it, and nobody gets it yet."""
        with self.lock:
            self.scheduler.release(lease.grant)

    def lease_closed(self, lease: Lease) -> None:
        """All work of a lease is done: its cells are free."""
        if self.state is FORKED:  # nobody asks
            return
        with self.lock:
            granted = self._free(lease)
        self._tell_freed(granted)

    def _free(self, lease: Lease) -> list[Request]:
        """The cells of a lease are free; who is granted by that. Holds the lock."""
        lease.executor.is_leased = False
        self.leases.discard(lease)
        return self.scheduler.drained(self._time(), lease.grant)

    def _tell_freed(self, granted: list[Request]) -> None:
        self._deliver(granted)
        self._give_up_forsaken()

    def _deliver(self, granted: list[Request]) -> None:
        """Tells who is granted, or never will be; what a closed loop is granted goes to others."""
        for request in granted:  # it grows meanwhile
            if not tell(request):
                with self.lock:
                    granted += self._drop(request)
        if self.scheduler.rejected:
            tell_all(self.scheduler.rejected)
        if self.scheduler.missing_executors:
            self._have_made()
        if self._waiting_for_none and self.scheduler.is_idle:
            with self.lock:
                told, self._waiting_for_none = self._waiting_for_none, []
            for door, waiter in told:
                door.wake_threadsafe(waiter)

    def _tend(self) -> float:
        """While requests wait: passed deadlines, and loops that closed with leases in hand."""
        self._adopt(self.current_poller())
        self._give_up_forsaken()
        with self.lock:
            now = self._time()
            granted, expired = self.scheduler.tick(now)
            deadline = self.scheduler.next_deadline()
        for request in expired:
            tell(request, DeadlineExceeded((request.deadline or now) - request.arrived))
        self._deliver(granted)
        return TEND_S if deadline is None else max(0.0, min(TEND_S, deadline - now))

    def _adopt(self, completion: CompletionPoller) -> None:
        """Takes over what closed loops left: requests go, leases end, executors drain."""
        granted: list[Request] = []
        with self.lock:
            closed = [door for door in self._completions if door.is_closed]
            if not closed:  # nor is anybody else's: who asks has one, and keeps it until it closes
                return
            self._latest = None
            for door in closed:
                del self._completions[door]
            self.unpark()
            asked = [*self.scheduler.queued(), *self._unclaimed()] if self.sites else []
            for request in filter(is_left, asked):
                granted += self._drop(request)
            orphans = [h for h in self.leases if h.poller.loop.is_closed]
        self._deliver(granted)
        for lease in orphans:
            lease.take_over(completion)

    # -- for executors and their threads ---------------------------------------------------------

    def current_poller(self) -> CompletionPoller:
        """The running loop's view of the outstanding work.

        Raises:
            NoLoop: no loop is running on this thread.
        """
        latest = self._latest
        if latest is not None and latest.loop.is_current():
            return latest
        door = current_adapter()
        completion = self._completions.get(door)
        if completion is None:
            completion = CompletionPoller(door, self.driver, self._tend)
            with self.lock:
                self._completions[door] = completion
            self._adopt(completion)
        self._latest = completion
        return completion

    @property
    def failure(self) -> BaseException | None:
        """The first device fault, if there was one."""
        failures = (site.device.health.failure for site in self.sites)
        return next((failure for failure in failures if failure is not None), None)

    def device_failed(self, fault: BaseException) -> None:
        """End the pool by a device fault. From any thread; only the first one counts."""
        with self.lock:
            if self.failure is not None or self.state is PoolState.CLOSED:
                return
            self.state = PoolState.POISONED
            waiting = self._stop_granting()
            completions = list(self._completions.values())
            for site in self.sites:
                site.device_failed(fault)
            for lease in self.leases:
                lease.close_bound_launches()
        logger.error("the GPU is unusable until this process is replaced: %s", fault)
        for request in waiting:
            tell(request, DeviceLost(fault))
        for completion in completions:
            completion.kick_threadsafe()

    def check(self) -> None:
        """Raises what keeps a granted partition from working: closed, poisoned, forked."""
        if not self._works:
            raise self.refusal()

    @property
    def _works(self) -> bool:
        return self.state is OPEN or self.state in WORKING

    def refusal(self) -> GreenschedError:
        """Why nothing is granted."""
        if self.failure is not None:
            return DeviceLost(self.failure)
        if self.state is FORKED:
            return ForkedPool("this pool")
        return PoolClosed("this pool", self.state.value)

    # -- its end ---------------------------------------------------------------------------------

    def forked(self, lock: threading.Lock) -> None:
        """In a forked child: nothing works, and whoever tries is told."""
        self.lock = lock
        self.state = FORKED
        self._parking.lock, self._parking.scheduler = self.lock, None
        self._parking.clear()
        for site in self.sites:
            site.close_use(lambda: ForkedPool("this pool"))
        for lease in tuple(self.leases):
            lease.close_bound_launches()

    def _stop_granting(self) -> list[Request]:
        """Nothing is parked or queued any more. Returns who was queued."""
        self._parking.scheduler = None
        self.unpark()
        return self.scheduler.close() if self.sites else []

    def stop(self) -> None:
        """Grants nothing more; who is queued is told."""
        with self.lock:
            waiting = self._stop_granting() if self.state is OPEN else []
            if self.state in (PoolState.OPENING, OPEN):
                self.state = PoolState.CLOSING
        for request in waiting:
            tell(request, PoolClosed("this pool", "closing"))

    def until_none(self, completion: CompletionPoller) -> Waiter | None:
        """Who is told once every cell is free, unless all are, or never will be."""
        with self.lock:
            if self.scheduler.is_idle or self.state is not PoolState.CLOSING:
                return None
            waiter = completion.loop.create_waiter()
            self._waiting_for_none.append((completion.loop, waiter))
            return waiter

    @property
    def is_held_up(self) -> bool:
        """Whether the builder makes an executor, or is to, on a device that works.

        A driver may hold that up until the work ends, which it may never do. The site is to be left
        as it is anyway, so the closing need not wait for the builder.
        """
        with self.lock:
            return any(self.sites[index].busy for index, _ in self._making)

    def close(self) -> list[str]:
        """Ends every site that is not used; says what was left. Blocks.

        On the builder, or beside it where it `is_held_up`.
        """
        with self.lock:
            if self.failure is not None:  # no more CUDA calls: the process is to be replaced
                for site in self.sites:
                    site.forget()
                return [repr(site.device) for site in self.sites]
            for request in self._unclaimed():
                self._drop(request)
            self.state = PoolState.CLOSED
            held = self._making_at
        abandoned = [left for site in self.sites for left in site.close(is_held=site is held)]
        self._let_go()
        return abandoned

    def _let_go(self) -> None:
        """Whoever waits for work that was left behind hears of the end instead."""
        with self.lock:
            leases, completions = tuple(self.leases), tuple(self._completions.values())
            told, self._waiting_for_none = self._waiting_for_none, []
        for door, waiter in told:
            door.wake_threadsafe(waiter)
        for lease in leases:
            lease.close_bound_launches()
            lease.poller.loop.call_threadsafe(lease.pool_closed)
        for completion in completions:
            completion.kick_threadsafe()
