"""Who waits, in lines: the queue of the scheduler.

Requests that left stay in their line until they come to its head, or outnumber those that wait:
so a mass cancellation is linear, and nothing grows with the number of past requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from greensched.errors import InvalidRequest
from greensched.scheduling.admission import DeadlineLedger
from greensched.scheduling.class_state import SMOOTHING, ClassState
from greensched.scheduling.policies import Deadline, Order, guard
from greensched.scheduling.policy import SizingView
from greensched.scheduling.requests import GONE, LazyHeap, Request, RequestLine, by_rank

#: So many more entries than twice those that wait are kept before anybody tidies up.
STALE_LEAST: Final = 64
#: Entries looked at in one call, for those that left: a fraction of a millisecond.
SWEEP = 2048

#: The first of a line behind its rank and order, and before these where its class stands, if the
#: policy says so. Orders differ, so requests are never compared.
Head = tuple[Any, ...]


class RequestQueue:
    """Requests that wait, by class and wish.

    Args:
        policy: their order.
        start_of: where the next grant of a class starts in virtual time.
        sms: SMs there are in all.
    """

    def __init__(self, policy: Order, start_of: Callable[[ClassState], float], sms: int) -> None:
        self.waiting = 0
        self._start_of = start_of
        self._sms = sms
        self._lines: dict[tuple[object, ...], RequestLine] = {}
        self._deadlines = LazyHeap(by_deadline=True)
        #: What is being swept of those that left.
        self._sweeping: list[LazyHeap] = []
        #: The first of the queue once it has aged, and the device that is kept for it.
        self._reserved: tuple[Request, int] | None = None
        self._cancelled = 0
        #: When the queue last moved, and the mean time between its moves.
        self._moved = 0.0
        self._interval = 0.0
        #: Entries in the lines, those included that left, and are to be swept out.
        self._entries = 0
        #: Somebody may be granted because a class with a floor waits no more.
        self._is_unlocked = False
        #: What is due when, where the policy goes by that; and the bucket of each request in it.
        self._agenda: DeadlineLedger | None = None
        self._agreed: dict[Request, int] = {}
        self._set_policy(policy)

    def _set_policy(self, policy: Order) -> None:
        self.policy = policy
        self._order = guard(policy)
        to_ask: Any = self._order
        self._class_ranks: Callable[[Any], tuple[float, ...]] | None = None
        self._size: Callable[[Any, SizingView], tuple[int, int]] | None = None
        if hasattr(policy, "class_rank"):
            self._class_ranks = to_ask.class_rank
        if hasattr(policy, "size"):
            self._size = to_ask.size
        by_due = isinstance(policy, Deadline)
        self._agenda = DeadlineLedger(self._sms) if by_due else None
        self._agreed.clear()

    def _queue(self, request: Request, line: RequestLine) -> None:
        rank = self._order.rank(request)
        flow = request.flow
        if not self.waiting:
            self._moved = request.arrived
        if not flow.waiting:
            flow.moved = request.arrived
            flow.finish = self._start_of(flow)
        self.waiting += 1
        flow.waiting += 1
        seconds = flow.mean if request.duration is None else request.seconds(line.asked)
        if seconds:
            request.work = work = line.asked * seconds
            flow.work += work
        if request.deadline is not None:
            self._deadlines.push(request)
        self._stand_in_line(request, line, rank)

    def _stand_in_line(self, request: Request, line: RequestLine, rank: tuple[float, ...]) -> None:
        """Behind whoever wants the same: `line` is theirs, or a new one if there are none."""
        if not line:
            self._lines[request.wish] = line
        line.add(request, rank)
        self._entries += 1
        if self._agenda is not None and request.due is not None:
            self._agenda.advance(request.arrived)
            self._agreed[request] = self._agenda.add(request.due, request.work)

    def _advance(self, request: Request, now: float) -> None:
        """Somebody who waited is granted: the queue moves."""
        flow = request.flow
        self._interval += SMOOTHING * (now - self._moved - self._interval)
        flow.interval += SMOOTHING * (now - flow.moved - flow.interval)
        self._moved = flow.moved = now
        if request.deadline is None and request.line.begins_with(request):
            self._entries -= 1  # the line drops it at the next look, and nobody else has it
        self._drop(request)

    def _leave(self, request: Request) -> bool:
        """Somebody stops waiting; true if others may be granted because of it."""
        request.state = GONE
        self._is_unlocked = False
        kept = self._drop(request)
        if self._is_untidy():
            self._tidy()
        return kept or self._is_unlocked

    def _drop(self, request: Request) -> bool:
        """Takes a request out of the queue; its line forgets it when it comes to its head."""
        flow = request.flow
        self.waiting -= 1
        flow.waiting -= 1
        flow.work -= request.work
        if not flow.waiting:
            flow.work = 0.0
            self._is_unlocked = self._is_unlocked or flow.kept > 0
        if self._agreed and request in self._agreed and self._agenda is not None:
            self._agenda.remove(self._agreed.pop(request), request.work)
        if self._reserved is None or self._reserved[0] is not request:
            return False
        self._reserved = None
        return True

    def _is_untidy(self) -> bool:
        """Whether those that left outnumber those that wait."""
        return not self.waiting or self._entries > 2 * self.waiting + STALE_LEAST

    def _tidy(self) -> None:
        """Forgets some of those that left; all of them, in as many calls as it takes."""
        if not self.waiting:
            self._lines.clear()
            self._deadlines = LazyHeap(by_deadline=True)
            self._sweeping.clear()
            self._entries = 0
            return
        if not self._sweeping:
            self._sweeping = [self._deadlines, *self._lines.values()]
        budget = SWEEP
        while self._sweeping and budget:
            budget = self._sweeping[-1].sweep(budget)
            if budget:
                self._sweeping.pop()
        if not self._sweeping:
            self._lines = {key: line for key, line in self._lines.items() if line}
            self._entries = sum(map(len, self._lines.values()))

    def _only_line(self) -> RequestLine:
        for line in self._lines.values():  # compiled, the shortest way to it
            return line
        raise AssertionError("nobody waits")

    # -- who is first --------------------------------------------------------------------------

    def _firsts(self) -> list[Request]:
        """The first of each line; forgets lines in which nobody waits."""
        firsts, empty = [], []
        for key, line in self._lines.items():
            first = line.first()
            if first is None:
                empty.append(key)
            else:
                firsts.append(first)
        for key in empty:
            del self._lines[key]
        return firsts

    def _head(self, first: Request) -> Head:
        if self._class_ranks is None:
            return first.rank, first.order, first
        return self._class_rank(first.flow), first.rank, first.order, first

    def _class_rank(self, flow: ClassState) -> tuple[float, ...]:
        """Where a class stands, by a policy that says so."""
        if self._class_ranks is None:
            return ()
        flow.tag = self._start_of(flow)
        rank: tuple[float, ...] = self._class_ranks(flow)
        return rank

    # -- for everybody ---------------------------------------------------------------------------

    def queued(self) -> list[Request]:
        """All that wait, in the order in which they came."""
        waiting = [r for line in self._lines.values() for r in line.waiting()]
        return sorted(waiting, key=lambda r: r.order)

    def close(self) -> list[Request]:
        """Empties the queue; returns who waited."""
        waited = sorted(self.queued(), key=by_rank)
        for request in waited:
            self._cancelled += 1
            self._leave(request)
        return waited

    def retry_after(self, flow: ClassState | None = None) -> float:
        """Seconds until there may be room in the queue, from how fast it moved of late."""
        return max(0.001, self._interval if flow is None else flow.interval)


def validate_bound(max_waiting: object) -> int:
    """The queue's bound, checked."""
    if type(max_waiting) is not int or max_waiting < 0:
        raise InvalidRequest(f"max_waiting={max_waiting!r} is no whole number >= 0")
    return max_waiting
