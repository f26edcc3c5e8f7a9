"""Requests and leases: what the scheduler is asked for, and what it gives."""

from __future__ import annotations

import enum
import heapq
import logging
from collections import deque
from collections.abc import Hashable, Mapping
from math import frexp, inf
from typing import Any, Final, Protocol

from greensched.scheduling.cells import SizeRange
from greensched.scheduling.class_state import ClassState

logger = logging.getLogger("greensched")


class GrantState(enum.Enum):
    """Where a request is in its life."""

    QUEUED = "waits for cells"
    GRANTED = "has its leases"
    GONE = "was cancelled or expired while it waited"


#: Looked up at every decision: a name of a module is found faster than a member of an enum, and a
#: final one, compiled, is not looked up.
QUEUED: Final = GrantState.QUEUED
GRANTED: Final = GrantState.GRANTED
GONE: Final = GrantState.GONE


class Curve(Protocol):
    """How long a piece of work takes on so many SMs, in seconds.

    Asked and told under a lock. Where it raises, or says what are no seconds, that is logged, and
    its request has no known duration from then on. What `observe` returns, nobody reads.
    """

    def at(self, sms: int) -> float: ...

    def observe(self, sms: int, seconds: float) -> object: ...


#: What a request is expected to take: seconds, or a curve that says it for each size.
Duration = float | Curve
NO_LOANS: Final[Mapping[ClassState, int]] = {}


class Grant:
    """Cells granted to one part of a request. `mask` and `sms` change at its checkpoints alone."""

    __slots__ = (
        "began",
        "charged",
        "device",
        "draining",
        "ends",
        "flow",
        "had",
        "holder",
        "is_apart",
        "is_paused",
        "is_seat",
        "is_short",
        "loans",
        "mask",
        "over",
        "request",
        "since",
        "sms",
    )

    def __init__(
        self, device: int, mask: int, sms: int, holder: Hashable, request: Request, now: float
    ) -> None:
        self.device = device
        self.mask = mask
        self.sms = sms
        self.holder = holder
        self.request = request
        self.flow = request.flow
        #: When it began; and when it last came to a checkpoint.
        self.began = self.since = now
        #: Nobody holds it any more, and its work may still run; and its cells are free.
        self.draining = self.over = False
        #: It is over, but for its cells: the next who wants the same may have it as it is.
        self.is_paused = False
        #: It has all SMs of a device, and others may have them, too (`sharing`); `mask` says which
        #: of the device's seats it is on.
        self.is_seat = False
        #: Nobody with a seat may be on its device.
        self.is_apart = True
        #: It is an owner's, elastic, and has less than it may have: he wants what is lent of his
        #: floor.
        self.is_short = False
        #: Cells it has on loan, by the owner of the floor they are of.
        self.loans = NO_LOANS
        #: When it ends, as far as is known.
        self.ends: float | None = None
        #: SM-seconds its class was charged for beforehand; and what it had before `since`.
        self.charged = self.had = 0.0

    def begin(self, now: float) -> None:
        """Another has it as it is, from now on: of who had it before nothing is left."""
        self.began = self.since = now
        self.charged = self.had = 0.0

    def frees_at(self, now: float) -> float:
        """When its cells may be free at the earliest, as far as is known."""
        is_known = self.ends is not None and not self.request.is_elastic
        return max(now, self.ends or now) if is_known else now

    def __repr__(self) -> str:
        state = "over" if self.over else "draining" if self.draining else "leased"
        return f"<Lease: {self.sms} SMs of device {self.device}, cells {self.mask:b}, {state}>"


class Request:
    """What somebody wants: sizes, where, how urgently, and for whom the grant is (`owner`)."""

    __slots__ = (
        "answer",
        "arrived",
        "deadline",
        "devices",
        "due",
        "duration",
        "flow",
        "holder",
        "is_blind",
        "lacks",
        "leases",
        "line",
        "near",
        "order",
        "owner",
        "parts",
        "priority",
        "rank",
        "state",
        "waiter",
        "wants",
        "within",
        "work",
    )

    def __init__(
        self,
        flow: ClassState,
        parts: tuple[SizeRange, ...],
        devices: tuple[int, ...],
        priority: float,
        arrived: float,
        order: int,
        *,
        near: int | None = None,
        due: float | None = None,
        deadline: float | None = None,
        duration: Duration | None = None,
        holder: Hashable = None,
        owner: object = None,
    ) -> None:
        #: The class it is of.
        self.flow = flow
        self.parts = parts
        #: What it is to have now, by a policy that sizes it; else what was asked for.
        self.wants = parts
        self.devices = devices
        self.priority = priority
        self.arrived = arrived
        self.order = order
        #: The device to be preferred.
        self.near = near
        #: When it should be done; and when it is not wanted any more.
        self.due = due
        self.deadline = deadline
        #: What it is expected to take.
        self.duration = duration
        #: It is a curve that failed, and is not asked again.
        self.is_blind = False
        #: Seconds in which what its lease does next should be done, by its last checkpoint.
        self.within: float | None = None
        self.holder = holder
        #: For whoever takes requests, and not for who decides on them: whose it is, what he awaits,
        #: and what he is told.
        self.owner = owner
        self.waiter: Any = None
        self.answer: object = None
        self.state = QUEUED
        self.rank: tuple[float, ...] = ()
        self.leases: tuple[Grant, ...] = ()
        #: (device, cells) that it fits on, and over which nothing is made.
        self.lacks: tuple[tuple[int, int], ...] = ()
        #: Where it waits; and the SM-seconds it counts for meanwhile.
        self.line: RequestLine
        self.work = 0.0

    @property
    def is_elastic(self) -> bool:
        """Whether its lease gives back and takes up SMs at its checkpoints."""
        return len(self.parts) == 1 and self.parts[0].least < self.parts[0].most

    @property
    def fewest(self) -> int:
        """SMs of its smallest part: by them it is judged, always, how long it would borrow."""
        return min([part.least for part in self.parts])

    @property
    def wish(self) -> tuple[object, ...]:
        """What its line has in common: where one of them does not fit, nor does the next.

        Who is known to end sooner may fit into a gap that is closed to others, so a known duration
        counts by its magnitude; a curve is itself, and need not be hashable.
        """
        duration = self.duration
        if duration is None:
            return self.flow, self.parts, self.devices
        magnitude = frexp(duration)[1] if isinstance(duration, (int, float)) else id(duration)
        return self.flow, self.parts, self.devices, magnitude

    @property
    def allowed(self) -> float | None:
        """Seconds it may take from now on; None: no known duration, deadline or latency."""
        flow = self.flow
        if self.duration is None:
            return None
        if self.within is not None:
            return self.within * flow.pace.of_deadline
        return None if flow.latency is None else flow.latency * flow.pace.part

    def seconds(self, sms: int) -> float | None:
        """How long it is expected to take on so many SMs; None: nobody knows."""
        duration = self.duration
        if duration is None or isinstance(duration, (int, float)):
            return duration
        if self.is_blind:
            return None
        try:
            seconds = float(duration.at(sms))
            if 0 <= seconds < inf:
                return seconds
            raise ValueError(f"{seconds} are no seconds")
        except Exception:  # a user's, amid a decision, where there is nobody to tell
            self._be_blind("at")
        return None

    def learn(self, sms: int, seconds: float) -> None:
        """What it did took so long on so many SMs: its curve is told, if it has one."""
        duration = self.duration
        if duration is None or isinstance(duration, (int, float)) or self.is_blind:
            return
        try:
            duration.observe(sms, seconds)
        except Exception:  # as above
            self._be_blind("observe")

    def _be_blind(self, method: str) -> None:
        logger.exception(
            "%r: %s() failed: nothing is known of what it costs", self.duration, method
        )
        self.is_blind = True

    def __repr__(self) -> str:
        return f"<Request {self.order}: {self.parts}, {self.state.name}>"


def by_rank(request: Request) -> tuple[tuple[float, ...], int]:
    """The order of the queue."""
    return request.rank, request.order


class LazyHeap:
    """Requests by rank, or by deadline, and then in their order, of which the first is asked for.

    Most come in that order, and stand in a row; who does not is in a heap beside it. Those that
    left stay until they come first or are swept out. Sweeping is done in parts, so that no call
    takes long however many left: what still waits is collected beside the rest, which goes on, and
    takes its place once all was looked at.
    """

    __slots__ = ("_at", "_before", "_by_deadline", "_first", "_heap", "_kept", "_last", "_row")

    def __init__(self, *, by_deadline: bool = False) -> None:
        self._by_deadline = by_deadline
        self._row: deque[Request] = deque()
        #: A key, the request's order, and the request. Orders differ: requests are not compared.
        self._heap: list[tuple[Any, int, Request]] = []
        #: The first as last looked for, if none came before it since; and the last in the row,
        #: behind which nobody in the heap stands: so there is one, or nobody at all.
        self._first: Request | None = None
        self._last: Request | None = None
        self._kept: LazyHeap | None = None
        self._before: list[Request] = []
        self._at = 0

    def __len__(self) -> int:
        """Requests, with those that left and were not swept out yet."""
        return len(self._row) + len(self._heap)

    def _key(self, request: Request) -> Any:
        return request.deadline if self._by_deadline else request.rank

    def _is_before(self, one: Request, other: Request) -> bool:
        mine, others = self._key(one), self._key(other)
        if mine is others:
            return one.order < other.order
        return bool(mine < others or (one.order < other.order and mine == others))

    def push(self, request: Request) -> None:
        """One more waits."""
        last = self._last
        if last is not None and self._is_before(request, last):
            heapq.heappush(self._heap, (self._key(request), request.order, request))
            self._first = None
        else:
            self._row.append(request)
            self._last = request
        if self._kept is not None:
            self._kept.push(request)

    def first(self) -> Request | None:
        """The first that still waits; drops those that left."""
        first = self._first
        if first is not None and first.state is QUEUED:
            return first
        row, heap = self._row, self._heap
        while row or heap:
            is_late = bool(heap) and not (row and self._is_before(row[0], heap[0][2]))
            request = heap[0][2] if is_late else row[0]
            if request.state is QUEUED:
                self._first = request
                return request
            if is_late:
                heapq.heappop(heap)
            else:
                row.popleft()
        self._first = self._last = None
        return None

    def begins_with(self, request: Request) -> bool:
        """Whether it was the first when that was last looked for: the next look drops it."""
        return self._first is request

    def _all(self) -> list[Request]:
        return [*self._row, *(entry[2] for entry in self._heap)]

    def waiting(self) -> list[Request]:
        """All that still wait, in no order."""
        return [request for request in self._all() if request.state is QUEUED]

    def sweep(self, most: int) -> int:
        """Looks at so many entries. Returns how many it may still look at; 0: it is not done."""
        if self._at < 0:  # what left is let go in parts, too: freeing takes as long as looking
            del self._before[-most:]
            if not self._before:
                self._at = 0
            return 0 if self._before else 1
        if self._kept is None:
            self._kept, self._before = LazyHeap(by_deadline=self._by_deadline), self._all()
        until = self._at + most
        for request in self._before[self._at : until]:
            if request.state is QUEUED:
                self._kept.push(request)
        self._at = until
        left = until - len(self._before)
        if left < 0:
            return 0
        kept = self._kept
        self._row, self._heap, self._last = kept._row, kept._heap, kept._last
        self._first, self._kept, self._at = None, None, -1
        return self.sweep(max(1, left))


class RequestLine(LazyHeap):
    """Requests of one class with the same wish, by rank. Only its first is ever tried.

    Args:
        request: one of them.
        able: the devices on which they fit when everybody has left.
        asked: SMs asked for.
        least: SMs without which none of them fits anywhere.
    """

    __slots__ = ("_rank", "able", "asked", "flow", "least", "needs_loan")

    def __init__(self, request: Request, able: tuple[int, ...], asked: int, least: int) -> None:
        super().__init__()
        self.flow = request.flow
        self.able = able
        self.asked = asked
        self.least = least
        #: Whether they may fit only on what floors of others lend; None: not asked yet.
        self.needs_loan: bool | None = None
        self._rank: tuple[float, ...] = ()

    def add(self, request: Request, rank: tuple[float, ...]) -> None:
        if rank != self._rank:
            self._rank = rank
        request.rank = self._rank  # one object for all of the same, not one each
        request.line = self
        self.push(request)
