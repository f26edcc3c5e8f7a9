"""Faults C that no other module shows: every status of a lost device, its suspects, slow calls."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from typing import Any

import anyio
import numpy as np
import pytest

import greensched
from greensched import LaunchConfig, Pool, PoolState
from greensched.driver import simulated
from greensched.driver.blocking import DRIVER_CALLS, Blocking
from greensched.driver.simulated import Crash, Fail, Slow
from greensched.driver.status import CLASSES, ErrorClass
from greensched.kernels import fill, spin
from helpers.waiting import turns

ONE = LaunchConfig(grid=1, block=1)
SECOND = 10**9


def run(main: Any, faults: list[Any]) -> simulated.SimulatedDriver:
    """Run a coroutine function with a driver, in virtual time."""
    clock = simulated.VirtualClock()
    driver = simulated.open("h20", clock=clock, faults=faults)
    clock.run(main, driver)
    return driver


@pytest.mark.fault("C4", "C11")
@pytest.mark.parametrize("status", CLASSES[ErrorClass.LOST].values())
def test_every_status_of_a_lost_device_ends_it(status: str) -> None:
    """Whichever it is, the job has it as its cause, readiness is red, and no call follows."""

    async def main(driver: simulated.SimulatedDriver) -> None:
        pool = Pool(driver=driver, prepare=[spin])
        await pool.open()
        with pytest.raises(greensched.DeviceLost, match=status):
            async with pool.partition(8) as p:
                await p.launch(ONE, spin, 1000)
        assert not pool.is_ready
        calls = sum(driver.script.calls.values())
        await pool.aclose()
        assert sum(driver.script.calls.values()) == calls

    run(main, [Crash("spin", status=status)])


@pytest.mark.fault("C3")
def test_a_fault_names_those_whose_work_may_have_caused_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An upload meets the fault of another task's kernel: the log names both leases."""

    async def main(driver: simulated.SimulatedDriver) -> None:
        pool = Pool(driver=driver, prepare=[spin])
        await pool.open()

        async def crash() -> None:
            with pytest.raises(greensched.DeviceLost):
                async with pool.partition(16) as p:
                    p.launch(ONE, spin, 1000)
                    await anyio.sleep(1.0)

        async def meet() -> None:
            with pytest.raises(greensched.DeviceLost):
                async with pool.partition(8) as p:
                    await turns()
                    while True:
                        (await p.upload(np.ones(8))).close()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(crash, name="first tenant")
            tasks.start_soon(meet, name="second tenant")
        await pool.aclose()

    caplog.set_level(logging.ERROR, "greensched")
    run(main, [Crash("spin")])
    assert "first tenant (16 SMs)" in caplog.text
    assert "second tenant (8 SMs)" in caplog.text


@pytest.mark.fault("C7", "C6", "C8", "C14")
@pytest.mark.parametrize(
    "status",
    ["COOPERATIVE_LAUNCH_TOO_LARGE", "LAUNCH_OUT_OF_RESOURCES", "INVALID_CLUSTER_SIZE",
     "NO_BINARY_FOR_GPU", "UNSUPPORTED_PTX_VERSION", "INVALID_CONTEXT", "CONTEXT_IS_DESTROYED"],
)  # fmt: skip
def test_a_refused_launch_fails_its_job_alone(status: str) -> None:
    """Too many SMs, code for another driver, or a context that other code ended: one job fails."""

    async def main(driver: simulated.SimulatedDriver) -> None:
        async with Pool(driver=driver, prepare=[spin]) as pool:
            async with pool.partition(8) as p:
                driver.script.add(Fail("launch", driver.script.calls["launch"] + 1, status))
                with pytest.raises(greensched.CUDAError, match=status) as refused:
                    await p.launch(ONE, spin, 1000)
                assert not isinstance(refused.value, greensched.DeviceFault)
                await p.launch(ONE, spin, 1000)
            assert pool.state is PoolState.OPEN

    assert not run(main, []).live()


@pytest.mark.fault("C19")
def test_slow_calls_are_no_fault() -> None:
    """Under a profiler each call that may block takes a second: nothing hangs, all is right."""

    async def main(driver: simulated.SimulatedDriver) -> None:
        async with Pool(driver=driver, hang_after=0.5, prepare=[fill]) as pool:
            for call, traits in DRIVER_CALLS.items():
                if traits.blocking is not Blocking.NEVER:
                    driver.script.add(Slow(call, 1.0))
            async with pool.partition(8) as p:
                with await p.upload(np.ones(50_000, np.float32)) as b:
                    await p.launch(ONE, fill, b, 2.0, 8)
                    assert (await p.download(b))[0] == 2.0
            assert pool.is_ready

    run(main, [])


@pytest.mark.fault("C12")
def test_a_driver_call_that_never_returns_holds_up_neither_loop_nor_exit() -> None:
    """A wait for a GPU that is gone keeps a thread of the library, and nothing else."""
    program = """
        import asyncio, threading
        from greensched import LaunchConfig, Pool
        from greensched.driver import simulated
        from greensched.kernels import spin

        driver, waits = simulated.open("h20"), threading.Event()
        driver.spin_budget = 0.0  # it sleeps at once

        def never(event):
            waits.set()
            threading.Event().wait()

        driver.synchronize_event = never

        async def main():
            pool = Pool(driver=driver, prepare=[spin])
            await pool.open()
            async with pool.partition(8) as p:
                job = p.launch(LaunchConfig(grid=1, block=1), spin, 10**12)
                waiter = asyncio.ensure_future(asyncio.wait_for(job, 0.05))
                while not waits.is_set():
                    await asyncio.sleep(0.001)
                try:
                    await waiter
                except TimeoutError:
                    print("answered")
                    raise

        try:
            asyncio.run(main())
        except TimeoutError:
            print("ends")
        """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "answered\nends\n", "")
