"""On a real GPU: a prepared kernel with much local memory does not wait."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from greensched import REST, Kernel, LaunchConfig, Pool, Program
from greensched.kernels import latch

pytestmark = pytest.mark.gpu

#: Bytes of each thread: more than any stack limit a driver begins with (1 KiB).
LOCAL_BYTES = 16 * 1024
SOURCE = r"""
extern "C" __global__ void scatter(unsigned *out, unsigned steps) {
    volatile unsigned mine[4096];
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    for (unsigned i = 0; i < 4096; i++) mine[i] = i;
    unsigned sum = 0;
    for (unsigned i = 0; i < steps; i++) sum += mine[(at * 7 + i * 13) % 4096];
    out[at] = sum;
}
"""
STEPS = 10
CONFIG = LaunchConfig(grid=64, block=64)


async def launch_beside_a_busy_partition(pool: Pool, kernel: Kernel) -> np.ndarray:
    """Return its result, while every other SM waits for the host."""
    async with pool.partitions(16, REST) as (p, rest):
        word = await rest.empty_pinned(1, np.uint32)
        busy = LaunchConfig(grid=rest.sm_count, block=1024)
        held = rest.launch(busy, latch, word, 20_000_000_000)
        try:
            with await p.empty(64 * 64, np.uint32) as out, anyio.fail_after(10):
                await p.launch(CONFIG, kernel, out, STEPS)
                result = await p.download(out)
                assert not held.done()
        finally:
            word.array[0] = 1
            await held
            word.close()
    return result


def test_a_prepared_kernel_with_local_memory_does_not_wait() -> None:
    """Local memory is sized when the pool opens."""
    kernel = Program(SOURCE).kernel("scatter")

    async def main() -> None:
        async with Pool([0], prepare=[kernel, latch], reserve_bytes=1 << 20) as pool:
            primary = pool.devices[0].primary
            assert primary.stack_bytes >= LOCAL_BYTES
            at = np.arange(64 * 64)
            sums = sum((at * 7 + step * 13) % 4096 for step in range(STEPS))
            found = await launch_beside_a_busy_partition(pool, kernel)
            np.testing.assert_array_equal(found, np.asarray(sums, np.uint32))
            primary.stack_bytes = 1024  # what torch keeps open, later tests have, too

    anyio.run(main)
