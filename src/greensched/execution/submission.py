"""The order of submission: which streams a piece of work must come behind.

Buffers bring an order of their own across partitions. The device waits, by an event, for work that
is on another stream already; the submit thread waits until work that another thread has yet to
submit is on its stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from greensched.device.buffers import Buffer, PinnedBuffer
from greensched.device.foreign_arrays import ForeignArray
from greensched.device.tickets import TicketedStream

#: Buffers that a piece of work uses, each with whether it writes them.
Uses = Iterable[tuple[Buffer | PinnedBuffer | ForeignArray, bool]]


class Dependencies(NamedTuple):
    """Work on other streams that must come first.

    Attributes:
        unsubmitted: up to which ticket another thread has yet to submit.
        streams: those to wait for, on the device.
    """

    unsubmitted: dict[TicketedStream, int]
    streams: list[TicketedStream]

    def order_before(self, stream: TicketedStream) -> None:
        """Order later work on a stream behind these; blocks until all of it is submitted."""
        for other, ticket in self.unsubmitted.items():
            other.wait_until_submitted(ticket)
        for other in self.streams:
            stream.order_behind(other)


def find_dependencies(
    stream: TicketedStream, uses: Uses, copy_stream: TicketedStream | None
) -> Dependencies:
    """Find the other streams that use the buffers.

    A call of the same partition that has not returned is not among them: what is submitted after a
    `run` is ordered behind it only once the run was awaited. Copies beside the launches have no
    other order than this.

    Raises:
        InvalidRequest: one of the streams is capturing.
        DeviceHung: the work on one of them hangs.
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
