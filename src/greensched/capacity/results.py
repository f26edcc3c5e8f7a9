"""Experiments and their results: attainment, goodput, and the comparison of policies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from greensched.capacity import metrics
from greensched.capacity.metrics import Latencies
from greensched.capacity.run import Outcome, Scenario
from greensched.capacity.validation.scenarios import Check
from greensched.typing import Granularity

#: The best of all fixed splits: an oracle, found by trying them all.
BEST_SPLIT = "best-split"
#: The same with target-aware servers, as `sized` has: it shows how much of the gain is due to them.
BEST_LATE = "best-split-late"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What to simulate.

    Attributes:
        gpus: devices, such as `h200x2`.
        granularity: as `Pool(granularity=...)`.
        services: a built-in set, or a file.
        policies: names of strategies, or `all`.
        trace: a file of traffic; None to use `generator`.
        generator: the name of a traffic generator.
        tables: a file of measured curves, which replace published ones of the same names.
        seconds: the length of the traffic in each run, at most that of a trace at the highest rate.
        rates: load factors, as multiples of saturation; empty for the traffic's own rate.
        seed: the first seed.
        repeats: the number of seeds.
        target: the target of every class as a multiple of its alone-p99; 0 for the services' own.
        check: whether to simulate the published figures, too.
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
    target: float = 0.0
    check: bool = True


@dataclass
class RunGroup:
    """The runs of one strategy at one rate: for each seed, the outcome and the latencies."""

    strategy: str
    rate: float
    outcomes: list[Outcome] = field(default_factory=list)
    latencies: list[dict[str, Latencies]] = field(default_factory=list)


@dataclass
class Results:
    """Runs by strategy and rate, and what they are compared with."""

    experiment: Experiment
    scenario: Scenario
    saturation: float
    offered: dict[float, float]
    alone_p99: dict[str, float]
    alone_rate: dict[str, float]
    groups: list[RunGroup]
    bounds: dict[float, list[dict[float | None, float]]]
    checks: tuple[Check, ...]
    #: Seconds of virtual time of all runs together.
    simulated: float


def targets(results: Results, multiple: float | None) -> dict[str, float]:
    """Return the targets in seconds: multiples of the alone-p99, or with None the classes' own."""
    return {
        name: service.latency if multiple is None else multiple * results.alone_p99[name]
        for name, service in results.scenario.services.items()
        if not service.is_best_effort
    }


def attained(results: Results, group: RunGroup, multiple: float | None) -> list[float]:
    """Return the worst class's attainment for each seed; nan where a class has no such target."""
    wanted = targets(results, multiple)
    return [worst_attained(found, wanted) for found in group.latencies]


def worst_attained(found: Mapping[str, Latencies], wanted: Mapping[str, float]) -> float:
    """Return the least attainment of the classes with requests; nan if a class has no target."""
    if any(map(math.isnan, wanted.values())):
        return math.nan
    report = (found[name].attained(latency) for name, latency in wanted.items())
    return min((each for each in report if not math.isnan(each)), default=1.0)


def goodputs(results: Results, multiple: float | None) -> dict[str, list[float]]:
    """Return the goodput of each strategy and of the bound for each seed, in requests a second."""
    found: dict[str, list[float]] = {}
    seeds = range(results.experiment.repeats)
    offered = results.offered
    for strategy in dict.fromkeys(group.strategy for group in results.groups):
        by_rate = {
            g.rate: attained(results, g, multiple) for g in results.groups if g.strategy == strategy
        }
        found[strategy] = [
            metrics.goodput({offered[r]: each[i] for r, each in by_rate.items()}) for i in seeds
        ]
    if results.bounds:
        bounds = results.bounds.items()
        found["bound"] = [
            metrics.goodput({offered[r]: each[i][multiple] for r, each in bounds}) for i in seeds
        ]
    return found


def compare_policies(results: Results) -> dict[str, dict[str, metrics.Interval]]:
    """Compare each strategy's goodput at its targets with that of the baselines.

    `streams`, `best-split`: the ratio to theirs. `recovered`: the fraction of the gap between the
    best split and the bound. `where streams do`: the least ratio of its attainment to that of plain
    streams, over the rates at which enough of every class is in time on plain streams.
    """
    good = goodputs(results, None)
    report: dict[str, dict[str, metrics.Interval]] = {}
    for strategy, found in good.items():
        rows = report[strategy] = {}
        for other in ("streams", BEST_SPLIT, BEST_LATE):
            if other in good and other != strategy:
                rows[other] = metrics.ratio(found, good[other])
        if BEST_SPLIT in good and "bound" in good and strategy not in (BEST_SPLIT, "bound"):
            rows["recovered"] = metrics.recovered(found, good[BEST_SPLIT], good["bound"])
        if "streams" in good and strategy not in ("streams", "bound"):
            rows["where streams do"] = metrics.interval(beside_streams(results, strategy))
    return report


def beside_streams(results: Results, strategy: str) -> list[float]:
    """Return for each seed the least ratio of attainment to plain streams', where those suffice."""
    attainments = {
        (group.strategy, group.rate): attained(results, group, None) for group in results.groups
    }
    found = []
    for i in range(results.experiment.repeats):
        pairs = [
            (attainments[strategy, rate][i], attainments["streams", rate][i])
            for rate in results.offered
        ]
        beside = [mine / theirs for mine, theirs in pairs if theirs >= metrics.MUST_MEET]
        found.append(min(beside) if beside else float("nan"))
    return found


def as_dict(results: Results) -> dict[str, Any]:
    """Convert to JSON types. Times are in seconds; intervals are [mean, low, high]."""
    experiment = results.experiment
    report: dict[str, Any] = {
        "gpus": experiment.gpus,
        "granularity": experiment.granularity,
        "traffic": experiment.trace.name if experiment.trace else experiment.generator,
        "seconds": experiment.seconds,
        "seeds": [*range(experiment.seed, experiment.seed + experiment.repeats)],
        "saturation": results.saturation,
        "alone_p99": results.alone_p99,
        "targets": targets(results, None),
        "runs": [_group(results, group) for group in results.groups],
        "goodput": {
            str(multiple or "target"): {
                strategy: metrics.interval(each)
                for strategy, each in goodputs(results, multiple).items()
            }
            for multiple in ((*metrics.MULTIPLES, None) if len(results.offered) > 1 else ())
        },
        "comparison": compare_policies(results) if len(results.offered) > 1 else {},
        "checks": [asdict(c) | {"is_reproduced": c.is_reproduced} for c in results.checks],
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
        "jain": metrics.interval([metrics.jain(each) for each in shares]),
        "pair_gap_sm_seconds": metrics.interval([max(each) - min(each) for each in shares]),
        "decisions_per_s": metrics.interval([o.decisions / seconds for o in group.outcomes]),
    }


def _class(results: Results, group: RunGroup, name: str) -> dict[str, Any]:
    found = [latencies[name] for latencies in group.latencies]
    done = metrics.interval([each.rate for each in found])
    report: dict[str, Any] = {"work_per_s": done}
    if results.scenario.services[name].is_best_effort:
        report["of_alone"] = metrics.interval([e.rate / results.alone_rate[name] for e in found])
        return report
    p99 = results.alone_p99[name]
    report["attained"] = {
        str(k): metrics.interval([each.attained(k * p99) for each in found])
        for k in metrics.MULTIPLES
    }
    for what in ("whole", "wait", "service"):
        report[what] = {
            f"p{100 * part:g}": metrics.interval([getattr(e, what).percentile(part) for e in found])
            for part in (0.5, 0.95, 0.99, 0.999)
        }
    report["p99_of_alone"] = metrics.interval([e.whole.percentile(0.99) / p99 for e in found])
    return report
