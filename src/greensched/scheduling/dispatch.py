"""Dispatching: which queued requests are granted free cells, in the order of the policy."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence

from greensched.errors import DeadlineExceeded, TooManySMs
from greensched.scheduling import shared_grants, sizing
from greensched.scheduling.allocator import SMAllocator
from greensched.scheduling.class_state import UNKNOWN_LEASE
from greensched.scheduling.giving_way import kept_at_checkpoint
from greensched.scheduling.policy import GuardedPolicy
from greensched.scheduling.queue import RequestQueue, Reservation
from greensched.scheduling.request_line import RequestLine
from greensched.scheduling.requests import (
    GONE,
    GRANTED,
    LONG_LEASE_S,
    QUEUED,
    Grant,
    Request,
    by_order,
)


class Dispatcher:
    """Grants requests, by the rules of `Scheduler`.

    Args:
        queue: The queued requests.
        allocator: The cells.
        policy: Decides which requests may overtake, and how large an elastic grant is.
    """

    def __init__(self, queue: RequestQueue, allocator: SMAllocator, policy: GuardedPolicy) -> None:
        self.queue = queue
        self.allocator = allocator
        self.policy = policy
        #: The (device, cells) that need an executor, since the pool last took them.
        self.missing_executors: dict[tuple[int, int], None] = {}
        #: Requests that can never be granted any more, or whose deadline passed before a decision,
        #: with an error each, since the pool last took them.
        self.rejected: list[tuple[Request, Exception]] = []
        self.granted = self.rejections = self.expired = 0
        #: The next time at which a lease counts as one that may never end, of the leases that a
        #: request without an executor has waited for since the last dispatch.
        self.long_at = math.inf
        self._held: dict[Hashable, list[Grant]] = {}
        #: Grants that were suspended. Their holders change too often to be kept in `_held`.
        self.reused: dict[Grant, None] = {}
        #: Whether a request may be granted because of this dispatch, which must then repeat.
        self._again = False
        #: The first request that does not fit in this decision.
        self._first: Request | None = None
        #: A request waits only because it may not overtake one of a higher class.
        self.is_held_back = False

    # -- granting one request --------------------------------------------------------------------

    def grant(
        self, request: Request, devices: Sequence[int], now: float, limit: int | None = None
    ) -> bool:
        """Grant a request on the first of some devices where it fits, within `limit` cells."""
        request.missing_executors = ()
        allocator, state = self.allocator, request.class_state
        if state.quota is not None and not state.is_within_quota(now):
            return False
        for device in devices if len(devices) == 1 else allocator.order(request, devices):
            masks = self._find(request, device, now, limit)
            if not masks:
                continue
            if not all(allocator.is_made(device, mask) for mask in masks):
                masks = self._made_instead(request, device, masks, now, limit)
                if not masks:
                    continue
            request.missing_executors = ()
            request.grants = grants = allocator.allocate(request, device, masks, now)
            request.state = GRANTED
            if request.holder is not None:
                self._held.setdefault(request.holder, []).extend(grants)
            self.granted += 1
            return True
        return False

    def _made_instead(
        self,
        request: Request,
        device: int,
        masks: tuple[int, ...],
        now: float,
        limit: int | None,
    ) -> tuple[int, ...]:
        """Return cells with an executor to grant instead of cells without one, or none.

        Notes the executors to make. If the device may have no other one, a request waits for those
        that exist, unless it could wait without end: if all of them overlap leases of its own
        holder, or leases older than `LONG_LEASE_S`.
        """
        allocator = self.allocator
        missing = allocator.missing(device, masks)
        if masks[0] <= allocator.devices[device].full_mask:
            may_make = allocator.may_make(device)
            if request.is_elastic:
                if may_make:
                    self.missing_executors.update(dict.fromkeys(missing))
                is_aged = not self.policy.may_overtake(request, now)
                made = allocator.find_made(request, device, limit, is_aged=is_aged)
                if made:
                    return (made,)
            if allocator.grants[device] and not may_make:
                held = self.held_by(request).get(device, 0) | self._long_held(device, now)
                missing = allocator.missing(device, allocator.find_idle(request, device, held))
        if not request.missing_executors:
            request.missing_executors = tuple(missing)
        return ()

    def _long_held(self, device: int, now: float) -> int:
        """Return the cells of leases that may never end; note when the next one is among them."""
        held = 0
        for grant in self.allocator.grants[device]:
            long_at = grant.began + LONG_LEASE_S
            if long_at <= now:
                held |= grant.mask
            else:
                self.long_at = min(self.long_at, long_at)
        return held

    def _find(
        self, request: Request, device: int, now: float, limit: int | None
    ) -> tuple[int, ...]:
        """Return the cells to grant on a device; empty if the request does not fit."""
        allocator, is_shared = self.allocator, False
        if allocator.may_share:
            is_shared = limit is None and shared_grants.can_share(allocator, request, device)
            if allocator.shared_grants[device] and not request.class_state.shared:
                return ()
        if self.policy.size is not None:
            self.set_target(request, device, now)
        if is_shared:
            return (shared_grants.free_mask(allocator, device),)
        return allocator.find(request, device, limit)

    def set_target(
        self, request: Request, device: int, now: float, grant: Grant | None = None
    ) -> None:
        """Set the size that an elastic request should have on a device now, by the policy."""
        size = self.policy.size
        if size is not None and request.is_elastic:
            is_aged = not self.policy.may_overtake(request, now)
            due = None if grant is not None else request.due
            request.left = None if due is None else due - now
            request.target = (
                sizing.target_size(
                    size, self.allocator, self.queue.lines.values(), request, device, grant,
                    is_aged=is_aged,
                ),
            )  # fmt: skip

    def _try(self, request: Request, now: float) -> bool:
        """Grant a request if it may be granted now."""
        is_free = self._first is None and self.queue.reservation is None
        reservation = None if is_free else self._kept_from(request, now)
        if reservation is None:
            return self.grant(request, request.devices, now)
        if len(request.devices) > 1:
            others = [device for device in request.devices if device != reservation.device]
            if self.grant(request, others, now):
                return True
        return self._backfill(request, reservation, now)

    def _backfill(self, request: Request, reservation: Reservation, now: float) -> bool:
        """Grant a request on the device that is kept for another request.

        It is granted from its own reserve, or if it ends or gives way before the other could begin.
        """
        allocator, (first, device), state = self.allocator, reservation, request.class_state
        if request.duration is None and not (request.is_elastic or state.reserve_cells):
            return False
        own = allocator.reservations[device].reserved_free(state)
        if own and self.grant(request, (device,), now, own):
            return True
        seconds = self._seconds_kept(request, first)
        if seconds == math.inf or now + seconds > allocator.free_at(device, first, now):
            return False
        return self.grant(request, (device,), now)

    def _kept_from(self, request: Request, now: float) -> Reservation | None:
        """Return the device that is kept for another request, if this one may not have it.

        Until the first request has aged, this applies to elastic leases of lower classes: to those
        not known to end, because each would give way to it at a checkpoint, and to those that a
        policy sizes, because they take few SMs for long, if the first would not fit beside them.
        """
        reservation, waits = self.queue.reservation, self._first
        if reservation is None:
            if waits is None or waits.state is not QUEUED:  # it was granted meanwhile
                return None
            is_lower = request.class_state.priority < waits.class_state.priority
            if not (is_lower and request.is_elastic):
                return None
            device = self._best_device(waits)
            if request.duration is not None and not self._delays(request, waits, device, now):
                return None
            reservation = Reservation(waits, device)
            self.is_held_back = True
        first, device = reservation
        if request is first or device not in request.devices:
            return None
        # Where its own holder has grants, the two requests would wait for each other.
        return None if device in request.held_devices else reservation

    def _delays(self, request: Request, first: Request, device: int, now: float) -> bool:
        """Say whether a request that the policy sizes would leave too little for a waiting one.

        Leases of lower classes with a known duration count, too. Others give way to the waiting
        request.
        """
        if self.policy.size is None:
            return False
        self.set_target(request, device, now)
        needed = sum(part.least for part in (*request.target, *first.target))
        for grant in self.allocator.grants[device]:
            is_lower = grant.class_state.priority < first.class_state.priority
            if is_lower and grant.request.duration is not None:
                needed += grant.sms
        return needed > self.allocator.most_idle(first, device)

    def _seconds_kept(self, request: Request, first: Request) -> float:
        """Return the seconds until a request, if granted, leaves its SMs to another.

        At its end, or at its first checkpoint if it gives way there; infinite: not known.
        """
        state, seconds = request.class_state, math.inf
        if request.duration is not None:
            known = request.seconds(self.asked(request))
            seconds = math.inf if known is None else known * state.overrun_factor
        is_higher = state.priority > first.class_state.priority
        if not request.is_elastic or request.held_devices or (is_higher and seconds < math.inf):
            return seconds
        interval = state.longest_interval()
        return min(seconds, UNKNOWN_LEASE if interval == math.inf else interval)

    def try_ahead_of_queue(self, request: Request, line: RequestLine | None, now: float) -> bool:
        """Grant a new request before the queued ones, if it may be.

        No queued request fits now, because all freed cells were dispatched. A new request that
        follows others in its line does not fit, either.
        """
        queue, before = self.queue, line.first() if line is not None else None
        self._first = None
        if self.allocator.is_limited:
            self._drop_limited_reservation()
        if queue.reservation is None:
            is_alone = len(queue.lines) == 1 and not self.allocator.is_limited
            first = before if before is not None and is_alone else self.first_waiting()
            if first is not None:
                self._reserve(first, now)
        if before is None:
            return self._try(request, now)
        request.missing_executors = before.missing_executors
        return False

    def may_change(self) -> bool:
        """Say whether queued requests may be granted for a reason other than freed cells.

        A policy that sizes, and what may pass a kept device or a first request, look at other
        leases and requests.
        """
        if self.policy.size is not None or self.queue.reservation is not None:
            return True
        return self.is_held_back

    # -- going through the queue -----------------------------------------------------------------

    def dispatch(self, now: float) -> list[Request]:
        """Grant everything that can be granted now, in the order of the policy."""
        granted: list[Request] = []
        self.long_at = math.inf
        if not self.queue.waiting:
            return granted
        while (late := self.queue.expired(now)) is not None:  # expired since the last tick
            self._expire(late)
        if self.queue.puts_late_behind:
            self._put_late_behind(now)
        allocator, self._again = self.allocator, True
        while self._again:  # a class with a reserve that no longer waits lends again
            self._again = False
            self._dispatch_once(now, granted)
            is_stuck = self.queue.waiting and not (all(allocator.grants) or self._again)
            if allocator.is_limited and is_stuck:
                self._serve_idle(now, granted)
        return granted

    def _expire(self, request: Request) -> None:
        """Remove a request from the queue whose deadline has passed."""
        assert request.deadline is not None
        error = DeadlineExceeded(request.deadline - request.arrived)
        self.rejected.append((request, error))
        self.expired += 1
        request.class_state.expired += 1
        request.state = GONE
        self.queue.remove(request)

    def _put_late_behind(self, now: float) -> None:
        """Let late requests go after those of their priority that may be in time."""
        for first in self.queue.firsts():
            late: Request | None = first
            while late is not None and late.due is not None and late.due <= now:
                self.queue.put_behind(late)
                late = late.line.first()

    def _dispatch_once(self, now: float, granted: list[Request]) -> None:
        most, reservation = self.allocator.most_free(), self.queue.reservation
        self._first, self.is_held_back = None, False
        if reservation is not None:
            if self._attempt(reservation.request, most, now):
                most = self._take(reservation.request, granted)
            else:
                self.note_missing(reservation.request)
                if self.allocator.is_limited:
                    self._drop_limited_reservation()
        line = self.queue.only_line()
        if line is None:
            self._serve_lines(most, now, granted)
        else:
            self._serve_line(line, most, now, granted)

    def _serve_line(self, line: RequestLine, most: int, now: float, granted: list[Request]) -> None:
        """Serve the only line: this is the usual case, and takes a third of the work."""
        may_share = self.allocator.may_share
        while (request := line.first()) is not None and (most or may_share):
            if not self._attempt(request, most, now):
                self._blocked(request, now, is_first=True)
                return
            most = self._take(request, granted)

    def _serve_lines(self, most: int, now: float, granted: list[Request]) -> None:
        queue, is_first, is_ranked = self.queue, True, self.policy.class_rank is not None
        is_reserved, may_share = queue.reservation is not None, self.allocator.may_share
        firsts = [x for x in queue.firsts() if not (is_reserved and self._is_kept_out(x))]
        places = [queue.place(request) for request in firsts]
        heapq.heapify(places)
        is_refused = False
        moves = len(places)  # between two grants, because a class's rank may differ at each call
        while places and (most or may_share):
            request: Request = places[0][-1]
            if moves and is_ranked and places[0][0] != queue.class_rank(request.class_state):
                moves -= 1  # the class was granted something
                heapq.heapreplace(places, queue.place(request))
            elif not self._attempt(request, most, now):
                heapq.heappop(places)
                is_refused = True
                if is_first or request.missing_executors:
                    is_first = self._blocked(request, now, is_first=is_first)
            else:
                was_reserved = queue.reservation is not None
                most = self._take(request, granted)
                # This grant may change what others should have, or when the first request could
                # begin.
                self._again |= is_refused and self.may_change()
                if was_reserved and queue.reservation is None:
                    self._again = True  # requests that were kept out may fit now
                    return
                moves = len(places)
                following = request.line.first()
                if following is not None:
                    heapq.heapreplace(places, queue.place(following))
                else:
                    heapq.heappop(places)

    def _serve_idle(self, now: float, granted: list[Request]) -> None:
        """On an idle device, let even waiting owners lend; otherwise all could wait for ever."""
        allocator, queue = self.allocator, self.queue
        for device, grants in enumerate(allocator.grants):
            reservations = allocator.reservations[device]
            if grants or not reservations.owners:
                continue
            ordered: list[Request] = [
                place[-1] for place in sorted(map(queue.place, queue.firsts()))
            ]
            if queue.reservation is not None and queue.reservation.device == device:
                ordered.insert(0, queue.reservation.request)
            reservations.is_idle = True
            for request in ordered:
                if device not in request.devices or self._is_limited(request):
                    continue
                if self.grant(request, (device,), now):
                    self._take(request, granted)
                    self._again = True
                    break
                self.note_missing(request)
            reservations.is_idle = False

    def _attempt(self, request: Request, most: int, now: float) -> bool:
        """Grant the first request of a line, if it may be granted now.

        Searching cells is expensive, so the free SMs are compared first: `most` on one device.
        """
        request.missing_executors = ()
        if request.line.least > most:
            state = request.class_state
            if not state.shared or self.allocator.split_controller.is_split:
                return False
        return self._try(request, now)

    def _take(self, request: Request, granted: list[Request]) -> int:
        """Remove a granted request from the queue; return the most SMs that are now free."""
        granted.append(request)
        if self.queue.remove(request):
            self._again = True
        return self.allocator.most_free()

    # -- requests that do not fit ----------------------------------------------------------------

    def note_missing(self, request: Request) -> None:
        """Note the executors that a request needs."""
        self.missing_executors.update(dict.fromkeys(request.missing_executors))

    def need(self, device: int, mask: int) -> None:
        """Note cells that need an executor, unless 0."""
        if mask and not self.allocator.is_made(device, mask):
            self.missing_executors[device, mask] = None

    def _is_kept_out(self, request: Request) -> bool:
        """Say whether all devices of a request are kept for another one."""
        reservation = self.queue.reservation
        assert reservation is not None
        first, device = reservation
        if request is first or request.devices != (device,) or device in request.held_devices:
            return False
        if request.duration is not None or request.is_elastic:
            return False
        if self.allocator.reservations[device].reserved_free(request.class_state):
            return False
        request.missing_executors = ()
        return True

    def _blocked(self, request: Request, now: float, *, is_first: bool) -> bool:
        """Handle a line whose first request does not fit; say whether another line is now first."""
        if request.missing_executors:
            self.note_missing(request)
        if not is_first:
            return False
        if self._is_limited(request):
            is_hopeless = request.class_state.preemptible and not self._is_possible(request)
            may_wait = any(self.allocator.grants) and self.policy.may_overtake(request, now)
            if is_hopeless and not may_wait:
                self.reject(request)
            return True
        if self.queue.reservation is None:
            first = self.first_waiting() if request.gave_way else request
            if first is not None:
                self._reserve(first, now)
        return False

    def _is_limited(self, request: Request) -> bool:
        """Say whether only the limits of its class keep a request waiting."""
        if not self.allocator.is_limited:
            return False
        state = request.class_state
        is_over = state.tokens <= 0 or state.sms + request.line.asked > state.cap
        return is_over or (state.preemptible and not self._is_possible(request))

    def _is_possible(self, request: Request) -> bool:
        """Say whether a request could be granted if all leases had ended.

        This may change for a request that must borrow, because classes whose leases take too long
        may not borrow.
        """
        line, allocator = request.line, self.allocator
        if line.needs_loan is None:
            line.needs_loan = allocator.needs_loan(request)
        return not line.needs_loan or any(
            allocator.can_ever_fit(request, device)
            or shared_grants.can_share(allocator, request, device)
            for device in request.devices
        )

    def reject(self, request: Request) -> None:
        """Remove a request from the queue that can never be granted any more."""
        self.rejected.append((request, self.too_many(request)))
        self.rejections += 1
        request.class_state.cancelled += 1
        request.state = GONE
        self.queue.remove(request)
        self._again = True  # for the next request of the line

    def too_many(self, request: Request) -> TooManySMs:
        """Return the error for a request that can never be granted."""
        allocator = self.allocator
        most, nearest = allocator.most_ever(request), tuple[int, ...]()
        if len(request.parts) > 1:
            nearest = allocator.nearest(request)
            most = sum(nearest)
        is_ruled = allocator.is_limited or bool(request.class_state.sizes)
        return TooManySMs(self.asked(request), most, nearest=nearest, is_ruled=is_ruled)

    # -- a device kept for one request -----------------------------------------------------------

    def _reserve(self, first: Request, now: float) -> None:
        """Keep a device for the first request that does not fit: from all once it has aged."""
        if first.missing_executors:
            return
        self._first = first
        if not self.policy.may_overtake(first, now):
            self.queue.reservation = Reservation(first, self._best_device(first))

    def _best_device(self, first: Request) -> int:
        """Choose the device to keep: not one where only the holder's own grants are in the way."""
        if len(first.devices) == 1:
            return first.devices[0]
        held, allocator = self.held_by(first), self.allocator
        able: Sequence[int] = first.line.devices
        if held or allocator.is_limited:
            able = [d for d in first.devices if allocator.can_ever_fit(first, d, held.get(d, 0))]
        return max(able or first.devices, key=allocator.free_sms.__getitem__)

    def _drop_limited_reservation(self) -> None:
        """Stop keeping a device for a request that has reached the limits of its class."""
        reservation = self.queue.reservation
        if reservation is not None and self._is_limited(reservation.request):
            self.queue.reservation = None

    def first_waiting(self) -> Request | None:
        """Return the first request that waits for cells rather than for its class's limits."""
        queue = self.queue
        places = [queue.place(x) for x in queue.firsts() if not self._is_limited(x)]
        if not places:
            return None
        first: Request = min(places)[-1]
        # Requests of leases that gave way are served by arrival. Otherwise, of two leases that give
        # way to each other, one would always be waiting, and precede every request of a lower
        # class.
        return min((place[-1] for place in places), key=by_order) if first.gave_way else first

    # -- leases that give way ----------------------------------------------------------------------

    def first_before(self, grant: Grant, now: float) -> Request | None:
        """Return the request that precedes an elastic lease at its checkpoint, or None.

        This is the request that the device is kept for, or else the first one of the queue if it
        has aged or has a higher class.
        """
        request = self._waiting_for(grant.device)
        if request is None or _is_own(request, grant) or self._holds_more(grant):
            return None
        is_higher = request.class_state.priority > grant.class_state.priority
        return request if is_higher or not self.policy.may_overtake(request, now) else None

    def is_wanted(self, grant: Grant) -> bool:
        """Say whether free cells on the device of an elastic lease are for others."""
        reservation = self.queue.reservation
        if reservation is not None:
            return reservation.device == grant.device
        first = self._waiting_for(grant.device)
        return first is not None and not _is_own(first, grant)

    def _waiting_for(self, device: int) -> Request | None:
        """Return the request for which a device is kept, or else the first that may use it."""
        queue = self.queue
        if queue.reservation is not None:
            request = queue.reservation.request if queue.reservation.device == device else None
        else:
            request = self.first_waiting() if queue.waiting else None
        if request is None or request.missing_executors or device not in request.devices:
            return None
        return request

    def keeps_at_checkpoint(self, request: Request, grant: Grant, now: float) -> int | None:
        """Return the SMs that an elastic lease keeps for a request that precedes it.

        None: the number that its policy says. 0: it gives way, and the device is kept for the
        request.
        """
        self.set_target(request, grant.device, now)
        is_aged = not self.policy.may_overtake(request, now)
        keeps = kept_at_checkpoint(self.allocator, request, grant, now, is_aged=is_aged)
        if keeps == 0:
            self.queue.reservation = Reservation(request, grant.device)
        return keeps

    def _holds_more(self, grant: Grant) -> bool:
        """Say whether its holder has other grants, and so would wait for SMs while holding some."""
        return len(self._grants_of(grant.holder)) > 1

    # -- requested and held SMs ------------------------------------------------------------------

    def line_of(self, request: Request) -> RequestLine:
        """Return the line to which a request belongs."""
        line = self.queue.lines.get(request.line_key)
        if line is not None:
            return line
        devices = self.allocator.devices_for(request)
        return RequestLine(request, devices, self.asked(request), self.least(request))

    def asked(self, request: Request) -> int:
        """Return the requested SMs; several parts count in whole cells, as they are granted."""
        devices, parts = self.allocator.devices, request.parts
        if len(parts) == 1:
            return parts[0].least or max(devices[device].total for device in request.devices)
        largest = max((devices[d] for d in request.devices), key=lambda cells: cells.total)
        return sum(max(1, largest.cells_for(part.least)) for part in parts) * largest.size

    def least(self, request: Request) -> int:
        """Return the SMs without which a request fits nowhere."""
        whole_device = min(self.allocator.devices[device].total for device in request.devices)
        return sum(part.least for part in request.parts) or whole_device

    def holds(self, holder: Hashable) -> bool:
        """Say whether a holder has any grant that is not draining."""
        return holder in self._held or any(grant.holder == holder for grant in self.reused)

    def held_devices(self, holder: Hashable) -> frozenset[int]:
        """Return the devices on which a holder has grants that are not draining."""
        return frozenset(grant.device for grant in self._grants_of(holder))

    def _grants_of(self, holder: Hashable) -> list[Grant]:
        if holder is None:  # as for suspended grants
            return []
        reused = [grant for grant in self.reused if grant.holder == holder]
        return self._held.get(holder, []) + reused

    def held_by(self, request: Request) -> dict[int, int]:
        """Return the cells that a request's own holder keeps from it, by device."""
        held: dict[int, int] = {}
        for grant in self._grants_of(request.holder):
            if not (grant.is_shared and request.class_state.shared):
                mask = grant.mask & self.allocator.devices[grant.device].full_mask
                held[grant.device] = held.get(grant.device, 0) | mask
        return held

    def held_sizes(self, request: Request, device: int) -> list[int]:
        """Return the SMs of each grant that a request's own holder has on a device."""
        grants = self._grants_of(request.holder)
        return [grant.sms for grant in grants if grant.device == device]

    def drop_holder(self, grant: Grant) -> None:
        """Remove a grant's holder, because its lease has ended."""
        if grant in self.reused:
            del self.reused[grant]
        elif grant.holder is not None:
            held = self._held[grant.holder]
            held.remove(grant)
            if not held:
                del self._held[grant.holder]
        grant.holder = None

    def reuse(self, grant: Grant) -> None:
        """Read the holder of a grant from the grant from now on; it has none now."""
        self.drop_holder(grant)
        self.reused[grant] = None

    def reuse_no_more(self, grant: Grant) -> None:
        """Index the holder of a grant again."""
        if grant in self.reused:
            del self.reused[grant]
            if grant.holder is not None:
                self._held.setdefault(grant.holder, []).append(grant)


def _is_own(request: Request, grant: Grant) -> bool:
    """Return whether a request and a grant have the same holder."""
    return grant.holder is not None and request.holder == grant.holder
