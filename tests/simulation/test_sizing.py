"""Leases sized by need, by class, and elastic ones: what our arms ask of the pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from greensched.simulation.compare import arms
from greensched.simulation.run import Outcome, Setting, simulate
from greensched.simulation.sizing import LEAST, MOST, SAFE, Pace
from greensched.simulation.traffic import Arrival, generate
from greensched.simulation.workload import LLM, W2


def w2(name: str) -> Outcome:
    """Paced requests beside training, at half of the device's time."""
    services = {service.name: replace(service, latency=0.0052) for service in W2}
    setting = Setting(gpus="h200", services=services, seconds=1.0)
    return simulate(arms()[name], setting, generate("paced", 1.0, 1), 1)


def test_a_plan_learns_from_what_was_late() -> None:
    """It begins where nobody can be late, uses more while few are, and less when many are."""
    pace = Pace(0.1)
    assert pace.part == SAFE
    for _ in range(40):
        pace.told(0.05, 500)
    assert pace.part == MOST
    pace.told(0.2, 10)
    pace.told(0.05, 490)
    assert LEAST < pace.part < MOST
    for _ in range(40):
        pace.told(0.2, 500)
    assert pace.part == LEAST


@pytest.mark.parametrize("name", ["classes", "elastic"])
def test_a_floor_is_lent_and_comes_back(name: str) -> None:
    """Training has most of what requests leave, and a request waits for one piece of it at most."""
    outcome = w2(name)
    assert max(outcome.samples["inference"].wait) < 0.0007  # 0.25 ms, on the rest of the SMs
    assert outcome.samples["training"].done > 0.7
    assert outcome.decisions > 100


def test_who_is_alone_has_everything() -> None:
    """A prompt with nobody beside it takes what it takes on the whole device."""
    services = {service.name: replace(service, latency=1.0) for service in LLM}
    setting = Setting(gpus="h200", services=services, seconds=2.0)
    for name in ("rightsized", "elastic", "classes"):
        expected = 0.138 if name == "rightsized" else 0.137 * 1.7  # the floor is not lent
        outcome = simulate(arms()[name], setting, [Arrival(0.0, 2048, 1)], 1)
        assert outcome.samples["prefill"].latency[0] <= expected
