"""One device of a pool: how it is split, the executors over it, its memory and its staging.

The device is split once, so its cells are disjoint; an executor is a green context over a set of
cells. Executors are made beforehand over a set of shapes (aligned blocks and their complements),
or when a request misses one; those in excess are closed least recently used first, and never with
work in flight.

Making and closing executors blocks: it happens on the pool's builder thread, which alone may do
it. Once the pool is open, its lock guards `add`, `take` and `evictable`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

from greensched._cleanup import run_all
from greensched.device.allocators import DeviceAllocator, PinnedAllocator
from greensched.device.device import Device
from greensched.device.staging import StagingPool
from greensched.device.staging_ring import StagingRing
from greensched.device.tickets import TicketMemory
from greensched.driver.status import CAPACITY
from greensched.errors import CUDAError, DeviceFault, GreenschedError, InvalidRequest, PoolClosed
from greensched.execution.executor import Executor, ExecutorHost
from greensched.kernels import Kernel
from greensched.leasing.device_split import split_device
from greensched.leasing.executor_builder import ExecutorBuilder

logger = logging.getLogger("greensched")

#: Executors made beforehand at most, some 6 MiB and 1 ms each on an H200, so that the first lease
#: of any size waits for none. Split into groups of 8 SMs a device has 87 shapes, and split into
#: groups of 2 it has 131 that begin or end where the device does, so that two leases that share it
#: can move their border, and 26 more that are aligned blocks of 8 SMs and more, for three leases
#: and more. What a driver can hold is not documented: making them ends quietly where it refuses.
MAX_PREBUILT = 160
#: Executors of other shapes kept at most: their threads, events and users' values. Many, because
#: making a green context waits on an H200 until nothing runs on the device. The context, of some 5
#: MiB, is kept even without its executor (`driver.kept_handles`).
MAX_EXTRA = 96


class DevicePool:
    """A device of a pool.

    Args:
        device: opened by the pool, and closed here.
        host: the pool.
        kernels: loaded for every executor as it is made. If there are any, everything else that a
            lease may need is allocated beforehand, too.
        reserve_bytes: device memory allocated beforehand.
        fine: split the device as finely as possible, without large thread-block clusters.
        balanced: give every executor work queues that it does not share, where possible.
        max_extra: executors that were not prebuilt, kept at most.
    """

    def __init__(
        self,
        device: Device,
        host: ExecutorHost,
        kernels: Sequence[Kernel] = (),
        reserve_bytes: int = 0,
        *,
        fine: bool = False,
        balanced: bool = False,
        max_extra: int = MAX_EXTRA,
    ) -> None:
        self.device = device
        self._max_extra = max_extra
        #: The other devices of the pool, by ordinal; set once all are open.
        self.neighbours: Mapping[int, DevicePool] = {}
        #: By cells, the least recently used first.
        self.executors: OrderedDict[int, Executor] = OrderedDict()
        #: Values that users made with executors which are closed.
        self.values_made = 0
        #: What the device does without, each in a sentence with its cause.
        self.degraded: list[str] = []
        try:
            self.words = TicketMemory(device.primary)
            split = split_device(device, fine=fine)
            self.cells = split.cells
            self.staging = StagingPool(device.primary)
            self.builder = ExecutorBuilder(
                device, split, self.words, self.staging, host, kernels, balanced=balanced
            )
            self._probe_words()
            self.prebuilt = frozenset(self.cells.menu(MAX_PREBUILT))
            self.slots = StagingRing(device.primary)
            self.memory = DeviceAllocator(device.primary, self.words)
            self.pinned = PinnedAllocator(device.primary)
            self.memory.reserve(reserve_bytes)
            if kernels:  # at most this many executors are leased at once
                self.staging.prepare(self.cells.count + bool(self.cells.remainder_mask))
            self._prebuild()
        except BaseException:
            self.abandon()
            raise

    def _probe_words(self) -> None:
        """Try whether streams can write tickets, on a green context as the executors have."""
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
        """Make the executors of the menu; end where the device lacks the capacity for one, twice.

        Raises:
            CUDAError: anything else failed, or not even one executor can be made.
        """
        menu = self.cells.menu(MAX_PREBUILT)
        for mask in menu:
            try:
                self.add(self.builder.make_again(mask))
            except CUDAError as error:
                if not self.executors or error.status not in CAPACITY:
                    raise
                have, wanted = len(self.executors), len(menu)
                self._do_without(f"{wanted - have} of {wanted} executors made at open: {error}")
                return

    def _do_without(self, what: str) -> None:
        self.degraded.append(f"device {self.device.ordinal} does without {what}")
        logger.warning("%s", self.degraded[-1])

    # -- executors ---------------------------------------------------------------------------------

    def prebuild_homes(self, masks: Collection[int]) -> None:
        """Make the executors over the home cells of classes, and evict none of them. Blocks."""
        self.prebuilt |= {*masks}
        for mask in masks:
            if mask not in self.executors:
                self.add(self.builder.make_again(mask))

    def add(self, executor: Executor) -> None:
        """Let an executor be taken from here on."""
        self.executors[executor.mask] = executor

    def evictable(self, keep: Collection[int]) -> list[int]:
        """Return the cells of executors to close, least recently used first.

        Those in excess of the most that are kept: neither prebuilt nor to keep, without a lease or
        work.
        """
        extra = [mask for mask in self.executors if mask not in self.prebuilt]
        unused = [m for m in extra if m not in keep and not self.executors[m].is_leased]
        idle = [mask for mask in unused if self.executors[mask].is_idle]
        return idle[: max(0, len(extra) - self._max_extra)]

    # -- its end -----------------------------------------------------------------------------------

    @property
    def busy(self) -> list[Executor]:
        """The executors that are leased, or have work."""
        executors = self.executors.values()
        return [executor for executor in executors if executor.is_leased or not executor.is_idle]

    def close(self, *, is_building: bool = False) -> list[str]:
        """Close everything if nothing works any more; else leave all as it is. Blocks.

        Beside work that does not end, much of it would wait for that work: cuMemHostUnregister and
        cuLibraryUnload do, on an H200 with driver 580. A leased executor counts as one that works,
        because work without a ticket does not show.

        Args:
            is_building: an executor is being made here; it counts as one that works.

        Returns:
            What is leased or has work, or could not be closed.
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
        steps: list[Callable[[], object]] = [each.close for each in self.executors.values()]
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
        """Close what exists of it, when opening failed half way. Blocks."""
        steps = [executor.close for executor in self.executors.values()]
        names = "memory", "pinned", "staging", "slots", "words"
        parts = [getattr(self, name, None) for name in names]
        steps += [part.close for part in parts if part is not None]
        try:
            run_all([*steps, self.device.close])
        except GreenschedError as error:  # the failure itself is raised, and not this one
            self._forget_if_lost(error)
            self.device.abandon()
            logger.warning("closing %r after a failure: %s", self.device, error)

    def _forget_if_lost(self, error: GreenschedError) -> None:
        """Have no later pool use the kept handles of a device that an error shows to be lost."""
        if isinstance(error, DeviceFault):
            self.device.driver.kept.forget(self.device.ordinal)

    def forget(self) -> None:
        """Leave everything as it is, lost or at work, until the process ends. Never waits."""
        self.device.primary.is_abandoned = True
        for executor in self.executors.values():
            executor.abandon()

    def device_failed(self, error: BaseException) -> None:
        """Record a device fault: no ticket is waited for any more, and no memory comes back.

        No handle of the device is used again, nor destroyed.
        """
        self.device.driver.kept.forget(self.device.ordinal)
        self.device.health.record(error)
        self._wake_submit_waiters()

    def close_use(self, closed_by: Callable[[], GreenschedError]) -> None:
        """End the device's use: its pool was closed over unfinished work, or forked."""
        self.device.health.close(closed_by)
        self._wake_submit_waiters()

    def _wake_submit_waiters(self) -> None:
        for executor in self.executors.values():
            executor.wake_submit_waiters()


def index_of(device_pools: Sequence[DevicePool], ordinal: int) -> int:
    """Return the index of a pool's device.

    Raises:
        InvalidRequest: the pool does not have it.
    """
    for index, device_pool in enumerate(device_pools):
        if device_pool.device.ordinal == ordinal:
            return index
    known = ", ".join(str(each.device.ordinal) for each in device_pools)
    raise InvalidRequest(f"device {ordinal} is not in this pool, which has {known}")
