"""Faults A and B that no other module shows: cancelled kernels, circles of waiting, clocks."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest

import greensched
from greensched import ALL, LaunchConfig, Pool
from greensched.driver import simulated
from greensched.kernels import spin
from helpers.waiting import turns

ONE = LaunchConfig(grid=1, block=1)
SECOND = 10**9


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Any:
    """Run a coroutine function with a driver, in virtual time on each kind of loop."""

    def run(main: Any) -> None:
        clock = simulated.VirtualClock()
        driver = simulated.open("h20", clock=clock)
        clock.run(main, driver, backend=request.param)
        assert not driver.live()

    return run


@pytest.mark.fault("A3", "A7")
def test_a_cancelled_caller_is_answered_while_its_kernel_runs(run: Any) -> None:
    """It continues within 5 ms; its SMs are free after the kernel."""

    async def main(driver: simulated.SimulatedDriver) -> None:
        async with Pool(driver=driver, prepare=[spin]) as pool:
            began = driver.time()
            with anyio.move_on_after(1.0) as scope:
                async with pool.partition(ALL) as p:
                    await p.launch(ONE, spin, 3 * SECOND)
            assert scope.cancelled_caught
            assert 1.0 <= driver.time() - began < 1.005
            assert pool.statistics().sms_draining == pool.statistics().sms_total
            async with pool.partition(8):
                assert 3.0 <= driver.time() - began < 3.1

    run(main)


@pytest.mark.fault("A4")
def test_with_every_partition_draining_nothing_is_granted(run: Any) -> None:
    """Statistics report it, and SMs are granted when work ends."""

    async def main(driver: simulated.SimulatedDriver) -> None:
        async with Pool(driver=driver, prepare=[spin], max_waiting=1) as pool:
            total, parts = pool.statistics().sms_total, 0
            while pool.statistics().sms_free >= 8:
                with anyio.move_on_after(0.1):
                    async with pool.partition(8) as p:
                        await p.launch(ONE, spin, SECOND)
                parts += 1
            s = pool.statistics()
            assert parts >= 9
            assert s.sms_draining == total - s.sms_free
            with pytest.raises(greensched.WouldBlock):
                pool.partition_nowait(8)

            async def wait() -> None:
                async with pool.partition(8):
                    assert pool.statistics().sms_draining < s.sms_draining

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await turns()
                with pytest.raises(greensched.QueueFull):
                    async with pool.partition(8):
                        pass
            async with pool.partition(ALL):
                assert pool.statistics().sms_draining == 0

    run(main)


@pytest.mark.fault("A5")
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_a_cancellation_in_the_end_of_a_block_completes_the_release(run: Any, again: bool) -> None:
    """The task ends at once, and its SMs return."""

    async def main(driver: simulated.SimulatedDriver) -> None:
        async with Pool(driver=driver, prepare=[spin]) as pool:

            async def use() -> None:
                async with pool.partition(ALL) as p:
                    p.launch(ONE, spin, SECOND)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(use)
                await anyio.sleep(0.1)  # in the end of its block
                tasks.cancel_scope.cancel()
                if again:
                    tasks.cancel_scope.cancel()
            assert tasks.cancel_scope.cancelled_caught
            async with pool.partition(ALL):
                assert pool.statistics().leases == 1

    run(main)


@pytest.mark.fault("A15")
def test_two_tasks_that_wait_for_each_other_are_told(run: Any) -> None:
    """Each holds half and requests half: both raise at their deadlines."""

    async def main(driver: simulated.SimulatedDriver) -> None:
        told = []
        async with Pool(driver=driver) as pool:
            half = pool.statistics().sms_total // 2 // 8 * 8

            async def use() -> None:
                async with pool.partition(half):
                    await turns()
                    try:
                        async with pool.partition(half, deadline=1.0):
                            pass
                    except greensched.GreenschedError as error:
                        told.append(error)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(use)
                tasks.start_soon(use)
            assert [type(error) for error in told] == [greensched.DeadlineExceeded] * 2
            assert 1.0 <= driver.time() < 1.1
            async with pool.partitions(half, half):  # both or none
                assert pool.statistics().leases == 2

    run(main)


@pytest.mark.fault("B13")
def test_a_wall_clock_that_jumps_changes_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines use a monotonic clock, not `time.time`."""
    jumps = iter(range(10**9, 0, -(10**6)))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))

    async def main(driver: simulated.SimulatedDriver) -> None:
        async with Pool(driver=driver, prepare=[spin], hang_after=5.0) as pool:
            async with pool.partition(ALL, deadline=1.0) as p:
                began = driver.time()
                await p.launch(ONE, spin, SECOND)
                assert driver.time() - began < 1.1
                with pytest.raises(greensched.WouldDeadlock):
                    async with pool.partition(8, deadline=1.0):
                        pass

    run(main)


@pytest.mark.fault("D17")
def test_a_process_that_stood_still_loses_nothing(run: Any) -> None:
    """Finished work is done, nothing hangs, and a late request expires."""

    async def main(driver: simulated.SimulatedDriver) -> None:
        late = []
        async with Pool(driver=driver, prepare=[spin], hang_after=1.0) as pool:

            async def wait() -> None:
                with pytest.raises(greensched.DeadlineExceeded) as told:
                    async with pool.partition(ALL, deadline=2.0):
                        pass
                late.append(told.value)

            async with anyio.create_task_group() as tasks:
                async with pool.partition(ALL) as p:
                    tasks.start_soon(wait)
                    await turns()
                    job = p.launch(ONE, spin, SECOND // 2)
                    driver.clock.sleep(5 * SECOND)  # on the loop's thread: nothing else has a turn
                    await job
            assert len(late) == 1
            assert pool.is_ready
            async with pool.partition(ALL, deadline=1.0):
                pass

    run(main)
