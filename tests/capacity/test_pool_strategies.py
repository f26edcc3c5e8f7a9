"""Strategies on the pool: leases sized by need, by class, and elastic ones."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from greensched.capacity.latency_tables import CURVES
from greensched.capacity.run import Outcome, Scenario, simulate
from greensched.capacity.sweeps import all_strategies
from greensched.capacity.traffic import Arrival, generate
from greensched.capacity.workload import LLM, W2, ServiceProfile


def w2(name: str) -> Outcome:
    """Paced requests beside training, at half of the device's time."""
    services = {service.name: replace(service, latency=0.0052) for service in W2}
    scenario = Scenario(gpus="h200", services=services, seconds=1.0)
    return simulate(all_strategies()[name], scenario, generate("paced", 1.0, 1), 1)


@pytest.mark.parametrize("name", ["classes", "elastic"])
def test_a_reserve_is_lent_and_comes_back(name: str) -> None:
    """Training has most of what requests leave, and a request waits for one piece of it at most."""
    outcome = w2(name)
    assert max(outcome.samples["inference"].wait) < 0.0007  # 0.25 ms, on the rest of the SMs
    assert outcome.samples["training"].done > 0.7
    assert outcome.decisions > 100


def test_a_request_alone_has_everything() -> None:
    """A prompt by itself takes the time of the whole device."""
    services = {service.name: replace(service, latency=1.0) for service in LLM}
    scenario = Scenario(gpus="h200", services=services, seconds=2.0)
    for name in ("sized", "elastic", "classes"):
        expected = 0.138 if name == "sized" else 0.137 * 1.7  # the reserve is not lent
        outcome = simulate(all_strategies()[name], scenario, [Arrival(0.0, 2048, 1)], 1)
        assert outcome.samples["prefill"].latency[0] <= expected


def test_devices_are_split_only_where_that_is_needed() -> None:
    """Small kernels beside a loop: as on plain streams, to the digit; beside large ones, it is."""
    small = {
        "inference": replace(W2[0], latency=0.020, reserve=64),
        "scan": ServiceProfile(name="scan", role="loop", curve=CURVES["ssm-b8"], segment=0.002),
    }
    traffic = generate("paced", 1.0, 1)
    scenario = Scenario(gpus="a100", services=small, seconds=1.0)
    ours, theirs = (
        simulate(all_strategies()[name], scenario, traffic, 1) for name in ("shared", "streams")
    )
    found, expected = ours.samples["inference"], theirs.samples["inference"]
    assert max(found.latency[1:]) <= 1.01 * max(expected.latency)  # the first makes executors
    assert ours.samples["scan"].done >= 0.99 * theirs.samples["scan"].done

    large = small | {"scan": replace(small["scan"], curve=CURVES["gemm"], segment=0.001)}
    scenario = replace(scenario, services=large)
    ours, theirs = (
        simulate(all_strategies()[name], scenario, traffic, 1) for name in ("shared", "streams")
    )
    found, expected = ours.samples["inference"], theirs.samples["inference"]
    assert median(found.latency) < 0.5 * median(expected.latency)
