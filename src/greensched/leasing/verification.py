"""Prove on the device that partitions share no SM, by a kernel that records `%smid`."""

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

#: Words of the bit mask of SMs, enough for 2048. The largest GPU so far has fewer than 200 SMs.
WORDS = 64
#: How long each block runs, so that the blocks spread over all SMs of the partition.
STAY_NS = 200_000
#: Threads of a block, the most possible. Then two blocks for each SM reach all SMs.
BLOCK_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Verification:
    """The SM ids of the partitions, as `(device, sets)` for each tested arrangement."""

    seen: tuple[tuple[int, tuple[frozenset[int], ...]], ...]

    def __repr__(self) -> str:
        """Show the proven sizes; `seen` has every SM."""
        devices = (
            f"device {d}: {'+'.join(str(len(sms)) for sms in sets)}" for d, sets in self.seen
        )
        return f"<Verification: SMs shared by none, {'; '.join(devices)}>"


async def verify(
    partitions: Callable[..., AbstractAsyncContextManager[tuple[Partition, ...]]],
    cells: Mapping[int, DeviceCells],
) -> Verification:
    """Prove on each device that partitions share no SM. See `Pool.verify`.

    Each device is tested when split into its smallest partitions, and into one such partition and
    the rest.

    Args:
        partitions: `Pool.partitions`, which waits here for every SM of a device.
        cells: The split of each device, by ordinal.

    Raises:
        VerificationFailed: Two partitions shared an SM, or a partition did not show all its SMs.
    """
    seen = []
    for device, split in cells.items():
        arrangements: list[tuple[Size, ...]] = [(split.size,) * split.count]
        if split.total > split.size:  # otherwise one cell is the whole device
            arrangements.append((split.size, REST))
        for sizes in arrangements:
            async with partitions(*sizes, device=device) as granted:
                seen.append((device, await _where(granted)))
    return Verification(tuple(seen))


async def _where(partitions: tuple[Partition, ...]) -> tuple[frozenset[int], ...]:
    """Run the kernel in all partitions at once; return and check the SM ids of each."""
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
            raise VerificationFailed(
                f"{p!r} should run on {p.sm_count} SMs, but ran on {len(ids)}: {sorted(ids)}"
            )
    union: set[int] = set().union(*sets)
    if len(union) != sum(map(len, sets)):
        device = partitions[0].device_id
        raise VerificationFailed(f"partitions of device {device} share SMs: {sets}")
    return tuple(sets)


def _ids(words: npt.NDArray[np.uint32]) -> frozenset[int]:
    return frozenset(
        int(i) for i in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    )
