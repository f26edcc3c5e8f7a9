"""The queue's bookkeeping: nothing takes long, however many leave at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched.scheduling.cells import DeviceCells, parse_sizes
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.policy import Deadline, Fifo, RequestView
from greensched.scheduling.request_line import STALE_LEAST, LazyHeap
from greensched.scheduling.requests import GrantState, Request, by_rank
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import DEFAULT_CLASS, ServiceClass
from greensched.typing import ALL


def rank_of(request: Request) -> tuple[float, ...]:
    return request.rank


def ranked(order: int, rank: float) -> Request:
    request = Request(ClassState(DEFAULT_CLASS), (), (), 0, 0.0, order)
    request.rank = (rank,)
    return request


@given(
    steps=st.lists(
        st.one_of(
            st.integers(0, 4), st.sampled_from(["first", "served", "left", "many left", "again"])
        ),
        max_size=60,
    ),
    data=st.data(),
)
def test_the_first_has_the_smallest_rank(steps: list[Any], data: st.DataObject) -> None:
    """Whatever arrives, leaves or is served: the first queued request is by rank and order."""
    heap, waiting, left, order = LazyHeap(rank_of), list[Request](), list[Request](), 0
    for step in steps:
        leaving = 0
        if isinstance(step, int):
            for _ in range(1 + step * 20):
                waiting.append(ranked(order, float(step)))
                heap.push(waiting[-1])
                order += 1
        elif step == "again":  # what has left is queued again, as another request
            for request in left[:3]:
                request.state, request.order, request.rank = GrantState.QUEUED, order, (2.0,)
                waiting.append(request)
                heap.push(request)
                order += 1
            del left[:3]
        elif step == "many left":
            leaving = 2 * len(waiting) // 3
        elif waiting and step != "first":
            leaving = 1
        for _ in range(leaving):
            waiting.sort(key=by_rank)
            gone = waiting.pop(
                0 if step == "served" else data.draw(st.integers(0, 3)) % len(waiting)
            )
            gone.state = GrantState.GONE
            left.append(gone)
            assert heap.discard(gone) is (not waiting)
        assert len(waiting) <= len(heap) <= 2 * len(waiting) + STALE_LEAST
        if step == "first" or data.draw(st.booleans()):
            assert heap.first() is min(waiting, key=by_rank, default=None)
            assert sorted(heap.queued(), key=by_rank) == sorted(waiting, key=by_rank)


@pytest.mark.fault("B7")
@pytest.mark.white_box
def test_a_mass_cancellation_rebuilds_rarely() -> None:
    """20,000 cancellations rebuild each heap a few times, and all are forgotten."""
    scheduler = Scheduler([DeviceCells(size=8, count=4)], Fifo(), 10**6)
    scheduler.request(0.0, parse_sizes((ALL,)))
    waiting = [scheduler.request(0.0, parse_sizes((8,)), deadline=9.0) for _ in range(20_000)]
    random.Random(1).shuffle(waiting)
    (line,) = scheduler.queue.lines.values()
    rebuilt = 0
    for number, request in enumerate(waiting, 1):
        before = len(line)
        scheduler.cancel(1.0, request)
        rebuilt += before - len(line) > 1
        assert scheduler.waiting == len(waiting) - number
    assert rebuilt < 20
    assert len(line) == len(scheduler.queue._deadlines) == 0
    assert scheduler.queue.lines == {}


@pytest.mark.fault("S3")
def test_what_asks_again_has_no_deadline_of_before() -> None:
    """A request overtook one with an earlier deadline; idle, it asks again beside a third."""
    scheduler = Scheduler([DeviceCells(size=8, count=2)], Fifo(), 1000)
    one, _ = (scheduler.request(0.0, parse_sizes((8,))).grants[0] for _ in range(2))
    first = scheduler.request(0.0, parse_sizes((ALL,)), deadline=5.0)
    second = scheduler.request(0.0, parse_sizes((8,)), deadline=9.0)
    third = scheduler.request(0.0, parse_sizes((ALL,)), deadline=8.0)
    scheduler.release(one)
    assert scheduler.drained(0.001, one) == [second]
    scheduler.cancel(0.002, first)
    (grant,) = second.grants
    scheduler.release(grant)
    assert scheduler.drained(0.003, grant) == []
    assert scheduler.ask_again(0.004, grant) == [second]
    assert scheduler.queue.next_deadline() == third.deadline


class Newest:
    """Rank the newest first; a device is kept at once for the first that does not fit."""

    def rank(self, request: RequestView) -> tuple[float, ...]:
        return (-request.order,)

    def may_overtake(self, first: RequestView, now: float) -> bool:
        return False


def test_a_request_granted_behind_a_newer_one_is_forgotten() -> None:
    """The request with a kept device is granted although it is no longer first in its line."""
    scheduler = Scheduler([DeviceCells(size=8, count=1)], Newest(), 1000)
    (held,) = scheduler.request(0.0, parse_sizes((8,))).grants
    scheduler.request(0.0, parse_sizes((8,)))
    for _ in range(1000):
        scheduler.request(1.0, parse_sizes((8,)))
        (granted,) = scheduler.drained(1.0, held)
        (held,) = granted.grants
    assert scheduler.waiting == 1
    assert sum(map(len, scheduler.queue.lines.values())) <= 2 * scheduler.waiting + STALE_LEAST


def test_requests_by_deadline_leave_the_ledger() -> None:
    """A granted, cancelled or expired request no longer counts as work to be done."""
    services = [ServiceClass("a", latency=1.0, on_late="best_effort")]
    scheduler = Scheduler([DeviceCells(size=8, count=4)], Deadline(), 1000, services=services)
    whole = scheduler.request(0.0, parse_sizes((ALL,)))
    waiting = [
        scheduler.request(
            0.0, parse_sizes((8,)), service="a", duration=0.01, deadline=0.1 * (i % 9 + 1)
        )
        for i in range(90)
    ]
    ledger = scheduler.queue.ledgers[0]
    assert max(ledger.due_by(5.0)) > 0
    scheduler.tick(0.45)
    for request in waiting[::2]:
        scheduler.cancel(0.5, request)
    granted = scheduler.drained(0.5, whole.grants[0])
    while granted:
        granted += scheduler.drained(0.6, granted.pop().grants[0])
    assert scheduler.waiting == 0
    assert scheduler.queue._buckets == {}
    assert scheduler.queue._work == {}
    ledger.advance(0.6)
    assert max(map(abs, ledger.due_by(5.0))) < 1e-9


def test_a_request_that_leaves_ends_no_reservation_of_another() -> None:
    """The device that is kept for the first request stays kept when a later one is cancelled."""
    scheduler = Scheduler([DeviceCells(size=8, count=4)], Fifo(), 100)
    scheduler.request(0.0, parse_sizes((16,)))
    scheduler.request(0.0, parse_sizes((ALL,)))
    later = scheduler.request(1000.0, parse_sizes((24,)))
    kept = scheduler.queue.reservation
    assert kept is not None
    assert scheduler.cancel(1000.0, later) == []
    assert scheduler.queue.reservation is kept


@pytest.mark.parametrize("policy", [Fifo(), Deadline()])
def test_a_closed_queue_counts_nothing_of_what_waited(policy: Fifo | Deadline) -> None:
    """Requests of a closed queue do not expire, cancel twice, or delay later requests."""
    classes = (ServiceClass("quick", latency=0.1),)
    scheduler = Scheduler([DeviceCells(size=8, count=4)], policy, 100, services=classes)
    scheduler.request(0.0, parse_sizes((ALL,)))
    options: dict[str, Any] = {"service": "quick", "duration": 0.06}
    waits = scheduler.request(0.0, parse_sizes((ALL,)), deadline=0.08, **options)
    left = scheduler.close()
    assert scheduler.queued() == []
    assert scheduler.services(0.0)["quick"].waiting == 0
    assert scheduler.next_deadline() is None
    assert scheduler.tick(0.08) == ([], [])
    assert scheduler.cancel(0.0, waits) == []
    assert list(left) == []
    found = scheduler.statistics()
    assert (found.waiting, found.cancelled, found.expired) == (0, 1, 0)
    again = scheduler.request(0.0, parse_sizes((ALL,)), **options)
    assert again.state is GrantState.QUEUED
