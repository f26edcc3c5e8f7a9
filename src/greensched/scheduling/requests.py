"""Requests to the scheduler, and the grants that it makes."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from functools import partial
from math import frexp, inf
from typing import Final, Protocol

from greensched.scheduling import user_code
from greensched.scheduling.cells import SizeRange
from greensched.scheduling.class_state import ClassState


class GrantState(enum.Enum):
    """The states of a request."""

    QUEUED = "waits for cells"
    GRANTED = "has its grants"
    GONE = "was cancelled, rejected or expired while it waited"


# Module names are faster to look up in every decision than members of the enum.
QUEUED: Final = GrantState.QUEUED
GRANTED: Final = GrantState.GRANTED
GONE: Final = GrantState.GONE


class DurationCurve(Protocol):
    """The duration of a piece of work by number of SMs, in seconds.

    Both methods are called inside decisions: they must not block, and cannot change the pool. A
    failure, or a result that is not a duration, is logged once; from then on the duration of the
    request counts as unknown.
    """

    def at(self, sms: int) -> float: ...

    def observe(self, sms: int, seconds: float) -> object: ...


#: The expected duration of a request: seconds, or a curve with the seconds for each size.
Duration = float | DurationCurve
#: A lease that has lasted for this many seconds may never end. Source: the time after which
#: psycopg_pool and HikariCP give up a request by default.
LONG_LEASE_S: Final = 30.0
NO_LOANS: Final[Mapping[ClassState, int]] = {}


class Grant:
    """Cells granted to one part of a request. Only a checkpoint changes `mask` and `sms`."""

    __slots__ = (
        "began",
        "charged",
        "class_state",
        "device",
        "draining",
        "ends",
        "holder",
        "is_bounded",
        "is_exclusive",
        "is_settled",
        "is_shared",
        "is_short",
        "is_suspended",
        "loans",
        "mask",
        "number",
        "over",
        "released",
        "request",
        "reused_s",
        "short_s",
        "short_uses",
        "since",
        "sms",
        "used",
    )

    def __init__(self, request: Request, device: int, now: float) -> None:
        self.request = request
        self.class_state = request.class_state
        self.holder = request.holder
        self.device = device
        self.mask = self.sms = 0
        #: When the lease began, and when it last reached a checkpoint.
        self.began = self.since = now
        #: Draining: the lease has ended, but its work may still run. Over: the cells are free.
        self.draining = self.over = False
        #: Whether its lease has ended and is accounted for, while the cells are kept for the next
        #: one.
        self.is_settled = False
        #: Whether its cells were reclaimed while it was kept for the next lease.
        self.is_suspended = False
        #: Whether it has all SMs of a device, which other shared grants may have, too. The bit of
        #: `mask` above all cells tells them apart.
        self.is_shared = False
        #: Whether no shared grant may be on its device.
        self.is_exclusive = not request.class_state.shared
        #: Whether it is elastic with less than it may have, and its class has a reserve here. Then
        #: the class wants its loans back.
        self.is_short = False
        #: Borrowed cells, by the class from whose reserve they come.
        self.loans = NO_LOANS
        #: When it is expected to end. None: unknown.
        self.ends: float | None = None
        #: Whether `ends` comes from its own duration, rather than from the mean of its class.
        self.is_bounded = False
        #: SM-seconds that its class was charged in advance, and those used before `since`.
        self.charged = self.used = 0.0
        #: When its lease ended, if that was before its work.
        self.released: float | None = None
        #: If leases are timed: the seconds of earlier leases on it.
        self.reused_s = 0.0
        #: How many earlier leases were short, and are not counted yet; and their seconds.
        self.short_uses, self.short_s = 0, 0.0
        #: The number of its lease in the pool's records; 0: none yet.
        self.number = 0

    def will_end(self, now: float) -> bool:
        """Say whether its end is known, so that it need not give way to others.

        If it should have ended already, its end is not known.
        """
        return self.is_bounded and self.ends is not None and self.ends > now

    def move_end(self, now: float, sms: int) -> None:
        """Expect its known end later or earlier, because it had this many SMs until now."""
        if not self.will_end(now) or self.sms == sms:
            return
        assert self.ends is not None
        before, after = self.request.seconds(sms), self.request.seconds(self.sms)
        if before and after:
            self.ends = now + (self.ends - now) * after / before

    def pieces_left(self, now: float) -> float:
        """Return how many times its request's present duration it still lasts. 0: unknown."""
        seconds = self.request.seconds(self.sms)
        return (self.ends - now) / seconds if self.ends and seconds and self.will_end(now) else 0.0

    def frees_at(self, now: float, request: Request) -> float:
        """Return when its cells may be free for a request at the earliest, as far as is known.

        An elastic lease may give them up at its next checkpoint, unless it has a higher class and
        is known to end.
        """
        is_higher = self.class_state.priority > request.class_state.priority
        gives_way = self.request.is_elastic and not (is_higher and self.will_end(now))
        return now if gives_way or self.ends is None else max(now, self.ends)

    def __repr__(self) -> str:
        state = "over" if self.over else "draining" if self.draining else "leased"
        return f"<Grant: {self.sms} SMs of device {self.device}, cells {self.mask:b}, {state}>"


class Line(Protocol):
    """What a request needs from its `RequestLine`."""

    #: Where the line's requests fit once every other lease has ended.
    devices: tuple[int, ...]
    #: The requested SMs, and the SMs without which no request of the line fits anywhere.
    asked: int
    least: int
    #: Whether they fit only with SMs borrowed from reserves. None: not determined yet.
    needs_loan: bool | None
    #: Whether it left the queue with all its requests.
    is_closed: bool

    def first(self) -> Request | None: ...

    def discard(self, request: Request) -> bool: ...


class Request:
    """A caller's request: sizes, allowed devices, and urgency."""

    __slots__ = (
        "arrived",
        "class_state",
        "cost_failed",
        "deadline",
        "devices",
        "due",
        "duration",
        "gave_way",
        "grants",
        "held_devices",
        "holder",
        "left",
        "line",
        "missing_executors",
        "near",
        "order",
        "owner",
        "parts",
        "pieces",
        "priority",
        "rank",
        "state",
        "target",
        "within",
        "work",
    )

    def __init__(
        self,
        class_state: ClassState,
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
        self.class_state = class_state
        self.parts = parts
        #: The sizes to grant now: from a policy that sizes requests, otherwise `parts`.
        self.target = parts
        self.devices = devices
        self.priority = priority
        self.arrived = arrived
        self.order = order
        #: The preferred device.
        self.near = near
        #: When it should be done, and when it expires.
        self.due = due
        self.deadline = deadline
        #: The expected seconds of its lease. None: unknown.
        self.duration = duration
        #: How many times its duration its lease lasts. Not 1 if it gave way at a checkpoint, where
        #: only the duration of the next piece is given. 0: unknown.
        self.pieces = 1.0
        #: Whether its duration is a curve that failed and is not called again.
        self.cost_failed = False
        #: Seconds in which the next piece should be done, from the last checkpoint.
        self.within: float | None = None
        #: Seconds left until it is due, when it was last tried.
        self.left: float | None = None
        self.holder = holder
        #: The devices on which its holder had grants when it arrived.
        self.held_devices: frozenset[int] = frozenset()
        #: For the caller of the scheduler, which does not read it.
        self.owner = owner
        self.state = QUEUED
        #: Whether it already had cells, and gave them up at a checkpoint.
        self.gave_way = False
        self.rank: tuple[float, ...] = ()
        self.grants: tuple[Grant, ...] = ()
        #: The (device, cells) on which it fits, but for which there is no executor yet.
        self.missing_executors: tuple[tuple[int, int], ...] = ()
        #: The line in which it waits, and the seconds for which it counts meanwhile.
        self.line: Line
        self.work = 0.0

    @property
    def is_elastic(self) -> bool:
        """Whether its grant gives back and takes up SMs at checkpoints."""
        return len(self.parts) == 1 and self.parts[0].least < self.parts[0].most

    @property
    def fewest(self) -> int:
        """The SMs of its smallest part, for which its borrowing time is always estimated."""
        return min([part.least for part in self.parts])

    @property
    def line_key(self) -> tuple[object, ...]:
        """What the requests of a line share: if one does not fit, neither do the others.

        A request that is known to end sooner may fit into a gap that is closed to others, so a
        known duration counts by its magnitude. A curve counts by identity, and need not be
        hashable. No device is closed to a request whose holder has grants there.
        """
        duration, held = self.duration, self.held_devices
        if duration is None:
            return self.class_state, self.parts, self.devices, held
        magnitude = frexp(duration)[1] if isinstance(duration, (int, float)) else id(duration)
        return self.class_state, self.parts, self.devices, held, magnitude

    @property
    def limit(self) -> float | None:
        """The seconds after which it is late. None: no known duration, deadline or latency."""
        if self.duration is None:
            return None
        if self.within is not None:
            return self.within
        latency = self.class_state.latency
        if latency is None or self.left is None or self.left <= 0:
            return latency
        return min(latency, self.left)

    @property
    def allowed(self) -> float | None:
        """The part of `limit` that is planned with."""
        limit, margin = self.limit, self.class_state.margin
        if limit is None:
            return None
        return limit * (margin.fraction if self.within is None else margin.of_deadline)

    def seconds(self, sms: int) -> float | None:
        """Return its expected seconds on this many SMs. None: unknown."""
        duration = self.duration
        if duration is None or isinstance(duration, (int, float)):
            return duration
        if self.cost_failed:
            return None
        try:
            seconds = float(user_code.call(partial(duration.at, sms)))
            if 0 <= seconds < inf:
                return seconds
            raise ValueError(f"at({sms}) returned {seconds}: return seconds, at least 0")
        except BaseException as error:  # user code inside a decision: no caller to raise it to
            self._curve_failed("at", error)
        return None

    def learn(self, sms: int, seconds: float) -> None:
        """Add a duration on this many SMs to its curve, if it has one."""
        duration = self.duration
        if duration is None or isinstance(duration, (int, float)) or self.cost_failed:
            return
        try:
            user_code.call(partial(duration.observe, sms, seconds))
        except BaseException as error:  # as above
            self._curve_failed("observe", error)

    def _curve_failed(self, method: str, error: BaseException) -> None:
        what = "%r.%s() failed: the duration counts as unknown"
        user_code.defer(error, what, self.duration, method)
        self.cost_failed = True

    def __repr__(self) -> str:
        return f"<Request {self.order}: {self.parts}, {self.state.name}>"


def by_order(request: Request) -> int:
    """Return the key that orders requests by arrival."""
    return request.order


def by_rank(request: Request) -> tuple[tuple[float, ...], int]:
    """Return the key by which the queue orders requests."""
    return request.rank, request.order
