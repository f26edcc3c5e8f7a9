"""The order of submission: which streams' work must precede a piece of work.

Buffers impose an order across partitions. For work that is on another stream, the device waits by
an event. For work that another thread has yet to submit, the submit thread waits until it is on
its stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from greensched.device.buffers import Buffer, PinnedBuffer
from greensched.device.foreign_arrays import ForeignArray
from greensched.device.tickets import TicketedStream

#: Buffers that a piece of work uses, each with whether the work writes it.
Uses = Iterable[tuple[Buffer | PinnedBuffer | ForeignArray, bool]]


class Dependencies(NamedTuple):
    """Work on other streams that must come first.

    Attributes:
        unsubmitted: The tickets up to which another thread has yet to submit.
        streams: The streams that the device must wait for.
    """

    unsubmitted: dict[TicketedStream, int]
    streams: list[TicketedStream]

    def order_before(self, stream: TicketedStream) -> None:
        """Order later work on a stream after these. Blocks until all of them are submitted."""
        for other, ticket in self.unsubmitted.items():
            other.wait_until_submitted(ticket)
        for other in self.streams:
            stream.order_behind(other)


def find_dependencies(
    stream: TicketedStream, uses: Uses, copy_stream: TicketedStream | None
) -> Dependencies:
    """Find the other streams that use the buffers.

    A call of the same partition that has not returned is not included: work submitted after a
    `run` is ordered after it only once the run was awaited. Copies beside the launches are ordered
    only by buffers.

    Raises:
        InvalidRequest: One of the streams is capturing.
        DeviceHung: Work on one of the streams hangs.
    """
    unsubmitted: dict[TicketedStream, int] = {}
    streams: dict[TicketedStream, None] = {}
    for buffer, write in uses:
        for other, ticket in buffer.dependencies(stream, write=write):
            if other.hang is not None and other.hangs(ticket):
                raise other.hang.of("")
            if other.has_submitted(ticket):
                other.check_capture()
                streams[other] = None
            elif other.owner is not stream.owner or copy_stream in (other, stream):
                unsubmitted[other] = max(ticket, unsubmitted.get(other, ticket))
                streams[other] = None
    return Dependencies(unsubmitted, list(streams))
