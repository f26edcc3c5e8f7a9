"""The stand-in driver: a libcuda.so.1 in C that needs no GPU and counts what it is asked.

`GREENSCHED_STANDIN_LIB` names the folder that holds it. It is loaded before the first driver call,
so that the real `cuda.bindings` find it in place of a real driver.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from greensched import driver as drivers
from greensched.driver import cuda
from greensched.driver.interface import Driver
from greensched.driver.types import CodeImage, StreamHandle
from helpers.kept import destroy_kept

FOLDER = "GREENSCHED_STANDIN_LIB"

CODE = CodeImage(
    "test",
    {},
    b"STUBCUDA 1\n"
    b"kernel store params=8,4 regs=32 smem=16 maxthreads=512 do=store32:@0,@1\n"
    b"kernel nothing params=\n\0",
)


class Standin:
    """The stand-in's controls and counters."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        for counter in ("live", "misuse", "calls", "injected", "overlaps", "fallible_calls"):
            getattr(self._library, f"stubcuda_{counter}").restype = ctypes.c_longlong
        self._library.stubcuda_fail_nth.argtypes = [ctypes.c_longlong, ctypes.c_int]
        self._library.stubcuda_trace.argtypes = [ctypes.c_char_p]
        self._library.stubcuda_set.argtypes = [ctypes.c_char_p, ctypes.c_double]

    def live(self, what: str | None = None) -> int:
        """Return how many objects and allocations exist, all or of one kind."""
        return int(self._library.stubcuda_live(what.encode() if what else None))

    def misuse(self, kind: str | None = None) -> int:
        """Return the number of wrong uses since `clear`."""
        return int(self._library.stubcuda_misuse(kind.encode() if kind else None))

    def calls(self, name: str) -> int:
        """Return how often a driver function was called."""
        return int(self._library.stubcuda_calls(name.encode()))

    def report(self, path: Path) -> Path:
        """Write the account so far to a file."""
        assert self._library.stubcuda_report(str(path).encode()) == 0
        return path

    def injected(self) -> int:
        """Return how many failures were injected."""
        return int(self._library.stubcuda_injected())

    def clear(self) -> None:
        """Forget wrong uses and pending injections."""
        self.fail(None)
        self.fail_nth(0, 0)
        self._library.stubcuda_clear()

    def fail(self, rules: str | None) -> None:
        """Make calls fail: `"cuEventQuery:1:700"` is the next call of that name."""
        self._library.stubcuda_fail(rules.encode() if rules else None)

    def fail_nth(self, nth: int, status: int) -> None:
        """Make the n-th fallible call from now fail; 0: none."""
        self._library.stubcuda_fail_nth(nth, status)

    def overlaps(self) -> int:
        """Return how many kernels of different green contexts shared an SM at one time."""
        return int(self._library.stubcuda_overlaps())

    def trace(self, path: Path | None) -> None:
        """Write a line for each operation from now on; None ends the trace."""
        self._library.stubcuda_flush()
        self._library.stubcuda_trace(str(path).encode() if path is not None else None)

    def set(self, name: str, value: float) -> None:
        """Set one of the stand-in's numbers."""
        assert self._library.stubcuda_set(name.encode(), value) == 0


class Arguments:
    """Parameters of the kernel `store`: pointers to an address and to a 32-bit number."""

    def __init__(self, address: int, value: int) -> None:
        self.address = ctypes.c_uint64(address)
        self.value = ctypes.c_int32(value)
        self._pointers = (ctypes.c_void_p * 2)(
            ctypes.addressof(self.address), ctypes.addressof(self.value)
        )
        self.pointers = ctypes.addressof(self._pointers)


@pytest.fixture(scope="session")
def standin_folder() -> Path:
    """Return the folder of the stand-in's libcuda.so.1."""
    folder = os.environ.get(FOLDER)
    if not folder:
        pytest.skip("needs the stand-in driver: make test-standin")
    library = Path(folder) / "libcuda.so.1"
    if not library.exists():
        pytest.fail(f"{FOLDER} is set, but {library} does not exist")
    return library.parent.resolve()


@pytest.fixture(scope="session")
def standin_library(standin_folder: Path) -> Standin:
    """Load the stand-in into this process."""
    return Standin(standin_folder / "libcuda.so.1")


@pytest.fixture(scope="session")
def initialised_driver(standin_library: Standin) -> Driver:
    """Return the real driver on the stand-in."""
    before = standin_library.calls("cuInit")
    driver = cuda.open()
    driver.initialise()
    if standin_library.calls("cuInit") == before:
        pytest.fail("the wheel had loaded another libcuda.so.1 before the stand-in")
    return driver


@pytest.fixture
def standin(standin_library: Standin, initialised_driver: Driver) -> Iterator[Standin]:
    """Yield the stand-in, and check that the test leaves nothing alive and misuses nothing."""
    standin_library.clear()
    standin_library.set("kernel_us", 0)
    before = standin_library.live()
    yield standin_library
    for driver in (initialised_driver, drivers.open("cuda")):
        destroy_kept(driver)
    misuse = standin_library.misuse()
    standin_library.clear()
    assert standin_library.live() <= before, "the test left something alive"
    assert misuse == 0, "the test misused the driver"


@pytest.fixture
def driver(standin: Standin, initialised_driver: Driver) -> Driver:
    """Return the real driver on the checked stand-in."""
    return initialised_driver


@pytest.fixture
def primary(driver: Driver) -> Iterator[Any]:
    """Make the primary context of device 0 current on this thread."""
    context = driver.retain_primary(0)
    driver.set_current(context)
    yield context
    driver.set_current(None)
    driver.release_primary(0)


def _stream(driver: Driver) -> Iterator[StreamHandle]:
    stream = driver.create_stream(None)
    yield stream
    driver.synchronize_stream(stream)
    driver.destroy_stream(stream)


@pytest.fixture
def stream(driver: Driver, primary: Any) -> Iterator[StreamHandle]:
    """Yield a stream of the primary context; drain and destroy it at the end."""
    yield from _stream(driver)


@pytest.fixture
def other_stream(driver: Driver, primary: Any) -> Iterator[StreamHandle]:
    """Yield another stream."""
    yield from _stream(driver)


@pytest.fixture
def word(driver: Driver, primary: Any) -> Iterator[tuple[int, memoryview]]:
    """Return pinned words: their device address and a view of the 32-bit numbers."""
    memory = driver.allocate_host(64)
    yield memory.device_address, memory.view.cast("I")
    driver.free_host(memory)


@pytest.fixture(scope="session")
def code() -> CodeImage:
    """Return code in the stand-in's format: `store` writes its second argument to its first."""
    return CODE


@pytest.fixture(scope="session")
def arguments() -> type[Arguments]:
    """Return a function that makes the launch parameters of `store`."""
    return Arguments


@pytest.fixture
def kernel(driver: Driver, primary: Any, code: CodeImage) -> Iterator[Any]:
    """Return the kernel `store`."""
    library = driver.load_code(code)
    yield driver.get_kernel(library, "store")
    driver.unload_code(library)


@pytest.fixture
def python(standin_folder: Path) -> Callable[..., str]:
    """Run a snippet in a process of its own, for what a process decides once.

    Keyword arguments are environment variables; the answer is what it printed.
    """

    def run(code: str, **variables: str) -> str:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("STUBCUDA_") and name != "CUDA_VISIBLE_DEVICES"
        }
        environment["LD_LIBRARY_PATH"] = str(standin_folder)
        environment |= variables
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    return run
