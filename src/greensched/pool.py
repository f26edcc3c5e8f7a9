"""The public door: a pool of SMs over one or more devices, leased to async tasks.

A pool is NEW, then OPENING, OPEN, CLOSING and CLOSED; POISONED after a device fault; FORKED in a
child process. Only an open one grants. Everything that blocks in opening and closing happens on
one thread, the builder.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, get_args

import anyio

from greensched import driver as drivers
from greensched._validation import as_float
from greensched.device.buffers import Buffer
from greensched.device.device import Device
from greensched.device.launch import LaunchConfig
from greensched.driver.interface import Driver
from greensched.errors import GreenschedError, InvalidRequest, PoolClosed
from greensched.execution.background import BackgroundTask
from greensched.execution.threads import WorkerThread
from greensched.kernels import Kernel
from greensched.leasing import asking, process, requests
from greensched.leasing.device_pool import DevicePool
from greensched.leasing.latency import LatencyCurve
from greensched.leasing.manager import LeaseManager
from greensched.leasing.measuring import measure, sizes_of
from greensched.leasing.partition import Partition
from greensched.leasing.partition_group import PartitionGroup
from greensched.leasing.preview import SplitPreview, plan
from greensched.leasing.requests import RequestParser
from greensched.leasing.status import CloseReport, PoolState, PoolStatistics
from greensched.leasing.verification import Verification, verify
from greensched.scheduling.placement import Placement
from greensched.scheduling.policies import policy_named
from greensched.scheduling.policy import Policy
from greensched.scheduling.requests import Duration
from greensched.scheduling.scheduler import validate_bound
from greensched.scheduling.services import ServiceClass, checked
from greensched.typing import CaptureMode, Granularity, Size, SupportsDevice

if TYPE_CHECKING:
    from greensched.leasing.sync import SyncPool

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("greensched")

#: Seconds `aclose` waits for leases to end, unless told otherwise. A serving process has 30 s
#: between SIGTERM and SIGKILL by Kubernetes' default; a pool should not take most of it.
GRACE = 5.0
#: Requests queued at most, unless told otherwise: a second of work at 1 ms each.
MAX_WAITING = 1024


class Pool:
    """SMs of one or more devices, leased to async tasks. Open it with `async with`.

    Making one touches neither CUDA nor a loop: it may be done at import, on any thread. Several
    loops, in several threads, may share it.

    Args:
        devices: ordinals, or devices of cuda.core; None: every visible device.
        driver: a driver, `"cuda"`, or `"simulated:h200"`; None: what the environment variable
            `GREENSCHED_DRIVER` says, else CUDA. A simulation is never chosen by itself.
        services: classes of users, for `partition(service=...)`.
        policy: who is next: `"fifo"`, first come, first served; `"fair"`, shares of SM-time by the
            weights of the classes; `"deadline"`, who is due first; `"sized"`, elastic leases as
            large as latencies and known costs say; or an object (`planning.policy.Policy`). Larger
            priority goes first in all of these.
        placement: on which of several devices: `"spread"`, where most SMs are free; `"pack"`, where
            fewest are and it fits.
        max_waiting: requests queued at most; beyond, `QueueFull`.
        granularity: `"coscheduled"`: SMs are cut so that thread-block clusters keep their size (8
            SMs on compute capability 9.0 and newer); `"fine"`: as finely as can be (2 SMs), which
            gives up large clusters.
        workqueues: `"balanced"`: partitions do not share the device's work queues, where that can
            be, so that a full one holds up nobody else. It needs CUDA 13.1. None: they share.
        prepare: kernels that every partition shall launch, or `bind`, without waiting: compiled and
            loaded for each while the pool opens, and local memory sized for them. What else a
            lease may need is then made, too: the chunks that large copies are staged in (8 MiB of
            pinned memory for each lease that there can be at once).
        reserve_bytes: device memory that each device's buffers shall never have to wait for.

    After `prepare`, and within `reserve_bytes`, nothing that a lease of a partition made at `open`
    does has the driver allocate anything, but `empty_pinned`, copies between devices, and what
    a callable given to `run` does.
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
    ) -> None:
        self._desk: LeaseManager | None = None
        self._opening: BackgroundTask[None] | None = None
        self._closing: BackgroundTask[CloseReport] | None = None
        self._is_ending = False
        self._wanted = None if devices is None else requests.ordinals(devices)
        self._driver_spec = driver
        self._asked = RequestParser(checked(services))
        self._policy = policy_named(policy)
        requests.one_of("placement", placement, get_args(Placement))
        self._placement: Placement = placement
        self._max_waiting = validate_bound(max_waiting)
        self._fine = requests.one_of("granularity", granularity, get_args(Granularity)) == "fine"
        self._balanced = requests.one_of("workqueues", workqueues, ("balanced", None)) is not None
        self._prepare = requests.kernels(prepare)
        if type(reserve_bytes) is not int or reserve_bytes < 0:
            raise InvalidRequest(f"reserve_bytes={reserve_bytes!r}: a number of bytes, at least 0")
        self._reserve_bytes = reserve_bytes
        #: Whom partitions ask: the desk, once it is open.
        self._grantor: Pool | LeaseManager = self
        self._lock = threading.Lock()
        process.on_fork(self)

    # -- opening ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Opens the devices, cuts them, and makes the lanes. Idempotent; waits for a thread.

        A cancellation stops the waiting only; the opening goes on, and the next `open` waits for
        the same one.

        Raises:
            DriverUnavailable: no usable driver or device; says what to install or change.
            DeviceTaken: another pool of this process has the device.
            InvalidRequest: the floors of the classes do not fit on the devices.
            PoolClosed, DeviceLost, ForkedPool: it has ended.
            InvalidRequest: no such device.
            NotSupported: `workqueues` on a driver below CUDA 13.1.
            CompileFailed, NotSimulable, ArgumentMismatch: a kernel of `prepare` cannot be loaded.
            OutOfMemory: there is less than `reserve_bytes`.
            CUDAError: the driver refused something; nothing is left open.
            RuntimeError: no thread can be started; nothing is left open.
        """
        with self._lock:
            if self._closing is not None:
                raise PoolClosed("this pool")
            if self._desk is not None:
                self._desk.check()
            if self._opening is None:
                driver = drivers.open(self._driver_spec)
                self._desk = LeaseManager(
                    driver, WorkerThread(driver, "greensched builder", is_relaxed=False)
                )
                opening = BackgroundTask(self._build)
                try:
                    self._desk.builder.submit(opening.do)
                except RuntimeError:  # no thread can be started now; another time, perhaps
                    self._desk = None
                    raise
                self._opening = opening
            opening = self._opening
        await opening.wait()

    def _build(self) -> None:
        """On the builder: everything that blocks. A failed opening leaves nothing open."""
        desk = self._desk
        assert desk is not None
        sites: list[DevicePool] = []
        taken: list[int] = []
        try:
            desk.driver.initialise()
            desk.driver.exchange_capture_mode(CaptureMode.RELAXED)
            everything = range(desk.driver.device_count())
            for ordinal in everything if self._wanted is None else self._wanted:
                device = Device(ordinal, driver=desk.driver)
                process.take_device(desk.driver, ordinal)
                taken.append(ordinal)
                site = DevicePool(
                    device,
                    desk,
                    self._prepare,
                    self._reserve_bytes,
                    fine=self._fine,
                    balanced=self._balanced,
                )
                sites.append(site)
            for site in sites:
                site.neighbours = {s.device.ordinal: s for s in sites if s is not site}
            services = self._asked.services
            desk.start(sites, self._policy, self._max_waiting, services, self._placement)
            self._grantor = desk
        except BaseException:
            for site in sites:
                site.abandon()
            process.release_devices(desk.driver, taken)
            with self._lock:  # the next open() starts anew
                self._opening = self._desk = None
            desk.builder.dismiss()
            raise

    async def __aenter__(self) -> Self:
        """Opens it; see `open`. Cancelled meanwhile, it closes it again: there is no block to."""
        try:
            await self.open()
        except GeneratorExit:
            self._close_unattended()
            raise
        except anyio.get_cancelled_exc_class():
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Closes it, within the default grace, also where the block was cancelled.

        Collected with its block open (GeneratorExit), it can wait for nothing, nor take a lock,
        which whoever was interrupted may hold: a thread closes it, without any grace.
        """
        if self.state is PoolState.FORKED:  # where anyio finds no loop, nor is there one to use
            return
        if kind is GeneratorExit:
            self._close_unattended()
            return
        with anyio.CancelScope(shield=True):
            await self.aclose()

    def opened(self) -> LeaseManager:
        """Whom partitions ask, while there is one. Raises `PoolClosed`."""
        desk = self._desk
        if desk is None or not desk.sites:  # not open yet, or closed before it was
            hint = ": use `async with pool:` or `await pool.open()`"
            raise PoolClosed("this pool", self.state.value + hint)
        return desk

    def take(self, _: object) -> None:
        """Nothing is parked before it is open. For partitions."""

    # -- asking for SMs --------------------------------------------------------------------------

    def partition(
        self,
        sms: Size,
        *,
        device: int | None = None,
        service: str | None = None,
        deadline: float | None = None,
        duration: Duration | None = None,
        near: Buffer | None = None,
    ) -> Partition:
        """A lease of SMs, to be used with `async with`, which waits for them.

        Args:
            sms: how many: `16`; `(8, 64)`: as many up to 64 as are free once 8 are; `(8, ALL)`: as
                many as are free; `ALL` of a device (`REST` is the same here; of several granted
                together it is what the others leave). Rounded up to what the device can be cut
                into; `Partition.sm_count` says what was granted.
            device: where; None: anywhere in the pool.
            service: on whose behalf, by the name of a class given to the pool.
            deadline: seconds from the request: not granted by then, `DeadlineExceeded`. Once
                granted it means nothing. Where `duration` is known: the work should be done by
                then,
                and if it is known that it cannot, `DeadlineImpossible` at once, or what the class
                says (`on_late`). None: the class's `latency`, for that alone.
            duration: seconds that the lease is expected to last, or the curve that says it for each
                size. Whoever gives it can be let into gaps that are closed to others.
            near: be on this buffer's device where it fits there.

        Raises:
            InvalidSize, InvalidRequest: what can never be right.
        """
        asked = self._asked.one(sms, service, device, deadline, duration, near)
        return Partition(self._grantor, asked)

    def partitions(
        self,
        *sizes: Size,
        device: int | None = None,
        service: str | None = None,
        deadline: float | None = None,
        duration: float | None = None,
        near: Buffer | None = None,
    ) -> AbstractAsyncContextManager[tuple[Partition, ...]]:
        """Several leases on one device, granted together, in the order of the arguments.

        One request: nobody holds one part and waits for another. They are entered together, and
        end together: `async with` on one of them is refused. `REST` stands for every SM of the
        device that is not in the same request. Arguments and errors as `partition`.
        """
        return PartitionGroup(
            self, self._asked.several(sizes, service, device, deadline, duration, near)
        )

    def partition_nowait(
        self,
        sms: Size,
        *,
        device: int | None = None,
        service: str | None = None,
        duration: Duration | None = None,
        near: Buffer | None = None,
    ) -> Partition:
        """A lease granted at once, still to be used with `async with`; never waits.

        Raises:
            WouldBlock: no SMs are free, or no lane over them is made yet.
            Others: as `partition`, and as its `async with`.
        """
        wanted = self._asked.one(sms, service, device, None, duration, near)
        channel = self._grantor.take(wanted)
        if channel is None:
            (channel,) = self.opened().acquire_nowait(wanted)
        return Partition(self._grantor, wanted, channel)

    async def launch(
        self,
        config: LaunchConfig,
        kernel: Kernel,
        *args: object,
        sms: Size,
        device: int | None = None,
        service: str | None = None,
        deadline: float | None = None,
        duration: Duration | None = None,
        near: Buffer | None = None,
    ) -> None:
        """Leases SMs, launches a kernel there, waits for it, and gives the SMs back.

        A cancellation leaves the kernel running, and its SMs held until it ends.
        """
        async with self.partition(
            sms, device=device, service=service, deadline=deadline, duration=duration, near=near
        ) as p:
            await p.launch(config, kernel, *args)

    async def run(
        self,
        fn: Callable[..., T],
        /,
        *args: object,
        sms: Size,
        device: int | None = None,
        service: str | None = None,
        deadline: float | None = None,
        duration: Duration | None = None,
        near: Buffer | None = None,
    ) -> T:
        """Leases SMs, calls a blocking function there, waits for it, and gives the SMs back.

        A cancellation leaves the call running, and its SMs held until it ends.
        """
        async with self.partition(
            sms, device=device, service=service, deadline=deadline, duration=duration, near=near
        ) as p:
            return await p.run(fn, *args)

    async def measure(
        self,
        fn: Callable[..., Any],
        /,
        *args: object,
        sms: Sequence[int] | None = None,
        device: int | None = None,
        service: str | None = None,
    ) -> LatencyCurve:
        """Finds how long a piece of work takes on partitions of each size.

        It waits its turn for each, 21 times; the first is not counted. A cancellation leaves
        nothing behind but what already runs.

        Args:
            fn: a blocking function, called as by `Partition.run`; or a coroutine function, called
                with the partition first: `async def step(p, ...)`. It should wait for its work.
            args: given to it each time.
            sms: the sizes; None: every size there is, up to `measuring.SIZES`.
            device: where; None: on the pool's first.
            service: on whose behalf.

        Raises:
            InvalidRequest, TooManySMs: what can never be; and what `fn` raises.
        """
        site = self.opened().sites[0]
        ordinal = site.device.ordinal if device is None else device
        sizes = sizes_of(site.cells) if sms is None else sms
        clock = site.device.driver.time
        return await measure(self, clock, sizes, fn, args, device=ordinal, service=service)

    def reconfigure(
        self,
        *,
        services: Sequence[ServiceClass] | None = None,
        policy: str | Policy | None = None,
    ) -> None:
        """Changes the classes, or the policy, while it runs; None: as they are. Never waits.

        Leases end under the rules they began under, and whoever waits keeps waiting, by the new
        order; `TooManySMs` is raised where he waits in who could never be granted any more. Those
        of a class that is not there any more are served without its floor and cap.
        Until leases from before have left a new floor, what comes free is kept for its owner.

        Raises:
            InvalidRequest: what no class or policy can be, or floors that do not fit; nothing has
                changed.
            PoolClosed, DeviceLost, ForkedPool: it is not open.
        """
        classes = None if services is None else checked(services)
        self.opened().reconfigure(classes, None if policy is None else policy_named(policy))
        if classes is not None:
            self._asked = RequestParser(classes)

    def observe(self, service: str, latency: float, count: int = 1) -> None:
        """Says that so many of a class had this latency, in seconds. Never waits.

        By that it is decided whether devices are split for classes that are `shared`. Of a class
        of which nobody says it, the time from a lease's request to its end counts.

        Raises:
            InvalidRequest: no such class, or what is no latency.
            PoolClosed, DeviceLost, ForkedPool: it is not open.
        """
        self._asked.check_observed(service, latency, count)
        self.opened().observe(service, latency, count)

    # -- closing ---------------------------------------------------------------------------------

    async def aclose(self, grace: float = GRACE) -> CloseReport:
        """Closes the pool: grants nothing more, lets leases end, then ends everything.

        Whoever is queued gets `PoolClosed`; whoever holds a lease may finish within the grace.
        What is still leased or has work then is left as it is, and reported, and whoever waits
        for it gets `PoolClosed`. Idempotent; any number may wait for it. A cancellation ends the
        grace at once, and the closing goes on, on a thread.

        Args:
            grace: seconds to wait for leases to end and lanes to drain. Where several callers wait,
                the first of them whose grace is over ends it for all.

        Raises:
            InvalidRequest: no such number; nothing is closed.
        """
        seconds = as_float(grace)
        if not seconds >= 0:
            raise InvalidRequest(f"grace={grace!r} is no number of seconds >= 0")
        if self.state is PoolState.FORKED:
            return CloseReport()
        desk, closing = self._desk, self._begin_closing()
        try:
            if desk is not None:
                desk.stop()
                if desk.sites:
                    await asking.wait_for_leases(desk, seconds)
        finally:
            self._finish_closing(desk, closing)
        return await closing.wait()

    def _begin_closing(self) -> BackgroundTask[CloseReport]:
        with self._lock:
            if self._closing is None:
                self._closing = BackgroundTask(self._end)
            return self._closing

    def _finish_closing(
        self, desk: LeaseManager | None, closing: BackgroundTask[CloseReport]
    ) -> None:
        """Whoever comes first has the builder end everything; it may be the second caller.

        The desk is the caller's: an opening that fails meanwhile takes the pool's away.
        """
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        if desk is None:
            closing.do()
            return
        closer = WorkerThread(desk.driver, "greensched closer") if desk.is_held_up else desk.builder
        closer.submit(closing.do)
        for thread in (closer, desk.builder):
            thread.dismiss()  # when that is done

    def _close_unattended(self) -> None:
        """Has the builder close it, with no lock taken here: see `__aexit__`."""
        desk = self._desk
        if desk is None or self._is_ending:
            return

        def close() -> None:
            closing = self._begin_closing()
            desk.stop()
            self._finish_closing(desk, closing)

        desk.builder.submit(close)

    def _end(self) -> CloseReport:
        """On the builder, behind what it still does, or beside it: ends every site."""
        desk = self._desk
        if desk is None:
            return CloseReport()
        abandoned = desk.close()
        process.release_devices(desk.driver, [site.device.ordinal for site in desk.sites])
        if abandoned:
            logger.warning("the pool was closed over leases or work: %s", ", ".join(abandoned))
        return CloseReport(tuple(abandoned))

    def forked(self) -> None:
        """In a forked child; see `process`."""
        self._lock = threading.Lock()
        if self._desk is not None:
            self._desk.forked()

    def __del__(self, is_open: PoolState = PoolState.OPEN, warn: Any = warnings.warn) -> None:
        # Kept here, for at the interpreter's end the module may have them no more.
        if self.state is is_open:
            warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)

    @property
    def sync(self) -> SyncPool:
        """The pool for threads that run no loop; see `SyncPool`. The same each time."""
        from greensched.leasing.sync import SyncPool

        new_loop = getattr(self._driver_spec, "new_event_loop", None)
        return self.__dict__.setdefault("_sync", SyncPool(self, new_loop))  # type: ignore[no-any-return]  # ours

    # -- questions -------------------------------------------------------------------------------

    @property
    def state(self) -> PoolState:
        """Where it is in its life."""
        if self._desk is not None:
            return self._desk.state
        return PoolState.NEW if self._closing is None else PoolState.CLOSED

    @property
    def is_ready(self) -> bool:
        """Whether it grants: what a readiness probe should answer."""
        return self.state is PoolState.OPEN

    @property
    def fault(self) -> BaseException | None:
        """The first device fault, if there was one."""
        return self._desk.fault if self._desk is not None else None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Its devices, in the order they were given; none before it was opened."""
        return tuple(site.device for site in self._desk.sites) if self._desk is not None else ()

    def statistics(self) -> PoolStatistics:
        """What it has and did, at one moment."""
        return self.opened().statistics()

    def plan(self, *sizes: Size) -> tuple[SplitPreview, ...]:
        """What `partitions(*sizes)` would get on each device, were it free. Never waits.

        Nothing is leased or queued. What is impossible says why, and what comes nearest.

        Raises:
            InvalidSize, InvalidRequest: what can never be right, on no device.
            PoolClosed: it is not open; only an open one knows its cells.
        """
        return tuple(plan(site.device, site.cells, sizes) for site in self.opened().sites)

    async def verify(self) -> Verification:
        """Proves on the device that partitions share no SM; see `verification.verify`.

        Waits until it has every SM of each device in turn, so nothing else runs meanwhile.

        Raises:
            VerificationFailed: two partitions shared an SM, or one was not seen on as many as it
                has.
        """
        cells = {s.device.ordinal: (s.cells.size, s.cells.count) for s in self.opened().sites}
        return await verify(self, cells)

    def __repr__(self) -> str:
        try:
            s = self.statistics()
        except GreenschedError:
            return f"<Pool: {self.state.value}>"
        return (
            f"<Pool: {s.state.value}, {s.devices} devices, {s.sms_total} SMs: {s.sms_free} free, "
            f"{s.sms_leased} leased, {s.sms_draining} draining; {s.waiting} waiting>"
        )
