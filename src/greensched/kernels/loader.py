"""`Loader`: the kernels of one open device, loaded when first used.

The launch path asks `loaded`, which never blocks; where it says None a worker calls `load`, which
compiles, loads, and compares the parameters with the code's: a launch reads as many bytes behind
each argument as the *code* says, so a wrong parameter would read foreign memory.

A kernel has one handle on a device, but each context loads its code for itself, and its first
launch there may block. Who has several contexts calls `load` in each, and remembers where.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from greensched._cleanup import run_all
from greensched.driver.interface import Driver
from greensched.driver.types import KernelHandle, LibraryHandle
from greensched.errors import ArgumentMismatch, Closed
from greensched.kernels.program import Kernel, Program
from greensched.typing import DeviceFacts, Limit, Parameter

#: Between saying that a first use comes and asking for it: whoever looked just before that, and saw
#: none, has made his call by then. A call takes microseconds (docs/completion.md).
SAID_S = 1e-3


class Loader:
    """Compiles and loads kernels for one device, each once. Thread-safe.

    One library is loaded for each program, and stays until `close`. A loader keeps the kernels it
    loaded alive.
    """

    def __init__(self, driver: Driver, facts: DeviceFacts) -> None:
        #: One for each first use that is under way. It waits until nothing runs on the device, and
        #: for so long the driver holds up every launch, copy and record there, of whatever stream
        #: (docs/measurements/h200-580/first-use-holds.json): no loop may make one.
        self.first_uses: list[None] = []
        self._driver = driver
        self._facts = facts
        self._lock = threading.Lock()
        #: The most that any of them needs of local memory, for each thread.
        self._local_bytes = 0
        self._libraries: dict[Program, LibraryHandle] = {}
        self._handles: dict[Kernel, KernelHandle] = {}
        self._closed = False

    def loaded(self, kernel: Kernel) -> KernelHandle | None:
        """The kernel's handle if a `load`, in whatever context, has got it. Never blocks."""
        return self._handles.get(kernel)

    def load(self, kernel: Kernel) -> KernelHandle:
        """The kernel's handle, compiled and loaded if it is not. Blocks.

        The calling thread needs a current context of the device. The kernel is loaded in that
        context also where it has its handle already, and local memory is sized for it: a launch
        there does not block then.

        Raises:
            CompileFailed: its source does not compile.
            DriverUnavailable: it must be compiled, and there is no NVRTC.
            NotSupported: it is a cubin for another architecture.
            ArgumentMismatch: its parameters are not those of the code.
            CUDAError: the driver refused the code, or has no such kernel in it.
            Closed: the loader is closed.
        """
        handle = self._handles.get(kernel)
        if handle is None:
            handle = self._open(kernel)
        self._driver.load_kernel(handle)
        self._make_room(handle)
        return handle

    def close(self) -> None:
        """Unloads everything, last loaded first. Blocks. Idempotent.

        Raises:
            CUDAError: the first that an unloading met; later ones are its notes. Every library
                was tried.
        """
        with self._lock:
            self._closed = True
            self._handles.clear()
            libraries = [self._libraries.popitem()[1] for _ in range(len(self._libraries))]
        run_all(partial(self._driver.unload_code, library) for library in libraries)

    def _open(self, kernel: Kernel) -> KernelHandle:
        binary = self._binary(kernel.program)
        with self._first_use():
            with self._lock:
                if self._closed:
                    raise Closed("the loader of kernels")
                handle = self._find(kernel, binary)
            layout = self._driver.kernel_layout(handle)  # without the lock: this may wait
        if layout is not None:
            _check_layout(kernel, layout)
        with self._lock:
            if self._closed:
                raise Closed("the loader of kernels")
            return self._handles.setdefault(kernel, handle)

    @contextmanager
    def _first_use(self) -> Iterator[None]:
        self.first_uses.append(None)
        try:
            if self._driver.needs_binary:  # simulated threads make their calls one after another
                time.sleep(SAID_S)
            yield
        finally:
            self.first_uses.pop()

    def _make_room(self, handle: KernelHandle) -> None:
        """Sizes local memory for a kernel that needs more than any before: its launch would wait.

        The stack limit sizes it, at once; the driver would raise that at the launch. Source: CUDA
        driver API, cuCtxSetLimit, CU_LIMIT_STACK_SIZE.
        """
        needed = self._driver.kernel_limits(handle, self._facts.ordinal).local_bytes
        with self._lock:
            self._local_bytes = max(self._local_bytes, needed)
        # Without the lock, for these calls may wait; whoever sets it last sees if more is needed by
        # now. Each size is set once: a driver may give less (cuCtxSetLimit clamps).
        said = 0
        while self._driver.limit(Limit.STACK) < (most := self._local_bytes) > said:
            self._driver.set_limit(Limit.STACK, most)
            said = most

    def _binary(self, program: Program) -> bytes:
        """Outside the lock, so that a long compilation keeps nobody from loading another kernel."""
        if not self._driver.needs_binary or program in self._libraries:
            return b""
        return program.compile(self._facts.arch)

    def _find(self, kernel: Kernel, binary: bytes) -> KernelHandle:
        program = kernel.program
        if program not in self._libraries:
            self._libraries[program] = self._driver.load_code(program.image(binary))
        return self._driver.get_kernel(self._libraries[program], kernel.name)


def _check_layout(kernel: Kernel, layout: tuple[tuple[int, int], ...]) -> None:
    """Compares parameters with the (offset, size) of each in the code."""
    parameters = kernel.parameters
    if len(parameters) != len(layout):
        raise ArgumentMismatch(
            kernel.name, f"the code takes {len(layout)} parameters, and {len(parameters)} are given"
        )
    end = 0
    for parameter, (offset, size) in zip(parameters, layout, strict=True):
        expected = end + -end % parameter.size if _is_scalar(parameter) else offset
        if (expected, parameter.size) != (offset, size):
            raise ArgumentMismatch(
                kernel.name,
                f"parameter {parameter.name!r} has {parameter.size} bytes at offset {expected} "
                f"as given ({parameter.dtype}{' *' if parameter.pointer else ''}), "
                f"and {size} bytes at offset {offset} in the code",
            )
        end = offset + size


def _is_scalar(parameter: Parameter) -> bool:
    """Whether CUDA aligns it to its own size, as it does not a structure (`"V24"`)."""
    return parameter.pointer or not parameter.dtype.startswith("V")
