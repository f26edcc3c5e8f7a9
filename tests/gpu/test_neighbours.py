"""On a real GPU: memory returns, large arrays arrive whole, and torch works beside a pool."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import anyio
import numpy as np
import pytest

from greensched import LaunchConfig, Pool
from greensched.kernels import saxpy

pytestmark = pytest.mark.gpu


def free_bytes() -> int:
    """Return the free bytes of device 0."""
    from cuda.bindings import driver

    driver.cuInit(0)
    context: Any = driver.cuDevicePrimaryCtxRetain(0)[1]
    driver.cuCtxPushCurrent(context)
    free = driver.cuMemGetInfo()[1]
    driver.cuCtxPopCurrent()
    driver.cuDevicePrimaryCtxRelease(0)
    return int(free)


def lose() -> None:
    """Print the bytes that 98 more pools cost, beside a holder of the primary context."""
    from cuda.bindings import driver

    driver.cuInit(0)
    driver.cuDevicePrimaryCtxRetain(0)

    async def main() -> None:
        async with Pool([0]) as pool, pool.partition(16) as p:
            with await p.upload(np.ones(2**24, np.float32)) as x:
                await p.launch(LaunchConfig(grid=64, block=256), saxpy, 1.0, x, x, x.size)

    free = []
    for _ in range(100):
        anyio.run(main)
        free.append(free_bytes())
    print(free[1] - min(free[1:]))


def test_a_gigabyte_goes_there_and_back() -> None:
    """A large array is uploaded, processed and downloaded while the loop runs."""
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await anyio.sleep(0.001)
            beats += 1

    async def main() -> None:
        a = np.random.default_rng(1).integers(0, 1000, 2**28).astype(np.float32)
        async with Pool([0]) as pool, anyio.create_task_group() as group:
            group.start_soon(beat)
            async with pool.partition(32) as p:
                with await p.upload(a) as x:
                    p.launch(LaunchConfig(grid=1024, block=256), saxpy, 1.0, x, x, x.size)
                    found = await p.download(x)
            group.cancel_scope.cancel()
        np.testing.assert_array_equal(found, 2 * a)

    anyio.run(main)
    assert beats > 20


def test_a_hundred_pools_take_no_more_memory_than_two() -> None:
    """Green contexts are kept for the next pool."""
    # A process of its own: what other tests' pools lose is not counted.
    ran = subprocess.run([sys.executable, __file__], stdout=subprocess.PIPE, text=True, check=True)
    assert int(ran.stdout) == 0


@pytest.mark.fault("B12")
def test_torch_works_in_a_partition_and_beside_it() -> None:
    """Torch works in p.run and outside of it."""
    torch = pytest.importorskip("torch", reason="torch is not on this machine")

    async def main() -> None:
        async with Pool([0]) as pool, pool.partition(16) as p:

            def product(stream: int) -> Any:
                with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                    a = torch.arange(65536, device="cuda", dtype=torch.float64).reshape(256, 256)
                    return (a @ a).sum().item()

            a = np.arange(65536, dtype=np.float64).reshape(256, 256)
            assert await p.run(product, int(p.stream.handle)) == pytest.approx((a @ a).sum())
            assert torch.ones(8, device="cuda").sum().item() == 8

    anyio.run(main)


if __name__ == "__main__":
    lose()
