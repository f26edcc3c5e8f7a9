"""The scheduler of a pool: `request`, `cancel`, `release`, `drained`, `checkpoint`, `tick`.

Synchronous and deterministic: a call takes `now` and returns the requests that it grants. Rules:

1. A cell is *free*, *leased* or *draining*, in only one state. Two grants never have the same
   cell (checked whenever cells move: `SMAllocator.resize`).
2. A request is QUEUED, then GRANTED, or GONE (cancelled, expired, rejected). Only a QUEUED request
   is granted. A GRANTED request that is no longer wanted returns its grants: `release`, `drained`.
   If its elastic lease gives way at a checkpoint, it is QUEUED again (`giving_way`).
3. Cells become free only by `drained`, `reclaim`, and the `checkpoint` of an elastic grant.
4. Requests of one class with equal sizes, devices and magnitude of a known duration, whose holders
   have grants on the same devices, wait in one line. Only the first of a line is ever tried: if it
   does not fit, no other of the line does. So the cost of a decision depends on the number of
   lines, not of requests.
5. The first request of all that does not fit lets others overtake as long as the policy allows.
   Then one device is kept for it: it goes first, and nothing else is granted there, whatever its
   rank, until the request is granted or gone. Exceptions: a class gets what is free of its reserve;
   a request is granted that ends or gives way before the first could begin (backfill), or whose
   holder has grants there, which may not end before. An elastic request of unknown duration does
   not overtake a first request of a higher class, even before the latter has aged; nor does one
   that the policy sizes, if the first would not fit beside it.
   No device is kept for a request that could not be granted even then, because the rules of its
   class, or the duration of its leases, have changed: once it has aged, or nothing is held, it is
   `rejected`.
6. A queued request holds nothing else, and no class borrows from the reserve of a class that waits.
   So when a request leaves, others can be granted only if a device was kept for it, or if it was
   the last one of a class with a reserve.
7. Cells without an executor (`is_made`) are not granted. A request that needs an executor waits,
   holding nothing, and the cells are noted in `missing_executors`. It is granted once the executor
   is made (`made`), or when other cells become free. No device is kept for it meanwhile, because
   making an executor may take arbitrarily long.
8. A class has its reserve, its cap and its quota (`services`) under every policy. Cells borrowed
   from a reserve return within the longest wait of their owner (`reservations`).

`RequestQueue` knows which requests wait, `SMAllocator` which cells are free; `Dispatcher` grants;
`Checkpoints` lets leases grow, shrink and give way.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from greensched.errors import InvalidRequest, QueueFull
from greensched.scheduling import refusals
from greensched.scheduling.allocator import Placement, SMAllocator
from greensched.scheduling.cells import DeviceCells, SizeRange
from greensched.scheduling.checkpoints import Checkpoints
from greensched.scheduling.class_state import SMOOTHING, ClassState
from greensched.scheduling.dispatch import Dispatcher
from greensched.scheduling.histogram import SHORTEST
from greensched.scheduling.lateness import Lateness
from greensched.scheduling.policy import GuardedPolicy, Policy
from greensched.scheduling.queue import RequestQueue
from greensched.scheduling.request_line import RequestLine
from greensched.scheduling.requests import (
    GONE,
    GRANTED,
    QUEUED,
    Duration,
    Grant,
    Request,
    by_rank,
)
from greensched.scheduling.services import ServiceClass
from greensched.scheduling.statistics import (
    SchedulerStatistics,
    ServiceStatistics,
    count_sms,
    granted_of,
    statistics_by_class,
)


def _always(*_: int) -> bool:
    return True


class Scheduler:
    """Decides which request gets which cells.

    Args:
        devices: The cells of each device.
        policy: The policy.
        max_waiting: The most requests in the queue.
        is_made: Whether (device, cells) has an executor.
        may_make: Whether a device may have another executor, although requests could wait for one.
        services: The classes.
        placement: Which device to try first.
        on_reclaim: Called after the cells of all suspended grants were freed.

    Raises:
        InvalidRequest: The reserves of the classes do not fit on the devices.
    """

    def __init__(
        self,
        devices: Sequence[DeviceCells],
        policy: Policy,
        max_waiting: int,
        is_made: Callable[[int, int], bool] = _always,
        *,
        may_make: Callable[[int], bool] = _always,
        services: Iterable[ServiceClass] = (),
        placement: Placement = "spread",
        on_reclaim: Callable[[], object] = lambda: None,
    ) -> None:
        guarded = GuardedPolicy(policy)
        self.allocator = SMAllocator(devices, is_made, may_make, services, placement)
        self.queue = RequestQueue(guarded, self.allocator.virtual_time, self.allocator.devices)
        self.dispatcher = Dispatcher(self.queue, self.allocator, guarded)
        self.checkpoints = Checkpoints(self.queue, self.allocator, self.dispatcher, self.drained)
        self.lateness = Lateness(self.queue, self.allocator)
        self.max_waiting = max_waiting
        #: Work for the pool: executors to make, as (device, cells), and errors to deliver to
        #: rejected requests. The pool empties both.
        self.missing_executors = self.dispatcher.missing_executors
        self.rejected = self.dispatcher.rejected
        #: Sets of cells with an executor, by device and number of cells. The pool updates it.
        self.ready_masks = self.allocator.ready_masks
        self._suspended: dict[Grant, None] = {}
        self._reused = self.dispatcher.reused
        self._on_reclaim = on_reclaim
        self._everywhere = tuple(range(len(self.allocator.devices)))
        self._cancelled = self._expired = self._refused = 0
        #: The mean duration of leases that ended while requests waited.
        self._mean_duration = 0.0
        self._need_reserves()

    # -- requests --------------------------------------------------------------------------------

    def request(
        self,
        now: float,
        parts: tuple[SizeRange, ...],
        *,
        service: str = "",
        devices: tuple[int, ...] | None = None,
        near: int | None = None,
        priority: float | None = None,
        deadline: float | None = None,
        duration: Duration | None = None,
        holder: Hashable = None,
        owner: object = None,
        wait: bool = True,
    ) -> Request:
        """Take a request. Grant it at once if it fits and none precedes it, otherwise queue it.

        Args:
            now: The time in seconds.
            parts: The sizes, all granted together on one device.
            service: The name of its class, or "".
            devices: Where it may be granted. None: anywhere.
            near: The preferred device.
            priority: Larger goes first. None: its class's priority.
            deadline: The time at which it expires.
            duration: Its expected duration, from its grant to its end.
            holder: The task or thread, to find requests that wait for their own holder's grants.
            owner: Any object, for the caller to find on the request.
            wait: Whether it may be queued.

        Raises:
            InvalidRequest: There is no such class.
            TooManySMs: It can never fit.
            DeadlineImpossible: It is known to miss its deadline.
            WouldBlock: `wait` is false and it does not fit now.
            WouldDeadlock: It would have to wait, and can never fit while `holder` keeps its
                grants.
            QueueFull: It would have to wait, and too many requests do.

        The caller then calls `resized`, because others may be granted.
        """
        state = self._class_of(service)
        if self.allocator.is_limited:
            state.forget_overruns(now)
        due = deadline
        if due is None and state.latency is not None:
            due = now + state.latency
        request = Request(
            state, parts, self._everywhere if devices is None else devices,
            state.priority if priority is None else priority, now, self.queue.arrivals,
            near=near, due=due, deadline=deadline, duration=duration, holder=holder, owner=owner,
        )  # fmt: skip
        if holder is not None and self.dispatcher.holds(holder):
            request.held_devices = self.dispatcher.held_devices(holder)
        if self._suspended and self._grant_beside_suspended(request, now):
            self.queue.arrivals += 1
            return request
        self.reclaim(now)
        if due is not None and duration is not None:
            self.lateness.check(request)
        line = None
        if self.queue.waiting:
            line = self.queue.lines.get(request.line_key)
            fits = self.dispatcher.try_ahead_of_queue(request, line, now)
        else:
            fits = self.dispatcher.grant(request, request.devices, now)
        if not fits:
            self._enqueue(request, line, now, wait=wait)
        self.queue.arrivals += 1
        return request

    def home_masks(self, device: int, service: str | None = None) -> tuple[int, ...]:
        """Return the home cells of a class, or of every class, on a device; see `home_cells`.

        Raises:
            InvalidRequest: There is no such class.
        """
        homes = self.allocator.reservations[device].homes
        states = homes if service is None else (self._class_of(service),)
        mask_lists = [masks for state in states for masks in homes.get(state, {}).values()]
        return tuple(dict.fromkeys(mask for masks in mask_lists for mask in masks))

    def claim(self, now: float, device: int, mask: int) -> Request | None:
        """Grant exactly these cells, which have an executor, regardless of the classes' rules.

        Returns None if they are not free, or requests wait.
        """
        self.reclaim(now)
        allocator = self.allocator
        if self.queue.waiting or mask & ~allocator.free_masks[device]:
            return None
        sms, state = allocator.devices[device].sm_count(mask), allocator.classes[""]
        size = SizeRange(sms, sms)
        claimed = Request(state, (size,), (device,), 0, now, self.queue.arrivals)
        claimed.grants = allocator.allocate(claimed, device, (mask,), now)
        claimed.state = GRANTED
        self.queue.arrivals += 1
        self.dispatcher.granted += 1
        return claimed

    def _class_of(self, service: str) -> ClassState:
        classes, retired = self.allocator.classes, self.allocator.retired
        state = classes.get(service)
        if state is None or service in retired:
            known = ", ".join(name for name in classes if name and name not in retired) or "none"
            raise InvalidRequest(f"unknown service {service!r}: this pool has {known}")
        return state

    def _grant_beside_suspended(self, request: Request, now: float) -> bool:
        """Grant a request from cells that are free without reclaiming, if only these decide.

        So grants of several sizes can be suspended at the same time: `make bench` has a bar for two
        sizes in turn. If a class has limits, a policy sizes or a device is shared, a decision
        depends on more than free cells. With several devices, only the device that it would get
        after reclaiming all is tried.
        """
        allocator = self.allocator
        if allocator.is_limited or allocator.may_share or self.queue.policy.size is not None:
            return False
        if request.is_elastic or request.duration is not None:
            return False
        if any(part.named for part in request.parts):
            return False
        devices = allocator.order(request, request.devices, self._suspended)[:1]
        return self.dispatcher.grant(request, devices, now)

    def _enqueue(
        self, request: Request, line: RequestLine | None, now: float, *, wait: bool
    ) -> None:
        """Queue a request that does not fit now, or refuse it."""
        if line is None:
            line = self.dispatcher.line_of(request)
            if not line.devices:
                raise self.dispatcher.too_many(request)
        if not wait:
            self._count_refusal(request)
            raise refusals.would_block(self.dispatcher, request)
        if request.held_devices:
            refusals.check_deadlock(self.dispatcher, request, line.devices)
        state, waiting = request.class_state, self.queue.waiting
        if waiting >= self.max_waiting or state.waiting >= state.max_waiting:
            self._count_refusal(request)
            number = waiting if waiting >= self.max_waiting else state.waiting
            after = refusals.retry_after(
                self.allocator, request, line.asked, now, self._mean_duration
            )
            raise QueueFull(number, after)
        if request.due is not None and request.duration is not None:
            self.lateness.check_in_queue(request, line, now)
        self.queue.add(request, line)
        if request.missing_executors:
            self.dispatcher.note_missing(request)

    def resized(self, request: Request) -> list[Request]:
        """Return the other requests that are granted because of the request that was just made.

        With a policy that sizes, they may need less. The first request may now begin later, which
        leaves time for more before it.
        """
        dispatcher = self.dispatcher
        return dispatcher.dispatch(request.arrived) if dispatcher.may_change() else []

    def cancel(self, now: float, request: Request) -> list[Request]:
        """Cancel a queued request; return the requests that are granted because it left."""
        if request.state is not QUEUED:
            return []
        if request.line.is_closed:  # `close` has counted it
            request.state = GONE
            return []
        self._cancelled += 1
        request.class_state.cancelled += 1
        return self.dispatcher.dispatch(now) if self._leave(request) else []

    def _leave(self, request: Request) -> bool:
        """Remove a request from the queue; say whether others may be granted because of it."""
        request.state = GONE
        was_first = self.queue.is_reserved_for(request) or self.dispatcher.is_held_back
        return self.queue.remove(request) or was_first

    # -- grants ----------------------------------------------------------------------------------

    def release(self, grant: Grant) -> None:
        """End a lease whose work may still run. Its cells are not free until it is `drained`."""
        if not grant.draining:
            grant.draining = True
            self.dispatcher.drop_holder(grant)

    def drained(self, now: float, grant: Grant) -> list[Request]:
        """Free the cells of a grant whose work is done; return the requests that are granted."""
        if grant.over:
            raise AssertionError(f"cells given back twice: {grant}")
        if not grant.draining:
            self.release(grant)
        grant.over = True
        self.allocator.free(grant, now)
        if not self.queue.waiting:
            return []
        # Only its time while others waited counts: before that another lease may have had the
        # same grant (`resume`).
        seconds = now - max(grant.began, self.queue.busy_since)
        mean = self._mean_duration
        self._mean_duration = mean + (SMOOTHING if mean else 1.0) * (seconds - mean)
        return self.dispatcher.dispatch(now)

    def checkpoint(
        self,
        now: float,
        grant: Grant,
        duration: Duration | None = None,
        within: float | None = None,
    ) -> list[Request]:
        """Allow changes of the cells of a grant whose holder has no work on it now.

        An elastic grant gives back SMs above its minimum, requests are granted from these, and it
        takes idle cells up to its maximum; a policy that sizes sets both limits. If the device of a
        shared grant is to be split, the grant instead gets the minimum of its request. Afterwards
        `grant.mask` and `grant.sms` say what it has.

        Args:
            now: The time in seconds.
            grant: The grant.
            duration: The expected duration until the next checkpoint. None: unknown.
            within: Seconds in which that should be done. None: the latency of its class.

        Returns:
            The requests that are granted.

        Raises:
            InvalidRequest: The grant would give way, but the policy failed to rank its request. It
                keeps its cells.
        """
        self.reclaim(now)
        return self.checkpoints.reach(now, grant, duration, within)

    def ask_again(self, now: float, grant: Grant) -> list[Request]:
        """Queue the request of a grant that was given back for a while, as a new request.

        Returns the requests that are granted as a result, itself included if it fits. It is
        `rejected` if it can never be granted any more, because the classes have changed.
        """
        self.reclaim(now)
        return self.checkpoints.ask_again(now, grant)

    # -- suspended grants ------------------------------------------------------------------------

    def suspend(self, now: float, grant: Grant) -> bool:
        """Set aside a grant of one size whose lease has ended, for the next equal request.

        `resume` grants it again without a decision. Its cells count as free: `reclaim` frees them
        before any decision that they could change. Return False if a decision would depend on more
        than free cells, so that the grant must be `drained`: requests wait, or it has a loan, a
        quota, a shared device, a removed class, or a duration, which the next request does not
        have.
        """
        if self.queue.waiting or not (grant in self._reused or self._may_reuse(grant)):
            return False
        self._suspended[grant] = None
        grant.holder = None
        if self.allocator.is_timed:
            seconds = now - grant.began
            if seconds < SHORTEST:  # counting each of these leases would add a tenth to it
                grant.short_uses += 1
                grant.short_s += seconds
            else:
                grant.class_state.use.add(seconds)
                grant.reused_s += seconds
        if self.allocator.is_classed:
            self.allocator.suspend(grant, now)
        return True

    def _may_reuse(self, grant: Grant) -> bool:
        """Say whether a grant may be suspended. True holds until a checkpoint or new rules."""
        allocator, state = self.allocator, grant.class_state
        if grant.loans or allocator.may_share or state.quota is not None:
            return False
        if state.name in allocator.retired or grant.request.duration is not None:
            return False
        grant.request.holder = None  # so that a kept grant keeps no task alive
        self.dispatcher.reuse(grant)
        return True

    def resume(self, now: float, grant: Grant, holder: Hashable) -> None:
        """Give a suspended grant to an equal request, and count this like any other grant."""
        del self._suspended[grant]
        self.queue.arrivals += 1
        self.dispatcher.granted += 1
        grant.holder = holder
        grant.began = grant.since = now
        if self.allocator.is_classed:
            self.allocator.resume(grant, now)

    def reclaim(self, now: float) -> None:
        """Free the cells of all suspended grants, and call `on_reclaim` if there are any."""
        if not self._suspended:
            return
        suspended, self._suspended = self._suspended, {}
        for grant in suspended:
            grant.is_suspended = True
            granted = self.drained(now, grant)
            assert not granted, "a grant was suspended while a request waited"
        self._on_reclaim()

    # -- other events ----------------------------------------------------------------------------

    def observe(self, now: float, service: str, latency: float, number: int) -> list[Request]:
        """Record that `number` requests of a class had this latency, from end to end.

        From then on these latencies, instead of the durations of its leases, determine whether
        devices are split, and how much of its latency the class plans with. Return the requests
        that are granted.

        Raises:
            InvalidRequest: There is no such class.
        """
        state, controller = self._class_of(service), self.allocator.split_controller
        state.reports_latency = True
        state.record_latency(latency, number)
        is_changed = state.shared and controller.record(state, latency, number, now)
        return self.dispatcher.dispatch(now) if is_changed else []

    def made(self, now: float) -> list[Request]:
        """Take new executors into account; return the requests that are granted."""
        return self.dispatcher.dispatch(now)

    def tick(self, now: float, most: int | None = None) -> tuple[list[Request], list[Request]]:
        """Let time pass; return the requests that are granted, and those that expired.

        At most `most` expire at once. If more must, `next_deadline` has passed.
        """
        queue = self.queue
        expired: list[Request] = []
        may_grant = any(state.is_within_quota(now) for state in self._over_quota())
        may_grant |= queue.waiting > 0 and self.is_idle
        late_at = queue.late_at()
        may_grant |= late_at is not None and late_at <= now
        may_grant |= self.dispatcher.long_at <= now
        while len(expired) != most and (request := queue.expired(now)) is not None:
            self._expired += 1
            request.class_state.expired += 1
            may_grant |= self._leave(request)
            expired.append(request)
        return (self.dispatcher.dispatch(now) if may_grant else []), expired

    def next_deadline(self) -> float | None:
        """Return when `tick` has something to do. None: never, as far as is known."""
        candidates = self.queue.next_deadline(), self.queue.late_at()
        times = [at for at in candidates if at is not None]
        times += [state.refilled_at() for state in self._over_quota()]
        if self.queue.waiting and self.dispatcher.long_at < math.inf:
            times.append(self.dispatcher.long_at)
        return min(times, default=None)

    def reconfigure(
        self, now: float, services: Iterable[ServiceClass] | None, policy: Policy | None
    ) -> list[Request]:
        """Apply other classes, or another policy (None: the same); return the granted requests.

        Queued requests stay queued, ranked by the new policy, and leases end under the rules they
        began under. A request of a removed class is served without a reserve or a cap. A request
        that can never be granted any more is `rejected`.

        Raises:
            InvalidRequest: The reserves do not fit on the devices, or the policy failed to rank a
                request; nothing has changed.
        """
        self.reclaim(now)
        queue, dispatcher = self.queue, self.dispatcher
        for grant in tuple(dispatcher.reused):
            dispatcher.reuse_no_more(grant)
        waiting = queue.queued()
        guarded = queue.policy if policy is None else GuardedPolicy(policy)
        ranks = [r.rank if policy is None else guarded.rank(r) for r in waiting]
        if services is not None:
            self.allocator.set_rules(services)
            self._need_reserves()
        dispatcher.policy = guarded
        queue.set_policy(guarded)
        queue.requeue()
        for request, rank in zip(waiting, ranks, strict=True):
            devices, old = self.allocator.devices_for(request), request.line
            if devices:
                line = queue.lines.get(request.line_key)
                if line is None:
                    line = RequestLine(request, devices, old.asked, old.least)
                queue.put_in_line(request, line, rank)
            else:
                dispatcher.reject(request)
        return dispatcher.dispatch(now)

    def close(self) -> Iterator[Request]:
        """Empty the queue immediately, however many requests wait.

        Returns:
            The requests that waited, in the order of the queue. Each leaves when the iterator
            yields it.
        """
        self._cancelled += self.queue.waiting
        for state in {line.class_state for line in self.queue.lines.values()}:
            state.cancelled += state.waiting
        return _left(self.queue.close())

    def _need_reserves(self) -> None:
        """Note executors for each reserve, and for the cells outside, before devices are busy."""
        for device, cells in enumerate(self.allocator.devices):
            reservations = self.allocator.reservations[device]
            for mask in reservations.blocks.values():
                self.dispatcher.need(device, mask)
            if reservations.owners:
                self.dispatcher.need(device, cells.complement(reservations.all_blocks))

    # -- state -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """The number of queued requests."""
        return self.queue.waiting

    @property
    def is_idle(self) -> bool:
        """Whether every cell is free."""
        return not any(self.allocator.grants)

    @property
    def arrivals(self) -> int:
        """The number of requests that have arrived, which is the unique order of the next one."""
        return self.queue.arrivals

    def queued(self) -> list[Request]:
        """Return all queued requests in the order of arrival."""
        return self.queue.queued()

    def statistics(self) -> SchedulerStatistics:
        """Return the counts and the present state."""
        free, leased, draining = count_sms(self.allocator)
        return SchedulerStatistics(
            waiting=self.queue.waiting,
            requested=self.arrivals,
            granted=self.granted,
            cancelled=self._cancelled + self.dispatcher.rejections,
            expired=self._expired + self.dispatcher.expired,
            refused=self._refused + self.lateness.refused,
            sms_free=free,
            sms_leased=leased,
            sms_draining=draining,
        )

    def time_leases(self, now: float) -> None:
        """Record from now on how long requests wait, and leases last and drain. Idempotent."""
        if self.allocator.is_timed:
            return
        self.reclaim(now)
        self.allocator.is_timed = True
        for state in self.allocator.classes.values():
            state.untimed = granted_of(self.allocator, state, self.granted)

    @property
    def granted(self) -> int:
        """The number of granted requests."""
        return self.dispatcher.granted

    def services(self, now: float) -> dict[str, ServiceStatistics]:
        """Return statistics by class name; "" is for requests without a class.

        Empty if there are no classes, unless leases are timed.
        """
        return statistics_by_class(self.allocator, self._suspended, self.granted, now)

    def _over_quota(self) -> list[ClassState]:
        """Return the classes whose requests wait for their quota."""
        if not self.allocator.is_limited or not self.queue.waiting:
            return []
        classes = self.allocator.classes.values()
        return [state for state in classes if state.waiting and state.quota and state.tokens <= 0]

    # -- refusals --------------------------------------------------------------------------------

    def _count_refusal(self, request: Request) -> None:
        self._refused += 1
        request.class_state.refused += 1


def _left(lines: list[RequestLine]) -> Iterator[Request]:
    for request in heapq.merge(*[line.take() for line in lines], key=by_rank):
        if request.state is QUEUED:  # otherwise it was cancelled meanwhile
            request.state = GONE
            yield request
