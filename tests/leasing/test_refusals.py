"""Arguments that can never be right are refused before anything is queued."""

from __future__ import annotations

import asyncio
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import greensched
from greensched import Pool, PoolState, ServiceClass
from greensched.driver import simulated
from greensched.driver.types import KernelLimits
from greensched.kernels import spin
from greensched.scheduling.policy import Fifo

#: Its `repr` is another one in each process.
OBJECT = pytest.param(object(), id="object")


class Asynchronous:
    async def __call__(self) -> None:
        raise AssertionError("it was called")


def test_an_object_whose_call_is_awaited_is_refused() -> None:
    """`run` refuses an object with an async `__call__` as it does a coroutine function."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            with pytest.raises(greensched.InvalidRequest, match="await"):
                (await p.run(Asynchronous())).close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "driver", [5, b"cuda", pytest.param(object(), id="object"), ["simulated:h200"]], ids=repr
)
def test_a_driver_of_the_wrong_kind_is_refused(driver: Any) -> None:
    """A driver that is neither a name nor a driver raises InvalidRequest."""

    async def main() -> None:
        with pytest.raises(greensched.InvalidRequest, match="simulated:h200"):
            await Pool(driver=driver).open()

    asyncio.run(main())


@pytest.mark.parametrize(
    "options",
    [
        {"services": ["decode"]},
        {"services": 5},
        {"services": [greensched.ServiceClass(name="a"), greensched.ServiceClass(name="a")]},
        {"policy": 5},
        {"policy": None},
    ],
    ids=repr,
)
def test_services_and_policies_of_the_wrong_kind_are_refused(options: Any) -> None:
    """An invalid service class or policy is refused where the pool is made."""
    with pytest.raises(greensched.InvalidRequest):
        Pool(driver="simulated:h200", **options)


@pytest.mark.parametrize("deadline", ["1", [1.0], True], ids=repr)
def test_a_deadline_of_the_wrong_kind_is_refused(deadline: Any) -> None:
    """A deadline that is not a number raises InvalidRequest, not TypeError."""
    with pytest.raises(greensched.InvalidRequest, match="deadline"):
        Pool(driver="simulated:h200").partition(8, deadline=deadline)


@pytest.mark.parametrize("service", [[], {}, 5], ids=repr)
def test_a_service_of_the_wrong_kind_is_refused(service: Any) -> None:
    """A service that is not a name raises InvalidRequest, not TypeError."""
    with pytest.raises(greensched.InvalidRequest, match="service"):
        Pool(driver="simulated:h200").partition(8, service=service)


@pytest.mark.parametrize("dtype", ["nonsense", 5, "f99", ["a"]], ids=repr)
def test_a_dtype_that_is_none_is_refused(dtype: Any) -> None:
    """An invalid dtype raises InvalidArray."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            for use in (p.empty, p.empty_pinned):
                with pytest.raises(greensched.InvalidArray):
                    use(3, dtype)

    asyncio.run(main())


@pytest.mark.parametrize("shape", [2**63, (2**40, 2**40), 2**64], ids=repr)
def test_a_shape_beyond_all_memory_fails_its_job(shape: Any) -> None:
    """A buffer larger than any memory is refused or fails only its job with OutOfMemory."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            for use in (p.empty, p.empty_pinned):
                with pytest.raises((greensched.OutOfMemory, greensched.InvalidArray)):
                    await use(shape)

    asyncio.run(main())


@pytest.mark.parametrize(
    "array", [None, [[1, 2], [3]], {}, pytest.param(object(), id="object")], ids=repr
)
def test_what_is_no_array_at_all_is_refused(array: Any) -> None:
    """Uploading an object that numpy cannot convert raises InvalidArray."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            with pytest.raises(greensched.InvalidArray):
                p.upload(array)

    asyncio.run(main())


@pytest.mark.parametrize("like", [None, 5, [1.0]], ids=repr)
def test_empty_like_nothing_is_refused(like: Any) -> None:
    """`empty_like` takes a buffer or an array; other objects raise InvalidArray."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            with pytest.raises(greensched.InvalidArray):
                p.empty_like(like)

    asyncio.run(main())


def test_run_of_what_cannot_be_called_is_refused() -> None:
    """An object that is not callable is refused at its submission."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            with pytest.raises(greensched.InvalidRequest):
                p.run(5)  # type: ignore[arg-type]

    asyncio.run(main())


@pytest.mark.parametrize("grace", [-1, float("nan"), "5", None], ids=repr)
def test_a_grace_that_is_none_is_refused(grace: Any) -> None:
    """`aclose(grace)` takes seconds from 0 on; a wrong value leaves the pool open."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool:
            with pytest.raises(greensched.InvalidRequest):
                await pool.aclose(grace=grace)
            assert pool.state is PoolState.OPEN

    asyncio.run(main())


@pytest.mark.parametrize("dtype", ["S0", "V0", (np.float32, 2)], ids=repr)
def test_a_dtype_without_elements_is_refused(dtype: Any) -> None:
    """A dtype of zero bytes, or a subarray dtype, raises InvalidArray."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool, pool.partition(8) as p:
            for use in (p.empty, p.empty_pinned):
                with pytest.raises(greensched.InvalidArray, match="dtype"):
                    use(4, dtype)
                with pytest.raises(greensched.InvalidArray, match="dimensions"):
                    use((1,) * 65)

    asyncio.run(main())


@pytest.mark.parametrize(
    "options",
    [
        {"services": [greensched.ServiceClass(name="a", priority="high")]},  # type: ignore[arg-type]
        {"services": [greensched.ServiceClass(name=5)]},  # type: ignore[arg-type]
        {"policy": Fifo},
    ],
    ids=repr,
)
def test_what_would_only_fail_in_the_queue_is_refused(options: Any) -> None:
    """The pool refuses a priority that is not a number, and a policy that is a class."""
    with pytest.raises(greensched.InvalidRequest):
        Pool(driver="simulated:h200", **options)


def test_times_beyond_all_time_are_refused() -> None:
    """A number too large for a float is refused as a time, and closes nothing."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool:
            with pytest.raises(greensched.InvalidRequest, match="grace"):
                await pool.aclose(grace=10**400)
            with pytest.raises(greensched.InvalidRequest, match="deadline"):
                pool.partition(8, deadline=10**400)
            async with pool.partition(8) as p:
                with pytest.raises(greensched.InvalidRequest, match="deadline"):
                    await p.checkpoint(0.1, deadline=10**400)
                with pytest.raises(greensched.InvalidRequest, match="deadline"):
                    await p.checkpoint(0.1, deadline=0)
                with pytest.raises(greensched.InvalidRequest, match="duration"):
                    await p.checkpoint(-0.1)
                assert await p.checkpoint(0.1, deadline=0.2) == p.sm_count
            assert pool.is_ready

    asyncio.run(main())


def test_numbers_of_numpy_are_numbers() -> None:
    """Sizes, times and geometry may be numpy scalars."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool:
            deadline: Any = np.float32(5)
            size: Any = (np.int64(8), np.int32(16))
            async with pool.partition(size, deadline=deadline) as p:
                config = greensched.LaunchConfig(
                    grid=np.int64(1), block=np.int32(1), shmem_size=np.int64(16)
                )
                assert type(config.shmem_size) is int
                assert p.sm_count == 16
            latency: Any = np.float32(0.05)
            quota: Any = Fraction(17, 2)
            pool.reconfigure(services=[ServiceClass("a", latency=latency, quota=quota)])
            async with pool.partition(8, service="a"):
                pass

    asyncio.run(main())


def test_static_shared_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Static shared memory reduces the dynamic memory that a kernel may ask for."""
    driver = simulated.open("h200")
    static = KernelLimits(1024, 32 * 1024, 0)
    monkeypatch.setattr(driver, "kernel_limits", lambda *_: static)
    asked: list[int] = []
    monkeypatch.setattr(driver, "allow_shared", lambda *given: asked.append(given[-1]))
    with greensched.Device(0, driver=driver) as device:
        stream = device.create_stream()
        most = device.facts.max_shared_bytes - static.static_shared_bytes
        for size, allowed in ((16 * 1024, []), (16 * 1024 + 1, [most]), (40 * 1024, [most])):
            asked.clear()
            config = greensched.LaunchConfig(grid=1, block=1, shmem_size=size)
            greensched.launch(stream, config, spin, 1)
            assert asked == allowed
        config = greensched.LaunchConfig(grid=1, block=1, shmem_size=most + 1)
        with pytest.raises(greensched.InvalidLaunch, match=f"at most {most}"):
            greensched.launch(stream, config, spin, 1)
        stream.sync()
        stream.close()
    device.close()
    driver.close()


def test_blocks_are_entered_with_async_with() -> None:
    """`await pool.partition()` and plain `with` say what to write, and request nothing."""

    async def main() -> None:
        async with Pool(driver="simulated:h200") as pool:
            for block in (pool.partition(8), pool.partitions(8, 8)):
                with pytest.raises(greensched.InvalidRequest, match=r"async with pool\.partition"):
                    await block  # type: ignore[misc]
                with pytest.raises(greensched.InvalidRequest, match=r"async with pool\.partition"):
                    with block:  # type: ignore[attr-defined]
                        pass
            with pytest.raises(greensched.InvalidRequest, match="async with pool:"), pool:
                pass
            assert pool.statistics().requested == 0

    asyncio.run(main())


def test_a_partition_of_a_closed_loop_says_so() -> None:
    """Using it on another loop raises PartitionClosed with the reason."""
    pool = Pool(driver="simulated:h200")

    async def enter() -> greensched.Partition:
        await pool.open()
        return await pool.partition(8).__aenter__()

    async def use(p: greensched.Partition) -> None:
        with pytest.raises(greensched.PartitionClosed, match="event loop"):
            p.run(lambda: None)
        with pytest.raises(greensched.PartitionClosed, match="event loop"):
            await p.drain()
        assert not (await pool.aclose()).abandoned

    asyncio.run(use(asyncio.run(enter())))


def test_statistics_are_json() -> None:
    """`as_dict` of statistics and of classes returns what `json.dumps` takes."""

    async def main() -> None:
        services = [greensched.ServiceClass("a", reserve=8)]
        async with Pool(driver="simulated:h200", services=services) as pool:
            found = json.loads(json.dumps(pool.statistics().as_dict()))
            assert found["state"] == "open"
            assert found["services"]["a"]["sms"] == 0

    asyncio.run(main())
