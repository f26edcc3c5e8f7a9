"""A holder that keeps others waiting is named, with the place that took the lease."""

from __future__ import annotations

import logging
import sys
from typing import Any

import anyio
import pytest

import greensched
from greensched import ALL, LaunchConfig, Pool, ServiceClass
from greensched.driver import simulated
from greensched.kernels import spin

CLASSES = [ServiceClass("decode", priority=1), ServiceClass("capped", cap=8)]


@pytest.fixture(params=["asyncio", "trio"])
def warned(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Any:
    """Run a holder beside a request for 32 SMs in virtual time; return the warnings."""
    clock = simulated.VirtualClock()
    driver = simulated.open("h200", clock=clock)

    def run(holder: Any, service: str | None = None) -> list[str]:
        async def ask(pool: Pool) -> None:
            async with pool.partition(8 if service else 32, service=service):
                pass

        async def main() -> None:
            async with (
                Pool(driver=driver, services=CLASSES) as pool,
                anyio.create_task_group() as t,
            ):
                async with pool.partition(8, service="capped"):
                    t.start_soon(holder, pool)
                    await anyio.sleep(0.1)
                    t.start_soon(ask, pool)
                    await anyio.sleep(4)

        with caplog.at_level(logging.WARNING, "greensched"):
            clock.run(main, backend=request.param)
        driver.close()
        return [record.getMessage() for record in caplog.records]

    return run


async def idle_holder(pool: Pool) -> None:
    """Wait twice for work, on all free SMs and without a checkpoint."""
    async with pool.partition((64, ALL), service="decode") as p:  # named in the warning
        await anyio.sleep(2.5)
        await p.checkpoint()
        await anyio.sleep(1.5)


async def stepping_holder(pool: Pool) -> None:
    """Reach checkpoints often."""
    async with pool.partition((64, ALL), service="decode") as p:
        for _ in range(40):
            await anyio.sleep(0.1)
            await p.checkpoint()


async def fixed_holder(pool: Pool) -> None:
    """Hold one size, which no checkpoint changes."""
    async with pool.partition(112, service="decode"):
        await anyio.sleep(4)


@pytest.mark.fault("A12")
def test_an_idle_holder_is_named_once(warned: Any) -> None:
    """The warning has the file and line of its `async with`."""
    (warning,) = warned(idle_holder)
    line = idle_holder.__code__.co_firstlineno + 2
    assert f"{__file__}:{line} has 124 SMs of device 0" in warning
    assert "p.checkpoint()" in warning


@pytest.mark.parametrize("holder", [stepping_holder, fixed_holder])
def test_others_are_not_named(warned: Any, holder: Any) -> None:
    """Holders with checkpoints, and holders of one size, are not named."""
    assert not warned(holder)


def test_a_request_that_its_own_class_keeps_waiting_blames_none(warned: Any) -> None:
    """A request at the cap of its class blames no holder."""
    assert not warned(idle_holder, service="capped")


async def forgotten_holder(pool: Pool) -> None:
    """Hold one size for very long without any work."""
    async with pool.partition(112, service="decode"):
        await anyio.sleep(100)


@pytest.mark.fault("A12")
@pytest.mark.parametrize("notes", [False, True])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_lease_that_is_held_very_long_is_named_once(
    notes: bool, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning says where its task waits, and where it was taken if that is recorded."""
    clock = simulated.VirtualClock()
    driver = simulated.open("h200", clock=clock)

    async def main() -> None:
        hang_after = 1000 if notes else None
        async with (
            Pool(driver=driver, services=CLASSES, hang_after=hang_after) as pool,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(forgotten_holder, pool)
            await anyio.sleep(0.1)
            with anyio.move_on_after(29) as short:
                async with pool.partition(32):
                    pass
            assert short.cancelled_caught
            assert not caplog.records
            with anyio.move_on_after(60):
                async with pool.partition(32):
                    pass
            tasks.cancel_scope.cancel()

    with caplog.at_level(logging.WARNING, "greensched"):
        clock.run(main, backend=backend)
    driver.close()
    (record,) = caplog.records
    line = forgotten_holder.__code__.co_firstlineno + 2
    is_noted = notes or sys.flags.dev_mode
    taken = f"{__file__}:{line}" if is_noted else "an unknown place"
    said = record.getMessage()
    assert f"took at {taken} has held 112 SMs of device 0 for " in said
    assert f"its task waits at {__file__}:{line + 1}" in said


def test_places_are_told_where_they_are_noted(recwarn: pytest.WarningsRecorder) -> None:
    """Errors of an ended or collected partition say where it was taken."""

    async def main() -> None:
        async with Pool(driver="simulated:h20", hang_after=1000) as pool:
            line = main.__code__.co_firstlineno + 3
            async with pool.partition(8) as p:
                stream = p.stream  # so that it is not cached, and has its lease
            with pytest.raises(greensched.PartitionClosed, match=f"{__file__}:{line} is closed"):
                p.run(int)
            assert stream.is_closed is False
            held = [pool.partition_nowait(8)]
            with pytest.warns(ResourceWarning, match=f"{__file__}:{line + 5}, was never left"):
                held.clear()

    anyio.run(main)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_cancelled_holder_whose_work_goes_on_is_named(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its block has ended, but its kernel still has the SMs."""
    clock = simulated.VirtualClock()
    driver = simulated.open("h200", clock=clock)

    async def main() -> None:
        async with Pool(driver=driver) as pool:
            with anyio.move_on_after(0.5):
                async with pool.partition(112) as p:
                    await p.launch(LaunchConfig(grid=1, block=1), spin, 50_000_000_000)
            async with pool.partition(32):
                pass

    with caplog.at_level(logging.WARNING, "greensched"):
        clock.run(main, backend=backend)
    driver.close()
    (record,) = caplog.records
    said = record.getMessage()
    assert "has held 112 SMs of device 0 for " in said
    assert "its block was left 30 s ago, and its work has not ended. Leave its block" in said
