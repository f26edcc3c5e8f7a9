"""What the library needs of an event loop: waking tasks, a timer, and calls from other threads."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final, Protocol

from greensched._asynclib import get_ident

#: A task that requests leases for another task, and that other task. Tasks that it starts request
#: them for themselves.
holder_override: Final[ContextVar[tuple[object, object] | None]] = ContextVar(
    "greensched_holder", default=None
)

#: What one task awaits until its loop's adapter wakes it.
Waiter = Awaitable[None]


class Timer(Protocol):
    """Calls a function on the loop's thread, at the time last asked for."""

    def schedule(self, delay: float) -> None:
        """Make the next call after `delay` seconds; 0: in the loop's next turn.

        Replaces an earlier schedule. On the loop's thread only.
        """


class LoopAdapter(ABC):
    """One running loop."""

    def __init__(self, *, always_yields: bool, current_task: Callable[[], object]) -> None:
        #: Whether an await that need not wait is a checkpoint all the same: trio's rule.
        self.always_yields = always_yields
        #: Returns the running task.
        self.current_task = current_task
        self._ident = get_ident()

    def is_current(self) -> bool:
        """Whether this is the running loop's adapter, if that can be said at once."""
        return False

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the loop is closed. From any thread."""

    @abstractmethod
    def create_waiter(self) -> Waiter:
        """Make something for one task to await."""

    def create_inline_waiter(self) -> Waiter:
        """Make a waiter for `resume`."""
        return self.create_waiter()

    @abstractmethod
    def is_waiting(self, waiter: Any) -> bool:
        """Whether a waiter was neither woken nor cancelled. On the loop's thread."""

    @abstractmethod
    def wake(self, waiter: Any) -> bool:
        """Wake the task that awaits it, or will. On the loop's thread, any number of times.

        Return False if the loop is closed.
        """

    @property
    def is_debugged(self) -> bool:
        """Whether the loop's debug mode is on: then no task is resumed inline.

        That mode reports a slow turn by the name of its task.
        """
        return False

    def resume(self, waiter: Any) -> None:
        """Wake the task of an inline waiter, and run it now where the loop allows that.

        Only from a call that the loop itself made, so that no task is running. Any number of times.

        Raises:
            KeyboardInterrupt, SystemExit: the task raised it, and the loop is to end.
        """
        self.wake(waiter)

    def wake_threadsafe(self, waiter: Any) -> bool:
        """Wake from any thread."""
        if get_ident() == self._ident:
            return self.wake(waiter)
        return self.call_threadsafe(functools.partial(self.wake, waiter))

    @abstractmethod
    def create_timer(self, callback: Callable[[], None]) -> Timer:
        """Make a timer, which calls nothing until it is scheduled."""

    @abstractmethod
    def call_threadsafe(self, function: Callable[[], object]) -> bool:
        """Call a function on the loop's thread; return False if the loop is closed."""

    def current_holder(self) -> object:
        """Return the task that holds what is granted now: the running task or its override."""
        override = holder_override.get()
        if override is None:
            return self.current_task()
        return override[1] if override[0] is self.current_task() else self.current_task()

    def checkpoint(self) -> Awaitable[None]:
        """Yield a turn of the loop, and be where a cancellation arrives.

        Only where `always_yields`: on asyncio an await that need not wait does not yield.
        """
        raise AssertionError(self)
