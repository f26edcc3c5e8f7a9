"""The driver interface's own types: opaque handles, resource facts, memory, and code images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NewType, Protocol

from greensched.typing import CostModel, Parameter, Reference, SharingScope, T

#: Shared memory of a block, static and dynamic, beyond which a kernel must opt in. Source: cuda.h,
#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: its default is this minus the static part.
DEFAULT_MAX_SHARED_BYTES: Final = 48 * 1024

# Handles are opaque. Each driver has its own kinds.
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
    """The size of an SM resource, its smallest group, and the step between group sizes.

    `min_partition_size` and `coscheduled_alignment` are 0 if the driver does not report them;
    driver 580 does not for outputs of a split. `flags` are the group's flags
    (CUdevSmResourceGroup_flags), 0 below 13.1.
    """

    sm_count: int
    min_partition_size: int
    coscheduled_alignment: int
    flags: int = 0


@dataclass(frozen=True, slots=True)
class SMGroup:
    """One requested group of a structured split.

    Attributes:
        sm_count: The number of SMs. 0: the largest possible group.
        coscheduled_sm_count: The least number of co-scheduled SMs. 0: the device's own number.
        preferred_coscheduled_sm_count: The preferred number of them. 0: the least number.
        backfill: Whether co-scheduling is only a preference, which allows any even `sm_count`.
    """

    sm_count: int = 0
    coscheduled_sm_count: int = 0
    preferred_coscheduled_sm_count: int = 0
    backfill: bool = False


@dataclass(frozen=True, slots=True)
class WorkqueueFacts:
    """A work-queue configuration: its sharing scope and its expected concurrency."""

    sharing_scope: SharingScope
    concurrency_limit: int


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Pinned host memory: its addresses for host and device, and a view of its bytes."""

    address: int
    device_address: int
    nbytes: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class KernelLimits:
    """What a kernel needs from a device. `local_bytes` is device memory per thread."""

    max_threads_per_block: int
    static_shared_bytes: int
    local_bytes: int


@dataclass(slots=True)
class KernelSpec:
    """What is known about a kernel without running it. Reference and cost may be added later."""

    name: str
    parameters: tuple[Parameter, ...]
    reference: Reference | None = None
    cost: CostModel | None = None


@dataclass(frozen=True, slots=True)
class CodeImage:
    """The argument of `Driver.load_code`: machine code for a GPU, and specs for a simulation.

    A real driver reads only `binary`, and the simulated one only `kernels`, so that simulating
    needs no compiler.
    """

    name: str
    kernels: Mapping[str, KernelSpec]
    binary: bytes = field(default=b"", repr=False)


class Mailbox(Protocol[T]):
    """A queue to one of the library's threads. `put` never waits, `get` waits for an item."""

    def put(self, item: T, /) -> None: ...

    def get(self) -> T: ...
