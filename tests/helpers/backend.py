"""The worlds the conformance suite runs in: a driver, a clock and an event loop."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, TypeVar

import anyio
import pytest

import greensched
from greensched import Device
from greensched import driver as drivers
from greensched.driver import simulated
from greensched.driver.interface import Driver
from greensched.typing import Feature

T = TypeVar("T")

#: What a test simulates that needs no other: of 78 SMs, so it opens in half an H200's time.
DEVICE = "h20"

#: Worlds without a GPU: both clocks, each on what its loops can be, and a driver of CUDA 13.4.
SIMULATED = (
    ("real", "asyncio"),
    ("real", "uvloop"),
    ("real", "trio"),
    ("virtual", "asyncio"),
    ("virtual", "trio"),
)
#: The older drivers, each with what is not there yet.
OLDER = tuple(("real", "asyncio", version) for version in ("12.5", "13.0", "13.1"))
#: The oldest: green contexts without streams, and so without pools.
OLDEST = (("real", "asyncio", "12.4"),)
#: Worlds of the CUDA driver, real or stood in for.
CUDA = (("cuda", "asyncio"), ("cuda", "uvloop"), ("cuda", "trio"))


class Backend:
    """One of them. Every driver it made is checked for leaks when the test is over."""

    def __init__(self, kind: str, backend: str, version: str | None = None) -> None:
        self.kind = kind
        self.backend = backend
        self.version = version
        self.clock = simulated.VirtualClock(seed=1) if kind == "virtual" else None
        self._drivers: list[Driver] = []
        self._threads_before = set(threading.enumerate())

    @property
    def is_simulated(self) -> bool:
        return self.kind != "cuda"

    def driver(self, spec: str = DEVICE, **options: Any) -> Driver:
        """A driver: a fresh simulated machine, or the process's CUDA driver."""
        if self.kind == "cuda":
            standin_library()  # before the first driver call, if there is one
            found = drivers.open("cuda")
        else:
            if self.version is not None and "@" not in spec:
                spec = f"{spec}@{self.version}"
            found = simulated.open(spec, clock=self.clock, **options)
        self._drivers.append(found)
        return found

    def pool(self, spec: str = DEVICE, **options: Any) -> greensched.Pool:
        """A pool on a driver of its own."""
        faults = {k: options.pop(k) for k in ("faults", "without") if k in options}
        if self.kind == "cuda":  # a machine may have several
            options.setdefault("devices", [0])
        return greensched.Pool(driver=self.driver(spec, **faults), **options)

    def pair(self, spec: str) -> greensched.Pool:
        """A pool over two devices; the test is skipped on a machine with fewer."""
        driver = self.driver(spec)
        if not self.is_simulated:  # its driver may not be asked on a loop, and has what was said
            _with(2, driver)
        return greensched.Pool(driver=driver, devices=[0, 1])

    def run(self, main: Callable[..., Awaitable[T]], *args: object) -> T:
        """Runs an async function on this world's loop and clock."""
        if self.clock is not None:
            return self.clock.run(main, *args, backend=self.backend)  # type: ignore[arg-type]
        if self.backend == "uvloop":
            return anyio.run(main, *args, backend="asyncio", backend_options={"use_uvloop": True})
        return anyio.run(main, *args, backend=self.backend)

    def check_nothing_left(self) -> None:
        """After a test: no object alive, no misuse, no thread of ours."""
        gc.collect()
        for driver in self._drivers:
            if isinstance(driver, simulated.SimulatedDriver):
                assert not driver.live(), driver.live()
        standin = standin_library()
        if self.kind == "cuda" and standin is not None:
            assert standin.stubcuda_live(None) == 0
            assert standin.stubcuda_misuse(None) == 0
            assert standin.stubcuda_overlaps() == 0
        self.join_threads()

    def join_threads(self) -> None:
        """Waits for this world's threads: they were told to end, and nobody waited for that."""
        for thread in set(threading.enumerate()) - self._threads_before:
            if thread.name.startswith("greensched") and not thread.name.endswith("simulated-gpu"):
                thread.join(5)
                assert not thread.is_alive(), thread.name


def _with(devices: int, driver: Driver) -> Driver:
    """The driver, initialised; the test is skipped where it has fewer devices."""
    driver.initialise()
    if driver.device_count() < devices:
        pytest.skip(f"the test is of {devices} devices, and this machine has fewer")
    return driver


@contextmanager
def opened(world: Backend, spec: str = DEVICE, devices: int = 1) -> Iterator[tuple[Device, ...]]:
    """Devices on one driver, closed at the end; skipped where there are not so many."""
    driver = _with(devices, world.driver(spec))
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(closing(Device(ordinal, driver=driver)))
            for ordinal in range(devices)
        )
        assert driver.current() is None, "the test left something current"


def needs(driver: Driver, feature: Feature) -> None:
    """Leaves a test out where the driver lacks a feature: that it says so, other tests show."""
    if not driver.supports(feature):
        pytest.skip(f"this driver lacks {feature.value}")


def standin_library() -> ctypes.CDLL | None:
    """The stand-in driver, where the suite runs on it."""
    folder = os.environ.get("GREENSCHED_STANDIN_LIB")
    if not folder:
        return None
    library = ctypes.CDLL(f"{folder}/libcuda.so.1", ctypes.RTLD_GLOBAL)
    for counter in ("live", "misuse", "overlaps"):
        getattr(library, f"stubcuda_{counter}").restype = ctypes.c_longlong
    return library
