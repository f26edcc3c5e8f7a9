"""Batch after batch to the GPU: the next is copied while the kernel on this one runs.

python examples/06_feeding.py
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import numpy as np

from greensched import LaunchConfig, Pool
from greensched.cli.demo import choose_driver
from greensched.kernels import saxpy

BATCHES, SIZE = 12, 1 << 20


def batches() -> Iterator[np.ndarray]:
    """From a file, say; asked for one ahead, so that its copy can begin."""
    for number in range(BATCHES):
        yield np.full(SIZE, number, np.float32)


async def main() -> bool:
    config = LaunchConfig(grid=256, block=256)
    # The pool loads the kernel as it opens: no launch waits for that.
    async with Pool(driver=choose_driver(), prepare=[saxpy]) as pool, pool.partition(16) as p:
        with await p.upload(np.zeros(SIZE, np.float32)) as total:
            count = 0
            async for batch in p.prefetch(batches()):
                p.launch(config, saxpy, 1.0, batch, total, SIZE)  # total = batch + total
                count += 1
            result = await p.download(total, progress=tell)

    right = bool((result == sum(range(BATCHES))).all())
    print(f"{count} batches of {SIZE * 4 / 1e6:.1f} MB added up: {'right' if right else 'WRONG'}")
    return right


def tell(done: int, total: int) -> None:
    """A long download says how far it is, on the loop's thread."""
    if done == total:
        print(f"all of {total / 1e6:.1f} MB are back")


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
