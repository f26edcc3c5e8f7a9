"""Requests to a pool: parsing them, serving them from the lease cache, waiting for their grants.

Most services request the same sizes of the same classes repeatedly, usually with an empty queue. A
lease that ends without work in this state is cached: the next task of its loop with an equal
request gets it without a decision (`make bench` has rows with and without one). To the scheduler
its grant is *suspended*: its cells are free, and are reclaimed before any decision that they could
affect. Each lease is counted, and its class charged, as if the scheduler had decided on it.

`LeaseManager` takes the request of a cancelled task out of the queue (`RequestQueue.remove`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import TypedDict

from greensched._asynclib import get_ident
from greensched._validation import as_float, as_tuple, is_count
from greensched.device.buffers import Buffer
from greensched.errors import InvalidRequest
from greensched.execution.completion_poller import CompletionPoller
from greensched.execution.lease import Lease
from greensched.kernels import Kernel
from greensched.leasing.holders import place
from greensched.scheduling.cells import SizeRange, parse_sizes
from greensched.scheduling.requests import Duration, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass
from greensched.typing import Size

#: The most latencies reported at once; their counts are still exact as floats.
MAX_COUNT = 10**9
#: The most requests kept for reuse, one for each size of each class. A service has few.
MAX_REUSED = 1024


class LeaseOptions(TypedDict, total=False):
    """The options of `Pool.partition`, which documents them."""

    device: int | None
    service: str | None
    deadline: float | None
    duration: Duration | None
    near: Buffer | None


@dataclass(frozen=True, slots=True, eq=False)
class LeaseRequest:
    """The request for one partition or one group of partitions.

    Attributes:
        parts: The size ranges, all granted together on one device.
        sizes: The sizes as the caller gave them.
        device: The ordinal of the only device allowed. None: any.
        service: The name of its class, or "".
        deadline: Seconds from the request until it expires.
        duration: The expected duration of the lease.
        near: The ordinal of the preferred device.
        is_reused: Whether this object stands for all requests for one size of one class, so that
            the lease cache may use it as a key.
    """

    parts: tuple[SizeRange, ...]
    sizes: tuple[Size, ...]
    device: int | None = None
    service: str = ""
    deadline: float | None = None
    duration: Duration | None = None
    near: int | None = None
    is_reused: bool = False

    def __str__(self) -> str:
        return "sms=" + ", ".join([repr(size) for size in self.sizes])


class RequestParser:
    """Parses the arguments of `Pool.partition` and similar methods.

    Args:
        services: The classes of the pool.
    """

    def __init__(self, services: Sequence[ServiceClass]) -> None:
        self.services = services
        #: Requests for one size, with or without a class, as most requests are.
        self._reused: dict[object, LeaseRequest] = {}

    def parse(self, sms: Size, options: LeaseOptions) -> LeaseRequest:
        """Parse a request for one partition. Equal size and class give the same object.

        Raises:
            InvalidSize, InvalidRequest: A value can never be right.
        """
        key: object = sms
        if options:
            service = options.get("service")
            key = (sms, service) if len(options) == 1 and type(service) is str else None
        if key is None or type(sms) is not int:  # True is not a size
            return self.parse_many((sms,), **options)
        request = self._reused.get(key)
        if request is None:
            may_keep = len(self._reused) < MAX_REUSED
            request = self.parse_many((sms,), is_reused=may_keep, **options)
            if may_keep:
                self._reused[key] = request
        return request

    def parse_many(
        self,
        sizes: tuple[Size, ...],
        *,
        device: int | None = None,
        service: str | None = None,
        deadline: float | None = None,
        duration: Duration | None = None,
        near: Buffer | None = None,
        is_reused: bool = False,
        **unknown: object,
    ) -> LeaseRequest:
        """Parse a request for several partitions. Raises as `parse`, or TypeError."""
        if unknown:
            raise TypeError(
                f"a request has no option {next(iter(unknown))!r}: give device, service, deadline, "
                "duration or near; to limit how long the caller waits, use asyncio.timeout"
            )
        if device is not None and not is_count(device):
            raise InvalidRequest(f"device={device!r}: give the ordinal of a device, such as 0")
        parts = parse_sizes(sizes)
        if service is not None:
            self._check_known(service)
            parts = self._with_sizes_of(service, parts, sizes)
        if near is not None and not isinstance(near, Buffer):
            raise InvalidRequest(f"near={near!r}: give a Buffer, whose device is preferred")
        return LeaseRequest(
            parts=parts,
            sizes=sizes,
            device=device,
            service=service or "",
            deadline=checked_deadline(deadline),
            duration=checked_duration(duration),
            near=None if near is None else near.device_id,
            is_reused=is_reused,
        )

    def check_observed(self, service: object, latency: object, count: object) -> None:
        """Check the arguments of `Pool.observe`.

        Raises:
            InvalidRequest: An unknown class, or a value that is not a latency or a count.
        """
        self._check_known(service)
        if not 0 <= as_float(latency) < math.inf:
            raise InvalidRequest(f"latency={latency!r}: give seconds, at least 0")
        if type(count) is not int or not 1 <= count <= MAX_COUNT:
            raise InvalidRequest(
                f"count={count!r}: give how many requests had it, from 1 to {MAX_COUNT}"
            )

    def _with_sizes_of(
        self, service: str, parts: tuple[SizeRange, ...], sizes: tuple[Size, ...]
    ) -> tuple[SizeRange, ...]:
        """Check that a request uses sizes of its class, if there are any. ALL is the largest.

        Raises:
            InvalidRequest: It uses other sizes.
        """
        known = next(
            service_class.sizes for service_class in self.services if service_class.name == service
        )
        if not known:
            return parts
        parts = tuple(part._replace(most=min(part.most, known[-1])) for part in parts)
        if any(part.named or not {part.least, part.most} <= {*known} for part in parts):
            raise InvalidRequest(
                f"sms={', '.join(map(repr, sizes))}: service {service!r} has the sizes {known}: "
                f"ask for one of them, or for a range, such as ({known[0]}, {known[-1]})"
            )
        return parts

    def _check_known(self, service: object) -> None:
        names = [service_class.name for service_class in self.services]
        if not (isinstance(service, str) and service in names):  # an array has no truth value
            known = ", ".join(names) or "none"
            raise InvalidRequest(
                f"unknown service {service!r}: this pool has {known} "
                "(name it in Pool(services=[...]))"
            )


def checked_duration(duration: object) -> Duration | None:
    """Check an expected duration: seconds, or a curve.

    Raises:
        InvalidRequest: It is neither.
    """
    if duration is None:
        return None
    methods = (getattr(duration, method, None) for method in ("at", "observe"))
    if not isinstance(duration, type) and all(map(callable, methods)):
        return duration  # type: ignore[return-value]  # an object with both methods is a curve
    number = as_float(duration)
    if not 0 < number < math.inf:
        raise InvalidRequest(
            f"duration={duration!r}: give seconds, more than 0, or a curve, with `at` and `observe`"
        )
    return number


def checked_deadline(deadline: object) -> float | None:
    """Check a deadline: seconds from now.

    Raises:
        InvalidRequest: It is not a positive number.
    """
    if deadline is None:
        return None
    seconds = as_float(deadline)
    if not seconds > 0:
        raise InvalidRequest(f"deadline={deadline!r}: give the seconds from now, more than 0")
    return seconds


def checked_kernels(prepare: object) -> tuple[Kernel, ...]:
    """Check the kernels of `Pool(prepare=...)`; return each kernel once.

    Raises:
        InvalidRequest: A value is not a kernel.
    """
    kernels = as_tuple(prepare)
    if kernels is None or not all(isinstance(kernel, Kernel) for kernel in kernels):
        raise InvalidRequest(f"prepare={prepare!r}: give kernels, such as [kernels.saxpy]")
    return tuple(dict.fromkeys(kernels))


# -- leases without work --------------------------------------------------------------------------


class LeaseCache:
    """The cached leases of a pool, by request and by the thread of their loop.

    Args:
        lock: The lock of the pool.
    """

    #: Whether it records where each lease is taken.
    notes_places = False

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        self._idle: dict[object, list[Lease]] = {}
        #: Whether the pool is open; otherwise no lease enters.
        self._is_open = False
        #: The scheduler, which suspends and resumes the grant of each cached lease.
        self._scheduler: Scheduler
        self._time: Callable[[], float]

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def open_locked(self, scheduler: Scheduler, time: Callable[[], float]) -> None:
        """Begin to keep leases. `time` returns the scheduler's time in seconds."""
        self._is_open, self._scheduler, self._time = True, scheduler, time

    def set_open_locked(self, is_open: bool) -> None:
        """Set whether leases are kept. Before False, the scheduler must have reclaimed all."""
        self._is_open = is_open

    def forked(self, lock: RLock) -> None:
        """Forget every lease, in a forked child, without a lock that the parent may have held."""
        self._lock, self._is_open = lock, False
        self.clear_locked()

    def take(self, request: LeaseRequest) -> Lease | None:
        """Take a lease that the running loop cached for an equal request, or return None."""
        idle = self._idle.get((request, get_ident()))
        if not idle:
            return None
        lock = self._lock
        lock.acquire()  # takes half as long as `with`, and a tenth of taking a cached lease
        try:
            if not idle:  # another thread has reclaimed it
                return None
            lease = idle[-1]
            holder = lease.poller.loop.current_holder()
            if holder is None:  # the leases belong to an earlier loop of this thread
                return None
            self._scheduler.resume(self._time(), lease.grant, holder)
            return idle.pop()
        finally:
            lock.release()

    def put(self, lease: Lease) -> bool:
        """Keep an open lease without work. Return False if it must end instead."""
        key = lease.cache_key
        if key is None:
            return False
        lock = self._lock
        lock.acquire()  # as in `take`
        try:
            if not (self._is_open and self._scheduler.suspend(self._time(), lease.grant)):
                return False
            self._idle.setdefault(key, []).append(lease)
            return True
        finally:
            lock.release()

    def clear_locked(self) -> list[Lease]:
        """Remove and return all leases. The scheduler has reclaimed their cells."""
        leases = [lease for idle in self._idle.values() for lease in idle]
        for idle in self._idle.values():
            idle.clear()  # in place, because `take` may be about to read it
        self._idle.clear()
        return leases


class PlacingLeaseCache(LeaseCache):
    """A lease cache that records where each lease is taken; see `holders`."""

    notes_places = True

    def take(self, request: LeaseRequest) -> Lease | None:
        lease = super().take(request)
        if lease is not None:
            lease.taken_at = place()
        return lease


# -- waiting for a grant ---------------------------------------------------------------------------


class GrantWaiter:
    """One task's wait for its queued request. It is the `owner` of the request.

    The thread that grants or refuses the request calls `notify` or `refuse`; the loop of the task
    wakes it.

    Args:
        request: A queued request that no other thread knows yet.
        poller: The poller of the running loop.
    """

    __slots__ = ("_poller", "_request", "error", "loop", "waiter")

    def __init__(self, request: Request, poller: CompletionPoller) -> None:
        self._poller = poller
        self._request = request
        self.loop = poller.loop
        self.waiter = poller.loop.create_waiter()
        #: Why it is not granted.
        self.error: Exception | None = None
        request.owner = self

    async def wait(self) -> None:
        """Wait until the request is granted. If it is refused, raise the reason."""
        self._poller.request_queued(self._request.deadline)
        try:
            await self.waiter
        finally:
            self._poller.waiting -= 1
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Remove the reference from the request, which may stay in a queue for a while.

        Otherwise the request would keep the task and its return value alive.
        """
        self._request.owner = self._request.holder = None


def notify(request: Request) -> bool:
    """Wake the task that waits for a request, if one does; return False if its loop is closed.

    From any thread.
    """
    owner = request.owner
    return not isinstance(owner, GrantWaiter) or owner.loop.wake_threadsafe(owner.waiter)


def refuse(request: Request, error: Exception) -> None:
    """Wake the task that waits for a request, if one does, with the reason of its refusal."""
    if isinstance(request.owner, GrantWaiter):
        request.owner.error = error
        notify(request)


def is_orphaned(request: Request) -> bool:
    """Say whether the loop of the task that waited for a request is closed."""
    return isinstance(request.owner, GrantWaiter) and request.owner.loop.is_closed
