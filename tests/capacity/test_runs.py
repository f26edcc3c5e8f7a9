"""Runs: servers and strategies on the real pool, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from greensched.capacity.baselines import Batched, Streams, baselines
from greensched.capacity.engine import FUSED
from greensched.capacity.host_costs import HostCost, HostCosts
from greensched.capacity.latency_tables import CURVES
from greensched.capacity.machine import KernelRun
from greensched.capacity.run import Outcome, Scenario, alone, occupied, simulate
from greensched.capacity.servers import Samples, passes
from greensched.capacity.strategies import Alone, Split, Strategy
from greensched.capacity.sweeps import all_strategies
from greensched.capacity.traffic import Arrival, generate
from greensched.capacity.workload import (
    LLM,
    W2,
    ServiceProfile,
    saturation,
)

TOKENS = {service.name: replace(service, latency=0.1) for service in LLM}
REQUESTS = {service.name: replace(service, latency=0.01) for service in W2}


def run(
    strategy: Strategy, seconds: float = 4.0, services: dict[str, ServiceProfile] = TOKENS
) -> Outcome:
    name = "azure-conv" if services is TOKENS else "requests"
    scenario = Scenario(gpus="h200", services=services, seconds=seconds)
    return simulate(strategy, scenario, generate(name, seconds, 1), 1)


def test_published_times() -> None:
    """Prompts and steps take what Splitwise measured, at the sizes it measured."""
    decode, prefill = LLM
    assert list(map(prefill.seconds, (512, 2048, 8192))) == pytest.approx([0.054, 0.137, 0.845])
    assert list(map(decode.seconds, (1, 32, 64))) == pytest.approx([0.0306, 0.0386, 0.0502])
    pieces = passes(5000, 4, prefill.seconds)
    assert sum(pieces) == pytest.approx(prefill.seconds(5000) * 1e9, abs=20)
    assert len(pieces) == 12


def test_one_request_alone() -> None:
    """Its first token takes its prompt, its other tokens a step each; nothing waits."""
    scenario = Scenario(gpus="h200", services=TOKENS, seconds=5.0)
    outcome = simulate(Split(64), scenario, [Arrival(0.0, 512, 11)], 1)
    (first,) = outcome.samples["prefill"].latency
    gaps = outcome.samples["decode"].latency
    assert first == pytest.approx(0.054 * CURVES["gemm"].slowdown(68), rel=0.01)
    assert gaps == pytest.approx([0.0306 * CURVES["moe"].slowdown(64)] * 10, rel=0.01)
    assert max(outcome.samples["decode"].wait) < 1e-4


def test_saturation_is_arithmetic() -> None:
    """At the rate it says, all of the time of the devices is used."""
    traffic = [Arrival(float(i), service="inference", cost=0.25) for i in range(101)]
    assert saturation(traffic, REQUESTS, 1) == pytest.approx(3.96, rel=0.01)
    assert saturation(traffic, REQUESTS, 2) == pytest.approx(7.92, rel=0.01)


@pytest.mark.parametrize("name", [*all_strategies(), "split"])
def test_every_arm_serves(name: str) -> None:
    """Each strategy serves requests, and fills no more SMs than there are."""
    outcome = run(all_strategies().get(name) or Split(48))
    assert 0 < outcome.busy <= 1
    assert outcome.seconds == pytest.approx(4.0)
    assert outcome.samples["decode"].weight
    assert min(outcome.samples["decode"].latency) >= 0.0305


@pytest.mark.parametrize("name", ["streams", "fifo", "sized"])
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    """To the last digit."""
    first, second = (run(all_strategies()[name], 3.0) for _ in range(2))
    assert first == second


def test_a_split_shields_and_streams_do_not() -> None:
    """Beside prefill the worst gap between tokens is several times longer on plain streams."""
    shared = run(baselines()["streams"]).samples["decode"].latency
    split = run(Split(64)).samples["decode"].latency
    assert max(shared) > 2 * max(split)


def test_best_effort_counts_by_its_work() -> None:
    """Alone a loop uses the device always; behind a gate it keeps about what requests leave."""
    scenario = Scenario(gpus="h200", services=REQUESTS, seconds=1.0)
    traffic = generate("requests", 1.0, 1)
    by_itself = alone(Alone(), scenario, traffic, 1)["training"]
    gated = simulate(baselines()["gate"], scenario, traffic, 1)
    assert by_itself.samples["training"].done == pytest.approx(1.0, rel=0.02)
    asked = sum(arrival.cost for arrival in traffic)
    assert gated.samples["training"].done == pytest.approx(1 - asked, abs=0.15)


def test_a_loop_on_sms_of_its_own_runs_in_longer_pieces() -> None:
    """It does as much work as in its own pieces, which a table of the host's costs asks for."""
    host = HostCosts(awaited=HostCost(0.001, 0.001))
    done = []
    for each in (HostCosts(), host):
        scenario = Scenario(gpus="h200", services=REQUESTS, seconds=1.0, host=each)
        outcome = simulate(Split(64), scenario, [], 1)
        done.append(outcome.samples["training"].done)
    assert done[0] == pytest.approx(done[1], abs=0.01)


def test_runs_alone_wait_for_every_request() -> None:
    """Otherwise the longest of the last requests would be missing in the targets."""
    scenario = Scenario(gpus="h200", services=REQUESTS, seconds=1.0)
    traffic = [Arrival(0.9, service="inference", cost=0.5)]
    (latency,) = alone(Alone(), scenario, traffic, 1)["inference"].samples["inference"].latency
    assert latency > 0.5


@pytest.mark.parametrize("name", ["alone", "streams", "fifo"])
def test_the_host_takes_its_time_for_each_launch_that_is_awaited(name: str) -> None:
    """A request is later by it where a table of the host was given."""
    host = HostCosts(awaited=HostCost(1000.0, 1000.0))
    services = {"inference": REQUESTS["inference"]}
    scenario = Scenario(gpus="h200", services=services, seconds=1.0)
    traffic = [Arrival(0.5, service="inference", cost=0.0001)]
    free, slow = (
        simulate(strategy, each, traffic, 1).samples["inference"].latency[0]
        for each in (scenario, replace(scenario, host=host))
        for strategy in [baselines().get(name) or Alone()]
    )
    assert slow == pytest.approx(free + 0.001, rel=1e-3)


@pytest.mark.parametrize("target_aware", [False, True])
def test_a_late_prompt_goes_last(target_aware: bool) -> None:
    """With a target-aware client, a prompt that cannot be in time goes behind those that can."""
    long, short = Arrival(0.0, 8192, 1), Arrival(0.0, 256, 1)
    services = {name: replace(service, latency=0.5) for name, service in TOKENS.items()}
    scenario = Scenario(gpus="h200", services=services, seconds=5.0)
    outcome = simulate(Split(64, target_aware=target_aware), scenario, [long, short, short], 1)
    assert sum(latency < 0.5 for latency in outcome.samples["prefill"].latency) == 2 * target_aware


def llm(strategy: Strategy, traffic: list[Arrival], first: float = 5.0) -> dict[str, Samples]:
    """A language model's requests to the end."""
    services = {
        "decode": replace(TOKENS["decode"], latency=0.2),
        "prefill": replace(TOKENS["prefill"], latency=first),
    }
    scenario = Scenario(
        gpus="h200", services=services, seconds=10.0, late_after=dict.fromkeys(services, 10.0)
    )
    return simulate(strategy, scenario, traffic, 1).samples


def test_a_fused_pass_reads_the_weights_once() -> None:
    """It takes as long as a prompt of all its tokens, and what fusing costs."""
    traffic = [Arrival(0.0, 512, 40), Arrival(1.0, 2048, 1)]
    found = llm(Batched(budget=513), traffic)
    slope = (0.137 - 0.054) / 1536
    gaps = sorted(found["decode"].latency)
    assert gaps[:35] == pytest.approx([0.0306] * 35, rel=0.01)
    assert gaps[35:] == pytest.approx([FUSED * (0.054 + slope)] * 4, rel=0.01)
    assert found["prefill"].latency[1] == pytest.approx(4 * FUSED * (0.054 + slope), abs=0.035)


@pytest.mark.parametrize("interval", [1, 4])
def test_prompts_go_first_after_a_number_of_steps(interval: int) -> None:
    """Between two passes of prompts so many steps of decoding run."""
    traffic = [Arrival(0.0, 512, 40), *(Arrival(0.5, 2048, 1) for _ in range(3))]
    found = llm(Batched(interval=interval), traffic)
    each = 0.137 + interval * 0.0306
    first, second, third = sorted(found["prefill"].latency)[1:]
    assert second - first == pytest.approx(each, rel=0.02)
    assert third - second == pytest.approx(each, rel=0.02)


def test_prompts_share_a_pass_of_an_engine() -> None:
    """Four short ones take one reading of the weights; one by one each takes its own."""
    traffic = [Arrival(0.0, 512, 1)] * 4
    found = llm(Batched(), traffic)
    assert found["prefill"].latency == pytest.approx([0.137] * 4, rel=0.01)
    found = llm(Batched(together=False), traffic)
    assert found["prefill"].latency == pytest.approx([0.054, 0.108, 0.162, 0.216], rel=0.01)


def test_an_urgent_stream_waits_for_one_kernel_only() -> None:
    """A step's kernels start before those of a prompt that were submitted earlier."""
    traffic = [Arrival(0.0, 128, 20), Arrival(0.2, 8192, 1)]
    plain, urgent = (
        llm(Streams(prioritised=prioritised), traffic)["decode"].latency
        for prioritised in (False, True)
    )
    assert max(urgent) < 0.6 * max(plain)


def test_steps_of_higher_priority_leave_time_for_prompts() -> None:
    """Between two kernels of a step those of a prompt begin, so it is not starved."""
    traffic = [Arrival(0.0, 128, 200), Arrival(0.2, 2048, 1)]
    prompt = llm(Streams(prioritised=True), traffic)["prefill"].latency[1]
    assert 1.2 * 0.137 < prompt < 5 * 0.137


def test_two_devices_share_the_requests() -> None:
    """The less loaded device gets the next request, and both are used."""
    scenario = Scenario(gpus="h200x2", services=REQUESTS, seconds=1.0)
    outcome = simulate(Split(64), scenario, generate("requests", 1.0, 1), 1)
    one = run(Split(64), 1.0, REQUESTS)
    assert len(outcome.samples["inference"].latency) >= len(one.samples["inference"].latency)
    assert outcome.samples["training"].done == pytest.approx(
        2 * one.samples["training"].done, rel=0.05
    )


def test_what_overlaps_counts_once() -> None:
    """Of two kernels on the same SMs at the same time, those SMs are busy once."""
    a, b = KernelRun("a", 0, 100, 0b1111), KernelRun("b", 50, 150, 0b0011)
    assert occupied([a, b]) == pytest.approx((100 * 4 + 50 * 2) / 1e9)


@pytest.mark.parametrize("seed", range(3))
def test_first_tokens_are_given_out_when_a_step_begins(seed: int) -> None:
    """If target-aware, no token waits for a step that it is not in; the first is a step later."""
    traffic = generate("azure-code", 8.0, seed)
    plain, ours = (_split(target_aware, 60.0, traffic) for target_aware in (False, True))
    longest = max(plain["decode"].latency)
    assert max(ours["decode"].wait) < 1e-4 < max(plain["decode"].wait)
    assert max(ours["decode"].latency) < longest
    pairs = zip(sorted(plain["prefill"].latency), sorted(ours["prefill"].latency), strict=True)
    assert max(later - latency for latency, later in pairs) < longest


@pytest.mark.parametrize(("latency", "waits"), [(0.3, False), (0.6, True)])
def test_first_tokens_do_not_wait_where_they_would_be_late(latency: float, waits: bool) -> None:
    """A first token whose target is no further away than a step is released at once."""
    traffic = [Arrival(0.0, 128, 20), Arrival(0.5, 128, 2)]  # the second in the midst of a step
    found = _split(True, latency, traffic)
    assert (max(found["prefill"].wait) > 0.01) == waits
    assert (max(found["decode"].wait) > 0.01) != waits


def _split(target_aware: bool, latency: float, traffic: list[Arrival]) -> dict[str, Samples]:
    """On a fixed split, to the end; a token may take 0.4 s, a first one `latency`."""
    services = {
        "decode": replace(TOKENS["decode"], latency=0.4),
        "prefill": replace(TOKENS["prefill"], latency=latency),
    }
    scenario = Scenario(gpus="h200", services=services, seconds=60.0)
    found = simulate(Split(16, target_aware=target_aware), scenario, traffic, 1).samples
    assert len(found["prefill"].latency) == len(traffic)
    return found
