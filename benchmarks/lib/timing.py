"""Measure two things in turns: rounds, percentiles, intervals, and the table.

Ours and the reference are measured in turns, in the same process and the same minute, because a
machine's speed changes from minute to minute. A *round* is a handful of samples of each. Samples of
one round are alike, so the bootstrap resamples rounds, not samples: an interval is as wide as the
machine's changes make it.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import platform
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from greensched.scheduling import scheduler

Samples = npt.NDArray[np.float64]
#: Does the thing once; returns the seconds it took, read as close to it as can be.
Work = Callable[[], Awaitable[float]]

#: Rounds of each side, and samples in each, after a round that is thrown away.
ROUNDS = 30
PER_ROUND = 50
#: Blocks of `paired`, and rounds in each, after one that is thrown away.
BLOCKS, PER_BLOCK = 16, 32
#: Resamplings for an interval: with more, the ends of a 95 % interval move by about 1 % of it.
RESAMPLINGS = 1000

SCALES = {"s": 1.0, "ms": 1e3, "us": 1e6, "x": 1.0}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. Times in `unit`; `interval` is a 95 % interval of the ratio."""

    what: str
    ours: float
    theirs: float
    unit: str
    interval: tuple[float, float] | None = None
    bar: str = ""
    passed: bool | None = None

    @property
    def ratio(self) -> float:
        """Ours over the reference."""
        return self.ours / self.theirs

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON, with its ratio."""
        return dataclasses.asdict(self) | {"ratio": self.ratio if self.theirs else None}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Row:
        """Return a row that another process measured."""
        values = {key: value for key, value in found.items() if key != "ratio"}
        if values["interval"] is not None:
            values["interval"] = tuple(values["interval"])
        return cls(**values)


@dataclass(slots=True)
class Comparison:
    """Seconds of ours and of the reference, by rounds."""

    what: str
    ours: list[Samples] = field(default_factory=list)
    theirs: list[Samples] = field(default_factory=list)

    def at(self, part: float) -> tuple[float, float]:
        """Return a percentile of each."""
        return percentile(self.ours, part), percentile(self.theirs, part)

    def interval(self, part: float, of: Callable[[float, float], float]) -> tuple[float, float]:
        """Return a 95 % bootstrap interval of a function of both percentiles."""
        rng = np.random.default_rng(1)
        found = []
        for _ in range(RESAMPLINGS):
            ours, theirs = (
                [rounds[i] for i in rng.integers(len(rounds), size=len(rounds))]
                for rounds in (self.ours, self.theirs)
            )
            found.append(of(percentile(ours, part), percentile(theirs, part)))
        low, high = np.quantile(found, (0.025, 0.975))
        return float(low), float(high)

    def row(self, part: float, unit: str, *, most: float | None = None) -> Row:
        """Return the row of a percentile; `most` is a bar on the ratio."""
        ours, theirs = self.at(part)
        return Row(
            f"{self.what}, {name_of(part)}",
            ours * SCALES[unit],
            theirs * SCALES[unit],
            unit,
            self.interval(part, lambda a, b: a / b),
            "" if most is None else f"<= {most:g} x",
            None if most is None else ours <= most * theirs,
        )


def percentile(rounds: Sequence[Samples], part: float) -> float:
    """Return the smallest sample that so large a part of all samples does not exceed."""
    return float(np.quantile(np.concatenate(rounds), part, method="inverted_cdf"))


def name_of(part: float) -> str:
    """Return a percentile's name: median, p99, p99.9, max."""
    return {0.5: "median", 1.0: "max"}.get(part, f"p{100 * part:g}")


async def compare(what: str, ours: Work, theirs: Work) -> Comparison:
    """Measure both in turns; the first of a round changes from round to round."""
    comparison = Comparison(what)
    await _round(ours)
    await _round(theirs)
    for number in range(ROUNDS):
        sides = [(ours, comparison.ours), (theirs, comparison.theirs)]
        for work, rounds in sides[:: 1 if number % 2 else -1]:
            rounds.append(await _round(work))
    return comparison


async def _round(work: Work) -> Samples:
    return np.array([await work() for _ in range(PER_ROUND)])


async def paired(
    what: str, sides: Callable[[int], AbstractAsyncContextManager[tuple[Work, Work]]], most: float
) -> Row:
    """Return the median ratio of two sides that differ by a few percent, and its interval.

    A round is ours, the reference twice, ours; or the other way around. Its ratio is free of a
    machine that becomes faster or slower meanwhile. A block of rounds has sides of its own, since
    where their objects lie in memory is worth some percent, too: the bootstrap resamples blocks.

    Args:
        what: The name of the row.
        sides: Makes ours and the reference for a block, of which it gets the number.
        most: The bar.
    """
    blocks: list[Samples] = []
    references: list[float] = []
    for block in range(BLOCKS):
        async with sides(block) as works:
            gc.collect()
            gc.disable()
            try:
                found = [await _ratio(*works, number) for number in range(-1, PER_BLOCK)][1:]
            finally:
                gc.enable()
        blocks.append(np.array([ratio for ratio, _ in found]))
        references += [seconds for _, seconds in found]
    rng = np.random.default_rng(1)
    drawn = rng.integers(len(blocks), size=(RESAMPLINGS, len(blocks)))
    medians = [np.median(np.concatenate([blocks[i] for i in each])) for each in drawn]
    low, high = map(float, np.quantile(medians, (0.025, 0.975)))
    ratio, theirs = float(np.median(np.concatenate(blocks))), float(np.median(references)) * 1e6
    return judged(Row(what, ratio * theirs, theirs, "us", (low, high)), most)


def judged(row: Row, most: float) -> Row:
    """Return a row with a bar on its ratio; not decided where the interval includes the bar."""
    assert row.interval is not None
    low, high = row.interval
    passed = None if low <= most < high else high <= most
    bar = f"<= {most:g} x" + (" (not decided)" if passed is None else "")
    return dataclasses.replace(row, bar=bar, passed=passed)


async def _ratio(ours: Work, reference: Work, number: int) -> tuple[float, float]:
    """Return the ratio of a round, and the seconds of the reference."""
    if number % 2:
        theirs = await reference()
        mine = await ours() + await ours()
        theirs += await reference()
    else:
        mine = await ours()
        theirs = await reference() + await reference()
        mine += await ours()
    return mine / theirs, theirs / 2


# -- printing ---------------------------------------------------------------------------------


class MachineLoad:
    """The interpreter, the build, and the cores that other processes use meanwhile.

    Other processes widen every figure.
    """

    def __init__(self) -> None:
        self._start = self._now()

    def __str__(self) -> str:
        wall, busy, own = (a - b for a, b in zip(self._now(), self._start, strict=True))
        return (
            f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} "
            f"cores, of which other processes used {max(0.0, busy - own) / wall:.1f} meanwhile; "
            f"greensched {'as Python' if scheduler.__file__.endswith('.py') else 'compiled'}"
        )

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Return wall-clock seconds, CPU seconds of all processes, and of this one's tree."""
        ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        busy = sum(ticks) - ticks[3] - ticks[4]  # all but idle and waiting for I/O
        return time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def table(rows: Sequence[Row]) -> str:
    """Return the rows, aligned."""
    return columns([("what", "ours", "theirs", "ratio [95 %]", "bar"), *map(_cells, rows)])


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells, aligned: the first and the last column left, the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = []
    for first, *numbers, last in lines:
        right = (cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=False))
        aligned.append("  ".join((first.ljust(widths[0]), *right, last)).rstrip())
    aligned.insert(1, "-" * max(map(len, aligned)))
    return "\n".join(aligned)


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    between = "" if row.interval is None else " [{:.3g} {:.3g}]".format(*row.interval)
    verdict = {None: "", True: ": PASS", False: ": FAIL"}[row.passed]
    return (
        row.what,
        f"{row.ours:.3g} {row.unit}",
        f"{row.theirs:.3g} {row.unit}",
        f"{row.ratio:.3g}{between}" if row.theirs else "",
        row.bar + verdict,
    )
