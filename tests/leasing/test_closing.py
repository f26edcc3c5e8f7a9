"""What `aclose` waits for: leases that are held, and leases that are granted but not entered."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
import pytest

import greensched
from greensched import ALL, LaunchConfig, Pool, PoolState, ServiceClass
from greensched.driver import simulated
from greensched.driver.simulated import Fail, Hang
from greensched.kernels import spin
from greensched.leasing.missing_executors import MissingExecutors
from helpers.waiting import turns, until

ONE = LaunchConfig(grid=1, block=1)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_closed_while_a_grant_is_on_its_way(backend: Any, seed: int) -> None:
    """A lease that is granted as the pool closes may end within the grace."""
    clock = simulated.VirtualClock(seed=seed)
    driver = simulated.open("h200", clock=clock)

    async def main() -> None:
        pool = Pool(driver=driver)
        await pool.open()
        held = pool.partition(ALL)
        await held.__aenter__()
        sums: list[float] = []

        async def ask() -> None:
            async with pool.partition(16) as p:
                with await p.upload(np.ones(10)) as b:
                    sums.append((await p.download(b)).sum())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: pool.statistics().waiting == 1)
            held._granted_lease().end()  # grants
            report = await pool.aclose(grace=5.0)
        assert sums == [10.0]
        assert not report.abandoned

    clock.run(main, backend=backend)
    assert not driver.live()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_closed_while_an_executor_is_made(backend: Any, seed: int) -> None:
    """A request that waits for an executor is granted or refused."""
    clock = simulated.VirtualClock(seed=seed)
    driver = simulated.open("h200", clock=clock)

    async def main() -> None:
        pool = Pool(driver=driver)
        await pool.open()
        ended: list[str] = []

        async def ask() -> None:
            try:
                async with pool.partitions(8, 8, 24, 40, 16) as parts:
                    for p in parts:
                        with await p.upload(np.ones(10)):
                            pass
                ended.append("worked")
            except greensched.PoolClosed:
                ended.append("told")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: pool.statistics().sms_leased == 96)
            report = await pool.aclose(grace=5.0)
        assert len(ended) == 1
        assert not report.abandoned

    clock.run(main, backend=backend)
    assert not driver.live()


class Contended:
    """A lock that reports when a thread had to wait for it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.had_to_wait = threading.Event()

    def acquire(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.had_to_wait.set()
            self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Slow(list[Any]):
    """A list whose first `append` waits for an event elsewhere."""

    def __init__(self, go: threading.Event, happened: list[threading.Event]) -> None:
        super().__init__()
        self._go = go
        self._happened = happened

    def append(self, item: Any) -> None:
        """Wait for the event, then append."""
        self._go.set()
        while not any(event.is_set() for event in self._happened):
            time.sleep(0)  # lets the other thread have the GIL, and no time pass
        super().append(item)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("faults", [[Hang("spin")], []], ids=["hangs", "takes 5 s"])
def test_closed_while_an_executor_waits_for_a_kernel(
    backend: Any, seed: int, faults: list[Any]
) -> None:
    """Closing does not wait for an executor that waits for a kernel, and abandons both."""
    clock = simulated.VirtualClock(seed=seed)
    driver = simulated.open("h200x2", clock=clock, faults=faults)

    async def main() -> None:
        pool = Pool(driver=driver)
        await pool.open()

        async def hang() -> None:
            with suppress(greensched.PoolClosed):
                async with pool.partition(8, device=0) as p:
                    await p.launch(ONE, spin, 5_000_000_000)

        async def ask() -> None:  # for a set of cells that has no executor
            with suppress(greensched.PoolClosed):
                async with pool.partitions(24, 40, 16, 24, device=0):
                    pytest.fail("no executor had to be made")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hang)
            await anyio.sleep(0.1)
            tasks.start_soon(ask)
            await anyio.sleep(1)
            began = anyio.current_time()
            report = await pool.aclose(grace=0.5)
            assert anyio.current_time() - began == pytest.approx(0.5, abs=0.01)
            await anyio.sleep(10)  # the builder makes it yet, if it can
            at_end = pool.statistics()
            assert at_end.executors_made - at_end.executors == (not faults)
            tasks.cancel_scope.cancel()
        assert report.abandoned
        assert not any("device 1" in left.lower() for left in report.abandoned)

    clock.run(main, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_closed_while_prepare_local_waits_for_a_kernel(backend: Any) -> None:
    """Neither the closing nor `prepare_local` waits for an executor that cannot be made."""
    clock = simulated.VirtualClock(seed=1)
    driver = simulated.open("h200", clock=clock, faults=[Hang("spin")])
    service = ServiceClass("decode", sizes=(88,), cap=88)

    async def main() -> None:
        pool = Pool(driver=driver)
        await pool.open()
        made = driver.script.calls["create_green"]
        driver.script.add(Fail("create_green", made + 1, "OUT_OF_MEMORY"))
        pool.reconfigure(services=[service])
        await until(lambda: driver.script.calls["create_green"] > made)

        async def hang() -> None:
            with suppress(greensched.PoolClosed):
                async with pool.partition(8) as p:
                    await p.launch(ONE, spin, 1)

        async def prepare() -> None:
            with pytest.raises(greensched.PoolClosed):
                await pool.prepare_local("decode", list)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hang)
            await anyio.sleep(0.1)
            tasks.start_soon(prepare)
            await anyio.sleep(1)
            began = anyio.current_time()
            with anyio.move_on_after(5):
                assert (await pool.aclose(grace=0.5)).abandoned
            assert anyio.current_time() - began == pytest.approx(0.5, abs=0.01)

    clock.run(main, backend=backend)


@pytest.mark.white_box
def test_a_closing_hears_of_the_last_lease_of_another_thread() -> None:
    """If the last lease ends elsewhere just as `aclose` looks, it does not wait for its grace."""
    pool = Pool(driver="simulated:h200")
    held, go, over = threading.Event(), threading.Event(), threading.Event()

    async def hold() -> None:
        async with pool.partition(16):
            held.set()
            await until(go.is_set)
        over.set()

    async def main() -> None:
        await pool.open()
        thread = threading.Thread(target=lambda: asyncio.run(hold()))
        thread.start()
        await until(held.is_set)
        manager: Any = pool._manager
        manager.lock = manager.cache._lock = Contended(manager.lock)
        manager._idle_waiters = Slow(go, [over, manager.lock.had_to_wait])
        async with asyncio.timeout(20):
            assert not (await pool.aclose(grace=1000.0)).abandoned
        thread.join()

    asyncio.run(main())


def test_a_pool_whose_block_is_collected_is_closed() -> None:
    """A block may be collected while a lock is held, so a thread closes the pool."""
    driver = simulated.open("h200")
    pool = Pool(driver=driver)

    async def forget() -> None:
        async with pool:
            await asyncio.get_running_loop().create_future()

    async def main() -> None:
        forgotten = forget()
        task = asyncio.create_task(forgotten)
        await until(lambda: pool.is_ready)
        await turns()
        manager: Any = pool._manager
        with manager.lock:
            with suppress(GeneratorExit):
                forgotten.throw(GeneratorExit)
        await until(lambda: pool.state is greensched.PoolState.CLOSED)
        await until(lambda: not driver.live())
        task.cancel()
        with suppress(RuntimeError, asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_pool_collected_while_it_opens_is_closed() -> None:
    """A pool that is collected while it opens is closed."""
    driver = simulated.open("h200")
    pool = Pool(driver=driver)

    async def main() -> None:
        opening = pool.__aenter__()
        opening.send(None)
        opening.close()
        await until(lambda: pool.state is greensched.PoolState.CLOSED)
        await until(lambda: not driver.live())

    asyncio.run(main())


def test_a_pool_whose_block_ends_after_it_was_closed_starts_no_thread() -> None:
    """A closed pool is not closed again when its block is collected."""

    async def main() -> None:
        pool = Pool(driver="simulated:h200")
        await pool.open()
        await pool.aclose()
        before = threading.active_count()
        await pool.__aexit__(GeneratorExit, None, None)
        assert threading.active_count() <= before

    asyncio.run(main())


@pytest.mark.fault("D16")
def test_an_opening_without_a_thread_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`open` raises if no thread can start, and a later `open` begins anew."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        driver = simulated.open("h200")
        pool = Pool(driver=driver)
        with monkeypatch.context() as patch:
            patch.setattr(driver, "start_thread", refuse)
            with pytest.raises(RuntimeError, match="thread"):
                await pool.open()
        async with pool, pool.partition(8):
            pass

    asyncio.run(main())


def test_a_closing_without_a_thread_waits_for_the_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can start, the builder's thread closes the pool."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        driver = simulated.open("h200")
        async with Pool(driver=driver) as pool:
            monkeypatch.setattr(MissingExecutors, "is_held_up", True)
            monkeypatch.setattr(driver, "start_thread", refuse)
            with suppress(RuntimeError):
                await pool.aclose()
            async with asyncio.timeout(5):
                assert not (await pool.aclose()).abandoned

    asyncio.run(main())


def test_closed_before_it_was_open() -> None:
    """Every use of a pool that is closed while it opens raises."""

    async def main() -> None:
        pool = Pool(driver="simulated:h200")
        opening = asyncio.create_task(pool.open())
        await asyncio.sleep(0)
        closing = asyncio.create_task(pool.aclose())
        await asyncio.sleep(0)
        assert "clos" in repr(pool)
        with suppress(greensched.PoolClosed):
            pool.statistics()
        with suppress(greensched.PoolClosed):
            await opening
        assert not (await closing).abandoned

    asyncio.run(main())


def test_closed_as_another_thread_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is opened and closed concurrently is closed and leaves nothing open."""

    async def main() -> None:
        driver = simulated.open("h200")
        pool = Pool(driver=driver)
        opening, begin = pool.open().__await__(), pool._lifecycle._begin_closing

        def open_first() -> object:
            opening.send(None)
            return begin()

        monkeypatch.setattr(pool._lifecycle, "_begin_closing", open_first)
        assert not (await pool.aclose()).abandoned
        opening.close()
        assert pool.state is greensched.PoolState.CLOSED
        async with Pool(driver=driver):
            pass

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(8))
def test_closed_while_its_opening_fails(seed: int) -> None:
    """An opening that fails during the closing interferes with nothing."""
    clock = simulated.VirtualClock(seed=seed)
    driver = simulated.open("h200", clock=clock, faults=[Fail("create_memory_pool", status=2)])

    async def main() -> None:
        pool = Pool(driver=driver)
        async with anyio.create_task_group() as tasks:

            async def open_it() -> None:
                with suppress(greensched.GreenschedError):
                    await pool.open()

            tasks.start_soon(open_it)
            await turns(seed)
            assert not (await pool.aclose()).abandoned
        assert pool.state is greensched.PoolState.CLOSED

    clock.run(main)
    assert not driver.live()


def test_collected_blocks_of_sync_wait_for_no_loop() -> None:
    """Collected blocks end their lease, pool and loop on any thread, without waiting."""
    pool = Pool(driver="simulated:h20")

    def generate() -> Iterator[None]:
        with pool.sync, pool.sync.partition(16):
            yield

    async def collect(entered: list[Iterator[None]]) -> None:
        entered.clear()
        await until(lambda: pool.state is PoolState.CLOSED)

    entered = [generate()]
    next(entered[0])
    pool.sync.call(collect, entered)
    assert pool.statistics().sms_leased == 0
    assert pool.sync._loop._thread is None
