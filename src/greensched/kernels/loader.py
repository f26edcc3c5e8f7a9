"""`Loader`: loads the kernels of one device on first use.

A launch calls `loaded`, which never blocks. If that returns None, a thread calls `load`, which
compiles and loads the kernel and compares its parameters with the code: a launch reads as many
bytes of each argument as the *code* says, so a wrong parameter would read other memory.

A kernel has one handle per device, but each context loads its code separately, and its first launch
there may block. So a user of several contexts calls `load` in each of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial

from greensched._cleanup import run_all
from greensched.driver.interface import Driver
from greensched.driver.types import KernelHandle, LibraryHandle
from greensched.errors import ArgumentMismatch, Closed, PartitionClosed
from greensched.kernels.program import Kernel, Program
from greensched.typing import DeviceFacts, Limit, Parameter

#: Seconds between announcing a first use and beginning it. A thread that read `first_uses` just
#: before the announcement has finished its driver call by then: a call takes microseconds
#: (docs/internals/completion.md, "Calls that wait").
ANNOUNCE_S = 1e-3


class Abandonment:
    """Ends waits for compilations that a partition no longer needs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._awaited: set[Future[bytes]] = set()

    def set(self) -> None:
        """End all waits, present and future. Does not wait."""
        with self._lock:
            self._is_set = True
            awaited, self._awaited = self._awaited, set()
        for future in awaited:
            future.cancel()

    def run(self, function: Callable[[], bytes], driver: Driver) -> bytes:
        """Call a function on a new thread, and wait for its end or for `set`.

        Raises:
            PartitionClosed: `set` was called first. The function continues.
            Exception: The function raised it.
        """
        future: Future[bytes] = Future()
        with self._lock:
            if self._is_set:
                raise PartitionClosed("this partition")
            self._awaited.add(future)
        try:
            driver.start_thread(partial(_resolve, future, function), "greensched compile")
            return future.result()
        except CancelledError:
            raise PartitionClosed("this partition") from None
        finally:
            with self._lock:
                self._awaited.discard(future)


def _resolve(future: Future[bytes], function: Callable[[], bytes]) -> None:
    """Set a future's result by calling a function, unless the future was cancelled."""
    try:
        binary = function()
    except BaseException as error:
        with suppress(InvalidStateError):
            future.set_exception(error)
    else:
        with suppress(InvalidStateError):
            future.set_result(binary)


class Loader:
    """Compiles and loads each kernel of one device once. Thread-safe.

    Each program becomes one library, which stays loaded until `close` and keeps its kernels alive.
    """

    def __init__(self, driver: Driver, facts: DeviceFacts) -> None:
        #: One entry for each first use in progress. A first use waits until the device is idle, and
        #: until then the driver delays every launch, copy and record on it, so no event loop may
        #: make one (docs/measurements/h200-580/first-use-holds.json).
        self.first_uses: list[None] = []
        self._driver = driver
        self._facts = facts
        self._lock = threading.Lock()
        #: The most local memory per thread that any loaded kernel needs.
        self._local_bytes = 0
        self._libraries: dict[Program, LibraryHandle] = {}
        self._handles: dict[Kernel, KernelHandle] = {}
        self._closed = False

    def loaded(self, kernel: Kernel) -> KernelHandle | None:
        """Return the kernel's handle if it was loaded in any context, else None. Never blocks."""
        return self._handles.get(kernel)

    def load(self, kernel: Kernel, abandonment: Abandonment | None = None) -> KernelHandle:
        """Compile and load a kernel if necessary, and return its handle. Blocks.

        A context of the device must be current on the thread. The kernel is loaded in that context
        and local memory is sized for it, so that no launch there blocks. An abandonment ends the
        wait for the compiler, which continues, for the cache.

        Raises:
            CompileFailed: The kernel's source does not compile.
            DriverUnavailable: The source must be compiled, but there is no NVRTC.
            NotSupported: The program is a cubin for another architecture.
            ArgumentMismatch: The kernel's parameters differ from the code's.
            CUDAError: The driver refused the code, or the code has no such kernel.
            Closed: The loader is closed.
            PartitionClosed: The abandonment came before the end of the compilation.
        """
        handle = self._handles.get(kernel)
        if handle is None:
            handle = self._open(kernel, abandonment)
        self._driver.load_kernel(handle)
        self._size_local_memory(handle)
        return handle

    def close(self) -> None:
        """Unload all libraries in reverse order of loading. Blocks. Idempotent.

        Raises:
            CUDAError: The first failure; later ones are its notes. Every library was tried.
        """
        with self._lock:
            self._closed = True
            self._handles.clear()
            libraries = [self._libraries.popitem()[1] for _ in range(len(self._libraries))]
        run_all(partial(self._driver.unload_code, library) for library in libraries)

    def _open(self, kernel: Kernel, abandonment: Abandonment | None) -> KernelHandle:
        binary = self._binary(kernel.program, abandonment)
        with self._first_use():
            with self._lock:
                if self._closed:
                    raise Closed("the loader of kernels")
                handle = self._find(kernel, binary)
            layout = self._driver.kernel_layout(handle)  # not under the lock: it may wait
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
            if self._driver.needs_binary:  # simulated threads run one at a time
                time.sleep(ANNOUNCE_S)
            yield
        finally:
            self.first_uses.pop()

    def _size_local_memory(self, handle: KernelHandle) -> None:
        """Grow local memory now if a kernel needs more, so that no launch waits for it.

        The stack limit sets it; otherwise the driver raises it at the launch. Source: CUDA
        driver API, cuCtxSetLimit, CU_LIMIT_STACK_SIZE.
        """
        needed = self._driver.kernel_limits(handle, self._facts.ordinal).local_bytes
        with self._lock:
            self._local_bytes = max(self._local_bytes, needed)
        # Not under the lock, because these calls may wait. The loop repeats if another thread needs
        # more meanwhile. Each size is set once: a driver may set less (cuCtxSetLimit clamps).
        size_set = 0
        while self._driver.limit(Limit.STACK) < (most := self._local_bytes) > size_set:
            self._driver.set_limit(Limit.STACK, most)
            size_set = most

    def _binary(self, program: Program, abandonment: Abandonment | None) -> bytes:
        """Return the cubin. Takes no lock, so that other kernels can be loaded meanwhile."""
        if not self._driver.needs_binary or program in self._libraries:
            return b""
        compile_program = partial(program.compile, self._facts.arch)
        if abandonment is None:
            return compile_program()
        return abandonment.run(compile_program, self._driver)

    def _find(self, kernel: Kernel, binary: bytes) -> KernelHandle:
        program = kernel.program
        if program not in self._libraries:
            self._libraries[program] = self._driver.load_code(program.image(binary))
        return self._driver.get_kernel(self._libraries[program], kernel.name)


def _check_layout(kernel: Kernel, layout: tuple[tuple[int, int], ...]) -> None:
    """Compare the parameters with those of the code, each an (offset, size)."""
    parameters = kernel.parameters
    if len(parameters) != len(layout):
        raise ArgumentMismatch(
            kernel.name,
            f"the code has {len(layout)} parameters, but {len(parameters)} are declared",
        )
    end = 0
    for parameter, (offset, size) in zip(parameters, layout, strict=True):
        expected = end + -end % parameter.size if _is_scalar(parameter) else offset
        if (expected, parameter.size) != (offset, size):
            raise ArgumentMismatch(
                kernel.name,
                f"parameter {parameter.name!r} has {parameter.size} bytes at offset {expected} "
                f"as declared ({parameter.dtype}{' *' if parameter.pointer else ''}), "
                f"but {size} bytes at offset {offset} in the code",
            )
        end = offset + size


def _is_scalar(parameter: Parameter) -> bool:
    """Return whether CUDA aligns a parameter to its size; it does not for a struct (`"V24"`)."""
    return parameter.pointer or not parameter.dtype.startswith("V")
