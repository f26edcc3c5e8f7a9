"""Plot what was measured: the ratio of ours to the reference, with its interval and its bar.

`python -m benchmarks host --plot FILE` and `python -m benchmarks gpu --plot FILE` draw their
figures. `python -m benchmarks.lib.plot FOUND.json FILE` draws what either wrote with `--json`:
a machine with a GPU may be without matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.timing import Row
from greensched.capacity.plot import check, pyplot, write
from greensched.errors import InvalidRequest, MissingPackage

#: Inches of a row, and of the space above and below the rows of a part.
ROW, AROUND = 0.22, 1.1
WIDTH = 11.0
COLOURS = {None: "grey", True: "tab:green", False: "tab:red"}
#: A bar of the table: a number, and whether it is a ratio, a time, or a difference of times.
_BAR = re.compile(r"<= (?P<more>\+ )?(?P<number>[\d.e+-]+) (?P<unit>x|s|ms|us)(?: \(was .*\))?$")


def save(found: Mapping[str, Sequence[Row]], machine: str, path: Path) -> None:
    """Draw the parts one below the other, each row with a ratio, on a logarithmic scale.

    A dot is the ratio, the line through it its interval, a stroke the bar. Green rows passed, red
    rows failed, grey rows have no bar.

    Args:
        found: the rows of each part.
        machine: what was measured on.
        path: its suffix is the format.

    Raises:
        MissingPackage: matplotlib is not installed; says what to install.
        InvalidRequest: the file cannot be written.
    """
    parts = {name: kept for name, rows in found.items() if (kept := drawable(rows))}
    heights = [ROW * len(rows) + AROUND for rows in parts.values()]
    figure, axes = pyplot().subplots(
        len(parts), figsize=(WIDTH, sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, (name, rows) in zip(axes[:, 0], parts.items(), strict=True):
        _draw(axis, name, rows)
    figure.suptitle(machine, fontsize="small")
    write(figure, path)


def picture(name: str) -> Path:
    """Parse a program's option; refuse what cannot be drawn before anything is measured."""
    try:
        check(Path(name))
    except (InvalidRequest, MissingPackage) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(name)


def drawable(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that have a place on a logarithmic scale: both figures are positive."""
    return [row for row in rows if row.ours > 0 and row.theirs > 0]


def most(row: Row) -> float | None:
    """Return the bar as a ratio; None: the row has none, or one of another kind."""
    bar = _BAR.search(row.bar)
    if bar is None:
        return None
    number = float(bar["number"])
    if bar["unit"] == "x":
        return number
    if bar["unit"] != row.unit:
        return None
    return (number + row.theirs * (bar["more"] is not None)) / row.theirs


def _draw(axis: Any, name: str, rows: list[Row]) -> None:
    for place, row in enumerate(rows):
        colour = COLOURS[row.passed]
        axis.plot(row.ratio, place, "o", color=colour, markersize=4)
        if row.interval is not None:
            axis.plot(row.interval, (place, place), color=colour, linewidth=1.5)
        if (bar := most(row)) is not None:
            axis.plot(bar, place, "|", color="black", markersize=10)
    axis.axvline(1.0, color="grey", linewidth=0.5)
    axis.set_xscale("log")
    axis.set_yticks(range(len(rows)), [row.what for row in rows], fontsize="x-small")
    axis.set_ylim(len(rows) - 0.5, -0.5)  # the first on top
    axis.set_title(name, fontsize="medium")
    axis.set_xlabel("ours / reference", fontsize="small")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lib.plot", description="Plot the figures of a suite."
    )
    parser.add_argument("found", type=Path, help="a file written with --json")
    parser.add_argument("file", type=picture, help="the picture")
    options = parser.parse_args()
    found = json.loads(options.found.read_text())
    machine = found.pop("machine", "")
    rows = {
        name: [Row.from_dict(row) for row in part]
        for name, part in found.items()
        if isinstance(part, list)
    }
    save(rows, machine, options.file)


if __name__ == "__main__":
    main()
