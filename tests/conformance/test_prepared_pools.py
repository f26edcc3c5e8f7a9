"""Prepared pools: any first lease launches, binds and copies at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import greensched
from greensched import REST, InvalidLaunch, InvalidRequest, LaunchConfig, Pool, Program
from greensched.kernels import fill, saxpy
from greensched.typing import Limit
from helpers.backend import Backend
from helpers.waiting import until

LARGE = np.ones(3_000_000, np.float32)


def test_every_executor_binds_and_launches_at_once(backend: Backend) -> None:
    """Unused executors, prebuilt or new, launch any geometry without a thread."""

    async def main() -> None:
        async with backend.pool("h200", prepare=[fill, fill, saxpy]) as pool:
            sizes = [8, 16, 24, (8, 100), REST]
            for blocks, size in enumerate(sizes, start=1):
                async with pool.partitions(size) as (p,):
                    with await p.empty(64) as buffer:
                        await until(lambda: p._open_lease().all_submitted)  # the pool grew
                        p.bind(LaunchConfig(grid=blocks, block=64), fill, buffer, 1.0, 64)()
                        assert p._open_lease().all_submitted
                        job = p.launch(
                            LaunchConfig(grid=blocks, block=32), saxpy, 1.0, *2 * (buffer,), 64
                        )
                        assert p._open_lease().all_submitted
                        await job
            async with pool.partitions(8, 24, 40, 16) as parts:  # of whatever cells
                for p in parts:
                    with await p.empty(64) as buffer:
                        p.bind(LaunchConfig(grid=3, block=64), fill, buffer, 1.0, 64)()

    backend.run(main)


def test_a_kernel_used_once_takes_any_geometry_at_once(backend: Backend) -> None:
    """Without `prepare` the first use goes through a thread, and later ones do not."""

    async def main() -> None:
        async with backend.pool() as pool, pool.partition(8) as p:
            with await p.empty(64) as buffer:
                with pytest.raises(greensched.WouldBlock, match="not used on these SMs"):
                    p.bind(LaunchConfig(grid=1, block=64), fill, buffer, 1.0, 64)
                job = p.launch(LaunchConfig(grid=1, block=64), fill, buffer, 1.0, 64)
                await job
                await until(lambda: p._open_lease().all_submitted)
                for block in (32, 64, 96):
                    p.launch(LaunchConfig(grid=1, block=block), fill, buffer, 1.0, 64)
                    assert p._open_lease().all_submitted
                p.bind(LaunchConfig(grid=2, block=64), fill, buffer, 2.0, 64)()

    backend.run(main)


def test_a_geometry_beyond_the_device_is_refused_when_prepared(backend: Backend) -> None:
    """It raises, prepared or not, and nothing is submitted."""

    async def main() -> None:
        async with backend.pool(prepare=[fill]) as pool, pool.partition(8) as p:
            with await p.empty(64) as buffer:
                issued = p._open_lease().launch_stream.issued
                with pytest.raises(InvalidLaunch, match="block"):
                    p.launch(LaunchConfig(grid=1, block=4096), fill, buffer, 1.0, 64)
                assert p._open_lease().launch_stream.issued == issued

    backend.run(main)


def test_reserved_memory_is_there(backend: Backend) -> None:
    """Within `reserve_bytes` no buffer makes the pool grow; too much fails the opening."""

    async def main() -> None:
        async with backend.pool(reserve_bytes=64 << 20) as pool, pool.partition(8) as p:
            memory = pool._manager.device_pools[0].memory
            reserved = memory._driver.reserved_bytes(memory._pool)
            assert not memory.would_grow(64 << 20)
            assert memory.would_grow((64 << 20) + (128 << 20))
            with await p.upload(LARGE), await p.empty(LARGE.size):
                assert not backend.is_simulated or (
                    memory._driver.reserved_bytes(memory._pool) == reserved
                )
        with pytest.raises(greensched.OutOfMemory) as refused:
            async with backend.pool(reserve_bytes=1 << 50):
                pass
        assert refused.value.asked == 1 << 50
        assert refused.value.free is not None
        assert refused.value.total is not None

    backend.run(main)


@pytest.mark.parametrize(
    "options",
    [
        {"prepare": ["saxpy"]},
        {"prepare": [(saxpy, LaunchConfig(grid=1, block=1))]},
        {"reserve_bytes": -1},
        {"reserve_bytes": 1.5},
        {"reserve_bytes": True},
    ],
)
def test_what_cannot_be_prepared_is_refused(options: dict[str, Any]) -> None:
    """The constructor refuses it, and the error says what to pass."""
    with pytest.raises(InvalidRequest, match=r"such as|at least 0"):
        Pool(**options)


@pytest.mark.parametrize("needed", [0, 1 << 14])
def test_local_memory_is_as_large_as_kernels_need(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, needed: int
) -> None:
    """Before any launch, threads have the local memory of the neediest prepared kernel."""
    driver = backend.driver()
    limits = driver.kernel_limits

    def needy(kernel: Any, device: int) -> Any:
        return replace(limits(kernel, device), local_bytes=needed)

    async def main() -> None:
        async with Pool([0], driver=driver) as pool:
            default = pool.devices[0].primary.stack_bytes
        monkeypatch.setattr(driver, "kernel_limits", needy)
        async with Pool([0], driver=driver, prepare=[fill]) as pool, pool.partition(8) as p:
            with p.context:  # a driver may keep it for each context, or for the primary's all
                assert driver.limit(Limit.STACK) == max(default, needed)
            with await p.empty(64) as buffer:
                await p.launch(LaunchConfig(grid=1, block=64), fill, buffer, 1.0, 64)
            # What another library keeps open, later tests have, too.
            await p.run(lambda: driver.set_limit(Limit.STACK, default))
        if backend.is_simulated:  # else another library may keep the primary context
            async with Pool([0], driver=driver) as pool:
                assert pool.devices[0].primary.stack_bytes == default

    backend.run(main)


def test_a_kernel_that_cannot_be_loaded_keeps_the_pool_closed(backend: Backend) -> None:
    """Opening fails with the kernel's error and leaves nothing behind."""

    async def main() -> None:
        broken = Program('extern "C" __global__ void f(float *x) { oops; }').kernel("f")
        errors = greensched.NotSimulable, greensched.CompileFailed
        with pytest.raises(errors):
            async with backend.pool(prepare=[fill, broken]):
                pass
        async with backend.pool(prepare=[fill]) as pool, pool.partition(8):
            pass

    backend.run(main)
