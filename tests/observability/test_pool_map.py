"""The map of SMs by time that asyncio's debug mode logs with an error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

import pytest

from greensched import DeviceLost, LaunchConfig, Pool
from greensched.driver import simulated
from greensched.driver.simulated import Crash, Fault, SimulatedDriver
from greensched.kernels import spin

CONFIG = LaunchConfig(grid=1, block=32)


async def fails(error: BaseException | None) -> None:
    """Leave a pool's block with an error, while another task holds SMs."""
    this = asyncio.current_task()
    assert this is not None
    this.set_name("failing")
    async with Pool(driver="simulated:h200") as pool:

        async def hold() -> None:
            async with pool.partition(64) as p:
                held.set()
                await p.launch(CONFIG, spin, 1_000_000)
                await asyncio.sleep(3600)

        held = asyncio.Event()
        holder = asyncio.create_task(hold(), name="holder")
        await held.wait()
        try:
            async with pool.partition(16) as p:
                await p.launch(CONFIG, spin, 1_000_000)
                if error is not None:
                    raise error
        finally:
            holder.cancel()


def test_the_debug_mode_of_asyncio_logs_the_map_of_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error that leaves the pool's block is logged with the SMs of each task, by time."""
    with pytest.raises(LookupError):
        asyncio.run(fails(LookupError()), debug=True)
    (record,) = [each for each in caplog.records if "an error leaves the block" in each.message]
    assert record.levelno == logging.ERROR
    title, *rows = record.message.splitlines()[1:]
    assert title.startswith("SMs by time, ")
    assert "A failing, B holder" in title
    assert {row.partition("|")[0].split()[-1] for row in rows} == {"0-63", "64-79", "80-131"}


@pytest.mark.parametrize(("error", "debug"), [(LookupError(), False), (None, True)])
def test_nothing_is_logged_without_an_error_or_the_debug_mode(
    error: BaseException | None, debug: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A block that ends as usual, or with an error outside the debug mode, is not told."""
    with contextlib.suppress(LookupError):
        asyncio.run(fails(error), debug=debug)
    assert not [each for each in caplog.records if each.name == "greensched"]


def test_a_cancelled_block_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """A cancellation leaves the block without a map."""
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(fails(asyncio.CancelledError()), debug=True)
    assert "SMs by time" not in caplog.text


def in_virtual_time(main: Callable[[SimulatedDriver], Awaitable[None]], *faults: Fault) -> None:
    """Run a function in asyncio's debug mode."""
    clock = simulated.VirtualClock()
    driver = simulated.open("h200", clock=clock, faults=faults)

    async def debugged() -> None:
        asyncio.get_running_loop().set_debug(True)
        await main(driver)

    clock.run(debugged)


def test_the_map_of_a_lost_device_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """An error that ended the pool is logged with the map, too."""

    async def main(driver: SimulatedDriver) -> None:
        async with Pool(driver=driver) as pool, pool.partition(16) as p:
            await p.launch(CONFIG, spin, 1_000_000)

    with pytest.raises(DeviceLost):
        in_virtual_time(main, Crash("spin"))
    (record,) = [each for each in caplog.records if "SMs by time" in each.message]
    assert record.levelno == logging.ERROR


def test_the_map_of_a_lease_that_outlasts_the_pool_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pool that closes over a lease logs which task holds which SMs."""

    async def main(driver: SimulatedDriver) -> None:
        async def leak() -> None:
            async with pool.partition(16):
                held.set()
                await asyncio.sleep(3600)

        held = asyncio.Event()
        async with Pool(driver=driver) as pool:
            leaking = asyncio.create_task(leak(), name="leaking")
            await held.wait()
        leaking.cancel()
        await asyncio.gather(leaking, return_exceptions=True)

    in_virtual_time(main)
    (record,) = [each for each in caplog.records if "SMs by time" in each.message]
    assert record.levelno == logging.WARNING
    assert "A leaking" in record.message
