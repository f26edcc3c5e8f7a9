"""Captures of streams, and graphs."""

from __future__ import annotations

from greensched.driver.simulated.handles import Capture, Executable, Graph
from greensched.driver.simulated.machine import Component
from greensched.driver.simulated.timeline import (
    InstantOp,
    Operation,
    Signal,
    StartResult,
    StreamQueue,
    Timeline,
    WaitOp,
)
from greensched.driver.status import from_status
from greensched.driver.types import ExecutableHandle, GraphHandle, StreamHandle
from greensched.typing import CaptureMode


class GraphLaunch(Operation):
    """The operations of a graph, run one after another on the SMs of the stream that captured it.

    The launch stream only decides when the graph begins; there the whole graph is one operation.
    """

    kind = "graph"

    def __init__(self, captured_on: StreamQueue, operations: list[Operation]) -> None:
        super().__init__("graph")
        self.sms = captured_on.sms
        self._green = captured_on.green
        self._operations = operations

    def begin(self, timeline: Timeline) -> StartResult:
        """Run the operations on a separate queue, whose last operation ends the launch."""
        self.start = timeline.now
        queue = StreamQueue(self.stream.ident, self.stream.device, self._green, self.sms)
        queue.on_error = self.stream.report_error
        for operation in (*self._operations, InstantOp("end", lambda _: timeline.end(self))):
            operation.stream = queue
            operation.enqueued, operation.ready = self.enqueued, timeline.now
            queue.queue.append(operation)
        timeline.pump(queue)
        return StartResult.RUNNING


class Captures(Component):
    """Driver calls for captures and graphs."""

    def begin_capture(self, stream: StreamHandle, mode: CaptureMode) -> None:
        """Record the stream's work from now on instead of running it."""
        target = self.machine.stream(stream, "begin_capture")
        if target.capture is not None:
            raise from_status(1, "begin_capture", detail="the stream is capturing already")
        target.capture = Capture(mode)
        self.machine.captures.add(target.capture)

    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        target = self.machine.stream(stream, "end_capture")
        capture = self.machine.end_capture(target)
        if capture is None:
            raise from_status(1, "end_capture", detail="the stream is not capturing")
        if capture.spoilt:
            raise from_status(901, "end_capture")
        self.machine.register(target.device.ordinal, "graph")
        return GraphHandle(self.machine.own(Graph(target, capture.nodes)))

    def is_capturing(self, stream: StreamHandle) -> bool:
        """Say whether a capture is in progress, even an invalidated one."""
        return self.machine.stream(stream, "is_capturing").capture is not None

    def exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        thread = self.machine.thread
        previous, thread.capture_mode = thread.capture_mode, mode
        return previous

    def destroy_graph(self, graph: GraphHandle) -> None:
        ended = self.machine.expect(graph, Graph, "destroy_graph")
        ended.alive = False
        self.machine.unregister(ended.stream.device.ordinal, "graph")

    def node_count(self, graph: GraphHandle) -> int:
        return len(self.machine.expect(graph, Graph, "node_count").nodes)

    def instantiate_graph(self, graph: GraphHandle, stream: StreamHandle) -> ExecutableHandle:
        """Make the present nodes executable. The upload takes no time here."""
        source = self.machine.expect(graph, Graph, "instantiate_graph")
        target = self.machine.stream(stream, "instantiate_graph")
        self.machine.refuse_on_capturing(target, "instantiate_graph")
        self.machine.register(source.stream.device.ordinal, "executable graph")
        return ExecutableHandle(self.machine.own(Executable(source)))

    def launch_graph(self, executable: ExecutableHandle, stream: StreamHandle) -> None:
        """Submit one operation for all nodes, which run on the SMs that captured them."""
        machine = self.machine
        launch_stream = machine.stream(stream, "launch_graph")
        target = machine.expect(executable, Executable, "launch_graph")
        if launch_stream.device is not target.stream.device:
            raise from_status(400, "launch_graph", detail=f"{target!r} on {launch_stream!r}")
        machine.refuse_on_capturing(launch_stream, "launch_graph")
        machine.wait_for_code_changes(launch_stream.device, "launch_graph")
        done, previous = Signal(), target.last
        if previous is not None:
            machine.enqueue(launch_stream, lambda: WaitOp(previous), "launch_graph")
        launch = GraphLaunch(target.stream, [make() for make in target.nodes])
        latency = launch_stream.device.model.launch_latency_ns
        machine.enqueue(launch_stream, lambda: launch, "launch_graph", latency)
        finish = InstantOp("record", lambda _: machine.timeline.complete(done))
        machine.enqueue(launch_stream, lambda: finish, "launch_graph")
        target.last = done

    def destroy_executable(self, executable: ExecutableHandle) -> None:
        """End an executable graph. Its launches still run to their end."""
        ended = self.machine.expect(executable, Executable, "destroy_executable")
        ended.alive = False
        self.machine.unregister(ended.stream.device.ordinal, "executable graph")
