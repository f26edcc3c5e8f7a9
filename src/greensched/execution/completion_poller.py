"""Turns tickets into awaitables. One `CompletionPoller` for each pool and loop.

Reading a ticket's word costs less than a call of the driver, so the loop polls. How often, and when
it sleeps instead, is decided by `PollPolicy`, which is pure. `CompletionPoller` does what it says.
Figures and reasons are in docs/internals/completion.md.

1. *Poll once a turn.* While a task waits for the device, the loop polls in each of its turns, until
   `spin_budget` seconds of *idle* time have passed: a busy loop polls for ever at no cost, an idle
   one does not burn a core.
2. *Sleep.* Then a thread blocks in the driver, and the loop sleeps. A safety poll comes after 1 ms,
   and later the longer nothing has happened: a wake-up that is late or lost costs little, and never
   hangs. While any ticket is outstanding, awaited or not, there is a next poll.
3. *Check for failures.* After a device fault no ticket is written, and only asking the driver
   tells. A sleeping loop asks at each safety poll, once in 1 ms at most; a busy one every 50 ms.
4. *Yield the GIL.* Beside a busy loop a thread that needs the GIL can starve for seconds. While one
   has work to do, the loop lets go of the GIL for 50 us each millisecond.

Under virtual time the driver calls `_poll_virtual` whenever the device progressed, and the policy
is not asked.

Everything here runs on the loop's thread, except what is called `..._threadsafe`.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any, Final, NamedTuple

from greensched.device.tickets import TicketedStream
from greensched.driver.interface import Driver
from greensched.errors import CUDAError, DeviceFault
from greensched.execution.eventloop import LoopAdapter, Waiter, current_adapter
from greensched.typing import CaptureMode

#: What calls return because a stream is capturing. Source: cuda.h, CUDA_ERROR_STREAM_CAPTURE_*.
CAPTURE_STATUSES = range(900, 909)
#: The device goes on after these. 1, INVALID_VALUE: of an event that a capture took in, once that
#: capture has ended (source: an H200, driver 580.159.04, tests/gpu/test_graphs_on_sms.py); 2,
#: OUT_OF_MEMORY; 600, NOT_READY.
PASSING_STATUSES = frozenset({1, 2, 600, *CAPTURE_STATUSES})

#: A turn of the loop shorter than this had nothing else to do, and counts against the budget.
#: 10 us: an empty turn takes 2-4 us, a turn with work tens.
IDLE_TURN_S: Final = 10e-6
#: The first safety poll: asyncio cannot sleep for less than 1 ms, and uvloop spins if asked to.
SAFETY_S: Final = 1e-3
#: Later ones come after this fraction of the time since the last progress, up to the most.
SAFETY_FRACTION: Final = 0.125
MAX_SAFETY_S: Final = 0.050
#: How often the GIL is yielded to a thread with work to do, and for how long.
GIL_YIELD_EVERY_S: Final = 1e-3
GIL_YIELD_S: Final = 50e-6

#: Tasks that one turn of the loop resumes at most, where so many wait for one job.
RESUMED_AT_ONCE: Final = 500
#: Waiters of a stream, some 30 KiB, before the cancelled ones among them are dropped.
MAX_WAITERS: Final = 64

Callback = Callable[[], object]
Watchdog = Callable[["CompletionPoller"], float | None]

#: A ticket, and a callback or a waiter; both of a callback that is also told if it is given up.
_Entry = tuple[int, Callback | None, Waiter | None]
#: The waiter of such a callback.
_NO_WAITER: Final[Any] = object()

logger = logging.getLogger("greensched")


class PendingStream:
    """What a poller knows of a stream with outstanding work."""

    __slots__ = ("entries", "most", "recorded", "thread_waits")

    def __init__(self) -> None:
        #: Callbacks and waiters, in the order of their tickets.
        self.entries: deque[_Entry] = deque()
        #: At so many entries the cancelled ones are dropped.
        self.most = MAX_WAITERS
        #: An event-wait thread blocks on the stream's event.
        self.thread_waits = False
        #: The stream's event captured everything up to this ticket.
        self.recorded: int | None = None

    def add(self, entry: _Entry) -> None:
        """Insert an entry in the order of tickets; most come in order."""
        entries = self.entries
        if not entries or entry[0] >= entries[-1][0]:
            entries.append(entry)
            return
        at = len(entries)
        while at and entry[0] < entries[at - 1][0]:
            at -= 1
        entries.insert(at, entry)

    def drop_cancelled(self, loop: LoopAdapter) -> None:
        """Drop cancelled waiters, and again once there are twice as many as were left."""
        left = [e for e in self.entries if e[1] is not None or loop.is_waiting(e[2])]
        self.entries.clear()
        self.entries.extend(left)
        self.most = max(MAX_WAITERS, 2 * len(left))


class Action(NamedTuple):
    """What the poller is to do after a poll.

    Attributes:
        delay: seconds until the next poll; None: none is needed.
        sleep: have threads wait in the driver meanwhile.
        check_failures: ask the driver whether a device has failed.
        yield_gil: let go of the GIL for `GIL_YIELD_S` first.
    """

    delay: float | None
    sleep: bool = False
    check_failures: bool = False
    yield_gil: bool = False


class PollPolicy:
    """Decides, after each poll of one loop, what comes next. All times are of one clock.

    Args:
        spin_budget: seconds of idle time in which the loop polls in each turn.
    """

    def __init__(self, spin_budget: float) -> None:
        self._spin_budget = spin_budget
        self._idle_spent = 0.0
        self._turn_began = 0.0
        self._last_progress = 0.0
        self._last_yield = 0.0
        self._last_check = 0.0

    def work_began(self, now: float) -> None:
        """Note that a stream has outstanding work, of which it had none."""
        self._last_progress = now

    def progressed(self, now: float) -> None:
        """Note that a ticket was found reached."""
        self._last_progress, self._idle_spent = now, 0.0

    def wait_began(self) -> None:
        """Note that a task waits, or a thread has work to do: the budget begins anew."""
        self._idle_spent = 0.0

    def thread_ran(self, now: float) -> None:
        """Note that a thread has done its work, so that it had the GIL just now."""
        self._last_yield = now

    def checked_failures(self, now: float) -> None:
        """Note that the driver was asked for failures."""
        self._last_check = now

    def turn_began(self, now: float) -> None:
        """Note the end of a poll: from here on the loop does other things."""
        self._turn_began = now

    def next(
        self,
        now: float,
        *,
        progressed: bool,
        on_device: bool,
        outstanding: bool,
        threads_busy: bool,
        immediate: bool,
    ) -> Action:
        """Decide what comes after a poll.

        Args:
            now: the time of the poll.
            progressed: the poll found a ticket reached.
            on_device: a task waits for work that is on its stream.
            outstanding: some stream has work.
            threads_busy: a thread has work to do for this loop.
            immediate: this poll was scheduled for the turn behind the last one.
        """
        turn = now - self._turn_began
        idle = turn < IDLE_TURN_S
        if progressed:
            self.progressed(now)
        elif idle:
            self._idle_spent += turn
        yield_gil = threads_busy and now - self._last_yield > GIL_YIELD_EVERY_S
        if yield_gil:
            self._last_yield = now
        unchecked = now - self._last_check
        if on_device and self._idle_spent < self._spin_budget:
            return Action(0.0, False, unchecked > MAX_SAFETY_S, yield_gil)
        if threads_busy and not (idle and immediate):
            # A busy loop, which only has to yield the GIL, need not poll in each turn. Whether it
            # is busy, the turn behind a pause does not show.
            delay = GIL_YIELD_EVERY_S if immediate else 0.0
            return Action(delay, False, unchecked > MAX_SAFETY_S, yield_gil)
        if outstanding or threads_busy:
            backed_off = (now - self._last_progress) * SAFETY_FRACTION
            delay = min(MAX_SAFETY_S, max(SAFETY_S, backed_off))
            # With many executors the loop sleeps often: not each time is the driver asked.
            return Action(delay, True, unchecked > SAFETY_S, yield_gil)
        return Action(None, yield_gil=yield_gil)


class CompletionPoller:
    """What one loop knows of one pool's outstanding work.

    Args:
        loop: the loop.
        driver: the pool's.
        on_queue_tick: called while requests of this loop are queued; returns after how many
            seconds it is to be called again.
    """

    def __init__(
        self,
        loop: LoopAdapter,
        driver: Driver,
        on_queue_tick: Callable[[], float],
    ) -> None:
        self.loop = loop
        self.pending: dict[TicketedStream, PendingStream] = {}
        #: Requests of this loop in the queue.
        self.waiting = 0
        self._driver = driver
        self._policy = PollPolicy(driver.spin_budget)
        self._on_queue_tick = on_queue_tick
        self._queue_tick_due = 0.0
        #: Pieces of work that threads have to do for this loop.
        self._thread_work = 0
        #: Pieces that threads have done, of which the loop has not heard.
        self._thread_work_done = deque[None]()
        #: A task waits for what is on a stream already, as of the last poll.
        self._on_device = False
        self._timer = loop.create_timer(self._on_timer)
        self._is_virtual = driver.subscribe(self._poll_virtual) is not None
        #: When the next poll is scheduled, and after what delay: a later one needs no clock.
        self._due = self._delay = math.inf
        self._kicked = False
        #: Waiters whose tickets are reached, and whose tasks are to go on.
        self._reached = deque[Waiter]()
        #: Called after each poll, where there is a watchdog; returns the seconds until it is to be
        #: called again at the latest, or None.
        self.watchdog: Watchdog | None = None

    # -- waiting -----------------------------------------------------------------------------------

    def wait(self, stream: TicketedStream, ticket: int) -> Waiter:
        """Make something to await until a ticket is reached or its device is lost; check then."""
        waiter = self.loop.create_inline_waiter()
        self._add(stream, (ticket, None, waiter))
        return waiter

    def when_reached(
        self, stream: TicketedStream, ticket: int, callback: Callback, *, or_given_up: bool = False
    ) -> None:
        """Call a function on the loop's thread once a ticket is reached or its device is lost."""
        self._add(stream, (ticket, callback, _NO_WAITER if or_given_up else None))

    def give_up(self, stream: TicketedStream) -> None:
        """Wake the tasks that wait for a ticket of a stream that was given up.

        Other callbacks stay: of the lease, whose SMs are free once the work has ended.
        """
        pending = self.pending.get(stream)
        if pending is None:
            return
        entries = tuple(pending.entries)
        pending.entries.clear()
        for entry in entries:
            ticket, callback, waiter = entry
            if waiter is None or ticket > stream.given_up:
                pending.entries.append(entry)
            elif callback is not None:
                self._call(callback, stream)
            else:
                self._reached.append(waiter)

    def _add(self, stream: TicketedStream, entry: _Entry) -> None:
        pending = self.pending.get(stream) or self._add_stream(stream)
        if len(pending.entries) >= pending.most:
            pending.drop_cancelled(self.loop)
        pending.add(entry)
        if entry[0] <= stream.submitted:
            self._poll_now()
        elif self._delay > GIL_YIELD_EVERY_S:
            self._leave_to_threads()

    def watch(self, stream: TicketedStream) -> None:
        """Poll a stream, and check it for failures, until it has no outstanding work."""
        if stream not in self.pending:
            self._add_stream(stream)
            if not self._is_virtual and self._delay > SAFETY_S:
                self._schedule(SAFETY_S)

    def _add_stream(self, stream: TicketedStream) -> PendingStream:
        pending = self.pending[stream] = PendingStream()
        self._policy.work_began(time.perf_counter())
        if self.watchdog is not None:  # it counts from now
            self._schedule(0.0)
        return pending

    def thread_work_started(self) -> None:
        """Note that a thread has work to do for this loop: it may need the GIL."""
        self._thread_work += 1
        if self._delay > GIL_YIELD_EVERY_S:
            self._leave_to_threads()

    def thread_work_done(self) -> None:
        """Note that a thread has done it."""
        self._thread_work -= 1

    def thread_work_done_threadsafe(self) -> None:
        """Note it from that thread, and poll. Many of these wake the loop once."""
        self._thread_work_done.append(None)
        self.kick_threadsafe()

    def kick_threadsafe(self) -> None:
        """Poll in the loop's next turn. From any thread."""
        if not self._kicked:
            self._kicked = True
            self.loop.call_threadsafe(self._kick)

    def request_queued(self, deadline: float | None = None) -> None:
        """Tick the queue from now on, and at this deadline, until `waiting` is counted down."""
        self.waiting += 1
        if self.waiting == 1:
            self._tick_queue()
        elif deadline is not None and deadline < self._queue_tick_due:
            self._queue_tick_due = deadline
            self._schedule(deadline - self._driver.time())

    # -- scheduling polls --------------------------------------------------------------------------

    def _poll_now(self) -> None:
        self._policy.wait_began()
        if not self._is_virtual:
            self._schedule(0.0)

    def _leave_to_threads(self) -> None:
        """Let a thread go first, which then wakes the loop: polling until then takes its GIL."""
        self._policy.wait_began()
        if not self._is_virtual:
            self._schedule(GIL_YIELD_EVERY_S)

    def _schedule(self, delay: float) -> None:
        """Poll after a delay, or sooner where that is scheduled already."""
        due = 0.0 if delay <= 0 else self._driver.time() + delay
        if due < self._due:
            self._due, self._delay = due, max(0.0, delay)
            self._timer.schedule(delay)

    def _on_timer(self) -> None:
        """Poll, and schedule the next poll whatever is raised meanwhile.

        Only what ends the loop is raised from here: on trio anything else would end the program.
        """
        try:
            try:
                self._poll_by_policy()
            except Exception:
                logger.exception("a poll failed; it is tried again")
                self._schedule(MAX_SAFETY_S)
            self._resume()
        except BaseException:
            self._schedule(MAX_SAFETY_S)
            raise

    def _poll_by_policy(self) -> None:
        immediate = self._delay == 0.0
        self._due = self._delay = math.inf
        now = time.perf_counter()
        progressed = self._poll()
        if not self._is_virtual:
            action = self._policy.next(
                now,
                progressed=progressed,
                on_device=self._on_device,
                outstanding=bool(self.pending),
                threads_busy=self._thread_work > 0,
                immediate=immediate,
            )
            if action.yield_gil:
                time.sleep(GIL_YIELD_S)
            if action.sleep:
                self._wait_in_threads()
            if action.check_failures:
                self._check_failures()
            if action.delay is not None:
                self._schedule(action.delay)
        self._look_for_hangs()
        if self.waiting:
            if self._driver.time() < self._queue_tick_due:
                self._schedule(self._queue_tick_due - self._driver.time())
            else:
                self._tick_queue()
        self._policy.turn_began(time.perf_counter())

    def _look_for_hangs(self) -> None:
        """Call the watchdog. Whatever it raises is logged: on trio it would end the program."""
        if self.watchdog is None:
            return
        try:
            delay = self.watchdog(self)
        except Exception:
            logger.exception("the watchdog failed; it looks again")
            delay = MAX_SAFETY_S
        if delay is not None:
            self._schedule(delay)

    def _tick_queue(self) -> None:
        delay = self._on_queue_tick()
        self._queue_tick_due = self._driver.time() + delay
        self._schedule(delay)

    def _kick(self) -> None:
        self._kicked = False  # first: a thread that comes from here on wakes the loop again
        if self._thread_work_done:
            self._policy.thread_ran(time.perf_counter())
        while self._thread_work_done:
            self._thread_work_done.popleft()
            self._thread_work -= 1
        if self._poll():
            self._policy.progressed(time.perf_counter())
        if self._on_device:
            self._poll_now()
        self._look_for_hangs()
        self._resume()

    def _poll_virtual(self) -> None:
        """Poll where the device progressed while the loop was idle, or failed."""
        self._poll()
        self._look_for_hangs()
        self._wake(RESUMED_AT_ONCE)
        self._check_failures()

    # -- polling -----------------------------------------------------------------------------------

    def _poll(self) -> bool:
        """Find the waiters whose tickets are reached, and whether there are any.

        Streams without outstanding work are dropped.
        """
        progressed = self._on_device = False
        for stream, pending in tuple(self.pending.items()):
            entries = pending.entries
            while entries and (stream.health.is_over or stream.reached(entries[0][0])):
                progressed = True
                _, callback, waiter = entries.popleft()
                if callback is not None:
                    self._call(callback, stream)
                elif waiter is not None:
                    self._reached.append(waiter)
            if stream.kept:
                stream.release_kept()
            if not entries and (stream.health.is_over or stream.reached(stream.issued)):
                self.pending.pop(stream, None)
            elif entries and entries[0][0] <= stream.submitted:
                self._on_device = True
        return progressed

    def _call(self, callback: Callback, stream: TicketedStream) -> None:
        """Call a function that waited for a ticket; its failure leaves the other streams alone."""
        try:
            callback()
        except DeviceFault as fault:
            stream.health.fail(fault)
        except Exception:
            logger.exception("%r failed behind the work of a stream", callback)

    def _resume(self) -> None:
        """Run the tasks of reached waiters now, one by one; last of all, as they may do anything.

        Only from a call that the loop itself made.
        """
        if self._reached and self.loop.is_debugged:
            self._wake()
        try:
            for _ in range(min(RESUMED_AT_ONCE, len(self._reached))):
                self.loop.resume(self._reached.popleft())
            if self._reached:
                self._schedule(0.0)
        except BaseException:  # the loop ends by it: the other tasks are woken all the same
            self._wake()
            raise

    def _wake(self, most: int = sys.maxsize) -> None:
        """Run the tasks of reached waiters in the loop's next turn, so many; others later."""
        for _ in range(min(most, len(self._reached))):
            self.loop.wake(self._reached.popleft())
        if self._reached:
            self._schedule(0.0)

    # -- asking the driver -------------------------------------------------------------------------

    def _wait_in_threads(self) -> None:
        """Have event-wait threads block in the driver, for streams that tasks wait for."""
        for stream, pending in tuple(self.pending.items()):
            self._record(stream, pending)
            if pending.entries and not pending.thread_waits and pending.recorded is not None:
                self._wait_in_thread(stream, pending)

    def _wait_in_thread(self, stream: TicketedStream, pending: PendingStream) -> None:
        def event_reached(is_done: bool) -> None:
            if not is_done:  # recorded anew by the safety poll, and no sooner: it would fail again
                pending.recorded = None
            pending.thread_waits = False
            if is_done:
                self.kick_threadsafe()

        pending.thread_waits = True
        if stream.owner is None or not stream.owner.wait_for_event(stream, event_reached):
            pending.thread_waits = False  # the safety poll sees the ticket

    def _record(self, stream: TicketedStream, pending: PendingStream) -> None:
        """Have the stream's event capture its work, unless what it captured is still running."""
        ticket = stream.submitted
        if stream.stream.is_closed:  # done, and its executor was closed since the poll
            return
        if pending.recorded is not None and not stream.reached(pending.recorded):
            return
        pending.recorded = None
        if stream.reached(ticket) or stream.first_uses:
            return
        handle = stream.stream.handle
        try:
            # A capture would take the event in, and querying it or waiting for it then fails.
            if self._driver.is_capturing(handle):
                return
            self._driver.record_event(stream.event.handle, handle)
            if self._driver.is_capturing(handle):  # begun meanwhile, by the worker thread
                return
        except Exception as error:  # then no thread waits: the safety poll sees the ticket
            self._judge(error, stream)
        else:
            pending.recorded = ticket

    def _check_failures(self) -> None:
        """Query an event of each stream: nothing else shows that a device has failed."""
        self._policy.checked_failures(time.perf_counter())
        for stream in tuple(self.pending):
            if not (stream.stream.is_closed or stream.health.is_over):
                self._check_failure(stream)

    def _check_failure(self, stream: TicketedStream) -> None:
        """Query the event of a stream. Never raises, whichever driver call fails."""
        driver, failure = self._driver, None
        try:
            before = driver.exchange_capture_mode(CaptureMode.RELAXED)
            try:
                # The event may be in a capture (`_record`), and a query would invalidate that.
                if not driver.is_capturing(stream.stream.handle):
                    driver.query_event(stream.event.handle)
            except Exception as error:
                failure = error
            driver.exchange_capture_mode(before)
        except Exception as error:
            failure = failure or error  # the first is the cause
        if failure is not None:
            self._judge(failure, stream)

    def _judge(self, error: Exception, stream: TicketedStream) -> None:
        """Report the loss of a stream's device, unless the device goes on after the error.

        A fault of a newer driver's status is no `DeviceFault`, and a driver that shuts down has
        none, so all but the known passing errors of these calls count as a loss.
        """
        is_passing = isinstance(error, CUDAError) and error.status in PASSING_STATUSES
        if is_passing or stream.event.is_closed or stream.stream.is_closed:  # closed meanwhile
            logger.debug("a driver call of a poll failed: %s", error)
        else:
            stream.health.fail(error)


class PollerRegistry:
    """The pollers of a pool, by loop.

    Args:
        driver: the pool's.
        lock: the manager's.
        on_tick: called while requests of a loop are queued; returns the seconds to the next call.
        on_new: called with each new poller: earlier loops may have closed.
    """

    def __init__(
        self,
        driver: Driver,
        lock: RLock,
        on_tick: Callable[[], float],
        on_new: Callable[[CompletionPoller], None],
    ) -> None:
        self._driver = driver
        self._lock = lock
        self._on_tick = on_tick
        self._on_new = on_new
        self._pollers: dict[LoopAdapter, CompletionPoller] = {}
        #: Of each poller; see `CompletionPoller.watchdog`.
        self._watchdog: Watchdog | None = None
        #: The poller last asked for: mostly it is asked for again.
        self._latest: CompletionPoller | None = None

    def current(self) -> CompletionPoller:
        """Return the poller of the running loop.

        Raises:
            NoLoop: no loop is running on this thread.
        """
        latest = self._latest
        if latest is not None and latest.loop.is_current():
            return latest
        loop = current_adapter()
        poller = self._pollers.get(loop)
        if poller is None:
            poller = CompletionPoller(loop, self._driver, self._on_tick)
            with self._lock:
                poller.watchdog = self._watchdog
                self._pollers[loop] = poller
            self._on_new(poller)
        self._latest = poller
        return poller

    def __len__(self) -> int:
        return len(self._pollers)

    @property
    def has_closed(self) -> bool:
        """Whether a loop has closed whose poller is still known. From any thread."""
        return any(loop.is_closed for loop in tuple(self._pollers))

    def call_one(self, function: Callable[[CompletionPoller], object]) -> bool:
        """Call a function of a poller on the loop of one that is open, soon; False: none is."""
        pollers = tuple(self._pollers.values())
        return any(one.loop.call_threadsafe(partial(function, one)) for one in pollers)

    def all_locked(self) -> tuple[CompletionPoller, ...]:
        """Return all pollers."""
        return tuple(self._pollers.values())

    def set_watchdog_locked(self, watchdog: Watchdog | None) -> None:
        """Have each poller call a function after its polls, from now on."""
        self._watchdog = watchdog
        for poller in self._pollers.values():
            poller.watchdog = watchdog

    def remove_closed_locked(self) -> bool:
        """Forget the pollers of closed loops; return whether there were any.

        Each caller has a poller of its own loop, and keeps it until that closes.
        """
        closed = [loop for loop in self._pollers if loop.is_closed]
        for loop in closed:
            del self._pollers[loop]
        if closed:
            self._latest = None
        return bool(closed)
