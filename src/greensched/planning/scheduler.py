"""Queue and leases of a pool: `request`, `cancel`, `release`, `drained`, `checkpoint`, `tick`.

Synchronous and deterministic: every call takes `now` and returns who is granted by it. Rules:

1. A cell is *free*, *leased* or *draining*, and in one state only; cells leased to two requests
   at once do not exist (checked at every grant).
2. A request is QUEUED, then GRANTED, or GONE (cancelled, expired). Only a QUEUED one is granted.
   Whoever stops wanting a GRANTED one gives its leases back: `release`, then `drained`.
3. Cells come free by `drained`, and by the `checkpoint` of an elastic lease, alone.
4. Requests of one class that want the same (sizes, devices, magnitude of a known cost) stand in
   one line, and only the first of a line is ever tried: where it does not fit, nobody behind it
   does. So a decision costs as much as there are different wishes, however many wait.
5. The first request of all that does not fit lets others pass as long as the policy says; then
   one device is kept for it: it goes before everybody, and nobody else is granted there, whatever
   his rank, until it is granted or gone. But an owner has what is free of his floor; and whoever
   is known to end before it could begin is in nobody's way.
6. Those that wait hold nothing but that, and that nothing is lent of a floor whose owner waits:
   only when the one with a device leaves, or the last of a class with a floor, can somebody be
   granted because of it.
7. Cells over which no partition is made yet (`is_made`) are not granted. A request that lacks one
   waits, holding nothing, and that is noted in `lacking`. It is granted once it is made (`made`),
   or when others come free. No device is kept for it meanwhile: making one may take for ever.
8. A class has its floor, its cap and its quota (`services`) under every policy. What is lent of a
   floor comes back within its owner's blocking budget (`lending`).

Requests that left stay in their line until they come to its head, or outnumber those that wait:
so a mass cancellation is linear, and nothing grows with the number of past requests.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Sequence

from greensched.errors import (
    DeadlineImpossible,
    InvalidRequest,
    QueueFull,
    TooManySMs,
    WouldBlock,
    WouldDeadlock,
)
from greensched.planning.admission import predicted, soonest
from greensched.planning.cells import Cells, Demand
from greensched.planning.ground import Ground
from greensched.planning.placement import Placement
from greensched.planning.policy import Policy
from greensched.planning.queue import STALE_LEAST, Queue, validate_bound
from greensched.planning.requests import (
    Cost,
    Lease,
    Line,
    Request,
    SchedulerStatistics,
    ServiceStatistics,
    State,
)
from greensched.planning.services import Flow, ServiceClass

__all__ = ["STALE_LEAST", "Lease", "Request", "Scheduler", "State", "validate_bound"]


class Scheduler(Queue):
    """Decides who gets which cells.

    Args:
        devices: the cells of each device.
        policy: who is next.
        max_waiting: the queue's bound.
        is_made: whether there is a partition over (device, cells).
        services: the classes of users.
        placement: on which device first.

    Raises:
        InvalidRequest: the floors of the classes do not fit on the devices.
    """

    def __init__(
        self,
        devices: Sequence[Cells],
        policy: Policy,
        max_waiting: int,
        is_made: Callable[[int, int], bool] = lambda device, mask: True,  # noqa: ARG005  any are
        *,
        services: Iterable[ServiceClass] = (),
        placement: Placement = "spread",
    ) -> None:
        self.ground = ground = Ground(devices, is_made, services, placement)
        self.devices, self.free, self.warm = ground.devices, ground.free, ground.warm
        super().__init__(policy, ground.clock.start_of, ground.total)
        self.max_waiting = max_waiting
        #: (device, cells) to be made, since the pool last took them.
        self.lacking: dict[tuple[int, int], None] = {}
        self._everywhere = tuple(range(len(self.devices)))
        self._held: dict[Hashable, list[Lease]] = {}
        self._requested = self._granted = self._expired = self._refused = 0

    # -- what happens ----------------------------------------------------------------------------

    def request(
        self,
        now: float,
        parts: tuple[Demand, ...],
        *,
        service: str = "",
        devices: tuple[int, ...] | None = None,
        near: int | None = None,
        priority: float | None = None,
        deadline: float | None = None,
        cost: Cost | None = None,
        holder: Hashable = None,
        owner: object = None,
        wait: bool = True,
    ) -> Request:
        """Takes a request: granted at once where it fits and nobody is before it, else queued.

        Args:
            now: seconds.
            parts: sizes, all granted together on one device.
            service: the class it is of; "": none.
            devices: where it may be granted; None: anywhere.
            near: the device to be preferred.
            priority: larger goes first; None: its class's.
            deadline: the time after which it is not wanted any more.
            cost: what it is expected to take, from its grant to its end.
            holder: who asks, to find out who waits for what he holds himself.
            owner: whatever the caller wants to find on the request.
            wait: False: granted now or not at all.

        Raises:
            InvalidRequest: no such class.
            TooManySMs: it can never fit.
            DeadlineImpossible: it is known that it cannot be done in time.
            WouldBlock: `wait` is false and it does not fit now.
            WouldDeadlock: it would have to wait, and can never fit while `holder` holds what he
                has.
            QueueFull: it would have to wait, and too many do.
        """
        where = self._everywhere if devices is None else devices
        flow = self.ground.flows.get(service)
        if flow is None or service in self.ground.retired:  # it was there when this was made
            raise InvalidRequest(f"no service {service!r} any more: the pool was reconfigured")
        if priority is None:
            priority = flow.priority
        request = Request(parts, where, priority, now, self._requested, deadline, holder, owner)
        request.flow = flow
        if near is not None:
            request.near = near
        if cost is not None:
            request.cost = cost
        due = deadline
        if due is None and flow.latency is not None:
            due = now + flow.latency
        if due is not None:
            self._set_due(request, due)
        line = None
        if self.waiting:
            line = self._lines.get((flow, parts, where) if cost is None else request.wish)
            fits = self._overtake(request, line, now)
        else:
            fits = self._grant(request, where, now)
        if fits:
            self._requested += 1
            return request
        if line is None:
            line = Line(request, self._able(request), self._asked(request))
        if not wait:
            self._refused += 1
            raise self._would_block(request)
        if holder in self._held:
            self._refuse_deadlock(request, line.able)
        if self.waiting >= self.max_waiting or flow.waiting >= flow.max_waiting:
            self._refused += 1
            waiting = self.waiting if self.waiting >= self.max_waiting else flow.waiting
            raise QueueFull(waiting, self.retry_after(flow))
        if due is not None and cost is not None:
            self._admit(request, line, now)
        self._requested += 1
        if request.lacks:
            self.lacking.update(dict.fromkeys(request.lacks))
        self._queue(request, line)
        return request

    def cancel(self, now: float, request: Request) -> list[Request]:
        """A queued request is not wanted any more. Returns who is granted because it left."""
        if request.state is not State.QUEUED:
            return []
        self._cancelled += 1
        return self._dispatch(now) if self._leave(request) else []

    def release(self, lease: Lease) -> None:
        """The work of a lease may still run; its cells stay until it is `drained`."""
        if not lease.draining:
            lease.draining = True
            self.ground.sms_leased -= lease.sms
            self.ground.sms_draining += lease.sms
            if lease.holder is not None:
                self._forget(lease)

    def pass_on(self, lease: Lease, holder: Hashable) -> None:
        """Another holds a lease from now on; None: nobody in particular."""
        if lease.holder is not None:
            self._forget(lease)
        lease.holder = lease.request.holder = holder
        if holder is not None:
            self._held.setdefault(holder, []).append(lease)

    def drained(self, now: float, lease: Lease) -> list[Request]:
        """All work of a lease is done: its cells are free. Returns who is granted by that."""
        if lease.over:
            raise AssertionError(f"cells given back twice: {lease}")
        if not lease.draining:
            self.release(lease)
        lease.over = True
        self.ground.take_back(lease, now)
        return self._dispatch(now) if self.waiting else []

    def checkpoint(self, now: float, lease: Lease) -> list[Request]:
        """The holder of a lease has no work on it now, and lets its cells be changed.

        An elastic one gives back what it has above its least, whoever can be granted because of
        that is, and then it takes up what is idle, to its most. `lease.mask` and `lease.sms` say
        what it has from now on. Returns who is granted by it.
        """
        ground, flow, before = self.ground, lease.flow, lease.mask
        flow.saw_segment(now - lease.since)
        ground.clock.pay(flow, lease, now)
        if lease.draining or not lease.request.is_elastic:
            return []
        granted: list[Request] = []
        if self.waiting:
            ground.shrink(lease)
            granted = self._dispatch(now) if lease.mask != before else []
        is_kept = self._reserved is not None and self._reserved[1] == lease.device
        if not is_kept and flow.is_within_quota(now):
            held = lease.mask
            missing = ground.grow(lease, before)
            if missing and not ground.is_made(lease.device, missing):
                self.lacking[lease.device, missing] = None
            if held & ~lease.mask and self.waiting:  # it went elsewhere, to have more
                granted += self._dispatch(now)
        return granted

    def made(self, now: float) -> list[Request]:
        """There are more partitions. Returns who is granted because of that."""
        return self._dispatch(now) if self.waiting else []

    def tick(self, now: float) -> tuple[list[Request], list[Request]]:
        """Lets time pass: (who is granted, whose deadline passed while queued)."""
        expired, unblocked = [], self._is_refilled(now)
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if request.state is State.QUEUED:
                self._expired += 1
                unblocked |= self._leave(request)
                expired.append(request)
        return (self._dispatch(now) if unblocked else []), expired

    def reconfigure(
        self, now: float, services: Iterable[ServiceClass] | None, policy: Policy | None
    ) -> list[Request]:
        """Other classes, or another policy; None: the same. Returns who is granted by that.

        Whoever waits keeps his place, by the new policy's rank; leases end as they began. Who is
        of a class that is not there any more is served as one without a floor or a cap.

        Raises:
            InvalidRequest: the floors do not fit on the devices; nothing has changed.
        """
        waiting = sorted(
            (r for line in self._lines.values() for r in line.waiting()), key=lambda r: r.order
        )
        lines = {request: self._line_of(request) for request in waiting}
        if services is not None:
            self.ground.set_rules(services)
        if policy is not None:
            self._set_policy(policy)
        self._lines.clear()
        self._entries = 0
        for request in waiting:
            request.rank = self.policy.rank(request)
            old = lines[request]
            self._stand_in_line(request, Line(request, old.able, old.asked))
        return self._dispatch(now)

    # -- questions -------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether every cell is free."""
        return not self.ground.sms_leased and not self.ground.sms_draining

    def statistics(self) -> SchedulerStatistics:
        """What is the case now."""
        free = sum(c.sms(f) for c, f in zip(self.devices, self.free, strict=True))
        return SchedulerStatistics(
            waiting=self.waiting,
            requested=self._requested,
            granted=self._granted,
            cancelled=self._cancelled,
            expired=self._expired,
            refused=self._refused,
            sms_free=free,
            sms_leased=self.ground.sms_leased,
            sms_draining=self.ground.sms_draining,
        )

    def services(self) -> dict[str, ServiceStatistics]:
        """What each class has now; "": those who named none. Without classes, nothing."""
        size = [cells.size for cells in self.devices]
        return {
            name: ServiceStatistics(
                sms=flow.sms,
                sms_lent=flow.lent * size[flow.home],
                waiting=flow.waiting,
                granted=flow.granted,
                sm_seconds=flow.sm_time,
            )
            for name, flow in self.ground.flows.items()
            if self.ground.is_classed
        }

    # -- granting --------------------------------------------------------------------------------

    def _try(self, request: Request, now: float) -> bool:
        """Grants it where it may be granted now."""
        kept = self._reserved
        if kept is None or kept[0] is request:
            return self._grant(request, request.devices, now)
        where = [device for device in request.devices if device != kept[1]]
        if where and self._grant(request, where, now):
            return True
        return kept[1] in request.devices and self._slip_in(request, kept, now)

    def _slip_in(self, request: Request, kept: tuple[Request, int], now: float) -> bool:
        """On the device kept for another: of his own floor, or before the other could begin."""
        ground, (first, device) = self.ground, kept
        own = ground.floors[device].kept(request.flow)
        if own and self._grant(request, (device,), now, own):
            return True
        seconds = request.seconds(self._asked(request))
        if seconds is None:
            return False
        ends = now + seconds * request.flow.slip
        if ends > ground.free_at(device, first, now):
            return False
        return self._grant(request, (device,), now)

    def _grant(
        self, request: Request, where: Sequence[int], now: float, limit: int | None = None
    ) -> bool:
        """Grants it on the first device of `where` on which it fits."""
        request.lacks = ()
        ground, parts = self.ground, request.parts
        is_ruled = ground.is_ruled
        if is_ruled and not request.flow.is_within_quota(now):
            return False
        for device in where if len(where) == 1 else ground.order(request, where):
            if is_ruled:
                masks = ground.fit(request, device, limit)
            else:
                masks = self.devices[device].fit_all(self.free[device], parts, self.warm[device])
            if not masks:
                continue
            for mask in masks:
                if not ground.is_made(device, mask):
                    break
            else:
                request.leases = leases = ground.give(request, device, masks, now)
                if request.holder is not None:
                    self._held.setdefault(request.holder, []).extend(leases)
                request.lacks = ()
                request.state = State.GRANTED
                self._granted += 1
                return True
            if not request.lacks:
                lacks = [(device, mask) for mask in masks if not ground.is_made(device, mask)]
                request.lacks = tuple(lacks)
        return False

    def _dispatch(self, now: float) -> list[Request]:
        """Grants whatever can be granted now, in the order of the policy."""
        granted: list[Request] = []
        self._is_unlocked = True
        while self._is_unlocked:  # an owner who waits no more lends again
            self._is_unlocked = False
            self._dispatch_once(now, granted)
        if granted and self._is_untidy():
            self._tidy()
        return granted

    def _dispatch_once(self, now: float, granted: list[Request]) -> None:
        kept = self._reserved
        if kept is not None and self._grant(kept[0], kept[0].devices, now):
            granted.append(kept[0])
            self._advance(kept[0], now)
        if len(self._lines) == 1:
            self._serve_only(next(iter(self._lines.values())), now, granted)
            return
        heads = self._heads()
        heapq.heapify(heads)
        is_first = True
        while heads and any(self.free):
            standing, _, _, line = heads[0]
            request = line.first()
            assert request is not None
            if self._stands is not None and standing != self._standing(line.flow):
                heapq.heapreplace(heads, self._head(line, request))  # it was granted something
            elif not self._attempt(line, request, now):
                heapq.heappop(heads)
                is_first = self._blocked(line, request, now, is_first=is_first)
            else:
                granted.append(request)
                self._advance(request, now)
                following = line.first()
                if following is not None:
                    heapq.heapreplace(heads, self._head(line, following))
                else:
                    heapq.heappop(heads)

    def _serve_only(self, line: Line, now: float, granted: list[Request]) -> None:
        """The same where all want the same: the usual case, and a third of the work."""
        while (request := line.first()) is not None and any(self.free):
            if not self._attempt(line, request, now):
                self._blocked(line, request, now, is_first=True)
                return
            granted.append(request)
            self._advance(request, now)
        if request is None:
            self._lines.clear()

    def _attempt(self, line: Line, request: Request, now: float) -> bool:
        """Grants the first of a line where it may be granted now; what it lacks is of now, too."""
        request.lacks = ()
        return not self._is_hopeless(line) and self._try(request, now)

    def _is_hopeless(self, line: Line) -> bool:
        """Whether no equal cell is free, and what is left over is less than they want.

        Where classes have limits a closer look is dear, so all that is free is counted first.
        """
        for device, free in enumerate(self.free):
            if free:
                cells = self.devices[device]
                if self.ground.is_ruled and cells.sms(free) < line.least:
                    continue
                if free & cells.equal or line.asked <= cells.remainder:
                    return False
        return True

    def _blocked(self, line: Line, request: Request, now: float, *, is_first: bool) -> bool:
        """Who is first does not fit. Returns whether the next of another line is the first."""
        if request.lacks:
            self.lacking.update(dict.fromkeys(request.lacks))
        if not is_first or self._is_limited(line):
            return is_first
        if self._reserved is None:
            self._reserve(request, now)
        return False

    def _is_limited(self, line: Line) -> bool:
        """Whether it is its class's limits that keep the first of a line from being granted."""
        if not self.ground.is_ruled:
            return False
        flow = line.flow
        return flow.tokens <= 0 or flow.sms + line.asked > flow.cap

    def _reserve(self, first: Request, now: float) -> None:
        """Once the first request that does not fit has aged, a device is kept for it."""
        if self._reserved is None and not first.lacks and not self.policy.may_pass(first, now):
            if len(first.devices) == 1:
                self._reserved = (first, first.devices[0])
                return
            # Not where it waits for itself: those cells come last of all, if ever.
            held = self._held_by(first.holder)
            able = [d for d in first.devices if self.ground.ever(first, d, held.get(d, 0))]
            best = max(able or first.devices, key=lambda d: self.devices[d].sms(self.free[d]))
            self._reserved = (first, best)

    def _overtake(self, request: Request, line: Line | None, now: float) -> bool:
        """Grants a new request past those that wait, where it may.

        None of them fits now: whatever gave back cells dispatched. Nor does what stands in line
        behind one of them.
        """
        before = line.first() if line is not None else None
        if self._reserved is None:
            is_only = before is not None and len(self._lines) == 1 and not self.ground.is_ruled
            first = before if is_only else self._first()
            if first is not None:
                self._reserve(first, now)
        if before is None:
            return self._try(request, now)
        request.lacks = before.lacks
        return False

    def _first(self) -> Request | None:
        """The first of the queue that waits for cells, and not for its class's limits."""
        heads = [head for head in self._heads() if not self._is_limited(head[3])]
        return min(heads)[3].first() if heads else None

    # -- time ------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        times = [self._deadlines[0][0]] if self._deadlines.first() else []
        times += [flow.refilled_at() for flow in self._over_quota()]
        return min(times, default=None)

    def _over_quota(self) -> list[Flow]:
        """Classes that wait for nothing but their quota."""
        if not self.ground.is_ruled or not self.waiting:
            return []
        return [f for f in self.ground.flows.values() if f.waiting and f.quota and f.tokens <= 0]

    def _is_refilled(self, now: float) -> bool:
        return any(flow.is_within_quota(now) for flow in self._over_quota())

    # -- deadlines -------------------------------------------------------------------------------

    def _set_due(self, request: Request, due: float) -> None:
        """When it should be done; refuses what cannot be, not even with the most it asks for."""
        request.due = due
        seconds = soonest(request, self.ground)
        if seconds is not None and request.arrived + seconds > due:
            self._be_late(request, seconds)

    def _admit(self, request: Request, line: Line, now: float) -> None:
        """Refuses what must wait too long to be done in time, or would make others late."""
        seconds = request.seconds(line.asked)
        if request.due is None or seconds is None:
            return
        work = line.asked * seconds
        done, is_fair = predicted(request, seconds, work, self.ground, self._agenda, now)
        if now + done > request.due or not is_fair:
            self._be_late(request, done)

    def _be_late(self, request: Request, done: float) -> None:
        """As its class says: refused, or behind everybody."""
        assert request.due is not None
        if request.flow.rules.if_late == "refuse":
            self._refused += 1
            raise DeadlineImpossible(done, request.due - request.arrived)
        request.deadline = request.due = None
        request.priority = -math.inf

    # -- refusals --------------------------------------------------------------------------------

    def _able(self, request: Request) -> tuple[int, ...]:
        """The devices on which it fits when everybody has left; refuses what fits on none."""
        able = tuple(d for d in request.devices if self.ground.ever(request, d, 0))
        if not able:
            raise TooManySMs(self._asked(request), self.ground.most(request, request.devices))
        return able

    def _would_block(self, request: Request) -> WouldBlock:
        if request.lacks:
            return WouldBlock(
                "the SMs are free, but no lane over just these is made yet: "
                "use `async with pool.partition(...)`, which waits for it"
            )
        free = max(self.devices[d].sms(self.free[d]) for d in request.devices)
        return WouldBlock(
            f"the SMs it asks for are not free now ({free} are, or somebody is before it): "
            "use `async with pool.partition(...)`, which waits"
        )

    def _refuse_deadlock(self, request: Request, able: Sequence[int]) -> None:
        """Refuses what cannot be granted while its holder holds what he has."""
        held = self._held_by(request.holder)
        if held and not any(self.ground.ever(request, d, held.get(d, 0)) for d in able):
            most = max(self.devices[d].sms(self.devices[d].every & ~held.get(d, 0)) for d in able)
            holds = sum(self.devices[d].sms(mask) for d, mask in held.items())
            raise WouldDeadlock(holds, self._asked(request), most)

    def _asked(self, request: Request) -> int:
        """SMs asked for; by several parts in whole cells, which is what they cost."""
        if len(request.parts) == 1:
            least = request.parts[0].least
            return least or max(self.devices[device].total for device in request.devices)
        largest = max((self.devices[d] for d in request.devices), key=lambda cells: cells.total)
        return sum(max(1, -(-part.least // largest.size)) for part in request.parts) * largest.size

    def _held_by(self, holder: Hashable) -> dict[int, int]:
        """What a holder has, by device; what drains comes back by itself and does not count."""
        held: dict[int, int] = {}
        for lease in self._held.get(holder, ()):
            held[lease.device] = held.get(lease.device, 0) | lease.mask
        return held

    def _forget(self, lease: Lease) -> None:
        mine = self._held[lease.holder]
        mine.remove(lease)
        if not mine:
            del self._held[lease.holder]
