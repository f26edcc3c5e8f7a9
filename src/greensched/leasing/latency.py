"""How long work takes on each number of SMs: curves that are measured, updated and queried."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from greensched._asynclib import is_coroutine_function
from greensched._validation import as_float, as_int, as_tuple
from greensched.errors import InvalidRequest

if TYPE_CHECKING:
    from greensched.leasing.partition import Partition
    from greensched.scheduling.cells import DeviceCells

#: A size counts as a step if the next smaller size takes this many times as long. Kernels with a
#: fixed grid are flat between sudden drops (1.8 x for 12 of 132 SMs in decode attention), so a
#: formula would give away SMs whose absence costs a second wave.
STEP = 1.15
#: Weight of the newest duration in a size's estimate; about the last twenty durations count.
NEWEST = 0.05
#: The quantile that is called the tail.
TAIL = 0.95
#: How many times each size is measured. Sizes take turns, because a machine's speed changes from
#: minute to minute. The 95th percentile of 20 is the second largest.
REPEATS = 20
#: The most sizes measured by default: all sizes of a device that is split into groups of 8 SMs.
MAX_SIZES = 17


class LatencyCurve:
    """Latency against SMs: median and 95th percentile for each size, in seconds.

    More SMs never take longer: measurements that say otherwise are smoothed (isotonic regression).
    Between two sizes the time of the smaller one applies. Made by `pool.measure`, or from a table.
    As `pool.partition(duration=curve)` it predicts durations, and learns from its leases.

    Args:
        samples: Durations in seconds, by number of SMs.

    Raises:
        InvalidRequest: There are no samples, or values are not durations.
    """

    def __init__(self, samples: Mapping[int, Iterable[float]]) -> None:
        self._median: dict[int, float] = {}
        self._p95: dict[int, float] = {}
        if not isinstance(samples, Mapping):
            raise InvalidRequest(
                f"samples={samples!r}: give durations by SMs, such as {{8: [0.004], 16: [0.002]}}"
            )
        by_size: dict[int, Any] = {as_int(sms): durations for sms, durations in samples.items()}
        for sms in sorted(by_size):
            values = by_size[sms]
            durations = list(map(as_float, as_tuple(values) or ()))
            if (
                sms < 1
                or not durations
                or not all(0 <= seconds < math.inf for seconds in durations)
            ):
                raise InvalidRequest(
                    f"samples for {list(samples)} SMs: give whole numbers of SMs, and at least one "
                    "duration in seconds for each"
                )
            durations.sort()
            self._median[sms] = quantile(durations, 0.5)
            self._p95[sms] = quantile(durations, TAIL)
        if not self._median:
            raise InvalidRequest("samples={}: give the durations of at least one size")
        #: The sizes in order. The smoothed estimates below are computed when first needed.
        self._sizes = tuple(sorted(self._median))
        self._smooth: tuple[dict[int, float], dict[int, float]] | None = None

    # -- queries ---------------------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, ...]:
        """The known sizes, smallest first."""
        return self._sizes

    def at(self, sms: int) -> float:
        """Return the median on `sms` SMs, in seconds; inversely proportional below the smallest."""
        return self._at(self._smoothed()[0], sms)

    def p95(self, sms: int) -> float:
        """Return the 95th percentile on `sms` SMs, in seconds."""
        return self._at(self._smoothed()[1], sms)

    @property
    def steps(self) -> tuple[int, ...]:
        """The sizes at which the curve drops: the next smaller size is slower by `STEP`."""
        median, sizes = self._smoothed()[0], self.sizes
        pairs = pairwise(sizes)
        return tuple(larger for smaller, larger in pairs if median[smaller] > STEP * median[larger])

    def within(self, *, slowdown: float) -> int:
        """Return the fewest SMs whose tail is at most `slowdown` times that of the largest size.

        Raises:
            InvalidRequest: `slowdown` is below 1.
        """
        if not as_float(slowdown) >= 1:
            raise InvalidRequest(f"slowdown={slowdown!r}: give a factor, at least 1")
        return self.meeting(slowdown * self.p95(self.sizes[-1]))

    def meeting(self, seconds: float) -> int:
        """Return the fewest SMs whose tail is at most `seconds`.

        Raises:
            InvalidRequest: Not even the largest size is fast enough; says how fast it is.
        """
        if not as_float(seconds) >= 0:
            raise InvalidRequest(f"seconds={seconds!r}: give seconds, at least 0")
        for sms in self.sizes:
            if self.p95(sms) <= seconds:
                return sms
        most = self.sizes[-1]
        raise InvalidRequest(
            f"seconds={seconds:.3g} cannot be met: give at least {self.p95(most):.3g}, which the "
            f"largest size, {most} SMs, takes (p95)"
        )

    def times(self, factor: float) -> ScaledCurve:
        """Return the curve of `factor` repetitions. Its durations also update this curve."""
        return ScaledCurve(self, factor)

    # -- learning --------------------------------------------------------------------------------

    def observe(self, sms: int, seconds: float) -> None:
        """Add a duration. Takes constant time, on any thread, so that a service can use it.

        Raises:
            InvalidRequest: A value is not a size or not a duration; nothing has changed.
        """
        if not (sms >= 1 and 0 <= seconds < math.inf):
            raise InvalidRequest(
                f"sms={sms!r}, seconds={seconds!r}: give a size of at least 1 SM, and seconds of "
                "at least 0"
            )
        if sms not in self._median:
            self._median[sms], self._p95[sms] = self.at(sms), self.p95(sms)
            self._sizes, self._smooth = tuple(sorted(self._median)), None
        # Each estimate moves towards the newest duration by a fraction of the distance. The tail
        # moves up by 95 parts and down by 5, so that one duration in twenty exceeds it.
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
                self._smooth = None  # computed again when next needed

    def _is_moved(self, smooth: dict[int, float], sms: int, old: float, new: float) -> bool:
        """Change one size in place; return False if smoothing is needed before or after."""
        place = bisect_right(self._sizes, sms)
        above = smooth[self._sizes[place - 2]] if place > 1 else math.inf
        below = smooth[self._sizes[place]] if place < len(self._sizes) else 0.0
        if smooth[sms] != old or not below < new < above:
            return False
        smooth[sms] = new
        return True

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the curve as JSON. Blocks."""
        rows = [
            {"sms": sms, "median": self._median[sms], "p95": self._p95[sms]} for sms in self.sizes
        ]
        Path(path).write_text(json.dumps({"latency": rows}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> LatencyCurve:
        """Read a curve that `save` wrote. Blocks.

        Raises:
            InvalidRequest: The file does not hold a curve.
            OSError: The file cannot be read.
        """
        try:
            rows: list[dict[str, Any]] = json.loads(Path(path).read_text())["latency"]
            curve = cls({row["sms"]: [row["median"]] for row in rows})
            curve._p95 = cls({row["sms"]: [row["p95"]] for row in rows})._median
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidRequest(
                f"{path} is not a latency curve written by `save`: {error!r}"
            ) from None
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
    """The curve of `factor` repetitions of another curve's work. It updates that curve."""

    __slots__ = ("_curve", "_factor")

    def __init__(self, curve: LatencyCurve, factor: float) -> None:
        if not 0 < as_float(factor) < math.inf:
            raise InvalidRequest(f"factor={factor!r}: give a number of repetitions, more than 0")
        self._curve = curve
        self._factor = factor

    def at(self, sms: int) -> float:
        """Return the median on `sms` SMs, in seconds."""
        return self._factor * self._curve.at(sms)

    def observe(self, sms: int, seconds: float) -> None:
        """Add a duration of the `factor` repetitions."""
        self._curve.observe(sms, seconds / self._factor)


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the least of sorted values with at least this fraction of them at or below it."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def _falling(times: dict[int, float]) -> dict[int, float]:
    """Return the closest times that never rise with size, by averaging rising neighbours."""
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


# -- measuring -------------------------------------------------------------------------------------


class PartitionSource(Protocol):
    """What `measure` needs from a pool."""

    def partition(
        self, sms: int, *, device: int, service: str | None
    ) -> AbstractAsyncContextManager[Partition]: ...


def default_sizes(cells: DeviceCells) -> tuple[int, ...]:
    """Return sizes worth measuring: evenly spaced multiples of a cell, and the whole device."""
    step = -(-cells.count // (MAX_SIZES - 1))
    counts = range(step, cells.count + 1, step)
    return tuple(dict.fromkeys((*(count * cells.size for count in counts), cells.total)))


async def measure(
    source: PartitionSource,
    clock: Callable[[], float],
    sizes: Sequence[int],
    fn: Callable[..., Any],
    args: tuple[object, ...],
    *,
    device: int,
    service: str | None,
    repeats: int = REPEATS,
) -> LatencyCurve:
    """Measure a piece of work on partitions of each size, in turns. See `Pool.measure`."""
    if not callable(fn):
        raise InvalidRequest(f"measure({fn!r}): give a function, or a coroutine function")
    checked: Any = as_tuple(sizes)  # because an iterator would be used up by the first turn
    if not checked:
        raise InvalidRequest(f"measure(sms={sizes!r}): give the sizes, such as [8, 16, 32]")
    samples: dict[int, list[float]] = {}
    for turn in range(1 + repeats):
        for sms in checked:
            async with source.partition(sms, device=device, service=service) as p:
                start = clock()
                await (fn(p, *args) if is_coroutine_function(fn) else p.run(fn, *args))
                duration = clock() - start
                if turn:  # the first turn also compiles and loads
                    samples.setdefault(p.sm_count, []).append(duration)
    return LatencyCurve(samples)
