"""The adapter of asyncio's loops and uvloop's."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Generator
from contextvars import Context, copy_context
from typing import Any

from greensched._asynclib import get_ident
from greensched.execution.eventloop.base import LoopAdapter, Timer, Waiter


class AsyncioAdapter(LoopAdapter):
    """A loop of asyncio, or of uvloop."""

    def __init__(self, loop: Any) -> None:
        current = functools.partial(asyncio.current_task, loop)
        super().__init__(always_yields=False, current_task=current)
        self._loop = loop
        self._create_future = loop.create_future
        method = getattr(loop.create_future, "__func__", None)
        if method is asyncio.BaseEventLoop.create_future:
            self._create_future = functools.partial(asyncio.Future, loop=loop)  # as it does

    @property
    def is_closed(self) -> bool:
        closed: bool = self._loop.is_closed()
        return closed

    def is_current(self) -> bool:
        return asyncio._get_running_loop() is self._loop and get_ident() == self._ident

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
        except RuntimeError:  # closed: trying costs half as much as asking
            if self.is_closed:
                return False
            raise
        return True

    def create_timer(self, callback: Callable[[], None]) -> Timer:
        return _HandleTimer(self._loop, callback)

    def call_threadsafe(self, function: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # closed, perhaps since a moment ago
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
    """A future whose task can be run at once, by `resume`, for one task and one wake.

    asyncio's own future calls its task in the loop's next turn only. That turn is why this class
    exists: `p.run` against `asyncio.to_thread` has a bar (`make bench`), and takes 0.62 of it with
    this class, 0.80 without.

    It implements what `asyncio.isfuture` and a task require of a future.
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
        #: asyncio's protocol: True when it is yielded to the task, which sets it back.
        self._asyncio_future_blocking = True
        self._loop = loop
        self._is_done = False
        self._is_cancelled = False
        self._message: object = None
        #: The task's callback, and the context to call it in.
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
            RuntimeError: the loop is closed.
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
        """Mark it done, and drop the callback, which holds the task."""
        found = self._callback, self._context
        self._is_done, self._callback, self._context = True, None, None
        return found
