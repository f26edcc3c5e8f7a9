"""What runs gave, in numbers: attainment, goodput, percentiles, fairness; intervals over seeds.

Everything printed here is a function of the arguments and seeds: the same command gives the same
bytes. How long the host took is not among it.
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

#: Targets as multiples of the alone-p99; 1 / part of all that must meet them for goodput.
MULTIPLES = (1.2, 1.5, 2.0, 5.0)
MUST_MEET = 0.99
#: The first tenth of the traffic fills queues and batches, and is left out.
WARM_UP = 0.1
#: Resamples of a bootstrap interval, and its width.
RESAMPLES, INTERVAL = 1000, 0.95


@dataclass(frozen=True, slots=True)
class Weighed:
    """Sorted values with weights: percentiles, and the part below a value."""

    values: tuple[float, ...]
    upto: tuple[int, ...]

    @staticmethod
    def of(values: Sequence[float], weights: Sequence[int]) -> Weighed:
        """From unsorted ones."""
        pairs = sorted(zip(values, weights, strict=True))
        total, upto = 0, []
        for _, weight in pairs:
            total += weight
            upto.append(total)
        return Weighed(tuple(value for value, _ in pairs), tuple(upto))

    @property
    def total(self) -> int:
        """All weight."""
        return self.upto[-1] if self.upto else 0

    def percentile(self, part: float) -> float:
        """The least value that so much of the weight is at or below; nan: there is none."""
        wanted = part * self.total
        for value, upto in zip(self.values, self.upto, strict=True):
            if upto >= wanted - 1e-9:
                return value
        return math.nan

    def below(self, value: float) -> int:
        """The weight at or below a value."""
        found = 0
        for each, upto in zip(self.values, self.upto, strict=True):
            if each > value:
                break
            found = upto
        return found


@dataclass(frozen=True, slots=True)
class Latencies:
    """One class in one run: all latencies, the parts of them, and what was never served."""

    whole: Weighed
    wait: Weighed
    service: Weighed
    left: tuple[float, ...]
    rate: float

    @staticmethod
    def of(samples: Samples, seconds: float, drained: float = 0.0) -> Latencies:
        """What began while there was traffic, served or not, but in the warm-up.

        Args:
            samples: of a run.
            seconds: of its traffic.
            drained: for how long it went on after that.
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
            Weighed.of(whole, weights),
            Weighed.of(wait, weights),
            Weighed.of(service, weights),
            left,
            samples.done / seconds,
        )

    def attained(self, target: float) -> float:
        """The part within a target; who was never served counts once he is late.

        nan: nobody came, or the target is nan, as a multiple of what nobody had alone is.
        """
        if math.isnan(target):
            return math.nan
        late = sum(age > target for age in self.left)
        total = self.whole.total + late
        return self.whole.below(target) / total if total else math.nan


def of_outcome(outcome: Outcome) -> dict[str, Latencies]:
    """Each class's."""
    return {
        name: Latencies.of(samples, outcome.seconds, outcome.drained)
        for name, samples in outcome.samples.items()
    }


# -- over seeds -------------------------------------------------------------------------------


#: A value, and the bounds of its interval; nan: there is none.
Interval = tuple[float, float, float]


def interval(values: Sequence[float]) -> Interval:
    """Mean, and the bounds of a bootstrap interval over seeds."""
    right = [value for value in values if not math.isnan(value)]
    return bootstrap(len(right), lambda some: _mean([right[i] for i in some]))


def bootstrap(seeds: int, of: Callable[[Sequence[int]], float]) -> Interval:
    """A statistic of seeds, and its interval when seeds are drawn again. The same each time."""
    if not seeds:
        return math.nan, math.nan, math.nan
    rng = random.Random(0)  # the values alone decide
    drawn = (of(rng.choices(range(seeds), k=seeds)) for _ in range(RESAMPLES if seeds > 1 else 1))
    found = sorted(value for value in drawn if not math.isnan(value))
    if not found:
        return of(range(seeds)), math.nan, math.nan
    cut = int((1 - INTERVAL) / 2 * len(found))
    return of(range(seeds)), found[cut], found[-1 - cut]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Of two means, seed by seed the same traffic; nan where there is nothing below."""

    def of(some: Sequence[int]) -> float:
        under = sum(below[i] for i in some)
        return sum(above[i] for i in some) / under if under else math.nan

    return bootstrap(len(above), of)


def recovered(found: Sequence[float], least: Sequence[float], most: Sequence[float]) -> Interval:
    """The part of the gap between two means that a third one covers; nan where there is none."""

    def of(some: Sequence[int]) -> float:
        gap = sum(most[i] - least[i] for i in some)
        return sum(found[i] - least[i] for i in some) / gap if gap > 0 else math.nan

    return bootstrap(len(found), of)


def jain(shares: Sequence[float]) -> float:
    """1: all have the same; 1/n: one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def shares(outcome: Outcome, services: Mapping[str, ServiceProfile]) -> list[float]:
    """SM-seconds of each class for a unit of its weight."""
    return [outcome.sm_seconds[name] / service.weight for name, service in services.items()]


def goodput(by_rate: Mapping[float, float]) -> float:
    """The highest rate up to which enough of all met their targets, between the rates tried.

    Linear between the last rate at which it held and the first at which it did not. nan: there is
    no saying who met them.
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
    """For JSON: what is no number is null, and digits that mean nothing are not printed."""
    if isinstance(value, float):
        return None if math.isnan(value) or math.isinf(value) else float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(each, digits) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each, digits) for each in value]
    return value
