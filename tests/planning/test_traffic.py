"""Traffic against the scheduler: what ageing is for, and what it costs.

The first shape is a published one: 16-SM jobs at 90 % load and a whole-device job every 500 ms,
for 20 s. Everything is drawn from fixed seeds, so the figures below are the same everywhere.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from itertools import count
from statistics import mean, median

import pytest

from greensched.planning.cells import Cells, demands
from greensched.planning.policy import Fifo
from greensched.planning.scheduler import Request, Scheduler
from greensched.typing import ALL, Size

DEVICE = Cells(size=8, count=16, remainder=4)
SECONDS = 20.0
SEEDS = (1, 2, 3)
STRICT, AGED, FIRST_FIT = 0.0, 0.020, float("inf")

#: (when, size, how long it runs)
Job = tuple[float, Size, float]
#: Seconds waited by those that were served, by size.
Waits = dict[Size, list[float]]


def poisson(rng: random.Random, size: int, load: float, mean_s: float) -> Iterator[Job]:
    """Jobs that keep a part of the device's 132 SMs busy, of exponential length."""
    at = 0.0
    while (at := at + rng.expovariate(load * DEVICE.total / size / mean_s)) < SECONDS:
        yield at, size, rng.expovariate(1 / mean_s)


def published(seed: int) -> list[Job]:
    """90 % of eight 16-SM jobs at once, and 40 whole-device jobs."""
    rng = random.Random(seed)
    load = 0.9 * 8 * 16 / DEVICE.total
    whole: list[Job] = [(0.25 + 0.5 * i, ALL, 0.010) for i in range(40)]
    return [*poisson(rng, 16, load, 0.010), *whole]


def mixed(seed: int) -> list[Job]:
    """16-SM jobs beside 64-SM jobs, 70 % load in all."""
    rng = random.Random(seed)
    return [*poisson(rng, 16, 0.4, 0.020), *poisson(rng, 64, 0.3, 0.020)]


def serve(jobs: list[Job], ageing: float) -> Waits:
    """Runs jobs against a scheduler, until the 20 s are over."""
    scheduler = Scheduler([DEVICE], Fifo(ageing=ageing), max_waiting=10**6)
    order = count()
    events: list[tuple[float, int, Job | Request]] = [(job[0], next(order), job) for job in jobs]
    heapq.heapify(events)
    waits: Waits = {}
    while events and events[0][0] < SECONDS:
        now, _, event = heapq.heappop(events)
        if isinstance(event, Request):
            begun = scheduler.drained(now, event.leases[0])
        else:
            request = scheduler.request(now, demands((event[1],)), owner=event)
            begun = [request] if request.leases else []
        for request in begun:
            at, size, length = request.owner
            waits.setdefault(size, []).append(now - at)
            heapq.heappush(events, (now + length, next(order), request))
    return waits


@pytest.fixture(scope="module")
def outcomes() -> dict[float, list[Waits]]:
    """The published shape under each policy, for every seed."""
    return {
        ageing: [serve(published(seed), ageing) for seed in SEEDS]
        for ageing in (STRICT, AGED, FIRST_FIT)
    }


def test_ageing_serves_every_whole_device_request(outcomes: dict[float, list[Waits]]) -> None:
    """With 20 ms of ageing all 40 are served, as in strict order, and within half a second."""
    for waits in outcomes[AGED]:
        assert len(waits[ALL]) == 40
        assert max(waits[ALL]) < 0.5


def test_ageing_costs_small_requests_nothing(outcomes: dict[float, list[Waits]]) -> None:
    """With large requests this rare, the small ones' median wait is strict order's, within 15 %."""
    strict, aged = (
        mean(median(waits[16]) for waits in outcomes[ageing]) for ageing in (STRICT, AGED)
    )
    assert aged == pytest.approx(strict, rel=0.15)
    for waits, others in zip(outcomes[AGED], outcomes[STRICT], strict=True):
        assert len(waits[16]) > 0.99 * len(others[16])


def test_without_ageing_large_requests_starve(outcomes: dict[float, list[Waits]]) -> None:
    """First-fit alone leaves whole-device requests waiting for seconds: why there is ageing."""
    waits = [wait for outcome in outcomes[FIRST_FIT] for wait in outcome[ALL]]
    aged = [wait for outcome in outcomes[AGED] for wait in outcome[ALL]]
    assert max(waits) > 5 * max(aged)
    assert len(waits) < len(aged)


def test_ageing_lets_small_requests_fill_gaps() -> None:
    """Beside middling requests the small ones' median wait is a fraction of strict order's."""
    small = {}
    for ageing in (STRICT, AGED):
        outcomes = [serve(mixed(seed), ageing) for seed in SEEDS]
        small[ageing] = mean(median(waits[16]) for waits in outcomes)
        assert all(len(waits[64]) > 500 for waits in outcomes)
    assert small[AGED] < small[STRICT] / 2
