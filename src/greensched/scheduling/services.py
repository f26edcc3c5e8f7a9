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
OnLate = Literal["refuse", "best_effort"]
LATE = get_args(OnLate)


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """A named kind of user of a pool. Times in seconds, sizes in SMs.

    Checked where it is given to a pool, which raises `InvalidRequest`.

    Attributes:
        name: the value of `pool.partition(..., service=name)`.
        reserve: SMs of one device that are kept for the class, rounded up to whole cells. While
            the class does not use them, other classes may borrow them.
        cap: the most SMs the class may hold in the pool at once.
        priority: larger goes first in the queue.
        weight: its share of SM-time among classes of the same priority, under `policy="fair"`.
        latency: target in seconds for a request, from the call to the end of its lease.
        preemptible: the class gives borrowed SMs back at its checkpoints, or ends its leases,
            within `checkpoint_interval`. Only a preemptible class borrows from other reserves.
        max_wait_for_reserve: the longest the class waits, in seconds, for SMs of its reserve that
            are lent; 0: its reserve is never lent. None: half of `latency`, or 0 without one.
        checkpoint_interval: the longest time in seconds between two checkpoints, or from a grant
            to its end. None, or where leases take longer: the time that was measured. Until one
            was measured, the class borrows nothing.
        max_waiting: the most requests of the class in the queue; None: the pool's bound alone.
        quota: SMs it may hold on average; it may save up `QUOTA_WINDOW` seconds of that.
        memory_bytes: device memory that jobs of the class may have allocated through greensched
            at once; beyond it a job fails with `OutOfMemory`. None: no limit.
        shared: while every shared class meets its `latency`, a request of the class is granted
            all SMs of a device, several leases together, whatever size it asks for: plain
            streams, which no split beats while nothing saturates. Shared leases may share SMs
            with each other, and with no other lease.
        on_late: for a request that cannot be done in time: `"refuse"` raises
            `DeadlineImpossible` at once, `"best_effort"` queues it behind all others of the class.
    """

    name: str
    reserve: int = 0
    cap: int | NamedSize = ALL
    priority: float = 0
    weight: float = 1
    latency: float | None = None
    preemptible: bool = False
    max_wait_for_reserve: float | None = None
    checkpoint_interval: float | None = None
    max_waiting: int | None = None
    quota: float | None = None
    memory_bytes: int | None = None
    shared: bool = False
    on_late: OnLate = "refuse"

    @property
    def blocking_budget(self) -> float:
        """How long it will wait for its own floor, in seconds."""
        if self.max_wait_for_reserve is not None:
            return self.max_wait_for_reserve
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
    for field in ("latency", "checkpoint_interval"):
        value = getattr(one, field)
        yield field, value is None or (_number(value) and value > 0), "seconds, above 0, or None"
    yield "preemptible", isinstance(one.preemptible, bool), "True or False"
    yield "shared", isinstance(one.shared, bool), "True or False"
    yield (
        "max_wait_for_reserve",
        _absent_or_at_least_0(one.max_wait_for_reserve),
        "seconds, at least 0, or None",
    )
    yield "max_waiting", one.max_waiting is None or _count(one.max_waiting), "a whole number"
    yield "quota", one.quota is None or (_number(one.quota) and one.quota > 0), "SMs, above 0"
    right = "a number of bytes, at least 0, or None"
    yield "memory_bytes", one.memory_bytes is None or _count(one.memory_bytes), right
    yield "on_late", _is_one_of(one.on_late, LATE), "'refuse' or 'best_effort'"


def _is_one_of(value: object, known: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value in known


def _count(value: object) -> bool:
    return type(value) is int and value >= 0


def _number(value: object) -> bool:
    return not math.isnan(as_float(value))


def _absent_or_at_least_0(value: float | None) -> bool:
    return value is None or (_number(value) and value >= 0)
