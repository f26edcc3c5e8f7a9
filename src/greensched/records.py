"""Records: one stream of small frozen objects that describe events in a pool; see `Pool.watch`.

Times are seconds of the driver's clock, monotonic or virtual. Requests and leases are numbered.
A refused request keeps no number: the next request reuses it. A lease that gives way
at a checkpoint, or is idle, ends here; its next grant has a new request and a new lease.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context
from dataclasses import dataclass, field, fields
from typing import Any

logger = logging.getLogger("greensched")


@dataclass(frozen=True, slots=True)
class Record:
    """An event in a pool, at a time in seconds."""

    time: float

    def as_dict(self) -> dict[str, Any]:
        """Return the record's name and its fields, as values for `json.dumps`."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.repr}
        return {"record": type(self).__name__, **values}


@dataclass(frozen=True, slots=True)
class Requested(Record):
    """A request was made. `sizes` are as the caller gave them, `context` is the caller's."""

    request: int
    service: str
    sizes: tuple[str, ...]
    holder: str
    context: Context = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Queued(Record):
    """A request does not fit now and joined the queue, which has `waiting` requests."""

    request: int
    service: str
    waiting: int


@dataclass(frozen=True, slots=True)
class Granted(Record):
    """A request was granted a lease, after `wait` seconds; one record for each of its parts.

    Attributes:
        device: The device's ordinal.
        cells: The granted cells, as a bit mask.
        sms: The number of granted SMs.
    """

    request: int
    lease: int
    service: str
    device: int
    cells: int
    sms: int
    wait: float
    holder: str


@dataclass(frozen=True, slots=True)
class Resized(Record):
    """A checkpoint changed the cells of a lease."""

    lease: int
    service: str
    device: int
    cells: int
    sms: int


@dataclass(frozen=True, slots=True)
class Lent(Record):
    """A lease borrowed SMs from the reserve of another class, the `owner`."""

    lease: int
    service: str
    device: int
    owner: str
    sms: int


@dataclass(frozen=True, slots=True)
class Reclaimed(Record):
    """A lease returned SMs that it had borrowed from the `owner`."""

    lease: int
    service: str
    device: int
    owner: str
    sms: int


@dataclass(frozen=True, slots=True)
class Submitted(Record):
    """A job was submitted in a lease; `stream` is `"launch"`, `"call"` or `"copy"`."""

    lease: int
    job: int
    name: str
    stream: str
    context: Context = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Done(Record):
    """The device has done a job, as seen by the event loop.

    Attributes:
        started: When the host had submitted the job and had seen the end of earlier work on its
            stream. The device may have begun it earlier, if the host saw that late, or later, if
            the job waited for another stream.
        error: The name of the error that the job failed with, or "".
    """

    lease: int
    job: int
    name: str
    stream: str
    started: float
    error: str


@dataclass(frozen=True, slots=True)
class Released(Record):
    """The block of a lease was left. Its SMs are not free until its work is done."""

    lease: int
    service: str


@dataclass(frozen=True, slots=True)
class Drained(Record):
    """All work of a lease is done and its SMs are free. `sm_seconds` is what the lease used."""

    lease: int
    service: str
    sm_seconds: float


@dataclass(frozen=True, slots=True)
class Refused(Record):
    """A request was refused; `error` is the error's name."""

    request: int
    service: str
    error: str


@dataclass(frozen=True, slots=True)
class Expired(Record):
    """A request was still queued at its deadline."""

    request: int
    service: str


@dataclass(frozen=True, slots=True)
class Cancelled(Record):
    """A request was cancelled before its task resumed, or its pool ended."""

    request: int
    service: str


@dataclass(frozen=True, slots=True)
class Lost(Record):
    """A device failed, which ends the pool."""

    device: int | None
    error: str


Watcher = Callable[[Record], object]


class Recorder:
    """Delivers the records of one pool to its watchers.

    `add` may be called under the pool's lock, but `flush`, which calls the watchers, must not. Only
    one thread at a time delivers, so that all watchers see the same order.
    """

    def __init__(self) -> None:
        #: Whether there are watchers. Code that could add a record tests this first.
        self.watched = False
        #: Whether a watchdog needs jobs' names, and whether jobs are noted, for it or for watchers.
        self._names_jobs = self.notes_jobs = False
        self._watchers: tuple[Watcher, ...] = ()
        self._pending = deque[tuple[tuple[Watcher, ...], Record]]()
        self._delivering = threading.Lock()
        self._failed: set[Watcher] = set()
        #: Returns the next number for a job or a lease.
        self.next_number = itertools.count(1).__next__

    def add(self, record: Record) -> None:
        """Note a record for the present watchers. The caller then calls `flush`."""
        self._pending.append((self._watchers, record))

    def emit(self, record: Record) -> None:
        """Note a record and deliver it. Not for use under a lock."""
        self.add(record)
        self.flush()

    def flush(self) -> None:
        """Deliver noted records, unless another call is doing so. Not for use under a lock."""
        while self._pending and self._delivering.acquire(blocking=False):
            try:
                while self._pending:
                    watchers, record = self._pending.popleft()
                    for watcher in watchers:
                        self._tell(watcher, record)
            finally:
                self._delivering.release()

    def _tell(self, watcher: Watcher, record: Record) -> None:
        try:
            watcher(record)
        except Exception:
            if watcher not in self._failed:  # otherwise every record would log a line
                self._failed.add(watcher)
                logger.exception("%r failed on %r; this is logged once", watcher, record)

    def start(self, watcher: Watcher, held: Iterable[Record]) -> None:
        """Add a watcher, and note for it alone the leases that exist. Then call `flush`."""
        self._pending.extend(((watcher,), record) for record in held)
        self._watchers += (watcher,)
        self.watched = self.notes_jobs = True

    def stop(self, watcher: Watcher) -> bool:
        """Remove a watcher; return whether it was the last."""
        left = list(self._watchers)
        if watcher in left:
            left.remove(watcher)
        self._watchers = tuple(left)
        self._failed.discard(watcher)
        self.watched = bool(left)
        self.notes_jobs = self.watched or self._names_jobs
        return not left

    def set_names_jobs(self, names_jobs: bool) -> None:
        """Set whether jobs are noted even without a watcher."""
        self._names_jobs = names_jobs
        self.notes_jobs = self.watched or names_jobs

    def forked(self) -> None:
        """Forget all watchers, in a forked child."""
        self.__init__()  # type: ignore[misc]  # a thread of the parent may hold the old lock


def holder_name(holder: object) -> str:
    """Return the name of a task or thread, or "" for None."""
    if holder is None:
        return ""
    get_name = getattr(holder, "get_name", None)  # of asyncio's tasks
    return str(get_name() if get_name is not None else getattr(holder, "name", holder))
