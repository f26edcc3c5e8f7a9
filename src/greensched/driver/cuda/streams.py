"""Streams, events and captures."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, Final

from greensched.driver.cuda.bindings import cuda, number
from greensched.driver.cuda.errors import NEWER, NOT_READY, ask, failed, lacking, newer, numbered
from greensched.driver.cuda.init import symbol_address
from greensched.driver.interface import Driver
from greensched.driver.types import EventHandle, ExecutableHandle, GraphHandle, StreamHandle
from greensched.typing import CaptureMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from greensched.driver.types import GreenHandle

#: CU_STREAM_NON_BLOCKING: compulsory for streams of a green context, and always wanted.
_NON_BLOCKING: Final = 1
#: CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING.
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2
#: CU_STREAM_WAIT_VALUE_GEQ: of the signed difference.
_GEQ: Final = 0
#: CU_STREAM_WRITE_VALUE_DEFAULT: with a system-wide fence before the write.
_FENCED: Final = 0

_query_stream = cuda.cuStreamQuery
_wait_event = cuda.cuStreamWaitEvent
_write_value = cuda.cuStreamWriteValue32
_wait_value = cuda.cuStreamWaitValue32
_is_capturing = cuda.cuStreamIsCapturing
_exchange_mode = cuda.cuThreadExchangeStreamCaptureMode
_record_event = cuda.cuEventRecord
_query_event = cuda.cuEventQuery
_launch_graph = cuda.cuGraphLaunch

#: By value, in both directions: wheels up to 13.1 take no plain int for an enum.
_THEIR_MODES: Final = tuple(cuda.CUstreamCaptureMode(mode.value) for mode in CaptureMode)
_OUR_MODES: Final = tuple(CaptureMode)


@functools.cache
def _launch_host_function() -> Any:
    """`cuLaunchHostFunc` past the wheel.

    Wheels up to 13.4 wrap any function, also a plain C one, in a trampoline that takes the GIL on
    the driver's thread, which deadlocks against a thread that holds the GIL and wants the driver's
    lock (promise 6; docs/completion.md). ctypes lets go of the GIL around the call, as the wheel
    does.
    """
    address = symbol_address("cuLaunchHostFunc", 10000)
    if not address:
        raise lacking("cuLaunchHostFunc")
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return prototype(address)


class Streams(Driver):
    """Order on the device, and the questions about it."""

    def create_stream(self, green: GreenHandle | None, priority: int = 0) -> StreamHandle:
        """`cuGreenCtxStreamCreate`, which ignores what is current, or of the current context.

        The driver clamps the priority to its range.
        """
        if green is None:
            return StreamHandle(ask(cuda.cuStreamCreateWithPriority, _NON_BLOCKING, priority))
        return StreamHandle(ask(cuda.cuGreenCtxStreamCreate, green, _NON_BLOCKING, priority))

    def destroy_stream(self, stream: StreamHandle) -> None:
        """`cuStreamDestroy`; with work pending it returns at once, and frees later."""
        ask(cuda.cuStreamDestroy, stream)

    def stream_address(self, stream: StreamHandle) -> int:
        """The number in the wrapper; no driver call."""
        return number(stream)

    def foreign_stream(self, address: int) -> StreamHandle:
        """The number, wrapped; no driver call."""
        return StreamHandle(cuda.CUstream(address))

    def query_stream(self, stream: StreamHandle) -> bool:
        """`cuStreamQuery`; spoils a global-mode capture elsewhere in the process."""
        try:
            (status,) = _query_stream(stream)
        except NEWER as error:
            raise newer(error, "cuStreamQuery") from None
        if not status:
            return True
        if status is NOT_READY:
            return False
        raise failed(status, "cuStreamQuery")

    def synchronize_stream(self, stream: StreamHandle) -> None:
        """`cuStreamSynchronize`; the wheel lets go of the GIL."""
        ask(cuda.cuStreamSynchronize, stream)

    def wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        """`cuStreamWaitEvent`; the event may be of another context or device."""
        try:
            (status,) = _wait_event(stream, event, 0)
        except NEWER as error:
            raise newer(error, "cuStreamWaitEvent") from None
        if status:
            raise failed(status, "cuStreamWaitEvent")

    def bind_mark(self, stream: StreamHandle, address: int) -> Callable[[int], None]:
        """`cuStreamWriteValue32`, with the address wrapped once: an int is wrapped at each call."""
        word = cuda.CUdeviceptr(address)
        write = _write_value

        def mark(value: int) -> None:
            try:
                (status,) = write(stream, word, value, _FENCED)
            except NEWER as error:
                raise newer(error, "cuStreamWriteValue32") from None
            if status:
                raise failed(status, "cuStreamWriteValue32")

        return mark

    def wait_value(self, stream: StreamHandle, address: int, value: int) -> None:
        """`cuStreamWaitValue32`; the driver's scheduler does not see this order."""
        try:
            (status,) = _wait_value(stream, address, value, _GEQ)
        except NEWER as error:
            raise newer(error, "cuStreamWaitValue32") from None
        if status:
            raise failed(status, "cuStreamWaitValue32")

    def host_function(self, stream: StreamHandle, function: int, data: int) -> None:
        """`cuLaunchHostFunc`, called by its address, so that no wheel puts Python in between."""
        status = _launch_host_function()(number(stream), function, data)
        if status:
            raise numbered(status, "cuLaunchHostFunc")

    # -- captures -------------------------------------------------------------------------------

    def begin_capture(self, stream: StreamHandle, mode: CaptureMode) -> None:
        """`cuStreamBeginCapture`."""
        ask(cuda.cuStreamBeginCapture, stream, _THEIR_MODES[mode])

    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        """`cuStreamEndCapture`; on the thread that began it, unless the mode was relaxed."""
        return GraphHandle(ask(cuda.cuStreamEndCapture, stream))

    def is_capturing(self, stream: StreamHandle) -> bool:
        """`cuStreamIsCapturing`; true as well of a spoilt capture, which is still to be ended."""
        try:
            status, state = _is_capturing(stream)
        except NEWER as error:
            raise newer(error, "cuStreamIsCapturing") from None
        if status:
            raise failed(status, "cuStreamIsCapturing")
        return bool(state)

    def destroy_graph(self, graph: GraphHandle) -> None:
        """`cuGraphDestroy`."""
        ask(cuda.cuGraphDestroy, graph)

    def exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        """`cuThreadExchangeStreamCaptureMode`; a fresh thread has GLOBAL."""
        try:
            status, previous = _exchange_mode(_THEIR_MODES[mode])
        except NEWER as error:
            raise newer(error, "cuThreadExchangeStreamCaptureMode") from None
        if status:
            raise failed(status, "cuThreadExchangeStreamCaptureMode")
        ours: CaptureMode = _OUR_MODES[previous]
        return ours

    def node_count(self, graph: GraphHandle) -> int:
        """`cuGraphGetNodes`, asked for none of them."""
        return int(ask(cuda.cuGraphGetNodes, graph, 0)[1])

    def instantiate_graph(self, graph: GraphHandle, stream: StreamHandle) -> ExecutableHandle:
        """`cuGraphInstantiateWithFlags`, which wheels call so, then `cuGraphUpload`."""
        made = ask(cuda.cuGraphInstantiate, graph, 0)
        try:
            ask(cuda.cuGraphUpload, made, stream)
        except BaseException:
            ask(cuda.cuGraphExecDestroy, made)
            raise
        return ExecutableHandle(made)

    def launch_graph(self, executable: ExecutableHandle, stream: StreamHandle) -> None:
        """`cuGraphLaunch`."""
        try:
            (status,) = _launch_graph(executable, stream)
        except NEWER as error:
            raise newer(error, "cuGraphLaunch") from None
        if status:
            raise failed(status, "cuGraphLaunch")

    def destroy_executable(self, executable: ExecutableHandle) -> None:
        """`cuGraphExecDestroy`."""
        ask(cuda.cuGraphExecDestroy, executable)

    # -- events ---------------------------------------------------------------------------------

    def create_event(self, *, timing: bool = False, blocking: bool = False) -> EventHandle:
        """`cuEventCreate`."""
        flags = (0 if timing else _DISABLE_TIMING) | (_BLOCKING_SYNC if blocking else 0)
        return EventHandle(ask(cuda.cuEventCreate, flags))

    def destroy_event(self, event: EventHandle) -> None:
        """`cuEventDestroy`; never waits, also for one that is not complete."""
        ask(cuda.cuEventDestroy, event)

    def record_event(self, event: EventHandle, stream: StreamHandle) -> None:
        """`cuEventRecord`; make the event where its stream is: "same context" says cuda.h.

        Whether an event of the primary passes on a green stream differs by driver and report.
        """
        try:
            (status,) = _record_event(event, stream)
        except NEWER as error:
            raise newer(error, "cuEventRecord") from None
        if status:
            raise failed(status, "cuEventRecord")

    def query_event(self, event: EventHandle) -> bool:
        """`cuEventQuery`; spoils a global-mode capture elsewhere in the process."""
        try:
            (status,) = _query_event(event)
        except NEWER as error:
            raise newer(error, "cuEventQuery") from None
        if not status:
            return True
        if status is NOT_READY:
            return False
        raise failed(status, "cuEventQuery")

    def synchronize_event(self, event: EventHandle) -> None:
        """`cuEventSynchronize`; the wheel lets go of the GIL, the thread may still spin."""
        ask(cuda.cuEventSynchronize, event)

    def elapsed(self, start: EventHandle, end: EventHandle) -> float:
        """`cuEventElapsedTime`, which answers milliseconds; both events must be complete."""
        return float(ask(cuda.cuEventElapsedTime, start, end)) / 1000.0
