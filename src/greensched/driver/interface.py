"""The port: the few dozen driver verbs in use, and what each may do to the thread that calls it.

Two drivers stand behind it, `driver.cuda` and `driver.simulated`, and answer alike. Rules of
the port, for both:

1. A verb raises our exceptions (`errors`), never returns a status. A verb that asks a question
   returns the answer; "not ready" is an answer.
2. Handles are opaque and each driver's own. Who made one destroys it, in the order events,
   streams, green context, primary context. Destroying is final; nothing here counts references
   but `retain_primary` and `release_primary`.
3. Every verb is marked with what it may do to its thread (`Blocks`) and whether it needs a
   current context. A `MAY` verb is never called on an event-loop thread: the simulated driver
   raises `LoopWouldBlock` if one is. Sources of the marks: CUDA driver API reference 13.5, and
   the measurements in docs/completion.md.
4. No verb runs Python on a driver thread.

Times are seconds unless a name says `_ns`; sizes are bytes; devices are ordinals.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar

from greensched.driver.blocking import FIRST_USE, MAY, NEVER, driver_call
from greensched.driver.graphs import Graphs
from greensched.driver.host import HostServices
from greensched.typing import (
    CacheConfig,
    CodeImage,
    ContextFlags,
    ContextHandle,
    DescriptorHandle,
    DeviceFacts,
    Dim3,
    EventHandle,
    Feature,
    GreenHandle,
    HostMemory,
    KernelHandle,
    KernelLimits,
    LibraryHandle,
    Limit,
    MemoryPoolHandle,
    ResourceFacts,
    ResourceHandle,
    SharingScope,
    SMGroup,
    StreamHandle,
    WorkqueueFacts,
)


class Driver(HostServices, Graphs):
    """What CUDA is to the rest of greensched."""

    #: `"cuda"` or `"simulated"`: for people, never for decisions.
    name: ClassVar[str]
    #: Whether a kernel must be compiled before `load_code` (a simulation runs its reference).
    needs_binary: ClassVar[bool]
    #: Seconds of idle turns a loop spends looking at a ticket before a thread waits for it.
    #: 50 us: a wake-up across threads costs 25-60 us (docs/completion.md). 0 where time does not
    #: pass while one looks.
    spin_budget: float = 50e-6

    # -- process and devices ------------------------------------------------------------------

    @abc.abstractmethod
    @driver_call(MAY)
    def initialise(self) -> None:
        """Makes the driver usable, once; later calls do nothing.

        Raises:
            DriverUnavailable: no driver, a stub of it, no device, or a driver too old.
        """

    @property
    @abc.abstractmethod
    def version(self) -> tuple[int, int]:
        """The newest CUDA the driver supports, such as (13, 1)."""

    @abc.abstractmethod
    def supports(self, feature: Feature) -> bool:
        """Whether the driver has a feature: asked of its symbols, not guessed from a version."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def device_count(self) -> int: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def device_facts(self, device: int) -> DeviceFacts: ...

    # -- contexts -----------------------------------------------------------------------------

    @abc.abstractmethod
    @driver_call(MAY)
    def retain_primary(self, device: int) -> ContextHandle:
        """Makes the device's primary context, or counts one more user of it."""

    @abc.abstractmethod
    @driver_call(MAY)
    def release_primary(self, device: int) -> None:
        """Counts one user less; the last one ends it and all that belongs to it."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def primary_state(self, device: int) -> tuple[int, bool]:
        """(flags, whether it is active) of the primary context, without making it."""

    @abc.abstractmethod
    @driver_call(MAY)
    def set_primary_flags(self, device: int, flags: ContextFlags) -> None:
        """How the primary context is made, or is from here on where it is active."""

    @abc.abstractmethod
    @driver_call(MAY)
    def create_context(self, device: int, flags: ContextFlags) -> ContextHandle:
        """A context of its own beside the primary one. It does not become current.

        Raises:
            NotSupported: the driver has one of the flags no more.
        """

    @abc.abstractmethod
    @driver_call(MAY)
    def destroy_context(self, context: ContextHandle) -> None:
        """Ends a context that `create_context` made, whose children are gone."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def context_device(self, context: ContextHandle) -> int:
        """The device of any context, whoever made it."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def current(self) -> ContextHandle | None:
        """The calling thread's current context."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def set_current(self, context: ContextHandle | None) -> None:
        """Replaces the top of the calling thread's context stack; None pops it."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def push_current(self, context: ContextHandle) -> None:
        """Puts a context on the calling thread's stack: it is current until it is popped."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def pop_current(self) -> ContextHandle:
        """Takes the top off the calling thread's stack, and returns it.

        Raises:
            CUDAError: INVALID_CONTEXT: nothing is current.
        """

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def context_flags(self) -> ContextFlags:
        """The flags of the current context."""

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def limit(self, limit: Limit) -> int:
        """A limit of the current context, in bytes.

        Raises:
            NotSupported: the device has nothing that this limits.
        """

    @abc.abstractmethod
    @driver_call(MAY, needs_context=True)
    def set_limit(self, limit: Limit, nbytes: int) -> None:
        """Asks for a limit of the current context; the driver may round and clamp it.

        Raises:
            NotSupported: the device has nothing that this limits.
        """

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def cache_config(self) -> CacheConfig: ...

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def set_cache_config(self, config: CacheConfig) -> None: ...

    @abc.abstractmethod
    @driver_call(MAY)
    def synchronize_context(self, context: ContextHandle) -> None:
        """Waits for all work of a context; of a primary, for its green contexts' too."""

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def priority_range(self) -> tuple[int, int]:
        """(least, greatest) stream priority; the greater urgency is the smaller number."""

    # -- SM resources and green contexts --------------------------------------------------------

    @abc.abstractmethod
    @driver_call(NEVER)
    def device_resource(self, device: int) -> ResourceHandle:
        """Every SM of a device."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def context_resource(self, context: ContextHandle) -> ResourceHandle:
        """The SMs a context was given. Of a green one, it can be split again."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def stream_resource(self, stream: StreamHandle) -> ResourceHandle:
        """The SMs a stream's context was given. Needs `Feature.STREAM_RESOURCES`."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def resource_facts(self, resource: ResourceHandle) -> ResourceFacts: ...

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
        """Cuts a resource into equal groups of at least `minimum` SMs (rounded up).

        Args:
            groups: how many are wanted; fewer may come. None: as many as there can be.

        Returns:
            The groups, disjoint, and what is left over (None: nothing). Two calls on the same
            resource start from the same SMs: their outputs overlap.

        Raises:
            CUDAError: INVALID_RESOURCE_CONFIGURATION where nothing can be cut so.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def split(
        self, resource: ResourceHandle, groups: Sequence[SMGroup]
    ) -> tuple[list[ResourceHandle], ResourceHandle | None]:
        """Cuts a resource into the groups asked for, from left to right; nothing is rounded.

        Needs `Feature.STRUCTURED_SPLIT`. Nothing is reserved by it.

        Returns:
            The groups, disjoint, as many as asked, and what is left over (None: nothing).

        Raises:
            CUDAError: INVALID_RESOURCE_CONFIGURATION where it cannot be cut so.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def device_workqueue(self, device: int) -> ResourceHandle:
        """The device's work-queue configuration. Needs `Feature.WORKQUEUES`."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def context_workqueue(self, context: ContextHandle) -> ResourceHandle:
        """The work-queue configuration a context was given. Needs `Feature.WORKQUEUES`."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def workqueue_facts(self, workqueue: ResourceHandle) -> WorkqueueFacts: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def configure_workqueue(
        self, workqueue: ResourceHandle, sharing_scope: SharingScope, concurrency_limit: int
    ) -> ResourceHandle:
        """A copy of a work-queue configuration, with other values; the given one stays."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def describe(self, resources: Sequence[ResourceHandle]) -> DescriptorHandle:
        """One descriptor of several outputs of the same split. Lives as long as the process.

        A work-queue configuration may stand among them (`Feature.WORKQUEUES`), one at most; alone
        it stands for every SM.
        """

    @abc.abstractmethod
    @driver_call(MAY)
    def create_green(self, descriptor: DescriptorHandle, device: int) -> GreenHandle:
        """A green context: retains the primary, does not become current."""

    @abc.abstractmethod
    @driver_call(MAY)
    def destroy_green(self, green: GreenHandle) -> None:
        """Ends a green context whose streams are gone and whose work is done."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def green_context(self, green: GreenHandle) -> ContextHandle:
        """The green context as something that can be made current. A view, not an object."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def record_green(self, green: GreenHandle, event: EventHandle) -> None:
        """The event captures all work of the green context so far.

        While a stream of it is capturing, this spoils that capture.
        """

    # -- streams --------------------------------------------------------------------------------

    @abc.abstractmethod
    @driver_call(MAY, needs_context=True)
    def create_stream(self, green: GreenHandle | None, priority: int = 0) -> StreamHandle:
        """A non-blocking stream of a green context, or (None) of the current context."""

    @abc.abstractmethod
    @driver_call(MAY)
    def destroy_stream(self, stream: StreamHandle) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def stream_address(self, stream: StreamHandle) -> int:
        """The raw `CUstream`, for `__cuda_stream__`."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def foreign_stream(self, address: int) -> StreamHandle:
        """A raw `CUstream` of anybody's, to order work behind it, or it behind ours.

        1 and 2 are the legacy default stream and the thread's own (CU_STREAM_LEGACY,
        CU_STREAM_PER_THREAD): those of the context that is current at each use.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def query_stream(self, stream: StreamHandle) -> bool:
        """Whether all work of the stream is done. Raises what its context suffered."""

    @abc.abstractmethod
    @driver_call(MAY)
    def synchronize_stream(self, stream: StreamHandle) -> None:
        """Waits for all work of the stream."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        """Later work of the stream waits for what the event captured; the host does not."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def bind_mark(self, stream: StreamHandle, address: int) -> Callable[[int], None]:
        """A function that writes a 32-bit number to a device address behind the stream's work.

        Needs `Feature.WRITE_VALUE`. Never blocks while fewer jobs are in flight than the lane
        allows.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def wait_value(self, stream: StreamHandle, address: int, value: int) -> None:
        """Later work of the stream waits until the 32-bit word at `address` is >= `value`.

        The comparison is of the signed difference, so a counter may wrap.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def host_function(self, stream: StreamHandle, function: int, data: int) -> None:
        """Calls the native function at address `function` with `data`, on a driver thread.

        Never a Python function (promise 6). It is not called after a device fault.
        """

    # -- events ---------------------------------------------------------------------------------

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def create_event(self, *, timing: bool = False, blocking: bool = False) -> EventHandle:
        """An event of the current context.

        Args:
            timing: it can be given to `elapsed`.
            blocking: a thread that synchronises with it sleeps instead of spinning.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def destroy_event(self, event: EventHandle) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def record_event(self, event: EventHandle, stream: StreamHandle) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def query_event(self, event: EventHandle) -> bool:
        """Whether what the event captured is done (true before it was ever recorded)."""

    @abc.abstractmethod
    @driver_call(MAY)
    def synchronize_event(self, event: EventHandle) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def elapsed(self, start: EventHandle, end: EventHandle) -> float:
        """Seconds of device time between two timing events; about 0.5 us fine."""

    # -- memory ---------------------------------------------------------------------------------

    @abc.abstractmethod
    @driver_call(MAY)
    def create_memory_pool(self, device: int) -> MemoryPoolHandle:
        """A stream-ordered pool of our own that keeps what it has."""

    @abc.abstractmethod
    @driver_call(MAY)
    def destroy_memory_pool(self, pool: MemoryPoolHandle) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether a device can read and write the memory of another one itself."""

    @abc.abstractmethod
    @driver_call(MAY)
    def share_memory_pool(self, pool: MemoryPoolHandle, device: int) -> None:
        """Lets another device read and write what the pool has and will have.

        Access to a pool is given by this alone, and not by cuCtxEnablePeerAccess (programming
        guide, stream-ordered allocation, device accessibility).

        Raises:
            CUDAError: INVALID_DEVICE where `can_access_peer` says no.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def reserved_bytes(self, pool: MemoryPoolHandle) -> int:
        """Bytes the pool holds of the device, in use or not."""

    @abc.abstractmethod
    @driver_call(FIRST_USE, needs_context=True)
    def allocate(self, pool: MemoryPoolHandle, nbytes: int, stream: StreamHandle) -> int:
        """A device address usable behind the stream's work so far; blocks if the pool grows.

        Raises:
            OutOfMemory: ordinary; nothing was allocated.
        """

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def free(self, address: int, stream: StreamHandle) -> None:
        """Gives memory back to its pool behind the stream's work so far."""

    @abc.abstractmethod
    @driver_call(MAY, needs_context=True)
    def allocate_host(self, nbytes: int) -> HostMemory:
        """Pinned, portable memory the device can address. Zeroed.

        Raises:
            OutOfMemory: ordinary; nothing was allocated.
        """

    @abc.abstractmethod
    @driver_call(MAY, needs_context=True)
    def free_host(self, memory: HostMemory) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current context's device."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def memory_device(self, address: int) -> int | None:
        """The device whose memory an address lies in, whoever allocated it; None: no device's."""

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def copy_to_device(self, address: int, host: int, nbytes: int, stream: StreamHandle) -> None:
        """From pinned host memory; from pageable memory a real driver blocks."""

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
        """From one device to another, on a stream of either that was given access to both.

        Without the access a real driver copies through host memory, and may block for that.
        """

    @abc.abstractmethod
    @driver_call(NEVER, needs_context=True)
    def set_bytes(self, address: int, value: int, nbytes: int, stream: StreamHandle) -> None:
        """Fills with one byte value."""

    # -- code -----------------------------------------------------------------------------------

    @abc.abstractmethod
    @driver_call(MAY)
    def load_code(self, image: CodeImage) -> LibraryHandle: ...

    @abc.abstractmethod
    @driver_call(MAY)
    def unload_code(self, library: LibraryHandle) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def get_kernel(self, library: LibraryHandle, name: str) -> KernelHandle: ...

    @abc.abstractmethod
    @driver_call(MAY, needs_context=True)
    def load_kernel(self, kernel: KernelHandle) -> None:
        """Loads a kernel for the current context's device now, not at its first launch."""

    @abc.abstractmethod
    @driver_call(FIRST_USE)
    def kernel_layout(self, kernel: KernelHandle) -> tuple[tuple[int, int], ...] | None:
        """(offset, size) of each parameter as the code has it; None where it cannot be asked."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def kernel_limits(self, kernel: KernelHandle, device: int) -> KernelLimits: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def allow_shared(self, kernel: KernelHandle, device: int, nbytes: int) -> None:
        """Lets a kernel use so much dynamic shared memory (beyond 48 KiB it must be asked)."""

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
        """A function that launches the kernel on the stream, whatever context is current.

        Args:
            parameters: host address of an array of pointers to the values (`void **`); the
                values are read at each call, so they may be patched in between, and must live.
        """

    def close(self) -> None:
        """Ends what the driver itself runs (the simulated one's threads)."""
