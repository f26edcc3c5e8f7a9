"""A holder that keeps others waiting is named, with the place where it took the lease."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest

from greensched import ALL, Pool, ServiceClass
from greensched.driver import simulated

CLASSES = [ServiceClass("decode", priority=1), ServiceClass("capped", cap=8)]


@pytest.fixture(params=["asyncio", "trio"])
def warned(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Any:
    """Runs a holder beside a request for 32 SMs, in virtual time; returns what was warned of."""
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
    """Wait for work on all SMs that are free, without a checkpoint, twice."""
    async with pool.partition((64, ALL), service="decode") as p:  # named in the warning
        await anyio.sleep(2.5)
        await p.checkpoint()
        await anyio.sleep(1.5)


async def stepping_holder(pool: Pool) -> None:
    """Come to a checkpoint often."""
    async with pool.partition((64, ALL), service="decode") as p:
        for _ in range(40):
            await anyio.sleep(0.1)
            await p.checkpoint()


async def fixed_holder(pool: Pool) -> None:
    """Hold a size that no checkpoint changes."""
    async with pool.partition(112, service="decode"):
        await anyio.sleep(4)


@pytest.mark.fault("A12")
def test_an_idle_holder_is_named_once(warned: Any) -> None:
    """The file and the line are those of its `async with`; after its checkpoint none waits."""
    (warning,) = warned(idle_holder)
    line = idle_holder.__code__.co_firstlineno + 2
    assert f"{__file__}:{line} has 124 SMs of device 0" in warning
    assert "p.checkpoint()" in warning


@pytest.mark.parametrize("holder", [stepping_holder, fixed_holder])
def test_others_are_not_named(warned: Any, holder: Any) -> None:
    """Not one that comes to checkpoints, nor one of a fixed size, which has nothing to give."""
    assert not warned(holder)


def test_a_request_that_its_own_class_keeps_waiting_blames_none(warned: Any) -> None:
    """The cap of its class is what it waits for."""
    assert not warned(idle_holder, service="capped")
