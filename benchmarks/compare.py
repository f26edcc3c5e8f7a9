"""Compare two runs of a suite, row by row: what each operation took before, and takes now.

`python -m benchmarks.compare BEFORE.json AFTER.json`, each written with `--json` by
`python -m benchmarks`, or by the programs that this repository had before (`benchmarks` and
`benchmarks.gpu`, whose rows had other names: `RENAMED`). Several runs of each side, taken in turns
on one machine, make the comparison sharper:
`python -m benchmarks.compare --before A1.json A2.json --after B1.json B2.json`.

The figures are those of greensched on both sides, in the row's own unit, and not the ratios to the
references: these were made tighter in between. `after / before` has an interval: of the runs'
means with several runs; with one run of each, from the intervals that the rows themselves have, the
noise of the reference included. Rows that are more than 5 % slower are marked `SLOWER`, or
`slower?` where the interval includes 1. Exit code 1 if a row is `SLOWER`.

What is compared are durations and memory: rows without a reference or with nothing to compare are
left out, and the maxima too, which are single samples.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.timing import Row, columns
from benchmarks.suites import load

#: Slower by more than this is marked.
MOST = 1.05
#: Names of rows as they were, and as they are now.
RENAMED = {
    r"eight \w+ at once \|": "eight partitions at once |",
    r"all \w+ in turn \| one\b[\w ]*": "all partitions in turn | one",
    r"lease of a class with a \w+": "lease of a class with a reserve",
    r"a job, 64 in flight \| raw launches": "a job, 64 in flight | raw launch + mark",
    r"a client hangs up: SMs free, after its kernel's end": "client disconnects: SMs free after "
    "its kernel's end",
    r"a curve learns, and is asked": "a latency curve records and predicts",
    r"cancelled, longest call \| bar": "cancelled, longest call | allowed",
    r" \(\d+ of these\)": "",
}


@dataclass(frozen=True, slots=True)
class Change:
    """A row's figure before and after, and the interval of their ratio."""

    what: str
    unit: str
    before: float
    after: float
    interval: tuple[float, float]
    references: tuple[float, float]

    @property
    def ratio(self) -> float:
        """The time after, over the time before."""
        return self.after / self.before

    @property
    def verdict(self) -> str:
        """`SLOWER`, `slower?` where that may be chance, or nothing."""
        if self.ratio <= MOST:
            return ""
        return "SLOWER" if self.interval[0] > 1 else "slower?"


def name_now(what: str) -> str:
    """Return a row's name as it is now, without what changes from run to run."""
    for old, new in RENAMED.items():
        what = re.sub(old, new, what)
    return what


def compare(before: Sequence[Sequence[Row]], after: Sequence[Sequence[Row]]) -> list[Change]:
    """Return the change of each row that every run of both sides has.

    Args:
        before: the rows of each run before.
        after: the rows of each run after.
    """
    tables = [
        [{name_now(row.what): row for row in rows} for rows in runs] for runs in (before, after)
    ]
    names = [name for name in tables[1][0] if all(name in one for runs in tables for one in runs)]
    return [
        change
        for name in names
        if (change := _change(name, *([one[name] for one in runs] for runs in tables))) is not None
    ]


def _change(what: str, before: Sequence[Row], after: Sequence[Row]) -> Change | None:
    rows = [*before, *after]
    if any(row.ours <= 0 or row.unit != rows[0].unit or not row.unit for row in rows):
        return None
    if what.endswith(", max") or "max of" in what:
        return None
    logs = [[math.log(row.ours) for row in side] for side in (before, after)]
    centre = statistics.mean(logs[1]) - statistics.mean(logs[0])
    width = math.hypot(_width(before, logs[0]), _width(after, logs[1]))
    return Change(
        what,
        rows[0].unit,
        math.exp(statistics.mean(logs[0])),
        math.exp(statistics.mean(logs[1])),
        (math.exp(centre - width), math.exp(centre + width)),
        (
            statistics.mean(row.ratio for row in before) if before[0].theirs > 0 else math.nan,
            statistics.mean(row.ratio for row in after) if after[0].theirs > 0 else math.nan,
        ),
    )


def _width(rows: Sequence[Row], logs: Sequence[float]) -> float:
    """Return half the width of a 95 % interval of a side's mean, in logarithms."""
    if len(rows) > 1:
        # Student's t for two to five runs; two standard errors for more.
        t = {2: 12.7, 3: 4.3, 4: 3.2, 5: 2.8}.get(len(rows), 2.0)
        return min(t * statistics.stdev(logs) / math.sqrt(len(rows)), _own_width(rows))
    return _own_width(rows)


def _own_width(rows: Sequence[Row]) -> float:
    """Return it from the rows' own intervals; 0 where a row has none."""
    widths = [
        (math.log(row.interval[1]) - math.log(row.interval[0])) / 2
        for row in rows
        if row.interval is not None and row.interval[0] > 0
    ]
    return max(widths, default=0.0)


def table(changes: Sequence[Change]) -> str:
    """Return the changes, aligned, with the median row last."""
    lines = [("row", "before", "after", "after / before [95 %]", "x reference", "")]
    for each in changes:
        was, now = each.references
        low, high = each.interval
        lines.append(
            (
                each.what,
                f"{each.before:.3g} {each.unit}",
                f"{each.after:.3g} {each.unit}",
                f"{each.ratio:.3f} [{low:.3f} {high:.3f}]",
                f"{was:.3g} -> {now:.3g}",
                each.verdict,
            )
        )
    slower = [each for each in changes if each.verdict]
    median = statistics.median(each.ratio for each in changes) if changes else math.nan
    return (
        f"{columns(lines)}\n\n{len(changes)} rows; the median row: {median:.3f}; more than "
        f"{100 * (MOST - 1):.0f} % slower: {len(slower)}, of which "
        f"{sum(each.verdict == 'SLOWER' for each in slower)} beyond chance"
    )


def _rows(file: Path) -> list[Row]:
    return [row for part in load(file).values() for row in part]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description="Compare runs of a suite before and after a change, row by row.",
    )
    parser.add_argument("runs", type=Path, nargs="*", help="BEFORE.json AFTER.json")
    parser.add_argument("--before", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--after", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the changes to a file")
    options = parser.parse_args()
    if options.runs:
        if len(options.runs) != 2 or options.before or options.after:
            parser.error("give two files, or --before and --after")
        options.before, options.after = options.runs[:1], options.runs[1:]
    if not (options.before and options.after):
        parser.error("give two files, or --before and --after")
    changes = compare(*([_rows(file) for file in side] for side in (options.before, options.after)))
    if not changes:
        parser.error("the files have no row in common")
    print(table(changes))
    if options.json is not None:
        found = [
            {"what": c.what, "unit": c.unit, "before": c.before, "after": c.after, "ratio": c.ratio,
             "interval": c.interval, "verdict": c.verdict}
            for c in changes
        ]  # fmt: skip
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(each.verdict == "SLOWER" for each in changes))


if __name__ == "__main__":
    raise SystemExit(main())
