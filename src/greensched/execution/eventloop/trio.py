"""The adapter of a run of trio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any

from greensched.execution.eventloop.base import LoopAdapter, Timer, Waiter


class TrioAdapter(LoopAdapter):
    """A run of trio."""

    def __init__(self, trio: Any) -> None:
        super().__init__(always_yields=True, current_task=trio.lowlevel.current_task)
        self._trio = trio
        self._token = trio.lowlevel.current_trio_token()
        self._is_closed = False
        trio.lowlevel.spawn_system_task(
            notify_on_exit, trio, self._close, name="greensched adapter"
        )

    def _close(self) -> None:
        self._is_closed = True

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def create_waiter(self) -> Waiter:
        return TaskWaiter(self._trio)

    def is_waiting(self, waiter: Any) -> bool:
        return not waiter.is_done

    def wake(self, waiter: Any) -> bool:
        if not self._is_closed:
            waiter.wake()
        return not self._is_closed

    def create_timer(self, callback: Callable[[], None]) -> Timer:
        return _TaskTimer(self._trio, callback)

    def call_threadsafe(self, function: Callable[[], object]) -> bool:
        try:
            self._token.run_sync_soon(function)
        except self._trio.RunFinishedError:
            return False
        return True

    def checkpoint(self) -> Awaitable[None]:
        checkpoint: Awaitable[None] = self._trio.lowlevel.checkpoint()
        return checkpoint


class TaskWaiter:
    """One task waiting for one wake, on the loop's thread; woken any number of times."""

    __slots__ = ("_task", "_trio", "is_done")

    def __init__(self, trio: Any) -> None:
        self._trio = trio
        self._task: Any = None
        #: The task was woken, or cancelled.
        self.is_done = False

    def wake(self) -> None:
        self.is_done = True
        if self._task is not None:
            task, self._task = self._task, None
            self._trio.lowlevel.reschedule(task)

    def __await__(self) -> Generator[Any, None, None]:
        lowlevel = self._trio.lowlevel
        if self.is_done:
            yield from lowlevel.checkpoint().__await__()
            return

        def abort(_: object) -> Any:
            self._task, self.is_done = None, True
            return lowlevel.Abort.SUCCEEDED

        self._task = lowlevel.current_task()
        yield from lowlevel.wait_task_rescheduled(abort).__await__()


class _TaskTimer:
    """A system task that sleeps until its next call."""

    def __init__(self, trio: Any, callback: Callable[[], None]) -> None:
        self._trio = trio
        self._callback = callback
        self._due: float | None = None
        self._changed = trio.Event()
        trio.lowlevel.spawn_system_task(self._run, name="greensched timer")

    def schedule(self, delay: float) -> None:
        self._due = self._trio.current_time() + max(0.0, delay)
        self._changed.set()

    async def _run(self) -> None:
        trio = self._trio
        while True:
            with trio.CancelScope(deadline=float("inf") if self._due is None else self._due):
                await self._changed.wait()
            self._changed = trio.Event()
            if self._due is not None and self._due <= trio.current_time():
                self._due = None
                await trio.lowlevel.checkpoint()
                self._callback()


async def notify_on_exit(trio: Any, callback: Callable[[], None]) -> None:
    """Call a function when the run ends: system tasks outlive the main task."""
    try:
        await trio.sleep_forever()
    finally:
        callback()
