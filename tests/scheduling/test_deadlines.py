"""Deadlines, admission, quotas, and the choice of a device."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched.errors import DeadlineExceeded, DeadlineImpossible, QueueFull
from greensched.scheduling.cells import DeviceCells, parse_sizes
from greensched.scheduling.deadline_ledger import BUCKET, BUCKETS, DeadlineLedger, Packing
from greensched.scheduling.policy import Deadline, Fair, Fifo, Policy
from greensched.scheduling.requests import GrantState, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import OnLate, ServiceClass
from greensched.typing import ALL, Size

DEVICE = DeviceCells(size=8, count=4)
SMS = 32


def make(*classes: ServiceClass, policy: Policy | None = None, devices: int = 1) -> Scheduler:
    return Scheduler([DEVICE] * devices, policy or Fifo(), 1000, services=classes)


def ask(scheduler: Scheduler, now: float, sms: Size, service: str = "", **more: object) -> Request:
    return scheduler.request(now, parse_sizes((sms,)), service=service, **more)  # type: ignore[arg-type]


# -- the ledger against a list --------------------------------------------------------------------

WORK = st.tuples(st.integers(0, 900), st.integers(1, 40))


@given(st.lists(WORK, max_size=30), st.lists(WORK, min_size=1, max_size=8), st.data())
def test_the_agenda_is_a_list_of_what_is_due(
    items: list[tuple[int, int]], asked: list[tuple[int, int]], data: st.DataObject
) -> None:
    """The work due by a time, and whether more fits, agree with a sum over all requests."""
    ledger, listed, now = DeadlineLedger(SMS), [], 0.0
    for bucket, work in items:
        due = (bucket + 0.5) * BUCKET
        listed.append((ledger.add(due, float(work) / 50), due, work / 50))
        if data.draw(st.booleans()) and listed:
            place, _, gone = listed.pop(data.draw(st.integers(0, len(listed) - 1)))
            ledger.remove(place, gone)
        now += data.draw(st.sampled_from([0.0, 0.0, 0.003]))
        ledger.advance(now)
    for bucket, work in asked:
        due = (max(bucket, int(now / BUCKET)) + 0.5) * BUCKET
        begin = int(due / BUCKET)
        expected = sum(w for place, _, w in listed if place <= begin)
        assert ledger.due_by(due) == pytest.approx(expected)
        late = {place for place, _, _ in listed if place >= begin}
        slack = [
            SMS * (place * BUCKET - now) - sum(w for p, _, w in listed if p <= place) - work / 50
            for place in late
        ]
        if all(abs(one) > 1e-9 for one in slack):
            assert ledger.has_room(now, due, work / 50) is all(one >= 0 for one in slack)


def test_a_deadline_beyond_all_time_is_one() -> None:
    """A request with a deadline far in the future is accepted, and so is one a second away."""
    scheduler = make(ServiceClass("a", latency=1e307), policy=Deadline())
    held = ask(scheduler, 0.0, ALL)
    waiting = [ask(scheduler, 0.0, 8, "a", duration=0.1, deadline=d) for d in (None, 1.7e308)]
    assert scheduler.drained(1.0, held.grants[0]) == waiting


# -- admission ------------------------------------------------------------------------------------


def test_what_takes_longer_than_its_deadline_is_refused() -> None:
    """A request that would be late even alone is refused, with the time that it needs."""
    scheduler = make()
    with pytest.raises(DeadlineImpossible) as caught:
        ask(scheduler, 5.0, 8, duration=0.2, deadline=5.1)
    assert caught.value.predicted == pytest.approx(0.2)
    assert caught.value.deadline == pytest.approx(0.1)
    assert scheduler.statistics().sms_free == SMS
    assert scheduler.statistics().refused == 1
    assert ask(scheduler, 5.0, 8, duration=0.1, deadline=5.2).state is GrantState.GRANTED


def test_a_request_that_would_wait_too_long_is_refused() -> None:
    """Admission counts the leases in progress and the requests that wait before it."""
    scheduler = make()
    ask(scheduler, 0.0, ALL, duration=0.1)
    ask(scheduler, 0.0, ALL, duration=0.1, deadline=0.25)
    with pytest.raises(DeadlineImpossible) as caught:
        ask(scheduler, 0.0, ALL, duration=0.1, deadline=0.25)
    assert caught.value.predicted == pytest.approx(0.3)
    assert ask(scheduler, 0.0, ALL, duration=0.1, deadline=0.35).state is GrantState.QUEUED


@pytest.mark.parametrize("policy", [Fifo(), Deadline()])
def test_a_declared_duration_that_is_wrong_locks_no_class_out(policy: Policy) -> None:
    """With durations declared 5 times too long, at most 1 % is refused after 100 requests."""
    scheduler = make(ServiceClass("a", latency=0.100), policy=policy)
    refused = []
    for i in range(400):
        try:
            request = ask(scheduler, 0.1 * i, 8, "a", duration=0.150)  # it takes 30 ms
            scheduler.drained(0.1 * i + 0.030, request.grants[0])
        except DeadlineImpossible:
            refused.append(i)
    assert sum(i >= 100 for i in refused) <= 3
    assert len(refused) < 10


def test_a_declared_duration_that_is_right_is_believed() -> None:
    """If leases do take longer than the latency, fewer and fewer probes are admitted."""
    scheduler = make(ServiceClass("a", latency=0.100))
    tried = 0
    for i in range(400):
        try:
            request = ask(scheduler, float(i), 8, "a", duration=0.150)
            tried += 1
            scheduler.drained(i + 0.150, request.grants[0])
        except DeadlineImpossible:
            pass
    assert 1 <= tried <= 6


def overloaded(policy: Policy, seed: int) -> tuple[int, int]:
    """Return how many of the 48-SM requests are admitted at 1.3 times the load, and in time."""
    rng, order = random.Random(seed), itertools.count()
    cells = DeviceCells(size=8, count=16, remainder=4)
    scheduler = Scheduler([cells], policy, 1000, services=[ServiceClass("a", latency=0.060)])
    events: list[tuple[float, int, Request | None]] = []
    at = 0.0
    while (at := at + rng.expovariate(1.3 * 2 / 0.010)) < 3.0:
        heapq.heappush(events, (at, next(order), None))
    admitted = in_time = 0
    while events:
        now, _, done = heapq.heappop(events)
        if done is not None:
            in_time += now <= done.arrived + 0.060 + 1e-9
            granted = scheduler.drained(now, done.grants[0])
        else:
            try:
                granted = [ask(scheduler, now, 48, "a", duration=0.010)]
            except DeadlineImpossible:
                continue
            admitted += 1
        for request in granted:
            if request.grants:
                heapq.heappush(events, (now + 0.010, next(order), request))
    return admitted, in_time


@pytest.mark.parametrize("seed", range(3))
def test_admission_counts_what_packs(seed: int) -> None:
    """For a size that fits twice, admission counts 2 at once and not 132 / 48."""
    admitted, in_time = overloaded(Deadline(), seed)
    assert in_time >= 0.99 * admitted
    assert in_time >= 0.95 * 3.0 * 2 / 0.010, "the device is in use"


@pytest.mark.parametrize("overrun", [0.0, 50.0])
def test_a_lease_that_overruns_makes_no_room(overrun: float) -> None:
    """However late a lease is, waiting requests still count with their whole duration."""
    scheduler = make(ServiceClass("a"), policy=Deadline())
    ask(scheduler, 0.0, ALL, "a", duration=1.0)
    now = 1.0 + overrun
    ask(scheduler, now, ALL, "a", duration=0.1, deadline=now + 0.15)
    with pytest.raises(DeadlineImpossible):  # the first one would be late
        ask(scheduler, now, ALL, "a", duration=0.1, deadline=now + 0.1)


def test_a_queue_in_order_of_arrival_is_measured_by_what_packs() -> None:
    """Two of eight waiting requests run at once, not 2.75: the next would begin at 0.5 s."""
    scheduler = Scheduler([DeviceCells(size=8, count=16, remainder=4)], Fifo(), 100)
    for _ in range(10):
        ask(scheduler, 0.0, 48, duration=0.1)
    with pytest.raises(DeadlineImpossible) as caught:
        ask(scheduler, 0.0, 48, duration=0.1, deadline=0.55)
    assert caught.value.predicted == pytest.approx(0.6)
    assert ask(scheduler, 0.0, 48, duration=0.1, deadline=0.65).state is GrantState.QUEUED


TWO_PRIORITIES = ServiceClass("high", priority=1), ServiceClass("low")


def test_a_higher_class_is_not_refused_for_a_lower_one() -> None:
    """A lower class's deadline does not count, because the higher class goes first."""
    scheduler = make(*TWO_PRIORITIES, policy=Deadline())
    held = ask(scheduler, 0.0, ALL, duration=0.1)
    ask(scheduler, 0.0, ALL, "low", duration=0.1, deadline=0.22)
    high = ask(scheduler, 0.0, ALL, "high", duration=0.05, deadline=0.16)
    assert scheduler.drained(0.1, held.grants[0]) == [high]


def test_a_lower_class_counts_all_that_waits_of_a_higher_one() -> None:
    """Every waiting request of a higher class goes first, whatever its deadline."""
    scheduler = make(*TWO_PRIORITIES, policy=Deadline())
    ask(scheduler, 0.0, ALL, duration=0.1)
    ask(scheduler, 0.0, ALL, "high", duration=0.1, deadline=5.0)
    with pytest.raises(DeadlineImpossible) as caught:
        ask(scheduler, 0.0, ALL, "low", duration=0.05, deadline=0.2)
    assert caught.value.predicted == pytest.approx(0.25)


@pytest.mark.parametrize("known", [True, False])
def test_what_is_late_after_a_blocked_loop_goes_behind_what_is_not(known: bool) -> None:
    """Requests that became late during a blocked loop do not make the next ones late."""
    scheduler = make(ServiceClass("a", latency=0.1), policy=Deadline())
    duration = 0.02 if known else None
    held = ask(scheduler, 0.0, ALL, "a", duration=duration)
    late = [ask(scheduler, 0.0, ALL, "a", duration=duration) for _ in range(3)]
    in_time = ask(scheduler, 1.0, ALL, "a", duration=duration)
    order, lease = [], held.grants[0]
    for step in range(4):
        (granted,) = scheduler.drained(1.0 + step * 0.02, lease)
        order.append(granted)
        lease = granted.grants[0]
    assert order == [in_time, *late]


@pytest.mark.parametrize("on_late", ["refuse", "best_effort"])
@pytest.mark.parametrize("policy", [Fifo, Deadline])
def test_a_flash_crowd_leaves_the_device_to_what_can_be_in_time(
    policy: type[Fifo], on_late: OnLate
) -> None:
    """For 20 s ten times the load: late work gives way to work that can still be in time.

    As much is in time meanwhile as the device can do, and everything soon afterwards.
    """
    rng, order = random.Random(1), itertools.count()
    service = ServiceClass("a", latency=0.6, on_late=on_late)
    scheduler = Scheduler([DEVICE], policy(), 10**6, services=[service])
    events: list[tuple[float, int, Request | None]] = []
    at = 0.0
    while at < 40.0:
        at += rng.expovariate((10 if 10 <= at < 30 else 1) * 0.8 * 2 / 0.1)
        heapq.heappush(events, (at, next(order), None))
    done: list[tuple[float, bool]] = []  # when one that arrived then was done, and whether in time
    arrivals = [at for at, _, _ in events]
    while events and events[0][0] < 40.0:
        now, _, ended = heapq.heappop(events)
        if ended is not None:
            done.append((ended.arrived, now <= ended.arrived + 0.6 + 1e-9))
            granted = scheduler.drained(now, ended.grants[0])
        else:
            try:
                granted = [ask(scheduler, now, 16, "a", duration=0.1)]
            except DeadlineImpossible:
                continue
        for request in granted:
            if request.grants:
                heapq.heappush(events, (now + 0.1, next(order), request))
    in_crowd = sum(is_in_time for at, is_in_time in done if 10 <= at < 30)
    assert in_crowd >= 0.95 * 20 * 2 / 0.1
    after = [at for at in arrivals if 31 <= at < 39]
    assert sum(is_in_time for at, is_in_time in done if 31 <= at < 39) >= 0.95 * len(after)


@given(st.lists(st.integers(1, 132), min_size=1, max_size=8))
def test_what_fits_together_counts_as_one_device_at_most(sizes: list[int]) -> None:
    """No measure of the work refuses more than the device can pack."""
    cells = DeviceCells(size=8, count=16, remainder=4)
    if sum(map(cells.cells_for, sizes)) <= cells.count:
        shares = [Packing([cells]).shares(sms) for sms in sizes]
        assert all(sum(measure) <= 1 + 1e-9 for measure in zip(*shares, strict=True))


@pytest.mark.parametrize("slack", range(1, 30))
def test_admission_is_monotone_in_slack(slack: int) -> None:
    """A request that is admitted would also be admitted with any later deadline."""
    outcomes = []
    for deadline in (slack * 0.02, slack * 0.02 + 0.02):
        scheduler = make(policy=Deadline())
        ask(scheduler, 0.0, ALL, duration=0.05)
        for other in (0.1, 0.2, 0.3):
            ask(scheduler, 0.0, 16, duration=0.05, deadline=other)
        try:
            ask(scheduler, 0.0, 24, duration=0.05, deadline=deadline)
            outcomes.append(True)
        except DeadlineImpossible:
            outcomes.append(False)
    assert outcomes[0] <= outcomes[1]


def test_an_admitted_request_is_not_made_late() -> None:
    """A more urgent request is refused if admitted requests would miss their deadlines."""
    scheduler = make(policy=Deadline())
    ask(scheduler, 0.0, ALL, duration=0.1)
    ask(scheduler, 0.0, ALL, duration=0.1, deadline=0.22)
    with pytest.raises(DeadlineImpossible):
        ask(scheduler, 0.0, ALL, duration=0.05, deadline=0.16)
    scheduler = make(policy=Fifo())
    ask(scheduler, 0.0, ALL, duration=0.1)
    assert ask(scheduler, 0.0, ALL, duration=0.05, deadline=0.16).state is GrantState.QUEUED


def test_an_elastic_lease_of_equal_priority_counts_to_its_end() -> None:
    """An elastic lease of equal priority gives nothing back, so all its work counts."""
    scheduler = make(policy=Deadline())
    ask(scheduler, 0.0, (8, 32), duration=0.1)
    ask(scheduler, 0.0, ALL, duration=0.1, deadline=0.22)
    with pytest.raises(DeadlineImpossible):
        ask(scheduler, 0.0, ALL, duration=0.05, deadline=0.16)


def test_a_request_goes_behind_others_when_it_becomes_late() -> None:
    """At the time that `next_deadline` gives, a late request lets the others pass."""
    scheduler = make(ServiceClass("a", latency=0.05), policy=Deadline())
    ask(scheduler, 0.0, 16, "a")
    late = ask(scheduler, 0.0, 32, "a")
    other = ask(scheduler, 0.03, 8, "a")
    assert scheduler.next_deadline() == 0.05
    assert scheduler.tick(0.04) == ([], [])
    assert scheduler.tick(0.05) == ([other], [])
    assert late.state is GrantState.QUEUED
    assert scheduler.next_deadline() is None


def test_work_of_a_request_that_became_late_delays_no_other() -> None:
    """The work of a late request, which goes last, does not count for later requests."""
    scheduler = make(ServiceClass("a", latency=0.1), policy=Deadline())
    ask(scheduler, 0.0, ALL)
    ask(scheduler, 0.0, ALL, "a", duration=0.05)
    assert scheduler.tick(0.5) == ([], [])
    assert ask(scheduler, 0.5, ALL, "a", duration=0.08).state is GrantState.QUEUED


def test_work_that_is_due_later_delays_no_other_after_a_quiet_time() -> None:
    """After a long idle time the ledger still orders work by its deadlines."""
    classes = ServiceClass("slow", latency=0.9), ServiceClass("quick", latency=0.1)
    scheduler = make(*classes, policy=Deadline())
    (lease,) = ask(scheduler, 0.0, ALL, "slow").grants
    scheduler.drained(0.05, lease)
    now = 2 * BUCKETS * BUCKET
    ask(scheduler, now, ALL)
    ask(scheduler, now, ALL, "slow")
    assert ask(scheduler, now, ALL, "quick", duration=0.08).state is GrantState.QUEUED


def test_a_late_request_can_be_queued_behind_others() -> None:
    """With `on_late="queue"` a late request waits behind those that can be in time."""
    scheduler = make(ServiceClass("a", latency=0.1, on_late="best_effort"), policy=Deadline())
    held = ask(scheduler, 0.0, ALL, "a")
    late = ask(scheduler, 0.0, ALL, "a", duration=0.2)
    in_time = ask(scheduler, 0.0, ALL, "a", duration=0.05)
    assert scheduler.tick(0.5) == ([], []), "it is still wanted"
    assert scheduler.drained(0.5, held.grants[0]) == [in_time]
    assert scheduler.drained(0.6, in_time.grants[0]) == [late]


def test_the_earliest_deadline_goes_first() -> None:
    """The earliest deadline or latency goes first; requests without one go last."""
    scheduler = make(ServiceClass("a", latency=1.0), policy=Deadline(ageing=10.0))
    held = ask(scheduler, 0.0, ALL)
    never, far = ask(scheduler, 0.0, ALL), ask(scheduler, 0.0, ALL, deadline=5.0)
    near, soon = ask(scheduler, 0.1, ALL, "a"), ask(scheduler, 0.1, ALL, deadline=0.9)
    order, lease = [], held.grants[0]
    for step in range(4):
        (granted,) = scheduler.drained(0.2 + step / 100, lease)
        order.append(granted)
        lease = granted.grants[0]
    assert order == [soon, near, far, never]


# -- quotas, bounds, devices ----------------------------------------------------------------------


@pytest.mark.fault("F11")
def test_a_quota_is_kept_on_average() -> None:
    """A class over its quota waits although cells are free, until its debt is paid."""
    scheduler = make(ServiceClass("a", quota=8.0), ServiceClass("b"))
    (lease,) = ask(scheduler, 0.0, 32, "a").grants
    scheduler.drained(1.0, lease)  # 32 SM-seconds: 8 were saved up, 8 came meanwhile
    waiting = ask(scheduler, 1.0, 8, "a")
    assert waiting.state is GrantState.QUEUED
    assert ask(scheduler, 1.0, 8, "b").state is GrantState.GRANTED, "others are not held up"
    at = scheduler.next_deadline()
    assert at is not None
    assert at == pytest.approx(1.0 + 16 / 8 + 1, abs=1.001)
    assert scheduler.tick(at - 0.01) == ([], [])
    assert scheduler.tick(at) == ([waiting], []), "a loop that waits until then need not look again"


def test_a_class_has_a_bound_of_its_own() -> None:
    """`QueueFull` of a class counts its own requests, and its `retry_after` is the class's."""
    scheduler = make(ServiceClass("a", max_waiting=1), ServiceClass("b"))
    ask(scheduler, 0.0, ALL)
    ask(scheduler, 0.0, 8, "a")
    with pytest.raises(QueueFull) as caught:
        ask(scheduler, 0.0, 8, "a")
    assert caught.value.waiting == 1
    assert caught.value.retry_after > 0
    assert ask(scheduler, 0.0, 8, "b").state is GrantState.QUEUED


def test_devices_are_packed_or_spread() -> None:
    """`pack` fills one device with small requests; the data's device is preferred."""
    packed = Scheduler([DEVICE] * 2, Fifo(), 10, placement="pack")
    assert [ask(packed, 0.0, 8).grants[0].device for _ in range(5)] == [0, 0, 0, 0, 1]
    spread = make(devices=2)
    assert [ask(spread, 0.0, 8).grants[0].device for _ in range(3)] == [0, 1, 0]
    assert ask(spread, 0.0, 8, near=0).grants[0].device == 0
    assert ask(spread, 0.0, 16, near=0).grants[0].device == 1, "where it fits comes before all"


def test_priorities_and_weights_can_be_any_numbers() -> None:
    """Fractional and negative priorities order classes as integers do."""
    scheduler = make(ServiceClass("a", priority=-0.5), ServiceClass("b", weight=0.1), policy=Fair())
    held = ask(scheduler, 0.0, ALL)
    a, b = ask(scheduler, 0.0, ALL, "a"), ask(scheduler, 0.0, ALL, "b")
    assert scheduler.drained(1.0, held.grants[0]) == [b]
    assert scheduler.drained(2.0, b.grants[0]) == [a]


TWO = (ServiceClass("a"), ServiceClass("b"))


@pytest.mark.fault("I10")
@pytest.mark.parametrize("classes", [(), TWO], ids=["one", "two"])
def test_a_deadline_that_passed_between_ticks_is_not_granted(
    classes: tuple[ServiceClass, ...],
) -> None:
    """Cells that become free after a deadline go to the next request; the late one is refused."""
    scheduler = make(*classes)
    names = [one.name for one in classes] or ["", ""]
    held = ask(scheduler, 0.0, ALL, names[0])
    late = ask(scheduler, 0.0, ALL, names[0], deadline=0.02)
    following = ask(scheduler, 0.0, ALL, names[1])
    (grant,) = held.grants
    assert scheduler.drained(0.5, grant) == [following]
    assert late.state is GrantState.GONE
    ((request, error),) = scheduler.rejected
    assert request is late
    assert isinstance(error, DeadlineExceeded)
    assert error.deadline == pytest.approx(0.02)
    s = scheduler.statistics()
    assert (s.requested, s.granted, s.expired, s.cancelled, s.waiting) == (3, 2, 1, 0, 0)
