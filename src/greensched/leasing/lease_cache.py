"""Leases that ended without work: for who waits for the same, or asks for it next.

Most services ask for the same sizes time and again, and most of the time nobody waits. Such a
lease is not given back to the scheduler: it is *parked*, and the next who asks on the same loop
has it, for a fraction of what a decision costs. To everybody else its SMs are free: whoever asks
the scheduler anything has all that is parked given back first. A class is charged for each lease as
if it had been a decision. What is not the class's own is not parked.

While somebody waits nothing is parked: where all wait for the same, no class has a say, and who is
next is of the same loop, a lease is handed over to him.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from greensched._asynclib import get_ident
from greensched.execution.lease import Lease
from greensched.leasing.requests import LeaseRequest
from greensched.scheduling.requests import Request
from greensched.scheduling.scheduler import Scheduler


class LeaseCache:
    """What is parked: each wish knows what, by thread.

    Args:
        lock: the desk's.
        free: gives back a lease that is over, because nobody would take it from here; under the
            lock. Returns who is granted by that.
        tell: tells them, outside it.
        time: seconds.
    """

    def __init__(
        self,
        lock: Lock,
        free: Callable[[Lease], list[Request]],
        tell: Callable[[list[Request]], None],
        time: Callable[[], float],
    ) -> None:
        self.lock = lock
        self._free = free
        self._tell = tell
        self._time = time
        #: Where something is parked, or was since all was given back last, by thread of its loop.
        self._spots: dict[tuple[LeaseRequest, int], list[Lease]] = {}
        #: Who decides, while the pool is open; None: nothing is parked or handed over.
        self.scheduler: Scheduler | None = None
        #: Who is told of each lease; None: there are no classes to be charged.
        self._charges: Scheduler | None = None
        #: How often one was parked since the scheduler was told last: those that are not there any
        #: more were taken, and it has not counted that.
        self.put = 0
        #: Some of them are held, and it does not know by whom.
        self.is_taken = False

    def start(self, scheduler: Scheduler) -> None:
        """Leases are parked from here on; after each change of the classes. Holds the lock."""
        self.scheduler = scheduler
        self._charges = scheduler if scheduler.allocator.is_classed else None

    def take(self, wish: LeaseRequest) -> Lease | None:
        """A lease of the running loop that was parked; None: there is none.

        Whoever pops a lease has it, without a lock. While it was parked it stayed open and plain,
        unless the pool stopped.
        """
        spot = self._spots.get((wish, get_ident()))
        if not spot:
            return None
        try:
            # All here are of one loop: another on this thread asks the desk, which clears it first.
            taker = spot[-1].poller.loop.current_holder()
            if taker is None:  # nobody's task, or that other loop's
                return None
            lease = spot.pop()
        except IndexError:  # another thread cleared it meanwhile
            return None
        lease.pending_holder = taker
        self.is_taken = True
        charges = self._charges
        if charges is not None:
            with self.lock:
                charges.unpause(self._time(), lease.grant)
        return lease

    def park(self, wish: LeaseRequest, lease: Lease) -> bool:
        """Parks a lease that its holder has left, or ends it; False: it has more to see to."""
        if not lease.is_unused():
            return False
        if lease.bound_launches:
            lease.close_bound_launches()
            lease.launch_stream.release_kept()  # of what was bound: it is done
        granted: list[Request] = []
        with self.lock:
            scheduler, charges, grant = self.scheduler, self._charges, lease.grant
            lease.pending_holder = None  # a task that is kept is not collected
            if scheduler is not None and scheduler.waiting:
                granted = self._hand_over(lease, scheduler)
            elif scheduler is not None:
                spot = self._spots.get((wish, lease.thread))
                # Not what nobody else asks for, nor on trio, where to ask is a turn anyway.
                if spot is None and wish.is_reused and not lease.poller.loop.always_yields:
                    spot = self._spots[wish, lease.thread] = []
                if spot is not None and (charges is None or charges.pause(self._time(), grant)):
                    if grant.holder is not None:
                        scheduler.pass_on(grant, None)
                    self.put += 1
                    spot.append(lease)
                    return True
            if not granted:
                lease.close_now()
                granted = self._free(lease)
        self._tell(granted)
        return True

    def _hand_over(self, lease: Lease, scheduler: Scheduler) -> list[Request]:
        """Gives a lease to who is next, if he waits for just that on the same loop.

        Returns him. Whoever calls holds the lock.
        """
        first = scheduler.next_for(lease.grant)
        if first is None:
            return []
        if first.owner is not lease.poller:
            return []
        first.answer = lease
        scheduler.hand_over(self._time(), lease.grant, first)
        return [first]

    def clear(self) -> tuple[list[Lease], int]:
        """All that is parked: it is over, and to be given back. Whoever calls holds the lock.

        And how often one was taken, of which the scheduler is to be told now.
        """
        self.is_taken = False  # first: who is taken from here on is told the next time
        found = []
        for spot in self._spots.values():
            while spot:  # somebody may take one meanwhile
                try:
                    found.append(spot.pop())
                except IndexError:
                    break
        self._spots.clear()  # wishes end, with their classes
        for lease in found:
            lease.close_now()
        taken, self.put = self.put - len(found), 0
        return found, taken
