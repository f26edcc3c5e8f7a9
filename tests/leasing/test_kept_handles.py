"""Streams and green contexts outlive their pool, and the next pool reuses them."""

from __future__ import annotations

import gc
import os
from collections.abc import Awaitable, Callable
from typing import Any, cast

import anyio
import pytest

import greensched
from greensched import ALL, REST, ContextOptions, Device, LaunchConfig, Pool
from greensched.driver import simulated
from greensched.driver.kept_handles import KeptContext, KeptHandles
from greensched.driver.simulated import Crash, Fail, SimulatedDriver
from greensched.kernels import spin
from greensched.typing import CaptureMode
from helpers.small_executors import one_cell_executors

ONE = LaunchConfig(grid=1, block=1)


def in_pool(
    driver: SimulatedDriver, body: Callable[[Pool], Awaitable[Any]], **options: Any
) -> None:
    """Open a pool, call `body` with it, and close it."""

    async def main() -> None:
        async with Pool(driver=driver, **options) as pool:
            await body(pool)

    anyio.run(main)


def record_on(driver: SimulatedDriver, address: int) -> None:
    """Do what torch does when it frees memory that was used on a stream."""
    driver.set_current(driver.retain_primary(0))
    event = driver.create_event()
    driver.record_event(event, driver.foreign_stream(address))
    driver.synchronize_event(event)
    driver.destroy_event(event)
    driver.set_current(None)
    driver.release_primary(0)


async def addresses(pool: Pool, *sizes: Any) -> list[int]:
    """Return the addresses of the streams of concurrent partitions of these sizes."""
    async with pool.partitions(*sizes) as partitions:
        return [p.stream.address for p in partitions]


@pytest.fixture
def driver() -> Any:
    """Yield a simulated machine, and check that only kept handles are alive at the end."""
    driver = simulated.open("h20")
    driver.initialise()
    yield driver
    assert not driver.live()
    driver.close()


def test_a_context_that_could_not_be_closed_is_closed_with_its_device(
    driver: SimulatedDriver,
) -> None:
    """It is kept for the next pool without a warning, even if nothing references it."""
    device = Device(driver=driver)
    options = ContextOptions(resources=[device.resources.sm])
    context = device.lend_context((False, 1, False), options)
    driver.script.add(Fail("current", driver.script.calls["current"] + 1))
    with pytest.raises(greensched.CUDAError, match="current"):
        context.close()
    del context
    gc.collect()
    device.close()
    assert driver.kept.cells(0, (False, 0, False)) == [1]


def test_a_library_can_use_a_stream_after_its_pool_has_closed(driver: SimulatedDriver) -> None:
    """An event can be recorded on it between pools, beside another pool, and at exit."""
    seen: list[int] = []

    async def see(pool: Pool) -> None:
        seen.extend(await addresses(pool, 8, 16, 24))

    async def use(pool: Pool) -> None:
        async with pool.partition(ALL) as p:
            p.launch(ONE, spin, 1000)
            for address in seen:
                await anyio.to_thread.run_sync(record_on, driver, address)

    in_pool(driver, see)
    for address in seen:
        record_on(driver, address)
    in_pool(driver, use)
    for address in seen:
        record_on(driver, address)


def test_the_next_pool_has_the_same_streams(driver: SimulatedDriver) -> None:
    """The same SMs have the same green context and streams in every pool."""
    seen: list[list[int]] = []

    async def see(pool: Pool) -> None:
        seen.append(await addresses(pool, 8, 16, 24))

    in_pool(driver, see)
    made = driver.script.calls["create_green"]
    in_pool(driver, see)
    assert seen[0] == seen[1]
    assert made == driver.script.calls["create_green"]


def test_many_pools_take_no_more_device_memory_than_one(driver: SimulatedDriver) -> None:
    """A library that holds the primary context would keep anything that is lost."""
    driver.set_current(driver.retain_primary(0))
    free: list[int] = []

    async def use(pool: Pool) -> None:
        async with pool.partition((8, ALL)) as p:
            await p.checkpoint()

    for number in range(20):
        in_pool(driver, use)
        free.append(driver.memory_info()[0])
        assert number == 0 or free[number] == free[0]
    driver.set_current(None)
    driver.release_primary(0)


def test_the_next_pool_has_an_executor_over_each_kept_context(
    driver: SimulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the limit of executors limits green contexts over all pools."""
    one_cell_executors(monkeypatch)
    executors: list[int] = []

    async def use(pool: Pool) -> None:
        executors.append(pool.statistics().executors)
        await addresses(pool, 16, 24, 8, REST)

    in_pool(driver, use)
    made, kept = driver.script.calls["create_green"], driver.kept.count(0)["green context"]
    in_pool(driver, use)
    assert executors == [executors[0], kept]
    assert kept > executors[0]
    assert driver.script.calls["create_green"] == made


@pytest.mark.parametrize("other", [{"granularity": "fine"}, {"workqueues": "balanced"}])
def test_a_pool_of_other_options_has_other_contexts(other: dict[str, str]) -> None:
    """Pools with another split or other work queues reuse no kept contexts."""
    driver = simulated.open("h20@13.1")
    seen: list[list[int]] = []

    async def see(pool: Pool) -> None:
        seen.append(await addresses(pool, 8))

    for options in ({}, other, {}):
        in_pool(driver, see, **options)
    assert seen[0] == seen[2] != seen[1]
    assert not driver.live()
    driver.close()


def test_the_handles_of_a_lost_device_are_not_used_again() -> None:
    """They are neither reused nor destroyed: no CUDA call is made for them."""
    driver = simulated.open("h20", faults=[Crash("spin")])
    in_pool(driver, lambda pool: addresses(pool, 8))
    assert driver.kept.count(0)["green context"]

    async def fail(pool: Pool) -> None:
        async with pool.partition(8) as p:
            await p.launch(ONE, spin, 1000)

    with pytest.raises(greensched.DeviceLost):
        in_pool(driver, fail)
    assert not driver.kept.count(0).total()
    assert not driver.script.calls["destroy_green"]
    driver.close()


def test_a_stream_that_is_left_busy_or_capturing_is_not_lent(driver: SimulatedDriver) -> None:
    """A user's stream in a partition's context is kept, and reused once it has no work."""

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            context = p.context
            capturing = await p.run(context.create_stream)
            driver.begin_capture(capturing.handle, CaptureMode.RELAXED)
            capturing.close()
            idle = await p.run(context.create_stream, priority=-1)
            idle.close()
            others = [await p.run(context.create_stream, priority=n) for n in (0, -1)]
            assert [other.handle is idle.handle for other in others] == [False, True]
            assert others[0].handle is not capturing.handle
            for other in others:
                other.close()
            with pytest.raises(greensched.Closed):
                idle.sync()
            driver.destroy_graph(driver.end_capture(capturing.handle))

    anyio.run(main)


def test_a_forked_child_has_nothing_of_its_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has no context or split of the parent, and keeps its own."""
    kept, key = KeptHandles(), (False, 1, False)
    parents, childs = (KeptContext(cast(Any, n), cast(Any, n)) for n in (1, 2))
    kept.put(0, key, parents)
    first = kept.cut(0, 8, False, lambda: ([], None))
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        assert kept.take(0, key) is None
        assert kept.cut(0, 8, False, lambda: ([], None)) is not first
        kept.put(0, key, childs)
        assert kept.take(0, key) is childs
    assert kept.cut(0, 8, False, lambda: ([], None)) is first
    assert kept.take(0, key) is parents
