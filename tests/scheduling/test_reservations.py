"""Reserves, caps and loans."""

from __future__ import annotations

import math

import pytest

from greensched.errors import InvalidRequest, TooManySMs
from greensched.leasing.latency import LatencyCurve
from greensched.scheduling.cells import DeviceCells, parse_sizes
from greensched.scheduling.policy import Fifo
from greensched.scheduling.requests import GrantState, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass
from greensched.typing import ALL, Size

DEVICE = DeviceCells(size=8, count=8)
OWNER = ServiceClass("owner", reserve=32, max_wait_for_reserve=0.010)
BATCH = ServiceClass("batch", preemptible=True, checkpoint_interval=0.005)
PLAIN = ServiceClass("plain")


def make(*classes: ServiceClass, devices: tuple[DeviceCells, ...] = (DEVICE,)) -> Scheduler:
    return Scheduler(devices, Fifo(), 1000, services=classes)


def ask(scheduler: Scheduler, now: float, sms: Size, service: str, **options: object) -> Request:
    return scheduler.request(now, parse_sizes((sms,)), service=service, **options)  # type: ignore[arg-type]


def test_a_reserve_is_kept_for_its_owner() -> None:
    """Other classes get the SMs outside the reserve, which stays free for its owner."""
    scheduler = make(OWNER, PLAIN)
    assert ask(scheduler, 0.0, 32, "plain").state is GrantState.GRANTED
    waiting = ask(scheduler, 0.0, 8, "plain")
    assert waiting.state is GrantState.QUEUED
    assert ask(scheduler, 1.0, 32, "owner").state is GrantState.GRANTED
    assert ask(scheduler, 1.0, 8, "owner").state is GrantState.QUEUED, (
        "beyond its reserve it waits, too"
    )


def test_a_request_without_a_class_gets_no_reserved_sms() -> None:
    """A request without a class has no reserve and cannot borrow."""
    scheduler = make(OWNER)
    ask(scheduler, 0.0, 32, "")
    assert ask(scheduler, 0.0, 8, "").state is GrantState.QUEUED
    with pytest.raises(TooManySMs, match="at most 32, or name a class") as caught:
        ask(scheduler, 0.0, ALL, "")
    assert (caught.value.asked, caught.value.most) == (64, 32)


def test_free_cells_of_a_reserve_do_not_end_a_wait() -> None:
    """Leases that end before a waiting request can begin overtake it, beside a reserve."""
    scheduler = make(ServiceClass("owner", reserve=32, max_wait_for_reserve=0), PLAIN)
    ask(scheduler, 0.0, 8, "plain", duration=4.0)
    whole = ask(scheduler, 0.0, 32, "plain")
    assert whole.state is GrantState.QUEUED, "of 56 free SMs 32 are kept"
    assert ask(scheduler, 1.0, 8, "plain", duration=4.0).state is GrantState.QUEUED
    assert ask(scheduler, 1.0, 8, "plain", duration=2.0).state is GrantState.GRANTED


def test_a_reserve_is_one_block() -> None:
    """The cells of a reserve stay contiguous."""
    scheduler = make(OWNER, PLAIN)
    others = [ask(scheduler, 0.0, 8, "plain") for _ in range(4)]
    for request in others[::2]:
        scheduler.drained(0.0, request.grants[0])
    (lease,) = ask(scheduler, 0.0, 32, "owner").grants
    assert lease.mask == 0b11110000


@pytest.mark.fault("F11")
def test_a_cap_bounds_what_a_class_holds() -> None:
    """A class at its cap waits although cells are free, and other classes overtake it."""
    scheduler = make(ServiceClass("small", cap=16), PLAIN)
    first = ask(scheduler, 0.0, (8, 64), "small")
    assert first.grants[0].sms == 16
    waiting = ask(scheduler, 0.0, 8, "small")
    assert waiting.state is GrantState.QUEUED
    assert ask(scheduler, 5.0, 48, "plain").state is GrantState.GRANTED, "no device is kept for it"
    assert scheduler.drained(6.0, first.grants[0]) == [waiting]
    with pytest.raises(TooManySMs, match=r"never be granted here \(at most 16 can"):
        ask(scheduler, 0.0, 17, "small")


def test_only_a_lease_known_to_end_in_time_borrows() -> None:
    """A loan needs a preemptible class, a known end, and an owner that may wait until then."""
    scheduler = make(OWNER, BATCH, PLAIN)
    ask(scheduler, 0.0, 32, "plain")
    assert ask(scheduler, 0.0, 8, "plain", duration=0.001).state is GrantState.QUEUED, (
        "not preemptible"
    )
    assert ask(scheduler, 0.0, 8, "batch", duration=0.020).state is GrantState.QUEUED, "too long"
    assert ask(scheduler, 0.0, 8, "batch", duration=0.010).state is GrantState.GRANTED
    assert ask(scheduler, 0.0, 8, "batch").state is GrantState.GRANTED, "5 ms, as it declared"
    assert scheduler.services(0.0)["owner"].sms_lent == 16
    unknown = make(OWNER, ServiceClass("batch", preemptible=True), PLAIN)
    ask(unknown, 0.0, 32, "plain")
    assert ask(unknown, 0.0, 8, "batch").state is GrantState.QUEUED, "nothing is known of it"


def test_a_loan_may_last_as_long_as_its_owner_waits() -> None:
    """A request that must borrow for longer waits for other leases to end."""
    scheduler = make(OWNER, BATCH, PLAIN)
    ask(scheduler, 0.0, 8, "plain")
    assert ask(scheduler, 0.0, 64, "batch", duration=0.010).state is GrantState.QUEUED
    with pytest.raises(TooManySMs):
        ask(scheduler, 0.0, 64, "batch", duration=0.020)


def test_several_parts_borrow_for_as_long_as_the_smallest_takes() -> None:
    """The owner's budget is compared with the longest part; the first part does not count."""
    scheduler = make(OWNER, BATCH, PLAIN)
    ask(scheduler, 0.0, 32, "plain")
    curve = LatencyCurve({8: [0.024], 24: [0.008]})
    parts = parse_sizes((24, 8))
    together = scheduler.request(0.0, parts, service="batch", duration=curve)
    assert together.state is GrantState.QUEUED
    assert ask(scheduler, 0.0, 32, "owner").state is GrantState.GRANTED


@pytest.mark.parametrize("ageing", [0.020, math.inf])
def test_no_device_is_kept_for_a_request_that_is_lent_nothing(ageing: float) -> None:
    """A class that overran its loans gets none, and its request keeps no device from others."""
    scheduler = Scheduler([DEVICE], Fifo(ageing=ageing), 9, services=[OWNER, BATCH, PLAIN])
    held = ask(scheduler, 0.0, ALL, "batch", duration=0.001)
    waiting = ask(scheduler, 0.0, ALL, "batch", duration=0.001)
    assert scheduler.drained(1.0, held.grants[0]) == [], "a thousand times what it said"
    scheduler.tick(2.0)
    assert [request for request, _ in scheduler.rejected] == [waiting]
    assert ask(scheduler, 2.0, 8, "plain").state is GrantState.GRANTED
    with pytest.raises(TooManySMs, match="that may borrow"):
        ask(scheduler, 2.0, ALL, "batch")


@pytest.mark.parametrize("sms", [40, 64])
def test_owners_do_not_wait_for_each_other_for_ever(sms: int) -> None:
    """Owners that need more than their reserves lend to each other on an idle device."""
    rules = {
        "reserve": 32,
        "max_wait_for_reserve": 0.010,
        "preemptible": True,
        "checkpoint_interval": 0.005,
    }
    scheduler = make(*(ServiceClass(name, **rules) for name in "ab"))  # type: ignore[arg-type]
    held = [ask(scheduler, 0.0, 32, name) for name in "ab"]
    waiting = [ask(scheduler, 0.0, sms, name) for name in "ab"]
    assert scheduler.drained(0.005, held[0].grants[0]) == []
    assert scheduler.drained(0.005, held[1].grants[0]) == [waiting[0]]
    assert scheduler.services(0.0)["b"].sms_lent == sms - 32
    assert scheduler.drained(0.010, waiting[0].grants[0]) == [waiting[1]]


def test_a_class_beyond_its_quota_blocks_no_other() -> None:
    """A device kept for a request goes to others once its class is over its quota."""
    scheduler = make(ServiceClass("a", quota=8), PLAIN)
    held = [ask(scheduler, 0.0, 8, "a"), ask(scheduler, 0.0, 32, "plain")]
    ask(scheduler, 0.0, 48, "a")
    first = ask(scheduler, 1.0, 8, "plain")
    assert first.state is GrantState.QUEUED, "the device is kept"
    assert scheduler.drained(9.0, held[0].grants[0]) == [first]
    assert ask(scheduler, 9.0, 8, "plain").state is GrantState.GRANTED


@pytest.mark.parametrize("owner", [ServiceClass("owner", reserve=32), ServiceClass("owner", 64)])
def test_an_owner_that_may_not_wait_lends_nothing(owner: ServiceClass) -> None:
    """Its reserve stays idle, even if a borrower's lease would end soon."""
    scheduler = make(owner, BATCH)
    with pytest.raises(TooManySMs):
        ask(scheduler, 0.0, ALL, "batch", duration=1e-6)


def test_the_budget_is_half_of_the_latency() -> None:
    """An owner without a blocking budget waits for loans for up to half of its latency."""
    assert ServiceClass("a", latency=0.050).reserve_wait == 0.025
    assert ServiceClass("a", latency=0.050, max_wait_for_reserve=0.0).reserve_wait == 0
    assert ServiceClass("a").reserve_wait == 0


def test_an_elastic_lease_borrows_above_its_least() -> None:
    """The minimum must be the borrower's own; cells above it may be borrowed."""
    scheduler = make(OWNER, BATCH, PLAIN)
    ask(scheduler, 0.0, 24, "plain")
    (lease,) = ask(scheduler, 0.0, (8, 64), "batch").grants
    assert lease.sms == 40
    assert dict(lease.loans) == {scheduler.allocator.classes["owner"]: 4}
    assert ask(scheduler, 0.0, (8, 64), "batch").state is GrantState.QUEUED, "its least is not lent"


def test_a_loan_comes_back_at_the_checkpoint() -> None:
    """An owner waits only for the borrower's next checkpoint, and then has its whole reserve."""
    scheduler = make(OWNER, BATCH)
    (lease,) = ask(scheduler, 0.0, (8, 64), "batch").grants
    owner = ask(scheduler, 1.0, 32, "owner")
    assert owner.state is GrantState.QUEUED
    assert scheduler.checkpoint(1.004, lease) == [owner]
    assert lease.sms == 32, "of what is idle it takes what is not lent"
    assert owner.grants[0].mask & lease.mask == 0
    assert scheduler.services(0.0)["owner"].sms_lent == 0


def test_a_loan_is_not_renewed_while_its_owner_waits() -> None:
    """Cells that the owner cannot use yet are kept for it, and not lent again."""
    scheduler = make(OWNER, BATCH, PLAIN)
    ask(scheduler, 0.0, 8, "plain")
    first, second = (ask(scheduler, 0.0, 16, "batch").grants[0] for _ in range(2))
    (third,) = ask(scheduler, 0.0, 24, "batch").grants
    owner = ask(scheduler, 0.0, 32, "owner")
    assert owner.state is GrantState.QUEUED
    new = ask(scheduler, 0.0, 8, "batch")
    assert scheduler.drained(0.001, third) == []
    assert new.state is GrantState.QUEUED, "24 SMs are free, and the owner's"
    assert scheduler.drained(0.002, second) == [owner, new]
    assert not first.over


def test_an_owner_that_stops_waiting_lends_again() -> None:
    """When the owner's last request stops waiting, requests that may borrow are granted."""
    scheduler = make(OWNER, BATCH)
    (lease,) = ask(scheduler, 0.0, (8, 40), "batch").grants
    owner = ask(scheduler, 0.0, 32, "owner")
    other = ask(scheduler, 0.0, 8, "batch")
    assert (owner.state, other.state) == (GrantState.QUEUED, GrantState.QUEUED)
    assert scheduler.cancel(0.0, owner) == [other]
    assert lease.sms == 40


def test_an_owner_with_its_whole_reserve_takes_no_loan_back() -> None:
    """The borrower then keeps its cells, which no longer count against the reserve."""
    scheduler = make(OWNER, BATCH, PLAIN)
    (plain,) = ask(scheduler, 0.0, 32, "plain").grants
    (borrowed,) = ask(scheduler, 0.0, 32, "batch").grants
    assert scheduler.services(0.0)["owner"].sms_lent == 32
    scheduler.drained(0.0, plain)
    (own,) = ask(scheduler, 0.0, 32, "owner").grants
    assert scheduler.services(0.0)["owner"].sms_lent == 0
    assert dict(borrowed.loans) == {}
    scheduler.drained(0.0, own)
    assert ask(scheduler, 0.0, 32, "plain").state is GrantState.QUEUED, "it is reserved again"


def test_a_class_that_ran_longer_than_declared_borrows_no_more() -> None:
    """A class whose lease outlasted the owner's budget cannot borrow for a time."""
    scheduler = make(OWNER, BATCH, PLAIN)
    ask(scheduler, 0.0, 32, "plain")
    (late,) = ask(scheduler, 0.0, 8, "batch").grants
    scheduler.drained(0.5, late)
    assert ask(scheduler, 0.5, 8, "batch").state is GrantState.QUEUED


def test_an_owner_has_its_reserve_on_a_device_that_is_kept() -> None:
    """A device kept for an aged request still grants a class its reserve there."""
    scheduler = make(ServiceClass("owner", reserve=16, max_wait_for_reserve=0.010), BATCH, PLAIN)
    ask(scheduler, 0.0, 40, "plain")
    large = ask(scheduler, 0.0, 48, "plain")
    assert scheduler.request(1.0, parse_sizes((8,)), service="plain").state is GrantState.QUEUED
    assert ask(scheduler, 1.0, 16, "owner").state is GrantState.GRANTED
    assert large.state is GrantState.QUEUED


def test_reserves_lie_on_the_devices_with_free_cells() -> None:
    """Each reserve is on one device, placed largest first; too many raise an error."""
    scheduler = make(
        ServiceClass("a", reserve=40), ServiceClass("b", reserve=40), devices=(DEVICE, DEVICE)
    )
    homes = [scheduler.allocator.classes[name].home for name in "ab"]
    assert sorted(homes) == [0, 1]
    with pytest.raises(InvalidRequest, match=r"'c': reserve=40: the reserves together do not fit"):
        make(*(ServiceClass(name, reserve=40) for name in "abc"), devices=(DEVICE, DEVICE))


def test_what_an_elastic_lease_gives_back_is_made() -> None:
    """If its minimum lacks an executor, one is made, and other requests keep waiting."""
    made = {DEVICE.full_mask}
    scheduler = Scheduler(
        (DEVICE,),
        Fifo(),
        10,
        lambda _, mask: mask in made or mask.bit_count() == 6,
        services=(OWNER, BATCH),
    )
    (lease,) = ask(scheduler, 0.0, (8, 64), "batch", duration=0.001).grants
    assert lease.mask == DEVICE.full_mask
    missing = (0, 0b11110000), (0, 0b00001111)
    assert tuple(scheduler.missing_executors) == missing, "before any owner asks"
    scheduler.missing_executors.clear()
    waiting = ask(scheduler, 0.0, 48, "owner")
    assert scheduler.checkpoint(0.001, lease) == []
    assert lease.sms == 64
    made.add(0b00001111)
    scheduler.ready_masks[0][4] = {0b00001111: None}
    scheduler.checkpoint(0.001, lease)
    assert lease.sms == 32, "as near as can be"
    assert (0, 1) in scheduler.missing_executors
    made.add(1)
    assert scheduler.checkpoint(0.002, lease) == [waiting]
    assert lease.sms == 8


def test_an_elastic_lease_of_an_owner_has_its_reserve_back() -> None:
    """An owner's lease at its minimum does not wait, and borrowers give back at checkpoints."""
    scheduler = make(OWNER, BATCH)
    (borrower,) = ask(scheduler, 0.0, (8, 56), "batch").grants
    (lease,) = ask(scheduler, 0.001, (8, 32), "owner").grants
    assert (borrower.sms, lease.sms) == (56, 8)
    scheduler.checkpoint(0.004, borrower)
    assert borrower.sms == 32, "the loan is not renewed"
    scheduler.checkpoint(0.005, lease)
    assert (borrower.sms, lease.sms) == (32, 32)
    scheduler.drained(0.006, lease)
    scheduler.checkpoint(0.007, borrower)
    assert borrower.sms == 56, "no request wants it any more"


@pytest.mark.parametrize("cells", [1, 0])
def test_a_grant_whose_least_is_in_the_remainder_borrows_every_cell_that_it_takes(
    cells: int,
) -> None:
    """It can return every cell while it keeps the remainder, so all its cells are loans."""
    device = DeviceCells(size=8, count=4, remainder=12, joins=False)
    owner = ServiceClass("owner", reserve=32, max_wait_for_reserve=0.010)
    scheduler = make(owner, BATCH, devices=(device,))
    if cells:
        ask(scheduler, 0.0, 8, "owner")
    (grant,) = ask(scheduler, 0.0, (8, 100), "batch", duration=1.0).grants
    assert grant.mask == device.remainder_mask
    scheduler.checkpoint(0.0, grant)
    if cells:
        assert grant.mask == device.remainder_mask, "3 borrowed cells could not all be given back"
        return
    assert grant.mask == device.full_mask
    assert sum(grant.loans.values()) == 4
    waiting = ask(scheduler, 1.0, 32, "owner")
    assert scheduler.checkpoint(1.0, grant) == [waiting]
    assert grant.mask == device.remainder_mask
    assert not grant.loans


@pytest.mark.fault("I15")
def test_loans_go_back_first_to_an_owner_that_waits() -> None:
    """A borrower of two owners returns cells to the one that waits."""
    patient = ServiceClass("patient", reserve=32, max_wait_for_reserve=0.020)
    scheduler = make(patient, ServiceClass("owner", reserve=16, max_wait_for_reserve=0.010), BATCH)
    (borrower,) = ask(scheduler, 0.0, (8, 64), "batch").grants
    loans = {owner.name: lent for owner, lent in borrower.loans.items()}
    assert loans == {"patient": 4, "owner": 2}
    ask(scheduler, 0.001, 16, "owner")
    scheduler.allocator.reservations[0].give(borrower, 2)
    assert {owner.name: lent for owner, lent in borrower.loans.items()} == {"patient": 4}


def test_a_class_that_was_slow_once_borrows_again_after_a_while() -> None:
    """An overrun is forgotten with time, without another lease of the class."""
    scheduler = make(OWNER, BATCH)
    (slow,) = ask(scheduler, 0.0, 56, "batch").grants
    scheduler.drained(0.050, slow)
    with pytest.raises(TooManySMs):
        ask(scheduler, 0.060, 56, "batch")
    assert ask(scheduler, 60.0, 56, "batch").state is GrantState.GRANTED


def test_one_free_cell_is_lent_once_its_owner_stops_waiting() -> None:
    """A waiting owner keeps its cell; when it leaves, the next borrower gets the cell."""
    owner = ServiceClass("owner", reserve=8, max_wait_for_reserve=1.0)
    scheduler = make(owner, BATCH, devices=(DeviceCells(size=8, count=2),))
    ask(scheduler, 0.0, 8, "batch", duration=0.5)
    whole = ask(scheduler, 0.0, 16, "owner")
    borrower = ask(scheduler, 0.0, 8, "batch", duration=0.5)
    assert whole.state is borrower.state is GrantState.QUEUED
    assert scheduler.cancel(0.0, whole) == [borrower]


def test_several_parts_may_reach_the_cap_and_not_more() -> None:
    """A joint request up to the class's cap waits; a larger one is refused."""
    scheduler = make(ServiceClass("small", cap=16), PLAIN)
    ask(scheduler, 0.0, 8, "small")
    both = scheduler.request(0.0, parse_sizes((8, 8)), service="small")
    assert both.state is GrantState.QUEUED
    with pytest.raises(TooManySMs):
        scheduler.request(0.0, parse_sizes((8, 16)), service="small")


def test_several_parts_that_never_fit_are_refused() -> None:
    """A joint request of which only the first part fits beside a reserve is refused."""
    scheduler = make(OWNER, PLAIN)
    with pytest.raises(TooManySMs) as caught:
        scheduler.request(0.0, parse_sizes((32, 8)), service="plain")
    assert caught.value.most == 32


def test_a_class_that_can_hold_nothing_is_told_so() -> None:
    """If other reserves leave no cell, the error says that at most 0 SMs are possible."""
    scheduler = make(ServiceClass("owner", reserve=64), PLAIN)
    with pytest.raises(TooManySMs) as caught:
        ask(scheduler, 0.0, 8, "plain")
    assert caught.value.most == 0
    assert "(at most 0 can): name a class" in str(caught.value)


def test_a_class_that_can_hold_only_the_remainder_is_told_so() -> None:
    """If other reserves leave only the remainder, the error gives its SMs as the most."""
    device = DeviceCells(size=8, count=8, remainder=12)
    scheduler = make(ServiceClass("owner", reserve=64), PLAIN, devices=(device,))
    with pytest.raises(TooManySMs) as caught:
        ask(scheduler, 0.0, 16, "plain")
    assert caught.value.most == ask(scheduler, 0.0, 8, "plain").grants[0].sms == 12


def test_a_cap_holds_in_the_remainder() -> None:
    """A remainder above the cap is not granted, although it has the requested SMs."""
    device = DeviceCells(size=8, count=8, remainder=12)
    scheduler = make(ServiceClass("small", cap=10), devices=(device,))
    with pytest.raises(TooManySMs) as caught:
        ask(scheduler, 0.0, 9, "small")
    assert caught.value.most == 8


def test_an_elastic_lease_of_a_capped_class_gets_the_remainder() -> None:
    """An elastic lease takes a remainder that joins its cells, up to its class's cap."""
    device = DeviceCells(size=8, count=8, remainder=4, joins=True)
    scheduler = make(ServiceClass("small", cap=12), devices=(device,))
    assert ask(scheduler, 0.0, (8, 64), "small").grants[0].sms == 12


@pytest.mark.parametrize("sms", [16, 32])
def test_others_stay_outside_a_reserve_that_they_may_borrow(sms: int) -> None:
    """A borrower gets free cells outside all reserves first, even if only others have executors."""
    scheduler = make(OWNER, BATCH)
    block = scheduler.allocator.reservations[0].all_blocks
    cells = sms // DEVICE.size
    scheduler.ready_masks[0][cells] = {((1 << cells) - 1) << (block.bit_length() - cells): None}
    (grant,) = ask(scheduler, 0.0, sms, "batch").grants
    assert not grant.mask & block
    assert not grant.loans


def test_an_elastic_request_begins_once_its_least_fits() -> None:
    """Others overtake it only until then, and cells kept for a reserve are not needed."""
    scheduler = make(ServiceClass("owner", reserve=32, max_wait_for_reserve=0), PLAIN)
    ask(scheduler, 0.0, 16, "plain", duration=1.0)
    ask(scheduler, 0.0, 8, "plain", duration=5.0)
    assert ask(scheduler, 0.0, (16, 64), "plain").state is GrantState.QUEUED
    assert ask(scheduler, 0.5, 8, "plain", duration=2.0).state is GrantState.QUEUED
    assert ask(scheduler, 0.5, 8, "plain", duration=0.4).state is GrantState.GRANTED


def test_a_class_without_limits_gets_the_whole_device() -> None:
    """Beside a capped class, all SMs can be granted, including the remainder."""
    device = DeviceCells(size=8, count=15, remainder=12)
    scheduler = make(ServiceClass("small", cap=16), PLAIN, devices=(device,))
    assert ask(scheduler, 0.0, 132, "plain").grants[0].mask == device.full_mask


def test_a_class_without_limits_gets_the_remainder_alone() -> None:
    """Beside a capped class, the remainder is granted once all cells are leased."""
    device = DeviceCells(size=8, count=15, remainder=12)
    scheduler = make(ServiceClass("small", cap=16), PLAIN, devices=(device,))
    ask(scheduler, 0.0, 120, "plain")
    assert ask(scheduler, 0.0, 12, "plain").grants[0].mask == device.remainder_mask


def test_a_reserve_is_whole_after_an_elastic_lease_of_its_owner() -> None:
    """A lease that grew beyond its owner's reserve leaves the reserve unchanged."""
    scheduler = make(OWNER, PLAIN)
    beside = ask(scheduler, 0.0, 32, "plain")
    lease = ask(scheduler, 0.0, (8, 64), "owner").grants[0]
    scheduler.drained(1.0, beside.grants[0])
    scheduler.checkpoint(1.0, lease)
    assert lease.sms == 64
    scheduler.drained(2.0, lease)
    assert ask(scheduler, 3.0, 32, "plain").state is GrantState.GRANTED
    assert ask(scheduler, 3.0, 8, "plain").state is GrantState.QUEUED
    assert ask(scheduler, 3.0, 32, "owner").state is GrantState.GRANTED


def test_a_request_that_new_reserves_exclude_counts_as_cancelled() -> None:
    """It is rejected once, and counted by the scheduler and by its class."""
    scheduler = make(PLAIN)
    ask(scheduler, 0.0, 64, "plain")
    ask(scheduler, 0.0, 64, "plain")
    assert scheduler.reconfigure(0.0, [OWNER, PLAIN], None) == []
    (rejected,) = scheduler.rejected
    assert isinstance(rejected[1], TooManySMs)
    assert scheduler.statistics().cancelled == 1
    assert scheduler.services(0.0)["plain"].cancelled == 1
