"""Lease 16 SMs, run a kernel on them, and get the result back.

python examples/01_hello_partition.py
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from greensched import LaunchConfig, Pool
from greensched.cli.demo import choose_driver
from greensched.kernels import saxpy

N = 1 << 20


async def main() -> bool:
    x = np.linspace(0, 1, N, dtype=np.float32)
    y = np.ones(N, np.float32)
    async with Pool(driver=choose_driver()) as pool, pool.partition(16) as p:
        # Never fewer than asked for; more where the GPU cannot be cut so finely.
        print(f"{p.sm_count} of {pool.statistics().sms_total} SMs are ours")

        # A buffer is memory of the device, not of the partition: `with` gives it back.
        with await p.upload(x) as x_there, await p.upload(y) as y_there:
            config = LaunchConfig(grid=N // 256, block=256)
            await p.launch(config, saxpy, 2.0, x_there, y_there, N)  # y = 2 x + y
            result = await p.download(y_there)

    right = np.allclose(result, 2 * x + y)
    print(f"2 x + y = {result[0]:.3f} ... {result[-1]:.3f}: {'right' if right else 'WRONG'}")
    return right


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
