"""On a real GPU: a lease runs on its SMs, and no other lease does."""

from __future__ import annotations

import random

import anyio
import numpy as np
import pytest

import greensched
from greensched import LaunchConfig, Pool
from greensched.kernels import latch, matmul, smids

pytestmark = pytest.mark.gpu

SEED = 20261120
LEASES = 400
WORDS = 64


def ids(words: np.ndarray) -> frozenset[int]:
    return frozenset(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")))


def test_random_leases_share_no_sm() -> None:
    """Of 400 random leases, some cancelled, none sees an SM of another."""
    rng = random.Random(SEED)
    held: dict[int, frozenset[int]] = {}
    counts = {"leases": 0, "cancelled": 0, "at once": 0}

    async def lease(pool: Pool, number: int) -> None:
        size, cancelled = rng.choice([8, 8, 16, 24, 32, 64]), rng.random() < 0.4
        with anyio.CancelScope() as scope:
            async with pool.partition(size) as p:
                with await p.upload(np.zeros(WORDS, np.uint32)) as seen:
                    config = LaunchConfig(grid=2 * p.sm_count, block=1024)
                    await p.launch(config, smids, seen, 100_000)
                    mine = ids(await p.download(seen))
                    assert len(mine) == p.sm_count
                    for other in held.values():
                        assert not mine & other
                    held[number] = mine
                    counts["at once"] = max(counts["at once"], len(held))
                    try:
                        job = p.launch(config, smids, seen, 1_000_000)  # longer than a loop's turn
                        if cancelled:
                            scope.cancel()
                        await job
                    finally:
                        del held[number]
        counts["leases"] += 1
        counts["cancelled"] += scope.cancelled_caught

    async def client(pool: Pool, first: int) -> None:
        for number in range(first, LEASES, 12):
            await lease(pool, number)

    async def main() -> None:
        async with Pool([0]) as pool, anyio.create_task_group() as group:
            for first in range(12):
                group.start_soon(client, pool, first)

    anyio.run(main)
    print(counts)
    assert counts["leases"] == LEASES
    assert counts["cancelled"] > LEASES / 4
    assert counts["at once"] > 4


@pytest.mark.fault("A3")
def test_a_cancelled_kernel_keeps_its_sms() -> None:
    """SMs of a running kernel are granted only after its end."""

    async def main() -> None:
        async with Pool([0]) as pool:
            async with pool.partition(8) as outside:
                word = await outside.empty_pinned(1, np.uint32)
                with anyio.move_on_after(0.05):
                    async with pool.partition(16) as p:
                        config = LaunchConfig(grid=p.sm_count, block=32)
                        await p.launch(config, latch, word, 10_000_000_000)
                assert pool.statistics().sms_draining == 16
                with pytest.raises(greensched.WouldBlock):
                    pool.partition_nowait(greensched.REST)
                word.array[0] = 1
                word.close()
            async with pool.partition(greensched.ALL):
                assert pool.statistics().sms_draining == 0

    anyio.run(main)


def test_work_in_one_partition_does_not_wait_for_another() -> None:
    """A partition answers while all others are busy."""

    async def main() -> None:
        async with Pool([0]) as pool, pool.partitions(16, greensched.REST) as (p, rest):
            word = await rest.empty_pinned(1, np.uint32)
            config = LaunchConfig(grid=rest.sm_count * 2, block=1024)
            grid = LaunchConfig(grid=64, block=(16, 16))
            await p.prepare(grid, matmul)  # a first use would wait for whatever runs on the device
            held = rest.launch(config, latch, word, 20_000_000_000)
            a = np.random.default_rng(1).standard_normal((256, 256), dtype=np.float32)
            with await p.upload(a) as x, await p.empty(a.shape) as y:
                await p.launch(grid, matmul, x, x, y, 256, 256, 256, 1)
                product = await p.download(y)
            assert not held.done()
            word.array[0] = 1
            await held
            word.close()
            np.testing.assert_allclose(product, a @ a, rtol=1e-3, atol=1e-3)

    anyio.run(main)
