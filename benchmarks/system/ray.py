"""A fleet on a Ray cluster of three nodes with simulated GPUs: throughput, and faults.

    python -m benchmarks.system.ray [--jobs 100000] [--faults]

First, jobs that return their argument beside one Ray call for each, to an actor that has such a
pool and takes the same lease, in turns, with several numbers in flight; then all at once, beside
Ray's calls without a lease. Then the jobs of `ray_faults`. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.lib.timing import RESAMPLINGS, MachineLoad, Row, table
from benchmarks.system.ray_faults import SMS, faults, make
from greensched import Partition
from greensched.integrations.ray import Fleet

NODES = 3
#: Ray's, as docs/how-to/ray.md gives them: a lost node is known in under 2 s instead of 15 s.
HEALTH_CHECKS = {
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
    "health_check_initial_delay_ms": 0,
}
#: Jobs or calls in flight, and their number in a round.
IN_FLIGHT = {1: 50, 2: 100, 4: 200, 16: 500, 100: 1000, 1000: 3000}
ROUNDS = 15
#: The bars: our rate over that of one Ray call for each job, by the number in flight; and over
#: Ray's calls without a lease, all at once.
AWAITED, AT_ONCE = {1: 1.0, 2: 1.0, 4: 1.0, 16: 1.0, 100: 5.0, 1000: 1.0}, 0.7


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
            rounds = await _in_turns(
                partial(_rate, job, number, in_flight), runs, number, in_flight
            )
            what = f"small jobs, {in_flight} in flight | one Ray call for each"
            rows.append(_judged(what, rounds, AWAITED[in_flight]))
        number = max(IN_FLIGHT.values())
        rounds = await _in_turns(partial(_rate, job, number, number), calls, number, 0)
        what = f"small jobs, {number} at once | Ray's own, ray.get of all"
        rows.append(_judged(what, rounds, AT_ONCE))
    return rows


async def _in_turns(
    ours: Callable[[], Awaitable[float]], methods: Sequence[Any], number: int, in_flight: int
) -> list[tuple[float, float]]:
    """Return the rates of some rounds, after one that is thrown away; methods take turns."""
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

    return [(await ours(), await theirs()) for _ in range(ROUNDS + 1)][1:]


def _judged(what: str, rounds: list[tuple[float, float]], least: float) -> Row:
    """Return a row of medians, with the 95 % interval of their ratio."""
    drawn = np.random.default_rng(1).choice(rounds, (RESAMPLINGS, len(rounds)))
    medians = np.median(drawn, axis=1)
    low, high = map(float, np.quantile(medians[:, 0] / medians[:, 1], (0.025, 0.975)))
    a, b = median(a for a, _ in rounds), median(b for _, b in rounds)
    return Row(what, a, b, "/s", (low, high), f">= {least:g} x", a >= least * b)


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


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.system.ray",
        description="Measure a fleet on a Ray cluster of three nodes.",
    )
    parser.add_argument("--jobs", type=int, default=100_000, help="default: 100000")
    parser.add_argument("--faults", action="store_true", help="only the run with faults")
    options = parser.parse_args()
    machine, rows = MachineLoad(), list[Row]()
    with cluster() as made:
        if not options.faults:
            rows = asyncio.run(throughput())
            print(f"{table(rows)}\n")
        passed = faults(made, options.jobs)
    print(f"\n{machine}; Ray {ray.__version__}, {NODES} nodes")
    return int(not passed or any(row.passed is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
