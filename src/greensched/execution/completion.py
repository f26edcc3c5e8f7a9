"""Turns tickets into awaitables. One `CompletionPoller` for each pool and loop.

How a loop learns that the device is done (figures and reasons in docs/completion.md):

1. *Look first.* Reading a ticket's word costs less than asking the driver; short jobs are often
   done before anybody waits.
2. *Look once a turn.* While somebody waits, the loop reads the words once in each of its turns,
   until `spin_budget` seconds of *idle* time have passed: a busy loop looks for ever at no cost,
   an idle one does not burn a core.
3. *Sleep.* Then a thread of the lane blocks in the driver, and the loop sleeps. A safety look
   comes after 1 ms and backs off with how long it has been: a wake-up that starved or was lost
   costs little, never a hang.

The safety look is also the *sweep*, once in a millisecond at most: after a device fault no ticket
is ever written, and only a question to the driver says so. A busy loop, which looks every turn and
never sleeps, sweeps every 50 ms. While any ticket is outstanding, awaited or not, there is a safety
look; while none is, there is no timer at all.

Under virtual time the driver calls `_look` whenever the device progressed, and 2 and 3 are idle.

Everything here runs on the loop's thread, but for what is called `..._threadsafe`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from greensched.device.streams import TicketedStream
from greensched.driver.interface import Driver
from greensched.errors import CUDAError, DeviceFault
from greensched.execution.eventloop.base import LoopAdapter, Waiter
from greensched.typing import CaptureMode

#: A turn of the loop shorter than this had nothing else to do, and counts against the budget.
#: 10 us: an empty turn takes 2-4 us here, a turn with work tens (docs/completion.md).
IDLE_TURN_S: Final = 10e-6
#: The first safety look; asyncio cannot sleep for less than 1 ms, and uvloop spins if asked to.
#: Not `Final`, by which compiled code would have it written in: tests replace it.
SAFETY_S = 1e-3
#: Later ones come after this part of the time since the last progress, up to `SAFETY_MOST_S`.
SAFETY_PART: Final = 0.125
SAFETY_MOST_S: Final = 0.050
#: While a thread of ours wants the GIL beside a busy loop it is let go of so often, for so long.
#: Without it such a thread can starve for seconds (docs/completion.md).
LET_GO_EVERY_S: Final = 1e-3
LET_GO_S: Final = 50e-6

#: What calls answer because somebody captures. Source: cuda.h, CUDA_ERROR_STREAM_CAPTURE_*.
CAPTURE_STATUSES = range(900, 909)
#: And of an event that a capture took in, once that is over. Source: an H200, driver 580.159.04
#: (tests/gpu/test_graphs_on_sms.py).
NOT_RECORDED = 1

#: So many may wait for a track before who was cancelled is looked for: they take some 30 KiB.
WAITERS: Final = 64

Wake = Callable[[], object]

#: A ticket, and whom to call then or, instead, who waits for it.
_Entry = tuple[int, Wake | None, Waiter | None]

logger = logging.getLogger("greensched")


class PendingStream:
    """What is known of a track that has work outstanding."""

    __slots__ = ("armed", "entries", "most", "recorded")

    def __init__(self) -> None:
        #: By ticket: whom to call, or who waits.
        self.entries: deque[_Entry] = deque()
        #: Where there are so many, those are looked for who wait no longer.
        self.most = WAITERS
        #: A thread sleeps until this ticket.
        self.armed: int | None = None
        #: The track's event captured everything up to this ticket.
        self.recorded: int | None = None

    def add(self, entry: _Entry) -> None:
        """Keeps the entries in the order of their tickets; most come in order."""
        entries = self.entries
        at = len(entries)
        while at and entry[0] < entries[at - 1][0]:
            at -= 1
        entries.insert(at, entry)

    def forget(self, loop: LoopAdapter) -> None:
        """Who was cancelled is forgotten, each time that twice as many are here as were left."""
        left = [e for e in self.entries if e[2] is None or loop.is_waiting(e[2])]
        self.entries.clear()
        self.entries.extend(left)
        self.most = max(WAITERS, 2 * len(left))


class CompletionPoller:
    """What one loop knows of one pool's outstanding work.

    Args:
        loop: the loop.
        driver: the pool's.
        lost: told of a device fault, once or more often.
        tend: called while requests of this loop are queued; returns after how many seconds it
            wants to be called again.
    """

    def __init__(
        self,
        loop: LoopAdapter,
        driver: Driver,
        lost: Callable[[BaseException], None],
        tend: Callable[[], float],
    ) -> None:
        self.loop = loop
        self.pending: dict[TicketedStream, PendingStream] = {}
        #: Requests of this loop in the queue.
        self.waiting = 0
        self._driver = driver
        self._lost = lost
        self._tend = tend
        self._thread_work = 0
        #: Somebody waits for what is on a stream already, as of the last look.
        self._on_device = False
        self._timer = loop.create_timer(self._step)
        self._unsubscribe = driver.subscribe(self._look_virtual)
        #: When the next look is agreed for, and how long after that was agreed: who needs none
        #: sooner than so long from now asks no clock.
        self._due = self._within = math.inf
        self._tend_at = 0.0
        self._kicked = False
        #: Who waited for what is reached by now, and is to go on.
        self._reached = deque[Waiter]()
        #: Errands done by other threads, of which the loop has not heard.
        self._delivered = deque[None]()
        self._spent = 0.0
        self._left = 0.0
        self._progress = 0.0
        self._let_go = 0.0
        self._swept = 0.0

    # -- asking ----------------------------------------------------------------------------------

    def wait(self, track: TicketedStream, ticket: int) -> Waiter:
        """Something to await until a ticket is reached or its track is lost; look again then."""
        waiter = self.loop.create_inline_waiter()
        self._add(track, (ticket, None, waiter))
        return waiter

    def when_reached(self, track: TicketedStream, ticket: int, wake: Wake) -> None:
        """Calls `wake` on the loop's thread once a ticket is reached or its track is lost."""
        self._add(track, (ticket, wake, None))

    def _add(self, track: TicketedStream, entry: _Entry) -> None:
        watch = self.pending.get(track) or self._watched(track)
        if len(watch.entries) >= watch.most:
            watch.forget(self.loop)
        watch.add(entry)
        if entry[0] <= track.submitted:
            self._hurry()
        else:
            self._leave_to_threads()

    def watch(self, track: TicketedStream) -> None:
        """Work is outstanding on a track: sweeps it until there is none, awaited or not."""
        if track not in self.pending:
            self._watched(track)
            if self._unsubscribe is None and self._within > SAFETY_S:
                self._appoint(SAFETY_S)

    def thread_work_started(self) -> None:
        """A thread of ours has got something to do: it may need the GIL."""
        self._thread_work += 1
        self._leave_to_threads()

    def thread_work_done(self) -> None:
        """A thread of ours has done it."""
        self._thread_work -= 1

    def request_queued(self, deadline: float | None = None) -> None:
        """A request of this loop is in the queue, until `waiting` is counted down again.

        However many are, they are tended together, and once by each one's deadline.
        """
        self.waiting += 1
        if self.waiting == 1:
            self._tend_again()
        elif deadline is not None and deadline < self._tend_at:
            self._tend_at = deadline
            self._appoint(deadline - self._driver.time())

    def thread_work_done_threadsafe(self) -> None:
        """From another thread of ours: it has done its errand, and there may be something to see.

        However many come before the loop's next turn, they wake it once.
        """
        self._delivered.append(None)
        self.kick_threadsafe()

    def kick_threadsafe(self) -> None:
        """From another thread: there may be something to see."""
        if not self._kicked:
            self._kicked = True
            self.loop.call_threadsafe(self._kick)

    # -- looking ---------------------------------------------------------------------------------

    def _hurry(self) -> None:
        self._spent = 0.0
        if self._unsubscribe is None:
            self._appoint(0.0)

    def _leave_to_threads(self) -> None:
        """A thread of ours goes first, and wakes the loop: to look until then takes its GIL."""
        self._spent = 0.0
        if self._unsubscribe is None and self._within > LET_GO_EVERY_S:
            self._appoint(LET_GO_EVERY_S)

    def _kick(self) -> None:
        self._kicked = False  # first: who comes from here on wakes the loop again
        if self._delivered:
            self._let_go = time.perf_counter()  # so one of them had the GIL just now
        while self._delivered:
            self._delivered.popleft()
            self._thread_work -= 1
        self._look()
        if self._on_device:
            self._hurry()
        self._resume()

    def _resume(self) -> None:
        """Has those go on who waited, one by one: last of all, since anything may come of it.

        Only where the loop itself calls.
        """
        if self._reached and self.loop.is_debugged:
            self._wake()
        try:
            while self._reached:
                self.loop.resume(self._reached.popleft())
        except BaseException:  # the loop ends over it: the others find what they waited for
            self._wake()
            raise

    def _wake(self) -> None:
        """Has them go on in the loop's next turn."""
        while self._reached:
            self.loop.wake(self._reached.popleft())

    def _watched(self, track: TicketedStream) -> PendingStream:
        watch = self.pending[track] = PendingStream()
        self._progress = self._driver.time()
        return watch

    def _look(self) -> bool:
        """Finds who waited for what is reached; forgets tracks with nothing outstanding."""
        progressed = self._on_device = False
        for track, watch in tuple(self.pending.items()):
            entries = watch.entries
            while entries and (track.fault is not None or track.reached(entries[0][0])):
                progressed = True
                _, wake, waiter = entries.popleft()
                if wake is not None:
                    wake()
                elif waiter is not None:
                    self._reached.append(waiter)
            if not entries and (track.fault is not None or track.reached(track.issued)):
                self.pending.pop(track, None)
            elif entries and entries[0][0] <= track.submitted:
                self._on_device = True
        if progressed:
            self._progress = self._driver.time()
            self._spent = 0.0
        return progressed

    def _look_virtual(self) -> None:
        """The device progressed while the loop was idle, or failed."""
        self._look()
        self._wake()
        self._sweep()

    def _step(self) -> None:
        """One look of the ticker, and the next appointment, whatever goes wrong meanwhile."""
        try:
            self._look_again()
            self._resume()
        except BaseException:
            self._appoint(SAFETY_MOST_S)
            raise

    def _look_again(self) -> None:
        at_once = self._within == 0.0
        self._due = self._within = math.inf
        began = time.perf_counter()
        turn = began - self._left
        if not self._look() and turn < IDLE_TURN_S:
            self._spent += turn
        if self._thread_work and began - self._let_go > LET_GO_EVERY_S:
            time.sleep(LET_GO_S)
            self._let_go = time.perf_counter()
        if self._unsubscribe is None:
            is_busy = turn >= IDLE_TURN_S
            if self._on_device and self._spent < self._driver.spin_budget:
                self._look_soon(0.0)
            elif self._thread_work and (is_busy or not at_once):
                # Whom a busy loop only lets go first, it need not look for in each turn; whether it
                # is one, the turn behind a pause does not show.
                self._look_soon(LET_GO_EVERY_S if at_once else 0.0)
            elif self.pending or self._thread_work:
                self._sleep()
        if self.waiting:
            if self._driver.time() < self._tend_at:
                self._appoint(self._tend_at - self._driver.time())
            else:
                self._tend_again()
        self._left = time.perf_counter()

    def _look_soon(self, delay: float) -> None:
        if time.perf_counter() - self._swept > SAFETY_MOST_S:  # a busy loop may look for ever
            self._sweep()
        self._appoint(delay)

    def _tend_again(self) -> None:
        delay = self._tend()
        self._tend_at = self._driver.time() + delay
        self._appoint(delay)

    def _appoint(self, delay: float) -> None:
        """Looks again after a delay, or sooner where that was agreed already."""
        due = 0.0 if delay <= 0 else self._driver.time() + delay
        if due < self._due:
            self._due, self._within = due, max(0.0, delay)
            self._timer.schedule(delay)

    def _sleep(self) -> None:
        """Has threads wait in the driver, sweeps, and comes back for a safety look."""
        for track, watch in tuple(self.pending.items()):
            self._record(track, watch)
            if watch.entries and watch.armed is None and watch.recorded is not None:
                self._arm(track, watch)
        if time.perf_counter() - self._swept > SAFETY_S:  # with many lanes it sleeps often
            self._sweep()
        since = self._driver.time() - self._progress
        self._appoint(min(SAFETY_MOST_S, max(SAFETY_S, since * SAFETY_PART)))

    def _sweep(self) -> None:
        self._swept = time.perf_counter()
        for track in tuple(self.pending):
            self._ask(track)

    def _record(self, track: TicketedStream, watch: PendingStream) -> None:
        """Has the track's event capture its work, unless what it captured is still running."""
        ticket = track.submitted
        if track.stream.is_closed:  # done, and its lane was ended since we looked
            return
        if watch.recorded is not None and not track.reached(watch.recorded):
            return
        if track.reached(ticket) or track.first_uses:
            watch.recorded = None
            return
        watch.recorded = None
        stream = track.stream.handle
        try:
            # A capture would take the event in, and who asks about it or waits for it spoils that.
            if self._driver.is_capturing(stream):
                return
            self._driver.record_event(track.event.handle, stream)
            if self._driver.is_capturing(stream):  # begun meanwhile, by the lane's own thread
                return
        except DeviceFault as fault:
            self._lost(fault)
        except CUDAError as error:  # then nobody sleeps: the safety look sees the ticket
            logger.debug("an event could not be recorded: %s", error)
        else:
            watch.recorded = ticket

    def _ask(self, track: TicketedStream) -> None:
        """Asks the driver: the one thing that sees a device fault."""
        if track.stream.is_closed:
            return
        before = self._driver.exchange_capture_mode(CaptureMode.RELAXED)
        try:
            # The event may be in that capture (`_record`), and who asks about it spoils it.
            if not self._driver.is_capturing(track.stream.handle):
                self._driver.query_event(track.event.handle)
        except CUDAError as error:
            # A fault of a status newer than us is no `DeviceFault`; a capture's is harmless.
            if error.status not in CAPTURE_STATUSES and error.status != NOT_RECORDED:
                self._lost(error)
        finally:
            self._driver.exchange_capture_mode(before)

    def _arm(self, track: TicketedStream, watch: PendingStream) -> None:
        watch.armed = watch.recorded

        def woken(is_done: bool) -> None:
            if not is_done:  # the safety look records it anew, and no sooner: it would fail again
                watch.recorded = None
            watch.armed = None
            if is_done:
                self.kick_threadsafe()

        if not track.crew.wait_for_event(track, woken):
            watch.armed = None  # the safety look sees the ticket
