"""Executors after many tickets, many loops and failed calls."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
import pytest

from greensched import CUDAError, Device, DeviceLost, Job, LaunchConfig, Pool, ServiceClass
from greensched.device.tickets import LINE, PAGE, TicketMemory
from greensched.driver import simulated
from greensched.driver.simulated import Fail
from greensched.driver.types import StreamHandle
from greensched.execution.call_context import current_call
from greensched.execution.threads import WorkerThread
from greensched.kernels import fill, spin
from helpers.gate import Gate
from helpers.small_executors import at_most, one_cell_executors
from helpers.waiting import turns, until

ONE = LaunchConfig(grid=1, block=32)
BIG = np.ones(1 << 20, np.float32)


def test_partitions_that_exchange_buffers_do_not_wait_in_a_circle() -> None:
    """Each waits only for the other's earlier work, not for later work."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partitions(8, 8) as (a, b):
            x, y, z = [await a.upload(BIG) for _ in range(3)]
            with x, y, z:
                jobs = b.copy(x, BIG + 1), a.copy(y, x), b.copy(z, y)
                for job in jobs:
                    await job
                np.testing.assert_array_equal(await a.download(z), BIG + 1)

    anyio.run(main)


def test_small_arrays_are_read_at_once_however_many() -> None:
    """After `upload` returns, an array of at most 64 KiB may change, even the hundredth."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            array = np.zeros(16, np.float32)
            jobs = []
            with await Gate.closed(p) as gate:
                for number in range(150):
                    array[:] = number
                    jobs.append(p.upload(array))
                gate.open()
                buffers = [await job for job in jobs]
            for number, buffer in enumerate(buffers):
                with buffer:
                    assert (await p.download(buffer))[0] == number

    anyio.run(main)


def test_a_call_in_flight_is_not_forgotten_by_a_later_launch() -> None:
    """A buffer in use by a call is written elsewhere only after the call has returned."""

    async def main() -> None:
        async with (
            Pool(driver="simulated:h200") as pool,
            pool.partition(8) as p,
            pool.partition(8) as q,
        ):
            await p.prepare(ONE, fill)
            go = threading.Event()
            with await p.upload(np.ones(64, np.float32)) as x:
                call = p.run(lambda _: go.wait(), x)
                await p.launch(ONE, fill, x, 2.0, 64)
                copy = q.copy(x, np.zeros(64, np.float32))
                await turns()
                assert not copy.done()
                go.set()
                await call
                await copy

    anyio.run(main)


def test_a_loop_that_only_awaited_leaves_nothing_behind() -> None:
    """A closed loop that awaited one job does not keep its executor."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool:
            async with pool.partition(8) as p:
                await p.prepare(ONE, spin)
                with await Gate.closed(p) as gate:
                    job = p.launch(ONE, spin, 1000)

                    async def give_up() -> None:
                        with anyio.move_on_after(0.02):
                            await job

                    await asyncio.to_thread(lambda: asyncio.run(give_up()))
                    gate.open()
                await job
            async with pool.partition(8) as p:
                with await p.upload(BIG) as x:
                    assert (await p.run(lambda: 7)) == 7
                    assert (await p.download(x))[0] == 1

    anyio.run(main)


@pytest.mark.parametrize("first", [2**31 - 3, 2**32 - 3], ids=["half", "whole"])
def test_tickets_never_wrap(first: int) -> None:
    """After 2**31 and 2**32 tickets, old work is done and new work is waited for."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            old = p.upload(np.ones(8, np.float32))
            buffer = await old
            track = p._open_lease().launch_stream
            track.issued = track.submitted = first
            track.word[0] = first & 0xFFFFFFFF
            with buffer, await Gate.closed(p) as gate:
                assert old.done()
                jobs = [p.copy(buffer, np.full(8, n, np.float32)) for n in range(6)]
                await turns()
                assert not any(job.done() for job in jobs)
                gate.open()
                for job in jobs:
                    await job
                assert (await p.download(buffer))[0] == 5

    anyio.run(main)


def test_a_refused_order_fails_one_job() -> None:
    """If the driver refuses to order a launch after another lease, only that job fails."""
    driver = simulated.open("h200", faults=[])

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partitions(8, 8) as (p, q):
            for partition in (p, q):
                await partition.prepare(ONE, fill)
            with await p.upload(np.zeros(8, np.float32)) as x:
                with await Gate.closed(q) as gate:
                    behind = q.launch(ONE, fill, x, 1.0, 8)
                    next_one = driver.script.calls["record_event"] + 1
                    driver.script.add(Fail("record_event", nth=next_one, status="INVALID_VALUE"))
                    refused = p.launch(ONE, fill, x, 2.0, 8)
                    gate.open()
                await behind
                with pytest.raises(Exception, match="INVALID_VALUE"):
                    await refused
                await p.launch(ONE, fill, x, 3.0, 8)
                assert (await p.download(x))[0] == 3

    anyio.run(main)


@pytest.mark.fault("D16")
def test_no_thread_fails_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can start, the job that needs one fails; the lease and its caller go on."""
    driver = simulated.open("h200")

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            with monkeypatch.context() as patch:
                patch.setattr(driver, "start_thread", refuse)
                with p.call.entered() as here:
                    upload, call = p.upload(BIG), p.run(lambda: 1)
                    assert current_call() is here
            for job in (upload, call):
                with pytest.raises(RuntimeError, match="new thread"):
                    await job
            assert await p.run(lambda: 2) == 2
        await until(lambda: pool.statistics().leases == 0)

    anyio.run(main)


def test_a_job_is_awaited_though_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can start to wait in the driver, the loop polls."""
    driver = simulated.open("h200")
    start, asked = driver.start_thread, list[str]()

    def refuse(body: Callable[[], None], name: str) -> None:
        if name.endswith(" wait"):
            asked.append(name)
            raise RuntimeError("can't start new thread")
        start(body, name)

    async def finish(job: Job[None]) -> None:
        await job

    async def main() -> None:
        async with Pool(driver=driver, prepare=[spin]) as pool, pool.partition(8) as p:
            monkeypatch.setattr(driver, "start_thread", refuse)
            with await Gate.closed(p) as gate:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(finish, p.launch(ONE, spin, 1))
                    await until(lambda: bool(asked))
                    gate.open()

    anyio.run(main)


def test_a_call_has_its_context_whatever_the_one_before_it_left() -> None:
    """A call after one that changed the current context has the partition's."""
    driver = simulated.open("h200")
    gate = threading.Event()

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:

            def spoil() -> None:
                gate.wait()
                driver.set_current(pool.devices[0].primary.handle)

            spoilt, behind = p.run(spoil), p.run(driver.current)
            gate.set()
            await spoilt
            assert await behind == p.context.handle

    anyio.run(main)


def test_a_name_that_is_none_keeps_no_ticket() -> None:
    """A callable whose `__name__` is not a string runs like any other."""

    class Proxy:
        __name__ = None

        def __call__(self) -> int:
            return 5

    async def main() -> None:
        async with Pool(driver=simulated.open("h200")) as pool, pool.partition(8) as p:
            assert await p.run(Proxy()) == 5
            await p.checkpoint()

    anyio.run(main)


@pytest.mark.fault("D11")
def test_a_close_that_raises_systemexit_ends_the_executor_alone() -> None:
    """The pool closes although a kept object's `close` raises SystemExit."""

    class Kept:
        def close(self) -> None:
            sys.exit("no")

    async def main() -> None:
        pool = await Pool(driver=simulated.open("h200")).__aenter__()
        async with pool.partition(8) as p:
            await p.local(Kept)
        await pool.aclose()

    anyio.run(main)


def test_a_context_that_cannot_be_entered_fails_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the context cannot be entered, all queued calls fail, and the lease goes on."""
    driver = simulated.open("h200")

    def refuse(*_: Any) -> None:
        raise RuntimeError("not now")

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            with monkeypatch.context() as patch:
                patch.setattr(driver, "set_current", refuse)
                calls = [p.run(lambda: 1) for _ in range(3)]
                for call in calls:
                    with pytest.raises(RuntimeError, match="not now"):
                        await call
            assert await p.run(lambda: 2) == 2

    anyio.run(main)


@pytest.mark.fault("C1")
def test_a_thread_that_cannot_leave_its_context_tells_that_the_device_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If a driver ends during a call, the log does not blame the call."""
    driver = simulated.open("h200")
    context = Device(0, driver=driver).primary
    thread = WorkerThread(driver, "greensched test", context)
    thread.submit(lambda: driver.script.add(Fail("set_current", 2, "DEINITIALIZED", 10**9)))
    thread.stop()
    assert "set_current: DEINITIALIZED" in str(context.health.failure)
    assert not caplog.records


@pytest.mark.fault("C1", "C3")
@pytest.mark.parametrize("status", ["INVALID_VALUE", "ILLEGAL_ADDRESS"])
def test_a_thread_that_cannot_enter_its_context_once_hides_nothing(status: str) -> None:
    """A passing failure is tried again; a lost device is the cause of later errors."""
    driver = simulated.open("h20", clock=simulated.VirtualClock())

    async def main() -> None:
        pool = Pool(driver=driver)
        await pool.open()
        with suppress(DeviceLost):
            async with pool.partition(8) as p:
                now = driver.script.calls["current"]
                driver.script.add(Fail("current", now + 1, status))
                launched = p.launch(ONE, spin, 1000)  # a thread loads the kernel for its first use
                if status == "INVALID_VALUE":
                    await launched
                else:
                    with pytest.raises(DeviceLost, match="current: ILLEGAL_ADDRESS"):
                        await launched
        assert pool.is_ready == (status == "INVALID_VALUE")
        await pool.aclose()

    driver.clock.run(main)


def test_executors_beside_the_menu_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many odd shapes are requested, each is granted, and few executors are made.

    Each set of cells would keep 4 MiB of the device until the process ends.
    """
    one_cell_executors(monkeypatch)
    clock = simulated.VirtualClock(seed=1)
    driver = simulated.open("h200", clock=clock)
    rng, sizes = random.Random(1), (16, 24, 40, 56, 72, 88, 104)
    seen: list[int] = []

    async def main() -> None:
        async with at_most(Pool(driver=driver), 40) as pool:

            async def ask(size: int, seconds: float) -> None:
                async with pool.partition(size):
                    await anyio.sleep(seconds)

            for _ in range(8):
                async with anyio.create_task_group() as tasks:
                    for _ in range(100):
                        tasks.start_soon(ask, rng.choice(sizes), rng.random())
                seen.append(pool.statistics().executors)

    clock.run(main)
    assert seen == [40] * 8
    assert driver.kept.count(0)["green context"] == seen[-1]
    assert not driver.live()


def test_everything_awaited_has_been_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is not done before the thread that submitted it says so, however fast the GPU is.

    Or a launch after it would be submitted later: into a capture that was begun in between.
    """
    written, go = threading.Event(), threading.Event()
    bind = simulated.SimulatedDriver.bind_mark

    def slow_to_return(
        driver: simulated.SimulatedDriver, stream: StreamHandle, address: int
    ) -> Callable[[int], None]:
        mark = bind(driver, stream, address)

        def marked(value: int) -> None:
            mark(value)
            if threading.current_thread().name.endswith("submit"):
                driver.synchronize_stream(stream)
                written.set()
                go.wait()

        return marked

    monkeypatch.setattr(simulated.SimulatedDriver, "bind_mark", slow_to_return)

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            job = p.upload(BIG)
            await until(written.is_set)
            await turns()
            assert not job.done()
            go.set()
            (await job).close()
            assert p._open_lease().all_submitted

    anyio.run(main)


def test_one_page_of_words_that_cannot_be_ended_keeps_no_other() -> None:
    """Every page of words is freed, even if the driver refuses the first."""
    driver = simulated.open("h200")
    device = Device(0, driver=driver)
    words = TicketMemory(device.primary)
    tracks = [words.create_stream(device.primary) for _ in range(PAGE // LINE + 1)]
    for track in tracks:
        track.close()
    assert driver.live()["pinned memory"] == 2
    driver.script.add(Fail("free_host"))
    with pytest.raises(CUDAError, match="INVALID_VALUE"):
        words.close()
    assert driver.live()["pinned memory"] == 1
    words.close()
    driver.close()


def test_words_given_back_are_used_again() -> None:
    """Streams that come and go reuse words and need no further page."""
    driver = simulated.open("h200")
    device = Device(0, driver=driver)
    words = TicketMemory(device.primary)
    for _ in range(3):
        tracks = [words.create_stream(device.primary) for _ in range(3 * PAGE // LINE)]
        for track in tracks:
            track.close()
    assert driver.live() == {"primary": 1, "pinned memory": 3}
    words.close()
    device.close()
    driver.close()


def test_a_track_that_cannot_be_made_keeps_no_word() -> None:
    """If the driver refuses a stream, its words are free again."""
    driver = simulated.open("h200")
    device = Device(0, driver=driver)
    words = TicketMemory(device.primary)
    driver.script.add(Fail("bind_mark", last=PAGE // LINE + 1))
    for _ in range(PAGE // LINE + 1):
        with pytest.raises(CUDAError, match="bind_mark"):
            words.create_stream(device.primary)
    assert driver.live() == {"primary": 1, "pinned memory": 1}
    words.close()
    device.close()
    driver.close()


@pytest.mark.fault("I15")
@pytest.mark.parametrize("holds_call", [False, True])
def test_a_call_overtakes_nothing_that_is_on_the_way(holds_call: bool) -> None:
    """Calls begin behind launches and calls that the submit thread has yet to pass on.

    It is held up before it submits the launch, or behind that, before it passes the call on.
    """
    order: list[str] = []

    async def main() -> None:
        launched, go_on = threading.Event(), threading.Event()

        def launch(_: int) -> None:
            if not holds_call:
                go_on.wait()
            order.append("launch")

        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            lease = p._open_lease()
            lease.executor.submit_in_order(launched.wait)
            lease.submit("launch", launch, may_block=True)
            if holds_call:
                lease.executor.submit_in_order(go_on.wait)
            jobs = [p.run(order.append, "first")]
            launched.set()
            if holds_call:
                await until(lambda: lease.all_submitted)
            jobs.append(p.run(order.append, "second"))
            await turns()
            go_on.set()
            for job in jobs:
                await job

    anyio.run(main)
    assert order == ["launch", "first", "second"]


@pytest.mark.fault("I15")
def test_each_call_finds_the_green_context_current() -> None:
    """A context that one call leaves current is not current in the next call."""
    driver = simulated.open("h200")
    go_on = threading.Event()

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            jobs = [
                p.run(go_on.wait),
                p.run(driver.set_current, pool.devices[0].primary.handle),
                p.run(driver.current),
            ]
            go_on.set()
            found = [await job for job in jobs]
            assert found[-1] == p._open_lease().executor.context.handle

    anyio.run(main)


@pytest.mark.fault("I15")
def test_a_lease_ends_behind_its_copies() -> None:
    """Cells stay leased while a copy beside the launches runs, however the lease ends."""
    clock = simulated.VirtualClock(seed=1)
    driver = simulated.open("h200", clock=clock)

    async def main() -> None:
        async with Pool(driver=driver) as pool:
            word = None
            with pytest.raises(LookupError):
                async with pool.partition(8) as p:
                    async for buffer in p.prefetch([BIG[:8]]):
                        buffer.close()
                    word = await p.empty_pinned(1, np.uint32)
                    lease = p._open_lease()
                    copies = lease.executor.copy_stream
                    assert copies is not None
                    driver.wait_value(copies.stream.handle, word.address, 1)
                    lease.submit("copy", lambda _: None, on_copy_stream=True)
                    raise LookupError
            await anyio.sleep(1)
            assert pool.statistics().sms_draining == 8
            assert word is not None
            word.array[0] = 1
            await until(lambda: pool.statistics().sms_draining == 0)
            word.close()

    clock.run(main)


def test_an_executor_that_cannot_be_made_fails_what_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`prepare_local` raises the driver's error, holds nothing, and works later."""
    one_cell_executors(monkeypatch)
    driver = simulated.open("h200", clock=simulated.VirtualClock())

    async def main() -> None:
        async with Pool(driver=driver) as pool:
            made, now = pool.statistics().executors, driver.script.calls["create_green"]
            # Of the three that `reconfigure` has made, and of the first again.
            driver.script.add(Fail("create_green", now + 1, "OUT_OF_MEMORY", now + 4))
            pool.reconfigure(services=[ServiceClass("a", sizes=(40,))])
            with pytest.raises(CUDAError, match="create_green: OUT_OF_MEMORY"):
                await pool.prepare_local("a", object)
            assert (pool.statistics().sms_free, pool.statistics().executors) == (132, made)
            assert not pool._lifecycle.manager().builder._makings
            await pool.prepare_local("a", object)
            assert (pool.statistics().sms_free, pool.statistics().executors) == (132, made + 3)

    driver.clock.run(main)


def test_a_lease_ends_although_a_library_captures_in_its_context(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An event cannot cover the context's work then; threads wait for the context instead."""
    driver = simulated.open("h200", clock=simulated.VirtualClock())

    async def main() -> None:
        async with Pool(driver=driver) as pool:
            async with pool.partition(8) as p:
                with p.context:
                    pass
                now = driver.script.calls["record_green"]
                status = "STREAM_CAPTURE_UNSUPPORTED"
                driver.script.add(Fail("record_green", now + 1, status, now + 2))
            assert driver.script.calls["record_green"] == now + 2
            assert pool.statistics().sms_free == 132

    driver.clock.run(main)
    (record,) = caplog.records
    assert "an event cannot capture the green context's work" in record.getMessage()
