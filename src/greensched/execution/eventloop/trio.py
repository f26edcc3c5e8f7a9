"""What awaits on trio, for its door: a task that waits for one wake, and system tasks.

A room of its own, because what awaits is Python in a compiled build, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from greensched.typing import T

if TYPE_CHECKING:
    from greensched.execution.jobs import Job


class TaskWaiter:
    """One task waiting for one wake, on the loop's thread; woken any number of times."""

    __slots__ = ("_task", "_trio", "is_over")

    def __init__(self, trio: Any) -> None:
        self._trio = trio
        self._task: Any = None
        #: He was woken, or cancelled.
        self.is_over = False

    def wake(self) -> None:
        self.is_over = True
        if self._task is not None:
            task, self._task = self._task, None
            self._trio.lowlevel.reschedule(task)

    def __await__(self) -> Generator[Any, None, None]:
        lowlevel = self._trio.lowlevel
        if self.is_over:
            yield from lowlevel.checkpoint().__await__()
            return

        def abort(_: object) -> Any:
            self._task, self.is_over = None, True
            return lowlevel.Abort.SUCCEEDED

        self._task = lowlevel.current_task()
        yield from lowlevel.wait_task_rescheduled(abort).__await__()


def until_done(job: Job[T], trio: Any) -> Generator[Any, Any, T]:
    """Awaits a job: that is a checkpoint, wait or not."""
    waiter = job.next_look()
    if waiter is None:
        yield from trio.lowlevel.checkpoint().__await__()
    while waiter is not None:
        yield from waiter.__await__()
        waiter = job.next_look()
    return job.result()


class TaskTicker:
    """A system task that sleeps until its next appointment."""

    def __init__(self, trio: Any, step: Callable[[], None]) -> None:
        self._trio = trio
        self._step = step
        self._due: float | None = None
        self._changed = trio.Event()
        trio.lowlevel.spawn_system_task(self._run, name="greensched ticker")

    def again(self, delay: float) -> None:
        """See `loops.Ticker`."""
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
                self._step()


async def outlast(trio: Any, over: Callable[[], None]) -> None:
    """System tasks outlive the main task: when this one ends, the run is over."""
    try:
        await trio.sleep_forever()
    finally:
        over()
