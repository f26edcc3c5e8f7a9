"""The experiment behind `greensched simulate`: strategies, rates and seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from greensched.capacity import latency_tables, metrics, upper_bound, validation
from greensched.capacity.baselines import baselines
from greensched.capacity.machine import models
from greensched.capacity.metrics import Latencies, of_outcome
from greensched.capacity.pool_strategies import CELL, FINEST, Classes, Elastic, Shared, Sized
from greensched.capacity.results import (
    BEST_LATE,
    BEST_SPLIT,
    Experiment,
    Results,
    RunGroup,
    targets,
    worst_attained,
)
from greensched.capacity.run import Scenario, alone, simulate
from greensched.capacity.strategies import Alone, Split, Strategy
from greensched.capacity.traffic import Arrival, faster, generate, read, window
from greensched.capacity.workload import ServiceProfile, saturation, services
from greensched.errors import InvalidRequest

#: Fixed splits that are tried: the SMs of the highest class, in sixteenths of the device rounded
#: to cells; with fine granularity also those between the least of them.
PARTS, BETWEEN = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12), (1.5, 2.5, 3.5, 4.5)
SIXTEENTHS = 16
#: Seconds of a generator's traffic from which its work per second is computed.
LONG_S = 600.0

#: The load, or less, at which alone-p99 are taken: a class by itself hardly waits for itself.
QUIET = 0.5

#: Called with the fraction done and a description of the next step.
Progress = Callable[[float, str], None]


def all_strategies() -> dict[str, Strategy]:
    """Return every strategy by name, except the splits."""
    ours: tuple[Strategy, ...] = (Classes(), Elastic(), Shared(), Sized())
    return baselines() | {strategy.name: strategy for strategy in ours}


def run_experiment(
    experiment: Experiment, progress: Progress = lambda _done, _what: None
) -> Results:
    """Run an experiment. Equal experiments give equal results."""
    curves = latency_tables.CURVES | (
        latency_tables.load(experiment.tables) if experiment.tables else {}
    )
    classes = services(experiment.services, curves)
    sms = _smallest_device(experiment)
    policies = _policy_names(experiment.policies, sms)
    _check(experiment, classes, sms)
    source = _TrafficSource(experiment, classes)
    experiment, rates = source.experiment, sorted(experiment.rates) or [0.0]
    seeds = range(experiment.seed, experiment.seed + experiment.repeats)
    scenario = Scenario(
        gpus=experiment.gpus,
        services=classes,
        seconds=experiment.seconds,
        granularity=experiment.granularity,
    )
    steps = _ProgressSteps(progress, len(rates) * len(seeds) * (len(policies) + 1) + len(seeds))

    quiet = min(QUIET, rates[0] or 1 / source.saturation)
    by_seed = [alone(Alone(), scenario, source.traffic(quiet, s), s) for s in seeds]
    latencies = {name: [of_outcome(each[name])[name] for each in by_seed] for name in classes}
    p99 = {
        name: metrics.interval([each.whole.percentile(0.99) for each in found])[0]
        for name, found in latencies.items()
    }
    alone_rate = {
        name: sum(each.rate for each in found) / len(found) for name, found in latencies.items()
    }
    classes = _with_targets(classes, p99, experiment.target)
    late_after = _late_after(classes, p99)
    scenario = replace(scenario, services=classes, late_after=late_after)
    quiet_runs = [outcome for each in by_seed for outcome in each.values()]
    simulated = sum(outcome.seconds + outcome.drained for outcome in quiet_runs)
    results = Results(
        experiment, scenario, source.saturation, {}, p99, alone_rate, [], {}, (), simulated
    )
    for rate in rates:
        results.offered[rate] = source.offered(rate)
        _run_rate(results, rate, source, policies, seeds, steps)
    if experiment.check:
        steps.next("published figures")
        results.checks = validation.checks()
    return results


class _ProgressSteps:
    def __init__(self, progress: Progress, number: int) -> None:
        self._progress, self._number, self._done = progress, number, 0

    def next(self, what: str) -> None:
        self._progress(min(1.0, self._done / self._number), what)
        self._done += 1


class _TrafficSource:
    """Makes the traffic of any rate and seed."""

    def __init__(self, experiment: Experiment, classes: Mapping[str, ServiceProfile]) -> None:
        self._whole = read(experiment.trace) if experiment.trace else None
        self._devices = len(models(experiment.gpus)[0])
        long = self._whole or generate(experiment.generator, LONG_S, experiment.seed)
        self._check(long, classes)
        self._classes = classes
        #: How many times faster than its own rate the traffic saturates the devices.
        self.saturation = saturation(long, classes, self._devices)
        self._natural = len(long) / (long[-1].at or 1.0)
        lasts = self._whole[-1].at if self._whole else 0.0
        most = math.nextafter(lasts / self._factor(max(experiment.rates, default=0.0)), math.inf)
        #: The experiment, with no more seconds than its trace lasts at the highest rate.
        self.experiment = replace(
            experiment, seconds=min(experiment.seconds, most if lasts else math.inf)
        )

    def offered(self, rate: float) -> float:
        """Return the requests a second at a rate."""
        return self._natural * self._factor(rate)

    def traffic(self, rate: float, seed: int) -> list[Arrival]:
        """Return a run's traffic at a multiple of saturation, or at its own rate if that is 0."""
        factor = self._factor(rate)
        seconds = self.experiment.seconds * factor
        if self._whole is not None:
            found = faster(window(self._whole, seconds, seed), factor)
        else:
            found = faster(generate(self.experiment.generator, seconds, seed), factor)
        return [arrival for arrival in found if arrival.at < self.experiment.seconds]

    def _factor(self, rate: float) -> float:
        return rate * self.saturation if rate else 1.0

    @staticmethod
    def _check(traffic: Sequence[Arrival], classes: Mapping[str, ServiceProfile]) -> None:
        plain = {arrival.service for arrival in traffic if arrival.service}
        unknown = sorted(plain - classes.keys())
        if unknown:
            raise InvalidRequest(
                f"the traffic has requests of classes {unknown}, which are not among the services "
                f"{[*classes]}: choose other --services, or another trace or generator"
            )
        tokens = any(not arrival.service for arrival in traffic)
        if tokens and not any(service.role == "prefill" for service in classes.values()):
            raise InvalidRequest(
                "the traffic has token counts: give services with one class of role prefill and "
                "one of role decode"
            )


def _smallest_device(experiment: Experiment) -> int:
    """Return the SMs of the smallest device."""
    return min(model.sm_count for model in models(experiment.gpus)[0])


def _check(experiment: Experiment, classes: Mapping[str, ServiceProfile], sms: int) -> None:
    """Refuse invalid numbers before anything is simulated."""
    above = experiment.seconds, *experiment.rates
    if experiment.repeats < 1 or not all(0 < number < math.inf for number in above):
        raise InvalidRequest(
            f"seconds={experiment.seconds!r}, repeats={experiment.repeats!r}, "
            f"rates={experiment.rates!r}: give finite numbers above 0, repeats at least 1"
        )
    if not 0 <= experiment.target < math.inf:
        raise InvalidRequest(
            f"target={experiment.target!r}: give a multiple of the alone-p99, such as 5, or 0"
        )
    for name, service in classes.items():
        if service.reserve > sms:
            raise InvalidRequest(
                f"class {name!r}: reserve={service.reserve}: a device has {sms} SMs, reserve at "
                "most these"
            )


def _policy_names(policies: Sequence[str], sms: int) -> list[str]:
    known = [*all_strategies(), BEST_SPLIT, BEST_LATE]
    policies = known if "all" in policies else list(dict.fromkeys(policies))
    for name in policies:
        is_split = name.startswith("split-") and name[6:].isdigit() and 0 < int(name[6:]) < sms
        if name not in known and not is_split:
            raise InvalidRequest(
                f"policy {name!r} does not exist: give all, {', '.join(known)}, or split-N with N "
                f"from 1 to {sms - 1} SMs"
            )
    return policies


def _with_targets(
    classes: Mapping[str, ServiceProfile], p99: Mapping[str, float], target: float
) -> dict[str, ServiceProfile]:
    """Return the classes with their targets in seconds.

    Raises:
        InvalidRequest: no request of a class was done alone, so its target is undefined.
    """
    for name, service in classes.items():
        if math.isnan(p99[name]) and not service.is_best_effort and (target or not service.latency):
            raise InvalidRequest(
                f"no request of {name!r} was done alone: give more seconds, or a longer trace"
            )
    return {
        name: service
        if service.is_best_effort or (service.latency and not target)
        else replace(service, latency=(target or service.target) * p99[name])
        for name, service in classes.items()
    }


def _late_after(
    classes: Mapping[str, ServiceProfile], p99: Mapping[str, float]
) -> dict[str, float]:
    """Return for each class the seconds after which a request has missed every reported target."""
    times = max(metrics.MULTIPLES)
    return {
        name: max(service.latency, 0.0 if math.isnan(p99[name]) else times * p99[name])
        for name, service in classes.items()
    }


def _run_rate(
    results: Results,
    rate: float,
    source: _TrafficSource,
    policies: Sequence[str],
    seeds: range,
    steps: _ProgressSteps,
) -> None:
    classes = results.scenario.services
    traffic = {seed: source.traffic(rate, seed) for seed in seeds}
    if {service.role for service in classes.values()} == {"prefill", "decode"}:
        sms = [model.sm_count for model in models(results.scenario.gpus)[0]]
        results.bounds[rate] = [_bounds(each, results, sms) for each in traffic.values()]
    for name in policies:
        group = RunGroup(name, rate)
        results.groups.append(group)
        for seed in seeds:
            steps.next(f"{name} at {rate:g}, seed {seed}")
            found = [
                simulate(strategy, results.scenario, traffic[seed], seed)
                for strategy in _candidates(name, results)
            ]
            results.simulated += sum(outcome.seconds + outcome.drained for outcome in found)
            best = max(found, key=lambda outcome: _worst(of_outcome(outcome), results))
            group.outcomes.append(best)
            group.latencies.append(of_outcome(best))


def _bounds(
    traffic: Sequence[Arrival], results: Results, sms: list[int]
) -> dict[float | None, float]:
    found: dict[float | None, float] = {}
    for k in (*metrics.MULTIPLES, None):
        latency = targets(results, k)
        found[k] = math.nan  # no request of some class was done alone
        if not any(map(math.isnan, latency.values())):
            scenario = results.scenario
            found[k] = upper_bound.attainment(
                traffic, scenario.services, sms, latency, scenario.guard, scenario.seconds
            )
    return found


def _candidates(name: str, results: Results) -> list[Strategy]:
    if name in (BEST_SPLIT, BEST_LATE):
        least = _smallest_device(results.experiment)
        firsts = [least * part // SIXTEENTHS // CELL * CELL or CELL for part in PARTS]
        if results.scenario.granularity == "fine":
            between = (least * part / SIXTEENTHS for part in BETWEEN)
            firsts += [int(sms) // FINEST * FINEST for sms in between]
        return [Split(first, target_aware=name == BEST_LATE) for first in dict.fromkeys(firsts)]
    if name.startswith("split-"):
        return [Split(int(name[6:]))]
    return [all_strategies()[name]]


def _worst(found: Mapping[str, Latencies], results: Results) -> float:
    """Return the least attainment of a class at its own target; best effort breaks ties."""
    classes = results.scenario.services
    worst = worst_attained(found, targets(results, None))
    rest = sum(found[name].rate for name, s in classes.items() if s.is_best_effort)
    return worst + 1e-6 * rest
