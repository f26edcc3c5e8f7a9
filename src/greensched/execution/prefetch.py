"""Uploads arrays one after another, each while work on the previous one runs.

The copies use their own stream, beside the launches: they need a copy engine of the device, but
no SM. At most three buffers exist: one in use, one with work queued behind it, and one that is
being filled.
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
        ready: Returns the partition's lease, or raises if it cannot submit.
        arrays: The arrays, in the order of their uploads.
    """

    def __init__(self, ready: Callable[[], Lease], arrays: Iterable[npt.ArrayLike]) -> None:
        try:
            self._arrays: Iterator[npt.ArrayLike] = iter(arrays)
        except TypeError:
            message = f"prefetch takes an iterable of arrays, not {arrays!r}"
            raise InvalidRequest(message) from None
        self._ready = ready
        self._next: Job[Buffer] | None = None
        #: Buffers that were returned, and may be in use.
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
        buffer.is_known = False  # closed here, even if the iteration is abandoned
        await self._wait_for_room()
        await self._open_copy_stream()  # a checkpoint may have moved the partition
        self._returned.append(buffer)  # without a later await, so a cancellation loses no buffer
        self._next = None
        self._next = self._upload()
        return buffer

    async def _open_copy_stream(self) -> None:
        """Have the executor's copy stream made. A cancellation stops only the waiting."""
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
        """Submit the copy of the next array; None after the last one."""
        for array in self._arrays:
            return _upload(self._ready(), staging_ring.source_array(array))
        return None

    async def _wait_for_room(self) -> None:
        """Wait for the work on all returned buffers except the last one."""
        lease = self._ready()
        streams = lease.executor.streams
        lease.ticket_bound_launches()  # otherwise bound launches have no ticket to wait for
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
