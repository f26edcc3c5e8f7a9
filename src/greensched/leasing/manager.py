"""The lease manager: takes requests, grants leases, and keeps account of them until the pool ends.

The scheduler decides, under one short lock. The thread that made it decide wakes the tasks whose
requests were granted, outside the lock, each through the adapter of its own loop. No log handler or
callback of the user's runs under the lock; a policy or duration curve does, with snapshots, and
what it raises waits for the end of the decision. A lease belongs to one loop from its grant until
its work is done. When a loop has closed, its queued requests are cancelled, and the next loop that
uses the pool takes over its leases.

A cancellation loses nothing: a queued request leaves the queue, and a request that was granted
meanwhile gives its cells back.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import anyio

from greensched._asynclib import get_ident
from greensched.device.quota import MemoryQuota
from greensched.driver.interface import Driver
from greensched.errors import (
    DeadlineExceeded,
    DeviceLost,
    ForkedPool,
    GreenschedError,
    InvalidRequest,
    NoLoop,
    PartitionClosed,
    PoolClosed,
    WouldBlock,
)
from greensched.execution.completion_poller import CompletionPoller, PollerRegistry
from greensched.execution.eventloop import LoopAdapter, Waiter
from greensched.execution.executor import Executor
from greensched.execution.lease import Lease
from greensched.execution.threads import WorkerThread
from greensched.leasing.decision_reads import DecisionReads
from greensched.leasing.device_loss import device_lost, first_fault
from greensched.leasing.device_pool import DevicePool, index_of
from greensched.leasing.holders import HolderWatch, place
from greensched.leasing.lease_cache import LeaseCache
from greensched.leasing.lease_records import LeaseRecords
from greensched.leasing.memory_quotas import update_quotas
from greensched.leasing.missing_executors import MissingExecutors
from greensched.leasing.pool_state import PoolState
from greensched.leasing.pool_statistics import LeaseInfo, PoolStatistics, collect_statistics
from greensched.leasing.requests import (
    GrantWaiter,
    LeaseRequest,
    checked_deadline,
    checked_duration,
    is_orphaned,
    notify,
    refuse,
)
from greensched.leasing.watchdog import ExitPolicy, Watchdog
from greensched.records import Record, Recorder, Refused, holder_name
from greensched.scheduling import user_code
from greensched.scheduling.allocator import Placement
from greensched.scheduling.histogram import Histogram, durations
from greensched.scheduling.policy import Policy
from greensched.scheduling.requests import QUEUED, Grant, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass

#: While requests are queued or come, closed loops are looked for this often.
TICK_S = 0.050
#: Requests that one turn of a loop refuses at most, and their tasks with it: some 10 ms, however
#: many wait.
AT_ONCE = 500
#: Looked up for every lease: a name of a module is found faster than the member of an enum.
OPEN: Final = PoolState.OPEN
FORKED: Final = PoolState.FORKED
WORKING: Final = (PoolState.OPENING, OPEN, PoolState.CLOSING)


class LeaseManager:
    """Grants the leases of one pool. Made closed; `start` opens it.

    Args:
        driver: the pool's.
        builder: the thread on which everything happens that blocks.
        lock: guards the scheduler, the leases and the state.
        cache: leases without work, which wait for the next request for the same.
        recorder: of the pool's records.
        hang_after: see `Watchdog`.
        exit_policy: what happens to the process when work hangs, or a device is lost.
    """

    def __init__(
        self,
        driver: Driver,
        builder: WorkerThread,
        lock: threading.RLock,
        cache: LeaseCache,
        recorder: Recorder,
        hang_after: float | None = None,
        exit_policy: ExitPolicy = "report",
    ) -> None:
        self.driver = driver
        self._time = driver.time
        self.lock = lock
        self.reads = DecisionReads(lock)
        self.state = PoolState.OPENING
        self.device_pools: tuple[DevicePool, ...] = ()
        self.scheduler: Scheduler
        self.cache = cache
        self.recorder = recorder
        self.records = LeaseRecords(recorder, driver.time)
        #: Where leases are timed: from a grant to the turn in which the task goes on.
        self._wake: Histogram | None = None
        #: Leases that are open or draining; cached ones, too.
        self.leases: set[Lease] = set()
        self.builder = MissingExecutors(self, builder)
        self.pollers = PollerRegistry(
            driver, lock, self._on_queue_tick, self._take_over_closed_loops
        )
        self.current_poller = self.pollers.current
        self.exit_policy = exit_policy
        self.watchdog = Watchdog(self, hang_after, exit_policy)
        self._holders = HolderWatch()
        #: When a request next looks for closed loops.
        self._look_due = 0.0
        #: Of each class whose memory is bounded, or was.
        self._quotas: dict[str, MemoryQuota] = {}
        #: Tasks that wait until every cell is free.
        self._idle_waiters: list[tuple[LoopAdapter, Waiter]] = []
        #: Requests whose task was collected while it waited; the next caller cancels them.
        self._abandoned: deque[Request] = deque()
        #: A loop will cancel more of them in its next turn.
        self._cancels_more = False
        #: What waited when the queue was closed, and what makes its errors, until all are refused.
        self._refusing: deque[tuple[Iterator[Request], Callable[[], Exception]]] = deque()

    def start(
        self,
        device_pools: Sequence[DevicePool],
        policy: Policy,
        max_waiting: int,
        services: Sequence[ServiceClass],
        placement: Placement,
    ) -> None:
        """Begin to grant the SMs of these devices.

        Raises:
            InvalidRequest: the reserves of the classes do not fit on the devices.
            CUDAError: an executor over the home cells of a class cannot be made.
        """
        scheduler = Scheduler(
            [each.cells for each in device_pools],
            policy,
            max_waiting,
            lambda index, mask: mask in device_pools[index].executors,
            services=services,
            placement=placement,
            on_reclaim=self._close_cached_locked,
        )
        for index, (each, ready) in enumerate(
            zip(device_pools, scheduler.ready_masks, strict=True)
        ):
            each.prebuild_homes(scheduler.home_masks(index))
            for mask in each.executors:
                ready.setdefault(mask.bit_count(), {})[mask] = None
        update_quotas(self._quotas, services)
        with self.lock:
            self.device_pools, self.scheduler = tuple(device_pools), scheduler
            self.records.device_pools = self.device_pools
            self.watchdog.set_services_locked(services)
            for each in device_pools:
                each.device.health.on_failure = partial(device_lost, self)
            if self.state is PoolState.OPENING:  # else it is closed as soon as it is open
                self.state = OPEN
                self.cache.open_locked(scheduler, self._time)
                if self.recorder.watched:
                    self.watched_locked()
        self.builder.make_missing()

    # -- requests --------------------------------------------------------------------------------

    async def acquire(self, request: LeaseRequest) -> tuple[Lease, ...]:
        """Wait until a request is granted, and return its leases: one for each of its parts.

        The lease cache had none for it.

        A checkpoint on trio; on asyncio it yields only if it waits. A cancellation leaves nothing
        behind: no place in the queue, no SM.

        Raises:
            TooManySMs, WouldDeadlock: it can never be granted, or not any more.
            QueueFull, DeadlineImpossible, DeadlineExceeded: it cannot be granted now, or in time.
            PoolClosed, DeviceLost, ForkedPool: nothing is granted any more.
            CUDAError: a green context over its SMs cannot be made.
        """
        if self.state is not OPEN:
            raise self.refusal()
        poller = self.current_poller()
        if poller.loop.always_yields:
            await poller.loop.checkpoint()
        queued, leases = self._request(request, poller, wait=True)
        if leases:
            return leases
        waiter = queued.owner
        assert isinstance(waiter, GrantWaiter)
        try:
            await waiter.wait()
            with self.lock:
                self.check()
                if self._wake is not None:
                    self._wake.add(self._time() - queued.grants[0].began)
                return self._claim_locked(queued, poller, request)
        except GeneratorExit:  # the collector ended the task: no lock may be taken here
            self._abandoned.append(queued)
            raise
        except BaseException:
            self._cancel(queued)
            raise
        finally:
            waiter.close()

    def acquire_nowait(self, request: LeaseRequest) -> Lease:
        """Grant one lease at once. Raises `WouldBlock`, and what `acquire` does."""
        if self.state is not OPEN:
            raise self.refusal()
        poller = self.current_poller()
        self._take_over_closed_loops(poller)  # no tick does, where no request is queued
        _, (lease,) = self._request(request, poller, wait=False)
        return lease

    async def claim(self, request: LeaseRequest, mask: int) -> Lease:
        """Lease exactly these cells of the request's device, beside the rules of the classes.

        Raises:
            WouldBlock: they are not free, or requests wait.
            PoolClosed, DeviceLost, ForkedPool: nothing is granted any more.
            CUDAError: a green context over them cannot be made.
        """
        poller = self.current_poller()
        assert request.device is not None
        index = index_of(self.device_pools, request.device)
        await self.builder.make(index, mask)
        with self.lock:
            if self.state is not OPEN:
                raise self.refusal()
            claimed = self.scheduler.claim(self._time(), index, mask)
            if claimed is None:
                raise WouldBlock(
                    f"cells {mask:b} of device {request.device} are leased, or requests wait: "
                    "prepare before traffic"
                )
            (lease,) = self._claim_locked(claimed, poller, request)
        return lease

    def _request(
        self, request: LeaseRequest, poller: CompletionPoller, *, wait: bool
    ) -> tuple[Request, tuple[Lease, ...]]:
        """Ask the scheduler; return the leases, or none if the request is queued."""
        self.refuse_in_decision()
        self._cancel_abandoned()
        if len(self.pollers) > 1:
            self._look_for_closed_loops(poller)
        try:
            with self.lock:
                asked, leases, granted = self._request_locked(request, poller, wait=wait)
        except BaseException as error:
            if not isinstance(error, WouldBlock):
                self.records.tell_rarely("refused %s: %s", request, error)
            self.recorder.flush()
            user_code.report()
            raise
        try:
            self.notify_granted(granted)
        except BaseException:  # an interrupt in a policy: the caller gets that, and no lease
            for lease in leases:
                lease.end()
            self._cancel(asked)
            raise
        return asked, leases

    def _request_locked(
        self, request: LeaseRequest, poller: CompletionPoller, *, wait: bool
    ) -> tuple[Request, tuple[Lease, ...], list[Request]]:
        """Return the scheduler's request, its leases, and others that are granted because of it."""
        if self.state is not OPEN:
            raise self.refusal()
        near, device, now = request.near, request.device, self._time()
        holder, is_watched = poller.loop.current_holder(), self.recorder.watched
        if is_watched:
            self.records.add_requested(now, self.scheduler.arrivals, request, holder)
        try:
            asked = self.scheduler.request(
                now,
                request.parts,
                service=request.service,
                devices=None if device is None else (index_of(self.device_pools, device),),
                near=None if near is None else index_of(self.device_pools, near),
                deadline=None if request.deadline is None else now + request.deadline,
                duration=request.duration,
                holder=holder,
                wait=wait,
            )
        except BaseException as error:
            if is_watched:
                name, number = type(error).__name__, self.scheduler.arrivals
                self.recorder.add(Refused(now, number, request.service, name))
            raise
        granted = self.scheduler.resized(asked)
        leases = self._claim_locked(asked, poller, request) if asked.grants else ()
        if not leases:
            GrantWaiter(asked, poller)
            if is_watched:
                self.records.add_queued(asked, self.scheduler.waiting)
        return asked, leases, granted

    @property
    def in_decision(self) -> bool:
        """Whether this thread is in a decision: then it runs a policy or a curve of the user's."""
        return self.lock._is_owned()  # type: ignore[attr-defined,no-any-return]  # `Condition`'s

    def refuse_in_decision(self) -> None:
        """Refuse a change by a policy or a curve: its own decision is not complete.

        Raises:
            InvalidRequest: this thread is in a decision.
        """
        if self.in_decision:
            raise InvalidRequest(
                "a policy or a duration curve cannot change its pool while that decides: it may "
                "read `pool.statistics()`, and a task of its own can do the rest"
            )

    def _claim_locked(
        self, granted: Request, poller: CompletionPoller, request: LeaseRequest
    ) -> tuple[Lease, ...]:
        """Turn the grants of a request into leases of this loop."""
        grants, granted.grants = granted.grants, ()  # or request and grants would be a cycle
        # On trio, asking is a checkpoint anyway, which costs more than a decision.
        notes_place = self.cache.notes_places or self.watchdog.is_on
        may_cache = not poller.loop.always_yields and notes_place == self.cache.notes_places
        key = (request, get_ident()) if request.is_reused and may_cache else None
        quota = self._quotas.get(granted.class_state.name)
        leases = []
        for grant in grants:
            device_pool = self.device_pools[grant.device]
            executor = self._take_executor_locked(grant)
            lease = Lease(grant, executor, poller, device_pool, self, quota, key)
            if notes_place or not request.is_reused:
                lease.taken_at = place()
            self.leases.add(lease)
            leases.append(lease)
        return tuple(leases)

    def _take_executor_locked(self, grant: Grant) -> Executor:
        """Return the executor over the cells of a grant: leased and used from now on."""
        executors = self.device_pools[grant.device].executors
        executor = executors[grant.mask]
        executor.is_leased = True
        executors.move_to_end(grant.mask)
        return executor

    def _unclaimed_locked(self) -> list[Request]:
        """Return the requests that are granted, and whose tasks had no turn to claim that."""
        owners = [grant.request for held in self.scheduler.allocator.grants for grant in held]
        return [request for request in dict.fromkeys(owners) if request.grants]

    def _cancel(self, request: Request) -> None:
        """Cancel a request, queued or granted."""
        if self.state is FORKED:
            return
        with self.lock:
            granted = self.cancel_locked(request)
        self.notify_granted(granted)

    def _cancel_abandoned(self) -> None:
        """Cancel the requests of collected tasks.

        The collector ends them at any allocation, on any thread, perhaps while the lock is held: so
        they only append to a list. At most `AT_ONCE` now, and the others in later turns of a loop.
        """
        for _ in range(min(AT_ONCE, len(self._abandoned))):
            with suppress(IndexError):  # another thread was first
                self._cancel(self._abandoned.popleft())
        if self._abandoned and not self._cancels_more:
            self._cancels_more = self.pollers.call_one(self._cancel_more)

    def _cancel_more(self, _: CompletionPoller) -> None:
        self._cancels_more = False
        self._cancel_abandoned()

    def cancel_locked(self, request: Request) -> list[Request]:
        """End a request that is queued, or granted and not claimed; a second time does nothing.

        Returns the requests that are granted because of it.
        """
        now = self._time()
        if self.recorder.watched and (request.grants or request.state is QUEUED):
            self.records.add_cancelled(request)
        granted = self.scheduler.cancel(now, request)
        grants, request.grants = request.grants, ()
        for grant in grants:
            granted += self.scheduler.drained(now, grant)
        return granted

    # -- changes ---------------------------------------------------------------------------------

    def checkpoint(self, lease: Lease, duration: object, deadline: object) -> Request | None:
        """Let the scheduler change the cells of a lease that has no work; the lease then moves.

        Returns:
            The request that the lease waits for if it gave way: `wait_to_go_on` follows.

        Raises:
            PoolClosed, DeviceLost, ForkedPool: the pool has ended.
            InvalidRequest: not a duration, or not a deadline.
        """
        self.refuse_in_decision()
        told = checked_duration(duration), checked_deadline(deadline)
        executor = lease.executor
        if len(self.pollers) > 1:
            self._look_for_closed_loops(lease.poller)
        waiting = None
        with self.lock:
            self.check()
            grant, before = lease.grant, lease.grant.mask
            granted = self.scheduler.checkpoint(self._time(), grant, *told)
            if grant.over:
                executor.is_leased = False
                lease.give_way()
                waiting = grant.request
                GrantWaiter(waiting, lease.poller)
                if self.recorder.watched:
                    self.records.add_queued(waiting, self.scheduler.waiting)
            elif grant.mask != before:
                executor.is_leased = False
                lease.move_to(self._take_executor_locked(grant))
        self.notify_granted(granted)
        if waiting is None and lease.executor is not executor:
            lease.move_bound_launches(executor)
        return waiting

    def begin_idle(self, lease: Lease) -> None:
        """Give back the cells of a lease that has no work, until `end_idle`.

        Raises:
            PoolClosed, DeviceLost, ForkedPool: the pool has ended.
        """
        with self.lock:
            self.check()
            grant, holder = lease.grant, lease.grant.holder
            granted = self.scheduler.drained(self._time(), grant)
            grant.holder = holder  # the request of `end_idle` is its, too
            lease.executor.is_leased = False
            lease.give_way()
        self.notify_granted(granted)

    async def end_idle(self, lease: Lease) -> None:
        """Ask for what the lease had, and wait until it is granted. Raises as `wait_to_go_on`."""
        request = lease.grant.request
        try:
            with self.lock:
                self.check()
                lease.check_waiting()
                GrantWaiter(request, lease.poller)
                now, is_watched = self._time(), self.recorder.watched
                if is_watched:
                    self.records.add_requested_again(now, self.scheduler.arrivals, lease.grant)
                granted = self.scheduler.ask_again(now, lease.grant)
                if is_watched:
                    self.records.add_queued(request, self.scheduler.waiting)
        except GreenschedError:
            lease.end()
            raise
        self.notify_granted(granted)
        await self.wait_to_go_on(lease, request)

    async def wait_to_go_on(self, lease: Lease, request: Request) -> None:
        """Wait until a lease that gave way at a checkpoint is granted SMs again.

        A cancellation, or what is raised, ends the lease: it has no SMs.

        Raises:
            PartitionClosed: it was ended meanwhile.
            TooManySMs: it can never be granted again, because the classes have changed.
            PoolClosed, DeviceLost, ForkedPool: nothing is granted any more.
        """
        executor, waiter = lease.executor, request.owner
        assert isinstance(waiter, GrantWaiter)
        try:
            await waiter.wait()
            with self.lock:
                self.check()
                lease.check_waiting()
                (grant,), request.grants = request.grants, ()
                lease.go_on(grant, self._take_executor_locked(grant))
        except GeneratorExit:  # the collector ended the task: no lock may be taken here
            self._abandoned.append(request)
            raise
        except BaseException:
            self._cancel(request)
            lease.end()
            raise
        finally:
            waiter.close()
        lease.move_bound_launches(executor)

    def reconfigure(self, services: Sequence[ServiceClass] | None, policy: Policy | None) -> None:
        """Change the classes, or the policy.

        Raises:
            PoolClosed, DeviceLost, ForkedPool: nothing is granted any more.
            InvalidRequest: the reserves of the classes do not fit; nothing has changed.
        """
        self.refuse_in_decision()
        with self.lock:
            if self.state is not OPEN:
                raise self.refusal()
            granted = self.scheduler.reconfigure(self._time(), services, policy)
            if services is not None:
                update_quotas(self._quotas, services)
                self.watchdog.set_services_locked(services)
                for index, device_pool in enumerate(self.device_pools):
                    homes = self.scheduler.home_masks(index)
                    device_pool.prebuilt |= {*homes}
                    missing = [m for m in homes if m not in device_pool.executors]
                    self.scheduler.missing_executors.update({(index, m): None for m in missing})
        self.notify_granted(granted)

    def observe(self, service: str, latency: float, count: int) -> None:
        """Tell the scheduler a latency of a class."""
        self.refuse_in_decision()
        with self.lock:
            self.check()
            granted = self.scheduler.observe(self._time(), service, latency, count)
        self.notify_granted(granted)

    def statistics(self) -> PoolStatistics:
        """Return what the pool has and did, at one moment.

        What closed loops held is taken over first. Inside a decision, statistics are those of the
        moment, and nothing is changed.
        """
        if not self.in_decision:
            self.take_over_closed_loops()
        with self.reads.read() as may_change:
            if may_change:
                self.scheduler.reclaim(self._time())
            return self.statistics_locked()

    def statistics_locked(self) -> PoolStatistics:
        """Return the statistics, in a read of `reads`."""
        wake = None if self._wake is None else durations(self._wake)
        leases, now = len(self.leases), self._time()
        return collect_statistics(self.state, self.device_pools, leases, self.scheduler, now, wake)

    def held(self) -> list[LeaseInfo]:
        """Return the leases that hold SMs, the oldest first. See `Pool.leases`."""
        with self.reads.read() as may_change:
            if may_change:
                self.scheduler.reclaim(self._time())
            return self.held_locked()

    def held_locked(self) -> list[LeaseInfo]:
        """Return the leases that hold SMs, in a read of `reads`."""
        infos = [self._info(lease) for lease in self.leases if not lease.grant.over]
        return sorted(infos, key=lambda info: info.since)

    def _info(self, lease: Lease) -> LeaseInfo:
        grant = lease.grant
        return LeaseInfo(
            holder=lease.holder or holder_name(grant.holder),
            service=grant.class_state.name,
            device=lease.ordinal,
            sms=grant.sms,
            cells=grant.mask & self.device_pools[grant.device].cells.full_mask,
            since=grant.began,
            draining_since=lease.draining_since,
            place=lease.taken_at,
        )

    def time_leases_locked(self) -> None:
        """Time leases from now on. Idempotent."""
        if self._wake is None:
            self._wake = Histogram()
            self.scheduler.time_leases(self._time())

    # -- records ---------------------------------------------------------------------------------

    def watched_locked(self) -> list[Record]:
        """Record from now on. Return records of what is held.

        No lease is cached meanwhile: each is decided on, and recorded.
        """
        self.scheduler.reclaim(self._time())
        self.cache.set_open_locked(False)
        self.scheduler.allocator.on_resize = self.records.add_resized
        for lease in self.leases:
            for bound in lease.bound_launches:
                bound.watch()
        grants = [grant for held in self.scheduler.allocator.grants for grant in held]
        return [self.records.granted(grant, grant.began) for grant in grants]

    def unwatched_locked(self) -> None:
        """Record nothing from now on."""
        self.scheduler.allocator.on_resize = None
        self.records.forget()
        self.cache.set_open_locked(self.state is OPEN)

    # -- giving back -----------------------------------------------------------------------------

    def lease_draining(self, lease: Lease) -> None:
        """Tell the scheduler that a lease has ended before its work."""
        grant, now = lease.grant, self._time()
        with self.lock:
            lease.holder, lease.draining_since = holder_name(grant.holder), now
            self.records.add_released(grant, now)
            self.scheduler.release(grant)
        self.recorder.flush()

    def lease_closed(self, lease: Lease) -> None:
        """Free the cells of a lease whose work is done."""
        if self.state is FORKED:
            return
        with self.lock:
            self.leases.discard(lease)
            lease.executor.hang = None  # what hung has ended
            if lease.grant.over:  # it gave way at a checkpoint, and has no cells
                refuse(lease.grant.request, PartitionClosed("this partition"))
                granted = self.cancel_locked(lease.grant.request)
            else:
                lease.executor.is_leased = False
                granted = self.scheduler.drained(self._time(), lease.grant)
        self.notify_granted(granted)
        self._cancel_abandoned()

    def _close_cached_locked(self) -> None:
        """Close the cached leases, whose cells the scheduler reclaims."""
        for lease in self.cache.clear_locked():
            lease.reclaimed()
            lease.executor.is_leased = False
            self.leases.discard(lease)

    def notify_granted(self, granted: list[Request]) -> None:
        """Wake the tasks of granted and rejected requests. Not under the lock.

        What was granted to a task of a closed loop goes to others. What the user's policies and
        curves raised in the decision is logged here, and their interrupts are raised.
        """
        for request in granted:  # grows meanwhile
            if not notify(request):
                with self.lock:
                    granted += self.cancel_locked(request)
        if self.recorder.watched:
            self.recorder.flush()
        rejected = self.scheduler.rejected
        while rejected:
            with suppress(IndexError):  # another thread was first
                self._refuse_queued(*rejected.pop())
        if self.scheduler.missing_executors:
            self.builder.make_missing()
        if self._idle_waiters and self.scheduler.is_idle:
            self._wake_idle_waiters()
        if user_code.deferred:
            user_code.report()

    def _refuse_queued(self, request: Request, error: Exception) -> None:
        """Refuse a request that left the queue."""
        self.records.refused_in_queue(request, error)
        refuse(request, error)

    def _on_queue_tick(self) -> float:
        """Expire queued requests, and look for closed loops, while requests are queued.

        Returns the seconds until it is to be called again.
        """
        self._take_over_closed_loops(self.current_poller())
        self._cancel_abandoned()
        with self.lock:
            now = self._time()
            granted, expired = self.scheduler.tick(now, AT_ONCE)
            deadline = self.scheduler.next_deadline()
            warnings = self._holders.warnings(now, self.leases, self.scheduler.queue.firsts)
        for warning in warnings:
            self.records.tell_rarely("%s", warning, level=logging.WARNING)
        for request in expired:
            error = DeadlineExceeded((request.deadline or now) - request.arrived)
            self._refuse_queued(request, error)
        self.notify_granted(granted)
        return TICK_S if deadline is None else max(0.0, min(TICK_S, deadline - now))

    def _look_for_closed_loops(self, poller: CompletionPoller) -> None:
        """Take over what closed loops left, every `TICK_S` at most.

        No tick does while no request is queued, and small or elastic ones need not queue.
        """
        now = self._time()
        if now >= self._look_due:
            self._look_due = now + TICK_S
            self._take_over_closed_loops(poller)

    def take_over_closed_loops(self) -> None:
        """Take over what closed loops left: by this thread's loop, or else soon by another."""
        if self.works and self.pollers.has_closed:
            try:
                self._take_over_closed_loops(self.current_poller())
            except NoLoop:
                self.pollers.call_one(self._take_over_closed_loops)

    def _take_over_closed_loops(self, poller: CompletionPoller) -> None:
        """Cancel the requests of closed loops, and end their leases, with this loop's poller."""
        granted: list[Request] = []
        with self.lock:
            if not self.pollers.remove_closed_locked():
                return
            if self.device_pools:
                self.scheduler.reclaim(self._time())
                for request in filter(is_orphaned, self._unclaimed_locked()):
                    granted += self.cancel_locked(request)
                self._abandoned.extend(filter(is_orphaned, self.scheduler.queued()))
            orphans = [lease for lease in self.leases if lease.poller.loop.is_closed]
        self.notify_granted(granted)
        for lease in orphans:
            lease.take_over(poller)
        self._cancel_abandoned()

    # -- state -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what keeps granted leases from working: closed, lost, forked."""
        if not self.works:
            raise self.refusal()

    @property
    def works(self) -> bool:
        """Whether granted leases can be used."""
        return self.state is OPEN or self.state in WORKING

    @property
    def is_used(self) -> bool:
        """Whether a request is queued, or a lease is open or draining. Without the lock."""
        return self.scheduler.waiting > 0 or len(self.leases) > len(self.cache)

    @property
    def failure(self) -> BaseException | None:
        """The first device fault, if there was one."""
        return first_fault(self.device_pools)

    def refusal(self) -> GreenschedError:
        """Return the error that says why nothing is granted."""
        if (failure := self.failure) is not None:
            return DeviceLost(failure)
        if self.state is FORKED:
            return ForkedPool("this pool")
        return PoolClosed("this pool", self.state.value)

    def forked(self, lock: threading.RLock) -> None:
        """Refuse everything in a forked child; take no lock that a thread of the parent holds."""
        self.lock = lock
        self.reads = DecisionReads(lock)
        self.cache.forked(lock)
        self.state = FORKED
        for device_pool in self.device_pools:
            device_pool.close_use(lambda: ForkedPool("this pool"))
        for lease in tuple(self.leases):
            lease.close_bound_launches()

    # -- closing ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Grant nothing more, and refuse what is queued."""
        with self.lock:
            if self.state is OPEN:
                self.stop_granting_locked(lambda: PoolClosed("this pool", "closing"))
            if self.state in (PoolState.OPENING, OPEN):
                self.state = PoolState.CLOSING
        self.refuse_closed()

    def stop_granting_locked(self, error: Callable[[], Exception]) -> None:
        """Reclaim what is cached and empty the queue; `refuse_closed` follows.

        Args:
            error: makes the error of a request that waited.
        """
        if not self.device_pools:
            return
        now = self._time()
        self.scheduler.reclaim(now)
        self.cache.set_open_locked(False)
        self._refusing.append((self.scheduler.close(), error))

    def refuse_closed(self) -> None:
        """Refuse what waited when the queue was closed, `AT_ONCE` in each turn of a loop."""
        while self._refuse_some() and not self.pollers.call_one(lambda _: self.refuse_closed()):
            pass  # no loop is left that has turns
        if not self._refusing and self._idle_waiters:
            self._wake_idle_waiters()

    def _refuse_some(self) -> bool:
        """Refuse at most `AT_ONCE` requests; return whether some are left."""
        refused: list[tuple[Request, Exception]] = []
        with self.lock:
            while self._refusing and len(refused) < AT_ONCE:
                requests, error = self._refusing[0]
                request = next(requests, None)
                if request is None:
                    self._refusing.popleft()
                    continue
                refused.append((request, error()))
                if self.recorder.watched:
                    self.records.add_cancelled(request)
        self.recorder.flush()
        for request, reason in refused:
            refuse(request, reason)
        return bool(self._refusing)

    async def wait_until_idle(self, grace: float) -> None:
        """Wait until no lease is granted, open or draining, and what waited for one is refused.

        Or until the grace has passed.
        """
        poller = self.current_poller()
        poller.request_queued()  # so that it ticks: a loop with leases may close meanwhile
        try:
            with anyio.move_on_after(grace):
                while (waiter := self._create_idle_waiter(poller)) is not None:
                    await waiter
        finally:
            poller.waiting -= 1

    def _create_idle_waiter(self, poller: CompletionPoller) -> Waiter | None:
        """Make a waiter that is woken once every cell is free; None if they are, or never will."""
        with self.lock:
            is_done = self.scheduler.is_idle and not self._refusing
            if is_done or self.state is not PoolState.CLOSING:
                return None
            waiter = poller.loop.create_waiter()
            self._idle_waiters.append((poller.loop, waiter))
            return waiter

    def _wake_idle_waiters(self) -> None:
        with self.lock:
            waiters, self._idle_waiters = self._idle_waiters, []
        for loop, waiter in waiters:
            loop.wake_threadsafe(waiter)

    def close(self) -> list[str]:
        """Close every device that has no work; return what was left. Blocks.

        On the builder thread, or beside it where it is held up.
        """
        with self.lock:
            if self.failure is not None:  # no more CUDA calls: the process is to be replaced
                for device_pool in self.device_pools:
                    device_pool.forget()
                return [repr(device_pool.device) for device_pool in self.device_pools]
            for request in self._unclaimed_locked():
                self.cancel_locked(request)
            self.state = PoolState.CLOSED
            building = self.builder.active
        abandoned = [
            left
            for device_pool in self.device_pools
            for left in device_pool.close(is_building=device_pool is building)
        ]
        self._end_waits()
        return abandoned

    def _end_waits(self) -> None:
        """Wake every task that waits for work that was left behind: it raises PoolClosed."""
        self._wake_idle_waiters()
        self.builder.end_waits()
        with self.lock:
            leases, pollers = tuple(self.leases), self.pollers.all_locked()
        for lease in leases:
            lease.close_bound_launches()
            lease.poller.loop.call_threadsafe(lease.pool_closed)
        for poller in pollers:
            poller.kick_threadsafe()
