"""Graphs: work captured once for each set of SMs, and launched again as one piece.

Captured work stays on the SMs of the stream that it was captured on, wherever it is launched. So
each executor that launches a graph captures it, on its worker thread and its call stream, and keeps
it. It is launched on the launch stream, with a ticket behind it. No ticket is ever inside: a launch
would turn the ticket's word back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from greensched.device.buffers import Buffer, Closable, PinnedBuffer
from greensched.device.foreign_arrays import ForeignArray
from greensched.driver.types import ExecutableHandle, GraphHandle
from greensched.errors import Closed, CUDAError, InvalidCapture, InvalidRequest, WrongDevice
from greensched.execution import calls
from greensched.execution.completion_poller import CAPTURE_STATUSES
from greensched.execution.executor import Executor
from greensched.execution.jobs import Job
from greensched.execution.lease import Lease
from greensched.typing import CaptureMode

#: What a graph uses, and whether it writes it.
Used = tuple[Buffer | PinnedBuffer | ForeignArray, bool]


class LaunchTarget(Protocol):
    """A partition."""

    def _ready_lease(self) -> Lease:
        """Return its lease, or raise what keeps it from submitting."""


class Graph(Closable):
    """Captured work, to be launched again and again, on whatever SMs.

    Made by `Partition.capture`. It outlives leases. `close()` it, or use it in a `with` block; one
    that is not closed warns, and is closed all the same. For any thread, one at a time.

    Attributes:
        device_id: the ordinal of its device.
    """

    __slots__ = ("_args", "_captured", "_function", "_kwargs", "_uses", "device_id")

    def __init__(
        self,
        device_id: int,
        function: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.device_id = device_id
        self._function, self._args, self._kwargs = function, args, kwargs
        self._captured: dict[Executor, _CapturedGraph] = {}
        given = (*args, *kwargs.values())
        #: Complete once it is captured; the same on each executor.
        self._uses: tuple[Used, ...] = tuple(
            (a, True) for a in given if isinstance(a, (Buffer, PinnedBuffer))
        )

    def launch(self, p: LaunchTarget) -> Job[None]:
        """Launch it on a partition's SMs, in the order of `Partition.launch`. Returns at once.

        Where it was not captured for these SMs yet, the partition's worker thread does that first,
        once; what is submitted behind it waits for that. The buffers that it uses are kept in order
        with other work on them, as in a launch.

        Args:
            p: a partition of the device that it was captured on, of this lease or any other.

        Raises:
            Closed: after `close()`.
            WrongDevice: the partition is of another device.
            BufferClosed: a buffer that it uses is closed.
            PartitionClosed, PoolClosed, DeviceLost, ForkedPool, WouldBlock, WrongThread: as
                `Partition.launch`.
            InvalidRequest: `p` is not a partition, or its stream is capturing.

        A failure to capture it is the job's failure, and the next launch tries again. Cancelling a
        task that awaits the job stops the waiting only.
        """
        lease = _lease_of(p)
        if self.is_closed:
            raise Closed("this graph")
        if lease.ordinal != self.device_id:
            raise WrongDevice("this graph", self.device_id, lease.ordinal)
        for buffer, _ in self._uses:
            buffer.check(self.device_id)
        captured = self._captured.get(lease.executor)
        if captured is None or captured.has_failed:
            captured = self._capture_again(lease)
        job = lease.submit("graph", captured.launch, self._uses, may_block=not captured.is_ready)
        captured.last_ticket = job._ticket
        return job

    def close(self) -> None:
        """Refuse further launches; what was launched is done all the same. Does not wait.

        Its memory on the device is freed once that is done and the partition's worker thread runs
        a call, when the pool is closed at the latest. Idempotent.
        """
        super().close()
        for captured in self._captured.values():
            captured.executor.close_released()

    def _give_back(self) -> None:
        for captured in self._captured.values():
            captured.executor.locals.release(captured)

    @property
    def _is_over(self) -> bool:
        return not any(captured.is_alive for captured in self._captured.values())

    # -- capturing ---------------------------------------------------------------------------------

    def capture(self, lease: Lease) -> Job[Graph]:
        """Capture it for the first time: what it uses is known afterwards."""

        def capture(*args: Any, **kwargs: Any) -> Graph:
            captured.create(partial(self._function, *args, **kwargs), self._record_uses)
            self._captured[captured.executor] = captured
            return self

        captured = _CapturedGraph(lease)
        return calls.submit_call(lease, capture, self._args, dict(self._kwargs))

    def _capture_again(self, lease: Lease) -> _CapturedGraph:
        """Capture it on another executor."""

        def capture(*args: Any, **kwargs: Any) -> None:
            captured.create(partial(function, *args, **kwargs), self._check_uses)

        function, captured = self._function, _CapturedGraph(lease)
        captured.capture_job = calls.submit_call(lease, capture, self._args, dict(self._kwargs))
        others = {executor: one for executor, one in self._captured.items() if not one.is_closed}
        self._captured = {**others, captured.executor: captured}
        return captured

    def _record_uses(self, recorded: Sequence[Used]) -> None:
        """Add what its kernels were launched with to what the function was given."""
        uses = {id(used): (used, write) for used, write in self._uses}
        for used, write in recorded:
            uses[id(used)] = (used, write or uses.get(id(used), (used, False))[1])
        self._uses = tuple(uses.values())

    def _check_uses(self, recorded: Sequence[Used]) -> None:
        """Refuse a use that the first capture did not have: it would be neither ordered nor kept.

        Raises:
            InvalidCapture: there is one.
        """
        known = {id(used): write for used, write in self._uses}
        for used, write in recorded:
            if not isinstance(used, ForeignArray) and known.get(id(used), not write) < write:
                raise InvalidCapture(
                    f"on these SMs it uses {used!r} as it did not the first time; it must use the "
                    "same buffers wherever it is captured"
                )

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", "graph")
        state = "closed" if self.is_closed else f"captured for {len(self._captured)} sets of SMs"
        return f"<Graph of {name}: {state}>"


class _CapturedGraph:
    """A graph on one executor, whose worker thread creates and closes it, and which keeps it.

    It has no reference to its `Graph`: that can be collected, and closes it, while the executor
    still has this.
    """

    __slots__ = (
        "_driver",
        "_error_taken",
        "_executable",
        "_kept",
        "capture_job",
        "executor",
        "is_closed",
        "last_ticket",
    )

    def __init__(self, lease: Lease) -> None:
        self.executor = lease.executor
        self._driver = lease.executor.driver
        self._executable: ExecutableHandle | None = None
        #: What the function returned, and what it used: memory that the graph works on.
        self._kept: object = None
        #: The call that creates it, where a launch asked for that.
        self.capture_job: Job[None] | None = None
        #: A launch has failed with that call's error.
        self._error_taken = False
        #: Of its last launch.
        self.last_ticket = 0
        self.is_closed = False

    # -- on the worker thread ----------------------------------------------------------------------

    def create(
        self, function: Callable[[], object], accept: Callable[[Sequence[Used]], object]
    ) -> None:
        """Capture what a function puts on the call stream.

        Raises:
            InvalidCapture: it put nothing there, or invalidated the capture.
            Exception: what the function raised, or `accept`, which is called with what it used.
        """
        self.executor.locals.close_released()
        stream, driver = self.executor.call_stream.stream, self._driver
        driver.begin_capture(stream.handle, CaptureMode.RELAXED)
        recorded: list[Used] = []
        stream.recorded = recorded
        try:
            self._kept = function(), recorded
        except BaseException as error:
            self._drop_capture()
            if isinstance(error, CUDAError) and error.status in CAPTURE_STATUSES:
                raise _invalidated(error) from error
            raise
        finally:
            stream.recorded = None
        graph = self._end_capture()
        try:
            if not driver.node_count(graph):
                raise InvalidCapture(
                    "it put nothing on current_call().stream, so there is nothing to launch"
                )
            accept(recorded)
            self._executable = driver.instantiate_graph(graph, stream.handle)
            self.executor.locals.adopt(self)
        finally:
            driver.destroy_graph(graph)

    def _end_capture(self) -> GraphHandle:
        stream = self.executor.call_stream.stream.handle
        if not self._driver.is_capturing(stream):
            raise InvalidCapture("it ended the capture itself")
        try:
            return self._driver.end_capture(stream)
        except CUDAError as error:
            if error.status not in CAPTURE_STATUSES:
                raise
            raise _invalidated(error) from error

    def _drop_capture(self) -> None:
        stream = self.executor.call_stream.stream.handle
        with suppress(CUDAError):  # invalidated: it has ended all the same
            if self._driver.is_capturing(stream):
                self._driver.destroy_graph(self._driver.end_capture(stream))

    def close(self) -> None:
        """Destroy it; no launch of it is in progress."""
        self.is_closed, self._kept = True, None
        executable, self._executable = self._executable, None
        if executable is not None:
            self._driver.destroy_executable(executable)

    # -- for its launches --------------------------------------------------------------------------

    @property
    def _is_captured(self) -> bool:
        return self.capture_job is None or self.capture_job.done()

    @property
    def has_failed(self) -> bool:
        """Whether it could not be created, as far as a launch knows."""
        if self._executable is not None or self.capture_job is None:
            return False
        return self._error_taken or self.capture_job.done()

    @property
    def is_ready(self) -> bool:
        """Whether it is created, and on the device."""
        return self._executable is not None and self._is_captured

    @property
    def is_alive(self) -> bool:
        """Whether it is to be closed, on a device that works."""
        return not self.is_closed and not self.executor.health.is_over

    @property
    def is_idle(self) -> bool:
        """Whether no thread creates it, and all its launches are done."""
        return self._is_captured and self.executor.launch_stream.reached(self.last_ticket)

    def launch(self, _: int) -> None:
        """Put it on the launch stream; on the submit thread, where it is yet to be created."""
        if not self.is_ready:
            self._wait_until_created()
        assert self._executable is not None
        handle = self.executor.launch_stream.stream.handle
        self._driver.launch_graph(self._executable, handle)

    def _wait_until_created(self) -> None:
        """Block until it is created, and order the launch stream behind that."""
        stream, job = self.executor.call_stream, self.capture_job
        assert job is not None
        stream.wait_until_submitted(job._ticket)
        error = job._take_error()
        if error is not None:
            self._error_taken = True  # the ticket may come much later, behind work of the stream
            raise error
        stream.health.check()
        self.executor.launch_stream.order_behind(stream)


def capture(
    lease: Lease, fn: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Job[Graph]:
    """See `Partition.capture`."""
    calls.check_blocking(fn)
    return Graph(lease.ordinal, fn, args, kwargs).capture(lease)


def _invalidated(error: CUDAError) -> InvalidCapture:
    return InvalidCapture(
        "it waited for the device or for work outside the capture, or did not join a stream of its "
        f"own to the captured one ({error})"
    )


def _lease_of(p: LaunchTarget) -> Lease:
    if not hasattr(p, "_ready_lease"):
        raise InvalidRequest(f"Graph.launch takes a Partition, not {type(p).__name__}: {p!r}")
    return p._ready_lease()
