"""The scheduler with service classes under random histories, beside what a naive model allows."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from greensched.errors import (
    DeadlineExceeded,
    DeadlineImpossible,
    InvalidRequest,
    QueueFull,
    TooManySMs,
    WouldBlock,
)
from greensched.scheduling.cells import SizeRange
from greensched.scheduling.policy import POLICIES, Policy
from greensched.scheduling.requests import Grant, GrantState, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass
from greensched.typing import ALL

from .reference_reservations import ReferenceReservations
from .strategies import devices, joint_demands

AGEING = 3
NAMES = ("owner", "second", "batch", "small")


class Work:
    """SM-seconds that more SMs divide: of the same amount there is one curve."""

    def __init__(self, sm_seconds: int) -> None:
        self.sm_seconds = sm_seconds
        self.number = 0

    def at(self, sms: int) -> float:
        return self.sm_seconds / max(1, sms)

    def observe(self, _sms: int, seconds: float) -> None:
        assert seconds >= 0
        self.number += 1


CURVES = [Work(4), Work(16), Work(60)]
COSTS = st.sampled_from([None, None, None, 1, 2, 4, *CURVES])


@st.composite
def classes(draw: st.DrawFn, most: int) -> list[ServiceClass]:
    """Two owners, a class that borrows, and one that does not."""
    reserve = draw(st.integers(0, most))
    budgets = st.sampled_from([0, 2, 4, 4])
    return [
        ServiceClass("owner", reserve=reserve, priority=draw(st.integers(0, 1)),
                     max_wait_for_reserve=draw(budgets),
                     latency=draw(st.sampled_from([None, 3, 8])),
                     on_late="best_effort"),
        ServiceClass("second", reserve=draw(st.integers(0, most - reserve)),
                     max_wait_for_reserve=draw(budgets),
                     preemptible=draw(st.booleans()), checkpoint_interval=3),
        ServiceClass("batch", preemptible=True,
                     checkpoint_interval=draw(st.sampled_from([1, 2, 3, 5]))),
        ServiceClass("small", cap=draw(st.integers(1, 12)), max_waiting=2,
                     on_late=draw(st.sampled_from(["refuse", "best_effort"]))),
    ]  # fmt: skip


class ServiceMachine(RuleBasedStateMachine):
    """Owners, borrowers that keep their declared intervals, and other classes."""

    @initialize(
        cells=st.lists(devices(4), min_size=1, max_size=2),
        policy=st.sampled_from(sorted(POLICIES)),
        data=st.data(),
    )
    def open(self, cells: list, policy: str, data: st.DataObject) -> None:
        most = max(one.size * one.count for one in cells)
        self.classes = data.draw(classes(most))
        self.cells = cells
        chosen: Policy = POLICIES[policy](ageing=AGEING)  # type: ignore[call-arg]
        try:
            self.scheduler = Scheduler(cells, chosen, 8, services=self.classes)
        except InvalidRequest:  # of several devices none may be large enough
            assume(False)
        self.twin = Scheduler(cells, chosen, 8, services=self.classes)
        self.now = 0
        self.naive = ReferenceReservations(self.scheduler, cells)
        self.twins: dict[Request, Request] = {}
        self.waiting: list[Request] = []
        #: Since when a waiting owner could have had all it asks for of its reserve.
        self.entitled: dict[Request, int] = {}
        #: Since when a class waits.
        self.waits_since: dict[str, int] = {}
        self.is_settled = True

    # -- rules ---------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), data=st.data(), cells=st.integers(1, 3))
    def request_cells(self, name: str, data: st.DataObject, cells: int) -> None:
        sms = cells * self.cells[0].size
        more = data.draw(st.sampled_from([0, 0, sms, 100]))
        self.request(name, (SizeRange(sms, sms + more),), data)

    @rule(data=st.data(), cells=st.integers(1, 2))
    def request_elastic(self, data: st.DataObject, cells: int) -> None:
        sms = cells * self.cells[0].size
        self.request("batch", (SizeRange(sms, sms + 100),), data)

    @rule(data=st.data(), cells=st.integers(1, 3))
    def request_floor(self, data: st.DataObject, cells: int) -> None:
        sms = cells * self.cells[0].size
        self.request("owner", (SizeRange(sms, sms),), data)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def request_whole(self, name: str, data: st.DataObject) -> None:
        self.request(name, (SizeRange(0, 0, ALL),), data)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def request_several(self, name: str, data: st.DataObject) -> None:
        self.request(name, data.draw(joint_demands()), data)

    def request(self, name: str, parts: tuple[SizeRange, ...], data: st.DataObject) -> None:
        options = {
            "service": name,
            "duration": data.draw(COSTS),
            "deadline": data.draw(st.none() | st.none() | st.integers(1, 9).map(self.later)),
            "wait": data.draw(st.sampled_from([True, True, True, False])),
        }
        before = self.facts()
        refusals = (TooManySMs, WouldBlock, QueueFull, DeadlineImpossible)
        refused = None
        try:
            made = self.scheduler.request(self.now, parts, **options)
        except refusals as error:
            refused = error
        if refused is not None:
            with pytest.raises(type(refused)) as same:
                self.twin.request(self.now, parts, **options)
            assert str(same.value) == str(refused)
            assert self.facts() == before, "a refusal leaves no trace"
            assert not isinstance(refused, DeadlineImpossible) or options["duration"] is not None
            return
        self.twins[made] = self.twin.request(self.now, parts, **options)
        if made.state is GrantState.QUEUED:
            self.waiting.append(made)
        else:
            self.take_over(made)
        self.granted(self.scheduler.resized(made), self.twin.resized(self.twins[made]))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        granted = self.scheduler.cancel(self.now, request)
        assert request.state is GrantState.GONE
        self.granted(granted, self.twin.cancel(self.now, self.twins[request]))

    @precondition(lambda self: len(self.naive.leases) > 1)
    @rule(data=st.data())
    def drained(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.naive.leases)))

    @precondition(lambda self: self.naive.leases)
    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        """Some say what comes next."""
        lease = data.draw(st.sampled_from(self.naive.leases))
        is_told = (
            lease.request.duration is not None and lease.request.is_elastic and not lease.loans
        )
        self.come_to_checkpoint(lease, data.draw(COSTS) if is_told else None)

    @rule(name=st.sampled_from(NAMES), latency=st.integers(1, 9), number=st.integers(1, 900))
    def observe(self, name: str, latency: int, number: int) -> None:
        """Users say what latency they have: a class plans with less of it, or more."""
        granted = self.scheduler.observe(self.now, name, latency, number)
        assert granted == self.twin.observe(self.now, name, latency, number) == []

    @rule(later=st.integers(1, 2))
    def tick(self, later: int) -> None:
        """Time passes, and each borrower comes to its checkpoint in time."""
        for _ in range(later):
            self.now += 1
            self.naive.now = self.now
            for lease in list(self.naive.leases):
                if lease.loans and not lease.over and self.naive.is_due(lease, self.now):
                    self.come_to_checkpoint(lease)
                    if not lease.over and self.naive.gives_back_at_its_end(lease):
                        self.end(lease)
            granted, expired = self.scheduler.tick(self.now)
            twin_granted, twin_expired = self.twin.tick(self.now)
            assert [self.twins[one] for one in expired] == twin_expired
            for request in expired:
                assert request.state is GrantState.GONE
                self.waiting.remove(request)
            self.granted(granted, twin_granted)
            self.look_at_owners()

    def end(self, lease: Grant) -> None:
        twin = self.twin_of(lease)
        self.naive.leases.remove(lease)
        self.naive.taken_at.pop(lease, None)
        granted = self.scheduler.drained(self.now, lease)
        self.granted(granted, self.twin.drained(self.now, twin))

    def come_to_checkpoint(self, lease: Grant, duration: object = None) -> None:
        before = lease.mask, lease.sms
        loans = dict(lease.loans)
        aged = self.scheduler.queue.reservation
        twin = self.twin_of(lease)
        granted = self.scheduler.checkpoint(self.now, lease, duration)
        same = self.twin.checkpoint(self.now, twin, duration)
        assert lease.over is twin.over
        if lease.over:
            self.gave_way(lease)
        self.granted(granted, same)
        if lease.over:
            return
        if aged is not None and aged[1] == lease.device and lease.request.is_elastic:
            kept = self.scheduler.queue.reservation
            assert kept is not aged or self.naive.gave_back(lease), "it keeps an aged request out"
        if not lease.request.is_elastic:
            assert (lease.mask, lease.sms) == before
        else:
            self.naive.check_size(lease)
            self.naive.taken_at[lease] = self.now  # a lease of one size declared its end
        for owner, cells in lease.loans.items():
            if cells > loans.get(owner, 0):
                assert not owner.waiting, "a loan was renewed while its owner waited"

    def gave_way(self, lease: Grant) -> None:
        """A lease that gives way waits again, for one that goes before it or has aged."""
        self.naive.leases.remove(lease)
        self.naive.taken_at.pop(lease, None)
        assert lease.request.is_elastic
        assert self.waiting, "a lease gave way to no request"
        self.entitled.pop(lease.request, None)  # it counts as another request
        self.waiting.append(lease.request)

    # -- what must hold ------------------------------------------------------------------------

    def later(self, seconds: int) -> int:
        return self.now + seconds

    def facts(self) -> object:
        classes = self.scheduler.allocator.classes.values()
        counts = [
            (f.name, f.sms, f.cells, f.lent, f.borrowed, f.waiting, f.finish) for f in classes
        ]
        return list(self.scheduler.allocator.free_masks), self.scheduler.waiting, counts

    def granted(self, here: list[Request], there: list[Request]) -> None:
        assert [self.twins[request] for request in here] == there, "equal inputs, equal outputs"
        for request in here:
            assert request in self.waiting, "granted to a cancelled request"
            self.waiting.remove(request)
            self.take_over(request)
        self.rejected()

    def rejected(self) -> None:
        """A borrower that can never be lent what it waits for waits no more."""
        late = [r for r, error in self.scheduler.rejected if isinstance(error, DeadlineExceeded)]
        told = [request for request, _ in self.scheduler.rejected]
        assert [self.twins[request] for request in told] == [r for r, _ in self.twin.rejected]
        for request in told:
            assert request.class_state.preemptible or request in late
            assert request.state is GrantState.GONE
            self.waiting.remove(request)
        self.scheduler.rejected.clear()
        self.twin.rejected.clear()

    def take_over(self, request: Request) -> None:
        assert request.state is GrantState.GRANTED
        for lease in request.grants:
            self.naive.leases.append(lease)
            self.naive.taken_at[lease] = self.now
            self.naive.check_size(lease)

    def twin_of(self, lease: Grant) -> Grant:
        return self.twins[lease.request].grants[lease.request.grants.index(lease)]

    def look_at_owners(self) -> None:
        """An owner whose reserve is idle waits for one blocking budget at most."""
        for request in self.waiting:
            if self.naive.is_entitled(request):
                since = self.entitled.setdefault(request, self.now)
                assert self.now - since <= request.class_state.max_wait
            else:
                self.entitled.pop(request, None)

    @invariant()
    def every_cell_is_in_one_state(self) -> None:
        if not hasattr(self, "naive"):
            return
        for device, cells in enumerate(self.cells):
            leased = 0
            for lease in self.naive.leases:
                if lease.device == device:
                    assert lease.mask & leased == 0
                    leased |= lease.mask
            assert self.scheduler.allocator.free_masks[device] == cells.full_mask & ~leased

    @invariant()
    def reserves_are_kept_but_for_loans(self) -> None:
        if hasattr(self, "naive"):
            self.naive.check_reserves()
            self.naive.check_loans()

    @invariant()
    def no_class_exceeds_its_cap(self) -> None:
        if not hasattr(self, "naive"):
            return
        for one in self.classes:
            held = sum(
                lease.sms for lease in self.naive.leases if lease.class_state.name == one.name
            )
            assert self.scheduler.allocator.classes[one.name].sms == held
            assert held <= (math.inf if one.cap is ALL else one.cap)
            waiting = sum(request.class_state.name == one.name for request in self.waiting)
            assert self.scheduler.services(0.0)[one.name].waiting == waiting
            assert one.max_waiting is None or waiting <= one.max_waiting

    @invariant()
    def twins_agree(self) -> None:
        for request, twin in getattr(self, "twins", {}).items():
            assert request.state is twin.state
            assert [x.mask for x in request.grants] == [x.mask for x in twin.grants]
        if hasattr(self, "naive"):
            assert self.facts() == (
                list(self.twin.allocator.free_masks), self.twin.waiting,
                [(f.name, f.sms, f.cells, f.lent, f.borrowed, f.waiting, f.finish)
                 for f in self.twin.allocator.classes.values()],
            )  # fmt: skip

    @invariant()
    def no_request_waits_that_could_be_granted(self) -> None:
        if not hasattr(self, "naive"):
            return
        assert self.scheduler.waiting == len(self.waiting)
        kept = self.scheduler.queue.reservation
        for request in self.waiting:
            for device in request.devices:
                is_kept = kept is not None and kept[0] is not request and kept[1] == device
                if not is_kept and not self.gives_way_at_once(request, device):
                    assert not self.naive.could_be_granted(request, device)

    def gives_way_at_once(self, request: Request, device: int) -> bool:
        """A lease not known to end, or sized, does not overtake a request of a higher class."""
        is_sized = self.scheduler.queue.policy.size is not None
        if not request.is_elastic or (request.duration is not None and not is_sized):
            return False
        priority = request.class_state.priority
        return any(
            device in other.devices and other.class_state.priority > priority
            for other in self.waiting
        )

    def teardown(self) -> None:
        """When all requests and leases have ended, nothing is left of them."""
        if not hasattr(self, "naive"):
            return
        while self.waiting:
            self.cancel_last()
        while self.naive.leases:
            self.end(self.naive.leases[0])
        for state in self.scheduler.allocator.classes.values():
            assert (state.sms, state.cells, state.lent, state.borrowed) == (0, 0, 0, 0)
            assert state.short == 0
        assert not any(state.borrowers for state in self.scheduler.allocator.reservations)
        assert not any(self.scheduler.allocator.grants)
        assert self.scheduler.queue.lines == {}
        assert self.scheduler.queue._buckets == {}
        assert self.scheduler.queue._work == {}

    def cancel_last(self) -> None:
        request = self.waiting.pop()
        granted = self.scheduler.cancel(self.now, request)
        self.granted(granted, self.twin.cancel(self.now, self.twins[request]))


#: It takes seconds; a failure is shrunk for five minutes at most.
TestServices = pytest.mark.timeout(360)(ServiceMachine.TestCase)
TestServices.settings = settings(stateful_step_count=60)
