"""A fleet on a Ray cluster of three nodes with simulated GPUs: throughput, and a node that is lost.

    python -m benchmarks.system.ray [--jobs 100000] [--loss]

First, jobs that return their argument beside one Ray call for each, to an actor that has such a
pool and takes the same lease, in turns, with several numbers in flight; then all at once, beside
Ray's calls without a lease.
Then the jobs, every second one idempotent; when three tenths are answered a node is killed, and
replaced three seconds later. Each job records that it ran, so a job that ran twice, or was answered
without having run, is known. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.lib.timing import MachineLoad, Row, table
from greensched import GreenschedError, LaunchConfig, Partition, Pool
from greensched.integrations.ray import Fleet
from greensched.kernels import spin

NODES = 3
#: Ray's, as docs/how-to/ray.md gives them: a lost node is known in under 2 s instead of 15 s.
HEALTH_CHECKS = {
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
    "health_check_initial_delay_ms": 0,
}
#: Jobs or calls in flight, and their number in a round.
IN_FLIGHT = {1: 200, 16: 1000, 100: 3000, 1000: 6000}
ROUNDS = 5
#: The bars: our rate over that of one Ray call for each job, by the number in flight; and over
#: Ray's calls without a lease, all at once.
AWAITED, AT_ONCE = {1: 1.0, 16: 1.0, 100: 5.0, 1000: 1.0}, 0.7
#: For the run that loses a node: jobs in flight, their size, and nanoseconds of their kernel.
CLIENTS, SMS, KERNEL_NS = 300, 16, 15_000_000
#: A job's deadline in seconds, and how much later its answer may come while this process is busy.
DEADLINE, LATE = 20.0, 1.0
#: The part of the jobs that is answered when the node is killed; seconds until another joins.
KILLED_AT, AWAY = 0.3, 3.0
#: Seconds after which a job without an answer counts as hung.
LIMIT = 500.0
#: The bar: seconds from the new node's joining until its first answer.
RECOVERY = 1.0

CONFIG = LaunchConfig(grid=1, block=32)
make = partial(Pool, driver="simulated:h200", prepare=[spin])


@contextmanager
def cluster(gpus: tuple[int, ...] = (1,) * NODES) -> Iterator[Cluster]:
    """Start a cluster of nodes with so many GPUs each, and connect this process to it."""
    if __name__ != "__main__":  # workers need not find this module
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    head = {
        "num_cpus": 1,
        "num_gpus": gpus[0],
        "include_dashboard": False,
        "_system_config": HEALTH_CHECKS,
    }
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for count in gpus[1:]:
            made.add_node(num_cpus=1, num_gpus=count)
        ray.init(address=made.address, log_to_driver=False, logging_level="error")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


# -- throughput -------------------------------------------------------------------------------


async def same(_p: Partition, x: int) -> int:
    """Return the argument."""
    return x


class PoolActor:
    """The reference: an actor with a pool, of which each job is a call."""

    def __init__(self) -> None:
        self.pool = make()

    async def open(self) -> None:
        await self.pool.open()

    async def run(self, x: int) -> int:
        async with self.pool.partition(SMS) as p:
            return await same(p, x)

    async def call(self, x: int) -> int:
        """Return the argument."""
        return x


async def throughput() -> list[Row]:
    """Return jobs and calls a second, for each number in flight and for all at once."""
    rows = []
    actors = _actors()
    runs, calls = ([getattr(actor, name) for actor in actors] for name in ("run", "call"))
    async with fleet("throughput") as ours:

        async def job() -> None:
            await ours.submit(same, 1, sms=SMS)

        for in_flight, number in IN_FLIGHT.items():
            a, b = await _in_turns(partial(_rate, job, number, in_flight), runs, number, in_flight)
            least = AWAITED[in_flight]
            what = f"small jobs, {in_flight} in flight | one Ray call for each"
            rows.append(Row(what, a, b, "/s", None, f">= {least:g} x", a >= least * b))
        number = max(IN_FLIGHT.values())
        a, b = await _in_turns(partial(_rate, job, number, number), calls, number, 0)
        what = f"small jobs, {number} at once | Ray's own, ray.get of all"
        rows.append(Row(what, a, b, "/s", None, f">= {AT_ONCE:g} x", a >= AT_ONCE * b))
    return rows


async def _in_turns(
    ours: Callable[[], Awaitable[float]], methods: Sequence[Any], number: int, in_flight: int
) -> tuple[float, float]:
    """Return the medians of some rounds, after one that is thrown away; methods take turns."""
    turns = cycle(methods)

    def call() -> Any:
        return next(turns).remote(1)

    def at_once() -> float:
        began = time.perf_counter()
        ray.get([call() for _ in range(number)])
        return number / (time.perf_counter() - began)

    async def theirs() -> float:
        if in_flight:

            async def awaited() -> None:
                await call()

            return await _rate(awaited, number, in_flight)
        return await asyncio.to_thread(at_once)  # on the loop, it would stop our heartbeats

    rounds = [(await ours(), await theirs()) for _ in range(ROUNDS + 1)][1:]
    return median(a for a, _ in rounds), median(b for _, b in rounds)


async def _rate(work: Callable[[], Awaitable[None]], number: int, in_flight: int) -> float:
    left = iter(range(number))

    async def client() -> None:
        for _ in left:
            await work()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(in_flight)))
    return number / (time.perf_counter() - began)


def _actors() -> list[Any]:
    """Create an actor with a pool on each node."""
    kind = ray.remote(num_cpus=0, max_concurrency=1000)(PoolActor)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    actors = [kind.options(scheduling_strategy=one).remote() for one in strategies]
    ray.get([actor.open.remote() for actor in actors])
    return actors


@asynccontextmanager
async def fleet(name: str) -> AsyncGenerator[Fleet]:
    """Provide a fleet, and stop it at the end."""
    async with Fleet(name, make) as made:
        yield made
        await made.stop()


# -- a node is lost ---------------------------------------------------------------------------


@dataclass
class Found:
    """The results of the jobs, by number: the even ones are idempotent."""

    jobs: int
    seconds: float = 0.0
    #: How often each began to run.
    ran: Counter[int] = field(default_factory=Counter)
    answered: set[int] = field(default_factory=set)
    #: Jobs that ended with an error of greensched, and with any other.
    refused: dict[int, str] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)
    #: The longest time in seconds from a job's deadline until its answer.
    latest: float = -DEADLINE
    #: When each process gave its first answer; when the new node was started, and had joined.
    first: dict[int, float] = field(default_factory=dict)
    added: float = 0.0
    joined: float = 0.0

    @property
    def has_recovered(self) -> bool:
        """Return whether the new node has answered."""
        return self.joined > 0 and self.recovery < float("inf")

    @property
    def recovery(self) -> float:
        """The seconds from the new node's joining to its first answer."""
        new = [when for when in self.first.values() if when > self.added]
        return min(new, default=float("inf")) - self.joined

    def bars(self) -> dict[str, bool]:
        """Return each condition, and whether it holds."""
        ended = self.answered | self.refused.keys()
        return {
            f"each of {self.jobs} answered, or failed with an error of greensched": (
                ended == set(range(self.jobs)) and not self.wrong
            ),
            "each job that was answered has run": all(self.ran[n] for n in self.answered),
            "no job that is not idempotent ran twice": (
                max((self.ran[n] for n in range(1, self.jobs, 2)), default=0) <= 1
            ),
            f"the latest answer came {self.latest:.2f} s after its deadline, < {LATE:g} s": (
                self.latest < LATE
            ),
            f"recovery {self.recovery:.2f} s after the new node had joined, <= {RECOVERY:g} s": (
                self.recovery <= RECOVERY
            ),
        }

    def __str__(self) -> str:
        even = sum(n % 2 == 0 for n in self.refused)
        again = sum(times > 1 for times in self.ran.values())
        return (
            f"{self.jobs} jobs in {self.seconds:.0f} s: {len(self.answered)} answered; "
            f"{len(self.refused)} refused, {even} of them idempotent: "
            f"{dict(Counter(self.refused.values()))}; {again} ran more than once; "
            f"wrong: {self.wrong or 'none'}"
        )


def losing_a_node(made: Cluster, jobs: int) -> Found:
    """Run the jobs on a thread, and kill a node here: Ray starts nodes on the main thread alone."""
    found, kill = Found(jobs), threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        work = Client(found, folder, kill).run()
        running = threading.Thread(target=asyncio.run, args=(work,), daemon=True)
        running.start()
        kill.wait()
        made.remove_node(next(iter(made.worker_nodes)), allow_graceful=False)
        time.sleep(AWAY)
        found.added = time.monotonic()
        made.add_node(num_cpus=1, num_gpus=1)  # raises if the node has not joined in 30 s
        found.joined = time.monotonic()
        running.join()
        for journal in Path(folder).iterdir():
            found.ran.update(map(int, journal.read_text().split()))
    return found


async def noted(p: Partition, number: int, folder: str) -> int:
    """Record that the job runs, run a kernel, and return the process."""
    with Path(folder, str(os.getpid())).open("a") as journal:  # noqa: ASYNC230  some 30 us
        journal.write(f"{number}\n")
    await p.launch(CONFIG, spin, KERNEL_NS)
    return os.getpid()


@dataclass
class Client:
    """Keeps so many jobs in flight until all have ended."""

    found: Found
    folder: str
    kill: threading.Event

    async def run(self) -> None:
        """Run all jobs; those that hang are given up after `LIMIT` seconds."""
        found, left = self.found, iter(range(self.found.jobs))
        began = time.monotonic()
        try:
            async with fleet("loss") as ours, asyncio.timeout(LIMIT):
                await asyncio.gather(*(self._some(ours, left) for _ in range(CLIENTS)))
                found.seconds = time.monotonic() - began
                while not found.has_recovered:  # the jobs may have been done before
                    process = await ours.submit(
                        os.getpid, sms=SMS, deadline=DEADLINE, idempotent=True
                    )
                    found.first.setdefault(process, time.monotonic())
        finally:
            self.kill.set()

    async def _some(self, ours: Fleet, left: Iterator[int]) -> None:
        found = self.found
        for number in left:
            began = time.monotonic()
            try:
                process = await ours.submit(
                    noted,
                    number,
                    self.folder,
                    sms=SMS,
                    deadline=DEADLINE,
                    idempotent=number % 2 == 0,
                )
            except GreenschedError as error:
                found.refused[number] = type(error).__name__
            except Exception as error:
                found.wrong[number] = repr(error)
            else:
                found.answered.add(number)
                found.first.setdefault(process, time.monotonic())
            found.latest = max(found.latest, time.monotonic() - began - DEADLINE)
            if len(found.answered) >= KILLED_AT * found.jobs:
                self.kill.set()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.system.ray",
        description="Measure a fleet on a Ray cluster of three nodes.",
    )
    parser.add_argument("--jobs", type=int, default=100_000, help="default: 100000")
    parser.add_argument("--loss", action="store_true", help="only the run that loses a node")
    options = parser.parse_args()
    machine, rows = MachineLoad(), list[Row]()
    with cluster() as made:
        if not options.loss:
            rows = asyncio.run(throughput())
        found = losing_a_node(made, options.jobs)
    print(f"{machine}; Ray {ray.__version__}, {NODES} nodes")
    if rows:
        print(f"\n{table(rows)}\n")
    print(found)
    bars = found.bars()
    for bar, holds in bars.items():
        print(f"{bar}: {'PASS' if holds else 'FAIL'}")
    return int(not all(bars.values()) or any(row.passed is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
