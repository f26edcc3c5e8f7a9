"""The backends of the conformance suite: a driver, a clock and an event loop each."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, TypeVar

import anyio
import pytest

import greensched
from greensched import Device
from greensched import driver as drivers
from greensched.driver import simulated
from greensched.driver.interface import Driver
from greensched.driver.simulated.device_models import MEASURED, DeviceModel, parse
from greensched.typing import Feature
from helpers.devices import DEVICE
from helpers.kept import destroy_kept

T = TypeVar("T")

#: Simulated devices: models, or what `simulated.open` parses.
Devices = str | Sequence[DeviceModel]

#: Backends without a GPU: both clocks, each on every loop it supports, and the default driver, of
#: CUDA 13.0, which is the one that was measured.
SIMULATED = (
    ("real", "asyncio"),
    ("real", "uvloop"),
    ("real", "trio"),
    ("virtual", "asyncio"),
    ("virtual", "trio"),
)
#: Newer drivers, known from their documentation alone.
NEWER = tuple(("real", "asyncio", version) for version in ("13.1", "13.4"))
#: Backends of the CUDA driver, which is a GPU's or the stand-in.
CUDA = (("cuda", "asyncio"), ("cuda", "uvloop"), ("cuda", "trio"))
#: Whether the stand-in is a newer driver than the one that was measured.
IS_NEWER_STANDIN = os.environ.get("STUBCUDA_DRIVER_VERSION", "13000") != "13000"


class Backend:
    """A driver, a clock and an event loop. After the test its drivers are checked for leaks."""

    def __init__(self, kind: str, loop: str, version: str | None = None) -> None:
        self.kind = kind
        self.loop = loop
        self.version: tuple[int, int] | None = None
        if version is not None:
            major, minor = version.split(".")
            self.version = int(major), int(minor)
        self.clock = simulated.VirtualClock(seed=1) if kind == "virtual" else None
        self._drivers: list[Driver] = []
        self._threads_before = set(threading.enumerate())

    @property
    def is_simulated(self) -> bool:
        return self.kind != "cuda"

    def driver(self, spec: Devices = (DEVICE,), **options: Any) -> Driver:
        """Open a driver: a fresh simulated machine, or the process's CUDA driver."""
        if self.kind == "cuda":
            standin_library()  # loads the stand-in, if any, before the first driver call
            found = drivers.open("cuda")
        else:
            models, version = parse(spec) if isinstance(spec, str) else (spec, MEASURED)
            if self.version is not None and "@" not in spec:
                version = self.version
            found = simulated.SimulatedDriver(models, version=version, clock=self.clock, **options)
        self._drivers.append(found)
        return found

    def pool(self, spec: Devices = (DEVICE,), **options: Any) -> greensched.Pool:
        """Make a pool on a driver of its own."""
        faults = {k: options.pop(k) for k in ("faults", "without") if k in options}
        if self.kind == "cuda":  # the machine may have several devices
            options.setdefault("devices", [0])
        return greensched.Pool(driver=self.driver(spec, **faults), **options)

    def pair(self, spec: Devices = (DEVICE, DEVICE), **options: Any) -> greensched.Pool:
        """Make a pool over two devices; skip the test on a machine with fewer."""
        return greensched.Pool(driver=self.two_devices(spec), devices=[0, 1], **options)

    def two_devices(self, spec: Devices = (DEVICE, DEVICE), **faults: Any) -> Driver:
        """Open a driver with two devices; skip the test on a machine with fewer."""
        driver = self.driver(spec, **faults)
        if not self.is_simulated:  # a simulated driver has the devices of `spec`
            _with(2, driver)
        return driver

    def run(self, main: Callable[..., Awaitable[T]], *args: object) -> T:
        """Run an async function on this backend's loop and clock."""
        if self.clock is not None:
            return self.clock.run(main, *args, backend=self.loop)  # type: ignore[arg-type]
        if self.loop == "uvloop":
            return anyio.run(main, *args, backend="asyncio", backend_options={"use_uvloop": True})
        return anyio.run(main, *args, backend=self.loop)

    def check_nothing_left(self) -> None:
        """Fail if the test left a driver object, a misuse or a thread of the library."""
        gc.collect()
        gc.freeze()  # nothing of it is garbage, so the next test's collection need not look at it
        for driver in self._drivers:
            if isinstance(driver, simulated.SimulatedDriver):
                assert not driver.live(), driver.live()
        standin = standin_library()
        if self.kind == "cuda" and standin is not None:
            for driver in self._drivers:
                destroy_kept(driver)
            assert standin.stubcuda_live(None) == 0
            assert standin.stubcuda_misuse(None) == 0
            assert standin.stubcuda_overlaps() == 0
        self.join_threads()

    def join_threads(self) -> None:
        """Join this backend's threads: a closed pool tells them to end and does not wait."""
        for thread in set(threading.enumerate()) - self._threads_before:
            if thread.name.startswith("greensched") and not thread.name.endswith("simulated-gpu"):
                thread.join()


def _with(devices: int, driver: Driver) -> Driver:
    """Initialise the driver; skip the test if it has fewer devices."""
    driver.initialise()
    if driver.device_count() < devices:
        pytest.skip(f"the test needs {devices} devices, this machine has {driver.device_count()}")
    return driver


@contextmanager
def opened(
    backend: Backend, spec: Devices = (DEVICE,), devices: int = 1
) -> Iterator[tuple[Device, ...]]:
    """Open devices on one driver and close them; skip the test on a machine with fewer."""
    driver = _with(devices, backend.driver(spec))
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(closing(Device(ordinal, driver=driver)))
            for ordinal in range(devices)
        )
        assert driver.current() is None, "the test left a context current"


def needs(driver: Driver, feature: Feature) -> None:
    """Skip the test if the driver lacks a feature; other tests show that the library says so."""
    if not driver.supports(feature):
        pytest.skip(f"this driver or its bindings lack {feature.value}")


def standin_library() -> ctypes.CDLL | None:
    """Return the stand-in driver's library, or None if the suite does not run on it."""
    folder = os.environ.get("GREENSCHED_STANDIN_LIB")
    if not folder:
        return None
    library = ctypes.CDLL(f"{folder}/libcuda.so.1", ctypes.RTLD_GLOBAL)
    for counter in ("live", "misuse", "overlaps"):
        getattr(library, f"stubcuda_{counter}").restype = ctypes.c_longlong
    return library
