"""Tasks that wait for a grant: each is granted, refused or cancelled once."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import anyio
import numpy as np
import pytest

from greensched import ALL, LaunchConfig, Partition, PartitionClosed, Pool, ServiceClass
from greensched.errors import DeadlineExceeded, DeviceLost, PoolClosed, WouldDeadlock
from greensched.execution.lease import Lease
from greensched.kernels import fill, spin
from helpers.waiting import turns, until

CONFIG = LaunchConfig(grid=1, block=8)
#: SMs that two have at a time, of 132.
HALF = 56
#: One has it at a time.
MOST = 120


def on_h200(**options: object) -> Pool:
    return Pool(driver="simulated:h200", **options)  # type: ignore[arg-type]


def lease_of(partition: Partition) -> Lease:
    assert partition._lease is not None
    return partition._lease


class Taker:
    """A task that waits for SMs and keeps them until it is released."""

    def __init__(self, pool: Pool, sms: int = HALF, deadline: float | None = None) -> None:
        self.pool = pool
        self.sms = sms
        self.deadline = deadline
        self.may_go = asyncio.Event()
        self.has: Partition | None = None
        self.task = asyncio.create_task(self._take())

    async def _take(self) -> None:
        async with self.pool.partition(self.sms, deadline=self.deadline) as self.has:
            await self.may_go.wait()

    async def go(self) -> None:
        self.may_go.set()
        await self.task


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_queued_tasks_are_granted_in_order(backend: str) -> None:
    """Tasks with equal requests are granted in order, and counted."""
    order = list[int]()

    async def main() -> None:
        async with on_h200() as pool:

            async def lease(number: int) -> None:
                async with pool.partition(MOST) as p:
                    order.append(number)
                    if number % 2:
                        with await p.upload(np.zeros(8, np.float32)) as x:
                            await p.launch(CONFIG, fill, x, number, 8)
                            assert list(await p.download(x)) == [number] * 8

            async with anyio.create_task_group() as group:
                async with pool.partition(ALL):
                    for number in range(20):
                        group.start_soon(lease, number)
                        await until(lambda n=number: pool.statistics().waiting == n + 1)
            stats = pool.statistics()
            assert (stats.sms_free, stats.leases, stats.waiting) == (132, 0, 0)
            assert (stats.requested, stats.granted, stats.cancelled) == (21, 21, 0)

    anyio.run(main, backend=backend)
    assert order == list(range(20))


def test_a_left_partition_stays_closed() -> None:
    """A partition whose block ended stays closed when its SMs are granted again."""

    async def main() -> None:
        async with on_h200() as pool:
            first, second, third = Taker(pool), Taker(pool), Taker(pool)
            await turns()
            old = first.has
            assert old is not None
            await first.go()
            await turns()
            assert third.has is not None
            with pytest.raises(PartitionClosed):
                _ = old.sm_count
            assert third.has.sm_count == HALF
            await third.go()
            await second.go()

    asyncio.run(main())


def test_a_task_cancelled_after_its_grant_leaves_the_sms_to_the_next() -> None:
    """The lease lasts less than a turn, and the next request gets its SMs."""

    async def main() -> None:
        async with on_h200() as pool:
            first, second, third, fourth = (Taker(pool) for _ in range(4))
            await turns()
            first.may_go.set()
            await until(lambda: pool.statistics().waiting == 1)
            third.task.cancel()
            await turns()
            assert third.task.cancelled()
            assert third.has is None
            assert fourth.has is not None
            assert pool.statistics().leases == 2
            await second.go()
            await fourth.go()
            assert pool.statistics().sms_free == 132

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancelled", "too late", "closed"])
def test_a_task_that_stops_waiting_is_not_referenced(how: str) -> None:
    """The task is freed at once, without a collection, while others wait."""

    async def wait(pool: Pool) -> None:
        async with pool.partition(HALF, deadline=0.01 if how == "too late" else None):
            pass

    async def leave(pool: Pool) -> None:
        entering = pool.partition(HALF).__aenter__()
        entering.send(None)
        entering.close()

    async def ended(pool: Pool) -> weakref.ref[asyncio.Task[None]]:
        task = asyncio.create_task((leave if how == "closed" else wait)(pool))
        await turns()
        if how == "cancelled":
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and how == "too late":
            assert isinstance(task.exception(), DeadlineExceeded)
        return weakref.ref(task)

    async def main() -> None:
        async with on_h200() as pool:
            keeper = Taker(pool, MOST)
            await turns()
            before = Taker(pool)
            await turns()
            gc.disable()
            left = await ended(pool)
            behind = Taker(pool)  # a new request removes what the collector left
            await turns()
            assert left() is None
            for each in (keeper, before, behind):
                await each.go()

    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_a_task_that_was_served_is_not_referenced() -> None:
    """It is freed although its entry stays behind earlier deadlines."""

    async def main() -> None:
        async with on_h200() as pool:
            keeper = Taker(pool, MOST)
            await turns()
            served = Taker(pool, MOST, deadline=100)
            behind = [Taker(pool, MOST, deadline=50) for _ in range(2)]
            await turns()
            await keeper.go()
            gc.disable()
            await served.go()
            left = weakref.ref(served.task)
            del served
            await turns()
            assert left() is None
            for each in behind:
                await each.go()

    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_a_fault_between_grant_and_turn_reaches_the_task() -> None:
    """A granted task that has not run since raises the fault."""

    async def main() -> None:
        async with on_h200() as pool:
            first, second, third = (Taker(pool) for _ in range(3))
            await turns()
            first.may_go.set()
            await until(lambda: pool.statistics().waiting == 0)
            assert third.has is None
            pool._manager.device_pools[0].device.health.fail(RuntimeError("the device is gone"))
            for taker in (third, second):
                taker.may_go.set()
                with pytest.raises(DeviceLost):
                    await taker.task

    asyncio.run(main())


def stop_before_its_turn(loop: asyncio.AbstractEventLoop, pool: Pool) -> Taker:
    """Return a task that has a grant and has not run since, because its loop is stopped."""
    first = pool.partition(MOST)

    async def begin() -> Taker:
        await pool.open()
        await first.__aenter__()
        taker = Taker(pool, MOST)
        await until(lambda: pool.statistics().waiting == 1)
        return taker

    async def leave() -> None:
        loop.stop()  # after this turn
        await first.__aexit__(None, None, None)

    taker = loop.run_until_complete(begin())
    leaving = loop.create_task(leave())
    loop.run_forever()
    assert leaving.done()
    assert pool.statistics().waiting == 0
    assert taker.has is None
    return taker


def test_a_loop_that_closes_before_the_turn_returns_the_lease() -> None:
    """The next request of another loop gets its SMs."""
    pool, gone = on_h200(), asyncio.new_event_loop()
    gone.set_exception_handler(lambda *_: None)
    taker = stop_before_its_turn(gone, pool)
    gone.close()

    async def go_on() -> None:
        async with pool.partition(ALL) as p:
            assert p.sm_count == 132
        assert pool.statistics().leases == 0
        await pool.aclose()

    asyncio.run(go_on())
    del taker
    gc.collect()  # what a closed loop leaves is collected, and says nothing


def test_a_loop_that_moved_to_another_thread_works_there() -> None:
    """A lease that is granted on one thread is used on its loop's present thread."""
    pool, loop, found = on_h200(), asyncio.new_event_loop(), list[float]()
    taker = stop_before_its_turn(loop, pool)

    async def work() -> None:
        await until(lambda: taker.has is not None)
        assert taker.has is not None
        with await taker.has.upload(np.full(8, 3, np.float32)) as x:
            found.extend(await taker.has.download(x))
        await taker.go()

    thread = threading.Thread(target=lambda: loop.run_until_complete(work()))
    thread.start()
    thread.join()
    assert found == [3.0] * 8
    loop.run_until_complete(pool.aclose())
    loop.close()


def test_a_pool_that_closes_before_the_turn_leaves_nothing_behind() -> None:
    """The unused lease ends with the pool while its loop is stopped; the task raises."""
    pool, loop = on_h200(), asyncio.new_event_loop()
    taker = stop_before_its_turn(loop, pool)
    assert asyncio.run(pool.aclose(grace=0.0)).abandoned == ()
    with pytest.raises(PoolClosed):
        loop.run_until_complete(taker.task)
    loop.close()


def test_a_granted_task_counts_as_the_holder() -> None:
    """A request that can never fit beside the task's lease is refused."""

    async def main() -> None:
        async with on_h200() as pool:
            first, second = Taker(pool), Taker(pool)
            await turns()

            async def greedy() -> None:
                async with pool.partition(HALF):
                    async with pool.partition(ALL):
                        raise AssertionError

            task = asyncio.create_task(greedy())
            await turns()
            await first.go()
            with pytest.raises(WouldDeadlock):
                await task
            await second.go()

    asyncio.run(main())


@pytest.mark.parametrize("device", [None, 0])  # one is parked at the end, and one is not
def test_nothing_is_kept_of_a_task_that_left(device: int | None) -> None:
    """Tasks and their results are freed at once, without a collection."""

    async def lease(pool: Pool) -> None:
        async with pool.partition(HALF, device=device):
            await asyncio.sleep(0)

    async def main() -> None:
        async with on_h200() as pool:
            tasks = [asyncio.create_task(lease(pool)) for _ in range(6)]
            known = [weakref.ref(task) for task in tasks]
            await asyncio.gather(*tasks)
            tasks.clear()
            await turns()
            assert [ref() for ref in known] == [None] * 6

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


@pytest.mark.parametrize("service", [None, "a"])
def test_work_and_classes_are_decided_on(service: str | None) -> None:
    """SMs are granted only after their work is done, by the rules of the classes."""

    async def main() -> None:
        async with on_h200(services=[ServiceClass("a")] if service else []) as pool:
            holdings = list[Lease]()

            async def lease() -> None:
                async with pool.partition(MOST, service=service) as p:
                    holdings.append(lease_of(p))
                    await turns(1)  # the others wait meanwhile
                    if service is None:
                        p.launch(CONFIG, spin, 100_000)

            await asyncio.gather(*(lease() for _ in range(5)))
            assert len(set(holdings)) == 5
            assert pool.statistics().sms_free == 132

    asyncio.run(main())


def test_a_task_on_another_loop_has_a_lease_of_its_own() -> None:
    """A lease belongs to one loop; a task of another loop gets a new one."""
    pool, here, there = on_h200(), asyncio.new_event_loop(), asyncio.new_event_loop()
    first = pool.partition(HALF)

    async def begin() -> None:
        await pool.open()
        await first.__aenter__()

    async def ask() -> list[Taker]:
        takers = [Taker(pool), Taker(pool)]
        await until(lambda: pool.statistics().waiting == 1)
        return takers

    async def finish(takers: list[Taker]) -> None:
        await until(lambda: takers[1].has is not None)
        assert takers[1].has is not None
        assert lease_of(takers[1].has) is not lease
        with await takers[1].has.upload(np.zeros(8, np.float32)) as x:
            assert list(await takers[1].has.download(x)) == [0.0] * 8
        for taker in takers:
            await taker.go()

    here.run_until_complete(begin())
    lease = lease_of(first)
    takers = there.run_until_complete(ask())
    here.run_until_complete(first.__aexit__(None, None, None))
    there.run_until_complete(finish(takers))
    here.run_until_complete(pool.aclose())
    for loop in (here, there):
        loop.close()


@pytest.mark.fault("I10")
def test_a_deadline_that_passed_while_the_loop_was_blocked_is_kept() -> None:
    """After a blocked loop, a request that is late by then is not granted."""
    pool = Pool(driver="simulated:h200")

    async def late() -> None:
        with pytest.raises(DeadlineExceeded):
            async with pool.partition(ALL, deadline=10.0):
                pass

    async def main() -> None:
        async with pool, anyio.create_task_group() as tasks:
            async with pool.partition(ALL):
                tasks.start_soon(late)
                await until(lambda: pool.statistics().waiting == 1)
                manager = pool._manager
                before = manager._time
                manager._time = lambda: before() + 11.0  # the loop is blocked meanwhile
            manager._time = before
        assert manager.scheduler.statistics().expired == 1

    anyio.run(main)
