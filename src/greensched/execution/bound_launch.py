"""Bound launches: checked and packed once, then launched at about the driver's own cost."""

from __future__ import annotations

from typing import Final, NoReturn

from greensched._asynclib import get_ident
from greensched.device.buffers import Buffer, PinnedBuffer, Use
from greensched.device.foreign_arrays import ForeignArray
from greensched.device.launch import PreparedLaunch
from greensched.device.tickets import MASK, TicketedStream
from greensched.errors import (
    CUDAError,
    DeviceFault,
    DeviceLost,
    NotCopyable,
    PartitionClosed,
    WouldBlock,
    wrong_thread,
)
from greensched.execution.jobs import Job
from greensched.execution.lease import Lease, SlowReason
from greensched.execution.submission import Dependencies

#: The reasons that end when the lease moves to another executor.
ENDED_BY_MOVE: Final = frozenset(SlowReason) - {SlowReason.CLOSED}


class BoundLaunch:
    """A launch prepared by `Partition.bind`, usable until its partition's block ends.

    `bound()` launches at once and without a ticket, so only later work of the partition shows when
    it is done. `bound.submit()` launches and returns a `Job`.

    A checkpoint that moves the partition moves the bound launch, too, with its argument values.

    Another library's array is ordered after its producer only once, when it is bound or set; the
    user must order later writes elsewhere. The array is kept alive until the block ends.

    Until the block ends its buffers count as used by the partition, and other partitions' work on
    them is ordered with it. This includes other partitions' bound launches: if one of them writes a
    shared buffer, each launch costs about as much as an unbound one. Buffers that all of them
    only read cost nothing.
    """

    __slots__ = (
        "__weakref__",
        "_arguments",
        "_cache",
        "_elsewhere",
        "_launch",
        "_lease",
        "_name",
        "_prepared",
        "_slow_reasons",
        "track",
    )

    def __init__(self, lease: Lease, prepared: PreparedLaunch, name: str) -> None:
        self._lease = lease
        self._cache = lease.executor.cache
        self.track = lease.launch_stream
        self._prepared = prepared
        self._launch = prepared.launch
        self._arguments = prepared.arguments
        self._name = name
        #: If empty, a launch has nothing to check. Other threads add to it.
        self._slow_reasons: set[SlowReason] = set()
        #: Uses of the buffers by other streams since the last launch.
        self._elsewhere: dict[TicketedStream, int] = {}
        if lease.recorder.watched:
            self._slow_reasons.add(SlowReason.WATCHED)
        if lease.stream_shared:
            self._slow_reasons.add(SlowReason.STREAM_SHARED)
        uses = tuple(self._arguments.buffers.values())
        for buffer, write in uses:  # before any buffer is bound, as an array may be refused
            self._add_uses(buffer, write=write)
        for buffer, write in uses:
            buffer.bind(self, write=write)

    @property
    def is_closed(self) -> bool:
        """Whether its partition's block, or its pool, has ended."""
        return SlowReason.CLOSED in self._slow_reasons

    def __call__(self) -> None:
        """Launch without a ticket. Never waits.

        Raises:
            WouldBlock: Too many launches are in flight; `await p.drain()` first.
            PartitionClosed: The partition's block has ended.
            InvalidRequest: The partition's stream is capturing.
            WrongThread: This is not the thread of the loop that entered the partition.
            InvalidArray: A checkpoint changed the SMs, and another library's array is refused
                there. The next launch tries again.
            DeviceLost: The device has failed.
        """
        lease, stream = self._lease, self.track
        if lease.thread != get_ident():
            raise wrong_thread()
        is_watched = False
        if (
            self._slow_reasons
            or lease.launch_budget <= 0
            or stream.submitted != stream.issued
            or stream.first_uses
        ):
            self._resolve()
            self._check_room()
            if self._must_defer():
                self._launch_deferred()
                return
            is_watched = SlowReason.WATCHED in self._slow_reasons
        try:
            self._launch()
        except CUDAError as error:
            self._failed(error)
        lease.launches_without_ticket = True
        lease.launch_budget -= 1
        if is_watched:
            self._record_launch()

    def submit(self) -> Job[None]:
        """Launch, and return a job to await. Errors are those of a call."""
        lease, stream = self._lease, self.track
        if lease.thread != get_ident():
            raise wrong_thread()
        if self._slow_reasons:
            self._resolve()
        issued = stream.issued
        full = (issued - stream.word[0]) & MASK >= lease.executor.depth
        deferred = self._slow_reasons and self._must_defer()
        if full or deferred or stream.submitted != issued or stream.first_uses:
            return self._launch_deferred()
        return lease.submit_now(self._launch, self._name, issued + 1)

    def set(self, index: int, value: object) -> None:
        """Replace one argument, for later launches.

        Raises:
            IndexError: There is no such argument.
            ArgumentMismatch, BufferClosed, InvalidArray, WrongDevice: As for `Partition.launch`.
            PartitionClosed: The partition's block has ended.
        """
        if self._slow_reasons and self.is_closed:
            raise PartitionClosed("the partition of this bound launch")
        arguments = self._arguments
        buffers = arguments.buffers
        before = buffers.get(index)
        if before is not None and before[0] is value and not value.is_closed:  # type: ignore[union-attr]  # `value` is a buffer, as `before` is
            return
        arguments.set(index, value)
        if before is not None:
            buffer, write = buffers[index]
            try:
                self._use(buffer, write=write)
            except BaseException:
                arguments.set(index, before[0])
                raise
            if all(kept is not before[0] for kept, _ in buffers.values()):
                before[0].unbind(self, self._next_ticket())

    # -- for its buffers and its lease -------------------------------------------------------------

    def last_use(self) -> Use:
        """Return the ticket, issued or next, until which its buffers are in use."""
        return self.track, self._next_ticket()

    def use_elsewhere(self, track: TicketedStream, ticket: int) -> None:
        """Order the next launch after another stream's use of a buffer."""
        if track is not self.track:
            self._elsewhere[track] = ticket
            self._slow_reasons.add(SlowReason.USED_ELSEWHERE)

    def look_again(self) -> None:
        """Have the next launch check all buffers, because one was closed."""
        self._slow_reasons.add(SlowReason.BUFFER_CLOSED)

    def share(self) -> None:
        """Have each launch look for earlier uses: a bound launch elsewhere uses a buffer."""
        self._slow_reasons.add(SlowReason.BUFFERS_SHARED)

    def slow_down(self, reason: SlowReason) -> None:
        """Have later launches do what a reason demands."""
        self._slow_reasons.add(reason)

    def move(self) -> None:
        """Use the lease's new executor. Earlier launches must have ended.

        The next launch registers the buffers. It raises if another library's array is refused
        there.
        """
        ticket = self._next_ticket()
        for buffer, _ in self._arguments.buffers.values():
            buffer.unbind(self, ticket)
        self._cache, self.track = self._lease.executor.cache, self._lease.launch_stream
        self._prepared = self._prepared.with_stream(self.track.stream)
        self._launch = self._prepared.launch
        self._elsewhere.clear()
        # Updated in place, because another thread may close it meanwhile.
        self._slow_reasons -= ENDED_BY_MOVE
        self._slow_reasons.add(SlowReason.MOVED)
        if self._lease.recorder.watched:
            self._slow_reasons.add(SlowReason.WATCHED)
        if self._prepared.kernel not in self._cache.loaded:
            self._slow_reasons.add(SlowReason.NOT_LOADED)

    def close(self) -> None:
        """Refuse further launches. Idempotent."""
        if self.is_closed:
            return
        self._slow_reasons.add(SlowReason.CLOSED)
        for buffer, _ in self._arguments.buffers.values():
            buffer.unbind(self, self._next_ticket())
        self._cache.recycle(self._prepared)

    def _use(self, buffer: Buffer | PinnedBuffer | ForeignArray, *, write: bool) -> None:
        self._add_uses(buffer, write=write)
        buffer.bind(self, write=write)

    def _add_uses(self, buffer: Buffer | PinnedBuffer | ForeignArray, *, write: bool) -> None:
        self._elsewhere.update(buffer.dependencies(self.track, write=write))
        if self._elsewhere:
            self._slow_reasons.add(SlowReason.USED_ELSEWHERE)

    def _next_ticket(self) -> int:
        issued = self.track.issued
        return issued + 1 if self._lease.launches_without_ticket else issued

    # -- the slow path -----------------------------------------------------------------------------

    def _resolve(self) -> None:
        """Handle every reason before the next launch; keep those that persist."""
        reasons = self._slow_reasons
        if SlowReason.CLOSED in reasons:
            if self.track.health.is_over:
                raise self.track.health.error()
            raise PartitionClosed("the partition of this bound launch")
        if SlowReason.GAVE_WAY in reasons:
            self._lease.check_open()
        if SlowReason.HUNG in reasons:
            self._lease.check_pool()
            reasons.discard(SlowReason.HUNG)
        self._lease.check_capture()
        if not self._lease.recorder.watched:
            reasons.discard(SlowReason.WATCHED)
        reasons.discard(SlowReason.BUFFER_CLOSED)  # first: another thread may close a buffer
        try:
            for buffer, write in self._arguments.buffers.values():
                buffer.check(self._lease.ordinal)
                if SlowReason.MOVED in reasons:
                    self._use(buffer, write=write)
                elif SlowReason.BUFFERS_SHARED in reasons:
                    self._add_uses(buffer, write=write)
        except BaseException:
            reasons.add(SlowReason.BUFFER_CLOSED)
            raise
        reasons.discard(SlowReason.MOVED)
        if SlowReason.USED_ELSEWHERE in reasons:
            self._order_behind_uses()
        if self._prepared.kernel in self._cache.loaded:
            reasons.discard(SlowReason.NOT_LOADED)

    def _order_behind_uses(self) -> None:
        """Order the stream after other uses of the buffers, once these are on their streams."""
        stream, is_ordered = self.track, False
        elsewhere = self._take_uses()
        try:
            for other, ticket in elsewhere.items():
                if other.hang is not None and other.hangs(ticket):
                    raise other.hang.of(self._name)
            is_submitted = all(other.has_submitted(ticket) for other, ticket in elsewhere.items())
            if is_submitted and not stream.first_uses:
                running = [
                    other for other, ticket in elsewhere.items() if not other.reached(ticket)
                ]
                for other in running:
                    other.check_capture()
                Dependencies({}, running).order_before(stream)
                is_ordered = True
        finally:
            if not is_ordered:
                self._put_back(elsewhere)

    def _take_uses(self) -> dict[TicketedStream, int]:
        """Take the uses by other streams; uses that other threads add meanwhile stay."""
        self._slow_reasons.discard(SlowReason.USED_ELSEWHERE)  # first: other threads add it last
        taken = {}
        while self._elsewhere:
            stream, ticket = self._elsewhere.popitem()
            taken[stream] = ticket
        return taken

    def _put_back(self, uses: dict[TicketedStream, int]) -> None:
        for stream, ticket in uses.items():
            self._elsewhere.setdefault(stream, ticket)  # a newer entry has a later ticket
        if uses:
            self._slow_reasons.add(SlowReason.USED_ELSEWHERE)

    def _must_defer(self) -> bool:
        """Say whether the submit thread must launch it."""
        reasons, stream = self._slow_reasons, self.track
        blocked = SlowReason.USED_ELSEWHERE in reasons or SlowReason.NOT_LOADED in reasons
        return bool(blocked or stream.submitted != stream.issued or stream.first_uses)

    def _check_room(self) -> None:
        if not self._lease.may_launch_bound():
            if self.track.health.is_over:
                raise self.track.health.error()
            raise WouldBlock("too many launches are in flight: `await p.drain()` first")

    def _record_launch(self) -> None:
        """Write a ticket for the last launch alone, and record it."""
        self._lease.ticket_bound_launches()
        job: Job[None] = Job(self.track, self.track.issued, self._name, self._lease)
        self._lease.record(job)

    def _launch_deferred(self) -> Job[None]:
        """Launch from the submit thread, with the present argument values."""
        lease = self._lease
        lease.check_room()
        lease.check_capture()
        uses = tuple(self._arguments.buffers.values())
        twin, loaded = self._prepared.copy(), self._cache.loaded
        elsewhere = self._take_uses()  # the buffers have them, too

        def step(_: int) -> None:
            twin.launch()
            loaded.add(twin.kernel)

        try:
            return lease.submit(self._name, step, uses, may_block=True)
        except BaseException:
            self._put_back(elsewhere)
            raise

    def _failed(self, error: CUDAError) -> NoReturn:
        if isinstance(error, DeviceFault):
            self._lease.executor.health.fail(error)
            raise DeviceLost(error) from None
        raise error

    def __reduce_ex__(self, _: object) -> NoReturn:  # no base class: it is compiled
        raise NotCopyable("BoundLaunch")

    def __repr__(self) -> str:
        return f"<BoundLaunch {self._name}{' (closed)' if self.is_closed else ''}>"
