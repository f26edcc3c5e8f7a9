"""The lease of an executor: what `async with pool.partition(...)` yields."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal, NoReturn, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from greensched.context import Context
from greensched.device.buffers import Buffer, PinnedBuffer
from greensched.device.device import Device
from greensched.device.launch import LaunchConfig
from greensched.device.streams import Stream
from greensched.errors import (
    InvalidArray,
    InvalidRequest,
    PartitionClosed,
    WouldBlock,
)
from greensched.execution import calls, copies, graphs, launches
from greensched.execution.bound_launch import BoundLaunch
from greensched.execution.call_context import CallContext
from greensched.execution.graphs import Graph
from greensched.execution.jobs import Job
from greensched.execution.lease import Lease
from greensched.execution.prefetch import Prefetcher
from greensched.execution.progress import ProgressCallback
from greensched.kernels import Kernel
from greensched.leasing.asking import Asker, Grantor
from greensched.typing import DeviceArray

P = ParamSpec("P")
T = TypeVar("T")
Array = npt.NDArray[Any]


class Partition(Asker["Partition"]):
    """SMs of one device, leased to one task at a time; made by `pool.partition(...)`.

    Inside its `async with` block: submit work, await it or leave it. Leaving the block normally
    waits for all of it and raises the first failure that nobody has seen; leaving it by an
    exception or a cancellation does not wait: the SMs go back when the device is done with them.

    Launches and copies happen in the order in which they are submitted. All methods that return a
    `Job` check everything first and raise, before anything is submitted:

    * `PartitionClosed` outside the block; `PoolClosed`, `DeviceLost`, `ForkedPool` when too late;
    * `WouldBlock` at the bound of jobs in flight: `await drain()` first;
    * `BufferClosed`, `WrongDevice` for a buffer that cannot be used here;
    * `InvalidRequest` while the partition's stream is capturing;
    * `WrongThread` on another thread than the one whose loop entered it. What has been submitted
      may be awaited anywhere, and the facts may be read anywhere.
    """

    __slots__ = ("__weakref__", "_is_left")

    def __init__(
        self,
        grantor: Grantor,
        wish: Any,
        granted: Lease | None = None,
        is_entered: bool = False,
    ) -> None:
        self._desk = grantor
        self._wish = wish
        self._is_entered = is_entered
        self._leased = granted
        #: Its block was left, and its lease may be somebody else's by now.
        self._is_left = False

    # -- being leased ------------------------------------------------------------------------------

    def _refuse(self) -> NoReturn:
        if self._leased is not None or self._is_left:
            self._open()
        raise InvalidRequest("this partition is entered already: ask for another")

    def _have(self, leases: tuple[Lease, ...]) -> Self:
        (self._leased,) = leases
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Ends the lease; see the class. A cancellation while it waits only stops the waiting."""
        lease = self._leased
        if lease is not None and kind is not GeneratorExit and self._desk.park(self._wish, lease):
            self._leased, self._is_left = None, True
            return
        self.leave(kind)
        if kind is None:
            await self.finish()
            self.raise_unseen()

    def leave(self, kind: type[BaseException] | None) -> None:
        """Ends it where its block is left.

        By a `GeneratorExit` the collector may leave it, at any allocation of any thread, perhaps
        while a lock is held that the end needs. Then its loop ends it in a turn of its own, or
        whichever loop takes over from a closed one.
        """
        lease = self._leased or self._granted()
        if kind is GeneratorExit:
            self._is_left = True
            lease.poller.loop.call_threadsafe(lease.end)
        else:
            lease.end()

    def end(self) -> None:
        """Nothing more is submitted; the SMs go back when the work is done. Does not wait.

        Idempotent: the lease may have ended already, with its loop.
        """
        if not self._is_left and self._granted().is_open:
            self._mine().end()

    async def finish(self) -> None:
        """Waits until all work of an ended lease is done."""
        lease = self._leased
        if lease is not None and not lease.is_closed:
            await lease.wait_closed()

    def raise_unseen(self) -> None:
        """Raises the first failure of a job that nobody has seen, or what ended everything."""
        lease = self._leased
        if lease is None:
            return
        unseen = lease.unretrieved_error
        if unseen is not None:
            raise unseen
        if lease.launch_stream.health.is_over:
            raise lease.launch_stream.health.error()

    def _granted(self) -> Lease:
        if self._leased is None:
            state = "closed" if self._is_left else "not granted: use it with `async with`"
            raise PartitionClosed("this partition", state)
        return self._leased

    def _open(self) -> Lease:
        lease = self._granted()
        lease.check_open()
        return lease

    def _ready(self) -> Lease:
        """The lease, where a job can be submitted now; raises what is in the way."""
        lease = self._leased
        if lease is None:
            lease = self._open()
        lease.check_ready()
        return lease

    def _mine(self) -> Lease:
        lease = self._granted()
        lease.check_thread()
        return lease

    def __del__(self) -> None:
        lease = self._leased
        if lease is not None and lease.is_open and not self._is_left:
            said = f"{self!r} was never left: use it with `async with`"
            # First: where warnings are errors, nothing after one is done.
            lease.poller.loop.call_threadsafe(lease.end)
            warnings.warn(said, ResourceWarning, stacklevel=2, source=self)

    # -- between two pieces of work ----------------------------------------------------------------

    async def checkpoint(self, duration: Any = None, *, deadline: float | None = None) -> int:
        """Waits for all of the lease's work, then lets its SMs be changed; how many it has now.

        A lease of a range of sizes, `sms=(8, 64)`, gives what it has above the least to whoever
        waits for it, or takes up what is idle. Any other lease keeps its SMs, and tells its class
        by this that it could give them back. Between checkpoints nothing moves.

        Bound launches follow, buffers stay valid; `stream` and `context` are others afterwards: ask
        for them again. A failed job does not show here, but where it is awaited, or at the end. A
        checkpoint on trio; on asyncio it yields only where it waits. Cancelled while it waits, it
        changes nothing; the change itself waits for nothing. `duration`: of what comes next;
        `deadline`: the seconds from now in which that should be done; None: its class's `latency`.
        A policy that sizes leases goes by both; nothing is refused or ended because of them.

        Raises:
            PartitionClosed, PoolClosed, DeviceLost: there is nothing to change any more.
            InvalidRequest: the partition's stream is capturing, or that is no duration or deadline.
        """
        lease = self._mine()
        lease.check_capture()
        lease.check_pool()
        door = lease.poller.loop
        if door.always_yields:
            await door.checkpoint()
        executor = lease.executor
        await lease.wait_idle()
        self._open()
        if lease.executor is executor:  # else another task's checkpoint was first
            lease.check_capture()
            self._desk.checkpoint(lease, duration, deadline)
            if duration is not None:  # this lease has it, and no later one that gives none
                lease.reusable = False
        return self._open().executor.sm_count

    # -- facts -------------------------------------------------------------------------------------

    @property
    def sm_count(self) -> int:
        """The SMs it was granted: never fewer than were asked for, often a few more."""
        return self._open().executor.sm_count

    @property
    def is_shared(self) -> bool:
        """Whether it has all SMs beside others that have them, too: see `ServiceClass.shared`."""
        return self._open().grant.is_shared

    @property
    def max_cluster_size(self) -> int:
        """Blocks of the largest thread-block cluster that is sure to find room here.

        1: no clusters: the device has none (below compute capability 9.0). 2 where the pool cuts
        finely, or on what a device's cut left over.
        """
        return self._open().executor.max_cluster_size

    @property
    def device(self) -> Device:
        """Its device."""
        return self._open().executor.device

    @property
    def device_id(self) -> int:
        """The ordinal of its device."""
        return self._open().ordinal

    @property
    def stream(self) -> Stream:
        """The stream of its launches and copies, for libraries that take one.

        What others put there is waited for at the end of the lease. While it is capturing,
        nothing can be submitted here; await what was submitted before you begin a capture. One
        that is open when the lease ends is dropped.

        Raises:
            WouldBlock: something was submitted that is not on the stream yet (a first use, a large
                copy): what others put there now would go before it. Await that first.
        """
        lease = self._open()
        lease.check_pool()
        if not (lease.all_submitted or lease.launch_stream.is_idle):
            raise WouldBlock("not all that was submitted is on the stream yet: await it first")
        lease.share_stream()
        return lease.launch_stream.stream

    @property
    def context(self) -> Context:
        """Its green context. Current on one thread at a time; no `await` while it is."""
        lease = self._open()
        lease.check_pool()
        lease.expect_foreign_work()
        return lease.executor.context

    def __cuda_stream__(self) -> tuple[Literal[0], int]:
        """The partition stands for its stream wherever libraries take one."""
        return self.stream.__cuda_stream__()

    # -- launching ---------------------------------------------------------------------------------

    def launch(self, config: LaunchConfig, kernel: Kernel, *args: object) -> Job[None]:
        """Launches a kernel and returns at once.

        A kernel's first use on these SMs goes through a thread of ours, which compiles and loads
        it, and so does what is submitted behind it until then.

        Args:
            config: the grid, the block and the dynamic shared memory.
            kernel: the kernel to launch.
            args: as the kernel's parameters: a `Buffer` or `PinnedBuffer` for each pointer, a
                number for each scalar. A pointer may also be an array of another library, in
                device memory and C order, by DLPack or `__cuda_array_interface__`: it is used
                where it lies, behind its producer's stream, and kept alive until the job is done.

        Raises:
            ArgumentMismatch: wrong number or kind of arguments; an array in host memory, of other
                strides than C order's, read-only where the parameter is not const, or one that its
                library refuses to hand out.
            InvalidArray: an array that lies in no device's memory, whatever it says.
            InvalidLaunch: a grid, block or shared memory beyond the device.
            NotSimulable: simulated, and the kernel has no reference or no cost.

        What shows only later (a compile error, the driver's refusal) is the job's failure.
        """
        return launches.launch(self._ready(), config, kernel, args)

    def prepare(self, config: LaunchConfig, kernel: Kernel) -> Job[None]:
        """Compiles and loads a kernel for these SMs, so that no later launch waits for that.

        It happens on the partition's own thread, behind the calls submitted before. A driver may
        hold a kernel's first loading up until everything that runs on the device is done (seen
        on an H200, driver 580): what a service launches is best given to `Pool(prepare=[...])`,
        which does this for every partition. Later launches and `bind` may have any geometry.

        Raises:
            InvalidLaunch, NotSimulable: as `launch`.
        """
        return launches.prepare(self._ready(), config, kernel)

    def bind(self, config: LaunchConfig, kernel: Kernel, *args: object) -> BoundLaunch:
        """Checks and packs a launch once, for launching often at the driver's own price.

        Raises:
            WouldBlock: the kernel was not loaded for these SMs: `await prepare(kernel, config)`.
            ArgumentMismatch, InvalidLaunch, NotSimulable: as `launch`.
        """
        lease = self._ready()
        bound = BoundLaunch(lease, launches.prepare_bound(lease, config, kernel, args), kernel.name)
        lease.bound_launches.append(bound)
        return bound

    # -- memory ------------------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Job[Buffer]:
        """An uninitialised buffer on the device, usable by every partition of it.

        Raises:
            InvalidArray: a dtype that device memory cannot hold, or a shape that is none.

        The job fails with `OutOfMemory` where there is no room.
        """
        return copies.empty(self._ready(), shape, dtype)

    def empty_like(self, like: Buffer | Array) -> Job[Buffer]:
        """An uninitialised buffer of the same shape and dtype. Raises and fails as `empty`."""
        if not isinstance(like, (Buffer, np.ndarray)):
            raise InvalidArray(f"a Buffer or an array is needed, not a {type(like).__name__}")
        return self.empty(like.shape, like.dtype)

    def empty_pinned(
        self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32
    ) -> Job[PinnedBuffer]:
        """Zeroed host memory that the device reads and writes directly. Fails as `empty`."""
        return copies.empty_pinned(self._ready(), shape, dtype)

    def upload(
        self, array: npt.ArrayLike, *, progress: ProgressCallback | None = None
    ) -> Job[Buffer]:
        """Copies an array to new device memory, in C order, whatever its strides.

        A large array must not change until the job is done; one of at most 64 KiB is read at once.
        No device ever reads it: large ones go through chunks of pinned memory of ours, by a thread.

        Args:
            array: anything numpy takes for an array; or a device array, as in `launch`, which the
                device copies.
            progress: called on this loop's thread with the bytes done and the bytes in all, never
                backwards, and with all of them before the job gives its value. What it raises
                stops a large copy between two chunks and fails the job.

        Raises:
            InvalidArray: Python objects, big-endian numbers, or no array at all.

        The job fails with `OutOfMemory` where there is no room. Cancelling who awaits it stops the
        waiting only: the copy goes on, and the array is in use until `job.done()`. To stop the
        copy itself, raise in `progress`.
        """
        return copies.upload(self._ready(), array, progress)

    def download(
        self,
        buffer: Buffer | DeviceArray,
        out: Array | None = None,
        *,
        progress: ProgressCallback | None = None,
    ) -> Job[Array]:
        """Copies a buffer to a numpy array: a new one, or `out`.

        `out` is in use until the job is done, also where nobody waits for it any more; a job that
        failed, or was stopped by `progress`, may leave it half written. No device ever writes it:
        that goes through pinned memory of ours.

        Args:
            buffer: of this device; or a device array of another library, as in `launch`.
            out: of the same shape and dtype, with any strides.
            progress: as of `upload`.

        Raises:
            InvalidArray: `out` is read-only, or of another shape or dtype; or a device array that
                cannot be used, see `launch`.
        """
        return copies.download(self._ready(), buffer, out, progress)

    def copy(
        self,
        dst: Buffer | DeviceArray,
        src: Buffer | DeviceArray | Array,
        *,
        progress: ProgressCallback | None = None,
    ) -> Job[None]:
        """Copies a buffer, or an array, into an existing buffer of the same shape and dtype.

        An array must not change until the job is done, unless it has at most 64 KiB.

        One of two buffers may be of another device of the pool. The copy comes behind what writes
        or reads them there, as here. It goes straight from device to device where the hardware
        can; else in chunks through pinned memory of the host, by a thread of ours.

        Args:
            dst: written: a buffer, or a device array of another library, as in `launch`.
            src: read: the same, or an array of the host.
            progress: as of `upload`. A copy of device memory that is listened to goes in parts of
                64 MiB.

        Raises:
            InvalidArray: they differ in shape or dtype; or a device array that cannot be used.
            WrongDevice: neither is of this device, or one is of a device outside the pool.
        """
        return copies.copy(self._ready(), dst, src, progress)

    def prefetch(self, arrays: Iterable[npt.ArrayLike]) -> Prefetcher:
        """Uploads arrays one after another, each while work on the one before it runs.

            async for x in p.prefetch(batches):
                p.launch(config, kernel, x, ...)

        The copy of the next array runs beside the launches, by a stream and a thread of its own,
        from the moment a buffer is given; so it does not matter whether the launches are awaited.
        Each buffer is whole when it is given, may be used until the next but one is asked for, and
        is closed then, behind its last user; at the end, or where the iteration is given up, all
        are. Three of them exist at a time, at most: asking for one waits until the work on the one
        before the last is done.

        Args:
            arrays: asked for one ahead, on this loop's thread. An array must not change until its
                buffer is given. They may differ in shape and dtype.

        Raises:
            InvalidRequest: `arrays` cannot be iterated over.

        Asking for the next buffer raises what `upload` does, and what the copy failed with. A
        cancellation stops the waiting only: the copy that is under way goes on, and ends.
        """
        return Prefetcher(self._ready, arrays)

    # -- blocking callables ------------------------------------------------------------------------

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Calls a blocking function on the partition's own thread, on these SMs.

        The green context is current there, and the run stream is ordered behind what was
        submitted before; what is submitted later is ordered behind the call only once it was
        awaited. The job is done when the call has returned and what it put on the run stream is
        done. A call that nobody waits for any more runs to its end, and the SMs stay until then.

        Buffers among the arguments are kept in order as in a launch, and count as written.
        It sees the context variables of its caller, as they are now, and sets them for itself.
        Libraries with a current stream have it set where their integration was imported
        (`greensched.integrations.torch`, say); `current_call()` says there what SMs there are.
        """
        return calls.submit_call(self._ready(), fn, args, kwargs)

    def capture(self, fn: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> Job[Graph]:
        """Captures the work of a function as a CUDA graph, to be launched again and again.

        `fn` is called as by `run`, with the stream capturing (relaxed mode): what it puts on
        `current_call().stream` is recorded, and not done. It is called again, with the same
        arguments, for each other set of SMs the graph is launched on, and must put the same work
        there. What it returns lives as long as that.

        The graph uses the buffers among the arguments, which count as written, and those that
        `launch(current_call().stream, ...)` is given inside. Prepare the kernels before.

        Raises:
            InvalidRequest, WouldBlock: as `run`.

        The job fails with what `fn` raises, and with `InvalidCapture` where nothing was recorded
        or the capture was spoilt, by waiting for the device, say; nothing is left of it then.
        Cancelling who awaits it stops the waiting only; the graph is closed when it is made.
        """
        return graphs.capture(self._ready(), fn, args, kwargs)

    def keep_alive(self, *things: object) -> Job[None]:
        """Keeps things alive until the device has done what it was given here so far.

        For arrays of other libraries that work on `stream` uses: a library may give their memory to
        other work as soon as nobody has them. Returns at once; the job is done when that work is.
        Cancelling who awaits it changes nothing.

        Raises:
            PartitionClosed, PoolClosed, DeviceLost, WrongThread: as `launch`.
            InvalidRequest: the partition's stream is capturing.
        """
        lease = self._mine()
        lease.check_pool()
        return calls.keep_alive(lease, things)

    @property
    def call(self) -> CallContext:
        """Where its launches and copies go, for integrations whose blocks work there, too.

        Raises:
            WouldBlock: as `stream`.
        """
        lease, _ = self._open(), self.stream
        return lease.context_on(lease.launch_stream)

    def local(self, factory: Callable[[], T]) -> Job[T]:
        """What a function makes for these SMs: once, then the same to every lease of them.

        For what partitions must not share: handles of libraries, workspaces, communicators,
        graphs. The first time `factory()` is called as by `run`; its value is kept by the function
        itself, so give the same one each time. Later, the job is done at once. Another set of SMs
        has a value of its own. When the set is given up, at the end of the pool at the latest,
        `value.close()` is called, if there is one, on the same thread with the same context.

        Raises:
            InvalidRequest: it is no function, one that is to be awaited, or cannot be told apart
                from others (not hashable).

        What the factory raises is the job's failure, and nothing is kept: the next call tries
        again. It is `InvalidRequest` where 64 others have been given. Cancelling who awaits it
        stops the waiting only: the value is made, and kept. After a device fault, or over work that
        does not end, nothing is closed.
        """
        return calls.local(self._ready(), factory)

    # -- room --------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Waits until a job or a bound launch can be submitted. A cancellation changes nothing.

        Raises:
            PartitionClosed, PoolClosed, DeviceLost: there is nothing to wait for any more.
            InvalidRequest: the partition's stream is capturing.
        """
        lease = self._mine()
        lease.check_capture()
        for track in (lease.launch_stream, lease.executor.call_stream):
            while not lease.has_room(track) and not track.health.is_over:
                oldest = track.issued - lease.executor.depth + 1
                await lease.poller.wait(track, oldest)
        await lease.wait_for_bound_launches()
        lease.check_pool()

    def __repr__(self) -> str:
        lease = self._leased
        if lease is None:
            return f"<Partition: {self._wish}, {'closed' if self._is_left else 'not granted'}>"
        sms, state = lease.executor.sm_count, lease.state.value
        return f"<Partition: {sms} SMs of device {lease.ordinal}, {state}>"
