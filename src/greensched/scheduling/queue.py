"""The queue: which requests wait, in lines of equal requests, and which is first.

Requests enter by `RequestQueue.add`. Granted, cancelled, expired and rejected requests leave by
`remove`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from greensched.errors import InvalidRequest
from greensched.scheduling.cells import DeviceCells
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.deadline_ledger import PackedWork, Packing
from greensched.scheduling.fair_queueing import VirtualTime
from greensched.scheduling.policy import Deadline, GuardedPolicy
from greensched.scheduling.request_line import LazyHeap, RequestLine, deadline_key
from greensched.scheduling.requests import QUEUED, Request, by_order

#: The position of a line's first request: the rank of its class, if the policy has one, its own
#: rank and order, and the request. Orders are distinct, so requests are never compared.
Place = tuple[Any, ...]


class Reservation(NamedTuple):
    """The first request of the queue once it has aged, and the device that is kept for it."""

    request: Request
    device: int


class RequestQueue:
    """Queued requests, in lines.

    Args:
        policy: The policy that orders them.
        virtual_time: The charges of the classes.
        devices: The cells of each device.
    """

    def __init__(
        self, policy: GuardedPolicy, virtual_time: VirtualTime, devices: Sequence[DeviceCells]
    ) -> None:
        self.waiting = 0
        #: The number of requests that have arrived, which is the order of the next one.
        self.arrivals = 0
        #: When the queue last became non-empty.
        self.busy_since = 0.0
        self.lines: dict[tuple[object, ...], RequestLine] = {}
        self.reservation: Reservation | None = None
        #: Measures work against what fits on the devices.
        self.packing = Packing(devices)
        #: The work by due time for each priority, if the policy uses it, and the bucket of each
        #: request in it.
        self.ledgers: dict[float, PackedWork] = {}
        self._buckets: dict[Request, int] = {}
        #: By priority and SMs: the number of queued requests, and their expected seconds.
        self._work: dict[tuple[float, int], tuple[int, float]] = {}
        self._deadlines = LazyHeap(deadline_key)
        self._virtual_time = virtual_time
        self.set_policy(policy)

    def set_policy(self, policy: GuardedPolicy) -> None:
        """Use another policy. The caller then calls `requeue` if requests wait."""
        self.policy = policy
        #: Late requests go behind others: only the built-in policy is known to rank them so.
        self.puts_late_behind = type(policy.policy) is Deadline
        self.ledgers.clear()
        self._buckets.clear()

    def requeue(self) -> None:
        """Remove all requests from their lines, for `put_in_line`."""
        self.lines.clear()

    def add(self, request: Request, line: RequestLine) -> None:
        """Queue a request.

        Args:
            request: The request.
            line: The line with its `line_key`, or a new one.

        Raises:
            InvalidRequest: The policy failed to rank the request; nothing has changed.
        """
        rank = self.policy.rank(request)
        state = request.class_state
        if not self.waiting:
            self.busy_since = request.arrived
        if not state.waiting:
            state.finish = self._virtual_time.start_of(state)
        self.waiting += 1
        state.waiting += 1
        known = request.duration is not None
        seconds = request.seconds(line.asked) if known else state.mean_duration
        if seconds:
            request.work = seconds
            self._count_work(request, line.asked, 1)
        if request.deadline is not None:
            self._deadlines.push(request)
        self.put_in_line(request, line, rank)

    def put_in_line(self, request: Request, line: RequestLine, rank: tuple[float, ...]) -> None:
        """Put a queued request into its line."""
        if not line:
            self.lines[request.line_key] = line
        line.add(request, rank)
        if self.policy.by_deadline and request.due is not None:
            ledger = self.ledgers.get(request.priority)
            if ledger is None:
                ledger = self.ledgers[request.priority] = PackedWork(self.packing)
            ledger.advance(request.arrived)
            self._buckets[request] = ledger.add(request.due, line.asked, request.work)

    def put_behind(self, first: Request) -> None:
        """Put a line's first request, which is late, after the requests that may be in time."""
        line = first.line
        assert isinstance(line, RequestLine)
        line.pop_first()
        self._forget_due(first)
        first.due = None
        if self.is_reserved_for(first):
            self.reservation = None
        line.add(first, self.policy.rank(first))

    def _forget_due(self, request: Request) -> None:
        bucket = self._buckets.pop(request, None)
        if bucket is not None:
            ledger = self.ledgers[request.priority]
            ledger.remove(bucket, request.line.asked, request.work)

    def _count_work(self, request: Request, sms: int, change: int) -> None:
        key = request.priority, sms
        number, seconds = self._work.get(key, (0, 0.0))
        if number + change:
            self._work[key] = number + change, seconds + change * request.work
        else:  # exactly 0, without rounding errors
            del self._work[key]

    def work_before(self, priority: float, *, is_equal: bool) -> list[float]:
        """Return the queued work of higher priority and, with `is_equal`, of equal priority.

        It is in device-seconds, by each measure of `Packing`.
        """
        return self.packing.work(
            (sms, seconds)
            for (other, sms), (_, seconds) in self._work.items()
            if other > priority or (is_equal and other == priority)
        )

    def remove(self, request: Request) -> bool:
        """Remove a request whose state has already changed.

        Returns:
            Whether this was the last waiting request of a class with free reserved cells, so that
            these can be lent.
        """
        state = request.class_state
        if request.line.discard(request):
            key = request.line_key
            if self.lines.get(key) is request.line:  # not so after a `requeue`
                del self.lines[key]
        if request.deadline is not None:
            self._deadlines.discard(request)
        self._forget_due(request)
        if request.work:
            self._count_work(request, request.line.asked, -1)
        if self.reservation is not None and self.reservation.request is request:
            self.reservation = None
        self.waiting -= 1
        state.waiting -= 1
        if state.waiting:
            return False
        return state.reserved_free > 0

    def close(self) -> list[RequestLine]:
        """Empty the queue immediately, however many requests wait; return its lines.

        Their requests are still marked as queued, but no longer counted.
        """
        lines = list(self.lines.values())
        self.lines.clear()
        for line in lines:
            line.is_closed = True
            line.class_state.waiting = 0
        self.waiting, self.reservation = 0, None
        self._deadlines = LazyHeap(deadline_key)
        self._buckets.clear()
        self.ledgers.clear()
        self._work.clear()
        return lines

    def is_reserved_for(self, request: Request) -> bool:
        """Say whether a device is kept for a request."""
        return self.reservation is not None and self.reservation.request is request

    def only_line(self) -> RequestLine | None:
        """Return the line in which all requests wait; None if there are several or none."""
        if len(self.lines) != 1:
            return None
        return next(iter(self.lines.values()))

    def firsts(self) -> list[Request]:
        """Return the first request of each line."""
        firsts = [line.first() for line in self.lines.values()]
        return [request for request in firsts if request is not None]

    def place(self, first: Request) -> Place:
        """Return the present position of a line's first request."""
        if self.policy.class_rank is None:
            return first.rank, first.order, first
        return self.class_rank(first.class_state), first.rank, first.order, first

    def class_rank(self, state: ClassState) -> tuple[float, ...]:
        """Return the rank of a class, if the policy ranks classes."""
        if self.policy.class_rank is None:
            return ()
        state.tag = self._virtual_time.start_of(state)
        return self.policy.class_rank(state)

    def queued(self) -> list[Request]:
        """Return all queued requests in the order of arrival."""
        requests = [request for line in self.lines.values() for request in line.queued()]
        return sorted(requests, key=by_order)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a queued request."""
        first = self._deadlines.first()
        return None if first is None else first.deadline

    def late_at(self) -> float | None:
        """Return when a request becomes late, by a policy that puts it behind others then."""
        if not self.puts_late_behind:
            return None
        return min([first.due for first in self.firsts() if first.due is not None], default=None)

    def expired(self, now: float) -> Request | None:
        """Return a queued request whose deadline has passed, or None."""
        first = self._deadlines.first()
        if first is None or first.deadline is None or first.deadline > now:
            return None
        assert first.state is QUEUED
        return first


def validate_bound(max_waiting: object) -> int:
    """Check and return the bound of a queue.

    Raises:
        InvalidRequest: Not a whole number of at least 0.
    """
    if type(max_waiting) is not int or max_waiting < 0:
        raise InvalidRequest(f"max_waiting={max_waiting!r}: give a whole number, at least 0")
    return max_waiting
