"""Leases that ended without work, kept for the next equal request.

Most services request the same sizes of the same classes repeatedly, usually with an empty queue. A
lease that ends in this state is cached: the next task of its loop with an equal request gets it
without a decision (`make bench` has rows with and without one). To the scheduler its grant is
*suspended*: its cells are free, and are reclaimed before any decision that they could affect. Each
lease is counted, and its class charged, as if the scheduler had decided on it.
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
        lock: The lock of the pool.
    """

    #: Whether it records where each lease is taken.
    notes_places = False

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        self._idle: dict[object, list[Lease]] = {}
        #: Whether the pool is open; otherwise no lease enters.
        self._is_open = False
        #: The scheduler, which suspends and resumes the grant of each cached lease.
        self._scheduler: Scheduler
        self._time: Callable[[], float]

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def open_locked(self, scheduler: Scheduler, time: Callable[[], float]) -> None:
        """Begin to keep leases. `time` returns the scheduler's time in seconds."""
        self._is_open, self._scheduler, self._time = True, scheduler, time

    def set_open_locked(self, is_open: bool) -> None:
        """Set whether leases are kept. Before False, the scheduler must have reclaimed all."""
        self._is_open = is_open

    def forked(self, lock: RLock) -> None:
        """Forget every lease, in a forked child, without a lock that the parent may have held."""
        self._lock, self._is_open = lock, False
        self.clear_locked()

    def take(self, request: LeaseRequest) -> Lease | None:
        """Take a lease that the running loop cached for an equal request, or return None."""
        idle = self._idle.get((request, get_ident()))
        if not idle:
            return None
        lock = self._lock
        lock.acquire()  # takes half as long as `with`, and a tenth of taking a cached lease
        try:
            if not idle:  # another thread has reclaimed it
                return None
            lease = idle[-1]
            holder = lease.poller.loop.current_holder()
            if holder is None:  # the leases belong to an earlier loop of this thread
                return None
            self._scheduler.resume(self._time(), lease.grant, holder)
            return idle.pop()
        finally:
            lock.release()

    def put(self, lease: Lease) -> bool:
        """Keep an open lease without work. Return False if it must end instead."""
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
        """Remove and return all leases. The scheduler has reclaimed their cells."""
        leases = [lease for idle in self._idle.values() for lease in idle]
        for idle in self._idle.values():
            idle.clear()  # in place, because `take` may be about to read it
        self._idle.clear()
        return leases


class PlacingLeaseCache(LeaseCache):
    """A lease cache that records where each lease is taken; see `holders`."""

    notes_places = True

    def take(self, request: LeaseRequest) -> Lease | None:
        """Take a lease, as `LeaseCache.take` does."""
        lease = super().take(request)
        if lease is not None:
            lease.taken_at = place()
        return lease
