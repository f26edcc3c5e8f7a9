"""Leases: one loop uses an executor, from the grant until its last work is done.

Submission: tickets are issued in the order of calls. If all issued work is submitted, new work
is submitted at once, on the caller's thread. Work that may block (a kernel's first use, memory
that must grow, a large copy) goes to the executor's submit thread, and so does later work until
that thread has caught up. So work is always submitted in the order of calls.

End: cells are held by tickets, not by tasks. A lease may end while its work runs, by an exception,
a cancellation or a closed loop; its cells become free when the device is done (`lease_drain.py`).
`end` does not wait. The listener's `lease_closed` is called exactly once.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial
from inspect import CO_COROUTINE
from types import FunctionType
from typing import Any, Final, Protocol

from greensched._asynclib import get_ident
from greensched.device.allocators import DeviceAllocator, PinnedAllocator
from greensched.device.buffers import Buffer, PinnedBuffer
from greensched.device.device import Device
from greensched.device.quota import MemoryQuota
from greensched.device.staging import StagingPool
from greensched.device.staging_ring import StagingRing
from greensched.device.tickets import MASK, TicketedStream
from greensched.errors import (
    CUDAError,
    DeviceFault,
    DeviceLost,
    InvalidRequest,
    PartitionClosed,
    WouldBlock,
    wrong_thread,
)
from greensched.execution.call_context import CallContext, CallWrapper, hooks
from greensched.execution.completion_poller import CompletionPoller
from greensched.execution.eventloop import Waiter
from greensched.execution.executor import Executor
from greensched.execution.jobs import Job
from greensched.execution.lease_drain import LeaseDrain
from greensched.execution.submission import Dependencies, Uses, find_dependencies
from greensched.execution.worker_calls import check_blocking, drop_capture
from greensched.kernels import Abandonment
from greensched.records import Done, Recorder, Submitted
from greensched.scheduling.requests import Grant
from greensched.typing import T

logger = logging.getLogger("greensched")

#: Bound launches after which a ticket is written, so that those in flight can be counted.
BATCH: Final = 64
#: Most bound launches in flight. With the entries of the jobs (2 for each of `executor.DEPTH`), it
#: stays below the 1,000 or so that a driver's queue holds.
MAX_BOUND_LAUNCHES: Final = 4 * BATCH


class LeaseState(enum.Enum):
    """The states of a lease."""

    #: It may submit work.
    OPEN = "open"
    #: It has no SMs until the next grant: it gave way at a checkpoint, or is idle.
    GAVE_WAY = "has no SMs now"
    #: It has ended, but its work is not done.
    DRAINING = "draining"
    #: It has ended, and its work is done.
    CLOSED = "closed"


class LeaseListener(Protocol):
    """The pool's interface for its leases."""

    recorder: Recorder

    def check(self) -> None:
        """Raise if the pool is closed, lost or forked."""

    def lease_draining(self, lease: Lease) -> None:
        """Notify that a lease has ended before its work is done. Called at most once."""

    def lease_closed(self, lease: Lease) -> None:
        """Notify that all work is done, on the polling loop's thread. Called exactly once."""


class DeviceMemory(Protocol):
    """Memory that all partitions of one device share."""

    device: Device
    memory: DeviceAllocator
    pinned: PinnedAllocator
    slots: StagingRing
    staging: StagingPool

    @property
    def neighbours(self) -> Mapping[int, DeviceMemory]:
        """The other devices of the pool, by ordinal."""


class SlowReason(enum.Enum):
    """Why a bound launch cannot take the fast path."""

    CLOSED = enum.auto()
    #: A library uses the stream: each launch checks whether it is capturing.
    STREAM_SHARED = enum.auto()
    #: Other streams have used a buffer since the last launch: the next launch follows them.
    USED_ELSEWHERE = enum.auto()
    #: A bound launch on another stream uses a buffer: each launch looks for earlier uses.
    BUFFERS_SHARED = enum.auto()
    #: A buffer was closed: the next launch checks all of them.
    BUFFER_CLOSED = enum.auto()
    #: The executor has changed: the buffers are not registered on its stream yet.
    MOVED = enum.auto()
    #: The kernel is not loaded on this executor: the submit thread launches it.
    NOT_LOADED = enum.auto()
    #: The lease gave way at a checkpoint: it has no executor until its next grant.
    GAVE_WAY = enum.auto()
    #: The pool has watchers: each launch has a ticket, for its records.
    WATCHED = enum.auto()
    #: Work on the executor hangs, or did: the next launch checks.
    HUNG = enum.auto()


class BoundHandle(Protocol):
    """A bound launch, which the lease closes at its end."""

    def close(self) -> None: ...

    def slow_down(self, reason: SlowReason) -> None: ...

    def move(self) -> None: ...


class Lease:
    """One loop's use of an executor. All methods are for that loop's thread.

    Args:
        grant: The granted cells.
        executor: The executor over these cells.
        poller: The poller of the loop that holds the lease; another takes over if that loop closes.
        device_memory: The memory of the executor's device.
        listener: Notified of the end of the lease.
        quota: The quota that the lease's buffers count against.
        cache_key: The key in the lease cache. None: the lease is not cached.
    """

    #: The code line that took it, if checkpoints may change it; "" if unknown.
    taken_at = ""
    #: While it drains: the name of its last holder, and when draining began.
    holder = ""
    draining_since: float | None = None

    def __init__(
        self,
        grant: Grant,
        executor: Executor,
        poller: CompletionPoller,
        device_memory: DeviceMemory,
        listener: LeaseListener,
        quota: MemoryQuota | None = None,
        cache_key: object = None,
    ) -> None:
        self.grant = grant
        self.cache_key = cache_key
        self.poller = poller
        self.device_memory = device_memory
        self.quota = quota
        self.ordinal = executor.ordinal
        #: The thread of the holding loop, the only thread that may submit.
        self.thread = get_ident()
        #: Jobs whose failure the end of the block raises, because it was not retrieved.
        self.failed: list[Job[Any]] = []
        self.bound_launches: list[BoundHandle] = []
        self.state = LeaseState.OPEN
        self._listener = listener
        self.recorder = listener.recorder
        #: When the last job of each stream was done; kept while there are watchers.
        self._job_ends: dict[TicketedStream, float] = {}
        self._close_waiters: list[Waiter] = []
        #: Ends waits for compilations; made for the first such wait.
        self._abandonment: Abandonment | None = None
        #: Waits for the remaining work once the lease has ended.
        self._drain: LeaseDrain | None = None
        self.move_to(executor)

    def move_to(self, executor: Executor) -> None:
        """Move to an executor on which the lease has no work; the previous one is idle.

        The caller then calls `move_bound_launches`, outside the pool's lock.
        """
        self.executor = executor
        executor.recent_jobs.clear()  # those of earlier leases are done
        self._first_ticket = executor.launch_stream.issued
        #: Whether libraries may have work on the green context that has no ticket, because they
        #: were given its stream or the context itself.
        self.foreign_work = executor.calls.is_exposed = False
        #: Whether there were calls, which may have left such work.
        self.has_called = False
        #: Whether a library was given the launch stream, and may capture on it.
        self.stream_shared = False
        #: Whether the lease may be cached: its end has only launches to wait for.
        self.reusable = True
        #: Whether there were bound launches since the last ticket.
        self.launches_without_ticket = False
        #: Bound launches allowed until `may_launch_bound` must count them again.
        self.launch_budget = BATCH
        self._budget_used = False
        #: The ticket after each batch of bound launches in flight.
        self._batches: deque[int] = deque()
        #: Jobs for which the host has work to do once the device is done.
        self._unfinished: deque[Job[Any]] = deque()
        #: The current call context in its calls; made for the first call.
        self._call_context: CallContext | None = None
        self._update_fast_path()

    def _update_fast_path(self) -> None:
        """Set `fast_path_ok`: a submission then checks only its thread, its loop and its depth."""
        executor = self.executor
        works = executor.hang is None and not executor.launch_stream.health.is_over
        self.fast_path_ok = self.state is LeaseState.OPEN and works and not self.stream_shared

    @property
    def is_open(self) -> bool:
        """Whether work may be submitted."""
        return self.state is LeaseState.OPEN

    @property
    def launch_stream(self) -> TicketedStream:
        """The stream of the lease's launches and copies."""
        return self.executor.launch_stream

    # -- checks ------------------------------------------------------------------------------------

    def check_ready(self) -> None:
        """Raise if no job can be submitted now.

        Raises:
            PartitionClosed, PoolClosed, DeviceLost, ForkedPool: The lease, its loop, its pool or
                its device has ended.
            WrongThread: This is not the thread of its loop.
            WouldBlock: Too many jobs are in flight.
            InvalidRequest: The stream is capturing.
        """
        executor = self.executor
        stream = executor.launch_stream
        if (
            self.fast_path_ok
            and self.thread == get_ident()
            and (stream.issued - stream.word[0]) & MASK < executor.depth
            and (stream in self.poller.pending or not self.poller.loop.is_closed)
        ):
            return
        self.check_thread()
        self.check_loop()
        self.check_pool()
        self.check_room()
        self.check_capture()

    def check_open(self) -> None:
        """Raise PartitionClosed if it has ended, WouldBlock while it has no SMs."""
        if self.state is LeaseState.GAVE_WAY:
            raise WouldBlock(
                "this partition has no SMs now: await its checkpoint, or leave its idle block first"
            )
        if self.state is not LeaseState.OPEN:
            raise PartitionClosed(self.partition_name)

    @property
    def partition_name(self) -> str:
        """Return the name of the partition for error messages."""
        return f"the partition taken at {self.taken_at}" if self.taken_at else "this partition"

    def check_thread(self) -> None:
        """Raise PartitionClosed if it has ended, WrongThread if this is not its loop's thread."""
        self.check_open()
        if self.thread != get_ident():
            raise wrong_thread()

    def check_loop(self) -> None:
        """Raise PartitionClosed if its loop is closed; the pool's next loop then ends it."""
        if self.poller.loop.is_closed:
            state = "closed, because its event loop is: enter a partition in the loop that uses it"
            raise PartitionClosed(self.partition_name, state)

    def check_running_loop(self) -> None:
        """Raise PartitionClosed if its loop is closed, WrongThread if it is not the running one.

        No loop of the parent runs in a forked child, where ForkedPool is raised.
        """
        self.check_loop()
        if not self.poller.loop.is_running:
            self.check_pool()
            raise wrong_thread()

    def check_pool(self) -> None:
        """Raise PoolClosed, DeviceLost, ForkedPool or DeviceHung if the lease is unusable."""
        self._listener.check()
        self.check_hang()

    def check_hang(self) -> None:
        """Raise DeviceHung while its executor's work hangs."""
        if self.executor.hang is not None:
            raise self.executor.hang.of("")

    def check_room(self) -> None:
        """Raise WouldBlock if too many jobs are in flight."""
        if not self.has_room(self.executor.launch_stream):
            raise WouldBlock("too many jobs are in flight: `await p.drain()` first")

    def check_capture(self) -> None:
        """Refuse to submit into a capture, where the ticket would be written at the graph's launch.

        Raises:
            InvalidRequest: A library's capture is open on the stream.
        """
        if self.stream_shared:
            handle = self.executor.launch_stream.stream.handle
            if self.executor.driver.is_capturing(handle):
                raise InvalidRequest("the partition's stream is capturing: end the capture first")

    def has_room(self, stream: TicketedStream) -> bool:
        """Say whether one more job may be in flight on a stream."""
        depth = self.executor.depth
        return (stream.issued - stream.word[0]) & MASK < depth or stream.is_idle

    @property
    def all_submitted(self) -> bool:
        """Whether all issued work is submitted, so that new work can be submitted at once."""
        stream = self.executor.launch_stream
        return stream.submitted == stream.issued

    # -- submitting --------------------------------------------------------------------------------

    def submit(
        self,
        what: str,
        step: Callable[[int], T],
        uses: Uses = (),
        *,
        may_block: bool = False,
        on_copy_stream: bool = False,
    ) -> Job[T]:
        """Submit one piece of work.

        Args:
            what: Describes the job in its `repr`.
            step: Called with the ticket; submits the work to the driver and returns the job's
                value. If the work may block or must wait its turn, the submit thread calls it, with
                the primary context current.
            uses: The buffers that the work uses.
            may_block: Whether `step` may block.
            on_copy_stream: Use the copy stream, by the submit thread. Only buffers order its work
                and the launches.
        """
        executor = self.executor
        stream = executor.launch_stream
        if on_copy_stream:
            assert executor.copy_stream is not None
            stream = executor.copy_stream
        dependencies = self.dependencies(stream, uses)
        must_wait = may_block or on_copy_stream or dependencies.unsubmitted or stream.first_uses
        inline = self.all_submitted and not must_wait
        ticket = stream.issue()
        for buffer, write in uses:
            buffer.record_use(stream, ticket, write=write)

        def ordered_step() -> T:
            dependencies.order_before(stream)
            return step(ticket)

        if inline:
            return self.submit_now(ordered_step, what, ticket)
        job: Job[T] = Job(stream, ticket, what, self)
        self.poller.watch(stream)
        executor.submit_deferred(ordered_step, job, self.poller)
        if self.recorder.notes_jobs:
            self.record(job)
        if not on_copy_stream:
            self.launches_without_ticket = False
        return job

    def submit_now(self, step: Callable[[], T], what: str, ticket: int) -> Job[T]:
        """Submit on this thread. If the driver refuses, the job fails.

        The ticket is the next one, or was issued just now. It is written even after a failure;
        otherwise no later ticket would be reached.

        Raises:
            DeviceLost: The device has failed.
        """
        executor = self.executor
        stream = executor.launch_stream
        stream.issued = ticket
        job: Job[T] = Job(stream, ticket, what, self)
        try:
            try:
                value = step()
                if value is not None:
                    job._set_result(value)
            except DeviceFault:
                raise
            except Exception as error:
                job._set_exception(error)
            finally:  # as `stream.mark`, inlined
                stream.write(ticket & MASK)
                stream.submitted = ticket
                if stream.submit_waiters:
                    stream.wake_submit_waiters()
        except CUDAError as error:
            executor.health.fail(error)
            raise DeviceLost(error) from None
        self.launches_without_ticket = False
        poller = self.poller
        if stream not in poller.pending:
            poller.watch(stream)
        if self.recorder.notes_jobs:
            self.record(job)
        return job

    def call(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job[T]:
        """See `Partition.run`."""
        # Recognise the usual case without a call: a plain function, not a coroutine function.
        if type(fn) is not FunctionType or fn.__dict__ or fn.__code__.co_flags & CO_COROUTINE:
            check_blocking(fn)
        executor, poller = self.executor, self.poller
        stream = executor.call_stream
        if not self.has_room(stream):
            raise WouldBlock("too many calls are in flight: `await p.drain()` first")
        values = (*args, *kwargs.values()) if kwargs else args
        uses = [(a, True) for a in values if isinstance(a, (Buffer, PinnedBuffer))]
        for buffer, _ in uses:
            buffer.check(self.ordinal)
        where = self.call_context
        wrappers: list[CallWrapper] = []
        if hooks:
            wrappers = [wrap for hook in hooks if (wrap := hook(where, values)) is not None]
        call: Callable[[], T] = partial(fn, *args, **kwargs) if values else fn
        for wrap in wrappers:
            call = partial(wrap, call)
        if uses:
            call = partial(_call_in_order, stream, self.dependencies(stream, uses), call)
        name = getattr(fn, "__name__", None)  # an object may have any value there
        ticket = stream.issue()
        for buffer, write in uses:
            buffer.record_use(stream, ticket, write=write)
        job: Job[T] = Job(stream, ticket, name if isinstance(name, str) else "run", self)
        if wrappers:  # the libraries' work may outlast the call
            stream.keep(ticket, values)
        self.has_called = True
        poller.watch(stream)
        executor.calls.submit(call, job, poller, where)
        if self.recorder.notes_jobs:
            self.record(job)
        return job

    def record(self, job: Job[Any]) -> None:
        """Note the job's name, and record its submission and later its end."""
        executor, stream, recorder = self.executor, job._stream, self.recorder
        executor.recent_jobs.append((stream, job._ticket, job.name))
        if not recorder.watched:
            return
        time, number, lease = executor.driver.time, recorder.next_number(), self.grant.number
        kind = "copy" if stream is executor.copy_stream else "call"
        kind = "launch" if stream is executor.launch_stream else kind
        submitted, ends = time(), self._job_ends
        recorder.emit(Submitted(submitted, lease, number, job.name, kind, copy_context()))

        def done() -> None:
            now, error = time(), job._error
            started = max(submitted, ends.get(stream, 0.0))
            if error is None and not stream.reached(job._ticket):
                error = stream.health.error()
            ends[stream] = now
            failure = "" if error is None else type(error).__name__
            recorder.emit(Done(now, lease, number, job.name, kind, min(started, now), failure))

        self.poller.when_reached(stream, job._ticket, done)

    def dependencies(self, stream: TicketedStream, uses: Uses) -> Dependencies:
        """Return what must precede work on a stream. Raises as `find_dependencies`."""
        return find_dependencies(stream, uses, self.executor.copy_stream)

    def finish_later(self, job: Job[Any]) -> None:
        """Have the host's work for a job done after the device's, before the lease closes.

        This holds even if the loop that would have done it has closed.
        """
        self.reusable = False
        unfinished = self._unfinished
        while unfinished and unfinished[0]._finalizer is None:
            unfinished.popleft()
        unfinished.append(job)
        self.poller.when_reached(self.executor.launch_stream, job._ticket, job._finalize)

    @property
    def call_context(self) -> CallContext:
        """The value of `current_call()` in the calls of this lease."""
        context = self._call_context
        if context is None:
            context = self._call_context = self.context_on(self.executor.call_stream)
        return context

    def context_on(self, stream: TicketedStream) -> CallContext:
        """Return a description of the lease and one of its streams, for integrations."""
        executor = self.executor
        simulated = not executor.driver.needs_binary
        return CallContext(stream.stream, self.ordinal, executor.sm_count, simulated)

    def expect_foreign_work(self) -> None:
        """Note that from now on libraries may have work without a ticket on the green context."""
        self.foreign_work = self.executor.calls.is_exposed = True
        self.reusable = False

    def share_stream(self) -> None:
        """Note that from now on libraries use the launch stream, and may capture on it."""
        self.expect_foreign_work()
        self.stream_shared = True
        self._update_fast_path()
        for bound in self.bound_launches:
            bound.slow_down(SlowReason.STREAM_SHARED)

    # -- work that hangs ---------------------------------------------------------------------------

    def hang_changed(self) -> None:
        """Refuse work while its executor hangs, and wake tasks that wait for the lease's end."""
        self._update_fast_path()
        for bound in self.bound_launches:
            bound.slow_down(SlowReason.HUNG)
        if self.executor.hang is not None:
            self._wake_close_waiters()

    async def wait_for(self, stream: TicketedStream, ticket: int) -> None:
        """Wait until a ticket is reached or the device is lost.

        Raises:
            DeviceHung: Work of the executor hangs.
        """
        self.check_hang()
        await self.poller.wait(stream, ticket)
        self.check_hang()

    # -- bound launches, which have no tickets -----------------------------------------------------

    def may_launch_bound(self) -> bool:
        """Say whether one more bound launch may be in flight. Renews the budget if so."""
        if self.launch_budget == 0 and not self._budget_used:
            self.ticket_bound_launches()
            self._batches.append(self.executor.launch_stream.issued)
            self._budget_used = True  # this batch is counted, but the next is not allowed yet
        if self._budget_used and self._batches_in_flight() < MAX_BOUND_LAUNCHES // BATCH:
            self.launch_budget, self._budget_used = BATCH, False
        return self.launch_budget > 0

    async def wait_for_bound_launches(self) -> None:
        """Wait until a bound launch can be submitted, or can never be."""
        stream = self.executor.launch_stream
        while not self.may_launch_bound() and not stream.health.is_over:
            await self.wait_for(stream, self._batches[0])

    def _batches_in_flight(self) -> int:
        batches, stream = self._batches, self.executor.launch_stream
        while batches and stream.reached(batches[0]):
            batches.popleft()
        return len(batches)

    def ticket_bound_launches(self) -> None:
        """Write a ticket after the bound launches without one, if there are any."""
        if not self.launches_without_ticket:
            return
        stream = self.executor.launch_stream
        inline = stream.submitted == stream.issued and not stream.first_uses
        ticket = stream.issue()
        self.launches_without_ticket = False
        self.poller.watch(stream)
        if inline:
            self.executor.write_launch_ticket(ticket)
        else:
            job: Job[None] = Job(stream, ticket, "ticket", self)
            self.executor.submit_deferred(lambda: None, job, self.poller)

    def close_bound_launches(self) -> None:
        """Refuse further bound launches, because the lease or pool ends or the lease is cached."""
        for bound in self.bound_launches:
            bound.close()
        self.bound_launches.clear()
        self._update_fast_path()

    # -- checkpoints -------------------------------------------------------------------------------

    async def wait_idle(self) -> None:
        """Wait until all its work is done, including work submitted meanwhile.

        A cancellation changes nothing. Returns if another task ends or moves the lease.

        Raises:
            DeviceHung: Work of the lease hangs.
        """
        executor, stream = self.executor, self.executor.launch_stream
        while not stream.health.is_over and self._has(executor):
            self.ticket_bound_launches()
            for other in executor.streams:
                last = other.issued
                while not (other.reached(last) or other.health.is_over):
                    await self.wait_for(other, last)
            if not self._has(executor):
                return
            # Not in `move_to`, under the pool's lock, because this calls progress callbacks.
            for job in tuple(self._unfinished):
                job._finalize()
            last = stream.issued
            if self._may_have_foreign_work():
                await self._ticket_whole_context()
                last += 1
            if not self.launches_without_ticket and last == stream.issued and executor.is_idle:
                return

    def has_no_work(self) -> bool:
        """Say whether `wait_idle` has nothing to wait for, the usual case at a checkpoint."""
        executor = self.executor
        launches, copies = executor.launch_stream, executor.copy_stream
        return (
            not (self.launches_without_ticket or self._unfinished or launches.health.is_over)
            and (launches.issued == launches.last_reached or launches.is_idle)
            and (copies is None or copies.is_idle)
            and executor.call_stream.is_idle
            and not self._may_have_foreign_work()
        )

    def _may_have_foreign_work(self) -> bool:
        """Say whether libraries may have work without a ticket on the green context.

        Calls that waited for all their work leave none.
        """
        return self.foreign_work or (self.has_called and not self.executor.calls.left_nothing())

    def _has(self, executor: Executor) -> bool:
        """Say whether the lease is open and still uses this executor."""
        return self.executor is executor and self.state is LeaseState.OPEN

    def _ticket_whole_context(self) -> Job[None]:
        """Submit a job that is done once all work of the green context is, libraries' included."""
        stream = self.executor.launch_stream
        job: Job[None] = Job(stream, stream.issue(), "checkpoint", self)
        self.poller.watch(stream)
        self.executor.submit_deferred(self.executor.order_behind_context, job, self.poller)
        return job

    def move_bound_launches(self, before: Executor) -> None:
        """Move the bound launches from the lease's previous executor."""
        for bound in self.bound_launches:
            bound.move()
        before.launch_stream.release_kept()

    def give_way(self) -> None:
        """Submit nothing until the next grant. The previous executor has no work left."""
        self.state = LeaseState.GAVE_WAY
        self._update_fast_path()
        for bound in self.bound_launches:
            bound.slow_down(SlowReason.GAVE_WAY)

    def check_waiting(self) -> None:
        """Raise PartitionClosed if the lease has ended since it gave way."""
        if self.state is not LeaseState.GAVE_WAY:
            raise PartitionClosed(self.partition_name)

    def go_on(self, grant: Grant, executor: Executor) -> None:
        """Use newly granted SMs. The caller then calls `move_bound_launches`."""
        self.grant, self.state = grant, LeaseState.OPEN
        self.move_to(executor)

    # -- the end of the lease ----------------------------------------------------------------------

    def leave(self) -> bool:
        """Say whether all work is done; if so, close the bound launches.

        The caller then caches the lease or calls `close`.
        """
        stream = self.executor.launch_stream
        issued = stream.issued
        if (
            not (self.fast_path_ok and self.reusable)
            or self.failed
            or stream.launch_errors
            or not (issued == stream.last_reached or issued & MASK == stream.word[0])
            or issued != stream.submitted
            or stream.kept
            or (self.has_called and not self.executor.calls.left_nothing())
        ):
            return False
        self.has_called = False
        if self.bound_launches:
            if self.launches_without_ticket:  # launches after the last ticket may still run
                return False
            self.close_bound_launches()
            stream.release_kept()  # the arguments of bound launches, which are done
        return True

    def reclaimed(self) -> None:
        """Close a cached lease whose cells the scheduler has reclaimed."""
        self.state = LeaseState.CLOSED
        self.fast_path_ok = False

    @property
    def abandonment(self) -> Abandonment:
        """The object that ends waits for the compiler."""
        if self._abandonment is None:
            self._abandonment = Abandonment()
        return self._abandonment

    def abandon_compilations(self) -> None:
        """Fail jobs that wait for the compiler: they are not needed, and would hold cells."""
        if self._abandonment is not None:
            self._abandonment.set()

    def abandon(self) -> None:
        """End the lease and its waits for the compiler. Does not wait."""
        self.abandon_compilations()
        self.end()

    def end(self) -> None:
        """End the lease. Its cells become free when its work is done. Does not wait."""
        if self.state is LeaseState.GAVE_WAY:
            self.close_bound_launches()
            self.close()
        if self.state is not LeaseState.OPEN:
            return
        self.state = LeaseState.DRAINING
        self.close_bound_launches()
        health = self.executor.health
        if self.stream_shared and not health.is_over:  # a capture would take in the last ticket
            try:
                drop_capture(self.executor.driver, self.executor.launch_stream)
            except CUDAError as error:
                health.fail(error)
        if not health.is_over:
            self.ticket_bound_launches()
        if health.is_over:
            self.close()
        else:
            foreign_work = self._may_have_foreign_work()
            self._drain = LeaseDrain(
                self.executor, self.poller, self.close, foreign_work=foreign_work
            )
            self._drain.begin()
        if self.state is LeaseState.DRAINING:
            self._listener.lease_draining(self)

    def close(self) -> None:
        """Close the lease: its work is done, or its device or pool has ended. Idempotent."""
        if self.state is LeaseState.CLOSED:
            return
        self.state = LeaseState.CLOSED
        self.fast_path_ok = False
        stream = self.executor.launch_stream
        if stream.kept:
            stream.release_kept()
        for job in self._unfinished:
            job._finalize()
        self._unfinished.clear()  # the jobs refer to the lease, which would be a cycle
        self._drain = None  # it refers to the lease, too
        try:
            self._listener.lease_closed(self)  # may raise an interrupt caught in a policy
        finally:
            self._wake_close_waiters()

    def _wake_close_waiters(self) -> None:
        waiters, self._close_waiters = self._close_waiters, []
        for waiter in waiters:
            self.poller.loop.wake(waiter)

    async def wait_closed(self) -> None:
        """Wait until all its work is done. A cancellation stops only the waiting.

        Raises:
            DeviceHung: Work of the lease hangs.
            PartitionClosed, WrongThread: The loop that holds it is closed, or not the running one.
        """
        while self.state is not LeaseState.CLOSED:
            self.check_hang()
            self.check_running_loop()
            waiter = self.poller.loop.create_waiter()
            self._close_waiters.append(waiter)
            await waiter

    def take_over(self, poller: CompletionPoller) -> None:
        """Have another loop poll the lease, because its loop has closed. An open lease ends."""
        self.poller = poller
        self._close_waiters.clear()  # tasks of the closed loop, which never resume
        if self.state is LeaseState.OPEN:
            logger.warning("a loop closed while it held %r: the lease ends", self.executor)
            self.abandon()
        elif self.state is LeaseState.GAVE_WAY:
            self.end()
        elif self._drain is not None:
            self._drain.take_over(poller)

    def pool_closed(self) -> None:
        """Stop all waits of an ended lease; an open lease may still end.

        A call of its work may never return.
        """
        if self.state is not LeaseState.OPEN:
            self.close()

    @property
    def unretrieved_error(self) -> BaseException | None:
        """The first failure of a job that was not retrieved, or None."""
        errors = [job._unretrieved_error for job in tuple(self.failed)]
        for ticket, error in tuple(self.executor.launch_stream.launch_errors):
            if ticket > self._first_ticket:  # other tickets belong to earlier leases
                errors.append(error)
        return next((error for error in errors if error is not None), None)


def _call_in_order(stream: TicketedStream, dependencies: Dependencies, call: Callable[[], T]) -> T:
    """Call a function after the work that uses its buffers."""
    dependencies.order_before(stream)
    return call()
