"""Write a kernel that runs on a GPU and on a simulated GPU.

python examples/04_your_own_kernel.py

Without a GPU: GREENSCHED_DRIVER=simulated:h200 python examples/04_your_own_kernel.py
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from greensched import LaunchConfig, Pool, Program
from greensched.typing import Cost, LaunchFacts

N = 100_000

SOURCE = """
// Steps of each number to 1: halve it if it is even, else triple it and add one.
extern "C" __global__ void collatz(unsigned *steps, unsigned n) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned count = 0;
    for (unsigned long long value = i + 1; value > 1; ++count)
        value = value % 2 ? 3 * value + 1 : value / 2;
    steps[i] = count;
}
"""
# The parameters are read from the source; NVRTC compiles it when a GPU first needs the kernel.
# A simulated GPU never compiles it: Program.compile() checks the source without a GPU.
collatz = Program(SOURCE).kernel("collatz")


# A simulated GPU runs this numpy function on the buffers instead of the kernel. A GPU uses neither
# the reference nor the cost; a kernel without them runs on a GPU only.
@collatz.reference
def _steps(_: LaunchFacts, steps: np.ndarray, n: np.uint32) -> None:
    value = np.arange(1, int(n) + 1, dtype=np.uint64)
    steps[: int(n)] = 0
    while (going := np.flatnonzero(value > 1)).size:
        now = value[going]
        value[going] = np.where(now % 2, 3 * now + 1, now // 2)
        steps[going] += 1


# The time that the kernel takes on a simulated GPU. An estimate is enough: about 100 steps per
# number, 10 instructions per step, and 200 instructions per nanosecond on an SM.
@collatz.cost
def _cost(_: LaunchFacts, _steps: np.ndarray, n: np.uint32) -> Cost:
    return Cost(sm_ns=int(n) * 100 * 10 / 200)


async def main() -> bool:
    config = LaunchConfig(grid=-(-N // 256), block=256)
    async with Pool() as pool, pool.partition(16) as p:
        with await p.empty(N, np.uint32) as buffer:
            p.launch(config, collatz, buffer, N)  # no await: the download waits for it
            steps = await p.download(buffer)

    longest = int(steps.argmax()) + 1
    print(f"below {N:,}, {longest:,} takes the most steps to 1: {steps.max()}")
    return (longest, steps.max()) == (77_031, 350)  # a known result


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
