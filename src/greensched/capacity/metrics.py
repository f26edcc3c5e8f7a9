"""Metrics of runs: attainment, goodput, percentiles, fairness; intervals over seeds.

They depend only on the arguments and seeds: the same command prints the same bytes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from greensched.capacity.run import Outcome
from greensched.capacity.servers import Samples
from greensched.capacity.workload import ServiceProfile

#: The fraction of requests of every class that must be in time for goodput.
MUST_MEET = 0.99
#: The first tenth of the traffic fills queues and batches, and does not count.
WARM_UP = 0.1
#: Resamples of a bootstrap interval, and its coverage.
RESAMPLES, INTERVAL = 1000, 0.95


@dataclass(frozen=True, slots=True)
class WeightedValues:
    """Sorted values with cumulative weights: percentiles, and the weight below a value."""

    values: tuple[float, ...]
    cumulative: tuple[int, ...]

    @staticmethod
    def of(values: Sequence[float], weights: Sequence[int]) -> WeightedValues:
        """Make it from unsorted values."""
        pairs = sorted(zip(values, weights, strict=True))
        total, cumulative = 0, []
        for _, weight in pairs:
            total += weight
            cumulative.append(total)
        return WeightedValues(tuple(value for value, _ in pairs), tuple(cumulative))

    @property
    def total(self) -> int:
        return self.cumulative[-1] if self.cumulative else 0

    def percentile(self, part: float) -> float:
        """Return the least value with this fraction of the weight at or below it; nan if empty."""
        wanted = part * self.total
        for value, cumulative in zip(self.values, self.cumulative, strict=True):
            if cumulative >= wanted - 1e-9:
                return value
        return math.nan

    def below(self, value: float) -> int:
        """Return the weight at or below a value."""
        weight = 0
        for sample, cumulative in zip(self.values, self.cumulative, strict=True):
            if sample > value:
                break
            weight = cumulative
        return weight


@dataclass(frozen=True, slots=True)
class Latencies:
    """One class in one run: latencies, their waiting and running parts, and unserved requests."""

    whole: WeightedValues
    wait: WeightedValues
    service: WeightedValues
    left: tuple[float, ...]
    rate: float

    @staticmethod
    def of(samples: Samples, seconds: float, drained: float = 0.0) -> Latencies:
        """Make it from samples that began during the traffic after the warm-up, served or not.

        Args:
            samples: The samples of a run.
            seconds: The length of its traffic.
            drained: How long the run continued after its traffic.
        """

        def counts(at: float) -> bool:
            return WARM_UP * seconds <= at <= seconds

        kept = [i for i, at in enumerate(samples.at) if counts(at)]
        weights = [samples.weight[i] for i in kept]
        whole = [samples.latency[i] for i in kept]
        wait = [samples.wait[i] for i in kept]
        service = [a - b for a, b in zip(whole, wait, strict=True)]
        left = tuple(age for age in samples.left if counts(seconds + drained - age))
        return Latencies(
            WeightedValues.of(whole, weights),
            WeightedValues.of(wait, weights),
            WeightedValues.of(service, weights),
            left,
            samples.done / seconds,
        )

    def attained(self, target: float) -> float:
        """Return the fraction within a target. An unserved request counts once it is late.

        nan if there were no requests, or if the target is nan (no request was served alone).
        """
        if math.isnan(target):
            return math.nan
        late = sum(age > target for age in self.left)
        total = self.whole.total + late
        return self.whole.below(target) / total if total else math.nan


def of_outcome(outcome: Outcome) -> dict[str, Latencies]:
    """Return the latencies of each class."""
    return {
        name: Latencies.of(samples, outcome.seconds, outcome.drained)
        for name, samples in outcome.samples.items()
    }


# -- over seeds -------------------------------------------------------------------------------


#: A value and the bounds of its interval, or nan.
Interval = tuple[float, float, float]


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and the bounds of its bootstrap interval over seeds."""
    right = [value for value in values if not math.isnan(value)]
    return bootstrap(len(right), lambda some: sum(right[i] for i in some) / len(some))


def bootstrap(seeds: int, of: Callable[[Sequence[int]], float]) -> Interval:
    """Return a statistic of seeds with its bootstrap interval. Equal arguments, equal results."""
    if not seeds:
        return math.nan, math.nan, math.nan
    rng = random.Random(0)  # so that the result depends only on the values
    drawn = (of(rng.choices(range(seeds), k=seeds)) for _ in range(RESAMPLES if seeds > 1 else 1))
    values = sorted(value for value in drawn if not math.isnan(value))
    if not values:
        return of(range(seeds)), math.nan, math.nan
    cut = int((1 - INTERVAL) / 2 * len(values))
    return of(range(seeds)), values[cut], values[-1 - cut]


def ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the ratio of two means over the same seeds; nan if the denominator is 0."""

    def of(some: Sequence[int]) -> float:
        under = sum(below[i] for i in some)
        return sum(above[i] for i in some) / under if under else math.nan

    return bootstrap(len(above), of)


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index: 1 for equal shares, 1/n if one of n has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def shares(outcome: Outcome, services: Mapping[str, ServiceProfile]) -> list[float]:
    """Return the SM-seconds of each class per unit of its weight."""
    return [outcome.sm_seconds[name] / service.weight for name, service in services.items()]


def goodput(by_rate: Mapping[float, float]) -> float:
    """Return the highest rate up to which enough requests met their targets.

    Linear between the last rate at which enough did and the first at which too few did. nan if an
    attainment is nan.
    """
    if any(map(math.isnan, by_rate.values())):
        return math.nan
    held, kept = 0.0, 1.0
    for rate in sorted(by_rate):
        attained = by_rate[rate]
        if attained < MUST_MEET:
            if held == 0.0:
                return 0.0
            return held + (rate - held) * (kept - MUST_MEET) / max(1e-12, kept - attained)
        held, kept = rate, attained
    return held


def rounded(value: Any, digits: int = 6) -> Any:
    """Prepare a value for JSON: nan and inf become None, floats are rounded."""
    if isinstance(value, float):
        return None if math.isnan(value) or math.isinf(value) else float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    return value
