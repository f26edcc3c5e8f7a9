"""Prefetch batches: the next one is copied while the kernel on the current one runs.

python examples/06_prefetching.py

Without a GPU: GREENSCHED_DRIVER=simulated:h200 python examples/06_prefetching.py
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import numpy as np

from greensched import LaunchConfig, Pool
from greensched.kernels import saxpy

BATCHES, SIZE = 12, 1 << 20


def batches() -> Iterator[np.ndarray]:
    """Yield batches, as from a file; `prefetch` takes each one early and begins to copy it."""
    for number in range(BATCHES):
        yield np.full(SIZE, number, np.float32)


async def main() -> bool:
    config = LaunchConfig(grid=256, block=256)
    # The pool loads the kernel when it opens, so that no launch waits for it.
    async with Pool(prepare=[saxpy]) as pool, pool.partition(16) as p:
        with await p.upload(np.zeros(SIZE, np.float32)) as total:
            count = 0
            async for batch in p.prefetch(batches()):
                p.launch(config, saxpy, 1.0, batch, total, SIZE)  # total = batch + total
                count += 1
            result = await p.download(total, progress=report)

    correct = bool((result == sum(range(BATCHES))).all())
    print(f"{count} batches of {SIZE * 4 / 1e6:.1f} MB added: {'correct' if correct else 'WRONG'}")
    return correct


def report(done: int, total: int) -> None:
    """Report the progress of the download; called on the event loop's thread."""
    if done == total:
        print(f"downloaded {total / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
