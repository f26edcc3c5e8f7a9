"""The kinds of leases of the soak: what tasks do with a partition, and how it ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import numpy as np

from greensched import ALL, REST, DeadlineExceeded, LaunchConfig, Pool, WouldBlock
from greensched.driver.simulated import cost
from greensched.kernels import saxpy, spin
from greensched.typing import Size

Kind = Callable[[Pool, random.Random], Awaitable[None]]

ONE = LaunchConfig(grid=1, block=32)
#: Items of the arrays that are copied: 16 KiB.
ITEMS = 4096


class Meant(Exception):
    """What some leases end by."""


def size(rng: random.Random) -> Size:
    """Mostly an exact number of SMs, sometimes a range, now and then everything."""
    draw = rng.random()
    if draw < 0.02:
        return ALL
    least = rng.randint(1, 64)
    return (least, rng.randint(least, 128)) if draw < 0.2 else least


def duration(rng: random.Random) -> int:
    """Nanoseconds of a kernel: 10 us on average, and some a hundred times that."""
    return int(rng.expovariate(1e-4)) * (100 if rng.random() < 0.02 else 1)


# -- the kinds --------------------------------------------------------------------------------


async def launched(pool: Pool, rng: random.Random) -> None:
    async with pool.partition(size(rng)) as p:
        await p.launch(ONE, spin, duration(rng))


async def launched_and_left(pool: Pool, rng: random.Random) -> None:
    """Several launches, for which the end of the block waits."""
    async with pool.partition(size(rng)) as p:
        for _ in range(rng.randint(1, 8)):
            p.launch(ONE, spin, duration(rng))


async def launched_by_the_pool(pool: Pool, rng: random.Random) -> None:
    await pool.launch(ONE, spin, duration(rng), sms=size(rng))


async def bound(pool: Pool, rng: random.Random) -> None:
    async with pool.partition(size(rng)) as p:
        await p.prepare(ONE, spin)
        launch = p.bind(ONE, spin, duration(rng))
        for _ in range(rng.randint(1, 100)):
            launch()
        launch.set(0, duration(rng))
        await launch.submit()


async def copied(pool: Pool, rng: random.Random) -> None:
    """There and back, with a kernel between."""
    array = np.full(ITEMS, rng.random(), np.float32)
    async with pool.partition(size(rng)) as p:
        with await p.upload(array) as x, await p.upload(array) as y:
            p.launch(ONE, saxpy, 2.0, x, y, ITEMS)
            out = await p.download(y)
    assert np.allclose(out, 3 * array)


async def called(pool: Pool, rng: random.Random) -> None:
    async with pool.partition(size(rng)) as p:
        p.launch(ONE, spin, duration(rng))
        assert await p.run(cost(duration(rng) / 1e9)(sum), [1, 2, 3]) == 6


async def together(pool: Pool, rng: random.Random) -> None:
    async with pool.partitions(rng.choice((8, 16, 32)), REST) as partitions:
        for p in partitions:
            p.launch(ONE, spin, duration(rng))


async def cancelled_at_work(pool: Pool, rng: random.Random) -> None:
    """Wherever it is when its time is over: queued, or with a kernel running."""
    with suppress(TimeoutError):
        async with asyncio.timeout(duration(rng) / 1e9):
            async with pool.partition(size(rng)) as p:
                await p.launch(ONE, spin, 10 * duration(rng))


async def cancelled_in_a_call(pool: Pool, rng: random.Random) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(duration(rng) / 1e9):
            await pool.run(cost(duration(rng) / 1e9)(len), (), sms=size(rng))


async def too_late(pool: Pool, rng: random.Random) -> None:
    """A request for everything, with a deadline that it seldom meets."""
    with suppress(DeadlineExceeded):
        async with pool.partition(ALL, deadline=(1 + duration(rng)) / 1e9) as p:
            await p.launch(ONE, spin, duration(rng))


async def at_once_or_not(pool: Pool, rng: random.Random) -> None:
    with suppress(WouldBlock):
        async with pool.partition_nowait(size(rng)) as p:
            await p.launch(ONE, spin, duration(rng))


async def failed(pool: Pool, rng: random.Random) -> None:
    """A block that raises over work in flight, or a call that raises in it."""

    def fail() -> None:
        raise Meant

    with suppress(Meant):
        async with pool.partition(size(rng)) as p:
            p.launch(ONE, spin, duration(rng))
            if rng.random() < 0.5:
                raise Meant
            await p.run(fail)


#: How often each is drawn: launches most; what takes a thread of ours least, for its price.
_KINDS: dict[Kind, int] = {
    launched: 30,
    launched_and_left: 10,
    launched_by_the_pool: 10,
    bound: 5,
    copied: 5,
    called: 3,
    together: 5,
    cancelled_at_work: 15,
    cancelled_in_a_call: 2,
    too_late: 5,
    at_once_or_not: 8,
    failed: 2,
}
KINDS, WEIGHTS = tuple(_KINDS), tuple(_KINDS.values())
