"""The port's verbs for captures and graphs."""

from __future__ import annotations

import abc

from greensched.driver.blocking import MAY, NEVER, driver_call
from greensched.typing import CaptureMode, ExecutableHandle, GraphHandle, StreamHandle


class Graphs(abc.ABC):
    """Work recorded instead of done, and launched as one piece afterwards.

    What was captured keeps the context of the stream it was captured on: it runs on those SMs,
    wherever it is launched (seen on an H200; cuGraphLaunch, and programming guide 4.6.5).
    """

    @abc.abstractmethod
    @driver_call(NEVER)
    def begin_capture(self, stream: StreamHandle, mode: CaptureMode) -> None: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        """Ends a capture. Raises if the capture was spoilt; it is over all the same."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def is_capturing(self, stream: StreamHandle) -> bool: ...

    @abc.abstractmethod
    @driver_call(NEVER)
    def exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        """Sets the calling thread's capture mode and returns the one it had."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def node_count(self, graph: GraphHandle) -> int:
        """How many pieces of work were recorded."""

    @abc.abstractmethod
    @driver_call(MAY)
    def instantiate_graph(self, graph: GraphHandle, stream: StreamHandle) -> ExecutableHandle:
        """Makes what was recorded executable; the graph itself may go.

        It is uploaded behind the stream's work, so that no launch behind that has to wait for it.
        """

    @abc.abstractmethod
    @driver_call(NEVER)
    def launch_graph(self, executable: ExecutableHandle, stream: StreamHandle) -> None:
        """Launches it behind the stream's work, and behind its own launch before.

        The stream gives the order, and not the SMs.
        """

    @abc.abstractmethod
    @driver_call(MAY)
    def destroy_executable(self, executable: ExecutableHandle) -> None:
        """Ends it; what was launched of it is done."""

    @abc.abstractmethod
    @driver_call(NEVER)
    def destroy_graph(self, graph: GraphHandle) -> None: ...
