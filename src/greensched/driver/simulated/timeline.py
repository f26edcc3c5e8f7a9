"""The simulated device's timeline: streams and the work on them, in modelled nanoseconds.

This is a discrete-event simulation. Each stream is a FIFO. Its first operation begins when earlier
work is done and what it waits for has come. This module has the rules of all operations; kernels,
copies and graph launches are in `kernel_timing`, `memory` and `captures`.

Two times are never mixed. The *modelled* time of an event decides what follows on the timeline. The
host's time to compute a kernel's reference only delays when the host sees the result (`Span.seen`).

`Timeline.lock` guards everything here. An operation's effect (a kernel's reference, a copy's
bytes) runs outside the lock, after its modelled end and before the host sees it.
"""

from __future__ import annotations

import enum
import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from greensched.driver.simulated.device_models import DeviceModel
from greensched.driver.types import Mailbox
from greensched.errors import CUDAError, ReferenceFailed

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

#: Nanoseconds after which the other devices of a process have a fault, too. On two H100 it took
#: less than 0.15 s, and the failed device was first; this was not measured more closely.
SPREAD_NS = 1_000_000


class DriverClock(Protocol):
    """What the simulated driver needs from its clock: `RealClock` or `VirtualClock`."""

    virtual: bool

    @property
    def new_event_loop(self) -> Callable[[], AbstractEventLoop] | None: ...
    def attach(self) -> Timeline: ...
    def detach(self, timeline: Timeline) -> None: ...
    def now(self) -> int: ...
    def poke(self) -> None: ...
    def changed(self) -> None: ...
    def wait(self, ready: Callable[[], bool]) -> None: ...
    def sleep(self, nanoseconds: int) -> None: ...
    def create_mailbox(self) -> Mailbox[Any]: ...
    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread: ...
    def subscribe(self, look: Callable[[], None]) -> Callable[[], None] | None: ...


class StartResult(enum.Enum):
    """The state of an operation after its `begin`."""

    DONE = "done at once"
    RUNNING = "ends later"
    WAITING = "begins again when what it waits for comes"


@dataclass(frozen=True, slots=True)
class Span:
    """One operation as it ran, in nanoseconds of the driver's clock.

    `green` is 0 for the primary context; `sms` is a bit mask. `seen` is when the host could first
    see the effect: never before `end`, and later if the host was late.
    """

    kind: str
    name: str
    device: int
    stream: int
    green: int
    sms: int
    nbytes: int
    enqueued: int
    start: int
    end: int
    seen: int


class Signal:
    """A point on the timeline, which is done once `missing` records have completed."""

    __slots__ = ("missing", "time", "waiting")

    def __init__(self, missing: int = 1) -> None:
        self.missing = missing
        self.time = 0
        self.waiting: list[StreamQueue] = []

    @property
    def done(self) -> bool:
        """Whether every record has completed."""
        return self.missing <= 0


class Operation:
    """Work on a stream, which begins no earlier than `ready`."""

    kind = "operation"
    nbytes = 0
    sms = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.enqueued = self.ready = self.start = 0
        self.stream: StreamQueue

    def begin(self, timeline: Timeline) -> StartResult:
        """Begin, at `timeline.now`."""
        raise AssertionError(self)

    def resume(self, timeline: Timeline, when: int) -> None:
        """Continue, because its condition in `Timeline.held` was true at `when`."""
        raise AssertionError(self)

    def effect(self) -> CUDAError | None:
        """Change memory after the end, without the lock; or return the fault that ends it."""


class StreamQueue:
    """A FIFO of operations on one device. `green` is 0 on the primary context."""

    def __init__(self, ident: int, device: DeviceState, green: int, sms: int) -> None:
        self.ident = ident
        self.device = device
        self.green = green
        self.sms = sms
        self.queue: deque[Operation] = deque()
        self.current: Operation | None = None
        #: Whether it was destroyed. Its device forgets it once its work is done.
        self.ended = False
        #: Called with errors of references. None: the next wait for the stream raises the first
        #: one.
        self.on_error: Callable[[Exception], None] | None = None
        self._error: Exception | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        return self.current is None and not self.queue

    @property
    def only_waits(self) -> bool:
        """Whether all its queued or running operations are waits for events."""
        return all(
            isinstance(operation, WaitOp) for operation in (self.current, *self.queue) if operation
        )

    def report_error(self, error: Exception) -> None:
        """Report the error of a reference, or keep it for `raise_error`."""
        if self.on_error is not None:
            self.on_error(error)
        elif self._error is None:
            self._error = error

    def raise_error(self) -> None:
        """Raise the kept error of a reference, and forget it."""
        error, self._error = self._error, None
        if error is not None:
            raise error


class DeviceState:
    """One device: its streams, its kernels in order of arrival, copy engines, and its fault."""

    def __init__(self, ordinal: int, model: DeviceModel) -> None:
        self.ordinal = ordinal
        self.model = model
        self.streams: dict[int, StreamQueue] = {}
        self.kernels: dict[Operation, None] = {}
        self.engines: dict[str, deque[Operation]] = {}
        self.fault: CUDAError | None = None
        #: The devices of its process, on all of which a fault of one ends CUDA, as two H100 with
        #: driver 580 showed after an illegal address (docs/measurements/h100-580/README.md).
        self.process: Sequence[DeviceState] = (self,)
        #: How many threads wait to load or unload code.
        self.changes = 0


class InstantOp(Operation):
    """An operation that takes no time: a mark, a record, a free. The action gets the time."""

    kind = "instant"

    def __init__(self, name: str, action: Callable[[int], None]) -> None:
        super().__init__(name)
        self.action = action

    def begin(self, timeline: Timeline) -> StartResult:
        self.action(timeline.now)
        return StartResult.DONE


class WaitOp(Operation):
    """Holds its stream until a signal is done."""

    kind = "wait"

    def __init__(self, signal: Signal) -> None:
        super().__init__("wait")
        self.signal = signal

    def begin(self, timeline: Timeline) -> StartResult:
        """Pass, or have the stream pumped again when the signal is done."""
        if self.signal.done:
            return StartResult.DONE
        self.signal.waiting.append(self.stream)
        return StartResult.WAITING


class PollOp(Operation):
    """Holds its stream until a condition in memory is true."""

    kind = "hold"

    def __init__(self, until: Callable[[], bool]) -> None:
        super().__init__("hold")
        self.until = until

    def begin(self, timeline: Timeline) -> StartResult:
        """Pass, or have the condition checked whenever memory may have changed."""
        if self.until():
            timeline.held.pop(self, None)
            return StartResult.DONE
        timeline.held[self] = self.until
        return StartResult.WAITING

    def resume(self, timeline: Timeline, when: int) -> None:
        timeline.at(when, lambda: timeline.pump(self.stream))


class Timeline:
    """All devices and streams of one driver, and the actions due on them."""

    def __init__(self, clock: DriverClock) -> None:
        self.clock = clock
        #: Re-entrant, because a finaliser may submit work on a thread that holds it.
        self.lock = threading.RLock()
        self.now = 0
        #: Operations held by a condition in memory, which is polled because changes are not
        #: signalled.
        self.held: dict[Operation, Callable[[], bool]] = {}
        self.on_span: Callable[[Span], None] | None = None
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._ended: deque[Operation] = deque()
        #: Whether the host could see a change: an operation is done, or a device failed.
        self._changed = False

    # Everything below is called with the lock held.

    def submit(self, stream: StreamQueue, operation: Operation, latency: int = 0) -> None:
        operation.stream = stream
        operation.enqueued = self.clock.now()
        operation.ready = operation.enqueued + latency
        stream.queue.append(operation)
        if stream.current is None and len(stream.queue) == 1:
            self.at(operation.ready, lambda: self.pump(stream))
            self.clock.poke()

    def follow(self, streams: Iterable[StreamQueue]) -> Signal:
        """Return a signal after all present work of the streams."""
        busy = [stream for stream in streams if not stream.idle]
        signal = Signal(len(busy))
        signal.time = self.clock.now()
        for stream in busy:
            self.submit(stream, InstantOp("record", lambda _: self.complete(signal)))
        return signal

    def next_time(self) -> int | None:
        """Return the modelled time at which something is due next."""
        return self._due[0][0] if self._due else None

    def run(self, until: int) -> bool:
        """Advance the timeline to `until`; return whether the host can see a change.

        A kernel's phases before its end do not count: a loop that was woken for each phase would
        poll its streams in vain.
        """
        self._changed = False
        self._poll_held(by_host=True)
        while self._due and self._due[0][0] <= until:
            time, _, action = heapq.heappop(self._due)
            self.now = max(self.now, time)
            action()
            while self._ended:
                self._finish(self._ended.popleft())
            if self.held:  # the device itself may have changed the word
                self._poll_held(by_host=False)
        return self._changed

    def at(self, time: int, action: Callable[[], None]) -> None:
        """Schedule an action at a modelled time."""
        heapq.heappush(self._due, (time, next(self._order), action))

    def pump(self, stream: StreamQueue) -> None:
        """Begin the operations of a stream that can begin."""
        while stream.queue and stream.current is None and stream.device.fault is None:
            operation = stream.queue[0]
            if operation.ready > self.now:
                self.at(operation.ready, lambda: self.pump(stream))
                return
            result = operation.begin(self)
            if result is StartResult.WAITING:
                return
            stream.queue.popleft()
            if result is StartResult.RUNNING:
                stream.current = operation
            else:
                self._changed = True
        if stream.ended and stream.idle:
            stream.device.streams.pop(stream.ident, None)

    def end(self, operation: Operation) -> None:
        """End an operation that takes time, now."""
        self._ended.append(operation)

    def complete(self, signal: Signal) -> None:
        """Complete one record of a signal; the last one resumes the waiting streams."""
        self._changed = True
        signal.missing -= 1
        if signal.done:
            signal.time = self.now
            waiting, signal.waiting = signal.waiting, []
            for stream in waiting:
                self.at(self.now, lambda stream=stream: self.pump(stream))  # type: ignore[misc]  # a lambda's default is not inferred

    def fail(self, device: DeviceState, fault: CUDAError) -> None:
        """Fail a device, and soon afterwards the other devices of its process.

        Its queued and running work never ends, and no work begins any more.
        """
        self._fail_one(device, fault)
        for other in device.process:
            if other.fault is None:
                self.at(self.now + SPREAD_NS, partial(self._fail_one, other, fault))

    def _fail_one(self, device: DeviceState, fault: CUDAError) -> None:
        self._changed = True
        device.fault = device.fault or fault
        device.kernels.clear()
        for stream in device.streams.values():
            stream.queue.clear()
        self.held = {op: until for op, until in self.held.items() if op.stream.device is not device}

    def _poll_held(self, *, by_host: bool) -> None:
        if not self.held:
            return
        free = [operation for operation in tuple(self.held) if self._is_free(operation)]
        # Read the host's time after its words, so that nothing continues before its release.
        when = max(self.now, self.clock.now()) if by_host else self.now
        for operation in free:
            if self.held.pop(operation, None) is not None:  # otherwise its device has failed
                operation.resume(self, when)

    def _is_free(self, operation: Operation) -> bool:
        try:
            return operation in self.held and self.held[operation]()
        except Exception as error:
            operation.stream.report_error(ReferenceFailed(operation.name, error, "cost.until"))
            return True

    def _finish(self, operation: Operation) -> None:
        """Finish an operation that has just ended: its effect, its trace, and its successors."""
        stream, end = operation.stream, self.now
        self._changed = True
        if stream.device.fault is not None:
            return
        fault = self._effect(operation)
        if fault is not None:
            self.fail(stream.device, fault)
            return
        stream.current = None
        if self.on_span is not None:
            self.on_span(
                Span(
                    kind=operation.kind,
                    name=operation.name,
                    device=stream.device.ordinal,
                    stream=stream.ident,
                    green=stream.green,
                    sms=operation.sms,
                    nbytes=operation.nbytes,
                    enqueued=operation.enqueued,
                    start=operation.start,
                    end=end,
                    seen=max(end, self.clock.now()),
                )
            )
        self.pump(stream)

    def _effect(self, operation: Operation) -> CUDAError | None:
        """Run an effect without the lock. A reference's exception fails only its stream."""
        self.lock.release()
        try:
            return operation.effect()
        except Exception as error:
            failed = ReferenceFailed(operation.name, error)
        finally:
            self.lock.acquire()
        operation.stream.report_error(failed)
        return None
