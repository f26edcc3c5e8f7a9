"""Queue and leases of a pool: `request`, `cancel`, `release`, `drained`, `checkpoint`, `tick`.

Synchronous and deterministic: every call takes `now` and returns who is granted by it. Rules:

1. A cell is *free*, *leased* or *draining*, and in one state only; cells leased to two requests
   at once do not exist (checked at every grant).
2. A request is QUEUED, then GRANTED, or GONE (cancelled, expired). Only a QUEUED one is granted.
   Whoever stops wanting a GRANTED one gives its leases back: `release`, then `drained`.
3. Cells come free by `drained`, and by the `checkpoint` of an elastic lease, alone. A lease that is
   over may instead go as it is to who would be granted by that (`next_for`, `hand_over`).
4. Requests of one class that want the same (sizes, devices, magnitude of a known duration) stand in
   one line, and only the first of a line is ever tried: where it does not fit, nobody behind it
   does. So a decision costs as much as there are different wishes, however many wait.
5. The first request of all that does not fit lets others pass as long as the policy says; then
   one device is kept for it: it goes before everybody, and nobody else is granted there, whatever
   his rank, until it is granted or gone. But an owner has what is free of his floor; and whoever
   is known to end before it could begin is in nobody's way.
   None is kept for who could not be granted even then, since what his class is promised, or how
   long it takes, has changed: once he has aged, or nobody has anything, he is `hopeless`.
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

import math
from collections.abc import Callable, Hashable, Iterable, Sequence

from greensched.errors import (
    DeadlineImpossible,
    InvalidRequest,
    QueueFull,
    WouldBlock,
    WouldDeadlock,
)
from greensched.scheduling import shared_grants
from greensched.scheduling.admission import predicted, soonest
from greensched.scheduling.cells import DeviceCells, SizeRange
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.dispatch import Dispatcher
from greensched.scheduling.placement import Placement
from greensched.scheduling.policies import Order, guard
from greensched.scheduling.queue import STALE_LEAST, validate_bound
from greensched.scheduling.requests import (
    GRANTED,
    QUEUED,
    Duration,
    Grant,
    GrantState,
    Request,
    RequestLine,
)
from greensched.scheduling.services import ServiceClass
from greensched.scheduling.statistics import SchedulerStatistics, ServiceStatistics

__all__ = ["STALE_LEAST", "Grant", "GrantState", "Request", "Scheduler", "validate_bound"]


class Scheduler(Dispatcher):
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
        devices: Sequence[DeviceCells],
        policy: Order,
        max_waiting: int,
        is_made: Callable[[int, int], bool] = lambda device, mask: True,  # noqa: ARG005  any are
        *,
        services: Iterable[ServiceClass] = (),
        placement: Placement = "spread",
    ) -> None:
        super().__init__(devices, policy, is_made, services, placement)
        self.max_waiting = max_waiting
        self._everywhere = tuple(range(len(self.devices)))
        self._requested = self._expired = self._refused = 0
        self._lack_floors()

    # -- what happens ----------------------------------------------------------------------------

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
        """Takes a request: granted at once where it fits and nobody is before it, else queued.

        Args:
            now: seconds.
            parts: sizes, all granted together on one device.
            service: the class it is of; "": none.
            devices: where it may be granted; None: anywhere.
            near: the device to be preferred.
            priority: larger goes first; None: its class's.
            deadline: the time after which it is not wanted any more.
            duration: what it is expected to take, from its grant to its end.
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

        Under a policy that sizes `resized` comes next: others may now be to have less.
        """
        where = self._everywhere if devices is None else devices
        flow = self.ground.flows.get(service)
        if flow is None or service in self.ground.retired:  # it was there when this was made
            raise InvalidRequest(f"no service {service!r} any more: the pool was reconfigured")
        if priority is None:
            priority = flow.priority
        due = deadline
        if due is None and flow.latency is not None:
            due = now + flow.latency
        request = Request(
            flow, parts, where, priority, now, self._requested,
            near=near, due=due, deadline=deadline, duration=duration, holder=holder, owner=owner,
        )  # fmt: skip
        if due is not None and duration is not None:
            self._refuse_late(request, due)
        line = None
        if self.waiting:
            line = self._lines.get((flow, parts, where) if duration is None else request.wish)
            fits = self._overtake(request, line, now)
        else:
            fits = self._grant(request, where, now)
        if fits:
            self._requested += 1
            return request
        if line is None:
            line = RequestLine(
                request, self._able(request), self._asked(request), self._least(request)
            )
        if not wait:
            self._refused += 1
            raise self._would_block(request)
        if holder in self._held:
            self._refuse_deadlock(request, line.able)
        if self.waiting >= self.max_waiting or flow.waiting >= flow.max_waiting:
            self._refused += 1
            waiting = self.waiting if self.waiting >= self.max_waiting else flow.waiting
            raise QueueFull(waiting, self.retry_after(flow))
        if due is not None and duration is not None:
            self._admit(request, line, now)
        self._requested += 1
        if request.lacks:
            self.lacking.update(dict.fromkeys(request.lacks))
        self._queue(request, line)
        return request

    def resized(self, request: Request) -> list[Request]:
        """Who is granted because of one that was just taken: a policy sizes by who is there."""
        return self._dispatch(request.arrived) if self._size and self.waiting else []

    def cancel(self, now: float, request: Request) -> list[Request]:
        """A queued request is not wanted any more. Returns who is granted because it left."""
        if request.state is not QUEUED:
            return []
        self._cancelled += 1
        return self._dispatch(now) if self._leave(request) else []

    def release(self, lease: Grant) -> None:
        """The work of a lease may still run; its cells stay until it is `drained`."""
        if not lease.draining:
            lease.draining = True
            if lease.holder is not None:
                self._forget(lease)

    def pause(self, now: float, lease: Grant) -> bool:
        """A class's lease of one size and no known duration is over; its cells wait for the next.

        Nobody waits. False: it is to be `drained`, because a decision looks at more than whether
        cells are free: at a loan, a quota, or whether the device is split.
        """
        ground = self.ground
        if lease.loans or ground.is_shared or lease.flow.quota is not None:
            return False
        ground.pause(lease, now)
        return True

    def resume(self, now: float, lease: Grant) -> None:
        """The next like it has what is paused; `pass_on` and `count_again` tell of him later."""
        self.ground.resume(lease, now)

    def count_again(self, number: int) -> None:
        """So many leases went to who asked for the same, without a decision."""
        self._requested += number
        self._granted += number

    def pass_on(self, lease: Grant, holder: Hashable) -> None:
        """Another holds a lease from now on; None: nobody in particular."""
        if lease.holder is not None:
            self._forget(lease)
        lease.holder = lease.request.holder = holder
        if holder is not None:
            self._held.setdefault(holder, []).append(lease)

    def next_for(self, lease: Grant) -> Request | None:
        """Who is next, if he may as well have a lease as it is, which is over.

        None: that has to be decided.

        Where all want the same, and none of them fits now, a decision would come to the same: it
        is his turn, and he fits where that lease was, and nowhere else.
        """
        if len(self._lines) != 1 or self.ground.is_classed:
            return None
        first = self._only_line().first()
        last = lease.request
        if first is None or first.lacks or first.parts != last.parts or len(first.parts) > 1:
            return None
        part = first.parts[0]
        if part.named is not None or part.least != part.most or lease.device not in first.devices:
            return None
        is_known = first.duration is not None or last.duration is not None
        is_kept_out = self._reserved is not None and self._reserved[0] is not first
        return None if is_known or is_kept_out else first

    def hand_over(self, now: float, lease: Grant, request: Request) -> None:
        """Who is `next_for` a lease has it from now on, as if it had been drained: he alone."""
        lease.request.leases = ()
        lease.request = request
        lease.begin(now)
        self.pass_on(lease, request.holder)
        request.leases = (lease,)
        request.state = GRANTED
        self._granted += 1
        self._advance(request, now)
        following = request.line.first()
        if following is not None and (self._most_free() or self.ground.is_shared):
            self._blocked(following, now, is_first=True)  # what is free is no more than it was
        if self._is_untidy():
            self._tidy()

    def drained(self, now: float, lease: Grant) -> list[Request]:
        """All work of a lease is done: its cells are free. Returns who is granted by that."""
        if lease.over:
            raise AssertionError(f"cells given back twice: {lease}")
        if not lease.draining:
            self.release(lease)
        lease.over = True
        self.ground.take_back(lease, now)
        return self._dispatch(now) if self.waiting else []

    def checkpoint(
        self,
        now: float,
        lease: Grant,
        duration: Duration | None = None,
        within: float | None = None,
    ) -> list[Request]:
        """The holder of a lease has no work on it now, and lets its cells be changed.

        An elastic one gives back what it has above its least, whoever can be granted because of
        that is, and then it takes up what is idle, to its most; least and most are the policy's, if
        it says them. One with a seat has the least it asked for instead, if its device is to be
        split. `lease.mask` and `lease.sms` say what it has from now on; `duration` is what it
        takes to
        its next checkpoint, which should come `within` so many seconds; None: its class's latency.
        Returns who is granted by it.
        """
        ground, flow, before = self.ground, lease.flow, lease.mask
        flow.saw_segment(now - lease.since)
        if duration is not None:
            ground.saw_piece(lease, duration, now)
        lease.request.within = within
        ground.clock.pay(flow, lease, now)
        if lease.draining:
            return []
        granted: list[Request] = []
        if ground.is_shared:
            self._sit_or_stand(lease)
        if lease.is_seat or not lease.request.is_elastic:
            return self._dispatch(now) if self.waiting and lease.mask != before else []
        is_claimed = shared_grants.is_claimed(ground, lease.device)
        if self._size is not None:
            self._set_size(lease.request, lease.device, lease)
        is_over = self._size is not None and lease.sms > lease.request.wants[0].most
        if self.waiting or is_claimed or is_over or any(owner.short for owner in lease.loans):
            least = self._kept_least(lease, is_claimed=is_claimed)
            missing = ground.shrink(lease, least) if lease.mask == before else 0
            if missing:
                self.lacking[lease.device, missing] = None
            granted = self._dispatch(now) if lease.mask != before and self.waiting else []
        is_kept = self._reserved is not None and self._reserved[1] == lease.device
        if not (is_kept or is_claimed) and flow.is_within_quota(now):
            held = lease.mask
            missing = ground.grow(lease, before)
            if missing and not ground.is_made(lease.device, missing):
                self.lacking[lease.device, missing] = None
            if held & ~lease.mask and self.waiting:  # it went elsewhere, to have more
                granted += self._dispatch(now)
        return granted

    def _kept_least(self, lease: Grant, *, is_claimed: bool) -> int:
        """SMs it keeps whoever waits, by the policy; not of others' floors, nor from the aged."""
        is_kept = self._reserved is not None and self._reserved[1] == lease.device
        is_due = any(owner.short or owner.waiting for owner in lease.loans)
        parts = lease.request.parts if is_kept or is_due or is_claimed else lease.request.wants
        return parts[0].least

    def _sit_or_stand(self, lease: Grant) -> None:
        """A lease of a class that allows it has a seat, or cells, as its device is split or not."""
        ground, device = self.ground, lease.device
        # Whoever could have had more may wait for nothing but the seats.
        others = any(flow.waiting and not flow.shared for flow in ground.flows.values())
        if lease.is_seat:
            if others or ground.verdict.is_split:
                missing = shared_grants.stand_up(ground, lease)
                if missing:
                    self.lacking[device, missing] = None
        elif (
            not others
            and not lease.is_apart
            and shared_grants.may_sit(ground, lease.request, device)
        ):
            seat = shared_grants.seat(ground, device)
            if ground.is_made(device, seat):
                shared_grants.sit(ground, lease, seat)
            else:
                self.lacking[device, seat] = None

    def observe(self, now: float, service: str, latency: float, number: int) -> list[Request]:
        """So many of a class had this latency, from end to end. Returns who is granted by that.

        From then on that counts for whether devices are split, and for how much of its latency its
        leases may take, instead of how long they take.
        """
        flow = self.ground.flows[service]
        flow.is_told = True
        flow.saw_latency(latency, number)
        is_changed = flow.shared and self.ground.verdict.saw(flow, latency, number, now)
        return self._dispatch(now) if is_changed and self.waiting else []

    def made(self, now: float) -> list[Request]:
        """There are more partitions. Returns who is granted because of that."""
        return self._dispatch(now) if self.waiting else []

    def tick(self, now: float) -> tuple[list[Request], list[Request]]:
        """Lets time pass: (who is granted, whose deadline passed while queued)."""
        expired, unblocked = [], self._is_refilled(now) or (self.waiting > 0 and self.is_idle)
        while (request := self._deadlines.first()) is not None:
            if request.deadline is None or request.deadline > now:
                break
            self._expired += 1
            unblocked |= self._leave(request)
            expired.append(request)
        return (self._dispatch(now) if unblocked else []), expired

    def reconfigure(
        self, now: float, services: Iterable[ServiceClass] | None, policy: Order | None
    ) -> list[Request]:
        """Other classes, or another policy; None: the same. Returns who is granted by that.

        Whoever waits keeps his place, by the new policy's rank; leases end as they began. Who is
        of a class that is not there any more is served as one without a floor or a cap. Who can
        never be granted what he asked for under the new ones is `hopeless`.

        Raises:
            InvalidRequest: the floors do not fit on the devices, or a rank is none; nothing has
                changed.
        """
        waiting = self.queued()
        ranks = (
            [r.rank for r in waiting] if policy is None else list(map(guard(policy).rank, waiting))
        )
        if services is not None:
            self.ground.set_rules(services)
            self._lack_floors()
        self._set_policy(self.policy if policy is None else policy)  # who is due is counted anew
        self._lines.clear()
        self._entries = 0
        for request, rank in zip(waiting, ranks, strict=True):
            old, able = request.line, self._able_now(request)
            if able:
                line = self._lines.get(request.wish) or RequestLine(
                    request, able, old.asked, old.least
                )
                self._stand_in_line(request, line, rank)
            else:
                self._give_up(request)
        return self._dispatch(now)

    def _lack_floors(self) -> None:
        """Has each floor made, and what is beside all of them, before a device is busy."""
        for device, (cells, floors) in enumerate(
            zip(self.devices, self.ground.floors, strict=True)
        ):
            beside = cells.complement(floors.all_blocks) if floors.owners else 0
            for mask in (*floors.blocks.values(), beside):
                if mask and not self.ground.is_made(device, mask):
                    self.lacking[device, mask] = None

    # -- questions -------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether every cell is free."""
        return not any(self.ground.live)

    def statistics(self) -> SchedulerStatistics:
        """What is the case now."""
        leased = draining = 0
        for cells, live in zip(self.devices, self.ground.live, strict=True):
            held = all_held = 0
            for lease in live:
                all_held |= lease.mask
                held |= 0 if lease.draining else lease.mask
            leased += cells.sms(held & cells.every)
            draining += cells.sms(all_held & ~held & cells.every)
        return SchedulerStatistics(
            waiting=self.waiting,
            requested=self._requested,
            granted=self._granted,
            cancelled=self._cancelled,
            expired=self._expired,
            refused=self._refused,
            sms_free=self.ground.total - leased - draining,
            sms_leased=leased,
            sms_draining=draining,
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
                is_shared=flow.shared and not self.ground.verdict.is_split,
            )
            for name, flow in self.ground.flows.items()
            if self.ground.is_classed
        }

    # -- time ------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        first = self._deadlines.first()
        times = [] if first is None or first.deadline is None else [first.deadline]
        times += [flow.refilled_at() for flow in self._over_quota()]
        return min(times, default=None)

    def _over_quota(self) -> list[ClassState]:
        """Classes that wait for nothing but their quota."""
        if not self.ground.is_ruled or not self.waiting:
            return []
        return [f for f in self.ground.flows.values() if f.waiting and f.quota and f.tokens <= 0]

    def _is_refilled(self, now: float) -> bool:
        return any(flow.is_within_quota(now) for flow in self._over_quota())

    # -- deadlines -------------------------------------------------------------------------------

    def _refuse_late(self, request: Request, due: float) -> None:
        """Refuses what cannot be done in time, not even with the most it asks for."""
        seconds = soonest(request, self.ground)
        if seconds is not None and request.arrived + seconds > due:
            self._be_late(request, seconds)

    def _admit(self, request: Request, line: RequestLine, now: float) -> None:
        """Refuses what must wait too long to be done in time, or would make others late."""
        sms = line.asked
        if request.is_elastic:  # it may be granted more than its least
            sms = min(request.parts[0].most, self.ground.most(request, request.devices))
        seconds = request.seconds(sms)
        if request.due is None or seconds is None:
            return
        work = sms * seconds
        done, is_fair = predicted(request, seconds, work, self.ground, self._agenda, now)
        if now + done > request.due or not is_fair:
            self._be_late(request, done)

    def _be_late(self, request: Request, done: float) -> None:
        """As its class says: refused, or behind everybody."""
        assert request.due is not None
        if request.flow.rules.on_late == "refuse":
            self._refused += 1
            raise DeadlineImpossible(done, request.due - request.arrived)
        request.deadline = request.due = None
        request.priority = -math.inf

    # -- refusals --------------------------------------------------------------------------------

    def _able(self, request: Request) -> tuple[int, ...]:
        """The devices on which it fits when everybody has left; refuses what fits on none."""
        able = self._able_now(request)
        if not able:
            raise self._too_many(request)
        return able

    def _able_now(self, request: Request) -> tuple[int, ...]:
        return tuple(d for d in request.devices if self.ground.ever(request, d, 0))

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
        held = self._held_by(request)
        if any(shared_grants.may_sit(self.ground, request, device) for device in able):
            return
        if held and not any(self.ground.ever(request, d, held.get(d, 0)) for d in able):
            most = max(self.devices[d].sms(self.devices[d].every & ~held.get(d, 0)) for d in able)
            holds = sum(self.devices[d].sms(mask) for d, mask in held.items())
            raise WouldDeadlock(holds, self._asked(request), most)
