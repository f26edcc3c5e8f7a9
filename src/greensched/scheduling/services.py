"""Service classes: what an operator promises to each kind of user of a pool."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from greensched._validation import as_float, as_tuple
from greensched.errors import InvalidRequest
from greensched.typing import ALL, NamedSize

#: What happens to a request that cannot be done in time.
OnLate = Literal["refuse", "best_effort"]
LATE = get_args(OnLate)

#: The largest latency target in seconds. A larger one is almost always meant in milliseconds, and
#: would have no effect: a margin needs 1,000 latencies, which at this size take hours. Longer
#: requests should have a `deadline`.
MOST_LATENCY = 10.0


#: The smallest and the largest weight. SM-time is divided by it. Beyond these values, sums of the
#: classes' charges would lose other classes' charges, or overflow.
WEIGHTS = 1e-6, 1e6


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """A named kind of user of a pool. Times are in seconds, sizes in SMs.

    A pool checks its classes, and raises `InvalidRequest`.

    Attributes:
        name: The value of `pool.partition(..., service=name)`.
        reserve: SMs of one device that are kept for the class, rounded up to whole cells. While
            the class does not use them, other classes may borrow them.
        cap: The most SMs that the class may hold in the pool at once.
        sizes: The SMs of its leases, ascending, such as `(24, 48, 64)`. Each request names one of
            them, or a range between two. A lease has one of these sizes at any time, and
            each size is granted on the same cells whenever these are free, from one end of the
            device, so that graphs and other state of an executor are made only once
            (`Pool.prepare_local`). Empty: any size.
        priority: Larger goes first in the queue.
        weight: Its share of SM-time among classes of the same priority, with `policy="fair"`;
            from 1e-6 to 1e6.
        latency: The target for a request, from the call to the end of its lease; at most 10.
            Longer requests should have a `deadline`.
        preemptible: Whether the class gives borrowed SMs back at its checkpoints, or ends its
            leases, within `checkpoint_interval`. Only preemptible classes borrow from reserves.
        max_wait_for_reserve: The longest time that the class waits for SMs of its reserve that
            are lent. 0: its reserve is never lent. None: half of `latency`, or 0 without one.
        checkpoint_interval: The longest time between two checkpoints, or from a grant to its end.
            None, or if leases take longer: the measured time. Until one is measured, the class
            borrows nothing.
        max_waiting: The most requests of the class in the queue. None: only the pool's bound.
        quota: The SMs it may hold on average; it may save up `QUOTA_WINDOW` seconds of that.
        memory_bytes: The most device memory that jobs of the class may have allocated through
            greensched at once; beyond it a job fails with `OutOfMemory`. None: no limit.
        shared: Whether, while every shared class meets its `latency`, a request of the class gets
            all SMs of a device, together with other leases, whatever size it requests. This is
            like plain streams, which no split beats while nothing saturates. Shared leases may
            share SMs with each other, but with no other lease.
        on_late: What happens to a request that cannot be done in time: `"refuse"` raises
            `DeadlineImpossible` at once, `"best_effort"` queues it after all others of the class.
        hang_after: Seconds after which work of the class counts as hung, instead of
            `Pool(hang_after=...)`; `math.inf`: never. None: the pool's value.
    """

    name: str
    reserve: int = 0
    cap: int | NamedSize = ALL
    sizes: tuple[int, ...] = ()
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
    hang_after: float | None = None

    @property
    def reserve_wait(self) -> float:
        """The longest time that the class waits for lent SMs of its reserve, in seconds."""
        if self.max_wait_for_reserve is not None:
            return self.max_wait_for_reserve
        return 0.0 if self.latency is None else self.latency / 2


#: The cap of a class without one: more SMs than exist.
NO_CAP = 1 << 40

#: The class of requests that name none.
DEFAULT_CLASS = ServiceClass("")


def validate_services(services: object) -> tuple[ServiceClass, ...]:
    """Check and return the classes of a pool.

    Raises:
        InvalidRequest: An object is not a class, or has an invalid field; the message says what is
            valid.
    """
    classes = as_tuple(services)
    if classes is None or not all(isinstance(service, ServiceClass) for service in classes):
        raise InvalidRequest(
            f"services={services!r}: give ServiceClass objects, such as "
            "[ServiceClass('decode', priority=1)]"
        )
    for service in classes:
        for field, is_right, right in _rules(service):
            if not is_right:
                value = getattr(service, field)
                raise InvalidRequest(f"service {service.name!r}: {field}={value!r}: give {right}")
    names = [service.name for service in classes]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"services={names}: give each name once")
    return tuple(map(_with_floats, classes))


def _with_floats(service: ServiceClass) -> ServiceClass:
    """Return a class whose times and weights are Python floats, as the compiled build needs.

    Otherwise a latency from a numpy array would raise TypeError there.
    """
    fields = (
        "priority", "weight", "latency", "checkpoint_interval", "max_wait_for_reserve", "quota",
        "hang_after",
    )  # fmt: skip
    others: dict[str, Any] = {}
    for field in fields:
        value = getattr(service, field)
        if value is not None and type(value) not in (int, float):
            others[field] = float(value)
    return replace(service, **others) if others else service


def _rules(service: ServiceClass) -> Iterable[tuple[str, bool, str]]:
    """Yield (field, whether it is valid, what would be valid)."""
    yield "name", type(service.name) is str and service.name != "", "a string that is not empty"
    yield "reserve", _is_count(service.reserve), "a number of SMs, at least 0"
    most = NO_CAP if isinstance(service.cap, NamedSize) else service.cap
    is_cap = service.cap is ALL or (_is_count(service.cap) and most > 0)
    yield "cap", is_cap, "a number of SMs, at least 1, or ALL"
    yield "cap", most >= service.reserve, "at least as many SMs as its reserve"
    yield "sizes", _are_sizes(service.sizes, most), "numbers of SMs, ascending, none above its cap"
    yield "sizes", not (service.sizes and service.shared), "none: shared leases have all SMs"
    yield "priority", _is_number(service.priority), "a number"
    lightest, heaviest = WEIGHTS
    is_weight = lightest <= as_float(service.weight) <= heaviest
    yield "weight", is_weight, f"a number from {lightest:g} to {heaviest:g}"
    right = "seconds, above 0, math.inf for never, or None"
    yield "hang_after", _is_above_0(service.hang_after), right
    for field in ("latency", "checkpoint_interval"):
        yield field, _is_above_0(getattr(service, field)), "seconds, above 0, or None"
    is_short = service.latency is None or service.latency <= MOST_LATENCY
    yield "latency", is_short, _latency_hint(service)
    yield "preemptible", isinstance(service.preemptible, bool), "True or False"
    yield "shared", isinstance(service.shared, bool), "True or False"
    wait = service.max_wait_for_reserve
    yield "max_wait_for_reserve", wait == 0 or _is_above_0(wait), "seconds, at least 0, or None"
    right = "a number of requests, at least 0, or None"
    yield "max_waiting", service.max_waiting is None or _is_count(service.max_waiting), right
    yield "quota", _is_above_0(service.quota), "SMs, above 0, or None"
    right = "a number of bytes, at least 0, or None"
    yield "memory_bytes", service.memory_bytes is None or _is_count(service.memory_bytes), right
    yield "on_late", service.on_late in LATE, "'refuse' or 'best_effort'"


def _latency_hint(service: ServiceClass) -> str:
    seconds = f"at most {MOST_LATENCY:g}: latency is in seconds"
    return f"{seconds} ({as_float(service.latency) / 1000:g} for {service.latency} ms)"


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_sizes(sizes: object, cap: int) -> bool:
    if not isinstance(sizes, tuple) or not all(_is_count(size) and size for size in sizes):
        return False
    return sorted(set(sizes)) == list(sizes) and (not sizes or sizes[-1] <= cap)


def _is_number(value: object) -> bool:
    return not math.isnan(as_float(value))


def _is_above_0(value: object) -> bool:
    """Say whether a value is None or a number above 0."""
    return value is None or as_float(value) > 0
