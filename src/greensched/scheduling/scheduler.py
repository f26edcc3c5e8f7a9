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
   not overtake a first request of a higher class, even before the latter has aged.
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

`RequestQueue` knows which requests wait, `SMAllocator` which cells are free; `Dispatcher` grants.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain

from greensched.errors import (
    InvalidRequest,
    QueueFull,
    WouldBlock,
    WouldDeadlock,
)
from greensched.scheduling import shared_grants
from greensched.scheduling.allocator import Placement, SMAllocator
from greensched.scheduling.cells import DeviceCells, SizeRange
from greensched.scheduling.class_state import SMOOTHING, UNKNOWN_LEASE, ClassState
from greensched.scheduling.dispatch import Dispatcher
from greensched.scheduling.histogram import SHORTEST, Durations, durations
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
from greensched.scheduling.statistics import SchedulerStatistics, ServiceStatistics
from greensched.typing import ALL


class Scheduler:
    """Decides which request gets which cells.

    Args:
        devices: The cells of each device.
        policy: The policy.
        max_waiting: The most requests in the queue.
        is_made: Whether (device, cells) has an executor.
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
        is_made: Callable[[int, int], bool] = lambda device, mask: True,  # noqa: ARG005  all are
        *,
        services: Iterable[ServiceClass] = (),
        placement: Placement = "spread",
        on_reclaim: Callable[[], object] = lambda: None,
    ) -> None:
        guarded = GuardedPolicy(policy)
        self.allocator = SMAllocator(devices, is_made, services, placement)
        self.queue = RequestQueue(guarded, self.allocator.virtual_time, self.allocator.devices)
        self.dispatcher = Dispatcher(self.queue, self.allocator, guarded)
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
        self._requested = self._cancelled = self._expired = self._refused = 0
        #: The number of requests that got a suspended grant.
        self._resumed = 0
        #: The mean duration of leases that ended while requests waited.
        self._mean_duration = 0.0
        self._is_timed = False
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
            state.heal(now)
        due = deadline
        if due is None and state.latency is not None:
            due = now + state.latency
        request = Request(
            state, parts, self._everywhere if devices is None else devices,
            state.priority if priority is None else priority, now, self.arrivals,
            near=near, due=due, deadline=deadline, duration=duration, holder=holder, owner=owner,
        )  # fmt: skip
        if holder is not None and self.dispatcher.holds(holder):
            request.held_devices = self.dispatcher.held_devices(holder)
        if self._suspended and self._grant_beside_suspended(request, now):
            self._requested += 1
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
        self._requested += 1
        return request

    def home_masks(self, device: int, service: str | None = None) -> tuple[int, ...]:
        """Return the home cells of a class, or of every class, on a device; see `home_cells`.

        Raises:
            InvalidRequest: There is no such class.
        """
        homes = self.allocator.reservations[device].homes
        states = homes if service is None else (self._class_of(service),)
        found = [masks for state in states for masks in homes.get(state, {}).values()]
        return tuple(dict.fromkeys(mask for masks in found for mask in masks))

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
        claimed = Request(state, (size,), (device,), 0, now, self.arrivals)
        claimed.grants = allocator.allocate(claimed, device, (mask,), now)
        claimed.state = GRANTED
        self._requested += 1
        self.dispatcher.granted += 1
        return claimed

    def _class_of(self, service: str) -> ClassState:
        state = self.allocator.classes.get(service)
        if state is None or service in self.allocator.retired:
            raise InvalidRequest(f"service={service!r}: the pool has no such class any more")
        return state

    def _grant_beside_suspended(self, request: Request, now: float) -> bool:
        """Grant a request from cells that are free without reclaiming, if only these decide.

        This keeps leases of several sizes suspended side by side: `make bench` has a bar for two
        sizes in turn. If a class has limits, a policy sizes or a device is shared, a decision
        depends on more than free cells. With several devices it is granted on the one that it would
        get if all were reclaimed, or not here.
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
            line = self._line_of(request)
            if not line.devices:
                raise self.dispatcher.too_many(request)
        if not wait:
            self._count_refusal(request)
            raise self._would_block(request)
        if request.held_devices:
            self._refuse_deadlock(request, line.devices)
        state, waiting = request.class_state, self.queue.waiting
        if waiting >= self.max_waiting or state.waiting >= state.max_waiting:
            self._count_refusal(request)
            number = waiting if waiting >= self.max_waiting else state.waiting
            raise QueueFull(number, self._retry_after(request, line.asked, now))
        if request.due is not None and request.duration is not None:
            self.lateness.check_in_queue(request, line, now)
        self.queue.add(request, line)
        if request.missing_executors:
            self.dispatcher.note_missing(request)

    def resized(self, request: Request) -> list[Request]:
        """Return the other requests that are granted because of a request just taken.

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

        An elastic grant gives back what exceeds its least, requests are granted from that, and it
        takes idle cells, up to its most; a policy that sizes sets both limits. A shared grant gets
        its requested least instead if its device is to be split. Afterwards `grant.mask` and
        `grant.sms` say what it has.

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
        self.dispatcher.reuse_no_more(grant)
        allocator, before = self.allocator, grant.mask
        allocator.charge_piece(grant, now, duration, within)
        if grant.draining:
            return []
        if allocator.may_share:
            self._need(grant.device, shared_grants.enter_or_leave(allocator, grant))
        if grant.is_shared or not grant.request.is_elastic:
            is_changed = grant.mask != before or self.dispatcher.may_change()
            return self.dispatcher.dispatch(now) if is_changed else []
        self.dispatcher.set_target(grant.request, grant.device, now, grant)
        first, keeps = self.dispatcher.first_before(grant, now), None
        if first is not None and self._able(grant.request):  # otherwise it could never continue
            keeps = self.dispatcher.keeps_at_checkpoint(first, grant, now)
        if keeps == 0:
            return self._give_way(grant, now)
        granted: list[Request] = []
        if self._gives_back(grant):
            least = self._least_kept(grant) if keeps is None else keeps
            if grant.mask == before and least < grant.sms:
                self._resize(grant, least, least)
            if grant.mask != before:
                granted = self.dispatcher.dispatch(now)
        if self._takes_up(grant, now):
            held = grant.mask
            parts, target = grant.request.parts, grant.request.target
            self._resize(grant, parts[0].least, target[0].most, prefer=before)
            if held & ~grant.mask:  # it moved, in order to have more
                granted += self.dispatcher.dispatch(now)
        if self.dispatcher.may_change():
            granted += self.dispatcher.dispatch(now)
        return granted

    def _give_way(self, grant: Grant, now: float) -> list[Request]:
        """Free the cells of a grant and queue its request again, which counts as a new request.

        `grant` is then over. The request is QUEUED, or at once GRANTED again.
        """
        request, holder = grant.request, grant.holder
        self._queue_again(request, now)
        request.gave_way = not grant.will_end(now)
        self.release(grant)
        request.holder = holder
        return self.drained(now, grant)

    def ask_again(self, now: float, grant: Grant) -> list[Request]:
        """Queue the request of a grant that was given back for a while, as a new request.

        Returns the requests that are granted as a result, itself included if it fits. It is
        `rejected` if it can never be granted any more, because the classes have changed.
        """
        self.reclaim(now)
        request = grant.request
        self._queue_again(request, now)
        request.holder = grant.holder
        if not self._able(request):
            self.dispatcher.reject(request)
        return self.dispatcher.dispatch(now)

    def _queue_again(self, request: Request, now: float) -> None:
        request.arrived, request.order = now, self.arrivals
        request.holder, request.held_devices, request.gave_way = None, frozenset(), False
        latency = request.class_state.latency
        request.due, request.deadline = None if latency is None else now + latency, None
        self.queue.add(request, self._line_of(request))  # it keeps its grants if this raises
        request.state, request.grants = QUEUED, ()
        self._requested += 1

    def _line_of(self, request: Request) -> RequestLine:
        """Return the line to which a request belongs."""
        line = self.queue.lines.get(request.line_key)
        if line is not None:
            return line
        asked, least = self.dispatcher.asked(request), self.dispatcher.least(request)
        return RequestLine(request, self._able(request), asked, least)

    def _resize(self, grant: Grant, least: int, most: int, *, prefer: int = 0) -> None:
        mask, missing = self.allocator.choose_mask(grant, least, most, prefer=prefer)
        if mask != grant.mask:
            self.allocator.resize(grant, mask)
        self._need(grant.device, missing)

    def _gives_back(self, grant: Grant) -> bool:
        """Say whether an elastic grant gives back what exceeds its least."""
        is_above = self.queue.policy.size is not None and grant.sms > grant.request.target[0].most
        return bool(
            self.queue.waiting
            or is_above
            or any(owner.short for owner in grant.loans)
            or shared_grants.is_leaving(self.allocator, grant.device)
        )

    def _least_kept(self, grant: Grant) -> int:
        """Return the SMs that an elastic grant keeps: its policy's, unless others must have them.

        Those are the owners of borrowed cells, and shared grants that must leave.
        """
        is_due = any(owner.short or owner.waiting for owner in grant.loans)
        is_leaving = shared_grants.is_leaving(self.allocator, grant.device)
        must_give = is_due or is_leaving
        return (grant.request.parts if must_give else grant.request.target)[0].least

    def _takes_up(self, grant: Grant, now: float) -> bool:
        """Say whether an elastic grant may take idle cells."""
        if grant.sms >= grant.request.target[0].most or self.dispatcher.is_wanted(grant):
            return False
        is_leaving = shared_grants.is_leaving(self.allocator, grant.device)
        return not is_leaving and grant.class_state.is_within_quota(now)

    def _need(self, device: int, mask: int) -> None:
        """Note cells that need an executor, unless 0."""
        if mask and not self.allocator.is_made(device, mask):
            self.missing_executors[device, mask] = None

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
        if self._is_timed:
            seconds = now - grant.began
            if seconds < SHORTEST:  # so short that counting each at once is a tenth of it
                grant.short_uses += 1
                grant.short_s += seconds
            else:
                grant.class_state.use.add(seconds)
                grant.reused_s += seconds
        if self.allocator.is_classed:
            self.allocator.suspend(grant, now)
        return True

    def _may_reuse(self, grant: Grant) -> bool:
        """Whether a grant may be suspended, until its rules change or it reaches a checkpoint."""
        allocator, state = self.allocator, grant.class_state
        if grant.loans or allocator.may_share or state.quota is not None:
            return False
        if state.name in allocator.retired or grant.request.duration is not None:
            return False
        grant.request.holder = None  # so that a kept grant keeps no task alive
        self.dispatcher.reuse(grant)
        return True

    def resume(self, now: float, grant: Grant, holder: Hashable) -> None:
        """Grant a suspended grant to an equal request, and count it like any other."""
        del self._suspended[grant]
        self._resumed += 1
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
        """Record that so many requests of a class had this latency, from end to end.

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
        while len(expired) != most and (request := queue.expired(now)) is not None:
            self._expired += 1
            request.class_state.expired += 1
            may_grant |= self._leave(request)
            expired.append(request)
        return (self.dispatcher.dispatch(now) if may_grant else []), expired

    def next_deadline(self) -> float | None:
        """Return when `tick` has something to do. None: never, as far as is known."""
        found = self.queue.next_deadline(), self.queue.late_at()
        times = [at for at in found if at is not None]
        times += [state.refilled_at() for state in self._over_quota()]
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
            devices, old = self._able(request), request.line
            if devices:
                line = queue.lines.get(request.line_key)
                if line is None:
                    line = RequestLine(request, devices, old.asked, old.least)
                queue.put_in_line(request, line, rank)
            else:
                dispatcher.reject(request)
        return dispatcher.dispatch(now)

    def close(self) -> Iterator[Request]:
        """Empty the queue at once, however many requests wait.

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
                self._need(device, mask)
            if reservations.owners:
                self._need(device, cells.complement(reservations.all_blocks))

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
        return self._requested + self._resumed

    def queued(self) -> list[Request]:
        """Return all queued requests in the order of arrival."""
        return self.queue.queued()

    def statistics(self) -> SchedulerStatistics:
        """Return the counts and the present state."""
        allocator, leased, draining, free = self.allocator, 0, 0, 0
        for device, cells in enumerate(allocator.devices):
            held = all_held = 0
            for grant in allocator.grants[device]:
                all_held |= grant.mask
                held |= 0 if grant.draining else grant.mask
            leased += cells.sm_count(held & cells.full_mask)
            draining += cells.sm_count(all_held & ~held & cells.full_mask)
            free += cells.largest_within(cells.full_mask & ~all_held)
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
        if self._is_timed:
            return
        self.reclaim(now)
        self._is_timed = self.allocator.is_timed = True
        for state in self.allocator.classes.values():
            state.untimed = self._granted_of(state)

    def _granted_of(self, state: ClassState) -> int:
        return state.granted if self.allocator.is_classed else self.granted

    @property
    def granted(self) -> int:
        """The number of granted requests."""
        return self._resumed + self.dispatcher.granted

    def services(self, now: float) -> dict[str, ServiceStatistics]:
        """Return statistics by class name; "" is for requests without a class.

        Empty if there are no classes, unless leases are timed.
        """
        allocator = self.allocator
        if not (allocator.is_classed or self._is_timed):
            return {}
        running: dict[ClassState, float] = {}
        for grant in chain.from_iterable(allocator.grants):
            state, is_suspended = grant.class_state, grant in self._suspended
            if grant.short_uses:
                allocator.count_short_uses(grant)
            used = allocator.unsettled_sm_time(grant, now, is_suspended=is_suspended)
            running[state] = running.get(state, 0.0) + used
        return {
            name: self._statistics_of(state, running.get(state, 0.0))
            for name, state in allocator.classes.items()
        }

    def _statistics_of(self, state: ClassState, running: float) -> ServiceStatistics:
        cells, granted = self.allocator.devices[state.home].size, self._granted_of(state)
        wait: Durations | None = None
        use: Durations | None = None
        drain: Durations | None = None
        if self._is_timed:
            use = durations(state.use)
            wait = durations(state.wait, granted - state.untimed - sum(state.wait.counts))
            drain = durations(state.drain, use.count - sum(state.drain.counts))
        return ServiceStatistics(
            sms=state.sms,
            sms_lent=state.lent * cells,
            waiting=state.waiting,
            granted=granted,
            sm_seconds=state.sm_time + running,
            is_shared=state.shared and not self.allocator.split_controller.is_split,
            reserve=state.reserve_cells * cells,
            weight=state.weight,
            cancelled=state.cancelled,
            expired=state.expired,
            refused=state.refused,
            wait=wait,
            use=use,
            drain=drain,
        )

    def _over_quota(self) -> list[ClassState]:
        """Return the classes whose requests wait for their quota."""
        if not self.allocator.is_limited or not self.queue.waiting:
            return []
        classes = self.allocator.classes.values()
        return [state for state in classes if state.waiting and state.quota and state.tokens <= 0]

    # -- refusals --------------------------------------------------------------------------------

    def _able(self, request: Request) -> tuple[int, ...]:
        """Return the devices on which a request fits once all leases have ended."""
        return tuple(d for d in request.devices if self.allocator.can_ever_fit(request, d))

    def _count_refusal(self, request: Request) -> None:
        self._refused += 1
        request.class_state.refused += 1

    def _would_block(self, request: Request) -> WouldBlock:
        if request.missing_executors:
            return WouldBlock(
                "the SMs are free, but there is no executor for them yet: use "
                "`async with pool.partition(...)`, which waits for one"
            )
        allocator = self.allocator
        free = max(
            allocator.devices[d].largest_within(allocator.free_masks[d]) for d in request.devices
        )
        return WouldBlock(
            f"{self.dispatcher.asked(request)} SMs cannot be granted now ({free} are free; other "
            "requests may go first): use `async with pool.partition(...)`, which waits"
        )

    def _refuse_deadlock(self, request: Request, able: Sequence[int]) -> None:
        """Refuse a request that cannot be granted while its own holder keeps its grants."""
        allocator, held = self.allocator, self.dispatcher.held_by(request)
        if not held or any(shared_grants.can_share(allocator, request, d) for d in able):
            return
        if any(allocator.can_ever_fit(request, d, held.get(d, 0)) for d in able):
            return
        most = holds = 0
        together: tuple[int, ...] = ()
        for device in able:
            cells, mask = allocator.devices[device], held.get(device, 0)
            most = max(most, cells.largest_within(allocator.reachable(request, device, mask)))
            sizes = [SizeRange(n, n) for n in self.dispatcher.held_sizes(request, device)]
            if not any(part.named is ALL for part in request.parts):
                reachable = allocator.reachable(request, device)
                found = cells.nearest(reachable, (*sizes, *request.parts))
                together = max(together, found, key=sum)
        holds = sum(allocator.devices[d].sm_count(mask) for d, mask in held.items())
        raise WouldDeadlock(holds, self.dispatcher.asked(request), most, together=together)

    def _retry_after(self, request: Request, asked: int, now: float) -> float:
        """Predict the seconds until the queue accepts a request again.

        That is when the first of the present leases ends, but not before a further lease could end.
        A further lease is assumed to take its expected duration, or else the mean of its class or
        of all leases, or else the shortest time that a present lease has taken so far.
        """
        grants = [grant for of_device in self.allocator.grants for grant in of_device]
        lease = (
            request.seconds(asked)
            or request.class_state.mean_duration
            or self._mean_duration
            or min((now - grant.began for grant in grants), default=0.0)
        )
        lease = max(lease, UNKNOWN_LEASE)
        ends = [lease if one.ends is None else one.ends - now for one in grants]
        return max(lease, min(ends, default=0.0))


def _left(lines: list[RequestLine]) -> Iterator[Request]:
    for request in heapq.merge(*[line.take() for line in lines], key=by_rank):
        if request.state is QUEUED:  # otherwise it was cancelled meanwhile
            request.state = GONE
            yield request
