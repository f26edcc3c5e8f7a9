"""Prepared launches of one executor, kept for reuse."""

from __future__ import annotations

from greensched.device.arguments import KernelArguments
from greensched.device.device import Device
from greensched.device.launch import LaunchConfig, PreparedLaunch, check_limits
from greensched.device.streams import Stream
from greensched.kernels import Abandonment, Kernel

#: Kinds of launches kept at most; at the bound the cache is cleared.
MAX_LAUNCHES = 256
#: Kept launches of closed bound launches, for each kind: more are rarely bound at once.
MAX_SPARE = 8

#: A kernel with its geometry, as `LaunchConfig.key` says it.
Kind = tuple[Kernel, str]


class LaunchCache:
    """Prepared launches on one stream, by kernel and geometry."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream
        #: For `Partition.launch`: their argument values are set at each launch.
        self.launches: dict[Kind, PreparedLaunch] = {}
        #: Of bound launches that are closed, for the next bound launch of the same kind.
        self.spare: dict[Kind, list[PreparedLaunch]] = {}
        #: Kernels whose launch no longer blocks: they are loaded, or were launched here.
        self.loaded: set[Kernel] = set()

    def load(self, kernel: Kernel, abandonment: Abandonment | None = None) -> None:
        """Compile and load a kernel; the executor's context must be current. Blocks.

        Raises as `Loader.load`.
        """
        self._device.loader.load(kernel, abandonment)
        self.loaded.add(kernel)

    def get(self, kernel: Kernel, config: LaunchConfig) -> PreparedLaunch | None:
        """Return the prepared launch, made if need be; None if the kernel is not loaded here.

        Never blocks.

        Raises:
            InvalidLaunch, CUDAError: the kernel cannot be launched with this geometry.
        """
        prepared = self.launches.get((kernel, config.key))
        if prepared is None and kernel in self.loaded:
            prepared = self.create(kernel, config, KernelArguments(kernel, self._device.ordinal))
            if len(self.launches) >= MAX_LAUNCHES:
                self.launches.clear()
            self.launches[kernel, config.key] = prepared
        return prepared

    def create(
        self, kernel: Kernel, config: LaunchConfig, arguments: KernelArguments
    ) -> PreparedLaunch:
        """Prepare a launch with its own arguments; the kernel has its handle. Never blocks."""
        handle = self._device.loader.loaded(kernel)
        assert handle is not None
        check_limits(kernel, handle, config, self._device.facts, self._device.driver)
        return PreparedLaunch(self._stream, config, kernel, handle, arguments)

    def recycle(self, prepared: PreparedLaunch) -> None:
        """Keep the prepared launch of a closed bound launch, and none of its buffers."""
        spare = self.spare.get(prepared.kind)
        if spare is None:
            if len(self.spare) >= MAX_LAUNCHES:
                self.spare.clear()
            spare = self.spare[prepared.kind] = []
        if len(spare) < MAX_SPARE:
            prepared.arguments.buffers.clear()
            spare.append(prepared)
