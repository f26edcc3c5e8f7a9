"""Prove on the device that partitions share no SM, with a kernel that records its `%smid`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from greensched.device.launch import LaunchConfig
from greensched.errors import VerificationFailed
from greensched.kernels import smids
from greensched.leasing.partition import Partition
from greensched.scheduling.cells import DeviceCells
from greensched.typing import REST, Size

#: Words of the bit mask of SMs: enough for 2048; the largest GPU so far has fewer than 200.
WORDS = 64
#: How long each block runs, so that the blocks spread over all SMs that they may use.
STAY_NS = 200_000
#: Threads of a block, the most there can be: two blocks for each SM reach all SMs.
BLOCK_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Verification:
    """The SM ids of each partition, as `(device, sets)` for each arrangement that was tried."""

    seen: tuple[tuple[int, tuple[frozenset[int], ...]], ...]

    def __repr__(self) -> str:
        """Say the proven sizes; `seen` has every SM."""
        said = (f"device {d}: {'+'.join(str(len(sms)) for sms in sets)}" for d, sets in self.seen)
        return f"<Verification: SMs shared by none, {'; '.join(said)}>"


async def verify(
    partitions: Callable[..., AbstractAsyncContextManager[tuple[Partition, ...]]],
    cells: Mapping[int, DeviceCells],
) -> Verification:
    """Run the proof on each device: in its smallest partitions, and in one beside all the rest.

    Args:
        partitions: `Pool.partitions`; the proof waits for every SM of a device at once.
        cells: how each device is split, by ordinal.

    Raises:
        VerificationFailed: two partitions shared an SM, or one was not seen on as many as it has.
    """
    seen = []
    for device, split in cells.items():
        arrangements: list[tuple[Size, ...]] = [(split.size,) * split.count]
        if split.total > split.size:  # else one cell is the whole device
            arrangements.append((split.size, REST))
        for sizes in arrangements:
            async with partitions(*sizes, device=device) as granted:
                seen.append((device, await _where(granted)))
    return Verification(tuple(seen))


async def _where(partitions: tuple[Partition, ...]) -> tuple[frozenset[int], ...]:
    """Run the kernel in all partitions at once; return the checked SM ids that each saw."""
    with ExitStack() as block:
        nothing = np.zeros(WORDS, np.uint32)
        counters = [block.enter_context(await p.upload(nothing)) for p in partitions]
        for p, counter in zip(partitions, counters, strict=True):
            config = LaunchConfig(grid=2 * p.sm_count, block=BLOCK_THREADS)
            p.launch(config, smids, counter, STAY_NS)
        sets = [
            _ids(await p.download(counter)) for p, counter in zip(partitions, counters, strict=True)
        ]
    for p, ids in zip(partitions, sets, strict=True):
        if len(ids) != p.sm_count:
            raise VerificationFailed(f"{p!r} was seen on {len(ids)} SMs: {sorted(ids)}")
    union: set[int] = set().union(*sets)
    if len(union) != sum(map(len, sets)):
        device = partitions[0].device_id
        raise VerificationFailed(f"partitions of device {device} share SMs: {sets}")
    return tuple(sets)


def _ids(words: npt.NDArray[np.uint32]) -> frozenset[int]:
    return frozenset(
        int(i) for i in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    )
