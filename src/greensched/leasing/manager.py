"""The lease manager: takes requests, grants leases, and tracks them until the pool ends.

The scheduler decides, under one short lock. The thread that called it then wakes the tasks whose
requests were granted, outside the lock, each through the adapter of its own loop. No log handler or
callback of the user runs under the lock. A policy or duration curve does; it gets snapshots, and
its exceptions wait for the end of the decision. A lease belongs to one loop from its grant until
its work is done. When a loop has closed, its queued requests are cancelled, and the next loop that
uses the pool takes over its leases.

A cancellation loses nothing: a queued request leaves the queue, and a request that was granted
meanwhile returns its cells.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
from greensched.execution.lease import Lease, SlowReason
from greensched.execution.threads import WorkerThread
from greensched.leasing.decision_reads import DecisionReads
from greensched.leasing.device_pool import DevicePool, index_of
from greensched.leasing.holders import MOST_S, HolderWatch, place
from greensched.leasing.lease_records import LeaseRecords
from greensched.leasing.missing_executors import MissingExecutors
from greensched.leasing.pool_state import PoolState
from greensched.leasing.pool_statistics import LeaseInfo, PoolStatistics, collect_statistics
from greensched.leasing.requests import (
    GrantWaiter,
    LeaseCache,
    LeaseRequest,
    checked_deadline,
    checked_duration,
    is_orphaned,
    notify,
    refuse,
)
from greensched.leasing.watchdog import ExitPolicy, Watchdog, end_process
from greensched.records import Record, Recorder, Refused, holder_name
from greensched.scheduling import user_code
from greensched.scheduling.allocator import Placement
from greensched.scheduling.histogram import Histogram, durations
from greensched.scheduling.policy import Policy
from greensched.scheduling.requests import QUEUED, Grant, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass

#: Seconds between two checks for closed loops, while requests are queued or made.
TICK_S = 0.050
#: The most requests that one turn of a loop refuses, waking their tasks: about 10 ms, however many
#: wait.
AT_ONCE = 500
#: Read for each lease. A module's name is found faster than an enum's member.
OPEN: Final = PoolState.OPEN
FORKED: Final = PoolState.FORKED
WORKING: Final = (PoolState.OPENING, OPEN, PoolState.CLOSING)


class LeaseManager:
    """Grants the leases of one pool. It is created closed; `start` opens it.

    Args:
        driver: The driver of the pool.
        builder: The thread for everything that blocks.
        lock: Guards the scheduler, the leases and the state.
        cache: Leases without work that wait for the next equal request.
        recorder: The recorder of the pool.
        hang_after: See `Watchdog`.
        exit_policy: What happens to the process when work hangs or a device is lost.
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
        #: If leases are timed: times from a grant until its task resumes.
        self._wake: Histogram | None = None
        #: Leases that are open, cached or draining.
        self.leases: set[Lease] = set()
        self.builder = MissingExecutors(self, builder)
        self.pollers = PollerRegistry(
            driver, lock, self._on_queue_tick, self._take_over_closed_loops
        )
        self.current_poller = self.pollers.current
        self.exit_policy = exit_policy
        self.watchdog = Watchdog(self, hang_after, exit_policy)
        self._holders = HolderWatch()
        #: When a tick next looks for holders that keep requests waiting.
        self._holders_due = 0.0
        #: When a request next looks for closed loops.
        self._look_due = 0.0
        #: Quotas of the classes whose memory is limited, or was.
        self._quotas: dict[str, MemoryQuota] = {}
        #: Tasks that wait until every cell is free.
        self._idle_waiters: list[tuple[LoopAdapter, Waiter]] = []
        #: Requests whose waiting task was collected. The next caller cancels them.
        self._abandoned: deque[Request] = deque()
        #: Whether a loop will cancel more of them in its next turn.
        self._cancels_more = False
        #: The requests of a closed queue, until all are refused, and what makes their errors.
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
            InvalidRequest: The reserves of the classes do not fit on the devices.
            CUDAError: An executor over the home cells of a class cannot be made.
        """
        scheduler = Scheduler(
            [device_pool.cells for device_pool in device_pools],
            policy,
            max_waiting,
            lambda index, mask: mask in device_pools[index].executors,
            may_make=self.builder.has_room,
            services=services,
            placement=placement,
            on_reclaim=self._close_cached_locked,
        )
        for index, (device_pool, ready) in enumerate(
            zip(device_pools, scheduler.ready_masks, strict=True)
        ):
            device_pool.prebuild_homes(scheduler.home_masks(index))
            for mask in device_pool.executors:
                ready.setdefault(mask.bit_count(), {})[mask] = None
        self._set_quotas(services)
        with self.lock:
            self.device_pools, self.scheduler = tuple(device_pools), scheduler
            self.records.device_pools = self.device_pools
            self.watchdog.set_services_locked(services)
            for device_pool in device_pools:
                device_pool.device.health.on_failure = self.device_lost
            if self.state is PoolState.OPENING:  # otherwise it is closed as soon as it is open
                self.state = OPEN
                self.cache.open_locked(scheduler, self._time)
                if self.recorder.watched:
                    self.watched_locked()
        self.builder.make_missing()

    # -- requests --------------------------------------------------------------------------------

    async def acquire(self, request: LeaseRequest) -> tuple[Lease, ...]:
        """Wait until a request is granted; return a lease for each of its parts.

        The caller has already tried the lease cache.

        A checkpoint on trio; on asyncio it yields only if it waits. A cancellation leaves nothing
        behind, neither a queued request nor a lease.

        Raises:
            TooManySMs, WouldDeadlock: It can never be granted, or no longer.
            QueueFull, DeadlineImpossible, DeadlineExceeded: It cannot be granted now, or in time.
            PoolClosed, DeviceLost, ForkedPool: The pool grants nothing any more.
            CUDAError: A green context over its SMs cannot be made.
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
        except GeneratorExit:  # from garbage collection, where no lock may be taken
            self._abandoned.append(queued)
            raise
        except BaseException:
            self._cancel(queued)
            raise
        finally:
            waiter.close()

    def acquire_nowait(self, request: LeaseRequest) -> Lease:
        """Grant one lease at once. Raises `WouldBlock`, and the errors of `acquire`."""
        if self.state is not OPEN:
            raise self.refusal()
        poller = self.current_poller()
        self._take_over_closed_loops(poller)  # with an empty queue, no tick does this
        _, (lease,) = self._request(request, poller, wait=False)
        return lease

    async def claim(self, request: LeaseRequest, mask: int) -> Lease:
        """Lease exactly these cells of a request's device, regardless of the classes' rules.

        Waits only while an executor over the cells is made; a cancellation stops only the waiting.

        Raises:
            WouldBlock: The cells are not free, or requests wait.
            PoolClosed, DeviceLost, ForkedPool: The pool grants nothing any more.
            CUDAError: A green context over the cells cannot be made.
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
        """Pass a request to the scheduler; return its leases, or none if it is queued."""
        self.refuse_in_decision()
        self._cancel_abandoned()
        if len(self.pollers) > 1:
            self._look_for_closed_loops(poller)
        try:
            with self.lock:
                scheduled, leases, granted = self._request_locked(request, poller, wait=wait)
        except BaseException as error:
            if not isinstance(error, WouldBlock):
                self.records.tell_rarely("refused %s: %s", request, error)
            self.recorder.flush()
            user_code.report()
            raise
        try:
            self.notify_granted(granted)
        except BaseException:  # an interrupt in a policy, which the caller gets instead of a lease
            for lease in leases:
                lease.end()
            self._cancel(scheduled)
            raise
        return scheduled, leases

    def _request_locked(
        self, request: LeaseRequest, poller: CompletionPoller, *, wait: bool
    ) -> tuple[Request, tuple[Lease, ...], list[Request]]:
        """Return the scheduler's request, its leases, and other requests granted meanwhile."""
        if self.state is not OPEN:
            raise self.refusal()
        near, device, now = request.near, request.device, self._time()
        holder, is_watched = poller.loop.current_holder(), self.recorder.watched
        if is_watched:
            self.records.add_requested(now, self.scheduler.arrivals, request, holder)
        try:
            scheduled = self.scheduler.request(
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
        granted = self.scheduler.resized(scheduled)
        leases = self._claim_locked(scheduled, poller, request) if scheduled.grants else ()
        if not leases:
            GrantWaiter(scheduled, poller)
            if is_watched:
                self.records.add_queued(scheduled, self.scheduler.waiting)
        return scheduled, leases, granted

    @property
    def in_decision(self) -> bool:
        """Whether this thread is in a decision, where it runs a policy or curve of the user."""
        return self.lock._is_owned()  # type: ignore[attr-defined,no-any-return]  # `Condition`'s

    def refuse_in_decision(self) -> None:
        """Refuse changes by a policy or curve during its own, incomplete decision.

        Raises:
            InvalidRequest: This thread is in a decision.
        """
        if self.in_decision:
            raise InvalidRequest(
                "a policy or a duration curve cannot change its pool during a decision: it may "
                "read `pool.statistics()`, and a task of its own can do the rest"
            )

    def _claim_locked(
        self, granted: Request, poller: CompletionPoller, request: LeaseRequest
    ) -> tuple[Lease, ...]:
        """Turn the grants of a request into leases of this loop."""
        grants, granted.grants = granted.grants, ()  # or request and grants would be a cycle
        # On trio a request is always a checkpoint, which costs more than a decision.
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
        """Return the executor over the cells of a grant, which uses it from now on."""
        executors = self.device_pools[grant.device].executors
        executor = executors[grant.mask]
        executor.is_leased = True
        return executor

    def _unclaimed_locked(self) -> list[Request]:
        """Return granted requests whose tasks have not resumed yet."""
        owners = [grant.request for held in self.scheduler.allocator.grants for grant in held]
        return [request for request in dict.fromkeys(owners) if request.grants]

    def _cancel(self, request: Request) -> None:
        """Cancel a request, whether queued or granted."""
        if self.state is FORKED:
            return
        with self.lock:
            granted = self.cancel_locked(request)
        self.notify_granted(granted)

    def _cancel_abandoned(self) -> None:
        """Cancel the requests of collected tasks.

        Garbage collection runs at any allocation, on any thread, perhaps while the lock is held, so
        it only appends to a list. At most `AT_ONCE` are cancelled now, the rest in later turns.
        """
        for _ in range(min(AT_ONCE, len(self._abandoned))):
            with suppress(IndexError):  # another thread took the last one
                self._cancel(self._abandoned.popleft())
        if self._abandoned and not self._cancels_more:
            self._cancels_more = self.pollers.call_one(self._cancel_more)

    def _cancel_more(self, _: CompletionPoller) -> None:
        self._cancels_more = False
        self._cancel_abandoned()

    def cancel_locked(self, request: Request) -> list[Request]:
        """End a request that is queued, or granted and not claimed. Idempotent.

        Returns the requests that are granted as a result.
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
        """Let the scheduler change the cells of a lease without work; the lease then moves.

        Returns:
            If the lease gave way, the request that it waits for: call `wait_to_go_on` next.

        Raises:
            PoolClosed, DeviceLost, ForkedPool: The pool has ended.
            InvalidRequest: `duration` or `deadline` is invalid.
        """
        self.refuse_in_decision()
        expectations = checked_duration(duration), checked_deadline(deadline)
        executor = lease.executor
        if len(self.pollers) > 1:
            self._look_for_closed_loops(lease.poller)
        waiting = None
        with self.lock:
            self.check()
            grant, before = lease.grant, lease.grant.mask
            granted = self.scheduler.checkpoint(self._time(), grant, *expectations)
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
        """Return the cells of a lease without work, until `end_idle`.

        Raises:
            PoolClosed, DeviceLost, ForkedPool: The pool has ended.
        """
        with self.lock:
            self.check()
            grant, holder = lease.grant, lease.grant.holder
            granted = self.scheduler.drained(self._time(), grant)
            grant.holder = holder  # the request of `end_idle` has the same holder
            lease.executor.is_leased = False
            lease.give_way()
        self.notify_granted(granted)

    async def end_idle(self, lease: Lease) -> None:
        """Request the earlier size again, and wait for the grant. Raises as `wait_to_go_on`."""
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
        """Wait until a lease that gave way at a checkpoint gets SMs again.

        A cancellation or an error ends the lease, because it has no SMs.

        Raises:
            PartitionClosed: The lease was ended meanwhile.
            TooManySMs: The classes have changed, and it can never be granted again.
            PoolClosed, DeviceLost, ForkedPool: The pool grants nothing any more.
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
        except GeneratorExit:  # from garbage collection, where no lock may be taken
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
        """Change the classes or the policy.

        Raises:
            PoolClosed, DeviceLost, ForkedPool: The pool grants nothing any more.
            InvalidRequest: The reserves of the classes do not fit; nothing has changed.
        """
        self.refuse_in_decision()
        with self.lock:
            if self.state is not OPEN:
                raise self.refusal()
            granted = self.scheduler.reconfigure(self._time(), services, policy)
            if services is not None:
                self._set_quotas(services)
                self.watchdog.set_services_locked(services)
                for index, device_pool in enumerate(self.device_pools):
                    homes = self.scheduler.home_masks(index)
                    missing = [m for m in homes if m not in device_pool.executors]
                    self.scheduler.missing_executors.update({(index, m): None for m in missing})
        self.notify_granted(granted)
        if services is not None:
            names = ", ".join(service.name for service in services) or "none"
            self.records.tell_rarely("the pool's classes are now: %s", names, level=logging.INFO)
        if policy is not None:
            name = type(policy).__name__
            self.records.tell_rarely("the pool's policy is now: %s", name, level=logging.INFO)

    def _set_quotas(self, services: Sequence[ServiceClass]) -> None:
        """Set each class's memory quota. A class whose quota was removed is still counted."""
        for service in services:
            if service.name in self._quotas:
                self._quotas[service.name].most = service.memory_bytes
            elif service.memory_bytes is not None:
                self._quotas[service.name] = MemoryQuota(service.name, service.memory_bytes)

    def observe(self, service: str, latency: float, count: int) -> None:
        """Report a latency of a class to the scheduler."""
        self.refuse_in_decision()
        with self.lock:
            self.check()
            granted = self.scheduler.observe(self._time(), service, latency, count)
        self.notify_granted(granted)

    def statistics(self) -> PoolStatistics:
        """Return figures of what the pool holds and has done, all from one moment.

        First takes over the leases of closed loops, except inside a decision.
        """
        if not self.in_decision:
            self.take_over_closed_loops()
        with self.reads.read() as may_change:
            if may_change:
                self.scheduler.reclaim(self._time())
            return self.statistics_locked()

    def statistics_locked(self) -> PoolStatistics:
        """Return the statistics. For use inside a read of `reads`."""
        wake = None if self._wake is None else durations(self._wake)
        leases, now = len(self.leases), self._time()
        return collect_statistics(self.state, self.device_pools, leases, self.scheduler, now, wake)

    def held(self) -> list[LeaseInfo]:
        """Return the leases that hold SMs, oldest first. See `Pool.leases`."""
        with self.reads.read() as may_change:
            if may_change:
                self.scheduler.reclaim(self._time())
            return self.held_locked()

    def held_locked(self) -> list[LeaseInfo]:
        """Return the leases that hold SMs. For use inside a read of `reads`."""
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
        """Record from now on. Return a record for each lease that exists.

        While records are made, no lease is cached, so that each lease has a decision and a record.
        """
        self.scheduler.reclaim(self._time())
        self.cache.set_open_locked(False)
        self.scheduler.allocator.on_resize = self.records.add_resized
        for lease in self.leases:
            for bound in lease.bound_launches:
                bound.slow_down(SlowReason.WATCHED)
        grants = [grant for held in self.scheduler.allocator.grants for grant in held]
        return [self.records.granted(grant, grant.began) for grant in grants]

    def unwatched_locked(self) -> None:
        """Record nothing from now on."""
        self.scheduler.allocator.on_resize = None
        self.records.forget()
        self.cache.set_open_locked(self.state is OPEN)

    # -- ending leases ---------------------------------------------------------------------------

    def lease_draining(self, lease: Lease) -> None:
        """Tell the scheduler that a lease has ended before its work is done."""
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
            lease.executor.hang = None  # its hanging work has ended
            if lease.grant.over:  # it gave way at a checkpoint, so it has no cells
                refuse(lease.grant.request, PartitionClosed("this partition"))
                granted = self.cancel_locked(lease.grant.request)
            else:
                lease.executor.is_leased = False
                granted = self.scheduler.drained(self._time(), lease.grant)
        self.notify_granted(granted)
        self._cancel_abandoned()

    def _close_cached_locked(self) -> None:
        """Close cached leases whose cells the scheduler has reclaimed."""
        for lease in self.cache.clear_locked():
            lease.reclaimed()
            lease.executor.is_leased = False
            self.leases.discard(lease)

    def notify_granted(self, granted: list[Request]) -> None:
        """Wake the tasks of granted and rejected requests. Not for use under the lock.

        Grants to tasks of a closed loop go to other requests. Exceptions of the user's policies and
        curves in the decision are logged here; an interrupt among them is raised.
        """
        for request in granted:  # which may grow in the loop
            if not notify(request):
                with self.lock:
                    granted += self.cancel_locked(request)
        if self.recorder.watched:
            self.recorder.flush()
        rejected = self.scheduler.rejected
        while rejected:
            with suppress(IndexError):  # another thread took the last one
                self._refuse_queued(*rejected.pop())
        if self.scheduler.missing_executors:
            self.builder.make_missing()
        if self._idle_waiters and self.scheduler.is_idle:
            self._wake_idle_waiters()
        if user_code.deferred:
            user_code.report()

    def _refuse_queued(self, request: Request, error: Exception) -> None:
        """Refuse a request that has left the queue."""
        self.records.refused_in_queue(request, error)
        refuse(request, error)

    def _on_queue_tick(self) -> float:
        """While requests are queued, expire them, and look for closed loops.

        Returns the seconds until the next call.
        """
        self._take_over_closed_loops(self.current_poller())
        self._cancel_abandoned()
        with self.lock:
            now = self._time()
            granted, expired = self.scheduler.tick(now, AT_ONCE)
            deadline = self.scheduler.next_deadline()
            warnings = self._holder_warnings_locked(now)
        for warning in warnings:
            self.records.tell_rarely("%s", warning, level=logging.WARNING)
        for request in expired:
            error = DeadlineExceeded((request.deadline or now) - request.arrived)
            self._refuse_queued(request, error)
        self.notify_granted(granted)
        return TICK_S if deadline is None else max(0.0, min(TICK_S, deadline - now))

    def _holder_warnings_locked(self, now: float) -> list[str]:
        """Return new warnings about holders that keep requests waiting, once in `MOST_S`."""
        if now < self._holders_due:
            return []
        self._holders_due = now + MOST_S
        firsts = [r for r in self.scheduler.queue.firsts() if now - r.arrived >= MOST_S]
        return self._holders.warnings(now, self.leases, firsts) if firsts else []

    def _look_for_closed_loops(self, poller: CompletionPoller) -> None:
        """Take over requests and leases of closed loops, at most once every `TICK_S`.

        Ticks look for closed loops, too, but only while requests are queued, and a program's
        requests may never be queued.
        """
        now = self._time()
        if now >= self._look_due:
            self._look_due = now + TICK_S
            self._take_over_closed_loops(poller)

    def take_over_closed_loops(self) -> None:
        """Have this thread's loop, or soon another loop, take over what closed loops left."""
        if self.works and self.pollers.has_closed:
            try:
                self._take_over_closed_loops(self.current_poller())
            except NoLoop:
                self.pollers.call_one(self._take_over_closed_loops)

    def _take_over_closed_loops(self, poller: CompletionPoller) -> None:
        """Cancel the requests of closed loops, and drain their leases on this loop's poller."""
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
        """Raise if granted leases cannot be used: the pool is closed, lost or forked."""
        if not self.works:
            raise self.refusal()

    @property
    def works(self) -> bool:
        """Whether granted leases can be used."""
        return self.state is OPEN or self.state in WORKING

    @property
    def is_used(self) -> bool:
        """Whether a request is queued, or a lease is open or draining. Takes no lock."""
        return self.scheduler.waiting > 0 or len(self.leases) > len(self.cache)

    @property
    def failure(self) -> BaseException | None:
        """The first device fault, or None."""
        failures = (device_pool.device.health.failure for device_pool in self.device_pools)
        return next((failure for failure in failures if failure is not None), None)

    def refusal(self) -> GreenschedError:
        """Return an error that says why the pool grants nothing."""
        if (failure := self.failure) is not None:
            return DeviceLost(failure)
        if self.state is FORKED:
            return ForkedPool("this pool")
        return PoolClosed("this pool", self.state.value)

    def device_lost(self, error: BaseException) -> None:
        """End the pool and all waits because of a device fault. Idempotent. From any thread.

        Each later use of the pool raises `DeviceLost` with this cause; no CUDA call is made again.
        """
        with self.lock:
            if self.failure is not None or self.state is PoolState.CLOSED:
                return
            self.state = PoolState.POISONED
            self._stop_granting_locked(lambda: DeviceLost(error))
            pollers = self.pollers.all_locked()
            for device_pool in self.device_pools:
                device_pool.device_failed(error)
            leased = []
            for lease in self.leases:
                lease.close_bound_launches()
                if not lease.grant.over:
                    holder = lease.holder or holder_name(lease.grant.holder)
                    leased.append(f"{holder} ({lease.grant.sms} SMs)")
        self._refuse_closed()
        for poller in pollers:
            poller.kick_threadsafe()
        self.records.lost(error, sorted(leased))
        end_process(self.exit_policy)

    def forked(self, lock: threading.RLock) -> None:
        """Refuse everything in a forked child, without a lock that the parent may have held."""
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
        """Grant nothing more, and refuse queued requests."""
        with self.lock:
            if self.state is OPEN:
                self._stop_granting_locked(lambda: PoolClosed("this pool", "closing"))
            if self.state in (PoolState.OPENING, OPEN):
                self.state = PoolState.CLOSING
        self._refuse_closed()

    def _stop_granting_locked(self, error: Callable[[], Exception]) -> None:
        """Reclaim cached leases and empty the queue. The caller then calls `_refuse_closed`.

        Args:
            error: Makes the error of a request that waited.
        """
        if not self.device_pools:
            return
        now = self._time()
        self.scheduler.reclaim(now)
        self.cache.set_open_locked(False)
        self._refusing.append((self.scheduler.close(), error))

    def _refuse_closed(self) -> None:
        """Refuse the requests of a closed queue, `AT_ONCE` in each turn of a loop."""
        while self._refuse_some() and not self.pollers.call_one(lambda _: self._refuse_closed()):
            pass  # no open loop is left
        if not self._refusing and self._idle_waiters:
            self._wake_idle_waiters()

    def _refuse_some(self) -> bool:
        """Refuse at most `AT_ONCE` requests; return whether more are left."""
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
        """Wait until no lease is open or draining, and all queued requests are refused.

        Returns earlier if the grace has passed.
        """
        poller = self.current_poller()
        poller.request_queued()  # so that it ticks, because a loop with leases may close meanwhile
        try:
            with anyio.move_on_after(grace):
                while (waiter := self._create_idle_waiter(poller)) is not None:
                    await waiter
        finally:
            poller.waiting -= 1

    def _create_idle_waiter(self, poller: CompletionPoller) -> Waiter | None:
        """Make a waiter that is woken once every cell is free; None if no wait is needed."""
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
        """Close every device without work; return what was left. Blocks.

        Runs on the builder thread, or on another one if the builder is held up.
        """
        with self.lock:
            if self.failure is not None:  # make no CUDA call: the process must be replaced
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
        """Wake all tasks that wait for work left behind. They raise PoolClosed."""
        self._wake_idle_waiters()
        self.builder.end_waits()
        with self.lock:
            leases, pollers = tuple(self.leases), self.pollers.all_locked()
        for lease in leases:
            lease.close_bound_launches()
            lease.poller.loop.call_threadsafe(lease.pool_closed)
        for poller in pollers:
            poller.kick_threadsafe()
