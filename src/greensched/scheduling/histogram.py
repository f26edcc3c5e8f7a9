"""Histograms of durations: counts by powers of two seconds, and their sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import frexp
from typing import Final

#: Seconds below `2 ** e`, but not below half of that, are counted at index `e`. It is negative
#: below half a second, where Python counts from the end. 2 ** 31 s are 68 years.
SLOTS: Final = 64
#: Added to each duration, because 0 has no exponent: a nanosecond, shorter than any lease.
TINY: Final = 1e-9
#: The exponents of the reported bounds: from 7.6 us to 16 s.
EXPONENTS: Final = range(-17, 5)
#: The first of these bounds: durations below it need not be distinguished.
SHORTEST: Final = 2.0**EXPONENTS.start


class Histogram:
    """Counts durations in seconds. The caller ensures that only one thread counts at a time."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * SLOTS
        self.seconds = 0.0

    def add(self, seconds: float, number: int = 1) -> None:
        """Count a duration `number` times."""
        self.counts[frexp(seconds + TINY)[1]] += number
        self.seconds += number * seconds

    def add_shortest(self, number: int, seconds: float) -> None:
        """Count durations below `SHORTEST`: their number, and the sum of their seconds."""
        self.counts[EXPONENTS.start] += number
        self.seconds += seconds


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of one kind: a histogram at one moment.

    Attributes:
        count: The number of durations.
        seconds: Their sum.
        buckets: Bounds in seconds, doubling from 7.6 us to 16 s, each with the number below it.
    """

    count: int
    seconds: float
    buckets: tuple[tuple[float, int], ...] = field(repr=False)

    def quantile(self, fraction: float) -> float | None:
        """Return the bound below which this fraction lies; None if empty or past the last bound."""
        wanted = fraction * self.count
        return next((bound for bound, n in self.buckets if self.count and n >= wanted), None)


def durations(histogram: Histogram, zeros: int = 0) -> Durations:
    """Return a histogram at this moment, with further durations of 0."""
    counts, below, buckets = histogram.counts, zeros, []
    below += sum(counts[SLOTS // 2 : EXPONENTS.start])
    for exponent in EXPONENTS:
        below += counts[exponent]
        buckets.append((2.0**exponent, below))
    count = below + sum(counts[EXPONENTS.stop : SLOTS // 2])
    return Durations(count, histogram.seconds, tuple(buckets))
