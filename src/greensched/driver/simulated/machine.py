"""The state of a simulated machine, and the checks that its driver calls share.

Where a real driver would crash or block, a call raises an exception: for a wrong or closed handle
(`DriverMisuse`), and for a call that may block on an event loop's thread (`LoopWouldBlock`). Where
a real driver returns a status, the simulated one returns it, too.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, TypeVar

from greensched._asynclib import in_event_loop
from greensched.driver.blocking import DRIVER_CALLS, Blocking, CallTraits
from greensched.driver.interface import Driver
from greensched.driver.simulated.address_space import AddressSpace, DeviceMemory
from greensched.driver.simulated.device_models import DeviceModel
from greensched.driver.simulated.faults import Fault, FaultScript
from greensched.driver.simulated.handles import (
    Capture,
    Context,
    Event,
    Handle,
    Node,
    SimulatedStream,
    ThreadToken,
)
from greensched.driver.simulated.timeline import DeviceState, DriverClock, Signal, StreamQueue
from greensched.driver.status import from_status
from greensched.driver.types import EventHandle, StreamHandle
from greensched.errors import DriverMisuse, LoopWouldBlock, NotSupported
from greensched.typing import CaptureMode, ContextFlags, Feature, T

H = TypeVar("H", bound=Handle)

#: The version from which a simulated driver has a feature.
SINCE: dict[Feature, tuple[int, int]] = {
    Feature.STRUCTURED_SPLIT: (13, 1),
    Feature.WORKQUEUES: (13, 1),
    Feature.WRITE_VALUE: (13, 0),
}

#: The number of queued operations at which a launch blocks, like a real driver's launch queue.
QUEUE_DEPTH = 1024
#: The device number under which contexts of `create_context` and their children are counted. A
#: primary context may end before them, so its leak check must not count them.
OWN = -1


class PerThread(threading.local):
    """The driver's state for each thread: its context stack and its capture mode."""

    def __init__(self) -> None:
        self.token = ThreadToken()
        self.stack: list[Context] = []
        self.capture_mode = CaptureMode.GLOBAL


class Machine:
    """Devices, memory, contexts and captures of one simulated driver.

    Args:
        devices: The models of its devices, in the order of their ordinals.
        version: The CUDA version whose rules apply.
        clock: A real or a virtual clock.
        faults: The faults to inject.
        without: Features that the driver lacks.
        strict_events: Whether an event can be recorded only on streams of its own context.
    """

    def __init__(
        self,
        devices: Iterable[DeviceModel],
        *,
        version: tuple[int, int],
        clock: DriverClock,
        faults: Iterable[Fault] = (),
        without: Iterable[Feature] = (),
        strict_events: bool = False,
    ) -> None:
        self.version = version
        self.clock = clock
        self.timeline = clock.attach()
        self.script = FaultScript(faults)
        self.devices = [DeviceState(i, model) for i, model in enumerate(devices)]
        for device in self.devices:
            device.process = self.devices
        self.memory = [DeviceMemory(device.model.memory_bytes) for device in self.devices]
        self.space = AddressSpace()
        self.strict_events = strict_events
        self.thread = PerThread()
        #: Captures in progress.
        self.captures: set[Capture] = set()
        #: For each device: the primary context, its number of users, and its flags.
        self.primaries: dict[int, Context] = {}
        self.primary_users: dict[int, int] = {}
        self.primary_flags: dict[int, ContextFlags] = {}
        #: For each piece of pinned memory, by address, the device that counts it.
        self.pinned: dict[int, int] = {}
        self.initialised = False
        self._closed = False
        self._without = frozenset(without)
        self._idents = count(1)
        self._live: Counter[tuple[int, str]] = Counter()

    def close(self) -> None:
        """End the clock's work for this machine, so that queued work never runs. Idempotent.

        A call that waits for such work, on any thread, returns DEINITIALIZED.
        """
        if not self._closed:
            self._closed = True
            for device in self.devices:
                device.fault = device.fault or from_status(4, "close")
            self.clock.detach(self.timeline)

    # -- checks --------------------------------------------------------------------------------

    def check_call(self, name: str, traits: CallTraits) -> None:
        """Count a driver call, and refuse it if a real driver would crash or block."""
        if self._closed:
            raise from_status(4, name)
        if not self.initialised and name != "initialise":
            raise from_status(3, name)
        if traits.blocking is Blocking.MAY:
            self.refuse_on_event_loop(name)
        self.count_call(name)
        if traits.needs_context and not self.thread.stack:
            raise from_status(201, name, detail="no context is current on this thread")

    def count_call(self, name: str) -> None:
        """Count a call for the fault script, which may delay it or make it fail."""
        status, seconds = self.script.call(name)
        if seconds:
            self.clock.sleep(int(seconds * 1e9))
        if status is not None:
            raise from_status(status, name)

    def refuse_on_event_loop(self, what: str) -> None:
        """Raise `LoopWouldBlock` on an event loop's thread."""
        if in_event_loop():
            raise LoopWouldBlock(what)

    def supports(self, feature: Feature) -> bool:
        """Say whether this version has a feature that `without` does not exclude."""
        return feature not in self._without and self.version >= SINCE[feature]

    def require(self, feature: Feature, what: str, needs: str) -> None:
        """Raise `NotSupported` if a feature is missing."""
        if not self.supports(feature):
            major, minor = self.version
            without = " without it" if self._without else ""
            raise NotSupported(what, needs, f"a simulated CUDA {major}.{minor}{without}")

    def device(self, ordinal: int) -> DeviceState:
        """Return the device of an ordinal, or raise INVALID_DEVICE."""
        if not 0 <= ordinal < len(self.devices):
            raise from_status(101, f"device {ordinal}")
        return self.devices[ordinal]

    def usable_device(self, ordinal: int, what: str) -> DeviceState:
        """Return the device of an ordinal, or raise its fault."""
        device = self.device(ordinal)
        check_fault(device, what)
        return device

    @property
    def current(self) -> Context:
        """The context that is current on this thread, which must exist."""
        return self.thread.stack[-1]

    def current_device(self, what: str) -> DeviceState:
        """Return the device of the current context, or raise its fault."""
        return self.usable_device(self.current.device, what)

    # -- handles -------------------------------------------------------------------------------

    def own(self, handle: H) -> H:
        """Mark a new handle as this machine's, and return it."""
        handle.owner = self
        return handle

    def expect(self, handle: object, kind: type[T], what: str) -> T:
        """Return a handle that has the right kind and machine and is open, or raise."""
        if not isinstance(handle, kind):
            raise DriverMisuse(f"{what}: expected a {kind.__name__}, got {handle!r}")
        if getattr(handle, "owner", self) is not self:
            raise DriverMisuse(f"{what}: {handle!r} is of another driver")
        if not getattr(handle, "alive", True):
            raise DriverMisuse(f"{what}: {handle!r} was used after its end")
        return handle

    def stream(self, handle: StreamHandle, what: str) -> SimulatedStream:
        """Return the stream of a handle, if its context exists and its device has no fault."""
        stream = self.expect(handle, SimulatedStream, what)
        if stream.detached:
            raise from_status(917 if self.version >= (13, 1) else 709, what)
        check_fault(stream.device, what)
        return stream

    # -- leak accounts -------------------------------------------------------------------------

    def live(self) -> Counter[str]:
        """Return how many objects of each kind exist on all devices."""
        total: Counter[str] = Counter()
        with self.timeline.lock:
            for (_, kind), number in self._live.items():
                total[kind] += number
        return +total

    def live_on(self, device: int) -> dict[str, int]:
        """Return how many objects of each kind a device has. The caller holds the lock."""
        return {kind: n for (owner, kind), n in self._live.items() if owner == device and n}

    def register(self, device: int, kind: str) -> int:
        """Count a new object of a device, and return a fresh number for it."""
        with self.timeline.lock:
            self._live[device, kind] += 1
            return next(self._idents)

    def unregister(self, device: int, kind: str) -> None:
        """Count an object of a device as ended."""
        with self.timeline.lock:
            self._live[device, kind] -= 1

    def register_child(self, context: Context, kind: str) -> int:
        """Count a stream or event with its owner: its device, or a context of `create_context`."""
        if not context.own:
            return self.register(context.device, kind)
        context.children += 1
        return self.register(OWN, kind)

    def unregister_child(self, context: Context, kind: str) -> None:
        """Count a stream or event as ended."""
        context.children -= context.own
        self.unregister(OWN if context.own else context.device, kind)

    # -- primary contexts ----------------------------------------------------------------------

    def retain_primary(self, device: int) -> Context:
        """Add a user to a device's primary context."""
        self.usable_device(device, "retain_primary")
        with self.timeline.lock:
            if not self.primary_users.get(device):
                primary = Context(self.register(device, "primary"), device)
                primary.flags |= self.primary_flags.get(device, ContextFlags.SCHED_AUTO)
                self.primaries[device] = self.own(primary)
            self.primary_users[device] = self.primary_users.get(device, 0) + 1
            return self.primaries[device]

    def release_primary(self, device: int) -> None:
        """Remove a user. Refuse to remove the last one while its objects are alive."""
        with self.timeline.lock:
            if not self.primary_users.get(device):
                raise from_status(201, "release_primary")
            self.primary_users[device] -= 1
            if self.primary_users[device]:
                return
            primary = self.primaries.pop(device)
            self.memory[device].contexts = 0
            self.unregister(device, "primary")
            primary.alive = False
            left = self.live_on(device)
        if left and self.devices[device].fault is None:
            raise DriverMisuse(f"the primary context of device {device} ended with {left} alive")
        if primary.threads:
            raise DriverMisuse(f"{primary!r} ended while current on {list(primary.threads)}")

    # -- captures ------------------------------------------------------------------------------

    def refuse_during_capture(self, what: str) -> None:
        """Refuse a call that is unsafe during a capture, and invalidate the affected captures.

        The thread's capture mode determines these, on every device, because the rule concerns
        threads.
        Source: cuThreadExchangeStreamCaptureMode in the driver API's manual.
        """
        mode, thread = self.thread.capture_mode, threading.get_ident()
        if mode is CaptureMode.RELAXED:
            return
        hit = False
        for capture in tuple(self.captures):
            if capture.mode is CaptureMode.RELAXED:
                continue
            own = capture.thread == thread
            if own or (mode is CaptureMode.GLOBAL and capture.mode is CaptureMode.GLOBAL):
                capture.spoilt = hit = True
        if hit:
            raise from_status(900, what, detail="a capture is in progress")

    @staticmethod
    def refuse_on_capturing(stream: SimulatedStream, what: str) -> None:
        """Refuse a call on a capturing stream, and invalidate the capture."""
        if stream.capture is not None:
            stream.capture.spoilt = True
            raise from_status(900, what, detail=f"{stream!r} is capturing")

    def end_capture(self, stream: SimulatedStream) -> Capture | None:
        capture, stream.capture = stream.capture, None
        if capture is not None:
            self.captures.discard(capture)
        return capture

    def uncaptured(self, handle: EventHandle, what: str) -> Event:
        """Return an event that recorded work, and is not part of a graph.

        A real stream that waits for an event in a capture joins the capture; the simulated one
        refuses. Once the capture has ended, the event counts as never recorded, as on an H200.
        """
        event = self.expect(handle, Event, what)
        if event.captured is not None:
            raise from_status(907 if event.captured in self.captures else 1, what)
        return event

    # -- work and waiting ----------------------------------------------------------------------

    def enqueue(self, stream: SimulatedStream, make: Node, what: str, latency: int = 0) -> None:
        """Submit an operation to a stream; if the stream is capturing, record `make` instead."""
        if stream.capture is not None:
            stream.capture.nodes.append(make)
            return
        operation = make()
        if len(stream.queue) >= QUEUE_DEPTH:
            self.refuse_on_event_loop(f"{what} behind {QUEUE_DEPTH} others")
            self.clock.wait(
                lambda: len(stream.queue) < QUEUE_DEPTH or stream.device.fault is not None
            )
            check_fault(stream.device, what)
        with self.timeline.lock:
            self.timeline.submit(stream, operation, latency)

    def wait_for_code_changes(self, device: DeviceState, what: str) -> None:
        """Wait while a thread waits to load or unload code of a device.

        Launches, copies, records, limits, and making events, streams and pinned memory wait in this
        way, on any stream; marks, waits, queries and a pool's memory do not. Source: an H200,
        driver 580, tested while `cuKernelGetParamInfo`, `cuFuncLoad`, a first launch and
        `cuLibraryUnload` waited beside a stuck stream
        (docs/measurements/h200-580/first-use-holds.json).
        """
        if device.changes:
            self.refuse_on_event_loop(f"{what}, while code is loaded or unloaded,")
            self.clock.wait(lambda: not device.changes or device.fault is not None)

    def work_so_far(
        self, device: DeviceState, context: Context | None, *, counts_waits: bool = True
    ) -> Signal:
        """Return a signal after the present work of a context, or (None) of the whole device.

        Args:
            device: The device.
            context: The context.
            counts_waits: Whether a stream's wait for an event is work even if nothing follows it.
        """
        with self.timeline.lock:
            # `follow` looks at these alone; a device has hundreds of streams.
            busy = [s for s in device.streams.values() if s.queue or s.current is not None]
            streams = [s for s in busy if _covers(context, s)]
            return self.timeline.follow([s for s in streams if counts_waits or not s.only_waits])

    def wait_for(self, signal: Signal, device: DeviceState, what: str) -> None:
        """Block until a signal is done; raise the device's fault if it never will be."""
        self.clock.wait(lambda: signal.done or device.fault is not None)
        check_fault(device, what)

    def wait_until_idle(self, device: DeviceState) -> None:
        """Block until all present work of a device is done, or the device has a fault.

        Making a green context, returning pinned memory, unloading code, and a kernel's first use
        wait like this. All other calls that were tested on an H200 beside a stream stuck in a
        kernel, or in a wait for a word, returned (docs/measurements/h200-580/stuck-and-lost.json).
        """
        if device.fault is None:
            signal = self.work_so_far(device, None)
            self.clock.wait(lambda: signal.done or device.fault is not None)

    def wait_to_change_code(self, device: DeviceState) -> None:
        """Wait like `wait_until_idle`; meanwhile `wait_for_code_changes` blocks other calls."""
        with self.timeline.lock:
            device.changes += 1
        try:
            self.wait_until_idle(device)
        finally:
            with self.timeline.lock:
                device.changes -= 1
                self.clock.changed()


class Component(Driver):
    """A group of driver calls that keep their state in the machine."""

    machine: Machine

    def __init_subclass__(cls) -> None:
        """Precede each driver call with the machine's checks."""
        for name, traits in DRIVER_CALLS.items():
            if name in vars(cls):
                setattr(cls, name, _checked(vars(cls)[name], traits))


def _checked(method: Callable[..., Any], traits: CallTraits) -> Callable[..., Any]:
    name = method.__name__

    @functools.wraps(method)
    def call(self: Component, *args: Any, **kwargs: Any) -> Any:
        self.machine.check_call(name, traits)
        return method(self, *args, **kwargs)

    call.__doc__ = method.__doc__ or getattr(Driver, name).__doc__
    return call


def check_fault(device: DeviceState, what: str) -> None:
    """Raise a device's fault again, as all later calls do. The first fault is the cause."""
    fault = device.fault
    if fault is not None:
        again = from_status(fault.status, what, fault.name, f"after {fault}")
        again.__cause__ = fault
        raise again


def _covers(context: Context | None, stream: StreamQueue) -> bool:
    """Say whether a context's work includes a stream's. A primary includes its green contexts."""
    if context is None:
        return True
    if context.own or context.green is not None:
        return stream.green == context.ident
    return not (isinstance(stream, SimulatedStream) and stream.context.own)
