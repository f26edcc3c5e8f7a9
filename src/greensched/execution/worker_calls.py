"""The worker of an executor, which runs blocking calls one after another in its green context.

Each call begins after all work submitted before it. Its ticket is written once it has returned and
its work on the call stream is done.
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

from greensched._asynclib import is_coroutine_function
from greensched.context import Context
from greensched.device.health import DeviceHealth
from greensched.device.streams import Event
from greensched.device.tickets import TicketedStream
from greensched.driver.interface import Driver
from greensched.errors import CUDAError, DeviceFault, InvalidRequest
from greensched.execution.call_context import CallContext, running_call
from greensched.execution.completion_poller import PASSING_STATUSES, CompletionPoller
from greensched.execution.jobs import Job
from greensched.execution.threads import Item, WorkerThread
from greensched.typing import CaptureMode, T

logger = logging.getLogger("greensched")


class WorkerCalls:
    """The calls of one executor, and the worker thread that runs them.

    Args:
        context: The green context.
        context_event: Captures all work of the context, including work without tickets.
        launch_stream: The stream whose work calls follow.
        call_stream: The stream of the calls.
        worker: The thread that runs the calls.
        submit_thread: The thread with submissions that calls must not overtake.
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
        #: Whether libraries have a stream or the context itself, so that they may capture any time.
        self.is_exposed = False
        #: Whether the context's event captured all work of the context after the last call, and
        #: whether all of that work was done already.
        self._is_recorded = self._left_nothing = False
        #: Calls for the worker. One wake-up covers many calls.
        self._calls: deque[_QueuedCall] = deque()
        self._worker_called = False
        self._run_queued = partial(self._run_calls, None)
        #: Calls that the submit thread has yet to forward, which later calls must not overtake.
        self._calls_to_forward: deque[None] = deque()
        self._scope = context.entered(wait=True)

    def submit(
        self,
        function: Callable[[], Any],
        job: Job[Any],
        poller: CompletionPoller,
        where: CallContext | None = None,
    ) -> None:
        """Have the worker call a function with the green context current.

        The call follows all work submitted before: on the device by an event, on the host after the
        submit thread, if that has yet to submit something.

        Args:
            function: Called once.
            job: Done when the function has returned and its work on the call stream is done.
            poller: The poller of the lease.
            where: The value of `current_call()` in a user's function, which sees a copy of its
                caller's context variables, as with `asyncio.to_thread`. None: the function is the
                library's own.
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
        """Run an item on the submit thread, after all calls and everything deferred before."""

        def after_deferred(_: Exception | None) -> None:
            self._worker.post(then_after_calls)

        def then_after_calls(_: Exception | None) -> None:
            self._submit_thread.post(lambda _: item())

        self._submit_thread.post(after_deferred)

    def _run_calls(self, refused: Exception | None) -> None:
        """Run all queued calls in one block of the green context.

        Each call finds the context current, whatever the previous call did. The block is left
        before the last call is reported as done, because a green context is current on one thread
        only.
        """
        self._worker_called = False  # first, so that a call queued from here on wakes the worker
        calls = self._calls
        ended: _QueuedCall | None = None
        try:
            if refused is not None:
                raise refused
            if calls:
                if self._health.is_over:  # as `check`, without a call
                    raise self._health.error()
                with self._scope:
                    while calls:
                        before, ended = ended, calls.popleft()
                        if before is not None:
                            self._finish_call(before)
                            self._scope.renew()
                        self._run_call(ended)
        except Exception as error:  # the thread cannot start, or enter or leave the context
            ended = ended or calls.popleft()
            ended.job._set_exception(error)
        if ended is not None:
            self._finish_call(ended)
        if calls:  # after a call that failed like this, each call tries again
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
        """Write the ticket of a returned call after the work that it left on the stream."""
        stream, ticket = self._call_stream, call.job._ticket
        try:
            if not self._health.is_over:
                self._record_context(call)
                # The stream is queried, too, because on an H100 the context's event does not cover
                # a stream's wait for an event if no work follows that wait.
                if self._has_no_work(stream):
                    stream.mark_here(ticket)
                else:
                    stream.mark(ticket)
        except CUDAError as error:
            self._health.fail(error)
        call.poller.thread_work_done_threadsafe()

    def _record_context(self, call: _QueuedCall) -> None:
        """Record the work that calls have left on any stream, including libraries' own streams.

        Usually there is none, because the function has waited for its work.
        """
        self._is_recorded = self._left_nothing = False  # forget the state of the earlier call
        green = self._context.green
        if call.where is None or self.is_exposed or green is None:  # a capture may be open
            return
        if self._call_stream.first_uses:  # recording a context would wait for first uses
            return
        try:
            self._driver.record_green(green, self._context_event.handle)
            self._left_nothing = self._driver.query_event(self._context_event.handle)
            self._is_recorded = True
        except CUDAError as error:  # a library captures; a thread waits for the whole context
            logger.debug("the green context's work cannot be recorded: %s", error)

    def left_nothing(self) -> bool:
        """Say whether all calls have returned, and all work of the green context was then done."""
        stream = self._call_stream
        # In this order, because the worker sets the result of the last call before its ticket.
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
        except CUDAError:  # a failure is found later, by the wait for the work
            return False

    def _has_no_work(self, stream: TicketedStream) -> bool:
        """Query a stream, again after dropping a capture that was left open on it."""
        try:
            return self._driver.query_stream(stream.stream.handle)
        except CUDAError as error:
            if error.status not in PASSING_STATUSES:
                raise
            drop_capture(self._driver, stream)
            return self._driver.query_stream(stream.stream.handle)


def job_failed(job: Job[Any], error: BaseException, health: DeviceHealth) -> None:
    """Set a job's failure. A device fault also makes the device lost."""
    job._set_exception(error)
    if isinstance(error, DeviceFault):
        health.fail(error)


def drop_capture(driver: Driver, stream: TicketedStream) -> None:
    """End a capture that was left open on a stream, because it would record the ticket.

    Raises:
        CUDAError: The stream cannot be queried.
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
    """A function for the worker, its context variables, and the poller to notify."""

    function: Callable[[], Any]
    job: Job[Any]
    poller: CompletionPoller
    where: CallContext | None
    context: ContextVars | None

    def run(self) -> None:
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


#: If sniffio is installed, anyio trusts this variable and would refuse to run a loop in a call.
_sniffio_variable: ContextVar[Any] | None = None


def _find_sniffio() -> ContextVar[Any] | None:
    """Return sniffio's variable; None unless sniffio is completely imported."""
    global _sniffio_variable
    _sniffio_variable = getattr(sys.modules.get("sniffio"), "current_async_library_cvar", None)
    return _sniffio_variable


def check_blocking(fn: object) -> None:
    """Refuse objects that the worker thread cannot call.

    Raises:
        InvalidRequest: It is not callable, or is a coroutine function.
    """
    if not callable(fn):
        raise InvalidRequest(f"give a blocking function, not {type(fn).__name__}: {fn!r}")
    if is_coroutine_function(fn):
        raise InvalidRequest(
            f"{fn!r} is a coroutine function: await it here; p.run calls blocking functions"
        )
