"""The way work takes to a lane somebody holds: one order, submitted at once or by the mover.

Tickets are issued in the order of the calls. While everything issued has been submitted, work is
submitted here and now, on the caller's thread. Work that may block (a kernel's first use, memory
that must grow, a large copy) goes to the lane's mover, and so does everything after it until the
mover has caught up: so the order of submission is the order of the calls, always.

Buffers bring an order of their own across partitions. Work elsewhere that must come first is
waited for by an event on the device; where it is not even submitted, the mover waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from greensched._asynclib import get_ident
from greensched.device.allocators import DeviceAllocator, PinnedAllocator
from greensched.device.buffers import Buffer, MemoryQuota, PinnedBuffer
from greensched.device.device import Device
from greensched.device.foreign_arrays import ForeignArray
from greensched.device.staging import StagingPool
from greensched.device.staging_ring import StagingRing
from greensched.device.streams import MASK, TicketedStream
from greensched.errors import CUDAError, DeviceFault, DeviceLost, InvalidRequest, WouldBlock
from greensched.execution.call_context import CallContext
from greensched.execution.jobs import Job
from greensched.execution.lease import Lease

T = TypeVar("T")

#: A buffer a piece of work uses, and whether it writes it.
Uses = Iterable[tuple[Buffer | PinnedBuffer | ForeignArray, bool]]
#: Up to which ticket somebody has yet to submit.
Lagging = Mapping[TicketedStream, int]


class Site(Protocol):
    """What is shared by the partitions of one device."""

    device: Device
    memory: DeviceAllocator
    pinned: PinnedAllocator
    slots: StagingRing
    staging: StagingPool

    @property
    def neighbours(self) -> Mapping[int, Site]:
        """The other devices of the pool, by ordinal."""


class Channel:
    """How one holder submits to his lane. For the holder's loop."""

    __slots__ = (
        "allowance",
        "check_pool",
        "depth",
        "holding",
        "in_calls",
        "lane",
        "ordinal",
        "site",
        "track",
    )

    def __init__(
        self,
        holding: Lease,
        site: Site,
        check_pool: Callable[[], None],
        allowance: MemoryQuota | None = None,
    ) -> None:
        self.holding = holding
        self.site = site
        #: What its buffers count against.
        self.allowance = allowance
        #: Raises what keeps the pool from working: closed, poisoned, forked.
        self.check_pool = check_pool
        self.lane = holding.crew.lane
        self.track = self.lane.launches
        #: Jobs in flight on it at most.
        self.depth = self.lane.depth
        self.ordinal = self.lane.device.ordinal
        #: What is current in its calls, once there was one.
        self.in_calls: CallContext | None = None

    def check(self) -> None:
        """Refuses what can be refused before anything is looked at.

        Raises:
            WouldBlock: the bound of jobs in flight.
            InvalidRequest: the stream is capturing.
        """
        if not self.has_room(self.track):
            raise WouldBlock("too many jobs are in flight: `await p.drain()` first")
        self.check_capture()

    def check_capture(self) -> None:
        """Refuses what a capture would take in: a ticket would be written when its graph runs.

        Raises:
            InvalidRequest: the stream was handed out, and is capturing.
        """
        if self.holding.is_lent:
            driver = self.lane.device.driver
            if driver.is_capturing(self.track.stream.handle):
                raise InvalidRequest("the partition's stream is capturing: end the capture first")

    def has_room(self, track: TicketedStream) -> bool:
        """Whether one more job can be in flight on a track."""
        return (track.issued - track.word[0]) & MASK < self.depth or track.is_idle

    def is_prompt(self) -> bool:
        """Whether everything issued is submitted: what comes now can go at once."""
        return self.track.submitted == self.track.issued

    # -- submitting ------------------------------------------------------------------------------

    def submit(
        self,
        what: str,
        step: Callable[[int], T],
        uses: Uses = (),
        *,
        may_block: bool = False,
        beside: TicketedStream | None = None,
    ) -> Job[T]:
        """Submits one piece of work.

        Args:
            what: for people.
            step: gives the work to the driver, and returns the job's value. It is told its
                ticket. A thread of ours calls it, with the primary context current, if it may
                block or must wait its turn.
            uses: the buffers it uses.
            may_block: see `step`.
            beside: the track of copies beside the launches, for one that may block, too: only
                buffers order it and launches behind each other.
        """
        track, holding = self.track if beside is None else beside, self.holding
        lagging, behind = self.others(track, uses)
        by_thread = may_block or lagging or track.first_uses or beside is not None
        at_once = self.is_prompt() and not by_thread
        ticket = track.issue()
        for buffer, write in uses:
            buffer.note(track, ticket, write=write)

        def whole() -> T:
            order_behind(track, lagging, behind)
            return step(ticket)

        if at_once:
            return self.submit_now(whole, what, ticket)
        job: Job[T] = Job(track, ticket, what, holding.failed)
        holding.completion.watch(track)
        holding.crew.defer(whole, job, track, ticket, holding.completion)
        if beside is None:
            holding.unmarked = 0
        return job

    def submit_now(self, step: Callable[[], T], what: str, ticket: int) -> Job[T]:
        """Submits on this thread. What the driver refuses is the job's failure.

        The ticket is the next, or was issued just now.

        The ticket is written whatever happens, or everything after it would wait for ever.

        Raises:
            DeviceLost: a device fault.
        """
        track, holding = self.track, self.holding
        track.issued = ticket
        job: Job[T] = Job(track, ticket, what, holding.failed)
        try:
            try:
                value = step()
                if value is not None:
                    job.succeed(value)
            except DeviceFault:
                raise
            except Exception as error:
                job.fail(error)
            finally:
                track.mark(ticket)
        except CUDAError as fault:
            holding.crew.home.lost(fault)
            raise DeviceLost(fault) from None
        holding.unmarked = 0
        completion = holding.completion
        if track not in completion.tracks:
            completion.watch(track)
        return job

    def others(self, track: TicketedStream, uses: Uses) -> tuple[Lagging, list[TicketedStream]]:
        """Who else uses the buffers: (who has not submitted a ticket yet, whom to wait for).

        A call of the same partition that has not returned is not among them: what is submitted
        after a `run` is ordered behind it only once the run was awaited. Copies beside the launches
        know no order but this one.

        Raises:
            InvalidRequest: one of them is capturing.
        """
        lagging: dict[TicketedStream, int] = {}
        behind: dict[TicketedStream, None] = {}
        for buffer, write in uses:
            for other, ticket in buffer.before(track, write=write):
                if other.has_submitted(ticket):
                    other.check_capture()
                    behind[other] = None
                elif other.crew is not track.crew or self.lane.copies in (other, track):
                    lagging[other] = max(ticket, lagging.get(other, ticket))
                    behind[other] = None
        return lagging, list(behind)


class Holder(Protocol):
    """Who submits: a partition, of which all that is asked is whether it may."""

    _channel: Channel | None

    def _ready(self) -> Channel: ...


def ready(p: Holder) -> Channel:
    """The channel of a partition, with everything looked at that can be wrong with submitting.

    Raises:
        GreenschedError: whatever is wrong: see `Partition`.
    """
    channel = p._channel
    if channel is not None:
        holding, track = channel.holding, channel.track
        if (
            holding.is_plain
            and holding.thread == get_ident()
            and (track.issued - track.word[0]) & MASK < channel.depth
        ):
            return channel
    return p._ready()


def order_behind(track: TicketedStream, lagging: Lagging, behind: Iterable[TicketedStream]) -> None:
    """Orders what follows on a track behind others; blocks for those who have yet to submit."""
    for other, ticket in lagging.items():
        other.wait_until_submitted(ticket)
    for other in behind:
        track.order_behind(other)
