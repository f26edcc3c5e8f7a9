"""A lease of a prepared pool makes no driver call that can allocate."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from driver_cuda.conftest import Standin
from greensched import REST, LaunchConfig, Partition, Pool
from greensched.kernels import fill, saxpy

pytestmark = pytest.mark.standin

#: Calls of the driver by which a warm lease gets its work done. None makes an object or loads
#: anything. `cuMemAllocFromPoolAsync` takes from what the pool has while that suffices; when it
#: may have grown, `cuMemPoolGetAttribute` asks by how much, and that is not among these. (That it
#: does not grow is in tests/driver_simulated: the stand-in does not say what a pool has.)
HARMLESS = {
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxPopCurrent",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuGreenCtxRecordEvent",
    "cuKernelGetAttribute",
    "cuLaunchKernel",
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
    "cuMemcpyDtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuStreamWriteValue32",
    "cuThreadExchangeStreamCaptureMode",
}
SMALL = np.ones(1000, np.float32)
LARGE = np.ones(5_000_000, np.float32)


async def everything(p: Partition, blocks: int) -> None:
    """Use every operation of a lease."""
    config = LaunchConfig(grid=blocks, block=64)
    for array in (SMALL, LARGE):
        with await p.upload(array) as x, await p.empty_like(x) as y:
            await p.copy(y, array)
            await p.copy(y, x)
            bound = p.bind(config, saxpy, 2.0, x, y, x.size)
            bound()
            p.launch(config, fill, y, 1.0, x.size)
            await bound.submit()
            await p.download(y)
    async for x in p.prefetch([SMALL, LARGE, SMALL, LARGE]):
        p.launch(config, fill, x, 1.0, x.size)
    assert await p.run(lambda: 7) == 7


async def leases(pool: Pool) -> None:
    for blocks, size in enumerate((8, 16, (8, 40)), start=1):
        async with pool.partition(size) as p:
            await everything(p, blocks)
    async with pool.partitions(8, 16, REST) as parts:
        await asyncio.gather(*(everything(p, 9) for p in parts))


def asked_by_leases(standin: Standin, folder: Path, pool: Pool) -> Counter[str]:
    """Return the driver functions that a pool's leases called."""

    def calls(name: str) -> Counter[str]:
        found = json.loads(standin.report(folder / name).read_text())["calls"]
        return Counter({name.removesuffix("_v2"): number for name, number in found.items()})

    async def main() -> Counter[str]:
        async with pool:
            before = calls("before")
            await leases(pool)
            return calls("after") - before

    return asyncio.run(main())


def test_a_warm_lease_makes_no_call_that_can_allocate(standin: Standin, tmp_path: Path) -> None:
    """On every executor, with all geometries and sizes."""
    pool = Pool(driver="cuda", prepare=[fill, saxpy], reserve_bytes=512 << 20)
    asked = asked_by_leases(standin, tmp_path, pool)
    assert set(asked) <= HARMLESS
    assert {"cuLaunchKernel", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"} <= set(asked)


def test_what_is_not_prepared_is_asked_for_in_a_lease(standin: Standin, tmp_path: Path) -> None:
    """Without `prepare` leases pin memory, and the pool grows."""

    async def main() -> None:
        async with Pool(driver="cuda") as pool, pool.partition(8) as p:
            await p.prepare(LaunchConfig(grid=1, block=1), saxpy)
            await p.prepare(LaunchConfig(grid=1, block=1), fill)
            before = standin.calls("cuFuncLoad"), standin.calls("cuMemHostRegister")
            await everything(p, 1)
            assert standin.calls("cuFuncLoad") == before[0]
            assert standin.calls("cuMemHostRegister") == before[1] + 2

    asyncio.run(main())
    kernels = Pool(driver="cuda", prepare=[fill, saxpy])
    asked = asked_by_leases(standin, tmp_path, kernels)
    assert set(asked) - HARMLESS == {"cuMemPoolGetAttribute"}
