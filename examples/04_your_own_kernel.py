"""A kernel of your own, that runs on a GPU and simulated alike.

python examples/04_your_own_kernel.py
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from greensched import LaunchConfig, Pool, Program
from greensched.cli.demo import choose_driver
from greensched.typing import Cost, LaunchFacts

N = 100_000

SOURCE = """
// How many steps each number takes to 1: halve it if it is even, else triple it and add one.
extern "C" __global__ void collatz(unsigned *steps, unsigned n) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned count = 0;
    for (unsigned long long value = i + 1; value > 1; ++count)
        value = value % 2 ? 3 * value + 1 : value / 2;
    steps[i] = count;
}
"""
# Compiled when a GPU first needs it; the parameters are read off the source.
collatz = Program(SOURCE).kernel("collatz")


# What it does, in numpy, on the bytes of the buffers: a simulated GPU runs this instead. A real
# one looks at neither this nor the cost; a kernel without them runs there only.
@collatz.reference
def _steps(_: LaunchFacts, steps: np.ndarray, n: np.uint32) -> None:
    value = np.arange(1, int(n) + 1, dtype=np.uint64)
    steps[: int(n)] = 0
    while (going := np.flatnonzero(value > 1)).size:
        now = value[going]
        value[going] = np.where(now % 2, 3 * now + 1, now // 2)
        steps[going] += 1


# What it costs, for the simulated clock. A guess will do: some 100 steps a number, 10
# instructions a step, and an SM that does 200 in a nanosecond.
@collatz.cost
def _cost(_: LaunchFacts, _steps: np.ndarray, n: np.uint32) -> Cost:
    return Cost(sm_ns=int(n) * 100 * 10 / 200)


async def main() -> bool:
    config = LaunchConfig(grid=-(-N // 256), block=256)
    async with Pool(driver=choose_driver()) as pool, pool.partition(16) as p:
        with await p.empty(N, np.uint32) as buffer:
            p.launch(config, collatz, buffer, N)  # no await: what follows comes behind it
            steps = await p.download(buffer)

    longest = int(steps.argmax()) + 1
    print(f"the longest way to 1 below {N:,} is that of {longest:,}: {steps.max()} steps")
    return (longest, steps.max()) == (77_031, 350)  # as is well known


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
