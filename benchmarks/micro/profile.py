"""Where the microseconds of the hot path go: each operation split into stages.

`python -m benchmarks.micro.profile [--driver NAME] [--json] [--plot FILE]`; docs/profile.md has a
run of it, and how to repeat that on the stand-in.

A profiler would add its own cost to each call, most to the shortest. So nothing is instrumented:
each operation is timed as a row of *prefixes*, which do ever more of it by the library's own
functions, in the path's own order, and the last of which is the public call itself. A stage is what
a prefix takes more than the one before. All prefixes of an operation are measured in turns, by one
stopwatch around an awaited function; what that takes around an empty one is taken off. What is left
to do behind a prefix (giving back a lease, say) is done beside the stopwatch.

So the stages add up to the operation, whatever they are called. What is not exact: a function that
is called from here has another caller than on the path, some tens of nanoseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.lib import timing as measure
from benchmarks.lib.plot import picture
from benchmarks.micro.stages import Operation, Prefix, nothing, operations
from greensched import driver as drivers
from greensched.capacity.plot import pyplot, write
from greensched.driver.interface import Driver


@dataclass(frozen=True, slots=True)
class Stage:
    """Microseconds of a stage, and a 95 % bootstrap interval of them, over rounds."""

    name: str
    us: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Split:
    """An operation in stages, which add up to it; `by_hand_us` is all of what one writes."""

    name: str
    stages: list[Stage]
    by_hand: str
    by_hand_us: float

    @property
    def us(self) -> float:
        """All of it."""
        return sum(stage.us for stage in self.stages)


async def split(operation: Operation) -> Split:
    """Times all prefixes in turns, and what one writes by hand with them."""
    ways = [Prefix("", nothing), *operation.prefixes, operation.by_hand]
    rounds = []
    for number in range(measure.ROUNDS + 1):
        turn = list(enumerate(ways))[:: 1 if number % 2 else -1]
        rounds.append({place: await _median(way) for place, way in turn})
    # In microseconds, by round and by way; the first round is thrown away.
    found = np.array([[one[place] for place in range(len(ways))] for one in rounds[1:]]) * 1e6
    stages = _steps(found)
    rng = np.random.default_rng(1)
    drawn = rng.integers(len(found), size=(measure.RESAMPLINGS, len(found)))
    low, high = np.quantile([_steps(found[rows]) for rows in drawn], (0.025, 0.975), axis=0)
    return Split(
        operation.name,
        [
            Stage(prefix.stage, float(stages[i]), (float(low[i]), float(high[i])))
            for i, prefix in enumerate(operation.prefixes)
        ],
        operation.by_hand.stage,
        float(np.median(found[:, -1]) - np.median(found[:, 0])),
    )


def _steps(found: Any) -> Any:
    """What each prefix takes more than the one before it, of the medians over rounds."""
    return np.diff(np.median(found[:, :-1], axis=0))


async def _median(way: Prefix) -> float:
    took = []
    for _ in range(measure.PER_ROUND):
        start = perf_counter()
        given = await way.do()
        took.append(perf_counter() - start)
        await way.finish(given)
    return float(np.median(took))


async def measure_all(driver: Driver) -> list[Split]:
    """Each operation, split."""
    async with operations(driver) as found:
        return [await split(operation) for operation in found]


# -- showing ----------------------------------------------------------------------------------


def table(splits: Sequence[Split]) -> str:
    """As a page has it: stages in microseconds with intervals, and their part of the whole."""
    lines = ["| stage | us | 95 % | part |", "|---|---|---|---|"]
    for one in splits:
        lines.append(f"| **{one.name}** | **{one.us:.2f}** | | |")
        for stage in one.stages:
            low, high = stage.interval
            part = 100 * stage.us / one.us
            lines.append(
                f"| {stage.name} | {stage.us:.2f} | {low:.2f} to {high:.2f} | {part:.0f} % |"
            )
        lines.append(f"| *by hand: {one.by_hand}* | {one.by_hand_us:.2f} | | |")
    return "\n".join(lines)


def save(splits: Sequence[Split], machine: str, path: Path) -> None:
    """Draws a bar for each operation, its stages one behind another; a line is what is by hand.

    Raises:
        MissingPackage: matplotlib is not installed; says what to install.
        InvalidRequest: the file cannot be written.
    """
    figure, axes = pyplot().subplots(
        len(splits), figsize=(10, 1.5 * len(splits) + 0.5), squeeze=False
    )
    for axis, one in zip(axes[:, 0], splits, strict=True):
        begin = 0.0
        for stage in one.stages:
            label = f"{stage.name}: {stage.us:.2f}"
            axis.barh(0, max(stage.us, 0.0), left=begin, label=label)
            begin += stage.us
        axis.axvline(one.by_hand_us, color="black", label=f"{one.by_hand}: {one.by_hand_us:.2f}")
        axis.set_yticks([])
        axis.set_title(f"{one.name}: {one.us:.2f} us", fontsize="small", loc="left")
        axis.tick_params(labelsize="x-small")
        axis.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle(machine, fontsize="x-small")
    write(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.profile", description=__doc__)
    parser.add_argument("--driver", default="cuda", help="cuda, or a simulated one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw it there, too")
    options = parser.parse_args()
    bystanders = measure.Bystanders()
    found = asyncio.run(measure_all(drivers.open(options.driver)))
    machine = str(bystanders)
    if options.json:
        print(json.dumps({"machine": machine, "operations": [asdict(one) for one in found]}))
    else:
        print(f"{machine}\n\n{table(found)}")
    if options.plot is not None:
        save(found, machine, options.plot)


if __name__ == "__main__":
    main()
