"""Code of the simulated driver: libraries, kernels, launches that run a numpy reference."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np

from greensched.driver.simulated.contention import bits
from greensched.driver.simulated.faults import Hang
from greensched.driver.simulated.handles import Context, Handle, SimulatedStream
from greensched.driver.simulated.memory import Memories
from greensched.driver.simulated.operations import Kernel as KernelOperation
from greensched.driver.simulated.timeline import Device, WaitOp
from greensched.driver.status import from_status
from greensched.driver.types import (
    DEFAULT_MAX_SHARED_BYTES,
    CodeImage,
    GreenHandle,
    KernelHandle,
    KernelLimits,
    KernelSpec,
    LibraryHandle,
    StreamHandle,
)
from greensched.errors import CUDAError, DriverMisuse, InvalidRequest, NotSimulable
from greensched.typing import Cost, Dim3, LaunchFacts, Parameter


class Library(Handle):
    """A loaded image.

    `loaded` holds the primary contexts that have its code: green contexts share that.
    """

    def __init__(self, image: CodeImage) -> None:
        self.image = image
        self.kernels: dict[str, Kernel] = {}
        self.loaded: set[int] = set()


class Kernel:
    """A kernel of a library. `warm` holds the contexts on which it was loaded or launched."""

    def __init__(self, spec: KernelSpec, library: Library) -> None:
        self.spec = spec
        self.library = library
        self.warm: WeakSet[object] = WeakSet()
        self.shared: dict[int, int] = {}

    @property
    def alive(self) -> bool:
        """As long as its library."""
        return self.library.alive

    @property
    def owner(self) -> object:
        """Its library's."""
        return self.library.owner

    def __repr__(self) -> str:
        return f"<kernel {self.spec.name!r} of {self.library.image.name!r}>"


class Code(Memories):
    """The verbs for code."""

    def load_code(self, image: CodeImage) -> LibraryHandle:
        """Takes the meaning of the image; its machine code is not looked at."""
        return LibraryHandle(self._own(Library(image)))

    def unload_code(self, library: LibraryHandle) -> None:
        """Ends a library and its kernels, when nothing runs any more where it was used."""
        gone = self._expect(library, Library, "unload_code")
        for context in tuple(self._primaries.values()):
            if context.ident in gone.loaded:
                self._settle_code(self.devices[context.device])
        gone.alive = False

    def get_kernel(self, library: LibraryHandle, name: str) -> KernelHandle:
        """A kernel by name; the same one each time."""
        found = self._expect(library, Library, "get_kernel")
        spec = found.image.kernels.get(name)
        if spec is None:
            raise from_status(500, "get_kernel", detail=f"no {name!r} in {found.image.name}")
        return KernelHandle(found.kernels.setdefault(name, Kernel(spec, found)))

    def load_kernel(self, kernel: KernelHandle) -> None:
        """Makes the first launch on the current context one that cannot block."""
        context = self._thread.stack[-1]
        self._unfaulted(self.devices[context.device], "load_kernel")
        found = self._expect(kernel, Kernel, "load_kernel")
        self._load(found, self.devices[context.device], "load_kernel")
        found.warm.add(context)

    def kernel_layout(self, kernel: KernelHandle) -> tuple[tuple[int, int], ...] | None:
        """Where each parameter stands, by CUDA's rules of alignment; a first use, if it is one."""
        found = self._expect(kernel, Kernel, "kernel_layout")
        if self._thread.stack:
            self._load(found, self.devices[self._thread.stack[-1].device], "kernel_layout")
        layout, offset = [], 0
        for parameter in found.spec.parameters:
            offset = -(-offset // parameter.size) * parameter.size
            layout.append((offset, parameter.size))
            offset += parameter.size
        return tuple(layout)

    def kernel_limits(self, kernel: KernelHandle, device: int) -> KernelLimits:
        """Those of the device: a reference has no registers."""
        self._expect(kernel, Kernel, "kernel_limits")
        return KernelLimits(self.device_facts(device).max_threads_per_block, 0, 32, 0)

    def allow_shared(self, kernel: KernelHandle, device: int, nbytes: int) -> None:
        """Remembers what was allowed."""
        if nbytes > self.device_facts(device).max_shared_bytes:
            raise from_status(1, "allow_shared", detail=f"{nbytes} bytes")
        self._expect(kernel, Kernel, "allow_shared").shared[device] = nbytes

    def bind_launch(
        self,
        stream: StreamHandle,
        kernel: KernelHandle,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        parameters: int,
    ) -> Callable[[], None]:
        """A function that launches the kernel's reference with what the parameters then hold."""
        found = self._stream(stream, "bind_launch")
        target = self._expect(kernel, Kernel, "bind_launch")
        if target.spec.reference is None:
            raise NotSimulable(target.spec.name)
        if target.spec.cost is None:
            raise NotSimulable(target.spec.name, "cost")
        device = self.device_facts(found.device.ordinal)
        _check_geometry(target.spec.name, grid, block, device.max_grid)
        _check_shared(target, device.ordinal, shared_bytes)
        facts = LaunchFacts(grid, block, shared_bytes, device, tuple(bits(found.sms)))

        def launch() -> None:
            self._launch(found, target, facts, parameters)

        return launch

    def occupy(self, name: str, cost: Cost) -> None:
        """Work on the SMs of what is current here, behind all of that; blocks until it is done.

        It fills the SMs that it uses: no kernel begins there meanwhile.
        """
        _check_cost(name, cost)
        context: Context = self._thread.stack[-1]
        green = None if context.green is None else GreenHandle(context.green)
        handle = self.create_stream(green)
        try:
            stream = self._stream(handle, name)
            before = self._work_so_far(stream.device, context)
            self._enqueue(stream, lambda: WaitOp(before), name)
            blocks = stream.sms.bit_count()
            work = KernelOperation(name, cost, blocks, 1.0, stream.sms, lambda: None)
            self._enqueue(stream, lambda: work, name)
            self.synchronize_stream(handle)
        finally:
            self.destroy_stream(handle)

    # -- a launch --------------------------------------------------------------------------------

    def _load(self, kernel: Kernel, device: Device, what: str) -> None:
        """Code comes to a device at the first use of any kernel of it, when nothing runs there.

        Source: the probe's `first_launch_beside_a_latch`: a first launch took the 2 s for which a
        kernel ran in another green context; one of a kernel used before, no time. That it was used
        in any other green context is enough: in `many_lanes`, kernels begin on contexts just made,
        beside a loaded one, without delay. What loads lazily is whatever comes first: a launch,
        `load_kernel`, and also asking for a kernel's parameters (stuck-and-lost.json).
        """
        primary = self._primaries.get(device.ordinal)
        if primary is None or primary.ident in kernel.library.loaded:
            return
        self._may_block(f"{what}: the first use of {kernel.spec.name!r}")
        self._settle_code(device)
        self._unfaulted(device, what)
        kernel.library.loaded.add(primary.ident)

    def _launch(
        self, stream: SimulatedStream, kernel: Kernel, facts: LaunchFacts, parameters: int
    ) -> None:
        self._count("launch")
        self._expect(kernel, Kernel, "launch")
        self._stream(StreamHandle(stream), "launch")
        _check_shared(kernel, facts.device.ordinal, facts.shared_bytes)
        spec = kernel.spec
        if stream.context not in kernel.warm:
            self._may_block(f"the first launch of {spec.name!r} on a context")
            self._load(kernel, stream.device, "launch")
            kernel.warm.add(stream.context)
        self._behind_changes(stream.device, f"a launch of {spec.name!r}")
        values = _values(spec, parameters)
        latency = stream.device.model.launch_latency_ns
        self._enqueue(stream, lambda: self._start(stream, kernel, facts, values), "launch", latency)

    def _start(
        self, stream: SimulatedStream, kernel: Kernel, facts: LaunchFacts, values: list[bytes]
    ) -> KernelOperation:
        """One start of a kernel: at its launch, or at each launch of a graph that has it."""
        spec = self._expect(kernel, Kernel, "launch").spec
        given = zip(spec.parameters, values, strict=True)
        arguments = [self._argument(spec.name, facts.device.ordinal, *pair) for pair in given]
        assert spec.reference is not None
        cost = _cost(spec, facts, arguments)
        reference = spec.reference
        fault = self.script.start(spec.name)
        if isinstance(fault, Hang):
            cost = Cost(sm_ns=math.inf)  # it keeps its room on its SMs

        def body() -> CUDAError | None:
            if isinstance(fault, int):
                return from_status(fault, f"kernel {spec.name!r}")
            reference(facts, *arguments)
            return None

        blocks = math.prod(facts.grid)
        part = math.prod(facts.block) / facts.device.max_threads_per_sm
        return KernelOperation(spec.name, cost, blocks, part, stream.sms, body)

    def _argument(self, kernel: str, device: int, parameter: Parameter, raw: bytes) -> Any:
        dtype = np.dtype(parameter.dtype)
        if not parameter.pointer:
            return np.frombuffer(raw, dtype)[0]
        address = int.from_bytes(raw, "little")
        if address == 0:
            return np.empty(0, dtype)
        what = f"kernel {kernel!r}, argument {parameter.name!r}"
        if address % dtype.itemsize:
            raise DriverMisuse(f"{what}: {address:#x} is not aligned to {dtype.itemsize} bytes")
        memory = self.space.to_end(address, device, what)
        view = memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
        if parameter.const:
            view = view.view()
            view.flags.writeable = False
        return view


def _values(spec: KernelSpec, parameters: int) -> list[bytes]:
    """What is behind `void **` now."""
    if not spec.parameters:
        return []
    pointers = (ctypes.c_uint64 * len(spec.parameters)).from_address(parameters)
    given = zip(pointers, spec.parameters, strict=True)
    return [ctypes.string_at(pointer, parameter.size) for pointer, parameter in given]


def _cost(spec: KernelSpec, facts: LaunchFacts, arguments: list[Any]) -> Cost:
    """What a launch costs, by its kernel's model; refused where that is no cost at all."""
    assert spec.cost is not None
    try:
        cost = spec.cost(facts, *arguments)
    except Exception as error:
        raise InvalidRequest(f"the cost of kernel {spec.name!r} failed: {error!r}") from error
    _check_cost(spec.name, cost)
    return cost


def _check_cost(name: str, cost: Cost) -> None:
    if not isinstance(cost, Cost):
        raise InvalidRequest(f"the cost of kernel {name!r} is {cost!r}, and no Cost")
    numbers = (cost.dram_bytes, cost.fixed_ns, cost.limit_ns or 0, cost.sms or 1)
    try:
        right = all(math.isfinite(n) and n >= 0 for n in numbers)
        right = right and cost.sms != 0 and cost.sm_ns >= 0
    except TypeError:
        right = False
    if not right:
        raise InvalidRequest(f"the cost of kernel {name!r} needs finite numbers >= 0: {cost}")


def _check_geometry(name: str, grid: Dim3, block: Dim3, max_grid: Dim3) -> None:
    """Answers INVALID_VALUE as a driver does. Source: return codes recorded on an RTX 3060."""
    fits = all(1 <= n <= most for n, most in zip(grid, max_grid, strict=True))
    threads = math.prod(block)
    if not fits or not 1 <= threads <= 1024 or min(block) < 1 or block[2] > 64:
        raise from_status(1, f"launch of {name!r}", detail=f"grid {grid}, block {block}")


def _check_shared(kernel: Kernel, device: int, nbytes: int) -> None:
    """Answers INVALID_VALUE to more dynamic shared memory than the kernel is allowed by now.

    Source: cuda.h, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
    """
    if not 0 <= nbytes <= kernel.shared.get(device, DEFAULT_MAX_SHARED_BYTES):
        name = kernel.spec.name
        raise from_status(1, f"launch of {name!r}", detail=f"{nbytes} bytes shared")
