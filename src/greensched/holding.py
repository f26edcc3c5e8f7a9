"""A lane in somebody's hands: from its grant until the last of its work is done.

Tickets own cells, not tasks: a lease may end while its work runs, by an exception or a
cancellation or a loop that closed; the cells go back when the device is done and not before.
Whoever ends a lease calls `end` and need not wait; `over` is called exactly once.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Protocol

from greensched.completion import Completion
from greensched.errors import CUDAError
from greensched.jobs import Job
from greensched.loops import Waiter
from greensched.planning.scheduler import Lease
from greensched.worker import Crew

logger = logging.getLogger("greensched")


class Keeper(Protocol):
    """Who is told how a holding ends: the pool."""

    def draining(self, holding: Holding) -> None: ...

    def over(self, holding: Holding) -> None: ...


class Holding:
    """One lease of a crew, by one loop.

    Args:
        lease: the cells.
        crew: the lane over them, and its threads.
        completion: the loop that holds it, until that loop closes.
        keeper: told once that the lease has ended and its work has not (unless it has), and once
            that all work is done; on the thread of whatever loop then looks after it.
    """

    def __init__(self, lease: Lease, crew: Crew, completion: Completion, keeper: Keeper) -> None:
        self.lease = lease
        self.crew = crew
        self.completion = completion
        self.is_open = True
        self.is_over = False
        #: Something beyond our own tickets may have work on the lane: `run`, `stream`, `context`.
        self.is_exposed = False
        #: Bound launches since the last ticket.
        self.unmarked = 0
        #: Jobs that failed, for the end of the block.
        self.failed: list[Job[Any]] = []
        self._keeper = keeper
        self._waiters: list[Waiter] = []
        #: Tickets put behind bound launches, and how many launches each covers.
        self._batches: deque[tuple[int, int]] = deque()
        #: The last ticket of all, once it is known.
        self._last: int | None = None

    # -- while it is held --------------------------------------------------------------------------

    def mark_unmarked(self) -> None:
        """Puts a ticket behind bound launches, which have none of their own."""
        launches = self.crew.lane.launches
        at_once = launches.submitted == launches.issued
        ticket = launches.issue()
        self._batches.append((ticket, self.unmarked))
        self.unmarked = 0
        if launches.watcher is None:
            self.completion.watch(launches)
        if at_once:
            launches.mark(ticket)
        else:
            self.crew.defer(lambda: None, Job(launches, ticket, "mark", self.failed), ticket)

    def unmarked_in_flight(self) -> int:
        """Bound launches that are not done, as far as their tickets tell."""
        batches, launches = self._batches, self.crew.lane.launches
        while batches and launches.reached(batches[0][0]):
            batches.popleft()
        return sum(number for _, number in batches)

    # -- its end -----------------------------------------------------------------------------------

    def end(self) -> None:
        """Nothing more is submitted; the cells go back when the work is done. Does not wait."""
        if not self.is_open:
            return
        self.is_open = False
        launches = self.crew.lane.launches
        try:
            if self.unmarked and launches.fault is None:
                self.mark_unmarked()
        except CUDAError as error:
            self.crew.home.lost(error)
        if launches.fault is not None:
            self._finish()
        elif self.is_exposed or not self.crew.lane.runs.is_idle:
            self.completion.errand()
            self.crew.after_runs(self._settle)
        else:
            self._last = launches.issued
            self._await_last()
        if not self.is_over:
            self._keeper.draining(self)

    def adopt(self, completion: Completion) -> None:
        """The loop that held it is closed: another looks after it, and an open lease ends."""
        self.completion = completion
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

    async def wait_until_over(self) -> None:
        """Waits for `over`. A cancellation leaves it as it is: it comes all the same."""
        while not self.is_over:
            waiter = self.completion.door.create_waiter()
            self._waiters.append(waiter)
            await waiter

    def _settle(self) -> None:
        """On the mover, after everything else of the lease: the whole green context's last ticket.

        Libraries put work on streams of their own; only the context knows them all.
        """
        launches = self.crew.lane.launches
        try:
            self._record_whole()
            ticket = launches.issue()
            launches.mark(ticket)
            self._last = ticket
        except CUDAError as error:
            self.crew.home.lost(error)
        completion = self.completion
        completion.door.call_threadsafe(completion.delivered)
        completion.door.call_threadsafe(self._await_last)

    def _record_whole(self) -> None:
        lane, driver = self.crew.lane, self.crew.driver
        green = lane.context.green
        assert green is not None
        try:
            driver.record_green(green, lane.whole.handle)
        except CUDAError as error:
            if lane.launches.fault is not None:
                raise
            # A capture left open on a stream we do not know: wait for what is not captured.
            logger.warning(
                "the lane's work could not be marked (%s): waiting for it instead", error
            )
            driver.synchronize_context(lane.context.handle)
        else:
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
            self._keeper.over(self)
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.wake()

    @property
    def unseen_error(self) -> BaseException | None:
        """The first failure of a job that nobody has been told."""
        errors = (job.unseen_error for job in self.failed)
        return next((error for error in errors if error is not None), None)
