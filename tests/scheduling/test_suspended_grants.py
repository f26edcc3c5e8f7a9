"""Suspended and resumed leases behave like leases that the scheduler decided on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greensched.scheduling.cells import DeviceCells, parse_sizes
from greensched.scheduling.policy import Fair
from greensched.scheduling.requests import Grant, GrantState, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass

SERVICES = [
    ServiceClass(
        "owner", reserve=16, priority=2, weight=3, max_wait_for_reserve=0.010, latency=0.004
    ),
    ServiceClass("other", weight=2, cap=24),
    ServiceClass("guest", preemptible=True, checkpoint_interval=0.005),
]
NAMES = ["", "owner", "other", "guest"]


class Decided:
    """A scheduler that decides on every lease, and its grants by request."""

    def __init__(self) -> None:
        cells = [DeviceCells(size=8, count=5)]
        self.scheduler = Scheduler(cells, Fair(), 100, services=SERVICES)
        self.held: list[Request] = []

    def ask(self, now: float, service: str, sms: int) -> bool:
        request = self.scheduler.request(now, parse_sizes((sms,)), service=service)
        if request.state is GrantState.GRANTED:
            self.held.append(request)
        return request.state is GrantState.GRANTED

    def give_back(self, now: float, index: int) -> list[tuple[str, int]]:
        """Return the requests that are granted by that."""
        (lease,) = self.held.pop(index).grants
        return self.drain(now, lease)

    def drain(self, now: float, lease: Grant) -> list[tuple[str, int]]:
        granted = self.scheduler.drained(now, lease)
        self.held += granted
        return [(request.class_state.name, request.order) for request in granted]

    def has(self) -> list[tuple[str, int]]:
        return [(request.class_state.name, request.grants[0].sms) for request in self.held]

    def accounts(self) -> list[tuple[float, ...]]:
        names = "sms cells borrowed lent reserved_free granted sm_time finish"
        names += " mean_duration longest_duration checkpoint_interval"
        classes = (self.scheduler.allocator.classes[name] for name in NAMES)
        return [tuple(getattr(state, name) for name in names.split()) for state in classes]


class Suspending(Decided):
    """One that suspends and resumes grants where it may, as a pool's cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.suspended: list[tuple[str, int, Request]] = []
        self.scheduler = Scheduler(
            [DeviceCells(size=8, count=5)],
            Fair(),
            100,
            services=SERVICES,
            on_reclaim=self.suspended.clear,
        )
        self.resumed = 0

    def ask(self, now: float, service: str, sms: int) -> bool:
        for i, (name, size, request) in enumerate(self.suspended):
            if (name, size) == (service, sms):
                del self.suspended[i]
                self.scheduler.resume(now, request.grants[0], "holder")
                self.held.append(request)
                self.resumed += 1
                return True
        return super().ask(now, service, sms)

    def give_back(self, now: float, index: int) -> list[tuple[str, int]]:
        request = self.held[index]
        (grant,) = request.grants
        if not self.scheduler.suspend(now, grant):
            return super().give_back(now, index)
        del self.held[index]
        self.suspended.append((request.class_state.name, request.parts[0].least, request))
        return []

    def clear(self, now: float) -> None:
        self.scheduler.reclaim(now)
        assert not self.suspended


asking = st.tuples(st.sampled_from(NAMES), st.sampled_from([8, 16, 24]))
steps = st.lists(st.tuples(st.integers(1, 9), asking | st.integers(0, 9)), max_size=60)


@given(steps)
def test_a_suspended_lease_behaves_as_a_decided_one(
    steps: list[tuple[int, tuple[str, int] | int]],
) -> None:
    """For any requests, the grants, the holders and the statistics are equal."""
    one, other = Decided(), Suspending()
    now = 0.0
    for milliseconds, step in steps:
        now += milliseconds / 1e3
        if isinstance(step, int):
            if one.held:
                index = step % len(one.held)
                assert one.give_back(now, index) == other.give_back(now, index)
        else:
            assert one.ask(now, *step) == other.ask(now, *step)
        assert one.has() == other.has()
    other.clear(now)
    assert one.accounts() == [pytest.approx(account) for account in other.accounts()]
    assert one.scheduler.statistics() == other.scheduler.statistics()


def test_a_latency_is_one_leases_own() -> None:
    """A latency counts from each request, not from the first one, so all are in time."""
    one, other = Decided(), Suspending()
    before = one.scheduler.allocator.classes["owner"].margin.fraction
    for i in range(3000):
        for each in (one, other):
            each.ask(i * 0.002, "owner", 16)
            each.give_back(i * 0.002 + 0.001, 0)
    assert other.resumed == 2999
    other.clear(6.0)
    parts = [each.scheduler.allocator.classes["owner"].margin.fraction for each in (one, other)]
    assert parts[0] == parts[1] > before


def loan(scheduler: Scheduler) -> Request:
    return scheduler.request(0.0, parse_sizes((40,)), service="guest", duration=0.001)


def quota(scheduler: Scheduler) -> Request:
    scheduler.reconfigure(0.0, [*SERVICES, ServiceClass("few", quota=100.0)], None)
    return scheduler.request(0.0, parse_sizes((8,)), service="few")


def split(scheduler: Scheduler) -> Request:
    scheduler.reconfigure(0.0, [*SERVICES, ServiceClass("all", shared=True, latency=1.0)], None)
    return scheduler.request(0.0, parse_sizes((8,)), service="other")


def told(scheduler: Scheduler) -> Request:
    request = scheduler.request(0.0, parse_sizes((8,)), service="other")
    scheduler.checkpoint(0.0, request.grants[0], duration=0.005)
    return request


@pytest.mark.parametrize("case", [loan, quota, split, told])
def test_what_a_decision_would_look_at_is_not_suspended(
    case: Callable[[Scheduler], Request],
) -> None:
    """Grants with loans, quotas or durations, and on devices that may split, are not suspended."""
    scheduler = Decided().scheduler
    (lease,) = case(scheduler).grants
    assert not scheduler.suspend(0.001, lease)
    assert scheduler.drained(0.001, lease) == []


def test_a_device_counts_its_suspended_cells_as_free() -> None:
    """A request goes to the device that has the most free SMs once all grants are reclaimed."""
    devices = [DeviceCells(size=8, count=8)] * 2
    scheduler = Scheduler(devices, Fair(), 100)
    kept = scheduler.request(0.0, parse_sizes((48,)))
    (grant,) = kept.grants
    other = scheduler.request(0.0, parse_sizes((24,)))
    assert (grant.device, other.grants[0].device) == (0, 1)
    assert scheduler.suspend(1.0, grant)
    beside = scheduler.request(2.0, parse_sizes((16,)))
    assert beside.grants[0].device == 0
    assert not grant.over


def test_a_request_of_another_size_leaves_suspended_grants_alone() -> None:
    """On one device, a request that fits beside a suspended grant does not end it."""
    scheduler = Scheduler([DeviceCells(size=8, count=8)], Fair(), 100)
    (grant,) = scheduler.request(0.0, parse_sizes((48,))).grants
    assert scheduler.suspend(1.0, grant)
    assert scheduler.request(2.0, parse_sizes((16,))).state is GrantState.GRANTED
    assert not grant.over
    assert scheduler.request(3.0, parse_sizes((32,))).state is GrantState.GRANTED
    assert grant.over
