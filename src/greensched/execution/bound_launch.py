"""Bound launches: checked and packed once, then launched at the driver's own price."""

from __future__ import annotations

from typing import NoReturn

from greensched._asynclib import get_ident
from greensched.device.buffers import Buffer, PinnedBuffer, Use
from greensched.device.foreign_arrays import ForeignArray
from greensched.device.launch import PreparedLaunch
from greensched.device.streams import MASK, TicketedStream
from greensched.errors import (
    CUDAError,
    DeviceFault,
    DeviceLost,
    PartitionClosed,
    WouldBlock,
    too_late,
    wrong_thread,
)
from greensched.execution.jobs import Job
from greensched.execution.submission import Channel, order_behind


class BoundLaunch:
    """A launch made ready by `Partition.bind`. Lives as long as its partition's block.

    `bound()` launches, at once and without a ticket: nothing tells when that one is done, but
    whatever is submitted behind it. `bound.submit()` launches and returns a `Job`.

    It follows its partition over a checkpoint, with the values it has.

    An array of another library is ordered behind its producer once, when it is bound or set; what
    writes it later, elsewhere, is for the user to order. It lives until the block has ended.

    Its buffers count as used by the partition until the block ends; work of other partitions on
    them is kept in order with it. So are bound launches of other partitions, where one of them
    writes a buffer they share: but then each asks for the other every time, which costs about as
    much as a launch that is not bound. Buffers that both only read cost nothing.
    """

    __slots__ = (
        "__weakref__",
        "_arguments",
        "_channel",
        "_elsewhere",
        "_is_cold",
        "_is_moved",
        "_is_shared",
        "_is_wary",
        "_name",
        "_plan",
        "is_closed",
        "track",
    )

    def __init__(self, channel: Channel, plan: PreparedLaunch, name: str) -> None:
        self._channel = channel
        self._plan = plan
        self._arguments = plan.arguments
        self._name = name
        self.track = channel.track
        self.is_closed = False
        #: Bound launches elsewhere use its buffers, without telling.
        self._is_shared = False
        #: Its kernel was not loaded yet for the SMs it moved to: a thread loads it.
        self._is_cold = False
        #: It has other SMs since its last launch: nobody knows yet that its buffers are used there.
        self._is_moved = False
        #: Closed, shared or cold, used elsewhere, or somebody may capture: one thing to look at in
        #: each launch.
        self._is_wary = True
        #: Uses of its buffers by others, since its last launch.
        self._elsewhere: dict[TicketedStream, int] = {}
        uses = tuple(plan.arguments.buffers.values())
        for buffer, write in uses:  # all of them before any: an array of others may be refused
            self._elsewhere.update(buffer.before(self.track, write=write))
        for buffer, write in uses:
            buffer.bind(self, write=write)

    def __call__(self) -> None:
        """Launches. Never waits.

        Raises:
            WouldBlock: too many launches are in flight; `await p.drain()` first.
            PartitionClosed: its partition's block has ended.
            InvalidRequest: the partition's stream is capturing.
            WrongThread: this is not the thread whose loop entered the partition.
            InvalidArray: its partition has other SMs since a checkpoint, and an array of another
                library is refused there. The next launch asks again.
            DeviceLost: a device fault.
        """
        holding, track = self._channel.holding, self.track
        if holding.thread != get_ident():
            raise wrong_thread()
        if (
            self._is_wary
            or holding.room <= 0
            or track.submitted != track.issued
            or track.first_uses
        ):
            self._catch_up()
            self._check_room()
            if self._elsewhere or track.submitted != track.issued or track.first_uses:
                self._launch_later()
                return
        try:
            self._plan.fire()
        except CUDAError as error:
            self._failed(error)
        holding.unmarked += 1
        holding.room -= 1

    def submit(self) -> Job[None]:
        """Launches, and returns a job to await. Raises as a call does."""
        channel = self._channel
        track, holding = self.track, channel.holding
        if holding.thread != get_ident():
            raise wrong_thread()
        if self._is_wary:
            self._catch_up()
        issued = track.issued
        full = (issued - track.word[0]) & MASK >= channel.depth
        if full or track.submitted != issued or self._elsewhere or track.first_uses:
            return self._launch_later()
        return channel.submit_now(self._plan.fire, self._name, issued + 1)

    def set(self, index: int, value: object) -> None:
        """Patches one argument, for the launches from here on.

        Raises:
            IndexError: there is no such argument.
            ArgumentMismatch, BufferClosed, InvalidArray, WrongDevice: as `Partition.launch`.
            PartitionClosed: its partition's block has ended.
        """
        if self.is_closed:
            raise PartitionClosed("the partition of this bound launch")
        arguments = self._arguments
        buffers = arguments.buffers
        before = buffers.get(index)
        if before is not None and before[0] is value and not value.is_closed:  # type: ignore[union-attr]  # what it is, `value` is: a buffer
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

    # -- for its buffers and its partition ---------------------------------------------------------

    def last_use(self) -> Use:
        """Its buffers are in use up to this ticket, issued already or the next to be."""
        return self.track, self._next_ticket()

    def use_elsewhere(self, track: TicketedStream, ticket: int) -> None:
        """Others use a buffer: the next launch comes behind that."""
        if track is not self.track:
            self._elsewhere[track] = ticket
            self._is_wary = True

    def look_again(self) -> None:
        """A buffer was closed: the next launch looks at all of them."""
        self._elsewhere[self.track] = self.track.issued
        self._is_wary = True

    def be_wary(self) -> None:
        """The partition's stream was handed out: each launch asks whether it is capturing."""
        self._is_wary = True

    def share(self) -> None:
        """A bound launch elsewhere uses a buffer too: each launch asks what came before it."""
        self._is_shared = self._is_wary = True

    def move(self, channel: Channel) -> None:
        """Its partition has other SMs from now on; nothing it launched still runs.

        Its next launch sees to its buffers: an array of another library may be refused there.
        """
        ticket = self._next_ticket()
        for buffer, _ in self._arguments.buffers.values():
            buffer.unbind(self, ticket)
        self._channel, self.track = channel, channel.track
        self._elsewhere.clear()
        self._is_shared = False
        self._is_cold = self._plan.kernel not in channel.lane.loaded
        self._is_moved = self._is_wary = True
        self._plan = self._plan.on(channel.track.stream)
        channel.holding.bind(self)

    def close(self) -> None:
        """The lease ends, however it does: the last launch is up to the last ticket. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = self._is_wary = True
        for buffer, _ in self._arguments.buffers.values():
            buffer.unbind(self, self._next_ticket())
        self._channel.lane.keep(self._plan)

    def _use(self, buffer: Buffer | PinnedBuffer | ForeignArray, *, write: bool) -> None:
        self._elsewhere.update(buffer.before(self.track, write=write))
        if self._elsewhere:
            self._is_wary = True
        buffer.bind(self, write=write)

    def _next_ticket(self) -> int:
        issued = self.track.issued
        return issued + 1 if self._channel.holding.unmarked else issued

    # -- the rarer ways ----------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Whatever must be seen to before the next launch."""
        if self.is_closed:
            if self.track.fault is not None:
                raise too_late(self.track.fault)
            raise PartitionClosed("the partition of this bound launch")
        self._channel.check_capture()
        for buffer, write in self._arguments.buffers.values():
            buffer.check(self._channel.ordinal)
            if self._is_moved:
                self._use(buffer, write=write)
            elif self._is_shared:
                self._elsewhere.update(buffer.before(self.track, write=write))
        self._is_moved = False
        track = self.track
        elsewhere = {o: t for o, t in self._elsewhere.items() if o is not track}
        is_there = all(other.has_submitted(ticket) for other, ticket in elsewhere.items())
        if is_there and not track.first_uses:
            behind = [other for other, ticket in elsewhere.items() if not other.reached(ticket)]
            for other in behind:
                other.check_capture()
            self._elsewhere.clear()
            order_behind(track, {}, behind)
        if self._is_cold:
            self._is_cold = self._plan.kernel not in self._channel.lane.loaded
            if self._is_cold:  # a first launch may block: not here
                self._elsewhere[track] = 0
        self._is_wary = False  # before the look: other threads have reasons, and then say so
        if self._has_reasons():
            self._is_wary = True

    def _has_reasons(self) -> bool:
        always = self.is_closed or self._is_shared or self._is_cold or bool(self._elsewhere)
        return always or self._channel.holding.is_lent

    def _check_room(self) -> None:
        if not self._channel.holding.make_room():
            if self.track.fault is not None:
                raise DeviceLost(self.track.fault)
            raise WouldBlock("too many launches are in flight: `await p.drain()` first")

    def _launch_later(self) -> Job[None]:
        """By the mover, with the values of now."""
        channel = self._channel
        channel.check()
        uses = tuple(self._arguments.buffers.values())
        twin, lane = self._plan.copy(), channel.lane
        self._elsewhere.clear()

        def fire(_: int) -> None:
            twin.fire()
            lane.loaded.add(twin.kernel)

        return channel.submit(self._name, fire, uses, may_block=True)

    def _failed(self, error: CUDAError) -> NoReturn:
        if isinstance(error, DeviceFault):
            self._channel.holding.crew.home.lost(error)
            raise DeviceLost(error) from None
        raise error

    def __repr__(self) -> str:
        return f"<Bound {self._name}{' (closed)' if self.is_closed else ''}>"
