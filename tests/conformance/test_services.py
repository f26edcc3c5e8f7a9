"""Service classes of a pool: reserves, limits, deadlines, and changes of classes."""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import numpy as np
import pytest

import greensched
from greensched import ALL, LatencyCurve, Pool, ServiceClass
from helpers.backend import Backend
from helpers.waiting import until

IS_VERSIONED = False


async def hold(pool: Pool, sms: object, release: anyio.Event, **options: object) -> None:
    async with pool.partition(sms, **options):  # type: ignore[arg-type]
        await release.wait()


def test_a_reserve_is_free_for_its_owner(backend: Backend) -> None:
    """However many others wait, a class gets its reserve at once."""
    services = [ServiceClass("decode", reserve=16), ServiceClass("batch")]

    async def main() -> None:
        async with backend.pool(services=services) as pool, anyio.create_task_group() as tasks:
            release = anyio.Event()
            for _ in range(pool.statistics().sms_total // 8 + 2):
                tasks.start_soon(lambda: hold(pool, 8, release, service="batch"))
            await until(lambda: pool.statistics().waiting > 0)
            async with pool.partition(16, service="decode") as p:
                assert p.sm_count >= 16
                assert pool.statistics().services["decode"].sms == p.sm_count
            release.set()
        assert pool.state is greensched.PoolState.CLOSED

    backend.run(main)


@pytest.mark.parametrize(("reserve", "sms"), [(16, 8), (32, 16), (32, 8), (64, 32), (64, 16)])
def test_a_reserve_has_prebuilt_executors(backend: Backend, reserve: int, sms: int) -> None:
    """A class can lease its whole reserve in one size at once, without new executors."""
    services = [ServiceClass("decode", reserve=reserve), ServiceClass("batch")]

    async def main() -> None:
        async with backend.pool("h200", services=services) as pool, AsyncExitStack() as held:
            for _ in range(reserve // sms):
                p = await held.enter_async_context(pool.partition_nowait(sms, service="decode"))
                assert p.sm_count == sms
            await held.enter_async_context(pool.partition_nowait(32, service="batch"))

    backend.run(main)


def test_each_class_has_its_own_bound(backend: Backend) -> None:
    """At its class's limit a request is refused with a hint, while others may queue."""
    services = [ServiceClass("a", max_waiting=1), ServiceClass("b")]

    async def main() -> None:
        async with backend.pool(services=services) as pool, anyio.create_task_group() as tasks:
            release = anyio.Event()
            async with pool.partition(ALL):
                tasks.start_soon(lambda: hold(pool, 8, release, service="a"))
                tasks.start_soon(lambda: hold(pool, 8, release, service="b"))
                await until(lambda: pool.statistics().waiting == 2)
                async with anyio.create_task_group() as others:
                    others.start_soon(refused_full, pool)
            release.set()

    backend.run(main)


async def refused_full(pool: Pool) -> None:
    with pytest.raises(greensched.QueueFull) as refused:
        async with pool.partition(8, service="a"):
            raise AssertionError("granted")
    assert refused.value.waiting == 1
    assert refused.value.retry_after > 0


def test_what_cannot_be_in_time_is_refused_at_once(backend: Backend) -> None:
    """A known duration beyond the deadline or latency raises with the prediction."""
    services = [
        ServiceClass("decode", latency=0.010),
        ServiceClass("batch", latency=0.010, on_late="best_effort"),
    ]

    async def main() -> None:
        async with backend.pool(services=services) as pool:
            with pytest.raises(greensched.DeadlineImpossible) as refused:
                async with pool.partition(8, service="decode", duration=0.020):
                    raise AssertionError("granted")
            assert refused.value.predicted == pytest.approx(0.020)
            assert refused.value.deadline == pytest.approx(0.010)
            with pytest.raises(greensched.DeadlineImpossible):
                await pool.run(int, sms=8, duration=2.0, deadline=1.0)
            async with pool.partition(8, service="batch", duration=0.020):
                pass
            async with pool.partition(8, service="decode", duration=0.005):
                pass
            assert pool.statistics().waiting == 0

    backend.run(main)


def test_a_request_that_needs_less_now_is_granted_it(backend: Backend) -> None:
    """Under "sized", a request that goes first may shrink another's size to what is free."""
    services = [
        ServiceClass("first", priority=2),
        ServiceClass("decode", priority=1, latency=1.0),
        ServiceClass("bulk"),
    ]
    work = LatencyCurve({sms: [40.0 / sms] for sms in range(8, 129, 8)})

    async def main() -> None:
        async with (
            backend.pool("h200", services=services, policy="sized") as pool,
            anyio.create_task_group() as tasks,
        ):
            release = anyio.Event()
            async with pool.partition((8, 64), service="bulk"):
                tasks.start_soon(
                    lambda: hold(pool, (8, ALL), release, service="decode", duration=work)
                )
                await until(lambda: pool.statistics().waiting == 1)
                tasks.start_soon(lambda: hold(pool, 100, release, service="first"))
                await until(lambda: pool.statistics().services["decode"].sms > 0)
                assert pool.statistics().services["first"].waiting == 1
                release.set()

    backend.run(main)


@pytest.mark.fault("B11")
def test_classes_change_while_it_runs(backend: Backend) -> None:
    """Queued requests and leases go on, and new requests use the new classes."""

    async def main() -> None:
        async with backend.pool(services=[ServiceClass("a")]) as pool:
            release = anyio.Event()
            async with anyio.create_task_group() as tasks:
                async with pool.partition(ALL, service="a") as p:
                    tasks.start_soon(lambda: hold(pool, 8, release, service="a"))
                    await until(lambda: pool.statistics().waiting == 1)
                    pool.reconfigure(services=[ServiceClass("b", reserve=8)], policy="fair")
                    assert p.sm_count
                    with pytest.raises(greensched.InvalidRequest, match="has b"):
                        pool.partition(8, service="a")
                await until(lambda: pool.statistics().services["a"].sms > 0)
                async with pool.partition(8, service="b"):
                    pass
                release.set()
            with pytest.raises(greensched.InvalidRequest, match="reserves"):
                pool.reconfigure(services=[ServiceClass("b", reserve=10**6)])
            async with pool.partition(8, service="b"):
                pass
        with pytest.raises(greensched.PoolClosed):
            pool.reconfigure(policy="fifo")

    backend.run(main)


def test_a_request_for_reserved_sms_fails(backend: Backend) -> None:
    """New reserves that leave too little end a request's wait with a typed error."""

    async def refused(pool: Pool) -> None:
        with pytest.raises(greensched.TooManySMs):
            async with pool.partition(ALL):
                raise AssertionError("granted")

    async def main() -> None:
        async with backend.pool() as pool, anyio.create_task_group() as tasks:
            async with pool.partition(8):
                tasks.start_soon(refused, pool)
                await until(lambda: pool.statistics().waiting == 1)
                pool.reconfigure(services=[ServiceClass("a", reserve=8)])
                await until(lambda: pool.statistics().waiting == 0)

    backend.run(main)


def test_reserves_that_do_not_fit_are_refused_at_opening(backend: Backend) -> None:
    """A pool whose reserves exceed its devices raises and opens nothing."""

    async def main() -> None:
        pool = backend.pool(services=[ServiceClass("decode", reserve=10**6)])
        with pytest.raises(greensched.InvalidRequest, match="reserve=1000000"):
            await pool.open()
        await pool.aclose()

    backend.run(main)


@pytest.mark.parametrize(
    "options",
    [{"duration": 0}, {"duration": "1"}, {"duration": float("inf")}, {"near": 0}],
    ids=repr,
)
def test_what_is_no_cost_and_no_buffer_is_refused(backend: Backend, options: dict) -> None:
    """A duration must be seconds above 0 or a curve, and `near` a buffer."""

    async def main() -> None:
        async with backend.pool() as pool:
            with pytest.raises(greensched.InvalidRequest):
                pool.partition(8, **options)

    backend.run(main)


@pytest.mark.fault("F11")
def test_what_a_class_allocates_is_bounded(backend: Backend) -> None:
    """Beyond `memory_bytes` a job fails with OutOfMemory; closed buffers count no more."""
    services = [ServiceClass("a", memory_bytes=1 << 20), ServiceClass("b")]

    async def main() -> None:
        async with backend.pool(services=services) as pool:
            async with pool.partition(8, service="a") as p:
                half = await p.empty(1 << 19, np.uint8)
                with await p.upload(np.ones(1 << 19, np.uint8)):
                    with pytest.raises(greensched.OutOfMemory, match="'a'") as refused:
                        await p.empty(1, np.uint8)
                    assert (refused.value.free, refused.value.total) == (0, 1 << 20)
                    async with pool.partition(8, service="b") as q:
                        (await q.empty(1 << 21, np.uint8)).close()
                with await p.empty(1 << 19, np.uint8):
                    pass
                pool.reconfigure(services=[ServiceClass("a"), ServiceClass("b")])
                with await p.empty(1 << 21, np.uint8), half:
                    pass

    backend.run(main)


def test_classes_that_allow_it_are_on_all_sms_together(backend: Backend) -> None:
    """They share all SMs until one is late, and then have SMs of their own."""
    services = [
        ServiceClass("quick", shared=True, latency=10.0),
        ServiceClass("bulk", shared=True),
    ]

    async def main() -> None:
        async with backend.pool(services=services) as pool:
            total = pool.statistics().sms_total
            async with pool.partition(8, service="quick") as a:
                async with pool.partition((8, 16), service="bulk") as b:
                    assert (a.sm_count, b.sm_count) == (total, total)
                    assert a.is_shared
                    assert b.is_shared
                    assert a.stream.handle != b.stream.handle
                    data = np.arange(8, dtype=np.float32)
                    buffers = [await p.upload(data) for p in (a, b)]
                    for p, buffer in zip((a, b), buffers, strict=True):
                        np.testing.assert_array_equal(await p.download(buffer), data)
                        buffer.close()
                    pool.observe("quick", 11.0, 100)
                    assert not pool.statistics().services["bulk"].is_shared
                    assert await b.checkpoint() <= 16
                    assert not b.is_shared
                    async with pool.partition(8, service="quick") as c:
                        assert c.sm_count < total

    backend.run(main)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("missing", 1.0), "unknown service 'missing'"),
        (("quick", -1.0), "at least 0"),
        (("quick", "soon"), "at least 0"),
        (("quick", 1.0, 0), "from 1 to"),
        (("quick", 1.0, 10**400), "from 1 to"),
    ],
)
def test_what_is_no_latency_is_refused(backend: Backend, args: tuple, said: str) -> None:
    """The error says what a latency is."""

    async def main() -> None:
        async with backend.pool(services=[ServiceClass("quick", shared=True)]) as pool:
            with pytest.raises(greensched.InvalidRequest, match=said):
                pool.observe(*args)

    backend.run(main)
