"""Lease 16 SMs, run a kernel on them, and get the result back.

python examples/01_hello_partition.py

Without a GPU: GREENSCHED_DRIVER=simulated:h200 python examples/01_hello_partition.py
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from greensched import LaunchConfig, Pool
from greensched.kernels import saxpy

N = 1 << 20


async def main() -> bool:
    x = np.linspace(0, 1, N, dtype=np.float32)
    y = np.ones(N, np.float32)
    async with Pool() as pool, pool.partition(16) as p:
        # At least as many as requested; more if the GPU cannot be split so finely.
        print(f"granted {p.sm_count} of {pool.statistics().sms_total} SMs")

        # A buffer belongs to the device, not to the partition; `with` frees it.
        with await p.upload(x) as device_x, await p.upload(y) as device_y:
            config = LaunchConfig(grid=N // 256, block=256)
            await p.launch(config, saxpy, 2.0, device_x, device_y, N)  # y = 2 x + y
            result = await p.download(device_y)

    correct = np.allclose(result, 2 * x + y)
    print(f"2 x + y = {result[0]:.3f} ... {result[-1]:.3f}: {'correct' if correct else 'WRONG'}")
    return correct


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
