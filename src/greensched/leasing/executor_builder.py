"""Making executors: a green context over a set of cells, with everything that leases need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from greensched._cleanup import first_error
from greensched.context import Context
from greensched.device.device import Device
from greensched.device.launch import check_runnable
from greensched.device.resources import (
    ContextOptions,
    WorkqueueResource,
    WorkqueueResourceOptions,
)
from greensched.device.staging import StagingPool
from greensched.device.tickets import TicketMemory
from greensched.driver.status import CAPACITY
from greensched.errors import CUDAError
from greensched.execution.completion_poller import CompletionPoller
from greensched.execution.executor import Executor
from greensched.kernels import Kernel
from greensched.leasing.device_split import DeviceSplit

#: The streams of an executor that can have work at the same time: launches and calls.
STREAMS = 2


class ExecutorBuilder:
    """Makes the executors of one device. All its methods block.

    Args:
        device: The device with the SMs.
        split: The split of the device into cells.
        words: Memory for the executors' tickets.
        staging: Chunks for the executors' large copies.
        current_poller: Returns the pool's poller of the running loop, or raises NoLoop.
        kernels: Kernels to load for each executor.
        balanced: Whether each executor gets work queues that it does not share, where possible.
    """

    def __init__(
        self,
        device: Device,
        split: DeviceSplit,
        words: TicketMemory,
        staging: StagingPool,
        current_poller: Callable[[], CompletionPoller],
        kernels: Sequence[Kernel],
        *,
        balanced: bool,
    ) -> None:
        self._device = device
        self._split = split
        self._words = words
        self._staging = staging
        self._current_poller = current_poller
        self._kernels = kernels
        self._queues = [_balanced_queues(device)] if balanced else []
        self.made = 0

    def make(self, mask: int) -> Executor:
        """Make the executor over a set of cells.

        Raises:
            CUDAError: The driver refused.
        """
        context = self.context(mask)
        words, staging = self._words, self._staging
        try:
            with context.entered():  # once, instead of for each stream and event
                poller = self._current_poller
                executor = Executor(self._device, context, mask, words, staging, poller)
        except BaseException:
            context.close()
            raise
        self._prepare(executor)
        self.made += 1
        return executor

    def make_again(self, mask: int) -> Executor:
        """Make an executor; if the device lacks capacity, try once more."""
        try:
            return self.make(mask)
        except CUDAError as error:
            if error.status not in CAPACITY:
                raise
            first = first_error(error)
        try:
            return self.make(mask)
        except CUDAError:
            raise first from None

    @property
    def is_fine(self) -> bool:
        """Whether the device is split as finely as possible."""
        return self._split.fine

    def kept(self) -> list[int]:
        """Return the cells of the green contexts that earlier pools have left."""
        kept, of_split = self._device.driver.kept, self._split.key(0, bool(self._queues))
        return kept.cells(self._device.ordinal, of_split)

    def context(self, mask: int) -> Context:
        """Return the green context over a set of cells, a kept one or a new one."""
        options = ContextOptions(resources=[*self._split.resources(mask), *self._queues])
        return self._device.lend_context(self._split.key(mask, bool(self._queues)), options)

    def _prepare(self, executor: Executor) -> None:
        """Do in advance whatever a launch would otherwise wait for."""
        try:
            for kernel in self._kernels:
                check_runnable(kernel, self._device.driver)
                with executor.context.entered():
                    executor.cache.load(kernel)
            if self._kernels:
                executor.create_copy_stream()
        except BaseException:
            executor.close()
            raise


def _balanced_queues(device: Device) -> WorkqueueResource:
    """Return work queues that the executor shares with no other, where possible."""
    queue = device.resources.workqueue
    queue.configure(
        WorkqueueResourceOptions(sharing_scope="green_ctx_balanced", concurrency_limit=STREAMS)
    )
    return queue
