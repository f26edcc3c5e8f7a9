"""Hold a partition's stream until a test opens it: reliable work in flight."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np

from greensched import Partition, PinnedBuffer


class Gate:
    """While closed, no work submitted to the partition after it begins.

    It is a stream wait on a word of pinned memory, which every driver honours, with device code or
    without. It opens at the end of its block at the latest, so that no test hangs the device.
    """

    def __init__(self, word: PinnedBuffer) -> None:
        self._word = word

    @classmethod
    async def closed(cls, p: Partition) -> Gate:
        """Close the partition's stream after the work submitted before."""
        gate = cls(await p.empty_pinned(1, np.uint32))
        lease = p._open_lease()
        track = lease.launch_stream
        track.stream.context.driver.wait_value(track.stream.handle, gate._word.address, 1)
        gate._word.record_use(track, (track.issued + 1) & 0xFFFFFFFF, write=False)
        lease.reusable = False
        lease.launches_without_ticket = True  # as by a bound launch
        return gate

    def open(self) -> None:
        """Let the work after it begin."""
        self._word.array[0] = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.open()
        self._word.close()
