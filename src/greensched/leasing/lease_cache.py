"""Leases that ended without work, kept for the next request for the same.

Most services ask for the same sizes of the same classes again and again, and mostly no request is
queued. A lease that ended then is cached: the next task of its loop that asks for the same gets it
without a decision (`make bench` has rows with and without one). To the scheduler its grant is
*suspended*: its cells are free, and are reclaimed before any decision that they could change. Each
lease is counted, and its class charged, as if it had been decided on.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock

from greensched._asynclib import get_ident
from greensched.execution.lease import Lease
from greensched.leasing.holders import place
from greensched.leasing.requests import LeaseRequest
from greensched.scheduling.scheduler import Scheduler


class LeaseCache:
    """The cached leases of a pool, by request and by the thread of their loop.

    Args:
        lock: the pool's.
    """

    #: Whether it notes where each lease is taken.
    notes_places = False

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        self._idle: dict[object, list[Lease]] = {}
        #: The pool is open, else nothing enters.
        self._is_open = False
        #: Is told of each lease that enters or leaves.
        self._scheduler: Scheduler
        self._time: Callable[[], float]

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def open_locked(self, scheduler: Scheduler, time: Callable[[], float]) -> None:
        """Begin to keep leases. `time` returns the seconds that the scheduler counts with."""
        self._is_open, self._scheduler, self._time = True, scheduler, time

    def set_open_locked(self, is_open: bool) -> None:
        """Keep leases from here on, or none; where none, the scheduler has reclaimed all."""
        self._is_open = is_open

    def forked(self, lock: RLock) -> None:
        """Forget every lease, in a forked child; take no lock that a thread of the parent holds."""
        self._lock, self._is_open = lock, False
        self.clear_locked()

    def take(self, request: LeaseRequest) -> Lease | None:
        """Take a lease that the running loop left for this request; None if there is none."""
        idle = self._idle.get((request, get_ident()))
        if not idle:
            return None
        lock = self._lock
        lock.acquire()  # half the time of `with`, and a tenth of all that a cached lease takes
        try:
            if not idle:  # reclaimed meanwhile
                return None
            lease = idle[-1]
            holder = lease.poller.loop.current_holder()
            if holder is None:  # these are of another loop, which ran on this thread before
                return None
            self._scheduler.resume(self._time(), lease.grant, holder)
            return idle.pop()
        finally:
            lock.release()

    def put(self, lease: Lease) -> bool:
        """Keep an open lease without work, unless it is to end: False."""
        key = lease.cache_key
        if key is None:
            return False
        lock = self._lock
        lock.acquire()  # as in `take`
        try:
            if not (self._is_open and self._scheduler.suspend(self._time(), lease.grant)):
                return False
            self._idle.setdefault(key, []).append(lease)
            return True
        finally:
            lock.release()

    def clear_locked(self) -> list[Lease]:
        """Remove and return all leases: the scheduler has reclaimed their cells."""
        leases = [lease for idle in self._idle.values() for lease in idle]
        for idle in self._idle.values():
            idle.clear()  # `take` may be about to look at it
        self._idle.clear()
        return leases


class PlacingLeaseCache(LeaseCache):
    """A lease cache that notes where each lease is taken; see `holders`."""

    notes_places = True

    def take(self, request: LeaseRequest) -> Lease | None:
        """Take a lease, as `LeaseCache.take`."""
        lease = super().take(request)
        if lease is not None:
            lease.taken_at = place()
        return lease
