"""Opening and closing a pool: all of it is here.

A pool is NEW, then OPENING, OPEN, CLOSING and CLOSED; or POISONED after a device fault, or FORKED
in a forked child. Everything that blocks happens on one thread, the builder.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from greensched import driver as drivers
from greensched._cleanup import first_error
from greensched.device.device import Device
from greensched.driver.interface import Driver
from greensched.driver.status import ErrorClass, error_class, unavailable
from greensched.errors import CUDAError, DriverUnavailable, PoolClosed
from greensched.execution.background import BackgroundTask
from greensched.execution.threads import WorkerThread
from greensched.kernels import Kernel
from greensched.leasing import process
from greensched.leasing.device_pool import MAX_EXECUTORS, DevicePool
from greensched.leasing.manager import LeaseManager
from greensched.leasing.pool_state import CloseReport, PoolState
from greensched.leasing.requests import LeaseCache, PlacingLeaseCache
from greensched.leasing.watchdog import ExitPolicy, has_limits
from greensched.records import Recorder, Watcher
from greensched.scheduling.allocator import Placement
from greensched.scheduling.policy import Policy
from greensched.scheduling.services import ServiceClass
from greensched.typing import CaptureMode

logger = logging.getLogger("greensched")


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The checked arguments of `Pool`.

    Attributes:
        max_executors: A device with this many makes no more if requests can wait for one of them.
    """

    driver: str | Driver | None
    devices: tuple[int, ...] | None
    services: tuple[ServiceClass, ...]
    policy: Policy
    placement: Placement
    max_waiting: int
    fine: bool
    balanced: bool
    prepare: tuple[Kernel, ...]
    reserve_bytes: int
    hang_after: float | None = None
    exit_policy: ExitPolicy = "report"
    max_executors: int = MAX_EXECUTORS


class PoolServer(Protocol):
    """Answers questions about a pool. No method waits for long."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    def forked(self) -> None: ...


class PoolLifecycle:
    """Opens one pool, and closes it once.

    While there is a manager, it has the state, because a device fault changes the state, too.
    """

    def __init__(self, options: PoolOptions) -> None:
        self.options = options
        #: Also the manager's lock. Re-entrant, because the user's policy may read statistics under
        #: it.
        self.lock = threading.RLock()
        notes_places = has_limits(options.hang_after, options.services) or sys.flags.dev_mode
        self.cache = (PlacingLeaseCache if notes_places else LeaseCache)(self.lock)
        self.recorder = Recorder()
        #: Started when the pool is opened first, and closed with it.
        self.server: PoolServer | None = None
        #: Whether leases are timed once the pool is open.
        self.is_timed = False
        #: Why the last opening failed. A successful one clears it.
        self.opening_error: BaseException | None = None
        self._manager: LeaseManager | None = None
        #: The manager while it grants, as one attribute for the hot paths.
        self.granting: LeaseManager | None = None
        self._opening: BackgroundTask[None] | None = None
        self._closing: BackgroundTask[CloseReport] | None = None
        #: Whether the devices are being closed, or will be once the builder is free.
        self._is_ending = False
        process.on_fork(self)

    @property
    def state(self) -> PoolState:
        if self._manager is not None:
            return self._manager.state
        return PoolState.NEW if self._closing is None else PoolState.CLOSED

    @property
    def failure(self) -> BaseException | None:
        """The device fault that ended the pool, or None."""
        return None if self._manager is None else self._manager.failure

    @property
    def device_pools(self) -> tuple[DevicePool, ...]:
        """The devices, in the order of the options; empty before the pool is open."""
        return () if self._manager is None else self._manager.device_pools

    def manager(self) -> LeaseManager:
        """Return the manager of the leases.

        Raises:
            PoolClosed: The pool is not open yet, or was closed before it opened.
        """
        manager = self._manager
        if manager is None or not manager.device_pools:
            hint = ": use `async with pool:` or `await pool.open()`"
            raise PoolClosed("this pool", self.state.value + hint)
        return manager

    def refuse_in_decision(self) -> None:
        """Raise InvalidRequest on a thread that runs a policy or a curve in a decision."""
        if self._manager is not None:
            self._manager.refuse_in_decision()

    # -- opening ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the devices, split them, and make executors. Idempotent. See `Pool.open`."""
        with self.lock:
            if self._closing is not None:
                raise PoolClosed("this pool")
            if self._manager is not None:
                self._manager.check()
            if self._opening is None:
                driver = drivers.open(self.options.driver)
                builder = WorkerThread(driver, "greensched builder", relaxed=False)
                manager = LeaseManager(
                    driver,
                    builder,
                    self.lock,
                    self.cache,
                    self.recorder,
                    self.options.hang_after,
                    self.options.exit_policy,
                )
                opening = BackgroundTask(lambda: self._build(manager))
                builder.submit(opening.run)  # raises RuntimeError if no thread can be started
                self._manager, self._opening = manager, opening
            opening = self._opening
        try:
            await opening.wait()
        except DriverUnavailable as error:
            # The message says what to install; the builder's frames add nothing.
            raise error.with_traceback(None) from None

    def _build(self, manager: LeaseManager) -> None:
        """Do every blocking step of the opening. A failure leaves nothing open.

        Runs on the builder thread.
        """
        options, driver = self.options, manager.driver
        device_pools: list[DevicePool] = []
        claimed: list[int] = []
        try:
            if self.server is not None:
                self.server.start()
            driver.initialise()
            driver.exchange_capture_mode(CaptureMode.RELAXED)
            every = range(driver.device_count())
            for ordinal in every if options.devices is None else options.devices:
                device = Device(ordinal, driver=driver)
                process.claim_device(driver, ordinal, device.uuid)
                claimed.append(ordinal)
                device_pool = DevicePool(
                    device,
                    manager.current_poller,
                    options.prepare,
                    options.reserve_bytes,
                    fine=options.fine,
                    balanced=options.balanced,
                    max_executors=options.max_executors,
                )
                device_pools.append(device_pool)
            for device_pool in device_pools:
                device_pool.neighbours = {
                    o.device.ordinal: o for o in device_pools if o is not device_pool
                }
            manager.start(
                device_pools,
                options.policy,
                options.max_waiting,
                options.services,
                options.placement,
            )
            with self.lock:
                self.granting, self.opening_error = manager, None
                if self.is_timed:
                    manager.time_leases_locked()
            logger.info(
                "a pool is open over %s", [device_pool.device for device_pool in device_pools]
            )
        except BaseException as error:
            for device_pool in device_pools:
                device_pool.abandon()
            process.release_devices(driver, claimed)
            first = self.opening_error = first_error(error)
            if self._closing is not None:  # its caller was cancelled, and does not get the error
                logger.warning("a pool that closes as it opens could not be opened: %s", first)
            with self.lock:  # the next open() starts anew; the server says why this one failed
                self._opening = self._manager = None
            manager.builder.thread.dismiss()
            if isinstance(first, CUDAError) and error_class(first.status) is ErrorClass.ENVIRONMENT:
                self.opening_error = unavailable(first)
                raise self.opening_error from first
            if first is error:
                raise
            raise first from None

    # -- watching --------------------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> None:
        """Add a watcher. See `Pool.watch`."""
        self.refuse_in_decision()
        with self.lock:
            granting = self.granting
            self.recorder.start(watcher, () if granting is None else granting.watched_locked())
        self.recorder.flush()

    def unwatch(self, watcher: Watcher) -> None:
        with self.lock:
            if self.recorder.stop(watcher) and self.granting is not None:
                self.granting.unwatched_locked()

    def time_leases(self) -> None:
        """Time leases from now on. See `Pool.time_leases`."""
        self.refuse_in_decision()
        with self.lock:
            self.is_timed = True
            if self.granting is not None:
                self.granting.time_leases_locked()

    # -- closing ---------------------------------------------------------------------------------

    async def close(self, grace: float) -> CloseReport:
        """Stop granting, wait for leases within the grace, then close. See `Pool.aclose`."""
        if self.state is PoolState.FORKED:
            return CloseReport()
        closing = self._begin_closing()  # first, so that no thread can open the pool any more
        manager = self._manager
        try:
            if manager is not None:
                manager.stop()
                if manager.device_pools:
                    await manager.wait_until_idle(grace)
        finally:
            self._finish_closing(manager, closing)
        return await closing.wait()

    def abort(self) -> None:
        """Have a thread close the pool, without a grace. Takes no lock and never waits.

        For garbage collection, which may interrupt a thread that holds the lock.
        """
        manager = self._manager
        if manager is None or self._is_ending:
            return

        def close() -> None:
            closing = self._begin_closing()
            manager.stop()
            self._finish_closing(manager, closing)

        manager.builder.thread.submit(close)

    def pool_collected(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Have a thread close a pool that was collected unclosed and is unused.

        Takes no lock and never waits, because a destructor calls it. If there are leases or queued
        requests, the pool stays, because their tasks may continue.
        """
        manager = self._manager
        if is_finalizing() or manager is None or manager.state is not PoolState.OPEN:
            return
        if not manager.is_used:
            process.end_claims(
                manager.driver, [device_pool.device.ordinal for device_pool in self.device_pools]
            )
            self.abort()

    def _begin_closing(self) -> BackgroundTask[CloseReport]:
        with self.lock:
            if self._closing is None:
                self._closing = BackgroundTask(self._end)
            return self._closing

    def _finish_closing(
        self, manager: LeaseManager | None, closing: BackgroundTask[CloseReport]
    ) -> None:
        """Have the builder close everything. The first caller whose grace has passed does this.

        The manager is an argument because a failing opening may reset the attribute.
        """
        with self.lock:
            if self._is_ending:
                return
            self._is_ending = True
        if manager is None:
            closing.run()
            return
        builder = closer = manager.builder.thread
        if manager.builder.is_held_up:
            closer = WorkerThread(manager.driver, "greensched closer")
        try:
            closer.submit(closing.run)
        except RuntimeError:  # no thread can be started: the builder does it once it is free
            builder.submit(closing.run)
        for thread in (closer, builder):
            thread.dismiss()  # ends the thread after that

    def _end(self) -> CloseReport:
        """Close every device. Runs on the builder, or beside it if the builder is held up."""
        manager = self._manager
        try:
            abandoned = [] if manager is None else manager.close()
        finally:
            if manager is not None:
                ordinals = [device_pool.device.ordinal for device_pool in manager.device_pools]
                process.release_devices(manager.driver, ordinals)
            if self.server is not None:
                self.server.close()
        logger.info("the pool is closed")
        if abandoned:
            logger.warning("the pool was closed over leases or work: %s", ", ".join(abandoned))
        return CloseReport(tuple(abandoned))

    def forked(self) -> None:
        """Use new locks and refuse everything, in a forked child. See `process`."""
        self.lock = threading.RLock()  # a thread that does not exist here may hold the old one
        self.recorder.forked()
        if self.server is not None:
            self.server.forked()
        if self._manager is not None:
            self._manager.forked(self.lock)
