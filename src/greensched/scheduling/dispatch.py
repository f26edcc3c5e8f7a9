"""Granting: who of those that wait is granted what is free, in the order of the policy.

The rules are the scheduler's; this is how they are gone through.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence

from greensched.errors import TooManySMs
from greensched.scheduling import shared_grants, sizing
from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.cells import DeviceCells
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.placement import Placement
from greensched.scheduling.policies import Order
from greensched.scheduling.queue import RequestQueue
from greensched.scheduling.requests import GONE, GRANTED, Grant, Request, RequestLine
from greensched.scheduling.services import ServiceClass


class Dispatcher(RequestQueue):
    """A queue before devices. Arguments as `Scheduler`."""

    def __init__(
        self,
        devices: Sequence[DeviceCells],
        policy: Order,
        is_made: Callable[[int, int], bool],
        services: Iterable[ServiceClass],
        placement: Placement,
    ) -> None:
        self.ground = ground = SMAllocator(devices, is_made, services, placement)
        self.devices, self.free, self.warm = ground.devices, ground.free, ground.warm
        super().__init__(policy, ground.clock.start_of, ground.total)
        #: (device, cells) to be made, since the pool last took them.
        self.lacking: dict[tuple[int, int], None] = {}
        #: Who cannot be granted any more, and what he is told, since the pool last took them.
        self.hopeless: list[tuple[Request, Exception]] = []
        self._held: dict[Hashable, list[Grant]] = {}
        self._granted = 0

    def _try(self, request: Request, now: float) -> bool:
        """Grants it where it may be granted now."""
        kept = self._reserved
        if kept is None or kept[0] is request or kept[1] not in request.devices:
            return self._grant(request, request.devices, now)
        if len(request.devices) > 1:
            where = [device for device in request.devices if device != kept[1]]
            if self._grant(request, where, now):
                return True
        return self._slip_in(request, kept, now)

    def _slip_in(self, request: Request, kept: tuple[Request, int], now: float) -> bool:
        """On the device kept for another: of his own floor, or before the other could begin."""
        ground, (first, device) = self.ground, kept
        if request.duration is None and not request.flow.need:
            return False
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
        ground, is_seat = self.ground, False
        if request.flow.quota is not None and not request.flow.is_within_quota(now):
            return False
        for device in where if len(where) == 1 else ground.order(request, where):
            if ground.is_shared:
                is_seat = limit is None and shared_grants.may_sit(ground, request, device)
                if ground.seats[device] and not request.flow.shared:
                    continue
            if self._size is not None:
                self._set_size(request, device)
            masks = (
                (shared_grants.seat(ground, device),)
                if is_seat
                else ground.find(request, device, limit)
            )
            if not masks:
                continue
            for mask in masks:
                if not ground.is_made(device, mask):
                    break
            else:
                if is_seat:
                    request.leases = leases = shared_grants.give_seat(
                        ground, request, device, masks[0], now
                    )
                else:
                    request.leases = leases = ground.give(request, device, masks, now)
                if request.holder is not None:
                    self._held.setdefault(request.holder, []).extend(leases)
                request.lacks = ()
                request.state = GRANTED
                self._granted += 1
                return True
            if not request.lacks:
                lacks = [(device, mask) for mask in masks if not ground.is_made(device, mask)]
                request.lacks = tuple(lacks)
        return False

    def _set_size(self, request: Request, device: int, lease: Grant | None = None) -> None:
        """Asks the policy what an elastic request is to have on a device now."""
        if self._size is not None and request.is_elastic:
            lines = self._lines.values()
            wanted = sizing.wanted(self._size, self.ground, lines, request, device, lease)
            request.wants = (wanted,)

    def _dispatch(self, now: float) -> list[Request]:
        """Grants whatever can be granted now, in the order of the policy."""
        granted: list[Request] = []
        self._is_unlocked = True
        while self._is_unlocked:  # an owner who waits no more lends again
            self._is_unlocked = False
            self._dispatch_once(now, granted)
            ground = self.ground
            if ground.is_ruled and self.waiting and not (all(ground.live) or self._is_unlocked):
                self._serve_idle(now, granted)
        if granted and self._is_untidy():
            self._tidy()
        return granted

    def _dispatch_once(self, now: float, granted: list[Request]) -> None:
        most, is_shared = self._most_free(), self.ground.is_shared
        kept = self._reserved
        if kept is not None:
            if self._attempt(kept[0], most, now):
                most = self._have(kept[0], now, granted)
            else:
                self.lacking.update(dict.fromkeys(kept[0].lacks))
                if self.ground.is_ruled:
                    self._keep_for_nobody_limited()
        if len(self._lines) == 1:
            self._serve_only(self._only_line(), most, now, granted)
            return
        is_kept, is_first = self._reserved is not None, True
        firsts = self._firsts()
        heads = [self._head(x) for x in firsts if not (is_kept and self._is_kept_out(x))]
        heapq.heapify(heads)
        moves = len(
            heads
        )  # at most, between two grants: a class's rank may differ at each question
        while heads and (most or is_shared):
            request: Request = heads[0][-1]
            if (
                moves
                and self._class_ranks is not None
                and heads[0][0] != self._class_rank(request.flow)
            ):
                moves -= 1
                heapq.heapreplace(heads, self._head(request))  # it was granted something
            elif not self._attempt(request, most, now):
                heapq.heappop(heads)
                if is_first or request.lacks:
                    is_first = self._blocked(request, now, is_first=is_first)
            else:
                most = self._have(request, now, granted)
                if is_kept and self._reserved is None:
                    self._is_unlocked = True  # whoever was kept out is not any more
                    return
                moves = len(heads)
                following = request.line.first()
                if following is not None:
                    heapq.heapreplace(heads, self._head(following))
                else:
                    heapq.heappop(heads)

    def _serve_idle(self, now: float, granted: list[Request]) -> None:
        """Where nobody has anything of a device, owners who wait lend: else all wait for ever."""
        ground = self.ground
        idle = [d for d, live in enumerate(ground.live) if not live and ground.floors[d].owners]
        for device in idle:
            ordered = [head[-1] for head in sorted(map(self._head, self._firsts()))]
            if self._reserved is not None and self._reserved[1] == device:
                ordered.insert(0, self._reserved[0])
            ground.floors[device].is_idle = True
            for request in ordered:
                is_here = device in request.devices and not self._is_limited(request)
                if is_here and self._grant(request, (device,), now):
                    self._have(request, now, granted)
                    self._is_unlocked = True
                    break
            ground.floors[device].is_idle = False

    def _serve_only(self, line: RequestLine, most: int, now: float, granted: list[Request]) -> None:
        """The same where all want the same: the usual case, and a third of the work."""
        while (request := line.first()) is not None and (most or self.ground.is_shared):
            if not self._attempt(request, most, now):
                self._blocked(request, now, is_first=True)
                return
            most = self._have(request, now, granted)
        if request is None:
            self._lines.clear()

    def _have(self, request: Request, now: float, granted: list[Request]) -> int:
        """One who waited is granted. Returns what is free then."""
        granted.append(request)
        self._advance(request, now)
        return self._most_free()

    def _most_free(self) -> int:
        """SMs that are free on the device where most are."""
        most = 0
        for cells, free in zip(self.devices, self.free):  # noqa: B905  as many; asked all the time
            sms = cells.sms(free)
            if sms > most:
                most = sms
        return most

    def _attempt(self, request: Request, most: int, now: float) -> bool:
        """Grants the first of a line where it may be granted now; what it lacks is of now, too.

        A closer look is dear, so all that is free is counted first: `most` on one device.
        """
        request.lacks = ()
        if request.line.least > most and not self._may_sit(request.flow):
            return False
        return self._try(request, now)

    def _may_sit(self, flow: ClassState) -> bool:
        return flow.shared and not self.ground.verdict.is_split

    def _is_kept_out(self, request: Request) -> bool:
        """Whether all it may be granted on is kept for another, and it cannot slip in there."""
        assert self._reserved is not None
        first, device = self._reserved
        if request is first or request.devices != (device,) or request.duration is not None:
            return False
        if self.ground.floors[device].kept(request.flow):
            return False
        request.lacks = ()
        return True

    def _blocked(self, request: Request, now: float, *, is_first: bool) -> bool:
        """Who is first does not fit. Returns whether the next of another line is the first."""
        if request.lacks:
            self.lacking.update(dict.fromkeys(request.lacks))
        if not is_first:
            return False
        if self._is_limited(request):
            is_hopeless = request.flow.preemptible and not self._is_possible(request)
            if is_hopeless and not (
                any(self.ground.live) and self._order.may_overtake(request, now)
            ):
                self._give_up(request)
            return True
        if self._reserved is None:
            self._reserve(request, now)
        return False

    def _is_limited(self, request: Request) -> bool:
        """Whether it is its class's limits that keep one who waits from being granted."""
        if not self.ground.is_ruled:
            return False
        flow = request.flow
        is_over = flow.tokens <= 0 or flow.sms + request.line.asked > flow.cap
        return is_over or (flow.preemptible and not self._is_possible(request))

    def _is_possible(self, request: Request) -> bool:
        """Whether it could be granted if everybody had left, by what is known of its class now.

        That does not stay: who takes too long is lent no floor. Who borrows nothing could be
        granted when he was queued, and still can.
        """
        line, ground = request.line, self.ground
        if line.needs_loan is None:
            line.needs_loan = ground.needs_loan(request)
        return not line.needs_loan or any(
            ground.ever(request, device, 0) or shared_grants.may_sit(ground, request, device)
            for device in request.devices
        )

    def _give_up(self, request: Request) -> None:
        """Takes one out of the queue who would wait for ever; he is told."""
        self.hopeless.append((request, self._too_many(request)))
        self._cancelled += 1
        request.state = GONE
        self._drop(request)
        self._is_unlocked = True  # for who stands behind him

    def _too_many(self, request: Request) -> TooManySMs:
        most = self.ground.most(request, request.devices)
        return TooManySMs(self._asked(request), most, is_ruled=self.ground.is_ruled)

    def _reserve(self, first: Request, now: float) -> None:
        """Once the first request that does not fit has aged, a device is kept for it."""
        if self._reserved is None and not first.lacks and not self._order.may_overtake(first, now):
            is_only = len(first.devices) == 1
            self._reserved = (first, first.devices[0] if is_only else self._best_for(first))

    def _best_for(self, first: Request) -> int:
        """The device to be kept for it: not where it waits for itself, which ends last, if ever."""
        held = self._held_by(first)
        able = [d for d in first.devices if self.ground.ever(first, d, held.get(d, 0))]
        return max(able or first.devices, key=lambda d: self.devices[d].sms(self.free[d]))

    def _keep_for_nobody_limited(self) -> None:
        """The device is kept no more for who has come to his class's limits meanwhile."""
        if self._reserved is not None and self._is_limited(self._reserved[0]):
            self._reserved = None

    def _overtake(self, request: Request, line: RequestLine | None, now: float) -> bool:
        """Grants a new request past those that wait, where it may.

        None of them fits now: whatever gave back cells dispatched. Nor does what stands in line
        behind one of them.
        """
        before = line.first() if line is not None else None
        if self.ground.is_ruled:
            self._keep_for_nobody_limited()
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
        heads = [self._head(x) for x in self._firsts() if not self._is_limited(x)]
        return min(heads)[-1] if heads else None

    # -- what is held ----------------------------------------------------------------------------

    def _asked(self, request: Request) -> int:
        """SMs asked for; by several parts in whole cells, which is what they cost."""
        if len(request.parts) == 1:
            least = request.parts[0].least
            return least or max(self.devices[device].total for device in request.devices)
        largest = max((self.devices[d] for d in request.devices), key=lambda cells: cells.total)
        return sum(max(1, -(-part.least // largest.size)) for part in request.parts) * largest.size

    def _least(self, request: Request) -> int:
        """SMs without which it fits nowhere; by name, it wants all of a device."""
        named = min(self.devices[device].total for device in request.devices)
        return sum(part.least for part in request.parts) or named

    def _held_by(self, request: Request) -> dict[int, int]:
        """What keeps its holder from it that is his own, by device; what drains comes back."""
        held: dict[int, int] = {}
        for lease in self._held.get(request.holder, ()):
            if not (lease.is_seat and request.flow.shared):
                mask = lease.mask & self.devices[lease.device].every
                held[lease.device] = held.get(lease.device, 0) | mask
        return held

    def _forget(self, lease: Grant) -> None:
        mine = self._held[lease.holder]
        mine.remove(lease)
        if not mine:
            del self._held[lease.holder]
