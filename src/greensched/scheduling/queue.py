"""The queue: which requests wait, in lines of requests that want the same, and which is first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from greensched.errors import InvalidRequest
from greensched.scheduling.cells import DeviceCells
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.deadline_ledger import PackedWork
from greensched.scheduling.fair_queueing import VirtualTime
from greensched.scheduling.policy import GuardedPolicy
from greensched.scheduling.request_line import LazyHeap, RequestLine, deadline_key
from greensched.scheduling.requests import QUEUED, Request, by_order

#: Where the first of a line stands in the queue: the rank of its class, if the policy has one, its
#: own rank and order, and the request. Orders differ, so requests are never compared.
Place = tuple[Any, ...]


class Reservation(NamedTuple):
    """The first request of the queue once it has aged, and the device that is kept for it."""

    request: Request
    device: int


class RequestQueue:
    """Queued requests, by line.

    Args:
        policy: their order.
        virtual_time: what the classes were charged.
        devices: the cells of each device.
    """

    def __init__(
        self, policy: GuardedPolicy, virtual_time: VirtualTime, devices: Sequence[DeviceCells]
    ) -> None:
        self.waiting = 0
        #: When the queue was last empty before it was not.
        self.busy_since = 0.0
        self.lines: dict[tuple[object, ...], RequestLine] = {}
        self.reservation: Reservation | None = None
        #: What is due when, where the policy goes by that, and the bucket of each request in it.
        self.ledger: PackedWork | None = None
        self._buckets: dict[Request, int] = {}
        self._deadlines = LazyHeap(deadline_key)
        self._virtual_time = virtual_time
        self._devices = devices
        self.set_policy(policy)

    def set_policy(self, policy: GuardedPolicy) -> None:
        """Order by another policy; `requeue` follows if requests wait."""
        self.policy = policy
        self.ledger = PackedWork(self._devices) if policy.by_deadline else None
        self._buckets.clear()

    def requeue(self) -> None:
        """Take all requests out of their lines, to be put in line again by `put_in_line`."""
        self.lines.clear()

    def add(self, request: Request, line: RequestLine) -> None:
        """Queue a request.

        Args:
            request: the request.
            line: the line of its `line_key`, or a new one if there is none.

        Raises:
            InvalidRequest: the policy failed to rank the request; nothing has changed.
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
            request.work = work = line.asked * seconds
            state.queued_work += work
        if request.deadline is not None:
            self._deadlines.push(request)
        self.put_in_line(request, line, rank)

    def put_in_line(self, request: Request, line: RequestLine, rank: tuple[float, ...]) -> None:
        """Put a queued request in its line."""
        if not line:
            self.lines[request.line_key] = line
        line.add(request, rank)
        if self.ledger is not None and request.due is not None:
            self.ledger.advance(request.arrived)
            asked = request.line.asked
            seconds = request.work / asked
            self._buckets[request] = self.ledger.add(request.due, asked, seconds)

    def remove(self, request: Request) -> bool:
        """Remove a request, whose state has changed already.

        Returns:
            Whether no request of a class with free reserved cells waits any more: they can be lent.
        """
        state = request.class_state
        if request.line.discard(request):
            key = request.line_key
            if self.lines.get(key) is request.line:  # not after a `requeue`
                del self.lines[key]
        if request.deadline is not None:
            self._deadlines.discard(request)
        if self._buckets and request in self._buckets and self.ledger is not None:
            asked = request.line.asked
            self.ledger.remove(self._buckets.pop(request), asked, request.work / asked)
        if self.reservation is not None and self.reservation.request is request:
            self.reservation = None
        self.waiting -= 1
        state.waiting -= 1
        state.queued_work -= request.work
        if state.waiting:
            return False
        state.queued_work = 0.0
        return state.reserved_free > 0

    def is_reserved_for(self, request: Request) -> bool:
        """Return whether a device is kept for a request."""
        return self.reservation is not None and self.reservation.request is request

    def only_line(self) -> RequestLine | None:
        """Return the line that all requests wait in; None: there are several, or none."""
        if len(self.lines) != 1:
            return None
        return next(iter(self.lines.values()))

    def firsts(self) -> list[Request]:
        """Return the first request of each line."""
        found = [line.first() for line in self.lines.values()]
        return [request for request in found if request is not None]

    def place(self, first: Request) -> Place:
        """Return where the first request of a line stands now."""
        if self.policy.class_rank is None:
            return first.rank, first.order, first
        return self.class_rank(first.class_state), first.rank, first.order, first

    def class_rank(self, state: ClassState) -> tuple[float, ...]:
        """Return the rank of a class, by a policy that has one."""
        if self.policy.class_rank is None:
            return ()
        state.tag = self._virtual_time.start_of(state)
        return self.policy.class_rank(state)

    def queued(self) -> list[Request]:
        """Return all queued requests, in the order of their arrival."""
        found = [request for line in self.lines.values() for request in line.queued()]
        return sorted(found, key=by_order)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a queued request."""
        first = self._deadlines.first()
        return None if first is None else first.deadline

    def expired(self, now: float) -> Request | None:
        """Return a queued request whose deadline has passed."""
        first = self._deadlines.first()
        if first is None or first.deadline is None or first.deadline > now:
            return None
        assert first.state is QUEUED
        return first


def validate_bound(max_waiting: object) -> int:
    """Return the bound of a queue, checked.

    Raises:
        InvalidRequest: not a whole number, at least 0.
    """
    if type(max_waiting) is not int or max_waiting < 0:
        raise InvalidRequest(f"max_waiting={max_waiting!r}: give a whole number, at least 0")
    return max_waiting
