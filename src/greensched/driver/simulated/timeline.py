"""The simulated device's timeline: streams, and the work on them, in modelled nanoseconds.

A discrete-event simulation. Each stream is a FIFO; its head begins when everything before it is
done and what it waits for has come. Here is what holds for any work; what takes time, kernels and
copies, is in `engines`.

Two times are never mixed: the *modelled* time of an event decides what follows on the timeline;
how long the host takes to compute a kernel's reference does not, it only delays when the host
can see the result (`Span.seen`).

`Timeline.lock` guards everything here. An operation's effect (a kernel's reference, a copy's
bytes) runs outside the lock, between its modelled end and its being seen.
"""

from __future__ import annotations

import enum
import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol

from greensched.driver.simulated.device_models import DeviceModel
from greensched.driver.status import from_status
from greensched.errors import CUDAError

if TYPE_CHECKING:
    from greensched.driver.simulated.operations import Copy, Kernel


class Clock(Protocol):
    """What tells the timeline the time, and runs it when something is due."""

    def now(self) -> int: ...

    def poke(self) -> None: ...


class StartResult(enum.Enum):
    """How an operation answers when its turn has come."""

    DONE = "done at once"
    RUNNING = "ends later"
    WAITING = "its stream is looked at again when what it waits for comes"


@dataclass(frozen=True, slots=True)
class Span:
    """One operation as it happened, in nanoseconds of the driver's clock.

    `green` is 0 on the primary context; `sms` is a bit mask. `seen` is when the host could first
    see the effect: never before `end`, and as much later as the host was late.
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
    """Something that comes to pass on the timeline once: what an event captured."""

    __slots__ = ("lacks", "time", "waiting")

    def __init__(self, lacks: int = 1) -> None:
        self.lacks = lacks
        self.time = 0
        self.waiting: list[Stream] = []

    @property
    def done(self) -> bool:
        """Whether it has come to pass."""
        return self.lacks <= 0


class Operation:
    """Work on a stream; it begins no earlier than `ready`."""

    kind = "operation"
    nbytes = 0
    sms = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.enqueued = self.ready = self.start = 0
        self.stream: Stream

    def begin(self, timeline: Timeline) -> StartResult:
        """Its turn has come, at `timeline.now`."""
        raise AssertionError(self)

    def resume(self, timeline: Timeline, when: int) -> None:
        """What held it up (`Timeline.held`) has come to pass, at `when`."""
        raise AssertionError(self)

    def effect(self) -> CUDAError | None:
        """What it does to memory, without the lock, once it has ended; or the fault it ends in."""


class Stream:
    """A FIFO of operations on one device. `green` is 0 on the primary context."""

    def __init__(self, ident: int, device: Device, green: int, sms: int) -> None:
        self.ident = ident
        self.device = device
        self.green = green
        self.sms = sms
        self.queue: deque[Operation] = deque()
        self.current: Operation | None = None
        #: Destroyed: its device forgets it when its work is done.
        self.ended = False

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        return self.current is None and not self.queue


class Device:
    """What shares one device: its streams, kernels (as they came), copy engines, and its fault."""

    def __init__(self, ordinal: int, model: DeviceModel) -> None:
        self.ordinal = ordinal
        self.model = model
        self.streams: dict[int, Stream] = {}
        self.kernels: dict[Kernel, None] = {}
        self.engines: dict[str, deque[Copy]] = {}
        self.fault: CUDAError | None = None
        #: Threads that wait to load or unload code of it.
        self.changes = 0


class InstantOp(Operation):
    """Something that takes no time: a mark, a record, a free. Its action is told the time."""

    kind = "instant"

    def __init__(self, name: str, action: Callable[[int], None]) -> None:
        super().__init__(name)
        self.action = action

    def begin(self, timeline: Timeline) -> StartResult:
        """Does it."""
        self.action(timeline.now)
        return StartResult.DONE


class WaitOp(Operation):
    """Holds its stream until a marker has come to pass."""

    kind = "wait"

    def __init__(self, marker: Signal) -> None:
        super().__init__("wait")
        self.marker = marker

    def begin(self, timeline: Timeline) -> StartResult:
        """Passes, or is looked at again when the marker comes."""
        if self.marker.done:
            return StartResult.DONE
        self.marker.waiting.append(self.stream)
        return StartResult.WAITING


class PollOp(Operation):
    """Holds its stream until a condition in memory is true."""

    kind = "hold"

    def __init__(self, until: Callable[[], bool]) -> None:
        super().__init__("hold")
        self.until = until

    def begin(self, timeline: Timeline) -> StartResult:
        """Passes, or is looked at again whenever memory may have changed."""
        if self.until():
            timeline.held.pop(self, None)
            return StartResult.DONE
        timeline.held[self] = self.until
        return StartResult.WAITING

    def resume(self, timeline: Timeline, when: int) -> None:
        """Its stream is looked at again."""
        timeline.at(when, lambda: timeline.pump(self.stream))


class Timeline:
    """Every device and stream of one driver, and what is due on them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        #: Re-entrant: a finaliser may submit work on a thread that is in here.
        self.lock = threading.RLock()
        self.now = 0
        #: What only a word in memory holds up: nobody says when it changes, so it is looked at.
        self.held: dict[Operation, Callable[[], bool]] = {}
        self.on_span: Callable[[Span], None] | None = None
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._ended: deque[Operation] = deque()

    # Everything below is called with the lock held.

    def submit(self, stream: Stream, operation: Operation, latency: int = 0) -> None:
        """Puts an operation on a stream, now."""
        operation.stream = stream
        operation.enqueued = self.clock.now()
        operation.ready = operation.enqueued + latency
        stream.queue.append(operation)
        if stream.current is None and len(stream.queue) == 1:
            self.at(operation.ready, lambda: self.pump(stream))
            self.clock.poke()

    def follow(self, streams: Iterable[Stream]) -> Signal:
        """A marker behind all the work that the streams have now."""
        busy = [stream for stream in streams if not stream.idle]
        marker = Signal(len(busy))
        marker.time = self.clock.now()
        for stream in busy:
            self.submit(stream, InstantOp("record", lambda _: self.complete(marker)))
        return marker

    def next_time(self) -> int | None:
        """When the next thing is due, in modelled time."""
        return self._due[0][0] if self._due else None

    def run(self, until: int) -> bool:
        """Brings the timeline up to `until`; true if anything happened."""
        happened = self._look_at_held(by_host=True)
        while self._due and self._due[0][0] <= until:
            time, _, action = heapq.heappop(self._due)
            self.now = max(self.now, time)
            action()
            while self._ended:
                self._finish(self._ended.popleft())
            happened = True
            if self.held:  # the device itself may have written the word
                self._look_at_held(by_host=False)
        return happened

    def at(self, time: int, action: Callable[[], None]) -> None:
        """Does something at a modelled time."""
        heapq.heappush(self._due, (time, next(self._order), action))

    def pump(self, stream: Stream) -> None:
        """Begins whatever can begin at the head of a stream."""
        while stream.queue and stream.current is None and stream.device.fault is None:
            operation = stream.queue[0]
            if operation.ready > self.now:
                self.at(operation.ready, lambda: self.pump(stream))
                return
            answer = operation.begin(self)
            if answer is StartResult.WAITING:
                return
            stream.queue.popleft()
            if answer is StartResult.RUNNING:
                stream.current = operation
        if stream.ended and stream.idle:
            stream.device.streams.pop(stream.ident, None)

    def end(self, operation: Operation) -> None:
        """An operation that takes time has ended, now."""
        self._ended.append(operation)

    def complete(self, marker: Signal) -> None:
        """One thing less that a marker lacks; the last one lets its waiters go."""
        marker.lacks -= 1
        if marker.done:
            marker.time = self.now
            waiting, marker.waiting = marker.waiting, []
            for stream in waiting:
                self.at(self.now, lambda stream=stream: self.pump(stream))  # type: ignore[misc]  # a lambda's default is not inferred

    def fail(self, device: Device, fault: CUDAError) -> None:
        """A device fault: what is queued or running never ends, and nothing begins again."""
        device.fault = device.fault or fault
        device.kernels.clear()
        for stream in device.streams.values():
            stream.queue.clear()
        self.held = {op: until for op, until in self.held.items() if op.stream.device is not device}

    def _look_at_held(self, *, by_host: bool) -> bool:
        free = [operation for operation in tuple(self.held) if self._is_free(operation)]
        # The host's time is read after its words: nothing goes on before somebody let it.
        when = max(self.now, self.clock.now()) if by_host else self.now
        for operation in free:
            if self.held.pop(operation, None) is not None:  # else its device failed meanwhile
                operation.resume(self, when)
        return bool(free)

    def _is_free(self, operation: Operation) -> bool:
        try:
            return operation in self.held and self.held[operation]()
        except Exception as error:
            self.fail(operation.stream.device, _own_bug(operation, "condition", error))
            return True

    def _finish(self, operation: Operation) -> None:
        """An operation has ended, now: its effect, its trace, and whatever follows it."""
        stream, end = operation.stream, self.now
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
        self.lock.release()
        try:
            return operation.effect()
        except Exception as error:
            return _own_bug(operation, "reference", error)
        finally:
            self.lock.acquire()


def _own_bug(operation: Operation, part: str, error: Exception) -> CUDAError:
    """A bug of a reference is what a wild pointer is to a real kernel."""
    what = f"{operation.kind} {operation.name!r}"
    fault = from_status(719, what, detail=f"its {part} failed: {error!r}")
    fault.__cause__ = error
    return fault
