"""Requests, leases and work of a loop that closed are taken over by other loops."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import greensched
from greensched import ALL, Buffer, LaunchConfig, Partition, Pool
from greensched.driver import simulated
from greensched.kernels import spin
from greensched.leasing.manager import TICK_S, LeaseManager
from greensched.scheduling.policy import Fifo
from helpers.gate import Gate
from helpers.waiting import until

ONE = LaunchConfig(grid=1, block=1)
#: Whole device of the preset used here.
EVERY_SM = 132
KERNEL_NS = 20_000


class Loops:
    """Two asyncio loops that one thread runs in turns, so that a test controls the order."""

    def __init__(self) -> None:
        self.here, self.there = asyncio.new_event_loop(), asyncio.new_event_loop()
        for loop in (self.here, self.there):
            loop.set_exception_handler(lambda *_: None)

    def on_here(self, main: Awaitable[Any]) -> Any:
        return self.here.run_until_complete(main)

    def on_there(self, main: Awaitable[Any]) -> Any:
        return self.there.run_until_complete(main)

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def loops() -> Any:
    loops = Loops()
    yield loops
    loops.close()


async def lease_once(pool: Pool, sms: Any, served: list[int]) -> None:
    async with pool.partition(sms) as p:
        served.append(p.sm_count)


async def ask(pool: Pool, sms: Any, served: list[int]) -> asyncio.Task[None]:
    """Start a task that waits for a lease."""
    waiting = pool.statistics().waiting
    task = asyncio.create_task(lease_once(pool, sms, served))
    await until(lambda: pool.statistics().waiting > waiting)
    return task


def test_what_is_granted_to_a_closed_loop_goes_to_the_next(loops: Loops) -> None:
    """Cells that become free for a closed loop's request are granted to the next request."""
    pool, served = Pool(driver="simulated:h200"), list[int]()

    async def wait_and_close(task: asyncio.Task[None]) -> None:
        await task
        s = pool.statistics()
        assert (s.sms_free, s.leases, s.waiting) == (EVERY_SM, 0, 0)
        await pool.aclose()

    loops.on_here(pool.open())
    held = pool.partition(ALL)
    loops.on_here(held.__aenter__())
    lost = loops.on_there(ask(pool, ALL, served))
    mine = loops.on_here(ask(pool, ALL, served))
    loops.there.close()
    loops.on_here(held.__aexit__(None, None, None))
    loops.on_here(wait_and_close(mine))
    assert served == [EVERY_SM]
    assert not lost.done()
    del lost
    gc.collect()  # what a closed loop leaves is collected, and says nothing


def test_requests_that_wait_share_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new request does not check the whole queue, and its deadline is still kept."""
    clock = simulated.VirtualClock(seed=1)
    driver, tend, tended = (
        simulated.open("h200", clock=clock),
        LeaseManager._on_queue_tick,
        list[LeaseManager](),
    )

    def counted(manager: LeaseManager) -> float:
        tended.append(manager)
        return tend(manager)

    async def follow(pool: Pool) -> None:
        async with pool.partition(8, deadline=TICK_S / 10):
            pass

    async def main() -> None:
        async with Pool(driver=driver) as pool:
            async with pool.partition(ALL):
                waiting = [asyncio.create_task(lease_once(pool, 8, [])) for _ in range(50)]
                await until(lambda: pool.statistics().waiting == len(waiting))
                assert len(tended) == 1
                began = driver.time()
                with pytest.raises(greensched.DeadlineExceeded):
                    await asyncio.create_task(follow(pool))
                assert driver.time() - began < TICK_S / 2
            await asyncio.gather(*waiting)

    monkeypatch.setattr(LeaseManager, "_on_queue_tick", counted)
    clock.run(main)


@pytest.mark.fault("D6")
def test_a_closed_loops_lease_ends_when_its_work_is_done(loops: Loops) -> None:
    """Another loop ends a closed loop's lease, and only after its work."""
    pool, gates = Pool(driver="simulated:h200"), list[Gate]()

    async def take() -> Partition:
        p = await pool.partition(16).__aenter__()
        gates.append(await Gate.closed(p))
        p.launch(ONE, spin, KERNEL_NS)
        return p

    async def follow() -> None:
        with pytest.raises(greensched.DeadlineExceeded):
            async with pool.partition(ALL, deadline=0.06):
                pass
        assert pool.statistics().sms_draining == 16
        gates[0].open()
        async with pool.partition(ALL) as q:
            assert q.sm_count == EVERY_SM
        gates[0]._word.close()
        await pool.aclose()

    loops.on_here(pool.open())
    p = loops.on_there(take())
    loops.there.close()
    loops.on_here(follow())
    with pytest.raises(greensched.PartitionClosed):
        p.launch(ONE, spin, 1)


def test_a_task_of_a_closed_loop_that_waited_for_a_drain_blocks_no_other(loops: Loops) -> None:
    """Another loop ends the lease for whose drain the closed loop's task waited."""
    pool, gates = Pool(driver="simulated:h200"), list[Gate]()

    async def leave() -> None:
        async with pool.partition(ALL) as p:
            gates.append(await Gate.closed(p))

    async def wait_there() -> asyncio.Task[None]:
        task = asyncio.create_task(leave())
        await until(lambda: pool.statistics().sms_draining == EVERY_SM)
        return task

    async def follow() -> None:
        waiting = asyncio.create_task(lease_once(pool, ALL, served))
        await until(lambda: pool.statistics().waiting == 1)
        gates[0].open()
        await waiting
        gates[0]._word.close()
        await pool.aclose()

    served, said = list[int](), list[object]()
    loops.here.set_exception_handler(lambda _, context: said.append(context))
    loops.on_here(pool.open())
    lost = loops.on_there(wait_there())
    loops.there.close()
    loops.on_here(follow())
    assert (served, said) == ([EVERY_SM], [])
    assert not lost.done()
    del lost
    gc.collect()  # what a closed loop leaves is collected, and says nothing


def test_a_loop_that_closes_meanwhile_holds_up_no_closing(loops: Loops) -> None:
    """`aclose` returns at once if the loop of the last open lease closes."""
    pool = Pool(driver="simulated:h200")
    left = pool.partition(16)

    async def close() -> None:
        closing = asyncio.create_task(pool.aclose(grace=1000.0))
        await until(lambda: pool.state is greensched.PoolState.CLOSING)
        loops.there.close()
        assert not (await closing).abandoned

    loops.on_here(pool.open())
    loops.on_there(left.__aenter__())
    loops.on_here(close())


@pytest.mark.parametrize("sms", [16, ALL], ids=repr)
def test_requests_of_a_closed_loop_block_no_others(loops: Loops, sms: Any) -> None:
    """A closed loop's queued request keeps no SM from others, even if it has aged."""
    pool, gates, served = Pool(driver="simulated:h200", policy=Fifo(ageing=0)), [], list[int]()
    p = pool.partition(16)

    async def take_and_ask() -> asyncio.Task[None]:
        await p.__aenter__()
        gates.append(await Gate.closed(p))
        p.launch(ONE, spin, KERNEL_NS)
        return await ask(pool, ALL, served)

    async def go_on() -> None:
        if sms is ALL:
            gates[0].open()
        await lease_once(pool, sms, served)  # beside the kernel of the closed loop, 116 are free
        gates[0].open()
        await until(lambda: pool.statistics().sms_free == EVERY_SM)
        gates[0]._word.close()
        await pool.aclose()

    loops.on_here(pool.open())
    lost = loops.on_there(take_and_ask())
    loops.there.close()
    loops.on_here(go_on())
    assert served == [EVERY_SM if sms is ALL else 16]
    assert not lost.done()


def test_a_grant_that_a_closed_loop_never_heard_of_goes_to_others(loops: Loops) -> None:
    """If a loop closes between a grant and its task's next turn, no SM is lost."""
    pool, served = Pool(driver="simulated:h200"), list[int]()
    held = pool.partition(ALL)

    async def go_on() -> None:
        await held.__aexit__(None, None, None)
        assert pool.statistics().granted == 2
        loops.there.close()
        await lease_once(pool, ALL, served)
        await pool.aclose()

    loops.on_here(pool.open())
    loops.on_here(held.__aenter__())
    lost = loops.on_there(ask(pool, ALL, served))
    loops.on_here(go_on())
    assert served == [EVERY_SM]
    assert not lost.done()


def test_a_closed_loops_downloads_give_their_staging_back(loops: Loops) -> None:
    """Downloads in flight of a closed loop complete, and their staging memory is free."""
    pool, gates, out = Pool(driver="simulated:h200"), list[Gate](), np.zeros(10)
    p = pool.partition(16)

    async def take() -> Buffer:
        await p.__aenter__()
        buffer = await p.upload(np.ones(10))
        gates.append(await Gate.closed(p))
        p.download(buffer, out)
        return buffer

    async def go_on() -> None:
        slots = pool._manager.device_pools[0].slots
        under_way = len(slots._free)
        gates[0].open()
        await lease_once(pool, ALL, [])
        assert out.all()
        assert len(slots._free) == under_way + 1
        buffer.close()
        gates[0]._word.close()
        await pool.aclose()

    loops.on_here(pool.open())
    buffer = loops.on_there(take())
    loops.there.close()
    loops.on_here(go_on())


def test_a_closing_whose_loop_closed_is_finished_by_another(loops: Loops) -> None:
    """If a loop closes during its `aclose`, the next `aclose` closes the pool."""
    pool = Pool(driver="simulated:h200")
    p = pool.partition(16)
    tasks: list[asyncio.Task[object]] = []

    async def begin() -> None:
        await p.__aenter__()
        tasks.append(asyncio.create_task(pool.aclose(grace=1000.0)))
        await until(lambda: pool.state is greensched.PoolState.CLOSING)

    loops.on_here(pool.open())
    loops.on_there(begin())
    loops.there.close()
    assert not loops.on_here(pool.aclose(grace=1000.0)).abandoned
    assert pool.state is greensched.PoolState.CLOSED


def test_loops_in_turns_leave_nothing_behind(loops: Loops) -> None:
    """Two loops that one thread runs in turns are two loops for the pool."""
    pool, served = Pool(driver="simulated:h200"), list[int]()
    loops.on_here(pool.open())
    for _ in range(20):
        loops.on_here(lease_once(pool, 8, served))
        loops.on_there(lease_once(pool, 8, served))
    assert len(pool._manager.pollers._pollers) == 2
    loops.on_here(pool.aclose())


async def take_and_work(pool: Pool, sms: int) -> Partition:
    """Lease SMs, and return with a lease that has not ended and whose work is done."""
    p = await pool.partition(sms).__aenter__()
    await p.launch(ONE, spin, KERNEL_NS)
    return p


@pytest.mark.fault("I2")
@pytest.mark.parametrize("sms", [(8, ALL), 8], ids=repr)
def test_requests_that_never_wait_take_over_from_a_closed_loop(
    loops: Loops, sms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed loop's SMs return even if no request waits and no statistics are read."""
    monkeypatch.setattr("greensched.leasing.manager.TICK_S", 0.005)
    pool = Pool(driver="simulated:h200")
    manager = pool._lifecycle

    async def use() -> None:
        while any(lease.grant.sms == 96 for lease in manager.manager().leases):
            async with pool.partition(sms, duration=1e-3):
                pass
        await pool.aclose()

    loops.on_here(pool.open())
    left = loops.on_there(take_and_work(pool, 96))
    loops.on_here(lease_once(pool, sms, []))
    loops.there.close()
    loops.on_here(use())
    with pytest.raises(greensched.PartitionClosed):
        left.launch(ONE, spin, 1)


@pytest.mark.fault("I2")
def test_a_checkpoint_takes_over_from_a_closed_loop(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An elastic lease grows into a closed loop's SMs without any other request."""
    monkeypatch.setattr("greensched.leasing.manager.TICK_S", 0.005)
    pool = Pool(driver="simulated:h200")
    elastic = pool.partition((8, ALL))

    async def grow() -> None:
        while elastic.sm_count < EVERY_SM:
            await elastic.checkpoint()
        await elastic.__aexit__(None, None, None)
        await pool.aclose()

    loops.on_here(pool.open())
    loops.on_there(take_and_work(pool, 96))
    loops.on_here(elastic.__aenter__())
    loops.there.close()
    loops.on_here(grow())


@pytest.mark.fault("I2")
def test_statistics_take_over_from_a_closed_loop(loops: Loops) -> None:
    """Statistics count SMs of a closed loop as free once its work is done."""
    pool = Pool(driver="simulated:h200")

    async def ask_statistics() -> None:
        s = pool.statistics()
        assert (s.sms_free, s.sms_leased, s.sms_draining) == (EVERY_SM, 0, 0)
        await pool.aclose()

    loops.on_here(pool.open())
    loops.on_there(take_and_work(pool, 96))
    loops.there.close()
    loops.on_here(ask_statistics())


@pytest.mark.fault("I2")
def test_statistics_without_a_loop_have_another_loop_take_over(loops: Loops) -> None:
    """A thread that only reads statistics, such as a scraper, sees the SMs return."""
    pool = Pool(driver="simulated:h200")

    async def scrape() -> None:
        await until(lambda: on_a_thread(pool.statistics).sms_free == EVERY_SM)
        await pool.aclose()

    loops.on_here(pool.open())
    loops.on_here(lease_once(pool, 8, []))
    loops.on_there(take_and_work(pool, 96))
    loops.there.close()
    loops.on_here(scrape())


def on_a_thread(function: Any) -> Any:
    """Return the result of a function on a thread without a loop."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


@pytest.mark.fault("I15")
def test_nowait_takes_over_from_a_closed_loop(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`partition_nowait` gets a closed loop's SMs at once, before the next periodic check."""
    monkeypatch.setattr("greensched.leasing.manager.TICK_S", 1000.0)
    pool = Pool(driver="simulated:h200")

    async def use() -> None:
        async with pool.partition_nowait(ALL) as p:
            assert p.sm_count == EVERY_SM
        await pool.aclose()

    loops.on_here(pool.open())
    loops.on_here(lease_once(pool, ALL, []))
    loops.on_there(take_and_work(pool, 96))
    loops.there.close()
    loops.on_here(use())


@pytest.mark.parametrize("error", [None, ValueError("of the block")], ids=["ended", "failed"])
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "open"])
def test_a_block_left_in_another_loop_ends_its_lease(
    loops: Loops, is_closed: bool, error: ValueError | None
) -> None:
    """The other loop cannot wait for the work, so leaving raises; no SM is lost."""
    pool, gates = Pool(driver="simulated:h200"), list[Gate]()
    p = pool.partition(96)

    async def enter() -> None:
        await p.__aenter__()
        gates.append(await Gate.closed(p))

    async def leave() -> None:
        if error is not None:
            await p.__aexit__(ValueError, error, None)
        elif is_closed:
            with pytest.raises(greensched.PartitionClosed, match="its event loop is"):
                await p.__aexit__(None, None, None)
        else:
            with pytest.raises(greensched.WrongThread, match="the loop that entered it"):
                await p.__aexit__(None, None, None)
        gates[0].open()

    async def close() -> None:
        await until(lambda: pool.statistics().sms_free == EVERY_SM)
        gates[0]._word.close()
        await pool.aclose()

    loops.on_here(pool.open())
    loops.on_there(enter())
    if is_closed:
        loops.there.close()
    loops.on_here(leave())
    if not is_closed:
        loops.on_there(until(lambda: pool.statistics().sms_free == EVERY_SM))
    loops.on_here(close())


def test_a_lease_waits_for_its_work_only_in_its_own_loop(loops: Loops) -> None:
    """In another loop of the same thread every waiting method raises and changes nothing."""
    pool = Pool(driver="simulated:h200")
    p = pool.partition((8, 64))
    idle = p.idle()

    async def wait_there() -> None:
        for wait in (p.checkpoint, p.drain, p.idle().__aenter__):
            with pytest.raises(greensched.WrongThread, match="the loop that entered it"):
                await wait()

    async def leave_idle_there() -> None:
        with pytest.raises(greensched.WrongThread, match="the loop that entered it"):
            await idle.__aexit__(None, None, None)

    async def end() -> None:
        await idle.__aexit__(None, None, None)
        assert p.sm_count == 64
        await p.__aexit__(None, None, None)
        await pool.aclose()

    loops.on_here(pool.open())
    loops.on_here(p.__aenter__())
    loops.on_there(wait_there())
    loops.on_here(idle.__aenter__())
    loops.on_there(leave_idle_there())
    loops.on_here(end())


def test_a_holder_that_waits_to_go_on_in_a_closed_loop_is_forgotten(loops: Loops) -> None:
    """When its task is collected, its request leaves the queue and its lease has no SMs."""
    pool, others = Pool(driver="simulated:h200"), list[Partition]()

    async def idle() -> None:
        async with pool.partition(16) as p:
            async with p.idle():
                others.append(await pool.partition(ALL).__aenter__())

    async def start() -> asyncio.Task[None]:
        task = asyncio.create_task(idle())
        await until(lambda: pool.statistics().waiting == 1)
        return task

    async def use() -> None:
        await others.pop().__aexit__(None, None, None)
        await until(lambda: pool.statistics().leases == 0)
        async with pool.partition(ALL) as p:
            assert await p.run(int) == 0
        assert pool.statistics().waiting == 0
        await pool.aclose()

    loops.on_here(pool.open())
    lost = loops.on_there(start())
    assert not lost.done()
    loops.there.close()
    del lost
    gc.collect()
    loops.on_here(use())
