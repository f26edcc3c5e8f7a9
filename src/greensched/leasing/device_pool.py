"""One device of a pool: its split, its executors, its memory and its staging.

The device is split once, so its cells are disjoint. An executor is a green context over a set of
cells. Executors are made in advance for a set of shapes (aligned blocks and their complements), or
when a request needs a missing one. Their number is bounded, because none is closed before the pool:
its green context lasts until the process ends (`driver.kept_handles`), and with it device memory.

Making executors blocks, so only the pool's builder thread does it. Once the pool is open, its lock
guards `executors`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from greensched._cleanup import run_all
from greensched.device.allocators import DeviceAllocator, PinnedAllocator
from greensched.device.device import Device
from greensched.device.staging import StagingPool
from greensched.device.staging_ring import StagingRing
from greensched.device.tickets import TicketMemory
from greensched.driver.status import CAPACITY
from greensched.errors import CUDAError, DeviceFault, GreenschedError, InvalidRequest, PoolClosed
from greensched.execution.completion_poller import CompletionPoller
from greensched.execution.executor import Executor
from greensched.kernels import Kernel
from greensched.leasing.device_split import split_device
from greensched.leasing.executor_builder import ExecutorBuilder

logger = logging.getLogger("greensched")

#: The most executors made in advance, so that the first lease of any size waits for none. Each
#: takes about 6 MiB and 1 ms on an H200. A device that is split into groups of 8 SMs has 87 shapes.
#: If it is split into groups of 2, it has 131 shapes that begin or end at an end of the device, for
#: two leases that share it, and 26 more aligned blocks of 8 or more SMs, for three or more leases.
#: A driver's capacity is not documented: making them stops without an error when the driver
#: refuses.
MAX_PREBUILT = 160
#: With this many executors a device makes no more if requests can wait for one of them. Without a
#: limit a service with leases of four sizes comes to 2,300 in 260,000 leases, about 13 GiB.
MAX_EXECUTORS = 256


class DevicePool:
    """A device of a pool.

    Args:
        device: A device that the pool has opened; closed with this object.
        current_poller: Returns the pool's poller of the running loop, or raises NoLoop.
        kernels: Kernels to load for each executor. If there are any, everything else that a lease
            may need is allocated in advance, too.
        reserve_bytes: Device memory to allocate in advance.
        fine: Whether to split as finely as possible, so that large thread-block clusters do not
            fit.
        balanced: Whether each executor gets work queues that it does not share, where possible.
        max_executors: With this many, no more are made if requests can wait for one of them.
    """

    def __init__(
        self,
        device: Device,
        current_poller: Callable[[], CompletionPoller],
        kernels: Sequence[Kernel] = (),
        reserve_bytes: int = 0,
        *,
        fine: bool = False,
        balanced: bool = False,
        max_executors: int = MAX_EXECUTORS,
    ) -> None:
        self.device = device
        self._max_executors = max_executors
        #: The other devices of the pool by ordinal. Set once all devices are open.
        self.neighbours: Mapping[int, DevicePool] = {}
        #: Executors by their cells.
        self.executors: dict[int, Executor] = {}
        #: What the device lacks: for each feature a sentence with the cause.
        self.degraded: list[str] = []
        try:
            self.words = TicketMemory(device.primary)
            split = split_device(device, fine=fine)
            self.cells = split.cells
            self.staging = StagingPool(device.primary)
            self.builder = ExecutorBuilder(
                device, split, self.words, self.staging, current_poller, kernels, balanced=balanced
            )
            self._probe_words()
            self.slots = StagingRing(device.primary)
            self.memory = DeviceAllocator(device.primary, self.words)
            self.pinned = PinnedAllocator(device.primary)
            self.memory.reserve(reserve_bytes)
            if kernels:  # as many executors can be leased at once
                self.staging.prepare(self.cells.count + bool(self.cells.remainder_mask))
            self._prebuild()
        except BaseException:
            self.abandon()
            raise

    def _probe_words(self) -> None:
        """Test whether streams can write tickets, on a green context like the executors'."""
        context = self.builder.context(1)
        try:
            self.words.probe_stream_writes(context)
        finally:
            context.close()
        if self.words.refusal is not None:
            self._do_without(
                f"streams that write tickets, so events are used: {self.words.refusal}"
            )

    def _prebuild(self) -> None:
        """Make the executors of the menu, and those whose green contexts are kept.

        Stop if the device twice lacks capacity for one.

        Raises:
            CUDAError: Another failure, or no executor at all can be made.
        """
        menu = list(dict.fromkeys((*self.cells.menu(MAX_PREBUILT), *self.builder.kept())))
        for mask in menu:
            try:
                self.add(self.builder.make_again(mask))
            except CUDAError as error:
                if not self.executors or error.status not in CAPACITY:
                    raise
                present, wanted = len(self.executors), len(menu)
                self._do_without(f"{wanted - present} of {wanted} executors made at open: {error}")
                return

    def _do_without(self, what: str) -> None:
        self.degraded.append(f"device {self.device.ordinal} does without {what}")
        logger.warning("%s", self.degraded[-1])

    # -- executors ---------------------------------------------------------------------------------

    def prebuild_homes(self, masks: Collection[int]) -> None:
        """Make the executors over the classes' home cells. Blocks."""
        for mask in masks:
            if mask not in self.executors:
                self.add(self.builder.make_again(mask))

    def add(self, executor: Executor) -> None:
        """Make an executor available for leases."""
        self.executors[executor.mask] = executor

    def has_room(self, making: int) -> bool:
        """Say whether one more executor may be made, besides `making` that are being made."""
        return len(self.executors) + making < self._max_executors

    # -- its end -----------------------------------------------------------------------------------

    @property
    def busy(self) -> list[Executor]:
        """The executors that are leased or have work."""
        executors = self.executors.values()
        return [executor for executor in executors if executor.is_leased or not executor.is_idle]

    def close(self, *, is_building: bool = False) -> list[str]:
        """Close everything if no work is left; otherwise leave everything as it is. Blocks.

        Next to work that does not end, closing could wait for that work: on an H200 with driver
        580, cuMemHostUnregister and cuLibraryUnload do. A leased executor counts as working,
        because work without a ticket is not visible.

        Args:
            is_building: Whether an executor is being made here; it then counts as working.

        Returns:
            Descriptions of what is leased, has work, or could not be closed.
        """
        busy = [repr(executor) for executor in self.busy]
        if is_building:
            busy.append(f"{self.device!r}: an executor is being made")
        if self.memory.is_used_by_peers:
            busy.append(f"{self.device!r}: another device uses its memory")
        if busy:
            self.close_use(lambda: PoolClosed("this pool"))
            self.forget()
            return busy
        steps: list[Callable[[], object]] = [executor.close for executor in self.executors.values()]
        parts = self.memory, self.pinned, self.staging, self.slots, self.words, self.device
        steps += [part.close for part in parts]
        try:
            run_all(steps)
        except GreenschedError as error:
            self._forget_if_lost(error)
            self.device.abandon()
            logger.warning("closing %r: %s", self.device, error)
            return [f"{self.device!r}: {error}"]
        return []

    def abandon(self) -> None:
        """Close the parts that exist after a failed opening. Blocks."""
        steps = [executor.close for executor in self.executors.values()]
        names = "memory", "pinned", "staging", "slots", "words"
        parts = [getattr(self, name, None) for name in names]
        steps += [part.close for part in parts if part is not None]
        try:
            run_all([*steps, self.device.close])
        except GreenschedError as error:  # only the original failure is raised
            self._forget_if_lost(error)
            self.device.abandon()
            logger.warning("closing %r after a failure: %s", self.device, error)

    def _forget_if_lost(self, error: GreenschedError) -> None:
        """Keep later pools from using kept handles if an error shows that the device is lost."""
        if isinstance(error, DeviceFault):
            self.device.driver.kept.forget(self.device.ordinal)

    def forget(self) -> None:
        """Leave everything as it is until the process ends. Never waits."""
        self.device.primary.is_abandoned = True
        for executor in self.executors.values():
            executor.abandon()

    def device_failed(self, error: BaseException) -> None:
        """Record a device fault. From now on nothing waits for tickets, and no memory is reused.

        No handle of the device is used or destroyed any more.
        """
        self.device.driver.kept.forget(self.device.ordinal)
        self.device.health.record(error)
        self._wake_submit_waiters()

    def close_use(self, closed_by: Callable[[], GreenschedError]) -> None:
        """End the use of the device: its pool was forked, or closed while work was unfinished."""
        self.device.health.close(closed_by)
        self._wake_submit_waiters()

    def _wake_submit_waiters(self) -> None:
        for executor in self.executors.values():
            executor.wake_submit_waiters()


def index_of(device_pools: Sequence[DevicePool], ordinal: int) -> int:
    """Return the index of a device among a pool's.

    Raises:
        InvalidRequest: The pool does not have the device.
    """
    for index, device_pool in enumerate(device_pools):
        if device_pool.device.ordinal == ordinal:
            return index
    known = ", ".join(str(device_pool.device.ordinal) for device_pool in device_pools)
    raise InvalidRequest(f"device {ordinal} is not in this pool, which has {known}")
