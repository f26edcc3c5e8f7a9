"""`Pool`: the SMs of one or more devices, leased to async tasks."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, Self, Unpack, get_args

import anyio

from greensched._asynclib import running_asyncio
from greensched._validation import Uncopyable, as_float, is_count, one_of, ordinals
from greensched.device.device import Device
from greensched.device.launch import LaunchConfig
from greensched.driver.interface import Driver
from greensched.errors import DeviceHung, GreenschedError, InvalidRequest
from greensched.execution.progress import ProgressCallback
from greensched.kernels import Kernel
from greensched.leasing.latency import LatencyCurve, default_sizes, measure
from greensched.leasing.manager import LeaseManager
from greensched.leasing.partition import Partition, PartitionGroup
from greensched.leasing.pool_lifecycle import PoolLifecycle, PoolOptions
from greensched.leasing.pool_state import CloseReport, PoolState
from greensched.leasing.pool_statistics import LeaseInfo, PoolStatistics
from greensched.leasing.prepared_executors import ExecutorInfo, executors, prepare_local
from greensched.leasing.preview import SplitPreview, preview
from greensched.leasing.requests import LeaseOptions, RequestParser, checked_kernels
from greensched.leasing.verification import Verification, verify
from greensched.leasing.watchdog import ExitPolicy, checked_exit_policy, checked_hang_after
from greensched.observability.snapshot import Snapshot, snapshots_of, take_snapshot
from greensched.observability.snapshot_server import SnapshotServer, checked_socket
from greensched.records import Record
from greensched.scheduling.allocator import Placement
from greensched.scheduling.policy import Policy, policy_named
from greensched.scheduling.queue import validate_bound
from greensched.scheduling.services import ServiceClass, validate_services
from greensched.typing import Granularity, Size, SupportsDevice, T

if TYPE_CHECKING:
    from greensched.leasing.sync import SyncPool
    from greensched.observability.pool_map import PoolMap
    from greensched.observability.trace import Trace

logger = logging.getLogger("greensched")

P = ParamSpec("P")

#: Seconds that `aclose` waits for leases to end, by default. Kubernetes' default leaves a process
#: 30 s between SIGTERM and SIGKILL, and a pool should not take most of them.
GRACE = 5.0
#: Default bound of queued requests: a second of work if each takes 1 ms.
MAX_WAITING = 1024


class Pool(Uncopyable):
    """SMs of one or more devices, leased to async tasks. Open it with `async with`.

    The constructor touches neither CUDA nor an event loop: call it at import, on any thread.
    Several loops, in several threads, may share a pool.

    Args:
        devices: Ordinals, or devices of cuda.core. None means every visible device.
        driver: A driver, `"cuda"`, or `"simulated:h200"`. None means the value of the environment
            variable `GREENSCHED_DRIVER`, or else CUDA. A simulation is never chosen by default.
        services: The service classes that `partition(service=...)` may name.
        policy: Which request is served next. `"fifo"`: the oldest. `"fair"`: shares of SM-time by
            the weights of the classes. `"deadline"`: the earliest deadline. `"sized"`: elastic
            leases get sizes by latencies and known durations. Or an object with the methods of
            `scheduling.policy.Policy`. In all named policies larger priority goes first.
        placement: Which device serves a request: `"spread"`, the one with most SMs free; `"pack"`,
            the one with fewest free where the request fits.
        max_waiting: The most requests queued at once; a further one raises `QueueFull`.
        granularity: `"coscheduled"` splits SMs so that thread-block clusters keep their size (8
            SMs on compute capability 9.0 and newer). `"fine"` splits as finely as possible (2
            SMs), but large clusters do not fit.
        workqueues: `"balanced"`: partitions share no hardware work queues, where possible, so that
            a full queue delays no other partition; needs CUDA 13.1. None: they share them.
        prepare: Kernels that every partition can launch or `bind` without waiting. Opening the pool
            compiles and loads them for each partition and sizes local memory for them. It then
            also allocates whatever else a lease may need: the chunks in which large copies
            are staged (8 MiB of pinned memory for each lease that can exist at once).
        reserve_bytes: Device memory, per device, that buffers get without waiting.
        socket: Where `greensched top` reads the pool. True: a Unix socket in the user's folder for
            such sockets, where `top` finds it. A path of at most 107 bytes: a socket there. False:
            no socket. Only this user can connect, from the first `open` until the pool is closed:
            of a pool that could not open it says why. Leases are timed. Linux only.
        hang_after: Seconds after which a kernel, copy or graph *hangs*, counted from its turn on
            its stream. Tasks that wait for it, or for later work on the same executor, then get
            `DeviceHung`, and its SMs are not granted until it ends. Set it far longer than any of
            them should take. A callable of `run` is not judged while it runs; bound launches are
            judged by the next ticket. None: no limit, unless a class sets one (`ServiceClass`).
        exit_policy: What happens to the process when work hangs or a device is lost, after the
            log entry: `"report"`, nothing more; `"terminate"`, it gets SIGTERM; `"exit"`, it exits
            at once with status 74.

    After `prepare`, and within `reserve_bytes`, leases of partitions made at `open` allocate
    nothing from the driver, except by `empty_pinned`, copies between devices, and callables given
    to `run`.
    """

    def __init__(
        self,
        devices: Sequence[int | SupportsDevice] | None = None,
        *,
        driver: str | Driver | None = None,
        services: Sequence[ServiceClass] = (),
        policy: str | Policy = "fifo",
        placement: Placement = "spread",
        max_waiting: int = MAX_WAITING,
        granularity: Granularity = "coscheduled",
        workqueues: Literal["balanced"] | None = None,
        prepare: Sequence[Kernel] = (),
        reserve_bytes: int = 0,
        socket: bool | str | os.PathLike[str] = False,
        hang_after: float | None = None,
        exit_policy: ExitPolicy = "report",
    ) -> None:
        classes = validate_services(services)
        one_of("placement", placement, get_args(Placement))
        one_of("granularity", granularity, get_args(Granularity))
        one_of("workqueues", workqueues, ("balanced", None))
        if not is_count(reserve_bytes):
            raise InvalidRequest(f"reserve_bytes={reserve_bytes!r}: give bytes, at least 0")
        self._parser = RequestParser(classes)
        self._lifecycle = PoolLifecycle(
            PoolOptions(
                driver=driver,
                devices=None if devices is None else ordinals(devices),
                services=classes,
                policy=policy_named(policy),
                placement=placement,
                max_waiting=validate_bound(max_waiting),
                fine=granularity == "fine",
                balanced=workqueues == "balanced",
                prepare=checked_kernels(prepare),
                reserve_bytes=reserve_bytes,
                hang_after=checked_hang_after(hang_after),
                exit_policy=checked_exit_policy(exit_policy),
            )
        )
        #: In asyncio's debug mode, from the first `async with` on.
        self._map: PoolMap | None = None
        if socket is not False:
            path, take = checked_socket(socket), snapshots_of(self._lifecycle)
            self._lifecycle.server = server = SnapshotServer(path, take)
            self._lifecycle.is_timed = True
            weakref.finalize(self, server.stop)

    @property
    def _manager(self) -> LeaseManager:
        return self._lifecycle.manager()

    # -- opening and closing ---------------------------------------------------------------------

    async def open(self) -> None:
        """Open the devices, split them, and make the partitions. Idempotent.

        A cancellation stops only the waiting: a thread continues to open the pool, and the next
        call of `open` waits for that thread.

        Raises:
            DriverUnavailable: There is no usable driver or device; says what to install or change.
            DeviceTaken: another pool of this process has the device.
            DeviceNotFound: A device does not exist.
            InvalidRequest: The classes' reserves do not fit.
            PoolClosed, DeviceLost, ForkedPool: the pool has ended.
            NotSupported: `workqueues` needs CUDA 13.1.
            CompileFailed, NotSimulable, ArgumentMismatch: a kernel of `prepare` cannot be loaded.
            OutOfMemory: A device has less free memory than `reserve_bytes`.
            CUDAError: The driver refused a call; nothing is left open.
            SocketUnavailable: The pool cannot listen at `socket`; nothing is left open.
            RuntimeError: No thread can be started; nothing is left open.
        """
        await self._lifecycle.open()

    async def aclose(self, grace: float = GRACE) -> CloseReport:
        """Close the pool: grant nothing more, let leases end, then release everything.

        Queued requests get `PoolClosed`; leases may end within the grace. Leases that are still
        open or have work after the grace are left as they are and reported, and tasks that wait for
        them get `PoolClosed`. Idempotent; any number of tasks may wait for it. A cancellation ends
        the grace at once, and a thread continues to close the pool.

        Args:
            grace: Seconds to wait for leases to end and work to drain. With several callers, the
                first grace to pass ends the wait for all.

        Raises:
            InvalidRequest: `grace` is not a number of seconds; nothing is closed.
        """
        seconds = as_float(grace)
        if not seconds >= 0:
            raise InvalidRequest(f"grace={grace!r}: give seconds, at least 0")
        return await self._lifecycle.close(seconds)

    async def __aenter__(self) -> Self:
        """Open the pool; see `open`. A cancellation meanwhile also closes it again.

        In asyncio's debug mode an error that leaves the block, and leases or work that outlast it,
        are logged with a map of the latest leases by SMs and time.
        """
        loop = running_asyncio()
        if self._map is None and loop is not None and loop.get_debug():
            from greensched.observability.pool_map import PoolMap

            self._map = PoolMap(snapshots_of(self._lifecycle))
            self.watch(self._map.add)
        try:
            await self.open()
        except GeneratorExit:
            self._lifecycle.abort()
            raise
        except anyio.get_cancelled_exc_class():
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close the pool, within the default grace, even if the block was cancelled.

        If garbage collection ends the block (GeneratorExit), it can neither wait nor take a lock
        that the interrupted thread may hold. A thread then closes the pool, without any grace.
        """
        if self.state is PoolState.FORKED:  # a forked child has no loop, and anyio finds none
            return
        if kind is GeneratorExit:
            self._lifecycle.abort()
            return
        is_error = isinstance(error, Exception)
        if is_error:
            self._log_map(logging.ERROR, "an error leaves the block of")
        with anyio.CancelScope(shield=True):
            report = await self.aclose()
        if report.abandoned and not is_error:
            self._log_map(logging.WARNING, "leases or work outlast the block of")

    def _log_map(self, level: int, what: str) -> None:
        """Log the map of the latest leases, in asyncio's debug mode."""
        if self._map is not None and self.devices:
            lines = self._map.lines(self.devices[0].driver.time())
            logger.log(level, "%s %r:\n%s", what, self, "\n".join(lines))

    def __enter__(self) -> NoReturn:
        raise InvalidRequest(
            "write `async with pool:`, or, on a thread without a loop, `with pool.sync:`"
        )

    def __exit__(self, *_: object) -> None:
        """Exist, so that Python calls `__enter__`."""

    def __del__(self, is_open: PoolState = PoolState.OPEN, warn: Any = warnings.warn) -> None:
        # The names are bound as defaults because at the interpreter's exit the module may have lost
        # them. The attribute is missing if the constructor raised.
        if hasattr(self, "_lifecycle") and self.state is is_open:
            try:
                warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)
            finally:
                self._lifecycle.pool_collected()

    # -- asking for SMs --------------------------------------------------------------------------

    def partition(self, sms: Size, **options: Unpack[LeaseOptions]) -> Partition:
        """Ask for a lease of SMs. Use the result with `async with`, which waits for them.

        Args:
            sms: How many: `16`; `(8, 64)`, as many up to 64 as are free once 8 are; `(8, ALL)`, as
                many as are free once 8 are; `ALL`, every SM of a device (`REST` means the same
                here; in `partitions` it means those that the other parts leave). The number is
                rounded up to what the device is split into; `Partition.sm_count` says what was
                granted.
            device: The ordinal of the only device allowed. None allows any device of the pool.
            service: The name of a class given to the pool, or None.
            deadline: Seconds from the request. A request not granted by then gets
                `DeadlineExceeded`. A granted lease is not ended. With `duration` the work should be
                done by then, too: if it cannot be, `DeadlineImpossible` is raised at once, or the
                class's `on_late` applies. None: the class's `latency`, for this second
                rule only.
            duration: Seconds that the lease is expected to last, or a curve of them by size. With
                it, the request can fill gaps that are closed to requests of unknown duration.
            near: Prefer this buffer's device if the request fits there.

        Raises:
            InvalidSize, InvalidRequest: A value can never be right.
        """
        return Partition(self._lifecycle, self._parser.parse(sms, options))

    def partitions(
        self, *sizes: Size, **options: Unpack[LeaseOptions]
    ) -> AbstractAsyncContextManager[tuple[Partition, ...]]:
        """Ask for several leases on one device, granted together, in the order of the arguments.

        They are one request: no lease is held while another is waited for. They are entered and
        ended together; `async with` on a single one is refused. `REST` stands for every SM of the
        device that no other part takes. Options and errors are those of `partition`.
        """
        return PartitionGroup(self._lifecycle, self._parser.parse_many(sizes, **options))

    def partition_nowait(self, sms: Size, **options: Unpack[LeaseOptions]) -> Partition:
        """Grant a lease at once or raise; never wait. Use the result with `async with`.

        Raises:
            WouldBlock: No SMs are free, or no green context over them exists yet.
            Others: Those of `partition`, and of its `async with`.
        """
        request = self._parser.parse(sms, options)
        lease = self._lifecycle.cache.take(request) or self._manager.acquire_nowait(request)
        return Partition(self._lifecycle, request, lease)

    async def launch(
        self,
        config: LaunchConfig,
        kernel: Kernel,
        *args: object,
        sms: Size,
        **options: Unpack[LeaseOptions],
    ) -> None:
        """Lease SMs, launch a kernel there, wait for it, and release the SMs.

        After a cancellation the kernel runs on and holds its SMs until it ends. Options and errors
        are those of `partition`.
        """
        async with self.partition(sms, **options) as p:
            await p.launch(config, kernel, *args)

    async def run(
        self, fn: Callable[..., T], /, *args: object, sms: Size, **options: Unpack[LeaseOptions]
    ) -> T:
        """Lease SMs, call a blocking function there, wait for it, and release the SMs.

        After a cancellation the call runs on and holds its SMs until it ends. Options and errors
        are those of `partition`.
        """
        async with self.partition(sms, **options) as p:
            return await p.run(fn, *args)

    def executors(self, service: str) -> tuple[ExecutorInfo, ...]:
        """Return the executors that leases of a class with `sizes` use. Never waits.

        A lease uses another executor only while all executors of its size are in use.

        Raises:
            InvalidRequest: There is no such class, or it has no `sizes`.
            PoolClosed, DeviceLost, ForkedPool: The pool does not work.
        """
        return executors(self._lifecycle, service)

    async def prepare_local(
        self,
        service: str,
        factory: Callable[[], Any],
        *,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Call `Partition.local(factory)` on every executor of a class, before traffic.

        Executors are leased one after another. Existing values are kept. `statistics().values_made`
        counts the values that leases make later. A cancellation keeps the values made so far, and
        waits for nothing.

        Args:
            service: the name of the class.
            factory: Called as by `Partition.local`; give the same function there.
            progress: Called on this loop's thread after each executor with two numbers: executors
                done, and executors in all.

        Raises:
            InvalidRequest: There is no such class, it has no `sizes`, or `factory` is not a
                function.
            WouldBlock: SMs of such an executor are leased, or requests wait.
            PoolClosed, DeviceLost, ForkedPool: The pool does not work.
            BaseException: `factory` raised it.
        """
        await prepare_local(self._lifecycle, service, factory, progress)

    async def measure(
        self,
        fn: Callable[..., Any],
        /,
        *args: object,
        sms: Sequence[int] | None = None,
        device: int | None = None,
        service: str | None = None,
    ) -> LatencyCurve:
        """Measure how long a piece of work takes on partitions of each size.

        Each size is leased 21 times, each time in its turn; the first run is not counted. After a
        cancellation only work that already runs continues.

        Args:
            fn: A blocking function, called as by `Partition.run`; or a coroutine function, called
                with the partition first: `async def step(p, ...)`. It should wait for its work.
            args: The arguments of `fn`, the same each time.
            sms: The sizes. None: all possible sizes, at most 17 of them.
            device: The ordinal of the device. None: the pool's first.
            service: The name of a class given to the pool.

        Raises:
            InvalidRequest, TooManySMs: The request can never be granted. `fn`'s errors, too.
        """
        first = self._manager.device_pools[0]
        ordinal = first.device.ordinal if device is None else device
        sizes = default_sizes(first.cells) if sms is None else sms
        clock = first.device.driver.time
        return await measure(self, clock, sizes, fn, args, device=ordinal, service=service)

    # -- changes ---------------------------------------------------------------------------------

    def reconfigure(
        self,
        *,
        services: Sequence[ServiceClass] | None = None,
        policy: str | Policy | None = None,
    ) -> None:
        """Change the classes or the policy while the pool runs. None keeps them. Never waits.

        Leases end under the rules they began under. Queued requests stay queued, in the new order;
        a request that can no longer ever be granted gets `TooManySMs`. Requests of a removed class
        are served without its reserve and cap. While older leases occupy a new reserve, its SMs are
        kept for its class as they become free.

        Raises:
            InvalidRequest: A class or the policy is invalid, or the reserves do not fit; nothing
                has changed.
            PoolClosed, DeviceLost, ForkedPool: the pool is not open.
        """
        classes = None if services is None else validate_services(services)
        self._manager.reconfigure(classes, None if policy is None else policy_named(policy))
        if classes is not None:
            self._parser = RequestParser(classes)

    def observe(self, service: str, latency: float, count: int = 1) -> None:
        """Report that `count` requests of a class had this latency, in seconds. Never waits.

        The latencies decide whether devices are split for `shared` classes. For a class without
        reported latencies, the time from a lease's request to its end is used.

        Raises:
            InvalidRequest: There is no such class, or `latency` or `count` is invalid.
            PoolClosed, DeviceLost, ForkedPool: the pool is not open.
        """
        self._parser.check_observed(service, latency, count)
        self._manager.observe(service, latency, count)

    # -- queries ---------------------------------------------------------------------------------

    @property
    def sync(self) -> SyncPool:
        """The pool for threads that run no loop, always the same object; see `SyncPool`."""
        from greensched.leasing.sync import SyncPool

        new_loop = getattr(self._lifecycle.options.driver, "new_event_loop", None)
        return self.__dict__.setdefault("_sync", SyncPool(self, new_loop))  # type: ignore[no-any-return]  # a SyncPool

    @property
    def state(self) -> PoolState:
        """The current state of the pool."""
        return self._lifecycle.state

    @property
    def is_ready(self) -> bool:
        """Whether the pool grants requests: the answer for a readiness probe."""
        return self.state is PoolState.OPEN

    @property
    def fault(self) -> BaseException | None:
        """The first device fault, or None."""
        return self._lifecycle.failure

    @property
    def opening_error(self) -> BaseException | None:
        """Why the last `open` failed, or None. A successful `open` clears it."""
        return self._lifecycle.opening_error

    @property
    def hung(self) -> tuple[DeviceHung, ...]:
        """An error for each executor on which work hangs now (see `hang_after`). Never waits."""
        pools = self._lifecycle.device_pools
        executors = [
            executor for device_pool in pools for executor in tuple(device_pool.executors.values())
        ]
        return tuple(executor.hang for executor in executors if executor.hang is not None)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, in the order they were given; empty before the pool is open."""
        return tuple(device_pool.device for device_pool in self._lifecycle.device_pools)

    def statistics(self) -> PoolStatistics:
        """Return figures of what the pool holds and has done, all from one moment."""
        return self._manager.statistics()

    def leases(self) -> list[LeaseInfo]:
        """Return the leases that hold SMs now, oldest first. Never waits.

        Raises:
            PoolClosed: the pool is not open.
        """
        return self._manager.held()

    def snapshot(self) -> Snapshot:
        """Return what each SM does and why requests wait, at one moment. From any thread.

        It waits only for the pool's lock. The snapshot of a pool that is not open has no devices.
        Waits and uses are timed from the call of `time_leases` on.
        """
        return take_snapshot(self._lifecycle)

    # -- watching --------------------------------------------------------------------------------

    def watch(self, callback: Callable[[Record], object]) -> Callable[[], None]:
        """Call a function with a record of each event from now on.

        The first records are a `Granted` for each lease that exists. Records come in order, one at
        a time, on the thread of the event or another thread of the pool, without a lock held. The
        function must not block; the first exception that it raises is logged. While there are
        watchers, leases are not cached for the next request of their size, and each bound launch
        has a ticket: both are slower. May be called before the pool is open. Never waits.

        Returns:
            A function that ends the watching.

        Raises:
            InvalidRequest: `callback` is not a function.
        """
        if not callable(callback):
            raise InvalidRequest(f"callback={callback!r}: give a function of one record")
        self._lifecycle.watch(callback)
        return partial(self._lifecycle.unwatch, callback)

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Write a Perfetto file of what happens while a block is open.

            async with pool, pool.trace("t.perfetto-trace"):
                ...

        The file has counters, and tracks for the queue, each device, each set of SMs and its jobs.
        Flows connect a request, its lease, its jobs and their ends. Times are the host's; see
        `Done.started` for a job's.
        A thread writes it while the pool runs, and the file is complete however the block ends:
        leases and requests that are still open end there in the trace. A file of that name is
        replaced. While the block is open the pool is watched; see `watch` for the cost.
        Entering and leaving the block wait for the disk, and a cancellation does not shorten the
        waits.

        Raises:
            MissingPackage: perfetto is not installed; says what to install.
            InvalidRequest: On entry or on leaving, the file could not be written.
            PoolClosed, DeviceLost, ForkedPool: On entry, the pool is not open.
        """
        from greensched.observability.trace import Trace

        return Trace(self._lifecycle, path)

    def time_leases(self) -> None:
        """Record from now on how long requests wait, and leases last and drain. Idempotent.

        `statistics().services` then has the histograms `wait`, `use` and `drain` of each class (the
        class `""` is for requests without one); `statistics().wake` shows a slow loop. Never waits.
        """
        self._lifecycle.time_leases()

    def preview(self, *sizes: Size) -> tuple[SplitPreview, ...]:
        """Return what `partitions(*sizes)` would get on each device if it were idle. Never waits.

        Nothing is leased or queued. For impossible sizes it says why, and the nearest possible
        ones.

        Raises:
            InvalidSize, InvalidRequest: The sizes are invalid on any device.
            PoolClosed: The pool is not open; only an open pool has split its devices.
        """
        return tuple(
            preview(device_pool.device, device_pool.cells, sizes)
            for device_pool in self._manager.device_pools
        )

    async def verify(self) -> Verification:
        """Prove on each device that partitions share no SM.

        Waits until it has every SM of each device in turn, so no other lease runs meanwhile. A
        cancellation ends it; its SMs are released once its kernels have ended.

        Raises:
            VerificationFailed: Two partitions shared an SM, or a kernel did not run on all SMs of
                its partition.
        """
        cells = {
            device_pool.device.ordinal: device_pool.cells
            for device_pool in self._manager.device_pools
        }
        return await verify(self.partitions, cells)

    def __repr__(self) -> str:
        try:
            s = self.statistics()
        except GreenschedError:
            return f"<Pool: {self.state.value}>"
        devices = "1 device" if s.devices == 1 else f"{s.devices} devices"
        hung = f"; {s.executors_hung} hung" if s.executors_hung else ""
        return (
            f"<Pool: {s.state.value}, {devices}, {s.sms_total} SMs: {s.sms_free} free, "
            f"{s.sms_leased} leased, {s.sms_draining} draining; {s.waiting} waiting{hung}>"
        )
