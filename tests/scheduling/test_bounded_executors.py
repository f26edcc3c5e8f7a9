"""Devices at their limit of executors: which requests wait, what is made, and that none starves."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable
from itertools import count

import pytest

from greensched.scheduling.cells import DeviceCells, SizeRange
from greensched.scheduling.policy import Fifo
from greensched.scheduling.requests import Grant, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass
from greensched.typing import REST

EIGHTS = DeviceCells(size=8, count=16, remainder=4)
TWOS = DeviceCells(size=2, count=66)


class Bounded:
    """A scheduler with executors over some sets of cells, and a limit of executors."""

    def __init__(
        self,
        masks: Iterable[int],
        room: int = 0,
        *,
        cells: DeviceCells = EIGHTS,
        services: Iterable[ServiceClass] = (),
    ) -> None:
        self.made = dict.fromkeys(masks)
        self.room = room
        self.scheduler = Scheduler(
            [cells],
            Fifo(),
            10**6,
            lambda _, mask: mask in self.made,
            may_make=lambda _: len(self.made) < self.room,
            services=services,
        )
        for mask in self.made:
            self._add(mask)

    def _add(self, mask: int) -> None:
        self.made[mask] = None
        self.scheduler.ready_masks[0].setdefault(mask.bit_count(), {})[mask] = None

    def make(self, now: float = 0.0) -> list[Request]:
        """Make every missing executor; return the requests that this grants."""
        granted: list[Request] = []
        while self.scheduler.missing_executors:
            (_, mask), _ = self.scheduler.missing_executors.popitem()
            self._add(mask)
            granted += self.scheduler.made(now)
        return granted

    def ask(self, *sizes: object, now: float = 0.0, **options: object) -> Request:
        parts = tuple(
            each if isinstance(each, SizeRange) else SizeRange(each, each)  # type: ignore[arg-type]
            for each in sizes
        )
        return self.scheduler.request(now, parts, **options)  # type: ignore[arg-type]

    def end(self, grant: Grant, now: float = 0.0) -> list[Request]:
        self.scheduler.release(grant)
        return self.scheduler.drained(now, grant)


def test_a_request_waits_for_an_executor_of_its_size() -> None:
    """Free cells are not enough: the request waits until a set with an executor is free."""
    bounded = Bounded([0b11, 0b1110])
    first, second = bounded.ask(16), bounded.ask(16)
    assert [grant.mask for grant in first.grants] == [0b11]
    assert not second.grants
    assert not bounded.scheduler.missing_executors
    assert bounded.end(first.grants[0]) == [second]


def test_a_size_without_an_executor_gets_one_all_the_same() -> None:
    """A size without an executor gets one on an idle device; its request would wait for ever."""
    bounded = Bounded([0b1])
    first = bounded.ask(8)
    second = bounded.ask(16)
    assert list(bounded.scheduler.missing_executors) == [(0, 0b11)]
    assert not bounded.make()
    assert bounded.end(first.grants[0]) == [second]


def test_sizes_of_one_request_get_executors_that_are_disjoint() -> None:
    """The parts of a joint request, REST included, get executors over disjoint cells."""
    bounded = Bounded([0b1, 0b11])
    first = bounded.ask(8)
    joint = bounded.ask(16, 24, SizeRange(0, 0, REST))
    while bounded.make():
        pass
    assert bounded.end(first.grants[0]) == []
    assert bounded.make() == [joint]
    masks = [grant.mask for grant in joint.grants]
    assert sum(masks) == masks[0] | masks[1] | masks[2]
    assert [EIGHTS.sm_count(mask) for mask in masks[:2]] == [16, 24]


def test_an_executor_over_cells_of_its_own_holder_does_not_count() -> None:
    """Executors over the holder's own lease do not count: it would wait for itself."""
    bounded = Bounded([0b111, 0b11])
    bounded.ask(24, holder="task")
    nested = bounded.ask(16, holder="task")
    assert not nested.grants
    assert bounded.make() == [nested]
    assert not nested.grants[0].mask & 0b111


def test_an_executor_over_cells_of_a_lease_that_may_never_end_does_not_count() -> None:
    """A request waits for a young lease; beside one of 30 s it gets an executor."""
    for since in (0.0, 29.0, 30.0):
        bounded = Bounded([0b111, 0b11])
        bounded.ask(24)
        second = bounded.ask(16, now=since)
        is_long = since == 30.0
        assert bounded.make(since) == [second] * is_long
        assert bool(second.grants) is is_long


def test_a_waiting_request_gets_an_executor_once_a_lease_may_never_end() -> None:
    """It gets one when a lease becomes too old, at the time that `next_deadline` gives."""
    bounded = Bounded([0b111, 0b11])
    bounded.ask(24, now=1.0)
    second = bounded.ask(16, now=2.0)
    assert bounded.scheduler.next_deadline() == 31.0
    assert bounded.scheduler.tick(30.9) == ([], [])
    assert not bounded.make(30.9)
    assert bounded.scheduler.tick(31.0) == ([], [])
    assert bounded.make(31.0) == [second]
    assert bounded.scheduler.next_deadline() is None


def test_owners_that_wait_for_each_other_on_an_idle_device_get_an_executor() -> None:
    """Two classes that each need the other's unlent reserve get an executor."""
    services = [
        ServiceClass(name, reserve=8, max_wait_for_reserve=1.0, preemptible=True) for name in "ab"
    ]
    bounded = Bounded([0b1], services=services)
    bounded.make()
    (grant,) = bounded.ask(8, service="a").grants
    first, second = (bounded.ask(SizeRange(0, 0, REST), service=n, duration=0.1) for n in "ab")
    assert bounded.end(grant) == []
    assert bounded.make() == [first]
    assert bounded.end(first.grants[0]) == [second]


def test_an_elastic_request_takes_another_size_and_has_none_made() -> None:
    """At the limit an elastic request takes a size that has an executor; below it, one is made."""
    for room in (0, 9):
        bounded = Bounded([0b1111, 0b11110000], room)
        bounded.ask(32)
        request = bounded.ask(SizeRange(8, 128))
        assert [grant.mask for grant in request.grants] == [0b11110000]
        assert bool(bounded.scheduler.missing_executors) is bool(room)


def test_an_elastic_lease_has_no_better_executor_made_at_a_checkpoint() -> None:
    """A checkpoint makes no executor for a larger set; the lease keeps its cells."""
    for room in (0, 9):
        bounded = Bounded([0b1111], room)
        (grant,) = bounded.ask(SizeRange(8, 128)).grants
        bounded.scheduler.missing_executors.clear()
        bounded.scheduler.checkpoint(1.0, grant)
        assert grant.mask == 0b1111
        assert bool(bounded.scheduler.missing_executors) is bool(room)


def test_a_class_beside_a_reserve_gets_executors_over_cells_that_it_may_have() -> None:
    """A class gets no executors over another's reserve, which it could not be granted."""
    services = [ServiceClass("owner", reserve=64), ServiceClass("other")]
    bounded = Bounded([], services=services)
    bounded.make()
    first = bounded.ask(8, service="other")
    bounded.make()
    second = bounded.ask(48, service="other")
    bounded.make()
    assert first.grants
    assert bounded.end(first.grants[0]) == [second]
    (reserve,) = bounded.scheduler.allocator.reservations[0].blocks.values()
    assert not second.grants[0].mask & reserve


@pytest.mark.parametrize(
    "services", [(), (ServiceClass("a", reserve=24), ServiceClass("b", cap=96))]
)
@pytest.mark.parametrize("cells", [EIGHTS, TWOS], ids=["eights", "twos"])
def test_no_request_starves_and_few_executors_are_made(
    cells: DeviceCells, services: tuple[ServiceClass, ...]
) -> None:
    """Each of 4,000 leases of many sizes is granted; without a limit, thousands would be made."""
    menu, rng, numbers = cells.menu(40), random.Random(2), count()
    bounded = Bounded(menu, 60, cells=cells, services=services)
    names = [service.name for service in services] or [""]
    now, running, waiting = 0.0, list[tuple[float, int, Grant]](), dict[Request, None]()
    kinds = set[object]()

    def begin(granted: Iterable[Request]) -> None:
        for request in granted:
            waiting.pop(request, None)
            for grant in request.grants:
                heapq.heappush(running, (now + rng.expovariate(1), next(numbers), grant))

    for _ in range(4_000):
        now += rng.expovariate(8)
        while running and (running[0][0] <= now or len(waiting) > 20):
            now = max(now, running[0][0])
            begin(bounded.end(heapq.heappop(running)[2], now))
            begin(bounded.make(now))
        sizes = tuple(rng.choice((8, 16, 24, 40, 64)) for _ in range(rng.choice((1, 1, 1, 2))))
        if sum(sizes) > 96:
            continue
        name = rng.choice(names)
        kinds.add((name, sizes))
        request = bounded.ask(*sizes, now=now, service=name)
        waiting[request] = None
        begin([request] if request.grants else [])
        begin(bounded.scheduler.resized(request))
        begin(bounded.make(now))
    while running:
        now = max(now, running[0][0])
        begin(bounded.end(heapq.heappop(running)[2], now))
        begin(bounded.make(now))
    assert not waiting
    assert len(bounded.made) <= 60 + 2 * len(kinds)
