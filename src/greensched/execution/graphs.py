"""Graphs: work that is captured once for each set of SMs and launched repeatedly.

Captured work stays on the SMs of the stream that captured it, wherever it is launched. So each
executor that launches a graph captures it, on its worker thread and call stream, and keeps
it. The launch stream runs it and writes a ticket after it. The graph itself contains no ticket,
because a launch would set the ticket's word back.
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
from greensched.execution.completion_poller import CAPTURE_STATUSES
from greensched.execution.executor import Executor
from greensched.execution.jobs import Job
from greensched.execution.lease import Lease
from greensched.typing import CaptureMode

#: An object that a graph uses, and whether the graph writes it.
Used = tuple[Buffer | PinnedBuffer | ForeignArray, bool]


class LaunchTarget(Protocol):
    """A partition."""

    def _ready_lease(self) -> Lease:
        """Return the lease, or raise if it cannot submit work."""


class Graph(Closable):
    """Captured work that can be launched repeatedly, on any SMs of its device.

    Made by `Partition.capture`; it outlives leases. `close()` it, or use it in a `with` block; if
    it is collected unclosed, it warns and is closed. For any thread, one at a time.

    Attributes:
        device_id: The ordinal of the device.
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
        values = (*args, *kwargs.values())
        #: Complete after the first capture; the same on each executor.
        self._uses: tuple[Used, ...] = tuple(
            (a, True) for a in values if isinstance(a, (Buffer, PinnedBuffer))
        )

    def launch(self, p: LaunchTarget) -> Job[None]:
        """Launch the graph on a partition's SMs, in order with `Partition.launch`. Returns at once.

        If it is not captured for these SMs yet, the partition's worker thread first captures it,
        and work submitted later waits for that. Its buffers are ordered with other work on them, as
        in a launch.

        Args:
            p: A partition of the device on which it was captured, of this lease or another.

        Raises:
            Closed: `close()` was called.
            WrongDevice: The partition belongs to another device.
            BufferClosed: A buffer of the graph is closed.
            PartitionClosed, PoolClosed, DeviceLost, ForkedPool, WouldBlock, WrongThread: As for
                `Partition.launch`.
            InvalidRequest: `p` is not a partition, or its stream is capturing.

        If the capture fails, the job fails, and the next launch tries again. Cancelling a task that
        awaits the job stops only the waiting.
        """
        if not hasattr(p, "_ready_lease"):
            raise InvalidRequest(f"Graph.launch takes a Partition, not {type(p).__name__}: {p!r}")
        lease = p._ready_lease()
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
        """Refuse further launches; earlier ones run to their end. Does not wait.

        Its device memory is freed once they are done and the partition's worker thread runs a
        call, or when the pool closes. Idempotent.
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
        """Capture it for the first time, which shows what it uses."""

        def capture(*args: Any, **kwargs: Any) -> Graph:
            captured.create(partial(self._function, *args, **kwargs), self._record_uses)
            self._captured[captured.executor] = captured
            return self

        captured = _CapturedGraph(lease)
        return lease.call(capture, self._args, dict(self._kwargs))

    def _capture_again(self, lease: Lease) -> _CapturedGraph:
        """Capture the graph on another executor."""

        def capture(*args: Any, **kwargs: Any) -> None:
            captured.create(partial(function, *args, **kwargs), self._check_uses)

        function, captured = self._function, _CapturedGraph(lease)
        captured.capture_job = lease.call(capture, self._args, dict(self._kwargs))
        others = {
            executor: captured
            for executor, captured in self._captured.items()
            if not captured.is_closed
        }
        self._captured = {**others, captured.executor: captured}
        return captured

    def _record_uses(self, recorded: Sequence[Used]) -> None:
        """Add the arguments of its kernels' launches to the function's own arguments."""
        uses = {id(used): (used, write) for used, write in self._uses}
        for used, write in recorded:
            uses[id(used)] = (used, write or uses.get(id(used), (used, False))[1])
        self._uses = tuple(uses.values())

    def _check_uses(self, recorded: Sequence[Used]) -> None:
        """Refuse uses that the first capture did not have: nothing would order or keep them.

        Raises:
            InvalidCapture: There is such a use.
        """
        known = {id(used): write for used, write in self._uses}
        for used, write in recorded:
            if not isinstance(used, ForeignArray) and known.get(id(used), not write) < write:
                raise InvalidCapture(
                    f"on these SMs it uses {used!r} differently from the first capture: it must "
                    "use the same buffers wherever it is captured"
                )

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", "graph")
        state = "closed" if self.is_closed else f"captured for {len(self._captured)} sets of SMs"
        return f"<Graph of {name}: {state}>"


class _CapturedGraph:
    """A graph captured on one executor, which keeps it; its worker thread creates and closes it.

    It does not refer to its `Graph`, which can thus be collected, and then closes this object,
    while the executor still has it.
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
        #: The function's return value and the memory that it used, which the graph works on.
        self._kept: object = None
        #: The call that creates it, if a launch requested it.
        self.capture_job: Job[None] | None = None
        #: Whether a launch has already failed with the error of that call.
        self._error_taken = False
        self.last_ticket = 0
        self.is_closed = False

    # -- on the worker thread ----------------------------------------------------------------------

    def create(
        self, function: Callable[[], object], accept: Callable[[Sequence[Used]], object]
    ) -> None:
        """Capture the work that a function submits to the call stream.

        Raises:
            InvalidCapture: The function submitted nothing, or invalidated the capture.
            Exception: The function raised it, or `accept` did, which is called with what was used.
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
                    "it submitted nothing to current_call().stream, so there is nothing to launch"
                )
            accept(recorded)
            self._executable = driver.instantiate_graph(graph, stream.handle)
            self.executor.locals.adopt(self)
        finally:
            driver.destroy_graph(graph)

    def _end_capture(self) -> GraphHandle:
        stream = self.executor.call_stream.stream.handle
        if not self._driver.is_capturing(stream):
            raise InvalidCapture("it ended the capture itself: leave that to p.capture")
        try:
            return self._driver.end_capture(stream)
        except CUDAError as error:
            if error.status not in CAPTURE_STATUSES:
                raise
            raise _invalidated(error) from error

    def _drop_capture(self) -> None:
        stream = self.executor.call_stream.stream.handle
        with suppress(CUDAError):  # of an invalidated capture, which has still ended
            if self._driver.is_capturing(stream):
                self._driver.destroy_graph(self._driver.end_capture(stream))

    def close(self) -> None:
        """Destroy the graph. No launch of it may be in progress."""
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
        """Whether its creation is known to have failed."""
        if self._executable is not None or self.capture_job is None:
            return False
        return self._error_taken or self.capture_job.done()

    @property
    def is_ready(self) -> bool:
        """Whether it is created and on the device."""
        return self._executable is not None and self._is_captured

    @property
    def is_alive(self) -> bool:
        """Whether it must still be closed, on a device that works."""
        return not self.is_closed and not self.executor.health.is_over

    @property
    def is_idle(self) -> bool:
        """Whether its creation and all its launches are done."""
        return self._is_captured and self.executor.launch_stream.reached(self.last_ticket)

    def launch(self, _: int) -> None:
        """Submit it to the launch stream; on the submit thread if it is not created yet."""
        if not self.is_ready:
            self._wait_until_created()
        assert self._executable is not None
        handle = self.executor.launch_stream.stream.handle
        self._driver.launch_graph(self._executable, handle)

    def _wait_until_created(self) -> None:
        """Block until it is created, and order the launch stream after its creation."""
        stream, job = self.executor.call_stream, self.capture_job
        assert job is not None
        stream.wait_until_submitted(job._ticket)
        error = job._take_error()
        if error is not None:
            self._error_taken = True  # the ticket may come much later, after other work
            raise error
        stream.health.check()
        self.executor.launch_stream.order_behind(stream)


def _invalidated(error: CUDAError) -> InvalidCapture:
    return InvalidCapture(
        "it waited for the device or for work outside the capture, or did not join a stream of its "
        f"own to the captured one ({error})"
    )
