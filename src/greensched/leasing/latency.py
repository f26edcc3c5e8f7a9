"""How long a piece of work takes on so many SMs: measured, kept true, and asked for a size."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from greensched._validation import as_float, as_int
from greensched.errors import InvalidRequest

#: A size is marked as a step where the next smaller one takes so much longer: kernels with a fixed
#: grid are flat and then fall at once (1.8 x for 12 of 132 SMs in decode attention), so a formula
#: would give away SMs that cost a second wave.
STEP = 1.15
#: Weight of the newest duration in what is kept of a size: the last twenty or so count.
NEWEST = 0.05
#: Durations beyond this quantile are the tail.
TAIL = 0.95


class LatencyCurve:
    """Latency against SMs: median and 95th percentile for each size, in seconds.

    More SMs never take longer: where a measurement says so it is smoothed (isotonic regression).
    Between two sizes the smaller one's time counts. Made by `pool.measure`, or from a table.
    Given to `pool.partition(duration=curve)` it predicts, and learns from what its leases take.

    Args:
        samples: durations in seconds, by SMs.

    Raises:
        InvalidRequest: no samples, or what are no durations.
    """

    def __init__(self, samples: Mapping[int, Iterable[float]]) -> None:
        self._median: dict[int, float] = {}
        self._p95: dict[int, float] = {}
        if not isinstance(samples, Mapping):
            raise InvalidRequest("give durations by SMs, such as {8: [0.004], 16: [0.002]}")
        by_size: dict[int, Any] = {as_int(sms): given for sms, given in samples.items()}
        for sms in sorted(by_size):
            given = by_size[sms]
            durations = list(map(as_float, given)) if isinstance(given, Iterable) else []
            if sms < 1 or not durations or not all(0 <= each < math.inf for each in durations):
                raise InvalidRequest(
                    f"{list(samples)} SMs: give whole numbers of SMs, and for each of them "
                    "durations in seconds, at least one"
                )
            durations.sort()
            self._median[sms] = _quantile(durations, 0.5)
            self._p95[sms] = _quantile(durations, TAIL)
        if not self._median:
            raise InvalidRequest("a curve needs the durations of at least one size")
        #: The sizes in order; and what is kept of each, smoothed, made when it is asked for.
        self._sizes = tuple(sorted(self._median))
        self._smooth: tuple[dict[int, float], dict[int, float]] | None = None

    # -- questions -------------------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes it knows, the smallest first."""
        return self._sizes

    def at(self, sms: int) -> float:
        """The median on so many SMs, in seconds; below the smallest size, in inverse proportion."""
        return self._at(self._smoothed()[0], sms)

    def p95(self, sms: int) -> float:
        """The 95th percentile on so many SMs, in seconds."""
        return self._at(self._smoothed()[1], sms)

    @property
    def steps(self) -> tuple[int, ...]:
        """Sizes below which it is much slower at once, by `STEP`: do not go below them lightly."""
        median, sizes = self._smoothed()[0], self.sizes
        pairs = pairwise(sizes)
        return tuple(larger for smaller, larger in pairs if median[smaller] > STEP * median[larger])

    def within(self, *, slowdown: float) -> int:
        """The fewest SMs on which the tail is at most so many times that of the most SMs.

        Raises:
            InvalidRequest: a slowdown below 1.
        """
        if not as_float(slowdown) >= 1:
            raise InvalidRequest(f"slowdown={slowdown!r}: give a factor, at least 1")
        return self.meeting(slowdown * self.p95(self.sizes[-1]))

    def meeting(self, seconds: float) -> int:
        """The fewest SMs on which the tail is at most so many seconds.

        Raises:
            InvalidRequest: not even the most SMs are fast enough; says how fast they are.
        """
        if not as_float(seconds) >= 0:
            raise InvalidRequest(f"seconds={seconds!r}: give seconds, at least 0")
        for sms in self.sizes:
            if self.p95(sms) <= seconds:
                return sms
        most = self.sizes[-1]
        raise InvalidRequest(f"{seconds:.3g} s: {most} SMs take {self.p95(most):.3g} s (p95)")

    def times(self, factor: float) -> ScaledCurve:
        """The same work `factor` times over; what is learnt of it goes to this curve."""
        return ScaledCurve(self, factor)

    # -- learning --------------------------------------------------------------------------------

    def observe(self, sms: int, seconds: float) -> None:
        """One more duration. O(1), on whatever thread: it is called while serving.

        Raises:
            InvalidRequest: that is no size, or no duration; nothing is learnt of it.
        """
        if not (sms >= 1 and 0 <= seconds < math.inf):
            raise InvalidRequest(f"{seconds!r} s on {sms!r} SMs: give a duration, and a size")
        if sms not in self._median:
            self._median[sms], self._p95[sms] = self.at(sms), self.p95(sms)
            self._sizes, self._smooth = tuple(sorted(self._median)), None
        # Each goes towards the newest by a part of it; the tail up by 95 parts and down by 5, so it
        # stands where one in twenty is above.
        median, p95 = self._median[sms], self._p95[sms]
        new_median = self._median[sms] = median + NEWEST * (seconds - median)
        part = TAIL if seconds > p95 else 1 - TAIL
        new_p95 = self._p95[sms] = p95 + 2 * NEWEST * part * (seconds - p95)
        if self._smooth is not None:
            smooth_median, smooth_p95 = self._smooth
            if not (
                self._is_moved(smooth_median, sms, median, new_median)
                and self._is_moved(smooth_p95, sms, p95, new_p95)
            ):
                self._smooth = None  # made again when it is asked

    def _is_moved(self, smooth: dict[int, float], sms: int, old: float, new: float) -> bool:
        """Changes one size, where it needs no smoothing before or after: the usual case."""
        place = bisect_right(self._sizes, sms)
        above = smooth[self._sizes[place - 2]] if place > 1 else math.inf
        below = smooth[self._sizes[place]] if place < len(self._sizes) else 0.0
        if smooth[sms] != old or not below < new < above:
            return False
        smooth[sms] = new
        return True

    # -- keeping ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes it as JSON. Blocks."""
        rows = [
            {"sms": sms, "median": self._median[sms], "p95": self._p95[sms]} for sms in self.sizes
        ]
        Path(path).write_text(json.dumps({"latency": rows}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> LatencyCurve:
        """Reads what `save` wrote. Blocks.

        Raises:
            InvalidRequest: the file holds no curve.
            OSError: it cannot be read.
        """
        try:
            rows: list[dict[str, Any]] = json.loads(Path(path).read_text())["latency"]
            curve = cls({row["sms"]: [row["median"]] for row in rows})
            curve._p95 = cls({row["sms"]: [row["p95"]] for row in rows})._median
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"{path} holds no latency curve: {error!r}") from None
        return curve

    # -- smoothing -------------------------------------------------------------------------------

    def _smoothed(self) -> tuple[dict[int, float], dict[int, float]]:
        if self._smooth is None:
            self._smooth = _falling(self._median), _falling(self._p95)
        return self._smooth

    def _at(self, smooth: dict[int, float], sms: int) -> float:
        place = bisect_right(self._sizes, sms)
        smallest = self._sizes[0]
        if not place:
            return smooth[smallest] * smallest / max(1, sms)
        return smooth[self._sizes[place - 1]]

    def __repr__(self) -> str:
        shown = ", ".join(f"{sms}: {1e3 * self.at(sms):.3g} ms" for sms in self.sizes)
        return f"<LatencyCurve {shown}>"


class ScaledCurve:
    """A curve's work so many times over: a batch of so many. What it learns, the curve does."""

    __slots__ = ("_curve", "_factor")

    def __init__(self, curve: LatencyCurve, factor: float) -> None:
        if not 0 < as_float(factor) < math.inf:
            raise InvalidRequest(f"factor={factor!r}: give how many times, more than 0")
        self._curve = curve
        self._factor = factor

    def at(self, sms: int) -> float:
        """The median on so many SMs, in seconds."""
        return self._factor * self._curve.at(sms)

    def observe(self, sms: int, seconds: float) -> None:
        """One more duration."""
        self._curve.observe(sms, seconds / self._factor)


def _quantile(ordered: list[float], part: float) -> float:
    """The smallest that so large a part does not exceed."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def _falling(times: dict[int, float]) -> dict[int, float]:
    """The nearest that never rises with the size: neighbours that do are averaged."""
    blocks: list[tuple[float, int]] = []
    for size in sorted(times):
        mean, count = times[size], 1
        while blocks and blocks[-1][0] < mean:
            other, others = blocks.pop()
            mean = (mean * count + other * others) / (count + others)
            count += others
        blocks.append((mean, count))
    smooth = [mean for mean, count in blocks for _ in range(count)]
    return dict(zip(sorted(times), smooth, strict=True))
