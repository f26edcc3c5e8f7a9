"""Queue, leases and cells of a pool: `request`, `cancel`, `release`, `drained`, `tick`.

Synchronous and deterministic: every call takes `now` and returns who is granted by it. Rules:

1. A cell is *free*, *leased* or *draining*, and in one state only; cells leased to two requests
   at once do not exist (checked at every grant).
2. A request is QUEUED, then GRANTED, or GONE (cancelled, expired). Only a QUEUED one is granted.
   Whoever stops wanting a GRANTED one gives its leases back: `release`, then `drained`.
3. Cells come free by `drained` alone.
4. Requests that want the same (sizes, devices) stand in one line, and only the first of a line
   is ever tried: where it does not fit, nobody behind it does. So a decision costs as
   much as there are different wishes, however many wait.
5. The first request of all that does not fit lets others pass as long as the policy says; then
   one device is kept for it: it goes before everybody, and nobody else is granted there, whatever
   his rank, until it is granted or gone.
6. Those that wait hold nothing but that: only when the one with a device leaves can somebody be
   granted because of it.
7. Cells over which no partition is made yet (`is_made`) are not granted. A request that lacks one
   waits, holding nothing, and that is noted in `lacking`. It is granted once it is made (`made`),
   or when others come free. No device is kept for it meanwhile: making one may take for ever.

Requests that left stay in their line until they come to its head, or outnumber those that wait:
so a mass cancellation is linear, and nothing grows with the number of past requests.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from greensched.errors import (
    InvalidRequest,
    QueueFull,
    TooManySMs,
    WouldBlock,
    WouldDeadlock,
)
from greensched.planning.cells import Cells, Demand
from greensched.planning.policy import Policy

K = TypeVar("K")

#: Weight of the newest interval in the mean time between grants, behind `retry_after`: the last
#: ten or so count.
SMOOTHING = 0.1
#: So many more entries than twice those that wait are kept before anybody tidies up.
STALE_LEAST = 64


class State(enum.Enum):
    """Where a request is in its life."""

    QUEUED = "waits for cells"
    GRANTED = "has its leases"
    GONE = "was cancelled or expired while it waited"


@dataclass(slots=True, eq=False)
class Lease:
    """Cells granted to one part of a request."""

    device: int
    mask: int
    sms: int
    holder: Hashable
    draining: bool = False
    over: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """What somebody wants: sizes, where, how urgently, and for whom the grant is (`owner`)."""

    parts: tuple[Demand, ...]
    devices: tuple[int, ...]
    priority: int
    arrived: float
    order: int
    deadline: float | None = None
    holder: Hashable = None
    owner: object = None
    state: State = State.QUEUED
    rank: tuple[float, ...] = ()
    leases: tuple[Lease, ...] = ()
    #: (device, cells) that it fits on, and over which nothing is made.
    lacks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counts since the beginning, and what is the case now.

    Every request taken is `requested`, and then `waiting`, `granted`, `cancelled` (also by the
    end of the pool) or `expired`; one that was refused because of what else waits is `refused`.
    """

    waiting: int
    requested: int
    granted: int
    cancelled: int
    expired: int
    refused: int
    sms_free: int
    sms_leased: int
    sms_draining: int


def _by_rank(request: Request) -> tuple[tuple[float, ...], int]:
    return request.rank, request.order


def _still_waiting(heap: list[tuple[K, int, Request]]) -> list[tuple[K, int, Request]]:
    """The heap without those that left."""
    kept = [entry for entry in heap if entry[2].state is State.QUEUED]
    heapq.heapify(kept)
    return kept


class _Line:
    """Requests with the same wish, by rank."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.rank, request.order, request))

    def first(self) -> Request | None:
        """The first that still waits; drops those that left."""
        while self._heap and self._heap[0][2].state is not State.QUEUED:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def waiting(self) -> list[Request]:
        """All that still wait; drops those that left."""
        self._heap = _still_waiting(self._heap)
        return [request for _, _, request in self._heap]


class Scheduler:
    """Decides who gets which cells.

    Args:
        devices: the cells of each device.
        policy: who is next.
        max_waiting: the queue's bound.
        is_made: whether there is a partition over (device, cells).
    """

    def __init__(
        self,
        devices: Sequence[Cells],
        policy: Policy,
        max_waiting: int,
        is_made: Callable[[int, int], bool] = lambda device, mask: True,  # noqa: ARG005  any are
    ) -> None:
        self.devices = tuple(devices)
        self.policy = policy
        self.max_waiting = max_waiting
        #: (device, cells) to be made, since the pool last took them.
        self.lacking: dict[tuple[int, int], None] = {}
        self._is_made = is_made
        self.free = [cells.every for cells in self.devices]
        #: Partitions that exist already, by device and number of cells; the pool keeps it true.
        self.warm: list[dict[int, dict[int, None]]] = [{} for _ in self.devices]
        self.waiting = 0
        self._everywhere = tuple(range(len(self.devices)))
        self._lines: dict[tuple[object, ...], _Line] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._held: dict[Hashable, list[Lease]] = {}
        self._reserved: tuple[Request, int] | None = None
        self._requested = self._granted = self._cancelled = self._expired = self._refused = 0
        #: When the queue last moved, and the mean time between its moves.
        self._moved = 0.0
        self._interval = 0.0
        #: Entries in the lines, the stale ones included: never fewer than there are.
        self._entries = 0
        self._sms_leased = self._sms_draining = 0

    # -- what happens ----------------------------------------------------------------------------

    def request(
        self,
        now: float,
        parts: tuple[Demand, ...],
        *,
        devices: tuple[int, ...] | None = None,
        priority: int = 0,
        deadline: float | None = None,
        holder: Hashable = None,
        owner: object = None,
        wait: bool = True,
    ) -> Request:
        """Takes a request: granted at once where it fits and nobody is before it, else queued.

        Args:
            now: seconds.
            parts: sizes, all granted together on one device.
            devices: where it may be granted; None: anywhere.
            priority: larger goes first.
            deadline: the time after which it is not wanted any more.
            holder: who asks, to find out who waits for what he holds himself.
            owner: whatever the caller wants to find on the request.
            wait: False: granted now or not at all.

        Raises:
            TooManySMs: it can never fit.
            WouldBlock: `wait` is false and it does not fit now.
            WouldDeadlock: it would have to wait, and can never fit while `holder` holds what he
                has.
            QueueFull: it would have to wait, and too many do.
        """
        where = self._everywhere if devices is None else devices
        request = Request(parts, where, priority, now, self._requested, deadline, holder, owner)
        fits = self._overtake(request, now) if self.waiting else self._grant(request, where)
        if fits:
            self._requested += 1
            return request
        able = self._able(request)
        if not wait:
            self._refused += 1
            if request.lacks:
                raise WouldBlock(
                    "the SMs are free, but no lane over just these is made yet: "
                    "use `async with pool.partition(...)`, which waits for it"
                )
            free = max(self.devices[d].sms(self.free[d]) for d in where)
            raise WouldBlock(
                f"the SMs it asks for are not free now ({free} are, or somebody is before it): "
                "use `async with pool.partition(...)`, which waits"
            )
        self._refuse_deadlock(request, able)
        if self.waiting >= self.max_waiting:
            self._refused += 1
            raise QueueFull(self.waiting, self.retry_after())
        self._requested += 1
        self._queue(request)
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
            self._sms_leased -= lease.sms
            self._sms_draining += lease.sms
            if lease.holder is not None:
                self._forget(lease)

    def drained(self, now: float, lease: Lease) -> list[Request]:
        """All work of a lease is done: its cells are free. Returns who is granted by that."""
        if lease.over:
            raise AssertionError(f"cells given back twice: {lease}")
        self.release(lease)
        lease.over = True
        self._sms_draining -= lease.sms
        self.free[lease.device] |= lease.mask
        return self._dispatch(now) if self.waiting else []

    def made(self, now: float) -> list[Request]:
        """There are more partitions. Returns who is granted because of that."""
        return self._dispatch(now) if self.waiting else []

    def tick(self, now: float) -> tuple[list[Request], list[Request]]:
        """Lets time pass: (who is granted, whose deadline passed while queued)."""
        expired, unblocked = [], False
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if request.state is State.QUEUED:
                self._expired += 1
                unblocked |= self._leave(request)
                expired.append(request)
        return (self._dispatch(now) if unblocked else []), expired

    def close(self) -> list[Request]:
        """Empties the queue; returns who waited."""
        waited = sorted((r for line in self._lines.values() for r in line.waiting()), key=_by_rank)
        for request in waited:
            self._cancelled += 1
            self._leave(request)
        return waited

    # -- questions -------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether every cell is free."""
        return not self._sms_leased and not self._sms_draining

    def most(self, devices: tuple[int, ...] | None = None) -> int:
        """The most SMs a request can ever be granted."""
        where = self._everywhere if devices is None else devices
        return max(self.devices[d].total for d in where)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        while self._deadlines and self._deadlines[0][2].state is not State.QUEUED:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def retry_after(self) -> float:
        """Seconds until there may be room in the queue, from how fast it moved of late."""
        return max(0.001, self._interval)

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
            sms_leased=self._sms_leased,
            sms_draining=self._sms_draining,
        )

    # -- granting --------------------------------------------------------------------------------

    def _grant(self, request: Request, where: Sequence[int]) -> bool:
        """Grants it on the device of `where` with the most free SMs on which it fits."""
        request.lacks = ()
        if len(where) > 1:
            where = sorted(where, key=lambda d: -self.devices[d].sms(self.free[d]))
        for device in where:
            cells, free = self.devices[device], self.free[device]
            masks = cells.fit_all(free, request.parts, self.warm[device]) if free else ()
            lacks = [(device, mask) for mask in masks if not self._is_made(device, mask)]
            if masks and not lacks:
                self._give(request, device, masks)
                return True
            request.lacks = request.lacks or tuple(lacks)
        return False

    def _give(self, request: Request, device: int, masks: tuple[int, ...]) -> None:
        cells, free, holder = self.devices[device], self.free[device], request.holder
        leases = []
        for mask in masks:
            if mask & ~free:
                raise AssertionError(f"cells granted twice: {mask:b} of {free:b}")
            free &= ~mask
            lease = Lease(device, mask, cells.sms(mask), holder)
            self._sms_leased += lease.sms
            leases.append(lease)
        self.free[device] = free
        if holder is not None:
            self._held.setdefault(holder, []).extend(leases)
        request.leases = tuple(leases)
        request.lacks = ()
        request.state = State.GRANTED
        self._granted += 1

    def _dispatch(self, now: float) -> list[Request]:
        """Grants whatever can be granted now, in the order of the policy."""
        granted: list[Request] = []
        kept = self._reserved
        if kept is not None and self._grant(kept[0], kept[0].devices):
            granted.append(kept[0])
            self._advance(kept[0], now)
        firsts = {key: line.first() for key, line in self._lines.items()}
        for key in [key for key, first in firsts.items() if first is None]:
            del self._lines[key]
        heads = [(*_by_rank(r), self._lines[key]) for key, r in firsts.items() if r is not None]
        heapq.heapify(heads)  # orders differ, so lines are never compared
        first_blocked = True
        while heads and any(self.free):
            line = heapq.heappop(heads)[2]
            request = line.first()
            assert request is not None
            if self._grant(request, self._open_to(request)):
                granted.append(request)
                self._advance(request, now)
                following = line.first()
                if following is not None:
                    heapq.heappush(heads, (*_by_rank(following), line))
                continue
            self.lacking.update(dict.fromkeys(request.lacks))
            if first_blocked:
                first_blocked = False
                self._reserve(request, now)
        if granted:
            self._tidy()
        return granted

    def _reserve(self, first: Request, now: float) -> None:
        """Once the first request that does not fit has aged, a device is kept for it."""
        if self._reserved is None and not first.lacks and not self.policy.may_pass(first, now):
            # Not where it waits for itself: those cells come last of all, if ever.
            held = self._held_by(first.holder)
            able = [d for d in first.devices if self._fits_ever(first, d, held.get(d, 0))]
            best = max(able or first.devices, key=lambda d: self.devices[d].sms(self.free[d]))
            self._reserved = (first, best)

    def _open_to(self, request: Request) -> Sequence[int]:
        """The devices on which a request may be granted now."""
        if self._reserved is None or self._reserved[0] is request:
            return request.devices
        return [d for d in request.devices if d != self._reserved[1]]

    def _overtake(self, request: Request, now: float) -> bool:
        """Grants a new request past those that wait, where it may.

        None of them fits now: whatever gave back cells dispatched.
        """
        first = min((r for line in self._lines.values() if (r := line.first())), key=_by_rank)
        self._reserve(first, now)
        return self._grant(request, self._open_to(request))

    # -- the queue -------------------------------------------------------------------------------

    def _queue(self, request: Request) -> None:
        request.rank = self.policy.rank(request)
        self.lacking.update(dict.fromkeys(request.lacks))
        key = (request.parts, request.devices)
        self._lines.setdefault(key, _Line()).add(request)
        if not self.waiting:
            self._moved = request.arrived
        self.waiting += 1
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.order, request))
        self._entries += 1
        self._tidy()

    def _advance(self, request: Request, now: float) -> None:
        """Somebody who waited is granted: the queue moves."""
        self._interval += SMOOTHING * (now - self._moved - self._interval)
        self._moved = now
        self._drop(request)

    def _leave(self, request: Request) -> bool:
        """Somebody stops waiting; true if a device was kept for him."""
        request.state = State.GONE
        kept = self._drop(request)
        self._tidy()
        return kept

    def _drop(self, request: Request) -> bool:
        """Takes a request out of the queue; its line forgets it when it comes to its head."""
        self.waiting -= 1
        if self._reserved is None or self._reserved[0] is not request:
            return False
        self._reserved = None
        return True

    def _tidy(self) -> None:
        """Forgets those that left, where they outnumber those that wait."""
        if not self.waiting or self._entries > 2 * self.waiting + STALE_LEAST:
            self._lines = {key: line for key, line in self._lines.items() if line.waiting()}
            self._deadlines = _still_waiting(self._deadlines)
            self._entries = self.waiting

    def _able(self, request: Request) -> list[int]:
        """The devices on which it fits when everybody has left; refuses what fits on none."""
        able = [d for d in request.devices if self._fits_ever(request, d, 0)]
        if not able:
            raise TooManySMs(self._asked(request), self.most(request.devices))
        return able

    def _refuse_deadlock(self, request: Request, able: list[int]) -> None:
        """Refuses what cannot be granted while its holder holds what he has."""
        held = self._held_by(request.holder)
        if held and not any(self._fits_ever(request, d, held.get(d, 0)) for d in able):
            most = max(self.devices[d].sms(self.devices[d].every & ~held.get(d, 0)) for d in able)
            holds = sum(self.devices[d].sms(mask) for d, mask in held.items())
            everything = max(self.devices[d].total for d in able)
            raise WouldDeadlock(holds, self._asked(request) or everything, most)

    def _asked(self, request: Request) -> int:
        """SMs asked for; by several parts in whole cells, which is what they cost."""
        if len(request.parts) == 1:
            return request.parts[0].least
        largest = max((self.devices[d] for d in request.devices), key=lambda cells: cells.total)
        return sum(max(1, -(-part.least // largest.size)) for part in request.parts) * largest.size

    def _fits_ever(self, request: Request, device: int, without: int) -> bool:
        cells = self.devices[device]
        return bool(cells.fit_all(cells.every & ~without, request.parts))

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


def validate_bound(max_waiting: int) -> int:
    """The queue's bound, checked."""
    if type(max_waiting) is not int or max_waiting < 0:
        raise InvalidRequest(f"max_waiting={max_waiting!r} is no whole number >= 0")
    return max_waiting
