"""Values kept with an executor that ends otherwise than with an idle pool."""

from __future__ import annotations

import threading

import anyio
import pytest

import greensched
from greensched import LaunchConfig, Pool
from greensched.driver import simulated
from greensched.integrations.testing import SimPool
from greensched.kernels import spin
from helpers.small_executors import keeping, one_cell_executors

CONFIG = LaunchConfig(grid=16, block=32)


class Thing:
    """Counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


async def test_an_evicted_executor_closes_it(
    sim_pool: SimPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed with an executor that is evicted for another, while the pool goes on."""
    one_cell_executors(monkeypatch)
    things = [Thing(), Thing()]

    def first() -> Thing:
        return things[0]

    def second() -> Thing:
        return things[1]

    async with keeping(sim_pool(), 1) as pool:
        async with pool.partition(24) as p:
            await p.local(first)
        async with pool.partition(8) as p:
            await p.local(second)
        for sms in (40, 48, 56):  # each a new executor, for which an old one is evicted
            async with pool.partition(sms):
                pass
        await anyio.sleep(1)  # the builder ends it behind the grant
        assert [thing.closed for thing in things] == [1, 0]
    assert [thing.closed for thing in things] == [1, 1]


@pytest.mark.parametrize("fault", [simulated.Crash("spin"), simulated.Hang("spin")])
async def test_what_may_not_be_touched_is_not_closed(
    sim_pool: SimPool, fault: simulated.Fault
) -> None:
    """After a device fault, and beside a kernel that hangs, nothing that uses CUDA is called."""
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
    """Closing a pool starts no thread for executors that keep nothing."""
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
