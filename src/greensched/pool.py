"""`Pool`: the SMs of one or more devices, leased to async tasks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, Self, TypeVar, Unpack, get_args

import anyio

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
from greensched.observability.snapshot import Snapshot, take_snapshot
from greensched.observability.snapshot_server import SnapshotServer, checked_socket
from greensched.records import Record
from greensched.scheduling.allocator import Placement
from greensched.scheduling.policy import Policy, policy_named
from greensched.scheduling.queue import validate_bound
from greensched.scheduling.services import ServiceClass, validate_services
from greensched.typing import Granularity, Size, SupportsDevice

if TYPE_CHECKING:
    from greensched.leasing.sync import SyncPool
    from greensched.observability.trace import Trace

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds that `aclose` waits for leases to end, by default. A serving process has 30 s between
#: SIGTERM and SIGKILL by Kubernetes' default; a pool should not take most of it.
GRACE = 5.0
#: Requests queued at most, by default: a second of work at 1 ms each.
MAX_WAITING = 1024


class Pool(Uncopyable):
    """SMs of one or more devices, leased to async tasks. Open it with `async with`.

    The constructor touches neither CUDA nor an event loop: call it at import, on any thread.
    Several loops, in several threads, may share a pool.

    Args:
        devices: ordinals, or devices of cuda.core; None: every visible device.
        driver: a driver, `"cuda"`, or `"simulated:h200"`; None: the value of the environment
            variable `GREENSCHED_DRIVER`, or else CUDA. A simulation is never chosen by default.
        services: service classes, for `partition(service=...)`.
        policy: which request is next: `"fifo"`, the first that came; `"fair"`, shares of SM-time by
            the weights of the classes; `"deadline"`, the earliest deadline; `"sized"`, elastic
            leases as large as latencies and known durations say; or an object with the methods of
            `scheduling.policy.Policy`. Larger priority goes first in all of these.
        placement: which of several devices: `"spread"`, the one with most SMs free; `"pack"`, the
            one with fewest free where the request fits.
        max_waiting: requests queued at most; beyond that, `QueueFull`.
        granularity: `"coscheduled"` splits SMs so that thread-block clusters keep their size (8
            SMs on compute capability 9.0 and newer); `"fine"` splits as finely as possible (2
            SMs), which gives up large clusters.
        workqueues: `"balanced"`: partitions share no work queues of the device, where possible, so
            that a full queue delays no other partition. Needs CUDA 13.1. None: they share.
        prepare: kernels that every partition can launch, or `bind`, without waiting: opening the
            pool compiles and loads them for each partition and sizes local memory for them. It
            then also allocates whatever else a lease may need: the chunks in which large copies
            are staged (8 MiB of pinned memory for each lease that can exist at once).
        reserve_bytes: device memory that the buffers of each device never have to wait for.
        socket: where `greensched top` reads the pool: a Unix socket for this user alone, from the
            opening to the closing, on a thread of its own. True: in the user's folder for such
            files, where it is found; or a path of at most 107 bytes. False: nowhere. Linux only.
        hang_after: seconds after which a kernel, copy or graph *hangs*, counted from its turn on
            its stream: whatever waits for it, or for what stands behind it on the same executor,
            raises `DeviceHung`, and its SMs are not granted until it ends. Far longer than any of
            them should take; a callable of `run` is not judged while it runs, and bound launches
            by the ticket behind them. None: never, unless a class says so (`ServiceClass`).
        exit_policy: what happens to the process when work hangs, or a device is lost, behind the
            line in the log: `"report"`, nothing more; `"terminate"`, it gets SIGTERM; `"exit"`,
            it exits at once with status 74.

    After `prepare`, and within `reserve_bytes`, no lease of a partition made at `open` makes the
    driver allocate anything, except by `empty_pinned`, copies between devices, and callables given
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
        if socket is not False:
            take = partial(take_snapshot, self._lifecycle)
            self._lifecycle.server = SnapshotServer(checked_socket(socket), take)

    @property
    def _manager(self) -> LeaseManager:
        return self._lifecycle.manager()

    # -- opening and closing ---------------------------------------------------------------------

    async def open(self) -> None:
        """Open the devices, split them, and make the partitions. Idempotent.

        A cancellation only stops the waiting: the opening goes on, on a thread, and the next
        `open` waits for the same one.

        Raises:
            DriverUnavailable: no usable driver or device; says what to install or change.
            DeviceTaken: another pool of this process has the device.
            InvalidRequest: no such device, or the reserves of the classes do not fit on them.
            PoolClosed, DeviceLost, ForkedPool: the pool has ended.
            NotSupported: `workqueues` on a driver below CUDA 13.1.
            CompileFailed, NotSimulable, ArgumentMismatch: a kernel of `prepare` cannot be loaded.
            OutOfMemory: there is less than `reserve_bytes`.
            CUDAError: the driver refused something; nothing is left open.
            SocketUnavailable: `socket` cannot be listened at; nothing is left open.
            RuntimeError: no thread can be started; nothing is left open.
        """
        await self._lifecycle.open()

    async def aclose(self, grace: float = GRACE) -> CloseReport:
        """Close the pool: grant nothing more, let leases end, then end everything.

        Queued requests get `PoolClosed`; leases may end within the grace. What is still leased or
        has work after it is left as it is, and reported, and tasks that wait for it get
        `PoolClosed`. Idempotent; any number of tasks may wait for it. A cancellation ends the grace
        at once, and the closing goes on, on a thread.

        Args:
            grace: seconds to wait for leases to end and work to drain. Of several callers, the
                first whose grace is over ends it for all.

        Raises:
            InvalidRequest: not a number of seconds; nothing is closed.
        """
        seconds = as_float(grace)
        if not seconds >= 0:
            raise InvalidRequest(f"grace={grace!r}: give seconds, at least 0")
        return await self._lifecycle.close(seconds)

    async def __aenter__(self) -> Self:
        """Open the pool, see `open`. A cancellation meanwhile also closes it again."""
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
        """Close the pool, within the default grace, also where the block was cancelled.

        If the collector ends the block (GeneratorExit), it can neither wait nor take a lock, which
        the interrupted thread may hold: a thread closes the pool, without any grace.
        """
        if self.state is PoolState.FORKED:  # a child has no loop, nor would anyio find one
            return
        if kind is GeneratorExit:
            self._lifecycle.abort()
            return
        with anyio.CancelScope(shield=True):
            await self.aclose()

    def __enter__(self) -> NoReturn:
        raise InvalidRequest(
            "write `async with pool:`, or, on a thread without a loop, `with pool.sync:`"
        )

    def __exit__(self, *_: object) -> None:
        """Exist, so that Python calls `__enter__`."""

    def __del__(self, is_open: PoolState = PoolState.OPEN, warn: Any = warnings.warn) -> None:
        # Bound as defaults, because at the interpreter's end the module may have lost them. The
        # constructor may have raised before there was a lifecycle.
        if hasattr(self, "_lifecycle") and self.state is is_open:
            try:
                warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)
            finally:
                self._lifecycle.pool_collected()

    # -- asking for SMs --------------------------------------------------------------------------

    def partition(self, sms: Size, **options: Unpack[LeaseOptions]) -> Partition:
        """Ask for a lease of SMs, to be used with `async with`, which waits for them.

        Args:
            sms: how many: `16`; `(8, 64)`: as many up to 64 as are free once 8 are; `(8, ALL)`: as
                many as are free; `ALL` SMs of a device (`REST` means the same here; in
                `partitions` it means those that the other parts leave). Rounded up to what the
                device is split into; `Partition.sm_count` says what was granted.
            device: the ordinal of the only device allowed; None: any of the pool.
            service: the name of a class given to the pool; None: none.
            deadline: seconds from the request: if not granted by then, `DeadlineExceeded`. Once
                granted it means nothing. With `duration` the work should be done by then, too: if
                that is known to be impossible, `DeadlineImpossible` at once, or what the class
                says (`on_late`). None: its `latency`, for that rule alone.
            duration: seconds that the lease is expected to last, or a curve of them by size. A
                request that says it can use gaps that are closed to others.
            near: prefer this buffer's device where the request fits there.

        Raises:
            InvalidSize, InvalidRequest: what can never be right.
        """
        return Partition(self._lifecycle, self._parser.parse(sms, options))

    def partitions(
        self, *sizes: Size, **options: Unpack[LeaseOptions]
    ) -> AbstractAsyncContextManager[tuple[Partition, ...]]:
        """Ask for several leases on one device, granted together, in the order of the arguments.

        They are one request: none is held while another is waited for. They are entered together
        and end together: `async with` on one of them is refused. `REST` stands for every SM of the
        device that is not in the same request. Options and errors as `partition`.
        """
        return PartitionGroup(self._lifecycle, self._parser.parse_many(sizes, **options))

    def partition_nowait(self, sms: Size, **options: Unpack[LeaseOptions]) -> Partition:
        """Grant a lease at once, still to be used with `async with`; never wait.

        Raises:
            WouldBlock: no SMs are free, or no green context over them is made yet.
            Others: as `partition`, and as its `async with`.
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
        """Lease SMs, launch a kernel there, wait for it, and give the SMs back.

        A cancellation leaves the kernel running, and its SMs held until it ends. Options and
        errors as `partition`.
        """
        async with self.partition(sms, **options) as p:
            await p.launch(config, kernel, *args)

    async def run(
        self, fn: Callable[..., T], /, *args: object, sms: Size, **options: Unpack[LeaseOptions]
    ) -> T:
        """Lease SMs, call a blocking function there, wait for it, and give the SMs back.

        A cancellation leaves the call running, and its SMs held until it ends. Options and errors
        as `partition`.
        """
        async with self.partition(sms, **options) as p:
            return await p.run(fn, *args)

    def executors(self, service: str) -> tuple[ExecutorInfo, ...]:
        """Return the executors that leases of a class with sizes meet. Never waits.

        Leases have others only while those of their size are leased otherwise.

        Raises:
            InvalidRequest: there is no such class, or it names no sizes.
            PoolClosed, DeviceLost, ForkedPool: the pool does not work.
        """
        return executors(self._lifecycle, service)

    async def prepare_local(
        self,
        service: str,
        factory: Callable[[], Any],
        *,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Make `Partition.local(factory)` of every executor of a class, before traffic.

        On one executor after another, each leased meanwhile. What exists already is kept.
        `statistics().values_made` counts what was made later, in leases. A cancellation leaves what
        was made so far, and waits for nothing.

        Args:
            service: the name of the class.
            factory: called as by `Partition.local`; give the same function there.
            progress: called on this loop's thread after each, with how many are done, and how many
                there are.

        Raises:
            InvalidRequest: there is no such class, it names no sizes, or `factory` is no function.
            WouldBlock: SMs of such an executor are leased, or requests wait.
            PoolClosed, DeviceLost, ForkedPool: the pool does not work.
            BaseException: what `factory` raised.
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

        Each size is leased 21 times, waiting its turn; the first is not counted. A cancellation
        leaves nothing behind but what already runs.

        Args:
            fn: a blocking function, called as by `Partition.run`; or a coroutine function, called
                with the partition first: `async def step(p, ...)`. It should wait for its work.
            args: its arguments, the same each time.
            sms: the sizes; None: every size there is, at most 17 of them.
            device: the ordinal of the device; None: the pool's first.
            service: the name of a class given to the pool.

        Raises:
            InvalidRequest, TooManySMs: what can never be; and whatever `fn` raises.
        """
        first = self._manager.device_pools[0]
        ordinal = first.device.ordinal if device is None else device
        sizes = default_sizes(first.cells) if sms is None else sms
        clock = first.device.driver.time
        return await measure(self, clock, sizes, fn, args, device=ordinal, service=service)

    # -- changing it -----------------------------------------------------------------------------

    def reconfigure(
        self,
        *,
        services: Sequence[ServiceClass] | None = None,
        policy: str | Policy | None = None,
    ) -> None:
        """Change the classes, or the policy, while the pool runs; None: as they are. Never waits.

        Leases end under the rules they began under. Queued requests stay queued, in the new order;
        a request that can never be granted any more raises `TooManySMs` where it waits. Requests of
        a class that is gone are served without its reserve and cap. Until leases from before have
        left a new reserve, SMs of it that become free are kept for its class.

        Raises:
            InvalidRequest: not a class or policy, or reserves that do not fit; nothing has
                changed.
            PoolClosed, DeviceLost, ForkedPool: the pool is not open.
        """
        classes = None if services is None else validate_services(services)
        self._manager.reconfigure(classes, None if policy is None else policy_named(policy))
        if classes is not None:
            self._parser = RequestParser(classes)

    def observe(self, service: str, latency: float, count: int = 1) -> None:
        """Report that `count` requests of a class had this latency, in seconds. Never waits.

        The latencies decide whether devices are split for classes that are `shared`. For a class of
        which none is reported, the time from a lease's request to its end counts.

        Raises:
            InvalidRequest: no such class, or not a latency.
            PoolClosed, DeviceLost, ForkedPool: the pool is not open.
        """
        self._parser.check_observed(service, latency, count)
        self._manager.observe(service, latency, count)

    # -- queries ---------------------------------------------------------------------------------

    @property
    def sync(self) -> SyncPool:
        """The same pool for threads that run no loop; see `SyncPool`. One object."""
        from greensched.leasing.sync import SyncPool

        new_loop = getattr(self._lifecycle.options.driver, "new_event_loop", None)
        return self.__dict__.setdefault("_sync", SyncPool(self, new_loop))  # type: ignore[no-any-return]  # a SyncPool

    @property
    def state(self) -> PoolState:
        """The state of the pool now."""
        return self._lifecycle.state

    @property
    def is_ready(self) -> bool:
        """Whether the pool grants: what a readiness probe should answer."""
        return self.state is PoolState.OPEN

    @property
    def fault(self) -> BaseException | None:
        """The first device fault, if there was one."""
        return self._lifecycle.failure

    @property
    def opening_error(self) -> BaseException | None:
        """Why `open` failed, until it succeeds; None: it has not failed."""
        return self._lifecycle.opening_error

    @property
    def hung(self) -> tuple[DeviceHung, ...]:
        """What hangs now, for longer than `hang_after`: an error for each executor. Never waits."""
        pools = self._lifecycle.device_pools
        executors = [one for each in pools for one in tuple(each.executors.values())]
        return tuple(one.hang for one in executors if one.hang is not None)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, in the order they were given; none before the pool is open."""
        return tuple(each.device for each in self._lifecycle.device_pools)

    def statistics(self) -> PoolStatistics:
        """Return what the pool has and did, at one moment."""
        return self._manager.statistics()

    def leases(self) -> list[LeaseInfo]:
        """Return the leases that hold SMs now, the oldest first. Never waits.

        Raises:
            PoolClosed: the pool is not open.
        """
        return self._manager.held()

    def snapshot(self) -> Snapshot:
        """Return what each SM does, what waits and why, at one moment. From any thread.

        It waits for the pool's lock alone. A pool that is not open has its state, and no devices.
        Waits and uses are those since `time_leases` was called.
        """
        return take_snapshot(self._lifecycle)

    # -- watching --------------------------------------------------------------------------------

    def watch(self, callback: Callable[[Record], object]) -> Callable[[], None]:
        """Call a function with a record of everything that happens, from now on.

        First with what is held: a `Granted` of each lease. Records come in one order, one at a
        time, each on the thread on which it happened or another of the pool's, under no lock. The
        function must not block, and what it raises is logged, once. While there are watchers, no
        lease is kept for the next request of its size, and each bound launch has a ticket: both
        cost more. May be called before the pool is open. Never waits.

        Returns:
            A function that ends it.
        """
        self._lifecycle.watch(callback)
        return partial(self._lifecycle.unwatch, callback)

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Write what happens while a block is open into a file, for Perfetto.

            async with pool, pool.trace("t.perfetto-trace"):
                ...

        The file has tracks for the queue, each device, each set of SMs and its jobs, with flows
        from a request to its lease, its jobs and their ends, and counters. Times are the host's.
        It is written while the pool runs, by a thread, and is complete however the block ends;
        leases and requests that have not ended by then end there in the trace. A file of that name
        is replaced. While the block is open the pool is watched; see `watch` for what that costs.
        Entering and leaving the block waits for the disk; a cancellation does not leave it
        earlier.

        Raises:
            MissingPackage: perfetto is not installed; says what to install.
            InvalidRequest: on entry, the file cannot be written; on leaving, it could not.
            PoolClosed, DeviceLost, ForkedPool: on entry, the pool is not open.
        """
        from greensched.observability.trace import Trace

        return Trace(self._lifecycle, path)

    def time_leases(self) -> None:
        """Count from now on how long requests wait, and leases last and drain. Idempotent.

        `statistics().services` then has the histograms `wait`, `use` and `drain` of each class, ""
        for requests without one; `statistics().wake` tells of a slow loop. Never waits.
        """
        self._lifecycle.time_leases()

    def preview(self, *sizes: Size) -> tuple[SplitPreview, ...]:
        """Return what `partitions(*sizes)` would get on each device if it were free. Never waits.

        Nothing is leased or queued. What is impossible says why, and what comes nearest.

        Raises:
            InvalidSize, InvalidRequest: what can never be right, on no device.
            PoolClosed: the pool is not open; only an open one has split its devices.
        """
        return tuple(preview(each.device, each.cells, sizes) for each in self._manager.device_pools)

    async def verify(self) -> Verification:
        """Prove on each device that partitions share no SM.

        Waits until it has every SM of each device in turn, so nothing else runs meanwhile.

        Raises:
            VerificationFailed: two partitions shared an SM, or one was not seen on as many as it
                has.
        """
        cells = {each.device.ordinal: each.cells for each in self._manager.device_pools}
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
