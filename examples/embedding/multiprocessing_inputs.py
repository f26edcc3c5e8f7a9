"""Give the GPU to one process: others prepare its inputs, and it sums them.

python examples/embedding/multiprocessing_inputs.py [fork | forkserver | spawn]
"""

from __future__ import annotations

import multiprocessing
import sys

import numpy as np

from greensched import LaunchConfig, Pool
from greensched.kernels import reduce_sum


def prepare(number: int) -> np.ndarray:
    """Make an input, in a process without a pool."""
    return np.full(1000, number, np.float32)


def total(pool: Pool, values: np.ndarray) -> float:
    zero = np.zeros(1, np.float32)
    with pool.sync.partition(16) as p, p.upload(values) as x, p.upload(zero) as y:
        p.launch(LaunchConfig(grid=16, block=256), reduce_sum, x, y, values.size)
        return float(p.download(y)[0])


def main(method: str | None) -> None:
    context, pool = multiprocessing.get_context(method), Pool(prepare=[reduce_sum])
    # The processes start before the pool opens: a forked child has copies of what is open.
    with context.Pool(2) as processes, pool.sync:
        for number, values in enumerate(processes.imap(prepare, range(8))):
            assert total(pool, values) == 1000 * number
    print("8 sums")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
