"""What a decision of the scheduler costs, beside a heap of the same size.

The scheduler alone, without a device and without a loop. A *cycle* returns one grant, which grants
the next request, and adds one request that waits: the queue keeps its length. The heap holds
entries like the queue's, which are made before the clock is read.

`python -m benchmarks.micro.scheduler`.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable
from time import perf_counter, thread_time

from benchmarks.lib.timing import Row, compare, table
from greensched.leasing.latency import LatencyCurve
from greensched.scheduling.cells import DeviceCells, SizeRange
from greensched.scheduling.policy import policy_named
from greensched.scheduling.requests import Grant, Request
from greensched.scheduling.scheduler import Scheduler
from greensched.scheduling.services import ServiceClass

#: An H200, split into cells of 8 SMs.
DEVICE = DeviceCells(size=8, count=16, remainder=4)
#: Cycles in a sample: one takes some microseconds, and reading the clock a tenth of one.
CYCLES = 50
#: A second of arrivals is 10,000 of these.
STEP = 1e-4
SIZES = (16, 8, 24)
#: Requests that wait at the most.
MANY = 100_000
CLASSES = (
    ServiceClass("decode", reserve=32, priority=10, latency=0.050),
    ServiceClass("prefill", weight=3),
    ServiceClass("batch", cap=96, preemptible=True, checkpoint_interval=0.005),
)


class Queue:
    """A scheduler whose devices are full, with so many requests that wait."""

    def __init__(
        self, waiting: int, *, policy: str = "fifo", is_classed: bool = False, devices: int = 1
    ) -> None:
        services = CLASSES if is_classed else ()
        self.names = [service.name for service in services] or [""]
        self.sizes = SIZES if is_classed else SIZES[:1]
        self.scheduler = Scheduler(
            [DEVICE] * devices, policy_named(policy), 10**9, services=services
        )
        self.now = 0.0
        self.running: deque[Grant] = deque()
        self.requested = 0
        while self.scheduler.waiting < waiting:
            self.request()

    def request(self) -> Request:
        self.requested += 1
        sms = self.sizes[self.requested % len(self.sizes)]
        name = self.names[self.requested % len(self.names)]
        request = self.scheduler.request(self.now, (SizeRange(sms, sms),), service=name)
        self.running.extend(request.grants)
        return request

    def cycle(self) -> None:
        self.now += STEP
        for granted in self.scheduler.drained(self.now, self.running.popleft()):
            self.running.extend(granted.grants)
        self.request()

    async def sample(self) -> float:
        start = perf_counter()
        for _ in range(CYCLES):
            self.cycle()
        return (perf_counter() - start) / CYCLES


class Heap:
    """A heap of so many entries: rank, order and an object."""

    def __init__(self, size: int) -> None:
        self.random = random.Random(1)
        self.order = 0
        self.entries = [self.entry() for _ in range(size)]
        heapq.heapify(self.entries)

    def entry(self) -> tuple[tuple[float, float], int, object]:
        self.order += 1
        return (0.0, self.random.random()), self.order, self

    async def sample(self) -> float:
        entries, new = self.entries, [self.entry() for _ in range(CYCLES)]
        push, pop = heapq.heappush, heapq.heappop
        start = perf_counter()
        for entry in new:
            push(entries, entry)
            pop(entries)
        return (perf_counter() - start) / CYCLES


class Curve:
    """A latency curve that records what a lease took, and predicts the next one."""

    def __init__(self) -> None:
        self.random = random.Random(1)
        self.curve = LatencyCurve({sms: [1 / sms + 0.002] for sms in range(8, 129, 8)})

    async def sample(self) -> float:
        took = [0.033 * self.random.uniform(0.97, 1.08) for _ in range(CYCLES)]
        start = perf_counter()
        for seconds in took:
            self.curve.observe(32, seconds)
            self.curve.at(32)
        return (perf_counter() - start) / CYCLES


def measure() -> list[Row]:
    """Return the bars on decisions, and what classes and policies add."""
    return asyncio.run(_measure())


async def _measure() -> list[Row]:
    heap = Heap(1000).sample
    plain, classed, fair, due = (
        Queue(1000, **options)  # type: ignore[arg-type]  # as they are named
        for options in (
            {},
            {"is_classed": True},
            {"is_classed": True, "policy": "fair"},
            {"is_classed": True, "policy": "deadline"},
        )
    )
    rows = [
        (await compare("cycle, 1,000 waiting | heap push + pop", plain.sample, heap)).row(
            0.5, "us", most=12
        )
    ]
    for name, queue in (("", classed), (", fair", fair), (", deadline", due)):
        what = f"the same, three classes and sizes{name} | heap push + pop"
        rows.append((await compare(what, queue.sample, heap)).row(0.5, "us", most=12))
    curve = await compare(
        "a latency curve records and predicts | heap push + pop", Curve().sample, heap
    )
    rows.append(curve.row(0.5, "us"))
    one, two = Queue(1000), Queue(1000, devices=2)
    beside = await compare("cycle, two devices | one device", two.sample, one.sample)
    rows.append(beside.row(0.5, "us"))
    few, many = Queue(100), Queue(MANY)
    grown = await compare(f"cycle, {MANY:,} waiting | 100 waiting", many.sample, few.sample)
    rows.append(grown.row(0.5, "us", most=2))
    rows.append(_mass_cancellation(MANY))
    return rows


def _mass_cancellation(number: int) -> Row:
    """Return the longest of the calls that cancel so many waiting requests, one each."""
    queue = Queue(0)
    requests = []
    while len(requests) < number:
        request = queue.request()
        if not request.grants:
            requests.append(request)
    random.Random(1).shuffle(requests)
    longest = _longest(lambda request: queue.scheduler.cancel(1.0, request), requests)
    bar = 0.010
    return Row(
        f"{number:,} cancelled, longest call | allowed", longest * 1e3, bar * 1e3, "ms",
        bar="<= 10 ms", passed=longest <= bar,
    )  # fmt: skip


def _longest(call: Callable[[Request], object], requests: list[Request]) -> float:
    """Return the longest call in this thread's processor seconds: any call may be interrupted."""
    longest = 0.0
    for request in requests:
        start = thread_time()
        call(request)
        longest = max(longest, thread_time() - start)
    return longest


if __name__ == "__main__":
    print(table(measure()))
