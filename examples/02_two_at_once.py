"""Lease two partitions of one GPU together: short requests beside a long job.

python examples/02_two_at_once.py

Without a GPU: GREENSCHED_DRIVER=simulated:h200 python examples/02_two_at_once.py
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from greensched import REST, LaunchConfig, Partition, Pool
from greensched.kernels import gaussian_blur, matmul

SIDE, PASSES, ROUNDS = 256, 1_000, 20  # of the long job: enough to keep a GPU busy for a while


async def multiply(p: Partition) -> bool:
    """Run the long job: kernels back to back. They run in order, so only the end is awaited."""
    a, b = np.random.default_rng(1).random((2, SIDE, SIDE), np.float32)
    config = LaunchConfig(grid=(SIDE // 32) ** 2, block=256)
    with await p.upload(a) as da, await p.upload(b) as db, await p.empty_like(da) as dc:
        for _ in range(ROUNDS):
            p.launch(config, matmul, da, db, dc, SIDE, SIDE, SIDE, PASSES)
        product = await p.download(dc)
    return np.allclose(product, PASSES * (a @ b), rtol=1e-2)


async def blur(p: Partition) -> bool:
    """Serve a short request: a point of light becomes a Gaussian spot."""
    image = np.zeros((64, 64), np.float32)
    image[32, 32] = 1
    with await p.upload(image) as src, await p.empty_like(src) as dst:
        p.launch(LaunchConfig(grid=16, block=256), gaussian_blur, src, dst, 64, 64, 1, 2.0)
        result = await p.download(dst)
    profile = np.exp(-0.5 * (np.arange(-6, 7) / 2.0) ** 2)  # sigma is 2
    image[26:39, 26:39] = np.outer(profile, profile) / profile.sum() ** 2
    return np.allclose(result, image, atol=1e-6)


async def main() -> bool:
    # One request for both: separate requests could deadlock with another task that holds one part.
    async with Pool() as pool, pool.partitions(16, REST) as (few, rest):
        print(f"{few.sm_count} SMs for short requests, {rest.sm_count} for the long job")
        async with asyncio.TaskGroup() as tasks:
            job = tasks.create_task(multiply(rest))
            blurred = [await blur(few)]
            while not job.done():
                blurred.append(await blur(few))

    print(f"beside the long job {len(blurred)} requests were served, {sum(blurred)} correctly")
    print(f"the product is {'correct' if job.result() else 'WRONG'}")
    return job.result() and all(blurred)


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
