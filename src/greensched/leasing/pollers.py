"""One completion poller for each event loop that uses a pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import RLock

from greensched.driver.interface import Driver
from greensched.execution.completion import CompletionPoller
from greensched.execution.eventloop import current_adapter
from greensched.execution.eventloop.base import LoopAdapter


class PollerRegistry:
    """The pollers of a pool, by loop.

    Args:
        driver: the pool's.
        lock: the manager's.
        on_tick: called while requests of a loop are queued; returns the seconds to the next call.
        on_new: called with each new poller: earlier loops may have closed.
    """

    def __init__(
        self,
        driver: Driver,
        lock: RLock,
        on_tick: Callable[[], float],
        on_new: Callable[[CompletionPoller], None],
    ) -> None:
        self._driver = driver
        self._lock = lock
        self._on_tick = on_tick
        self._on_new = on_new
        self._pollers: dict[LoopAdapter, CompletionPoller] = {}
        #: The poller last asked for: mostly it is asked for again.
        self._latest: CompletionPoller | None = None

    def current(self) -> CompletionPoller:
        """Return the poller of the running loop.

        Raises:
            NoLoop: no loop is running on this thread.
        """
        latest = self._latest
        if latest is not None and latest.loop.is_current():
            return latest
        loop = current_adapter()
        poller = self._pollers.get(loop)
        if poller is None:
            poller = CompletionPoller(loop, self._driver, self._on_tick)
            with self._lock:
                self._pollers[loop] = poller
            self._on_new(poller)
        self._latest = poller
        return poller

    def __len__(self) -> int:
        return len(self._pollers)

    @property
    def has_closed(self) -> bool:
        """Whether a loop has closed whose poller is still known. From any thread."""
        return any(loop.is_closed for loop in tuple(self._pollers))

    def call_one(self, function: Callable[[CompletionPoller], object]) -> None:
        """Call a function of a poller on the loop of one that is open, if there is one, soon."""
        for poller in tuple(self._pollers.values()):
            if poller.loop.call_threadsafe(partial(function, poller)):
                return

    def all_locked(self) -> tuple[CompletionPoller, ...]:
        """Return all pollers."""
        return tuple(self._pollers.values())

    def remove_closed_locked(self) -> bool:
        """Forget the pollers of closed loops; return whether there were any.

        Each caller has a poller of its own loop, and keeps it until that closes.
        """
        closed = [loop for loop in self._pollers if loop.is_closed]
        for loop in closed:
            del self._pollers[loop]
        if closed:
            self._latest = None
        return bool(closed)
