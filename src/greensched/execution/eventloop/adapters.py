"""Waiting, on the loop's own means: asyncio's futures, trio's rescheduling. Nothing else waits.

A `LoopAdapter` stands for one running loop. Three things go through it: a task waits (`Waiter`), a
function is called again and again at times of its own choosing (`Timer`), and another thread
has something done on the loop's thread (`call_threadsafe`). The last is the only way in for
other threads, and it is refused, not lost, once the loop is closed.

Whoever waits for the device is woken by a function that the loop itself calls. There his task can
go on at once (`LoopAdapter.resume`), where a future's would a turn of the loop later
(docs/completion.md).

asyncio covers uvloop. anyio is not used here: its primitives yield a whole turn of the loop where
nothing has to be waited for, and its events cost two and a half times a future
(docs/completion.md).
"""

from __future__ import annotations

import asyncio
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, Protocol

from greensched._asynclib import get_ident, running_trio
from greensched.errors import NoLoop
from greensched.execution.eventloop.trio import TaskTicker, TaskWaiter, outlast

#: A task that asks for a thread, and that thread. Tasks started by it ask for themselves.
asker: Final[ContextVar[tuple[object, object] | None]] = ContextVar(
    "greensched asker", default=None
)

#: What one task awaits until its door wakes it: a future of asyncio, or trio's `TaskWaiter`.
Waiter = Awaitable[None]


class Timer(Protocol):
    """Calls a function on the loop's thread, when it was last asked to."""

    def again(self, delay: float) -> None:
        """Makes the next call after so many seconds (0: in the loop's next turn).

        Replaces an earlier appointment. On the loop's thread only.
        """


class LoopAdapter(ABC):
    """One running loop."""

    def __init__(self, *, always_yields: bool, current_task: Callable[[], object]) -> None:
        #: Whether an await that need not wait is a checkpoint all the same: trio's rule.
        self.always_yields = always_yields
        #: The running task.
        self.current_task = current_task
        self._ident = get_ident()

    def is_current(self) -> bool:
        """Whether this is `current_door()`, if that can be said at once."""
        return False

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the loop is over. May be asked from any thread."""

    @abstractmethod
    def create_waiter(self) -> Waiter:
        """Something for one task to await."""

    def create_resumable(self) -> Waiter:
        """The same for who is to go on at once: see `resume`."""
        return self.create_waiter()

    @abstractmethod
    def is_waiting(self, waiter: Any) -> bool:
        """Whether he was neither woken nor cancelled. On the loop's thread."""

    @abstractmethod
    def wake(self, waiter: Any) -> bool:
        """Wakes who awaits it, or will. On the loop's thread, any number of times.

        False if the loop is over.
        """

    @property
    def is_debugged(self) -> bool:
        """Whether who goes on is to be woken, in a turn of his own: the loop's debug mode is on.

        It tells of a turn that takes long by its task's name.
        """
        return False

    def resume(self, waiter: Any) -> None:
        """Wakes who awaits a resumable, and has his task go on here and now, where that can be.

        Only where the loop itself calls, so that no task is running. Any number of times.

        Raises:
            KeyboardInterrupt, SystemExit: the task raised it, and the loop is to end.
        """
        self.wake(waiter)

    def wake_threadsafe(self, waiter: Any) -> bool:
        """The same from whatever thread."""
        if get_ident() == self._ident:
            return self.wake(waiter)
        return self.call_threadsafe(functools.partial(self.wake, waiter))

    @abstractmethod
    def create_ticker(self, step: Callable[[], None]) -> Timer:
        """Something that calls a function, once it is asked to."""

    @abstractmethod
    def call_threadsafe(self, function: Callable[[], object]) -> bool:
        """Has a function called on the loop's thread; False if the loop is over."""

    def asks(self) -> object:
        """Who holds what is granted now: the running task, or whom it asks for."""
        task, stands = self.current_task(), asker.get()
        return task if stands is None or stands[0] is not task else stands[1]

    def checkpoint(self) -> Awaitable[None]:
        """Yields a turn of the loop, and is where a cancellation arrives.

        Only where `always_yields`: elsewhere nobody yields who need not wait.
        """
        raise AssertionError(self)


# -- asyncio ----------------------------------------------------------------------------------


class _HandleTicker:
    def __init__(self, loop: asyncio.AbstractEventLoop, step: Callable[[], None]) -> None:
        self._loop = loop
        self._step = step
        self._handle: asyncio.Handle | None = None

    def again(self, delay: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if delay <= 0:
            self._handle = self._loop.call_soon(self._step)
        else:
            self._handle = self._loop.call_later(delay, self._step)


class InlineFuture:
    """What a task of asyncio awaits as if it were a future, and which can have it go on at once.

    It is what `asyncio.isfuture` calls one, with all that a task asks of it; a future of asyncio's
    calls its task in the loop's next turn only. For one task and one wake.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_callback",
        "_context",
        "_is_cancelled",
        "_is_over",
        "_loop",
        "_message",
    )

    def __init__(self, loop: Any) -> None:
        #: asyncio's protocol: who awaits it yields it to the task so, which sets it back.
        self._asyncio_future_blocking = True
        self._loop = loop
        self._is_over = False
        self._is_cancelled = False
        self._message: object = None
        #: The task's, and where it is to be called.
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
        if self._is_over:
            self.set_result(None)

    def done(self) -> bool:
        return self._is_over

    def result(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError(*(() if self._message is None else (self._message,)))

    def set_result(self, _: None) -> None:
        """Its task goes on in the loop's next turn.

        Raises:
            RuntimeError: the loop is closed.
        """
        callback, context = self._taken()
        if callback is not None:
            self._loop.call_soon(callback, self, context=context)

    def cancel(self, msg: object = None) -> bool:
        """Its task goes on with a cancellation, in the loop's next turn; False: it was woken."""
        if self._is_over:
            return False
        self._is_cancelled, self._message = True, msg
        self.set_result(None)
        return True

    def resume(self) -> None:
        """Its task goes on here and now."""
        callback, context = self._taken()
        if callback is not None and context is not None:
            context.run(callback, self)

    def _taken(self) -> tuple[Callable[[Any], object] | None, Context | None]:
        """It is over: whom it calls, and where, is not kept."""
        found = self._callback, self._context
        self._is_over, self._callback, self._context = True, None, None
        return found


class AsyncioAdapter(LoopAdapter):
    """A loop of asyncio, or uvloop's."""

    def __init__(self, loop: Any) -> None:
        current = functools.partial(asyncio.current_task, loop)
        super().__init__(always_yields=False, current_task=current)
        self.loop = loop
        self._create_future = loop.create_future
        method = getattr(loop.create_future, "__func__", None)
        if method is asyncio.BaseEventLoop.create_future:
            self._create_future = functools.partial(asyncio.Future, loop=loop)  # as it does

    @property
    def is_closed(self) -> bool:
        closed: bool = self.loop.is_closed()
        return closed

    def is_current(self) -> bool:
        return running_loop() is self.loop and get_ident() == self._ident

    def create_waiter(self) -> Waiter:
        waiter: Waiter = self._create_future()
        return waiter

    def create_resumable(self) -> Waiter:
        return InlineFuture(self.loop)

    def is_waiting(self, waiter: Any) -> bool:
        return not waiter.done()

    @property
    def is_debugged(self) -> bool:
        debugged: bool = self.loop.get_debug()
        return debugged

    def resume(self, waiter: Any) -> None:
        resumable: InlineFuture = waiter
        if not resumable.done():
            resumable.resume()

    def wake(self, waiter: Any) -> bool:
        if waiter.done():
            return not self.is_closed
        try:
            waiter.set_result(None)
        except RuntimeError:  # closed: asked by trying, which is half the price
            if self.is_closed:
                return False
            raise
        return True

    def create_ticker(self, step: Callable[[], None]) -> Timer:
        return _HandleTicker(self.loop, step)

    def call_threadsafe(self, function: Callable[[], object]) -> bool:
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:  # closed, perhaps since a moment ago
            return False
        return True


# -- trio -------------------------------------------------------------------------------------


class TrioAdapter(LoopAdapter):
    """A run of trio."""

    def __init__(self, trio: Any) -> None:
        super().__init__(always_yields=True, current_task=trio.lowlevel.current_task)
        self._trio = trio
        self.token = trio.lowlevel.current_trio_token()
        self._over = False
        trio.lowlevel.spawn_system_task(outlast, trio, self._close, name="greensched door")

    def _close(self) -> None:
        self._over = True

    @property
    def is_closed(self) -> bool:
        return self._over

    def create_waiter(self) -> Waiter:
        return TaskWaiter(self._trio)

    def is_waiting(self, waiter: Any) -> bool:
        return not waiter.is_over

    def wake(self, waiter: Any) -> bool:
        if not self._over:
            waiter.wake()
        return not self._over

    def create_ticker(self, step: Callable[[], None]) -> Timer:
        return TaskTicker(self._trio, step)

    def call_threadsafe(self, function: Callable[[], object]) -> bool:
        try:
            self.token.run_sync_soon(function)
        except self._trio.RunFinishedError:
            return False
        return True

    def checkpoint(self) -> Awaitable[None]:
        yields: Awaitable[None] = self._trio.lowlevel.checkpoint()
        return yields


# -- the running one --------------------------------------------------------------------------

#: Asked for every lease: what is final is, compiled, not looked up.
running_loop: Final = asyncio._get_running_loop

#: What a thread remembers: the loop it `met` last and its door, once there was one, and the `doors`
#: of every loop it has run that is not closed.
_mine: Final[Any] = threading.local()


def current_door() -> LoopAdapter:
    """The door of the loop running on this thread.

    Raises:
        NoLoop: there is none.
    """
    key: Any = running_loop()
    trio = None
    if key is None:
        trio = running_trio()
        if trio is None:
            raise NoLoop
        key = trio.lowlevel.current_trio_token()
    met: tuple[Any, LoopAdapter] | None = getattr(_mine, "met", None)
    if met is None or met[0] is not key:
        doors: dict[Any, LoopAdapter] = getattr(_mine, "doors", {})
        _mine.doors = {k: door for k, door in doors.items() if not door.is_closed}
        if key not in _mine.doors:
            _mine.doors[key] = AsyncioAdapter(key) if trio is None else TrioAdapter(trio)
        met = _mine.met = key, _mine.doors[key]
    return met[1]
