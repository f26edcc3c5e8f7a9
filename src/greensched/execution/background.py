"""What a thread of ours does for tasks, and how they wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic

from greensched.execution.eventloop import current_adapter
from greensched.execution.eventloop.base import LoopAdapter, Waiter
from greensched.typing import T


class BackgroundTask(Generic[T]):
    """Something done once by a thread, awaited by any number of tasks of any loop.

    A cancelled awaiter leaves it as it is: it is done all the same.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._lock = threading.Lock()
        self._waiting: list[tuple[LoopAdapter, Waiter]] = []
        self._is_done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def do(self) -> None:
        """Does it, on the calling thread, and wakes whoever waits."""
        function, self._function = self._function, None  # it may hold whoever holds this
        assert function is not None
        try:
            self._value = function()
        except BaseException as error:
            self._error = error
        del function
        with self._lock:
            self._is_done = True
            waiting, self._waiting = self._waiting, []
        for loop, waiter in waiting:
            loop.wake_threadsafe(waiter)

    async def wait(self) -> T:
        """Its result, or what it raised."""
        loop = current_adapter()
        waiter = loop.create_waiter()
        with self._lock:
            if not self._is_done:
                self._waiting.append((loop, waiter))
            else:
                loop.wake(waiter)
        await waiter
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]  # T
