"""Leases that ended without work, kept for a moment for who asks for the same again.

Most services ask for the same sizes time and again, and most of the time nobody waits. Such a
lease is not given back to the scheduler: it is *parked*, and the next who asks on the same loop
has it, for a tenth of what a decision costs. To everybody else its SMs are free: whoever asks the
scheduler anything has all that is parked given back first. Nothing is parked while somebody
waits, or where classes have rules.
"""

from __future__ import annotations

from asyncio import _get_running_loop
from threading import Lock, get_ident
from typing import Any

from greensched.channel import Channel
from greensched.holding import Holding
from greensched.planning.scheduler import Scheduler
from greensched.stream import MASK
from greensched.wishes import Wish


class Parking:
    """What is parked, by loop and by what was asked for.

    Args:
        lock: the desk's.
    """

    def __init__(self, lock: Lock) -> None:
        self.lock = lock
        self._parked: dict[Any, dict[Wish, list[Channel]]] = {}
        #: Who decides, while the pool is open and has no classes; None: nothing is parked.
        self.scheduler: Scheduler | None = None
        #: How often one was parked since the last `clear`: those that are not there any more were
        #: taken, and the scheduler has not counted that.
        self.put = 0
        #: Those that were taken and are held, and by whom: the scheduler has not been told.
        self.untold: dict[Holding, object] = {}

    def take(self, wish: Wish) -> Channel | None:
        """A lease of the running loop that was parked, open again; None: there is none.

        It takes no lock: whoever pops a channel has it.
        """
        mine = self._parked.get(_get_running_loop())
        try:
            channel = mine[wish].pop()  # type: ignore[index]  # None, or nothing parked: see below
        except (TypeError, LookupError):
            return None
        holding = channel.holding
        holding.is_open = holding.is_plain = True
        holding.is_over = False
        if self.scheduler is None:  # the pool stopped just now: each submission looks at that
            holding.is_plain = False
        self.untold[holding] = holding.completion.door.asks()
        return channel

    def park(self, wish: Wish, channel: Channel) -> bool:
        """Parks a lease that its holder has left; False: it must be ended."""
        holding, track = channel.holding, channel.track
        issued = track.issued
        if not (  # of what it did nothing is left: it could as well go on
            wish.is_shared
            and holding.is_plain
            and not holding.is_involved
            and not holding.failed
            and issued & MASK == track.word[0]
            and issued == track.submitted
            and not track.kept
            and holding.thread == get_ident()
        ):
            return False
        loop = _get_running_loop()
        if loop is None:  # trio: to ask is a turn of the loop anyway
            return False
        with self.lock:
            scheduler = self.scheduler
            if scheduler is None or scheduler.waiting:
                return False
            self.untold.pop(holding, None)
            if holding.lease.holder is not None:  # a task that is kept is not collected
                scheduler.pass_on(holding.lease, None)
            holding.is_open = holding.is_plain = False
            holding.is_over = True
            self.put += 1
            try:
                self._parked[loop][wish].append(channel)
            except KeyError:
                self._parked.setdefault(loop, {}).setdefault(wish, []).append(channel)
        return True

    def clear(self) -> list[Channel]:
        """All that is parked: it is to be given back now. Whoever calls holds the lock."""
        if not self._parked:
            return []
        found = []
        for wishes in self._parked.values():
            for channels in wishes.values():
                while channels:  # somebody may take one meanwhile
                    try:
                        found.append(channels.pop())
                    except IndexError:
                        break
        self._parked.clear()
        return found
