"""Large copies through two chunks of pinned memory, on an executor's thread.

While the device moves one chunk the host fills or empties the other. A copy takes two chunks from
its device's `StagingPool`, and returns them at its end. A copy to another device through host
memory also takes a stream of that device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from greensched._cleanup import run_all
from greensched.context import Context
from greensched.device.allocators import allocate_pinned
from greensched.device.staging_ring import Bytes, pieces
from greensched.device.streams import Event, Stream
from greensched.device.tickets import TicketedStream
from greensched.driver.types import HostMemory
from greensched.typing import T

#: Bytes of a chunk. 4 MiB take 70 us over PCIe 5.0, far more than a copy's fixed cost.
CHUNK = 4 << 20
#: Bytes after which a copy between device memories reports its progress: 64 MiB take 30 us inside
#: an H200, 150 us between two of them.
PART = 64 << 20

Array = npt.NDArray[Any]
#: Called with the number of moved bytes. An exception ends the copy.
Moved = Callable[[int], object]
#: (offset, bytes).
Part = tuple[int, int]


class DoubleBuffer:
    """Two chunks of pinned memory, for one copy at a time."""

    def __init__(self, primary: Context) -> None:
        self._driver = primary.driver
        self.memory: list[HostMemory] = []
        try:
            for _ in range(2):
                self.memory.append(allocate_pinned(self._driver, CHUNK))
        except BaseException:
            self.close()
            raise
        self._bytes: list[Bytes] = [np.frombuffer(memory.view, np.uint8) for memory in self.memory]

    def place(self, which: int, like: Array) -> Array:
        """Return the beginning of a chunk as an array of the shape and dtype of another."""
        return self._bytes[which][: like.nbytes].view(like.dtype).reshape(like.shape)

    def close(self) -> None:
        """Free the memory. May block."""
        run_all(partial(self._driver.free_host, memory) for memory in self.memory)


class PeerStream:
    """A stream of a device for copies from another device, with an event for each chunk."""

    def __init__(self, primary: Context) -> None:
        self.primary = primary
        with ExitStack() as undo:
            self.stream = Stream(primary)
            undo.callback(self.stream.close)
            first = Event(primary)
            undo.callback(first.close)
            self.events = first, Event(primary)
            undo.pop_all()

    def close(self) -> None:
        """Destroy the events and the stream. May block."""
        run_all((*(event.close for event in self.events), self.stream.close))


class StagingPool:
    """Lends chunks and streams to the large copies of one device. Thread-safe; creating blocks."""

    def __init__(self, primary: Context) -> None:
        self._primary = primary
        self._buffers: list[DoubleBuffer] = []
        self._peers: list[PeerStream] = []
        self._made: list[DoubleBuffer | PeerStream] = []
        self._lock = threading.Lock()

    def prepare(self, copies: int) -> None:
        """Create the chunks for this many simultaneous large copies."""
        buffers = [self.take() for _ in range(copies)]
        self._buffers += buffers

    def take(self) -> DoubleBuffer:
        """Return two free chunks."""
        return self._take(self._buffers, DoubleBuffer)

    def put(self, buffer: DoubleBuffer) -> None:
        """Take back two chunks that the device no longer uses."""
        self._buffers.append(buffer)

    @contextmanager
    def peer_stream(self) -> Iterator[PeerStream]:
        """Lend a stream of this device for a copy from another device.

        It is returned when its work is done; never if a driver error leaves that unknown.
        """
        peer = self._take(self._peers, PeerStream)
        try:
            yield peer
        finally:
            peer.stream.sync()
            self._peers.append(peer)

    def _take(self, free: list[Any], make: Callable[[Context], T]) -> T:
        with self._lock:
            if free:
                item: T = free.pop()
                return item
        with self._primary.entered():
            made = make(self._primary)
        self._made.append(made)  # type: ignore[arg-type]  # T is one of the two kinds
        return made

    def close(self) -> None:
        """Free all memory and streams. The device must be idle. May block."""
        made, self._made = self._made, []
        self._buffers, self._peers = [], []
        with self._primary.entered():
            run_all(resource.close for resource in made)


class ChunkedCopier:
    """Large copies on one stream, one at a time, on one thread at a time.

    Every method blocks, needs the primary context current, and returns when all bytes are moved.
    An exception of `moved`, or of the host's copy, ends the copy between two chunks.

    Args:
        stream: The stream for the copies.
        events: Two events of the stream's context.
        staging: The pool of chunks.
    """

    def __init__(
        self, stream: TicketedStream, events: tuple[Event, Event], staging: StagingPool
    ) -> None:
        self._stream = stream.stream
        self._event = stream.event
        self._driver = stream.stream.context.driver
        self._events = events
        self._staging = staging

    def upload(self, array: Array, address: int, moved: Moved) -> None:
        """Copy an array to device memory."""

        def begin(which: int, item: tuple[int, Array]) -> Event:
            offset, piece = item
            np.copyto(pair.place(which, piece), piece, casting="no")
            host = pair.memory[which].address
            self._driver.copy_to_device(address + offset, host, piece.nbytes, self._stream.handle)
            return self._record(which)

        with self._lent() as pair:
            _by_twos(pieces(array, CHUNK), begin, lambda _, item: moved(item[1].nbytes))

    def download(self, address: int, out: Array, moved: Moved) -> None:
        """Copy device memory into an array."""

        def begin(which: int, item: tuple[int, Array]) -> Event:
            offset, piece = item
            host = pair.memory[which].address
            self._driver.copy_to_host(host, address + offset, piece.nbytes, self._stream.handle)
            return self._record(which)

        def end(which: int, item: tuple[int, Array]) -> None:
            np.copyto(item[1], pair.place(which, item[1]), casting="no")
            moved(item[1].nbytes)

        with self._lent() as pair:
            _by_twos(pieces(out, CHUNK), begin, end)

    def in_parts(self, copy: Callable[[int, int], None], nbytes: int, moved: Moved) -> None:
        """Call `copy(offset, nbytes)` for each part, to submit a copy of device memory."""

        def begin(which: int, part: Part) -> Event:
            copy(*part)
            return self._record(which)

        _by_twos(_parts(nbytes, PART), begin, lambda _, part: moved(part[1]))

    def copy_from_peer(
        self, far: StagingPool, source: int, target: int, nbytes: int, moved: Moved
    ) -> None:
        """Copy another device's memory to this device's, through the chunks."""
        driver = self._driver

        def begin(which: int, part: Part) -> Event:
            offset, size = part
            host = pair.memory[which].address
            with peer.primary.entered():
                driver.copy_to_host(host, source + offset, size, peer.stream.handle)
            self._stream.wait(peer.stream.record(peer.events[which]))
            driver.copy_to_device(target + offset, host, size, self._stream.handle)
            return self._record(which)

        with self._lent() as pair, far.peer_stream() as peer:
            peer.stream.wait(self._stream.record(self._event))
            _by_twos(_parts(nbytes, CHUNK), begin, lambda _, part: moved(part[1]))

    def copy_to_peer(
        self, far: StagingPool, source: int, target: int, nbytes: int, moved: Moved
    ) -> None:
        """Copy this device's memory to another device's, through the chunks."""
        driver = self._driver

        def begin(which: int, part: Part) -> Event:
            offset, size = part
            host = pair.memory[which].address
            driver.copy_to_host(host, source + offset, size, self._stream.handle)
            peer.stream.wait(self._record(which))
            with peer.primary.entered():
                driver.copy_to_device(target + offset, host, size, peer.stream.handle)
            return peer.stream.record(peer.events[which])

        with self._lent() as pair, far.peer_stream() as peer:
            _by_twos(_parts(nbytes, CHUNK), begin, lambda _, part: moved(part[1]))

    def close(self) -> None:
        """Destroy the events."""
        run_all(event.close for event in self._events)

    def _record(self, which: int) -> Event:
        return self._stream.record(self._events[which])

    @contextmanager
    def _lent(self) -> Iterator[DoubleBuffer]:
        """Lend two chunks until the device no longer uses them; for ever if that is unknown."""
        pair = self._staging.take()
        try:
            yield pair
        except BaseException:
            self._stream.sync()  # not an event, because recording may be what failed
            self._staging.put(pair)
            raise
        self._staging.put(pair)


def _by_twos(
    items: Iterable[T], begin: Callable[[int, T], Event], end: Callable[[int, T], object]
) -> None:
    """Alternate between the two chunks; end each item once the event of its chunk is done."""
    under_way: deque[tuple[Event, int, T]] = deque()

    def end_first() -> None:
        event, which, item = under_way.popleft()
        event.sync()
        end(which, item)

    for turn, item in enumerate(items):
        if len(under_way) == 2:
            end_first()
        under_way.append((begin(turn % 2, item), turn % 2, item))
    while under_way:
        end_first()


def _parts(nbytes: int, limit: int) -> Iterator[Part]:
    for offset in range(0, nbytes, limit):
        yield offset, min(limit, nbytes - offset)
