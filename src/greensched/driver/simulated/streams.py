"""Streams: ordered work, and the marks, words and events that show its progress."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from greensched.driver.simulated.address_space import STREAM_BYTES
from greensched.driver.simulated.contexts import PRIORITIES
from greensched.driver.simulated.handles import Event, Green, SimulatedStream
from greensched.driver.simulated.machine import Component, check_fault
from greensched.driver.simulated.timeline import InstantOp, PollOp, Signal, WaitOp
from greensched.driver.status import from_status
from greensched.driver.types import EventHandle, GreenHandle, StreamHandle
from greensched.errors import DriverMisuse
from greensched.typing import Feature


class Streams(Component):
    """Driver calls for streams and events."""

    def create_stream(self, green: GreenHandle | None, priority: int = 0) -> StreamHandle:
        machine, context = self.machine, self.machine.current
        if green is not None:
            context = machine.expect(green, Green, "create_stream").view
        device = machine.usable_device(context.device, "create_stream")
        machine.wait_for_code_changes(device, "create_stream")
        least, greatest = PRIORITIES
        with machine.timeline.lock:
            machine.memory[context.device].open(STREAM_BYTES, "create_stream")
        ident = machine.register_child(context, "stream")
        clamped = max(greatest, min(least, priority))
        stream = machine.own(SimulatedStream(ident, device, context, clamped))
        with machine.timeline.lock:
            device.streams[ident] = stream
        if context.green is not None:
            context.green.streams.add(stream)
        return StreamHandle(stream)

    def destroy_stream(self, stream: StreamHandle) -> None:
        """End a stream. Its queued work still runs."""
        machine = self.machine
        ended = machine.expect(stream, SimulatedStream, "destroy_stream")
        if ended.detached and machine.version < (13, 1):
            raise from_status(709, "destroy_stream")
        ended.alive = False
        machine.end_capture(ended)
        if ended.context.green is not None:
            ended.context.green.streams.discard(ended)
        with machine.timeline.lock:
            machine.memory[ended.device.ordinal].close(STREAM_BYTES)
            ended.ended = True
            if ended.idle:
                del ended.device.streams[ended.ident]
        machine.unregister_child(ended.context, "stream")
        check_fault(ended.device, "destroy_stream")

    def report_reference_errors(
        self, stream: StreamHandle, report: Callable[[Exception], None] | None
    ) -> None:
        target = self.machine.expect(stream, SimulatedStream, "report_reference_errors")
        target.on_error = report

    def stream_address(self, stream: StreamHandle) -> int:
        return address_of(self.machine.expect(stream, SimulatedStream, "stream_address").ident)

    def foreign_stream(self, address: int) -> StreamHandle:
        """Return the stream that has this number. Default streams never have work."""
        machine = self.machine
        if address in (1, 2):
            if not machine.thread.stack:
                raise from_status(201, "foreign_stream", detail="no context is current")
            context = machine.current
            device = machine.devices[context.device]
            return StreamHandle(machine.own(SimulatedStream(0, device, context, 0)))
        for device in machine.devices:
            target = device.streams.get(address - address_of(0))
            if isinstance(target, SimulatedStream) and target.alive:
                return StreamHandle(target)
        raise DriverMisuse(f"foreign_stream: {address:#x} is not a live stream")

    def query_stream(self, stream: StreamHandle) -> bool:
        target = self.machine.stream(stream, "query_stream")
        self.machine.refuse_on_capturing(target, "query_stream")
        self.machine.refuse_during_capture("query_stream")
        with self.machine.timeline.lock:
            idle = target.idle
        target.raise_error()
        return idle

    def synchronize_stream(self, stream: StreamHandle) -> None:
        machine = self.machine
        target = machine.stream(stream, "synchronize_stream")
        machine.refuse_on_capturing(target, "synchronize_stream")
        machine.refuse_during_capture("synchronize_stream")
        with machine.timeline.lock:
            work = machine.timeline.follow([target])
        machine.wait_for(work, target.device, "synchronize_stream")
        target.raise_error()

    def wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        target = self.machine.stream(stream, "wait_event")
        signal = self.machine.uncaptured(event, "wait_event").signal
        if signal is None:
            return
        if target.capture is not None:  # a capture cannot wait for work outside it: error 905
            target.capture.spoilt = True
            detail = f"{target!r} is capturing, and the event is not"
            raise from_status(905, "wait_event", detail=detail)
        self.machine.enqueue(target, lambda: WaitOp(signal), "wait_event")

    def bind_mark(self, stream: StreamHandle, address: int) -> Callable[[int], None]:
        machine = self.machine
        machine.require(
            Feature.WRITE_VALUE, "a ticket written by a stream", "stream memory operations"
        )
        target = machine.stream(stream, "bind_mark")
        self._word(address, "bind_mark")

        def mark(value: int) -> None:
            machine.count_call("mark")
            machine.stream(stream, "mark")
            word = self._word(address, "mark")
            _check_32_bits(value, "mark")

            def write(_: int) -> None:
                word[0] = value

            machine.enqueue(target, lambda: InstantOp("mark", write), "mark")

        return mark

    def wait_value(self, stream: StreamHandle, address: int, value: int) -> None:
        word = self._word(address, "wait_value")
        _check_32_bits(value, "wait_value")

        def reached() -> bool:
            return (int(word[0]) - value) & 0xFFFFFFFF < 0x80000000

        target = self.machine.stream(stream, "wait_value")
        self.machine.enqueue(target, lambda: PollOp(reached), "wait_value")

    # -- events ------------------------------------------------------------------------------------

    def create_event(self, *, timing: bool = False, blocking: bool = False) -> EventHandle:
        """Make an event of the current context. A simulated wait always sleeps."""
        context = self.machine.current
        device = self.machine.usable_device(context.device, "create_event")
        self.machine.wait_for_code_changes(device, "create_event")
        self.machine.register_child(context, "event")
        return EventHandle(self.machine.own(Event(context, timing)))

    def destroy_event(self, event: EventHandle) -> None:
        """End an event, recorded or not."""
        ended = self.machine.expect(event, Event, "destroy_event")
        ended.alive = False
        self.machine.unregister_child(ended.context, "event")
        self.machine.usable_device(ended.context.device, "destroy_event")

    def record_event(self, event: EventHandle, stream: StreamHandle) -> None:
        machine = self.machine
        recorded_stream = machine.stream(stream, "record_event")
        target = machine.expect(event, Event, "record_event")
        self._check_same_context(target, recorded_stream)
        machine.wait_for_code_changes(recorded_stream.device, "record_event")
        signal, captured = Signal(), recorded_stream.capture
        if captured is None:  # in a capture it is a dependency, not a piece of work
            finish = InstantOp("record", lambda _: machine.timeline.complete(signal))
            machine.enqueue(recorded_stream, lambda: finish, "record_event")
        target.signal, target.captured, target.stream = signal, captured, recorded_stream

    def _check_same_context(self, event: Event, stream: SimulatedStream) -> None:
        """Refuse an event on a stream of another context, if this version does."""
        if event.context is stream.context:
            return
        apart = event.context.own or stream.context.own
        elsewhere = event.context.device != stream.context.device
        if self.machine.strict_events or apart or elsewhere:
            raise from_status(400, "record_event", detail=f"{event!r} on {stream!r}")

    def record_green(self, green: GreenHandle, event: EventHandle) -> None:
        """Record the work of every stream of a green context.

        As on an H100 with driver 580, a stream's wait for an event is omitted if no work follows it
        (docs/measurements/h100-580/two-gpus.json).
        """
        machine = self.machine
        source = machine.expect(green, Green, "record_green")
        target = machine.expect(event, Event, "record_green")
        device = machine.usable_device(source.device, "record_green")
        machine.wait_for_code_changes(device, "record_green")
        if target.context.device != source.device or target.context.own:
            raise from_status(400, "record_green")
        captures = [s.capture for s in source.streams if s.capture is not None]
        for capture in captures:
            capture.spoilt = True
        if captures:
            raise from_status(900, "record_green", detail="a stream of the context is capturing")
        work = machine.work_so_far(device, source.view, counts_waits=False)
        target.signal, target.captured, target.stream = work, None, None

    def query_event(self, event: EventHandle) -> bool:
        """Say whether the recorded work is done. Invalidates a capture that recorded it."""
        target = self.machine.expect(event, Event, "query_event")
        self.machine.usable_device(target.context.device, "query_event")
        if target.captured is not None:  # an H200 invalidates it, too
            target.captured.spoilt = True
        self.machine.uncaptured(event, "query_event")
        self.machine.refuse_during_capture("query_event")
        done = target.signal is None or target.signal.done
        if done:
            target.raise_error()
        return done

    def synchronize_event(self, event: EventHandle) -> None:
        target = self.machine.expect(event, Event, "synchronize_event")
        if target.captured is not None:
            target.captured.spoilt = True
            raise from_status(1, "synchronize_event")
        device = self.machine.devices[target.context.device]
        self.machine.refuse_during_capture("synchronize_event")
        self.machine.wait_for(target.signal or Signal(0), device, "synchronize_event")
        target.raise_error()

    def elapsed(self, start: EventHandle, end: EventHandle) -> float:
        events = [self.machine.uncaptured(e, "elapsed") for e in (start, end)]
        for event in events:
            self.machine.usable_device(event.context.device, "elapsed")
        signals = [e.signal for e in events if e.timing and e.signal is not None]
        if len(signals) != 2:
            raise from_status(400, "elapsed", detail="an event without timing, or never recorded")
        if not all(signal.done for signal in signals):
            raise from_status(600, "elapsed")
        return (signals[1].time - signals[0].time) / 1e9

    # -- words -------------------------------------------------------------------------------------

    def _word(self, address: int, what: str) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        if address % 4:
            raise DriverMisuse(f"{what}: {address:#x} is not aligned to 4 bytes")
        return self.machine.space.bytes_at(address, 4, what).view(np.uint32)


def address_of(ident: int) -> int:
    """Return the number that identifies the stream of a `Span`."""
    return 0x5100_0000 + ident


def _check_32_bits(value: int, what: str) -> None:
    if not 0 <= value <= 0xFFFFFFFF:
        raise DriverMisuse(f"{what}: {value} does not fit in 32 bits")
