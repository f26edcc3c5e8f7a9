"""Threads of our own: what blocks happens here, never on an event loop's thread.

A lane has a *worker* for blocking callables, a *mover* for what must be submitted in order but
cannot be submitted at once (large copies, a kernel's first use, memory that must grow), and one
*sleeper* for each of its streams, which blocks in the driver. Each is a thread that starts when
it is first needed and is the lane's alone: one hung kernel holds up nobody else.

A thread of ours enters its context for each item and restores what the driver says was current
before, whatever the item did; its capture mode is relaxed, so that it spoils nobody's capture.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from contextvars import Context as ContextVars
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol

from greensched._asynclib import reset_sniffio
from greensched._cleanup import run_all
from greensched.context import Context
from greensched.device.streams import TicketedStream
from greensched.driver.interface import Driver
from greensched.driver.types import Mailbox
from greensched.errors import CUDAError, DeviceFault
from greensched.execution.call_context import CallContext, running_call
from greensched.execution.completion import CAPTURE_STATUSES, CompletionPoller
from greensched.execution.jobs import Job
from greensched.execution.lane import Lane
from greensched.execution.local_storage import ExecutorLocals
from greensched.typing import CaptureMode, T

logger = logging.getLogger("greensched")

Item = Callable[[], object]


class ExecutorHost(Protocol):
    """What a lane's threads need of the pool."""

    def completion(self) -> CompletionPoller: ...

    def lost(self, fault: BaseException) -> None: ...


class WorkerThread:
    """One thread, started when first needed, that does one item after another.

    Args:
        driver: whose threads these are.
        name: of the thread.
        context: entered for each item; None: the items see to that themselves.
        is_relaxed: its calls spoil nobody's capture; only where the driver is initialised.
    """

    def __init__(
        self,
        driver: Driver,
        name: str,
        context: Context | None = None,
        *,
        is_relaxed: bool = True,
    ) -> None:
        self._is_relaxed = is_relaxed
        self._driver = driver
        self._name = name
        self._context = context
        self._lock = threading.Lock()
        self._mailbox: Mailbox[Item | _Stop] | None = None

    def submit(self, item: Item) -> None:
        """Has an item done, after those before it. Never waits. Items catch what they raise."""
        mailbox = self._mailbox
        if mailbox is None:
            mailbox = self._start()
        mailbox.put(item)

    def submit_if_running(self, item: Item) -> None:
        """The same where its thread runs; else nothing is done."""
        mailbox = self._mailbox
        if mailbox is not None:
            mailbox.put(item)

    def stop(self) -> None:
        """Ends the thread once it has done what it has; waits for that. Idempotent."""
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            ended: Mailbox[None] = self._driver.create_mailbox()
            mailbox.put(_Stop(ended))
            ended.get()

    def dismiss(self) -> None:
        """Ends the thread once it has done what it has; does not wait for that."""
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            mailbox.put(_Stop(self._driver.create_mailbox()))

    def _start(self) -> Mailbox[Item | _Stop]:
        with self._lock:
            if self._mailbox is None:
                mailbox: Mailbox[Any] = self._driver.create_mailbox()
                self._driver.start_thread(lambda: self._run(mailbox), self._name)
                self._mailbox = mailbox
            return self._mailbox

    def _run(self, mailbox: Mailbox[Any]) -> None:
        if self._is_relaxed:
            with suppress(CUDAError):
                self._driver.exchange_capture_mode(CaptureMode.RELAXED)
        while True:
            item = mailbox.get()
            if isinstance(item, _Stop):
                item.ended.put(None)
                return
            try:
                if self._context is None:
                    item()
                else:
                    self._do(item, self._context)
            except BaseException:  # the thread goes on: its lane's end waits for it
                logger.exception("%s: an item failed outside its own care", self._name)
            del item  # nothing of it may live until the next one comes

    def _do(self, item: Item, context: Context) -> None:
        """An item is done whatever happens: somebody waits for it. Without its context it fails."""
        with ExitStack() as block:
            try:
                block.enter_context(context.entered())
            except CUDAError as error:
                logger.error("%s: its context cannot be entered: %s", self._name, error)
            item()


class _Stop:
    """The last item of a worker."""

    def __init__(self, ended: Mailbox[None]) -> None:
        self.ended = ended


class _QueuedCall:
    """A function on its way to a worker, where it is called, and who is told when it was."""

    __slots__ = ("call", "completion", "context", "function", "job")

    def __init__(
        self,
        function: Callable[[], Any],
        job: Job[Any],
        completion: CompletionPoller,
        call: CallContext | None,
        context: ContextVars | None,
    ) -> None:
        self.function = function
        self.job = job
        self.completion = completion
        self.call = call
        self.context = context

    def make(self) -> None:
        """Calls it."""
        if self.context is None:
            value = self.function()
        else:
            value = self.context.run(_within, self.call, self.function)
        if value is not None:
            self.job.succeed(value)


def _within(call: CallContext | None, function: Callable[[], T]) -> T:
    """Calls a function, in a copy of its caller's context, where `current_call()` is this."""
    running_call.set(call)
    reset_sniffio()
    return function()


class Crew:
    """A lane and its threads."""

    def __init__(self, lane: Lane, home: ExecutorHost) -> None:
        self.lane = lane
        self.home = home
        self.is_leased = False
        #: What users keep with the lane.
        self.belongings = ExecutorLocals()
        driver, primary = lane.device.driver, lane.device.primary
        self.driver = driver
        name = f"greensched {lane.device.ordinal}:{lane.mask:x}"
        self._worker = WorkerThread(driver, f"{name} worker")  # calls enter the lane's own context
        self._mover = WorkerThread(driver, f"{name} mover", primary)
        self._sleepers = {
            lane.launches: WorkerThread(driver, f"{name} sleeper", primary),
            lane.runs: WorkerThread(driver, f"{name} run sleeper", primary),
        }
        #: Callables for the worker, and whether it is to look for them: woken once for many.
        self._calls: deque[_QueuedCall] = deque()
        self._is_called = False
        self._block = lane.context.entered(wait=True)
        self._turn = lane.context.turn
        #: Those on their way to it through the mover: later ones must not overtake.
        self._on_the_way: deque[None] = deque()
        lane.launches.crew = lane.runs.crew = self

    @property
    def is_entered(self) -> bool:
        """Whether the calling thread is inside a block of the lane's context."""
        return self._turn is not None and self._turn.is_mine

    def make_copies(self) -> None:
        """The lane gets its track for copies beside the launches, if it has none. Blocks.

        On the mover, or on the builder while nobody has the lane.
        """
        lane = self.lane
        if lane.copies is None:
            track = lane.new_copies()
            name = f"greensched {lane.device.ordinal}:{lane.mask:x} copy sleeper"
            self._sleepers[track] = WorkerThread(self.driver, name, lane.device.primary)
            track.crew = self
            lane.copies = track  # last: others may use it from here on

    def do_in_order(self, step: Callable[[], object]) -> None:
        """Has the mover do something, behind all that was deferred before."""
        _hand(self._mover, lambda _: step())

    def sleep_until_done(self, track: TicketedStream, then: Callable[[bool], object]) -> bool:
        """Has a thread block until what the track's event captured is done; False: none starts.

        `then` is told whether it is.
        """

        def sleep() -> None:
            is_done = False
            try:
                self.driver.synchronize_event(track.event.handle)
                is_done = True
            except DeviceFault as fault:
                self.home.lost(fault)
            except CUDAError as error:  # the safety look sees the ticket
                logger.debug("a thread could not wait: %s", error)
            then(is_done)

        try:
            self._sleepers[track].submit(sleep)
        except RuntimeError as error:
            logger.debug("no thread to wait in can be started: %s", error)
            return False
        return True

    # -- deferred submissions ----------------------------------------------------------------------

    def defer(
        self,
        step: Callable[[], Any],
        job: Job[Any],
        track: TicketedStream,
        ticket: int,
        completion: CompletionPoller,
    ) -> None:
        """Has the mover submit work, in the order of the calls, and then its ticket.

        `step` returns the job's result, or raises what it fails with. `completion` is the
        holder's.
        """
        completion.errand()

        def move(refused: Exception | None) -> None:
            self._attempt(step, job, refused)
            try:
                track.mark(ticket)
            except CUDAError as error:
                self.home.lost(error)
            completion.deliver_threadsafe()

        _hand(self._mover, move)

    # -- blocking callables ------------------------------------------------------------------------

    def run(
        self,
        function: Callable[[], Any],
        job: Job[Any],
        completion: CompletionPoller,
        where: CallContext | None = None,
    ) -> None:
        """Has the worker call a function, on the run stream, with the lane's context current.

        It begins behind what was submitted before: on the device by an event, and where that is
        not submitted yet, behind the mover.

        Args:
            function: called once.
            job: done when the function has returned, and what it left on the stream is done.
            completion: the holder's.
            where: what `current_call()` is in a function of the holder's. That sees the context
                variables as they are now and here, as by `asyncio.to_thread`, and sets them for
                itself alone. None: the function is ours.
        """
        launches = self.lane.launches
        call = _QueuedCall(
            function, job, completion, where, None if where is None else copy_context()
        )
        completion.errand()
        if launches.submitted == launches.issued and not self._on_the_way:
            self._enqueue(call)
            return

        def forward(_: Exception | None) -> None:
            self._enqueue(call)
            self._on_the_way.popleft()

        self._on_the_way.append(None)
        _hand(self._mover, forward)

    def _enqueue(self, call: _QueuedCall) -> None:
        self._calls.append(call)
        self._call_worker()

    def _call_worker(self) -> None:
        if not self._is_called:
            self._is_called = True
            _hand(self._worker, self._make_calls)

    def after_runs(self, item: Item) -> None:
        """Has the mover do something after all callables and all that was deferred before."""

        def after_deferred(_: Exception | None) -> None:
            _hand(self._worker, after_calls)

        def after_calls(_: Exception | None) -> None:
            _hand(self._mover, lambda _: item())

        _hand(self._mover, after_deferred)

    def _make_calls(self, refused: Exception | None) -> None:
        """Makes all calls that are queued, in one block of the lane's context.

        Each finds that current, whatever the one before left so. It is left before anybody hears
        of the last: a context is current on one thread only.
        """
        self._is_called = False  # first: who comes from here on wakes the thread again
        calls = self._calls
        made: _QueuedCall | None = None
        try:
            if refused is not None:
                raise refused
            if calls:
                with self._block:
                    while calls:
                        before, made = made, calls.popleft()
                        if before is not None:
                            self._made(before)
                            self._block.renew()
                        self._call(made)
        except Exception as error:  # the thread cannot be started, the context entered or left
            made = made or calls.popleft()
            made.job.fail(error)
        if made is not None:
            self._made(made)
        if calls:  # behind one that could not be made: they try for themselves
            self._call_worker()

    def _call(self, call: _QueuedCall) -> None:
        lane = self.lane
        try:
            if not lane.launches.is_idle:
                lane.runs.order_behind(lane.launches)
            call.make()
        except BaseException as error:
            call.job.fail(error)

    def _made(self, call: _QueuedCall) -> None:
        """The callable has returned: its ticket comes when what it left on the stream is done."""
        runs, ticket = self.lane.runs, call.job.ticket
        try:
            if self._has_nothing(runs):
                runs.mark_here(ticket)
            else:
                runs.mark(ticket)
        except CUDAError as error:
            self.home.lost(error)
        call.completion.deliver_threadsafe()

    def _has_nothing(self, track: TicketedStream) -> bool:
        """Whether a track's stream has no work, or had but a capture: that is dropped."""
        try:
            return self.driver.query_stream(track.stream.handle)
        except CUDAError as error:
            if error.status not in CAPTURE_STATUSES:
                raise
            self.drop_capture(track)
            return self.driver.query_stream(track.stream.handle)

    def drop_capture(self, track: TicketedStream) -> None:
        """Ends a capture that was left open on a track's stream, or our ticket would go into it.

        Raises:
            CUDAError: the stream cannot be asked.
        """
        if not self.driver.is_capturing(track.stream.handle):
            return
        logger.warning("a capture was left open on a partition's stream; it is dropped")
        try:
            self.driver.destroy_graph(self.driver.end_capture(track.stream.handle))
        except CUDAError as error:
            logger.warning("the capture was spoilt already: %s", error)

    def _attempt(self, step: Callable[[], Any], job: Job[Any], refused: Exception | None) -> None:
        try:
            if refused is not None:
                raise refused
            job.succeed(step())
        except BaseException as error:
            job.fail(error)

    # -- its end -----------------------------------------------------------------------------------

    @property
    def _threads(self) -> tuple[WorkerThread, ...]:
        return self._worker, self._mover, *self._sleepers.values()

    def close(self) -> None:
        """Ends what users keep, the threads, then the lane, which has no work. Blocks."""
        if self.belongings:
            _hand(self._worker, lambda _: self._close_belongings())
        run_all((*(thread.stop for thread in self._threads), self.lane.close))

    def tidy(self) -> None:
        """Has what users let go of closed, if that can be. From any thread; does not wait."""
        if self.lane.launches.fault is None:
            self._worker.submit_if_running(self.belongings.tidy)

    def _close_belongings(self) -> None:
        """Where they were made: on the worker, with the lane's context current."""
        with self._block:
            self.belongings.close()

    def abandon(self) -> None:
        """Leaves the lane as it is, and lets each thread end as soon as it can. Never waits."""
        self.lane.context.is_abandoned = True
        for thread in self._threads:
            thread.dismiss()


def _hand(worker: WorkerThread, item: Callable[[Exception | None], object]) -> None:
    """Has a worker do something. Where no thread can be started it is told so, here and now.

    It must come to its end all the same: a ticket that is never written holds its lane for ever.
    """
    try:
        worker.submit(partial(item, None))
    except RuntimeError as error:
        item(error)
