"""`Partition`: the SMs that `async with pool.partition(...)` yields; and groups of partitions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Literal, NoReturn, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from greensched._validation import Uncopyable
from greensched.context import Context
from greensched.device.buffers import Buffer, PinnedBuffer
from greensched.device.device import Device
from greensched.device.launch import LaunchConfig
from greensched.device.streams import Stream
from greensched.errors import InvalidArray, InvalidRequest, PartitionClosed, WouldBlock
from greensched.execution import calls, copies, graphs, launches
from greensched.execution.bound_launch import BoundLaunch
from greensched.execution.call_context import CallContext
from greensched.execution.graphs import Graph
from greensched.execution.jobs import Job
from greensched.execution.lease import Lease
from greensched.execution.prefetch import Prefetcher
from greensched.execution.progress import ProgressCallback
from greensched.kernels import Kernel
from greensched.leasing.pool_lifecycle import PoolLifecycle
from greensched.leasing.requests import LeaseRequest
from greensched.typing import DeviceArray

P = ParamSpec("P")
T = TypeVar("T")
Array = npt.NDArray[Any]


class AsyncBlock(Uncopyable):
    """What is used with `async with` alone: says so where it is awaited, or used with `with`."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, NoReturn]:
        raise InvalidRequest("this is not awaited: write `async with pool.partition(...) as p:`")

    def __enter__(self) -> NoReturn:
        raise InvalidRequest(
            "write `async with pool.partition(...) as p:`, or, on a thread without a loop, "
            "`with pool.sync.partition(...) as p:`"
        )

    def __exit__(self, *_: object) -> None:
        """Exist, so that Python calls `__enter__`."""


class Partition(AsyncBlock):
    """SMs of one device, leased to one task at a time; made by `pool.partition(...)`.

    Inside its `async with` block: submit work, await it or leave it. Leaving the block normally
    waits for all of it and raises the first failure that was not retrieved; leaving it by an
    exception or a cancellation does not wait: the SMs go back once the device has done the work.

    Launches and copies happen in the order in which they are submitted. All methods that return a
    `Job` check everything first and raise, before anything is submitted:

    * `PartitionClosed` outside the block; `PoolClosed`, `DeviceLost`, `ForkedPool` when too late;
    * `WouldBlock` at the bound of jobs in flight: `await drain()` first;
    * `BufferClosed`, `WrongDevice` for a buffer that cannot be used here;
    * `InvalidRequest` while the partition's stream is capturing;
    * `WrongThread` on another thread than the one whose loop entered it. What has been submitted
      may be awaited anywhere, and the facts may be read anywhere.
    """

    __slots__ = ("__weakref__", "_is_entered", "_is_left", "_lease", "_lifecycle", "_request")

    def __init__(
        self, lifecycle: PoolLifecycle, request: LeaseRequest, lease: Lease | None = None
    ) -> None:
        self._lifecycle = lifecycle
        self._request = request
        #: Granted, perhaps before the block is entered; until it was left without work.
        self._lease = lease
        self._is_entered = False
        self._is_left = False

    # -- being leased ------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Wait for the SMs; a checkpoint on trio, and on asyncio only if it waits.

        A cancellation leaves nothing behind: no place in the queue, no SM.

        Raises:
            TooManySMs, WouldDeadlock: it can never be granted, or not while this task holds SMs.
            QueueFull: too many requests are queued.
            DeadlineExceeded: the deadline passed while it was queued.
            DeadlineImpossible: the work cannot be done in time.
            PoolClosed, DeviceLost, ForkedPool: the pool grants nothing.
            InvalidRequest: it is entered already, by any task.
            PartitionClosed: its block has ended.
        """
        if self._is_entered:
            if self._lease is not None or self._is_left:
                self._open_lease()
            raise InvalidRequest("this partition is entered already: ask for another")
        self._is_entered = True
        if self._lease is None:  # else `partition_nowait` made it
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
        """End the lease; see the class. A cancellation while it waits only stops the waiting."""
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
        """End the lease where its block is left.

        On a `GeneratorExit` this may be the collector, at any allocation of any thread, perhaps
        while a lock is held that the end needs: so the lease's loop ends it in a turn of its own,
        or the loop that takes over from a closed one.
        """
        lease = self._granted_lease()
        if kind is None:
            lease.end()
        elif kind is GeneratorExit:
            self._is_left = True
            lease.poller.loop.call_threadsafe(lease.abandon)
        else:
            lease.abandon()

    async def _wait_closed(self) -> None:
        """Wait until all work of an ended lease is done."""
        lease = self._lease
        if lease is not None and not lease.is_closed:
            try:
                await lease.wait_closed()
            except BaseException:  # a cancellation
                lease.abandon_compilations()
                raise

    def _raise_unretrieved(self) -> None:
        """Raise the first failure of a job that was not retrieved, or what ended everything."""
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
        """Return the lease, if it is open. From any thread."""
        lease = self._granted_lease()
        lease.check_open()
        return lease

    def _own_lease(self) -> Lease:
        """Return the lease, if it is open and of this thread's loop."""
        lease = self._granted_lease()
        lease.check_thread()
        lease.check_loop()
        return lease

    def _ready_lease(self) -> Lease:
        """Return the lease, if a job can be submitted now."""
        lease = self._lease or self._granted_lease()
        lease.check_ready()
        return lease

    def __del__(self) -> None:
        lease = self._lease
        if lease is not None and lease.is_open and not self._is_left:
            place = f", taken at {lease.taken_at}," if lease.taken_at else ""
            message = f"{self!r}{place} was never left: use it with `async with`"
            # First: where warnings are errors, nothing behind the warning happens.
            lease.poller.loop.call_threadsafe(lease.abandon)
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    # -- between two pieces of work ----------------------------------------------------------------

    async def checkpoint(self, duration: Any = None, *, deadline: float | None = None) -> int:
        """Wait for all of the lease's work, let its SMs be changed, and return how many it has.

        A lease of a range of sizes, `sms=(8, 64)`, gives what it has above the least to queued
        requests, or takes up what is idle. It gives way with all of its SMs, and the checkpoint
        waits until it has some again, where a request of a higher priority, or one that has aged,
        does not fit otherwise. Any other lease keeps its SMs; its checkpoints tell its class that
        it could give them back. Between checkpoints nothing moves.

        Bound launches follow, and buffers stay valid; `stream` and `context` are others afterwards:
        read them again. A failed job does not raise here, but where it is awaited, or at the end. A
        checkpoint on trio; on asyncio it yields only where it waits. Cancelled while it waits for
        its work, it changes nothing; cancelled while it waits for SMs, the lease has ended.

        Args:
            duration: of the work until the next checkpoint, in seconds or a curve.
            deadline: the seconds from now in which that should be done; None: the class's
                `latency`. A policy that sizes leases uses both; nothing is refused or ended
                because of them.

        Raises:
            PartitionClosed, PoolClosed, DeviceLost: there is nothing to change any more.
            InvalidRequest: the partition's stream is capturing, or a wrong duration or deadline.
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
        if lease.executor is executor:  # else another task's checkpoint was first
            lease.check_capture()
            manager = self._lifecycle.manager()
            waiting = manager.checkpoint(lease, duration, deadline)
            if waiting is not None:
                await manager.wait_to_go_on(lease, waiting)
        return self._open_lease().executor.sm_count

    def idle(self) -> IdleBlock:
        """Open a block in which the partition has no SMs, for a holder that waits for work.

            async with p.idle():
                request = await requests.get()

        Entering waits for all of the lease's work, and gives all SMs back. Leaving asks for the
        same again, as a request of its class, and waits for it: at most the budget of the class
        where its reserve has the least. Inside, nothing can be submitted: `WouldBlock`. Bound
        launches follow, and buffers stay valid; read `stream` and `context` again afterwards.

        Entering raises as `checkpoint`; cancelled, it changes nothing. Leaving raises
        `TooManySMs`, if the classes have changed, `PoolClosed` or `DeviceLost`. A block that is
        left by a cancellation, or whose end is cancelled, ends the lease.
        """
        return IdleBlock(self)

    async def _begin_idle(self) -> None:
        lease = self._own_lease()
        lease.check_ready()
        if lease.poller.loop.always_yields:
            await lease.poller.loop.checkpoint()
        await lease.wait_idle()
        self._open_lease().check_capture()
        self._lifecycle.manager().begin_idle(lease)

    async def _end_idle(self, kind: type[BaseException] | None) -> None:
        lease = self._granted_lease()
        if kind is not None and not issubclass(kind, Exception):
            lease.poller.loop.call_threadsafe(lease.end)  # perhaps the collector ends the block
        else:
            await self._lifecycle.manager().end_idle(lease)

    # -- facts -------------------------------------------------------------------------------------

    @property
    def sm_count(self) -> int:
        """The SMs that were granted: never fewer than asked for, often a few more."""
        return self._open_lease().executor.sm_count

    @property
    def is_shared(self) -> bool:
        """Whether it shares all SMs of the device with other leases: see `ServiceClass.shared`."""
        return self._open_lease().grant.is_shared

    @property
    def max_cluster_size(self) -> int:
        """Blocks of the largest thread-block cluster that surely fits here.

        1: the device has no clusters (below compute capability 9.0). 2: the pool splits finely, or
        these are the SMs that the split of the device left over.
        """
        return self._open_lease().executor.max_cluster_size

    @property
    def device(self) -> Device:
        """Its device."""
        return self._open_lease().executor.device

    @property
    def device_id(self) -> int:
        """The ordinal of its device."""
        return self._open_lease().ordinal

    @property
    def stream(self) -> Stream:
        """The stream of its launches and copies, for libraries that take one.

        The end of the lease waits for what libraries put there. While it is capturing, nothing can
        be submitted here: await what was submitted before you begin a capture. A capture that is
        open when the lease ends is dropped.

        Raises:
            WouldBlock: something was submitted that is not on the stream yet (a first use, a large
                copy): the work of a library would go before it. Await it first.
        """
        lease = self._open_lease()
        lease.check_pool()
        if not (lease.all_submitted or lease.launch_stream.is_idle):
            raise WouldBlock("not all that was submitted is on the stream yet: await it first")
        lease.share_stream()
        return lease.launch_stream.stream

    @property
    def context(self) -> Context:
        """Its green context. Current on one thread at a time; never across an `await`."""
        lease = self._open_lease()
        lease.check_pool()
        lease.expect_foreign_work()
        return lease.executor.context

    def __cuda_stream__(self) -> tuple[Literal[0], int]:
        """Stand for the stream wherever libraries take one."""
        return self.stream.__cuda_stream__()

    # -- launching ---------------------------------------------------------------------------------

    def launch(self, config: LaunchConfig, kernel: Kernel, *args: object) -> Job[None]:
        """Launch a kernel and return at once.

        A kernel's first use on these SMs goes through a thread of the partition, which compiles
        and loads it, and so does what is submitted behind it until then.

        Args:
            config: the grid, the block and the dynamic shared memory.
            kernel: the kernel to launch.
            args: as the kernel's parameters: a `Buffer` or `PinnedBuffer` for each pointer, a
                number for each scalar. A pointer may also be an array of another library, in
                device memory and C order, by DLPack or `__cuda_array_interface__`: it is used
                where it lies, behind its producer's stream, and kept alive until the job is done.

        Raises:
            ArgumentMismatch: wrong number or kind of arguments; an array in host memory, not in C
                order, read-only where the parameter is not const, or one that its library refuses
                to export.
            InvalidArray: an array that is not in the memory of any device, whatever it says.
            InvalidLaunch: a grid, block or shared memory beyond the device.
            NotSimulable: simulated, and the kernel has no reference or no cost.

        What shows only later (a compile error, the driver's refusal) is the job's failure.
        """
        return launches.launch(self._lease or self._granted_lease(), config, kernel, args)

    def prepare(self, config: LaunchConfig, kernel: Kernel) -> Job[None]:
        """Compile and load a kernel for these SMs, so that no later launch waits for that.

        It happens on the partition's own thread, behind the calls submitted before. A driver may
        delay a kernel's first load until everything that runs on the device is done (seen on an
        H200, driver 580): give the kernels of a service to `Pool(prepare=[...])`, which does this
        for every partition. Later launches and `bind` may have any geometry.

        Raises:
            InvalidLaunch, NotSimulable: as `launch`.
        """
        return launches.prepare(self._ready_lease(), config, kernel)

    def bind(self, config: LaunchConfig, kernel: Kernel, *args: object) -> BoundLaunch:
        """Check and pack a launch once, to launch it often at the cost of the driver's call.

        Raises:
            WouldBlock: the kernel was not loaded for these SMs: `await prepare(config, kernel)`.
            ArgumentMismatch, InvalidLaunch, NotSimulable: as `launch`.
        """
        lease = self._ready_lease()
        bound = BoundLaunch(lease, launches.prepare_bound(lease, config, kernel, args), kernel.name)
        lease.bound_launches.append(bound)
        return bound

    # -- memory ------------------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Job[Buffer]:
        """Allocate an uninitialised buffer on the device, for every partition of it.

        Raises:
            InvalidArray: a dtype that device memory cannot hold, or an impossible shape.

        The job fails with `OutOfMemory` if there is not enough.
        """
        return copies.empty(self._ready_lease(), shape, dtype)

    def empty_like(self, like: Buffer | Array) -> Job[Buffer]:
        """Allocate a buffer of the same shape and dtype. Raises and fails as `empty`."""
        if not isinstance(like, (Buffer, np.ndarray)):
            raise InvalidArray(
                f"empty_like() takes a Buffer or a numpy array, not a {type(like).__name__}"
            )
        return self.empty(like.shape, like.dtype)

    def empty_pinned(
        self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32
    ) -> Job[PinnedBuffer]:
        """Allocate zeroed host memory that the device accesses directly. Fails as `empty`."""
        return copies.empty_pinned(self._ready_lease(), shape, dtype)

    def upload(
        self, array: npt.ArrayLike, *, progress: ProgressCallback | None = None
    ) -> Job[Buffer]:
        """Copy an array to new device memory, in C order, whatever its strides.

        A large array must not change until the job is done; one of at most 64 KiB is read at once.
        A device never reads it: a thread copies large ones through chunks of pinned memory.

        Args:
            array: anything that numpy converts to an array; or a device array, as in `launch`,
                which the device copies.
            progress: called on this loop's thread with the bytes done, which never decrease, and
                the bytes in all, and with all of them before the job is done. An exception stops a
                large copy between two chunks and fails the job.

        Raises:
            InvalidArray: Python objects, big-endian numbers, or not an array.

        The job fails with `OutOfMemory` if there is not enough. Cancelling a task that awaits it
        stops the waiting only: the copy goes on, and the array is in use until the job is done. To
        stop the copy itself, raise in `progress`.
        """
        return copies.upload(self._ready_lease(), array, progress)

    def download(
        self,
        buffer: Buffer | DeviceArray,
        out: Array | None = None,
        *,
        progress: ProgressCallback | None = None,
    ) -> Job[Array]:
        """Copy a buffer to a numpy array: a new one, or `out`.

        `out` is in use until the job is done, also where no task awaits it any more; a job that
        failed, or was stopped by `progress`, may leave it half written. A device never writes it
        directly, but through pinned memory.

        Args:
            buffer: of this device; or a device array of another library, as in `launch`.
            out: of the same shape and dtype, with any strides.
            progress: as of `upload`.

        Raises:
            InvalidArray: `out` is read-only, or of another shape or dtype; or a device array that
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
        """Copy a buffer, or an array, into an existing buffer of the same shape and dtype.

        An array must not change until the job is done, unless it has at most 64 KiB.

        One of two buffers may be of another device of the pool. The copy is ordered behind what
        writes or reads them there, as here. It goes directly from device to device where the
        hardware can; else a thread copies chunks through pinned memory.

        Args:
            dst: written: a buffer, or a device array of another library, as in `launch`.
            src: read: the same, or an array of the host.
            progress: as of `upload`. A copy of device memory with `progress` goes in parts of 64
                MiB.

        Raises:
            InvalidArray: different shapes or dtypes, or a device array that cannot be used.
            WrongDevice: neither is of this device, or one is of a device outside the pool.
        """
        return copies.copy(self._ready_lease(), dst, src, progress)

    def prefetch(self, arrays: Iterable[npt.ArrayLike]) -> Prefetcher:
        """Upload arrays one after another, each while work on the one before it runs.

            async for x in p.prefetch(batches):
                p.launch(config, kernel, x, ...)

        The copy of the next array runs beside the launches, by a stream and a thread of its own,
        from the moment a buffer is returned; the launches need not be awaited. Each buffer is
        complete when it is returned, may be used until the next but one is asked for, and is closed
        then, behind its last use; all are closed when the iteration ends or is given up. At most
        three exist at a time: asking for one waits until the work on the one before the last is
        done.

        Args:
            arrays: iterated one ahead, on this loop's thread. An array must not change until its
                buffer is returned. They may differ in shape and dtype.

        Raises:
            InvalidRequest: `arrays` cannot be iterated over.

        Asking for the next buffer raises as `upload`, and as its copy fails. A cancellation stops
        the waiting only: the copy in progress goes on, and ends.
        """
        return Prefetcher(self._ready_lease, arrays)

    # -- blocking callables ------------------------------------------------------------------------

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Call a blocking function on the partition's own thread, on these SMs.

        The green context is current there, and the call stream is ordered behind what was
        submitted before; what is submitted later is ordered behind the call only once the call was
        awaited. The job is done when the call has returned and its work on the call stream is
        done. A call that no task awaits any more runs to its end, and the SMs stay until then.

        Buffers among the arguments are kept in order as in a launch, and count as written. The call
        sees a copy of its caller's context variables. The integration of a library, if imported
        (`greensched.integrations.torch`, for example), sets its current stream; `current_call()`
        describes the SMs and the stream.
        """
        return calls.submit_call(self._ready_lease(), fn, args, kwargs)

    def capture(self, fn: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> Job[Graph]:
        """Capture the work of a function as a CUDA graph, to be launched again and again.

        `fn` is called as by `run`, with the stream capturing (relaxed mode): what it puts on
        `current_call().stream` is recorded, and does not run. It is called again, with the same
        arguments, for each other set of SMs on which the graph is launched, and must put the same
        work there. Its return value is kept as long as what it recorded.

        The graph uses the buffers among the arguments, which count as written, and those that
        `fn` gives to `launch(current_call().stream, ...)`. Prepare the kernels before.

        Raises:
            InvalidRequest, WouldBlock: as `run`.

        The job fails with what `fn` raises, and with `InvalidCapture` if nothing was recorded or
        the capture became invalid, for example by waiting for the device; nothing is left of it
        then. Cancelling a task that awaits it stops the waiting only; the graph is then closed as
        soon as it is made.
        """
        return graphs.capture(self._ready_lease(), fn, args, kwargs)

    def keep_alive(self, *things: object) -> Job[None]:
        """Keep objects alive until the device has done what was submitted here so far.

        For arrays of other libraries that work on `stream` uses: a library may reuse their memory
        as soon as nothing refers to them. Returns at once; the job is done when that work is.
        Cancelling a task that awaits it changes nothing.

        Raises:
            PartitionClosed, PoolClosed, DeviceLost, WrongThread: as `launch`.
            InvalidRequest: the partition's stream is capturing.
        """
        lease = self._own_lease()
        lease.check_pool()
        return calls.keep_alive(lease, things)

    @property
    def call(self) -> CallContext:
        """Its launch stream and SMs, for integrations whose blocks work there, too.

        Raises:
            WouldBlock: as `stream`.
        """
        lease, _ = self._open_lease(), self.stream
        return lease.context_on(lease.launch_stream)

    def local(self, factory: Callable[[], T]) -> Job[T]:
        """Return what a function makes for these SMs: made once, then kept for every lease of them.

        For what partitions must not share: handles of libraries, workspaces, communicators,
        graphs. The first time `factory()` is called as by `run`; the function is the key of its
        value, so give the same one each time. Later, the job is done at once. Another set of SMs
        has a value of its own. When the green context of the SMs is closed, at the end of the pool
        at the latest, `value.close()` is called, if it exists, on the same thread with the same
        context.

        Raises:
            InvalidRequest: not a function, a coroutine function, or not hashable.

        What the factory raises is the job's failure, and nothing is kept: the next call tries
        again. It fails with `InvalidRequest` if 64 others are kept. Cancelling a task that awaits
        it stops the waiting only: the value is made, and kept. After a device fault, or over work
        that does not end, nothing is closed.
        """
        return calls.local(self._ready_lease(), factory)

    # -- waiting for capacity ----------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until a job or a bound launch can be submitted. A cancellation changes nothing.

        Raises:
            PartitionClosed, PoolClosed, DeviceLost: there is nothing to wait for any more.
            InvalidRequest: the partition's stream is capturing.
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
        """Wait for the partition's work, and give its SMs back."""
        await self._partition._begin_idle()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Wait until the partition has SMs again."""
        await self._partition._end_idle(kind)


class PartitionGroup(AsyncBlock):
    """Several partitions of one request: granted, entered and ended together."""

    def __init__(self, lifecycle: PoolLifecycle, request: LeaseRequest) -> None:
        self._lifecycle = lifecycle
        self._request = request
        self._is_entered = False
        self._partitions: tuple[Partition, ...] = ()

    async def __aenter__(self) -> tuple[Partition, ...]:
        """Wait for the SMs of all. Waits and raises as `Partition.__aenter__`."""
        if self._is_entered:
            raise InvalidRequest("these partitions were entered already: ask for others")
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
        """End all of them, then wait for each; raise the first failure."""
        for partition in self._partitions:
            partition._end_block(kind)
        if kind is None:
            for partition in self._partitions:
                await partition._wait_closed()
            for partition in self._partitions:
                partition._raise_unretrieved()
