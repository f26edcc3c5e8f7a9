"""New classes and policies while requests wait and leases are held."""

from __future__ import annotations

import pytest

from greensched.errors import InvalidRequest, TooManySMs
from greensched.scheduling.cells import DeviceCells, parse_sizes
from greensched.scheduling.policy import Deadline, Fair, Fifo
from greensched.scheduling.requests import GrantState, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass
from greensched.typing import ALL, Size

DEVICE = DeviceCells(size=8, count=8)
OWNER = ServiceClass("owner", reserve=32, max_wait_for_reserve=0.010)
BATCH = ServiceClass("batch", preemptible=True, checkpoint_interval=0.005)


def make(*classes: ServiceClass) -> Scheduler:
    return Scheduler([DEVICE], Fifo(), 1000, services=classes)


def ask(scheduler: Scheduler, sms: Size, service: str = "", **options: object) -> Request:
    return scheduler.request(0.0, parse_sizes((sms,)), service=service, **options)  # type: ignore[arg-type]


@pytest.mark.fault("B11")
def test_a_new_reserve_fills_as_leases_end() -> None:
    """Older leases keep their cells; free cells are kept until the new reserve is whole."""
    scheduler = make(BATCH)
    leases = [ask(scheduler, 16, "batch").grants[0] for _ in range(4)]
    waiting = ask(scheduler, 16, "batch")
    owner = ServiceClass("owner", reserve=32)
    assert scheduler.reconfigure(0.0, [owner, BATCH], None) == []
    assert scheduler.drained(1.0, leases[0]) == []
    assert scheduler.drained(1.0, leases[1]) == []
    assert ask(scheduler, 32, "owner").state is GrantState.GRANTED
    assert scheduler.drained(2.0, leases[2]) == [waiting]


def test_a_removed_reserve_is_free_for_all_classes() -> None:
    """SMs of a removed reserve are granted to waiting requests at once."""
    scheduler = make(OWNER, ServiceClass("plain"))
    ask(scheduler, 32, "plain")
    waiting = ask(scheduler, 32, "plain")
    assert scheduler.reconfigure(0.0, [ServiceClass("owner"), ServiceClass("plain")], None) == [
        waiting
    ]


def test_a_lease_that_could_not_go_on_does_not_give_way() -> None:
    """A lease that the new classes could never grant again keeps its SMs until its end."""
    scheduler = make(ServiceClass("low"))
    (lease,) = ask(scheduler, (48, 64), "low").grants
    classes = [ServiceClass("high", priority=1, reserve=32), ServiceClass("low")]
    scheduler.reconfigure(0.0, classes, None)
    high = ask(scheduler, 32, "high")
    assert scheduler.checkpoint(1.0, lease) == []
    assert (lease.over, lease.sms) == (False, 48)
    assert scheduler.drained(2.0, lease) == [high]


def test_a_request_queued_again_that_can_never_be_granted_is_rejected() -> None:
    """A lease that gave way is rejected if the new classes can never grant it again."""
    scheduler = make(ServiceClass("low"))
    (lease,) = ask(scheduler, (48, 64), "low").grants
    assert scheduler.drained(1.0, lease) == []
    scheduler.reconfigure(1.0, [ServiceClass("high", reserve=32), ServiceClass("low")], None)
    assert scheduler.ask_again(2.0, lease) == []
    ((request, error),) = scheduler.rejected
    assert request is lease.request
    assert isinstance(error, TooManySMs)
    assert (request.state, scheduler.waiting) == (GrantState.GONE, 0)


def test_no_request_is_dropped_with_its_class() -> None:
    """Requests and leases of a removed class go on; new requests of it are refused."""
    scheduler = make(OWNER, BATCH)
    held = ask(scheduler, ALL, "batch", duration=0.001)
    waiting = ask(scheduler, 16, "owner")
    scheduler.reconfigure(0.0, [ServiceClass("other")], None)
    with pytest.raises(InvalidRequest, match="unknown service 'owner': this pool has other"):
        ask(scheduler, 8, "owner")
    assert waiting.state is GrantState.QUEUED
    assert scheduler.drained(1.0, held.grants[0]) == [waiting]
    assert scheduler.drained(2.0, waiting.grants[0]) == []
    scheduler.reconfigure(3.0, [ServiceClass("other")], None)
    assert set(scheduler.services(0.0)) == {"", "other"}


def test_loans_are_still_loans() -> None:
    """Loans from a reserve that stays return at the borrower's next checkpoint."""
    scheduler = make(OWNER, BATCH)
    (lease,) = ask(scheduler, (8, 64), "batch").grants
    scheduler.reconfigure(0.0, [OWNER, BATCH, ServiceClass("third")], None)
    assert scheduler.services(0.0)["owner"].sms_lent == 32
    owner = ask(scheduler, 32, "owner")
    assert scheduler.checkpoint(1.0, lease) == [owner]


def test_a_new_policy_orders_the_queue() -> None:
    """Waiting requests are served in the order of the new policy."""
    scheduler = make(ServiceClass("a"), ServiceClass("b"))
    held = ask(scheduler, ALL)
    late = ask(scheduler, ALL, "a", deadline=9.0)
    soon = ask(scheduler, ALL, "b", deadline=5.0)
    scheduler.reconfigure(0.0, None, Deadline())
    assert scheduler.drained(1.0, held.grants[0]) == [soon]
    scheduler.reconfigure(1.0, None, Fair())
    assert scheduler.drained(2.0, soon.grants[0]) == [late]


def test_what_is_due_counts_once() -> None:
    """Waiting work counts once in the ledger, however often the classes change."""
    scheduler = Scheduler([DEVICE], Deadline(), 1000, services=[ServiceClass("a")])
    held = ask(scheduler, ALL)
    waiting = ask(scheduler, ALL, "a", deadline=1.0, duration=0.3)
    for _ in range(9):
        scheduler.reconfigure(0.0, [ServiceClass("a")], None)
    assert scheduler.drained(0.1, held.grants[0]) == [waiting]
    ask(scheduler, 8, "a", deadline=1.0, duration=0.3)


@pytest.mark.parametrize("rules", [{"reserve": 8}, {"cap": 16}])
def test_a_request_that_can_no_longer_be_granted_is_rejected(rules: dict[str, int]) -> None:
    """A waiting request above the new reserves or cap is rejected."""
    scheduler = make(ServiceClass("a"))
    held = ask(scheduler, 8)
    waiting = ask(scheduler, ALL, "a" if "cap" in rules else "")
    assert scheduler.reconfigure(0.0, [ServiceClass("a", **rules)], None) == []
    assert [request for request, _ in scheduler.rejected] == [waiting]
    assert scheduler.drained(9.0, held.grants[0]) == []
    assert ask(scheduler, 16).state is GrantState.GRANTED


def test_a_request_above_the_new_sizes_of_its_class_is_rejected() -> None:
    """A request above the new sizes would wait for ever and keep the device from others."""
    scheduler = make(ServiceClass("a"))
    held = ask(scheduler, ALL)
    waiting = [ask(scheduler, sms, "a") for sms in (40, (24, 40), 20)]
    sized = ServiceClass("a", sizes=(16, 32))
    assert scheduler.reconfigure(0.0, [sized], None) == []
    assert [request for request, _ in scheduler.rejected] == waiting[:1]
    assert "at most 32" in str(scheduler.rejected[0][1])
    assert scheduler.drained(1.0, held.grants[0]) == waiting[1:]
    assert [request.grants[0].sms for request in waiting[1:]] == [32, 32]


def test_a_request_between_sizes_that_its_class_cannot_have_is_rejected() -> None:
    """The next larger size does not fit beside a new reserve, so the request is rejected."""
    scheduler = make(ServiceClass("a"))
    ask(scheduler, ALL)
    waiting = ask(scheduler, 40, "a")
    classes = [ServiceClass("a", sizes=(16, 64)), ServiceClass("owner", reserve=16)]
    assert scheduler.reconfigure(0.0, classes, None) == []
    assert [request for request, _ in scheduler.rejected] == [waiting]


def test_what_cannot_be_changes_nothing() -> None:
    """Reserves that do not fit are refused, and the classes stay as they were."""
    scheduler = make(OWNER)
    ask(scheduler, 32)
    waiting = ask(scheduler, 8)
    with pytest.raises(InvalidRequest, match="reserves"):
        scheduler.reconfigure(0.0, [OWNER, ServiceClass("b", reserve=40)], Fair())
    assert isinstance(scheduler.queue.policy.policy, Fifo)
    assert set(scheduler.services(0.0)) == {"", "owner"}
    assert waiting.state is GrantState.QUEUED
    assert ask(scheduler, 32, "owner").state is GrantState.GRANTED


def test_a_latency_of_a_class_that_is_gone_is_refused() -> None:
    """`observe` is refused if another thread has removed the class meanwhile."""
    scheduler = Scheduler([DeviceCells(size=8, count=2)], Fifo(), 9, services=[ServiceClass("old")])
    scheduler.reconfigure(0.0, [ServiceClass("new")], None)
    with pytest.raises(InvalidRequest, match="unknown service 'old': this pool has new"):
        scheduler.observe(0.0, "old", 0.001, 1)
