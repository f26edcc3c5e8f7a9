"""Public aliases, protocols, enums and small frozen values. Nothing here does anything."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NewType, Protocol, TypeVar

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


#: Every SM of one device, remainder included.
ALL: Final = NamedSize.ALL
#: Every SM of the same device that is not in the same request.
REST: Final = NamedSize.REST

#: `16`; `(8, 64)` (least, most), `(8, ALL)`; `ALL`; `REST`.
Size = int | tuple[int, int | Literal[NamedSize.ALL]] | NamedSize

#: A grid or block: blocks (threads) in x, y, z; an int stands for (n, 1, 1).
Dim3 = tuple[int, int, int]


# -- handles: opaque, each driver's own -------------------------------------------------------

ContextHandle = NewType("ContextHandle", object)
GreenHandle = NewType("GreenHandle", object)
ResourceHandle = NewType("ResourceHandle", object)
DescriptorHandle = NewType("DescriptorHandle", object)
StreamHandle = NewType("StreamHandle", object)
EventHandle = NewType("EventHandle", object)
MemoryPoolHandle = NewType("MemoryPoolHandle", object)
LibraryHandle = NewType("LibraryHandle", object)
KernelHandle = NewType("KernelHandle", object)
GraphHandle = NewType("GraphHandle", object)
ExecutableHandle = NewType("ExecutableHandle", object)


class Feature(enum.Enum):
    """What a driver may or may not have; the value says what it takes."""

    STRUCTURED_SPLIT = "a split into groups of different sizes (CUDA 13.1)"
    STREAM_RESOURCES = "asking a stream for its resources (CUDA 13.1)"
    WORKQUEUES = "work-queue resources (CUDA 13.1)"
    WRITE_VALUE = "stream memory operations"


class ContextFlags(enum.IntFlag):
    """How a context is made (CUctx_flags of cuda.h): one way to wait, and what else is asked for.

    `MAP_HOST` is always so from CUDA 11 on; `LMEM_RESIZE_TO_MAX` keeps local memory as large as a
    launch once needed it.
    """

    SCHED_AUTO = 0
    SCHED_SPIN = 1
    SCHED_YIELD = 2
    SCHED_BLOCKING_SYNC = 4
    MAP_HOST = 8
    LMEM_RESIZE_TO_MAX = 16


class Limit(enum.IntEnum):
    """What a context has limits of (CUlimit of cuda.h), each in bytes."""

    STACK = 0
    PRINTF_FIFO = 1
    MALLOC_HEAP = 2
    PERSISTING_L2 = 6


class CacheConfig(enum.IntEnum):
    """What a kernel would rather have more of (CUfunc_cache of cuda.h): a hint.

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


# -- facts ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What never changes about a device. Sizes in bytes; limits as the driver reports them."""

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


@dataclass(frozen=True, slots=True)
class ResourceFacts:
    """An SM resource: how many SMs, the smallest group, and the step between sizes.

    `min_partition_size` and `coscheduled_alignment` are 0 where the driver does not say.
    `flags` are those of the group (CUdevSmResourceGroup_flags); 0 below 13.1.
    """

    sm_count: int
    min_partition_size: int
    coscheduled_alignment: int
    flags: int = 0


@dataclass(frozen=True, slots=True)
class SMGroup:
    """One group of a structured split, as a driver is asked for it.

    Attributes:
        sm_count: how many SMs; 0: the largest group there can be.
        coscheduled_sm_count: SMs that are co-scheduled at least; 0: the device's own number.
        preferred_coscheduled_sm_count: as many, where that can be; 0: no more than the least.
        backfill: constraints are wishes, so that any even `sm_count` can be met.
    """

    sm_count: int = 0
    coscheduled_sm_count: int = 0
    preferred_coscheduled_sm_count: int = 0
    backfill: bool = False


#: How a pool cuts a device.
Granularity = Literal["coscheduled", "fine"]

#: Who shares a work queue: everybody on the device, or, where that can be, nobody else who asked
#: for the same. The names are cuda.core's, of CUdevWorkqueueConfigScope.
SharingScope = Literal["device_ctx", "green_ctx_balanced"]


@dataclass(frozen=True, slots=True)
class WorkqueueFacts:
    """A work-queue configuration: who shares it, and the work expected in it at once."""

    sharing_scope: SharingScope
    concurrency_limit: int


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Pinned host memory: its address for the host, for the device, and a view of its bytes."""

    address: int
    device_address: int
    nbytes: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class KernelLimits:
    """What one kernel needs of a device: most threads a block, static shared bytes, registers.

    And `local_bytes` of each thread: arrays and registers that lie in device memory.
    """

    max_threads_per_block: int
    static_shared_bytes: int
    registers: int
    local_bytes: int


# -- code -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter, as CUDA passes it.

    Attributes:
        name: as in the source.
        dtype: numpy's code of the scalar or of what a pointer points to (`"f4"`); `"V1"`: void.
        pointer: passed as a device address.
        const: points to what the kernel only reads.
    """

    name: str
    dtype: str
    pointer: bool = False
    const: bool = False

    @property
    def size(self) -> int:
        """Bytes it takes among the launch parameters; CUDA aligns scalars to their own size."""
        return 8 if self.pointer else int(self.dtype[1:])


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """What a reference or a cost function is told about the launch beside its arguments."""

    grid: Dim3
    block: Dim3
    shared_bytes: int
    device: DeviceFacts
    #: The SMs the stream has; a simulated kernel occupies no other.
    sms: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a kernel asks of a device, for the simulated clock.

    Alone on S SMs it takes `fixed_ns + max(sm_ns / min(S, sms), dram_bytes / bandwidth)`, counted
    from when its first blocks have room: those of earlier kernels on the same SMs may leave none.

    Attributes:
        sm_ns: work, in nanoseconds of one SM; infinite: it never ends.
        sms: the most SMs it can use, and take up (None: as many as it has blocks).
        dram_bytes: bytes it must move through device memory.
        fixed_ns: what takes as long on any number of SMs.
        until: instead of an end in time: it runs until this is true (looked at a few thousand
            times a second of real time, and whenever virtual time would pass).
        limit_ns: with `until`: so long after its start it ends at the latest.
    """

    sm_ns: float = 0.0
    sms: int | None = None
    dram_bytes: float = 0.0
    fixed_ns: float = 0.0
    until: Callable[[], bool] | None = None
    limit_ns: float | None = None


#: `reference(launch, *arguments)`: pointers arrive as 1-D numpy arrays to the end of their
#: allocation, scalars as numpy scalars; it writes into the arrays and returns nothing.
Reference = Callable[..., None]
#: `cost(launch, *arguments) -> Cost`, with the same arguments, before they are touched.
CostModel = Callable[..., Cost]


@dataclass(slots=True)
class KernelSpec:
    """What is known of a kernel without running it. Reference and cost may be added later."""

    name: str
    parameters: tuple[Parameter, ...]
    reference: Reference | None = None
    cost: CostModel | None = None


@dataclass(frozen=True, slots=True)
class CodeImage:
    """What `Driver.load_code` takes: machine code for a GPU, and its meaning for a simulation.

    A real driver reads only `binary`; the simulated one reads only `kernels`, so simulating
    needs no compiler.
    """

    name: str
    kernels: Mapping[str, KernelSpec]
    binary: bytes = field(default=b"", repr=False)


# -- protocols --------------------------------------------------------------------------------


class SupportsCudaStream(Protocol):
    """Anything that names a stream by the protocol of cuda.core, torch, CuPy and numba."""

    def __cuda_stream__(self) -> tuple[Literal[0], int]: ...


class SupportsDevice(Protocol):
    """Another library's device, cuda.core's say."""

    @property
    def device_id(self) -> int: ...


class SupportsDLPack(Protocol):
    """An array that another library takes without a copy, by DLPack."""

    def __dlpack__(self, *, stream: int | None = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class SupportsCudaArray(Protocol):
    """The same, by numba's `__cuda_array_interface__`."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


#: An array of another library in device memory, in C order: torch's, CuPy's, numba's, Warp's,
#: JAX's; a `Buffer` of cuda.core, which is so many bytes.
DeviceArray = SupportsDLPack | SupportsCudaArray


class Mailbox(Protocol[T]):
    """How work reaches one of our threads: `put` never waits, `get` waits for the next item."""

    def put(self, item: T, /) -> None: ...

    def get(self) -> T: ...


#: Anything numpy can make an array of without copying device memory.
ArrayLike = Any
