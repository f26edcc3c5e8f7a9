"""Service classes: what each kind of user of a pool is promised, and what it has now.

A `ServiceClass` is what an operator writes; a `Flow` is what the scheduler remembers of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from greensched.errors import InvalidRequest
from greensched.planning.pacing import Pace
from greensched.quantities import real
from greensched.typing import ALL, NamedSize

#: Weight of the newest sample in what a class is remembered by: the last ten or so count.
SMOOTHING = 0.1

#: What becomes of a request that cannot be done in time.
IfLate = Literal["refuse", "best_effort"]
LATE = get_args(IfLate)


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """A named kind of user of a pool. Times in seconds, sizes in SMs.

    Checked where it is given to a pool, which raises `InvalidRequest`.

    Attributes:
        name: what `pool.partition(..., service=name)` says.
        reserve: SMs of one device that are kept for the class (its *floor*). An owner whose floor
            is idle waits at most `budget` for it. Rounded up to what the device is cut into.
        cap: the most SMs it may hold in the pool at once.
        priority: larger goes first in the queue.
        weight: its share of SM-time beside classes of the same priority, under `policy="fair"`.
        latency: what its requests should take from being asked for to their end.
        revocable: it gives back what it has on loan at its checkpoints, or ends its leases, within
            `segment`. Only such a class borrows idle SMs of others' floors.
        budget: how long it will wait for SMs of its floor that were lent; 0: nothing of it is
            lent. None: half of `latency`, or 0 where there is none.
        segment: the longest it goes between two checkpoints, or from a grant to its end. None, and
            wherever it takes longer: what was seen of it. Until something was, it borrows nothing.
        max_waiting: requests of it queued at most; None: as many as the pool's.
        quota: SMs it may hold on average; it may save up `QUOTA_WINDOW` seconds of that.
        memory_bytes: of device memory that it may have allocated through us at once; beyond,
            the job fails with `OutOfMemory`. None: as much as there is.
        unsplit: as long as every class that says so has its `latency`, they are granted all SMs of
            a device at once, several leases together, whatever size they ask for: plain streams,
            which nothing beats while nothing saturates. Their leases may share SMs with each
            other, and with nobody else's.
        if_late: what becomes of a request that cannot be done in time: `"refuse"` it at once
            (`DeadlineImpossible`), or take it as `"best_effort"`, behind all others of its class.
    """

    name: str
    reserve: int = 0
    cap: int | NamedSize = ALL
    priority: float = 0
    weight: float = 1
    latency: float | None = None
    revocable: bool = False
    budget: float | None = None
    segment: float | None = None
    max_waiting: int | None = None
    quota: float | None = None
    memory_bytes: int | None = None
    unsplit: bool = False
    if_late: IfLate = "refuse"

    @property
    def blocking_budget(self) -> float:
        """How long it will wait for its own floor, in seconds."""
        if self.budget is not None:
            return self.budget
        return 0.0 if self.latency is None else self.latency / 2


#: Seconds of its quota that a class may save up: two leases of middling length, so that a class
#: within its quota rarely waits because of it.
QUOTA_WINDOW = 1.0

#: SMs of a class without a cap: more than there are.
NO_CAP = 1 << 40

#: Whoever names no class: nothing is kept for him, and nothing kept from him.
ANYBODY = ServiceClass("")


def checked(services: object) -> tuple[ServiceClass, ...]:
    """The classes of a pool, each checked.

    Raises:
        InvalidRequest: what is no class, or what no class can be; the message says what can.
    """
    given = tuple(services) if isinstance(services, Iterable) else (services,)
    if not all(isinstance(service, ServiceClass) for service in given):
        raise InvalidRequest(
            f"services={services!r}: give ServiceClass objects, such as "
            "[ServiceClass('decode', priority=1)]"
        )
    for service in given:
        for field, is_right, right in _rules(service):
            if not is_right:
                value = getattr(service, field)
                raise InvalidRequest(f"service {service.name!r}: {field}={value!r}: {right}")
    if len({service.name for service in given}) < len(given):
        raise InvalidRequest(f"services={services!r}: each name once")
    return given


def _rules(one: ServiceClass) -> Iterable[tuple[str, bool, str]]:
    """(field, whether it is right, what would be)."""
    yield "name", type(one.name) is str and one.name != "", "a string"
    yield "reserve", _count(one.reserve), "a number of SMs, at least 0"
    most = NO_CAP if isinstance(one.cap, NamedSize) else one.cap
    is_cap = one.cap is ALL or (_count(one.cap) and most > 0)
    yield "cap", is_cap, "a number of SMs, at least 1, or ALL"
    yield "cap", most >= one.reserve, "at least as many SMs as its reserve"
    yield "priority", _number(one.priority), "a number"
    yield "weight", _number(one.weight) and 0 < one.weight < math.inf, "a number above 0"
    for field in ("latency", "segment"):
        value = getattr(one, field)
        yield field, value is None or (_number(value) and value > 0), "seconds, above 0, or None"
    yield "revocable", isinstance(one.revocable, bool), "True or False"
    yield "unsplit", isinstance(one.unsplit, bool), "True or False"
    yield "budget", _absent_or_at_least_0(one.budget), "seconds, at least 0, or None"
    yield "max_waiting", one.max_waiting is None or _count(one.max_waiting), "a whole number"
    yield "quota", one.quota is None or (_number(one.quota) and one.quota > 0), "SMs, above 0"
    right = "a number of bytes, at least 0, or None"
    yield "memory_bytes", one.memory_bytes is None or _count(one.memory_bytes), right
    yield "if_late", _is_one_of(one.if_late, LATE), "'refuse' or 'best_effort'"


def _is_one_of(value: object, known: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value in known


def _count(value: object) -> bool:
    return type(value) is int and value >= 0


def _number(value: object) -> bool:
    return not math.isnan(real(value))


def _absent_or_at_least_0(value: float | None) -> bool:
    return value is None or (_number(value) and value >= 0)


class Flow:
    """What the scheduler remembers of a class. Every user without one is in one flow together."""

    __slots__ = (
        "borrowed",
        "budget",
        "cap",
        "cells",
        "finish",
        "granted",
        "home",
        "interval",
        "is_told",
        "kept",
        "latency",
        "lent",
        "longest",
        "max_waiting",
        "mean",
        "moved",
        "need",
        "pace",
        "priority",
        "quota",
        "refilled",
        "revocable",
        "rules",
        "segment",
        "short",
        "slip",
        "sm_time",
        "sms",
        "start",
        "tag",
        "tokens",
        "unsplit",
        "waiting",
        "weight",
        "work",
    )

    def __init__(self, rules: ServiceClass) -> None:
        #: SMs it holds, draining ones included.
        self.sms = 0
        #: Cells it holds on the device of its floor, and how many of them are on loan to it.
        self.cells = self.borrowed = 0
        #: Cells of its floor that others have on loan; and those that are free, and its own.
        self.lent = self.kept = 0
        #: Its elastic leases there that have less than they may have.
        self.short = 0
        #: Its requests that are queued, and the SM-seconds they are expected to take.
        self.waiting = 0
        self.work = 0.0
        #: Fair queueing: where its last grant started and ends in virtual time; and where its next
        #: one starts, as last looked at.
        self.start = self.finish = self.tag = 0.0
        #: SM-seconds it had, and leases.
        self.sm_time = 0.0
        self.granted = 0
        #: Seconds of a lease on average; of the longest of late; between checkpoints.
        self.mean = self.longest = self.segment = 0.0
        #: How much longer than their known cost its leases took, of late; at least 1.
        self.slip = 1.0
        #: When its queue last moved, and the mean time between its moves.
        self.moved = self.interval = 0.0
        #: SM-seconds left of its quota, and since when.
        self.tokens, self.refilled = math.inf, 0.0
        #: Its users say what latency they have; else that of its leases counts.
        self.is_told = False
        self.pace = Pace()
        #: Its floor in cells, and the device it is on; set by `lending`.
        self.need, self.home = 0, 0
        self.set_rules(rules)

    def set_rules(self, rules: ServiceClass) -> None:
        """What it is promised from now on; what it has, it keeps."""
        self.rules = rules
        self.priority = rules.priority
        self.weight = rules.weight
        self.revocable = rules.revocable
        self.unsplit = rules.unsplit
        self.budget = rules.blocking_budget
        self.cap = NO_CAP if isinstance(rules.cap, NamedSize) else rules.cap
        self.latency = rules.latency
        self.quota = rules.quota
        self.max_waiting = math.inf if rules.max_waiting is None else rules.max_waiting
        if rules.quota is None:
            self.tokens = math.inf
        elif self.tokens == math.inf:
            self.tokens = rules.quota * QUOTA_WINDOW

    @property
    def name(self) -> str:
        """The class's."""
        return self.rules.name

    def account(self, cells: int = 0, *, borrowed: int = 0, lent: int = 0) -> None:
        """It has so many more cells on the device of its floor, so many of them on loan.

        And others have so many more of its floor on loan; what is on loan to it is not of that.
        """
        self.cells += cells
        self.borrowed += borrowed
        self.lent += lent
        kept = self.need - self.cells + self.borrowed - self.lent
        self.kept = kept if kept > 0 else 0  # noqa: FURB136  counted at every grant

    # -- what is seen of it ----------------------------------------------------------------------

    # Rising at once and falling slowly: what is promised of a class goes by its longest of late.

    def saw_segment(self, seconds: float) -> None:
        """It went so long without a checkpoint."""
        old = self.segment
        self.segment = seconds if seconds > old else old + SMOOTHING * (seconds - old)

    def saw_lease(self, seconds: float, segment: float, cost: float | None) -> None:
        """A lease of it took so long, the last of it without a checkpoint; `cost` was expected."""
        self.saw_segment(segment)
        old = self.longest
        self.longest = seconds if seconds > old else old + SMOOTHING * (seconds - old)
        self.mean += (SMOOTHING if self.mean else 1.0) * (seconds - self.mean)
        if cost:
            over = seconds / cost
            self.slip = (
                over if over > self.slip else max(1.0, self.slip + SMOOTHING * (over - self.slip))
            )

    def saw_latency(self, latency: float, number: int) -> None:
        """So many of it had this latency."""
        if self.latency is not None:
            self.pace.saw(number, is_late=latency > self.latency)

    def longest_segment(self) -> float:
        """Seconds until it gives back a loan, as far as is known; infinite: nothing is."""
        return max(self.rules.segment or 0.0, self.segment) or math.inf

    def longest_lease(self, cost: float | None, *, is_elastic: bool) -> float:
        """Seconds until a lease of it has ended, as far as is known; infinite: nothing is.

        A lease of one size has nothing to give back before its end, so its end is its segment.
        """
        if cost is not None:
            return cost * self.slip
        declared = 0.0 if is_elastic else self.rules.segment or 0.0
        return max(declared, self.longest) or math.inf

    # -- its quota -------------------------------------------------------------------------------

    def is_within_quota(self, now: float) -> bool:
        """Whether it may be granted more now."""
        if self.quota is None:
            return True
        most = self.quota * QUOTA_WINDOW
        self.tokens = min(most, self.tokens + self.quota * (now - self.refilled))
        self.refilled = now
        return self.tokens > 0

    def refilled_at(self) -> float:
        """When it is within its quota again."""
        assert self.quota is not None
        return self.refilled + max(0.0, -self.tokens) / self.quota
