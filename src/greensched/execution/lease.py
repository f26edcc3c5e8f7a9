"""A lane in somebody's hands: from its grant until the last of its work is done.

Tickets own cells, not tasks: a lease may end while its work runs, by an exception or a
cancellation or a loop that closed; the cells go back when the device is done and not before.
Whoever ends a lease calls `end` and need not wait; `over` is called exactly once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from functools import partial
from typing import Any, Final, Protocol

from greensched.errors import CUDAError
from greensched.execution.completion import CompletionPoller
from greensched.execution.eventloop.adapters import Waiter
from greensched.execution.jobs import Job
from greensched.execution.threads import Crew
from greensched.scheduling.requests import Grant

logger = logging.getLogger("greensched")

#: Bound launches after which a ticket must lie behind them, so that they can be counted.
BATCH: Final = 64
#: Bound launches in flight at most: with the jobs' own entries (2 for each of lane.DEPTH) below
#: the thousand or so that a driver's queue holds.
MOST: Final = 4 * BATCH


class LeaseListener(Protocol):
    """Who is told how a holding ends: the pool."""

    def draining(self, holding: Lease) -> None: ...

    def over(self, holding: Lease) -> None: ...


class BoundHandle(Protocol):
    """A bound launch: over with the lease."""

    def close(self) -> None: ...

    def be_wary(self) -> None: ...

    def move(self, channel: Any) -> None: ...


class Lease:
    """One lease of a crew, by one loop.

    Args:
        lease: the cells.
        crew: the lane over them, and its threads.
        completion: the loop that holds it, until that loop closes.
        keeper: told once that the lease has ended and its work has not (unless it has), and once
            that all work is done; on the thread of whatever loop then looks after it.
    """

    def __init__(
        self, lease: Grant, crew: Crew, completion: CompletionPoller, keeper: LeaseListener
    ) -> None:
        self.lease = lease
        self.crew = crew
        self.completion = completion
        #: The thread of the loop it was granted to: the only one that may submit.
        self.thread = threading.get_ident()
        #: Who took it while it was parked: the scheduler has not heard of him yet.
        self.taker: object = None
        self.is_open = True
        self.is_over = False
        #: Something beyond our own tickets may have work on the lane: `run`, `stream`, `context`.
        self.is_exposed = False
        #: Its end has more to see to than the work on its launches.
        self.is_involved = False
        #: The stream of its launches was handed out: somebody may capture on it.
        self.is_lent = False
        #: What is bound, and must not launch once the cells are somebody else's.
        self.bound: list[BoundHandle] = []
        #: Open, in a pool that works, and its stream never handed out: one thing to look at in
        #: each submission.
        self.is_plain = True
        #: Bound launches since the last ticket.
        self.unmarked = 0
        #: Bound launches until they must be counted again, by `make_room`.
        self.room = BATCH
        #: Jobs that failed and nobody saw, for the end of the block.
        self.failed: list[Job[Any]] = []
        #: Jobs for which the host has something left to do once the device is done.
        self.unfinished: deque[Job[Any]] = deque()
        self._keeper = keeper
        self._waiters: list[Waiter] = []
        #: Tickets behind bound launches in flight, one for each batch of them.
        self._batches: deque[int] = deque()
        #: The last ticket of all, once it is known.
        self._last: int | None = None

    # -- while it is held --------------------------------------------------------------------------

    def expose(self) -> None:
        """Something beyond our own tickets may have work on the lane from here on."""
        self.is_exposed = self.is_involved = True

    def bind(self, bound: BoundHandle) -> None:
        """A bound launch is made on it, or moves to it."""
        self.bound.append(bound)

    def lend(self) -> None:
        """The stream of its launches goes to others."""
        self.expose()
        self.is_lent = True
        self.is_plain = False
        for bound in self.bound:
            bound.be_wary()

    def finish_later(self, job: Job[Any]) -> None:
        """The host's part of a job is done when the device is done, and before the lease is over.

        Also where the loop has closed that would have done it.
        """
        self.is_involved = True
        unfinished = self.unfinished
        while unfinished and unfinished[0].is_finished:
            unfinished.popleft()
        unfinished.append(job)
        self.completion.when_reached(self.crew.lane.launches, job.ticket, job.finish)

    def make_room(self) -> bool:
        """Whether one more bound launch can be in flight."""
        if self.room == 0:
            self.mark_unmarked()
            self._batches.append(self.crew.lane.launches.issued)
            self.room = -1  # counted, and not granted yet
        if self.room < 0 and self._batches_in_flight() < MOST // BATCH:
            self.room = BATCH
        return self.room > 0

    def next_room(self) -> Waiter:
        """Something to await until bound launches have ended; look again then."""
        return self.completion.wait(self.crew.lane.launches, self._batches[0])

    def _batches_in_flight(self) -> int:
        batches, launches = self._batches, self.crew.lane.launches
        while batches and launches.reached(batches[0]):
            batches.popleft()
        return len(batches)

    def mark_unmarked(self) -> None:
        """Puts a ticket behind bound launches, if there are any: they have none of their own."""
        if not self.unmarked:
            return
        launches = self.crew.lane.launches
        at_once = launches.submitted == launches.issued and not launches.first_uses
        ticket = launches.issue()
        self.unmarked = 0
        self.completion.watch(launches)
        if at_once:
            self._mark(ticket)
        else:
            job: Job[None] = Job(launches, ticket, "mark", self.failed)
            self.crew.defer(lambda: None, job, launches, ticket, self.completion)

    def _mark(self, ticket: int) -> None:
        """A ticket that cannot be written would be waited for for ever: that ends everything."""
        try:
            self.crew.lane.launches.mark(ticket)
        except CUDAError as error:
            self.crew.home.lost(error)

    # -- its checkpoints ---------------------------------------------------------------------------

    def whole_so_far(self) -> Job[None]:
        """Done once the whole green context is: what libraries put on streams of their own, too."""
        launches = self.crew.lane.launches
        job: Job[None] = Job(launches, launches.issue(), "checkpoint", self.failed)
        self.completion.watch(launches)
        self.crew.defer(self._record_whole, job, launches, job.ticket, self.completion)
        return job

    def moved(self, crew: Crew) -> Lease:
        """The same lease on another lane, from now on; this lane has no work, and is let go."""
        for job in self.unfinished:
            job.finish()
        self.lapse()
        moved = Lease(self.lease, crew, self.completion, self._keeper)
        moved.failed = self.failed
        return moved

    def hand_over(self, channel: Any) -> None:
        """What is bound launches where the lease is now, and nothing of it is kept here."""
        bounds, self.bound = self.bound, []
        for bound in bounds:
            bound.move(channel)
        self.crew.lane.launches.let_go()

    # -- its end -----------------------------------------------------------------------------------

    def lapse(self) -> None:
        """It is over at once: nothing is left of it here."""
        self.is_open = self.is_plain = False
        self.is_over = True

    def end(self) -> None:
        """Nothing more is submitted; the cells go back when the work is done. Does not wait."""
        if not self.is_open:
            return
        self.is_open = False
        self.taker = None
        self.end_bound()
        launches = self.crew.lane.launches
        if launches.fault is None:
            self._leave_stream()
        if launches.fault is not None:
            self._finish()
        elif self._has_last_ticket():
            self._await_last()
        else:
            self.completion.errand()
            self.crew.after_runs(partial(self._settle, self.completion))
        if not self.is_over:
            self._keeper.draining(self)

    def _has_last_ticket(self) -> bool:
        """Whether a ticket is behind everything of the lease, or could be put there here and now.

        Where a thread of ours has something left to do it comes first, and then puts it there.
        """
        lane = self.crew.lane
        launches = lane.launches
        if any(not track.is_idle for track in lane.tracks[1:]):
            return False
        if self.is_exposed:
            if launches.submitted != launches.issued or launches.first_uses:
                return False
            try:
                self._order_whole()
            except CUDAError:  # somebody captures on a stream of his own: a thread waits for that
                return False
            self._mark(launches.issue())
        self._last = launches.issued
        return True

    def _leave_stream(self) -> None:
        """Sees to it that a last ticket is, or will be, behind everything on the stream."""
        launches = self.crew.lane.launches
        if self.is_lent:
            try:
                self.crew.drop_capture(launches)
            except CUDAError as error:
                self.crew.home.lost(error)
                return
        self.mark_unmarked()

    def end_bound(self) -> None:
        """No bound launch is fired any more: the lease is over, or the pool under it."""
        self.is_plain = False
        self.close_bound()

    def close_bound(self) -> None:
        """What is bound so far is not launched any more."""
        for bound in self.bound:
            bound.close()
        self.bound.clear()

    def adopt(self, completion: CompletionPoller) -> None:
        """The loop that held it is closed: another looks after it, and an open lease ends."""
        self.completion = completion
        self._waiters.clear()  # who waited was of the closed one, and does not go on
        if self.is_open:
            logger.warning("a loop closed while it held %r: the lease ends", self.crew.lane)
            self.end()
        elif self._last is not None:
            self._await_last()

    def let_go(self) -> None:
        """Its pool is closed over it: an ended lease waits for nothing. An open one may still end.

        On its loop's thread. What it waited for may be a call that never returns.
        """
        if not self.is_open:
            self._finish()

    def next_over(self) -> Waiter:
        """Something to await until it is over; look again then."""
        waiter = self.completion.door.create_waiter()
        self._waiters.append(waiter)
        return waiter

    def _settle(self, asked: CompletionPoller) -> None:
        """On the mover, after everything else of the lease: the whole green context's last ticket.

        Libraries put work on streams of their own; only the context knows them all. `asked` is
        of the loop that ended the lease, which may be closed by now.
        """
        launches = self.crew.lane.launches
        try:
            self._record_whole()
            copies = self.crew.lane.copies
            if copies is not None and not copies.is_idle:
                launches.order_behind(copies)
            ticket = launches.issue()
            launches.mark(ticket)
            self._last = ticket
        except CUDAError as error:
            self.crew.home.lost(error)
        asked.door.call_threadsafe(asked.delivered)
        self.completion.door.call_threadsafe(self._await_last)

    def _record_whole(self) -> None:
        lane = self.crew.lane
        try:
            self._order_whole()
        except CUDAError as error:
            if lane.launches.fault is not None:
                raise
            # A capture left open on a stream we do not know: wait for what is not captured.
            logger.warning(
                "the lane's work could not be marked (%s): waiting for it instead", error
            )
            self.crew.driver.synchronize_context(lane.context.handle)

    def _order_whole(self) -> None:
        """What comes on the stream of the launches is behind all of the green context."""
        lane, driver = self.crew.lane, self.crew.driver
        green = lane.context.green
        assert green is not None
        driver.record_green(green, lane.whole.handle)
        driver.wait_event(lane.launches.stream.handle, lane.whole.handle)

    def _await_last(self) -> None:
        launches = self.crew.lane.launches
        if launches.fault is not None or (self._last is not None and launches.reached(self._last)):
            self._finish()
        elif self._last is not None:
            self.completion.when_reached(launches, self._last, self._finish)

    def _finish(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.crew.lane.launches.let_go()
            for job in self.unfinished:
                job.finish()
            self._keeper.over(self)
            waiters, self._waiters, door = self._waiters, [], self.completion.door
            for waiter in waiters:
                door.wake(waiter)

    @property
    def unseen_error(self) -> BaseException | None:
        """The first failure of a job that nobody has been told."""
        errors = (job.unseen_error for job in tuple(self.failed))
        return next((error for error in errors if error is not None), None)
