"""Records: what happens in a pool, as one stream of small frozen objects; see `Pool.watch`.

Times are in seconds of the driver's clock: monotonic, or virtual. Requests and leases are numbered.
A request that is refused holds no number: the next request has the same one. A lease that gives way
at a checkpoint, or is idle, ends here; it goes on as another request, and another lease.
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
    """Something that happened in a pool, at a time in seconds."""

    time: float

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that `json.dumps` takes, and the name of the record."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.repr}
        return {"record": type(self).__name__, **values}


@dataclass(frozen=True, slots=True)
class Requested(Record):
    """A request was made; `sizes` as the caller wrote them, `context` of the caller."""

    request: int
    service: str
    sizes: tuple[str, ...]
    holder: str
    context: Context = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Queued(Record):
    """A request does not fit now: it is one of `waiting`."""

    request: int
    service: str
    waiting: int


@dataclass(frozen=True, slots=True)
class Granted(Record):
    """A request was granted a lease, after `wait` seconds; one record for each of its parts.

    Attributes:
        device: the ordinal.
        cells: the cells, as a bit mask.
        sms: the SMs.
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
    """A lease has other cells since a checkpoint."""

    lease: int
    service: str
    device: int
    cells: int
    sms: int


@dataclass(frozen=True, slots=True)
class Lent(Record):
    """A lease has borrowed SMs of the reserve of another class, the `owner`."""

    lease: int
    service: str
    device: int
    owner: str
    sms: int


@dataclass(frozen=True, slots=True)
class Reclaimed(Record):
    """A lease has given SMs back that it had borrowed from the `owner`."""

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
    """The device has done a job, as the event loop saw it.

    Attributes:
        started: when the job could begin, at the latest: it was submitted, and the work before it
            on its stream was done.
        error: the name of the error that the job failed with; "": none.
    """

    lease: int
    job: int
    name: str
    stream: str
    started: float
    error: str


@dataclass(frozen=True, slots=True)
class Released(Record):
    """The block of a lease was left; its SMs stay until the work is done."""

    lease: int
    service: str


@dataclass(frozen=True, slots=True)
class Drained(Record):
    """The SMs of a lease are free: all its work is done. `sm_seconds` is what it took."""

    lease: int
    service: str
    sm_seconds: float


@dataclass(frozen=True, slots=True)
class Refused(Record):
    """A request was refused, with an error of this name."""

    request: int
    service: str
    error: str


@dataclass(frozen=True, slots=True)
class Expired(Record):
    """A request was queued longer than its deadline."""

    request: int
    service: str


@dataclass(frozen=True, slots=True)
class Cancelled(Record):
    """A request was cancelled, in the queue or before its task went on; or its pool ended."""

    request: int
    service: str


@dataclass(frozen=True, slots=True)
class Lost(Record):
    """A device has failed, and with it the pool."""

    device: int | None
    error: str


Watcher = Callable[[Record], object]


class Recorder:
    """The records of one pool, on their way to its watchers.

    `add` may be called under the pool's lock; `flush`, which calls the watchers, may not. One
    thread at a time delivers, so that watchers see one order.
    """

    def __init__(self) -> None:
        #: Whether there are watchers: what every place that could add a record tests.
        self.watched = False
        #: Whether a watchdog is to name jobs; and whether jobs are noted, for it or for watchers.
        self._names_jobs = self.notes_jobs = False
        self._watchers: tuple[Watcher, ...] = ()
        self._pending = deque[tuple[tuple[Watcher, ...], Record]]()
        self._delivering = threading.Lock()
        self._failed: set[Watcher] = set()
        #: Makes the numbers of jobs and leases.
        self.next_number = itertools.count(1).__next__

    def add(self, record: Record) -> None:
        """Note a record for the present watchers; `flush` follows."""
        self._pending.append((self._watchers, record))

    def emit(self, record: Record) -> None:
        """Note a record and deliver it. Not under a lock."""
        self.add(record)
        self.flush()

    def flush(self) -> None:
        """Deliver what was noted, unless another call does so right now. Not under a lock."""
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
            if watcher not in self._failed:  # else a line for each record
                self._failed.add(watcher)
                logger.exception("%r failed on %r; this is logged once", watcher, record)

    def start(self, watcher: Watcher, held: Iterable[Record]) -> None:
        """Add a watcher, and note for it alone what it has missed; `flush` follows."""
        self._pending.extend(((watcher,), record) for record in held)
        self._watchers += (watcher,)
        self.watched = self.notes_jobs = True

    def stop(self, watcher: Watcher) -> bool:
        """Remove a watcher; return whether none is left."""
        left = list(self._watchers)
        if watcher in left:
            left.remove(watcher)
        self._watchers = tuple(left)
        self._failed.discard(watcher)
        self.watched = bool(left)
        self.notes_jobs = self.watched or self._names_jobs
        return not left

    def set_names_jobs(self, names_jobs: bool) -> None:
        """Have jobs be noted also without a watcher, or not."""
        self._names_jobs = names_jobs
        self.notes_jobs = self.watched or names_jobs

    def forked(self) -> None:
        """Forget all watchers, in a forked child."""
        self.__init__()  # type: ignore[misc]  # a thread of the parent may hold the old lock


def holder_name(holder: object) -> str:
    """Return the name of a task or thread; "" of none."""
    if holder is None:
        return ""
    get_name = getattr(holder, "get_name", None)  # of asyncio's tasks
    return str(get_name() if get_name is not None else getattr(holder, "name", holder))
