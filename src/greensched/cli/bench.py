"""`greensched bench`: the host's time for each operation, beside comparable ones of asyncio."""

from __future__ import annotations

import asyncio
from typing import Any

from greensched.cli import measure
from greensched.cli.terminal import Progress
from greensched.driver.interface import Driver
from greensched.kernels import spin
from greensched.pool import Pool

#: A description of each operation of `measure.host_costs`, and the asyncio baseline for it.
OPERATIONS = {
    "submission": ("submit a bound launch", None),
    "wake": ("a kernel's end to the task that waits", None),
    "hop": ("await p.run(f)", "to_thread"),
    "lease": ("acquire and return a lease", "semaphore"),
    "checkpoint": ("await p.checkpoint()", None),
}
BASELINES = {"to_thread": "asyncio.to_thread(f)", "semaphore": "async with asyncio.Semaphore"}


async def bench(driver: Driver, progress: Progress) -> dict[str, Any]:
    """Time each operation, and asyncio's baselines in the same loop, in microseconds."""
    async with Pool([0], driver=driver, prepare=[spin]) as pool:
        costs = await measure.host_costs(pool, driver, progress)
        gate = asyncio.Semaphore()

        async def pass_gate() -> None:
            async with gate:
                pass

        threads = await measure.times(driver.time, lambda: asyncio.to_thread(measure.nothing))
        gates = await measure.times(driver.time, pass_gate)
        return {
            "source": measure.source_of(pool.devices[0].name),
            "operations": costs,
            "baselines": {
                "to_thread": measure.percentiles(threads),
                "semaphore": measure.percentiles(gates),
            },
        }


def rows(times: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return table rows: an operation, its times, and the median of its baseline."""
    table = []
    for name, (what, beside) in OPERATIONS.items():
        took = times["operations"][name]
        row: tuple[object, ...] = (what, took["p50_us"], took["p99_us"])
        if beside is None:
            table.append((*row, None, None, None))
        else:
            other = times["baselines"][beside]["p50_us"]
            ratio = f"{took['p50_us'] / other:.2f}" if other else None
            table.append((*row, BASELINES[beside], other, ratio))
    return table
