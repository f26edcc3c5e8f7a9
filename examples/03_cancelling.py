"""Cancel a task whose kernel runs: the task is free at once, its SMs when the kernel has ended.

python examples/03_cancelling.py
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from greensched import ALL, LaunchConfig, PinnedBuffer, Pool
from greensched.cli.demo import choose_driver
from greensched.kernels import latch

ONE = LaunchConfig(grid=1, block=1)
AT_MOST_NS = 10_000_000_000  # on a GPU the kernel gives up then, should this program hang


async def hold(pool: Pool, word: PinnedBuffer, launched: asyncio.Event) -> None:
    """Runs a kernel that does not end before the word is 1."""
    async with pool.partition(16) as p:
        await p.prepare(ONE, latch)  # compiled and loaded, so that the launch goes out at once
        job = p.launch(ONE, latch, word, AT_MOST_NS)
        launched.set()
        await job


def account(pool: Pool, when: str) -> tuple[int, int, int]:
    s = pool.statistics()
    print(f"{when:22} {s.sms_leased:3} leased, {s.sms_draining:3} draining, {s.sms_free:3} free")
    return s.sms_leased, s.sms_draining, s.sms_free


async def main() -> bool:
    async with Pool(driver=choose_driver()) as pool, asyncio.TaskGroup() as tasks:
        async with pool.partition(8) as p:  # memory outlives the partition that asked for it
            word = await p.empty_pinned(1, np.uint32)
        with word:
            launched = asyncio.Event()
            task = tasks.create_task(hold(pool, word, launched))
            await launched.wait()
            leased, _, free = account(pool, "the kernel runs")

            task.cancel()
            await asyncio.wait([task])
            cancelled = account(pool, "the task was cancelled")

            word.array[0] = 1  # a running kernel cannot be stopped; this one can be asked to end
            async with pool.partition(ALL):  # whoever wants its SMs waits for that
                account(pool, "ALL was granted")
            after = account(pool, "and given back")

    right = task.cancelled() and cancelled == (0, leased, free) and after == (0, 0, leased + free)
    print("nothing came back too early, and nothing was lost" if right else "WRONG")
    return right


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
