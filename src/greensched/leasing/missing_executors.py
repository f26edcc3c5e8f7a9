"""Executors that requests wait for. The builder thread makes them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from threading import RLock
from typing import Protocol

from greensched.driver.interface import Driver
from greensched.execution.background import BackgroundTask
from greensched.execution.executor import Executor
from greensched.execution.threads import WorkerThread
from greensched.leasing.device_pool import DevicePool
from greensched.leasing.pool_state import PoolState
from greensched.leasing.requests import refuse
from greensched.scheduling.requests import Request
from greensched.scheduling.scheduler import Scheduler


class BuilderHost(Protocol):
    """What the builder needs from the manager."""

    lock: RLock
    scheduler: Scheduler
    device_pools: tuple[DevicePool, ...]

    state: PoolState
    driver: Driver

    @property
    def works(self) -> bool:
        """Whether granted leases can be used."""

    def cancel_locked(self, request: Request) -> list[Request]: ...

    def notify_granted(self, granted: list[Request]) -> None: ...


class MissingExecutors:
    """Has the builder thread make each missing executor once.

    Args:
        host: The manager.
        thread: The pool's builder thread, on which opening and closing happen, too.
    """

    def __init__(self, host: BuilderHost, thread: WorkerThread) -> None:
        self.thread = thread
        self._host = host
        #: The (device index, cells) of executors that the thread must make.
        self._queued: set[tuple[int, int]] = set()
        #: The tasks' waits in `make`.
        self._makings: set[BackgroundTask[Exception | None]] = set()
        #: The device on which an executor is being made now.
        self.active: DevicePool | None = None

    def make_missing(self) -> None:
        """Have the thread make the executors that the scheduler misses. Never blocks."""
        host, missing = self._host, self._host.scheduler.missing_executors
        while missing:
            with host.lock, suppress(KeyError):  # another thread took the last one
                key, _ = missing.popitem()
                if key not in self._queued and host.state is PoolState.OPEN:
                    self._queued.add(key)
                    self.thread.submit(partial(self._make, *key))

    async def make(self, index: int, mask: int) -> None:
        """Wait until there is an executor over a set of cells, or the pool is not open.

        Raises:
            CUDAError: The driver refused it.
        """
        host, making = self._host, BackgroundTask(partial(self._make, index, mask))
        with host.lock:
            if mask in host.device_pools[index].executors or host.state is not PoolState.OPEN:
                return
            self._queued.add((index, mask))
            self._makings.add(making)
            self.thread.submit(making.run)
        try:
            failure = await making.wait()
        finally:
            self._makings.discard(making)
        if failure is not None:
            raise failure

    def end_waits(self) -> None:
        """Wake every task in `make`, because the pool is closed. The thread may be held up."""
        for making in tuple(self._makings):
            making.end_waits()

    @property
    def is_held_up(self) -> bool:
        """Whether an executor is being made, or will be, on a device that has work.

        A driver may delay that until the work ends, which may never happen. The device is then
        left as it is, so that closing the pool need not wait for the builder thread.
        """
        with self._host.lock:
            return any(self._host.device_pools[index].busy for index, _ in self._queued)

    def _make(self, index: int, mask: int) -> Exception | None:
        """Make an executor, on the thread, and wake the tasks that wait for it.

        If it cannot be made, returns the reason, which the tasks also get.
        """
        host, device_pool = self._host, self._host.device_pools[index]
        with host.lock:
            if not host.works:
                return None
            self.active = device_pool
        executor: Executor | None = None
        failure: Exception | None = None
        try:
            executor = device_pool.executors.get(mask) or device_pool.builder.make(mask)
        except Exception as error:  # any error, because a waiting task raises it
            failure = error
        refused: list[Request] = []
        with host.lock:
            self.active = None
            self._queued.discard((index, mask))
            if host.state is PoolState.CLOSED:  # the devices were left as they were
                if executor is not None:
                    executor.abandon()
                return failure
            if executor is not None:
                self._add_locked(index, executor)
                granted = host.scheduler.made(host.driver.time())
            else:
                refused = [
                    r for r in host.scheduler.queued() if (index, mask) in r.missing_executors
                ]
                granted = [other for request in refused for other in host.cancel_locked(request)]
        for request in refused:
            assert failure is not None
            refuse(request, failure)
        host.notify_granted(granted)
        return failure

    def has_room(self, index: int) -> bool:
        """Say whether a device may have another executor. The caller holds the manager's lock."""
        to_make = self._queued.union(self._host.scheduler.missing_executors)
        making = sum(of_device == index for of_device, _ in to_make)
        return self._host.device_pools[index].has_room(making)

    def _add_locked(self, index: int, executor: Executor) -> None:
        """Make an executor available."""
        mask = executor.mask
        self._host.device_pools[index].add(executor)
        self._host.scheduler.ready_masks[index].setdefault(mask.bit_count(), {})[mask] = None
