"""Libraries, kernels, and launches, which run numpy references."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np

from greensched.driver.simulated.contention import bits
from greensched.driver.simulated.faults import Hang
from greensched.driver.simulated.handles import Handle, SimulatedStream
from greensched.driver.simulated.kernel_timing import KernelOp
from greensched.driver.simulated.machine import Component
from greensched.driver.simulated.timeline import DeviceState, WaitOp
from greensched.driver.status import from_status
from greensched.driver.types import (
    DEFAULT_MAX_SHARED_BYTES,
    CodeImage,
    KernelHandle,
    KernelLimits,
    KernelSpec,
    LibraryHandle,
    StreamHandle,
)
from greensched.errors import CUDAError, DriverMisuse, InvalidRequest, NotSimulable
from greensched.typing import Cost, Dim3, LaunchFacts, Parameter


class Library(Handle):
    """A loaded code image.

    `loaded` holds the primary contexts in which it is loaded; green contexts share their primary's.
    """

    def __init__(self, image: CodeImage) -> None:
        self.image = image
        self.kernels: dict[str, LibraryKernel] = {}
        self.loaded: set[int] = set()


class LibraryKernel:
    """A kernel of a library. `warm` holds the contexts in which it was loaded or launched."""

    def __init__(self, spec: KernelSpec, library: Library) -> None:
        self.spec = spec
        self.library = library
        self.warm: WeakSet[object] = WeakSet()
        self.shared: dict[int, int] = {}

    @property
    def alive(self) -> bool:
        return self.library.alive

    @property
    def owner(self) -> object:
        return self.library.owner

    def __repr__(self) -> str:
        return f"<kernel {self.spec.name!r} of {self.library.image.name!r}>"


class Modules(Component):
    """Driver calls for code."""

    def load_code(self, image: CodeImage) -> LibraryHandle:
        """Keep the kernel specs of an image; its machine code is ignored."""
        return LibraryHandle(self.machine.own(Library(image)))

    def unload_code(self, library: LibraryHandle) -> None:
        """End a library and its kernels once the devices that loaded it are idle."""
        ended = self.machine.expect(library, Library, "unload_code")
        for context in tuple(self.machine.primaries.values()):
            if context.ident in ended.loaded:
                self.machine.wait_to_change_code(self.machine.devices[context.device])
        ended.alive = False

    def get_kernel(self, library: LibraryHandle, name: str) -> KernelHandle:
        loaded = self.machine.expect(library, Library, "get_kernel")
        spec = loaded.image.kernels.get(name)
        if spec is None:
            raise from_status(500, "get_kernel", detail=f"no {name!r} in {loaded.image.name}")
        return KernelHandle(loaded.kernels.setdefault(name, LibraryKernel(spec, loaded)))

    def load_kernel(self, kernel: KernelHandle) -> None:
        context = self.machine.current
        device = self.machine.usable_device(context.device, "load_kernel")
        loaded = self._kernel(kernel, "load_kernel")
        self._load(loaded, device, "load_kernel")
        loaded.warm.add(context)

    def kernel_layout(self, kernel: KernelHandle) -> tuple[tuple[int, int], ...] | None:
        """Return each parameter's (offset, size) by CUDA's alignment rules. May be a first use."""
        loaded = self._kernel(kernel, "kernel_layout")
        if self.machine.thread.stack:
            device = self.machine.devices[self.machine.current.device]
            self._load(loaded, device, "kernel_layout")
        layout, offset = [], 0
        for parameter in loaded.spec.parameters:
            offset = -(-offset // parameter.size) * parameter.size
            layout.append((offset, parameter.size))
            offset += parameter.size
        return tuple(layout)

    def kernel_limits(self, kernel: KernelHandle, device: int) -> KernelLimits:
        """Return the device's limits, because a reference implementation uses no registers."""
        self._kernel(kernel, "kernel_limits")
        facts = self.machine.device(device).model.facts(device)
        return KernelLimits(facts.max_threads_per_block, 0, 0)

    def allow_shared(self, kernel: KernelHandle, device: int, nbytes: int) -> None:
        if nbytes > self.machine.device(device).model.max_shared_bytes:
            raise from_status(1, "allow_shared", detail=f"{nbytes} bytes")
        self._kernel(kernel, "allow_shared").shared[device] = nbytes

    def bind_launch(
        self,
        stream: StreamHandle,
        kernel: KernelHandle,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        parameters: int,
    ) -> Callable[[], None]:
        launch_stream = self.machine.stream(stream, "bind_launch")
        target = self._kernel(kernel, "bind_launch")
        name = target.spec.name
        if target.spec.reference is None:
            raise NotSimulable(name)
        if target.spec.cost is None:
            raise NotSimulable(name, "cost")
        ordinal = launch_stream.device.ordinal
        device = launch_stream.device.model.facts(ordinal)
        _check_geometry(name, grid, block, device.max_grid)
        _check_shared(target, ordinal, shared_bytes)
        facts = LaunchFacts(grid, block, shared_bytes, device, tuple(bits(launch_stream.sms)))

        def launch() -> None:
            self._launch(launch_stream, target, facts, parameters)

        return launch

    def _occupy(self, handle: StreamHandle, name: str, cost: Cost) -> None:
        """Submit work to a fresh stream, after the present work of the current context.

        It fills the SMs that it uses, so that no kernel begins there meanwhile.
        """
        machine = self.machine
        stream = machine.stream(handle, name)
        before = machine.work_so_far(stream.device, machine.current)
        machine.enqueue(stream, lambda: WaitOp(before), name)
        work = KernelOp(name, cost, stream.sms.bit_count(), 1.0, stream.sms, lambda: None)
        machine.enqueue(stream, lambda: work, name)

    # -- a launch --------------------------------------------------------------------------------

    def _kernel(self, handle: object, what: str) -> LibraryKernel:
        return self.machine.expect(handle, LibraryKernel, what)

    def _load(self, kernel: LibraryKernel, device: DeviceState, what: str) -> None:
        """Load a library on a device at the first use of any of its kernels there.

        This waits until the device is idle. Source: the probe's `first_launch_beside_a_latch`. A
        first launch took the 2 s for which a kernel ran in another green context. A launch of a
        kernel used before took no time, even if it was used in another green context: in the probe,
        kernels begin in new contexts beside a loaded one without delay. The first use is a launch,
        `load_kernel`, or a query of a kernel's parameters (stuck-and-lost.json).
        """
        primary = self.machine.primaries.get(device.ordinal)
        if primary is None or primary.ident in kernel.library.loaded:
            return
        self.machine.refuse_on_event_loop(f"{what}: the first use of {kernel.spec.name!r}")
        self.machine.wait_to_change_code(device)
        self.machine.usable_device(device.ordinal, what)
        kernel.library.loaded.add(primary.ident)

    def _launch(
        self, stream: SimulatedStream, kernel: LibraryKernel, facts: LaunchFacts, parameters: int
    ) -> None:
        machine, spec = self.machine, kernel.spec
        machine.count_call("launch")
        self._kernel(kernel, "launch")
        machine.stream(StreamHandle(stream), "launch")
        _check_shared(kernel, facts.device.ordinal, facts.shared_bytes)
        if stream.context not in kernel.warm:
            machine.refuse_on_event_loop(f"the first launch of {spec.name!r} on a context")
            self._load(kernel, stream.device, "launch")
            kernel.warm.add(stream.context)
        machine.wait_for_code_changes(stream.device, f"a launch of {spec.name!r}")
        values = _read_values(spec, parameters)

        def start() -> KernelOp:
            return self._start(stream, kernel, facts, values)

        machine.enqueue(stream, start, "launch", stream.device.model.launch_latency_ns)

    def _start(
        self,
        stream: SimulatedStream,
        kernel: LibraryKernel,
        facts: LaunchFacts,
        values: list[bytes],
    ) -> KernelOp:
        """Make the operation of one start, at a launch or at each launch of its graph."""
        spec = self._kernel(kernel, "launch").spec
        pairs = zip(spec.parameters, values, strict=True)
        arguments = [self._argument(spec.name, facts.device.ordinal, *pair) for pair in pairs]
        assert spec.reference is not None
        cost = _evaluate_cost(spec, facts, arguments)
        reference = spec.reference
        fault = self.machine.script.start(spec.name)
        if isinstance(fault, Hang):
            cost = Cost(sm_ns=math.inf)  # it keeps occupying its SMs

        def body() -> CUDAError | None:
            if isinstance(fault, int):
                return from_status(fault, f"kernel {spec.name!r}")
            reference(facts, *arguments)
            return None

        blocks = math.prod(facts.grid)
        part = math.prod(facts.block) / facts.device.max_threads_per_sm
        return KernelOp(spec.name, cost, blocks, part, stream.sms, body, stream.priority)

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
        memory = self.machine.space.to_end(address, device, what)
        view = memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
        if parameter.const:
            view = view.view()
            view.flags.writeable = False
        return view


def _read_values(spec: KernelSpec, parameters: int) -> list[bytes]:
    """Copy the values that a `void **` points to."""
    if not spec.parameters:
        return []
    pointers = (ctypes.c_uint64 * len(spec.parameters)).from_address(parameters)
    pairs = zip(pointers, spec.parameters, strict=True)
    return [ctypes.string_at(pointer, parameter.size) for pointer, parameter in pairs]


def _evaluate_cost(spec: KernelSpec, facts: LaunchFacts, arguments: list[Any]) -> Cost:
    """Return the checked cost of a launch, from its kernel's cost model."""
    assert spec.cost is not None
    try:
        cost = spec.cost(facts, *arguments)
    except Exception as error:
        raise InvalidRequest(f"the cost of kernel {spec.name!r} failed: {error!r}") from error
    check_cost(spec.name, cost)
    return cost


def check_cost(name: str, cost: Cost) -> None:
    """Raise InvalidRequest if a cost is not a valid `Cost`."""
    if not isinstance(cost, Cost):
        raise InvalidRequest(f"the cost of kernel {name!r} is {cost!r}: return a Cost")
    numbers = (
        cost.dram_bytes, cost.fixed_ns, cost.limit_ns or 0, cost.sms or 1, cost.sm_watts,
        cost.sm_bandwidth or 1,
    )  # fmt: skip
    try:
        valid = all(math.isfinite(n) and n >= 0 for n in numbers)
        valid = valid and cost.sms != 0 and cost.sm_bandwidth != 0 and cost.sm_ns >= 0
    except TypeError:
        valid = False
    if not valid:
        raise InvalidRequest(f"the cost of kernel {name!r} needs finite numbers >= 0: {cost}")


def _check_geometry(name: str, grid: Dim3, block: Dim3, max_grid: Dim3) -> None:
    """Return INVALID_VALUE as a driver does. Source: return codes recorded on an RTX 3060."""
    fits = all(1 <= n <= most for n, most in zip(grid, max_grid, strict=True))
    threads = math.prod(block)
    if not fits or not 1 <= threads <= 1024 or min(block) < 1 or block[2] > 64:
        raise from_status(1, f"launch of {name!r}", detail=f"grid {grid}, block {block}")


def _check_shared(kernel: LibraryKernel, device: int, nbytes: int) -> None:
    """Return INVALID_VALUE for more dynamic shared memory than the kernel has opted in to.

    Source: cuda.h, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
    """
    if not 0 <= nbytes <= kernel.shared.get(device, DEFAULT_MAX_SHARED_BYTES):
        name = kernel.spec.name
        raise from_status(1, f"launch of {name!r}", detail=f"{nbytes} bytes shared")
