"""Work that does not end: which waiters raise, when, and what goes on beside it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

import greensched
from greensched import ALL, DeviceHung, LaunchConfig, Pool, ServiceClass
from greensched.driver import simulated
from greensched.driver.simulated import Crash, Fault, Hang
from greensched.kernels import fill, saxpy, spin
from greensched.leasing.watchdog import Watchdog
from helpers.devices import SMALL_DEVICE
from helpers.waiting import turns

ONE = LaunchConfig(grid=1, block=1)
SECOND = 10**9
LIMIT = 0.5
#: Four cells of 8 SMs: an executor over every set of them that the tests lease.
FOUR_CELLS = replace(SMALL_DEVICE, gpcs=(8, 8, 8, 8))


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a coroutine function with a driver, in virtual time on each kind of loop."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)

    def run(main: Callable[[Any], Any], *faults: Fault) -> None:
        clock = simulated.VirtualClock()
        driver = simulated.open([FOUR_CELLS], clock=clock, faults=faults)
        clock.run(lambda: main(driver), backend=request.param)

    return run


async def opened(driver: Any, **options: Any) -> Pool:
    """Open a pool with a limit and loaded kernels; the test closes it."""
    pool = Pool(driver=driver, **{"hang_after": LIMIT, "prepare": [spin, fill, saxpy], **options})
    await pool.open()
    return pool


async def hang(pool: Pool, sms: int = 8, **options: Any) -> DeviceHung:
    """Lease SMs, and wait for a kernel that hangs."""
    with pytest.raises(DeviceHung) as told:
        async with pool.partition(sms, **options) as p:
            await p.launch(ONE, spin, 1000)
    return told.value


@pytest.mark.fault("C9")
def test_waiters_are_told_at_the_limit(run: Any) -> None:
    """A hung kernel's waiter raises at the exact time with all facts; others are served."""

    async def main(driver: Any) -> None:
        pool = await opened(driver, services=[ServiceClass("decode")])
        began = driver.time()
        told = await hang(pool, service="decode")
        assert driver.time() - began == pytest.approx(LIMIT, abs=1e-6)
        assert (told.job, told.work, told.behind) == ("spin", "spin", ())
        assert (told.device, told.sms, told.service) == (0, 8, "decode")
        assert (told.hang_after, told.queues, told.beside) == (LIMIT, 8, ())
        assert (told.hung, told.leased) == pytest.approx((LIMIT, LIMIT), abs=1e-6)
        path, line = told.place.rsplit(":", 1)
        assert (path, int(line)) == (__file__, hang.__code__.co_firstlineno + 3)
        s = pool.statistics()
        assert (s.executors_hung, s.sms_draining, s.as_dict()["executors_hung"]) == (1, 8, 1)
        assert [one.place for one in pool.hung] == [told.place]
        assert "; 1 hung" in repr(pool)
        for _ in range(20):  # on other SMs
            async with pool.partition(16) as p:
                await p.launch(ONE, spin, 1000)
        with pytest.raises(greensched.DeadlineExceeded):
            async with pool.partition(ALL, deadline=1.0):
                pass
        (left,) = (await pool.aclose(grace=0.1)).abandoned
        assert "hung" in left

    run(main, Hang("spin"))


def test_a_turn_begins_when_the_work_before_it_ends(run: Any) -> None:
    """Each kernel's limit counts from the end of the one before it."""

    async def main(driver: Any) -> None:
        pool = await opened(driver)
        began = driver.time()
        async with pool.partition(8) as p:
            jobs = [p.launch(ONE, spin, int(LIMIT * 0.9 * SECOND)) for _ in range(3)]
            jobs.append(p.launch(ONE, spin, 1000))
            await jobs[1]
            with pytest.raises(DeviceHung) as told:
                await jobs[3]
            assert driver.time() - began == pytest.approx(LIMIT * 2.8, rel=1e-3)
            assert (told.value.job, told.value.work, told.value.behind) == ("spin",) * 2 + (
                ("spin",),
            )
            assert [job.done() for job in jobs] == [True] * 4
            with pytest.raises(DeviceHung):
                jobs[2].result()
            with pytest.raises(DeviceHung):
                p.launch(ONE, spin, 1000)
            with pytest.raises(DeviceHung):
                await p.checkpoint()
        await pool.aclose(grace=0.1)

    with pytest.raises(DeviceHung):  # at the end of the block
        run(main, Hang("spin", 3))


def test_a_lease_forgets_the_jobs_of_the_lease_before_it(run: Any) -> None:
    """An executor keeps the names of one lease's jobs, not of all leases."""

    async def main(driver: Any) -> None:
        pool = await opened(driver)
        for _ in range(3):
            async with pool.partition(8, duration=1.0) as p:  # with a duration it is not cached
                await p.launch(ONE, spin, 1000)
        executors = pool._lifecycle.manager().device_pools[0].executors.values()
        assert sum(len(executor.recent_jobs) for executor in executors) == 1
        await pool.aclose()

    run(main)


def test_an_executor_returns_when_its_work_ends(run: Any) -> None:
    """A kernel that ends late returns its SMs, and its job has its result."""

    async def main(driver: Any) -> None:
        pool = await opened(driver)
        with pytest.raises(DeviceHung):
            async with pool.partition(8) as p:
                job = p.launch(ONE, spin, 2 * SECOND)
                await job
        assert (pool.statistics().executors_hung, pool.statistics().sms_draining) == (1, 8)
        await anyio.sleep(2)
        s = pool.statistics()
        assert (s.executors_hung, s.sms_draining, s.sms_free, pool.hung) == (0, 0, 32, ())
        assert job.result() is None
        async with pool.partition(ALL) as p:
            await p.launch(ONE, spin, 1000)
        assert not (await pool.aclose()).abandoned

    run(main)


def test_a_partition_can_be_used_again_when_its_work_has_ended(run: Any) -> None:
    """While work hangs every use is refused, and afterwards none is."""

    async def main(driver: Any) -> None:
        pool = await opened(driver)
        async with pool.partition(8) as p:
            bound = p.bind(ONE, spin, 1000)
            job = p.launch(ONE, spin, 2 * SECOND)
            with pytest.raises(DeviceHung):
                await job
            uses: list[Callable[[], Any]] = [
                bound,
                bound.submit,
                lambda: p.launch(ONE, spin, 1),
                lambda: p.run(print),
                lambda: p.stream,
            ]
            for use in uses:
                with pytest.raises(DeviceHung):
                    use()
            for wait in (p.drain, p.checkpoint, p.idle().__aenter__):
                with pytest.raises(DeviceHung):
                    await wait()
            await anyio.sleep(2)
            bound()
            await p.launch(ONE, spin, 1000)
            await job
            await p.checkpoint()
        await pool.aclose()

    run(main)


def test_all_that_stands_behind_it_is_reported(run: Any) -> None:
    """Copies, calls and callbacks after a hung kernel fail with it, by name."""

    async def main(driver: Any) -> None:
        pool = await opened(driver)
        called = list[Any]()
        with pytest.raises(DeviceHung) as left:
            async with pool.partition(8) as p:
                x = await p.empty(8)
                jobs: list[greensched.Job[Any]] = [p.launch(ONE, spin, 1000), p.download(x)]
                jobs += [p.launch(ONE, saxpy, 2.0, x, x, 8), p.run(math.sqrt, 4.0)]
                jobs[1].add_done_callback(called.append)
                with pytest.raises(DeviceHung) as told:
                    await jobs[2]
                assert told.value.behind[:2] == ("download", "saxpy")
                await turns()
                assert called == [jobs[1]]
                assert str(jobs[1].exception()).startswith("spin on device 0 has not ended")
        assert left.value.job == ""
        assert pool.statistics().executors_hung == 1
        await pool.aclose(grace=0.1)

    run(main, Hang("spin"))


def test_a_hung_graph_and_a_hung_bound_launch_are_told(run: Any) -> None:
    """A graph hangs like a kernel, a bound launch by the ticket after it."""

    async def main(driver: Any) -> None:
        pool = await opened(driver)
        with pytest.raises(DeviceHung):
            async with pool.partition(8) as p:

                def work() -> None:
                    greensched.launch(greensched.current_call().stream, ONE, fill, x, 1.0, 8)

                x = await p.empty(8)
                graph = await p.capture(work)
                with pytest.raises(DeviceHung) as told:
                    await graph.launch(p)
                assert told.value.work == "graph"
        with pytest.raises(DeviceHung) as left:
            async with pool.partition(8) as p:
                p.bind(ONE, spin, 1000)()
        assert (left.value.work, pool.statistics().executors_hung) == ("", 2)
        await pool.aclose(grace=0.1)

    run(main, Hang("fill"), Hang("spin"))


def test_work_of_others_on_its_buffers_is_told_or_refused(run: Any) -> None:
    """Work that waits for a hung kernel's buffer hangs too; later work is refused."""

    async def main(driver: Any) -> None:
        pool = await opened(driver)
        told = list[DeviceHung]()

        async def behind(x: greensched.Buffer) -> None:
            with pytest.raises(DeviceHung) as mine:
                async with pool.partition(8) as q:
                    await q.launch(ONE, saxpy, 2.0, x, x, 8)
            told.append(mine.value)

        async with anyio.create_task_group() as tasks, pool.partition(16) as other:
            with pytest.raises(DeviceHung):
                async with pool.partition(8) as p:
                    x = await p.empty(8)
                    job = p.launch(ONE, fill, x, 1.0, 8)
                    tasks.start_soon(behind, x)
                    await job
            await turns()
            assert told[0].work.startswith("saxpy (behind fill of ")
            with pytest.raises(DeviceHung):
                other.launch(ONE, saxpy, 2.0, x, x, 8)
            await other.launch(ONE, spin, 1000)
        assert pool.statistics().executors_hung == 2
        await pool.aclose(grace=0.1)

    run(main, Hang("fill"))


def test_work_that_waits_for_others_has_not_its_turn(run: Any) -> None:
    """A kernel that waits for another partition's long work does not hang."""

    async def main(driver: Any) -> None:
        pool = await opened(driver)
        async with pool.partition(8) as p, pool.partition(8) as q:
            x = await p.empty(8)
            for _ in range(3):
                p.launch(ONE, spin, int(0.9 * LIMIT * SECOND))
            p.launch(ONE, fill, x, 1.0, 8)
            await q.launch(ONE, saxpy, 2.0, x, x, 8)
            assert driver.time() > 2.7 * LIMIT
        await pool.aclose()

    run(main)


def test_a_cancelled_waiter_leaves_a_hung_kernel(run: Any) -> None:
    """A cancellation is immediate, before and after the limit, and the log still reports it."""

    async def main(driver: Any) -> None:
        pool = await opened(driver)
        for seconds in (0.1, 0.1):
            began = driver.time()
            with anyio.move_on_after(seconds):
                async with pool.partition(8) as p:
                    await p.launch(ONE, spin, 1000)
            assert driver.time() - began == pytest.approx(seconds, abs=1e-6)
        assert pool.statistics().executors_hung == 0
        await anyio.sleep(LIMIT)
        assert (pool.statistics().executors_hung, pool.statistics().sms_draining) == (2, 16)
        with anyio.move_on_after(0.1) as scope:
            async with pool.partition(8, deadline=10) as p, pool.partition(16):
                pass
        assert scope.cancelled_caught  # while it waits for SMs that are quarantined
        assert pool.statistics().sms_free == 16
        await pool.aclose(grace=0.1)

    run(main, Hang("spin", 1), Hang("spin", 2))


def test_a_pool_closes_over_a_hung_executor(run: Any) -> None:
    """The grace bounds the wait, the report names it, and another device is closed."""

    async def main(driver: Any) -> None:
        pool = await opened(driver)
        await hang(pool)
        began = driver.time()
        report = await pool.aclose(grace=1.0)
        assert driver.time() - began == pytest.approx(1.0, abs=0.01)
        assert report.abandoned == ("<Executor: 8 SMs of device 0, cells 1, hung>",)
        assert pool.state is greensched.PoolState.CLOSED

    run(main, Hang("spin"))


@pytest.mark.parametrize("of_class", [None, 0.2, 2.0, math.inf])
def test_a_class_has_its_own_limit(run: Any, of_class: float | None) -> None:
    """A class's limit replaces the pool's: shorter, longer or none."""

    async def main(driver: Any) -> None:
        pool = await opened(driver, services=[ServiceClass("own", hang_after=of_class)])
        limit = LIMIT if of_class is None else of_class
        began = driver.time()
        with anyio.move_on_after(10):
            told = await hang(pool, service="own")
            assert told.hang_after == limit
        assert driver.time() - began == pytest.approx(min(limit, 10), abs=1e-6)
        began = driver.time()
        assert (await hang(pool)).hang_after == LIMIT
        assert driver.time() - began == pytest.approx(LIMIT, abs=1e-6)
        await pool.aclose(grace=0.1)

    run(main, Hang("spin", 1), Hang("spin", 2))


def test_a_limit_can_come_and_go(run: Any) -> None:
    """Without a limit nothing is watched, until a class gets one."""

    async def main(driver: Any) -> None:
        pool = await opened(driver, hang_after=None, services=[ServiceClass("own")])
        async with pool.partition(8, service="own") as p:
            await p.launch(ONE, spin, 1000)
        poller = pool._manager.current_poller()
        assert poller.watchdog is None
        assert not pool._lifecycle.recorder.notes_jobs
        pool.reconfigure(services=[ServiceClass("own", hang_after=1.0)])
        assert (await hang(pool, service="own")).hang_after == 1.0
        pool.reconfigure(services=[ServiceClass("own")])
        assert poller.watchdog is None
        await pool.aclose(grace=0.1)

    run(main, Hang("spin", 2))


def test_cached_leases_and_groups_have_their_places(run: Any) -> None:
    """The place is that of the present block, however the lease was taken."""

    async def main(driver: Any) -> None:
        pool = await opened(driver)
        for _ in range(2):  # the second time from the cache
            async with pool.partition(8):
                pass
        first = test_cached_leases_and_groups_have_their_places.__code__.co_firstlineno
        lines = list[int]()
        async with pool.partition(8), pool.partition_nowait(8), pool.partitions(8, 8):
            lines += [int(one.place.removeprefix(f"{__file__}:")) for one in pool.leases()]
        assert lines == [first + 10] * 4
        await pool.aclose()

    run(main)


def test_events_in_place_of_tickets_tell_of_a_hang_too() -> None:
    """If streams do not write tickets, events show that work has not ended."""
    clock = simulated.VirtualClock()
    without = [greensched.typing.Feature.WRITE_VALUE]
    driver = simulated.open([FOUR_CELLS], clock=clock, faults=[Hang("spin")], without=without)

    async def main() -> None:
        pool = await opened(driver)
        began = driver.time()
        assert (await hang(pool)).work == "spin"
        assert driver.time() - began == pytest.approx(LIMIT, abs=1e-3)
        await pool.aclose(grace=0.1)

    clock.run(main)


def test_a_waiter_on_another_loop_is_reported() -> None:
    """A task of another loop that awaits the job raises with the holder's."""
    driver = simulated.open([FOUR_CELLS], faults=[Hang("spin")])

    async def main() -> None:
        pool = await opened(driver, hang_after=0.05)
        with pytest.raises(DeviceHung):
            async with pool.partition(8) as p:
                job = p.launch(ONE, spin, 1000)

                async def other() -> None:
                    with pytest.raises(DeviceHung):
                        await job

                await asyncio.to_thread(asyncio.run, other())
        await pool.aclose(grace=0.0)

    asyncio.run(main())
    driver.close()


def test_the_log_has_one_line_for_each_hang(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An error when it is found, and a warning when it ends."""

    async def main(driver: Any) -> None:
        pool = await opened(driver)
        async with pool.partition(8) as p:
            with pytest.raises(DeviceHung):
                await p.launch(ONE, spin, SECOND)
            await anyio.sleep(1)
        await pool.aclose()

    with caplog.at_level(logging.WARNING, "greensched"):
        run(main)
    # Not what a thread logs that an earlier test left in a driver which it closed.
    found, ended = [record for record in caplog.records if record.module == "lease_records"]
    assert (found.levelname, ended.levelname) == ("ERROR", "WARNING")
    assert "spin on device 0 has not ended 0.5 s after its turn" in found.getMessage()
    assert "has ended, 1 s after its turn" in ended.getMessage()


@pytest.mark.parametrize("fault", [Hang("spin"), Crash("spin")])
@pytest.mark.parametrize("policy", ["report", "terminate", "exit"])
def test_the_exit_policy_ends_the_process_once_it_is_reported(
    fault: Fault, policy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the log line: SIGTERM, or exit with status 74; also for a lost device."""
    ends = list[Any]()

    def end(*how: int) -> None:
        assert any(record.levelname == "ERROR" for record in caplog.records)
        ends.append(how)

    monkeypatch.setattr(os, "kill", end)
    monkeypatch.setattr(os, "_exit", end)
    clock = simulated.VirtualClock()
    driver = simulated.open([FOUR_CELLS], clock=clock, faults=[fault])

    async def main() -> None:
        pool = await opened(driver, exit_policy=policy)
        with pytest.raises((DeviceHung, greensched.DeviceLost)):
            async with pool.partition(8) as p:
                await p.launch(ONE, spin, 1000)
        await pool.aclose(grace=0.1)

    clock.run(main)
    how = {"report": [], "terminate": [(os.getpid(), signal.SIGTERM)], "exit": [(74,)]}
    assert ends == how[policy]


@pytest.mark.parametrize("wrong", [0, -1, math.nan, True, "1", b"", 10**400])
def test_wrong_limits_are_refused(wrong: Any) -> None:
    """A limit of a pool or class must be a number of seconds above 0."""
    with pytest.raises(greensched.InvalidRequest, match="hang_after"):
        Pool(driver="simulated:h200", hang_after=wrong)
    with pytest.raises(greensched.InvalidRequest, match="hang_after"):
        Pool(driver="simulated:h200", services=[ServiceClass("a", hang_after=wrong)])


@pytest.mark.parametrize("wrong", [None, "abort", 1])
def test_wrong_exit_policies_are_refused(wrong: Any) -> None:
    """An exit policy must be one of three words."""
    with pytest.raises(greensched.InvalidRequest, match="exit_policy"):
        Pool(driver="simulated:h200", exit_policy=wrong)


@pytest.mark.parametrize(("given", "queues"), [("32", 32), ("", 8), ("many", 8)])
def test_the_hardware_queues_are_those_of_the_environment(
    given: str, queues: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has their number, and the executors with work beside the hung one."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    clock = simulated.VirtualClock()
    driver = simulated.open([FOUR_CELLS], clock=clock, faults=[Hang("spin")])

    async def main() -> None:
        pool = await opened(driver)
        async with pool.partition(8) as beside:
            with pytest.raises(DeviceHung) as told:
                async with pool.partition(8) as p:
                    job = p.launch(ONE, spin, 1000)
                    await anyio.sleep(0.2)
                    beside.launch(ONE, spin, int(0.8 * LIMIT * SECOND))
                    await job
        assert told.value.queues == queues
        (other,) = told.value.beside
        assert other.startswith("<Executor: 8 SMs of device 0, cells 1> for 0.3 s")
        assert f"one of the device's {queues} hardware queues" in str(told.value)
        await pool.aclose(grace=0.1)

    clock.run(main)


@pytest.mark.parametrize(("policy", "status"), [("exit", 74), ("terminate", -signal.SIGTERM)])
def test_a_process_ends_by_its_policy(policy: str, status: int) -> None:
    """A supervisor sees the exit status or signal, and the log line."""
    program = f"""
import asyncio, greensched
from greensched.driver import simulated
from greensched.kernels import spin

async def main():
    driver = simulated.open("h20", faults=[simulated.Hang("spin")])
    async with greensched.Pool(driver=driver, hang_after=0.02, exit_policy={policy!r}) as pool:
        async with pool.partition(8) as p:
            p.launch(greensched.LaunchConfig(grid=1, block=1), spin, 1000)
            await asyncio.sleep(60)

asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == status, ended.stderr
    assert "spin on device 0 has not ended" in ended.stderr


def test_a_watchdog_that_fails_ends_nothing(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error is logged, also on trio, and it checks again."""
    look, failures = Watchdog.look, [ValueError("once")]

    def failing(self: Watchdog, poller: Any) -> float | None:
        if failures:
            raise failures.pop()
        return look(self, poller)

    monkeypatch.setattr(Watchdog, "look", failing)

    async def main(driver: Any) -> None:
        pool = await opened(driver)
        assert (await hang(pool)).work == "spin"
        await pool.aclose(grace=0.1)

    run(main, Hang("spin"))
    assert "the watchdog failed" in caplog.text
