"""Waiting, on the loop's own means: asyncio's futures, trio's rescheduling. Nothing else waits.

A `Door` stands for one running loop. Three things go through it: a task waits (`Waiter`), a
function is called again and again at times of its own choosing (`Ticker`), and another thread
has something done on the loop's thread (`call_threadsafe`). The last is the only way in for
other threads, and it is refused, not lost, once the loop is closed.

asyncio covers uvloop. anyio is not used here: its primitives yield a whole turn of the loop where
nothing has to be waited for, and its events cost two and a half times a future
(docs/completion.md).
"""

from __future__ import annotations

import abc
import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from typing import Any, Generic

from greensched.errors import NoLoop
from greensched.running import running_trio
from greensched.typing import T

#: A task that asks for a thread, and that thread. Tasks started by it ask for themselves.
asker: ContextVar[tuple[object, object] | None] = ContextVar("greensched asker", default=None)


class Waiter(abc.ABC):
    """One task waiting for one wake. `wake` is called on the loop's thread, any number of times."""

    __slots__ = ()

    @abc.abstractmethod
    def wake(self) -> None: ...

    @abc.abstractmethod
    def __await__(self) -> Generator[Any, None, None]: ...


class Ticker(abc.ABC):
    """Calls a function on the loop's thread, when it was last asked to."""

    @abc.abstractmethod
    def again(self, delay: float) -> None:
        """Makes the next call after so many seconds (0: in the loop's next turn).

        Replaces an earlier appointment. On the loop's thread only.
        """


class Door(abc.ABC):
    """One running loop."""

    #: Whether an await that need not wait is a checkpoint all the same: trio's rule.
    always_yields: bool
    #: The running task.
    current_task: Callable[[], object]

    @property
    @abc.abstractmethod
    def is_closed(self) -> bool:
        """Whether the loop is over. May be asked from any thread."""

    @abc.abstractmethod
    def create_waiter(self) -> Waiter: ...

    @abc.abstractmethod
    def create_ticker(self, step: Callable[[], None]) -> Ticker: ...

    @abc.abstractmethod
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


class _FutureWaiter(Waiter):
    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future = loop.create_future()

    def wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def __await__(self) -> Generator[Any, None, None]:
        return self._future.__await__()


class _HandleTicker(Ticker):
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


class AsyncioDoor(Door):
    """A loop of asyncio, or uvloop's."""

    always_yields = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.current_task = functools.partial(asyncio.current_task, loop)

    @property
    def is_closed(self) -> bool:
        return self.loop.is_closed()

    def create_waiter(self) -> Waiter:
        return _FutureWaiter(self.loop)

    def create_ticker(self, step: Callable[[], None]) -> Ticker:
        return _HandleTicker(self.loop, step)

    def call_threadsafe(self, function: Callable[[], object]) -> bool:
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:  # closed, perhaps since a moment ago
            return False
        return True


# -- trio -------------------------------------------------------------------------------------


class _TaskWaiter(Waiter):
    __slots__ = ("_task", "_trio", "_woken")

    def __init__(self, trio: Any) -> None:
        self._trio = trio
        self._task: Any = None
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        if self._task is not None:
            task, self._task = self._task, None
            self._trio.lowlevel.reschedule(task)

    def __await__(self) -> Generator[Any, None, None]:
        lowlevel = self._trio.lowlevel
        if self._woken:
            yield from lowlevel.checkpoint().__await__()
            return

        def abort(_: object) -> Any:
            self._task = None
            return lowlevel.Abort.SUCCEEDED

        self._task = lowlevel.current_task()
        yield from lowlevel.wait_task_rescheduled(abort).__await__()


class _TaskTicker(Ticker):
    """A system task that sleeps until its next appointment."""

    def __init__(self, trio: Any, step: Callable[[], None]) -> None:
        self._trio = trio
        self._step = step
        self._due: float | None = None
        self._changed = trio.Event()
        trio.lowlevel.spawn_system_task(self._run, name="greensched ticker")

    def again(self, delay: float) -> None:
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


class TrioDoor(Door):
    """A run of trio."""

    always_yields = True

    def __init__(self, trio: Any) -> None:
        self._trio = trio
        self.current_task = trio.lowlevel.current_task
        self.token = trio.lowlevel.current_trio_token()
        self._over = False
        trio.lowlevel.spawn_system_task(self._last, name="greensched door")

    async def _last(self) -> None:
        """System tasks outlive the main task: when this one ends, the run is over."""
        try:
            await self._trio.sleep_forever()
        finally:
            self._over = True

    @property
    def is_closed(self) -> bool:
        return self._over

    def create_waiter(self) -> Waiter:
        return _TaskWaiter(self._trio)

    def create_ticker(self, step: Callable[[], None]) -> Ticker:
        return _TaskTicker(self._trio, step)

    def call_threadsafe(self, function: Callable[[], object]) -> bool:
        try:
            self.token.run_sync_soon(function)
        except self._trio.RunFinishedError:
            return False
        return True

    def checkpoint(self) -> Awaitable[None]:
        return self._trio.lowlevel.checkpoint()  # type: ignore[no-any-return]  # trio is optional


# -- what a thread of ours does for a task ----------------------------------------------------


class Errand(Generic[T]):
    """Something done once by a thread, awaited by any number of tasks of any loop.

    A cancelled awaiter leaves it as it is: it is done all the same.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._lock = threading.Lock()
        self._waiting: list[tuple[Door, Waiter]] = []
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
        for door, waiter in waiting:
            door.call_threadsafe(waiter.wake)

    async def wait(self) -> T:
        """Its result, or what it raised."""
        door = current_door()
        waiter = door.create_waiter()
        with self._lock:
            if not self._is_done:
                self._waiting.append((door, waiter))
            else:
                waiter.wake()
        await waiter
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]  # T


# -- the running one --------------------------------------------------------------------------


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.key: object = None
        self.door: Door | None = None
        #: Of every loop this thread has run that is not closed.
        self.doors: dict[object, Door] = {}


_mine = _PerThread()


def current_door() -> Door:
    """The door of the loop running on this thread.

    Raises:
        NoLoop: there is none.
    """
    key: Any = asyncio._get_running_loop()
    trio = None
    if key is None:
        trio = running_trio()
        if trio is None:
            raise NoLoop
        key = trio.lowlevel.current_trio_token()
    if _mine.key is not key:
        _mine.doors = {k: door for k, door in _mine.doors.items() if not door.is_closed}
        if key not in _mine.doors:
            _mine.doors[key] = AsyncioDoor(key) if trio is None else TrioDoor(trio)
        _mine.door, _mine.key = _mine.doors[key], key
    assert _mine.door is not None
    return _mine.door
