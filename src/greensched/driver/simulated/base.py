"""What all verbs of the simulated driver share: its state, and the checks made before each verb.

A verb is refused, loudly, where a real driver would crash or silently block: a wrong or dead
handle (`DriverMisuse`), a verb that may block on an event-loop thread (`LoopWouldBlock`). Where a
real driver answers a status, so does this one.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypedDict, TypeVar, Unpack

from greensched._asynclib import in_event_loop
from greensched.driver.blocking import DRIVER_CALLS, Blocking
from greensched.driver.interface import Driver
from greensched.driver.simulated.address_space import AddressSpace, DeviceMemory
from greensched.driver.simulated.device_models import DeviceModel
from greensched.driver.simulated.faults import Fault, Script
from greensched.driver.simulated.handles import Capture, Handle, SimulatedStream, Thread
from greensched.driver.simulated.timeline import Device, Span, Timeline
from greensched.driver.status import from_status
from greensched.driver.types import Mailbox, StreamHandle
from greensched.errors import CUDAError, DriverMisuse, LoopWouldBlock, NotSupported
from greensched.typing import CaptureMode, DeviceFacts, Feature

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

T = TypeVar("T")
H = TypeVar("H", bound=Handle)
D = TypeVar("D", bound="type[Core]")

#: The version from which a simulated driver has a feature.
SINCE: dict[Feature, tuple[int, int]] = {
    Feature.STRUCTURED_SPLIT: (13, 1),
    Feature.STREAM_RESOURCES: (13, 1),
    Feature.WORKQUEUES: (13, 1),
    Feature.WRITE_VALUE: (13, 0),
}


class DriverClock(Protocol):
    """What the driver asks of its clock: `RealClock` or `VirtualClock`."""

    virtual: bool

    @property
    def new_event_loop(self) -> Callable[[], AbstractEventLoop] | None: ...
    def attach(self) -> Timeline: ...
    def detach(self, timeline: Timeline) -> None: ...
    def now(self) -> int: ...
    def poke(self) -> None: ...
    def changed(self) -> None: ...
    def wait(self, ready: Callable[[], bool]) -> None: ...
    def sleep(self, nanoseconds: int) -> None: ...
    def create_mailbox(self) -> Mailbox[Any]: ...
    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread: ...
    def subscribe(self, look: Callable[[], None]) -> Callable[[], None] | None: ...


#: The driver that a thread works for.
_threads = threading.local()


def current_driver() -> Core | None:
    """The simulated driver whose thread this is; None on any other thread."""
    return getattr(_threads, "driver", None)


class PerThread(threading.local):
    """What the driver keeps for each thread."""

    def __init__(self) -> None:
        self.me = Thread()
        self.stack: list[Any] = []
        self.capture_mode = CaptureMode.GLOBAL


class Options(TypedDict):
    """The options of a simulated driver; `open` says what they mean."""

    version: tuple[int, int]
    clock: DriverClock
    faults: Iterable[Fault]
    without: Iterable[Feature]
    strict_events: bool


class Core(Driver):
    """The state of a simulated driver, and the host's side of the port."""

    name: ClassVar[str] = "simulated"
    needs_binary: ClassVar[bool] = False

    def __init__(self, devices: Iterable[DeviceModel], **options: Unpack[Options]) -> None:
        clock = options["clock"]
        self.clock = clock
        self.timeline = clock.attach()
        self.script = Script(options["faults"])
        self.devices = [Device(i, model) for i, model in enumerate(devices)]
        self.memory = [DeviceMemory(d.model.memory_bytes) for d in self.devices]
        self.space = AddressSpace()
        self.strict_events = options["strict_events"]
        self.new_event_loop = clock.new_event_loop
        if clock.virtual:
            self.spin_budget = 0.0
        self._version = options["version"]
        self._without = frozenset(options["without"])
        self._initialised = False
        self._closed = False
        self._idents = count(1)
        self._live: Counter[tuple[int, str]] = Counter()
        self._thread = PerThread()
        #: Captures in progress.
        self._captures: set[Capture] = set()
        #: The device that each piece of pinned memory is counted with.
        self._pinned: dict[int, int] = {}

    # -- the host's side -----------------------------------------------------------------------

    def time(self) -> float:
        """Seconds on the clock."""
        return self.clock.now() / 1e9

    def create_mailbox(self) -> Mailbox[Any]:
        """A queue to one of our own threads; under virtual time its reader counts as idle."""
        return self.clock.create_mailbox()

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Starts one of our own threads; under virtual time it takes turns with the others."""

        def body() -> None:
            _threads.driver = self
            target()

        return self.clock.start_thread(body, name)

    def subscribe(self, look: Callable[[], None]) -> Callable[[], None] | None:
        """Under virtual time the clock says when to look."""
        return self.clock.subscribe(look)

    def close(self) -> None:
        """Ends the clock's work for this driver: what is queued never runs. Idempotent."""
        if not self._closed:
            self._closed = True
            self.clock.detach(self.timeline)

    def on_span(self, listener: Callable[[Span], None] | None) -> None:
        """Calls `listener` with each operation as it ends; it must be quick and not call back."""
        self.timeline.on_span = listener

    def live(self) -> Counter[str]:
        """How many objects of each kind exist now, over all devices: for leak checks."""
        total: Counter[str] = Counter()
        with self.timeline.lock:
            for (_, kind), number in self._live.items():
                total[kind] += number
        return +total

    # -- process and devices -------------------------------------------------------------------

    def initialise(self) -> None:
        """Makes the driver usable."""
        self._initialised = True

    @property
    def version(self) -> tuple[int, int]:
        """The CUDA version whose rules apply."""
        return self._version

    def supports(self, feature: Feature) -> bool:
        """Whether this version has a feature, and it was not taken away."""
        return feature not in self._without and self._version >= SINCE[feature]

    def device_count(self) -> int:
        """How many devices the machine has."""
        return len(self.devices)

    def device_facts(self, device: int) -> DeviceFacts:
        """The facts of a device."""
        return self._device(device).model.facts(device)

    def _lacks(self, what: str, needs: str) -> NotSupported:
        """The answer where a feature is missing: of this version, or taken away."""
        major, minor = self.version
        without = " without it" if self._without else ""
        return NotSupported(what, needs, f"a simulated CUDA {major}.{minor}{without}")

    # -- checks --------------------------------------------------------------------------------

    def _device(self, ordinal: int) -> Device:
        if not 0 <= ordinal < len(self.devices):
            raise from_status(101, f"device {ordinal}")
        return self.devices[ordinal]

    def _check(self, verb: str, blocks: Blocking, needs_context: bool) -> None:
        if self._closed:
            raise from_status(4, verb)
        if not self._initialised and verb != "initialise":
            raise from_status(3, verb)
        if blocks is Blocking.MAY:
            self._may_block(verb)
        status, seconds = self.script.call(verb)
        if seconds:
            self.clock.sleep(int(seconds * 1e9))
        if status is not None:
            raise from_status(status, verb)
        if needs_context and not self._thread.stack:
            raise from_status(201, verb, detail="no context is current on this thread")

    def _may_block(self, what: str) -> None:
        """Refuses, on an event-loop thread, what can block."""
        if in_event_loop():
            raise LoopWouldBlock(what)

    def _behind_changes(self, device: Device, what: str) -> None:
        """Waits while some thread waits to load or unload code of a device.

        Launches, copies and records do, on whatever stream, making events, streams and pinned
        memory, and limits; marks, waits, queries and memory of a pool do not. Source: an H200,
        driver 580, asked while `cuKernelGetParamInfo`, `cuFuncLoad`, a first launch and
        `cuLibraryUnload` waited beside a stream that was stuck
        (docs/measurements/h200-580/first-use-holds.json).
        """
        if device.changes:
            self._may_block(f"{what}, while code is loaded or unloaded,")
            self.clock.wait(lambda: not device.changes or device.fault is not None)

    def _born(self, device: int, kind: str) -> int:
        with self.timeline.lock:
            self._live[device, kind] += 1
            return next(self._idents)

    def _died(self, device: int, kind: str) -> None:
        with self.timeline.lock:
            self._live[device, kind] -= 1

    def _own(self, handle: H) -> H:
        """A new handle of this driver."""
        handle.owner = self
        return handle

    def _expect(self, handle: object, kind: type[T], what: str) -> T:
        """A handle of the right kind, of this driver, that is still alive."""
        if not isinstance(handle, kind):
            raise DriverMisuse(f"{what}: expected a {kind.__name__}, got {handle!r}")
        if getattr(handle, "owner", self) is not self:
            raise DriverMisuse(f"{what}: of another driver: {handle!r}")
        if not getattr(handle, "alive", True):
            raise DriverMisuse(f"{what}: used after its end: {handle!r}")
        return handle

    def _stream(self, handle: StreamHandle, what: str) -> SimulatedStream:
        stream = self._expect(handle, SimulatedStream, what)
        if stream.detached:
            raise from_status(917 if self.version >= (13, 1) else 709, what)
        self._unfaulted(stream.device, what)
        return stream

    @staticmethod
    def _refuse_own_capture(stream: SimulatedStream, what: str) -> None:
        if stream.capture is not None:
            stream.capture.spoilt = True
            raise from_status(900, what, detail=f"{stream!r} is capturing")

    def _refuse_capture(self, what: str) -> None:
        """A call that may be unsafe spoils the captures that the thread's mode does not allow for.

        Those of every device: the rule speaks of threads.

        Source: cuThreadExchangeStreamCaptureMode in the driver's manual.
        """
        mode, me = self._thread.capture_mode, threading.get_ident()
        if mode is CaptureMode.RELAXED:
            return
        hit = False
        for capture in tuple(self._captures):
            if capture.mode is CaptureMode.RELAXED:
                continue
            own = capture.thread == me
            if own or (mode is CaptureMode.GLOBAL and capture.mode is CaptureMode.GLOBAL):
                capture.spoilt = hit = True
        if hit:
            raise from_status(900, what, detail="a capture is in progress")

    def _end_capture(self, stream: SimulatedStream) -> Capture | None:
        """Ends the stream's capture, if it has one."""
        capture, stream.capture = stream.capture, None
        if capture is not None:
            self._captures.discard(capture)
        return capture

    @staticmethod
    def _unfaulted(device: Device, what: str) -> None:
        """After a device fault every call on the device answers it."""
        if device.fault is not None:
            raise _again(device.fault, what)


def _again(fault: CUDAError, what: str) -> CUDAError:
    """The same fault, met by another call; the first is its cause."""
    met = from_status(fault.status, what, fault.name, f"after {fault}")
    met.__cause__ = fault
    return met


def checked(driver: D) -> D:
    """Puts the checks before every verb of a driver class."""
    for name, mark in DRIVER_CALLS.items():
        setattr(
            driver,
            name,
            _with_checks(getattr(driver, name), name, mark.blocking, mark.needs_context),
        )
    return driver


def _with_checks(
    method: Callable[..., T], name: str, blocks: Blocking, needs_context: bool
) -> Callable[..., T]:
    @functools.wraps(method)
    def verb(self: Core, *args: Any, **kwargs: Any) -> T:
        self._check(name, blocks, needs_context)
        return method(self, *args, **kwargs)

    return verb
