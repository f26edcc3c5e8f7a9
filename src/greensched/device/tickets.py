"""Tickets: how the completion of a stream's work is known.

Each piece of work is followed by a *ticket*, a growing number. The stream itself writes its lowest
32 bits to a word of pinned memory. Reading the word shows whether the work is done, without a
driver call or a thread, and one read covers everything before it.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import ClassVar, Final, Protocol

from greensched._cleanup import run_all
from greensched.device.current_context import ContextOwnership
from greensched.device.streams import Event, Stream, StreamContext, any_current
from greensched.driver.status import CAPACITY
from greensched.driver.types import HostMemory, Mailbox
from greensched.errors import CUDAError, DeviceFault, DeviceHung, InvalidRequest
from greensched.typing import CaptureMode, Feature

#: The lowest 32 bits of a ticket, which are written. At no time are 2**32 in flight.
MASK: Final = 0xFFFFFFFF
#: Bytes of a cache line, one for each word: 64 on x86-64 and most AArch64.
LINE: Final = 64
PAGE: Final = 4096


class StreamOwner(Protocol):
    """The owner of a ticketed stream, an executor. All streams of a partition have the same."""

    #: Which thread has the executor's context current.
    ownership: ContextOwnership | None

    @property
    def is_entered(self) -> bool:
        """Whether the calling thread has the executor's context current."""

    def wait(self, stream: TicketedStream, ticket: int) -> Awaitable[object]:
        """Return an object to await on the calling loop until a ticket is reached or lost."""

    def notify_when(
        self, stream: TicketedStream, ticket: int, callback: Callable[[], object]
    ) -> None:
        """Call a function on the calling loop's thread once a ticket is reached or lost."""

    def wait_for_event(self, stream: TicketedStream, then: Callable[[bool], object]) -> bool:
        """Have a thread block until the stream's event is done, and pass `then` whether it is."""


class TicketedStream:
    """A stream, and the word to which its tickets are written.

    Tickets are issued and written in the same order. `issued` is ahead of `submitted` while an
    executor's thread still has work to submit.

    Args:
        stream: The stream.
        event: An event of the stream's context.
        word: One element of pinned memory, as 32-bit unsigned.
        address: The address of the word for the device.
        release: Returns the word on `close`.
    """

    __slots__ = (
        "_release",
        "behind",
        "event",
        "first_uses",
        "given_up",
        "hang",
        "health",
        "issued",
        "kept",
        "last_reached",
        "launch_errors",
        "owner",
        "stream",
        "submit_waiters",
        "submitted",
        "word",
        "write",
    )

    def __init__(
        self,
        stream: Stream,
        event: Event,
        word: memoryview[int],
        address: int,
        release: Callable[[], None],
    ) -> None:
        self.stream = stream
        self.word = word
        word[0] = 0
        self._release = release
        #: The device's health. Once it is over no ticket is reached.
        self.health = stream.context.health
        #: While it is not empty, driver calls for this stream may wait, except writing a ticket, so
        #: an event loop makes none (`kernels.Loader`).
        self.first_uses = stream.context.loader.first_uses
        #: Recorded after the work, to block a thread or to order another stream after it.
        self.event = event
        self.issued = self.submitted = 0
        #: A ticket known to be reached; earlier tickets need no read.
        self.last_reached = 0
        #: The last ticket that was given up because work hangs, and the error for all up to it.
        self.given_up = 0
        self.hang: DeviceHung | None = None
        #: Recent work of other streams, after which work of this stream was ordered.
        self.behind: deque[tuple[TicketedStream, int]] = deque(maxlen=8)
        self.owner: StreamOwner | None = None
        #: Threads that wait until a ticket is submitted.
        self.submit_waiters: list[tuple[int, Mailbox[None]]] = []
        #: Other libraries' memory that work here uses, as (last ticket, object).
        self.kept: deque[tuple[int, object]] = deque()
        #: Errors of simulated kernels' references, each with the ticket after its launch. Bounded,
        #: because entries of jobs that are never awaited stay.
        self.launch_errors: deque[tuple[int, Exception]] = deque(maxlen=64)
        stream.context.driver.report_reference_errors(stream.handle, self._launch_failed)
        self.write = self._bind(address)
        stream.context.primary.order_before[stream.address] = self.order_before

    def _bind(self, address: int) -> Callable[[int], None]:
        return self.stream.context.driver.bind_mark(self.stream.handle, address)

    def issue(self) -> int:
        """Return the next ticket, for work about to be submitted."""
        self.issued = ticket = self.issued + 1
        return ticket

    def mark(self, ticket: int) -> None:
        """Have the stream write a ticket after its work."""
        self.write(ticket & MASK)
        self.submitted = ticket
        if self.submit_waiters:
            self.wake_submit_waiters()

    def mark_here(self, ticket: int) -> None:
        """Write a ticket from the host. Only for a stream without work."""
        self.word[0] = ticket & MASK
        self.submitted = ticket
        if self.submit_waiters:
            self.wake_submit_waiters()

    def reached(self, ticket: int) -> bool:
        """Say whether the work of a ticket, and everything before it, is done.

        False until `submitted` covers it, which another thread sets after writing the ticket, so
        that after awaiting everything a caller finds everything submitted.
        """
        if ticket <= self.last_reached:
            return True
        written = self.word[0]  # read before `issued`, so that it is never ahead of `issued`
        issued = self.issued
        if ticket > self.submitted or ticket > issued - ((issued - written) & MASK):
            return False
        self.last_reached = ticket  # if another thread then sets an earlier one, that is true, too
        return True

    def hangs(self, ticket: int) -> bool:
        """Say whether a ticket was given up and is still not reached."""
        return ticket <= self.given_up and not self.reached(ticket)

    def has_submitted(self, ticket: int) -> bool:
        """Say whether the work of a ticket is on the stream, so that an event can record it.

        For a ticket not issued yet (a bound launch's next one): whether all earlier work is.
        """
        return self.submitted >= min(ticket, self.issued)

    def wait_until_submitted(self, ticket: int) -> None:
        """Block until a ticket is submitted or the device is lost. Not on a loop's thread.

        Tickets are issued in one order over all streams, and a submitting thread waits only for
        earlier ones. So threads never wait for each other in a circle.
        """
        passed: Mailbox[None] = self.stream.context.driver.create_mailbox()
        self.submit_waiters.append((ticket, passed))
        self.wake_submit_waiters()  # because the ticket may have just been submitted
        passed.get()

    def wake_submit_waiters(self) -> None:
        """Wake each thread whose ticket is submitted or never will be."""
        for entry in tuple(self.submit_waiters):
            if self.health.is_over or self.has_submitted(entry[0]):
                with suppress(ValueError):  # another thread has just removed it
                    self.submit_waiters.remove(entry)
                    entry[1].put(None)

    @property
    def is_idle(self) -> bool:
        """Whether every issued ticket is reached."""
        return self.reached(self.issued)

    def check_capture(self) -> None:
        """Refuse to order work after a capture, which would draw that work into it.

        Raises:
            InvalidRequest: The stream is capturing.
        """
        if self.stream.context.driver.is_capturing(self.stream.handle):
            raise InvalidRequest(
                "a buffer is in use by a partition whose stream is capturing: end the capture first"
            )

    def order_behind(self, other: TicketedStream) -> None:
        """Order later work here after everything submitted to another stream so far."""
        driver = self.stream.context.driver
        driver.record_event(other.event.handle, other.stream.handle)
        driver.wait_event(self.stream.handle, other.event.handle)
        self.behind.append((other, other.submitted))

    def order_before(self, address: int) -> None:
        """Order later work on any library's stream after everything submitted here so far.

        Raises:
            InvalidRequest: This stream is capturing.
        """
        if address != self.stream.address:
            self.check_capture()
            driver = self.stream.context.driver
            driver.record_event(self.event.handle, self.stream.handle)
            with any_current(self.stream.context.primary):
                driver.wait_event(driver.foreign_stream(address), self.event.handle)

    def keep(self, ticket: int, kept: object) -> None:
        """Keep an object alive until a ticket is reached and `release_kept` finds that out."""
        self.kept.append((ticket, kept))

    def release_kept(self) -> None:
        """Release objects that were kept for work that is done. From any thread."""
        with suppress(IndexError):  # another thread releases them, too
            if not self.reached(self.kept[0][0]):
                return  # the first is the oldest, or nearly so
            for _ in range(len(self.kept)):
                kept = self.kept.popleft()
                if not self.reached(kept[0]):
                    self.kept.append(kept)

    def _launch_failed(self, error: Exception) -> None:
        """Keep the error of a kernel's reference for the job whose ticket is written next."""
        written = self.word[0]  # read before `issued`, so that it is never ahead of `issued`
        issued = self.issued
        self.launch_errors.append((issued - ((issued - written) & MASK) + 1, error))

    def take_launch_error(self, ticket: int) -> Exception | None:
        """Return and forget the error of the reference that ran before a reached ticket."""
        for entry in tuple(self.launch_errors):
            if self._is_behind(ticket, entry[0]):
                self.launch_errors.remove(entry)
                return entry[1]
        return None

    def _is_behind(self, ticket: int, next_ticket: int) -> bool:
        return ticket == next_ticket

    def close(self) -> None:
        """Destroy the event and the stream, which has no work left. May block.

        Old jobs and buffers then read a private word, because the shared word is reused.
        """
        self.word = _private_word(self.issued)
        self.kept.clear()
        self.behind.clear()
        self.stream.context.primary.order_before.pop(self.stream.address, None)
        driver, handle = self.stream.context.driver, self.stream.handle
        driver.report_reference_errors(handle, None)  # the stream may be kept
        run_all((self.event.close, self.stream.close, self._release))


class EventTicketedStream(TicketedStream):
    """A ticketed stream for drivers whose streams cannot write words. Events stand for tickets.

    Each check is an event query, which can invalidate another library's capture, so the thread's
    capture mode is relaxed meanwhile.
    """

    #: The most tickets in flight. Each has its own event, created beforehand.
    DEPTH: ClassVar[int] = 64

    __slots__ = ("_lock", "_pending", "_ring")

    def __init__(self, stream: Stream, event: Event) -> None:
        self._ring: list[Event] = []
        with ExitStack() as undo:
            for _ in range(self.DEPTH):
                self._ring.append(Event(stream.context))
                undo.callback(self._ring[-1].close)
            undo.pop_all()
        self._pending: deque[int] = deque()
        self._lock = threading.Lock()  # because loops of several threads may check
        super().__init__(stream, event, _private_word(0), 0, lambda: None)

    def _bind(self, address: int) -> Callable[[int], None]:  # noqa: ARG002  an event takes no address
        driver, handle = self.stream.context.driver, self.stream.handle

        def write(ticket: int) -> None:
            driver.record_event(self._event_of(ticket).handle, handle)
            self._pending.append(ticket)

        return write

    def mark_here(self, ticket: int) -> None:
        """Write a ticket from the host, because earlier events are done."""
        with self._lock:
            self._pending.clear()
            super().mark_here(ticket)

    def reached(self, ticket: int) -> bool:
        """Say whether the work of a ticket is done; queries the driver if that is unknown."""
        if not (super().reached(ticket) or self.health.is_over):
            with suppress(Exception):  # the poller's check reports the driver's error
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
        return ticket >= next_ticket  # the word is only as new as the last check

    def _event_of(self, ticket: int) -> Event:
        return self._ring[ticket % self.DEPTH]

    def close(self) -> None:
        """Destroy its events and its stream."""
        self._pending.clear()
        run_all((*(event.close for event in self._ring), super().close))


class TicketMemory:
    """Pinned words for tickets, each on its own cache line. For one thread at a time."""

    def __init__(self, primary: StreamContext) -> None:
        self._primary = primary
        #: Whether streams write words; set by `probe_stream_writes`.
        self.stream_writes = True
        #: Why they do not, if the driver offers the call.
        self.refusal: CUDAError | None = None
        self._pages: list[HostMemory] = []
        #: One permanent list, to which streams return their words.
        self._free: list[tuple[memoryview[int], int]] = []

    def _take(self) -> tuple[memoryview[int], int]:
        if not self._free:
            with self._primary.entered():
                page = self._primary.driver.allocate_host(PAGE)
            self._pages.append(page)
            words = page.view.cast("B").cast("I")
            step = LINE // 4
            self._free += [
                (words[i : i + 1], page.device_address + 4 * i) for i in range(0, PAGE // 4, step)
            ]
        return self._free.pop()

    def create_stream(self, context: StreamContext) -> TicketedStream:
        """Create a stream of a context, with the word for its tickets. May block."""
        with ExitStack() as undo:
            stream = Stream(context)
            undo.callback(stream.close)
            event = Event(context)
            undo.callback(event.close)
            ticketed: TicketedStream
            if self.stream_writes:
                word, address = taken = self._take()
                give_back = partial(self._free.append, taken)
                undo.callback(give_back)
                ticketed = TicketedStream(stream, event, word, address, give_back)
            else:
                ticketed = EventTicketedStream(stream, event)
            undo.pop_all()
        return ticketed

    def probe_stream_writes(self, context: StreamContext) -> None:
        """Find out, once, whether a context's streams write words. If not, events are used.

        A driver may offer the call but refuse it (virtual GPUs) or ignore it. Blocks.

        Raises:
            CUDAError: A device fault, or a lack of capacity, which says nothing about the call.
        """
        self.stream_writes = context.driver.supports(Feature.WRITE_VALUE)
        if not self.stream_writes:
            return
        ticketed = self.create_stream(context)
        try:
            ticketed.mark(ticketed.issue())
            ticketed.stream.sync()
            self.stream_writes = ticketed.is_idle
        except CUDAError as error:
            ticketed.close()  # here, so that its errors have the first error as their context
            if isinstance(error, DeviceFault) or error.status in CAPACITY:
                raise
            self.stream_writes, self.refusal = False, error
        else:
            ticketed.close()

    def close(self) -> None:
        """Free all pages, even if freeing one fails. May block."""
        self._free.clear()
        pages, self._pages = self._pages, []
        with self._primary.entered():
            run_all(partial(self._primary.driver.free_host, page) for page in pages)


def _private_word(ticket: int) -> memoryview[int]:
    """Return a word that no stream writes."""
    return memoryview((ctypes.c_uint32 * 1)(ticket & MASK)).cast("B").cast("I")
