"""Pools that are collected without `aclose` release their devices."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import anyio
import pytest

import greensched
from greensched import LaunchConfig, Pool
from greensched.driver import simulated
from greensched.kernels import spin

ONE = LaunchConfig(grid=1, block=1)


def run(clock: str, main: Any) -> simulated.SimulatedDriver:
    virtual = simulated.VirtualClock(seed=1) if clock == "virtual" else None
    driver = simulated.open("h20", clock=virtual)
    start = partial(main, driver)
    if virtual is None:
        anyio.run(start)
    else:
        virtual.run(start)
    return driver


async def forget(driver: simulated.SimulatedDriver) -> None:
    """Use a pool and drop it."""
    pool = Pool(driver=driver)
    await pool.open()
    async with pool.partition(8) as p:
        await p.launch(ONE, spin, 1000)


@pytest.mark.fault("I7")
@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_a_collected_pool_gives_its_device_back(clock: str) -> None:
    """The next pool opens on the device at once, and nothing of the first is left."""

    async def main(driver: simulated.SimulatedDriver) -> None:
        for _ in range(3):
            with pytest.warns(ResourceWarning, match="never closed"):
                await forget(driver)
                gc.collect()
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            await p.launch(ONE, spin, 1000)

    assert not run(clock, main).live()


@pytest.mark.fault("I7")
def test_a_lease_outlives_its_pool() -> None:
    """A lease in use keeps its dropped pool and its device."""

    async def main(driver: simulated.SimulatedDriver) -> None:
        pool = Pool(driver=driver)
        await pool.open()
        p = await pool.partition(8).__aenter__()
        with pytest.warns(ResourceWarning, match="never closed"):
            del pool
            gc.collect()
        await p.launch(ONE, spin, 1000)
        with pytest.raises(greensched.DeviceTaken):
            await Pool(driver=driver).open()
        await p.__aexit__(None, None, None)
        await p._lifecycle.close(1.0)

    assert not run("real", main).live()
