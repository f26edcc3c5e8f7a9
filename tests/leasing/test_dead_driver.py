"""A driver that fails while a loop polls: a lost device is reported, a passing error is not."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

import greensched
from greensched import LaunchConfig, Pool, PoolState
from greensched.driver import simulated
from greensched.driver.blocking import DRIVER_CALLS
from greensched.driver.simulated import Fail, Hang
from greensched.kernels import saxpy, spin
from greensched.typing import Feature
from helpers.devices import DEVICE
from helpers.waiting import turns, until

ONE = LaunchConfig(grid=1, block=1)
BACKENDS = [("real", "asyncio"), ("real", "trio"), ("virtual", "asyncio"), ("virtual", "trio")]
#: The driver calls of a poller.
POLLED = ["exchange_capture_mode", "is_capturing", "query_event", "record_event"]
WITHOUT = {"word": (), "event": (Feature.WRITE_VALUE,)}


def fail_from_now_on(driver: simulated.SimulatedDriver, call: str, status: str) -> None:
    driver.script.add(Fail(call, driver.script.calls[call] + 1, status, last=10**9))


async def beat() -> None:
    while True:  # noqa: ASYNC110  time is to pass
        await anyio.sleep(0.1)


def run(clock: str, loop: str, main: Any, **options: Any) -> None:
    """Run `main(driver)` on a loop, with a clock."""
    virtual = simulated.VirtualClock(seed=1) if clock == "virtual" else None
    driver = simulated.open([DEVICE], clock=virtual, **options)
    driver.spin_budget = 0.0  # it sleeps at once, which is where it asks the driver
    start = partial(main, driver)
    if virtual is not None:
        virtual.run(start, backend=loop)
    else:
        anyio.run(start, backend=loop)


@pytest.mark.fault("I1")
@pytest.mark.parametrize("completion", WITHOUT)
@pytest.mark.parametrize("status", ["DEINITIALIZED", "CONTEXT_IS_DESTROYED", "ILLEGAL_ADDRESS"])
@pytest.mark.parametrize(("clock", "loop"), BACKENDS)
def test_a_dead_driver_is_told_beside_a_hung_kernel(
    clock: str, loop: str, status: str, completion: str
) -> None:
    """If every call fails, a hung kernel's waiter gets DeviceLost, and the pool is not ready."""

    async def main(driver: simulated.SimulatedDriver) -> None:
        pool = Pool(driver=driver)
        await pool.open()
        with pytest.raises(greensched.DeviceLost) as lost:
            async with pool.partition(8) as p:
                await p.prepare(ONE, spin)
                job = p.launch(ONE, spin, 1000)
                await turns()
                for call in DRIVER_CALLS:
                    fail_from_now_on(driver, call, status)
                began = driver.time()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(beat)  # virtual time only passes to what is due
                    with anyio.fail_after(5), pytest.raises(greensched.DeviceLost):
                        await job
                    tasks.cancel_scope.cancel()
                if clock == "virtual":
                    assert driver.time() - began < 1.0
                calls = sum(driver.script.calls.values())
                assert pool.state is PoolState.POISONED
        assert status in str(lost.value)
        await pool.aclose()
        if clock == "virtual":  # else a thread may be about to wait for the work
            assert sum(driver.script.calls.values()) == calls  # no CUDA call after it

    run(clock, loop, main, faults=[Hang("spin")], without=WITHOUT[completion])


@pytest.mark.fault("I1", "D11")
@pytest.mark.parametrize("status", ["DEINITIALIZED", "ILLEGAL_ADDRESS"])
@pytest.mark.parametrize(
    ("clock", "loop", "call"),
    [
        (*backend, call)
        for backend in BACKENDS
        for call in POLLED
        if (backend[0], call) != ("virtual", "record_event")  # there a poller records none
    ],
)
def test_whichever_call_of_a_poller_fails_tells_a_lost_device(
    clock: str, loop: str, call: str, status: str
) -> None:
    """A failing call of a poller is reported as the loss of the device, though nothing waits.

    Were it raised instead, the timer of the loop would end: on trio the whole program would.
    """

    async def main(driver: simulated.SimulatedDriver) -> None:
        pool = Pool(driver=driver)
        await pool.open()
        with pytest.raises(greensched.DeviceLost):
            async with pool.partition(8) as p:
                await p.prepare(ONE, spin)
                fail_from_now_on(driver, call, status)
                p.launch(ONE, spin, 1000)
                with anyio.fail_after(5):
                    await until(lambda: not pool.is_ready)
        await pool.aclose()

    run(clock, loop, main, faults=[Hang("spin")])


@pytest.mark.fault("I1")
@pytest.mark.parametrize("status", ["OUT_OF_MEMORY", "INVALID_VALUE", "STREAM_CAPTURE_ISOLATION"])
@pytest.mark.parametrize("call", POLLED)
@pytest.mark.parametrize(("clock", "loop"), BACKENDS)
def test_a_passing_error_of_a_poller_loses_no_device(
    clock: str, loop: str, call: str, status: str
) -> None:
    """OUT_OF_MEMORY of a query loses no device; this job and the next complete."""

    async def main(driver: simulated.SimulatedDriver) -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            x = await p.upload(np.ones(8, np.float32))
            await p.prepare(ONE, saxpy)
            await p.prepare(ONE, spin)
            for _ in range(3):
                job = p.launch(ONE, spin, 5_000_000)
                await turns()
                driver.script.add(Fail(call, driver.script.calls[call] + 1, status))
                await job
                await p.launch(ONE, saxpy, 1.0, x, x, 8)
            assert pool.is_ready
            x.close()

    run(clock, loop, main)
