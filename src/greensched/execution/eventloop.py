"""Event loops: one adapter for each running loop of asyncio (or uvloop) or trio.

anyio is not used for waiting, because its primitives yield a whole turn of the loop even if there
is nothing to wait for.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from asyncio import _get_running_loop
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, Protocol

from greensched._asynclib import get_ident, running_asyncio, running_trio
from greensched.errors import NoLoop

#: A task that requests leases on behalf of another task, and that other task. Tasks that the former
#: starts are not affected.
holder_override: Final[ContextVar[tuple[object, object] | None]] = ContextVar(
    "greensched_holder", default=None
)

#: An object that one task awaits until its loop's adapter wakes it.
Waiter = Awaitable[None]


class Timer(Protocol):
    """Calls a function on the loop's thread at the time that was scheduled last."""

    def schedule(self, delay: float) -> None:
        """Make the next call after `delay` seconds; 0 means in the loop's next turn.

        Replaces an earlier schedule. Only on the loop's thread.
        """


class LoopAdapter(ABC):
    """The interface to one running loop."""

    def __init__(self, *, always_yields: bool, current_task: Callable[[], object]) -> None:
        #: Whether an await that need not wait is still a checkpoint, as trio requires.
        self.always_yields = always_yields
        #: Returns the running task.
        self.current_task = current_task
        self._ident = get_ident()

    def is_current(self) -> bool:
        """Say whether this is the running loop's adapter, if that is known without cost."""
        return False

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether the loop runs on this thread."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the loop is closed. From any thread."""

    @abstractmethod
    def create_waiter(self) -> Waiter:
        """Return an object for one task to await."""

    def create_inline_waiter(self) -> Waiter:
        """Make a waiter for `resume`."""
        return self.create_waiter()

    @abstractmethod
    def is_waiting(self, waiter: Any) -> bool:
        """Say whether a waiter is neither woken nor cancelled. On the loop's thread."""

    @abstractmethod
    def wake(self, waiter: Any) -> bool:
        """Wake the task that awaits, or will await, a waiter. Repeatable. On the loop's thread.

        Return False if the loop is closed.
        """

    @property
    def is_debugged(self) -> bool:
        """Whether the loop's debug mode is on, in which no task is resumed inline.

        Debug mode reports a slow turn by the name of its task.
        """
        return False

    def resume(self, waiter: Any) -> None:
        """Wake the task of an inline waiter, and run it now if the loop allows. Repeatable.

        Only for calls that the loop itself makes, so that no task is running.

        Raises:
            KeyboardInterrupt, SystemExit: The task raised it, and the loop must end.
        """
        self.wake(waiter)

    def wake_threadsafe(self, waiter: Any) -> bool:
        """Wake a task from any thread. Return False if the loop is closed."""
        if get_ident() == self._ident:
            return self.wake(waiter)
        return self.call_threadsafe(functools.partial(self.wake, waiter))

    @abstractmethod
    def create_timer(self, callback: Callable[[], None]) -> Timer:
        """Return a timer, which is not scheduled yet."""

    @abstractmethod
    def call_threadsafe(self, function: Callable[[], object]) -> bool:
        """Call a function on the loop's thread; return False if the loop is closed."""

    def current_holder(self) -> object:
        """Return the task that holds new leases: the running task or its override."""
        override = holder_override.get()
        if override is None:
            return self.current_task()
        return override[1] if override[0] is self.current_task() else self.current_task()

    def checkpoint(self) -> Awaitable[None]:
        """Yield a turn of the loop, and let a cancellation arrive.

        Only if `always_yields`: on asyncio an await that need not wait does not yield.
        """
        raise AssertionError(self)


# -- asyncio, and uvloop ---------------------------------------------------------------------------


class AsyncioAdapter(LoopAdapter):
    """A loop of asyncio, or of uvloop."""

    def __init__(self, loop: Any) -> None:
        current = functools.partial(asyncio.current_task, loop)
        super().__init__(always_yields=False, current_task=current)
        self._loop = loop
        self._create_future = loop.create_future
        method = getattr(loop.create_future, "__func__", None)
        if method is asyncio.BaseEventLoop.create_future:
            self._create_future = functools.partial(asyncio.Future, loop=loop)  # as the loop does

    @property
    def is_running(self) -> bool:
        return _get_running_loop() is self._loop

    @property
    def is_closed(self) -> bool:
        closed: bool = self._loop.is_closed()
        return closed

    def is_current(self) -> bool:
        return self.is_running and get_ident() == self._ident

    def create_waiter(self) -> Waiter:
        waiter: Waiter = self._create_future()
        return waiter

    def create_inline_waiter(self) -> Waiter:
        return InlineFuture(self._loop)

    def is_waiting(self, waiter: Any) -> bool:
        return not waiter.done()

    @property
    def is_debugged(self) -> bool:
        debugged: bool = self._loop.get_debug()
        return debugged

    def resume(self, waiter: Any) -> None:
        inline: InlineFuture = waiter
        if not inline.done():
            inline.resume()

    def wake(self, waiter: Any) -> bool:
        if waiter.done():
            return not self.is_closed
        try:
            waiter.set_result(None)
        except RuntimeError:  # closed; catching this costs half as much as asking first
            if self.is_closed:
                return False
            raise
        return True

    def create_timer(self, callback: Callable[[], None]) -> Timer:
        return _HandleTimer(self._loop, callback)

    def call_threadsafe(self, function: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # closed, perhaps just now
            return False
        return True


class _HandleTimer:
    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.Handle | None = None

    def schedule(self, delay: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if delay <= 0:
            self._handle = self._loop.call_soon(self._callback)
        else:
            self._handle = self._loop.call_later(delay, self._callback)


class InlineFuture:
    """A future whose task `resume` can run at once. For one task and one wake.

    asyncio's own future calls its task only in the loop's next turn. This class saves that turn:
    `p.run` takes 0.62 of the time of `asyncio.to_thread` with it, 0.80 without (`make bench`). It
    implements what `asyncio.isfuture` and a task require of a future.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_callback",
        "_context",
        "_is_cancelled",
        "_is_done",
        "_loop",
        "_message",
    )

    def __init__(self, loop: Any) -> None:
        #: asyncio's protocol: set when this future is yielded to the task, which clears it.
        self._asyncio_future_blocking = True
        self._loop = loop
        self._is_done = False
        self._is_cancelled = False
        self._message: object = None
        #: The task's callback and its context.
        self._callback: Callable[[Any], object] | None = None
        self._context: Context | None = None

    def __await__(self) -> Generator[Any, Any, None]:
        return iter((self,))  # type: ignore[return-value]  # all that a `yield from` needs

    def get_loop(self) -> Any:
        return self._loop

    def add_done_callback(
        self, callback: Callable[[Any], object], *, context: Context | None = None
    ) -> None:
        self._callback = callback
        self._context = copy_context() if context is None else context
        if self._is_done:
            self.set_result(None)

    def done(self) -> bool:
        return self._is_done

    def result(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError(*(() if self._message is None else (self._message,)))

    def set_result(self, _: None) -> None:
        """Run the task in the loop's next turn.

        Raises:
            RuntimeError: The loop is closed.
        """
        callback, context = self._finish()
        if callback is not None:
            self._loop.call_soon(callback, self, context=context)

    def cancel(self, msg: object = None) -> bool:
        """Cancel the task's await, in the loop's next turn; return False if it is done."""
        if self._is_done:
            return False
        self._is_cancelled, self._message = True, msg
        self.set_result(None)
        return True

    def resume(self) -> None:
        """Run the task now."""
        callback, context = self._finish()
        if callback is not None and context is not None:
            context.run(callback, self)

    def _finish(self) -> tuple[Callable[[Any], object] | None, Context | None]:
        """Mark the future done, and drop the callback, which refers to the task."""
        entry = self._callback, self._context
        self._is_done, self._callback, self._context = True, None, None
        return entry


# -- trio ------------------------------------------------------------------------------------------


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
    def is_running(self) -> bool:
        return (trio := running_trio()) is not None and (
            trio.lowlevel.current_trio_token() is self._token
        )

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
    """One task's wait for a wake, on the loop's thread. May be woken repeatedly."""

    __slots__ = ("_task", "_trio", "is_done")

    def __init__(self, trio: Any) -> None:
        self._trio = trio
        self._task: Any = None
        #: Whether the task was woken or cancelled.
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
    """A system task that sleeps until its next call, and ends with the object that it calls.

    Otherwise the task would live as long as the run, and keep every closed pool of the run alive.

    Args:
        callback: A method. Its object is not kept alive.
    """

    def __init__(self, trio: Any, callback: Callable[[], None]) -> None:
        self._trio = trio
        self._token = trio.lowlevel.current_trio_token()
        self._callback = weakref.WeakMethod(callback, self._collected)
        self._due: float | None = None
        self._changed = trio.Event()
        trio.lowlevel.spawn_system_task(self._run, name="greensched timer")

    def schedule(self, delay: float) -> None:
        self._due = self._trio.current_time() + max(0.0, delay)
        self._changed.set()

    def _collected(self, _: object) -> None:
        """Wake the task so that it ends. From any thread, where garbage collection runs."""
        with suppress(self._trio.RunFinishedError):
            self._token.run_sync_soon(self.schedule, 0.0)

    async def _run(self) -> None:
        trio = self._trio
        while True:
            with trio.CancelScope(deadline=float("inf") if self._due is None else self._due):
                await self._changed.wait()
            self._changed = trio.Event()
            if self._due is not None and self._due <= trio.current_time():
                self._due = None
                await trio.lowlevel.checkpoint()
                callback = self._callback()
                if callback is None:
                    return
                callback()
                del callback  # otherwise its object would live while this task sleeps


async def notify_on_exit(trio: Any, callback: Callable[[], None]) -> None:
    """Call a function when the run ends. As a system task it outlives the main task."""
    try:
        await trio.sleep_forever()
    finally:
        callback()


# -- the running loop ------------------------------------------------------------------------------


#: For each thread: the `latest` loop with its adapter, and the `adapters` of all its open loops.
_local: Final[Any] = threading.local()


def current_adapter() -> LoopAdapter:
    """Return the adapter of the loop that runs on this thread.

    Raises:
        NoLoop: No loop is running on this thread.
    """
    key: Any = _get_running_loop()
    trio = None
    if key is None:
        trio = running_trio()
        if trio is None:
            raise NoLoop
        key = trio.lowlevel.current_trio_token()
    latest: tuple[Any, LoopAdapter] | None = getattr(_local, "latest", None)
    if latest is None or latest[0] is not key:
        adapters: dict[Any, LoopAdapter] = getattr(_local, "adapters", {})
        _local.adapters = {k: adapter for k, adapter in adapters.items() if not adapter.is_closed}
        if key not in _local.adapters:
            _local.adapters[key] = AsyncioAdapter(key) if trio is None else TrioAdapter(trio)
        latest = _local.latest = key, _local.adapters[key]
    return latest[1]


def current_trio() -> Any:
    """Return the `trio` module if trio runs on this thread, else None."""
    return running_trio() if "trio" in sys.modules and running_asyncio() is None else None
