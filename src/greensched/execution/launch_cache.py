"""Prepared launches of one executor, which are kept for reuse."""

from __future__ import annotations

from greensched.device.arguments import KernelArguments
from greensched.device.device import Device
from greensched.device.launch import LaunchConfig, PreparedLaunch, check_limits
from greensched.device.streams import Stream
from greensched.kernels import Abandonment, Kernel

#: The most kinds of launches that are kept; then the cache is cleared.
MAX_LAUNCHES = 256
#: The most launches of closed bound launches that are kept for each kind.
MAX_SPARE = 8

#: A kernel and its geometry, as in `LaunchConfig.key`.
Kind = tuple[Kernel, str]


class LaunchCache:
    """Prepared launches on one stream, by kernel and geometry."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream
        #: Launches for `Partition.launch`, which sets their argument values each time.
        self.launches: dict[Kind, PreparedLaunch] = {}
        #: Launches of closed bound launches, for new bound launches of the same kind.
        self.spare: dict[Kind, list[PreparedLaunch]] = {}
        #: Kernels whose launch does not block, because they were loaded or launched here.
        self.loaded: set[Kernel] = set()

    def load(self, kernel: Kernel, abandonment: Abandonment | None = None) -> None:
        """Compile and load a kernel. The executor's context must be current. Blocks.

        Errors are those of `Loader.load`.
        """
        self._device.loader.load(kernel, abandonment)
        self.loaded.add(kernel)

    def get(self, kernel: Kernel, config: LaunchConfig) -> PreparedLaunch | None:
        """Return the launch, prepared if necessary; None if the kernel is not loaded here.

        Never blocks.

        Raises:
            InvalidLaunch, CUDAError: The kernel cannot be launched with this geometry.
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
        """Prepare a launch with its own arguments. The kernel is loaded. Never blocks."""
        handle = self._device.loader.loaded(kernel)
        assert handle is not None
        check_limits(kernel, handle, config, self._device.facts, self._device.driver)
        return PreparedLaunch(self._stream, config, kernel, handle, arguments)

    def recycle(self, prepared: PreparedLaunch) -> None:
        """Keep the prepared launch of a closed bound launch, without its buffers."""
        spare = self.spare.get(prepared.kind)
        if spare is None:
            if len(self.spare) >= MAX_LAUNCHES:
                self.spare.clear()
            spare = self.spare[prepared.kind] = []
        if len(spare) < MAX_SPARE:
            prepared.arguments.buffers.clear()
            spare.append(prepared)
