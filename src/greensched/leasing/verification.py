"""Proof, on the device, that partitions share no SM: a kernel that says where it ran."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from greensched.device.device import Device
from greensched.device.launch import LaunchConfig
from greensched.errors import VerificationFailed
from greensched.kernels import smids
from greensched.leasing.partition import Partition
from greensched.typing import REST, Size

#: Words of the bit mask of SMs: room for 2048, and the largest GPU so far has fewer than 200.
WORDS = 64
#: How long each block stays, so that the blocks spread over all the SMs they may use.
STAY_NS = 200_000
#: As many threads as a block can have: two blocks for each SM reach all of them.
CONFIG_BLOCK = 1024


class Leasing(Protocol):
    """What of a pool the proof needs."""

    @property
    def devices(self) -> tuple[Device, ...]: ...

    def partitions(
        self, *sizes: Size, device: int | None = None
    ) -> AbstractAsyncContextManager[tuple[Partition, ...]]: ...


@dataclass(frozen=True, slots=True)
class Verification:
    """What was seen: for each device and arrangement, the SM ids of each partition."""

    seen: tuple[tuple[int, tuple[frozenset[int], ...]], ...]

    def __repr__(self) -> str:
        """What was proven, in short: `seen` has every SM."""
        said = (f"device {d}: {'+'.join(str(len(sms)) for sms in sets)}" for d, sets in self.seen)
        return f"<Verification: SMs shared by none, {'; '.join(said)}>"


async def verify(pool: Leasing, cells: dict[int, tuple[int, int]]) -> Verification:
    """Runs the proof on every device, in its smallest partitions and in one with its rest.

    Args:
        pool: leases for it; it waits for every SM of a device at once.
        cells: (SMs of a cell, number of cells) of each device.

    Raises:
        VerificationFailed: two partitions shared an SM, or one was not seen on as many as it has.
    """
    seen = []
    for device in pool.devices:
        size, number = cells[device.ordinal]
        arrangements: list[tuple[Size, ...]] = [(size,) * number]
        if device.resources.sm.sm_count > size:  # else one cell is all of it
            arrangements.append((size, REST))
        for sizes in arrangements:
            async with pool.partitions(*sizes, device=device.ordinal) as partitions:
                seen.append((device.ordinal, await _where(partitions)))
    return Verification(tuple(seen))


async def _where(partitions: tuple[Partition, ...]) -> tuple[frozenset[int], ...]:
    """Runs the kernel in all partitions at once; the SMs each saw, checked."""
    with ExitStack() as block:
        nothing = np.zeros(WORDS, np.uint32)
        counters = [block.enter_context(await p.upload(nothing)) for p in partitions]
        for p, counter in zip(partitions, counters, strict=True):
            config = LaunchConfig(grid=2 * p.sm_count, block=CONFIG_BLOCK)
            p.launch(config, smids, counter, STAY_NS)
        sets = [
            _ids(await p.download(counter)) for p, counter in zip(partitions, counters, strict=True)
        ]
    for p, ids in zip(partitions, sets, strict=True):
        if len(ids) != p.sm_count:
            raise VerificationFailed(f"{p!r} was seen on {len(ids)} SMs: {sorted(ids)}")
    union: set[int] = set().union(*sets)
    if len(union) != sum(map(len, sets)):
        raise VerificationFailed(f"partitions of device {partitions[0].device} share SMs: {sets}")
    return tuple(sets)


def _ids(words: npt.NDArray[np.uint32]) -> frozenset[int]:
    return frozenset(
        int(i) for i in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    )
