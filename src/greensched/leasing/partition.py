"""`Partition`, the SMs that `async with pool.partition(...)` yields; and groups of partitions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Literal, NoReturn, ParamSpec, Self

import numpy as np
import numpy.typing as npt

from greensched._validation import Uncopyable
from greensched.context import Context
from greensched.device.buffers import Buffer, PinnedBuffer
from greensched.device.device import Device
from greensched.device.launch import LaunchConfig
from greensched.device.streams import Stream
from greensched.errors import InvalidArray, InvalidRequest, PartitionClosed, WouldBlock
from greensched.execution import copies, launches
from greensched.execution.bound_launch import BoundLaunch
from greensched.execution.call_context import CallContext
from greensched.execution.graphs import Graph
from greensched.execution.jobs import Job
from greensched.execution.lease import Lease
from greensched.execution.prefetch import Prefetcher
from greensched.execution.progress import ProgressCallback
from greensched.execution.worker_calls import check_blocking
from greensched.kernels import Kernel
from greensched.leasing.pool_lifecycle import PoolLifecycle
from greensched.leasing.requests import LeaseRequest
from greensched.typing import DeviceArray, T

P = ParamSpec("P")
Array = npt.NDArray[Any]


class AsyncBlock(Uncopyable):
    """A block for `async with` only. `await` and `with` raise an error that says so."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, NoReturn]:
        raise InvalidRequest(
            "await does not enter a partition: write `async with pool.partition(...) as p:`"
        )

    def __enter__(self) -> NoReturn:
        raise InvalidRequest(
            "write `async with pool.partition(...) as p:`, or, on a thread without a loop, "
            "`with pool.sync.partition(...) as p:`"
        )

    def __exit__(self, *_: object) -> None:
        """Exist, so that Python calls `__enter__`."""


class Partition(AsyncBlock):
    """SMs of one device, leased to one task at a time. Made by `pool.partition(...)`.

    Inside its `async with` block a task submits work, and may await it. A normal end of the block
    waits for all work and raises the first failure that was not retrieved. An exception or a
    cancellation ends it without waiting; the SMs are released once the device has done the work.

    Launches and copies run in the order of submission. All methods that return a `Job` first check
    everything, and raise before anything is submitted:

    * `PartitionClosed` outside the block; `PoolClosed`, `DeviceLost` or `ForkedPool` after that
      end;
    * `WouldBlock` when too many jobs are in flight: `await drain()` first;
    * `BufferClosed`, `WrongDevice` for a buffer that cannot be used here;
    * `InvalidRequest` while the partition's stream is capturing;
    * `WrongThread` on any thread except that of the loop that entered the block. Any thread may
      await jobs and read the partition's properties.
    """

    __slots__ = ("__weakref__", "_is_entered", "_is_left", "_lease", "_lifecycle", "_request")

    def __init__(
        self, lifecycle: PoolLifecycle, request: LeaseRequest, lease: Lease | None = None
    ) -> None:
        self._lifecycle = lifecycle
        self._request = request
        #: The lease once it is granted, perhaps before the block is entered.
        self._lease = lease
        self._is_entered = False
        self._is_left = False

    # -- being leased ------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Wait for the SMs. A checkpoint on trio; on asyncio only if it waits.

        A cancellation leaves nothing behind, neither a queued request nor a lease.

        Raises:
            TooManySMs, WouldDeadlock: It can never be granted, or not while this task holds SMs.
            QueueFull: Too many requests are queued.
            DeadlineExceeded: The deadline passed while it was queued.
            DeadlineImpossible: The work cannot be done in time.
            PoolClosed, DeviceLost, ForkedPool: The pool grants nothing.
            InvalidRequest: A task has entered it already.
            PartitionClosed: Its block has ended.
        """
        if self._is_entered:
            if self._lease is not None or self._is_left:
                self._open_lease()
            raise InvalidRequest("this partition is entered already: request another")
        self._is_entered = True
        if self._lease is None:  # otherwise `partition_nowait` got it
            try:
                self._lease = self._lifecycle.cache.take(self._request)
                if self._lease is None:
                    manager = self._lifecycle.granting or self._lifecycle.manager()
                    (self._lease,) = await manager.acquire(self._request)
            except BaseException:
                self._is_entered = False  # it may be tried again
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """End the lease as the class describes. A cancellation meanwhile only stops the waiting."""
        lease = self._lease
        if lease is not None and kind is not GeneratorExit and lease.leave():
            if not self._lifecycle.cache.put(lease):
                lease.close()
            self._lease, self._is_left = None, True
            return
        self._end_block(kind)
        if kind is None:
            await self._wait_closed()
            self._raise_unretrieved()

    def _end_block(self, kind: type[BaseException] | None) -> None:
        """End the lease when its block is left.

        A `GeneratorExit` may come from garbage collection, on any thread, perhaps while a lock is
        held that ending the lease needs. So the lease's loop ends it in a later turn, or, if that
        loop has closed, the loop that takes over. The same holds if another loop leaves the block.
        """
        lease = self._granted_lease()
        end = lease.end if kind is None else lease.abandon
        if kind is GeneratorExit or not lease.poller.loop.is_running:
            self._is_left = True
            lease.poller.loop.call_threadsafe(end)
        else:
            end()

    async def _wait_closed(self) -> None:
        """Wait until all work of an ended lease is done."""
        lease = self._lease
        if lease is not None:
            try:
                await lease.wait_closed()
            except BaseException:  # a cancellation
                lease.abandon_compilations()
                raise

    def _raise_unretrieved(self) -> None:
        """Raise the first job failure that was not retrieved, or the error that ended the pool."""
        lease = self._lease
        if lease is None:
            return
        if (error := lease.unretrieved_error) is not None:
            raise error
        if lease.launch_stream.health.is_over:
            raise lease.launch_stream.health.error()

    def _granted_lease(self) -> Lease:
        if self._lease is None:
            state = "closed" if self._is_left else "not granted: use it with `async with`"
            raise PartitionClosed("this partition", state)
        return self._lease

    def _open_lease(self) -> Lease:
        """Return the lease if it is open. From any thread."""
        lease = self._granted_lease()
        lease.check_open()
        return lease

    def _own_lease(self) -> Lease:
        """Return the lease if it is open and belongs to this thread's loop."""
        lease = self._granted_lease()
        lease.check_thread()
        lease.check_running_loop()
        return lease

    def _ready_lease(self) -> Lease:
        """Return the lease if a job can be submitted now."""
        lease = self._lease or self._granted_lease()
        lease.check_ready()
        return lease

    def __del__(self) -> None:
        lease = self._lease
        if lease is not None and lease.is_open and not self._is_left:
            place = f", taken at {lease.taken_at}," if lease.taken_at else ""
            message = f"{self!r}{place} was never left: use it with `async with`"
            # First, because the warning may be raised as an error.
            lease.poller.loop.call_threadsafe(lease.abandon)
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    # -- checkpoints and idle times ----------------------------------------------------------------

    async def checkpoint(self, duration: Any = None, *, deadline: float | None = None) -> int:
        """Wait for all of the lease's work, allow a resize, and return the number of SMs.

        A lease of a range of sizes, such as `sms=(8, 64)`, gives SMs above its minimum to queued
        requests, or takes idle ones. It gives up all of its SMs, and the checkpoint waits for new
        ones, if a request of higher priority, or one that has aged, does not fit otherwise. Any
        other lease keeps its SMs; its checkpoints show that leases of its class could give them
        back. Between checkpoints no SM is taken or added.

        Bound launches follow, and buffers stay valid, but `stream` and `context` change: read them
        again. A failed job raises where it is awaited or at the end of the block, not here. A
        checkpoint on trio; on asyncio it yields only if it waits. A cancellation while it waits for
        work changes nothing; a cancellation while it waits for SMs ends the lease.

        Args:
            duration: Expected seconds of work until the next checkpoint, or a curve of them.
            deadline: Seconds from now in which that work should be done. None: the class's
                `latency`. Only a policy that sizes leases uses the two; they never cause a refusal.

        Raises:
            PartitionClosed, PoolClosed, DeviceLost: There is no lease to change any more.
            InvalidRequest: The stream is capturing, or `duration` or `deadline` is invalid.
        """
        lease = self._own_lease()
        lease.check_capture()
        lease.check_pool()
        if lease.poller.loop.always_yields:
            await lease.poller.loop.checkpoint()
        executor = lease.executor
        if not lease.has_no_work():
            await lease.wait_idle()
        self._open_lease()
        if lease.executor is executor:  # otherwise another task's checkpoint was first
            lease.check_capture()
            manager = self._lifecycle.manager()
            waiting = manager.checkpoint(lease, duration, deadline)
            if waiting is not None:
                await manager.wait_to_go_on(lease, waiting)
        return self._open_lease().executor.sm_count

    def idle(self) -> IdleBlock:
        """Open a block in which the partition has no SMs, for a task that waits for work.

            async with p.idle():
                request = await requests.get()

        Entering waits for all of the lease's work and releases all SMs. Leaving requests the same
        size again, as a request of its class, and waits for the grant: at most
        `max_wait_for_reserve` if the class's reserve covers the least size. Inside, submitting
        raises `WouldBlock`. Bound launches follow, and buffers stay valid; read `stream` and
        `context` again afterwards. A partition of `Pool.partitions` cannot be idle alone.

        Entering raises as `checkpoint` does; a cancellation then changes nothing. Leaving raises
        `TooManySMs` if the classes have changed, or `PoolClosed` or `DeviceLost`. A cancellation
        that leaves the block, or comes while it waits for SMs, ends the lease.
        """
        return IdleBlock(self)

    # -- properties --------------------------------------------------------------------------------

    @property
    def sm_count(self) -> int:
        """The number of granted SMs: never fewer than requested, often a few more."""
        return self._open_lease().executor.sm_count

    @property
    def is_shared(self) -> bool:
        """Whether it shares all SMs of the device with other leases; see `ServiceClass.shared`."""
        return self._open_lease().grant.is_shared

    @property
    def max_cluster_size(self) -> int:
        """The most blocks that a thread-block cluster can have here, with certainty.

        1: the device has no clusters (compute capability below 9.0). 2: the pool splits finely, or
        these SMs are the remainder of the device's split.
        """
        return self._open_lease().executor.max_cluster_size

    @property
    def device(self) -> Device:
        """The device of the partition."""
        return self._open_lease().executor.device

    @property
    def device_id(self) -> int:
        """The ordinal of the device."""
        return self._open_lease().ordinal

    @property
    def stream(self) -> Stream:
        """The stream of the partition's launches and copies, for libraries that take a stream.

        The end of the lease waits for work that libraries submit to it. While it is capturing,
        nothing can be submitted here: await earlier jobs before you begin a capture. A capture that
        is still open when the lease ends is dropped.

        Raises:
            WouldBlock: A job is not on the stream yet (a first use, a large copy), so a library's
                work would overtake it. Await that job first.
        """
        lease = self._open_lease()
        lease.check_pool()
        if not (lease.all_submitted or lease.launch_stream.is_idle):
            raise WouldBlock("a submitted job is not on the stream yet: await it first")
        lease.share_stream()
        return lease.launch_stream.stream

    @property
    def context(self) -> Context:
        """The partition's green context. Only one thread at a time may enter it."""
        lease = self._open_lease()
        lease.check_pool()
        lease.expect_foreign_work()
        return lease.executor.context

    def __cuda_stream__(self) -> tuple[Literal[0], int]:
        """Return the stream for libraries that use this protocol."""
        return self.stream.__cuda_stream__()

    # -- launching ---------------------------------------------------------------------------------

    def launch(self, config: LaunchConfig, kernel: Kernel, *args: object) -> Job[None]:
        """Launch a kernel and return at once.

        A kernel's first use on these SMs goes through a thread of the partition, which compiles
        and loads it; work submitted meanwhile follows on the same thread.

        Args:
            config: The grid, the block and the dynamic shared memory.
            kernel: The kernel to launch.
            args: The kernel's arguments: a `Buffer` or `PinnedBuffer` for each pointer, a number
                for each scalar. A pointer may also be another library's array in device memory and
                C order, by DLPack or `__cuda_array_interface__`. It is used in place, ordered after
                its producer's stream, and kept alive until the job is done.

        Raises:
            ArgumentMismatch: Arguments of wrong number or kind; or an array in host memory, not in
                C order, read-only although the parameter is not const, or not exportable.
            InvalidArray: An array is in no device's memory, although it says so.
            InvalidLaunch: The grid, block or shared memory exceeds a limit of the device.
            NotSimulable: The driver is simulated, and the kernel has no reference or no cost.

        Later failures (a compile error, a refusal by the driver) make the job fail.
        """
        return launches.launch(self._lease or self._granted_lease(), config, kernel, args)

    def prepare(self, config: LaunchConfig, kernel: Kernel) -> Job[None]:
        """Compile and load a kernel for these SMs, so that no later launch has to.

        It happens on the partition's own thread, after the calls submitted before. A driver may
        delay a kernel's first load until all work on the device is done (seen on an H200, driver
        580), so give a service's kernels to `Pool(prepare=[...])`, which loads them for every
        partition. Later launches and `bind` may have any geometry.

        Raises:
            InvalidLaunch, NotSimulable: As for `launch`.
        """
        return launches.prepare(self._ready_lease(), config, kernel)

    def bind(self, config: LaunchConfig, kernel: Kernel, *args: object) -> BoundLaunch:
        """Check and pack a launch once; each further launch costs only the driver's call.

        Raises:
            WouldBlock: The kernel is not loaded for these SMs: `await prepare(config, kernel)`.
            ArgumentMismatch, InvalidLaunch, NotSimulable: As for `launch`.
        """
        lease = self._ready_lease()
        bound = BoundLaunch(lease, launches.prepare_bound(lease, config, kernel, args), kernel.name)
        lease.bound_launches.append(bound)
        return bound

    # -- memory ------------------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Job[Buffer]:
        """Allocate an uninitialised buffer, which every partition of the device can use.

        Raises:
            InvalidArray: Device memory cannot hold the dtype, or the shape is impossible.

        The job fails with `OutOfMemory` if memory runs out.
        """
        return copies.empty(self._ready_lease(), shape, dtype)

    def empty_like(self, like: Buffer | Array) -> Job[Buffer]:
        """Allocate a buffer of the same shape and dtype. Errors are those of `empty`."""
        if not isinstance(like, (Buffer, np.ndarray)):
            raise InvalidArray(
                f"empty_like() takes a Buffer or a numpy array, not a {type(like).__name__}"
            )
        return self.empty(like.shape, like.dtype)

    def empty_pinned(
        self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32
    ) -> Job[PinnedBuffer]:
        """Allocate zeroed host memory that the device accesses directly. Errors as for `empty`."""
        return copies.empty_pinned(self._ready_lease(), shape, dtype)

    def upload(
        self, array: npt.ArrayLike, *, progress: ProgressCallback | None = None
    ) -> Job[Buffer]:
        """Copy an array to new device memory in C order, whatever its strides.

        A large array must not change until the job is done; an array of up to 64 KiB is read
        immediately. The device never reads it directly: a thread copies large arrays through pinned
        chunks.

        Args:
            array: Anything that numpy converts to an array; or a device array as in `launch`, which
                the device copies.
            progress: Called on this loop's thread with bytes done and bytes in all. Bytes done
                never decrease, and reach the total before the job is done. If it raises, a large
                copy stops between two chunks and the job fails.

        Raises:
            InvalidArray: Python objects, big-endian numbers, or no array at all.

        The job fails with `OutOfMemory` if memory runs out. Cancelling a task that awaits the job
        stops only the waiting: the copy continues, and uses the array until the job is done. To
        stop the copy, raise an exception in `progress`.
        """
        return copies.upload(self._ready_lease(), array, progress)

    def download(
        self,
        buffer: Buffer | DeviceArray,
        out: Array | None = None,
        *,
        progress: ProgressCallback | None = None,
    ) -> Job[Array]:
        """Copy a buffer to a numpy array: a new array, or `out`.

        `out` is in use until the job is done, even if no task awaits it any more. A job that
        failed, or was stopped by `progress`, may leave `out` half written. The device writes it
        only through pinned memory.

        Args:
            buffer: A buffer of this device, or another library's device array as in `launch`.
            out: An array of the same shape and dtype, with any strides.
            progress: As for `upload`.

        Raises:
            InvalidArray: `out` is read-only, or has another shape or dtype; or a device array
                cannot be used, see `launch`.
        """
        return copies.download(self._ready_lease(), buffer, out, progress)

    def copy(
        self,
        dst: Buffer | DeviceArray,
        src: Buffer | DeviceArray | Array,
        *,
        progress: ProgressCallback | None = None,
    ) -> Job[None]:
        """Copy a buffer or an array into an existing buffer of the same shape and dtype.

        A host array must not change until the job is done, unless it has at most 64 KiB.

        One of two buffers may belong to another device of the pool. The copy is ordered after work
        that uses the buffers on either device. It goes directly from device to device if the
        hardware can; otherwise a thread copies chunks through pinned memory.

        Args:
            dst: The destination: a buffer, or another library's device array as in `launch`.
            src: The source: the same, or a host array.
            progress: As for `upload`. With it, device memory is copied in parts of 64 MiB.

        Raises:
            InvalidArray: Shapes or dtypes differ, or a device array cannot be used.
            WrongDevice: Neither buffer is on this device, or one is on a device outside the pool.
        """
        return copies.copy(self._ready_lease(), dst, src, progress)

    def prefetch(self, arrays: Iterable[npt.ArrayLike]) -> Prefetcher:
        """Upload arrays one after another, each while work on the previous one runs.

            async for x in p.prefetch(batches):
                p.launch(config, kernel, x, ...)

        When a buffer is returned, the next array's copy begins, on its own stream and thread,
        beside the launches; the launches need not be awaited. A returned buffer is complete, and is
        valid until two more have been requested; then it is closed, after its last use. All are
        closed when the iteration ends or is abandoned. At most three exist at a time: requesting a
        buffer waits until work on the next to last one is done.

        Args:
            arrays: Iterated one ahead, on this loop's thread. An array must not change until its
                buffer is returned. The arrays may differ in shape and dtype.

        Raises:
            InvalidRequest: `arrays` is not iterable.

        Requesting the next buffer raises as `upload` does, and if its copy fails. A cancellation
        stops only the waiting; the copy in progress runs to its end.
        """
        return Prefetcher(self._ready_lease, arrays)

    # -- blocking callables ------------------------------------------------------------------------

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Call a blocking function on the partition's own thread, on these SMs.

        The green context is current there, and the call stream is ordered after all work submitted
        before; later work is ordered after the call only once the call was awaited. The job is done
        when the call has returned and its work on the call stream is done. A call that no task
        awaits any more runs to its end, and holds the SMs until then.

        Buffers among the arguments are ordered as in a launch, and count as written. The call sees
        a copy of the caller's context variables. A library's integration, once imported
        (`greensched.integrations.torch`, for example), sets the library's current stream;
        `current_call()` describes the SMs and the stream.
        """
        return self._ready_lease().call(fn, args, kwargs)

    def capture(self, fn: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> Job[Graph]:
        """Capture the work of a function as a CUDA graph, which can be launched repeatedly.

        `fn` is called as by `run`, while the stream is capturing (relaxed mode): work that it
        submits to `current_call().stream` is recorded and does not run. For each other set of SMs
        on which the graph is launched, `fn` is called again with the same arguments, and must
        submit the same work. Its return value is kept as long as the graph.

        The graph uses the buffers among the arguments, which count as written, and buffers that
        `fn` passes to `launch(current_call().stream, ...)`. Prepare the kernels before.

        Raises:
            InvalidRequest, WouldBlock: As for `run`.

        The job fails with the exception of `fn`, or with `InvalidCapture` if nothing was recorded
        or the capture became invalid, for example by waiting for the device; then no graph is left.
        Cancelling a task that awaits the job stops only the waiting; the graph is then closed as
        soon as it is made.
        """
        lease = self._ready_lease()
        check_blocking(fn)
        return Graph(lease.ordinal, fn, args, kwargs).capture(lease)

    def keep_alive(self, *objects: object) -> Job[None]:
        """Keep objects alive until the device has done the work submitted here so far.

        For arrays of other libraries in work on `stream`: a library may reuse their memory
        as soon as no reference is left. Returns at once; the job is done when that work is done.
        Cancelling a task that awaits the job changes nothing.

        Raises:
            PartitionClosed, PoolClosed, DeviceLost, WrongThread: As for `launch`.
            InvalidRequest: The partition's stream is capturing.
        """
        lease = self._own_lease()
        lease.check_pool()
        lease.check_capture()
        stream = lease.launch_stream
        return lease.submit("keep_alive", lambda ticket: stream.keep(ticket, objects))

    @property
    def call(self) -> CallContext:
        """The launch stream and the SMs, for integrations whose own blocks work there.

        Raises:
            WouldBlock: As for `stream`.
        """
        lease, _ = self._open_lease(), self.stream
        return lease.context_on(lease.launch_stream)

    def local(self, factory: Callable[[], T]) -> Job[T]:
        """Return a value for these SMs, which `factory` makes once for all their leases.

        For things that partitions must not share: library handles, workspaces, communicators,
        graphs. The first time, `factory()` is called as by `run`; later the job is done at once.
        The function identifies the value, so pass the same function each time. Another set of SMs
        has its own value. When the SMs' green context is closed, at the latest with the pool,
        `value.close()` is called, if it exists, on the same thread and in the same context.

        Raises:
            InvalidRequest: `factory` is not a function, is a coroutine function, or is unhashable.

        If the factory raises, the job fails with that exception, and the next call tries again. It
        fails with `InvalidRequest` if 64 other values are kept. Cancelling a task that awaits the
        job stops only the waiting: the value is made and kept. After a device fault, or over work
        that does not end, nothing is closed.
        """
        lease = self._ready_lease()
        check_blocking(factory)
        values = lease.executor.locals
        try:
            is_made = values.has(factory)
        except TypeError:
            raise InvalidRequest(f"{factory!r} is not hashable: give a function") from None
        if not is_made:
            return lease.call(values.get, (factory,), {})
        # Ticket 0 is always reached.
        job: Job[T] = Job(lease.executor.call_stream, 0, "local", lease)
        job._set_result(values.get(factory))
        return job

    # -- waiting for capacity ----------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until a job or a bound launch can be submitted. A cancellation changes nothing.

        Raises:
            PartitionClosed, PoolClosed, DeviceLost: No job can be submitted any more.
            InvalidRequest: The partition's stream is capturing.
        """
        lease = self._own_lease()
        lease.check_capture()
        for track in (lease.launch_stream, lease.executor.call_stream):
            while not lease.has_room(track) and not track.health.is_over:
                oldest = track.issued - lease.executor.depth + 1
                await lease.wait_for(track, oldest)
        await lease.wait_for_bound_launches()
        lease.check_pool()

    def __repr__(self) -> str:
        lease = self._lease
        if lease is None:
            state = "closed" if self._is_left else "not granted"
            return f"<Partition: {self._request}, {state}>"
        sms, device = lease.executor.sm_count, lease.ordinal
        return f"<Partition: {sms} SMs of device {device}, {lease.state.value}>"


class IdleBlock(AsyncBlock):
    """What `async with p.idle():` enters: see `Partition.idle`."""

    __slots__ = ("_partition",)

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    async def __aenter__(self) -> None:
        """Wait for the partition's work, and give its SMs back.

        Raises:
            InvalidRequest: It was requested together with others.
        """
        partition = self._partition
        lease = partition._own_lease()
        lease.check_ready()
        if len(partition._request.parts) > 1:  # all of them would be requested again
            raise InvalidRequest(
                "a partition of `pool.partitions` cannot be idle alone: request it by itself, with "
                "`pool.partition`"
            )
        if lease.poller.loop.always_yields:
            await lease.poller.loop.checkpoint()
        await lease.wait_idle()
        partition._open_lease().check_capture()
        partition._lifecycle.manager().begin_idle(lease)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Wait until the partition has SMs again."""
        lease = self._partition._granted_lease()
        if kind is not None and not issubclass(kind, Exception):
            lease.poller.loop.call_threadsafe(lease.end)  # perhaps from garbage collection
        else:
            lease.check_running_loop()
            await self._partition._lifecycle.manager().end_idle(lease)


class PartitionGroup(AsyncBlock):
    """Several partitions of one request; they are granted, entered and ended together."""

    def __init__(self, lifecycle: PoolLifecycle, request: LeaseRequest) -> None:
        self._lifecycle = lifecycle
        self._request = request
        self._is_entered = False
        self._partitions: tuple[Partition, ...] = ()

    async def __aenter__(self) -> tuple[Partition, ...]:
        """Wait for the SMs of all partitions. Waits and raises as `Partition.__aenter__`."""
        if self._is_entered:
            raise InvalidRequest("these partitions are entered already: request others")
        self._is_entered = True
        try:
            leases = await self._lifecycle.manager().acquire(self._request)
        except BaseException:
            self._is_entered = False  # it may be tried again
            raise
        self._partitions = tuple(
            Partition(self._lifecycle, self._request, lease) for lease in leases
        )
        for partition in self._partitions:
            partition._is_entered = True
        return self._partitions

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """End all leases, then wait for each; raise the first failure."""
        for partition in self._partitions:
            partition._end_block(kind)
        if kind is None:
            for partition in self._partitions:
                await partition._wait_closed()
            for partition in self._partitions:
                partition._raise_unretrieved()
