"""Uploads arrays one after another, each while work on the one before it runs.

The copies go by a stream of their own, beside the launches: they use a copy engine of the device,
and no SM. Three buffers exist at most: one in use, one whose work is queued behind it, and one
that is being filled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import numpy.typing as npt

from greensched._validation import Uncopyable
from greensched.device import staging_ring
from greensched.device.buffers import Buffer
from greensched.errors import InvalidRequest
from greensched.execution.background import BackgroundTask
from greensched.execution.copies import allocate_and_fill
from greensched.execution.jobs import Job
from greensched.execution.lease import Lease

Array = npt.NDArray[Any]


class Prefetcher(Uncopyable):
    """The asynchronous iterator of buffers that `Partition.prefetch` returns; for one task.

    Args:
        ready: returns the partition's lease, or raises what keeps it from submitting.
        arrays: uploaded in this order.
    """

    def __init__(self, ready: Callable[[], Lease], arrays: Iterable[npt.ArrayLike]) -> None:
        try:
            self._arrays: Iterator[npt.ArrayLike] = iter(arrays)
        except TypeError:
            message = f"prefetch takes an iterable of arrays, not {arrays!r}"
            raise InvalidRequest(message) from None
        self._ready = ready
        self._next: Job[Buffer] | None = None
        #: Returned, and perhaps in use.
        self._returned: deque[Buffer] = deque()
        self._is_started = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Buffer:
        if not self._is_started:
            await self._open_copy_stream()
            self._next = self._upload()
            self._is_started = True
        if self._next is None:
            self._close_all_but(0)
            raise StopAsyncIteration
        buffer = await self._next
        buffer.is_known = False  # closed here, also where the iteration is given up
        await self._wait_for_room()
        await self._open_copy_stream()  # a checkpoint may have moved the partition
        self._returned.append(buffer)  # no await from here on: a cancellation loses no buffer
        self._next = None
        self._next = self._upload()
        return buffer

    async def _open_copy_stream(self) -> None:
        """Have the executor's copy stream made. A cancellation stops the waiting only."""
        lease = self._ready()
        lease.reusable = False
        if lease.executor.copy_stream is None:
            task = BackgroundTask(lease.executor.create_copy_stream)
            lease.poller.thread_work_started()
            lease.executor.submit_in_order(task.run)
            try:
                await task.wait()
            finally:
                lease.poller.thread_work_done()

    def _upload(self) -> Job[Buffer] | None:
        """Submit the copy of the next array; None: there is none."""
        for array in self._arrays:
            return _upload(self._ready(), staging_ring.source_array(array))
        return None

    async def _wait_for_room(self) -> None:
        """Wait for the work on all returned buffers but the last."""
        lease = self._ready()
        streams = lease.executor.streams
        lease.ticket_bound_launches()  # else bound launches have no ticket to wait for
        for buffer in tuple(self._returned)[:-1]:
            for stream, ticket in buffer.uses():
                while stream in streams and not (stream.reached(ticket) or stream.health.is_over):
                    await lease.wait_for(stream, ticket)
        self._close_all_but(1)

    def _close_all_but(self, count: int) -> None:
        while len(self._returned) > count:
            self._returned.popleft().close()


def _upload(lease: Lease, source: Array) -> Job[Buffer]:
    stream, chunks = lease.executor.copy_stream, lease.executor.copy_chunks
    assert stream is not None
    assert chunks is not None

    def fill(buffer: Buffer) -> None:
        if source.nbytes:
            chunks.upload(source, buffer.address, lambda _: None)

    return lease.submit(
        "prefetch",
        lambda ticket: allocate_and_fill(lease, source, stream, ticket, fill),
        may_block=True,
        on_copy_stream=True,
    )
