"""Leases: their sizes, their order, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator

import anyio
import pytest

import greensched
from greensched import ALL, REST, Pool, ServiceClass
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.waiting import until


@pytest.mark.fault("B3")
@pytest.mark.parametrize("sms", [1, 8, 9, 16, 24, 64, 100, 120])
def test_granted_is_at_least_what_was_asked_and_visible(backend: Backend, sms: int) -> None:
    """A partition has at least the requested SMs, in whole cells, and its count is visible."""

    async def main() -> None:
        async with backend.pool("h200") as pool, pool.partition(sms) as p:
            assert p.sm_count >= sms
            assert p.sm_count - sms < 16
            assert pool.statistics().sms_leased == p.sm_count

    backend.run(main)


def test_all_is_every_sm(backend: Backend) -> None:
    """ALL grants every SM, including the remainder, and leaves none free."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(ALL) as p:
            assert p.sm_count == pool.devices[0].sm_count
            assert pool.statistics().sms_free == 0
            with pytest.raises(greensched.WouldBlock):
                pool.partition_nowait(1)

    backend.run(main)


def test_joint_request_is_granted_as_one(backend: Backend) -> None:
    """`partitions(16, REST)` yields both parts in order, on one device."""

    async def main() -> None:
        async with backend.pool("h200") as pool, pool.partitions(16, REST) as (a, b):
            assert a.sm_count == 16
            assert a.device == b.device
            assert b.sm_count >= 132 - 16 - 12
            assert pool.statistics().leases == 2

    backend.run(main)


def test_rest_comes_first_when_written_first(backend: Backend) -> None:
    """`partitions` yields its parts in the order of its arguments, also with REST first."""

    async def main() -> None:
        async with (
            backend.pool("h200") as pool,
            pool.partitions(REST, 8, 16) as (rest, small, larger),
        ):
            assert (small.sm_count, larger.sm_count) == (8, 16)
            assert rest.sm_count > 90

    backend.run(main)


def test_elastic_size_takes_what_is_free(backend: Backend) -> None:
    """`(8, 64)` is granted as soon as 8 are free, with as many up to 64 as are free."""

    async def main() -> None:
        async with backend.pool("h20") as pool:
            async with pool.partition((8, 64)) as p:
                assert p.sm_count == 64
            most = pool.devices[0].sm_count
            async with pool.partition(most - 32), pool.partition((8, 64)) as p:
                assert 8 <= p.sm_count <= 32

    backend.run(main)


NO_SIZES = [0, -1, True, 1.5, "16", None, (8,), (64, 8), (0, 8), (8, "x"), float("nan")]


@pytest.mark.parametrize("sms", NO_SIZES)
def test_what_is_no_size_is_refused(backend: Backend, sms: object) -> None:
    """An invalid size is refused at the request, and the error says what is valid."""
    pool = backend.pool()
    with pytest.raises(greensched.InvalidSize, match="positive int"):
        pool.partition(sms)  # type: ignore[arg-type]


@pytest.mark.parametrize("sms", [133, 10**9])
def test_more_than_can_ever_be_is_refused_at_once(backend: Backend, sms: int) -> None:
    """A request above every device is refused at once, and the error gives the most."""

    async def main() -> None:
        async with backend.pool() as pool:
            with pytest.raises(greensched.TooManySMs) as refused:
                async with pool.partition(sms):
                    pass
            assert refused.value.most == pool.devices[0].sm_count
            assert str(refused.value.most) in str(refused.value)

    backend.run(main)


async def follow(pool: Pool, sms: object, name: object, order: list[object]) -> None:
    async with pool.partition(sms):  # type: ignore[arg-type]
        order.append(name)


def test_requests_are_granted_in_order(backend: Backend) -> None:
    """Requests of one size are granted in the order of arrival."""
    order: list[object] = []

    async def main() -> None:
        async with backend.pool() as pool, anyio.create_task_group() as tasks:
            async with pool.partition(ALL):
                for number in range(5):
                    tasks.start_soon(follow, pool, ALL, number, order)
                    await until(lambda number=number: pool.statistics().waiting > number)
        assert order == [0, 1, 2, 3, 4]

    backend.run(main)


def test_larger_priority_goes_first(backend: Backend) -> None:
    """A request of a class with a higher priority is granted before earlier ones."""
    order: list[object] = []
    services = [ServiceClass(name="batch"), ServiceClass(name="decode", priority=10)]

    async def one(pool: Pool, service: str) -> None:
        async with pool.partition(ALL, service=service):
            order.append(service)

    async def main() -> None:
        async with backend.pool(services=services) as pool, anyio.create_task_group() as tasks:
            async with pool.partition(ALL):
                for waiting, service in enumerate(("batch", "batch", "decode")):
                    tasks.start_soon(one, pool, service)
                    await until(lambda waiting=waiting: pool.statistics().waiting > waiting)
            assert pool.statistics().waiting
        assert order == ["decode", "batch", "batch"]

    backend.run(main)


@pytest.mark.fault("B8")
def test_queue_is_bounded(backend: Backend) -> None:
    """At the limit of the queue a request is refused at once, with `retry_after`."""

    async def main() -> None:
        order: list[object] = []
        async with backend.pool(max_waiting=2) as pool, anyio.create_task_group() as tasks:
            async with pool.partition(ALL):
                for number in range(2):
                    tasks.start_soon(follow, pool, 8, number, order)
                await until(lambda: pool.statistics().waiting == 2)
                async with anyio.create_task_group() as others:
                    others.start_soon(_refused_full, pool)
        assert sorted(order) == [0, 1]

    backend.run(main)


async def _refused_full(pool: Pool) -> None:
    with pytest.raises(greensched.QueueFull) as refused:
        await follow(pool, 8, None, [])
    assert refused.value.waiting == 2
    assert refused.value.retry_after > 0


@pytest.mark.fault("A7")
def test_deadline_passes_while_queued(backend: Backend) -> None:
    """A request not granted by its deadline raises DeadlineExceeded and leaves the queue."""

    async def late(pool: Pool) -> None:
        with pytest.raises(greensched.DeadlineExceeded):
            async with pool.partition(8, deadline=0.02):
                pass

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(ALL):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(late, pool)
            statistics = pool.statistics()
            assert (statistics.waiting, statistics.expired) == (0, 1)

    backend.run(main)


@pytest.mark.fault("A7")
def test_deadline_means_nothing_once_granted(backend: Backend) -> None:
    """A deadline applies to the queue; a granted lease outlives it."""

    async def main() -> None:
        driver = backend.driver()
        async with Pool(driver=driver) as pool, pool.partition(8, deadline=0.001) as p:
            granted = driver.time()
            await until(lambda: driver.time() > granted + 0.001)
            assert p.sm_count == 8

    backend.run(main)


@pytest.mark.fault("A14")
def test_asking_for_what_one_holds_is_reported(backend: Backend) -> None:
    """A task whose own leases make a request impossible gets WouldDeadlock."""

    async def main() -> None:
        async with backend.pool("h200") as pool, pool.partition(64):
            with pytest.raises(greensched.WouldDeadlock) as refused:
                async with pool.partition(ALL):
                    pass
            assert refused.value.holds == 64
            async with pool.partition(8) as inner:  # what can come, comes
                assert inner.sm_count == 8

    backend.run(main)


def test_nowait_is_granted_or_refused(backend: Backend) -> None:
    """`partition_nowait` returns a granted partition, or raises WouldBlock and takes nothing."""

    async def main() -> None:
        async with backend.pool() as pool:
            p = pool.partition_nowait(16)
            assert p.sm_count == 16
            assert pool.statistics().sms_leased == 16
            async with p:
                before = pool.statistics().sms_free
                with pytest.raises(greensched.WouldBlock):
                    pool.partition_nowait(ALL)
                assert pool.statistics().sms_free == before
            assert pool.statistics().sms_leased == 0

    backend.run(main)


def test_other_shapes_are_made_when_asked_for(backend: Backend) -> None:
    """Cells without an executor get one when requested, which is kept."""
    driver = backend.driver("h200")
    driver.kept.forget(0)  # a process keeps the contexts of its earlier pools, and opens with them

    async def main() -> None:
        pool = greensched.Pool(driver=driver, devices=[0])
        async with pool, pool.partitions(24, 24, 24, 24):
            with pytest.raises(greensched.WouldBlock, match="no executor"):
                pool.partition_nowait(24)
            made = pool.statistics().executors_made
            for _ in range(3):
                async with pool.partition(24) as p:
                    assert p.sm_count == 24
            assert pool.statistics().executors_made == made + 1
            async with pool.partition_nowait(24) as p:
                assert p.sm_count == 24

    backend.run(main)


def test_partition_outside_its_block_is_refused(backend: Backend) -> None:
    """Before and after its block a partition raises PartitionClosed and has no effect."""

    async def main() -> None:
        async with backend.pool() as pool:
            p = pool.partition(8)
            with pytest.raises(greensched.PartitionClosed, match="async with"):
                _ = p.sm_count
            async with p:
                pass
            for use in (lambda: p.sm_count, lambda: p.run(int), lambda: p.upload([1.0])):
                with pytest.raises(greensched.PartitionClosed):
                    use()

    backend.run(main)


def test_a_partition_is_entered_once(backend: Backend) -> None:
    """A second task that enters a partition, queued or granted, is refused; no SM is lost."""

    async def main() -> None:
        async with backend.pool() as pool:
            p = pool.partition(8)
            entered, left = anyio.Event(), anyio.Event()

            async def use() -> None:
                async with p:
                    entered.set()
                    await left.wait()

            async with anyio.create_task_group() as tasks:
                async with pool.partition(ALL):
                    tasks.start_soon(use)
                    await until(lambda: pool.statistics().waiting == 1)
                    with pytest.raises(greensched.InvalidRequest, match="entered already"):
                        await p.__aenter__()
                await entered.wait()
                with pytest.raises(greensched.InvalidRequest, match="entered already"):
                    await p.__aenter__()
                assert p.sm_count == 8
                left.set()
            with pytest.raises(greensched.PartitionClosed):
                await p.__aenter__()
            assert pool.statistics().sms_leased == 0

    backend.run(main)


def test_a_refused_partition_may_be_entered_again(backend: Backend) -> None:
    """A partition whose entry failed can be entered later."""

    async def main() -> None:
        async with backend.pool() as pool:
            p, both = pool.partition(8), pool.partitions(8, REST)
            async with pool.partition(ALL):
                for refused in (p, both):
                    with pytest.raises(greensched.WouldDeadlock):
                        await refused.__aenter__()
            async with p:
                pass
            async with both:
                with pytest.raises(greensched.InvalidRequest, match="entered already"):
                    await both.__aenter__()

    backend.run(main)


def test_a_member_of_a_joint_grant_is_not_entered_by_itself(backend: Backend) -> None:
    """Entering one member is refused; one that ended early hides no error of the others."""

    async def main() -> None:
        async with backend.pool() as pool:
            with pytest.raises(KeyError):
                async with pool.partitions(16, 8) as (a, b):
                    with pytest.raises(greensched.InvalidRequest, match="entered already"):
                        await b.__aenter__()
                    a._granted_lease().end()
                    raise KeyError
            await until(lambda: pool.statistics().leases == 0)

    backend.run(main)


def test_pool_outside_its_life_is_refused(backend: Backend) -> None:
    """A pool that is not open, or closed, raises an error that says how to open it."""

    async def main() -> None:
        pool = backend.pool()
        with pytest.raises(greensched.PoolClosed, match="async with pool"):
            async with pool.partition(8):
                pass
        async with pool:
            pass
        with pytest.raises(greensched.PoolClosed):
            async with pool.partition(8):
                pass
        with pytest.raises(greensched.PoolClosed):
            await pool.open()
        assert "closed" in repr(pool)

    backend.run(main)


def test_second_pool_on_a_device_is_refused(backend: Backend) -> None:
    """A second pool on a device is refused, because their partitions would overlap."""

    async def main() -> None:
        driver = backend.driver()
        async with Pool(driver=driver):
            with pytest.raises(greensched.DeviceTaken):
                await Pool(driver=driver).open()
        async with Pool(driver=driver) as after:
            assert after.is_ready

    backend.run(main)


@pytest.mark.fault("B5", "B6")
def test_big_request_is_not_starved_by_small_ones(backend: Backend) -> None:
    """Beside continuing small requests, a request for ALL is granted within the ageing."""

    async def main() -> None:
        async with backend.pool() as pool, anyio.create_task_group() as tasks:
            small = [0]

            async def keep_coming() -> None:
                while True:
                    async with pool.partition(8):
                        small[0] += 1
                        await anyio.sleep(0.002)  # its work: ageing goes by the backend's clock

            for _ in range(12):
                tasks.start_soon(keep_coming)
            await until(lambda: small[0] > 20)
            async with pool.partition(ALL) as p:
                assert p.sm_count == pool.devices[0].sm_count
            tasks.cancel_scope.cancel()

    backend.run(main)


@pytest.mark.fault("B10")
def test_statistics_and_repr_tell_the_truth(backend: Backend) -> None:
    """Leased, draining and free SMs add up at every step, in statistics and `repr`."""

    async def main() -> None:
        async with backend.pool() as pool:
            async with pool.partition(16) as p:
                with await Gate.closed(p):
                    s = pool.statistics()
                    assert (s.sms_leased, s.sms_draining) == (16, 0)
                    with pytest.raises(RuntimeError, match="mine"):
                        async with pool.partition(8) as q:
                            held = await Gate.closed(q)
                            raise RuntimeError("mine")
                    s = pool.statistics()
                    assert (s.sms_leased, s.sms_draining) == (16, 8)
                    assert 0 < s.sms_free <= s.sms_total - 24, "what one request can get"
                    assert "16 leased, 8 draining" in repr(pool)
                    held.open()
                    await until(lambda: pool.statistics().sms_draining == 0)
                    held._word.close()

    backend.run(main)


def test_the_first_lease_of_any_size_makes_no_executor(backend: Backend) -> None:
    """The executors of every size, alone or beside REST, are made when the pool opens."""

    async def main() -> None:
        async with backend.pool() as pool:
            made = pool.statistics().executors_made
            for sms in range(8, pool.devices[0].sm_count - 16, 8):
                async with pool.partition_nowait(sms):
                    pass
                async with pool.partitions(sms, greensched.REST):
                    pass
            assert pool.statistics().executors_made == made

    backend.run(main)


def test_a_generator_that_is_closed_has_left_its_block(backend: Backend) -> None:
    """Closing an async generator inside a block ends the block, without a warning."""

    async def numbers(pool: Pool) -> AsyncIterator[int]:
        async with pool.partition(8) as p:
            yield p.sm_count

    async def main() -> None:
        async with backend.pool() as pool:
            found = numbers(pool)
            assert await anext(found) >= 8
            await found.aclose()
            del found
            gc.collect()
            await until(lambda: pool.statistics().leases == 0)

    backend.run(main)
