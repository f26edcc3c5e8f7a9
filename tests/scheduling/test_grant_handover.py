"""Leases that are handed over: who is next has one as it is, and nobody can tell."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from greensched.scheduling.cells import DeviceCells, parse_sizes
from greensched.scheduling.policy import Fifo
from greensched.scheduling.requests import GrantState, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass
from greensched.typing import ALL, Size

AGEING = 0.020
#: Of two devices: in one pool two leases of two cells fill each, in the other one cell is left.
ODD, EVEN = ([DeviceCells(size=8, count=count)] * 2 for count in (3, 4))


@dataclass(frozen=True)
class Ask:
    """What one of many is that ask."""

    sms: Size = 16
    devices: tuple[int, ...] | None = None
    priority: int = 0
    deadline: float | None = None
    duration: float | None = None


#: Most ask for the same: else nobody who waits does.
usual = st.builds(Ask, deadline=st.none() | st.integers(1, 30).map(lambda ms: ms / 1e3))
others = st.builds(
    Ask,
    sms=st.sampled_from([8, 16, (8, 16), ALL, 24]),
    devices=st.sampled_from([None, (0,), (1,), (1, 0)]),
    priority=st.integers(-1, 1),
    duration=st.sampled_from([None, None, 0.001]),
)
giving_back = st.integers(0, 9)
step = st.one_of(*[usual] * 6, others, *[giving_back] * 4)
steps = st.lists(st.tuples(st.integers(0, 9), step), min_size=20, max_size=60)


@dataclass
class Decided:
    """A scheduler that decides on every lease, and what is held of it."""

    cells: list[DeviceCells] = field(default_factory=lambda: ODD)
    held: list[Request] = field(default_factory=list)
    #: Who was granted, in that order.
    granted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.cells, Fifo(ageing=AGEING), 99)

    def ask(self, now: float, ask: Ask) -> Request:
        until = None if ask.deadline is None else now + ask.deadline
        request = self.scheduler.request(
            now, parse_sizes((ask.sms,)), devices=ask.devices, priority=ask.priority,
            deadline=until, duration=ask.duration, holder=object(),
        )  # fmt: skip
        if request.state is GrantState.GRANTED:
            self.have([request])
        return request

    def have(self, granted: list[Request]) -> None:
        self.held += granted
        self.granted += [request.order for request in granted]

    def tick(self, now: float) -> None:
        self.have(self.scheduler.tick(now)[0])

    def give_back(self, now: float, index: int) -> None:
        (lease,) = self.held.pop(index).grants
        self.have(self.scheduler.drained(now, lease))

    def state(self) -> list[object]:
        leases = [request.grants[0] for request in self.held]
        assert [lease.holder for lease in leases] == [request.holder for request in self.held]
        free = [
            each.sm_count(cells)
            for each, cells in zip(self.cells, self.scheduler.allocator.free_masks, strict=True)
        ]
        held = [(request.order, lease.device, lease.sms) for request, lease in self.pairs()]
        kept = self.scheduler.queue.reservation
        for_whom = None if kept is None else (kept[0].order, kept[1])
        return [held, free, self.granted, for_whom, self.scheduler.statistics()]

    def pairs(self) -> list[tuple[Request, object]]:
        return [(request, request.grants[0]) for request in self.held]


class Handed(Decided):
    """One whose leases are handed over where they may be, as a pool does it."""

    handed = 0

    def give_back(self, now: float, index: int) -> None:
        (lease,) = self.held[index].grants
        following = self.scheduler.next_for(lease)
        if following is None:
            super().give_back(now, index)
            return
        left, mask = self.held.pop(index), lease.mask
        self.scheduler.hand_over(now, lease, following)
        self.have([following])
        self.handed += 1
        assert (left.grants, following.grants, lease.mask) == ((), (lease,), mask)


@settings(max_examples=300)
@given(steps, st.sampled_from([ODD, EVEN]))
def test_nobody_can_tell(steps: list[tuple[int, Ask | int]], cells: list[DeviceCells]) -> None:
    """Whatever is asked for, given back and expires, the same are granted the same, in order."""
    one, other = Decided(cells), Handed(cells)
    now = 0.0
    for milliseconds, step in steps:
        now += milliseconds / 1e3
        for each in (one, other):
            each.tick(now)
            if isinstance(step, Ask):
                each.ask(now, step)
            elif each.held:
                each.give_back(now, step % len(each.held))
        assert one.state() == other.state()
    event(f"handed over: {min(other.handed, 5)}")
    while one.held:
        one.give_back(now, 0)
        other.give_back(now, 0)
        assert one.state() == other.state()
    assert not other.scheduler.dispatcher._held
    assert not other.scheduler.queue.lines


@pytest.mark.parametrize(
    ("last", "first"),
    [
        (Ask(16), Ask(8)),
        (Ask((8, 24)), Ask((8, 24))),
        (Ask(ALL), Ask(ALL)),
        (Ask(16, duration=0.001), Ask(16)),
        (Ask(16), Ask(16, duration=0.001)),
        (Ask(16, devices=(0,)), Ask(16, devices=(1,))),
    ],
)
def test_what_is_not_just_that_is_decided(last: Ask, first: Ask) -> None:
    """Another size, a range, a name, a known duration, another device: somebody has to look."""
    each = Decided()
    lease = each.ask(0.0, last).grants[0]
    while each.ask(0.0, first).state is GrantState.GRANTED:
        pass
    assert each.scheduler.next_for(lease) is None


def test_two_sorts_that_wait_are_decided_on() -> None:
    """So is whoever has a class, which has floors, caps and shares."""
    each = Decided()
    lease = each.ask(0.0, Ask()).grants[0]
    while (waiting := each.ask(0.0, Ask())).state is GrantState.GRANTED:
        pass
    assert each.scheduler.next_for(lease) is waiting
    each.ask(0.0, Ask(24))
    assert each.scheduler.next_for(lease) is None
    classed = Scheduler(ODD, Fifo(), 9, services=[ServiceClass("a")])
    requests = [classed.request(0.0, parse_sizes((16,)), service="a") for _ in range(3)]
    assert classed.waiting == 1
    assert classed.next_for(requests[0].grants[0]) is None


def test_what_one_had_is_not_the_nexts() -> None:
    """What a lease was charged for until its checkpoint is its holder's, and stays behind."""
    each = Decided()
    lease = each.ask(0.0, Ask()).grants[0]
    while (waiting := each.ask(0.0, Ask())).state is GrantState.GRANTED:
        pass
    each.scheduler.checkpoint(0.5, lease)
    assert lease.used
    each.scheduler.hand_over(1.0, lease, waiting)
    assert waiting.grants == (lease,)
    assert (lease.used, lease.charged, lease.began, lease.since) == (0.0, 0.0, 1.0, 1.0)


def test_who_lacks_a_lane_is_decided_on() -> None:
    """There is room for him elsewhere: he waits for that to be made, or for whatever comes free."""
    made = [0b11]
    scheduler = Scheduler([DeviceCells(size=8, count=4)], Fifo(), 9, lambda _, mask: mask in made)
    first, second = (scheduler.request(0.0, parse_sizes((16,))) for _ in range(2))
    assert (first.state, second.missing_executors) == (GrantState.GRANTED, ((0, 0b1100),))
    assert scheduler.next_for(first.grants[0]) is None


def test_who_has_a_device_kept_goes_first() -> None:
    """Also before one of a higher priority that came later."""
    scheduler = Scheduler([DeviceCells(size=8, count=2)], Fifo(ageing=AGEING), 9)
    held = scheduler.request(0.0, parse_sizes((16,)))
    aged = scheduler.request(0.0, parse_sizes((16,)))
    urgent = scheduler.request(1.0, parse_sizes((16,)), priority=1)
    assert scheduler.next_for(held.grants[0]) is None
    assert scheduler.drained(1.0, held.grants[0]) == [aged]
    assert scheduler.next_for(aged.grants[0]) is urgent
