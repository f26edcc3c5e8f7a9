"""The scheduler under traffic, without devices: the share of each class, and how long jobs wait.

The first shape is a published one: 16-SM jobs at 90 % load and a whole-device job every 500 ms,
for 20 s. Everything is drawn from seeds, so the figures are the same everywhere.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Mapping
from itertools import count

from greensched.scheduling.cells import DeviceCells, parse_sizes
from greensched.scheduling.policy import Fair, Policy
from greensched.scheduling.requests import GrantState, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass
from greensched.typing import ALL, Size

DEVICE = DeviceCells(size=8, count=16, remainder=4)
SECONDS = 20.0
#: A drain of eight exponential leases of 10 ms takes 27 ms on average, and rarely 100.
DRAIN_S = 0.120

#: (when, size, how long it runs)
Job = tuple[float, Size, float]
#: The seconds that granted jobs waited, by size.
Waits = dict[Size, list[float]]


def poisson(rng: random.Random, size: int, load: float, mean_s: float) -> Iterator[Job]:
    """Yield jobs of exponential length that keep a part of the device's 132 SMs busy."""
    at = 0.0
    while (at := at + rng.expovariate(load * DEVICE.total / size / mean_s)) < SECONDS:
        yield at, size, rng.expovariate(1 / mean_s)


def published(seed: int) -> list[Job]:
    """Return 16-SM jobs at 90 % of eight at once, and 40 whole-device jobs."""
    rng = random.Random(seed)
    load = 0.9 * 8 * 16 / DEVICE.total
    whole: list[Job] = [(0.25 + 0.5 * i, ALL, 0.010) for i in range(40)]
    return [*poisson(rng, 16, load, 0.010), *whole]


def serve(jobs: list[Job], policy: Policy, *, known: bool = False) -> Waits:
    """Run jobs for 20 s; their lengths are known to the scheduler, or not."""
    scheduler, order = Scheduler([DEVICE], policy, 10**6), count()
    events: list[tuple[float, int, Job | Request]] = [(job[0], next(order), job) for job in jobs]
    heapq.heapify(events)
    waits: Waits = {}
    while events and events[0][0] < SECONDS:
        now, _, event = heapq.heappop(events)
        if isinstance(event, Request):
            begun = scheduler.drained(now, event.grants[0])
        else:
            cost = event[2] if known else None
            request = scheduler.request(now, parse_sizes((event[1],)), owner=event, duration=cost)
            begun = [request] if request.grants else []
        for request in begun:
            at, size, length = request.owner  # type: ignore[misc]  # a job
            waits.setdefault(size, []).append(now - at)
            heapq.heappush(events, (now + length, next(order), request))
    return waits


def saturate(
    weights: Mapping[str, float], mean_s: Mapping[str, float], seed: int, seconds: float
) -> Scheduler:
    """Run classes that always have waiting requests, under `fair`, with leases of given lengths."""
    rng, order = random.Random(seed), count()
    services = [ServiceClass(name, weight=weight) for name, weight in weights.items()]
    scheduler = Scheduler([DEVICE], Fair(), 10**6, services=services)
    running: list[tuple[float, int, Request]] = []
    now = 0.0

    def begin(requests: list[Request]) -> None:
        for request in requests:
            length = rng.expovariate(1 / mean_s[request.class_state.name])
            heapq.heappush(running, (now + length, next(order), request))

    for name in weights:
        for _ in range(40):
            request = scheduler.request(now, parse_sizes((16,)), service=name)
            begin([request] if request.state is GrantState.GRANTED else [])
    while now < seconds:
        now, _, done = heapq.heappop(running)
        begin(scheduler.drained(now, done.grants[0]))
        more = scheduler.request(now, parse_sizes((16,)), service=done.class_state.name)
        begin([more] if more.state is GrantState.GRANTED else [])
    return scheduler
