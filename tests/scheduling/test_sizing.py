"""A policy's sizes: the fewest SMs for a latency, and the rest for the other classes."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched.errors import InvalidRequest
from greensched.leasing.device_pool import MAX_PREBUILT
from greensched.scheduling import user_code
from greensched.scheduling.cells import DeviceCells, SizeRange
from greensched.scheduling.latency_margin import LEAST, MOST, SAFE, LatencyMargin
from greensched.scheduling.policy import ClassView, Fifo, RequestView, Sized, SizingView
from greensched.scheduling.requests import Grant, GrantState
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass

CELLS = DeviceCells(size=8, count=15, remainder=12, joins=True)
EVEN = DeviceCells(size=8, count=16, remainder=0, joins=True)
FINE = DeviceCells(size=2, count=66)
DECODE = ServiceClass("decode", priority=1, latency=1.0)
BULK = ServiceClass("bulk")


@dataclass(eq=False)
class Work:
    """A piece's SM-seconds, which more SMs divide; it notes the duration."""

    sm_seconds: float
    seen: list[tuple[int, float]] = field(default_factory=list)

    def at(self, sms: int) -> float:
        return self.sm_seconds / sms

    def observe(self, sms: int, seconds: float) -> None:
        self.seen.append((sms, seconds))


def pool(*services: ServiceClass, policy: Fifo | None = None) -> Scheduler:
    """Return a scheduler without late requests for long, so that plans use the whole latency."""
    given = services or (DECODE, BULK)
    scheduler = Scheduler([CELLS], policy or Sized(), 10, services=given)
    for _ in range(40):
        scheduler.observe(0.0, "decode", 0.1, 1000)
    return scheduler


def leased(
    scheduler: Scheduler, service: str, duration: Work | None = None, least: int = 8
) -> Grant:
    """Return the grant of an elastic lease that fits at once."""
    request = scheduler.request(0.0, (SizeRange(least, 132),), service=service, duration=duration)
    (lease,) = request.grants
    return lease


class Own:
    """A user's policy with the required methods."""

    def rank(self, request: RequestView) -> tuple[float, ...]:
        return (-request.priority,)

    def may_overtake(self, first: RequestView, now: float) -> bool:
        return now - first.arrived < 0.020


class Wrong(Own):
    """A policy and a curve of which one method fails."""

    def __init__(self, method: str, answer: object) -> None:
        self.__dict__[method] = lambda *_: answer if answer != "raise" else 1 // 0

    def class_rank(self, service: ClassView) -> tuple[float, ...]:
        return (-service.priority, service.tag)

    def size(self, _: object, room: SizingView) -> tuple[int, int]:
        return room.sizes[0], room.sizes[-1]

    def at(self, _: int) -> float:
        return 0.1

    def observe(self, _: int, __: float) -> None:
        pass


@pytest.mark.parametrize("answer", ["raise", None, 0.5, (None, 8), (math.nan, 8.0), math.nan])
@pytest.mark.parametrize("method", ["may_overtake", "class_rank", "size", "at", "observe"])
def test_an_error_of_a_users_policy_or_curve_loses_no_request(
    method: str, answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are still granted, cells return, and the error is logged."""
    wrong = Wrong(method, answer)
    scheduler = pool(DECODE, BULK, policy=wrong)
    duration = wrong if method in {"at", "observe"} else None
    asked = [
        scheduler.request(0.0, (SizeRange(8, 132),), service=service, duration=duration)
        for service in ("decode", "bulk", "decode", "bulk")
    ]
    leases = list(asked[0].grants)
    while leases:
        lease = leases.pop()
        granted = scheduler.checkpoint(0.5, lease, duration)
        granted += scheduler.drained(1.0, lease)
        leases += [lease for request in granted for lease in request.grants]
    assert all(request.state is GrantState.GRANTED for request in asked)
    assert (scheduler.is_idle, scheduler.waiting) == (True, 0)
    assert [state.sms for state in scheduler.allocator.classes.values()] == [0, 0, 0]
    assert not caplog.records  # nothing of the user's runs inside a decision: no log handler
    user_code.report()
    is_answer = method == "may_overtake" or method == "observe" or (method, answer) == ("at", 0.5)
    assert bool(caplog.records) is (answer == "raise" or not is_answer)


def test_a_class_rank_that_changes_at_each_call_blocks_no_request() -> None:
    """A policy whose ranks depend on a clock still serves every class."""
    ticks = itertools.count()

    class Restless(Own):
        def class_rank(self, _: ClassView) -> tuple[float, ...]:
            return (np.float64(next(ticks)),)

    scheduler = pool(DECODE, BULK, policy=Restless())
    asked = [
        scheduler.request(0.0, (SizeRange(132, 132),), service=service)
        for service in ("decode", "bulk", "decode", "bulk")
    ]
    leases = list(asked[0].grants)
    while leases:
        granted = scheduler.drained(1.0, leases.pop())
        leases += [lease for request in granted for lease in request.grants]
    assert all(request.state is GrantState.GRANTED for request in asked)


def test_a_rank_that_is_none_changes_nothing() -> None:
    """Under a policy with invalid ranks a request raises, and such a policy cannot be set."""
    scheduler = pool()
    leased(scheduler, "decode")
    waiting = scheduler.request(0.0, (SizeRange(132, 132),), service="bulk")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="return a tuple of numbers"):
            scheduler.reconfigure(0.0, [BULK], Wrong("rank", (math.nan,)))
    assert (scheduler.waiting, waiting.state) == (1, GrantState.QUEUED)
    assert set(scheduler.services(0.0)) == {"", "decode", "bulk"}
    with pytest.raises(InvalidRequest, match="return a tuple of numbers"):
        wrong = pool(policy=Wrong("rank", None))
        leased(wrong, "decode")
        leased(wrong, "bulk")
    assert wrong.waiting == 0


def test_a_lease_alone_has_all_sms_and_gives_up_what_is_not_needed() -> None:
    """It has the device, and then only what its latency needs once another request waits."""
    scheduler = pool()
    decode = leased(scheduler, "decode", Work(30.0))
    assert decode.sms == 132
    bulk = scheduler.request(0.0, (SizeRange(8, 132),), service="bulk")
    assert not bulk.grants
    assert scheduler.checkpoint(0.1, decode) == [bulk]
    assert decode.sms == 32  # 30 SM-seconds in 0.95 s
    assert bulk.grants[0].sms == 100


def test_a_lease_is_told_what_comes_next_and_moves_with_it() -> None:
    """A longer next piece gets more SMs at the other's checkpoint, a shorter one fewer."""
    scheduler = pool()
    first = Work(30.0)
    decode = leased(scheduler, "decode", first)
    bulk = scheduler.request(0.0, (SizeRange(8, 132),), service="bulk")
    scheduler.checkpoint(0.1, decode)
    assert first.seen == []
    second = Work(60.0)
    scheduler.checkpoint(0.2, decode, second)
    assert first.seen == [(32, pytest.approx(0.1))]
    assert decode.sms == 32  # bulk has the rest, until its checkpoint
    scheduler.checkpoint(0.3, bulk.grants[0])
    assert bulk.grants[0].sms == 64  # of 68, in whole cells
    scheduler.checkpoint(0.4, decode, Work(15.0))
    assert decode.sms == 16
    scheduler.checkpoint(0.5, bulk.grants[0])
    assert bulk.grants[0].sms == 132 - 16


def test_it_waits_for_what_is_enough() -> None:
    """A piece does not begin on fewer SMs than its latency needs."""
    scheduler = pool()
    bulk = leased(scheduler, "bulk")
    decode = scheduler.request(0.0, (SizeRange(8, 132),), service="decode", duration=Work(60.0))
    assert bulk.sms == 132
    assert scheduler.checkpoint(0.010, bulk) == [decode]
    assert (bulk.sms, decode.grants[0].sms) == (132 - 64, 64)


def test_a_reserve_is_granted_without_waiting_for_more() -> None:
    """A request within its reserve is granted at once, though its target is larger."""
    scheduler = pool(ServiceClass("decode", priority=1, latency=1.0, reserve=16), BULK)
    bulk = leased(scheduler, "bulk")
    assert bulk.sms == 116
    assert leased(scheduler, "decode", Work(60.0)).sms == 16


def test_a_cap_holds_whatever_is_enough() -> None:
    """No size exceeds the class's cap, and a request does not wait for a larger one."""
    scheduler = pool(ServiceClass("decode", priority=1, latency=1.0, cap=32), BULK)
    assert leased(scheduler, "decode", Work(60.0)).sms == 32
    assert leased(scheduler, "bulk").sms == 100


def test_what_is_enough_is_no_more_than_was_asked_for() -> None:
    """If no partition has exactly the requested most, the next smaller one is used."""
    uneven = DeviceCells(size=8, count=3, remainder=4)
    scheduler = Scheduler([uneven], Sized(), 10, services=(DECODE, BULK))
    bulk = scheduler.request(0.0, (SizeRange(8, 26),), service="bulk")
    assert bulk.grants[0].sms == 24
    scheduler.drained(0.0, bulk.grants[0])
    decode = scheduler.request(0.0, (SizeRange(8, 26),), service="decode", duration=Work(26.0))
    assert decode.grants[0].sms == 24


def test_no_class_is_kept_out_for_ever() -> None:
    """Once a waiting request has aged, an elastic lease that needs more than is left gives way."""
    scheduler = pool()
    decode = leased(scheduler, "decode", Work(120.0), least=16)
    late = scheduler.request(0.0, (SizeRange(112, 112),), service="bulk")
    assert scheduler.checkpoint(0.010, decode) == []
    assert decode.sms == 132, "it is not reserved yet"
    scheduler.request(1.0, (SizeRange(8, 8),), service="bulk")  # so time is seen to pass
    assert late in scheduler.checkpoint(1.0, decode)
    assert decode.over
    assert scheduler.queued() == [decode.request]


def test_no_request_waits_for_what_is_never_given_back() -> None:
    """If even all SMs are too few, a request gets what others do not keep until their end."""
    scheduler = pool()
    bulk = leased(scheduler, "bulk")
    decode = scheduler.request(0.0, (SizeRange(8, 132),), service="decode", duration=Work(130.0))
    assert scheduler.checkpoint(0.016, bulk) == [decode]
    assert (bulk.sms, decode.grants[0].sms) == (8, 124)


@pytest.mark.parametrize(("least", "joins"), [(36, True), (2, False)])
def test_a_request_that_fits_only_with_the_remainder_beside_a_reserve_is_granted(
    least: int, joins: bool
) -> None:
    """Its smallest partition has the remainder; cells of the reserve cannot be borrowed."""
    cells = DeviceCells(size=8, count=5, remainder=4, joins=joins)
    reserve = 8 if joins else 40
    owner = ServiceClass("owner", reserve=reserve, max_wait_for_reserve=0.05)
    bulk = ServiceClass("bulk", preemptible=True)
    scheduler = Scheduler([cells], Sized(), 10, services=(owner, bulk))
    request = scheduler.request(0.0, (SizeRange(least, 44),), service="bulk")
    assert [grant.sms for grant in request.grants] == [36 if joins else 4]


def test_an_aged_request_does_not_wait_for_cells_that_a_reserve_keeps() -> None:
    """The policy wants the whole device, but a reserve is lent only until a checkpoint."""

    class Most(Own):
        def size(self, request: RequestView, view: SizingView) -> tuple[int, int]:
            return view.sizes[-1], view.sizes[-1]

    owner = ServiceClass("owner", reserve=40, max_wait_for_reserve=0.05)
    bulk = ServiceClass("bulk", preemptible=True)
    scheduler = Scheduler([CELLS], Most(), 10, services=(owner, bulk))
    request = scheduler.request(0.0, (SizeRange(8, 132),), service="bulk")
    assert scheduler.tick(0.010)[0] == []
    assert scheduler.tick(0.020)[0] == [request]
    assert request.grants[0].sms == 132 - 40


@pytest.mark.parametrize("quiet", [0.0, 0.1])
@pytest.mark.parametrize("cells", [CELLS, EVEN, FINE])
@pytest.mark.parametrize("seed", range(5))
def test_a_need_is_met_with_the_partitions_that_are_made(
    seed: int, cells: DeviceCells, quiet: float
) -> None:
    """With few executors, and none to be made, a need is met after one checkpoint."""
    menu, rng = cells.menu(MAX_PREBUILT), random.Random(seed)
    made = set(menu)
    scheduler = Scheduler([cells], Sized(), 10, lambda _, mask: mask in made,
                          services=(DECODE, BULK))  # fmt: skip
    for mask in menu:
        scheduler.ready_masks[0].setdefault(mask.bit_count(), {})[mask] = None
    bulk = leased(scheduler, "bulk")
    most = cells.total
    request = scheduler.request(0.0, (SizeRange(8, most),), service="decode", duration=Work(5.0))
    scheduler.checkpoint(0.001, bulk)
    (decode,) = request.grants
    for step in range(1, 200):
        scheduler.checkpoint(float(step), decode, Work(rng.uniform(2.0, 40.0)))
        scheduler.checkpoint(step + 0.1, bulk)
        scheduler.checkpoint(step + 0.2, decode)
        assert decode.sms >= request.target[0].least
        assert bulk.sms >= most - decode.sms - 2 * cells.size, "most of the rest is in use"
        if rng.random() < quiet:  # the device had nothing to do for a moment
            for _, mask in scheduler.missing_executors:
                made.add(mask)
                scheduler.ready_masks[0].setdefault(mask.bit_count(), {})[mask] = None
            scheduler.missing_executors.clear()


def test_what_is_in_time_only_without_the_margin_has_the_most() -> None:
    """A class waits for its largest size rather than be late on what lower classes leave."""
    scheduler = Scheduler([EVEN], Sized(), 10, services=(DECODE, BULK))
    bulk = leased(scheduler, "bulk", least=120)
    decode = scheduler.request(0.0, (SizeRange(8, 24),), service="decode", duration=Work(18.0))
    assert scheduler.checkpoint(0.001, bulk) == [decode]
    assert bulk.over
    assert decode.grants[0].sms == 24


@pytest.mark.parametrize(("waits", "sms"), [(96, 24), (112, 128)])
def test_one_that_leaves_too_little_for_the_next_has_all(waits: int, sms: int) -> None:
    """A lease takes SMs that no other request could use, and ends sooner."""
    scheduler = Scheduler([EVEN], Sized(), 10, services=(DECODE, BULK))
    before = scheduler.request(0.0, (SizeRange(128, 128),), service="bulk")
    scheduler.request(0.0, (SizeRange(waits, waits),), service="bulk")
    decode = scheduler.request(0.0, (SizeRange(8, 128),), service="decode", duration=Work(10.0))
    assert decode in scheduler.drained(0.001, before.grants[0])
    assert decode.grants[0].sms == sms


def test_one_that_needs_less_because_another_came_has_it_at_once() -> None:
    """A request whose size shrinks for a higher class is granted the smaller size at once."""
    first = ServiceClass("first", priority=2)
    scheduler = pool(first, DECODE, BULK)
    bulk = scheduler.request(0.0, (SizeRange(8, 64),), service="bulk").grants[0]
    decode = scheduler.request(0.0, (SizeRange(8, 132),), service="decode", duration=Work(100.0))
    assert scheduler.resized(decode) == []
    assert not decode.grants, "of the 106 that it needs 68 are free"
    before = scheduler.request(0.0, (SizeRange(100, 100),), service="first")
    assert scheduler.resized(before) == [decode]
    assert decode.grants[0].sms == 32
    assert scheduler.checkpoint(0.001, bulk) == [before]


@pytest.mark.parametrize(("least", "is_granted"), [(32, True), (40, False)])
def test_few_sms_are_taken_for_long_only_if_a_higher_class_fits_beside_them(
    least: int, is_granted: bool
) -> None:
    """Otherwise the higher class would wait for the end of that lease."""
    scheduler = pool(ServiceClass("first", priority=2), DECODE, BULK)
    scheduler.request(0.0, (SizeRange(8, 64),), service="bulk")
    before = scheduler.request(0.0, (SizeRange(100, 100),), service="first")
    assert not before.grants, "68 are free"
    size, work = SizeRange(least, 132), Work(100.0)
    low = scheduler.request(0.001, (size,), service="bulk", duration=work)
    assert bool(low.grants) is is_granted


def beside_bulk() -> tuple[Scheduler, Grant, Grant]:
    """Lease a device of whole cells: decode has what it needs, bulk the rest."""
    scheduler = Scheduler([EVEN], Sized(), 10, services=(DECODE, BULK))
    bulk = leased(scheduler, "bulk")
    request = scheduler.request(0.0, (SizeRange(8, 128),), service="decode", duration=Work(30.0))
    scheduler.checkpoint(0.1, bulk)
    return scheduler, request.grants[0], bulk


def move(
    scheduler: Scheduler, decode: Grant, bulk: Grant, duration: Work, within: float | None
) -> None:
    """Bring both leases to checkpoints until decode has its cells."""
    scheduler.checkpoint(0.2, decode, duration, within)
    scheduler.checkpoint(0.2, bulk)
    scheduler.checkpoint(0.2, decode, duration, within)


def test_a_deadline_goes_before_the_latency_of_the_class() -> None:
    """A piece with less time gets more SMs; without a deadline the class's latency counts."""
    scheduler, decode, bulk = beside_bulk()
    assert decode.sms == 72  # 30 SM-seconds in 0.475 of the 0.9 s that are left
    for within, sms in ((1.0, 32), (0.5, 64), (2.0, 16), (None, 64)):
        move(scheduler, decode, bulk, Work(30.0), within)
        assert (decode.sms, bulk.sms) == (sms, 128 - sms)


@given(
    pieces=st.lists(st.tuples(st.floats(1.0, 200.0), st.floats(0.1, 5.0)), min_size=1, max_size=20),
    late=st.integers(0, 20),
)
def test_a_piece_has_the_fewest_sms_for_its_deadline(
    pieces: list[tuple[float, float]], late: int
) -> None:
    """Its size is enough, or all there is, and one cell fewer is not enough."""
    scheduler, decode, bulk = beside_bulk()
    for _ in range(late):
        scheduler.observe(0.1, "decode", 9.0, 1000)
    part = scheduler.allocator.classes["decode"].margin.of_deadline
    for work, within in pieces:
        duration = Work(work)
        move(scheduler, decode, bulk, duration, within)
        assert duration.at(decode.sms) <= part * within or decode.sms == 128 - EVEN.size
        assert decode.sms == EVEN.size or duration.at(decode.sms - EVEN.size) > part * within


def test_a_class_that_is_often_late_plans_with_less() -> None:
    """A class that was late, by the latencies it reports, gets more SMs for the same work."""
    scheduler = pool()
    bulk = leased(scheduler, "bulk")
    for latency in (1.1, 1.2) * 10:
        scheduler.observe(0.0, "decode", latency, 1000)
    decode = scheduler.request(0.0, (SizeRange(8, 132),), service="decode", duration=Work(15.0))
    scheduler.checkpoint(0.010, bulk)
    assert decode.grants[0].sms == 80  # 15 SM-seconds in a fifth of a second


def test_a_pace_follows_what_was_late() -> None:
    """The margin falls if too many are late, and rises while hardly any is, at first fast."""
    margin = LatencyMargin()
    assert margin.fraction == SAFE
    for _ in range(4):
        margin.record(1000, is_late=False)
    assert margin.fraction == MOST
    for _ in range(40):
        margin.record(1000, is_late=True)
    assert margin.fraction == LEAST
    for _ in range(40):
        margin.record(1000, is_late=False)
    assert margin.fraction == MOST


def test_of_a_deadline_twice_as_much_is_used() -> None:
    """A lease with a deadline is not interrupted, but a class that was late plans with less."""
    margin = LatencyMargin()
    assert margin.of_deadline == MOST
    parts = []
    for _ in range(40):
        margin.record(1000, is_late=True)
        parts.append(margin.of_deadline)
        assert margin.of_deadline == min(MOST, 2 * margin.fraction)
    assert parts == sorted(parts, reverse=True)
    assert parts[-1] == 2 * LEAST


def test_more_than_is_wanted_now_is_given_back() -> None:
    """After a checkpoint a lease has no more SMs than the policy says."""
    scheduler = pool()
    bulk = leased(scheduler, "bulk")
    decode = scheduler.request(0.0, (SizeRange(8, 132),), service="decode", duration=Work(15.0))
    scheduler.checkpoint(0.010, bulk)
    assert (bulk.sms, decode.grants[0].sms) == (116, 16)
    scheduler.checkpoint(0.020, decode.grants[0], Work(20.0))
    for mask in (bulk.mask, bulk.mask & 0xFF00):
        scheduler.ready_masks[0].setdefault(mask.bit_count(), {})[mask] = None
    scheduler.checkpoint(0.030, bulk)
    assert bulk.sms == 104  # of 108, in whole cells


def test_a_policy_of_ones_own_sizes() -> None:
    """A user's policy gives each class at most half of what higher classes leave."""

    class Halves(Own):
        def size(self, request: RequestView, room: SizingView) -> tuple[int, int]:
            return room.sizes[0], max(room.sizes[0], room.left // 2)

    scheduler = pool(policy=Halves())
    assert leased(scheduler, "bulk").sms == 64  # of 66, in whole cells
    assert leased(scheduler, "bulk").sms == 56


@pytest.mark.parametrize("is_observed", [False, True])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_late_lease_counts_once_unless_latencies_are_reported(
    is_observed: bool, in_pieces: bool
) -> None:
    """Leases and pieces set the margin of their class until `observe` reports its latencies."""
    scheduler = Scheduler([CELLS], Sized(), 10, services=(DECODE,))
    margin = scheduler.allocator.classes["decode"].margin
    if is_observed:
        scheduler.observe(0.0, "decode", 0.1, 1)
    now, before = 0.0, margin.fraction
    lease = leased(scheduler, "decode", Work(8.0))
    found = []
    for _ in range(9):
        now += 2 * DECODE.latency
        if in_pieces:
            scheduler.checkpoint(now, lease, Work(8.0))
        else:
            scheduler.drained(now, lease)
            lease = leased(scheduler, "decode", Work(8.0))
        found.append(margin.fraction == before)
    assert found == [True] * 8 + [is_observed]


def test_a_lease_at_its_cap_keeps_its_sms_at_a_checkpoint() -> None:
    """What a lease already has does not count against its own class's cap."""
    scheduler = pool(ServiceClass("decode", priority=1, latency=1.0, cap=32), BULK)
    lease = leased(scheduler, "decode", Work(100.0))
    assert lease.sms == 32
    scheduler.checkpoint(1.0, lease, Work(100.0))
    assert lease.sms == 32
