"""Service classes: what each kind of user of a pool is promised, as an operator writes it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Literal, get_args

from greensched._validation import as_float
from greensched.errors import InvalidRequest
from greensched.typing import ALL, NamedSize

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
    return tuple(map(_plain, given))


def _plain(one: ServiceClass) -> ServiceClass:
    """The same, with Python's own numbers where it has others: compiled rooms take no others."""
    given: dict[str, Any] = {"latency": one.latency, "quota": one.quota}
    odd: dict[str, Any] = {
        x: as_float(n) for x, n in given.items() if type(n) not in (float, int, NoneType)
    }
    return replace(one, **odd) if odd else one


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
    return not math.isnan(as_float(value))


def _absent_or_at_least_0(value: float | None) -> bool:
    return value is None or (_number(value) and value >= 0)
