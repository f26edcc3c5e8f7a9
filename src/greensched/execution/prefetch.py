"""A stream of arrays to the device, each copied while work on the one before it runs.

The copies go by a track of their own, beside the launches: on the device they take a copy engine,
and no SM. So there are three buffers at most: one that is worked on, one whose work is queued
behind that, and one that is being filled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import numpy.typing as npt

from greensched.device import staging_ring
from greensched.device.buffers import Buffer
from greensched.errors import InvalidRequest
from greensched.execution.background import BackgroundTask
from greensched.execution.jobs import Job
from greensched.execution.lease import Lease

Array = npt.NDArray[Any]


class Prefetcher:
    """What `Partition.feed` gives: an asynchronous iterator of buffers; for one task.

    Args:
        ready: gives the partition's lease, or raises what keeps it from submitting.
        arrays: what is uploaded, in this order.
    """

    def __init__(self, ready: Callable[[], Lease], arrays: Iterable[npt.ArrayLike]) -> None:
        if not isinstance(arrays, Iterable):
            raise InvalidRequest(f"feed takes arrays one after another, and {arrays!r} are none")
        self._ready = ready
        self._arrays: Iterator[npt.ArrayLike] = iter(arrays)
        self._ahead: Job[Buffer] | None = None
        #: What was given: its work may run, or be queued.
        self._given: deque[Buffer] = deque()
        self._is_begun = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Buffer:
        if not self._is_begun:
            await self._open_copies()
            self._ahead = self._upload()
            self._is_begun = True
        if self._ahead is None:
            self._close(keep=0)
            raise StopAsyncIteration
        buffer = await self._ahead
        buffer.is_known = False  # it is closed here, also where nobody iterates to the end
        await self._make_room()
        await self._open_copies()  # the partition may have other SMs since a checkpoint
        self._given.append(buffer)  # from here on nothing waits: a cancellation loses no buffer
        self._ahead = None
        self._ahead = self._upload()
        return buffer

    async def _open_copies(self) -> None:
        """The lane has its track for copies. A cancellation stops the waiting only."""
        lease = self._ready()
        lease.reusable = False
        if lease.executor.copy_stream is None:
            errand = BackgroundTask(lease.executor.create_copy_stream)
            lease.poller.thread_work_started()
            lease.executor.submit_in_order(errand.run)
            try:
                await errand.wait()
            finally:
                lease.poller.thread_work_done()

    def _upload(self) -> Job[Buffer] | None:
        """The next array is on its way; None: there is none."""
        for array in self._arrays:
            source = staging_ring.source_array(array)
            return _upload(self._ready(), source)
        return None

    async def _make_room(self) -> None:
        """Waits for the work on all but the buffer that was given last."""
        lease = self._ready()
        tracks = lease.executor.streams
        lease.ticket_bound_launches()  # else bound launches have no ticket to wait for
        for buffer in tuple(self._given)[:-1]:
            for track, ticket in buffer.uses():
                while track in tracks and not (track.reached(ticket) or track.health.is_over):
                    await lease.poller.wait(track, ticket)
        self._close(keep=1)

    def _close(self, keep: int) -> None:
        while len(self._given) > keep:
            self._given.popleft().close()


def _upload(lease: Lease, source: Array) -> Job[Buffer]:
    memory = lease.device_memory.memory
    copies, chunks = lease.executor.copy_stream, lease.executor.copy_chunks
    allowance = lease.quota
    assert copies is not None
    assert chunks is not None

    def step(ticket: int) -> Buffer:
        buffer = memory.allocate(source.shape, source.dtype, copies, ticket, allowance)
        try:
            if source.nbytes:
                chunks.upload(source, buffer.address, lambda _: None)
        except BaseException:
            buffer.close()
            raise
        return buffer

    return lease.submit("feed", step, may_block=True, on_copy_stream=True)
