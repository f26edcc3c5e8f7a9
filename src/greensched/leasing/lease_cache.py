"""Leases that ended without work, kept for the next request for the same.

Most services ask for the same sizes of the same classes again and again, and mostly no request is
queued. A lease that ended then is cached: the next task of its loop that asks for the same gets it
without a decision (`make bench` has rows with and without one). To the scheduler its grant is
*suspended*: its cells are free, and are reclaimed before any decision that they could change. Each
lease is counted, and its class charged, as if it had been decided on.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from greensched._asynclib import get_ident
from greensched.execution.lease import Lease
from greensched.leasing.requests import LeaseRequest
from greensched.scheduling.scheduler import Scheduler


class LeaseCache:
    """The cached leases of a pool, by request and by the thread of their loop.

    Args:
        lock: the manager's.
        scheduler: is told of each lease that enters or leaves.
        time: returns the seconds that the scheduler counts with.
    """

    def __init__(self, lock: Lock, scheduler: Scheduler, time: Callable[[], float]) -> None:
        self._lock = lock
        self._scheduler = scheduler
        self._time = time
        self._idle: dict[tuple[LeaseRequest, int], list[Lease]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def take(self, request: LeaseRequest) -> Lease | None:
        """Take a lease that the running loop left for this request; None if there is none."""
        idle = self._idle.get((request, get_ident()))
        if not idle:
            return None
        with self._lock:
            if not idle:  # reclaimed meanwhile
                return None
            holder = idle[-1].poller.loop.current_holder()
            if holder is None:  # these are of another loop, which ran on this thread before
                return None
            lease = idle.pop()
            self._scheduler.resume(self._time(), lease.grant, holder)
        return lease

    def put_locked(self, request: LeaseRequest, lease: Lease) -> bool:
        """Keep an open lease without work, unless it is to end: False."""
        # On trio, asking is a checkpoint anyway, which costs more than a decision.
        if not request.is_reused or lease.poller.loop.always_yields:
            return False
        if not self._scheduler.suspend(self._time(), lease.grant):
            return False
        self._idle.setdefault((request, lease.thread), []).append(lease)
        return True

    def clear_locked(self) -> list[Lease]:
        """Remove and return all leases: the scheduler has reclaimed their cells."""
        leases = [lease for idle in self._idle.values() for lease in idle]
        for idle in self._idle.values():
            idle.clear()  # `take` may be about to look at it
        self._idle.clear()
        return leases
