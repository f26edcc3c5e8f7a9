"""Figures measured on an H100 and an H200, row by row, with the model's predictions.

`measured.csv` has the figures with their sources under `docs/measurements`, in microseconds unless
a figure's name says otherwise. `predicted.csv` has the latest result of `python -m
benchmarks.model` in the repository, which takes minutes; so reports only read it, and a test
computes a part of it again.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
MEASURED, PREDICTED = HERE / "measured.csv", HERE / "predicted.csv"
KEYS = ("gpu", "workload", "case", "arm", "figure")
#: The relative error within which a prediction counts as right.
WITHIN = 0.25
#: The ratio of measured figures from which a ranking must reproduce their order.
DIFFERENT = 1.15
#: Arms that give the times of work alone, which are inputs of the predictions.
INPUTS = {"alone", "other alone", "plain alone"}
#: The given rate of training, from which the rate on fewer SMs is predicted.
GIVEN = ("h200", "torch", "graph", "streams", "steps/s")
#: Rows that parameters were fitted to: (workload, case, arm, figures). `benchmarks.model.hosts` and
#: `contention` say which parameter was fitted to which row.
FITTED = (
    ("W1", "spin 0.04 ms", "lease each", ("p50", "p99")),
    ("W1", "spin 0.25 ms", "lease each", ("p50", "p99")),
    ("W1", "spin 0.04 ms", "lease held", ("p50",)),
    ("W1", "spin 0.25 ms", "lease held", ("p50",)),
    *(("W1", f"spin {ms} ms", "split", ("p50", "p99")) for ms in ("0.04", "0.25", "2", "10")),
    ("W2", "load 0.25", "reserve kept", ("p50",)),
    ("W8", "two small", "shared", ("p50",)),
    ("bandwidth", "16 bytes a thread", "", ("GB/s",)),
    ("bandwidth", "16 beside 16", "32 of", ("GB/s",)),
    ("bandwidth", "16 beside 16", "96 of", ("GB/s",)),
    ("torch", "graph", "partition 16", ("MHz",)),
    ("engine", "14/s", "split 64", ("first p50",)),
    ("engine", "20/s", "chunked 256", ("between p50",)),
    ("engine", "28/s", "chunked 384", ("between p50",)),
)
#: Figures of which only the best arm is compared: the engine's share in time, which the measurement
#: counts in requests and the model in tokens.
SHARES = ("in time at 12", "in time at 20")

Key = tuple[str, str, str, str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: measured, with its 95 % interval as factors if known, and predicted."""

    key: Key
    value: float
    low: float
    high: float
    source: str
    predicted: float | None

    @property
    def is_input(self) -> bool:
        """Say whether the figure is an input of the predictions."""
        return self.key[3] in INPUTS or self.key == GIVEN

    @property
    def is_known(self) -> bool:
        """Say whether the measurement itself is known to within a quarter."""
        return self.low >= 1 / (1 + WITHIN) and self.high <= 1 + WITHIN

    @property
    def is_fitted(self) -> bool:
        """Say whether a parameter was fitted to this figure."""
        _, workload, case, arm, figure = self.key
        return any(
            (workload, case) == (w, c) and arm.startswith(a) and figure in figures
            for w, c, a, figures in FITTED
        )

    @property
    def is_within(self) -> bool:
        """Say whether the prediction is within a quarter of the figure."""
        return self.predicted is not None and abs(self.predicted / self.value - 1) <= WITHIN


@functools.cache
def rows() -> tuple[Row, ...]:
    """Read the figures to compare: no inputs, and no interval wider than a quarter of its value."""
    return tuple(
        row
        for row in inputs_and_rows()
        if row.is_known and not row.is_input and row.key[4] not in SHARES
    )


def _read(path: Path) -> Iterator[tuple[Key, dict[str, str]]]:
    with path.open() as file:
        for row in csv.DictReader(file):
            yield _key(row), row


def _key(row: dict[str, str]) -> Key:
    gpu, workload, case, arm, figure = (row[name] for name in KEYS)
    return gpu, workload, case, arm, figure


@functools.cache
def inputs_and_rows() -> tuple[Row, ...]:
    """Read every measured figure, with its prediction if there is one."""
    predictions = _read(PREDICTED) if PREDICTED.exists() else ()  # the command creates it again
    predicted = {key: float(row["value"]) for key, row in predictions}
    return tuple(
        Row(
            key,
            float(row["value"]),
            float(row["low"] or 1),
            float(row["high"] or 1),
            row["source"],
            predicted.get(key),
        )
        for key, row in _read(MEASURED)
    )


# -- rankings -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ranking:
    """Two arms whose measured figures differ by more than 15 %: the better and the worse one."""

    better: Row
    worse: Row

    @property
    def is_right(self) -> bool:
        """Say whether the predictions are in the same order."""
        a, b = self.better.predicted, self.worse.predicted
        if a is None or b is None:
            return False
        return (a < b) == (self.better.value < self.worse.value)


def rankings(figures: Sequence[Row]) -> list[Ranking]:
    """Return every pair of arms of a workload, case and figure that differ by more than 15 %."""
    pairs = []
    for i, a in enumerate(figures):
        for b in figures[i + 1 :]:
            same = (*a.key[:3], a.key[4]) == (*b.key[:3], b.key[4])
            if not same or a.key[1] == "bandwidth":
                continue
            better, worse = (a, b) if a.value < b.value else (b, a)
            if worse.value > DIFFERENT * better.value:
                pairs.append(Ranking(better, worse))
    return pairs


# -- the summary ----------------------------------------------------------------------------------


def summary() -> list[str]:
    """Return the first lines of a report: how accurate the model is on GPUs."""
    figures = rows()
    held_out = [row for row in figures if not row.is_fitted]
    pairs = rankings(figures)
    right = sum(pair.is_right for pair in pairs)
    chosen = choices().values()
    groups: dict[str, list[Row]] = {}
    for row in figures:
        groups.setdefault(row.key[1], []).append(row)
    parts = ", ".join(
        f"{name} {sum(row.is_within for row in group)}/{len(group)}"
        for name, group in groups.items()
    )
    first = (
        f"model: {_share(figures)} figures measured on an H100 or H200 are within {WITHIN:.0%}; of "
        f"those that nothing was fitted to {_share(held_out)}"
    )
    second = (
        f"model: {right} of {len(pairs)} pairs of arms that differ by {DIFFERENT - 1:.0%} are in "
        f"the measured order; the best arm is right in "
        f"{sum(choice[2] for choice in chosen)} of {len(chosen)} cases; within: {parts}"
    )
    return [first, second]


#: The figures by which a workload's best arm is chosen, and whether more is better.
CHOSEN_BY = dict.fromkeys(("W1", "W2", "W7", "W8"), (("p99", False),)) | {
    "engine": tuple((figure, True) for figure in SHARES)
}


def choices() -> dict[tuple[str, str, str, str], tuple[str, str, bool]]:
    """Return the best arm by measurement, by the model, and whether the latter is as good.

    The keys are GPU, workload, case and figure. The model's arm is as good if it is the measured
    best, or measured within 15 % of it. A case counts only if the best arm's share in time is known
    to within a quarter.
    """
    arms: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in inputs_and_rows():
        gpu, workload, case, _, figure = row.key
        if figure in dict(CHOSEN_BY.get(workload, ())) and not row.is_input:
            arms.setdefault((gpu, workload, case, figure), []).append(row)
    best_arms = {}
    for where, rows_of_case in arms.items():
        more = dict(CHOSEN_BY[where[1]])[where[3]]
        best = _best({row: row.value for row in rows_of_case}, more=more)
        if len(rows_of_case) > 1 and (best.is_known or not more):
            chosen = _best({row: row.predicted for row in rows_of_case}, more=more)
            a, b = (best, chosen) if more else (chosen, best)
            best_arms[where] = best.key[3], chosen.key[3], a.value <= DIFFERENT * b.value
    return best_arms


def _best(values: Mapping[Row, float | None], *, more: bool) -> Row:
    """Return the best row; one without a value is the worst."""

    def rank(row: Row) -> float:
        value = values[row]
        return math.inf if value is None else -value if more else value

    return min(values, key=rank)


def _share(figures: Sequence[Row]) -> str:
    within = sum(row.is_within for row in figures)
    return f"{within} of {len(figures)} ({within / max(1, len(figures)):.0%})"
