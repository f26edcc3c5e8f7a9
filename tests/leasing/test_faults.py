"""Faults: what fails one job, what ends the pool, and that nothing hangs or is lost."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

import greensched
from greensched import ALL, LaunchConfig, Pool, PoolState
from greensched.device.staging_ring import SLOTS
from greensched.driver import simulated
from greensched.driver.blocking import DRIVER_CALLS
from greensched.driver.simulated import Crash, Fail, Hang
from greensched.driver.simulated.device_models import PRESETS
from greensched.driver.status import from_status
from greensched.kernels import fill, saxpy, spin
from greensched.leasing.device_pool import DevicePool
from greensched.typing import CaptureMode, Feature
from helpers.devices import SMALL_DEVICE
from helpers.waiting import turns, until

ONE = LaunchConfig(grid=1, block=1)


@pytest.fixture(params=["asyncio", "trio"])
def clock(request: pytest.FixtureRequest) -> Any:
    """Return a virtual clock for each kind of loop."""
    clock = simulated.VirtualClock()
    run = clock.run
    clock.run = lambda main: run(main, backend=request.param)  # type: ignore[method-assign,assignment]
    return clock


async def opened(driver: simulated.SimulatedDriver) -> Pool:
    """Open a pool that the test closes itself."""
    pool = Pool(driver=driver)
    await pool.open()
    return pool


def test_an_upload_without_room_gives_its_slot_back() -> None:
    """After many failed small uploads, the next ones have staging as before."""
    driver = simulated.open("h200")

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            first = driver.script.calls["allocate"] + 1
            driver.script.add(Fail("allocate", first, "OUT_OF_MEMORY", last=first + 2))
            for _ in range(3):
                with pytest.raises(greensched.OutOfMemory):
                    await p.upload(np.ones(5))
            slots = pool._manager.device_pools[0].slots
            taken = [slots.take() for _ in range(SLOTS)]
            assert all(taken)
            for slot in filter(None, taken):
                slots.release(slot)

    anyio.run(main)
    driver.close()


@pytest.mark.fault("C2")
def test_a_device_fault_ends_everything_within_a_second(clock: Any) -> None:
    """Every job, waiter and request fails with the first cause."""
    driver = simulated.open("h200", clock=clock, faults=[Crash("saxpy")])
    seen: list[BaseException] = []

    async def main() -> None:
        pool = await opened(driver)

        async def queued() -> None:
            with pytest.raises(greensched.DeviceLost) as refused:
                async with pool.partition(ALL):
                    pass
            seen.append(refused.value)

        async def beside() -> None:
            with pytest.raises(greensched.DeviceLost) as refused:
                async with pool.partition(8) as p:
                    await p.launch(ONE, spin, 10**12)
            seen.append(refused.value)

        async with anyio.create_task_group() as tasks:
            with pytest.raises(greensched.DeviceLost) as met:
                async with pool.partition(8) as p:
                    await p.prepare(ONE, saxpy)  # beside a running kernel it would wait for that
                    tasks.start_soon(beside)
                    tasks.start_soon(queued)
                    await turns()
                    x = await p.empty(8)
                    began = driver.time()
                    await p.launch(ONE, saxpy, 1.0, x, x, 8)
            seen.append(met.value)
        assert driver.time() - began < 1.0
        assert not pool.is_ready
        assert pool.state is PoolState.POISONED
        assert len(seen) == 3
        for error in seen:
            assert isinstance(error, greensched.DeviceLost)
            assert error.cause is pool.fault
            assert "ILLEGAL_ADDRESS" in str(error)
        calls = sum(driver.script.calls.values())
        with pytest.raises(greensched.DeviceLost):
            async with pool.partition(8):
                pass
        x.close()
        await pool.aclose()
        assert sum(driver.script.calls.values()) == calls  # no CUDA call after it

    clock.run(main)


async def crash(pool: Pool, device: int) -> None:
    """Lose a device by the kernel that the driver's script names."""
    with pytest.raises(greensched.DeviceLost):
        async with pool.partition(8, device=device) as p:
            x = await p.empty(8)
            await p.launch(ONE, saxpy, 1.0, x, x, 8)


def test_a_fault_of_one_device_ends_the_pool_over_two(clock: Any) -> None:
    """A CUDA fault ends CUDA for the process, so leases of the other device end, too."""
    driver = simulated.open("h20x2", clock=clock, faults=[Crash("saxpy")])
    ended: list[greensched.DeviceLost] = []

    async def main() -> None:
        pool = await opened(driver)

        async def work(p: greensched.Partition) -> None:
            with pytest.raises(greensched.DeviceLost) as met:
                async with p:
                    await p.launch(ONE, spin, 10**12)
            ended.append(met.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, pool.partition(8, device=1))
            await turns()
            tasks.start_soon(work, pool.partition(ALL, device=1))  # waits until the other one ends
            await turns()
            await crash(pool, 0)
        assert [error.cause for error in ended] == [pool.fault] * 2
        assert isinstance(pool.fault, greensched.DeviceFault)
        assert pool.fault.device == 0
        with pytest.raises(greensched.DeviceLost):
            pool.partition_nowait(8, device=1)
        await pool.aclose()

    clock.run(main)


def test_a_fault_ends_the_pool_of_another_device(clock: Any) -> None:
    """With a pool on each device the other pool ends as well."""
    driver = simulated.open("h20x2", clock=clock, faults=[Crash("saxpy")])

    async def main() -> None:
        async with Pool([0], driver=driver) as one, Pool([1], driver=driver) as two:
            with pytest.raises(greensched.DeviceLost) as met:
                async with two.partition(16) as q:
                    job = q.launch(ONE, spin, 10**12)
                    await crash(one, 0)
                    await job
            assert isinstance(met.value.cause, greensched.DeviceFault)
            assert met.value.cause.device == 1
            assert (one.is_ready, two.is_ready) == (False, False)

    clock.run(main)


async def noticed(driver: simulated.SimulatedDriver) -> float:
    """Abandon work that fails; return the seconds until the pool notices it."""
    pool = await opened(driver)
    with pytest.raises(greensched.DeviceLost):
        async with pool.partition(8) as p:
            p.launch(ONE, spin, 1000)
            began = driver.time()
            await until(lambda: not pool.is_ready)
            took = driver.time() - began
    await pool.aclose()
    return took


@pytest.mark.fault("C10")
def test_a_fault_is_noticed_though_no_task_waits(clock: Any) -> None:
    """After a fault of abandoned work the pool is not ready within a second."""
    driver = simulated.open("h200", clock=clock, faults=[Crash("spin")])
    assert clock.run(partial(noticed, driver)) < 1.0


@pytest.mark.fault("C10")
def test_a_fault_on_the_real_clock_is_noticed() -> None:
    """On the real clock the periodic check finds the fault without a waiting task."""
    anyio.run(noticed, simulated.open("h200", faults=[Crash("spin")]))


def test_sleeping_often_makes_no_more_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that sleeps for each job queries the driver at intervals, not for each job."""
    monkeypatch.setattr("greensched.execution.completion_poller.SAFETY_S", 60.0)
    driver = simulated.open("h200")
    driver.spin_budget = 0.0  # it sleeps at once

    async def main() -> None:
        async with Pool(driver=driver, prepare=[spin]) as pool, pool.partition(8) as p:
            asked, slept = (driver.script.calls[f"{it}_event"] for it in ("query", "synchronize"))
            for _ in range(20):
                await p.launch(ONE, spin, 3_000_000)
            assert driver.script.calls["synchronize_event"] >= slept + 10  # or this shows nothing
            assert driver.script.calls["query_event"] <= asked + 1

    anyio.run(main)


def test_a_thread_that_cannot_wait_tries_again_at_the_next_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It neither delays waiting tasks, nor spins until the work is done."""
    driver, tries = simulated.open("h200"), list[object]()
    driver.spin_budget = 0.0  # it sleeps at once

    def refuse(event: object) -> None:
        tries.append(event)
        raise from_status(1, "synchronize_event")

    monkeypatch.setattr(driver, "synchronize_event", refuse)

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            with await p.empty_pinned(1, np.uint32) as word:

                def hold() -> None:
                    call = greensched.current_call()
                    assert call is not None
                    driver.wait_value(call.stream.handle, word.address, 1)

                held = asyncio.ensure_future(asyncio.wait_for(p.run(hold), None))
                await until(lambda: len(tries) > 10)
                assert len(tries) <= driver.script.calls["record_event"]  # a look's, once for each
                word.array[0] = 1
                await held

    anyio.run(main)


@pytest.mark.parametrize("fault", [Fail("copy_to_host", status="INVALID_VALUE"), Crash("saxpy")])
def test_a_failed_download_leaves_its_array_alone(clock: Any, fault: Fail | Crash) -> None:
    """If the copy is refused or the device fails before it, `out` is unchanged."""
    driver = simulated.open("h200", clock=clock, faults=[fault])

    async def main() -> None:
        pool = await opened(driver)
        out = np.full(8, 3, np.float32)
        with suppress(greensched.DeviceLost):
            async with pool.partition(8) as p:
                await p.prepare(ONE, saxpy)
                x = await p.upload(np.ones(8, np.float32))
                p.launch(ONE, saxpy, 1.0, x, x, 8)
                job = p.download(x, out)
                with pytest.raises(greensched.GreenschedError):
                    await job
        x.close()
        await pool.aclose()
        np.testing.assert_array_equal(out, 3)

    clock.run(main)


@pytest.mark.fault("C9")
def test_a_hung_kernel_holds_its_own_sms_only(clock: Any) -> None:
    """Other leases are served beside a hung kernel; closing reports it and does not hang."""
    driver = simulated.open("h200", clock=clock, faults=[Hang("spin")])

    async def main() -> None:
        pool = await opened(driver)
        # Prepared before the kernel hangs: driver 580 makes no green context beside it.
        async with pool.partition(16), pool.partition(100):
            pass
        with anyio.move_on_after(0.1):
            async with pool.partition(16) as p:
                await p.launch(ONE, spin, 1000)
        assert pool.statistics().sms_draining == 16
        for _ in range(20):
            async with pool.partition(100) as p:
                await p.launch(ONE, spin, 1000)
        with pytest.raises(greensched.DeadlineExceeded):
            async with pool.partition(ALL, deadline=1.0):
                pass
        report = await pool.aclose(grace=2.0)
        assert len(report.abandoned) == 1

    clock.run(main)


@pytest.mark.parametrize("exposed", [False, True], ids=["own", "exposed"])
def test_a_pool_closed_over_an_idle_lease_abandons_its_executor(clock: Any, exposed: bool) -> None:
    """A lease past the grace is reported; its end makes no CUDA call."""
    driver = simulated.open("h200", clock=clock)

    async def main() -> None:
        pool = await opened(driver)
        p = await pool.partition(16).__aenter__()
        if exposed:
            await p.run(lambda: None)
        report = await pool.aclose(grace=0.0)
        assert len(report.abandoned) == 1
        assert "16 SMs" in report.abandoned[0]
        calls = sum(driver.script.calls.values())
        with pytest.raises(greensched.PoolClosed):
            p.launch(ONE, spin, 1000)
        with pytest.raises(greensched.PoolClosed):
            await p.__aexit__(None, None, None)
        assert sum(driver.script.calls.values()) == calls

    clock.run(main)


@pytest.mark.parametrize("leaves", [False, True], ids=["open", "draining"])
def test_a_hung_bound_launch_does_not_hold_up_the_closing(clock: Any, leaves: bool) -> None:
    """A hung bound launch without a ticket is abandoned like other work."""
    driver = simulated.open("h200", clock=clock, faults=[Hang("spin")])

    async def main() -> None:
        pool = await opened(driver)
        p = await pool.partition(8).__aenter__()
        await p.prepare(ONE, spin)
        p.bind(ONE, spin, 1000)()
        if leaves:
            p._granted_lease().end()
        report = await pool.aclose(grace=0.1)
        assert len(report.abandoned) == 1
        if not leaves:
            p._granted_lease().end()

    clock.run(main)


def test_waiting_for_abandoned_work_raises(clock: Any) -> None:
    """Awaiting a job, or a block's end, that the pool abandoned raises PoolClosed."""
    driver = simulated.open("h200", clock=clock, faults=[Hang("spin")])

    async def main() -> None:
        pool = await opened(driver)
        p = await pool.partition(8).__aenter__()
        job = p.launch(ONE, spin, 1000)

        async def wait() -> None:
            with pytest.raises(greensched.PoolClosed):
                await job

        async def leave() -> None:
            with pytest.raises(greensched.PoolClosed):
                await p.__aexit__(None, None, None)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            tasks.start_soon(leave)
            await turns()
            assert len((await pool.aclose(grace=0.1)).abandoned) == 1

    clock.run(main)


def test_waiting_for_a_call_that_never_returns_raises() -> None:
    """The end of a block whose blocking call hangs raises when its pool closes."""
    driver = simulated.open("h200")
    hung = threading.Event()

    async def main() -> None:
        pool = await opened(driver)

        async def use() -> None:
            with pytest.raises(greensched.PoolClosed):
                async with pool.partition(8) as p:
                    p.run(hung.wait)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use)
            await until(lambda: pool.statistics().sms_draining == 8)
            assert len((await pool.aclose(grace=0.01)).abandoned) == 1
        hung.set()

    anyio.run(main)


@pytest.mark.parametrize("verb", ["launch", "copy_to_device", "allocate"])
def test_an_ordinary_failure_fails_one_job(clock: Any, verb: str) -> None:
    """A refused launch, copy or allocation fails its own job, and the pool goes on."""
    fault = Fail(verb, nth=2, status="INVALID_VALUE")
    driver = simulated.open("h200", clock=clock, faults=[fault])

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            failures = []
            for _ in range(4):
                try:
                    with await p.upload(np.ones(8, np.float32)) as b:
                        await p.launch(ONE, fill, b, 2.0, 8)
                        assert (await p.download(b))[0] == 2.0
                except greensched.CUDAError as error:
                    failures.append(error.name)
            assert failures == ["INVALID_VALUE"]
            assert pool.is_ready

    clock.run(main)


def test_without_write_value_events_stand_for_tickets(clock: Any) -> None:
    """If streams cannot write words, events are used, and statistics say so."""
    driver = simulated.open("h200", clock=clock, without=[Feature.WRITE_VALUE])

    async def main() -> None:
        async with Pool(driver=driver) as pool:
            assert pool.statistics().completion == "event"
            async with pool.partition(8) as p:
                for size in (10, 100_000):
                    array = np.arange(size, dtype=np.float32)
                    with await p.upload(array) as b:
                        for _ in range(200):
                            await p.launch(ONE, spin, 1000)
                        assert await p.run(lambda: 7) == 7
                        np.testing.assert_array_equal(await p.download(b), array)
            async with pool.partition(ALL):
                pass

    clock.run(main)
    assert not driver.live()


def test_without_write_value_on_the_real_clock() -> None:
    """Events are polled once in a turn, and then a thread sleeps."""
    driver = simulated.open("h200", without=[Feature.WRITE_VALUE])

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            for duration in (1000, 3_000_000):
                await p.launch(ONE, spin, duration)
            assert await p.run(lambda: 7) == 7

    anyio.run(main)
    assert not driver.live()


def leave_a_capture() -> None:
    call = greensched.current_call()
    assert call is not None
    stream = call.stream
    stream.context.driver.begin_capture(stream.handle, CaptureMode.RELAXED)


async def whole_scenario(driver: simulated.SimulatedDriver) -> None:
    """Use every operation of a pool once."""
    async with Pool(driver=driver) as pool:
        async with pool.partition(8) as p:
            with await p.upload(np.ones(8, np.float32)) as b:
                await p.prepare(ONE, fill)
                bound = p.bind(ONE, fill, b, 3.0, 8)
                bound()
                await bound.submit()
                await p.launch(ONE, fill, b, 2.0, 8)
                await p.run(lambda: None)
                await p.run(leave_a_capture)
                await p.download(b)
            with await p.upload(np.ones(50_000, np.float32)) as large:
                await p.download(large)
            with await p.empty_pinned(4):
                pass
        async with pool.partitions(8, greensched.REST) as (a, other):
            with await a.upload(np.ones(8)) as b:
                await other.download(b)


def fill_captured(b: greensched.Buffer) -> None:
    call = greensched.current_call()
    assert call is not None
    greensched.launch(call.stream, ONE, fill, b, 4.0, 8)


async def graph_scenario(driver: simulated.SimulatedDriver) -> None:
    """Launch a graph on its first SMs and on others."""
    async with Pool(driver=driver, prepare=[fill]) as pool:
        async with pool.partitions(8, greensched.REST) as (p, q):
            with await p.upload(np.ones(8, np.float32)) as b:
                with await p.capture(fill_captured, b) as graph:
                    await graph.launch(p)
                    graph.launch(q)
                    await graph.launch(q)
                    assert (await q.download(b))[0] == 4.0


Scenario = Callable[[simulated.SimulatedDriver], Awaitable[None]]


def calls_of(scenario: Scenario) -> dict[str, int]:
    clock = simulated.VirtualClock()
    driver = simulated.open([SMALL_DEVICE], clock=clock)
    clock.run(scenario, driver)
    assert not driver.live()
    return dict(driver.script.calls)


CALLS = calls_of(whole_scenario)
#: Calls of graphs alone, and those that a capture makes.
GRAPH_CALLS = {
    verb: number
    for verb, number in calls_of(graph_scenario).items()
    if verb not in CALLS or verb in ("begin_capture", "end_capture", "is_capturing", "launch")
}
#: Verbs that end something: what they refuse to end stays alive, and is reported.
ENDING = {"destroy_stream", "destroy_event", "destroy_green", "release_primary", "free_host",
          "destroy_memory_pool", "unload_code", "free", "destroy_graph", "synchronize_stream",
          "synchronize_context", "destroy_executable", "stream_address"}  # fmt: skip


#: Pure queries, which cannot fail where the driver works at all.
NEVER_FAIL = {"initialise", "current", "device_count", "device_facts", "resource_facts"}


@pytest.mark.fault("C1")
@pytest.mark.parametrize("status", ["INVALID_VALUE", "OUT_OF_MEMORY", "ILLEGAL_ADDRESS"])
@pytest.mark.parametrize(
    ("scenario", "verb"),
    [(whole_scenario, verb) for verb in sorted(set(CALLS) - NEVER_FAIL)]
    + [(graph_scenario, verb) for verb in sorted(GRAPH_CALLS)],
)
def test_every_driver_call_fails_in_turn(
    scenario: Scenario, verb: str, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If any call fails, there is a typed error or none, no hang, and no loss."""
    caplog.set_level(logging.WARNING, "greensched")
    for nth in range(1, (CALLS if scenario is whole_scenario else GRAPH_CALLS)[verb] + 1):
        caplog.clear()
        clock = simulated.VirtualClock()
        driver = simulated.open([SMALL_DEVICE], clock=clock, faults=[Fail(verb, nth, status)])

        async def main(driver: simulated.SimulatedDriver = driver) -> None:
            with anyio.fail_after(100):
                await scenario(driver)

        poisoned = False
        try:
            clock.run(main)
        except greensched.GreenschedError as error:
            poisoned = isinstance(error, (greensched.DeviceLost, greensched.DeviceFault))
        # A device that is lost while its pool closes is told in a warning, and left as it is.
        poisoned = poisoned or "ILLEGAL_ADDRESS" in caplog.text
        where = (verb, nth, status)
        if verb not in ENDING and not poisoned:
            assert not driver.live(), (where, driver.live())


def test_the_verbs_are_covered() -> None:
    """The scenarios make every driver call, except those of other tests."""
    elsewhere = {"primary_state", "stream_address", "synchronize_stream",
                 "destroy_graph", "elapsed", "set_bytes", "copy",
                 "synchronize_context", "priority_range", "wait_value", "allow_shared",
                 "memory_info", "synchronize_event", "split", "device_workqueue",
                 "context_workqueue", "workqueue_facts", "configure_workqueue", "create_context",
                 "destroy_context", "context_device", "push_current", "pop_current", "limit",
                 "set_limit", "cache_config", "set_cache_config", "context_flags",
                 "set_primary_flags", "can_access_peer", "share_memory_pool", "copy_peer",
                 "foreign_stream", "memory_device",
                 "destroy_green"}  # fmt: skip
    called = {*CALLS, *GRAPH_CALLS}
    assert set(DRIVER_CALLS) - called <= elsewhere, set(DRIVER_CALLS) - called - elsewhere


def test_a_fault_inside_a_graph_ends_everything(clock: Any) -> None:
    """A kernel that crashes in a graph's second launch is a device fault."""
    driver = simulated.open("h200", clock=clock, faults=[Crash("fill", nth=2)])

    async def main() -> None:
        pool = await opened(driver)
        with pytest.raises(greensched.DeviceLost):
            async with pool.partition(8) as p:
                await p.prepare(ONE, fill)
                b = await p.empty(8)
                graph = await p.capture(fill_captured, b)
                await graph.launch(p)
                with pytest.raises(greensched.DeviceLost):
                    await graph.launch(p)
                with pytest.raises(greensched.DeviceLost):
                    graph.launch(p)
        graph.close()
        b.close()
        await pool.aclose()

    clock.run(main)


def test_a_hung_graph_holds_its_own_sms_only(clock: Any) -> None:
    """Closing reports it; the graph can be closed, and its executor stays."""
    driver = simulated.open("h200", clock=clock, faults=[Hang("fill")])

    async def main() -> None:
        pool = await opened(driver)
        # Prepared before the kernel hangs: driver 580 makes no green context beside it.
        async with pool.partition(16), pool.partition(100):
            pass
        with anyio.move_on_after(0.1):
            async with pool.partition(16) as p:
                for kernel in (fill, spin):  # beside a running kernel it would wait for that
                    await p.prepare(ONE, kernel)
                b = await p.empty(8)
                graph = await p.capture(fill_captured, b)
                await graph.launch(p)
        assert pool.statistics().sms_draining == 16
        graph.close()
        b.close()
        async with pool.partition(100) as p:
            await p.launch(ONE, spin, 1000)
        assert len((await pool.aclose(grace=1.0)).abandoned) == 1

    clock.run(main)
    assert "h200" in PRESETS


class Shown:
    """An array of another library, on a stream of its own."""

    def __init__(self, buffer: greensched.Buffer, stream: int) -> None:
        self.__cuda_array_interface__ = buffer.__cuda_array_interface__ | {"stream": stream}


def test_an_array_that_cannot_be_ordered_is_refused(clock: Any) -> None:
    """If any call for such an array fails, the copy is refused and the next succeeds."""
    driver = simulated.open("h200", clock=clock)

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            theirs = await p.run(p.context.device.create_stream)
            with await p.upload(np.arange(4)) as x:
                array = Shown(x, theirs.address)
                for verb in (
                    "memory_device",
                    "foreign_stream",
                    "is_capturing",
                    "create_event",
                    "record_event",
                    "wait_event",
                ):
                    before = driver.live()
                    issued = p._open_lease().launch_stream.issued
                    driver.script.add(Fail(verb, driver.script.calls[verb] + 1, "OUT_OF_MEMORY"))
                    with pytest.raises(greensched.OutOfMemory):
                        p.download(array)
                    assert driver.live() == before
                    assert p._open_lease().launch_stream.issued == issued
                    assert (await p.download(array)).tolist() == [0, 1, 2, 3]
            await p.run(theirs.close)

    clock.run(main)
    assert not driver.live()


async def _busy() -> None:
    """Keep every turn of a loop longer than an idle one."""
    while True:
        until = time.perf_counter() + 50e-6
        while time.perf_counter() < until:
            pass
        await anyio.sleep(0)


@pytest.mark.parametrize("without", [[], [Feature.WRITE_VALUE]], ids=["words", "events"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_busy_loop_hears_of_a_fault(without: list[Feature], busy: bool) -> None:
    """A waiter beside tasks that never pause gets the fault, by words and by events."""
    driver = simulated.open("h200", faults=[Crash("fill")], without=without)

    async def main() -> None:
        pool = await opened(driver)
        async with anyio.create_task_group() as group:
            if busy:
                group.start_soon(_busy)
            with pytest.raises(greensched.DeviceLost):
                async with pool.partition(8) as p:
                    with await p.empty(8) as buffer:
                        await p.launch(ONE, fill, buffer, 1.0, 8)
            group.cancel_scope.cancel()
        assert pool.state is greensched.PoolState.POISONED
        await pool.aclose()

    anyio.run(main)


class StrictLock:
    """A lock that records a second acquisition by the thread that holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.depth = self.deepest = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self._lock.release()

    def _is_owned(self) -> bool:
        return self._lock._is_owned()


@pytest.mark.white_box
@pytest.mark.parametrize("leased", [0, 132], ids=["in its block", "queued"])
def test_a_task_collected_while_the_lock_is_held_takes_no_lock(
    leased: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a closed loop left is released once, even if collected under the lock."""
    driver = simulated.open("h200")
    pool = Pool(driver=driver)

    async def use() -> None:
        async with pool.partition(8):
            await asyncio.get_running_loop().create_future()

    def leave_a_task_behind() -> None:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)

        async def start() -> None:
            task = loop.create_task(use())
            await until(lambda: pool.statistics().requested == before + 1)
            assert not task.done()

        before = pool.statistics().requested
        loop.run_until_complete(start())
        loop.close()

    async def main() -> None:
        await pool.open()
        manager = pool._manager
        async with AsyncExitStack() as stack:
            if leased:
                await stack.enter_async_context(pool.partition(leased))
            await asyncio.to_thread(leave_a_task_behind)
        lock = manager.lock = StrictLock()  # type: ignore[assignment]
        request = manager.scheduler.request

        def collect_and_request(*args: Any, **options: Any) -> Any:
            gc.collect()  # as the collector may at any allocation
            return request(*args, **options)

        monkeypatch.setattr(manager.scheduler, "request", collect_and_request)
        async with pool.partition(8):
            pass
        async with pool.partition(ALL):
            pass
        assert lock.deepest == 1
        s = pool.statistics()
        assert (s.sms_free, s.leases) == (s.sms_total, 0)
        assert not (await pool.aclose()).abandoned

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("failed", [False, True], ids=["normally", "by an error"])
def test_a_forked_child_leaves_its_block_at_once(failed: bool) -> None:
    """In a child the block's end takes no lock, makes no call, and raises ForkedPool."""

    def leave(block: Any) -> int:
        signal.alarm(10)  # a hang ends it, and is seen by its status
        error = KeyError() if failed else None
        try:
            block.__aexit__(type(error) if error else None, error, None).send(None)
        except StopIteration:  # left without a wait or an error of its own
            return 0 if failed else 1
        except greensched.ForkedPool:
            return 1 if failed else 0
        return 2

    def left_in_child(pool: Pool, block: Any) -> int:
        with pool._manager.lock:  # as a thread may that the child does not have
            child = os.fork()
            if child == 0:
                status = 3
                try:
                    status = leave(block)
                finally:
                    os._exit(status)
        return os.waitpid(child, 0)[1]

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool:
            one, several = pool.partition(8), pool.partitions(8, 16)
            p = await one.__aenter__()
            await several.__aenter__()
            await p.run(lambda: None)
            for block in (one, several):
                assert left_in_child(pool, block) == 0
                await block.__aexit__(None, None, None)

    anyio.run(main)


def test_what_a_closed_loop_leased_can_be_had_without_waiting() -> None:
    """A request that does not wait gets a closed loop's SMs."""
    pool = Pool(driver="simulated:h200")
    kept: list[greensched.Partition] = []

    async def take() -> None:
        kept.append(pool.partition_nowait(ALL))

    async def main() -> None:
        async with pool:
            await asyncio.to_thread(asyncio.run, take())
            async with pool.partition_nowait(ALL):
                pass

    anyio.run(main)


def test_statistics_are_counted_while_executors_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor is added under the lock under which statistics count."""
    pool = Pool(driver="simulated:h200")
    add, held = DevicePool.add, list[bool]()

    def watched(site: DevicePool, executor: Any) -> None:
        held.append(pool._manager.lock._is_owned())
        add(site, executor)

    async def main() -> None:
        async with pool:
            monkeypatch.setattr(DevicePool, "add", watched)
            async with pool.partitions(24, 24, 24, 24), pool.partition(24):  # cells off the menu
                pass

    anyio.run(main)
    assert held
    assert all(held)


@pytest.mark.parametrize("status", [1, 700])
def test_memory_that_is_not_taken_back_is_nobodys_fault(status: int) -> None:
    """A refused `free` fails no upload, loses no staging, and is tried again."""
    driver = simulated.open("h200", faults=[Fail("free", status=status)])

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(16) as p:
            memory = p._open_lease().device_memory.memory
            (await p.upload(np.ones(2**20, np.uint8))).close()
            with await p.upload(np.ones(10)):
                pass
            with await p.upload(np.ones(10)):
                await until(lambda: memory.would_grow(0) or memory.used_bytes < 2**20)
            assert pool.is_ready

    asyncio.run(main())
