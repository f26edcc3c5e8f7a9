"""What ageing is for, and what it costs, in traffic from fixed seeds."""

from __future__ import annotations

import random
from functools import cache
from statistics import mean, median

import pytest
from benchmarks.micro.shares import Job, Waits, poisson, published, serve

from greensched.scheduling.policy import Fifo
from greensched.typing import ALL

SEEDS = (1, 2, 3)
STRICT, AGED, FIRST_FIT = 0.0, 0.020, float("inf")


def mixed(seed: int) -> list[Job]:
    """Return 16-SM jobs beside 64-SM jobs, with a load of 70 %."""
    rng = random.Random(seed)
    return [*poisson(rng, 16, 0.4, 0.020), *poisson(rng, 64, 0.3, 0.020)]


@cache
def outcomes(ageing: float) -> list[Waits]:
    """Return the published workload's results under a policy, for every seed."""
    return [serve(published(seed), Fifo(ageing=ageing)) for seed in SEEDS]


def test_ageing_serves_every_whole_device_request() -> None:
    """With 20 ms of ageing all 40 are served within half a second, as in strict order."""
    for waits in outcomes(AGED):
        assert len(waits[ALL]) == 40
        assert max(waits[ALL]) < 0.5


def test_ageing_costs_small_requests_nothing() -> None:
    """Large requests are rare, so the small ones' median wait is within 15 % of strict order's."""
    strict, aged = (
        mean(median(waits[16]) for waits in outcomes(ageing)) for ageing in (STRICT, AGED)
    )
    assert aged == pytest.approx(strict, rel=0.15)
    for waits, others in zip(outcomes(AGED), outcomes(STRICT), strict=True):
        assert len(waits[16]) > 0.99 * len(others[16])


def test_without_ageing_large_requests_starve() -> None:
    """Under first-fit alone, whole-device requests wait for seconds."""
    waits = [wait for outcome in outcomes(FIRST_FIT) for wait in outcome[ALL]]
    aged = [wait for outcome in outcomes(AGED) for wait in outcome[ALL]]
    assert max(waits) > 5 * max(aged)
    assert len(waits) < len(aged)


def test_ageing_lets_small_requests_fill_gaps() -> None:
    """Beside medium requests the small ones' median wait is a fraction of strict order's."""
    small = {}
    for ageing in (STRICT, AGED):
        outcomes = [serve(mixed(seed), Fifo(ageing=ageing)) for seed in SEEDS]
        small[ageing] = mean(median(waits[16]) for waits in outcomes)
        assert all(len(waits[64]) > 500 for waits in outcomes)
    assert small[AGED] < small[STRICT] / 2
