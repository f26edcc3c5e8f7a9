"""Graphs: work captured once for each set of SMs, and launched again as one piece.

What was captured stays on the SMs of the stream it was captured on, wherever it is launched. So a
graph is captured by each lane it is launched on, on the lane's own thread and its stream of calls,
and kept with the lane. It is launched on the stream of launches, with a ticket behind it: none is
ever inside, for a launch would turn the word back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from greensched.device.buffers import Buffer, Closable, PinnedBuffer
from greensched.device.foreign_arrays import ForeignArray
from greensched.driver.types import ExecutableHandle, GraphHandle
from greensched.errors import (
    Closed,
    CUDAError,
    InvalidCapture,
    InvalidRequest,
    WrongDevice,
)
from greensched.execution import calls
from greensched.execution.completion import CAPTURE_STATUSES
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
    """Work that was captured, to be launched again and again, on whatever SMs.

    Made by `Partition.capture`. It outlives leases. `close()` it, or use it in a `with` block; a
    forgotten one warns and is closed all the same. For any thread, one at a time.

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
        #: Where it was captured so far.
        self._captured: dict[Executor, _CapturedGraph] = {}
        given = (*args, *kwargs.values())
        #: Known once it was captured; the same wherever it is.
        self._uses: tuple[Used, ...] = tuple(
            (a, True) for a in given if isinstance(a, (Buffer, PinnedBuffer))
        )

    def launch(self, p: LaunchTarget) -> Job[None]:
        """Launches it on a partition's SMs and returns at once; in order, as `Partition.launch`.

        Where it was not captured for these SMs yet, that is done first, once, by the partition's
        own thread; what is submitted behind it waits for that. The buffers it uses are kept in
        order with other work on them, as in a launch.

        Args:
            p: a partition of the device it was captured on, of this lease or any other.

        Raises:
            Closed: after `close()`.
            WrongDevice: the partition is of another device.
            BufferClosed: something it uses is closed.
            PartitionClosed, PoolClosed, DeviceLost, ForkedPool, WouldBlock, WrongThread: as
                `Partition.launch`.
            InvalidRequest: `p` is no partition, or its stream is capturing.

        What capturing it anew fails with is the job's failure, and the next launch tries again.
        Cancelling who awaits it stops the waiting only.
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
        captured.last = job._ticket
        return job

    def close(self) -> None:
        """Nothing more is launched; what was launched is done all the same. Does not wait.

        Its memory on the device comes back once that is done and the partition's thread has
        something to do, when the pool is closed at the latest. Idempotent.
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
        """The first time: what it uses is known afterwards."""

        def capture(*args: Any, **kwargs: Any) -> Graph:
            captured.make(partial(self._function, *args, **kwargs), self._record_uses)
            self._captured[captured.executor] = captured
            return self

        captured = _CapturedGraph(lease)
        return calls.submit_call(lease, capture, self._args, dict(self._kwargs))

    def _capture_again(self, lease: Lease) -> _CapturedGraph:
        """For SMs it was not captured on yet."""

        def capture(*args: Any, **kwargs: Any) -> None:
            captured.make(partial(function, *args, **kwargs), self._check_uses)

        function, captured = self._function, _CapturedGraph(lease)
        captured.again = calls.submit_call(lease, capture, self._args, dict(self._kwargs))
        others = {executor: one for executor, one in self._captured.items() if not one.is_closed}
        self._captured = {**others, captured.executor: captured}
        return captured

    def _record_uses(self, recorded: Sequence[Used]) -> None:
        """What it uses: what the function was given, and what kernels were launched with."""
        uses = {id(used): (used, write) for used, write in self._uses}
        for used, write in recorded:
            uses[id(used)] = (used, write or uses.get(id(used), (used, False))[1])
        self._uses = tuple(uses.values())

    def _check_uses(self, recorded: Sequence[Used]) -> None:
        """Other buffers than the first time would be ordered behind nobody, and kept by nobody."""
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
    """A graph on one lane. Made and closed by the lane's worker, kept with what users keep there.

    It does not know its `Graph`: a forgotten one is closed though the lane still has this.
    """

    __slots__ = (
        "_driver",
        "_executable",
        "_is_refused",
        "_kept",
        "again",
        "executor",
        "is_closed",
        "last",
    )

    def __init__(self, lease: Lease) -> None:
        self.executor = lease.executor
        self._driver = lease.executor.driver
        self._executable: ExecutableHandle | None = None
        #: What the function returned, and what it used: memory that the graph works on.
        self._kept: object = None
        #: The call that makes it, where a launch asked for that.
        self.again: Job[None] | None = None
        #: Somebody was told that it failed.
        self._is_refused = False
        #: The ticket of its last launch.
        self.last = 0
        self.is_closed = False

    # -- on the worker -----------------------------------------------------------------------------

    def make(
        self, function: Callable[[], object], accept: Callable[[Sequence[Used]], object]
    ) -> None:
        """Captures what a function puts on the stream of the call.

        Raises:
            InvalidCapture: it put nothing there, or spoilt the capture.
            Exception: what the function raised, or `accept`, which is told what it used.
        """
        self.executor.locals.close_released()
        stream, driver = self.executor.call_stream.stream, self._driver
        driver.begin_capture(stream.handle, CaptureMode.RELAXED)
        recorded: list[Used] = []
        stream.recorded = recorded
        try:
            self._kept = function(), recorded
        except BaseException as error:
            self._drop()
            if isinstance(error, CUDAError) and error.status in CAPTURE_STATUSES:
                raise _spoilt(error) from error
            raise
        finally:
            stream.recorded = None
        graph = self._end()
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

    def _end(self) -> GraphHandle:
        stream = self.executor.call_stream.stream.handle
        if not self._driver.is_capturing(stream):
            raise InvalidCapture("it ended the capture itself")
        try:
            return self._driver.end_capture(stream)
        except CUDAError as error:
            if error.status not in CAPTURE_STATUSES:
                raise
            raise _spoilt(error) from error

    def _drop(self) -> None:
        stream = self.executor.call_stream.stream.handle
        with suppress(CUDAError):  # spoilt: it is over all the same
            if self._driver.is_capturing(stream):
                self._driver.destroy_graph(self._driver.end_capture(stream))

    def close(self) -> None:
        """Ends it; no launch of it is under way."""
        self.is_closed, self._kept = True, None
        executable, self._executable = self._executable, None
        if executable is not None:
            self._driver.destroy_executable(executable)

    # -- for its launches --------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Whether it could not be made, as far as anybody was told."""
        if self._executable is not None or self.again is None:
            return False
        return self._is_refused or self.again.done()

    @property
    def is_ready(self) -> bool:
        """Whether it is made, and on the device."""
        return self._executable is not None and (self.again is None or self.again.done())

    @property
    def is_alive(self) -> bool:
        """Whether there is something to be closed, on a device that works."""
        return not self.is_closed and not self.executor.launch_stream.health.is_over

    @property
    def is_idle(self) -> bool:
        """Whether nobody makes it, and all its launches are done."""
        is_made = self.again is None or self.again.done()
        return is_made and self.executor.launch_stream.reached(self.last)

    def launch(self, _: int) -> None:
        """Puts it on the stream of launches; where it is still to be made, on the mover."""
        launches = self.executor.launch_stream
        if not self.is_ready:
            self._wait()
        assert self._executable is not None
        self._driver.launch_graph(self._executable, launches.stream.handle)

    def _wait(self) -> None:
        """Blocks until it is made, and has the device wait until it is there."""
        runs, again = self.executor.call_stream, self.again
        assert again is not None
        runs.wait_until_submitted(again._ticket)
        error = again._take_error()
        if error is not None:
            self._is_refused = True  # its ticket may come much later, behind what runs there
            raise error
        if runs.health.is_over:
            raise runs.health.error()
        self.executor.launch_stream.order_behind(runs)


def capture(
    lease: Lease, fn: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Job[Graph]:
    """See `Partition.capture`."""
    calls.check_blocking(fn)
    return Graph(lease.ordinal, fn, args, kwargs).capture(lease)


def _spoilt(error: CUDAError) -> InvalidCapture:
    return InvalidCapture(
        f"it waited for the device or for work outside, or left a stream of its own apart ({error})"
    )


def _lease_of(p: LaunchTarget) -> Lease:
    if not hasattr(p, "_ready_lease"):
        raise InvalidRequest(f"Graph.launch takes a Partition, not {type(p).__name__}: {p!r}")
    return p._ready_lease()
