"""Buffers on the device and pinned ones on the host; who wrote them last and who uses them.

A buffer belongs to a device, not to a partition: it outlives leases, and work of any partition
may use it. It knows the last ticket of everybody who uses it, so that work elsewhere is ordered
behind its writer, and its memory is given back behind its last user.

Rules of one device's memory (`DeviceMemory`), all entered by any thread:

1. Memory comes from one stream-ordered pool of ours that never shrinks. Growing it may block, so
   `would_grow` is asked first, and where it would, a thread of ours allocates.
2. What is closed while the device still uses it waits in `_closed` until every ticket is reached;
   it is then freed on a stream of its own, and counts as available when that stream has done so.
3. Destructors only append to a list.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections import deque
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from greensched.driver.base import Driver
from greensched.errors import (
    BufferClosed,
    CUDAError,
    DeviceFault,
    InvalidArray,
    OutOfMemory,
    WrongDevice,
    run_all,
)
from greensched.stream import Event, EventTrack, Stream, Track
from greensched.typing import Feature, HostMemory

if TYPE_CHECKING:
    import numpy.typing as npt

#: A word for each ticket on a cache line of its own: 64 bytes on x86-64 and most of AArch64.
LINE = 64
PAGE = 4096
#: cuMemAllocFromPoolAsync hands out multiples of 512 bytes (seen; the manual says 256 at least).
GRAIN = 512

#: (who, the ticket up to which).
Use = tuple[Track, int]


class Owner(Protocol):
    """What memory needs of its device's primary context."""

    driver: Driver

    @property
    def device_ordinal(self) -> int: ...

    def entered(self) -> Any: ...

    def create_stream(self, *, priority: int = 0) -> Stream: ...

    def create_event(self, *, timing: bool = False, blocking: bool = True) -> Event: ...


class BoundUser(Protocol):
    """What a buffer needs to know of a bound launch, which uses it without a ticket each time."""

    track: Track

    def last_use(self) -> Use: ...

    def use_elsewhere(self, track: Track, ticket: int) -> None: ...

    def look_again(self) -> None: ...


class Buffer:
    """An array in device memory, in C order.

    Made by `Partition.upload`, `empty` and `empty_like`. Usable by any partition of its device,
    in this thread and others, one at a time. `close()` it, or use it in a `with` block; a
    forgotten one warns and is given back all the same.

    Attributes:
        shape, dtype: as in numpy; `size` counts elements, `nbytes` bytes.
        address: in device memory; 0 if it has no bytes.
        device: the ordinal of its device.
    """

    __slots__ = (
        "__weakref__",
        "_bound",
        "_memory",
        "_readers",
        "_writer",
        "address",
        "dtype",
        "is_closed",
        "nbytes",
        "shape",
    )

    def __init__(
        self, memory: DeviceMemory, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._memory = memory
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.is_closed = False
        self._writer: Use | None = None
        self._readers: dict[Track, int] = {}
        self._bound: dict[BoundUser, None] = {}

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def device(self) -> int:
        """The ordinal of its device."""
        return self._memory.device

    # -- who uses it -----------------------------------------------------------------------------

    def before(self, track: Track, *, write: bool) -> list[Use]:
        """Work elsewhere that work on `track` must be ordered behind."""
        uses = self.uses() if write else self._written()
        return [
            (who, ticket) for who, ticket in uses if who is not track and not who.reached(ticket)
        ]

    def note(self, track: Track, ticket: int, *, write: bool) -> None:
        """Work on `track` up to `ticket` uses it, ordered behind what `before` said."""
        if write:
            self._writer = (track, ticket)
            self._readers.clear()
        else:
            self._readers[track] = ticket
        for bound in self._bound:
            bound.use_elsewhere(track, ticket)

    def bind(self, bound: BoundUser) -> None:
        """A bound launch uses it, time and again, until `unbind`."""
        self._bound[bound] = None

    def unbind(self, bound: BoundUser, ticket: int, *, write: bool) -> None:
        """The bound launch is over; its last use has this ticket."""
        if self._bound.pop(bound, self) is None:
            self.note(bound.track, ticket, write=write)

    def _written(self) -> tuple[Use, ...]:
        last = (self._writer,) if self._writer is not None else ()
        return (*last, *(bound.last_use() for bound in self._bound))

    def uses(self) -> tuple[Use, ...]:
        """Everybody who uses it, and up to which ticket."""
        return (*self._readers.items(), *self._written())

    def check(self, device: int) -> None:
        """Refuses a closed buffer, and one of another device.

        Raises:
            BufferClosed: after `close()`, or after its pool was closed.
            WrongDevice: it belongs to another device.
        """
        if self.is_closed or self._memory.is_closed:
            raise BufferClosed("this buffer")
        if device != self._memory.device:
            raise WrongDevice("this buffer", self._memory.device, device)

    # -- its end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives its memory back behind its last user. Idempotent; does not wait."""
        if not self.is_closed:
            self.is_closed = True
            for bound in self._bound:
                bound.look_again()
            if self.address:
                self._memory.give_back(self.address, self.nbytes, self.uses())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.is_closed and not self._memory.is_closed:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)
            self.close()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, for libraries that take device arrays without a copy.

        The stream is that of the last writer while its work is not done: whoever takes the array
        orders itself behind it.
        """
        self.check(self.device)
        pending = self._writer is not None and not self._writer[0].reached(self._writer[1])
        stream = self._writer[0].stream.__cuda_stream__()[1] if self._writer and pending else None
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": stream,
        }

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"device {self.device}"
        return f"<Buffer {self.shape} {self.dtype} ({state})>"


class PinnedBuffer:
    """Host memory that the device reads and writes directly, as a numpy array.

    Made by `Partition.empty_pinned`. Its bytes are shared with the device: nothing orders the
    host's accesses but waiting for jobs.

    Attributes:
        array: the memory, as numpy sees it; not to be used after `close()`.
        address: for the device.
    """

    __slots__ = ("_host", "_memory", "_uses", "address", "array", "is_closed")

    def __init__(
        self, memory: DeviceMemory, host: HostMemory, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._memory = memory
        self._host = host
        self._uses: dict[Track, int] = {}
        self.address = host.device_address
        self.array: npt.NDArray[Any] = np.frombuffer(
            host.view, dtype, count=math.prod(shape)
        ).reshape(shape)
        self.is_closed = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """As of its array."""
        return self.array.dtype

    @property
    def device(self) -> int:
        """The ordinal of its device."""
        return self._memory.device

    def before(self, track: Track, *, write: bool) -> list[Use]:  # noqa: ARG002  as Buffer's
        """Nothing: the host shares it, so no order of work on the device would be the whole one."""
        return []

    def note(self, track: Track, ticket: int, *, write: bool) -> None:  # noqa: ARG002  as Buffer's
        """Work on `track` up to `ticket` uses it."""
        self._uses[track] = ticket

    def bind(self, bound: BoundUser) -> None:
        """A bound launch uses it: it is noted when that is over."""

    def unbind(self, bound: BoundUser, ticket: int, *, write: bool) -> None:
        """The bound launch is over; its last use has this ticket."""
        self.note(bound.track, ticket, write=write)

    def check(self, device: int) -> None:
        """Refuses a closed buffer, and one of another device."""
        if self.is_closed or self._memory.is_closed:
            raise BufferClosed("this pinned buffer")
        if device != self._memory.device:
            raise WrongDevice("this pinned buffer", self._memory.device, device)

    def close(self) -> None:
        """Gives it back behind its last user, when a thread of ours comes by. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self._memory.give_back_host(self._host, tuple(self._uses.items()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.is_closed and not self._memory.is_closed:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"device {self.device}"
        return f"<PinnedBuffer {self.array.shape} {self.array.dtype} ({state})>"


class Words:
    """Pinned words for tickets, each on a cache line of its own. For one thread at a time."""

    def __init__(self, primary: Owner) -> None:
        self._primary = primary
        #: Whether streams write them; `try_writing` finds out.
        self.are_written = True
        self._pages: list[HostMemory] = []
        self._free: list[tuple[memoryview[int], int]] = []

    def _take(self) -> tuple[memoryview[int], int]:
        if not self._free:
            with self._primary.entered():
                page = self._primary.driver.allocate_host(PAGE)
            self._pages.append(page)
            words = page.view.cast("B").cast("I")
            step = LINE // 4
            self._free = [
                (words[i : i + 1], page.device_address + 4 * i) for i in range(0, PAGE // 4, step)
            ]
        return self._free.pop()

    def create_track(self, context: Owner) -> Track:
        """A new stream of a context, and the tickets of its work. May block."""
        with ExitStack() as undo:
            stream = context.create_stream()
            undo.callback(stream.close)
            event = context.create_event()
            undo.callback(event.close)
            track = self._track(stream, event)
            undo.pop_all()
        return track

    def _track(self, stream: Stream, event: Event) -> Track:
        if not self.are_written:
            return EventTrack(stream, event)
        word, address = self._take()
        return Track(stream, event, word, address, lambda: self._free.append((word, address)))

    def try_writing(self, context: Owner) -> None:
        """Finds out, once, whether streams of a context write words; else events stand for them.

        A driver may have the call and refuse it (virtual GPUs), or not do it. Blocks.
        """
        self.are_written = context.driver.supports(Feature.WRITE_VALUE)
        if not self.are_written:
            return
        track = self.create_track(context)
        try:
            track.mark(track.issue())
            track.stream.sync()
            self.are_written = track.is_idle
        except DeviceFault:
            raise
        except CUDAError:
            self.are_written = False
        finally:
            track.close()

    def close(self) -> None:
        """Ends all pages. May block."""
        self._free.clear()
        with self._primary.entered():
            while self._pages:
                self._primary.driver.free_host(self._pages.pop())


class DeviceMemory:
    """One device's memory: a pool of ours, and what waits to be given back to it. May block."""

    def __init__(self, primary: Owner, words: Words) -> None:
        self.device = primary.device_ordinal
        self.is_closed = False
        self._primary = primary
        self._driver = primary.driver
        with ExitStack() as undo:
            self._pool = self._driver.create_memory_pool(self.device)
            undo.callback(self._driver.destroy_memory_pool, self._pool)
            self._janitor = words.create_track(primary)
            undo.pop_all()
        self._lock = threading.Lock()
        self._used = 0
        self._reserved = 0
        self._live: dict[int, int] = {}
        self._closed: deque[tuple[int, int, tuple[Use, ...]]] = deque()
        self._freed: deque[tuple[int, int]] = deque()
        self._closed_host: deque[tuple[HostMemory, tuple[Use, ...]]] = deque()
        self._live_host: dict[int, HostMemory] = {}

    # -- taking ----------------------------------------------------------------------------------

    def would_grow(self, nbytes: int) -> bool:
        """Whether an allocation may block because the pool must grow for it."""
        self.reap()
        return self._used + _rounded(nbytes) > self._reserved

    def allocate(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], track: Track, ticket: int
    ) -> Buffer:
        """A buffer usable by work on `track` from now on, and by others behind `ticket`.

        Raises:
            OutOfMemory: with what was asked, free and there in all; nothing is lost.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        address = self._take(nbytes, track.stream) if nbytes else 0
        buffer = Buffer(self, address, shape, dtype)
        if address:
            buffer.note(track, ticket, write=True)
        return buffer

    def _take(self, nbytes: int, stream: Stream) -> int:
        """The lock is not held while the driver may block: what is asked for counts as used."""
        size = _rounded(nbytes)
        with self._lock:
            if self.is_closed:
                raise BufferClosed("the memory of this device")
            self._used += size
        try:
            with self._primary.entered():
                address = self._allocate(nbytes, stream)
        except BaseException:
            with self._lock:
                self._used -= size
            raise
        with self._lock:
            self._live[address] = nbytes
            if self._used > self._reserved:
                self._reserved = self._driver.reserved_bytes(self._pool)
        return address

    def _allocate(self, nbytes: int, stream: Stream) -> int:
        try:
            return self._driver.allocate(self._pool, nbytes, stream.handle)
        except OutOfMemory as error:
            free, total = self._driver.memory_info()
            unused = max(0, self._reserved - self._used)
            raise OutOfMemory("allocate", nbytes, free + unused, total) from error

    def allocate_host(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> PinnedBuffer:
        """Pinned memory, zeroed. May block."""
        nbytes = max(1, math.prod(shape) * dtype.itemsize)
        with self._primary.entered():
            host = self._driver.allocate_host(nbytes)
        self._live_host[host.address] = host
        return PinnedBuffer(self, host, shape, dtype)

    # -- giving back -----------------------------------------------------------------------------

    def give_back(self, address: int, nbytes: int, uses: tuple[Use, ...]) -> None:
        """Notes what is not wanted any more. Called by destructors: it only appends."""
        self._closed.append((address, nbytes, uses))

    def give_back_host(self, host: HostMemory, uses: tuple[Use, ...]) -> None:
        """The same for pinned memory; `reap_host` ends it."""
        self._closed_host.append((host, uses))

    def reap(self) -> None:
        """Frees what nobody uses any more. Does not block."""
        if not self._closed and not self._freed:
            return
        with self._lock:
            if self.is_closed:
                return
            self._free_unused()
            while self._freed and self._janitor.reached(self._freed[0][0]):
                self._used -= self._freed.popleft()[1]

    def _free_unused(self) -> None:
        ready = []
        for _ in range(len(self._closed)):
            address, nbytes, uses = self._closed.popleft()
            if all(track.reached(ticket) for track, ticket in uses):
                ready.append((address, nbytes))
            else:
                self._closed.append((address, nbytes, uses))
        if not ready:
            return
        with self._primary.entered():
            for address, _ in ready:
                self._driver.free(address, self._janitor.stream.handle)
                del self._live[address]
        ticket = self._janitor.issue()
        self._janitor.mark(ticket)
        self._freed.append((ticket, sum(_rounded(nbytes) for _, nbytes in ready)))

    def reap_host(self) -> None:
        """Ends pinned memory nobody uses any more. May block."""
        for _ in range(len(self._closed_host)):
            host, uses = self._closed_host.popleft()
            if all(track.reached(ticket) for track, ticket in uses):
                del self._live_host[host.address]
                with self._primary.entered():
                    self._driver.free_host(host)
            else:
                self._closed_host.append((host, uses))

    def close(self) -> None:
        """Ends the pool and every buffer of it; no work may be left on the device. May block."""
        with self._lock:
            self.is_closed = True
        run_all(
            (
                self._free_everything,
                self._janitor.stream.sync,
                self._free_hosts,
                self._janitor.close,
                lambda: self._driver.destroy_memory_pool(self._pool),
            )
        )

    def _free_everything(self) -> None:
        janitor = self._janitor.stream.handle
        with self._primary.entered():
            run_all(partial(self._driver.free, address, janitor) for address in self._live)
        self._live.clear()

    def _free_hosts(self) -> None:
        with self._primary.entered():
            run_all(partial(self._driver.free_host, host) for host in self._live_host.values())
        self._live_host.clear()

    @property
    def used_bytes(self) -> int:
        """Bytes in use, or on their way back."""
        return self._used


def dtype_of(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """A dtype that device memory can hold.

    Raises:
        InvalidArray: it holds Python objects, or its bytes are in the other order; says which.
    """
    found = np.dtype(dtype)
    if found.hasobject:
        raise InvalidArray(f"dtype {found} holds Python objects, which have no bytes to move")
    if not found.isnative:
        raise InvalidArray(
            f"dtype {found} is big-endian, and kernels read little-endian: convert it first with "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    return found


def _rounded(nbytes: int) -> int:
    return -(-nbytes // GRAIN) * GRAIN
