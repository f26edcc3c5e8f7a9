"""The scheduler's rules."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from greensched.errors import InvalidRequest, QueueFull, TooManySMs, WouldBlock, WouldDeadlock
from greensched.scheduling.cells import DeviceCells, parse_sizes
from greensched.scheduling.class_state import UNKNOWN_LEASE, ClassState
from greensched.scheduling.policy import Fifo, Policy, RequestView, policy_named
from greensched.scheduling.queue import validate_bound
from greensched.scheduling.request_line import STALE_LEAST
from greensched.scheduling.requests import Grant, GrantState, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import DEFAULT_CLASS, ServiceClass
from greensched.typing import ALL, REST, Size

H100 = DeviceCells(size=8, count=15, remainder=12)
SMALL = DeviceCells(size=8, count=4)


def make(*devices: DeviceCells, policy: Policy | None = None, max_waiting: int = 1000) -> Scheduler:
    return Scheduler(devices or (SMALL,), policy or Fifo(), max_waiting)


def ask(scheduler: Scheduler, now: float, *sizes: Size, **options: object) -> Request:
    return scheduler.request(now, parse_sizes(sizes), **options)  # type: ignore[arg-type]


def give_back(scheduler: Scheduler, now: float, request: Request) -> list[Request]:
    granted = []
    for lease in request.grants:
        granted += scheduler.drained(now, lease)
    return granted


# -- granting -----------------------------------------------------------------------------------


def test_a_request_that_fits_is_granted_at_once() -> None:
    """With free cells and an empty queue, the request comes back granted."""
    scheduler = make()
    request = ask(scheduler, 0.0, 16, owner="me", holder="task")
    assert request.state is GrantState.GRANTED
    assert [(x.device, x.mask, x.sms, x.holder) for x in request.grants] == [(0, 0b11, 16, "task")]
    assert request.owner == "me"


def test_what_a_request_lacked_once_is_not_lacking_for_ever() -> None:
    """An executor is made only while its cells are free, not again once others hold them."""
    cells = DeviceCells(size=8, count=2, remainder=12)
    scheduler = Scheduler((cells,), Fifo(), 1000, lambda _, mask: mask != 0b11)
    waiting = ask(scheduler, 0.0, 16)
    assert scheduler.missing_executors == {(0, 0b11): None}
    for _ in range(2):
        assert ask(scheduler, 0.0, 8).state is GrantState.GRANTED
    assert scheduler.allocator.free_masks == [0b100]
    scheduler.missing_executors.clear()
    assert scheduler.made(0.0) == []
    assert not scheduler.missing_executors
    assert waiting.state is GrantState.QUEUED


def test_cells_come_free_by_drained_alone() -> None:
    """A released lease keeps its cells, because its work may run, until `drained`."""
    scheduler = make()
    first = ask(scheduler, 0.0, ALL)
    waiting = ask(scheduler, 0.0, 8)
    scheduler.release(first.grants[0])
    assert scheduler.allocator.free_masks == [0]
    assert scheduler.statistics().sms_draining == 32
    assert waiting.state is GrantState.QUEUED
    assert scheduler.drained(1.0, first.grants[0]) == [waiting]


def test_cells_given_back_twice_are_a_bug_of_the_caller() -> None:
    """A second `drained` raises and frees nothing, even if the cells are leased again."""
    scheduler = make()
    lease = ask(scheduler, 0.0, ALL).grants[0]
    scheduler.drained(0.0, lease)
    other = ask(scheduler, 0.0, ALL)
    with pytest.raises(AssertionError, match="given back twice"):
        scheduler.drained(0.0, lease)
    assert scheduler.allocator.free_masks == [0]
    assert scheduler.statistics().sms_leased == other.grants[0].sms == 32


def test_the_device_with_the_most_free_sms_is_taken() -> None:
    """A request goes to the device with the most free SMs, or the first of equals."""
    scheduler = make(SMALL, SMALL)
    devices = [ask(scheduler, 0.0, size).grants[0].device for size in (8, 8, 16, 8)]
    assert devices == [0, 1, 0, 1]


def test_a_joint_request_is_granted_on_one_device() -> None:
    """All parts of a joint request are granted together on one device, or none is."""
    scheduler = make(SMALL, SMALL)
    ask(scheduler, 0.0, 16, devices=(0,))
    ask(scheduler, 0.0, 16, devices=(1,))
    request = ask(scheduler, 0.0, 8, 16)
    assert request.state is GrantState.QUEUED
    assert scheduler.statistics().sms_free == 32


def test_devices_of_a_request_are_kept_to() -> None:
    """A request for one device waits for it, although another has free SMs."""
    scheduler = make(SMALL, SMALL)
    ask(scheduler, 0.0, ALL, devices=(1,))
    assert ask(scheduler, 0.0, 8, devices=(1,)).state is GrantState.QUEUED
    assert ask(scheduler, 0.0, 8, devices=(0,)).state is GrantState.GRANTED


def test_what_was_asked_is_what_comes() -> None:
    """A request for 9 SMs on cells of 8 gets 16, and the lease says so."""
    scheduler = make()
    assert ask(scheduler, 0.0, 9).grants[0].sms == 16


# -- order --------------------------------------------------------------------------------------


def test_larger_priority_goes_first_then_the_earlier_request() -> None:
    """Free cells go to the highest priority, and among equals to the earliest request."""
    scheduler = make()
    holder = ask(scheduler, 0.0, ALL)
    waiting = {
        name: ask(scheduler, 0.0, 8, priority=priority)
        for name, priority in [("a", 0), ("b", 1), ("c", -1), ("d", 1), ("e", 0)]
    }
    granted = give_back(scheduler, 0.0, holder)
    assert granted == [waiting[name] for name in "bdae"]
    assert waiting["c"].state is GrantState.QUEUED


def test_smaller_requests_pass_while_the_first_is_young() -> None:
    """A request that does not fit lets others pass until it has aged."""
    scheduler = make(policy=Fifo(ageing=0.020))
    ask(scheduler, 0.0, 8)
    big = ask(scheduler, 0.0, ALL)
    assert ask(scheduler, 0.019, 8).state is GrantState.GRANTED
    assert big.state is GrantState.QUEUED
    assert ask(scheduler, 0.020, 8).state is GrantState.QUEUED


def test_ageing_counts_from_the_request_that_is_first_now() -> None:
    """A request also ages while it is not the first in the queue."""
    scheduler = make(policy=Fifo(ageing=0.020))
    one, two = ask(scheduler, 0.0, 16), ask(scheduler, 0.0, 16)
    first = ask(scheduler, 0.0, 24)
    second = ask(scheduler, 0.001, ALL)
    give_back(scheduler, 0.010, two)
    assert give_back(scheduler, 0.030, one) == [first]
    assert ask(scheduler, 0.031, 8).state is GrantState.QUEUED, "kept for the second"
    assert give_back(scheduler, 0.040, first) == [second]


def test_a_device_is_kept_until_its_request_is_served() -> None:
    """Free cells of a kept device wait for its request; the others are granted afterwards."""
    scheduler = make(policy=Fifo(ageing=0.0))
    running = [ask(scheduler, 0.0, 8) for _ in range(4)]
    big = ask(scheduler, 0.0, ALL)
    small = [ask(scheduler, 0.0, 8) for _ in range(2)]
    for request in running[:3]:
        assert give_back(scheduler, 0.1, request) == []
    assert give_back(scheduler, 0.1, running[3]) == [big]
    assert give_back(scheduler, 0.2, big) == small


def test_only_one_device_is_kept() -> None:
    """Other devices go on serving while one is kept for the first request."""
    scheduler = make(SMALL, SMALL, policy=Fifo(ageing=0.0))
    ask(scheduler, 0.0, 24, devices=(0,))
    ask(scheduler, 0.0, 8, devices=(1,))
    big = ask(scheduler, 0.0, ALL)
    assert big.state is GrantState.QUEUED
    assert ask(scheduler, 1.0, 8, devices=(1,)).state is GrantState.QUEUED, (
        "it had the most free SMs"
    )
    assert ask(scheduler, 1.0, 8).grants[0].device == 0


def test_a_kept_device_stays_kept_when_a_more_urgent_request_comes() -> None:
    """No request overtakes an aged one on the device that is kept for it."""
    scheduler = make(policy=Fifo(ageing=0.020))
    running = [ask(scheduler, 0.0, 8), ask(scheduler, 0.0, 8)]
    big = ask(scheduler, 0.0, ALL)
    urgent = ask(scheduler, 0.030, 8, priority=9)
    assert urgent.state is GrantState.QUEUED, "16 SMs are free, and kept"
    assert give_back(scheduler, 0.040, running[0]) == []
    assert give_back(scheduler, 0.050, running[1]) == [big]
    assert give_back(scheduler, 0.060, big) == [urgent]


def test_a_kept_device_is_free_for_all_once_its_request_leaves() -> None:
    """Cancelling the request of a kept device grants the requests behind it at once."""
    scheduler = make(policy=Fifo(ageing=0.0))
    ask(scheduler, 0.0, 8)
    big = ask(scheduler, 0.0, ALL)
    held_back = [ask(scheduler, 0.0, 8) for _ in range(3)]
    assert scheduler.cancel(1.0, big) == held_back


def test_an_expired_request_frees_its_kept_device() -> None:
    """When the request of a kept device expires, the requests behind it are granted."""
    scheduler = make(policy=Fifo(ageing=0.0))
    ask(scheduler, 0.0, 8)
    big = ask(scheduler, 0.0, ALL, deadline=5.0)
    held_back = ask(scheduler, 0.0, 8)
    assert scheduler.tick(4.9) == ([], [])
    assert scheduler.tick(5.0) == ([held_back], [big])


def test_no_device_is_kept_where_a_request_waits_for_itself() -> None:
    """The kept device is one that the request can get while its holder keeps its leases."""
    scheduler = make(SMALL, SMALL, policy=Fifo(ageing=0.0))
    ask(scheduler, 0.0, 8, devices=(0,), holder="task")
    other = ask(scheduler, 0.0, 16, devices=(1,))
    whole = ask(scheduler, 0.0, ALL, holder="task")
    assert ask(scheduler, 0.0, 8, devices=(1,)).state is GrantState.QUEUED
    assert ask(scheduler, 0.0, 24, devices=(0,)).state is GrantState.GRANTED
    assert give_back(scheduler, 1.0, other) == [whole]


@pytest.mark.parametrize("duration", [None, 5.0])
def test_a_kept_device_is_open_to_a_request_whose_holder_has_grants_there(
    duration: float | None,
) -> None:
    """Otherwise the holder and the first request would wait for each other."""
    scheduler = make(policy=Fifo(ageing=0.0))
    outer = ask(scheduler, 0.0, 8, holder="task", duration=duration)
    other = ask(scheduler, 0.0, 24)
    whole = ask(scheduler, 1.0, ALL)
    stranger = ask(scheduler, 2.0, 8, duration=duration and 2 * duration)
    nested = ask(scheduler, 3.0, 8, holder="task", duration=duration)
    assert whole.state is stranger.state is nested.state is GrantState.QUEUED
    assert give_back(scheduler, 4.0, other) == [nested]
    at_once = ask(scheduler, 4.0, 8, holder="task")
    assert at_once.state is GrantState.GRANTED
    assert give_back(scheduler, 5.0, at_once) + give_back(scheduler, 5.0, nested) == []
    assert give_back(scheduler, 5.0, outer) == [whole]


def test_what_is_granted_on_a_kept_device_leaves_time_for_others_before_its_end() -> None:
    """A grant that delays the first request lets others in that end before it."""
    scheduler = make(policy=Fifo(ageing=0.0))
    ask(scheduler, 0.0, 8, holder="task", duration=5.0)
    ask(scheduler, 0.0, 8, duration=4.0)
    whole = ask(scheduler, 1.0, ALL)
    waiting = ask(scheduler, 1.0, 8, duration=5.0)
    assert whole.state is waiting.state is GrantState.QUEUED, "it would end at 6.0, not at 5.0"
    nested = ask(scheduler, 1.0, 8, holder="task", duration=6.0)
    assert nested.state is GrantState.GRANTED
    assert scheduler.resized(nested) == [waiting]


def test_the_request_with_a_kept_device_goes_first_everywhere() -> None:
    """An aged request is granted first wherever it fits, not only on its kept device."""
    scheduler = make(SMALL, SMALL, policy=Fifo(ageing=0.0))
    here, there = ask(scheduler, 0.0, ALL, devices=(0,)), ask(scheduler, 0.0, 24, devices=(1,))
    aged = ask(scheduler, 0.0, 16)
    urgent = ask(scheduler, 0.0, 16, priority=5)
    assert give_back(scheduler, 0.0, here) == [aged, urgent]
    assert {lease.device for request in (aged, urgent) for lease in request.grants} == {0}
    assert give_back(scheduler, 0.0, there) == []


def test_a_request_that_never_waits_is_held_back_too() -> None:
    """A request with `wait=False` does not overtake an aged request."""
    scheduler = make(policy=Fifo(ageing=0.0))
    ask(scheduler, 0.0, 8)
    ask(scheduler, 0.0, ALL)
    with pytest.raises(WouldBlock):
        ask(scheduler, 0.0, 8, wait=False)


def test_a_policy_of_ones_own_decides_the_order() -> None:
    """A user's policy decides the order of requests, of one size and of several."""

    @dataclass(frozen=True)
    class Youngest:
        def rank(self, request: RequestView) -> tuple[float, ...]:
            return (-request.order,)

        def may_overtake(self, first: RequestView, now: float) -> bool:
            return True

    scheduler = make(policy=Youngest())
    holder = ask(scheduler, 0.0, ALL)
    waiting = [ask(scheduler, 0.0, size) for size in (8, 8, 16, 8)]
    granted = give_back(scheduler, 0.0, holder)
    assert granted == [waiting[3], waiting[2], waiting[1]]


# -- leaving ------------------------------------------------------------------------------------


def test_a_cancelled_request_is_never_granted() -> None:
    """A cancelled request is never granted, and leaving twice changes nothing."""
    scheduler = make()
    holder = ask(scheduler, 0.0, ALL)
    gone, stays = ask(scheduler, 0.0, 8), ask(scheduler, 0.0, 8)
    assert scheduler.cancel(0.0, gone) == []
    assert scheduler.cancel(0.0, gone) == []
    assert give_back(scheduler, 0.0, holder) == [stays]
    assert gone.state is GrantState.GONE
    assert scheduler.statistics().cancelled == 1


def test_cancelling_a_granted_request_changes_nothing() -> None:
    """Cancelling a granted request does nothing; its leases end as usual."""
    scheduler = make()
    request = ask(scheduler, 0.0, ALL)
    assert scheduler.cancel(0.0, request) == []
    assert request.state is GrantState.GRANTED
    assert scheduler.statistics().cancelled == 0


def test_deadlines() -> None:
    """`tick` returns each expired request once, and `next_deadline` says when to call it."""
    scheduler = make()
    holder = ask(scheduler, 0.0, ALL, deadline=1.0)
    late = ask(scheduler, 0.0, 8, deadline=3.0)
    later = ask(scheduler, 0.0, 8, deadline=5.0)
    gone = ask(scheduler, 0.0, 8, deadline=2.0)
    patient = ask(scheduler, 0.0, 8)
    assert scheduler.next_deadline() == 2.0
    scheduler.cancel(0.5, gone)
    assert scheduler.next_deadline() == 3.0
    assert scheduler.tick(3.0, 0) == ([], [])
    assert scheduler.tick(3.0, 1) == ([], [late])
    assert scheduler.tick(3.0) == ([], [])
    assert give_back(scheduler, 4.0, holder) == [later, patient]
    assert scheduler.next_deadline() is None
    assert scheduler.tick(10.0) == ([], [])
    assert later.state is GrantState.GRANTED, "once granted, a deadline never cancels"


def test_close_empties_the_queue_in_order() -> None:
    """`close` returns the waiting requests in order of service and keeps granted ones."""
    scheduler = make()
    holder = ask(scheduler, 0.0, ALL)
    low, high = ask(scheduler, 0.0, 8), ask(scheduler, 0.0, 16, priority=1)
    gone = ask(scheduler, 0.0, 8)
    waited = scheduler.close()
    assert scheduler.waiting == 0
    assert scheduler.cancel(0.0, gone) == []
    assert list(waited) == [high, low]
    assert {low.state, high.state, gone.state} == {GrantState.GONE}
    assert list(scheduler.close()) == []
    assert give_back(scheduler, 0.0, holder) == []
    statistics = scheduler.statistics()
    assert statistics.requested == 4 == statistics.granted + statistics.cancelled


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(133,), (10**9,), (60, 60, 12), (REST, 132), (8,) * 17])
def test_what_can_never_fit_is_refused_at_once(sizes: tuple[Size, ...]) -> None:
    """A request above every device is refused at once, and the error gives the most."""
    scheduler = make(H100)
    ask(scheduler, 0.0, ALL)
    ask(scheduler, 0.0, ALL)
    with pytest.raises(TooManySMs) as caught:
        ask(scheduler, 0.0, *sizes)
    assert caught.value.asked > caught.value.most == 132
    assert scheduler.waiting == 1


@pytest.mark.parametrize("sizes", [(132,), (ALL,), (REST,), (8,) * 16, (120, REST), (56, 64, 12)])
def test_what_can_fit_some_day_is_not_refused(sizes: tuple[Size, ...]) -> None:
    """A request that can fit later waits, even if the remainder must be one of its parts."""
    scheduler = make(H100)
    holder = ask(scheduler, 0.0, ALL)
    request = ask(scheduler, 0.0, *sizes)
    assert give_back(scheduler, 0.0, holder) == [request]


def test_the_devices_asked_for_say_what_is_too_many() -> None:
    """A request for a small device is refused although a larger device could grant it."""
    scheduler = make(SMALL, H100)
    with pytest.raises(TooManySMs, match="at most 32"):
        ask(scheduler, 0.0, 40, devices=(0,))
    assert ask(scheduler, 0.0, 40).grants[0].device == 1


@pytest.mark.parametrize("sizes", [(24,), (ALL,), (REST,), (8, REST), (8, 16)])
def test_a_request_that_waits_for_its_own_holder_is_refused(sizes: tuple[Size, ...]) -> None:
    """A request that cannot fit beside its holder's leases is refused and not queued."""
    scheduler = make()
    mine = ask(scheduler, 0.0, 16, holder="task")
    with pytest.raises(WouldDeadlock) as caught:
        ask(scheduler, 0.0, *sizes, holder="task")
    assert (caught.value.holds, caught.value.most) == (16, 16)
    assert ask(scheduler, 0.0, 24).state is GrantState.QUEUED, "a request without a holder may wait"
    assert ask(scheduler, 0.0, 24, holder="another").state is GrantState.QUEUED
    scheduler.release(mine.grants[0])
    assert ask(scheduler, 0.0, *sizes, holder="task").state is GrantState.QUEUED, (
        "it drains by itself"
    )


def test_a_request_that_does_not_wait_is_not_a_deadlock() -> None:
    """`wait=False` raises WouldBlock even if the holder itself has the cells."""
    scheduler = make()
    ask(scheduler, 0.0, 16, holder="task")
    with pytest.raises(WouldBlock):
        ask(scheduler, 0.0, ALL, holder="task", wait=False)
    with pytest.raises(TooManySMs):
        ask(scheduler, 0.0, 33, holder="task", wait=False)


def test_another_device_is_no_deadlock() -> None:
    """A holder of one device may wait for another."""
    scheduler = make(SMALL, SMALL)
    ask(scheduler, 0.0, 8, devices=(0,), holder="task")
    ask(scheduler, 0.0, 8, devices=(1,))
    assert ask(scheduler, 0.0, ALL, holder="task").state is GrantState.QUEUED
    with pytest.raises(WouldDeadlock):
        ask(scheduler, 0.0, ALL, holder="task", devices=(0,))


def test_the_queue_is_bounded() -> None:
    """A full queue raises QueueFull, a request that leaves makes room, and 0 allows none."""
    scheduler = make(max_waiting=2)
    ask(scheduler, 0.0, ALL)
    first = ask(scheduler, 0.0, 8)
    ask(scheduler, 0.0, 8)
    with pytest.raises(QueueFull) as caught:
        ask(scheduler, 0.0, 8)
    assert caught.value.waiting == 2
    scheduler.cancel(0.0, first)
    assert ask(scheduler, 0.0, 8).state is GrantState.QUEUED
    assert scheduler.statistics().refused == 1
    none = make(max_waiting=0)
    ask(none, 0.0, ALL)
    with pytest.raises(QueueFull):
        ask(none, 0.0, 8)


@pytest.mark.parametrize("age", [0.0, 0.1, 0.5])
def test_retry_after_is_at_least_what_a_lease_takes(age: float) -> None:
    """It uses declared durations, then those of ended leases, then the ages of leases."""
    known = make(max_waiting=0)
    for _ in range(4):
        ask(known, 0.0, 8, duration=0.5)
    assert retry_after(known, age, duration=0.5) == 0.5
    assert retry_after(known, age, duration=2.0) == 2.0
    assert retry_after(known, age) == max(age, UNKNOWN_LEASE, 0.5 - age)


def test_retry_after_is_no_earlier_than_the_first_lease_ends() -> None:
    """A short request cannot begin before a long lease ends."""
    scheduler = make(max_waiting=0)
    for seconds in (5.0, 7.0):
        ask(scheduler, 0.0, 16, duration=seconds)
    assert retry_after(scheduler, 1.0, duration=0.1) == 4.0


def test_retry_after_learns_from_leases_that_ended() -> None:
    """It uses leases that ended while requests waited; idle hours do not count."""
    scheduler = make(max_waiting=1)
    now = 0.0
    for _ in range(100):
        holder = ask(scheduler, now, ALL)
        waiting = ask(scheduler, now + 3600.0, ALL)
        give_back(scheduler, now + 3600.25, holder)
        give_back(scheduler, now + 3600.25, waiting)
        now += 7200.0
    ask(scheduler, now, ALL)
    ask(scheduler, now, ALL)
    assert retry_after(scheduler, now) == pytest.approx(0.25, rel=0.01)


def retry_after(scheduler: Scheduler, now: float, **options: object) -> float:
    with pytest.raises(QueueFull) as caught:
        ask(scheduler, now, ALL, **options)
    return caught.value.retry_after


def test_the_first_begins_once_enough_leases_have_ended() -> None:
    """A request overtakes the first only if it ends before the lease that the first waits for."""
    scheduler = make(DeviceCells(size=8, count=8))
    ask(scheduler, 0.0, 32, duration=1.0)
    ask(scheduler, 0.0, 24, duration=5.0)
    ask(scheduler, 0.0, 32)
    now = 0.5
    assert scheduler.tick(now) == ([], [])
    assert ask(scheduler, now, 8, duration=2.0).state is GrantState.QUEUED
    assert ask(scheduler, now, 8, duration=0.4).state is GrantState.GRANTED


@pytest.mark.parametrize("joins", [False, True])
def test_sizes_that_do_not_pack_are_told_what_does(joins: bool) -> None:
    """For 64 + 64 of 132 SMs both refusals suggest a request that is granted."""
    device = DeviceCells(size=8, count=15, remainder=12, joins=joins)
    scheduler = make(device)
    if joins:
        assert ask(scheduler, 0.0, 64, 64).state is GrantState.GRANTED
        return
    with pytest.raises(
        TooManySMs, match=r"most 120 can\): ask for pool.partitions\(56, 64\)"
    ) as full:
        ask(scheduler, 0.0, 64, 64)
    assert full.value.asked > full.value.most == 120
    outer = ask(scheduler, 0.0, 64, holder="task")
    assert scheduler.statistics().sms_free == 56, "12 more are free, and fit into no partition"
    with pytest.raises(WouldDeadlock, match=r"pool.partitions\(56, 64\)") as nested:
        ask(scheduler, 0.0, 64, holder="task")
    assert (nested.value.holds, nested.value.asked, nested.value.most) == (64, 64, 56)
    assert ask(scheduler, 0.0, nested.value.most, holder="task").state is GrantState.GRANTED
    again = make(device)
    assert ask(again, 0.0, *nested.value.together).state is GrantState.GRANTED
    give_back(scheduler, 0.0, outer)


def test_a_refused_request_leaves_no_trace() -> None:
    """After a refusal of any kind, the queue, the cells and the holders are unchanged."""
    scheduler = make(max_waiting=1)
    ask(scheduler, 0.0, 24, holder="task")
    waiting = ask(scheduler, 0.0, ALL)
    before = (list(scheduler.allocator.free_masks), scheduler.waiting, footprint(scheduler))
    for error, sizes, options in [
        (TooManySMs, (33,), {}),
        (WouldDeadlock, (16,), {"holder": "task"}),
        (WouldBlock, (16,), {"wait": False}),
        (QueueFull, (16,), {}),
    ]:
        with pytest.raises(error):
            ask(scheduler, 0.0, *sizes, **options)
    assert (scheduler.allocator.free_masks, scheduler.waiting, footprint(scheduler)) == before
    assert waiting.state is GrantState.QUEUED


# -- policies and bounds ------------------------------------------------------------------------


def test_policies_by_name() -> None:
    """A policy is a name or an object; an unknown name raises an error that lists the names."""
    assert type(policy_named("fifo")) is Fifo
    own = Fifo(ageing=1.0)
    assert policy_named(own) is own
    with pytest.raises(InvalidRequest, match="policy='lifo': give one of fifo"):
        policy_named("lifo")


@pytest.mark.parametrize("ageing", [-0.001, float("nan")])
def test_an_ageing_that_is_no_time_is_refused(ageing: float) -> None:
    """Ageing is a number of seconds from 0 to infinity; other values are refused."""
    with pytest.raises(InvalidRequest, match="ageing"):
        Fifo(ageing=ageing)
    assert Fifo(ageing=0.0).ageing == 0.0
    assert Fifo(ageing=float("inf")).may_overtake(
        Request(ClassState(DEFAULT_CLASS), (), (), 0, 0.0, 0), 1e9
    )


@pytest.mark.parametrize("bound", [-1, 1.5, True, None, "8"])
def test_a_bound_that_is_no_number_is_refused(bound: object) -> None:
    """`max_waiting` is a whole number from 0 on; other values are refused."""
    with pytest.raises(InvalidRequest, match="max_waiting"):
        validate_bound(bound)
    assert validate_bound(0) == 0


# -- nothing grows, and how much is looked at ---------------------------------------------------


def footprint(scheduler: Scheduler) -> int:
    """Count every object that the scheduler references."""
    heaps = sum(len(line) for line in scheduler.queue.lines.values())
    held = sum(len(leases) for leases in scheduler.dispatcher._held.values())
    return (
        heaps
        + held
        + len(scheduler.queue.lines)
        + len(scheduler.queue._deadlines)
        + len(scheduler.dispatcher._held)
    )


def test_nothing_grows_with_past_requests() -> None:
    """After 10,000 requests of every outcome with a non-empty queue, no state is left."""
    scheduler = make(policy=Fifo(ageing=0.5))
    running: list[Grant] = list(ask(scheduler, 0.0, ALL).grants)
    waiting = [ask(scheduler, 0.0, 8, deadline=1e9)]
    most = 0
    for i in range(1, 10_000):
        now = float(i)
        deadline = [None, 1e9, now + 2.0][i % 3]
        waiting.append(ask(scheduler, now, 8 + i % 25, deadline=deadline, holder=i, priority=i % 2))
        if i % 4 == 1:
            for request in scheduler.cancel(now, waiting[-2]):
                running.extend(request.grants)
        granted, _ = scheduler.tick(now)
        while scheduler.waiting > 3:
            granted += scheduler.drained(now, running.pop(0))
        running.extend(lease for request in granted for lease in request.grants)
        waiting = [request for request in waiting if request.state is GrantState.QUEUED]
        assert waiting
        most = max(most, footprint(scheduler))
    assert most <= 3 * (2 * 5 + STALE_LEAST) + 3 * 4
    for request in waiting:
        scheduler.cancel(1e5, request)
    for lease in running:
        if not lease.over:
            scheduler.drained(1e5, lease)
    assert footprint(scheduler) == 0
    assert scheduler.statistics().sms_free == 32


@pytest.mark.fault("B7")
@pytest.mark.white_box
def test_a_mass_cancellation_is_linear_and_leaves_nothing() -> None:
    """Cancelling 10,000 requests looks at no cells, and the one that stays is served."""
    counting = CountingCells(size=8, count=4)
    scheduler = make(counting, policy=Fifo(ageing=0.0), max_waiting=20_000)
    holder = ask(scheduler, 0.0, ALL)
    stays = ask(scheduler, 0.0, 16)
    waiting = [ask(scheduler, 0.0, 8 + i % 20, deadline=1e9) for i in range(10_000)]
    LOOKS.clear()
    for request in waiting:
        assert scheduler.cancel(1.0, request) == []
    assert LOOKS == []
    assert footprint(scheduler) <= 3 * (2 + STALE_LEAST)
    assert give_back(scheduler, 2.0, holder) == [stays]
    assert footprint(scheduler) == 0


@pytest.mark.fault("B9")
@pytest.mark.white_box
def test_a_decision_costs_as_much_as_there_are_different_sizes() -> None:
    """10,000 requests of three sizes take at most three searches, or none if too little is free."""
    counting = CountingCells(size=8, count=4)
    scheduler = make(counting, max_waiting=20_000)
    running = [ask(scheduler, 0.0, 8) for _ in range(4)]
    waiting = [ask(scheduler, 0.0, (24, 16, 32)[i % 3]) for i in range(10_000)]
    LOOKS.clear()
    assert give_back(scheduler, 0.001, running[0]) == []
    assert LOOKS == []
    assert give_back(scheduler, 0.002, running[1]) == [waiting[1]]
    assert len(LOOKS) == 1


@pytest.mark.white_box
def test_a_decision_skips_requests_from_which_a_device_is_kept() -> None:
    """No cells are searched on a kept device for other requests."""
    counting = CountingCells(size=8, count=4)
    scheduler = make(counting, policy=Fifo(ageing=0.0), max_waiting=20_000)
    running = [ask(scheduler, 0.0, 8) for _ in range(4)]
    first = ask(scheduler, 0.0, 32)
    small = [ask(scheduler, 0.0, (8, 16, 24)[i % 3]) for i in range(3_000)]
    LOOKS.clear()
    for number, lease in enumerate(running, 1):
        assert give_back(scheduler, 0.001 * number, lease) == ([first] if number == 4 else [])
    assert len(LOOKS) == 1
    assert give_back(scheduler, 0.01, first) == [small[0], small[1]]


@pytest.mark.white_box
def test_an_uncontended_lease_looks_at_one_device_once() -> None:
    """With an empty queue a request takes one search on one device, and its return none."""
    counting = CountingCells(size=8, count=4)
    scheduler = make(counting)
    LOOKS.clear()
    request = ask(scheduler, 0.0, 16)
    assert len(LOOKS) == 1
    give_back(scheduler, 0.0, request)
    assert len(LOOKS) == 1


LOOKS: list[int] = []


class CountingCells(DeviceCells):
    """Cells that count the searches for a fit."""

    __slots__ = ()

    def fit_all(self, free, parts, warm=()):  # type: ignore[no-untyped-def,override]
        LOOKS.append(free)
        return super().fit_all(free, parts, warm or {})


@pytest.mark.fault("I15")
def test_what_fits_before_a_reservation_counts_overruns() -> None:
    """A class whose leases take twice as long as it says is not let in for what it says."""
    late = ServiceClass("late")
    scheduler = Scheduler([SMALL], Fifo(ageing=0), 1000, services=[late])
    give_back(scheduler, 2.0, ask(scheduler, 0.0, 8, service="late", duration=1.0))
    ask(scheduler, 10.0, 16, duration=3.0)
    assert ask(scheduler, 10.0, ALL).state is GrantState.QUEUED
    assert ask(scheduler, 10.0, 8, service="late", duration=2.0).state is GrantState.QUEUED
    assert ask(scheduler, 10.0, 8, duration=2.0).state is GrantState.GRANTED


@pytest.mark.fault("I15")
def test_no_device_is_kept_for_a_request_whose_executor_is_made() -> None:
    """Its cells are free: others have them until the executor is there."""
    scheduler = Scheduler([SMALL], Fifo(ageing=0), 1000, lambda _, mask: mask.bit_count() < 3)
    assert ask(scheduler, 0.0, 24).state is GrantState.QUEUED
    assert scheduler.missing_executors
    assert ask(scheduler, 1.0, 16).state is GrantState.GRANTED


def test_waits_before_leases_are_timed_do_not_count() -> None:
    """`wait` has the requests that are granted from `time_leases` on."""
    scheduler = make()
    holder, waiting = ask(scheduler, 0.0, ALL), ask(scheduler, 0.0, ALL)
    assert give_back(scheduler, 1.0, holder) == [waiting]
    scheduler.time_leases(1.0)
    waits = scheduler.services(1.0)[""].wait
    assert waits is not None
    assert (waits.count, waits.seconds) == (0, 0.0)


@pytest.mark.parametrize("services", [(), (ServiceClass("a"),)])
@pytest.mark.parametrize("sms", [8, (8, 16)])
def test_sm_seconds_are_those_of_open_and_of_ended_leases(
    services: tuple[ServiceClass, ...], sms: Size
) -> None:
    """A timed scheduler counts each lease once, with its checkpoints, with and without classes."""
    scheduler = Scheduler((DeviceCells(size=8, count=1),), Fifo(), 100, services=services)
    scheduler.time_leases(0.0)
    request = ask(scheduler, 0.0, sms)
    scheduler.checkpoint(1.0, request.grants[0])
    assert scheduler.services(3.0)[""].sm_seconds == 3 * 8
    give_back(scheduler, 4.0, request)
    assert scheduler.services(5.0)[""].sm_seconds == 4 * 8


def test_reading_statistics_counts_no_lease_again() -> None:
    """Short leases on a suspended grant count once, however often they are read."""
    scheduler = make()
    scheduler.time_leases(0.0)
    (grant,) = ask(scheduler, 0.0, 8).grants
    assert scheduler.suspend(1e-6, grant)
    found = [scheduler.services(1.0)[""].use for _ in range(3)]
    scheduler.reclaim(1.0)
    found.append(scheduler.services(1.0)[""].use)
    assert [use and (use.count, use.seconds) for use in found] == [(1, 1e-6)] * 4
