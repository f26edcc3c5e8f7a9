"""Executors: a green context over a set of cells, with its streams, threads and caches.

An executor is made once, cached, and reused by one lease after another. It has two streams with
tickets: one for launches and copies, one for blocking calls. A third, for copies beside the
launches, belongs to the primary context and is made when first needed.

A green context may be current on one thread at a time. Only the worker thread makes this one
current; what is created in it (streams, events) is created before the executor is used.

Each executor has its own threads, so that one hung kernel delays no other executor. Each thread
starts when it is first needed:

* the *worker thread* runs blocking calls;
* the *submit thread* submits in order what may block: large copies, a kernel's first use, memory
  that must grow, and everything submitted behind these;
* one *event-wait thread* for each stream blocks in the driver until an event is reached.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Context as ContextVars
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Protocol

from greensched._cleanup import run_all
from greensched.context import Context
from greensched.device.device import Device
from greensched.device.resources import max_cluster_size
from greensched.device.staging import ChunkedCopier, StagingPool
from greensched.device.tickets import EventTicketedStream, TicketedStream, TicketMemory
from greensched.errors import CUDAError, DeviceFault
from greensched.execution.call_context import CallContext, running_call
from greensched.execution.completion import CAPTURE_STATUSES, CompletionPoller
from greensched.execution.eventloop import Waiter
from greensched.execution.jobs import Job
from greensched.execution.launch_cache import LaunchCache
from greensched.execution.local_storage import ExecutorLocals
from greensched.execution.threads import Item, WorkerThread
from greensched.typing import CaptureMode, T

logger = logging.getLogger("greensched")

#: Jobs in flight on a stream at most, so that no launch blocks: a driver's launch queue holds about
#: 1,000 entries (docs/internals/completion.md), and a job is up to three.
DEPTH = 256


class ExecutorHost(Protocol):
    """What an executor needs of the pool that owns it."""

    def current_poller(self) -> CompletionPoller: ...


class Executor:
    """A set of SMs as it exists on the device, whichever lease uses it. Creating one blocks.

    Args:
        device: has the SMs.
        context: the green context over the SMs. The executor's `close` closes it; where the
            executor cannot be made, the caller does, and with it what was made in it.
        mask: its cells, as scheduling counts them.
        words: memory for its tickets.
        staging: lends chunks to its large copies.
        host: the pool.
    """

    def __init__(
        self,
        device: Device,
        context: Context,
        mask: int,
        words: TicketMemory,
        staging: StagingPool,
        host: ExecutorHost,
    ) -> None:
        self.device = device
        self.driver = device.driver
        self.ordinal = device.ordinal
        self.health = device.health
        self.mask = mask
        self.host = host
        self.is_leased = False
        self._words = words
        self._staging = staging
        self.context = context
        sms = context.resources.sm
        self.sm_count = sms.sm_count
        #: Blocks of the largest thread-block cluster; 1: no clusters.
        self.max_cluster_size = max_cluster_size(device.compute_capability, sms)
        self.launch_stream = words.create_stream(context)
        self.call_stream = words.create_stream(context)
        #: Captures all work of the green context, beyond what has tickets.
        self.context_event = context.create_event()
        # Kept here: they outlive their context where that is closed at once.
        self._first_chunk = context.create_event()
        self._second_chunk = context.create_event()
        chunk_events = self._first_chunk, self._second_chunk
        self.chunks = ChunkedCopier(self.launch_stream, chunk_events, staging)
        #: Libraries have a stream or the context itself: they may capture at any time.
        self.is_exposed = False
        #: When the last call returned, the context's event captured all work of the context; and
        #: all of it was done already.
        self._is_recorded = self._left_nothing = False
        #: For copies beside the launches; made by `create_copy_stream`.
        self.copy_stream: TicketedStream | None = None
        self.copy_chunks: ChunkedCopier | None = None
        self.cache = LaunchCache(device, self.launch_stream.stream)
        #: Values that users keep with the executor.
        self.locals = ExecutorLocals()
        self.uses_events = isinstance(self.launch_stream, EventTicketedStream)
        #: Jobs in flight on a stream at most.
        self.depth = min(DEPTH, EventTicketedStream.DEPTH - 1) if self.uses_events else DEPTH
        primary = device.primary
        self._worker = self._thread("worker")  # calls enter the green context themselves
        self._submit_thread = self._thread("submit", primary)
        self._event_wait_threads = {
            self.launch_stream: self._thread("launch wait", primary),
            self.call_stream: self._thread("call wait", primary),
        }
        #: Calls for the worker; one wake-up covers many.
        self._calls: deque[_QueuedCall] = deque()
        self._worker_called = False
        self._run_queued = partial(self._run_calls, None)
        #: Calls that the submit thread has yet to forward: later calls must not overtake them.
        self._calls_to_forward: deque[None] = deque()
        self._scope = self.context.entered(wait=True)
        self.ownership = self.context.ownership
        self.launch_stream.owner = self.call_stream.owner = self

    def _thread(self, role: str, context: Context | None = None) -> WorkerThread:
        name = f"greensched {self.device.ordinal}:{self.mask:x} {role}"
        return WorkerThread(self.driver, name, context)

    @property
    def streams(self) -> tuple[TicketedStream, ...]:
        """Its streams with tickets."""
        streams = self.launch_stream, self.call_stream
        return streams if self.copy_stream is None else (*streams, self.copy_stream)

    @property
    def is_idle(self) -> bool:
        """Whether every issued ticket is reached."""
        return all(stream.is_idle for stream in self.streams)

    # -- for its streams ---------------------------------------------------------------------------

    @property
    def is_entered(self) -> bool:
        """Whether the calling thread is inside a block of the green context."""
        return self.ownership is not None and self.ownership.is_mine

    def wait(self, stream: TicketedStream, ticket: int) -> Waiter:
        """Make something to await on the running loop until a ticket is reached, or is lost.

        Raises:
            NoLoop: no loop is running on this thread.
        """
        return self.host.current_poller().wait(stream, ticket)

    def notify_when(
        self, stream: TicketedStream, ticket: int, callback: Callable[[], object]
    ) -> None:
        """Call a function on the running loop's thread once a ticket is reached, or is lost.

        Raises:
            NoLoop: no loop is running on this thread.
        """
        self.host.current_poller().when_reached(stream, ticket, callback)

    def create_copy_stream(self) -> None:
        """Make the stream for copies beside the launches, if there is none. Blocks.

        On the submit thread, or on the builder thread before the executor is used. The stream
        belongs to the primary context: a copy engine moves the bytes, and no SM.
        """
        if self.copy_stream is not None:
            return
        primary = self.device.primary
        with ExitStack() as undo:
            stream = self._words.create_stream(primary)
            undo.callback(stream.close)
            first = primary.create_event()
            undo.callback(first.close)
            second = primary.create_event()
            undo.pop_all()
        self.copy_chunks = ChunkedCopier(stream, (first, second), self._staging)
        self._event_wait_threads[stream] = self._thread("copy wait", primary)
        stream.owner = self
        self.copy_stream = stream  # last: other threads use it from here on

    def wait_for_event(self, stream: TicketedStream, then: Callable[[bool], object]) -> bool:
        """Have a thread block until what the stream's event captured is done.

        `then` is called on that thread with whether it is done. Return False if no thread starts.
        """

        def wait() -> None:
            is_done = False
            try:
                self.driver.synchronize_event(stream.event.handle)
                is_done = True
            except DeviceFault as fault:
                self.health.fail(fault)
            except CUDAError as error:  # the safety poll sees the ticket
                logger.debug("a thread could not wait for an event: %s", error)
            then(is_done)

        try:
            self._event_wait_threads[stream].submit(wait)
        except RuntimeError as error:
            logger.debug("no event-wait thread can be started: %s", error)
            return False
        return True

    # -- deferred submissions ----------------------------------------------------------------------

    def submit_in_order(self, step: Callable[[], object]) -> None:
        """Run a function on the submit thread, behind all that was deferred before."""
        self._submit_thread.post(lambda _: step())

    def submit_deferred(
        self,
        step: Callable[[], Any],
        job: Job[Any],
        poller: CompletionPoller,
    ) -> None:
        """Have the submit thread submit work, in the order of the calls, and then its ticket.

        `step` returns the job's result, or raises the job's failure. `poller` is the lease's.
        """
        poller.thread_work_started()

        def submit(refused: Exception | None) -> None:
            try:
                if refused is not None:
                    raise refused
                job._set_result(step())
            except BaseException as error:
                self._job_failed(job, error)
            try:
                job._stream.mark(job._ticket)
            except CUDAError as error:
                self.health.fail(error)
            poller.thread_work_done_threadsafe()

        self._submit_thread.post(submit)

    # -- blocking calls ----------------------------------------------------------------------------

    def call(
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
        launches = self.launch_stream
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

    def after_calls(self, item: Item) -> None:
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
            launches = self.launch_stream
            if launches.issued > launches.last_reached and not launches.is_idle:
                self.call_stream.order_behind(launches)
            call.run()
        except BaseException as error:
            self._job_failed(call.job, error)

    def _job_failed(self, job: Job[Any], error: BaseException) -> None:
        """Set the failure of a job; a device fault is the loss of the device, too."""
        job._set_exception(error)
        if isinstance(error, DeviceFault):
            self.health.fail(error)

    def _finish_call(self, call: _QueuedCall) -> None:
        """Write the ticket of a call that returned, behind the work that it left on the stream."""
        stream, ticket = self.call_stream, call.job._ticket
        try:
            if self._leaves_nothing(call) or self._has_no_work(stream):
                stream.mark_here(ticket)
            else:
                stream.mark(ticket)
        except CUDAError as error:
            self.health.fail(error)
        call.poller.thread_work_done_threadsafe()

    def _leaves_nothing(self, call: _QueuedCall) -> bool:
        """Return whether no call has left work on any stream, not even on one of a library's own.

        The context's event captures what they have left. As a rule that is nothing: the function
        has waited for its work.
        """
        self._is_recorded = self._left_nothing = False  # what was so behind an earlier call
        green = self.context.green
        if call.where is None or self.is_exposed or green is None:  # a capture may be open there
            return False
        if self.call_stream.first_uses:  # recording a context would wait for them
            return False
        try:
            self.driver.record_green(green, self.context_event.handle)
            self._left_nothing = self.driver.query_event(self.context_event.handle)
            self._is_recorded = True
        except CUDAError as error:  # a library captures: a thread waits for the whole context
            logger.debug("the green context's work cannot be recorded: %s", error)
        return self._left_nothing

    def calls_left_nothing(self) -> bool:
        """Whether all calls have returned, and all work of the green context was done since."""
        stream = self.call_stream
        # In this order: the worker says what the last call left, and then writes its ticket.
        if not (stream.is_idle and self._is_recorded):
            return False
        if stream.kept:
            stream.release_kept()
            if stream.kept:
                return False
        if self._left_nothing:
            return True
        driver = self.driver
        try:
            before = driver.exchange_capture_mode(CaptureMode.RELAXED)
            try:
                return driver.query_event(self.context_event.handle)
            finally:
                driver.exchange_capture_mode(before)
        except CUDAError:  # what has failed is found where the work is waited for
            return False

    def _has_no_work(self, stream: TicketedStream) -> bool:
        """Query a stream; a capture that was left open on it is dropped first."""
        try:
            return self.driver.query_stream(stream.stream.handle)
        except CUDAError as error:
            if error.status not in CAPTURE_STATUSES:
                raise
            self.drop_capture(stream)
            return self.driver.query_stream(stream.stream.handle)

    def drop_capture(self, stream: TicketedStream) -> None:
        """End a capture that was left open on a stream: it would take in the ticket.

        Raises:
            CUDAError: the stream cannot be queried.
        """
        handle = stream.stream.handle
        if not self.driver.is_capturing(handle):
            return
        logger.warning("a capture was left open on a partition's stream; it is dropped")
        try:
            self.driver.destroy_graph(self.driver.end_capture(handle))
        except CUDAError as error:
            logger.warning("the capture was invalid already: %s", error)

    # -- its end -----------------------------------------------------------------------------------

    @property
    def _threads(self) -> tuple[WorkerThread, ...]:
        return self._worker, self._submit_thread, *self._event_wait_threads.values()

    def wake_submit_waiters(self) -> None:
        """Wake the threads that wait for a ticket: the use of the device is over."""
        for stream in self.streams:
            stream.wake_submit_waiters()

    def close_released(self) -> None:
        """Have released values closed, if the worker runs. From any thread; does not wait."""
        if not self.launch_stream.health.is_over:
            self._worker.submit_if_running(self.locals.close_released)

    def close(self) -> None:
        """End the threads, then everything on the device; its work is done. Blocks.

        Raises:
            CUDAError: the first error of the driver; every step was tried all the same.
        """
        if self.locals:
            self._worker.post(lambda _: self._close_locals())
        run_all(
            (
                *(thread.stop for thread in self._threads),
                self.chunks.close,
                *(() if self.copy_chunks is None else (self.copy_chunks.close,)),
                self.context_event.close,
                *(stream.close for stream in self.streams),
                self.context.close,
            )
        )

    def _close_locals(self) -> None:
        """Close them where they were made: on the worker, with the green context current."""
        with self._scope:
            self.locals.close()

    def abandon(self) -> None:
        """Leave it as it is, and let each thread end as soon as it can. Never waits."""
        self.context.is_abandoned = True
        for thread in self._threads:
            thread.dismiss()

    def __repr__(self) -> str:
        return (
            f"<Executor: {self.sm_count} SMs of device {self.device.ordinal}, cells {self.mask:b}>"
        )


class _QueuedCall:
    """A function for the worker, the context variables it sees, and the poller to tell."""

    __slots__ = ("context", "function", "job", "poller", "where")

    def __init__(
        self,
        function: Callable[[], Any],
        job: Job[Any],
        poller: CompletionPoller,
        where: CallContext | None,
        context: ContextVars | None,
    ) -> None:
        self.function = function
        self.job = job
        self.poller = poller
        self.where = where
        self.context = context

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
