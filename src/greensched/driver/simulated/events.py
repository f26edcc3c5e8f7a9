"""Events: records of the work of a stream or of a green context."""

from __future__ import annotations

from greensched.driver.simulated.handles import Event, Green, SimulatedStream
from greensched.driver.simulated.machine import Component
from greensched.driver.simulated.timeline import InstantOp, Signal
from greensched.driver.status import from_status
from greensched.driver.types import EventHandle, GreenHandle, StreamHandle


class Events(Component):
    """Driver calls for events."""

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
