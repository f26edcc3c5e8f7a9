"""Whether the demo blocks the event loop: a 1 ms heartbeat, beside that of an idle loop.

A task sleeps for a millisecond, again and again; a *gap* is the time from one beat to the next. In
turns, the loop is idle in one window and carries the demo's load in the next (clients in a
partition of 16 SMs, matrices on the others, on a simulated H200 with the real clock), so that other
load of the machine affects both.

`python -m benchmarks.system.heartbeat`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from benchmarks.lib.timing import Comparison, Row, Samples, name_of, percentile, table
from greensched import Pool
from greensched.cli.demo import Service
from greensched.driver import simulated

#: Windows of each kind, and their seconds: some 15,000 beats a kind, so that fifteen gaps lie
#: beyond the p99.9.
WINDOWS = 12
SECONDS = 1.5
TICK_S = 1e-3
#: The bar: seconds that the p99.9 of the busy loop may be longer than that of the idle one.
MOST_S = 5e-3
PART = 0.999

#: When a window began and ended.
Window = tuple[float, float]
#: When a beat came, and the thread's seconds by then: on a core, and ready to run without a core.
Beat = tuple[float, float, float]


def measure() -> list[Row]:
    """Return rows for each kind of loop; print on standard error what the longest gaps were."""
    return [row for name, factory in _loops().items() for row in _measure(name, factory)]


def _loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    try:
        import uvloop
    except ImportError:
        return loops
    return loops | {"uvloop": uvloop.new_event_loop}


def _measure(name: str, factory: Callable[[], asyncio.AbstractEventLoop]) -> list[Row]:
    account = Path("/proc/thread-self/schedstat")
    with asyncio.Runner(loop_factory=factory) as runner, account.open("rb") as file:
        beats, busy, idle = runner.run(_windows(file))
    comparison = Comparison(f"heartbeat, {name}: demo | idle loop")
    gaps = np.diff(beats, axis=0)
    in_busy = [_meets(beats, window) for window in busy]
    comparison.ours = [gaps[chosen, 0] for chosen in in_busy]
    comparison.theirs = [gaps[_within(beats, window), 0] for window in idle]
    print(name, _reasons(gaps[np.logical_or.reduce(in_busy)]), file=sys.stderr)
    usual, rare, longest = (comparison.row(part, "ms") for part in (0.5, 0.99, 1.0))
    return [usual, rare, _judged(comparison), longest]


async def _windows(account: BinaryIO) -> tuple[Samples, list[Window], list[Window]]:
    """Return the beats, and the busy and idle windows among them."""
    driver = simulated.open("h200")
    beats: list[Beat] = []
    busy: list[Window] = []
    idle: list[Window] = []
    async with Pool(driver=driver) as pool:
        service = Service(pool, driver, seed=1)
        await service.warm_up()
        heart = asyncio.create_task(_beat(beats, account))
        for _ in range(WINDOWS):
            with _noted(idle):
                await asyncio.sleep(SECONDS)
            with _noted(busy):
                row = await service.apart(SECONDS, lambda _part, _name: None)
            assert row.verified == row.results
        heart.cancel()
    driver.close()
    return np.array(beats), busy, idle


async def _beat(beats: list[Beat], account: BinaryIO) -> None:
    while True:
        on_core, waited, _ = os.pread(account.fileno(), 64, 0).split()
        beats.append((time.perf_counter(), int(on_core) / 1e9, int(waited) / 1e9))
        await asyncio.sleep(TICK_S)  # uvloop counts milliseconds, and would spin on less


@contextmanager
def _noted(windows: list[Window]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    windows.append((start, time.perf_counter()))


def _meets(beats: Samples, window: Window) -> npt.NDArray[np.bool_]:
    """Return gaps that overlap a busy window: the load may have begun or ended in one."""
    return (beats[1:, 0] > window[0]) & (beats[:-1, 0] < window[1])


def _within(beats: Samples, window: Window) -> npt.NDArray[np.bool_]:
    """Return gaps that lie wholly in an idle window."""
    return (beats[:-1, 0] >= window[0]) & (beats[1:, 0] <= window[1])


def _judged(comparison: Comparison) -> Row:
    busy, idle = comparison.at(PART)
    low, high = comparison.interval(PART, lambda a, b: 1e3 * (a - b))
    return Row(
        f"{comparison.what}, {name_of(PART)}",
        1e3 * busy,
        1e3 * idle,
        "ms",
        comparison.interval(PART, lambda a, b: a / b),
        f"<= idle + {1e3 * MOST_S:g} ms: + {1e3 * (busy - idle):.2f} [{low:.2f} {high:.2f}]",
        busy - idle <= MOST_S,
    )


def _reasons(gaps: Samples) -> str:
    """Say what the thread did in the longest gaps: a blocked loop computes, or waits for a lock."""
    longest = gaps[gaps[:, 0] >= percentile([gaps[:, 0]], PART)]
    whole, computing, without = 1e3 * longest.mean(axis=0)
    return (
        f"under load, {len(gaps)} gaps: from the {name_of(PART)} up {whole:.2f} ms on average, "
        f"{computing:.2f} of them computing, {without:.2f} without a core, "
        f"{whole - computing - without:.2f} asleep (1 is intended) or without the GIL"
    )


if __name__ == "__main__":
    print(table(measure()))
