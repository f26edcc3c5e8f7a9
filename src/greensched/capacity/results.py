"""Experiments and their results: attainment, goodput, and the comparison of policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from greensched.capacity import measured, metrics, sweeps
from greensched.capacity.metrics import Latencies
from greensched.capacity.run import Outcome, Scenario
from greensched.typing import Granularity


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What to simulate.

    Attributes:
        gpus: The devices, such as `h200x2`.
        granularity: As `Pool(granularity=...)`.
        services: A built-in set, or a file.
        policies: Names of strategies, or `all`.
        trace: A file of traffic. None: use `generator`.
        generator: The name of a traffic generator.
        tables: A file of measured curves, which replace published ones of the same names.
        seconds: The length of the traffic in each run; a trace at the highest rate may shorten it.
        rates: Load factors, as multiples of saturation. Empty: the traffic's own rate.
        seed: The first seed.
        repeats: The number of seeds.
        slo: Targets in seconds by class; for a language model also `first` and `between`.
        multiple: The target of every class as a multiple of its median alone. 0: `slo`, or the
            services' own.
        until_late: Whether to simulate a policy only up to the first rate at which too few requests
            are in time for every seed, which is what goodput needs.
    """

    gpus: str = "h200"
    granularity: Granularity = "coscheduled"
    services: str = "llm"
    policies: tuple[str, ...] = ("all",)
    trace: Path | None = None
    generator: str = "azure-conv"
    tables: Path | None = None
    seconds: float = 120.0
    rates: tuple[float, ...] = ()
    seed: int = 1
    repeats: int = 1
    slo: Mapping[str, float] = field(default_factory=dict)
    multiple: float = 0.0
    until_late: bool = False


@dataclass
class RunGroup:
    """The runs of one strategy at one rate: the outcome and the latencies for each seed."""

    strategy: str
    rate: float
    outcomes: list[Outcome] = field(default_factory=list)
    latencies: list[dict[str, Latencies]] = field(default_factory=list)


@dataclass
class Results:
    """Runs by strategy and rate, with their references."""

    experiment: Experiment
    scenario: Scenario
    saturation: float
    offered: dict[float, float]
    alone_p99: dict[str, float]
    alone_rate: dict[str, float]
    groups: list[RunGroup]
    #: A clairvoyant's estimated attainment of prefill, by rate, for each seed.
    clairvoyant: dict[float, list[float]]
    #: Seconds of virtual time of all runs together.
    simulated: float


def targets(results: Results) -> dict[str, float]:
    """Return the targets in seconds."""
    services = results.scenario.services.items()
    return {name: service.latency for name, service in services if not service.is_best_effort}


def attained(results: Results, group: RunGroup) -> list[float]:
    """Return the worst class's attainment for each seed."""
    services = results.scenario.services
    return [sweeps.score(run, services).worst for run in group.latencies]


def goodputs(results: Results) -> dict[str, list[float]]:
    """Return the goodput of each strategy for each seed, in requests a second."""
    by_seed: dict[str, list[float]] = {}
    by_strategy: dict[str, dict[float, list[float]]] = {}
    for group in results.groups:
        by_strategy.setdefault(group.strategy, {})[group.rate] = attained(results, group)
    if results.clairvoyant:
        by_strategy["clairvoyant"] = results.clairvoyant
    for strategy, by_rate in by_strategy.items():
        by_seed[strategy] = [
            metrics.goodput(
                {results.offered[rate]: attained[i] for rate, attained in by_rate.items()}
            )
            for i in range(results.experiment.repeats)
        ]
    return by_seed


def compare_policies(results: Results) -> dict[str, dict[str, metrics.Interval]]:
    """Compare each strategy's goodput with plain streams' and the best fixed splits'.

    `where streams do`: the lowest ratio of its attainment to that of plain streams, over the rates
    at which plain streams have enough requests of every class in time.
    """
    good = goodputs(results)
    report: dict[str, dict[str, metrics.Interval]] = {}
    for strategy, values in good.items():
        rows = report[strategy] = {}
        for other in ("streams", sweeps.BEST_SPLIT, sweeps.BEST_LATE):
            if other in good and other != strategy:
                rows[other] = metrics.ratio(values, good[other])
        if "streams" in good and strategy not in ("streams", "clairvoyant"):
            rows["where streams do"] = metrics.interval(beside_streams(results, strategy))
    return report


def beside_streams(results: Results, strategy: str) -> list[float]:
    """Return each seed's lowest ratio of attainment to plain streams', where those suffice."""
    attainments = {
        (group.strategy, group.rate): attained(results, group) for group in results.groups
    }
    ratios = []
    for i in range(results.experiment.repeats):
        pairs = [
            (attainments[strategy, rate][i], attainments["streams", rate][i])
            for rate in results.offered
            if (strategy, rate) in attainments and ("streams", rate) in attainments
        ]
        beside = [own / streams for own, streams in pairs if streams >= metrics.MUST_MEET]
        ratios.append(min(beside) if beside else float("nan"))
    return ratios


def as_dict(results: Results) -> dict[str, Any]:
    """Convert to JSON types. Times are in seconds; intervals are [mean, low, high]."""
    experiment = results.experiment
    report: dict[str, Any] = {
        "model": measured.summary(),
        "gpus": experiment.gpus,
        "granularity": experiment.granularity,
        "traffic": experiment.trace.name if experiment.trace else experiment.generator,
        "seconds": experiment.seconds,
        "seeds": [*range(experiment.seed, experiment.seed + experiment.repeats)],
        "saturation": results.saturation,
        "alone_p99": results.alone_p99,
        "targets": targets(results),
        "runs": [_group(results, group) for group in results.groups],
        "goodput": {
            strategy: metrics.interval(values)
            for strategy, values in (goodputs(results) if len(results.offered) > 1 else {}).items()
        },
        "comparison": compare_policies(results) if len(results.offered) > 1 else {},
    }
    return {key: metrics.rounded(value) for key, value in report.items()}


def _group(results: Results, group: RunGroup) -> dict[str, Any]:
    classes = results.scenario.services
    shares = [metrics.shares(outcome, classes) for outcome in group.outcomes]
    seconds = results.experiment.seconds
    return {
        "policy": group.strategy,
        "rate": group.rate,
        "offered": results.offered[group.rate],
        "classes": {name: _class(results, group, name) for name in classes},
        "sm_utilisation": metrics.interval([outcome.busy for outcome in group.outcomes]),
        "jain": metrics.interval([metrics.jain(seed_shares) for seed_shares in shares]),
        "pair_gap_sm_seconds": metrics.interval(
            [max(seed_shares) - min(seed_shares) for seed_shares in shares]
        ),
        "decisions_per_s": metrics.interval([o.decisions / seconds for o in group.outcomes]),
    }


def _class(results: Results, group: RunGroup, name: str) -> dict[str, Any]:
    runs = [latencies[name] for latencies in group.latencies]
    done = metrics.interval([run.rate for run in runs])
    report: dict[str, Any] = {"work_per_s": done}
    if results.scenario.services[name].is_best_effort:
        report["of_alone"] = metrics.interval([e.rate / results.alone_rate[name] for e in runs])
        return report
    p99 = results.alone_p99[name]
    target = results.scenario.services[name].latency
    report["attained"] = metrics.interval([run.attained(target) for run in runs])
    for what in ("whole", "wait", "service"):
        report[what] = {
            f"p{100 * part:g}": metrics.interval([getattr(e, what).percentile(part) for e in runs])
            for part in (0.5, 0.95, 0.99, 0.999)
        }
    report["p99_of_alone"] = metrics.interval([e.whole.percentile(0.99) / p99 for e in runs])
    return report
