"""Launching: the geometry, its checks, and the launch itself.

A kernel is launched on a stream, whose context determines the SMs. The calling thread's current
context does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from greensched.device.arguments import KernelArguments
from greensched.device.foreign_arrays import ForeignArray
from greensched.device.streams import Stream
from greensched.driver.interface import Driver
from greensched.driver.types import DEFAULT_MAX_SHARED_BYTES, KernelHandle
from greensched.errors import InvalidLaunch, InvalidRequest, NotSimulable
from greensched.kernels import Kernel
from greensched.typing import DeviceFacts, Dim3


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """The geometry of a launch.

    Attributes:
        grid: Blocks in x, y, z. With an int, or fewer numbers, the others are 1.
        block: Threads of a block, in the same form.
        shmem_size: Bytes of dynamic shared memory of each block.

    Raises:
        InvalidLaunch: A number is not a positive int (`shmem_size`: not >= 0). The limits of
            a device are checked at the launch.
    """

    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    shmem_size: int = 0
    #: Equal configurations have the same string, for look-ups: a string caches its hash.
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", _dim3("grid", self.grid))
        object.__setattr__(self, "block", _dim3("block", self.block))
        size: object = self.shmem_size
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 0:
            raise InvalidLaunch("shmem_size", size, "a whole number of bytes, >= 0")
        object.__setattr__(self, "shmem_size", int(size))
        object.__setattr__(self, "key", f"{self.grid} {self.block} {self.shmem_size}")

    @property
    def grid3(self) -> Dim3:
        """Blocks in x, y, z."""
        return self.grid  # type: ignore[return-value]  # made so in __post_init__

    @property
    def block3(self) -> Dim3:
        """Threads of a block in x, y, z."""
        return self.block  # type: ignore[return-value]  # made so in __post_init__

    def check(self, facts: DeviceFacts) -> None:
        """Check the limits of a device.

        Raises:
            InvalidLaunch: The grid, block or shared memory exceeds a limit; says which.
        """
        for what, sizes, limits in (
            ("grid", self.grid3, facts.max_grid),
            ("block", self.block3, facts.max_block),
        ):
            for axis, size, limit in zip("xyz", sizes, limits, strict=True):
                if size > limit:
                    raise InvalidLaunch(f"{what}.{axis}", size, limit)
        self.check_threads(facts.max_threads_per_block)
        if self.shmem_size > facts.max_shared_bytes:
            raise InvalidLaunch("shmem_size", self.shmem_size, facts.max_shared_bytes)

    def check_threads(self, limit: int, whose: str = "the device") -> None:
        """Check the threads of a block against the limit of a device or a kernel.

        Raises:
            InvalidLaunch: There are more threads.
        """
        x, y, z = self.block3
        if x * y * z > limit:
            raise InvalidLaunch(
                f"threads of a block ({x} x {y} x {z}, for {whose})", x * y * z, limit
            )


class PreparedLaunch:
    """A prepared launch. `launch()` submits it with the present argument values. Never blocks.

    Args:
        stream: The stream.
        handle: The handle of the loaded kernel, which `check_limits` has accepted.
        arguments: The arguments, which the caller sets before each `launch` or once.
    """

    __slots__ = ("_parts", "arguments", "launch")

    def __init__(
        self,
        stream: Stream,
        config: LaunchConfig,
        kernel: Kernel,
        handle: KernelHandle,
        arguments: KernelArguments,
    ) -> None:
        self._parts = (stream, config, kernel, handle)
        self.arguments = arguments
        self.launch = stream.context.driver.bind_launch(
            stream.handle, handle, config.grid3, config.block3, config.shmem_size, arguments.address
        )

    @property
    def kernel(self) -> Kernel:
        return self._parts[2]

    @property
    def kind(self) -> tuple[Kernel, str]:
        """The key that interchangeable launches share."""
        return self._parts[2], self._parts[1].key

    def with_stream(self, stream: Stream) -> PreparedLaunch:
        """Return the same launch, with the same arguments, for another stream of the device."""
        return PreparedLaunch(stream, *self._parts[1:], self.arguments)

    def copy(self) -> PreparedLaunch:
        """Return the same launch with a copy of the present values."""
        return self.with_arguments(self.arguments.copy())

    def with_arguments(self, arguments: KernelArguments) -> PreparedLaunch:
        """Return the same launch with other arguments."""
        return PreparedLaunch(*self._parts, arguments)


def check_limits(
    kernel: Kernel, handle: KernelHandle, config: LaunchConfig, facts: DeviceFacts, driver: Driver
) -> None:
    """Check by driver calls whether a loaded kernel can be launched with this geometry.

    Raises:
        InvalidLaunch: The kernel cannot have this many threads or this much shared memory.
    """
    limits = driver.kernel_limits(handle, facts.ordinal)
    config.check_threads(limits.max_threads_per_block, f"kernel {kernel.name!r}")
    if config.shmem_size + limits.static_shared_bytes > DEFAULT_MAX_SHARED_BYTES:
        most = facts.max_shared_bytes - limits.static_shared_bytes
        if config.shmem_size > most:
            raise InvalidLaunch("shmem_size", config.shmem_size, most)
        # Allow the maximum, because it applies to the kernel and another launch may need more.
        driver.allow_shared(handle, facts.ordinal, most)


def check_launch(config: object, kernel: object, facts: DeviceFacts, driver: Driver) -> None:
    """Check a launch as far as possible before anything is loaded or queued.

    Raises:
        InvalidRequest: Not a kernel, or not a launch configuration.
        InvalidLaunch: The geometry exceeds a limit of the device.
        NotSimulable: The driver runs references, and the kernel has no reference or no cost.
    """
    if not isinstance(config, LaunchConfig) or not isinstance(kernel, Kernel):
        raise InvalidRequest(
            "launch() takes a LaunchConfig first and a Kernel second; "
            f"got {type(config).__name__}, {type(kernel).__name__}"
        )
    config.check(facts)
    check_runnable(kernel, driver)


def check_runnable(kernel: Kernel, driver: Driver) -> None:
    """Check, on a driver that runs references, that a kernel has a reference and a cost.

    Raises:
        NotSimulable: The kernel has no reference or no cost; says how to add one.
    """
    if driver.needs_binary:
        return
    if kernel.spec.reference is None:
        raise NotSimulable(kernel.name)
    if kernel.spec.cost is None:
        raise NotSimulable(kernel.name, "cost")


class HasStream(Protocol):
    """An object that can replace its stream, such as a partition."""

    @property
    def stream(self) -> Stream: ...


def launch(stream: Stream | HasStream, config: LaunchConfig, kernel: Kernel, *args: object) -> None:
    """Launch a kernel on a stream, with cuda.core's order of arguments, and do not wait.

    A partition may replace its stream. Unlike `Partition.launch` this call does not order the
    launch after other streams' work on the same buffers, report its end, or keep its arguments
    alive. It does order it after the producers of other libraries' arrays. The first launch of a
    kernel on a device compiles and loads it, which blocks: not for an event-loop thread.

    Raises:
        Closed: The stream or its context is closed.
        InvalidRequest: Not a stream, not a kernel, or not a launch configuration.
        InvalidLaunch: The geometry exceeds a limit of the device or the kernel.
        ArgumentMismatch: The number or kind of arguments is wrong.
        InvalidArray, WrongDevice: An array cannot be used here.
        NotSimulable: The driver is simulated, and the kernel has no reference or no cost.
        CompileFailed: The kernel's source does not compile.
        CUDAError: The driver refused the launch.
    """
    if not isinstance(stream, Stream):
        target, stream = stream, getattr(stream, "stream", None)  # type: ignore[assignment]  # checked next
        if not isinstance(stream, Stream):
            raise InvalidRequest(
                f"launch() takes a Stream or a Partition first; got {type(target).__name__}: "
                "launch(stream, config, kernel, *args)"
            )
    stream.check()
    context = stream.context
    check_launch(config, kernel, context.facts, context.driver)
    arguments = KernelArguments(kernel, context.device_id)
    arguments.fill(args)
    handle = context.loader.loaded(kernel)
    if handle is None:
        with context.primary.entered():  # a green context may be current on another thread
            handle = context.loader.load(kernel)
    check_limits(kernel, handle, config, context.facts, context.driver)
    prepared = PreparedLaunch(stream, config, kernel, handle, arguments)
    for used in arguments.buffers.values():
        if stream.recorded is not None:  # it is ordered when the captured graph is launched
            stream.recorded.append(used)
        elif isinstance(used[0], ForeignArray):
            used[0].order(stream)
    prepared.launch()


def _dim3(what: str, value: object) -> Dim3:
    numbers = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(numbers) <= 3:
        raise InvalidLaunch(what, value, "one to three numbers")
    for axis, number in zip("xyz", numbers, strict=False):
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < 1:
            raise InvalidLaunch(f"{what}.{axis}", repr(number), "a whole number, at least 1")
    x, y, z = (*(int(n) for n in numbers), 1, 1)[:3]
    return x, y, z
