"""The life of a pool: opening, closing with and without work, and the objects below it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

import greensched
from greensched import (
    ContextOptions,
    Device,
    LaunchConfig,
    Pool,
    PoolState,
    SMResourceOptions,
    launch,
)
from greensched.kernels import smids, spin
from greensched.leasing import process
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.waiting import until


@pytest.mark.fault("D8")
def test_a_pool_can_be_made_anywhere_and_opened_often(backend: Backend) -> None:
    """The constructor needs no loop; opening twice, or from two tasks, opens once."""
    pool = backend.pool()
    assert pool.state is PoolState.NEW
    assert "not open" in repr(pool)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.open)
            tasks.start_soon(pool.open)
        await pool.open()
        assert pool.is_ready
        made = pool.statistics().executors_made
        await pool.open()
        assert pool.statistics().executors_made == made
        report = await pool.aclose()
        assert not report.abandoned
        assert await pool.aclose() == report
        assert pool.state is PoolState.CLOSED

    backend.run(main)


def test_a_pool_never_opened_can_be_closed(backend: Backend) -> None:
    """Closing a pool that was never opened does nothing, and nothing opens it afterwards."""

    async def main() -> None:
        pool = backend.pool()
        await pool.aclose()
        with pytest.raises(greensched.PoolClosed):
            await pool.open()

    backend.run(main)


@pytest.mark.fault("E1")
def test_closing_fails_requests_and_lets_leases_finish(backend: Backend) -> None:
    """`aclose` refuses queued requests and waits for leases within its grace."""

    async def main() -> None:
        pool = backend.pool()
        await pool.open()
        told: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                with pytest.raises(greensched.PoolClosed):
                    async with pool.partition(greensched.ALL):
                        pass
                told.append("waiter")

            async def close() -> None:
                report = await pool.aclose(grace=10)
                told.append(f"closed {report.abandoned}")

            async with pool.partition(8) as p:
                tasks.start_soon(wait)
                await until(lambda: pool.statistics().waiting == 1)
                tasks.start_soon(close)
                await until(lambda: told == ["waiter"])
                assert pool.state is PoolState.CLOSING
                with await p.empty(8):  # a holder may go on
                    pass
                told.append("holder")
        assert told == ["waiter", "holder", "closed ()"]

    backend.run(main)


def test_what_still_works_after_the_grace_is_abandoned_and_reported(backend: Backend) -> None:
    """An executor whose work does not end is left as it is, and `aclose` reports it."""

    async def main() -> None:
        pool = backend.pool()
        await pool.open()
        with pytest.raises(ZeroDivisionError):
            async with pool.partition(16) as p:
                gate = await Gate.closed(p)
                raise ZeroDivisionError
        report = await pool.aclose(grace=0.05)
        assert len(report.abandoned) == 1
        assert "16 SMs" in report.abandoned[0]
        with gate:
            gate.open()
            await until(lambda: p._lease is not None and p._lease.executor.is_idle)
        _clean_up(pool)

    def _clean_up(pool: Pool) -> None:
        """End what an abandoned pool leaves until the end of the process."""
        manager = pool._manager
        backend.leftover = manager.device_pools

    backend.run(main)
    backend.join_threads()  # they may still be on their way out of the driver
    for site in backend.leftover:
        site.close()


def test_a_cancelled_block_still_closes_the_pool(backend: Backend) -> None:
    """`async with pool` closes the pool when it is cancelled."""

    async def main() -> None:
        pool = backend.pool()
        with anyio.move_on_after(0.02):
            async with pool, pool.partition(8):
                await anyio.sleep_forever()
        assert pool.state is PoolState.CLOSED

    backend.run(main)


def test_a_cancelled_opening_closes_the_pool(backend: Backend) -> None:
    """A cancelled entry into `async with pool` leaves its devices free."""
    driver = backend.driver()

    async def main() -> None:
        pool = Pool(driver=driver)
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with pool:
                raise AssertionError("it was cancelled")
        assert pool.state is PoolState.CLOSED
        async with Pool(driver=driver) as other, other.partition(8):
            pass

    backend.run(main)


@pytest.mark.fault("A11")
def test_a_forgotten_partition_warns_and_comes_back(backend: Backend) -> None:
    """A collected partition warns, and its SMs are granted again."""

    async def main() -> None:
        async with backend.pool() as pool:
            held = [pool.partition_nowait(16)]
            with pytest.warns(ResourceWarning, match="never left"):
                held.clear()
            await until(lambda: pool.statistics().sms_leased == 0)
            async with pool.partition(greensched.ALL):
                pass

    backend.run(main)


def test_what_is_forgotten_comes_back_where_warnings_are_errors(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collected lease or buffer is released even if its warning is an error."""
    refused: list[BaseException | None] = []
    monkeypatch.setattr("sys.unraisablehook", lambda found: refused.append(found.exc_value))

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            site = p._open_lease().device_memory
            held = [pool.partition_nowait(16), await p.empty(1), await p.empty_pinned(3000)]
            address = held[2].address
            held.clear()
            await until(lambda: len(refused) == 3)  # a thread of ours may still let go of some
            assert all(isinstance(warning, ResourceWarning) for warning in refused)
            await until(lambda: pool.statistics().sms_leased == 8)
            await until(lambda: site.memory.reap() is None and site.memory.used_bytes == 0)
            with await p.empty_pinned(3000) as again:
                assert again.address == address

    backend.run(main)


def test_a_forgotten_pool_warns(backend: Backend) -> None:
    """A collected open pool warns, and a thread closes it."""
    driver = backend.driver()

    async def main() -> None:
        pool = Pool(driver=driver)
        await pool.open()
        with pytest.warns(ResourceWarning, match="never closed") as seen:
            del pool
            await until(lambda: len(seen) > 0)

    backend.run(main)
    process.claim_device(driver, 0, "GPU-0")  # waits until it is closed
    process.release_devices(driver, [0])


def test_objects_below_the_pool_work_by_themselves(backend: Backend) -> None:
    """Device, Context, Stream, Event and `launch` work without a pool, on any thread."""

    def use() -> None:
        device = Device(0, driver=backend.driver())
        assert device.resources.sm.sm_count == device.sm_count
        groups, rest = device.resources.sm.split(SMResourceOptions(count=(8, 8)))
        assert rest is None or rest.sm_count < device.sm_count
        context = device.create_context(ContextOptions(resources=groups))
        assert context.is_green
        assert context.resources.sm.sm_count == sum(g.sm_count for g in groups)
        stream = context.create_stream()
        start, end = context.create_event(timing=True), context.create_event(timing=True)
        stream.record(start)
        launch(stream, LaunchConfig(grid=1, block=1), spin, 100_000)
        stream.record(end)
        stream.sync()
        assert stream.is_done
        assert end.is_done
        assert end.elapsed_since(start) > 0
        with context:
            assert context.is_current
            with pytest.raises(greensched.InvalidRequest, match="current"):
                context.close()
        assert not context.is_current
        for child in (start, end, stream):
            child.close()
            child.close()
        with pytest.raises(greensched.Closed):
            stream.sync()
        context.close()
        context.close()
        device.close()
        device.close()

    with ThreadPoolExecutor(1) as threads:  # the main thread's calls are judged as a loop's
        threads.submit(use).result()


@pytest.mark.fault("C18")
def test_children_end_with_their_context(backend: Backend) -> None:
    """Closing a context closes its streams and events."""
    device = Device(0, driver=backend.driver())
    groups, _ = device.resources.sm.split(SMResourceOptions(count=8))
    context = device.create_context(ContextOptions(resources=groups))
    stream, event = context.create_stream(), context.create_event()
    context.close()
    for use in (stream.sync, event.sync, stream.record):
        with pytest.raises(greensched.Closed, match="context is gone"):
            use()
    for child in (stream, event):
        child.close()  # of a dead handle nothing is asked
        child.close()
    device.close()


def test_nothing_is_launched_on_a_dead_stream(backend: Backend) -> None:
    """`launch` refuses a closed stream, one of a closed context, and any other object."""
    device = Device(0, driver=backend.driver())
    groups, _ = device.resources.sm.split(SMResourceOptions(count=8))
    context = device.create_context(ContextOptions(resources=groups))
    closed, left = context.create_stream(), context.create_stream()
    closed.close()
    context.close()
    one = LaunchConfig(grid=1, block=1)
    for stream, said in ((closed, "this stream is closed"), (left, "context is gone")):
        with pytest.raises(greensched.Closed, match=said):
            launch(stream, one, spin, 1)
    with pytest.raises(greensched.InvalidRequest, match=r"takes a Stream .*launch\(stream, config"):
        launch(one, spin, closed, 1)  # type: ignore[arg-type]
    left.close()
    device.close()


@pytest.mark.fault("C18")
def test_a_device_ends_its_green_contexts_before_its_primary(backend: Backend) -> None:
    """`close` ends open objects in order, and none while one is current."""
    device = Device(0, driver=backend.driver())
    groups, _ = device.resources.sm.split(SMResourceOptions(count=(8, 8)))
    contexts = [device.create_context(ContextOptions(resources=[group])) for group in groups]
    stream, own = contexts[0].create_stream(), device.create_stream()
    for context in (contexts[1], device.primary):
        with context, pytest.raises(greensched.InvalidRequest, match="current on this thread"):
            device.close()
    stream.sync()
    device.close()
    assert all(context.is_closed for context in contexts)
    for use in (stream.sync, own.sync):
        with pytest.raises(greensched.Closed, match="context is gone"):
            use()
    for child in (stream, own, *contexts, device):
        child.close()


def test_a_device_closes_while_others_have_its_primary_current(backend: Backend) -> None:
    """Other code that holds the primary current, such as torch, keeps it."""
    driver = backend.driver()
    device = Device(0, driver=driver)
    theirs = driver.retain_primary(0)
    driver.set_current(theirs)
    device.create_stream().close()
    device.close()
    assert driver.current() == theirs
    driver.set_current(None)
    driver.release_primary(0)


def test_a_forgotten_stream_warns(backend: Backend) -> None:
    """A collected open stream warns, and ends with its context."""
    device = Device(0, driver=backend.driver())
    stream = device.create_stream()
    with pytest.warns(ResourceWarning, match="never closed"):
        del stream
    device.close()


@pytest.mark.runs_device_code
def test_a_kernel_runs_on_its_partitions_sms_only(backend: Backend) -> None:
    """`pool.verify()` sees each partition on its own SMs and on no others."""

    async def main() -> None:
        async with backend.pool() as pool:
            seen = await pool.verify()
            for _, sets in seen.seen:
                union = frozenset().union(*sets)
                assert len(union) == sum(map(len, sets))

    assert smids.name == "smids"
    backend.run(main)


def test_device_that_is_not_there_is_reported(backend: Backend) -> None:
    """An ordinal beyond the last device raises with the number of devices."""
    with pytest.raises(greensched.InvalidRequest, match="device 99 does not exist"):
        Device(99, driver=backend.driver())

    async def main() -> None:
        with pytest.raises(greensched.InvalidRequest, match="device 99 does not exist"):
            await Pool([99], driver=backend.driver()).open()
        async with backend.pool() as pool:
            with pytest.raises(greensched.InvalidRequest, match="not in this pool"):
                async with pool.partition(8, device=7):
                    pass

    backend.run(main)
