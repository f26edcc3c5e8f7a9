"""The scheduler under random histories, step by step beside the naive one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from greensched.errors import QueueFull, TooManySMs, WouldBlock, WouldDeadlock
from greensched.scheduling.cells import SizeRange
from greensched.scheduling.class_state import ClassState
from greensched.scheduling.policy import Fifo
from greensched.scheduling.requests import Grant, GrantState, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import DEFAULT_CLASS
from greensched.typing import ALL, REST

from .reference_cells import fits, possible, sms
from .reference_scheduler import ReferenceScheduler
from .strategies import devices, joint_demands, plain_demands

HOLDERS = st.sampled_from([None, None, "a", "b"])
PRIORITIES = st.sampled_from([0, 0, -1, 1])
NAMED = st.sampled_from([(SizeRange(0, 0, ALL),), (SizeRange(0, 0, REST),)])
AGEING = 3


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, cancellations, leases and time, in any order."""

    @initialize(
        cells=st.lists(devices(4), min_size=1, max_size=3),
        bound=st.sampled_from([8, 8, 3, 0]),
        data=st.data(),
    )
    def open(self, cells: list, bound: int, data: st.DataObject) -> None:
        self.scheduler = Scheduler(cells, Fifo(ageing=AGEING), bound)
        self.twin = Scheduler(cells, Fifo(ageing=AGEING), bound)
        self.naive = ReferenceScheduler(cells, AGEING)
        self.now = 0
        self.requests: list[Request] = []
        self.twins: dict[Request, Request] = {}
        self.counts = dict.fromkeys(("requested", "granted", "cancelled", "expired", "refused"), 0)
        for device, mask in data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 31)))):
            if device < len(cells) and possible(cells[device], mask):
                for scheduler in (self.scheduler, self.twin):
                    scheduler.ready_masks[device].setdefault(mask.bit_count(), {})[mask] = None

    # -- rules ---------------------------------------------------------------------------------

    # Most steps are requests: only then are there several to serve in the right order.

    @rule(data=st.data(), priority=PRIORITIES, holder=HOLDERS)
    def request_small(self, data: st.DataObject, priority: int, holder: str | None) -> None:
        self.request(data, (data.draw(plain_demands(3)),), priority, holder)

    @rule(data=st.data(), priority=PRIORITIES, holder=HOLDERS)
    def request_large(self, data: st.DataObject, priority: int, holder: str | None) -> None:
        most = max(cells.total for cells in self.scheduler.allocator.devices)
        self.request(data, (data.draw(plain_demands(most + 1)),), priority, holder)

    @rule(data=st.data(), priority=PRIORITIES, holder=HOLDERS)
    def request_several(self, data: st.DataObject, priority: int, holder: str | None) -> None:
        self.request(data, data.draw(joint_demands()), priority, holder)

    @rule(data=st.data(), priority=PRIORITIES, holder=HOLDERS)
    def request_named(self, data: st.DataObject, priority: int, holder: str | None) -> None:
        self.request(data, data.draw(NAMED), priority, holder)

    def request(self, data: st.DataObject, parts: tuple, priority: int, holder: str | None) -> None:
        anywhere = st.none() | st.permutations(self.everywhere).map(tuple)
        where = data.draw(anywhere | st.sampled_from(self.everywhere).map(lambda one: (one,)))
        soon = st.integers(1, 8).map(lambda later: self.now + later)
        deadline = data.draw(st.none() | st.none() | soon)
        wait = data.draw(st.sampled_from([True, True, True, False]))
        probe = Request(
            ClassState(DEFAULT_CLASS),
            parts,
            where or self.everywhere,
            priority,
            self.now,
            -1,
            holder=holder,
        )
        if self.naive.waiting:
            self.naive.keep_a_device(self.now)
        expected = self.expected_refusal(probe, wait)
        options = {"devices": where, "priority": priority, "deadline": deadline}
        options |= {"holder": holder, "wait": wait}
        if expected is not None:
            with pytest.raises(expected) as caught:
                self.scheduler.request(self.now, parts, **options)
            with pytest.raises(expected) as same:
                self.twin.request(self.now, parts, **options)
            assert str(caught.value) == str(same.value)
            self.counts["refused"] += expected in (WouldBlock, QueueFull)
            self.check_refusal(caught.value, probe)
            return
        made = self.scheduler.request(self.now, parts, **options)
        self.counts["requested"] += 1
        self.requests.append(made)
        self.twins[made] = self.twin.request(self.now, parts, **options)
        if self.naive.where_fits(probe):
            self.naive.take_over(made)
            self.counts["granted"] += 1
        else:
            assert made.state is GrantState.QUEUED
            assert made.grants == ()
            self.naive.waiting.append(made)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        was = request.state
        granted = self.scheduler.cancel(self.now, request)
        self.same_for_twin(granted, self.twin.cancel(self.now, self.twins[request]))
        if was is not GrantState.QUEUED:
            assert granted == []
            assert request.state is was
            return
        assert request.state is GrantState.GONE
        self.counts["cancelled"] += 1
        self.left([request], granted)

    @precondition(lambda self: any(not lease.draining for lease in self.naive.leases))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([x for x in self.naive.leases if not x.draining]))
        twin = self.twin_of(lease)
        for _ in range(data.draw(st.integers(1, 2))):  # any number of times
            self.scheduler.release(lease)
            self.twin.release(twin)

    @precondition(lambda self: self.naive.leases)
    @rule(data=st.data())
    def drained(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.naive.leases))
        twin = self.twin_of(lease)
        self.naive.leases.remove(lease)
        granted = self.scheduler.drained(self.now, lease)
        self.same_for_twin(granted, self.twin.drained(self.now, twin))
        self.counts["granted"] += len(granted)
        self.naive.dispatch(self.now, granted)

    @rule(later=st.integers(1, 4))
    def tick(self, later: int) -> None:
        waited = list(self.naive.waiting)
        deadlines = [r.deadline for r in waited if r.deadline is not None]
        assert self.scheduler.next_deadline() == min(deadlines, default=None)
        self.now += later
        granted, expired = self.scheduler.tick(self.now)
        twin_granted, twin_expired = self.twin.tick(self.now)
        self.same_for_twin(granted, twin_granted)
        self.same_for_twin(expired, twin_expired)
        late = [r for r in waited if r.deadline is not None and r.deadline <= self.now]
        assert set(expired) == set(late)
        assert len(expired) == len(late)
        assert all(request.state is GrantState.GONE for request in expired)
        self.counts["expired"] += len(expired)
        self.left(expired, granted)

    @precondition(lambda self: len(self.naive.waiting) > 5)
    @rule()
    def close(self) -> None:
        waited = list(self.scheduler.close())
        assert waited == self.naive.in_order()
        assert all(request.state is GrantState.GONE for request in waited)
        assert len(list(self.twin.close())) == len(waited)
        self.counts["cancelled"] += len(waited)
        self.naive.waiting.clear()
        self.naive.kept = None

    # -- what must hold ------------------------------------------------------------------------

    @property
    def everywhere(self) -> tuple[int, ...]:
        return tuple(range(len(self.scheduler.allocator.devices)))

    def expected_refusal(self, probe: Request, wait: bool) -> type[Exception] | None:
        if not self.naive.where_fits_ever(probe, beside_own=False):
            return TooManySMs
        if self.naive.where_fits(probe):
            return None
        if not wait:
            return WouldBlock
        if not self.naive.where_fits_ever(probe, beside_own=True):
            return WouldDeadlock
        return QueueFull if len(self.naive.waiting) >= self.scheduler.max_waiting else None

    def check_refusal(self, error: Exception, probe: Request) -> None:
        devices = self.scheduler.allocator.devices
        if isinstance(error, TooManySMs) and len(probe.parts) == 1:
            assert error.most == max(devices[d].total for d in probe.devices)
        elif isinstance(error, TooManySMs):
            assert error.most == sum(error.nearest)
            nearest = tuple(SizeRange(one, one) for one in error.nearest)
            assert any(fits(devices[d], devices[d].full_mask, nearest) for d in probe.devices)
        if isinstance(error, WouldDeadlock):
            mine = [x for x in self.naive.leases if x.holder == probe.holder and not x.draining]
            assert error.holds == sum(lease.sms for lease in mine)
        if isinstance(error, QueueFull):
            assert error.waiting == len(self.naive.waiting)
            assert error.retry_after > 0

    def left(self, gone: list[Request], granted: list[Request]) -> None:
        """A waiting request holds nothing, so only one with a kept device lets others go on."""
        freed = [self.naive.leave(request) for request in gone]
        self.counts["granted"] += len(granted)
        if any(freed):
            self.naive.dispatch(self.now, granted)
        else:
            assert granted == []

    def twin_of(self, lease: Grant) -> Grant:
        for request in self.requests:
            if lease in request.grants:
                return self.twins[request].grants[request.grants.index(lease)]
        raise AssertionError(lease)

    def same_for_twin(self, here: list[Request], there: list[Request]) -> None:
        assert [self.twins[request] for request in here] == there

    @invariant()
    def equal_inputs_give_equal_outputs(self) -> None:
        for request, twin in self.twins.items():
            assert request.state is twin.state
            here = [(lease.device, lease.mask) for lease in request.grants]
            assert here == [(lease.device, lease.mask) for lease in twin.grants]

    @invariant()
    def every_cell_is_in_one_state(self) -> None:
        for device, cells in enumerate(self.scheduler.allocator.devices):
            leased = 0
            for lease in self.naive.leases:
                if lease.device == device:
                    assert lease.mask & leased == 0
                    leased |= lease.mask
            assert self.scheduler.allocator.free_masks[device] & leased == 0
            assert self.scheduler.allocator.free_masks[device] | leased == cells.full_mask

    @invariant()
    def no_request_waits_that_could_be_granted(self) -> None:
        assert self.scheduler.waiting == len(self.naive.waiting)
        for request in self.naive.waiting:
            assert request.state is GrantState.QUEUED
            assert self.naive.where_fits(request) == []

    @invariant()
    def statistics_add_up(self) -> None:
        now = self.scheduler.statistics()
        held = [(lease.draining, lease.sms) for lease in self.naive.leases]
        assert now.sms_leased == sum(sms for draining, sms in held if not draining)
        assert now.sms_draining == sum(sms for draining, sms in held if draining)
        assert now.sms_free == sum(map(self.naive.grantable_sms, self.everywhere))
        free = sum(map(self.naive.free_sms, self.everywhere))
        total = sum(sms(cells, cells.full_mask) for cells in self.scheduler.allocator.devices)
        assert free + now.sms_leased + now.sms_draining == total
        assert now.waiting == len(self.naive.waiting)
        assert {name: getattr(now, name) for name in self.counts} == self.counts
        ends = now.granted + now.cancelled + now.expired
        assert now.requested == ends + now.waiting

    def teardown(self) -> None:
        """When all requests and leases have ended, the scheduler is as new."""
        if not hasattr(self, "scheduler"):
            return
        while self.naive.waiting:
            request = self.naive.waiting.pop(0)
            for other in self.scheduler.cancel(self.now, request):
                self.naive.waiting.remove(other)
                self.naive.leases.extend(other.grants)
        for lease in self.naive.leases:
            assert self.scheduler.drained(self.now, lease) == []
        assert self.scheduler.tick(self.now + 100) == ([], [])
        fresh = Scheduler(self.scheduler.allocator.devices, self.scheduler.queue.policy.policy, 0)
        queue, allocator = self.scheduler.queue, self.scheduler.allocator
        assert len(queue._deadlines) == 0
        assert (queue.waiting, queue.lines, queue.reservation) == (0, {}, None)
        assert allocator.free_masks == fresh.allocator.free_masks
        assert self.scheduler.dispatcher._held == {}


#: It takes seconds; a failure is shrunk for five minutes at most.
TestScheduler = pytest.mark.timeout(360)(SchedulerMachine.TestCase)
TestScheduler.settings = settings(stateful_step_count=60)
