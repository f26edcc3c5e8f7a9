"""Objects that are kept with an executor whose end is not that of an idle pool."""

from __future__ import annotations

import threading

import anyio
import pytest

import greensched
from greensched import LaunchConfig, Pool
from greensched.driver import simulated
from greensched.integrations.testing import SimPool
from greensched.kernels import spin

CONFIG = LaunchConfig(grid=16, block=32)


class Thing:
    """An object that counts its `close` calls."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("fault", [simulated.Crash("spin"), simulated.Hang("spin")])
async def test_what_may_not_be_touched_is_not_closed(
    sim_pool: SimPool, fault: simulated.Fault
) -> None:
    """After a fault, or beside a hung kernel, no object that uses CUDA is closed."""
    thing = Thing()
    pool = sim_pool(faults=[fault])
    await pool.open()
    with anyio.move_on_after(1):
        with pytest.raises(greensched.DeviceLost):
            async with pool.partition(8) as p:
                await p.local(lambda: thing)
                await p.launch(CONFIG, spin, 1000)
    assert (await pool.aclose(grace=1)).abandoned
    assert thing.closed == 0


def test_unused_locals_cost_no_thread() -> None:
    """Closing a pool starts no thread for executors without objects."""
    started: list[str] = []
    driver = simulated.open()
    start = driver.start_thread

    def noted(target: object, name: str) -> threading.Thread:
        started.append(name)
        return start(target, name)  # type: ignore[arg-type]  # handed on

    driver.start_thread = noted  # type: ignore[method-assign]  # of this one

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            await p.local(Thing)

    anyio.run(main)
    assert sum(name.endswith("worker") for name in started) == 1
