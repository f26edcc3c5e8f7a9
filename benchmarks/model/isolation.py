"""Published figures on separate SMs: start latencies, and the effects of lending."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from benchmarks.model.scenarios import (
    TINY,
    Check,
    beside,
    forever,
    pair,
    percentile,
    play,
    same,
    work,
)
from greensched.capacity.baselines import Streams
from greensched.capacity.machine import Machine
from greensched.capacity.pool_strategies import Classes
from greensched.capacity.strategies import Client, Fifo, LeaseClient, Split, Strategy
from greensched.capacity.workload import ServiceProfile
from greensched.pool import Pool

# -- 1: start latency, HoloHub on an RTX 6000 Ada -----------------------------------------------

#: Launch to start in an idle partition: median 3.9 us, p99 14.0. The critical kernel runs
#: for 1.2 us, and the load's kernels for 513 us (holoscan/holohub, green_context_benchmarking).
IDLE_US, IDLE_P99_US, SHORT_NS, LOAD_NS = 3.9, 14.0, 1_200, 513_000
STARTS = 1_000


def start_latency(seed: int) -> Iterator[Check]:
    """Check how long a kernel takes to start beside a load, on the same SMs and on other SMs."""
    shared, apart = (_starts(strategy, seed) for strategy in (Streams(), Split(72)))
    given = "start in an idle partition (p50 3.9, p99 14.0 us), a load of 513 us kernels"
    yield Check("start beside a load, p50, us", 272.0, percentile(shared, 0.5), given)
    yield Check("start beside a load, p99, us", 478.5, percentile(shared, 0.99), given)
    ratio = percentile(shared, 0.99) / percentile(apart, 0.99)
    yield Check("shared over partition, p99 of the start", 34.0, ratio, given)


def _starts(strategy: Strategy, seed: int) -> list[float]:
    machine = Machine("l40s", pair(work(142), TINY), {}, seed)
    rng = random.Random(f"starts {seed}")
    sigma = math.log(IDLE_P99_US / IDLE_US) / 2.3263  # the 99th percentile of a normal
    found: list[float] = []

    async def critical(client: Client) -> None:
        for _ in range(STARTS):
            await asyncio.sleep(rng.uniform(0.001, 0.003))
            began = machine.now()
            await client.run((SHORT_NS,))
            waited = (machine.now() - began - SHORT_NS) / 1e3
            found.append(waited - IDLE_US + rng.lognormvariate(math.log(IDLE_US), sigma))

    async def drive(_: Machine, client: Callable[[str], Client]) -> None:
        await beside(critical(client("critical")), forever(client("other"), same(LOAD_NS)))

    play(machine, strategy, drive)
    return found


# -- 2: lending without the rule, on an A100 ----------------------------------------------------

#: The critical tenant alone: p99 62.5 us, one request every 5 ms. Without protection it waited
#: for one kernel of the borrower: 1609 us in the median of the same experiment.
OWN_NS, EVERY_S, BORROWER_NS = 62_500, 0.005, 1_609_000


def inversion(seed: int) -> Iterator[Check]:
    """Check what lending costs the lender, without a rule and with reserves, and its gain."""
    strict, strict_done = _lent(seed, _Sized(sizes={"critical": 52, "other": 52}))
    lent, lent_done = _lent(seed, _Sized(sizes={"critical": 52, "other": (52, 104)}))
    ruled, _ = _lent(seed, Classes())
    given = "the tenant alone (62.5 us), the borrower's kernel on what it is lent (1609 us)"
    yield Check("strict halves, p99, us", 62.5, percentile(strict, 0.99), given)
    yield Check("lent without a rule, p99, us", 1650.0, percentile(lent, 0.99), given)
    ratio = percentile(lent, 0.99) / percentile(strict, 0.99)
    yield Check("inversion: lent without a rule over strict", 26.4, ratio, given)
    by_rule = percentile(ruled, 0.99)
    yield Check("lent by the rule (a floor of our classes), p99, us", 55.7, by_rule, given)
    yield Check("what lending gives to the borrower", 1.92, lent_done / strict_done, given)


def _lent(seed: int, strategy: Strategy) -> tuple[list[float], float]:
    """Return the critical tenant's latencies, and the other tenant's work per second."""
    services = pair(work(108), TINY)
    services["critical"] = replace(
        services["critical"], reserve=52, cap=52, max_wait_for_reserve=0.0
    )
    machine = Machine("a100", services, {}, seed)
    rng = random.Random(f"lent {seed}")
    found: list[float] = []
    done: list[int] = []
    latency = machine.driver.devices[0].model.launch_latency_ns
    # A kernel takes BORROWER_NS on all SMs that may be lent; on other numbers its work is the same.
    kernel = round(BORROWER_NS / work(108).slowdown(104))

    async def critical(client: Client) -> None:
        for _ in range(400):
            await asyncio.sleep(EVERY_S * rng.uniform(0.9, 1.1))
            began = machine.now()
            await client.run((OWN_NS - latency,))
            found.append((machine.now() - began) / 1e3)

    async def drive(_: Machine, client: Callable[[str], Client]) -> None:
        await beside(critical(client("critical")), forever(client("other"), same(kernel), done))

    play(machine, strategy, drive)
    return found, sum(done) / machine.now()


@dataclass
class _Sized(Fifo):
    """A lease for each kernel, with a given size for each class."""

    sizes: dict[str, int | tuple[int, int]] = field(kw_only=True)

    def client(
        self, machine: Machine, pool: Pool, device: int, service: ServiceProfile
    ) -> LeaseClient:
        """Make a client that requests the class's size."""
        return LeaseClient(machine, pool, device, service, self.sizes[service.name])
