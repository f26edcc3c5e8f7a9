"""Streams: ordered work, and the marks and words that show its progress."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from greensched.driver.simulated.address_space import STREAM_BYTES
from greensched.driver.simulated.contexts import PRIORITIES
from greensched.driver.simulated.handles import Green, SimulatedStream
from greensched.driver.simulated.machine import Component, check_fault
from greensched.driver.simulated.timeline import InstantOp, PollOp, WaitOp
from greensched.driver.status import from_status
from greensched.driver.types import EventHandle, GreenHandle, StreamHandle
from greensched.errors import DriverMisuse
from greensched.typing import Feature


class Streams(Component):
    """Driver calls for streams."""

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
        """Report failures of references on a stream, instead of raising them at its next wait."""
        target = self.machine.expect(stream, SimulatedStream, "report_reference_errors")
        target.on_error = report

    def stream_address(self, stream: StreamHandle) -> int:
        """Return a number that identifies the stream."""
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
