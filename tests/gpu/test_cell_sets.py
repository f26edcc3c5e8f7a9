"""On a real GPU: green contexts over random sets of cells run on those SMs, all at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack, closing

import anyio
import numpy as np
import pytest

from greensched import (
    Buffer,
    ContextOptions,
    Device,
    LaunchConfig,
    Partition,
    Pool,
    SMResource,
    SMResourceOptions,
    launch,
)
from greensched.kernels import smids

pytestmark = pytest.mark.gpu

SEED = 20261120
SETS = 1000
MOST_AT_ONCE = 6
WORDS = 64

SMs = frozenset[int]


def cells_of(device: Device) -> list[SMResource]:
    """Return the device's smallest groups, and the remainder."""
    sm = device.resources.sm
    least = sm.min_partition_size
    groups, rest = sm.split(
        SMResourceOptions(count=[least] * (sm.sm_count // least), coscheduled_sm_count=2)
    )
    return [*groups, rest] if rest is not None and rest.sm_count else groups


def run_at_once(
    device: Device, sets: Sequence[Sequence[SMResource]], buffers: Sequence[Buffer]
) -> None:
    """Have each set's SMs write their ids into its buffer, in new contexts. Blocks."""
    with ExitStack() as stack:
        streams = []
        for cells in sets:
            context = device.create_context(ContextOptions(resources=list(cells)))
            stack.enter_context(closing(context))
            streams.append(stack.enter_context(closing(context.create_stream())))
        for stream, cells, buffer in zip(streams, sets, buffers, strict=False):
            blocks = 2 * sum(cell.sm_count for cell in cells)
            launch(stream, LaunchConfig(grid=blocks, block=1024), smids, buffer, 100_000)
        for stream in streams:
            stream.sync()


async def seen_by(
    p: Partition, buffers: Sequence[Buffer], device: Device, sets: Sequence[Sequence[SMResource]]
) -> list[SMs]:
    """Return the SMs that a kernel of each set sees while all run."""
    for buffer in buffers:
        await p.copy(buffer, np.zeros(WORDS, np.uint32))
    await anyio.to_thread.run_sync(run_at_once, device, sets, buffers)
    found = []
    for buffer in buffers[: len(sets)]:
        bits = np.unpackbits((await p.download(buffer)).view(np.uint8), bitorder="little")
        found.append(frozenset(map(int, np.flatnonzero(bits))))
    return found


def test_random_sets_of_cells_are_disjoint() -> None:
    """Each of 1,000 random sets sees all SMs of its cells and no others."""
    rng = random.Random(SEED)

    async def main() -> None:
        async with Pool(devices=[0]) as pool, pool.partition(8) as p:
            device = pool.devices[0]
            cells = cells_of(device)
            buffers = [await p.empty(WORDS, np.uint32) for _ in range(MOST_AT_ONCE)]
            alone = [(await seen_by(p, buffers, device, [[cell]]))[0] for cell in cells]
            assert sum(len(sms) for sms in alone) == device.sm_count
            assert len(frozenset().union(*alone)) == device.sm_count
            seen = 0
            while seen < SETS:
                numbers = rng.sample(range(len(cells)), rng.randint(2, len(cells)))
                parts = rng.randint(1, min(MOST_AT_ONCE, len(numbers)))
                chosen = [numbers[first::parts] for first in range(parts)]
                found = await seen_by(
                    p, buffers, device, [[cells[n] for n in part] for part in chosen]
                )
                for part, sms in zip(chosen, found, strict=True):
                    assert sms == frozenset().union(*(alone[n] for n in part))
                assert sum(map(len, found)) == len(frozenset().union(*found))
                seen += parts
            print(f"{seen} sets of {len(cells)} cells, seed {SEED}")
            for buffer in buffers:
                buffer.close()

    anyio.run(main)
