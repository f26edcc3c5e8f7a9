"""Large copies: in chunks of pinned memory, two of them, by a thread of ours.

While the device moves one chunk the host fills or empties the other. What a copy needs is lent to
it by its device's `StagingPool` and comes back with its end, so there is never more of it than
copies
were under way at once: two chunks; and of the other device, for a copy that goes there through
host memory, a stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from greensched._cleanup import run_all
from greensched.device.allocators import allocate_pinned
from greensched.device.staging_ring import Bytes, pieces
from greensched.device.streams import Event, Stream, StreamOwner, TicketedStream
from greensched.driver.types import HostMemory, StreamHandle

#: A chunk of a large copy. 4 MiB take 70 us over PCIe 5.0, far above the cost of a copy.
CHUNK = 4 << 20
#: A part of a copy that somebody wants to hear of while it goes from device memory to device
#: memory: 64 MiB take 30 us inside an H200, 150 us between two of them.
PART = 64 << 20

Array = npt.NDArray[Any]
#: Told of bytes that were moved; what it raises ends the copy.
Moved = Callable[[int], object]
#: (where it begins, bytes).
Part = tuple[int, int]
T = TypeVar("T")


class DoubleBuffer:
    """Two chunks of pinned memory, for one copy at a time."""

    def __init__(self, primary: StreamOwner) -> None:
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
        """The beginning of a chunk, as an array of the same shape and dtype."""
        return self._bytes[which][: like.nbytes].view(like.dtype).reshape(like.shape)

    def close(self) -> None:
        """Ends the memory. May block."""
        run_all(partial(self._driver.free_host, memory) for memory in self.memory)


class PeerStream:
    """A stream of a device's primary context for what others copy there, an event a chunk."""

    def __init__(self, primary: StreamOwner) -> None:
        self.primary = primary
        with ExitStack() as undo:
            self.stream = Stream(primary)
            undo.callback(self.stream.close)
            first = Event(primary)
            undo.callback(first.close)
            self.events = first, Event(primary)
            undo.pop_all()

    def close(self) -> None:
        """Ends them. May block."""
        run_all((*(event.close for event in self.events), self.stream.close))


class StagingPool:
    """What large copies of one device are lent. Thread-safe. Making some blocks."""

    def __init__(self, primary: StreamOwner) -> None:
        self._primary = primary
        self._pairs: list[DoubleBuffer] = []
        self._ends: list[PeerStream] = []
        self._made: list[DoubleBuffer | PeerStream] = []
        self._lock = threading.Lock()

    def prepare(self, copies: int) -> None:
        """Makes the chunks for so many large copies at once."""
        pairs = [self.take() for _ in range(copies)]
        self._pairs += pairs

    def take(self) -> DoubleBuffer:
        """Two chunks nobody uses."""
        return self._one(self._pairs, DoubleBuffer)

    def put(self, pair: DoubleBuffer) -> None:
        """The device has let go of them."""
        self._pairs.append(pair)

    @contextmanager
    def far_end(self) -> Iterator[PeerStream]:
        """A stream of this device, for a copy that a stream of another one makes.

        It comes back when its work is done; where that cannot be said it does not.
        """
        end = self._one(self._ends, PeerStream)
        try:
            yield end
        finally:
            end.stream.sync()
            self._ends.append(end)

    def _one(self, free: list[Any], make: Callable[[StreamOwner], T]) -> T:
        with self._lock:
            if free:
                found: T = free.pop()
                return found
        with self._primary.entered():
            made = make(self._primary)
        self._made.append(made)  # type: ignore[arg-type]  # one of the two
        return made

    def close(self) -> None:
        """Ends all of it; no work may be left. May block."""
        made, self._made = self._made, []
        self._pairs, self._ends = [], []
        with self._primary.entered():
            run_all(one.close for one in made)


class ChunkedCopier:
    """Large copies of one track, one at a time, on one thread at a time.

    Every method blocks, needs the primary context current, and returns when all is moved. What
    `moved` or the host raises ends the copy between two chunks.

    Args:
        track: where the copies go.
        events: two, of the context of its stream.
        staging: lends the chunks.
    """

    def __init__(
        self, track: TicketedStream, events: tuple[Event, Event], staging: StagingPool
    ) -> None:
        self._track = track
        self._driver = track.stream.context.driver
        self._events = events
        self._staging = staging

    def upload(self, array: Array, address: int, moved: Moved) -> None:
        """Copies an array to device memory."""

        def begin(which: int, item: tuple[int, Array]) -> Event:
            offset, piece = item
            np.copyto(pair.place(which, piece), piece, casting="no")
            host = pair.memory[which].address
            self._driver.copy_to_device(address + offset, host, piece.nbytes, self._stream)
            return self._record(which)

        with self._lent() as pair:
            _by_twos(pieces(array, CHUNK), begin, lambda _, item: moved(item[1].nbytes))

    def download(self, address: int, out: Array, moved: Moved) -> None:
        """Copies device memory into an array."""

        def begin(which: int, item: tuple[int, Array]) -> Event:
            offset, piece = item
            host = pair.memory[which].address
            self._driver.copy_to_host(host, address + offset, piece.nbytes, self._stream)
            return self._record(which)

        def end(which: int, item: tuple[int, Array]) -> None:
            np.copyto(item[1], pair.place(which, item[1]), casting="no")
            moved(item[1].nbytes)

        with self._lent() as pair:
            _by_twos(pieces(out, CHUNK), begin, end)

    def in_parts(self, copy: Callable[[int, int], None], nbytes: int, moved: Moved) -> None:
        """Has `copy(offset, nbytes)` submit a copy of device memory, part by part."""

        def begin(which: int, part: Part) -> Event:
            copy(*part)
            return self._record(which)

        _by_twos(_parts(nbytes, PART), begin, lambda _, part: moved(part[1]))

    def fetch(self, far: StagingPool, source: int, target: int, nbytes: int, moved: Moved) -> None:
        """Copies memory of another device to this one's, through the chunks."""
        driver, track = self._driver, self._track

        def begin(which: int, part: Part) -> Event:
            offset, size = part
            host = pair.memory[which].address
            with end.primary.entered():
                driver.copy_to_host(host, source + offset, size, end.stream.handle)
            track.stream.wait(end.stream.record(end.events[which]))
            driver.copy_to_device(target + offset, host, size, self._stream)
            return self._record(which)

        with self._lent() as pair, far.far_end() as end:
            end.stream.wait(track.stream.record(track.event))
            _by_twos(_parts(nbytes, CHUNK), begin, lambda _, part: moved(part[1]))

    def send(self, far: StagingPool, source: int, target: int, nbytes: int, moved: Moved) -> None:
        """Copies this device's memory to another one's, through the chunks."""
        driver = self._driver

        def begin(which: int, part: Part) -> Event:
            offset, size = part
            host = pair.memory[which].address
            driver.copy_to_host(host, source + offset, size, self._stream)
            end.stream.wait(self._record(which))
            with end.primary.entered():
                driver.copy_to_device(target + offset, host, size, end.stream.handle)
            return end.stream.record(end.events[which])

        with self._lent() as pair, far.far_end() as end:
            _by_twos(_parts(nbytes, CHUNK), begin, lambda _, part: moved(part[1]))

    def close(self) -> None:
        """Ends the events."""
        run_all(event.close for event in self._events)

    @property
    def _stream(self) -> StreamHandle:
        return self._track.stream.handle

    def _record(self, which: int) -> Event:
        return self._track.stream.record(self._events[which])

    @contextmanager
    def _lent(self) -> Iterator[DoubleBuffer]:
        """Given back when the device has let go of them; where that cannot be said they are not."""
        pair = self._staging.take()
        try:
            yield pair
        except BaseException:
            self._track.stream.sync()  # not an event, which may be what could not be recorded
            self._staging.put(pair)
            raise
        self._staging.put(pair)


def _by_twos(
    items: Iterable[T], begin: Callable[[int, T], Event], end: Callable[[int, T], object]
) -> None:
    """Two under way at a time: each is begun on one of two chunks, and ended once it is done."""
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
