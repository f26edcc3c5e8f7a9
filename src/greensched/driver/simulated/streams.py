"""Streams, events and captures of the simulated driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from greensched.driver.simulated.address_space import STREAM_BYTES
from greensched.driver.simulated.contexts import Contexts
from greensched.driver.simulated.handles import (
    Capture,
    Context,
    Event,
    Executable,
    Graph,
    Green,
    Node,
    SimulatedStream,
)
from greensched.driver.simulated.operations import Graph as GraphOperation
from greensched.driver.simulated.timeline import (
    InstantOp,
    PollOp,
    Signal,
    WaitOp,
)
from greensched.driver.status import from_status
from greensched.driver.types import (
    EventHandle,
    ExecutableHandle,
    GraphHandle,
    GreenHandle,
    StreamHandle,
)
from greensched.errors import DriverMisuse
from greensched.typing import CaptureMode, Feature

#: A real driver's launch queue holds about so many before a launch blocks.
QUEUE_DEPTH = 1024


class Streams(Contexts):
    """The verbs for streams, events and captures."""

    # -- streams ---------------------------------------------------------------------------------

    def create_stream(self, green: GreenHandle | None, priority: int = 0) -> StreamHandle:
        """A stream of a green context, or of the current context."""
        context: Context = self._thread.stack[-1]
        if green is not None:
            context = self._expect(green, Green, "create_stream").view
        device = self.devices[context.device]
        self._unfaulted(device, "create_stream")
        self._behind_changes(device, "create_stream")
        least, greatest = self.priority_range()
        with self.timeline.lock:
            self.memory[context.device].open(STREAM_BYTES, "create_stream")
        ident = self._born_in(context, "stream")
        clamped = max(greatest, min(least, priority))
        stream = self._own(SimulatedStream(ident, device, context, clamped))
        with self.timeline.lock:
            device.streams[ident] = stream
        if context.green is not None:
            context.green.streams.add(stream)
        return StreamHandle(stream)

    def destroy_stream(self, stream: StreamHandle) -> None:
        """Ends a stream; what is queued on it still runs."""
        gone = self._expect(stream, SimulatedStream, "destroy_stream")
        if gone.detached and self.version < (13, 1):
            raise from_status(709, "destroy_stream")
        gone.alive = False
        self._end_capture(gone)
        if gone.context.green is not None:
            gone.context.green.streams.discard(gone)
        with self.timeline.lock:
            self.memory[gone.device.ordinal].close(STREAM_BYTES)
            gone.ended = True
            if gone.idle:
                del gone.device.streams[gone.ident]
        self._died_in(gone.context, "stream")
        self._unfaulted(gone.device, "destroy_stream")

    def stream_address(self, stream: StreamHandle) -> int:
        """A number that stands for the stream."""
        return self.address_of(self._expect(stream, SimulatedStream, "stream_address").ident)

    def foreign_stream(self, address: int) -> StreamHandle:
        """The stream that the number stands for; a default stream is one that nobody works on."""
        if address in (1, 2):
            if not self._thread.stack:
                raise from_status(201, "foreign_stream", detail="no context is current")
            context: Context = self._thread.stack[-1]
            device = self.devices[context.device]
            return StreamHandle(self._own(SimulatedStream(0, device, context, 0)))
        for device in self.devices:
            found = device.streams.get(address - self.address_of(0))
            if isinstance(found, SimulatedStream) and found.alive:
                return StreamHandle(found)
        raise DriverMisuse(f"foreign_stream: {address:#x} is no live stream")

    @staticmethod
    def address_of(ident: int) -> int:
        """The number that stands for the stream of a `Span`."""
        return 0x5100_0000 + ident

    def query_stream(self, stream: StreamHandle) -> bool:
        """Whether the stream has no work."""
        found = self._stream(stream, "query_stream")
        self._refuse_own_capture(found, "query_stream")
        self._refuse_capture("query_stream")
        with self.timeline.lock:
            return found.idle

    def synchronize_stream(self, stream: StreamHandle) -> None:
        """Waits for the stream's work."""
        found = self._stream(stream, "synchronize_stream")
        self._refuse_own_capture(found, "synchronize_stream")
        self._refuse_capture("synchronize_stream")
        with self.timeline.lock:
            marker = self.timeline.follow([found])
        self._wait_for(marker, found.device, "synchronize_stream")

    def wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        """Later work waits for what the event captured."""
        found = self._stream(stream, "wait_event")
        marker = self._uncaptured(event, "wait_event").marker
        if marker is not None:
            self._refuse_crossing(found, "wait_event")
            self._enqueue(found, lambda: WaitOp(marker), "wait_event")

    def bind_mark(self, stream: StreamHandle, address: int) -> Callable[[int], None]:
        """A function that writes a number behind the stream's work."""
        if not self.supports(Feature.WRITE_VALUE):
            raise self._lacks("a ticket written by a stream", "stream memory operations")
        found = self._stream(stream, "bind_mark")
        self._word(address, "bind_mark")

        def mark(value: int) -> None:
            self._count("mark")
            self._stream(stream, "mark")
            word = self._word(address, "mark")
            self._in_32_bits(value, "mark")

            def write(_: int) -> None:
                word[0] = value

            self._enqueue(found, lambda: InstantOp("mark", write), "mark")

        return mark

    def wait_value(self, stream: StreamHandle, address: int, value: int) -> None:
        """Later work waits until a word is at least `value`, by signed difference."""
        word = self._word(address, "wait_value")
        self._in_32_bits(value, "wait_value")

        def reached() -> bool:
            return (int(word[0]) - value) & 0xFFFFFFFF < 0x80000000

        self._enqueue(self._stream(stream, "wait_value"), lambda: PollOp(reached), "wait_value")

    def host_function(self, stream: StreamHandle, function: int, data: int) -> None:
        """Calls a native function on the device's thread."""
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        found = self._stream(stream, "host_function")
        self._enqueue(
            found, lambda: InstantOp("host function", lambda _: call(data)), "host_function"
        )

    # -- captures --------------------------------------------------------------------------------

    def begin_capture(self, stream: StreamHandle, mode: CaptureMode) -> None:
        """From here on the stream's work is recorded instead of run."""
        found = self._stream(stream, "begin_capture")
        if found.capture is not None:
            raise from_status(1, "begin_capture", detail="the stream is capturing already")
        found.capture = Capture(mode)
        self._captures.add(found.capture)

    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        """What was recorded; raises if something spoilt it."""
        found = self._stream(stream, "end_capture")
        capture = self._end_capture(found)
        if capture is None:
            raise from_status(1, "end_capture", detail="the stream is not capturing")
        if capture.spoilt:
            raise from_status(901, "end_capture")
        self._born(found.device.ordinal, "graph")
        return GraphHandle(self._own(Graph(found, capture.nodes)))

    def is_capturing(self, stream: StreamHandle) -> bool:
        """Whether a capture is in progress, spoilt or not."""
        return self._stream(stream, "is_capturing").capture is not None

    def destroy_graph(self, graph: GraphHandle) -> None:
        """Ends a graph."""
        gone = self._expect(graph, Graph, "destroy_graph")
        gone.alive = False
        self._died(gone.stream.device.ordinal, "graph")

    def node_count(self, graph: GraphHandle) -> int:
        """What was recorded, counted."""
        return len(self._expect(graph, Graph, "node_count").nodes)

    def instantiate_graph(self, graph: GraphHandle, stream: StreamHandle) -> ExecutableHandle:
        """The nodes as they are now. An upload takes no time here."""
        source = self._expect(graph, Graph, "instantiate_graph")
        self._refuse_own_capture(self._stream(stream, "instantiate_graph"), "instantiate_graph")
        self._born(source.stream.device.ordinal, "executable graph")
        return ExecutableHandle(self._own(Executable(source)))

    def launch_graph(self, executable: ExecutableHandle, stream: StreamHandle) -> None:
        """One operation, as long as its nodes take; they run where they were captured."""
        found = self._stream(stream, "launch_graph")
        target = self._expect(executable, Executable, "launch_graph")
        if found.device is not target.stream.device:
            raise from_status(400, "launch_graph", detail=f"{target!r} on {found!r}")
        self._refuse_own_capture(found, "launch_graph")
        self._behind_changes(found.device, "launch_graph")
        done, before = Signal(), target.last
        if before is not None:
            self._enqueue(found, lambda: WaitOp(before), "launch_graph")
        graph = GraphOperation(target.stream, [make() for make in target.nodes])
        self._enqueue(found, lambda: graph, "launch_graph", found.device.model.launch_latency_ns)
        finish = InstantOp("record", lambda _: self.timeline.complete(done))
        self._enqueue(found, lambda: finish, "launch_graph")
        target.last = done

    def destroy_executable(self, executable: ExecutableHandle) -> None:
        """Ends it; what was launched of it still runs."""
        gone = self._expect(executable, Executable, "destroy_executable")
        gone.alive = False
        self._died(gone.stream.device.ordinal, "executable graph")

    def exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        """Sets the thread's mode, returns the one before."""
        before, self._thread.capture_mode = self._thread.capture_mode, mode
        return before

    # -- events ----------------------------------------------------------------------------------

    def create_event(self, *, timing: bool = False, blocking: bool = False) -> EventHandle:
        """An event of the current context. A simulation always sleeps, `blocking` or not."""
        context: Context = self._thread.stack[-1]
        self._unfaulted(self.devices[context.device], "create_event")
        self._behind_changes(self.devices[context.device], "create_event")
        self._born_in(context, "event")
        return EventHandle(self._own(Event(context, timing)))

    def destroy_event(self, event: EventHandle) -> None:
        """Ends an event, recorded or not."""
        gone = self._expect(event, Event, "destroy_event")
        gone.alive = False
        self._died_in(gone.context, "event")
        self._unfaulted(self.devices[gone.context.device], "destroy_event")

    def record_event(self, event: EventHandle, stream: StreamHandle) -> None:
        """Captures the stream's work so far."""
        found = self._stream(stream, "record_event")
        target = self._expect(event, Event, "record_event")
        same = target.context is found.context
        apart = target.context.own or found.context.own
        elsewhere = target.context.device != found.context.device
        if not same and (self.strict_events or apart or elsewhere):
            raise from_status(400, "record_event", detail=f"{target!r} on {found!r}")
        self._behind_changes(found.device, "record_event")
        marker, captured = Signal(), found.capture
        if captured is None:  # there it is a dependency, and no piece of work
            finish = InstantOp("record", lambda _: self.timeline.complete(marker))
            self._enqueue(found, lambda: finish, "record_event")
        target.marker, target.captured = marker, captured

    def record_green(self, green: GreenHandle, event: EventHandle) -> None:
        """Captures the work of every stream of a green context."""
        source = self._expect(green, Green, "record_green")
        target = self._expect(event, Event, "record_green")
        device = self.devices[source.device]
        self._unfaulted(device, "record_green")
        self._behind_changes(device, "record_green")
        if target.context.device != source.device or target.context.own:
            raise from_status(400, "record_green")
        captures = [s.capture for s in source.streams if s.capture is not None]
        for capture in captures:
            capture.spoilt = True
        if captures:
            raise from_status(900, "record_green", detail="a stream of the context is capturing")
        target.marker, target.captured = self._work_so_far(device, source.view), None

    def query_event(self, event: EventHandle) -> bool:
        """Whether what it captured is done; spoils a capture that took it in, as an H200 does."""
        target = self._expect(event, Event, "query_event")
        device = self.devices[target.context.device]
        self._unfaulted(device, "query_event")
        if target.captured is not None:
            target.captured.spoilt = True
        self._uncaptured(event, "query_event")
        self._refuse_capture("query_event")
        return target.marker is None or target.marker.done

    def synchronize_event(self, event: EventHandle) -> None:
        """Waits for what it captured; spoils a capture as `query_event` does."""
        target = self._expect(event, Event, "synchronize_event")
        if target.captured is not None:
            target.captured.spoilt = True
            raise from_status(1, "synchronize_event")
        device = self.devices[target.context.device]
        self._refuse_capture("synchronize_event")
        self._wait_for(target.marker or Signal(0), device, "synchronize_event")

    def elapsed(self, start: EventHandle, end: EventHandle) -> float:
        """Seconds between two timing events that are done."""
        events = [self._uncaptured(e, "elapsed") for e in (start, end)]
        for event in events:
            self._unfaulted(self.devices[event.context.device], "elapsed")
        markers = [e.marker for e in events if e.timing and e.marker is not None]
        if len(markers) != 2:
            raise from_status(400, "elapsed", detail="an event without timing, or never recorded")
        if not all(marker.done for marker in markers):
            raise from_status(600, "elapsed")
        return (markers[1].time - markers[0].time) / 1e9

    # -- for all verbs ---------------------------------------------------------------------------

    def _enqueue(self, stream: SimulatedStream, make: Node, what: str, latency: int = 0) -> None:
        """Runs an operation on a stream, or records how it is made where that is capturing."""
        if stream.capture is not None:
            stream.capture.nodes.append(make)
            return
        operation = make()
        if len(stream.queue) >= QUEUE_DEPTH:
            self._may_block(f"{what} behind {QUEUE_DEPTH} others")
            self.clock.wait(
                lambda: len(stream.queue) < QUEUE_DEPTH or stream.device.fault is not None
            )
            self._unfaulted(stream.device, what)
        with self.timeline.lock:
            self.timeline.submit(stream, operation, latency)

    @staticmethod
    def _refuse_crossing(stream: SimulatedStream, what: str) -> None:
        """Nothing outside a capture comes before what is in it. Source: cuda.h, error 905."""
        if stream.capture is not None:
            stream.capture.spoilt = True
            raise from_status(905, what, detail=f"{stream!r} is capturing, and the event is not")

    def _word(self, address: int, what: str) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        if address % 4:
            raise DriverMisuse(f"{what}: {address:#x} is not aligned to 4 bytes")
        return self.space.bytes_at(address, 4, what).view(np.uint32)

    @staticmethod
    def _in_32_bits(value: int, what: str) -> None:
        if not 0 <= value <= 0xFFFFFFFF:
            raise DriverMisuse(f"{what}: {value} does not fit in 32 bits")

    def _uncaptured(self, handle: EventHandle, what: str) -> Event:
        """An event that captured work, not a part of a graph that is in the making.

        A real stream that waits for one joins the capture; the simulated one refuses.
        """
        event = self._expect(handle, Event, what)
        if event.captured is not None:  # over, an H200 says that it was recorded nowhere
            raise from_status(907 if event.captured in self._captures else 1, what)
        return event

    def _count(self, what: str) -> None:
        status, _ = self.script.call(what)
        if status is not None:
            raise from_status(status, what)
