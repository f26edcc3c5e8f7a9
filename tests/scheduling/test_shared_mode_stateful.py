"""Shared mode under random histories: which leases share SMs, and when."""

from __future__ import annotations

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from greensched.errors import DeadlineImpossible, InvalidRequest, QueueFull, TooManySMs
from greensched.scheduling.cells import SizeRange
from greensched.scheduling.policy import POLICIES, Policy
from greensched.scheduling.requests import Grant, GrantState, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass
from greensched.typing import ALL, REST

from .strategies import devices, joint_demands

AGEING = 3
LATENCY = 8
CLASSES = (
    ServiceClass("quick", shared=True, latency=LATENCY, preemptible=True, checkpoint_interval=1),
    ServiceClass("bulk", shared=True, preemptible=True, checkpoint_interval=2),
    ServiceClass("plain"),
)
NAMES = ("quick", "quick", "bulk", "bulk", "plain", "owner")
#: What leases take: each lease keeps its declared duration.
COSTS = st.sampled_from([1, 2, 4])


class SharingMachine(RuleBasedStateMachine):
    """Classes that may share all SMs, and classes that may not."""

    @initialize(
        cells=st.lists(devices(4), min_size=1, max_size=2),
        policy=st.sampled_from(sorted(POLICIES)),
        reserve=st.integers(0, 2),
        budget=st.sampled_from([0, 2, 4]),
    )
    def open(self, cells: list, policy: str, reserve: int, budget: int) -> None:
        owner = ServiceClass("owner", reserve=reserve * cells[0].size, max_wait_for_reserve=budget)
        chosen: Policy = POLICIES[policy](ageing=AGEING)  # type: ignore[call-arg]
        classes = (*CLASSES, owner)
        try:
            self.scheduler = Scheduler(cells, chosen, 8, services=classes)
        except InvalidRequest:  # there are not so many cells
            assume(False)
        self.twin = Scheduler(cells, chosen, 8, services=classes)
        self.cells, self.now = cells, 0
        self.waiting: list[Request] = []
        self.leases: list[Grant] = []
        self.twins: dict[Request, Request] = {}
        #: Since when an owner waits that asks for no more than its reserve.
        self.entitled: dict[Request, int] = {}

    # -- rules ---------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), cells=st.integers(1, 3), more=st.sampled_from([0, 0, 100]),
          duration=COSTS)  # fmt: skip
    def request_cells(self, name: str, cells: int, more: int, duration: int) -> None:
        sms = cells * self.cells[0].size
        self.request(name, (SizeRange(sms, sms + more),), duration)

    @precondition(lambda self: self.scheduler.allocator.classes["owner"].reserve_cells)
    @rule(duration=COSTS)
    def request_floor(self, duration: int) -> None:
        sms = self.cells[0].size
        self.request("owner", (SizeRange(sms, sms),), duration)

    @rule(name=st.sampled_from(NAMES), named=st.sampled_from([ALL, REST]), duration=COSTS)
    def request_whole(self, name: str, named: object, duration: int) -> None:
        self.request(name, (SizeRange(0, 0, named),), duration)  # type: ignore[arg-type]  # one of two

    @rule(name=st.sampled_from(NAMES), data=st.data(), duration=COSTS)
    def request_several(self, name: str, data: st.DataObject, duration: int) -> None:
        self.request(name, data.draw(joint_demands()), duration)

    def request(self, name: str, parts: tuple[SizeRange, ...], duration: int) -> None:
        options = {"service": name, "duration": None if name == "plain" else duration}
        try:
            made = self.scheduler.request(self.now, parts, **options)
        except (TooManySMs, QueueFull, DeadlineImpossible) as refused:
            with pytest.raises(type(refused)):
                self.twin.request(self.now, parts, **options)
            return
        self.twins[made] = self.twin.request(self.now, parts, **options)
        if made.state is GrantState.QUEUED:
            self.waiting.append(made)
            if self.is_entitled(made):
                self.entitled[made] = self.now
        else:
            self.take_over(made)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.granted(
            self.scheduler.cancel(self.now, request),
            self.twin.cancel(self.now, self.twins[request]),
        )

    @precondition(lambda self: len(self.leases) > 1)
    @rule(data=st.data())
    def drained(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.leases)))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        self.come_to_checkpoint(data.draw(st.sampled_from(self.leases)))

    @rule(latency=st.sampled_from([1, LATENCY]), number=st.sampled_from([1, 4, 400]))
    def observe(self, latency: int, number: int) -> None:
        args = self.now, "quick", latency, number
        self.granted(self.scheduler.observe(*args), self.twin.observe(*args))

    @rule()
    def tick(self) -> None:
        """Advance the time; every lease reaches a checkpoint or ends as declared."""
        self.now += 1
        for lease in list(self.leases):
            if lease.request.duration is not None and not lease.over:
                self.come_to_checkpoint(lease)
                if not lease.over and self.now - lease.began >= lease.request.duration:
                    self.end(lease)
        granted, _ = self.scheduler.tick(self.now)
        self.granted(granted, self.twin.tick(self.now)[0])
        for request in self.waiting:
            if self.is_entitled(request):
                since = self.entitled.setdefault(request, self.now)
                assert self.now - since <= request.class_state.max_wait
            else:
                self.entitled.pop(request, None)

    def end(self, lease: Grant) -> None:
        twin = self.twin_of(lease)
        self.leases.remove(lease)
        granted = self.scheduler.drained(self.now, lease)
        self.granted(granted, self.twin.drained(self.now, twin))

    def come_to_checkpoint(self, lease: Grant) -> None:
        was_seat, twin = lease.is_shared, self.twin_of(lease)
        granted = self.scheduler.checkpoint(self.now, lease)
        same = self.twin.checkpoint(self.now, twin)
        assert lease.over is twin.over
        if lease.over:
            self.gave_way(lease)
        self.granted(granted, same)
        if lease.is_shared and not was_seat:
            assert not self.is_split, "a seat on a device that is split"

    def gave_way(self, lease: Grant) -> None:
        """Queue the request of a lease that gave way, which other requests waited for."""
        request = lease.request
        assert request.is_elastic
        assert not lease.is_shared
        assert self.waiting, "a lease gave way to no request"
        self.leases.remove(lease)
        self.entitled.pop(request, None)  # it counts as another request
        self.waiting.append(request)

    # -- what must hold ------------------------------------------------------------------------

    @property
    def is_split(self) -> bool:
        return self.scheduler.allocator.split_controller.is_split

    def twin_of(self, lease: Grant) -> Grant:
        return self.twins[lease.request].grants[lease.request.grants.index(lease)]

    def granted(self, here: list[Request], there: list[Request]) -> None:
        assert [self.twins[request] for request in here] == there, "equal inputs, equal outputs"
        for request in here:
            self.waiting.remove(request)
            self.take_over(request)

    def take_over(self, request: Request) -> None:
        assert request.state is GrantState.GRANTED
        for lease in request.grants:
            assert not (lease.is_shared and self.is_split), "a seat on a device that is split"
            self.leases.append(lease)

    def of(self, device: int) -> list[Grant]:
        return [lease for lease in self.leases if lease.device == device]

    def is_entitled(self, request: Request) -> bool:
        """Say whether it asks for its class's reserve, of which no lease has any."""
        state, part = request.class_state, request.parts[0]
        if state.name != "owner" or len(request.parts) > 1 or part.named or state.sms:
            return False
        first = min(
            (r for r in self.waiting if r.class_state is state), key=lambda r: (r.rank, r.order)
        )
        return (
            request is first
            and -(-part.least // self.cells[state.home].size) <= state.reserve_cells
        )

    @invariant()
    def only_shared_classes_share_sms(self) -> None:
        for device, cells in enumerate(getattr(self, "cells", ())):
            leased = 0
            for lease in self.of(device):
                if lease.is_shared:
                    assert lease.class_state.rules.shared
                    assert lease.sms == cells.total
                    assert lease.mask & cells.full_mask == cells.full_mask
                    others = [other for other in self.of(device) if other is not lease]
                    assert all(other.class_state.rules.shared for other in others)
                    assert lease.mask not in [other.mask for other in others], (
                        "one executor for two"
                    )
                else:
                    assert lease.mask & leased == 0
                    leased |= lease.mask
            assert self.scheduler.allocator.free_masks[device] == cells.full_mask & ~leased

    @invariant()
    def counts_are_right(self) -> None:
        for name, state in (
            self.scheduler.allocator.classes.items() if hasattr(self, "cells") else ()
        ):
            assert state.sms == sum(
                lease.sms for lease in self.leases if lease.class_state.name == name
            )
        if hasattr(self, "cells"):
            now = self.scheduler.statistics()
            total = sum(cells.total for cells in self.cells)
            assert now.sms_free + now.sms_leased + now.sms_draining <= total
            assert self.scheduler.waiting == len(self.waiting)

    @invariant()
    def no_request_waits_that_could_share(self) -> None:
        for request in getattr(self, "waiting", ()):
            if not request.class_state.shared or len(request.parts) > 1 or self.is_split:
                continue
            for device in range(len(self.cells)):
                kept = self.scheduler.queue.reservation
                own = kept is None or kept[0] is request or kept[1] != device
                beside = all(lease.class_state.shared for lease in self.of(device))
                owners = self.scheduler.allocator.reservations[device].owners
                assert not (own and beside and not owners)

    @invariant()
    def twins_agree(self) -> None:
        for request, twin in getattr(self, "twins", {}).items():
            assert request.state is twin.state
            assert [x.mask for x in request.grants] == [x.mask for x in twin.grants]

    def teardown(self) -> None:
        """End all leases: every waiting request is then served, and all SMs are free."""
        if not hasattr(self, "cells"):
            return
        while self.leases:
            self.end(self.leases[0])
        assert self.waiting == []
        assert not any(self.scheduler.allocator.shared_grants)
        assert self.scheduler.allocator.exclusive == [0] * len(self.cells)
        assert self.scheduler.allocator.free_masks == [cells.full_mask for cells in self.cells]


#: It takes seconds; a failure is shrunk for five minutes at most.
TestSharing = pytest.mark.timeout(360)(SharingMachine.TestCase)
TestSharing.settings = settings(stateful_step_count=60)
