"""The driver interface's own types: opaque handles, resource facts, memory, and code images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NewType, Protocol, TypeVar

from greensched.typing import CostModel, Parameter, Reference, SharingScope

T = TypeVar("T")

#: Shared memory of a block, static and dynamic, beyond which a kernel must opt in. Source: cuda.h,
#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: its default is this less the static part.
DEFAULT_MAX_SHARED_BYTES: Final = 48 * 1024

# Handles are opaque: each driver has its own.
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


@dataclass(frozen=True, slots=True)
class ResourceFacts:
    """An SM resource: how many SMs, the smallest group, and the step between sizes.

    `min_partition_size` and `coscheduled_alignment` are 0 where the driver does not say, as driver
    580 does not for the outputs of a split. `flags` are the group's (CUdevSmResourceGroup_flags);
    0 below 13.1.
    """

    sm_count: int
    min_partition_size: int
    coscheduled_alignment: int
    flags: int = 0


@dataclass(frozen=True, slots=True)
class SMGroup:
    """One group of a structured split, as it is requested.

    Attributes:
        sm_count: how many SMs; 0: the largest group possible.
        coscheduled_sm_count: least number of co-scheduled SMs; 0: the device's own number.
        preferred_coscheduled_sm_count: preferred number of them; 0: no more than the least.
        backfill: co-scheduling becomes a preference, so that any even `sm_count` is possible.
    """

    sm_count: int = 0
    coscheduled_sm_count: int = 0
    preferred_coscheduled_sm_count: int = 0
    backfill: bool = False


@dataclass(frozen=True, slots=True)
class WorkqueueFacts:
    """A work-queue configuration: its sharing scope, and the concurrency it expects."""

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
    """What one kernel needs of a device; `local_bytes` is device memory for each thread."""

    max_threads_per_block: int
    static_shared_bytes: int
    registers: int
    local_bytes: int


@dataclass(slots=True)
class KernelSpec:
    """What is known of a kernel without running it. Reference and cost may be added later."""

    name: str
    parameters: tuple[Parameter, ...]
    reference: Reference | None = None
    cost: CostModel | None = None


@dataclass(frozen=True, slots=True)
class CodeImage:
    """The argument of `Driver.load_code`: machine code for a GPU, and specs for a simulation.

    A real driver reads only `binary`; the simulated one reads only `kernels`, so simulating
    needs no compiler.
    """

    name: str
    kernels: Mapping[str, KernelSpec]
    binary: bytes = field(default=b"", repr=False)


class Mailbox(Protocol[T]):
    """A queue to one of the library's threads: `put` never waits, `get` waits for an item."""

    def put(self, item: T, /) -> None: ...

    def get(self) -> T: ...
