"""Cancel a task while its kernel runs: the task ends at once, its SMs are freed after the kernel.

python examples/03_cancelling.py

Without a GPU: GREENSCHED_DRIVER=simulated:h200 python examples/03_cancelling.py
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from greensched import ALL, LaunchConfig, PinnedBuffer, Pool
from greensched.kernels import latch

ONE = LaunchConfig(grid=1, block=1)
AT_MOST_NS = 10_000_000_000  # on a GPU the kernel ends after this time, should this program hang


async def hold(pool: Pool, word: PinnedBuffer, launched: asyncio.Event) -> None:
    """Run a kernel that ends once the word is 1."""
    async with pool.partition(16) as p:
        await p.prepare(ONE, latch)  # compile and load it, so that the launch starts at once
        job = p.launch(ONE, latch, word, AT_MOST_NS)
        launched.set()
        await job


def print_sms(pool: Pool, when: str) -> tuple[int, int, int]:
    """Print and return the SMs that are leased, draining, and free for one request."""
    s = pool.statistics()
    print(f"{when:22} {s.sms_leased:3} leased, {s.sms_draining:3} draining, {s.sms_free:3} free")
    return s.sms_leased, s.sms_draining, s.sms_free


async def main() -> bool:
    async with Pool() as pool, asyncio.TaskGroup() as tasks:
        async with pool.partition(8) as p:  # memory outlives the partition that allocated it
            word = await p.empty_pinned(1, np.uint32)
        with word:
            launched = asyncio.Event()
            task = tasks.create_task(hold(pool, word, launched))
            await launched.wait()
            leased, _, free = print_sms(pool, "the kernel runs")

            task.cancel()
            await asyncio.wait([task])
            cancelled = print_sms(pool, "the task is cancelled")

            word.array[0] = 1  # a running kernel cannot be stopped; this one ends by itself
            async with pool.partition(ALL):  # waits until the kernel has ended
                print_sms(pool, "ALL is granted")
            after = print_sms(pool, "ALL is released")
            total = pool.statistics().sms_total

    correct = task.cancelled() and cancelled == (0, leased, free) and after == (0, 0, total)
    print("no SM was freed early, and none was lost" if correct else "WRONG")
    return correct


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
