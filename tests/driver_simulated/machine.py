"""A simulated machine for tests: contexts, streams, kernels and memory in a line each."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from greensched.driver import simulated
from greensched.driver.simulated import DeviceModel, SimulatedDriver, Span
from greensched.driver.simulated.device_models import PRESETS
from greensched.driver.types import (
    CodeImage,
    EventHandle,
    GreenHandle,
    HostMemory,
    KernelHandle,
    KernelSpec,
    MemoryPoolHandle,
    ResourceHandle,
    StreamHandle,
)
from greensched.typing import Cost, LaunchFacts, Parameter

#: An H200 as the preset has it, but for its bandwidth: that of the data sheet, from any SM.
SMS = 132
LAUNCH_NS = 3_900
COPY_NS = 1_500
DRAM_PER_NS = 4_800
LINK_PER_NS = 55


class Machine:
    """A driver whose device 0 has its primary context current on the making thread."""

    def __init__(self, spec: str | Sequence[DeviceModel] = "h200", **options: Any) -> None:
        options.setdefault("clock", simulated.VirtualClock())
        if spec in ("h200", "h200x2"):
            round_figures = replace(PRESETS["h200"], dram_bandwidth=4.8e12, sm_bandwidth=math.inf)
            spec = [round_figures] * (1 if spec == "h200" else 2)
        self.driver: SimulatedDriver = simulated.open(spec, **options)
        self.driver.initialise()
        self.spans: list[Span] = []
        self.driver.on_span(self.spans.append)
        self.primary = self.driver.retain_primary(0)
        self.driver.set_current(self.primary)
        self._pool: MemoryPoolHandle | None = None

    def close(self) -> None:
        self.driver.close()

    # -- contexts and streams ------------------------------------------------------------------

    def cells(self, minimum: int = 16, device: int = 0) -> list[ResourceHandle]:
        """Return the groups of one split."""
        resource = self.driver.device_resource(device)
        return self.driver.split_by_count(resource, None, minimum)[0]

    def greens(self, number: int, sms: int = 16, device: int = 0) -> list[GreenHandle]:
        """Return disjoint green contexts with so many SMs."""
        cells = self.cells(sms, device)[:number]
        return [self.driver.create_green(self.driver.describe([c]), device) for c in cells]

    def green(self, sms: int = 16, device: int = 0) -> GreenHandle:
        (green,) = self.greens(1, sms, device)
        return green

    def stream(self, green: GreenHandle | None = None, *, priority: int = 0) -> StreamHandle:
        return self.driver.create_stream(green, priority)

    def hold(self, *streams: StreamHandle) -> Word:
        """Block streams, after their present work, until the word is 1."""
        word = self.word()
        for stream in streams:
            self.driver.wait_value(stream, word.address, 1)
        return word

    def event(self, green: GreenHandle | None = None, **options: bool) -> EventHandle:
        """Make an event of a green context, or of the current one."""
        before = self.driver.current()
        if green is not None:
            self.driver.set_current(self.driver.green_context(green))
        event = self.driver.create_event(**options)
        self.driver.set_current(before)
        return event

    # -- memory --------------------------------------------------------------------------------

    @property
    def pool(self) -> MemoryPoolHandle:
        if self._pool is None:
            self._pool = self.driver.create_memory_pool(0)
        return self._pool

    def device_memory(self, nbytes: int, stream: StreamHandle) -> int:
        return self.driver.allocate(self.pool, nbytes, stream)

    def pinned(self, nbytes: int = 64) -> HostMemory:
        return self.driver.allocate_host(nbytes)

    def word(self) -> Word:
        return Word(self.pinned(4))

    # -- code ----------------------------------------------------------------------------------

    def kernel(
        self,
        name: str = "kernel",
        parameters: Sequence[Parameter] = (),
        reference: Callable[..., None] | None = None,
        cost: Cost | Callable[..., Cost] = Cost(),  # noqa: B008  a frozen value
        loaded: bool = True,
    ) -> KernelHandle:
        """A kernel of a library of its own; without a reference it does nothing.

        It is `loaded` as if it had been used before: a first use waits for what runs.
        """

        def nothing(launch: LaunchFacts, *arguments: object) -> None:
            pass

        def constant(launch: LaunchFacts, *arguments: object) -> Cost:
            assert isinstance(cost, Cost)
            return cost

        spec = KernelSpec(
            name, tuple(parameters), reference or nothing, cost if callable(cost) else constant
        )
        library = self.driver.load_code(CodeImage("test", {name: spec}))
        kernel = self.driver.get_kernel(library, name)
        if loaded:
            kernel.library.loaded.update(p.ident for p in self.driver.machine.primaries.values())  # type: ignore[attr-defined]
        return kernel

    def launch(
        self,
        stream: StreamHandle,
        kernel: KernelHandle,
        *values: object,
        blocks: int = 1024,
        threads: int = 128,
    ) -> None:
        packed = Packed(kernel.spec.parameters, values)  # type: ignore[attr-defined]
        grid, block = (blocks, 1, 1), (threads, 1, 1)
        self.driver.bind_launch(stream, kernel, grid, block, 0, packed.address)()

    def run(
        self, stream: StreamHandle, name: str, blocks: int = 1024, threads: int = 128, **cost: Any
    ) -> None:
        """Launch a kernel that only takes time."""
        kernel = self.kernel(name, cost=Cost(**cost))
        self.launch(stream, kernel, blocks=blocks, threads=threads)

    def inside(self, function: Callable[[], Any]) -> Any:
        """Calls a function on a thread of the driver's: while it runs no virtual time passes.

        For a test's own thread it passes as soon as it has waited for anything.
        """
        outcome: list[Any] = []

        def body() -> None:
            self.driver.set_current(self.primary)
            outcome.append(caught(function))
            self.driver.set_current(None)

        self.driver.start_thread(body, "inside").join()
        return result_of(outcome)

    # -- looking -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for all work on device 0."""
        self.driver.synchronize_context(self.primary)

    def times(self) -> dict[str, tuple[int, int]]:
        """Return (start, end) of the work that has run, by name."""
        return {span.name: (span.start, span.end) for span in self.spans}

    def lengths(self) -> dict[str, int]:
        """Wait for all work, and return each kernel's or copy's duration."""
        self.finish()
        return {name: end - start for name, (start, end) in self.times().items()}


class Word:
    """A 32-bit word of pinned memory."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._array = np.frombuffer(memory.view, np.uint32)

    @property
    def address(self) -> int:
        return self.memory.device_address

    @property
    def value(self) -> int:
        return int(self._array[0])

    @value.setter
    def value(self, value: int) -> None:
        self._array[0] = value


class Packed:
    """Launch parameters as `void **`."""

    def __init__(self, parameters: Sequence[Parameter], values: Sequence[object]) -> None:
        assert len(parameters) == len(values)
        self.cells = []
        for parameter, value in zip(parameters, values, strict=True):
            dtype = np.dtype(np.uint64 if parameter.pointer else parameter.dtype)
            self.cells.append(ctypes.create_string_buffer(dtype.type(value).tobytes(), 8))
        self._pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, self.cells))
        self.address = ctypes.addressof(self._pointers) if values else 0


def spin(until: Callable[[], object]) -> None:
    """Wait for another thread without sleeping; the test's own limit ends it."""
    while not until():
        pass


def on_thread(function: Callable[[], Any]) -> Any:
    """Return the result of a function, or its error, from a thread of its own."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(caught(function)), daemon=True)
    thread.start()
    thread.join()
    return result_of(outcome)


def caught(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:
        return None, error


def result_of(outcome: list[Any]) -> Any:
    assert outcome, "the thread hangs"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
