"""Shared mode: shared grants, their queue, and when devices are split and merged."""

from __future__ import annotations

import pytest

from greensched.errors import DeadlineImpossible
from greensched.scheduling.cells import DeviceCells, parse_sizes
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.policy import Fifo
from greensched.scheduling.requests import GrantState, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass
from greensched.scheduling.split_controller import (
    HOLD,
    LONGEST,
    LOOK,
    NEAR,
    ONE_IN,
    SplitController,
)
from greensched.typing import ALL, Size

DEVICE = DeviceCells(size=8, count=8)
QUICK = ServiceClass("quick", shared=True, latency=0.010)
BULK = ServiceClass("bulk", shared=True)
PLAIN = ServiceClass("plain")
#: So many that are near make devices split.
ENOUGH = LOOK // ONE_IN


def make(*classes: ServiceClass) -> Scheduler:
    return Scheduler((DEVICE,), Fifo(), 1000, services=classes or (QUICK, BULK, PLAIN))


def ask(scheduler: Scheduler, now: float, sms: Size, service: str, **options: object) -> Request:
    return scheduler.request(now, parse_sizes((sms,)), service=service, **options)  # type: ignore[arg-type]


def end(scheduler: Scheduler, now: float, request: Request) -> list[Request]:
    (lease,) = request.grants
    return scheduler.drained(now, lease)


def split(scheduler: Scheduler, now: float) -> list[Request]:
    return scheduler.observe(now, "quick", 0.011, ENOUGH)


def test_a_device_is_whole_again_after_its_shared_grants() -> None:
    """A request for all SMs waits only for the exclusive lease before it."""
    scheduler = make()
    end(scheduler, 1.0, ask(scheduler, 0.0, ALL, "bulk"))
    held = ask(scheduler, 1.0, 8, "plain")
    waits = ask(scheduler, 1.0, ALL, "plain")
    assert waits.state is GrantState.QUEUED
    assert end(scheduler, 2.0, held) == [waits]


def test_an_exclusive_request_begins_after_all_shared_grants() -> None:
    """It is refused at once if it would miss its deadline behind them."""
    scheduler = make()
    ask(scheduler, 0.0, ALL, "bulk", duration=0.5)
    with pytest.raises(DeadlineImpossible):
        ask(scheduler, 0.0, 8, "plain", duration=0.1, deadline=0.2)


def test_shared_grants_are_spread_over_the_devices() -> None:
    """A shared lease goes to the device with the fewest shared leases."""
    scheduler = Scheduler((DEVICE, DEVICE), Fifo(), 1000, services=(QUICK, BULK))
    found = [ask(scheduler, 0.0, ALL, "bulk").grants[0].device for _ in range(4)]
    assert found == [0, 1, 0, 1]


def test_classes_that_allow_it_have_all_sms_at_once() -> None:
    """A shared lease of any size has all SMs, and an executor of its own."""
    scheduler = make()
    wanted = (8, "quick"), ((16, 32), "bulk"), (ALL, "bulk")
    found = [ask(scheduler, 0.0, sms, name) for sms, name in wanted]
    assert [r.state for r in found] == [GrantState.GRANTED] * 3
    assert [r.grants[0].sms for r in found] == [64] * 3
    assert len({r.grants[0].mask for r in found}) == 3
    assert scheduler.services(0.0)["bulk"].is_shared
    assert scheduler.statistics().sms_leased == 64
    assert scheduler.statistics().sms_free == 0


def test_shared_and_exclusive_leases_never_coexist() -> None:
    """An exclusive request waits for all shared leases, and none begins beside it."""
    scheduler = make()
    one, other = ask(scheduler, 0.0, 8, "quick"), ask(scheduler, 0.0, 8, "bulk")
    apart = ask(scheduler, 0.0, 8, "plain")
    assert end(scheduler, 0.001, one) == []
    assert end(scheduler, 0.002, other) == [apart]
    beside = ask(scheduler, 0.003, 8, "quick")
    assert beside.grants[0].sms == 8
    assert beside.grants[0].mask & apart.grants[0].mask == 0


def test_an_exclusive_request_is_not_overtaken_for_ever() -> None:
    """The device is kept for an exclusive request that has aged."""
    scheduler = make()
    shared = [ask(scheduler, 0.0, 8, "bulk")]
    apart = ask(scheduler, 0.0, 8, "plain")
    shared.append(ask(scheduler, 0.019, 8, "bulk"))
    assert ask(scheduler, 0.020, 8, "bulk").state is GrantState.QUEUED
    assert next(r for each in shared for r in end(scheduler, 0.021, each)) is apart


def test_near_its_latency_a_class_has_devices_split() -> None:
    """One late latency in a hundred is enough; later leases get cells once shared ones end."""
    scheduler = make()
    old = ask(scheduler, 0.0, 8, "bulk")
    scheduler.observe(0.0, "quick", 0.010 * NEAR, LOOK - 100)
    scheduler.observe(0.0, "quick", 0.010, ENOUGH - 1)
    assert ask(scheduler, 0.0, 8, "bulk").grants[0].is_shared
    split(scheduler, 0.0)
    assert not scheduler.services(0.0)["quick"].is_shared
    new = ask(scheduler, 0.0, 16, "quick")
    assert (new.grants[0].sms, new.grants[0].is_shared) == (16, False)
    assert old.grants[0].is_shared
    assert ask(scheduler, 0.0, 8, "plain").state is GrantState.QUEUED, "shared leases drain"


def test_without_observations_the_leases_count() -> None:
    """Without `observe`, a latency is the time from the request to the lease's end."""
    scheduler = make()
    for _ in range(ENOUGH):
        assert scheduler.services(0.0)["quick"].is_shared
        end(scheduler, 0.009, ask(scheduler, 0.0, 8, "quick"))
    assert not scheduler.services(0.0)["quick"].is_shared


def test_an_elastic_lease_leaves_shared_mode_and_returns() -> None:
    """Checkpoints move it, first with its minimum, which leaves cells for the others."""
    scheduler = make()
    one, other = ask(scheduler, 0.0, (16, 64), "bulk"), ask(scheduler, 0.0, (32, 64), "bulk")
    (first,), (second,) = one.grants, other.grants
    split(scheduler, 0.0)
    scheduler.checkpoint(0.1, first)
    assert (first.sms, first.is_shared) == (16, False)
    scheduler.checkpoint(0.1, second)
    assert (second.sms, second.is_shared) == (48, False)
    scheduler.observe(HOLD * 3, "quick", 0.001, 1)
    for lease in (first, second):
        scheduler.checkpoint(HOLD * 3, lease)
        assert (lease.sms, lease.is_shared) == (64, True)
    assert scheduler.allocator.free_masks == [DEVICE.full_mask]


def test_a_waiting_request_makes_an_elastic_lease_leave_shared_mode() -> None:
    """An exclusive request can be granted the cells that the elastic lease leaves."""
    scheduler = make()
    (lease,) = ask(scheduler, 0.0, (16, 64), "bulk").grants
    apart = ask(scheduler, 0.0, 8, "plain")
    assert scheduler.checkpoint(0.001, lease) == [apart]
    assert not lease.is_shared
    assert lease.mask & apart.grants[0].mask == 0


@pytest.mark.parametrize(("budget", "is_shared_now"), [(0.0, False), (0.002, False), (0.004, True)])
def test_an_owner_waits_for_shared_leases_no_longer_than_for_loans(
    budget: float, is_shared_now: bool
) -> None:
    """An exclusive owner has its reserve back within its budget."""
    owner = ServiceClass("owner", reserve=16, max_wait_for_reserve=budget)
    bulk = ServiceClass("bulk", shared=True, preemptible=True)
    scheduler = make(owner, bulk)
    request = ask(scheduler, 0.0, 8, "bulk", duration=0.003)
    assert request.grants[0].is_shared is is_shared_now
    assert (ask(scheduler, 0.001, 16, "owner").state is GrantState.GRANTED) is not is_shared_now


def test_a_capped_class_is_not_shared() -> None:
    """A capped class cannot be shared, because all SMs exceed its cap."""
    scheduler = make(ServiceClass("bulk", shared=True, cap=32))
    assert ask(scheduler, 0.0, (8, 64), "bulk").grants[0].sms == 32


def test_leases_end_as_they_began() -> None:
    """If a class stops sharing, its shared leases stay, and no grant begins beside them."""
    scheduler = make()
    old = ask(scheduler, 0.0, 8, "bulk")
    scheduler.reconfigure(0.0, (ServiceClass("bulk"),), None)
    new = ask(scheduler, 0.0, 8, "bulk")
    assert new.state is GrantState.QUEUED
    assert end(scheduler, 0.0, old) == [new]


# -- the controller --------------------------------------------------------------------------------


def see(controller: SplitController, state: ClassState, now: float, near: int, others: int) -> bool:
    changed = controller.record(state, 0.001, others, now) if others else False
    return controller.record(state, 0.011, near, now) or changed if near else changed


def test_devices_stay_split_for_a_time_that_doubles() -> None:
    """Devices do not alternate between split and shared if neither is fast enough."""
    controller, state, now, held = SplitController(), ClassState(QUICK), 0.0, []
    for _ in range(9):
        assert see(controller, state, now, ENOUGH, 0)
        began = now
        while controller.is_split:
            now += HOLD / 4
            see(controller, state, now, 0, 1)
        held.append(now - began)
    assert held == [min(LONGEST, HOLD * 2**i) for i in (*range(1, 9), 9)]
    now += 2 * LONGEST
    assert see(controller, state, now, ENOUGH, 0)
    assert see(controller, state, now + HOLD, 0, 1), "after a long time it begins anew"


def test_devices_are_not_split_where_that_was_worse() -> None:
    """If more latencies were near the target when split, it is tried again only much later."""
    controller, state = SplitController(), ClassState(QUICK)
    assert see(controller, state, 0.0, ENOUGH, LOOK - 100)
    assert see(controller, state, 2 * HOLD, 50, 50), "half of them, and 1 in 80 before"
    for i in range(4):
        assert not see(controller, state, 2 * HOLD + i, ENOUGH, LOOK - ENOUGH)
    assert see(controller, state, 2 * HOLD + LONGEST + 4, ENOUGH, LOOK - ENOUGH)


def test_a_class_without_a_latency_never_splits_a_device() -> None:
    """A class without a latency is never late, so its device stays shared."""
    assert not SplitController().record(ClassState(BULK), 1e9, 1000, 0.0)
