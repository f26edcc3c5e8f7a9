"""One device as a pool uses it: how it is cut, the executors over it, its memory and its staging.

The device is cut once, by one split, so its cells are disjoint by construction; an executor is a
green context over a set of them. Executors are made beforehand from a menu (aligned blocks and
their complements), or when a request lacks one; those that are no longer wanted go least recently
used first, and never with work in flight.

Making and ending executors blocks: it happens on the pool's builder thread, and is entered by it
alone. `add`, `take` and `surplus` are entered under the pool's lock, once it is open: others look
through the executors under it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from greensched._cleanup import run_all
from greensched.device.allocators import DeviceAllocator, PinnedAllocator
from greensched.device.device import Device
from greensched.device.launch import check_runnable
from greensched.device.resources import (
    ContextOptions,
    SMResource,
    WorkqueueResource,
    WorkqueueResourceOptions,
)
from greensched.device.staging import StagingPool
from greensched.device.staging_ring import StagingRing
from greensched.device.tickets import TicketMemory
from greensched.errors import (
    CUDAError,
    GreenschedError,
    InvalidCombination,
    InvalidRequest,
    PoolClosed,
)
from greensched.execution.executor import Executor, ExecutorHost
from greensched.kernels import Kernel
from greensched.scheduling.cells import DeviceCells

logger = logging.getLogger("greensched")

#: Executors made beforehand at most, some 5 MiB and 1 ms each on an H200: the first lease of any
#: size then makes none. By eights it has 87, and by twos 131 that begin or end where the device
#: does, so that two who share it can move the border. What a driver can hold is not documented, so
#: the menu ends quietly where the driver says it is enough.
MENU = 132
#: Executors of other shapes kept at most, some 5 MiB each on an H200. Generous, because making one
#: waits there until nothing runs on the device, and driver 580 takes 4 of the 5 MiB back only with
#: the primary context (docs/measurements/h200-580/stuck-and-lost.json).
MAX_EXTRA = 96
#: Streams of an executor that have work at once: one of launches, one of calls (`executor`).
STREAMS = 2


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """A device cut into cells: its equal groups, and what was left over."""

    whole: SMResource
    groups: tuple[SMResource, ...]
    remainder: SMResource | None
    cells: DeviceCells


class DevicePool:
    """A device of a pool.

    Args:
        device: opened by the pool, closed here.
        home: the pool.
        kernels: loaded for every executor as it is made. Where there are any, everything else that
            a lease may need is made beforehand, too.
        reserve_bytes: of device memory, taken beforehand.
        fine: cut it as finely as can be, without large thread-block clusters.
        balanced: every executor asks for work queues that it does not share.
        max_extra: executors of other shapes than the menu's, kept at most.
    """

    def __init__(
        self,
        device: Device,
        home: ExecutorHost,
        kernels: Sequence[Kernel] = (),
        reserve_bytes: int = 0,
        *,
        fine: bool = False,
        balanced: bool = False,
        max_extra: int = MAX_EXTRA,
    ) -> None:
        self.device = device
        self._home = home
        self._kernels = kernels
        self._max_extra = max_extra
        #: The other devices of the pool, by ordinal; known once all are opened.
        self.neighbours: Mapping[int, DevicePool] = {}
        self.executors: OrderedDict[int, Executor] = OrderedDict()
        self.executors_made = 0
        try:
            self._queues = [_balanced(device)] if balanced else []
            self.words = TicketMemory(device.primary)
            self.cut = split_device(device, fine=fine)
            self._try_words()
            self.menu = frozenset(self.cells.menu(MENU))
            self.slots = StagingRing(device.primary)
            self.staging = StagingPool(device.primary)
            self.memory = DeviceAllocator(device.primary, self.words)
            self.pinned = PinnedAllocator(device.primary)
            self.memory.reserve(reserve_bytes)
            if kernels:  # at most so many executors are leased at once
                self.staging.prepare(self.cells.count + bool(self.cells.remainder_mask))
            self._make_menu()
        except BaseException:
            self.abandon()
            raise

    @property
    def cells(self) -> DeviceCells:
        """What planning counts with."""
        return self.cut.cells

    def _try_words(self) -> None:
        """On a green context, as the executors are."""
        context = self.device.create_context(ContextOptions(resources=self.cut.groups[:1]))
        try:
            self.words.probe_stream_writes(context)
        finally:
            context.close()

    def _make_menu(self) -> None:
        for mask in self.cells.menu(MENU):
            try:
                self.add(self.make(mask))
            except CUDAError as error:
                if not self.executors:
                    raise
                logger.info("%r holds %d executors: %s", self.device, len(self.executors), error)
                return

    # -- executors ---------------------------------------------------------------------------------

    def take(self, mask: int) -> Executor:
        """The executor over a set of cells, which is made; leased and used from now on."""
        executor = self.executors[mask]
        executor.is_leased = True
        self.executors.move_to_end(mask)
        return executor

    def make(self, mask: int) -> Executor:
        """Makes an executor, to be added, unless there is one. Blocks.

        Raises:
            CUDAError: the driver could not.
        """
        executor = self.executors.get(mask)
        if executor is None:
            executor = Executor(
                self.device, self._resources(mask), mask, self.words, self.staging, self._home
            )
            self._prepare(executor)
            self.executors_made += 1
        return executor

    def _prepare(self, executor: Executor) -> None:
        """What a launch would have to wait for is done before anybody has the executor."""
        try:
            for kernel in self._kernels:
                check_runnable(kernel, self.device.driver)
                with executor.context.entered():
                    executor.cache.load(kernel)
            if self._kernels:
                executor.create_copy_stream()
        except BaseException:
            executor.close()
            raise

    def add(self, executor: Executor) -> None:
        """An executor that was made can be taken from here on."""
        self.executors[executor.mask] = executor

    def surplus(self, keep: Collection[int]) -> list[int]:
        """Executors to end, least recently used first: beside the menu, not leased, too many."""
        extra = [m for m in self.executors if m not in self.menu]
        spare = [m for m in extra if m not in keep and not self.executors[m].is_leased]
        idle = [m for m in spare if self.executors[m].is_idle]
        return idle[: max(0, len(extra) - self._max_extra)]

    def _resources(self, mask: int) -> list[SMResource | WorkqueueResource]:
        split_device = self.cut
        if mask & self.cells.full_mask == self.cells.full_mask:  # alone, or as one of several there
            return [split_device.whole, *self._queues]
        chosen = [group for i, group in enumerate(split_device.groups) if mask >> i & 1]
        if mask & self.cells.remainder_mask and split_device.remainder is not None:
            chosen.append(split_device.remainder)
        return [*chosen, *self._queues]

    # -- its end -----------------------------------------------------------------------------------

    @property
    def busy(self) -> list[Executor]:
        """The executors that are leased, or have work."""
        executors = self.executors.values()
        return [executor for executor in executors if executor.is_leased or not executor.is_idle]

    def close(self, *, is_held: bool = False) -> list[str]:
        """Ends everything, if nothing works any more; else leaves all as it is. Blocks.

        Beside work that does not end, much of it would wait for that: cuMemHostUnregister and
        cuLibraryUnload do, on an H200 with driver 580. A leased executor counts as one that works:
        what its holder put there without a ticket shows nowhere.

        Args:
            is_held: an executor is being made here meanwhile; it counts as one that works.

        Returns:
            What still is leased or has work, or could not be ended.
        """
        busy = [repr(executor) for executor in self.busy]
        if is_held:
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
        except CUDAError as error:
            logger.warning("closing %r: %s", self.device, error)
            return [f"{self.device!r}: {error}"]
        return []

    def abandon(self) -> None:
        """Ends what was made of it, when opening failed half way. Blocks."""
        steps = [executor.close for executor in self.executors.values()]
        names = "memory", "pinned", "staging", "slots", "words"
        made = [getattr(self, name, None) for name in names]
        steps += [part.close for part in made if part is not None]
        try:
            run_all([*steps, self.device.close])
        except CUDAError as error:
            logger.warning("closing %r after a failure: %s", self.device, error)

    def forget(self) -> None:
        """Leaves all as it is, dead or at work, until the process ends. Never waits."""
        self.device.primary.is_abandoned = True
        for executor in self.executors.values():
            executor.abandon()

    def device_failed(self, error: BaseException) -> None:
        """Record a device fault: no ticket is waited for any more, and no memory comes back."""
        self.device.health.record(error)
        self._wake_submit_waiters()

    def close_use(self, closed_by: Callable[[], GreenschedError]) -> None:
        """End the device's use: its pool was closed over unfinished work, or forked."""
        self.device.health.close(closed_by)
        self._wake_submit_waiters()

    def _wake_submit_waiters(self) -> None:
        for executor in self.executors.values():
            executor.wake_submit_waiters()


def split_device(device: Device, *, fine: bool = False) -> DeviceSplit:
    """Cuts a device into its smallest cells, and finds out whether the remainder joins them.

    One split only: a second one would overlap the first.

    Args:
        fine: the smallest there are when SMs need not be co-scheduled.
    """
    whole = device.resources.sm
    if fine:
        groups, remainder = whole.split_evenly(1, fine=True)
    else:
        groups, remainder = whole.split_evenly(whole.min_partition_size)
    left = remainder.sm_count if remainder is not None else 0
    joins = remainder is not None and _joins(device, groups[0], remainder)
    cells = DeviceCells(size=groups[0].sm_count, count=len(groups), remainder=left, joins=joins)
    return DeviceSplit(whole, tuple(groups), remainder, cells)


def _balanced(device: Device) -> WorkqueueResource:
    """What every executor asks for: work queues of its own, where that can be."""
    queue = device.resources.workqueue
    queue.configure(
        WorkqueueResourceOptions(sharing_scope="green_ctx_balanced", concurrency_limit=STREAMS)
    )
    return queue


def _joins(device: Device, group: SMResource, remainder: SMResource) -> bool:
    """Tried once: from CUDA 13.1 on resources of unequal alignment are refused."""
    try:
        device.create_context(ContextOptions(resources=[group, remainder])).close()
    except (CUDAError, InvalidCombination):
        return False
    return True


def index_of(sites: Sequence[DevicePool], ordinal: int) -> int:
    """Which of a pool's devices has an ordinal.

    Raises:
        InvalidRequest: none.
    """
    for index, site in enumerate(sites):
        if site.device.ordinal == ordinal:
            return index
    mine = ", ".join(str(site.device.ordinal) for site in sites)
    raise InvalidRequest(f"device {ordinal} is not in this pool, which has {mine}")
