"""Streams and events, with their owners, and tracks: a stream that counts its work in tickets.

A child holds its parent: a `Stream` keeps its context alive, so a handle that exists is valid.
Whoever is forgotten warns, and its handle is destroyed when its context closes; no destructor
ever calls CUDA, on whatever thread it may run.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, TypeVar

from greensched._cleanup import run_all
from greensched.driver.interface import Driver
from greensched.driver.types import ContextHandle, EventHandle, GreenHandle, Mailbox, StreamHandle
from greensched.errors import Closed, CUDAError, InvalidRequest, WrongContext
from greensched.typing import CaptureMode, DeviceFacts, SupportsCudaStream

if TYPE_CHECKING:  # they stand side by side, and neither needs the other to run
    from greensched.device.resources import DeviceResources

#: What streams write of a ticket: its lowest 32 bits. There are never 2**32 in flight.
MASK: Final = 0xFFFFFFFF
#: A priority is a signed 32-bit number. Source: cuda.h, cuStreamCreateWithPriority.
PRIORITIES = 2**31
#: The default stream of the calling thread. Source: cuda.h, CU_STREAM_PER_THREAD.
PER_THREAD = 2
#: Source: cuda.h, CUDA_ERROR_INVALID_HANDLE.
INVALID_HANDLE = 400

C = TypeVar("C", "Event", "Stream")


class StreamOwner(Protocol):
    """What a stream or event needs of the context that made it: all of it is `Context`'s."""

    driver: Driver
    handle: ContextHandle
    green: GreenHandle | None
    facts: DeviceFacts
    loader: Any
    streams: set[StreamHandle]
    events: set[EventHandle]
    tracks: dict[int, TicketedStream]
    is_closed: bool
    is_abandoned: bool

    @property
    def kind(self) -> str: ...

    @property
    def device_ordinal(self) -> int: ...

    @property
    def primary(self) -> StreamOwner: ...

    @property
    def resources(self) -> DeviceResources: ...

    def entered(self) -> AbstractContextManager[None]: ...


class Event:
    """A point in a stream's work. Made by `Context.create_event` or `Stream.record`."""

    __slots__ = ("context", "handle", "is_closed")

    def __init__(
        self,
        owner: StreamOwner,
        *,
        timing: bool = False,
        blocking: bool = True,
        made_in: StreamOwner | None = None,
    ) -> None:
        self.is_closed = True  # until there is a handle: __del__ runs after a failed create too
        #: The context it belongs to, which it keeps alive, and with which it ends.
        self.context = owner
        with (owner if made_in is None else made_in).entered():
            self.handle = owner.driver.create_event(timing=timing, blocking=blocking)
            owner.events.add(self.handle)
        self.is_closed = False

    @property
    def is_done(self) -> bool:
        """Whether the work it captured is done; does not block. True before any record."""
        return self.context.driver.query_event(_open(self, "event").handle)

    def sync(self) -> None:
        """Blocks until the work it captured is done; not for an event-loop thread."""
        self.context.driver.synchronize_event(_open(self, "event").handle)

    def elapsed_since(self, start: Event) -> float:
        """Seconds of device time from `start` to this; both made with `timing`, and done.

        Resolution is about 0.5 us (driver API, cuEventElapsedTime).
        """
        return self.context.driver.elapsed(
            _open(start, "event").handle, _open(self, "event").handle
        )

    def close(self) -> None:
        """Ends it, whether or not its work is done. Idempotent; does not block."""
        if not self.is_closed:
            self.is_closed = True
            if self.context.is_closed:  # which ended it: the handle is dead
                return
            self.context.events.discard(self.handle)
            self.context.driver.destroy_event(self.handle)

    def __del__(self) -> None:
        if not self.is_closed:
            _forgotten(self)

    def __repr__(self) -> str:
        return f"<Event {'closed' if self.is_closed else f'of {self.context!r}'}>"


class Stream:
    """A non-blocking stream of a context: work on it runs in order, on its context's SMs.

    Made by `Context.create_stream` or `Device.create_stream`. It may be used from any thread.
    """

    __slots__ = ("context", "handle", "is_closed", "recorded")

    def __init__(self, context: StreamOwner, *, priority: object = 0) -> None:
        self.is_closed = True
        #: While we capture on it: what kernels are launched with, and whether they write it.
        self.recorded: list[tuple[Any, bool]] | None = None
        if type(priority) is not int or not -PRIORITIES <= priority < PRIORITIES:
            raise InvalidRequest(f"priority={priority!r}: give an int, such as 0, or -1 before it")
        #: The context it belongs to, which it keeps alive.
        self.context = context
        with context.entered():
            self.handle = context.driver.create_stream(context.green, priority)
            context.streams.add(self.handle)
        self.is_closed = False

    def check(self) -> None:
        """Raises Closed where it cannot be used: it is closed, or its context is."""
        _open(self, "stream")

    @property
    def address(self) -> int:
        """The raw `CUstream`, as a number."""
        return self.context.driver.stream_address(self.handle)

    @property
    def resources(self) -> DeviceResources:
        """What its context was given: `sm` and `workqueue`."""
        return _open(self, "stream").context.resources

    def record(self, event: Event | None = None) -> Event:
        """Captures the work submitted so far in an event (a new one if none is given).

        Raises:
            WrongContext: one of the two is of a context of its own, and the other is not of it.
            WrongThread: a new one is needed, this driver wants it made in the stream's own green
                context, and that is current on another thread: make it beforehand.
        """
        driver = _open(self, "stream").context.driver
        if event is None:
            return self._record_new()
        _open(event, "event")
        if _apart(self, event) and event.context is not self.context:
            raise WrongContext(event, self)
        driver.record_event(event.handle, self.handle)
        return event

    def _record_new(self) -> Event:
        """Made in the primary context, which is in nobody's way; where that will not do, in ours.

        An H200 takes it (driver 580, probe.json); other drivers are said to want an event and a
        stream of one context, and answer CUDA_ERROR_INVALID_HANDLE.
        """
        if self.context.primary is not self.context:
            event = Event(self.context, made_in=self.context.primary)
            try:
                return self.record(event)
            except CUDAError as error:
                event.close()
                if error.status != INVALID_HANDLE:
                    raise
        event = Event(self.context)
        try:
            return self.record(event)
        except CUDAError:
            event.close()
            raise

    def wait(self, event: Event) -> None:
        """Later work on this stream waits for what the event captured; the host does not.

        Raises:
            WrongContext: one of the two is of a context of its own, and the other of a green one.
        """
        driver = _open(self, "stream").context.driver
        _open(event, "event")
        if _apart(self, event) and "green" in (self.context.kind, event.context.kind):
            raise WrongContext(event, self)
        driver.wait_event(self.handle, event.handle)

    def follow(self, other: SupportsCudaStream | int) -> None:
        """Later work on this stream waits for all that was submitted to another so far.

        The host does not. The other may be anybody's, of any library.

        Args:
            other: what has `__cuda_stream__`, or a raw `CUstream`; 1 is the legacy default stream
                and 2 the thread's own, of the context that is current.

        Raises:
            InvalidRequest: no stream; one that is capturing; or one of somebody else's green
                context, where this driver wants an event made there.
        """
        primary, address = _open(self, "stream").context.primary, address_of(other)
        if address == self.address:
            return
        ours = primary.tracks.get(address)
        if ours is not None:
            ours.lead(self.address)
            return
        driver = primary.driver
        with _somewhere(primary):
            theirs = driver.foreign_stream(address)
            if address > PER_THREAD and driver.is_capturing(theirs):
                raise InvalidRequest(f"{other!r} is capturing: end the capture first")
            event = driver.create_event()
            try:
                driver.record_event(event, theirs)
                driver.wait_event(self.handle, event)
            except CUDAError as error:
                if error.status != INVALID_HANDLE:
                    raise
                raise InvalidRequest(
                    f"nothing can be ordered behind {other!r}: this driver wants an event of its "
                    "context. Give the array by DLPack, or wait for its producer first"
                ) from error
            finally:
                driver.destroy_event(event)

    @property
    def is_done(self) -> bool:
        """Whether all its work is done; does not block."""
        return _open(self, "stream").context.driver.query_stream(self.handle)

    def sync(self) -> None:
        """Blocks until all its work is done; not for an event-loop thread."""
        _open(self, "stream").context.driver.synchronize_stream(self.handle)

    def close(self) -> None:
        """Ends it; its work goes on. Idempotent. May block: not for an event-loop thread."""
        if not self.is_closed:
            self.is_closed = True
            if self.context.is_closed:  # which ended it: the handle is dead
                return
            self.context.streams.discard(self.handle)
            self.context.driver.destroy_stream(self.handle)

    def __cuda_stream__(self) -> tuple[Literal[0], int]:
        """The protocol by which cuda.core, torch, CuPy and numba take foreign streams."""
        return 0, self.context.driver.stream_address(_open(self, "stream").handle)

    def __del__(self) -> None:
        if not self.is_closed:
            _forgotten(self)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"of {self.context!r}"
        return f"<Stream {state}>"


class TicketedStream:
    """A stream and the word its tickets are written to.

    Each piece of work is followed by a *ticket*, a growing number whose lowest 32 bits the stream
    itself writes into a word of pinned memory. Who wants to know whether the work is done reads
    the word: no driver call, no thread, and one read covers everything before it. Tickets are
    issued, and their marks submitted, in one order; `issued` runs ahead of `submitted` while a
    thread of ours still has to submit.

    Args:
        stream: where the work goes.
        event: of the stream's context.
        word: one element of pinned memory, as 32-bit unsigned.
        address: the same word, for the device.
        release: takes the word back when the track closes.
        first: the ticket before the first (for tests of the wrap).
    """

    __slots__ = (
        "_lagging",
        "_release",
        "_write",
        "crew",
        "event",
        "fault",
        "first_uses",
        "issued",
        "kept",
        "known",
        "launch_errors",
        "stream",
        "submitted",
        "word",
    )

    def __init__(
        self,
        stream: Stream,
        event: Event,
        word: memoryview[int],
        address: int,
        release: Callable[[], None],
        first: int = 0,
    ) -> None:
        self.stream = stream
        self.word = word
        word[0] = first & MASK
        self._release = release
        #: While there is any a call of the driver for this stream may wait, but for a mark: no loop
        #: makes one (`kernels.Loader`).
        self.first_uses = stream.context.loader.first_uses
        #: Recorded behind the work, for whoever must block or order another stream behind it.
        self.event = event
        self.issued = self.submitted = first
        #: A ticket that was seen to be reached: no earlier one is looked up again.
        self.known = first
        #: What ended everything: no ticket after it is ever reached.
        self.fault: BaseException | None = None
        #: Whose threads work on it: the service floor's.
        self.crew: Any = None
        #: Threads that wait until a ticket is submitted.
        self._lagging: list[tuple[int, Mailbox[None]]] = []
        #: (up to which ticket, what): memory of others that work here uses.
        self.kept: deque[tuple[int, object]] = deque()
        #: Failed references of simulated kernels, each with the ticket behind its launch. Those of
        #: jobs that are never asked stay, so their number is bounded.
        self.launch_errors: deque[tuple[int, Exception]] = deque(maxlen=64)
        self._write = self._bind(address)
        stream.context.driver.report_reference_errors(stream.handle, self._launch_failed)
        stream.context.primary.tracks[stream.address] = self

    def _bind(self, address: int) -> Callable[[int], None]:
        return self.stream.context.driver.bind_mark(self.stream.handle, address)

    def issue(self) -> int:
        """The next ticket, for work about to be submitted."""
        self.issued = ticket = self.issued + 1
        return ticket

    def mark(self, ticket: int) -> None:
        """Has the stream write a ticket behind its work."""
        self._write(ticket & MASK)
        self.submitted = ticket
        if self._lagging:
            self.pass_lagging()

    def mark_here(self, ticket: int) -> None:
        """Writes a ticket from the host: only for a stream with no work on it."""
        self.word[0] = ticket & MASK
        self.submitted = ticket
        if self._lagging:
            self.pass_lagging()

    def reached(self, ticket: int) -> bool:
        """Whether the work of a ticket is done, and everything before it.

        Not before `submitted` says so, which a thread of ours sets behind the mark: who has
        awaited everything finds everything submitted.
        """
        if ticket <= self.known:
            return True
        written = self.word[0]  # before `issued`, which it then cannot be ahead of
        issued = self.issued
        if ticket > self.submitted or ticket > issued - ((issued - written) & MASK):
            return False
        self.known = ticket  # whoever else looks now may write an earlier one: also known
        return True

    def has_submitted(self, ticket: int) -> bool:
        """Whether the work of a ticket is on the stream, so that an event can capture it.

        Of a ticket still to be issued (a bound launch's next): whether all before it is.
        """
        return self.submitted >= min(ticket, self.issued)

    def wait_until_submitted(self, ticket: int) -> None:
        """Blocks until a ticket is submitted, or its track is lost. Not on a loop's thread.

        Tickets are issued in one order over all tracks, and whoever submits waits for earlier
        ones only: so nobody waits in a circle.
        """
        passed: Mailbox[None] = self.stream.context.driver.create_mailbox()
        self._lagging.append((ticket, passed))
        self.pass_lagging()  # it may have been submitted just before
        passed.get()

    def pass_lagging(self) -> None:
        """Lets go on who waited for what is submitted by now, or never will be."""
        for entry in tuple(self._lagging):
            if self.fault is not None or self.has_submitted(entry[0]):
                with suppress(ValueError):  # another thread was here at the same time
                    self._lagging.remove(entry)
                    entry[1].put(None)

    def _launch_failed(self, error: Exception) -> None:
        """Keep a failed reference for the job whose ticket is written next."""
        written = self.word[0]  # before `issued`, which it then cannot be ahead of
        issued = self.issued
        self.launch_errors.append((issued - ((issued - written) & MASK) + 1, error))

    def take_launch_error(self, ticket: int) -> Exception | None:
        """Return the failed reference behind which a reached ticket was written, once."""
        for entry in tuple(self.launch_errors):
            if self._is_behind(ticket, entry[0]):
                self.launch_errors.remove(entry)
                return entry[1]
        return None

    def _is_behind(self, ticket: int, next_ticket: int) -> bool:
        return ticket == next_ticket

    @property
    def is_idle(self) -> bool:
        """Whether every ticket issued is reached."""
        return self.reached(self.issued)

    def check_capture(self) -> None:
        """Refuses to order anything behind a capture: it would be drawn into it.

        Raises:
            InvalidRequest: the stream is capturing.
        """
        if self.stream.context.driver.is_capturing(self.stream.handle):
            raise InvalidRequest(
                "a buffer is in use by a partition whose stream is capturing: end the capture first"
            )

    def order_behind(self, other: TicketedStream) -> None:
        """Later work here waits for everything submitted to the other track so far."""
        driver = self.stream.context.driver
        driver.record_event(other.event.handle, other.stream.handle)
        driver.wait_event(self.stream.handle, other.event.handle)

    def lead(self, address: int) -> None:
        """Later work on a stream of anybody's waits for everything submitted here so far.

        Raises:
            InvalidRequest: this one is capturing.
        """
        if address != self.stream.address:
            self.check_capture()
            driver = self.stream.context.driver
            driver.record_event(self.event.handle, self.stream.handle)
            with _somewhere(self.stream.context.primary):
                driver.wait_event(driver.foreign_stream(address), self.event.handle)

    def keep(self, ticket: int, thing: object) -> None:
        """Work up to a ticket uses it: it lives until then, whoever else lets go."""
        self.kept.append((ticket, thing))

    def let_go(self) -> None:
        """Lets go of what was kept for work that is done."""
        with suppress(IndexError):  # another thread was here at the same time
            for _ in range(len(self.kept)):
                kept = self.kept.popleft()
                if not self.reached(kept[0]):
                    self.kept.append(kept)

    def close(self) -> None:
        """Ends its event and its stream, which has no work any more. May block.

        Whoever still looks at it, an old job or buffer, reads a word of its own: the one it had
        goes to another track.
        """
        self.word = _private_word(self.issued)
        self.kept.clear()
        self.stream.context.primary.tracks.pop(self.stream.address, None)
        run_all((self.event.close, self.stream.close, self._release))


class EventTicketedStream(TicketedStream):
    """A track on a driver whose streams cannot write words: events stand for the tickets.

    Looking costs an event query, and a query can spoil somebody's capture: so the thread's
    capture mode is relaxed around it.
    """

    #: Tickets in flight at most; each has an event of its own, made beforehand.
    DEPTH: ClassVar[int] = 64

    __slots__ = ("_lock", "_pending", "_ring")

    def __init__(self, stream: Stream, event: Event, first: int = 0) -> None:
        self._ring: list[Event] = []
        with ExitStack() as undo:
            for _ in range(self.DEPTH):
                self._ring.append(Event(stream.context))
                undo.callback(self._ring[-1].close)
            undo.pop_all()
        self._pending: deque[int] = deque()
        self._lock = threading.Lock()  # loops of several threads may look
        super().__init__(stream, event, _private_word(first), 0, lambda: None, first)

    def _bind(self, address: int) -> Callable[[int], None]:  # noqa: ARG002  no word to write
        driver, handle = self.stream.context.driver, self.stream.handle

        def write(ticket: int) -> None:
            driver.record_event(self._event_of(ticket).handle, handle)
            self._pending.append(ticket)

        return write

    def mark_here(self, ticket: int) -> None:
        """Writes a ticket from the host: the events before it are done."""
        with self._lock:
            self._pending.clear()
            super().mark_here(ticket)

    def reached(self, ticket: int) -> bool:
        """Whether the work of a ticket is done; asks the driver where that is not known yet."""
        if not super().reached(ticket):
            with suppress(CUDAError):  # a fault is for the sweep to find, not for whoever looks
                self._look()
        return super().reached(ticket)

    def _look(self) -> None:
        driver = self.stream.context.driver
        before = driver.exchange_capture_mode(CaptureMode.RELAXED)
        try:
            with self._lock:
                while self._pending and driver.query_event(self._event_of(self._pending[0]).handle):
                    self.word[0] = self._pending.popleft()
        finally:
            driver.exchange_capture_mode(before)

    def _is_behind(self, ticket: int, next_ticket: int) -> bool:
        return ticket >= next_ticket  # the word is only as new as the last look

    def _event_of(self, ticket: int) -> Event:
        return self._ring[ticket % self.DEPTH]

    def close(self) -> None:
        """Ends its events and its stream."""
        self._pending.clear()
        run_all((*(event.close for event in self._ring), super().close))


def address_of(stream: object) -> int:
    """The raw `CUstream` of anybody's stream, as a number.

    Raises:
        InvalidRequest: it is none, or 0, which says nothing of whose default stream it is.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    address: object = stream
    if protocol is not None:
        try:
            version, address = protocol() if callable(protocol) else protocol
        except (TypeError, ValueError):
            version = address = None
        if version != 0:
            raise InvalidRequest(f"__cuda_stream__ of {stream!r} is of no version known here")
    if type(address) is not int or address <= 0:
        raise InvalidRequest(
            f"{stream!r} is no stream: give what has __cuda_stream__, or its number"
        )
    return address


def _somewhere(primary: StreamOwner) -> AbstractContextManager[object]:
    """A block in which some context is current: a default stream is that of the current one."""
    return nullcontext() if primary.driver.current() is not None else primary.entered()


def _private_word(ticket: int) -> memoryview[int]:
    """A word that no stream writes."""
    return memoryview((ctypes.c_uint32 * 1)(ticket & MASK)).cast("B").cast("I")


def _open(child: C, kind: str) -> C:
    if child.is_closed:
        raise Closed(f"this {kind}")
    if child.context.is_closed:
        raise Closed(repr(child), "dead: its context is gone")
    return child


def _apart(stream: Stream, event: Event) -> bool:
    """Whether either is of a context of its own, which has nothing in common with any other."""
    return "own" in (stream.context.kind, event.context.kind)


def _forgotten(child: Event | Stream) -> None:
    if not child.context.is_closed and not child.context.is_abandoned:
        warnings.warn(
            f"{child!r} was never closed; it is ended with its context",
            ResourceWarning,
            stacklevel=3,
            source=child,
        )
