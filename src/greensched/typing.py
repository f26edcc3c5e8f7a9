"""Public aliases, enums, protocols and small frozen values, without behaviour."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeVar

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)


# -- sizes of a partition ---------------------------------------------------------------------


class NamedSize(enum.Enum):
    """Sizes that depend on the device."""

    ALL = "all"
    REST = "rest"

    def __repr__(self) -> str:
        return self.name


#: Every SM of one device, including the remainder of its split.
ALL: Final = NamedSize.ALL
#: Every SM of the same device that is not in the same request.
REST: Final = NamedSize.REST

#: `16`; `(8, 64)` (least, most), `(8, ALL)`; `ALL`; `REST`.
Size = int | tuple[int, int | Literal[NamedSize.ALL]] | NamedSize

#: A grid or block: blocks (threads) in x, y, z; an int stands for (n, 1, 1).
Dim3 = tuple[int, int, int]

#: How a pool cuts a device.
Granularity = Literal["coscheduled", "fine"]

#: Which contexts share a work queue: all of the device, or, where possible, none of those that
#: asked for this value. The names are cuda.core's, of CUdevWorkqueueConfigScope.
SharingScope = Literal["device_ctx", "green_ctx_balanced"]


# -- drivers and contexts ---------------------------------------------------------------------


class Feature(enum.Enum):
    """A feature that a driver may lack; the value says what it is and what it needs."""

    STRUCTURED_SPLIT = "a split into groups of different sizes (CUDA 13.1)"
    STREAM_RESOURCES = "asking a stream for its resources (CUDA 13.1)"
    WORKQUEUES = "work-queue resources (CUDA 13.1)"
    WRITE_VALUE = "stream memory operations"


class ContextFlags(enum.IntFlag):
    """How a context is made (CUctx_flags of cuda.h): at most one way to wait, and options.

    `MAP_HOST` is always set from CUDA 11 on; `LMEM_RESIZE_TO_MAX` keeps local memory at the largest
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
    """How strict a thread is about calls that could spoil a capture (CUstreamCaptureMode)."""

    GLOBAL = 0
    THREAD_LOCAL = 1
    RELAXED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The constant properties of a device. Sizes in bytes; limits as the driver reports them."""

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
        name: as in the source.
        dtype: numpy's code of the scalar or of what a pointer points to (`"f4"`); `"V1"`: void.
        pointer: passed as a device address.
        const: points to memory that the kernel only reads.
    """

    name: str
    dtype: str
    pointer: bool = False
    const: bool = False

    @property
    def size(self) -> int:
        """Bytes among the launch parameters; CUDA aligns scalars to their own size."""
        return 8 if self.pointer else int(self.dtype[1:])


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """The launch, as a reference or a cost function sees it beside its arguments."""

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
    counted from when its first blocks have room, which earlier kernels on the same SMs can delay.
    The bandwidth is the device's, or that which S SMs draw.

    Attributes:
        sm_ns: work, in nanoseconds of one SM; infinite: the kernel never ends.
        sms: the most SMs that it can use and occupy (None: as many as it has blocks).
        dram_bytes: bytes that it must move through device memory.
        sm_bandwidth: the bytes a second that one SM draws at most: the bytes that its threads have
            in flight over the memory's latency (None: the most that an SM of the device draws).
        sm_watts: power of an SM at work, at full clock, beyond that of an idle one.
        fixed_ns: time that does not depend on the number of SMs.
        until: instead of an end in time: the kernel runs until this is true (evaluated a few
            thousand times a second of real time, and whenever virtual time would pass).
        limit_ns: with `until`: the kernel ends this long after its start at the latest.
    """

    sm_ns: float = 0.0
    sms: int | None = None
    dram_bytes: float = 0.0
    sm_bandwidth: float | None = None
    sm_watts: float = 0.0
    fixed_ns: float = 0.0
    until: Callable[[], bool] | None = None
    limit_ns: float | None = None


#: `reference(launch, *arguments)`: pointers arrive as 1-D numpy arrays to the end of their
#: allocation, scalars as numpy scalars; it writes into the arrays and returns nothing.
Reference = Callable[..., None]
#: `cost(launch, *arguments) -> Cost`, with the same arguments, before they are touched.
CostModel = Callable[..., Cost]


# -- protocols --------------------------------------------------------------------------------


class SupportsCudaStream(Protocol):
    """Anything that names a stream by the protocol of cuda.core, torch, CuPy and numba."""

    def __cuda_stream__(self) -> tuple[Literal[0], int]: ...


class SupportsDevice(Protocol):
    """Another library's device, such as cuda.core's."""

    @property
    def device_id(self) -> int:
        """Its ordinal."""


class SupportsDLPack(Protocol):
    """An array that another library takes without a copy, by DLPack."""

    def __dlpack__(self, *, stream: int | None = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class SupportsCudaArray(Protocol):
    """An array that another library takes without a copy, by `__cuda_array_interface__`."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


#: An array of another library in device memory, in C order: torch's, CuPy's, numba's, Warp's,
#: JAX's; a `Buffer` of cuda.core, which is an array of bytes.
DeviceArray = SupportsDLPack | SupportsCudaArray

#: Anything numpy can make an array of without copying device memory.
ArrayLike = Any
