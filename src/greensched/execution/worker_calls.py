"""The worker of an executor: runs blocking calls one after another, in its green context.

Each call begins behind what was submitted before it, and its ticket is written once it has returned
and its work on the call stream is done.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from contextvars import Context as ContextVars
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from greensched.context import Context
from greensched.device.health import DeviceHealth
from greensched.device.streams import Event
from greensched.device.tickets import TicketedStream
from greensched.driver.interface import Driver
from greensched.errors import CUDAError, DeviceFault
from greensched.execution.call_context import CallContext, running_call
from greensched.execution.completion_poller import CAPTURE_STATUSES, CompletionPoller
from greensched.execution.jobs import Job
from greensched.execution.threads import Item, WorkerThread
from greensched.typing import CaptureMode, T

logger = logging.getLogger("greensched")


class WorkerCalls:
    """The calls of one executor, and the worker thread that runs them.

    Args:
        context: the green context.
        context_event: captures all its work, beyond what has tickets.
        launch_stream: calls begin behind its work.
        call_stream: of the calls.
        worker: runs the calls.
        submit_thread: has the submissions that calls must not overtake.
    """

    def __init__(
        self,
        context: Context,
        context_event: Event,
        launch_stream: TicketedStream,
        call_stream: TicketedStream,
        worker: WorkerThread,
        submit_thread: WorkerThread,
    ) -> None:
        self._driver = context.driver
        self._health = launch_stream.health
        self._context = context
        self._context_event = context_event
        self._launch_stream = launch_stream
        self._call_stream = call_stream
        self._worker = worker
        self._submit_thread = submit_thread
        #: Libraries have a stream or the context itself: they may capture at any time.
        self.is_exposed = False
        #: When the last call returned, the context's event captured all work of the context; and
        #: all of it was done already.
        self._is_recorded = self._left_nothing = False
        #: Calls for the worker; one wake-up covers many.
        self._calls: deque[_QueuedCall] = deque()
        self._worker_called = False
        self._run_queued = partial(self._run_calls, None)
        #: Calls that the submit thread has yet to forward: later calls must not overtake them.
        self._calls_to_forward: deque[None] = deque()
        self._scope = context.entered(wait=True)

    def submit(
        self,
        function: Callable[[], Any],
        job: Job[Any],
        poller: CompletionPoller,
        where: CallContext | None = None,
    ) -> None:
        """Have the worker call a function, with the green context current.

        The call begins behind what was submitted before: on the device by an event, and behind the
        submit thread where that has yet to submit something.

        Args:
            function: called once.
            job: done when the function has returned and its work on the call stream is done.
            poller: the lease's.
            where: what `current_call()` returns in a function of the user's. That sees a copy of
                the caller's context variables, as by `asyncio.to_thread`. None: the function is
                the library's own.
        """
        launches = self._launch_stream
        call = _QueuedCall(function, job, poller, where, None if where is None else copy_context())
        poller.thread_work_started()
        if launches.submitted == launches.issued and not self._calls_to_forward:
            self._enqueue(call)
            return

        def forward(_: Exception | None) -> None:
            self._enqueue(call)
            self._calls_to_forward.popleft()

        self._calls_to_forward.append(None)
        self._submit_thread.post(forward)

    def _enqueue(self, call: _QueuedCall) -> None:
        self._calls.append(call)
        self._wake_worker()

    def _wake_worker(self) -> None:
        if not self._worker_called:
            self._worker_called = True
            mailbox = self._worker.mailbox
            if mailbox is not None:
                mailbox.put(self._run_queued)
            else:
                self._worker.post(self._run_calls)

    def submit_behind(self, item: Item) -> None:
        """Run an item on the submit thread, after all calls and all that was deferred before."""

        def after_deferred(_: Exception | None) -> None:
            self._worker.post(then_after_calls)

        def then_after_calls(_: Exception | None) -> None:
            self._submit_thread.post(lambda _: item())

        self._submit_thread.post(after_deferred)

    def _run_calls(self, refused: Exception | None) -> None:
        """Run all queued calls in one block of the green context.

        Each call finds that context current, whatever the call before it did. The block is left
        before the last call is reported as done: a green context is current on one thread only.
        """
        self._worker_called = False  # first: a call that is queued from here on wakes the worker
        calls = self._calls
        ended: _QueuedCall | None = None
        try:
            if refused is not None:
                raise refused
            if calls:
                with self._scope:
                    while calls:
                        before, ended = ended, calls.popleft()
                        if before is not None:
                            self._finish_call(before)
                            self._scope.renew()
                        self._run_call(ended)
        except Exception as error:  # the thread cannot be started, the context entered or left
            ended = ended or calls.popleft()
            ended.job._set_exception(error)
        if ended is not None:
            self._finish_call(ended)
        if calls:  # behind a call that failed so: each tries again
            self._wake_worker()

    def _run_call(self, call: _QueuedCall) -> None:
        try:
            launches = self._launch_stream
            if launches.issued > launches.last_reached and not launches.is_idle:
                self._call_stream.order_behind(launches)
            call.run()
        except BaseException as error:
            job_failed(call.job, error, self._health)

    def _finish_call(self, call: _QueuedCall) -> None:
        """Write the ticket of a call that returned, behind the work that it left on the stream."""
        stream, ticket = self._call_stream, call.job._ticket
        try:
            self._record_context(call)
            # Asked of the stream, too: on an H100 the context's event leaves out what a stream with
            # no work behind it waits for.
            if self._has_no_work(stream):
                stream.mark_here(ticket)
            else:
                stream.mark(ticket)
        except CUDAError as error:
            self._health.fail(error)
        call.poller.thread_work_done_threadsafe()

    def _record_context(self, call: _QueuedCall) -> None:
        """Record what calls have left on any stream, also on one of a library's own.

        As a rule that is nothing: the function has waited for its work.
        """
        self._is_recorded = self._left_nothing = False  # what was so behind an earlier call
        green = self._context.green
        if call.where is None or self.is_exposed or green is None:  # a capture may be open there
            return
        if self._call_stream.first_uses:  # recording a context would wait for them
            return
        try:
            self._driver.record_green(green, self._context_event.handle)
            self._left_nothing = self._driver.query_event(self._context_event.handle)
            self._is_recorded = True
        except CUDAError as error:  # a library captures: a thread waits for the whole context
            logger.debug("the green context's work cannot be recorded: %s", error)

    def left_nothing(self) -> bool:
        """Whether all calls have returned, and all work of the green context was done since."""
        stream = self._call_stream
        # In this order: the worker says what the last call left, and then writes its ticket.
        if not (stream.is_idle and self._is_recorded):
            return False
        if stream.kept:
            stream.release_kept()
            if stream.kept:
                return False
        if self._left_nothing:
            return True
        driver = self._driver
        try:
            before = driver.exchange_capture_mode(CaptureMode.RELAXED)
            try:
                return driver.query_event(self._context_event.handle)
            finally:
                driver.exchange_capture_mode(before)
        except CUDAError:  # what has failed is found where the work is waited for
            return False

    def _has_no_work(self, stream: TicketedStream) -> bool:
        """Query a stream; a capture that was left open on it is dropped first."""
        try:
            return self._driver.query_stream(stream.stream.handle)
        except CUDAError as error:
            if error.status not in CAPTURE_STATUSES:
                raise
            drop_capture(self._driver, stream)
            return self._driver.query_stream(stream.stream.handle)


def job_failed(job: Job[Any], error: BaseException, health: DeviceHealth) -> None:
    """Set the failure of a job; a device fault is the loss of the device, too."""
    job._set_exception(error)
    if isinstance(error, DeviceFault):
        health.fail(error)


def drop_capture(driver: Driver, stream: TicketedStream) -> None:
    """End a capture that was left open on a stream: it would take in the ticket.

    Raises:
        CUDAError: the stream cannot be queried.
    """
    handle = stream.stream.handle
    if not driver.is_capturing(handle):
        return
    logger.warning("a capture was left open on a partition's stream; it is dropped")
    try:
        driver.destroy_graph(driver.end_capture(handle))
    except CUDAError as error:
        logger.warning("the capture was invalid already: %s", error)


@dataclass(slots=True, eq=False)
class _QueuedCall:
    """A function for the worker, the context variables it sees, and the poller to tell."""

    function: Callable[[], Any]
    job: Job[Any]
    poller: CompletionPoller
    where: CallContext | None
    context: ContextVars | None

    def run(self) -> None:
        """Call the function."""
        if self.context is None:
            value = self.function()
        else:
            value = self.context.run(_call_in, self.where, self.function)
        if value is not None:
            self.job._set_result(value)


def _call_in(where: CallContext | None, function: Callable[[], T]) -> T:
    """Call a function in a copy of its caller's context variables, with `current_call()` set."""
    running_call.set(where)
    variable = _sniffio_variable or _find_sniffio()
    if variable is not None and variable.get() is not None:
        variable.set(None)
    return function()


#: Where sniffio is installed, anyio trusts this variable and would refuse to run a loop in a call.
_sniffio_variable: ContextVar[Any] | None = None


def _find_sniffio() -> ContextVar[Any] | None:
    """Find sniffio's variable; None while it is not imported, or only half."""
    global _sniffio_variable
    _sniffio_variable = getattr(sys.modules.get("sniffio"), "current_async_library_cvar", None)
    return _sniffio_variable
