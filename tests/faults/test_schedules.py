"""Random programs in random schedules: a sample, its repetition, and what they have found."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest

import greensched
from faults import schedules
from greensched import LaunchConfig, Pool
from greensched.driver import simulated
from greensched.driver.simulated import Crash, Fail, Slow
from greensched.execution.threads import WorkerThread
from greensched.kernels import fill, spin

ONE = LaunchConfig(grid=1, block=1)
#: Seeds of the sample: some seconds of the processor.
SAMPLE = range(1000, 1012)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Programs are meant to fail: what is logged of it is not shown."""
    with caplog.at_level(100, "greensched"):
        yield


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_program_breaks_no_rule(seed: int) -> None:
    """What must hold after each step and in the end does, whatever runs next."""
    assert schedules.run(seed).wrong == []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_seed_is_one_history(backend: str) -> None:
    """The same steps, errors, and kernels on the same SMs at the same times, twice."""
    seed = next(n for n in range(100) if schedules.draw(n).backend == backend)
    first, second = schedules.run(seed), schedules.run(seed)
    assert first.steps == second.steps > 0
    assert first.history == second.history


def test_a_broken_rule_is_found() -> None:
    """A cell that is granted and free, a job told twice, and an error without a cause are."""
    program = schedules.draw(0)
    checks = schedules.Checks(program)

    async def main() -> None:
        async with Pool(driver=checks.driver) as checks.pool:
            checks.before_step()
            async with checks.pool.partition(8):
                checks.before_step()
                assert checks.wrong == []
                allocator = checks.pool._manager.scheduler.allocator
                allocator.free_masks[0] |= 1 << 30
                checks.before_step()
                allocator.free_masks[0] &= ~(1 << 30)

    checks.clock = schedules.AnyOrderClock(0, checks.before_step)
    checks.driver = simulated.open("h20", clock=checks.clock)
    checks.clock.run(main)
    checks.raised("launches", KeyError("handle"))
    checks.raised("launches", greensched.OutOfMemory("allocate", 1, 0, 0))
    checks.raised("nowait", greensched.WouldBlock("busy"), greensched.WouldBlock)
    checks.told = {"spin": 2, "fill": 1}
    checks.at_end(None)
    found = [text.split(": ", 1)[1].split("\n", 1)[0] for text in checks.wrong]
    assert [text.split(" ")[0] for text in found] == ["of", "launches", "launches", "spin"]


@pytest.mark.fault("S1")
def test_a_query_that_fails_once_ends_no_pool() -> None:
    """The query of a call's stream behind the call meets OUT_OF_MEMORY: the call is done."""
    clock = simulated.VirtualClock()
    driver = simulated.open("h20", clock=clock)

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            nth = driver.script.calls["query_stream"] + 1
            driver.script.add(Fail("query_stream", nth, "OUT_OF_MEMORY"))
            assert await p.run(sum, (1, 2)) == 3
            assert pool.is_ready
            assert driver.script.calls["query_stream"] >= nth

    clock.run(main)


@pytest.mark.fault("S2")
def test_what_waits_for_a_thread_is_not_submitted_behind_a_fault() -> None:
    """A thread is in a slow call when a device of two is lost: it submits nothing of its queue."""
    clock = simulated.VirtualClock()
    faults = [Crash("spin"), Slow("load_kernel", 0.0005)]
    driver = simulated.open("h100x2", clock=clock, faults=faults)

    async def main() -> None:
        pool = Pool(driver=driver, devices=[0, 1], prepare=[spin])
        await pool.open()
        with pytest.raises(greensched.DeviceLost):
            async with pool.partition(8, device=1) as p:
                x = await p.empty(8)
                jobs = [p.launch(ONE, fill, x, 1.0, 8) for _ in range(3)]
                await anyio.sleep(0.0001)
                with pytest.raises(greensched.DeviceLost):
                    await pool.launch(ONE, spin, 1000, sms=8, device=0)
                launches = driver.script.calls["launch"]
                await anyio.sleep(1)
                assert driver.script.calls["launch"] == launches + 1  # what had begun
                for job in jobs:
                    with pytest.raises(greensched.DeviceLost):
                        await job
        await pool.aclose()

    clock.run(main)
    driver.close()


@pytest.mark.fault("S4")
def test_a_dismissed_thread_ends_behind_later_work() -> None:
    """An item that was submitted behind the end of a thread runs, and no thread is left."""
    clock, ran = simulated.VirtualClock(), list[int]()
    driver = simulated.open("h20", clock=clock)
    thread = WorkerThread(driver, "greensched test", relaxed=False)

    async def main() -> None:
        thread.submit(lambda: ran.append(1))
        thread.dismiss()
        thread.submit(lambda: ran.append(2))
        await anyio.sleep(1)

    clock.run(main)
    assert sorted(ran) == [1, 2]
    assert clock._participants == []


def test_an_opening_that_fails_behind_a_cancellation_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The cancelled caller does not get the error, so the log says what failed."""
    clock = simulated.VirtualClock()
    driver = simulated.open("h20", clock=clock, faults=[Fail("create_green", 5, "DEINITIALIZED")])

    async def main() -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with Pool(driver=driver):
                raise AssertionError("it was cancelled")

    with caplog.at_level("WARNING", "greensched"):
        clock.run(main)
    assert "DEINITIALIZED" in caplog.text
