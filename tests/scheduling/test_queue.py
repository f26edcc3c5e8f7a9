"""The queue's bookkeeping: nothing takes long, however many leave at once."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from greensched.scheduling.cells import DeviceCells, parse_sizes
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.policies import Deadline, Fifo
from greensched.scheduling.policy import RequestView
from greensched.scheduling.queue import STALE_LEAST, SWEEP
from greensched.scheduling.requests import GrantState, LazyHeap, Request, by_rank
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ANYBODY, ServiceClass
from greensched.typing import ALL


def ranked(order: int) -> Request:
    request = Request(ClassState(ANYBODY), (), (), 0, 0.0, order)
    request.rank = (float(order % 7),)
    return request


def test_sweeping_in_parts_is_sweeping_at_once() -> None:
    """What still waits stays, in its order, also what came and what left meanwhile."""
    rng = random.Random(1)
    entries, waiting = LazyHeap(), {}
    for order in range(500):
        entries.push(waiting.setdefault(order, ranked(order)))
    for order in rng.sample(range(500), 300):
        waiting.pop(order).state = GrantState.GONE
    new = 500
    while not entries.sweep(17):
        entries.push(waiting.setdefault(new, ranked(new)))
        waiting.pop(rng.choice(list(waiting))).state = GrantState.GONE
        new += 1
    order = []
    while (first := entries.first()) is not None:
        order.append(first.order)
        first.state = GrantState.GRANTED
    assert order == [request.order for request in sorted(waiting.values(), key=by_rank)]


@given(
    steps=st.lists(
        st.one_of(st.integers(0, 4), st.sampled_from(["first", "served", "left", "swept"])),
        max_size=40,
    ),
    data=st.data(),
)
def test_the_first_is_who_has_the_smallest_rank(steps: list[Any], data: st.DataObject) -> None:
    """Whoever comes, leaves, is served or swept out: the first that waits is by rank and order."""
    entries, waiting = LazyHeap(), list[Request]()
    for order, step in enumerate(steps):
        if isinstance(step, int):
            waiting.append(Request(ClassState(ANYBODY), (), (), 0, 0.0, order))
            waiting[-1].rank = (float(step),)
            entries.push(waiting[-1])
        elif step == "swept":
            entries.sweep(data.draw(st.integers(1, 5)))
        elif waiting and step != "first":
            waiting.sort(key=by_rank)
            gone = 0 if step == "served" else data.draw(st.integers(0, len(waiting) - 1))
            waiting.pop(gone).state = GrantState.GONE
        if step == "first" or data.draw(st.booleans()):
            assert entries.first() is min(waiting, key=by_rank, default=None)


def test_no_cancellation_sweeps_for_long() -> None:
    """Each of 20,000 cancellations looks at a bounded number of others, and all are forgotten."""
    scheduler = Scheduler([DeviceCells(size=8, count=4)], Fifo(), 10**6)
    scheduler.request(0.0, parse_sizes((ALL,)))
    waiting = [scheduler.request(0.0, parse_sizes((8,)), deadline=9.0) for _ in range(20_000)]
    random.Random(1).shuffle(waiting)
    (line,) = scheduler._lines.values()
    before = len(line)
    for number, request in enumerate(waiting, 1):
        looked = line._at
        scheduler.cancel(1.0, request)
        assert line._at - looked <= SWEEP
        assert scheduler.waiting == before - number
    assert scheduler._entries == len(scheduler._deadlines) == 0


class Newest:
    """Who came last is next; the first that does not fit is kept a device for, at once."""

    def rank(self, request: RequestView) -> tuple[float, ...]:
        return (-request.order,)

    def may_overtake(self, first: RequestView, now: float) -> bool:
        return False


def test_who_is_granted_behind_a_newcomer_is_forgotten() -> None:
    """Whom a device was kept for is granted where another is the first of his line by now."""
    scheduler = Scheduler([DeviceCells(size=8, count=1)], Newest(), 1000)
    (held,) = scheduler.request(0.0, parse_sizes((8,))).leases
    scheduler.request(0.0, parse_sizes((8,)))
    for _ in range(1000):
        scheduler.request(1.0, parse_sizes((8,)))
        (granted,) = scheduler.drained(1.0, held)
        (held,) = granted.leases
    assert scheduler.waiting == 1
    assert sum(map(len, scheduler._lines.values())) <= 2 * scheduler.waiting + STALE_LEAST


def test_requests_by_deadline_leave_the_agenda() -> None:
    """Whoever is granted, cancelled or expired is no work to be done any more."""
    services = [ServiceClass("a", latency=1.0, on_late="best_effort")]
    scheduler = Scheduler([DeviceCells(size=8, count=4)], Deadline(), 1000, services=services)
    whole = scheduler.request(0.0, parse_sizes((ALL,)))
    waiting = [
        scheduler.request(
            0.0, parse_sizes((8,)), service="a", duration=0.01, deadline=0.1 * (i % 9 + 1)
        )
        for i in range(90)
    ]
    assert scheduler._agenda is not None
    assert scheduler._agenda.due_by(5.0) > 0
    scheduler.tick(0.45)
    for request in waiting[::2]:
        scheduler.cancel(0.5, request)
    granted = scheduler.drained(0.5, whole.leases[0])
    while granted:
        granted += scheduler.drained(0.6, granted.pop().leases[0])
    assert scheduler.waiting == 0
    assert scheduler._agreed == {}
    scheduler._agenda.advance(0.6)
    assert abs(scheduler._agenda.due_by(5.0)) < 1e-9
