"""Public aliases, enums, protocols and small frozen values, without behaviour."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeVar

T = TypeVar("T")


# -- sizes of a partition ---------------------------------------------------------------------


class NamedSize(enum.Enum):
    """Sizes that depend on the device."""

    ALL = "all"
    REST = "rest"

    def __repr__(self) -> str:
        return self.name


#: Every SM of one device, including the remainder of its split.
ALL: Final = NamedSize.ALL
#: Every SM of the same device that no other part of the request takes.
REST: Final = NamedSize.REST

#: `16`; `(8, 64)`, least and most; `(8, ALL)`; `ALL`; `REST`.
Size = int | tuple[int, int | Literal[NamedSize.ALL]] | NamedSize

#: A grid or block: blocks (threads) in x, y, z; an int stands for (n, 1, 1).
Dim3 = tuple[int, int, int]

#: How a pool splits a device.
Granularity = Literal["coscheduled", "fine"]

#: Which contexts share a work queue: all of the device, or, if possible, none of those with this
#: value. The names are cuda.core's, for CUdevWorkqueueConfigScope.
SharingScope = Literal["device_ctx", "green_ctx_balanced"]


# -- drivers and contexts ---------------------------------------------------------------------


class Feature(enum.Enum):
    """A feature that a driver may lack; the value names it and what it needs."""

    STRUCTURED_SPLIT = "a split into groups of different sizes (CUDA 13.1)"
    WORKQUEUES = "work-queue resources (CUDA 13.1)"
    WRITE_VALUE = "stream memory operations"


class ContextFlags(enum.IntFlag):
    """Options of a context (CUctx_flags of cuda.h), including at most one way to wait.

    `MAP_HOST` is always set from CUDA 11 on. `LMEM_RESIZE_TO_MAX` keeps local memory at the largest
    size that a launch has needed.
    """

    SCHED_AUTO = 0
    SCHED_SPIN = 1
    SCHED_YIELD = 2
    SCHED_BLOCKING_SYNC = 4
    MAP_HOST = 8
    LMEM_RESIZE_TO_MAX = 16


class Limit(enum.IntEnum):
    """A limit of a context (CUlimit of cuda.h), in bytes."""

    STACK = 0
    PRINTF_FIFO = 1
    MALLOC_HEAP = 2
    PERSISTING_L2 = 6


class CacheConfig(enum.IntEnum):
    """A kernel's preference for L1 cache or shared memory (CUfunc_cache of cuda.h): a hint.

    Hardware whose L1 cache and shared memory have fixed sizes ignores it.
    """

    PREFER_NONE = 0
    PREFER_SHARED = 1
    PREFER_L1 = 2
    PREFER_EQUAL = 3


class CaptureMode(enum.IntEnum):
    """How strictly a thread refuses calls that could spoil a capture (CUstreamCaptureMode)."""

    GLOBAL = 0
    THREAD_LOCAL = 1
    RELAXED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The constant properties of a device. Sizes are in bytes. Limits are the driver's."""

    ordinal: int
    name: str
    uuid: str
    compute_capability: tuple[int, int]
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    warp_size: int
    max_threads_per_block: int
    max_threads_per_sm: int
    max_block: Dim3
    max_grid: Dim3
    max_shared_bytes: int
    copy_engines: int

    @property
    def arch(self) -> str:
        """The compiler's name of this architecture, such as `sm_90`."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"


# -- kernels ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter, as CUDA passes it.

    Attributes:
        name: The name in the source.
        dtype: numpy's code of the scalar or of the pointer's target (`"f4"`); `"V1"` for void.
        pointer: Whether it is passed as a device address.
        const: Whether the kernel only reads the memory that it points to.
    """

    name: str
    dtype: str
    pointer: bool = False
    const: bool = False

    @property
    def size(self) -> int:
        """Bytes among the launch parameters. CUDA aligns a scalar to its own size."""
        return 8 if self.pointer else int(self.dtype[1:])


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """What a reference or a cost function gets about its launch."""

    grid: Dim3
    block: Dim3
    shared_bytes: int
    device: DeviceFacts
    #: The SMs of the stream; a simulated kernel occupies no others.
    sms: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The work of a kernel, for the simulated clock.

    Alone on S SMs a kernel takes `fixed_ns + max(sm_ns / min(S, sms), dram_bytes / bandwidth)`,
    counted from when its first blocks have space; earlier kernels on the same SMs can delay that.
    The bandwidth is the smaller of the device's and the most that S SMs draw.

    Attributes:
        sm_ns: Work, in nanoseconds of one SM. If infinite, the kernel never ends.
        sms: The most SMs that it can use and occupy. None: as many as it has blocks.
        dram_bytes: Bytes that it moves through device memory.
        sm_bandwidth: The most bytes per second that one SM draws: the bytes in flight from its
            threads over the memory's latency. None: the most that an SM of the device draws.
        sm_watts: Extra power of a working SM over an idle one, at full clock.
        fixed_ns: Time that does not depend on the number of SMs.
        until: Replaces the end in time: the kernel runs until this returns true. It is called a
            few thousand times per second of real time, and whenever virtual time would pass.
        limit_ns: With `until`, the longest time that the kernel runs.
    """

    sm_ns: float = 0.0
    sms: int | None = None
    dram_bytes: float = 0.0
    sm_bandwidth: float | None = None
    sm_watts: float = 0.0
    fixed_ns: float = 0.0
    until: Callable[[], bool] | None = None
    limit_ns: float | None = None


#: `reference(launch, *arguments)` gets pointers as 1-D numpy arrays to the end of their
#: allocation and scalars as numpy scalars. It writes into the arrays and returns nothing.
Reference = Callable[..., None]
#: `cost(launch, *arguments) -> Cost` gets the same arguments, before the reference changes them.
CostModel = Callable[..., Cost]


# -- protocols --------------------------------------------------------------------------------


class SupportsCudaStream(Protocol):
    """Anything that names a stream by the protocol of cuda.core, torch, CuPy and numba."""

    def __cuda_stream__(self) -> tuple[Literal[0], int]: ...


class SupportsDevice(Protocol):
    """Another library's device, such as cuda.core's."""

    @property
    def device_id(self) -> int:
        """The device's ordinal."""


class SupportsDLPack(Protocol):
    """Another library's array that can be used without a copy, by DLPack."""

    def __dlpack__(self, *, stream: int | None = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class SupportsCudaArray(Protocol):
    """Another library's array that can be used without a copy, by `__cuda_array_interface__`."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


#: Another library's array in device memory and C order: torch's, CuPy's, numba's, Warp's, JAX's;
#: or a `Buffer` of cuda.core, which is an array of bytes.
DeviceArray = SupportsDLPack | SupportsCudaArray
