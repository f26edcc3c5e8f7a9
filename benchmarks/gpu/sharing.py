"""Two users on one GPU: workloads W1, W2, W7 and W8, on streams and by greensched.

`python -m benchmarks.gpu.sharing [--driver cuda|simulated:h200] [--seconds N] [--json FILE]`

The workloads are in `workloads`, the places where they run in `strategies`. The strategies are
measured in turns:

* *alone*: the critical user alone on every SM. *alone, same SMs*: alone on those of the split.
  *other alone*: the other user alone. All ratios are over these.
* *B1*: two streams of the primary context.
* *B2*: the same, the critical one of the highest priority, the other of the lowest.
* *B3b*: two green contexts over a fixed split, the best that a sweep in the same process found: the
  one with the highest throughput of the other user, among those with a critical p95 of at most 1.3
  times that alone; if there is none, the one with the smallest p95. In W8: the one where the larger
  slowdown of the two users is smallest.
* *greensched*: a pool with the workload's classes, the critical reserve as large as B3b's part, and
  a lease for each request, scheduler included. In W1 also a lease that is held while it is idle.

On B1 to B3b launches are packed once, the stream writes a word in pinned memory behind each piece,
and a loop polls it in every turn: nothing that is written in Python costs less. So our loop polls
in every turn, too (`spin_budget`): the strategies differ in where work runs, not in how a host
waits, which `micro.completion` measures. One loop drives both users in every strategy. Requests
that were due and not begun when a slice ended count with the time that they had waited by then, so
the p99 of a strategy that cannot keep up is a lower bound; their number is printed. The first round
is thrown away; intervals are bootstrap intervals over rounds.
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
    Held,
    Leased,
    OnStream,
    Place,
    Progress,
    RawStreams,
    Work,
    blocking,
    until,
)
from benchmarks.gpu.workloads import KERNELS, WORKLOADS, Workload, WorkloadLaunches
from benchmarks.lib.report import Report, clocks
from benchmarks.lib.timing import Comparison, MachineLoad, Row, Samples, percentile, table
from greensched import Device, Pool, Stream
from greensched import driver as drivers
from greensched.driver.interface import Driver
from greensched.driver.simulated import SimulatedDriver

ROUNDS = 5
#: The sweep's part of a workload's time.
SWEEP = 0.12
#: The shortest slice, and a slice of the round that is thrown away, in seconds.
LEAST = 0.1
WARM = 0.15
#: Seconds that a slice takes besides: changing the classes, the last pieces.
BESIDES = 0.04
#: Mean pause between two requests of W1: its kernel takes 2 us, and should begin at any moment.
PAUSE = 0.0005
#: The slowdown of the critical user that the sweep allows.
ALLOWED = 1.3
#: Launches that are timed together, to find how many make a request.
SOME = 16
#: The part of a class's checkpoint interval after which a busy user comes to its checkpoint: a user
#: that is late once borrows no SMs for a time.
OF_SEGMENT = 0.6
#: Of W2: the p99 over that alone on the same SMs and on all SMs, and the other user's throughput.
BARS = {"same SMs": 1.15, "all SMs": 1.3, "throughput": 0.70}

ALONE, SAME, OTHER = "alone", "alone, same SMs", "other alone"
BASELINES = ("B1 plain streams", "B2 priority streams", "B3b best split")

#: The places of the critical user and the other; None: there is no such user.
Pair = tuple[Place | None, Place | None]
Strategy = Callable[[], AbstractAsyncContextManager[Pair]]


@dataclass(slots=True)
class Slice:
    """What was measured in one slice: seconds, pieces a second, requests never begun."""

    critical: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)
    rate: float = 0.0
    dropped: int = 0
    sms: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Measured:
    """A strategy's slices."""

    slices: list[Slice] = field(default_factory=list)

    def critical(self) -> list[Samples]:
        return [np.array(each.critical) for each in self.slices if each.critical]

    def other(self) -> list[Samples]:
        """Return latencies where the other user has requests, else seconds for a piece."""
        found = [each.other or ([1 / each.rate] if each.rate else []) for each in self.slices]
        return [np.array(each) for each in found if each]

    def as_dict(self) -> dict[str, Any]:
        parts = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}

        def percentiles(rounds: list[Samples]) -> dict[str, float]:
            if not rounds:
                return {}
            return {name: 1e6 * percentile(rounds, part) for name, part in parts.items()}

        return {
            "critical_us": percentiles(self.critical()),
            "critical_samples": sum(len(each.critical) for each in self.slices),
            "critical_dropped": sum(each.dropped for each in self.slices),
            "other_us": percentiles(self.other()),
            "other_sms": sorted({sms for each in self.slices for sms in each.sms}),
            "other_per_s": [each.rate for each in self.slices],
            "critical_p99_us_by_round": [1e6 * percentile([r], 0.99) for r in self.critical()],
        }


# -- one slice ------------------------------------------------------------------------------------


class Clients:
    """The two users, on whatever places a strategy gives them."""

    def __init__(self, workload: Workload, driver: Driver) -> None:
        self._workload = workload
        self._driver = driver
        #: Seconds of a request alone, of the critical user and the other.
        self.alone = (0.001, 0.001)

    async def slice(self, pair: Pair, case: str, seconds: float, seed: int) -> Slice:
        """Run both users for so many seconds.

        Raises:
            TimeoutError: the GPU did not answer.
        """
        critical, other = pair
        found, done = Slice(), Progress()
        begin = time.perf_counter() + 0.005
        end = begin + seconds
        # The other user is busy when the first request comes, and until the last is answered.
        first = begin + 0.1 * seconds if other is not None else begin
        async with asyncio.timeout(2 * seconds + 20), asyncio.TaskGroup() as users:
            if other is not None:
                if self._workload.other == "keep_busy":
                    users.create_task(other.keep_busy(end + 0.01, done))
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
    """Make one request after another, with pauses."""
    rng = random.Random(seed)
    await until(begin)
    while time.perf_counter() < end:
        out.append(await place.begin())
        await until(time.perf_counter() + rng.expovariate(1 / PAUSE))


async def _open(
    place: Place, out: list[float], count: Slice, rate: float, begin: float, end: float, seed: int
) -> None:
    """Make requests at Poisson times, one at a time, first come, first served."""
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


# -- strategies -----------------------------------------------------------------------------------


class Bench:
    """One workload on one driver: its sweep, its strategies, its rows.

    Args:
        device: the device of the baselines' streams, beside the pools'.
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
        """Sweep, then measure all cases in turns; each figure is reported at once."""
        end = time.perf_counter() + seconds
        self.found["clocks before"] = await blocking(clocks)
        async with self._opened([]) as (_pool, launches):
            await self._sweep(launches, SWEEP * seconds)
        services = next(iter(self._workload.variants.values()))(self.split)
        async with self._opened(services) as (pool, launches):
            for done, case in enumerate(self._workload.cases):
                self._report.put(self._workload.name, self.found)
                if self._report.left < 1:
                    raise TimeoutError("the time is up: the cases left were not measured")
                left = (end - time.perf_counter()) / (len(self._workload.cases) - done)
                await self._case(pool, launches, case, left)
        self.found["clocks after"] = await blocking(clocks)
        self._report.put(self._workload.name, self.found)

    @asynccontextmanager
    async def _opened(self, services: Any) -> AsyncIterator[tuple[Pool, WorkloadLaunches]]:
        """Provide a pool, and the workload's launches on buffers of it."""
        small = isinstance(self._driver, SimulatedDriver)
        async with Pool([0], driver=self._driver, services=services, prepare=KERNELS) as pool:
            async with pool.partition(8) as p:
                launches = await self._workload.build(p, small)
                words = [await p.empty_pinned(1, np.uint32) for _ in range(64)]
            launches.critical = list(launches.critical) * self._repeats
            if self._workload.other == "requests":
                repeated = {case: list(w) * self._repeats for case, w in launches.others.items()}
                launches.others = repeated
            self._words = list(words)
            try:
                yield pool, launches
            finally:
                for thing in (*launches.keep, *words):
                    thing.close()

    def _on(self, stream: Stream, work: Work, launches: WorkloadLaunches) -> OnStream:
        word = self._words.pop()
        word.array[0] = 0
        return OnStream(stream, work, word, launches.started)

    async def _sweep(self, launches: WorkloadLaunches, seconds: float) -> None:
        """Find what a request takes alone, and the best split."""
        case = self._workload.sweep
        raw = await blocking(RawStreams, self._device)
        try:
            some = list(launches.critical) * (SOME if self._workload.request else 1)
            critical = await blocking(self._on, await blocking(raw.stream), some, launches)
            if self._workload.request:
                one = await self._seconds(critical) / SOME
                self._repeats = max(1, round(self._workload.request / one))
                launches.critical = list(launches.critical) * self._repeats
                if self._workload.other == "requests":
                    launches.others[case] = list(launches.others[case]) * self._repeats
                place = partial(self._on, launches=launches)
                critical = await blocking(place, await blocking(raw.stream), launches.critical)
            took = await self._seconds(critical)
            self._clients.alone = (took, took)
            self.found |= {"launches": len(launches.critical), "alone_ms": 1e3 * took}
            each = max(LEAST, seconds / (len(raw.sizes) + 1))
            alone = await self._clients.slice((critical, None), case, each, 1)
            sweep: dict[int, tuple[float, float]] = {}
            for sms in raw.sizes:
                mine, rest = await blocking(raw.split, sms)
                pair = (
                    await blocking(self._on, mine, launches.critical, launches),
                    await blocking(self._on, rest, launches.others[case], launches),
                )
                got = await self._clients.slice(pair, case, each, 1)
                seen = Measured([got])
                slow, usual = (_p95(each) for each in (seen, Measured([alone])))
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
        """Return the seconds of a request: the least of three medians of ten.

        The rate of requests in every strategy depends on it.
        """
        medians = []
        for _ in range(3):
            took = []
            for _ in range(10):
                began = time.perf_counter()
                await place.request()
                took.append(time.perf_counter() - began)
            medians.append(float(np.median(took)))
        return min(medians)

    async def _case(
        self, pool: Pool, launches: WorkloadLaunches, case: str, seconds: float
    ) -> None:
        raw = await blocking(RawStreams, self._device)
        try:
            strategies = await self._arms(raw, pool, launches, case)
            seen = {name: Measured() for name in strategies}
            each = max(LEAST, (seconds / len(strategies) - WARM - BESIDES) / ROUNDS - BESIDES)
            for number in range(ROUNDS + 1):
                names = list(strategies)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    async with strategies[name]() as pair:
                        some = each if number else min(each, WARM)
                        got = await self._clients.slice(pair, case, some, 10 * number)
                    if number:
                        seen[name].slices.append(got)
                if self._report.left < 0 and number > 1:
                    break
            self._judge(case, seen)
        finally:
            await blocking(raw.close)

    async def _arms(
        self, raw: RawStreams, pool: Pool, launches: WorkloadLaunches, case: str
    ) -> dict[str, Strategy]:
        critical, other = launches.critical, launches.others[case]
        least, most = await blocking(raw.priorities)
        mine, rest = await blocking(raw.split, self.split)
        made = partial(blocking, self._on, launches=launches)

        async def pair(a: Stream, b: Stream) -> Pair:
            return await made(a, critical), await made(b, other)

        plain = await pair(await blocking(raw.stream), await blocking(raw.stream))
        split = await pair(mine, rest)
        high = partial(raw.stream, priority=most)
        low = partial(raw.stream, priority=least)
        strategies: dict[str, Strategy] = {
            ALONE: _always((plain[0], None)),
            OTHER: _always((None, plain[1])),
            BASELINES[0]: _always(plain),
            BASELINES[1]: _always(await pair(await blocking(high), await blocking(low))),
            BASELINES[2]: _always(split),
        }
        if self._workload.same_sms:
            strategies[SAME] = _always((split[0], None))
        for name, classes in self._workload.variants.items():
            strategies[name] = partial(self._leased, pool, launches, case, classes(self.split))
        if self._workload.holds:
            (classes,) = self._workload.variants.values()
            held = partial(self._held, pool, launches, case, classes(self.split))
            strategies["greensched, a lease held"] = held
        return strategies

    @asynccontextmanager
    async def _leased(
        self, pool: Pool, launches: WorkloadLaunches, case: str, services: Any
    ) -> AsyncIterator[Pair]:
        pool.reconfigure(services=services)
        segment = next(s.checkpoint_interval for s in services if s.name == "other")
        other = Leased(
            pool,
            "other",
            (8, self._device.sm_count),
            launches.others[case],
            segment=OF_SEGMENT * (segment or 0.010),
        )
        yield Leased(pool, "critical", self.split, launches.critical, launches.started), other

    @asynccontextmanager
    async def _held(
        self, pool: Pool, launches: WorkloadLaunches, case: str, services: Any
    ) -> AsyncIterator[Pair]:
        async with (
            self._leased(pool, launches, case, services) as (_, other),
            pool.partition(self.split, service="critical") as p,
        ):
            yield Held(p, launches.critical, launches.started), other

    # -- rows -------------------------------------------------------------------------------------

    def _judge(self, case: str, seen: dict[str, Measured]) -> None:
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

        for name in (*BASELINES, *ours):
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
            for hand in BASELINES:
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
            and any(f"| {hand}" in row.what for hand in BASELINES)
        ]
        self.found["cases"][case] = {
            "strategies": {name: each.as_dict() for name, each in seen.items()},
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


def _always(pair: Pair) -> Strategy:
    @asynccontextmanager
    async def strategy() -> AsyncIterator[Pair]:
        yield pair

    return strategy


def _p95(seen: Measured, *, of_other: bool = False) -> float:
    """Return the p95 in seconds; infinite where nothing was done."""
    found = seen.other() if of_other else seen.critical()
    return percentile(found, 0.95) if found else math.inf


def _best(sweep: dict[int, tuple[float, float]], *, worse_of_both: bool) -> int:
    """Return the best split, given (critical slowdown, seconds of the other's piece) of each."""
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.sharing", description="Measure two users on one GPU."
    )
    parser.add_argument("--driver", help="cuda or simulated:h200 (default: GREENSCHED_DRIVER)")
    parser.add_argument("--seconds", type=float, default=320, help="for all (default: 320)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each step")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=WORKLOADS,
        default=list(WORKLOADS),
        help="these workloads (default: all)",
    )
    options = parser.parse_args()
    return run(options.driver, options.only, Report(options.json, options.seconds))


def run(spec: str | None, names: list[str], report: Report) -> int:
    """Measure the workloads of these names; return 1 if a bar was missed or a workload failed."""
    machine = MachineLoad()
    driver = drivers.open(spec)
    driver.spin_budget = math.inf
    device = Device(0, driver=driver)
    report.put("device", f"{device.name}, {device.sm_count} SMs, {driver.name}")
    print(report.found["device"], flush=True)
    if isinstance(driver, SimulatedDriver):
        sys.setswitchinterval(100e-6)  # the simulated GPU is a thread that a polling loop starves
    with device:
        pass  # the primary context is created here, not on the loop's thread
    rows = asyncio.run(_main(driver, device, names, report))
    device.close()
    driver.close()
    report.put("machine", str(machine))
    failed = [row for row in rows if row.passed is False]
    print(f"\n{machine}\n{len(rows)} rows, {len(failed)} bars missed, ", end="")
    print(f"{len(report.found['errors'])} errors", flush=True)
    return int(bool(failed or report.found["errors"]))


if __name__ == "__main__":
    raise SystemExit(main())
