"""Leases that never end: how long other requests wait, and what the highest class gets."""

from __future__ import annotations

import pytest

from greensched.errors import InvalidRequest
from greensched.scheduling.cells import DeviceCells, SizeRange
from greensched.scheduling.policy import POLICIES, Fifo, RequestView, Sized
from greensched.scheduling.requests import Grant, GrantState
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass

from .programs import Curve, Program, Traffic, partitions, run

EIGHTS = DeviceCells(size=8, count=16, remainder=4)
TWOS = DeviceCells(size=2, count=66)
HIGH, LOW = ServiceClass("high", priority=1), ServiceClass("low")


def loop(rules: ServiceClass, least: int, interval: float, *, leases: int = 1) -> Traffic:
    """Return leases that never end, with a checkpoint after each piece."""
    curve = Curve(interval * least, least)
    return Traffic(rules, curve, 0, least, least, 132, (0.0,) * leases)


def every(seconds: float, rules: ServiceClass, size: int, piece: float, least: int = 8) -> Traffic:
    """Return requests of one piece at intervals, which can use twice their size."""
    at = tuple(0.05 + seconds * i for i in range(round(0.5 / seconds)))
    return Traffic(rules, Curve(piece * size, 2 * size), 1, size, least, 132, at)


def test_the_highest_of_three_classes_has_what_the_policy_leaves() -> None:
    """Beside two lower leases without an end it is served by their next checkpoints."""
    classes = [ServiceClass("high", priority=10, latency=1.0), ServiceClass("middle", priority=5),
               ServiceClass("low")]  # fmt: skip
    scheduler = Scheduler([EIGHTS], Sized(), 10, services=classes)

    def elastic(name: str, **options: object) -> list[Grant]:
        request = scheduler.request(0.0, (SizeRange(8, 132),), service=name, **options)  # type: ignore[arg-type]
        return list(request.grants)

    low = elastic("low")
    elastic("middle")
    scheduler.checkpoint(0.001, low[0])
    elastic("high", duration=Curve(110.0, 132))
    holders = [x for x in scheduler.allocator.grants[0] if x.class_state.name != "high"]
    for grant in holders:
        scheduler.checkpoint(0.002, grant)
    high = scheduler.allocator.classes["high"]
    assert high.granted == 1
    assert high.sms >= 104


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_classes_that_each_ask_for_more_than_half_take_turns(policy: str) -> None:
    """Of two such leases that never end, neither waits for long, under any policy."""
    traffic = tuple(loop(ServiceClass(name), 72, 0.005) for name in ("one", "two"))
    outcomes = run(Program(EIGHTS, traffic), policy)
    for outcome in outcomes.values():
        assert outcome.longest_wait <= 0.020 + 0.005 + 1e-9
        assert outcome.pieces > 40


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_leases_without_an_end_take_turns_across_classes(policy: str) -> None:
    """Two leases of a higher class that give way to each other also let a lower class in."""
    high = loop(ServiceClass("high", priority=1), 72, 0.005, leases=2)
    program = Program(EIGHTS, (loop(ServiceClass("low"), 72, 0.005), high))
    outcomes = run(program, policy)
    assert outcomes["low"].longest_wait <= 2 * (0.020 + 2 * 0.005)
    assert outcomes["high"].pieces > outcomes["low"].pieces > 8


def test_a_lease_that_is_known_to_end_keeps_what_it_needs_from_a_lower_class() -> None:
    """An aged request of a lower class waits for the lease's known end."""
    classes = [ServiceClass("high", priority=1, latency=1.0), ServiceClass("low")]
    scheduler = Scheduler([EIGHTS], Sized(), 10, services=classes)
    size, pieces = SizeRange(8, 132), [Curve(44.0, 132), Curve(22.0, 132)]
    (high,) = scheduler.request(0.0, (size,), service="high", duration=pieces[0]).grants
    low = scheduler.request(0.0, (SizeRange(120, 120),), service="low")
    assert scheduler.checkpoint(0.2, high, pieces[1], 0.5) == []
    assert not high.over
    assert high.sms >= 22 / 0.5
    assert scheduler.drained(0.4, high) == [low]


def test_a_lease_that_shrinks_is_known_to_end_later() -> None:
    """Its duration was for all SMs; on fewer it ends later and does not give way."""
    scheduler = Scheduler([EIGHTS], Fifo(), 10, services=[HIGH, LOW])
    size = SizeRange(32, 132)
    (lease,) = scheduler.request(0.0, (size,), service="high", duration=Curve(13.2, 132)).grants
    beside = scheduler.request(0.0, (SizeRange(96, 96),), service="high")
    assert scheduler.checkpoint(0.01, lease) == [beside]
    assert lease.ends == pytest.approx(0.01 + 0.09 * 132 / 32)
    scheduler.request(0.02, (SizeRange(120, 120),), service="low")
    assert scheduler.drained(0.2, beside.grants[0]) == []
    assert scheduler.checkpoint(0.2, lease) == []
    assert not lease.over


@pytest.mark.parametrize("is_known", [True, False])
def test_a_lease_that_gave_way_is_expected_to_take_what_was_left(is_known: bool) -> None:
    """Its checkpoint gives the next piece's duration, its request that of the whole lease."""
    scheduler = Scheduler([EIGHTS], Fifo(), 10, services=[HIGH])
    size, piece = SizeRange(72, 132), Curve(3.3, 132)
    request = scheduler.request(
        0.0, (size,), service="high", duration=Curve(13.2, 132) if is_known else None
    )
    scheduler.request(0.0, (size,), service="high", duration=Curve(1.32, 132))
    (other,) = scheduler.checkpoint(0.05, request.grants[0], piece)
    assert request.gave_way is not is_known
    assert scheduler.drained(0.06, other.grants[0]) == [request]
    (lease,) = request.grants
    assert lease.is_bounded is is_known
    if is_known:
        assert lease.ends == pytest.approx(0.06 + 0.05)
        scheduler.checkpoint(0.085, lease, piece)
        scheduler.drained(0.11, lease)
    assert scheduler.allocator.classes["high"].overrun_factor == pytest.approx(1.0)


def test_a_lease_that_was_idle_is_expected_to_take_its_duration_again() -> None:
    """The time left when it gave way earlier no longer counts."""
    scheduler = Scheduler([EIGHTS], Fifo(), 10, services=[HIGH])
    size, piece = SizeRange(72, 132), Curve(3.3, 132)
    request = scheduler.request(0.0, (size,), service="high", duration=Curve(13.2, 132))
    scheduler.request(0.0, (size,), service="high", duration=Curve(1.32, 132))
    (other,) = scheduler.checkpoint(0.05, request.grants[0], piece)
    scheduler.drained(0.06, other.grants[0])
    (lease,) = request.grants
    scheduler.drained(0.07, lease)
    assert scheduler.ask_again(1.0, lease) == [request]
    assert request.grants[0].ends == pytest.approx(1.0 + 3.3 / 132)


def test_a_lower_lease_gives_way_though_one_of_the_requests_class_has_more_than_it_needs() -> None:
    """The lease of the request's class may reach no checkpoint before its end."""
    scheduler = Scheduler([EIGHTS], Fifo(), 10, services=[HIGH, LOW])
    (low,) = scheduler.request(0.0, (SizeRange(80, 132),), service="low").grants
    size = SizeRange(8, 48)
    first = scheduler.request(0.0, (size,), service="high", duration=0.1)
    assert scheduler.checkpoint(0.001, low) == [first]
    assert (low.sms, first.grants[0].sms) == (80, 48)
    second = scheduler.request(0.002, (size,), service="high", duration=0.1)
    assert scheduler.checkpoint(0.003, low) == [second]
    assert low.over


def test_a_loan_returns_though_the_device_is_kept_for_a_lower_class() -> None:
    """The borrower gives up only what the owner waits for."""
    owner = ServiceClass("owner", priority=2, reserve=16, max_wait_for_reserve=0.05)
    borrower = ServiceClass("borrower", priority=1, preemptible=True)
    scheduler = Scheduler([EIGHTS], Fifo(), 10, services=[owner, borrower, LOW])
    size = SizeRange(40, 132)
    (lease,) = scheduler.request(0.0, (size,), service="borrower", duration=0.04).grants
    scheduler.request(0.0, (SizeRange(112, 112),), service="low")
    waits = scheduler.request(0.025, (SizeRange(16, 16),), service="owner")
    assert lease.loans
    assert scheduler.checkpoint(0.03, lease) == [waits]


def disb(cells: DeviceCells) -> Program:
    """Five classes with targets and one of best effort, like DISB's models beside training."""
    sizes, pieces = (24, 32, 40, 24, 16), (0.003, 0.004, 0.006, 0.005, 0.008)
    targets = [
        every(0.017 + 0.004 * i,
              ServiceClass(f"model-{i}", priority=5 - i, latency=8 * piece + 0.040),
              size, piece, least=cells.size)
        for i, (size, piece) in enumerate(zip(sizes, pieces, strict=True))
    ]  # fmt: skip
    best_effort = loop(ServiceClass("training", priority=-1), 40, 0.004, leases=2)
    return Program(cells, (*targets, best_effort))


def in_time(program: Program) -> int:
    return sum(outcome.in_time for outcome in run(program, "sized", prebuilt=True).values())


def test_finer_cells_are_no_worse() -> None:
    """By twos `sized` serves as many requests of a mix of six classes in time as by eights.

    Also where the device is never idle, so that no executor is made in traffic.
    """
    requests = sum(len(one.at) for one in disb(TWOS).traffic if one.pieces)
    by_eights, by_twos = in_time(disb(EIGHTS)), in_time(disb(TWOS))
    assert by_twos >= by_eights
    assert by_twos == requests


def test_a_request_whose_size_shrinks_is_granted_what_is_free() -> None:
    """If another lease shrinks the request's size to what is free, it is granted at once."""
    classes = [ServiceClass("high", priority=1, latency=1.0), ServiceClass("low", latency=1.0)]
    scheduler = Scheduler([TWOS], Sized(), 10, services=classes)
    first = scheduler.request(0.0, (SizeRange(2, 132),), service="high", duration=Curve(10, 132))
    low = scheduler.request(0.0, (SizeRange(2, 132),), service="low", duration=Curve(60, 132))
    (high,) = first.grants
    scheduler.checkpoint(0.010, high, Curve(58, 132))
    assert not low.grants or low.grants[0].sms <= 132 - high.sms
    scheduler.checkpoint(0.015, high, Curve(10, 132))
    assert low.grants


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_higher_class_does_not_wait_for_ageing(policy: str) -> None:
    """A lease that never ends gives way at its checkpoint to a class with a higher priority."""
    high = every(0.025, ServiceClass("high", priority=1, latency=0.020), 88, 0.004, least=88)
    program = Program(EIGHTS, (loop(ServiceClass("low"), 72, 0.005), high))
    outcome = run(program, policy)["high"]
    assert outcome.in_time == outcome.requests == partitions(program)["high"].in_time
    assert outcome.longest_wait <= 0.005 + 1e-9


THREE = [ServiceClass("high", priority=2), ServiceClass("middle", priority=1), ServiceClass("low")]


def test_a_higher_class_has_at_once_what_a_checkpoint_gives_up() -> None:
    """It does not wait for the checkpoint of a lower class, which may be far away."""
    scheduler = Scheduler([EIGHTS], Fifo(), 10, services=THREE)
    (low,) = scheduler.request(0.0, (SizeRange(48, 56),), service="low").grants
    (middle,) = scheduler.request(0.0, (SizeRange(64, 72),), service="middle").grants
    high = scheduler.request(0.0, (SizeRange(64, 64),), service="high")
    assert scheduler.checkpoint(0.001, middle) == [high]
    assert middle.over
    assert scheduler.checkpoint(0.002, low) == [middle.request]


def test_what_a_checkpoint_gives_up_for_a_higher_class_stays_free() -> None:
    """The lease does not take it back: after another's checkpoint it is enough."""
    scheduler = Scheduler([EIGHTS], Fifo(), 10, services=THREE)
    scheduler.request(0.0, (SizeRange(40, 40),), service="low")
    (one,) = scheduler.request(0.0, (SizeRange(32, 48),), service="low").grants
    (two,) = scheduler.request(0.0, (SizeRange(32, 40),), service="low").grants
    high = scheduler.request(0.0, (SizeRange(24, 24),), service="high")
    assert scheduler.checkpoint(0.001, one) == []
    assert one.sms == 32
    assert scheduler.checkpoint(0.002, two) == [high]
    assert two.sms == 32


def test_what_ends_before_a_higher_lease_does_is_let_past_a_kept_device() -> None:
    """A lease that is known to end gives nothing up for a lower class, so that waits for its end.

    Until then requests of known duration are granted what is free beside it.
    """
    scheduler = Scheduler([EIGHTS], Fifo(ageing=0), 10, services=THREE)
    scheduler.request(0.0, (SizeRange(64, 72),), service="middle", duration=10.0)
    low = scheduler.request(0.0, (SizeRange(120, 120),), service="low")
    (short,) = scheduler.request(1.0, (SizeRange(32, 32),), service="high", duration=1.0).grants
    late = scheduler.request(1.0, (SizeRange(8, 8),), service="high", duration=20.0)
    assert short.sms == 32
    assert not low.grants
    assert not late.grants


def test_what_comes_to_a_checkpoint_in_time_is_let_past_a_kept_device() -> None:
    """A lease that gives way before the first request can begin does not delay it.

    Until a class has come to a checkpoint, 20 ms are assumed.
    """
    loops = [ServiceClass("slow", checkpoint_interval=0.2), ServiceClass("fast")]
    scheduler = Scheduler([EIGHTS], Fifo(ageing=0), 10, services=loops)
    (held,) = scheduler.request(0.0, (SizeRange(64, 64),), service="slow", duration=0.1).grants
    first = scheduler.request(0.0, (SizeRange(128, 128),), service="slow")
    slow = scheduler.request(0.05, (SizeRange(8, 16),), service="slow")
    (fast,) = scheduler.request(0.05, (SizeRange(8, 16),), service="fast").grants
    assert not slow.grants
    assert scheduler.drained(0.1, held) == []
    assert scheduler.checkpoint(0.1, fast) == [first]
    assert fast.over


def test_a_lease_without_an_end_does_not_overtake_a_higher_class() -> None:
    """It would hold, until its first checkpoint, the cells that the other waits for."""
    scheduler = Scheduler([EIGHTS], Fifo(), 10, services=THREE)
    (held,) = scheduler.request(0.0, (SizeRange(64, 64),), service="high").grants
    high = scheduler.request(0.0, (SizeRange(72, 72),), service="high")
    low = scheduler.request(0.0, (SizeRange(64, 72),), service="low")
    same = scheduler.request(0.0, (SizeRange(8, 16),), service="high")
    short = scheduler.request(0.0, (SizeRange(8, 8),), service="low")
    assert (len(low.grants), len(same.grants), len(short.grants)) == (0, 1, 1)
    assert scheduler.drained(0.001, held) == [high]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_a_checkpoint_gives_back_stays_free_for_what_waits(policy: str) -> None:
    """Two leases give back cells above their minimum, and neither takes them again."""
    scheduler = Scheduler([EIGHTS], POLICIES[policy](), 10, services=THREE)
    leases = []
    for _ in range(2):
        leases += scheduler.request(0.0, (SizeRange(24, 64),), service="low").grants
    waits = scheduler.request(0.0, (SizeRange(72, 72),), service="low")
    assert scheduler.checkpoint(0.001, leases[0]) == []
    assert scheduler.checkpoint(0.002, leases[1]) == [waits]
    assert leases[0].sms == 24
    assert scheduler.drained(0.003, waits.grants[0]) == []
    scheduler.checkpoint(0.004, leases[0])
    assert leases[0].sms > 24


def test_a_lease_does_not_give_way_to_its_own_holder() -> None:
    """A holder with two leases, or one that waits for itself, keeps its cells."""
    scheduler = Scheduler([EIGHTS], POLICIES["fifo"](), 10, services=[ServiceClass("one")])
    (held,) = scheduler.request(0.0, (SizeRange(40, 64),), service="one", holder="a").grants
    scheduler.request(0.0, (SizeRange(40, 64),), service="one", holder="a")
    aged = scheduler.request(0.0, (SizeRange(120, 120),), service="one", holder="b")
    assert scheduler.checkpoint(1.0, held) == []
    assert not aged.grants
    assert held.sms >= 40


def test_a_lease_gives_up_nothing_in_vain_for_a_lower_class() -> None:
    """A request that cannot begin before the lease ends would not gain from it."""
    scheduler = Scheduler([EIGHTS], Fifo(ageing=0), 10, services=THREE)
    size, work = SizeRange(16, 128), Curve(128.0, 128)
    (held,) = scheduler.request(0.0, (size,), service="high", duration=work).grants
    low = scheduler.request(0.0, (SizeRange(120, 120),), service="low")
    assert scheduler.checkpoint(0.5, held, work) == []
    assert held.sms == 128
    assert scheduler.drained(1.0, held) == [low]


def test_a_lease_gives_way_where_the_remainder_of_a_device_helps_a_request() -> None:
    """Beside a reserve of 4 of 15 cells, 48 SMs fit in 5 cells and the remainder of 12 SMs."""
    cells = DeviceCells(size=8, count=15, remainder=12, joins=True)
    owner = ServiceClass("owner", reserve=32, max_wait_for_reserve=0)
    scheduler = Scheduler([cells], Fifo(), 10, services=[*THREE, owner])
    scheduler.request(0.0, (SizeRange(48, 48),), service="high")
    (low,) = scheduler.request(0.0, (SizeRange(32, 40),), service="low").grants
    high = scheduler.request(0.0, (SizeRange(48, 48),), service="high")
    assert scheduler.checkpoint(0.001, low) == [high]
    assert low.over


def test_a_lease_does_not_give_way_beside_one_that_is_used_again() -> None:
    """A holder whose other lease is a resumed grant also keeps its cells."""
    scheduler = Scheduler([EIGHTS], Fifo(ageing=0), 10)
    (again,) = scheduler.request(0.0, (SizeRange(16, 16),), holder="a").grants
    assert scheduler.suspend(0.0, again)
    scheduler.resume(0.0, again, "a")
    (held,) = scheduler.request(0.0, (SizeRange(40, 132),), holder="a").grants
    scheduler.request(0.0, (SizeRange(96, 96),), holder="b")
    assert scheduler.checkpoint(1.0, held) == []
    assert not held.over


def test_a_lease_that_gives_way_goes_behind_all_that_wait() -> None:
    """Resumed grants count as arrivals, so the order stays right."""
    scheduler = Scheduler([EIGHTS], Fifo(ageing=0), 10)
    (again,) = scheduler.request(0.0, (SizeRange(16, 16),)).grants
    for _ in range(5):
        assert scheduler.suspend(0.0, again)
        scheduler.resume(0.0, again, None)
    scheduler.drained(0.0, again)
    (lease,) = scheduler.request(0.0, (SizeRange(120, 132),)).grants
    waiting = [scheduler.request(1.0, (SizeRange(sms, sms),)) for sms in (104, 112, 96)]
    assert scheduler.checkpoint(2.0, lease) == waiting[:1]
    assert lease.over
    assert scheduler.queued() == [*waiting[1:], lease.request]
    assert lease.request.order > waiting[-1].order


def test_a_lease_that_cannot_be_ranked_again_keeps_its_sms() -> None:
    """If the policy fails while a lease gives way, the checkpoint raises and changes nothing."""

    class Failing(Fifo):
        def rank(self, request: RequestView) -> tuple[float, ...]:
            if request.order > 1:
                raise InvalidRequest("a rank")
            return super().rank(request)

    scheduler = Scheduler([EIGHTS], Failing(ageing=0), 10)
    (held,) = scheduler.request(0.0, (SizeRange(120, 132),)).grants
    waiting = scheduler.request(0.0, (SizeRange(96, 96),))
    with pytest.raises(InvalidRequest, match="a rank"):
        scheduler.checkpoint(1.0, held)
    assert (held.sms, held.over, held.request.grants) == (132, False, (held,))
    assert held.request.state is GrantState.GRANTED
    assert scheduler.queued() == [waiting]
    assert scheduler.drained(2.0, held) == [waiting]
