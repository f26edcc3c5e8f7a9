"""The experiment behind `greensched simulate`: strategies, rates and seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from greensched.capacity import clairvoyant, host_costs, latency_tables, metrics, sweeps
from greensched.capacity.machine import models
from greensched.capacity.metrics import of_outcome
from greensched.capacity.results import Experiment, Results, RunGroup, attained, targets
from greensched.capacity.run import Outcome, Scenario, alone, simulate
from greensched.capacity.strategies import CELL, FINEST, Alone, Strategy
from greensched.capacity.traffic import Arrival, faster, generate, read, window
from greensched.capacity.workload import ServiceProfile, saturation, services
from greensched.errors import InvalidRequest

#: Seconds of a generator's traffic from which its work per second is computed.
LONG_S = 600.0

#: The highest load at which classes run alone: then a class hardly waits for itself.
QUIET = 0.5
#: The classes' roles in `--slo` of a language model: a first token, and the gap between two.
SLO_ROLES = {"first": "prefill", "between": "decode"}

#: Called with the fraction done and a description of the next step.
Progress = Callable[[float, str], None]


def run_experiment(
    experiment: Experiment, progress: Progress = lambda _done, _what: None
) -> Results:
    """Run an experiment. Equal experiments give equal results."""
    curves = latency_tables.CURVES | (
        latency_tables.load(experiment.tables) if experiment.tables else {}
    )
    classes = services(experiment.services, curves)
    sms = _smallest_device(experiment)
    policies = _policy_names(experiment.policies, classes, sms)
    _check(experiment, classes, sms)
    classes = _with_latencies(classes, experiment.slo)
    source = _TrafficSource(experiment, classes)
    experiment, rates = source.experiment, sorted(experiment.rates) or [0.0]
    seeds = range(experiment.seed, experiment.seed + experiment.repeats)
    scenario = Scenario(
        gpus=experiment.gpus,
        services=classes,
        seconds=experiment.seconds,
        granularity=experiment.granularity,
        host=host_costs.load(experiment.tables) if experiment.tables else host_costs.NO_COSTS,
    )
    steps = _ProgressSteps(progress, len(rates) * len(seeds) * (len(policies) + 1) + len(seeds))

    quiet = min(QUIET, rates[0] or 1 / source.saturation)
    by_seed = [alone(Alone(), scenario, source.traffic(quiet, s), s) for s in seeds]
    latencies = {
        name: [of_outcome(outcomes[name])[name] for outcomes in by_seed] for name in classes
    }
    medians, p99 = (
        {
            name: metrics.interval([run.whole.percentile(part) for run in runs])[0]
            for name, runs in latencies.items()
        }
        for part in (0.5, 0.99)
    )
    alone_rate = {
        name: sum(run.rate for run in runs) / len(runs) for name, runs in latencies.items()
    }
    classes = _with_targets(classes, medians, experiment)
    late_after = {name: service.latency for name, service in classes.items()}
    scenario = replace(scenario, services=classes, late_after=late_after)
    quiet_runs = [outcome for outcomes in by_seed for outcome in outcomes.values()]
    simulated = sum(outcome.seconds + outcome.drained for outcome in quiet_runs)
    results = Results(
        experiment, scenario, source.saturation, {}, p99, alone_rate, [], {}, simulated
    )
    for rate in rates:
        results.offered[rate] = source.offered(rate)
        if experiment.until_late:
            policies = [name for name in policies if not _is_late(results, name)]
        _run_rate(results, rate, source, policies, seeds, steps)
    return results


class _ProgressSteps:
    def __init__(self, progress: Progress, number: int) -> None:
        self._progress, self._number, self._done = progress, number, 0

    def next(self, what: str) -> None:
        self._progress(min(1.0, self._done / self._number), what)
        self._done += 1


class _TrafficSource:
    """Makes the traffic for any rate and seed."""

    def __init__(self, experiment: Experiment, classes: Mapping[str, ServiceProfile]) -> None:
        self._whole = read(experiment.trace) if experiment.trace else None
        self._devices = len(models(experiment.gpus)[0])
        long = self._whole or generate(experiment.generator, LONG_S, experiment.seed)
        self._check(long, classes)
        self._classes = classes
        #: How many times faster than its own rate the traffic would saturate the devices.
        self.saturation = saturation(long, classes, self._devices)
        self._natural = len(long) / (long[-1].at or 1.0)
        lasts = self._whole[-1].at if self._whole else 0.0
        most = math.nextafter(lasts / self._factor(max(experiment.rates, default=0.0)), math.inf)
        #: The experiment, but no longer than its trace lasts at the highest rate.
        self.experiment = replace(
            experiment, seconds=min(experiment.seconds, most if lasts else math.inf)
        )

    def offered(self, rate: float) -> float:
        """Return the requests a second at a rate."""
        return self._natural * self._factor(rate)

    def traffic(self, rate: float, seed: int) -> list[Arrival]:
        """Return a run's traffic at a multiple of saturation, or with 0 at its own rate."""
        factor = self._factor(rate)
        seconds = self.experiment.seconds * factor
        if self._whole is not None:
            arrivals = faster(window(self._whole, seconds, seed), factor)
        else:
            arrivals = faster(generate(self.experiment.generator, seconds, seed), factor)
        return [arrival for arrival in arrivals if arrival.at < self.experiment.seconds]

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
                "the traffic has token counts: choose other --services, such as llm, with one "
                "class of role prefill and one of role decode, or another trace or generator"
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
    if not 0 <= experiment.multiple < math.inf:
        raise InvalidRequest(
            f"multiple={experiment.multiple!r}: give a multiple of the median alone, such as 5, "
            "or 0"
        )
    for name, service in classes.items():
        if service.reserve > sms:
            raise InvalidRequest(
                f"class {name!r}: reserve={service.reserve}: a device has {sms} SMs, reserve at "
                "most these"
            )


def _policy_names(
    policies: Sequence[str], classes: Mapping[str, ServiceProfile], sms: int
) -> list[str]:
    """Return the policies to compare; `sized` comes with its control.

    Raises:
        InvalidRequest: A policy does not exist, or cannot serve the classes.
    """
    known = sweeps.names(classes)
    policies = known if "all" in policies else list(dict.fromkeys(policies))
    for name in policies:
        split = sweeps.split_of(name)
        if name not in known and (split is None or not 0 < sum(split) < sms or 0 in split):
            raise InvalidRequest(
                f"policy {name!r} does not exist for these classes: give all, {', '.join(known)}, "
                f"or split-N or split-N-M of fewer than {sms} SMs"
            )
    if "sized" in policies and sweeps.BEST_LATE not in policies:
        policies.append(sweeps.BEST_LATE)
    return policies


def _with_latencies(
    classes: Mapping[str, ServiceProfile], slo: Mapping[str, float]
) -> dict[str, ServiceProfile]:
    """Return the classes with the requested targets, in seconds.

    Raises:
        InvalidRequest: There is no such class, or a target is not above 0.
    """
    updated = dict(classes)
    for key, seconds in slo.items():
        role = SLO_ROLES.get(key)
        names = [n for n, s in classes.items() if n == key or (role and s.role == role)]
        if not names or classes[names[0]].is_best_effort or not 0 < seconds < math.inf:
            raise InvalidRequest(
                f"target {key}={seconds!r}: give seconds above 0 for one of "
                f"{[n for n, s in classes.items() if not s.is_best_effort]}, or for 'first' and "
                "'between' of a language model"
            )
        updated[names[0]] = replace(updated[names[0]], latency=seconds)
    return updated


def _with_targets(
    classes: Mapping[str, ServiceProfile], medians: Mapping[str, float], experiment: Experiment
) -> dict[str, ServiceProfile]:
    """Return the classes with their targets in seconds, some of them multiples of medians.

    Raises:
        InvalidRequest: No request of a class finished in its run without other classes, so its
            target is undefined.
    """
    updated = {}
    for name, service in classes.items():
        updated[name] = service
        is_given = service.latency and not experiment.multiple
        if service.is_best_effort or is_given:
            continue
        if math.isnan(medians[name]):
            raise InvalidRequest(
                f"no request of {name!r} finished in its run without other classes: give more "
                "seconds, or a longer trace"
            )
        multiple = experiment.multiple or service.target
        updated[name] = replace(service, latency=multiple * medians[name])
    return updated


def _is_late(results: Results, name: str) -> bool:
    """Say whether a policy had too few requests in time at the last rate, for every seed."""
    last = [group for group in results.groups if group.strategy == name][-1:]
    return any(max(attained(results, group)) < metrics.MUST_MEET for group in last)


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
        results.clairvoyant[rate] = [_clairvoyant(t, results, sms) for t in traffic.values()]
    scenario = results.scenario
    smallest = _smallest_device(results.experiment)
    finest = FINEST if scenario.granularity == "fine" else CELL
    for name in policies:
        group = RunGroup(name, rate)
        results.groups.append(group)
        for seed in seeds:
            steps.next(f"{name} at {rate:g}, seed {seed}")

            def run(strategy: Strategy, seed: int = seed) -> Outcome:
                return simulate(strategy, scenario, traffic[seed], seed)

            best, tried = sweeps.best_run(name, run, classes, smallest, finest)
            results.simulated += sum(outcome.seconds + outcome.drained for outcome in tried)
            group.outcomes.append(best)
            group.latencies.append(of_outcome(best))


def _clairvoyant(traffic: Sequence[Arrival], results: Results, sms: list[int]) -> float:
    scenario = results.scenario
    return clairvoyant.attainment(
        traffic, scenario.services, sms, targets(results), scenario.guard, scenario.seconds
    )
