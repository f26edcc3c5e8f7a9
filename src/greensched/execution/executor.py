"""Executors: a green context over a set of cells, with its streams, threads and caches.

An executor is made once, cached, and reused by one lease after another. It has two streams with
tickets: one for launches and copies, one for blocking calls. A third stream, for copies beside
the launches, belongs to the primary context and is made when first needed.

A green context may be current on only one thread at a time. Only the worker thread makes it
current; streams and events in it are created before the executor is used.

Each executor has its own threads, so that one hung kernel delays no other executor. Each thread
starts when it is first needed:

* the *worker thread* runs blocking calls;
* the *submit thread* submits, in order, work that may block: large copies, a kernel's first use,
  memory that must grow, and everything submitted after such work;
* one *event-wait thread* for each stream blocks in the driver until an event is reached.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from greensched._cleanup import run_all
from greensched.context import Context
from greensched.device.device import Device
from greensched.device.resources import max_cluster_size
from greensched.device.staging import ChunkedCopier, StagingPool
from greensched.device.tickets import EventTicketedStream, TicketedStream, TicketMemory
from greensched.errors import CUDAError, DeviceFault, DeviceHung
from greensched.execution.completion_poller import CompletionPoller
from greensched.execution.eventloop import Waiter
from greensched.execution.jobs import Job
from greensched.execution.launch_cache import LaunchCache
from greensched.execution.local_storage import ExecutorLocals
from greensched.execution.threads import WorkerThread
from greensched.execution.worker_calls import WorkerCalls, job_failed

logger = logging.getLogger("greensched")

#: The most jobs in flight on a stream, so that no launch blocks. Launches are reported to block at
#: about 1,000 entries in a driver's queue (not measured here); a job has up to three entries.
DEPTH = 256


class Executor:
    """A set of SMs on the device, whatever lease uses it. Creating one blocks.

    Args:
        device: The device with the SMs.
        context: The green context over the SMs. The executor's `close` closes it. If the executor
            cannot be created, the caller must close the context, with everything made in it.
        mask: The executor's cells, as the scheduler counts them.
        words: Memory for tickets.
        staging: Chunks for large copies.
        current_poller: Returns the pool's poller of the running loop, or raises NoLoop.
    """

    def __init__(
        self,
        device: Device,
        context: Context,
        mask: int,
        words: TicketMemory,
        staging: StagingPool,
        current_poller: Callable[[], CompletionPoller],
    ) -> None:
        self.device = device
        self.driver = device.driver
        self.ordinal = device.ordinal
        self.health = device.health
        self.mask = mask
        self._current_poller = current_poller
        self.is_leased = False
        #: What hangs on this executor now, or None; see `leasing.watchdog`.
        self.hang: DeviceHung | None = None
        #: Stream, ticket and name of its lease's latest jobs, for a watchdog that names jobs.
        self.recent_jobs: deque[tuple[TicketedStream, int, str]] = deque(maxlen=2 * DEPTH)
        self._words = words
        self._staging = staging
        self.context = context
        sms = context.resources.sm
        self.sm_count = sms.sm_count
        #: Most blocks of a thread-block cluster; 1 without clusters.
        self.max_cluster_size = max_cluster_size(device.compute_capability, sms)
        self.launch_stream = words.create_stream(context)
        self.call_stream = words.create_stream(context)
        #: Captures all work of the green context, including work without tickets.
        self.context_event = context.create_event()
        # Attributes, because they must outlive a context that is closed at once.
        self._first_chunk = context.create_event()
        self._second_chunk = context.create_event()
        chunk_events = self._first_chunk, self._second_chunk
        self.chunks = ChunkedCopier(self.launch_stream, chunk_events, staging)
        #: The stream for copies beside the launches, made by `create_copy_stream`.
        self.copy_stream: TicketedStream | None = None
        self.copy_chunks: ChunkedCopier | None = None
        self.cache = LaunchCache(device, self.launch_stream.stream)
        #: Values that users keep with the executor.
        self.locals = ExecutorLocals()
        self.uses_events = isinstance(self.launch_stream, EventTicketedStream)
        #: The most jobs in flight on a stream.
        self.depth = min(DEPTH, EventTicketedStream.DEPTH - 1) if self.uses_events else DEPTH
        primary = device.primary
        self._worker = self._thread("worker")  # calls enter the green context themselves
        self._submit_thread = self._thread("submit", primary)
        self._event_wait_threads = {
            self.launch_stream: self._thread("launch wait", primary),
            self.call_stream: self._thread("call wait", primary),
        }
        self.calls = WorkerCalls(
            context,
            self.context_event,
            self.launch_stream,
            self.call_stream,
            self._worker,
            self._submit_thread,
        )
        self.ownership = self.context.ownership
        self.launch_stream.owner = self.call_stream.owner = self

    def _thread(self, role: str, context: Context | None = None) -> WorkerThread:
        name = f"greensched {self.device.ordinal}:{self.mask:x} {role}"
        return WorkerThread(self.driver, name, context)

    @property
    def streams(self) -> tuple[TicketedStream, ...]:
        """Its streams that have tickets."""
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
        """Return an object to await on the running loop until a ticket is reached or given up.

        Raises:
            NoLoop: No loop is running on this thread.
        """
        return self._current_poller().wait(stream, ticket)

    def notify_when(
        self, stream: TicketedStream, ticket: int, callback: Callable[[], object]
    ) -> None:
        """Call a function on the running loop's thread once a ticket is reached or given up.

        Raises:
            NoLoop: No loop is running on this thread.
        """
        self._current_poller().when_reached(stream, ticket, callback, or_given_up=True)

    def create_copy_stream(self) -> None:
        """Make the stream for copies beside the launches, if it is missing. Blocks.

        Runs on the submit thread, or on the builder thread before the executor is used. The stream
        belongs to the primary context, because a copy engine moves the bytes, and no SM.
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
        self.copy_stream = stream  # last, because other threads use it from here on

    def wait_for_event(self, stream: TicketedStream, then: Callable[[bool], object]) -> bool:
        """Have a thread block until the work that the stream's event captured is done.

        The thread calls `then` with whether it is done. Return False if no thread can be started.
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
        """Run a function on the submit thread, after all earlier deferred work."""
        self._submit_thread.post(lambda _: step())

    def submit_deferred(
        self,
        step: Callable[[], Any],
        job: Job[Any],
        poller: CompletionPoller,
    ) -> None:
        """Have the submit thread submit work, in the order of the calls, and then its ticket.

        `step` returns the job's result, or raises its failure. `poller` is the lease's.
        """
        poller.thread_work_started()

        def submit(refused: Exception | None) -> None:
            try:
                if refused is not None:
                    raise refused
                self.health.check()
                job._set_result(step())
            except BaseException as error:
                job_failed(job, error, self.health)
            try:
                if not self.health.is_over:
                    job._stream.mark(job._ticket)
            except CUDAError as error:
                self.health.fail(error)
            poller.thread_work_done_threadsafe()

        self._submit_thread.post(submit)

    # -- the green context as a whole --------------------------------------------------------------

    def order_behind_context(self) -> None:
        """Order the launch stream after the green context, or block until the context is idle."""
        try:
            self.order_behind_green_context()
        except CUDAError as error:
            if self.launch_stream.health.is_over:
                raise
            # A library's capture is open on a stream, but other work can be waited for.
            logger.warning(
                "an event cannot capture the green context's work (%s): waiting for it instead",
                error,
            )
            self.driver.synchronize_context(self.context.handle)

    def order_behind_green_context(self) -> None:
        """Order the launch stream after all work of the green context.

        Raises:
            CUDAError: A library captures on its own stream.
        """
        green = self.context.green
        assert green is not None
        self.driver.record_green(green, self.context_event.handle)
        self.driver.wait_event(self.launch_stream.stream.handle, self.context_event.handle)

    def write_launch_ticket(self, ticket: int) -> None:
        """Write a ticket. If that fails, report the device lost: the ticket would never come."""
        try:
            self.launch_stream.mark(ticket)
        except CUDAError as error:
            self.health.fail(error)

    # -- its end -----------------------------------------------------------------------------------

    @property
    def _threads(self) -> tuple[WorkerThread, ...]:
        return self._worker, self._submit_thread, *self._event_wait_threads.values()

    def wake_submit_waiters(self) -> None:
        """Wake the threads that wait for a ticket, because the device is no longer used."""
        for stream in self.streams:
            stream.wake_submit_waiters()

    def close_released(self) -> None:
        """Have released values closed, if the worker runs. From any thread. Does not wait."""
        if not self.launch_stream.health.is_over:
            self._worker.submit_if_running(self.locals.close_released)

    def close(self) -> None:
        """End the threads, then destroy everything on the device, which is idle. Blocks.

        Raises:
            CUDAError: The driver's first error. All further steps were tried.
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
        """Close values where they were made: on the worker, in the green context."""
        with self.context.entered(wait=True):
            self.locals.close()

    def abandon(self) -> None:
        """Leave everything as it is, and let each thread end as soon as it can. Never waits."""
        self.context.is_abandoned = True
        for thread in self._threads:
            thread.dismiss()

    def __repr__(self) -> str:
        hung = "" if self.hang is None else ", hung"
        where = f"{self.sm_count} SMs of device {self.device.ordinal}, cells {self.mask:b}"
        return f"<Executor: {where}{hung}>"
