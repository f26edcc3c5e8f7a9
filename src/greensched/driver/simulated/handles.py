"""The simulated driver's handles: contexts, streams, events, captures, graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakSet

from greensched.driver.simulated.sm_split import Descriptor
from greensched.driver.simulated.timeline import DeviceState, Operation, Signal, StreamQueue
from greensched.typing import CacheConfig, CaptureMode, ContextFlags, Limit

#: A recorded piece of work, which makes a new operation at each launch of its graph.
Node = Callable[[], Operation]


class Handle:
    """A handle of one machine. It is refused by every other machine, and after its end."""

    owner: object = None
    alive = True


class ThreadToken:
    """Represents a thread, as long as the thread lives."""

    def __init__(self) -> None:
        self.name = threading.current_thread().name

    def __repr__(self) -> str:
        return repr(self.name)


class Context(Handle):
    """A context that can be current: primary, own (`create_context`), or a green context's view.

    `children` counts the streams and events of an own context. Those of other contexts count with
    the device.
    """

    def __init__(
        self, ident: int, device: int, green: Green | None = None, own: bool = False
    ) -> None:
        self.ident = ident
        self.device = device
        self.green = green
        self.own = own
        self.children = 0
        self.flags = ContextFlags.MAP_HOST
        self.limits: dict[Limit, int] = {}
        self.cache_config = CacheConfig.PREFER_NONE
        #: Threads on which it is current. Weak, because a thread's end also ends its stack.
        self.threads: WeakSet[ThreadToken] = WeakSet()

    def __repr__(self) -> str:
        kind = "green" if self.green else "own" if self.own else "primary"
        return f"<{kind} context {self.ident} of device {self.device}>"


class Green(Handle):
    """A green context: some SMs of a device, and the streams made from it.

    `sm_count` is the number that the driver reports; it may differ from the SMs in `mask`.
    """

    def __init__(self, ident: int, primary: Context, made_of: Descriptor) -> None:
        self.ident = ident
        self.primary = primary
        self.device = device = primary.device
        self.mask = made_of.mask
        self.sm_count = made_of.sm_count
        self.grain = made_of.grain
        self.workqueue = made_of.workqueue
        self.view = Context(ident, device, self)
        self.streams: set[SimulatedStream] = set()

    def __repr__(self) -> str:
        return f"<green context {self.ident}: {self.mask.bit_count()} SMs of device {self.device}>"


class Capture:
    """A capture in progress: its thread, its mode and its recorded nodes."""

    def __init__(self, mode: CaptureMode) -> None:
        self.mode = mode
        self.thread = threading.get_ident()
        self.spoilt = False
        self.nodes: list[Node] = []


class Graph(Handle):
    """The nodes of a capture, and the stream on which they were captured."""

    def __init__(self, stream: SimulatedStream, nodes: list[Node]) -> None:
        self.stream = stream
        self.nodes = nodes


class Executable(Handle):
    """A graph that can be launched: its stream's context and SMs, its nodes, its last launch."""

    def __init__(self, graph: Graph) -> None:
        self.stream = graph.stream
        self.nodes = tuple(graph.nodes)
        self.last: Signal | None = None


class SimulatedStream(Handle, StreamQueue):
    """A stream of a context."""

    def __init__(self, ident: int, device: DeviceState, context: Context, priority: int) -> None:
        sms = context.green.mask if context.green else (1 << device.model.sm_count) - 1
        apart = context.green is not None or context.own
        super().__init__(ident, device, context.ident if apart else 0, sms)
        self.context = context
        self.priority = priority
        #: Whether its green context ended before it.
        self.detached = False
        self.capture: Capture | None = None

    def __repr__(self) -> str:
        return f"<stream {self.ident} of {self.context!r}>"


class Event(Handle):
    """An event of a context, and its last record."""

    def __init__(self, context: Context, timing: bool) -> None:
        self.context = context
        self.timing = timing
        self.signal: Signal | None = None
        self.stream: SimulatedStream | None = None
        #: The capture that recorded it, if that was its last record.
        self.captured: Capture | None = None

    def raise_error(self) -> None:
        """Raise the stream's error of a reference, and forget it."""
        if self.stream is not None:
            self.stream.raise_error()

    def __repr__(self) -> str:
        return f"<event of {self.context!r}>"
