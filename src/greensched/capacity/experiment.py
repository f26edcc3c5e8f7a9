"""The experiment behind `greensched simulate`: arms, rates and seeds, and what they add up to."""

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
from greensched.capacity.run import Outcome, Scenario, alone, simulate
from greensched.capacity.strategies import Alone, Split, Strategy
from greensched.capacity.traffic import Arrival, faster, generate, read, window
from greensched.capacity.workload import ServiceProfile, saturation, services
from greensched.errors import InvalidRequest

#: Fixed splits that are tried: the SMs of the highest class, in parts of the device, by eights; and
#: between the least of them, where it is cut finely.
PARTS, BETWEEN = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12), (1.5, 2.5, 3.5, 4.5)
SIXTEENTHS = 16
#: So many seconds of a generator's traffic say how much work it is.
LONG_S = 600.0

#: A load at which a class by itself hardly waits for its own: alone-p99 are taken there, or lower.
QUIET = 0.5

#: Told the part done, from 0 to 1, and what is being done.
Progress = Callable[[float, str], None]


def arms() -> dict[str, Strategy]:
    """Every arm by name, but the best split."""
    ours: tuple[Strategy, ...] = (Classes(), Elastic(), Shared(), Sized())
    return baselines() | {arm.name: arm for arm in ours}


def ask(question: Experiment, progress: Progress = lambda _done, _what: None) -> Results:
    """Runs everything. Equal questions get equal answers."""
    curves = latency_tables.CURVES | (
        latency_tables.load(question.tables) if question.tables else {}
    )
    classes = services(question.services, curves)
    sms = _smallest(question)
    asked = _named(question.policies, sms)
    _check(question, classes, sms)
    source = _Source(question, classes)
    question, rates = source.question, sorted(question.rates) or [0.0]
    seeds = range(question.seed, question.seed + question.repeats)
    setting = Scenario(
        gpus=question.gpus,
        services=classes,
        seconds=question.seconds,
        granularity=question.granularity,
    )
    steps = _Steps(progress, len(rates) * len(seeds) * (len(asked) + 1) + len(seeds))

    quiet = min(QUIET, rates[0] or 1 / source.saturation)
    by_seed = [alone(Alone(), setting, source.traffic(quiet, s), s) for s in seeds]
    p99 = {
        name: metrics.interval([_of(each[name], name).whole.percentile(0.99) for each in by_seed])[
            0
        ]
        for name in classes
    }
    alone_rate = {
        name: sum(_of(each[name], name).rate for each in by_seed) / len(by_seed) for name in classes
    }
    classes = _targeted(classes, p99, question.target)
    late_after = _late_after(classes, p99)
    setting = replace(setting, services=classes, late_after=late_after)
    quiet_runs = [outcome for each in by_seed for outcome in each.values()]
    simulated = sum(outcome.seconds + outcome.drained for outcome in quiet_runs)
    answer = Results(
        question, setting, source.saturation, {}, p99, alone_rate, [], {}, (), simulated
    )
    for rate in rates:
        answer.offered[rate] = source.offered(rate)
        _at_rate(answer, rate, source, asked, seeds, steps)
    if question.check:
        steps.next("what is known")
        answer.checks = validation.checks()
    return answer


class _Steps:
    def __init__(self, progress: Progress, number: int) -> None:
        self._progress, self._number, self._done = progress, number, 0

    def next(self, what: str) -> None:
        self._progress(min(1.0, self._done / self._number), what)
        self._done += 1


class _Source:
    """Traffic at any rate, for any seed."""

    def __init__(self, question: Experiment, classes: Mapping[str, ServiceProfile]) -> None:
        self._whole = read(question.trace) if question.trace else None
        self._devices = len(models(question.gpus)[0])
        long = self._whole or generate(question.generator, LONG_S, question.seed)
        self._check(long, classes)
        self._classes = classes
        #: How many times faster than it is the traffic saturates the devices.
        self.saturation = saturation(long, classes, self._devices)
        self._natural = len(long) / (long[-1].at or 1.0)
        lasts = self._whole[-1].at if self._whole else 0.0
        most = math.nextafter(lasts / self._factor(max(question.rates, default=0.0)), math.inf)
        #: Of no more seconds than a trace lasts at the highest rate.
        self.question = replace(
            question, seconds=min(question.seconds, most if lasts else math.inf)
        )

    def offered(self, rate: float) -> float:
        """Requests a second."""
        return self._natural * self._factor(rate)

    def traffic(self, rate: float, seed: int) -> list[Arrival]:
        """At a multiple of saturation; 0: as it is. What comes within a run's seconds."""
        factor = self._factor(rate)
        seconds = self.question.seconds * factor
        if self._whole is not None:
            found = faster(window(self._whole, seconds, seed), factor)
        else:
            found = faster(generate(self.question.generator, seconds, seed), factor)
        return [arrival for arrival in found if arrival.at < self.question.seconds]

    def _factor(self, rate: float) -> float:
        return rate * self.saturation if rate else 1.0

    @staticmethod
    def _check(traffic: Sequence[Arrival], classes: Mapping[str, ServiceProfile]) -> None:
        plain = {arrival.service for arrival in traffic if arrival.service}
        unknown = sorted(plain - classes.keys())
        if unknown:
            raise InvalidRequest(f"the traffic is of {unknown}, the services are {[*classes]}")
        tokens = any(not arrival.service for arrival in traffic)
        if tokens and not any(service.role == "prefill" for service in classes.values()):
            raise InvalidRequest("the traffic is of tokens: a class must prefill, one decode")


def _smallest(question: Experiment) -> int:
    """SMs of the smallest device."""
    return min(model.sm_count for model in models(question.gpus)[0])


def _check(question: Experiment, classes: Mapping[str, ServiceProfile], sms: int) -> None:
    """Refuses numbers that make no sense, before anything is simulated."""
    above = question.seconds, *question.rates
    if question.repeats < 1 or not all(0 < number < math.inf for number in above):
        raise InvalidRequest("seconds, repeats and rates are above 0, and not infinite")
    if not 0 <= question.target < math.inf:
        raise InvalidRequest(f"target {question.target!r}: give how many times the alone-p99")
    for name, service in classes.items():
        if service.reserve > sms:
            raise InvalidRequest(
                f"class {name!r}: reserve={service.reserve}: a device has {sms} SMs"
            )


def _named(policies: Sequence[str], sms: int) -> list[str]:
    known = [*arms(), BEST_SPLIT, BEST_LATE]
    asked = known if "all" in policies else list(dict.fromkeys(policies))
    for name in asked:
        is_split = name.startswith("split-") and name[6:].isdigit() and 0 < int(name[6:]) < sms
        if name not in known and not is_split:
            raise InvalidRequest(
                f"no policy {name!r}: there is all, {', '.join(known)}, "
                f"and split-N, N from 1 to {sms - 1} SMs"
            )
    return asked


def _targeted(
    classes: Mapping[str, ServiceProfile], p99: Mapping[str, float], target: float
) -> dict[str, ServiceProfile]:
    """What the pool's users would have said: latencies in seconds.

    Raises:
        InvalidRequest: a class had nothing done alone, so there is nothing to take its target from.
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
    """Seconds after which one of a class has missed every target that attainments are told of."""
    times = max(metrics.MULTIPLES)
    return {
        name: max(service.latency, 0.0 if math.isnan(p99[name]) else times * p99[name])
        for name, service in classes.items()
    }


def _at_rate(
    answer: Results, rate: float, source: _Source, asked: Sequence[str], seeds: range, steps: _Steps
) -> None:
    classes = answer.setting.services
    traffic = {seed: source.traffic(rate, seed) for seed in seeds}
    if {service.role for service in classes.values()} == {"prefill", "decode"}:
        sms = [model.sm_count for model in models(answer.setting.gpus)[0]]
        answer.bounds[rate] = [_bounds(each, answer, sms) for each in traffic.values()]
    for name in asked:
        cell = RunGroup(name, rate)
        answer.cells.append(cell)
        for seed in seeds:
            steps.next(f"{name} at {rate:g}, seed {seed}")
            found = [
                simulate(arm, answer.setting, traffic[seed], seed) for arm in _arms(name, answer)
            ]
            answer.simulated += sum(outcome.seconds + outcome.drained for outcome in found)
            best = max(found, key=lambda outcome: _worst(of_outcome(outcome), answer))
            cell.outcomes.append(best)
            cell.latencies.append(of_outcome(best))


def _bounds(
    traffic: Sequence[Arrival], answer: Results, sms: list[int]
) -> dict[float | None, float]:
    found: dict[float | None, float] = {}
    for k in (*metrics.MULTIPLES, None):
        latency = targets(answer, k)
        found[k] = math.nan  # a multiple of what nobody had alone
        if not any(map(math.isnan, latency.values())):
            setting = answer.setting
            found[k] = upper_bound.attainment(
                traffic, setting.services, sms, latency, setting.guard, setting.seconds
            )
    return found


def _arms(name: str, answer: Results) -> list[Strategy]:
    if name in (BEST_SPLIT, BEST_LATE):
        least = _smallest(answer.question)
        firsts = [least * part // SIXTEENTHS // CELL * CELL or CELL for part in PARTS]
        if answer.setting.granularity == "fine":
            between = (least * part / SIXTEENTHS for part in BETWEEN)
            firsts += [int(sms) // FINEST * FINEST for sms in between]
        return [Split(first, by_target=name == BEST_LATE) for first in dict.fromkeys(firsts)]
    if name.startswith("split-"):
        return [Split(int(name[6:]))]
    return [arms()[name]]


def _worst(found: Mapping[str, Latencies], answer: Results) -> float:
    """The attainment of the class that does worst at its own target; best effort breaks ties."""
    classes = answer.setting.services
    worst = worst_attained(found, targets(answer, None))
    rest = sum(found[name].rate for name, s in classes.items() if s.is_best_effort)
    return worst + 1e-6 * rest


def _of(outcome: Outcome, name: str) -> Latencies:
    return of_outcome(outcome)[name]
