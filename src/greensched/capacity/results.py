"""Questions and answers in numbers: attainment, goodput, what stands against what."""

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

#: The name under which the best of all fixed splits goes: an oracle, found by trying them all.
BEST_SPLIT = "best-split"
#: The same, and its servers mind targets as ours do: how much of what our arms gain is that.
BEST_LATE = "best-split-late"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What an operator asks.

    Attributes:
        gpus: such as `h200x2`.
        granularity: how finely pools cut them, as `Pool(granularity=...)`.
        services: a built-in set, or a file.
        policies: names of arms; `all`.
        trace: a file; None: `generator`.
        generator: the name of one.
        tables: a file of measured curves, which go before the published ones.
        seconds: of traffic in each run; at most what a trace lasts at the highest rate.
        rates: multiples of saturation; empty: as fast as the traffic is.
        seed: the first one.
        repeats: how many seeds.
        target: of every class, in multiples of its alone-p99; 0: as the services say.
        check: whether what is known is simulated, too.
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
    """One arm at one rate: an outcome for each seed, and each class's latencies."""

    arm: str
    rate: float
    outcomes: list[Outcome] = field(default_factory=list)
    latencies: list[dict[str, Latencies]] = field(default_factory=list)


@dataclass
class Results:
    """What came out: cells by arm and rate, and what they are measured against."""

    question: Experiment
    setting: Scenario
    saturation: float
    offered: dict[float, float]
    alone_p99: dict[str, float]
    alone_rate: dict[str, float]
    cells: list[RunGroup]
    bounds: dict[float, list[dict[float | None, float]]]
    checks: tuple[Check, ...]
    #: Seconds of virtual time that were played, all in all.
    simulated: float


def targets(answer: Results, multiple: float | None) -> dict[str, float]:
    """Seconds, of each class but best effort: a multiple of its alone-p99; None: its own target."""
    return {
        name: service.latency if multiple is None else multiple * answer.alone_p99[name]
        for name, service in answer.setting.services.items()
        if not service.is_best_effort
    }


def attained(answer: Results, cell: RunGroup, multiple: float | None) -> list[float]:
    """For each seed, the attainment of the class that does worst; nan: one has no such target."""
    wanted = targets(answer, multiple)
    return [worst_attained(found, wanted) for found in cell.latencies]


def worst_attained(found: Mapping[str, Latencies], wanted: Mapping[str, float]) -> float:
    """The attainment of the class that does worst, of those that came; nan: one has no target."""
    if any(map(math.isnan, wanted.values())):
        return math.nan
    told = (found[name].attained(latency) for name, latency in wanted.items())
    return min((each for each in told if not math.isnan(each)), default=1.0)


def goodputs(answer: Results, multiple: float | None) -> dict[str, list[float]]:
    """Of each arm and of the bound, for each seed: requests a second."""
    found: dict[str, list[float]] = {}
    seeds = range(answer.question.repeats)
    offered = answer.offered
    for arm in dict.fromkeys(cell.arm for cell in answer.cells):
        by_rate = {c.rate: attained(answer, c, multiple) for c in answer.cells if c.arm == arm}
        found[arm] = [
            metrics.goodput({offered[r]: each[i] for r, each in by_rate.items()}) for i in seeds
        ]
    if answer.bounds:
        bounds = answer.bounds.items()
        found["bound"] = [
            metrics.goodput({offered[r]: each[i][multiple] for r, each in bounds}) for i in seeds
        ]
    return found


def against(answer: Results) -> dict[str, dict[str, metrics.Interval]]:
    """Each arm's goodput at its targets over what stands for doing without: [value, low, high].

    `streams` and `best-split`: over theirs. `recovered`: of the gap between the best split and the
    bound. `where streams do`: the least of its attainment over theirs, of all rates at which plain
    streams have enough of every class in time.
    """
    good = goodputs(answer, None)
    told: dict[str, dict[str, metrics.Interval]] = {}
    for arm, found in good.items():
        rows = told[arm] = {}
        for other in ("streams", BEST_SPLIT, BEST_LATE):
            if other in good and other != arm:
                rows[other] = metrics.ratio(found, good[other])
        if BEST_SPLIT in good and "bound" in good and arm not in (BEST_SPLIT, "bound"):
            rows["recovered"] = metrics.recovered(found, good[BEST_SPLIT], good["bound"])
        if "streams" in good and arm not in ("streams", "bound"):
            rows["where streams do"] = metrics.interval(beside_streams(answer, arm))
    return told


def beside_streams(answer: Results, arm: str) -> list[float]:
    """For each seed the least of its attainment over that of plain streams, where those do."""
    by = {(cell.arm, cell.rate): attained(answer, cell, None) for cell in answer.cells}
    found = []
    for i in range(answer.question.repeats):
        pairs = [(by[arm, rate][i], by["streams", rate][i]) for rate in answer.offered]
        beside = [mine / theirs for mine, theirs in pairs if theirs >= metrics.MUST_MEET]
        found.append(min(beside) if beside else float("nan"))
    return found


def as_dict(answer: Results) -> dict[str, Any]:
    """For JSON. Times in seconds; intervals are [mean, low, high]."""
    question = answer.question
    told: dict[str, Any] = {
        "gpus": question.gpus,
        "granularity": question.granularity,
        "traffic": question.trace.name if question.trace else question.generator,
        "seconds": question.seconds,
        "seeds": [*range(question.seed, question.seed + question.repeats)],
        "saturation": answer.saturation,
        "alone_p99": answer.alone_p99,
        "targets": targets(answer, None),
        "cells": [_cell(answer, cell) for cell in answer.cells],
        "goodput": {
            str(multiple or "target"): {
                arm: metrics.interval(each) for arm, each in goodputs(answer, multiple).items()
            }
            for multiple in ((*metrics.MULTIPLES, None) if len(answer.offered) > 1 else ())
        },
        "against": against(answer) if len(answer.offered) > 1 else {},
        "known": [asdict(c) | {"is_reproduced": c.is_reproduced} for c in answer.checks],
    }
    return {key: metrics.rounded(value) for key, value in told.items()}


def _cell(answer: Results, cell: RunGroup) -> dict[str, Any]:
    classes = answer.setting.services
    shares = [metrics.shares(outcome, classes) for outcome in cell.outcomes]
    seconds = answer.question.seconds
    return {
        "arm": cell.arm,
        "rate": cell.rate,
        "offered": answer.offered[cell.rate],
        "classes": {name: _class(answer, cell, name) for name in classes},
        "sm_utilisation": metrics.interval([outcome.busy for outcome in cell.outcomes]),
        "jain": metrics.interval([metrics.jain(each) for each in shares]),
        "pair_gap_sm_seconds": metrics.interval([max(each) - min(each) for each in shares]),
        "decisions_per_s": metrics.interval([o.decisions / seconds for o in cell.outcomes]),
    }


def _class(answer: Results, cell: RunGroup, name: str) -> dict[str, Any]:
    found = [latencies[name] for latencies in cell.latencies]
    done = metrics.interval([each.rate for each in found])
    told: dict[str, Any] = {"work_per_s": done}
    if answer.setting.services[name].is_best_effort:
        told["of_alone"] = metrics.interval([e.rate / answer.alone_rate[name] for e in found])
        return told
    p99 = answer.alone_p99[name]
    told["attained"] = {
        str(k): metrics.interval([each.attained(k * p99) for each in found])
        for k in metrics.MULTIPLES
    }
    for what in ("whole", "wait", "service"):
        told[what] = {
            f"p{100 * part:g}": metrics.interval([getattr(e, what).percentile(part) for e in found])
            for part in (0.5, 0.95, 0.99, 0.999)
        }
    told["p99_of_alone"] = metrics.interval([e.whole.percentile(0.99) / p99 for e in found])
    return told
