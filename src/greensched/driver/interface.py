"""The driver interface: the CUDA driver calls in use, and what each may do to its thread.

Two drivers implement it, `driver.cuda` and `driver.simulated`, with the same behaviour. The rules:

1. A call raises our exceptions (`errors`) and never returns a status. A query returns its answer,
   and "not ready" is an answer.
2. Handles are opaque and specific to each driver. The maker of a handle destroys it, in the order
   events, streams, green context, primary context, or leaves it to `kept`. Only `retain_primary`
   and `release_primary` count references; each green context counts as one.
3. Every call declares its `Blocking` and whether it needs a current context. No event loop's thread
   makes a `MAY` call: the simulated driver raises `LoopWouldBlock` there. Sources of these traits:
   CUDA driver API reference 13.5, and the measurements in docs/internals/completion.md.
4. No call runs Python on a driver thread.

Times are seconds unless a name says `_ns`; sizes are bytes; devices are ordinals.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar

from greensched.driver.blocking import FIRST_USE, MAY, NEVER, driver_call
from greensched.driver.host import HostServices
from greensched.driver.kept_handles import KeptHandles
from greensched.driver.types import (
    CodeImage,
    ContextHandle,
    DescriptorHandle,
    EventHandle,
    ExecutableHandle,
    GraphHandle,
    GreenHandle,
    HostMemory,
    KernelHandle,
    KernelLimits,
    LibraryHandle,
    MemoryPoolHandle,
    ResourceFacts,
    ResourceHandle,
    SMGroup,
    StreamHandle,
    WorkqueueFacts,
)
from greensched.typing import (
    CacheConfig,
    CaptureMode,
    ContextFlags,
    DeviceFacts,
    Dim3,
    Feature,
    Limit,
    SharingScope,
)


class Driver(HostServices, abc.ABC):
    """CUDA, as the rest of greensched uses it."""

    #: `"cuda"` or `"simulated"`, for messages but never for decisions.
    name: ClassVar[str]
    #: Whether a kernel must be compiled before `load_code`; a simulation runs its reference
    #: instead.
    needs_binary: ClassVar[bool]
    #: Seconds of idle turns for which a loop polls a ticket before a thread waits for it. 50 us: a
    #: wake-up across threads costs 25-60 us (docs/internals/completion.md). 0 if no time passes
    #: during polling.
    spin_budget: float = 50e-6

    def __init__(self) -> None:
        #: Handles that outlive the pools.
        self.kept = KeptHandles()

    # -- process and devices ------------------------------------------------------------------

    @abc.abstractmethod
    @driver_call(MAY)
    def initialise(self) -> None:
        """Make the driver usable, once; later calls do nothing.

        Raises:
            DriverUnavailable: There is no driver, only a stub, no device, or a driver below CUDA
                13.0.
        """

    @property
    @abc.abstractmethod
    def version(self) -> tuple[int, int]:
        """The newest CUDA version that the driver supports, such as (13, 1)."""

    @abc.abstractmethod
    def supports(self, feature: Feature) -> bool:
        """Say whether the driver has a feature, by its symbols rather than its version."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def device_count(self) -> int:
        """Return the number of devices."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def device_facts(self, device: int) -> DeviceFacts:
        """Return a device's constant properties."""

    # -- contexts -----------------------------------------------------------------------------

    @abc.abstractmethod
    @driver_call(MAY)
    def retain_primary(self, device: int) -> ContextHandle:
        """Make the device's primary context, or add a user to it."""

    @abc.abstractmethod
    @driver_call(MAY)
    def release_primary(self, device: int) -> None:
        """Remove a user; the last one ends the context and everything in it."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def primary_state(self, device: int) -> tuple[int, bool]:
        """Return (flags, whether it is active) of the primary context, without making it."""

    @abc.abstractmethod
    @driver_call(MAY)
    def set_primary_flags(self, device: int, flags: ContextFlags) -> None:
        """Set the flags of the primary context, which apply at once if it is active."""

    @abc.abstractmethod
    @driver_call(MAY)
    def create_context(self, device: int, flags: ContextFlags) -> ContextHandle:
        """Make a context beside the primary one, without making it current.

        Raises:
            NotSupported: The driver no longer has one of the flags.
        """

    @abc.abstractmethod
    @driver_call(MAY)
    def destroy_context(self, context: ContextHandle) -> None:
        """End a context of `create_context`. Its streams and events must be destroyed."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def context_device(self, context: ContextHandle) -> int:
        """Return the device of any context, including another library's."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def current(self) -> ContextHandle | None:
        """Return the calling thread's current context."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def set_current(self, context: ContextHandle | None) -> None:
        """Replace the top of the calling thread's context stack; None pops it."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def push_current(self, context: ContextHandle) -> None:
        """Push a context on the calling thread's stack. It is current until it is popped."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def pop_current(self) -> ContextHandle:
        """Pop the top of the calling thread's stack, and return it.

        Raises:
            CUDAError: INVALID_CONTEXT if no context is current.
        """

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def context_flags(self) -> ContextFlags:
        """Return the flags of the current context."""

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def limit(self, limit: Limit) -> int:
        """Return a limit of the current context, in bytes.

        Raises:
            NotSupported: The device lacks the resource of this limit.
        """

    @abc.abstractmethod
    @driver_call(MAY, needs_context=True)
    def set_limit(self, limit: Limit, nbytes: int) -> None:
        """Request a limit of the current context, which the driver may round and clamp.

        Raises:
            NotSupported: The device lacks the resource of this limit.
        """

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def cache_config(self) -> CacheConfig:
        """Return the cache preference of the current context."""

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def set_cache_config(self, config: CacheConfig) -> None: ...

    @abc.abstractmethod
    @driver_call(MAY)
    def synchronize_context(self, context: ContextHandle) -> None:
        """Wait for all work of a context; a primary's includes its green contexts'."""

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def priority_range(self) -> tuple[int, int]:
        """Return (least, greatest) stream priority; a smaller number is more urgent."""

    # -- SM resources and green contexts --------------------------------------------------------

    @abc.abstractmethod
    @driver_call(NEVER)
    def device_resource(self, device: int) -> ResourceHandle:
        """Return every SM of a device."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def context_resource(self, context: ContextHandle) -> ResourceHandle:
        """Return the SMs of a context. Those of a green context can be split again."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def resource_facts(self, resource: ResourceHandle) -> ResourceFacts:
        """Return the size, the smallest group and the alignment of an SM resource."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def split_by_count(
        self,
        resource: ResourceHandle,
        groups: int | None,
        minimum: int,
        *,
        ignore_coscheduling: bool = False,
    ) -> tuple[list[ResourceHandle], ResourceHandle | None]:
        """Split a resource into equal groups of at least `minimum` SMs (rounded up).

        Args:
            groups: The requested number; there may be fewer. None: as many as possible.

        Returns:
            The groups, which are disjoint, and the remainder or None. Outputs of two calls on the
            same resource overlap, because both start from the same SMs.

        Raises:
            CUDAError: INVALID_RESOURCE_CONFIGURATION if no such group is possible.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def split(
        self, resource: ResourceHandle, groups: Sequence[SMGroup]
    ) -> tuple[list[ResourceHandle], ResourceHandle | None]:
        """Split a resource into the requested groups, from left to right, without rounding.

        Needs `Feature.STRUCTURED_SPLIT`. A split reserves nothing.

        Returns:
            The groups, disjoint and as many as requested, and the remainder or None.

        Raises:
            CUDAError: INVALID_RESOURCE_CONFIGURATION if the split is not possible.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def device_workqueue(self, device: int) -> ResourceHandle:
        """Return the device's work-queue configuration. Needs `Feature.WORKQUEUES`."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def context_workqueue(self, context: ContextHandle) -> ResourceHandle:
        """Return a context's work-queue configuration. Needs `Feature.WORKQUEUES`."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def workqueue_facts(self, workqueue: ResourceHandle) -> WorkqueueFacts:
        """Return the sharing scope and the concurrency of a work-queue configuration."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def configure_workqueue(
        self, workqueue: ResourceHandle, sharing_scope: SharingScope, concurrency_limit: int
    ) -> ResourceHandle:
        """Return a copy of a work-queue configuration with other values."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def describe(self, resources: Sequence[ResourceHandle]) -> DescriptorHandle:
        """Make a descriptor of several outputs of the same split. It is never freed.

        It may contain at most one work-queue configuration (`Feature.WORKQUEUES`). Without SM
        resources it stands for every SM.
        """

    @abc.abstractmethod
    @driver_call(MAY)
    def create_green(self, descriptor: DescriptorHandle, device: int) -> GreenHandle:
        """Make a green context. It retains the primary, and does not become current."""

    @abc.abstractmethod
    @driver_call(MAY)
    def destroy_green(self, green: GreenHandle) -> None:
        """End a green context. Its streams must be destroyed and its work done."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def green_context(self, green: GreenHandle) -> ContextHandle:
        """Return the green context as a context that can be current: a view, not an object."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def record_green(self, green: GreenHandle, event: EventHandle) -> None:
        """Record all work of the green context so far in the event.

        A stream's wait for an event is omitted if no work follows it. If a stream of the context is
        capturing, this invalidates the capture.
        """

    # -- streams --------------------------------------------------------------------------------

    @abc.abstractmethod
    @driver_call(MAY, needs_context=True)
    def create_stream(self, green: GreenHandle | None, priority: int = 0) -> StreamHandle:
        """Make a non-blocking stream of a green context, or of the current context (None)."""

    @abc.abstractmethod
    @driver_call(MAY)
    def destroy_stream(self, stream: StreamHandle) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def stream_address(self, stream: StreamHandle) -> int:
        """Return the raw `CUstream`, for `__cuda_stream__`."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def foreign_stream(self, address: int) -> StreamHandle:
        """Return a handle of another library's raw `CUstream`, for ordering work around its work.

        1 and 2 are the legacy default stream and the thread's own (CU_STREAM_LEGACY,
        CU_STREAM_PER_THREAD), each of the context that is current at each use.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def query_stream(self, stream: StreamHandle) -> bool:
        """Say whether all work of the stream is done. Raises its context's fault."""

    @abc.abstractmethod
    @driver_call(MAY)
    def synchronize_stream(self, stream: StreamHandle) -> None:
        """Wait for all work of the stream."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        """Order later work of the stream after an event; the host does not wait."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def bind_mark(self, stream: StreamHandle, address: int) -> Callable[[int], None]:
        """Return a function that has the stream write a 32-bit number to a device address.

        It is written after the stream's work. Needs `Feature.WRITE_VALUE`. The function never
        blocks while fewer jobs are in flight than the executor allows.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def wait_value(self, stream: StreamHandle, address: int, value: int) -> None:
        """Have later work of the stream wait until the 32-bit word at `address` is >= `value`.

        The comparison uses the signed difference, so that a counter may wrap.
        """

    # -- events ---------------------------------------------------------------------------------

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def create_event(self, *, timing: bool = False, blocking: bool = False) -> EventHandle:
        """Make an event of the current context.

        Args:
            timing: Whether `elapsed` accepts it.
            blocking: Whether a thread that waits for it sleeps instead of spinning.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def destroy_event(self, event: EventHandle) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def record_event(self, event: EventHandle, stream: StreamHandle) -> None:
        """Record the stream's work submitted so far."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def query_event(self, event: EventHandle) -> bool:
        """Say whether the recorded work is done (true before the first record)."""

    @abc.abstractmethod
    @driver_call(MAY)
    def synchronize_event(self, event: EventHandle) -> None:
        """Wait for the recorded work."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def elapsed(self, start: EventHandle, end: EventHandle) -> float:
        """Return seconds of device time between two timing events; resolution about 0.5 us."""

    # -- captures and graphs ----------------------------------------------------------------------
    #
    # Captured work stays in the context of the stream that captured it: it runs on that context's
    # SMs, wherever the graph is launched (measured on an H200; cuGraphLaunch, programming guide
    # 4.6.5).

    @abc.abstractmethod
    @driver_call(NEVER)
    def begin_capture(self, stream: StreamHandle, mode: CaptureMode) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        """End a capture. It has ended even if this raises because it was invalidated."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def is_capturing(self, stream: StreamHandle) -> bool: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        """Set the calling thread's capture mode, and return the previous one."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def node_count(self, graph: GraphHandle) -> int:
        """Return the number of recorded nodes."""

    @abc.abstractmethod
    @driver_call(MAY)
    def instantiate_graph(self, graph: GraphHandle, stream: StreamHandle) -> ExecutableHandle:
        """Make a graph executable. The graph itself may then be destroyed.

        It is uploaded after the stream's work, so that later launches there need not wait for it.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def launch_graph(self, executable: ExecutableHandle, stream: StreamHandle) -> None:
        """Launch after the stream's work and the executable's previous launch.

        The stream determines the order, but not the SMs.
        """

    @abc.abstractmethod
    @driver_call(MAY)
    def destroy_executable(self, executable: ExecutableHandle) -> None:
        """End an executable graph. Its launches must be done."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def destroy_graph(self, graph: GraphHandle) -> None:
        """End a graph."""

    # -- memory ---------------------------------------------------------------------------------

    @abc.abstractmethod
    @driver_call(MAY)
    def create_memory_pool(self, device: int) -> MemoryPoolHandle:
        """Make a stream-ordered pool that keeps its memory."""

    @abc.abstractmethod
    @driver_call(MAY)
    def destroy_memory_pool(self, pool: MemoryPoolHandle) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def can_access_peer(self, device: int, peer: int) -> bool:
        """Say whether a device can access another device's memory directly."""

    @abc.abstractmethod
    @driver_call(MAY)
    def share_memory_pool(self, pool: MemoryPoolHandle, device: int) -> None:
        """Let another device access the pool's present and future memory.

        Only this call gives access to a pool; cuCtxEnablePeerAccess does not (programming guide,
        stream-ordered allocation, device accessibility).

        Raises:
            CUDAError: INVALID_DEVICE if `can_access_peer` is false.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def reserved_bytes(self, pool: MemoryPoolHandle) -> int:
        """Return how many bytes of the device the pool holds, in use or not."""

    @abc.abstractmethod
    @driver_call(FIRST_USE, needs_context=True)
    def allocate(self, pool: MemoryPoolHandle, nbytes: int, stream: StreamHandle) -> int:
        """Return a device address, valid after the stream's work. Blocks if the pool grows.

        Raises:
            OutOfMemory: No error of the device; nothing was allocated.
        """

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def free(self, address: int, stream: StreamHandle) -> None:
        """Return memory to its pool after the stream's work so far."""

    @abc.abstractmethod
    @driver_call(MAY, needs_context=True)
    def allocate_host(self, nbytes: int) -> HostMemory:
        """Allocate pinned, portable, zeroed memory that the device can address.

        Raises:
            OutOfMemory: No error of the device; nothing was allocated.
        """

    @abc.abstractmethod
    @driver_call(MAY, needs_context=True)
    def free_host(self, memory: HostMemory) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of the current context's device."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def memory_device(self, address: int) -> int | None:
        """Return the device of any library's memory at an address, or None."""

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def copy_to_device(self, address: int, host: int, nbytes: int, stream: StreamHandle) -> None:
        """Copy from pinned host memory. From pageable memory a real driver blocks."""

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def copy_to_host(self, host: int, address: int, nbytes: int, stream: StreamHandle) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def copy(self, target: int, source: int, nbytes: int, stream: StreamHandle) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def copy_peer(
        self,
        target: int,
        target_context: ContextHandle,
        source: int,
        source_context: ContextHandle,
        nbytes: int,
        stream: StreamHandle,
    ) -> None:
        """Copy between devices, on a stream of either. Needs access to both pools.

        Without access a real driver copies through host memory, and may block meanwhile.
        """

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def set_bytes(self, address: int, value: int, nbytes: int, stream: StreamHandle) -> None:
        """Fill with one byte value."""

    # -- code -----------------------------------------------------------------------------------

    @abc.abstractmethod
    @driver_call(MAY)
    def load_code(self, image: CodeImage) -> LibraryHandle: ...

    @abc.abstractmethod
    @driver_call(MAY)
    def unload_code(self, library: LibraryHandle) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def get_kernel(self, library: LibraryHandle, name: str) -> KernelHandle:
        """Return a kernel by its name in the code."""

    @abc.abstractmethod
    @driver_call(MAY, needs_context=True)
    def load_kernel(self, kernel: KernelHandle) -> None:
        """Load a kernel for the current context's device now, not at its first launch."""

    @abc.abstractmethod
    @driver_call(FIRST_USE)
    def kernel_layout(self, kernel: KernelHandle) -> tuple[tuple[int, int], ...] | None:
        """Return the code's (offset, size) of each parameter; None if that is unknown."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def kernel_limits(self, kernel: KernelHandle, device: int) -> KernelLimits: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def allow_shared(self, kernel: KernelHandle, device: int, nbytes: int) -> None:
        """Allow a kernel more dynamic shared memory than `DEFAULT_MAX_SHARED_BYTES`."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def bind_launch(
        self,
        stream: StreamHandle,
        kernel: KernelHandle,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        parameters: int,
    ) -> Callable[[], None]:
        """Return a function that launches the kernel on the stream, whatever context is current.

        Args:
            parameters: The host address of an array of pointers to the values (`void **`). Each
                call reads the values, which may be changed between calls, and must stay alive.
        """

    def report_reference_errors(
        self, stream: StreamHandle, report: Callable[[Exception], None] | None
    ) -> None:
        """Report `ReferenceFailed` of kernels on a stream. A GPU runs no references.

        Args:
            report: Called on any thread before work after the kernel begins; must not block. None:
                the stream's next wait raises the error.
        """

    def close(self) -> None:
        """Stop the threads that the driver itself started, as only the simulated driver does."""
