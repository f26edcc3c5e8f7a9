"""Turns tickets into awaitables. One `CompletionPoller` for each pool and loop.

Reading a ticket's word is cheaper than a driver call, so the loop polls. `PollPolicy`, which is
pure, decides how often, and when the loop sleeps instead. `CompletionPoller` carries this out.
Figures and reasons are in docs/internals/completion.md.

1. *Poll once a turn.* While a task waits for the device, the loop polls in each of its turns, until
   `spin_budget` seconds of *idle* time have passed. So a busy loop always polls, at no cost, and an
   idle one does not burn a core.
2. *Sleep.* Then a thread blocks in the driver, and the loop sleeps. A safety poll comes after 1 ms,
   later ones at longer intervals while nothing happens, so that a late or lost wake-up costs little
   and nothing hangs. While any ticket is outstanding, awaited or not, a next poll is scheduled.
3. *Check for failures.* After a device fault no ticket is written, and only a driver call shows the
   fault. A sleeping loop makes one at each safety poll, at most once in 1 ms; a busy one every 50
   ms.
4. *Yield the GIL.* Next to a busy loop a thread that needs the GIL can starve for seconds. While a
   thread has work to do, the loop releases the GIL for 50 us each millisecond.

Under virtual time the driver calls `_poll_virtual` whenever the device has progressed, and the
policy is not used.

Everything here runs on the loop's thread, except methods named `..._threadsafe`.
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

#: Statuses of calls on a capturing stream. Source: cuda.h, CUDA_ERROR_STREAM_CAPTURE_*.
CAPTURE_STATUSES = range(900, 909)
#: Statuses after which the device still works. 1, INVALID_VALUE, comes from an event that was
#: recorded in a capture that has ended (source: an H200, driver 580.159.04,
#: tests/gpu/test_graphs_on_sms.py); 2 is OUT_OF_MEMORY; 600 is NOT_READY.
PASSING_STATUSES = frozenset({1, 2, 600, *CAPTURE_STATUSES})

#: A turn of the loop shorter than this was idle, and counts against the budget. An empty turn takes
#: 2-4 us, a turn with work tens of microseconds.
IDLE_TURN_S: Final = 10e-6
#: The delay of the first safety poll: asyncio cannot sleep for less than 1 ms, and uvloop spins.
SAFETY_S: Final = 1e-3
#: Later delays are this fraction of the time since the last progress, up to the maximum.
SAFETY_FRACTION: Final = 0.125
MAX_SAFETY_S: Final = 0.050
#: How often the GIL is yielded to a thread with work to do, and for how long.
GIL_YIELD_EVERY_S: Final = 1e-3
GIL_YIELD_S: Final = 50e-6

#: The most tasks that one turn of the loop resumes if many wait for one job.
RESUMED_AT_ONCE: Final = 500
#: How many waiters a stream has, about 30 KiB, before cancelled ones are dropped.
MAX_WAITERS: Final = 64

Callback = Callable[[], object]
Watchdog = Callable[["CompletionPoller"], float | None]

#: A ticket, and a callback or a waiter. A callback that is also called when the ticket is given up
#: has both.
_Entry = tuple[int, Callback | None, Waiter | None]
#: The waiter of such a callback.
_NO_WAITER: Final[Any] = object()

logger = logging.getLogger("greensched")


class PendingStream:
    """The poller's data on a stream with outstanding work."""

    __slots__ = ("entries", "most", "recorded", "thread_waits")

    def __init__(self) -> None:
        #: Callbacks and waiters, in the order of their tickets.
        self.entries: deque[_Entry] = deque()
        #: The number of entries at which cancelled ones are dropped.
        self.most = MAX_WAITERS
        #: Whether an event-wait thread blocks on the stream's event.
        self.thread_waits = False
        #: The last ticket whose work the stream's event has captured.
        self.recorded: int | None = None

    def add(self, entry: _Entry) -> None:
        """Insert an entry in ticket order; most entries arrive in order."""
        entries = self.entries
        if not entries or entry[0] >= entries[-1][0]:
            entries.append(entry)
            return
        at = len(entries)
        while at and entry[0] < entries[at - 1][0]:
            at -= 1
        entries.insert(at, entry)

    def drop_cancelled(self, loop: LoopAdapter) -> None:
        """Drop cancelled waiters, and set the limit to twice the number that is left."""
        left = [e for e in self.entries if e[1] is not None or loop.is_waiting(e[2])]
        self.entries.clear()
        self.entries.extend(left)
        self.most = max(MAX_WAITERS, 2 * len(left))


class Action(NamedTuple):
    """What the poller must do after a poll.

    Attributes:
        delay: Seconds until the next poll. None: no poll is needed.
        sleep: Whether threads should wait in the driver meanwhile.
        check_failures: Whether to check by driver calls if a device has failed.
        yield_gil: Whether to release the GIL for `GIL_YIELD_S` first.
    """

    delay: float | None
    sleep: bool = False
    check_failures: bool = False
    yield_gil: bool = False


class PollPolicy:
    """Decides what follows each poll of one loop. All times are of one clock.

    Args:
        spin_budget: Seconds of idle time during which the loop polls in each turn.
    """

    def __init__(self, spin_budget: float) -> None:
        self._spin_budget = spin_budget
        self._idle_spent = 0.0
        self._turn_began = 0.0
        self._last_progress = 0.0
        self._last_yield = 0.0
        self._last_check = 0.0

    def work_began(self, now: float) -> None:
        """Note that an idle stream now has outstanding work."""
        self._last_progress = now

    def progressed(self, now: float) -> None:
        """Note that a reached ticket was found."""
        self._last_progress, self._idle_spent = now, 0.0

    def wait_began(self) -> None:
        """Note that a task waits, or a thread has work to do. The budget starts again."""
        self._idle_spent = 0.0

    def thread_ran(self, now: float) -> None:
        """Note that a thread has done its work, which means that it just had the GIL."""
        self._last_yield = now

    def checked_failures(self, now: float) -> None:
        """Note that failures were checked by driver calls."""
        self._last_check = now

    def turn_began(self, now: float) -> None:
        """Note the end of a poll, after which the loop runs other callbacks."""
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
        """Decide what the poller does after a poll.

        Args:
            now: The time of the poll.
            progressed: Whether the poll found a reached ticket.
            on_device: Whether a task waits for work that is on its stream.
            outstanding: Whether any stream has work.
            threads_busy: Whether a thread has work to do for this loop.
            immediate: Whether this poll was scheduled for the turn after the last one.
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
            # A busy loop, which only has to yield the GIL, need not poll in each turn. The turn
            # after a pause does not show whether the loop is busy.
            delay = GIL_YIELD_EVERY_S if immediate else 0.0
            return Action(delay, False, unchecked > MAX_SAFETY_S, yield_gil)
        if outstanding or threads_busy:
            backed_off = (now - self._last_progress) * SAFETY_FRACTION
            delay = min(MAX_SAFETY_S, max(SAFETY_S, backed_off))
            # With many executors the loop sleeps often, so it does not check failures each time.
            return Action(delay, True, unchecked > SAFETY_S, yield_gil)
        return Action(None, yield_gil=yield_gil)


class CompletionPoller:
    """Tracks one pool's outstanding work for one loop.

    Args:
        loop: The loop.
        driver: The driver of the pool.
        on_queue_tick: Called while requests of this loop are queued; returns the seconds until its
            next call.
    """

    def __init__(
        self,
        loop: LoopAdapter,
        driver: Driver,
        on_queue_tick: Callable[[], float],
    ) -> None:
        self.loop = loop
        self.pending: dict[TicketedStream, PendingStream] = {}
        #: The number of this loop's requests in the queue.
        self.waiting = 0
        self._driver = driver
        self._policy = PollPolicy(driver.spin_budget)
        self._on_queue_tick = on_queue_tick
        self._queue_tick_due = 0.0
        #: How many pieces of work threads have to do for this loop.
        self._thread_work = 0
        #: Pieces that threads have done, but that the loop has not counted yet.
        self._thread_work_done = deque[None]()
        #: Whether, at the last poll, a task waited for work that was on its stream.
        self._on_device = False
        self._timer = loop.create_timer(self._on_timer)
        self._is_virtual = driver.subscribe(self._poll_virtual) is not None
        #: When the next poll is scheduled, and with what delay; a later one needs no clock call.
        self._due = self._delay = math.inf
        self._kicked = False
        #: Waiters whose tickets are reached, and whose tasks must resume.
        self._reached = deque[Waiter]()
        #: Called after each poll, if there is a watchdog; returns the seconds within which it must
        #: be called again, or None.
        self.watchdog: Watchdog | None = None

    # -- waiting -----------------------------------------------------------------------------------

    def wait(self, stream: TicketedStream, ticket: int) -> Waiter:
        """Return an object to await until a ticket is reached or its device is lost."""
        waiter = self.loop.create_inline_waiter()
        self._add(stream, (ticket, None, waiter))
        return waiter

    def when_reached(
        self, stream: TicketedStream, ticket: int, callback: Callback, *, or_given_up: bool = False
    ) -> None:
        """Call a function on the loop's thread once a ticket is reached or its device is lost."""
        self._add(stream, (ticket, callback, _NO_WAITER if or_given_up else None))

    def give_up(self, stream: TicketedStream) -> None:
        """Wake the tasks that wait for a given-up ticket of a stream.

        The lease's callbacks remain, because its SMs become free only when the work has ended.
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
            self._poll_within(0.0)
        elif self._delay > GIL_YIELD_EVERY_S:
            self._poll_within(GIL_YIELD_EVERY_S)

    def watch(self, stream: TicketedStream) -> None:
        """Poll a stream and check it for failures while it has outstanding work."""
        if stream not in self.pending:
            self._add_stream(stream)
            if not self._is_virtual and self._delay > SAFETY_S:
                self._schedule(SAFETY_S)

    def _add_stream(self, stream: TicketedStream) -> PendingStream:
        pending = self.pending[stream] = PendingStream()
        self._policy.work_began(time.perf_counter())
        if self.watchdog is not None:  # its time begins now
            self._schedule(0.0)
        return pending

    def thread_work_started(self) -> None:
        """Note that a thread has work to do for this loop, and may need the GIL."""
        self._thread_work += 1
        if self._delay > GIL_YIELD_EVERY_S:
            self._poll_within(GIL_YIELD_EVERY_S)

    def thread_work_done(self) -> None:
        self._thread_work -= 1

    def thread_work_done_threadsafe(self) -> None:
        """Note, from a thread, that its work is done, and poll. Many calls wake the loop once."""
        self._thread_work_done.append(None)
        self.kick_threadsafe()

    def kick_threadsafe(self) -> None:
        """Poll in the loop's next turn. From any thread."""
        if not self._kicked:
            self._kicked = True
            self.loop.call_threadsafe(self._kick)

    def request_queued(self, deadline: float | None = None) -> None:
        """Tick the queue from now on, and at this deadline, while `waiting` is above 0."""
        self.waiting += 1
        if self.waiting == 1:
            self._tick_queue()
        elif deadline is not None and deadline < self._queue_tick_due:
            self._queue_tick_due = deadline
            self._schedule(deadline - self._driver.time())

    # -- scheduling polls --------------------------------------------------------------------------

    def _poll_within(self, delay: float) -> None:
        """Poll within a delay for a new wait; the delay is not 0 if a thread must act first.

        The thread wakes the loop, and polling meanwhile would take the GIL from it.
        """
        self._policy.wait_began()
        if not self._is_virtual:
            self._schedule(delay)

    def _schedule(self, delay: float) -> None:
        """Poll after a delay, unless an earlier poll is scheduled."""
        due = 0.0 if delay <= 0 else self._driver.time() + delay
        if due < self._due:
            self._due, self._delay = due, max(0.0, delay)
            self._timer.schedule(delay)

    def _on_timer(self) -> None:
        self._run(self._poll_by_policy)

    def _run(self, poll: Callable[[], object]) -> None:
        """Poll and resume tasks; schedule the next poll even after an exception.

        Only exceptions that end the loop pass, because on trio others would end the program.
        """
        try:
            try:
                poll()
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
        """Call the watchdog. Log its exceptions, because on trio they would end the program."""
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
        self._run(self._poll_kicked)

    def _poll_kicked(self) -> None:
        self._kicked = False  # first, so that a call from here on wakes the loop again
        if self._thread_work_done:
            self._policy.thread_ran(time.perf_counter())
        while self._thread_work_done:
            self._thread_work_done.popleft()
            self._thread_work -= 1
        if self._poll():
            self._policy.progressed(time.perf_counter())
        if self._on_device:
            self._poll_within(0.0)
        self._look_for_hangs()

    def _poll_virtual(self) -> None:
        """Poll after the device progressed while the loop was idle, or failed."""
        self._poll()
        self._look_for_hangs()
        self._wake(RESUMED_AT_ONCE)
        self._check_failures()

    # -- polling -----------------------------------------------------------------------------------

    def _poll(self) -> bool:
        """Find the waiters whose tickets are reached; return whether there are any.

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
        """Call a function that waited for a ticket. Its failure does not affect other streams."""
        try:
            callback()
        except DeviceFault as fault:
            stream.health.fail(fault)
        except Exception:
            logger.exception("%r failed after the work of a stream", callback)

    def _resume(self) -> None:
        """Resume the tasks of reached waiters now, one by one. Last, because they may do anything.

        Only for calls that the loop itself makes.
        """
        if self._reached and self.loop.is_debugged:
            self._wake()
        try:
            for _ in range(min(RESUMED_AT_ONCE, len(self._reached))):
                self.loop.resume(self._reached.popleft())
            if self._reached:
                self._schedule(0.0)
        except BaseException:  # it ends the loop, but the other tasks are still woken
            self._wake()
            raise

    def _wake(self, most: int = sys.maxsize) -> None:
        """Resume some tasks of reached waiters in the loop's next turn, the others later."""
        for _ in range(min(most, len(self._reached))):
            self.loop.wake(self._reached.popleft())
        if self._reached:
            self._schedule(0.0)

    # -- driver calls ------------------------------------------------------------------------------

    def _wait_in_threads(self) -> None:
        """Have event-wait threads block in the driver for the streams that tasks wait for."""
        for stream, pending in tuple(self.pending.items()):
            self._record(stream, pending)
            if pending.entries and not pending.thread_waits and pending.recorded is not None:
                self._wait_in_thread(stream, pending)

    def _wait_in_thread(self, stream: TicketedStream, pending: PendingStream) -> None:
        def event_reached(is_done: bool) -> None:
            if not is_done:  # the safety poll records it again; earlier it would fail again
                pending.recorded = None
            pending.thread_waits = False
            if is_done:
                self.kick_threadsafe()

        pending.thread_waits = True
        if stream.owner is None or not stream.owner.wait_for_event(stream, event_reached):
            pending.thread_waits = False  # the safety poll sees the ticket

    def _record(self, stream: TicketedStream, pending: PendingStream) -> None:
        """Have the stream's event capture its work, unless earlier captured work still runs."""
        ticket = stream.submitted
        if stream.stream.is_closed:  # its work is done, and its executor was just closed
            return
        if pending.recorded is not None and not stream.reached(pending.recorded):
            return
        pending.recorded = None
        if stream.reached(ticket) or stream.first_uses:
            return
        handle = stream.stream.handle
        try:
            # A capture would record the event, and querying it or waiting for it would fail.
            if self._driver.is_capturing(handle):
                return
            self._driver.record_event(stream.event.handle, handle)
            if self._driver.is_capturing(handle):  # the worker thread has just begun a capture
                return
        except Exception as error:  # no thread waits: the safety poll sees the ticket
            self._judge(error, stream)
        else:
            pending.recorded = ticket

    def _check_failures(self) -> None:
        """Query an event of each stream, because nothing else shows a failed device."""
        self._policy.checked_failures(time.perf_counter())
        for stream in tuple(self.pending):
            if not (stream.stream.is_closed or stream.health.is_over):
                self._check_failure(stream)

    def _check_failure(self, stream: TicketedStream) -> None:
        """Query the event of a stream. Never raises, whatever driver call fails."""
        driver, failure = self._driver, None
        try:
            before = driver.exchange_capture_mode(CaptureMode.RELAXED)
            try:
                # The event may be in a capture (`_record`), which a query would invalidate.
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
        """Report a stream's device as lost, unless the device still works after this error.

        A newer driver's fault status may not be a `DeviceFault`, and a driver that shuts down
        raises none. So every error except the known passing statuses of these calls counts as a
        loss.
        """
        is_passing = isinstance(error, CUDAError) and error.status in PASSING_STATUSES
        if is_passing or stream.event.is_closed or stream.stream.is_closed:  # closed meanwhile
            logger.debug("a driver call of a poll failed: %s", error)
        else:
            stream.health.fail(error)


class PollerRegistry:
    """The pollers of a pool, one for each loop.

    Args:
        driver: The driver of the pool.
        lock: The manager's lock.
        on_tick: Called while requests of a loop are queued; returns the seconds until its next
            call.
        on_new: Called with each new poller, because earlier loops may have closed.
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
        #: The watchdog of each poller; see `CompletionPoller.watchdog`.
        self._watchdog: Watchdog | None = None
        #: The poller that was last returned, which is usually the next one, too.
        self._latest: CompletionPoller | None = None

    def current(self) -> CompletionPoller:
        """Return the poller of the running loop.

        Raises:
            NoLoop: No loop is running on this thread.
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
        """Say whether a poller of a closed loop is still registered. From any thread."""
        return any(loop.is_closed for loop in tuple(self._pollers))

    def call_one(self, function: Callable[[CompletionPoller], object]) -> bool:
        """Schedule a call on one open loop, with its poller; return False if no loop is open."""
        pollers = tuple(self._pollers.values())
        return any(poller.loop.call_threadsafe(partial(function, poller)) for poller in pollers)

    def all_locked(self) -> tuple[CompletionPoller, ...]:
        return tuple(self._pollers.values())

    def set_watchdog_locked(self, watchdog: Watchdog | None) -> None:
        """Set the function that each poller calls after its polls."""
        self._watchdog = watchdog
        for poller in self._pollers.values():
            poller.watchdog = watchdog

    def remove_closed_locked(self) -> bool:
        """Forget the pollers of closed loops; return whether there were any.

        Each caller has a poller of its own loop, and keeps it until that loop closes.
        """
        closed = [loop for loop in self._pollers if loop.is_closed]
        for loop in closed:
            del self._pollers[loop]
        if closed:
            self._latest = None
        return bool(closed)
