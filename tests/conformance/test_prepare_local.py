"""Classes with sizes: their executors are few, and their state is made before traffic."""

from __future__ import annotations

import anyio
import pytest

import greensched
from greensched import ALL, Pool, ServiceClass
from helpers.backend import Backend

IS_VERSIONED = False

#: Sizes that exist on every device here: the least is one cell of 8 SMs.
DECODE = ServiceClass("decode", sizes=(8, 16, 32), cap=32, reserve=8)
PREFILL = ServiceClass("prefill", sizes=(16, 32), cap=32)
CLASSES = [DECODE, PREFILL, ServiceClass("any")]


class Made:
    """Stands for captured graphs: records its SMs, and is closed with them."""

    def __init__(self) -> None:
        self.sms: list[int] = []

    def __call__(self) -> int:
        call = greensched.current_call()
        assert call is not None
        self.sms.append(call.sm_count)
        return call.sm_count


def test_state_is_made_for_every_executor_of_a_class(backend: Backend) -> None:
    """It is made once, with progress, and leases of the class make none later."""
    make, told = Made(), list[tuple[int, int]]()

    async def main() -> None:
        async with backend.pool(services=CLASSES) as pool:
            known = pool.executors("decode")
            expected = [8, 8, 8, 8, 16, 16, 32]
            assert sorted(one.sm_count for one in known) == expected
            for _ in range(2):
                await pool.prepare_local("decode", make, progress=lambda *done: told.append(done))
            assert sorted(make.sms) == expected
            assert told == [(n, 7) for n in range(1, 8)] * 2
            assert pool.statistics().values_made == 0
            await serve(pool)
            assert sorted(make.sms) == expected
            assert pool.statistics().values_made == 0
            async with pool.partition(16, service="prefill") as p:
                assert await p.local(make) == 16
            assert pool.statistics().values_made == 1
            assert pool.statistics().leases == 0

    async def serve(pool: Pool) -> None:
        async with pool.partition((8, 32), service="decode") as p:
            for _ in range(3):
                assert await p.local(make) == p.sm_count
                await p.checkpoint()
        async with pool.partition(8, service="decode") as p, pool.partition(8, service="decode"):
            assert await p.local(make) == 8

    backend.run(main)


def test_the_same_size_has_the_same_sms_beside_other_leases(backend: Backend) -> None:
    """A size of the class always has the same stream, whatever others lease."""

    async def main() -> None:
        async with backend.pool("h20", services=CLASSES) as pool:
            streams: dict[int, set[int]] = {}
            for others in ((), (16,), (32,), (8, 8)):
                async with anyio.create_task_group() as tasks:
                    held = [pool.partition_nowait(sms, service="any") for sms in others]
                    for size in (8, 16, 32):
                        async with pool.partition(size, service="decode") as p:
                            streams.setdefault(size, set()).add(p.stream.address)
                    for one in held:
                        tasks.start_soon(enter, one)
            assert [len(met) for met in streams.values()] == [1, 1, 1]

    async def enter(p: greensched.Partition) -> None:
        async with p:
            pass

    backend.run(main)


def test_a_closed_pool_has_no_executors(backend: Backend) -> None:
    """`executors` is empty, and `prepare_local` is refused."""

    async def main() -> None:
        async with backend.pool(services=CLASSES) as pool:
            pass
        with pytest.raises(greensched.PoolClosed):
            pool.executors("decode")
        with pytest.raises(greensched.PoolClosed):
            await pool.prepare_local("decode", Made())

    backend.run(main)


def test_preparing_says_what_keeps_it_from_going_on(backend: Backend) -> None:
    """Leased SMs, a class without sizes, a wrong function, and the function's own errors."""

    def fail() -> None:
        raise ValueError("no graph")

    async def main() -> None:
        async with backend.pool(services=CLASSES) as pool:
            with pytest.raises(greensched.InvalidRequest, match="'any' names no sizes"):
                pool.executors("any")
            with pytest.raises(
                greensched.InvalidRequest,
                match="unknown service 'other': this pool has decode, prefill, any",
            ):
                await pool.prepare_local("other", fail)
            with pytest.raises(greensched.InvalidRequest, match="function"):
                await pool.prepare_local("decode", 5)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="no graph"):
                await pool.prepare_local("decode", fail)
            async with pool.partition((8, ALL), service="any"), pool.partition(8, service="decode"):
                with pytest.raises(greensched.WouldBlock, match="before traffic"):
                    await pool.prepare_local("decode", Made())
            await pool.prepare_local("decode", Made())

    backend.run(main)


def test_other_classes_have_other_executors_at_once(backend: Backend) -> None:
    """`reconfigure` makes the missing executors of the new sizes."""

    async def main() -> None:
        async with backend.pool("h20", services=CLASSES) as pool:
            pool.reconfigure(services=[ServiceClass("decode", sizes=(24, 40), cap=40)])
            make = Made()
            await pool.prepare_local("decode", make)
            assert make.sms == [24, 40]
            async with pool.partition((24, 40), service="decode") as p:
                assert await p.local(make) == 40
            assert pool.statistics().values_made == 0

    backend.run(main)
