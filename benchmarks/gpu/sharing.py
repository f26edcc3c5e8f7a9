"""Two users on one GPU: W1, W2, W7 and W8, by hand and by greensched. Issue 4, bar 8.

`python -m benchmarks.gpu.sharing [--driver cuda|simulated:h200] [--seconds N] [--json FILE]`

What the users do is in `works`, where their work runs in `arms`. The arms, in turns:

* *alone*: the critical user on every SM, and nobody else. *alone, same SMs*: on those of the
  split. *other alone*: the other user, and nobody else. These are what all ratios are over.
* *B1*: two streams of the primary context.
* *B2*: the same, the critical one of the highest priority, the other of the lowest.
* *B3b*: two green contexts, cut by hand: of all splits the one that a sweep in the same process
  found best. Best is: the other user's throughput, among the splits with a critical p95 of at most
  1.3 times that alone; where there is none, the smallest p95. In W8: the smaller of the two users'
  worse slowdowns.
* *greensched*: a pool with the classes of `works`, whose critical floor is as large as B3b's part,
  and a lease for each request, scheduler and all. In W1 also a lease held while it is idle.

By hand means: launches packed once, a word in pinned memory that the stream writes behind each
piece, and a loop that looks at it in every turn. Nothing one writes in Python does it for less. So
our loop looks in every turn, too (`spin_budget`): the arms differ in where work runs, not in how a
host waits, which is `waking`'s affair. One loop drives both users in every arm. Requests that were
due and not begun when a slice ended count with what they had waited by then, so the p99 of an arm
that cannot keep up is a lower bound; how many they are is printed. The first round is thrown away;
intervals are the bootstrap's, over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.strategies import (
    Done,
    Held,
    Leased,
    OnStream,
    Place,
    Raw,
    Work,
    blocking,
    until,
)
from benchmarks.gpu.workloads import KERNELS, WORKLOADS, Workload, Works
from benchmarks.lib.report import Report, clocks
from benchmarks.lib.timing import Comparison, MachineLoad, Row, Samples, percentile, table
from greensched import Device, Pool, Stream
from greensched import driver as drivers
from greensched.driver.interface import Driver
from greensched.driver.simulated import SimulatedDriver

ROUNDS = 5
#: Of a workload's time: the sweep's part.
SWEEP = 0.12
#: A slice at least, and one of the round that is thrown away, in seconds.
LEAST = 0.1
WARM = 0.15
#: What a slice takes besides: changing the classes, the last pieces.
BESIDES = 0.04
#: Mean pause between two requests of W1: its kernel takes 2 us, and should find any moment.
PAUSE = 0.0005
#: What the sweep allows the critical user, over alone.
ALLOWED = 1.3
#: Launches that are timed together to find how many make a request.
SOME = 16
#: Who works without pause ends his segments in so much of what his class says they take: if he is
#: late once, he gets no loans for a time.
OF_SEGMENT = 0.6
#: Issue 4, bar 3.
BARS = {"same SMs": 1.15, "all SMs": 1.3, "throughput": 0.70}

ALONE, SAME, OTHER = "alone", "alone, same SMs", "other alone"
BY_HAND = ("B1 plain streams", "B2 priority streams", "B3b best split")

#: A critical user's and another's place; None: he is not there.
Pair = tuple[Place | None, Place | None]
Arm = Callable[[], AbstractAsyncContextManager[Pair]]


@dataclass(slots=True)
class Slice:
    """What one arm gave in one slice: seconds, pieces a second, requests never begun."""

    critical: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)
    rate: float = 0.0
    dropped: int = 0
    sms: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Seen:
    """An arm's slices."""

    slices: list[Slice] = field(default_factory=list)

    def critical(self) -> list[Samples]:
        return [np.array(each.critical) for each in self.slices if each.critical]

    def other(self) -> list[Samples]:
        """Latencies where the other user has requests, else seconds for a piece."""
        found = [each.other or ([1 / each.rate] if each.rate else []) for each in self.slices]
        return [np.array(each) for each in found if each]

    def as_dict(self) -> dict[str, Any]:
        parts = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}

        def told(rounds: list[Samples]) -> dict[str, float]:
            if not rounds:
                return {}
            return {name: 1e6 * percentile(rounds, part) for name, part in parts.items()}

        return {
            "critical_us": told(self.critical()),
            "critical_samples": sum(len(each.critical) for each in self.slices),
            "critical_dropped": sum(each.dropped for each in self.slices),
            "other_us": told(self.other()),
            "other_sms": sorted({sms for each in self.slices for sms in each.sms}),
            "other_per_s": [each.rate for each in self.slices],
            "critical_p99_us_by_round": [1e6 * percentile([r], 0.99) for r in self.critical()],
        }


# -- one slice ------------------------------------------------------------------------------------


class Clients:
    """The two users, on whatever places an arm gives them."""

    def __init__(self, workload: Workload, driver: Driver) -> None:
        self._workload = workload
        self._driver = driver
        #: Seconds of a request alone, of the critical user and the other.
        self.alone = (0.001, 0.001)

    async def slice(self, pair: Pair, case: str, seconds: float, seed: int) -> Slice:
        """Both for so long; ends soon after, with an error if it does not.

        Raises:
            TimeoutError: the GPU did not answer.
        """
        critical, other = pair
        found, done = Slice(), Done()
        begin = time.perf_counter() + 0.005
        end = begin + seconds
        # The other user is at work when the first request comes, and until the last is answered.
        first = begin + 0.1 * seconds if other is not None else begin
        async with asyncio.timeout(2 * seconds + 20), asyncio.TaskGroup() as users:
            if other is not None:
                if self._workload.other == "churn":
                    users.create_task(other.churn(end + 0.01, done))
                else:
                    load = self._workload.cases[case] / self.alone[1]
                    users.create_task(
                        _open(other, found.other, Slice(), load, begin, end, seed + 1)
                    )
            if critical is not None:
                if self._workload.measures == "begin":
                    users.create_task(_closed(critical, found.critical, first, end, seed))
                else:
                    load = self._workload.cases[case] / self.alone[0]
                    users.create_task(
                        _open(critical, found.critical, found, load, first, end, seed)
                    )
        found.rate = done.rate()
        found.sms = sorted(done.sms)
        return found


async def _closed(place: Place, out: list[float], begin: float, end: float, seed: int) -> None:
    """One request after another, with pauses."""
    rng = random.Random(seed)
    await until(begin)
    while time.perf_counter() < end:
        out.append(await place.begin())
        await until(time.perf_counter() + rng.expovariate(1 / PAUSE))


async def _open(
    place: Place, out: list[float], count: Slice, rate: float, begin: float, end: float, seed: int
) -> None:
    """Requests at Poisson times, one at a time, first come, first served."""
    rng = random.Random(seed)
    due = begin
    while (due := due + rng.expovariate(rate)) < end:
        await until(due)
        if time.perf_counter() >= end:
            out.append(end - due)
            count.dropped += 1
            continue
        await place.request()
        out.append(time.perf_counter() - due)


# -- arms -----------------------------------------------------------------------------------------


class Bench:
    """One workload on one driver: its sweep, its arms, its rows.

    Args:
        device: of ours, beside the pools', with the streams of what is by hand.
    """

    def __init__(self, workload: Workload, driver: Driver, device: Device, report: Report) -> None:
        self._workload = workload
        self._driver = driver
        self._device = device
        self._report = report
        self._clients = Clients(workload, driver)
        self._repeats = 1
        self.split = 0
        self.found: dict[str, Any] = {"about": workload.about, "cases": {}}
        self.rows: list[Row] = []

    async def measure(self, seconds: float) -> None:
        """The sweep, then all cases in turns; what is found is kept as it is found."""
        end = time.perf_counter() + seconds
        self.found["clocks before"] = await blocking(clocks)
        async with self._opened([]) as (_pool, works):
            await self._sweep(works, SWEEP * seconds)
        services = next(iter(self._workload.variants.values()))(self.split)
        async with self._opened(services) as (pool, works):
            for done, case in enumerate(self._workload.cases):
                self._report.put(self._workload.name, self.found)
                if self._report.left < 1:
                    raise TimeoutError("the time is up: what is left was not measured")
                left = (end - time.perf_counter()) / (len(self._workload.cases) - done)
                await self._case(pool, works, case, left)
        self.found["clocks after"] = await blocking(clocks)
        self._report.put(self._workload.name, self.found)

    @asynccontextmanager
    async def _opened(self, services: Any) -> AsyncIterator[tuple[Pool, Works]]:
        """A pool, and the workload's launches on buffers of it."""
        small = isinstance(self._driver, SimulatedDriver)
        async with Pool([0], driver=self._driver, services=services, prepare=KERNELS) as pool:
            async with pool.partition(8) as p:
                works = await self._workload.build(p, small)
                words = [await p.empty_pinned(1, np.uint32) for _ in range(64)]
            works.critical = list(works.critical) * self._repeats
            if self._workload.other == "requests":
                repeated = {case: list(w) * self._repeats for case, w in works.others.items()}
                works.others = repeated
            self._words = list(words)
            try:
                yield pool, works
            finally:
                for thing in (*works.keep, *words):
                    thing.close()

    def _on(self, stream: Stream, work: Work, works: Works) -> OnStream:
        word = self._words.pop()
        word.array[0] = 0
        return OnStream(stream, work, word, works.started)

    async def _sweep(self, works: Works, seconds: float) -> None:
        """Finds what a request takes alone, and the best split."""
        case = self._workload.sweep
        raw = await blocking(Raw, self._device)
        try:
            some = list(works.critical) * (SOME if self._workload.request else 1)
            critical = await blocking(self._on, await blocking(raw.stream), some, works)
            if self._workload.request:
                one = await self._seconds(critical) / SOME
                self._repeats = max(1, round(self._workload.request / one))
                works.critical = list(works.critical) * self._repeats
                if self._workload.other == "requests":
                    works.others[case] = list(works.others[case]) * self._repeats
                place = partial(self._on, works=works)
                critical = await blocking(place, await blocking(raw.stream), works.critical)
            took = await self._seconds(critical)
            self._clients.alone = (took, took)
            self.found |= {"launches": len(works.critical), "alone_ms": 1e3 * took}
            each = max(LEAST, seconds / (len(raw.sizes) + 1))
            alone = await self._clients.slice((critical, None), case, each, 1)
            sweep: dict[int, tuple[float, float]] = {}
            for sms in raw.sizes:
                mine, rest = await blocking(raw.split, sms)
                pair = (
                    await blocking(self._on, mine, works.critical, works),
                    await blocking(self._on, rest, works.others[case], works),
                )
                got = await self._clients.slice(pair, case, each, 1)
                seen = Seen([got])
                slow, usual = (_p95(each) for each in (seen, Seen([alone])))
                sweep[sms] = slow / usual, _p95(seen, of_other=True)
            self.split = _best(sweep, worse_of_both=self._workload.other == "requests")
            self.found |= {
                "split": self.split,
                "sweep": {
                    sms: {"critical_p95_slowdown": a, "other_s": b} for sms, (a, b) in sweep.items()
                },
            }
        finally:
            await blocking(raw.close)

    async def _seconds(self, place: Place) -> float:
        """Of a request: the least of three medians of ten, for the rate of all arms goes by it."""
        medians = []
        for _ in range(3):
            took = []
            for _ in range(10):
                began = time.perf_counter()
                await place.request()
                took.append(time.perf_counter() - began)
            medians.append(float(np.median(took)))
        return min(medians)

    async def _case(self, pool: Pool, works: Works, case: str, seconds: float) -> None:
        raw = await blocking(Raw, self._device)
        try:
            arms = await self._arms(raw, pool, works, case)
            seen = {name: Seen() for name in arms}
            each = max(LEAST, (seconds / len(arms) - WARM - BESIDES) / ROUNDS - BESIDES)
            for number in range(ROUNDS + 1):
                names = list(arms)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    async with arms[name]() as pair:
                        some = each if number else min(each, WARM)
                        got = await self._clients.slice(pair, case, some, 10 * number)
                    if number:
                        seen[name].slices.append(got)
                if self._report.left < 0 and number > 1:
                    break
            self._judge(case, seen)
        finally:
            await blocking(raw.close)

    async def _arms(self, raw: Raw, pool: Pool, works: Works, case: str) -> dict[str, Arm]:
        critical, other = works.critical, works.others[case]
        least, most = await blocking(raw.priorities)
        mine, rest = await blocking(raw.split, self.split)
        made = partial(blocking, self._on, works=works)

        async def pair(a: Stream, b: Stream) -> Pair:
            return await made(a, critical), await made(b, other)

        plain = await pair(await blocking(raw.stream), await blocking(raw.stream))
        split = await pair(mine, rest)
        high = partial(raw.stream, priority=most)
        low = partial(raw.stream, priority=least)
        arms: dict[str, Arm] = {
            ALONE: _always((plain[0], None)),
            OTHER: _always((None, plain[1])),
            BY_HAND[0]: _always(plain),
            BY_HAND[1]: _always(await pair(await blocking(high), await blocking(low))),
            BY_HAND[2]: _always(split),
        }
        if self._workload.same_sms:
            arms[SAME] = _always((split[0], None))
        for name, classes in self._workload.variants.items():
            arms[name] = partial(self._leased, pool, works, case, classes(self.split))
        if self._workload.holds:
            (classes,) = self._workload.variants.values()
            held = partial(self._held, pool, works, case, classes(self.split))
            arms["greensched, a lease held"] = held
        return arms

    @asynccontextmanager
    async def _leased(
        self, pool: Pool, works: Works, case: str, services: Any
    ) -> AsyncIterator[Pair]:
        pool.reconfigure(services=services)
        segment = next(s.checkpoint_interval for s in services if s.name == "other")
        other = Leased(
            pool,
            "other",
            (8, self._device.sm_count),
            works.others[case],
            segment=OF_SEGMENT * (segment or 0.010),
        )
        yield Leased(pool, "critical", self.split, works.critical, works.started), other

    @asynccontextmanager
    async def _held(
        self, pool: Pool, works: Works, case: str, services: Any
    ) -> AsyncIterator[Pair]:
        async with (
            self._leased(pool, works, case, services) as (_, other),
            pool.partition(self.split, service="critical") as p,
        ):
            yield Held(p, works.critical, works.started), other

    # -- rows -------------------------------------------------------------------------------------

    def _judge(self, case: str, seen: dict[str, Seen]) -> None:
        alone, other = seen[ALONE].critical(), seen[OTHER].other()
        rows: list[Row] = []
        what_other = "request" if self._workload.other == "requests" else "piece"
        ours = list(self._workload.variants)
        if self._workload.holds:
            ours.append("greensched, a lease held")

        def add(name: str, over: str, part: float, a: Any, b: Any, **bar: float) -> None:
            if a and b:
                what = f"{self._workload.name} {case}, {name} | {over}"
                rows.append(Comparison(what, a, b).row(part, "us", **bar))

        for name in (*BY_HAND, *ours):
            mine = seen[name]
            judged = name in ours and self._workload.name == "W2"
            add(name, ALONE, 0.5, mine.critical(), alone)
            bar = {"most": BARS["all SMs"]} if judged else {}
            add(name, ALONE, 0.99, mine.critical(), alone, **bar)
            if SAME in seen:
                bar = {"most": BARS["same SMs"]} if judged else {}
                add(name, SAME, 0.99, mine.critical(), seen[SAME].critical(), **bar)
            bar = {"most": 1 / BARS["throughput"]} if judged else {}
            add(f"{name}: other's {what_other}", OTHER, 0.5, mine.other(), other, **bar)
        for name in ours:
            for hand in BY_HAND:
                add(name, hand, 0.99, seen[name].critical(), seen[hand].critical())
                add(
                    f"{name}: other's {what_other}",
                    hand,
                    0.5,
                    seen[name].other(),
                    seen[hand].other(),
                )
        lost = [
            row.what
            for row in rows
            if row.interval
            and row.interval[0] > 1
            and any(f"| {hand}" in row.what for hand in BY_HAND)
        ]
        self.found["cases"][case] = {
            "arms": {name: each.as_dict() for name, each in seen.items()},
            "rows": [row.as_dict() for row in rows],
            "lost": lost,
        }
        self._report.put(self._workload.name, self.found)
        self.rows += rows
        print(f"\n{self._workload.name} {case}, split {self.split}", flush=True)
        print(table(rows), flush=True)
        for name, each in seen.items():
            if dropped := sum(one.dropped for one in each.slices):
                print(f"{name}: {dropped} requests never begun", flush=True)
        print("\n".join(f"we lose: {what}" for what in lost), flush=True)


def _always(pair: Pair) -> Arm:
    @asynccontextmanager
    async def arm() -> AsyncIterator[Pair]:
        yield pair

    return arm


def _p95(seen: Seen, *, of_other: bool = False) -> float:
    """In seconds; infinite where nothing was done."""
    found = seen.other() if of_other else seen.critical()
    return percentile(found, 0.95) if found else math.inf


def _best(sweep: dict[int, tuple[float, float]], *, worse_of_both: bool) -> int:
    """The best split, of (slowdown of the critical user, seconds of the other's) for each."""
    if worse_of_both:
        least = min(other for _, other in sweep.values())
        return min(sweep, key=lambda sms: max(sweep[sms][0], sweep[sms][1] / least))
    good = {sms: other for sms, (slowdown, other) in sweep.items() if slowdown <= ALLOWED}
    if good:
        return min(good, key=good.__getitem__)
    return min(sweep, key=lambda sms: sweep[sms][0])


# -- the program ----------------------------------------------------------------------------------


async def _main(driver: Driver, device: Device, names: list[str], report: Report) -> list[Row]:
    rows: list[Row] = []
    try:
        async with Pool([0], driver=driver) as pool:
            report.put("verification", repr(await pool.verify()))
    except Exception:
        report.fail("verification")
    shares = sum(WORKLOADS[name].share for name in names)
    for name in names:
        workload = WORKLOADS[name]
        seconds = max(1.0, report.left - 3) * workload.share / shares
        shares -= workload.share
        bench = Bench(workload, driver, device, report)
        try:
            async with asyncio.timeout(1.5 * seconds + 30):
                await bench.measure(seconds)
        except Exception:
            report.fail(name)
        rows += bench.rows
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sharing", description=__doc__)
    parser.add_argument("--driver", help="cuda, or simulated:h200; else GREENSCHED_DRIVER's")
    parser.add_argument("--seconds", type=float, default=320)
    parser.add_argument("--json", type=Path, help="a file, written whenever something is found")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    options = parser.parse_args()
    return run(options.driver, options.only, Report(options.json, options.seconds))


def run(spec: str | None, names: list[str], report: Report) -> int:
    """Measures the workloads of these names; 1 if a bar was missed, or anything failed."""
    load = MachineLoad()
    driver = drivers.open(spec)
    driver.spin_budget = math.inf
    device = Device(0, driver=driver)
    report.put("device", f"{device.name}, {device.sm_count} SMs, {driver.name}")
    print(report.found["device"], flush=True)
    if isinstance(driver, SimulatedDriver):
        sys.setswitchinterval(100e-6)  # its GPU is a thread, which a loop that polls would starve
    with device:
        pass  # the primary context is made here, not on the loop's thread
    rows = asyncio.run(_main(driver, device, names, report))
    device.close()
    driver.close()
    report.put("machine", str(load))
    failed = [row for row in rows if row.passed is False]
    print(f"\n{load}\n{len(rows)} rows, {len(failed)} bars missed, ", end="")
    print(f"{len(report.found['errors'])} errors", flush=True)
    return int(bool(failed or report.found["errors"]))


if __name__ == "__main__":
    raise SystemExit(main())
