"""Cached leases: reused by the next request for the same, and accounted for like any other."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest

from greensched import (
    ALL,
    Buffer,
    LaunchConfig,
    PartitionClosed,
    Pool,
    ServiceClass,
    WouldBlock,
    WouldDeadlock,
    current_call,
)
from greensched.device.launch import launch
from greensched.device.streams import Stream
from greensched.driver import simulated
from greensched.errors import DeviceLost, InvalidRequest
from greensched.kernels import fill, spin
from helpers.objects import library_objects
from helpers.waiting import turns

CONFIG = LaunchConfig(grid=1, block=8)


def cached(pool: Pool) -> int:
    """Return the number of cached leases."""
    return len(pool._manager.cache)


async def leased(pool: Pool, sms: int = 16) -> None:
    async with pool.partition(sms):
        pass


def on_h200(**options: object) -> Pool:
    return Pool(driver="simulated:h200", **options)  # type: ignore[arg-type]


def test_the_next_request_for_the_same_is_counted() -> None:
    """Successive leases reuse one grant, and each is counted."""

    async def main() -> None:
        async with on_h200() as pool:
            for _ in range(5):
                await leased(pool)
                assert cached(pool) == 1
            with_nowait = pool.partition_nowait(16)
            async with with_nowait as p:
                assert p.sm_count == 16
                assert cached(pool) == 0
            stats = pool.statistics()
            assert (stats.requested, stats.granted) == (6, 6)

    asyncio.run(main())


def test_leases_of_several_sizes_are_cached_side_by_side() -> None:
    """Sizes that fit beside each other are reused; one that does not fit reclaims them."""

    async def main() -> None:
        async with on_h200() as pool:
            for _ in range(3):
                await leased(pool, 16)
                await leased(pool, 24)
            assert cached(pool) == 2
            stats_before = pool._manager.scheduler.statistics()
            assert (stats_before.requested, stats_before.granted) == (6, 6)
            await leased(pool, 120)
            assert cached(pool) == 1

    asyncio.run(main())


def test_a_choice_of_devices_counts_cached_sms_as_free() -> None:
    """Cached SMs count as free when a request's device is chosen."""

    async def main() -> None:
        async with Pool(driver="simulated:h20x2") as pool:
            for _ in range(3):
                for sms in (16, 24):
                    async with pool.partition(sms) as p:
                        assert p.device_id == 0
            assert cached(pool) == 2
            async with pool.partition(16, device=1), pool.partition(32) as p:
                assert p.device_id == 0
            async with pool.partition(8, device=0), pool.partition(40) as p:
                assert p.device_id == 1

    asyncio.run(main())


def test_cached_sms_are_free_to_other_requests() -> None:
    """Statistics and other requests are as if nothing were cached."""

    async def main() -> None:
        async with on_h200() as pool:
            await leased(pool)
            stats = pool.statistics()
            assert (stats.sms_free, stats.sms_leased, stats.leases) == (132, 0, 0)
            await leased(pool)
            async with pool.partition(ALL) as p:
                assert p.sm_count == 132
            await leased(pool)
            async with pool.partition(120), pool.partition(8):
                assert pool.statistics().sms_free == 0  # 8 are given the 12 that are left over

    asyncio.run(main())


def test_a_left_block_stays_left() -> None:
    """A partition whose block ended is closed although its executor is in use again."""

    async def main() -> None:
        async with on_h200() as pool:
            async with pool.partition(16) as before:
                with await before.upload(np.zeros(8, np.float32)) as x:
                    await before.launch(CONFIG, fill, x, 1.0, 8)
            await leased(pool)
            async with pool.partition(16) as old:
                pass
            async with pool.partition(16):
                for wrong in (old, before):
                    with pytest.raises(PartitionClosed):
                        _ = wrong.sm_count
                    with pytest.raises(PartitionClosed):
                        wrong.launch(CONFIG, fill, x, 1.0, 8)
                    with pytest.raises(PartitionClosed):
                        async with wrong:
                            raise AssertionError
                    assert "closed" in repr(wrong)

    asyncio.run(main())


def test_queued_requests_go_before_the_cache() -> None:
    """A queued request gets returned SMs before their last holder."""

    async def main() -> None:
        async with on_h200() as pool:
            order: list[str] = []

            async def wait() -> None:
                async with pool.partition(132):
                    order.append("all")

            async with pool.partition(16):
                waiting = asyncio.create_task(wait())
                await turns()
            async with pool.partition(16):
                order.append("again")
            await waiting
            assert order == ["all", "again"]

    asyncio.run(main())


def test_the_holder_of_a_cached_lease_is_known() -> None:
    """A task with a cached lease gets WouldDeadlock for an impossible request."""

    async def main() -> None:
        async with on_h200() as pool:
            await leased(pool)
            async with pool.partition(16):
                with pytest.raises(WouldDeadlock):
                    await pool.partition(ALL).__aenter__()
            async with pool.partition(ALL):  # nor does it count once the block was left
                pass

    asyncio.run(main())


def test_a_cached_lease_keeps_no_task() -> None:
    """A cached lease keeps no reference to the task that held it."""

    async def main() -> None:
        async with on_h200() as pool:
            tasks = [asyncio.create_task(leased(pool)) for _ in range(3)]
            known = [weakref.ref(task) for task in tasks]
            await asyncio.gather(*tasks)
            tasks.clear()
            await turns()
            gc.collect()
            assert cached(pool)
            assert all(ref() is None for ref in known)

    asyncio.run(main())


def test_another_loop_asks_the_scheduler() -> None:
    """A lease is cached for its own loop; a request of another loop reclaims it."""

    async def main(pool: Pool) -> None:
        await leased(pool)
        other = threading.Thread(target=lambda: asyncio.run(leased(pool, 132)))
        other.start()
        await asyncio.to_thread(other.join)
        assert cached(pool) == 1  # the other's, whose loop is over
        await leased(pool)
        await leased(pool)
        assert pool.statistics().sms_free == 132

    async def all_of_it() -> None:
        async with on_h200() as pool:
            await main(pool)

    asyncio.run(all_of_it())


def test_one_loop_after_the_other() -> None:
    """A closed loop leaves no cached lease for the next loop on its thread."""
    pool = on_h200()

    async def first() -> None:
        await pool.open()
        await leased(pool)
        assert cached(pool) == 1

    async def second() -> None:
        async with pool.partition(16) as p, pool.partition(8):
            assert p.sm_count == 16
        await pool.aclose()

    asyncio.run(first())
    asyncio.run(second())


def test_a_request_outside_of_any_task_asks_the_scheduler() -> None:
    """Cached leases belong to tasks; a loop's callback gets a new grant."""

    async def main() -> None:
        async with on_h200() as pool:
            await leased(pool)
            granted = asyncio.get_running_loop().create_future()

            def ask() -> None:
                granted.set_result(pool.partition_nowait(16))

            asyncio.get_running_loop().call_soon(ask)
            async with await granted as p:
                assert p.sm_count == 16
                stats = pool.statistics()
                assert (stats.leases, stats.requested) == (1, 2)

    asyncio.run(main())


def test_a_class_is_charged_for_each_lease() -> None:
    """A class's leases are cached, counted, and charged for the time in which they are held."""
    clock = simulated.VirtualClock(seed=1)

    async def main() -> None:
        services = [ServiceClass("a", reserve=16), ServiceClass("b")]
        async with Pool(driver=simulated.open("h200", clock=clock), services=services) as pool:
            for _ in range(5):
                for service in ("a", "b"):
                    async with pool.partition(16, service=service):
                        await asyncio.sleep(0.010)
                    assert cached(pool)
                await asyncio.sleep(1.0)
            found = pool.statistics().services
            for service in ("a", "b"):
                assert found[service].granted == 5
                assert found[service].sm_seconds == pytest.approx(5 * 16 * 0.010, rel=1e-3)
                assert not found[service].sms

    clock.run(main)


def test_a_reserve_is_kept_though_leases_are_cached() -> None:
    """Cached cells are free, and count as no loan from a reserve."""

    async def main() -> None:
        services = [ServiceClass("a", reserve=64), ServiceClass("b")]
        async with on_h200(services=services) as pool:
            async with pool.partition(16, service="a"), pool.partition(16, service="b"):
                pass
            assert cached(pool) == 2
            async with pool.partition(56, service="b"):
                assert cached(pool) == 0
                with pytest.raises(WouldBlock):
                    pool.partition_nowait(16, service="b")
                async with pool.partition(64, service="a") as p:
                    assert p.sm_count == 64

    asyncio.run(main())


def test_a_change_of_classes_reclaims_the_cache() -> None:
    """Cached leases are reclaimed, and held leases are cached by the new rules."""

    async def main() -> None:
        async with on_h200() as pool:
            await leased(pool)
            async with pool.partition(24):
                pool.reconfigure(services=[ServiceClass("a", reserve=16)])
                assert not cached(pool)
            await leased(pool)
            assert cached(pool) == 1
            pool.reconfigure(services=[])
            await leased(pool)
            assert cached(pool) == 1
            assert pool.statistics().leases == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    "service",
    [
        ServiceClass("a", quota=1000.0),
        ServiceClass("a", shared=True, latency=1.0),
    ],
)
def test_what_needs_a_decision_is_not_cached(service: ServiceClass) -> None:
    """Leases with quotas, on devices that may split, or elastic ones, are decided each time."""

    async def main() -> None:
        async with on_h200(services=[service]) as pool:
            async with pool.partition(16, service="a"):
                pass
            assert not cached(pool)
        async with on_h200(services=[ServiceClass("a")]) as pool:
            async with pool.partition((8, 64), service="a"):
                pass
            assert not cached(pool)

    asyncio.run(main())


@pytest.mark.parametrize("services", [[], [ServiceClass("a")]])
def test_a_lease_of_a_known_duration_is_not_cached(services: list[ServiceClass]) -> None:
    """A lease whose duration a checkpoint gave is not cached."""

    async def main() -> None:
        async with on_h200(services=services) as pool:
            async with pool.partition(16) as p:
                await p.checkpoint(0.005)
            assert not cached(pool)
            async with pool.partition(16) as p:
                await p.checkpoint()
            assert cached(pool) == 1

    asyncio.run(main())


def test_a_fault_reclaims_the_cache() -> None:
    """After a device fault no cached lease is granted."""

    async def main() -> None:
        async with on_h200() as pool:
            await leased(pool)
            pool._manager.device_pools[0].device.health.fail(RuntimeError("the device is gone"))
            with pytest.raises(DeviceLost):
                await leased(pool)

    asyncio.run(main())


def leave_work() -> Stream:
    """Leave a kernel running on a stream of its own, as a library does."""
    call = current_call()
    assert call is not None
    own = Stream(call.stream.context)
    launch(own, LaunchConfig(grid=1, block=1), spin, 200_000_000)  # outlasts the lease
    return own


@pytest.mark.parametrize("use", ["run", "left", "stream", "context", "bind", "feed"])
def test_a_lease_with_work_left_is_ended(use: str) -> None:
    """A lease whose end must wait for other work is not cached."""

    async def main() -> None:
        async with on_h200() as pool:
            async with pool.partition(16) as p:
                with await p.empty(8) as x:
                    await p.launch(CONFIG, fill, x, 1.0, 8)
                    if use == "run":
                        p.run(int)
                    elif use == "left":
                        left = await p.run(leave_work)
                    elif use == "stream":
                        _ = p.stream
                    elif use == "context":
                        _ = p.context
                    elif use == "bind":
                        p.bind(CONFIG, fill, x, 1.0, 8)()
                    elif use == "feed":
                        async for _ in p.prefetch([np.zeros(4, np.float32)]):
                            pass
            assert not cached(pool)
            if use == "left":
                left.close()

    asyncio.run(main())


def test_calls_that_left_nothing_do_not_prevent_caching() -> None:
    """Calls that waited for their work, or failed, do not prevent caching."""

    async def main() -> None:
        async with on_h200() as pool:
            for _ in range(2):
                async with pool.partition(16) as p:
                    assert await p.run(int) == 0
                    with pytest.raises(ZeroDivisionError):
                        await p.run(lambda: 1 // 0)
                    assert await p.checkpoint() == 16
                assert cached(pool) == 1

    asyncio.run(main())


def test_what_an_earlier_call_left_says_nothing_of_a_later_one() -> None:
    """A call that leaves work ends its lease, although an earlier call left none."""

    async def main() -> None:
        async with on_h200() as pool:
            go, first_uses = threading.Event(), pool.devices[0].loader.first_uses

            def leave_work_beside_a_first_use() -> Stream:
                left = leave_work()
                first_uses.append(None)  # as another thread does: no context is recorded now
                return left

            async with pool.partition(16) as p:
                jobs = p.run(go.wait), p.run(leave_work_beside_a_first_use)
                go.set()
                await jobs[0]
                left = await jobs[1]
                first_uses.clear()
            assert not cached(pool)
            left.close()

    asyncio.run(main())


def test_done_bound_launches_do_not_prevent_caching() -> None:
    """A lease with awaited bound launches is cached, and its block closes them."""

    async def main() -> None:
        async with on_h200(prepare=[fill]) as pool:
            with await pool_empty(pool) as x:
                for _ in range(3):
                    async with pool.partition(16) as p:
                        bound = p.bind(CONFIG, fill, x, 1.0, 8)
                        bound()
                        await bound.submit()
                    assert cached(pool) == 1
                    with pytest.raises(PartitionClosed):
                        bound()
                stats = pool.statistics()
                assert (stats.granted, stats.leases) == (4, 0)

    asyncio.run(main())


async def pool_empty(pool: Pool) -> Buffer:
    async with pool.partition(16) as p:
        return await p.empty(8)


def test_a_removed_class_is_refused_though_it_was_used_before() -> None:
    """A request is parsed once by size and class, and again after a change of classes."""

    async def main() -> None:
        async with on_h200(services=[ServiceClass("a", reserve=16)]) as pool:
            for _ in range(2):
                async with pool.partition(16, service="a") as p:
                    assert p.sm_count == 16
            assert pool.statistics().services["a"].granted == 2
            pool.reconfigure(services=[ServiceClass("b")])
            with pytest.raises(InvalidRequest, match="service 'a'"):
                pool.partition(16, service="a")

    asyncio.run(main())


def test_a_lease_leaves_nothing_to_the_collector() -> None:
    """A lease's objects are freed without a collection, because none is in a cycle."""

    async def main() -> None:
        async with on_h200(services=[ServiceClass("a", reserve=16)]) as pool:

            async def lease(times: int) -> None:
                for _ in range(times):
                    async with pool.partition(16, service="a"):
                        pass

            await lease(2)
            gc.collect()
            gc.disable()
            try:
                before = library_objects()
                await lease(50)
                assert not {kind: n for kind, n in (library_objects() - before).items() if n >= 50}
            finally:
                gc.enable()

    asyncio.run(main())


def test_the_cache_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no more entries than are in use, although sizes and classes change."""
    monkeypatch.setattr("greensched.leasing.requests.MAX_REUSED", 2)

    async def main() -> None:
        async with on_h200() as pool:
            for sms in 8, 16, 24, 32, 8, 24, 32:
                await leased(pool, sms)
            for _ in range(5):
                pool.reconfigure(services=[ServiceClass("a")])
                async with pool.partition(8, service="a"):
                    pass
            assert len(pool._manager.cache._idle) <= 2

    asyncio.run(main())
