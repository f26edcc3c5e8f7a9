"""Streams, events and captures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from greensched.driver.cuda.bindings import cuda, number
from greensched.driver.cuda.errors import (
    NOT_READY,
    UNKNOWN_STATUS,
    call,
    error_for_status,
    error_for_unknown_status,
)
from greensched.driver.interface import Driver
from greensched.driver.types import EventHandle, ExecutableHandle, GraphHandle, StreamHandle
from greensched.typing import CaptureMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from greensched.driver.types import GreenHandle

#: CU_STREAM_NON_BLOCKING: required for streams of a green context, and always wanted.
_NON_BLOCKING: Final = 1
#: CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING.
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2
#: CU_STREAM_WAIT_VALUE_GEQ, which compares by the signed difference.
_GEQ: Final = 0
#: CU_STREAM_WRITE_VALUE_DEFAULT: with a system-wide fence before the write.
_FENCED: Final = 0

_query_stream = cuda.cuStreamQuery
_wait_event = cuda.cuStreamWaitEvent
_write_value = cuda.cuStreamWriteValue32
_is_capturing = cuda.cuStreamIsCapturing
_exchange_mode = cuda.cuThreadExchangeStreamCaptureMode
_record_event = cuda.cuEventRecord
_query_event = cuda.cuEventQuery

#: The wheel's modes by value, because wheels up to 13.1 accept no plain int for an enum.
_THEIR_MODES: Final = tuple(cuda.CUstreamCaptureMode(mode.value) for mode in CaptureMode)
_OUR_MODES: Final = tuple(CaptureMode)


class Streams(Driver):
    """Streams, events, captures and graphs."""

    def create_stream(self, green: GreenHandle | None, priority: int = 0) -> StreamHandle:
        """Call `cuGreenCtxStreamCreate`, or `cuStreamCreateWithPriority` in the current context.

        The driver clamps the priority to its range.
        """
        if green is None:
            return StreamHandle(call(cuda.cuStreamCreateWithPriority, _NON_BLOCKING, priority))
        return StreamHandle(call(cuda.cuGreenCtxStreamCreate, green, _NON_BLOCKING, priority))

    def destroy_stream(self, stream: StreamHandle) -> None:
        """Call `cuStreamDestroy`. With work pending it returns at once, and frees later."""
        call(cuda.cuStreamDestroy, stream)

    def stream_address(self, stream: StreamHandle) -> int:
        """Return the number in the wrapper, without a driver call."""
        return number(stream)

    def foreign_stream(self, address: int) -> StreamHandle:
        """Wrap the number, without a driver call."""
        return StreamHandle(cuda.CUstream(address))

    def query_stream(self, stream: StreamHandle) -> bool:
        """Call `cuStreamQuery`. It invalidates a global-mode capture elsewhere in the process."""
        try:
            (status,) = _query_stream(stream)
        except UNKNOWN_STATUS as error:
            raise error_for_unknown_status(error, "cuStreamQuery") from None
        if not status:
            return True
        if status is NOT_READY:
            return False
        raise error_for_status(status, "cuStreamQuery")

    def synchronize_stream(self, stream: StreamHandle) -> None:
        """Call `cuStreamSynchronize`. The wheel releases the GIL."""
        call(cuda.cuStreamSynchronize, stream)

    def wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        """Call `cuStreamWaitEvent`. The event may be of another context or device."""
        try:
            (status,) = _wait_event(stream, event, 0)
        except UNKNOWN_STATUS as error:
            raise error_for_unknown_status(error, "cuStreamWaitEvent") from None
        if status:
            raise error_for_status(status, "cuStreamWaitEvent")

    def bind_mark(self, stream: StreamHandle, address: int) -> Callable[[int], None]:
        """Bind `cuStreamWriteValue32`, with the address wrapped once instead of at each call."""
        word = cuda.CUdeviceptr(address)
        write = _write_value

        def mark(value: int) -> None:
            try:
                (status,) = write(stream, word, value, _FENCED)
            except UNKNOWN_STATUS as error:
                raise error_for_unknown_status(error, "cuStreamWriteValue32") from None
            if status:
                raise error_for_status(status, "cuStreamWriteValue32")

        return mark

    def wait_value(self, stream: StreamHandle, address: int, value: int) -> None:
        """Call `cuStreamWaitValue32`. The driver's scheduler does not know this order."""
        call(cuda.cuStreamWaitValue32, stream, address, value, _GEQ)

    # -- captures -------------------------------------------------------------------------------

    def begin_capture(self, stream: StreamHandle, mode: CaptureMode) -> None:
        call(cuda.cuStreamBeginCapture, stream, _THEIR_MODES[mode])

    def end_capture(self, stream: StreamHandle) -> GraphHandle:
        """Call `cuStreamEndCapture`, on the thread that began it unless the mode is relaxed."""
        return GraphHandle(call(cuda.cuStreamEndCapture, stream))

    def is_capturing(self, stream: StreamHandle) -> bool:
        """Call `cuStreamIsCapturing`; also true for an invalidated capture, which must be ended."""
        try:
            status, state = _is_capturing(stream)
        except UNKNOWN_STATUS as error:
            raise error_for_unknown_status(error, "cuStreamIsCapturing") from None
        if status:
            raise error_for_status(status, "cuStreamIsCapturing")
        return bool(state)

    def destroy_graph(self, graph: GraphHandle) -> None:
        call(cuda.cuGraphDestroy, graph)

    def exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        """Call `cuThreadExchangeStreamCaptureMode`. A new thread has GLOBAL."""
        try:
            status, previous = _exchange_mode(_THEIR_MODES[mode])
        except UNKNOWN_STATUS as error:
            raise error_for_unknown_status(error, "cuThreadExchangeStreamCaptureMode") from None
        if status:
            raise error_for_status(status, "cuThreadExchangeStreamCaptureMode")
        ours: CaptureMode = _OUR_MODES[previous]
        return ours

    def node_count(self, graph: GraphHandle) -> int:
        """Call `cuGraphGetNodes` only for the count."""
        return int(call(cuda.cuGraphGetNodes, graph, 0)[1])

    def instantiate_graph(self, graph: GraphHandle, stream: StreamHandle) -> ExecutableHandle:
        """Call `cuGraphInstantiateWithFlags` (its name in wheels), then `cuGraphUpload`."""
        made = call(cuda.cuGraphInstantiate, graph, 0)
        try:
            call(cuda.cuGraphUpload, made, stream)
        except BaseException:
            call(cuda.cuGraphExecDestroy, made)
            raise
        return ExecutableHandle(made)

    def launch_graph(self, executable: ExecutableHandle, stream: StreamHandle) -> None:
        call(cuda.cuGraphLaunch, executable, stream)

    def destroy_executable(self, executable: ExecutableHandle) -> None:
        call(cuda.cuGraphExecDestroy, executable)

    # -- events ---------------------------------------------------------------------------------

    def create_event(self, *, timing: bool = False, blocking: bool = False) -> EventHandle:
        flags = (0 if timing else _DISABLE_TIMING) | (_BLOCKING_SYNC if blocking else 0)
        return EventHandle(call(cuda.cuEventCreate, flags))

    def destroy_event(self, event: EventHandle) -> None:
        """Call `cuEventDestroy`. It never waits, not even for an incomplete event."""
        call(cuda.cuEventDestroy, event)

    def record_event(self, event: EventHandle, stream: StreamHandle) -> None:
        """Call `cuEventRecord`. Make the event in its stream's context, as cuda.h requires.

        Drivers are reported to differ in whether a green stream accepts an event of the primary.
        """
        try:
            (status,) = _record_event(event, stream)
        except UNKNOWN_STATUS as error:
            raise error_for_unknown_status(error, "cuEventRecord") from None
        if status:
            raise error_for_status(status, "cuEventRecord")

    def query_event(self, event: EventHandle) -> bool:
        """Call `cuEventQuery`. It invalidates a global-mode capture elsewhere in the process."""
        try:
            (status,) = _query_event(event)
        except UNKNOWN_STATUS as error:
            raise error_for_unknown_status(error, "cuEventQuery") from None
        if not status:
            return True
        if status is NOT_READY:
            return False
        raise error_for_status(status, "cuEventQuery")

    def synchronize_event(self, event: EventHandle) -> None:
        """Call `cuEventSynchronize`. The wheel releases the GIL, but the thread may spin."""
        call(cuda.cuEventSynchronize, event)

    def elapsed(self, start: EventHandle, end: EventHandle) -> float:
        """Call `cuEventElapsedTime`, which returns milliseconds. Both events must be complete."""
        return float(call(cuda.cuEventElapsedTime, start, end)) / 1000.0
