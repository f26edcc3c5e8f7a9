"""Work that a thread does once, and that tasks of any loop can wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic

from greensched.execution.eventloop import LoopAdapter, Waiter, current_adapter
from greensched.typing import T


class BackgroundTask(Generic[T]):
    """A function that a thread calls once, awaited by any number of tasks of any loop.

    A cancelled await does not affect it: the function is still called.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._lock = threading.Lock()
        self._waiters: list[tuple[LoopAdapter, Waiter]] = []
        self._is_done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call the function on the calling thread, and wake the waiting tasks."""
        function, self._function = self._function, None  # it may refer to this object
        assert function is not None
        try:
            self._value = function()
        except BaseException as error:
            self._error = error
        del function
        self.end_waits()

    def end_waits(self) -> None:
        """Wake the waiting tasks. If the function has not returned yet, their result is None."""
        with self._lock:
            self._is_done = True
            waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            loop.wake_threadsafe(waiter)

    async def wait(self) -> T:
        """Return the function's result, or raise its exception."""
        loop = current_adapter()
        waiter = loop.create_waiter()
        with self._lock:
            if not self._is_done:
                self._waiters.append((loop, waiter))
            else:
                loop.wake(waiter)
        await waiter
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]  # what the task returned, of type T
