"""Streams and events of a context.

A `Stream` or `Event` keeps its context alive, so an existing handle is valid. A stream or event
that is never closed warns, and is destroyed with its context; no destructor calls CUDA.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, TypeVar

from greensched._validation import Uncopyable
from greensched.device.health import DeviceHealth
from greensched.device.resources import DeviceResources
from greensched.driver.interface import Driver
from greensched.driver.types import ContextHandle, EventHandle, GreenHandle, StreamHandle
from greensched.errors import Closed, CUDAError, InvalidRequest, WrongContext
from greensched.kernels.loader import Loader
from greensched.typing import DeviceFacts, SupportsCudaStream

#: A priority is a signed 32-bit number. Source: cuda.h, cuStreamCreateWithPriority.
PRIORITIES = 2**31
#: The default stream of the calling thread. Source: cuda.h, CU_STREAM_PER_THREAD.
PER_THREAD = 2
#: Source: cuda.h, CUDA_ERROR_INVALID_HANDLE.
INVALID_HANDLE = 400

C = TypeVar("C", "Event", "Stream")


class StreamContext(Protocol):
    """What streams and events need from their `Context`."""

    driver: Driver
    handle: ContextHandle
    green: GreenHandle | None
    facts: DeviceFacts
    loader: Loader
    health: DeviceHealth
    events: set[EventHandle]
    order_before: dict[int, Callable[[int], None]]
    is_closed: bool
    is_abandoned: bool

    @property
    def kind(self) -> str: ...

    @property
    def device_id(self) -> int: ...

    @property
    def primary(self) -> StreamContext: ...

    @property
    def resources(self) -> DeviceResources: ...

    def entered(self) -> AbstractContextManager[None]: ...

    def open_stream(self, priority: int) -> StreamHandle: ...

    def close_stream(self, handle: StreamHandle) -> None: ...


class Event(Uncopyable):
    """A point in a stream's work. Made by `Context.create_event` or `Stream.record`."""

    __slots__ = ("context", "handle", "is_closed")

    def __init__(
        self,
        context: StreamContext,
        *,
        timing: bool = False,
        blocking: bool = True,
        made_in: StreamContext | None = None,
    ) -> None:
        self.is_closed = True  # until there is a handle, because `__del__` runs in any case
        #: The context, which the event keeps alive, and with which it ends.
        self.context = context
        with (context if made_in is None else made_in).entered():
            self.handle = context.driver.create_event(timing=timing, blocking=blocking)
            context.events.add(self.handle)
        self.is_closed = False

    @property
    def is_done(self) -> bool:
        """Whether the recorded work is done; True before any record. Does not block."""
        return self.context.driver.query_event(_open(self, "event").handle)

    def sync(self) -> None:
        """Block until the recorded work is done. Not for an event-loop thread."""
        self.context.driver.synchronize_event(_open(self, "event").handle)

    def elapsed_since(self, start: Event) -> float:
        """Return the seconds of device time since `start`. Both need `timing`, and must be done.

        Resolution is about 0.5 us (driver API, cuEventElapsedTime).
        """
        return self.context.driver.elapsed(
            _open(start, "event").handle, _open(self, "event").handle
        )

    def close(self) -> None:
        """Destroy the event, whether or not its work is done. Idempotent; does not block."""
        if not self.is_closed:
            self.is_closed = True
            if self.context.is_closed:  # the context has destroyed the handle
                return
            self.context.events.discard(self.handle)
            self.context.driver.destroy_event(self.handle)

    def __del__(self) -> None:
        if not self.is_closed:
            _warn_unclosed(self)

    def __repr__(self) -> str:
        return f"<Event {'closed' if self.is_closed else f'of {self.context!r}'}>"


class Stream(Uncopyable):
    """A non-blocking stream of a context. Its work runs in order, on the context's SMs.

    Made by `Context.create_stream` or `Device.create_stream`. For any thread.
    """

    __slots__ = ("context", "handle", "is_closed", "recorded")

    def __init__(self, context: StreamContext, *, priority: object = 0) -> None:
        self.is_closed = True
        #: During our own capture: the arrays that kernels use, and whether they write them.
        self.recorded: list[tuple[Any, bool]] | None = None
        if type(priority) is not int or not -PRIORITIES <= priority < PRIORITIES:
            raise InvalidRequest(
                f"priority={priority!r}: give an int, such as 0, or -1, which is more urgent"
            )
        #: The context, which the stream keeps alive.
        self.context = context
        self.handle = context.open_stream(priority)
        self.is_closed = False

    def check(self) -> None:
        """Raise Closed if the stream or its context is closed."""
        _open(self, "stream")

    @property
    def address(self) -> int:
        """The raw `CUstream`, as a number."""
        return self.context.driver.stream_address(self.handle)

    @property
    def resources(self) -> DeviceResources:
        """The context's resources: `sm` and `workqueue`."""
        return _open(self, "stream").context.resources

    def record(self, event: Event | None = None) -> Event:
        """Record the work submitted so far in an event, a new one by default.

        Raises:
            WrongContext: One of the two belongs to an own context, and the other does not.
            WrongThread: This driver needs a new event to be created in the stream's own green
                context, which is current on another thread. Create the event earlier.
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
        """Record a new event, created in the primary context, or else in the stream's own.

        The primary context may be current on any number of threads. An H200 accepts such an event
        (driver 580, probe.json). Other drivers are said to need an event and a stream of one
        context, and to return CUDA_ERROR_INVALID_HANDLE otherwise.
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
        """Order later work on this stream after an event's work; the host does not wait.

        Raises:
            WrongContext: One of the two belongs to an own context, and the other to a green one.
        """
        driver = _open(self, "stream").context.driver
        _open(event, "event")
        if _apart(self, event) and "green" in (self.context.kind, event.context.kind):
            raise WrongContext(event, self)
        driver.wait_event(self.handle, event.handle)

    def follow(self, other: SupportsCudaStream | int) -> None:
        """Order later work on this stream after everything submitted to another stream so far.

        The host does not wait. The other stream may belong to any library.

        Args:
            other: An object with `__cuda_stream__`, or a raw `CUstream`. Of the current context, 1
                is the legacy default stream and 2 the thread's own.

        Raises:
            InvalidRequest: Not a stream; a capturing one; or one of another library's green
                context, if this driver needs an event that is created there.
        """
        primary, address = _open(self, "stream").context.primary, address_of(other)
        if address == self.address:
            return
        order_before = primary.order_before.get(address)
        if order_before is not None:
            order_before(self.address)
            return
        driver = primary.driver
        with any_current(primary):
            handle = driver.foreign_stream(address)
            if address > PER_THREAD and driver.is_capturing(handle):
                raise InvalidRequest(f"{other!r} is capturing: end the capture first")
            event = driver.create_event()
            try:
                driver.record_event(event, handle)
                driver.wait_event(self.handle, event)
            except CUDAError as error:
                if error.status != INVALID_HANDLE:
                    raise
                raise InvalidRequest(
                    f"{other!r} cannot be waited for: this driver needs an event of that stream's "
                    "context. Pass the array by DLPack, or wait for its producer first"
                ) from error
            finally:
                driver.destroy_event(event)

    @property
    def is_done(self) -> bool:
        """Whether all work of the stream is done. Does not block."""
        return _open(self, "stream").context.driver.query_stream(self.handle)

    def sync(self) -> None:
        """Block until all work of the stream is done. Not for an event-loop thread."""
        _open(self, "stream").context.driver.synchronize_stream(self.handle)

    def close(self) -> None:
        """Destroy the stream; its work continues. Idempotent. May block: not for event loops.

        In a partition's context the driver's stream stays, as libraries may remember its address.
        """
        if not self.is_closed:
            self.is_closed = True
            if self.context.is_closed:  # the context has destroyed the handle
                return
            self.context.close_stream(self.handle)

    def __cuda_stream__(self) -> tuple[Literal[0], int]:
        """Return the stream for the protocol of cuda.core, torch, CuPy and numba."""
        return 0, self.context.driver.stream_address(_open(self, "stream").handle)

    def __del__(self) -> None:
        if not self.is_closed:
            _warn_unclosed(self)

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"of {self.context!r}"
        return f"<Stream {state}>"


def address_of(stream: object) -> int:
    """Return the raw `CUstream` of a stream of any library, as a number.

    Raises:
        InvalidRequest: Not a stream; or 0, which is ambiguous between the default streams.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    address: object = stream
    if protocol is not None:
        try:
            version, address = protocol() if callable(protocol) else protocol
        except (TypeError, ValueError):
            version = address = None
        if version != 0:
            raise InvalidRequest(
                f"__cuda_stream__ of {stream!r} has version {version!r}: only version 0 is known"
            )
    if type(address) is not int or address <= 0:
        raise InvalidRequest(
            f"{stream!r} is not a stream: give an object with __cuda_stream__, or its number"
        )
    return address


def any_current(primary: StreamContext) -> AbstractContextManager[object]:
    """Return a block with any context current, on which default streams depend."""
    return nullcontext() if primary.driver.current() is not None else primary.entered()


def _open(child: C, kind: str) -> C:
    if child.is_closed:
        raise Closed(f"this {kind}")
    if child.context.is_closed:
        raise Closed(repr(child), "dead: its context is gone")
    return child


def _apart(stream: Stream, event: Event) -> bool:
    """Say whether one belongs to an own context (`Context.create`), with its own address space."""
    return "own" in (stream.context.kind, event.context.kind)


def _warn_unclosed(child: Event | Stream) -> None:
    if not child.context.is_closed and not child.context.is_abandoned:
        warnings.warn(
            f"{child!r} was never closed; it is ended with its context",
            ResourceWarning,
            stacklevel=3,
            source=child,
        )
