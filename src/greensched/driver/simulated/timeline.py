"""The simulated device's timeline: streams, and the work on them, in modelled nanoseconds.

A discrete-event simulation. Each stream is a FIFO; its head begins when everything before it is
done and what it waits for has come. Kernels share SMs and memory bandwidth (`sharing`); copies
share one engine for each direction, one copy at a time. SMs are all that a green context
isolates: the copy engines and the memory system belong to everybody.

Two times are never mixed: the *modelled* time of an event decides what follows on the timeline;
how long the host takes to compute a kernel's reference does not, it only delays when the host
can see the result (`Span.seen`).

`Timeline.lock` guards everything here. An operation's effect (a kernel's reference, a copy's
bytes) runs outside the lock, between its modelled end and its being seen.
"""

from __future__ import annotations

import enum
import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from greensched.driver.simulated.presets import DeviceModel
from greensched.driver.simulated.sharing import speeds
from greensched.errors import CUDAError, from_status
from greensched.typing import Cost


class Clock(Protocol):
    """What tells the timeline the time, and runs it when something is due."""

    def now(self) -> int: ...

    def poke(self) -> None: ...


class Begin(enum.Enum):
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


class Marker:
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

    def begin(self, timeline: Timeline) -> Begin:
        """Its turn has come, at `timeline.now`."""
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
    """What shares one device: its streams, running kernels, copy engines, and its fault."""

    def __init__(self, ordinal: int, model: DeviceModel) -> None:
        self.ordinal = ordinal
        self.model = model
        self.streams: dict[int, Stream] = {}
        self.running: dict[Kernel, None] = {}
        self.engines: dict[str, deque[Copy]] = {}
        self.fault: CUDAError | None = None


class Kernel(Operation):
    """A kernel: so much work on the SMs of its stream, shared with whoever runs there too."""

    kind = "kernel"

    def __init__(
        self, name: str, cost: Cost, blocks: int, sms: int, body: Callable[[], CUDAError | None]
    ) -> None:
        super().__init__(name)
        self.cost = cost
        self.cap = min(cost.sms or blocks, blocks, sms.bit_count())
        self.sms = sms
        self.effect = body  # type: ignore[method-assign]  # one call less for each kernel
        self.done = 0.0  # of its work, from 0 to 1
        self.speed = 0.0  # done per nanosecond
        self.since = 0  # when `done` was last brought up to date
        self.version = 0  # of its scheduled end: a change of speed makes the older one void

    def begin(self, timeline: Timeline) -> Begin:
        """Starts with its fixed time, which is as long on any number of SMs."""
        self.start = timeline.now
        if self.cost.until is not None:
            timeline.held[self] = self.cost.until
            if self.cost.limit_ns is not None:
                timeline.at(
                    self.start + math.ceil(self.cost.limit_ns), lambda: timeline.let_go(self)
                )
        elif not math.isinf(self.cost.fixed_ns):
            timeline.at(self.start + math.ceil(self.cost.fixed_ns), lambda: timeline.work(self))
        return Begin.RUNNING


class Copy(Operation):
    """Bytes over one of the device's engines, one copy at a time."""

    kind = "copy"

    def __init__(self, path: str, nbytes: int, bandwidth: float, body: Callable[[], None]) -> None:
        super().__init__(path)
        self.path = path
        self.nbytes = nbytes
        self.bandwidth = bandwidth
        self.effect = body  # type: ignore[method-assign]  # as for kernels

    def begin(self, timeline: Timeline) -> Begin:
        """Joins the queue of its engine."""
        line = self.stream.device.engines.setdefault(self.path, deque())
        line.append(self)
        if len(line) == 1:
            timeline.move(self)
        return Begin.RUNNING


class Instant(Operation):
    """Something that takes no time: a mark, a record, a free. Its action is told the time."""

    kind = "instant"

    def __init__(self, name: str, action: Callable[[int], None]) -> None:
        super().__init__(name)
        self.action = action

    def begin(self, timeline: Timeline) -> Begin:
        """Does it."""
        self.action(timeline.now)
        return Begin.DONE


class Wait(Operation):
    """Holds its stream until a marker has come to pass."""

    kind = "wait"

    def __init__(self, marker: Marker) -> None:
        super().__init__("wait")
        self.marker = marker

    def begin(self, timeline: Timeline) -> Begin:
        """Passes, or is looked at again when the marker comes."""
        if self.marker.done:
            return Begin.DONE
        self.marker.waiting.append(self.stream)
        return Begin.WAITING


class Hold(Operation):
    """Holds its stream until a condition in memory is true."""

    kind = "hold"

    def __init__(self, until: Callable[[], bool]) -> None:
        super().__init__("hold")
        self.until = until

    def begin(self, timeline: Timeline) -> Begin:
        """Passes, or is looked at again whenever memory may have changed."""
        if self.until():
            timeline.held.pop(self, None)
            return Begin.DONE
        timeline.held[self] = self.until
        return Begin.WAITING


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

    def follow(self, streams: Iterable[Stream]) -> Marker:
        """A marker behind all the work that the streams have now."""
        busy = [stream for stream in streams if not stream.idle]
        marker = Marker(len(busy))
        marker.time = self.clock.now()
        for stream in busy:
            self.submit(stream, Instant("record", lambda _: self.complete(marker)))
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
            if answer is Begin.WAITING:
                return
            stream.queue.popleft()
            if answer is Begin.RUNNING:
                stream.current = operation
        if stream.ended and stream.idle:
            stream.device.streams.pop(stream.ident, None)

    def let_go(self, kernel: Kernel) -> None:
        """A kernel that a word holds up ends all the same: it has waited long enough."""
        if self.held.pop(kernel, None) is not None:
            self._ended.append(kernel)

    def complete(self, marker: Marker) -> None:
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
        device.running.clear()
        for stream in device.streams.values():
            stream.queue.clear()
        self.held = {op: until for op, until in self.held.items() if op.stream.device is not device}

    def _look_at_held(self, *, by_host: bool) -> bool:
        free = [operation for operation in tuple(self.held) if self._is_free(operation)]
        # The host's time is read after its words: nothing goes on before somebody let it.
        when = max(self.now, self.clock.now()) if by_host else self.now
        for operation in free:
            if self.held.pop(operation, None) is None:
                continue  # its device failed meanwhile
            if isinstance(operation, Kernel):
                self.at(when, lambda op=operation: self._ended.append(op))  # type: ignore[misc]  # as above
            else:
                self.at(when, lambda op=operation: self.pump(op.stream))  # type: ignore[misc]  # as above
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

    # -- kernels share SMs and bandwidth ---------------------------------------------------------

    def work(self, kernel: Kernel) -> None:
        """The part of a kernel begins that more SMs would make shorter."""
        if kernel.stream.device.fault is not None:
            return
        if kernel.cost.sm_ns <= 0 and kernel.cost.dram_bytes <= 0:
            self._ended.append(kernel)
            return
        kernel.since = self.now
        kernel.stream.device.running[kernel] = None
        self._share(kernel.stream.device)

    def _share(self, device: Device) -> None:
        """Gives every running kernel its speed, now that who runs has changed."""
        kernels = list(device.running)
        given = speeds(kernels, device.model.dram_bandwidth)
        for kernel, speed in zip(kernels, given, strict=True):
            if speed == kernel.speed:
                continue
            kernel.done += kernel.speed * (self.now - kernel.since)
            kernel.since, kernel.speed = self.now, speed
            kernel.version += 1
            if speed == 0:  # of infinite cost: it has no end
                continue
            # The small number keeps a rounding error from costing a whole nanosecond.
            left = max(0, math.ceil((1.0 - kernel.done) / speed - 1e-6))
            self.at(
                self.now + left,
                lambda kernel=kernel, version=kernel.version: self._worked(kernel, version),  # type: ignore[misc]  # as above
            )

    def _worked(self, kernel: Kernel, version: int) -> None:
        device = kernel.stream.device
        if kernel.version != version or kernel not in device.running:
            return
        del device.running[kernel]
        self._ended.append(kernel)
        self._share(device)

    # -- copies share engines -------------------------------------------------------------------

    def move(self, copy: Copy) -> None:
        """The copy at the head of its engine begins to move."""
        copy.start = self.now
        took = math.ceil(copy.nbytes / copy.bandwidth * 1e9)
        self.at(self.now + took, lambda: self._moved(copy))

    def _moved(self, copy: Copy) -> None:
        line = copy.stream.device.engines[copy.path]
        line.popleft()
        self._ended.append(copy)
        if line:
            self.move(line[0])


def _own_bug(operation: Operation, part: str, error: Exception) -> CUDAError:
    """A bug of a reference is what a wild pointer is to a real kernel."""
    what = f"{operation.kind} {operation.name!r}"
    fault = from_status(719, what, detail=f"its {part} failed: {error!r}")
    fault.__cause__ = error
    return fault
