"""What is current on a thread: blocks that enter a context, and whose turn it is with a green one.

Every block restores what the *driver* says was current when it began; nothing about that is
remembered in Python but the one saved context of each block, so blocks nest with those of other
libraries in any order. What is remembered is whose turn it is with a green context. That is current
on one thread at a time (cuda.h of CUDA 13.0 to 13.4, cuGreenCtxCreate), and no driver checks it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Protocol

from greensched.device import await_guard
from greensched.device.thread_state import _ThreadToken, here
from greensched.driver.interface import Driver
from greensched.driver.types import ContextHandle, Mailbox
from greensched.errors import CurrentElsewhere, GreenschedError, InvalidRequest


class Enterable(Protocol):
    """What a block needs of a context: all of it is `Context`'s."""

    driver: Driver
    handle: ContextHandle
    turn: ContextOwnership | None
    inside: list[weakref.ref[_ThreadToken]]


class ContextOwnership:
    """Whose turn it is with a green context: one thread's, which may take it several times."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._holder: weakref.ref[_ThreadToken] | None = None
        self._depth = 0
        self._waiting: deque[Mailbox[None]] = deque()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has it."""
        return self._holder is here.ref

    def take(self, context: object, *, wait: bool = False) -> None:
        """Takes it. With `wait` blocks until the thread that has it has left, or has ended.

        Raises:
            CurrentElsewhere: another thread has it; names both.
        """
        while True:
            with self._lock:
                holder = None if self._holder is None else self._holder()
                if holder is None or holder is here.me:
                    self._depth = 1 if holder is None else self._depth + 1
                    self._holder = here.ref
                    return
                if not wait:
                    raise CurrentElsewhere(context, holder.name, here.me.name)
                mailbox: Mailbox[None] = self._driver.create_mailbox()
                self._waiting.append(mailbox)
                ended = weakref.finalize(holder, mailbox.put, None)
                ended.atexit = False
            del holder  # it is the thread's alone: its end must show
            mailbox.get()
            ended.detach()

    def leave(self) -> None:
        """Gives up what one `take` took."""
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            self._holder = None
            waiting, self._waiting = self._waiting, deque()
        for mailbox in waiting:
            mailbox.put(None)


class ContextScope:
    """Makes a context current for a synchronous block, and restores what was current before."""

    __slots__ = ("_before", "_driver", "_wait", "context")

    #: Whether it is set even where it is current already.
    always: ClassVar[bool] = False

    def __init__(self, context: Enterable, *, wait: bool = False) -> None:
        self.context = context
        self._driver = context.driver
        self._wait = wait

    def __enter__(self) -> None:
        turn = self.context.turn
        if turn is not None:
            turn.take(self.context, wait=self._wait)
        try:
            self._before = self._driver.current()
            if self.always or self._before != self.context.handle:
                self._set(self.context.handle)
        except BaseException:
            if turn is not None:
                turn.leave()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        finally:
            if self.context.turn is not None:
                self.context.turn.leave()

    def renew(self) -> None:
        """Makes it current again, where what ran inside has left another so."""
        if self._driver.current() != self.context.handle:
            self._set(self.context.handle)

    def _restore(self) -> None:
        """Makes current what was; where that is not possible any more, at least not ours."""
        before, driver = self._before, self._driver
        if before is None:  # NULL pops once, and somebody may have pushed meanwhile
            self._set(None)
            while driver.current() is not None:
                self._set(None)
        elif self.always or driver.current() != before:
            try:
                self._set(before)
            except GreenschedError:
                with suppress(GreenschedError):
                    if driver.current() == self.context.handle:
                        driver.set_current(None)
                raise

    def _set(self, context: ContextHandle | None) -> None:
        try:
            self._driver.set_current(context)
        except GreenschedError:  # once more: what is left current would be in everybody's way
            self._driver.set_current(context)


class UserContextScope(ContextScope):
    """A user's `with context:`, on one thread: no `await` inside, which is looked after.

    It sets, as the runtime API does, and does not push: so it nests with torch and CuPy. What is
    current afterwards is what was before, whatever others set, push or pop inside. Where they do
    not balance that, past our rooms, it also changed what lies *below* on the stack, which no
    driver shows.
    """

    __slots__ = ("_standing", "_watch")

    always = True

    def __enter__(self) -> None:
        super().__enter__()
        here.blocks.append(self)
        self.context.inside.append(here.ref)
        self._standing = len(here.standing)
        self._watch = await_guard.begin(self.context)

    def __exit__(self, *_: object) -> None:
        """Ends it, and what was made current inside it and stands.

        Raises:
            HeldAcrossAwait: it was, and that is an error here.
            CUDAError: what was current before could not be restored.
        """
        problem = None if self._watch is None else await_guard.end(self._watch)
        here.blocks.remove(self)
        self.context.inside.remove(here.ref)
        try:
            self._pop_ours()
            super().__exit__()
        except GreenschedError as error:
            if problem is not None:
                error.add_note(f"and: {problem}")
            raise
        finally:
            while len(here.standing) > self._standing:
                _leave(len(here.standing) - 1)
        if problem is not None:
            raise problem

    def _pop_ours(self) -> None:
        """Pops what was pushed inside it and is still there, so that below is what was."""
        with suppress(GreenschedError):  # what was current is to be restored all the same
            for context, pushed in reversed(here.standing[self._standing :]):
                if pushed and context.driver.current() == context.handle:
                    context.driver.pop_current()

    @staticmethod
    def innermost(context: Enterable) -> UserContextScope | None:
        """The innermost block of a context that this thread is inside."""
        return next((block for block in reversed(here.blocks) if block.context is context), None)

    @staticmethod
    def ending(context: Enterable) -> UserContextScope | None:
        """The block that a `with` of a context ends now.

        Blocks of one context that tasks hold across awaits end in any order. Whoever ends first
        restores what the last one saw, so that the context stays current until all have ended; but
        what is told, is told of the task that held it.
        """
        blocks = here.blocks
        last = (
            blocks[-1]
            if blocks and blocks[-1].context is context
            else UserContextScope.innermost(context)
        )
        if last is not None and last._watch is not None and len(blocks) > 1:
            frame = await_guard.awaiting()
            for block in reversed(blocks):
                watch = block._watch
                if block.context is context and watch is not None and watch.frame is frame:
                    last._watch, block._watch = watch, last._watch
                    break
        return last


# -- without a block ------------------------------------------------------------------------------


def replace(context: Enterable) -> None:
    """Makes a context current in the place of what is, on this thread, until something else is."""
    before = context.driver.current()
    index = len(here.standing) - 1
    replaced, pushed = here.standing[index] if index >= _first() else (None, False)
    is_there = replaced is not None and _matches(replaced, context.driver, before)
    _stand(context, context.driver.set_current, pushed=pushed and is_there)
    if replaced is not None and (is_there or not pushed):
        _leave(index)


def push(context: Enterable) -> None:
    """Makes a context current on top of what is, on this thread, until it is popped."""
    _stand(context, context.driver.push_current, pushed=True)


def pop(context: Enterable) -> None:
    """Takes a context off the top of this thread's stack: it floats, or is current lower down.

    Raises:
        InvalidRequest: it is not the top, or it is in a block's place.
    """
    driver = context.driver
    if driver.current() != context.handle:
        raise InvalidRequest(f"{context!r} is not what is current on thread {here.me.name!r}")
    found = [index for index in range(_first(), len(here.standing)) if _is(index, context)]
    if found:
        is_blocks = bool(here.blocks) and not here.standing[found[-1]][1]
    else:
        is_blocks = UserContextScope.innermost(context) is not None
    if is_blocks:
        raise InvalidRequest(f"{context!r} is current by a `with` block: leave that instead")
    driver.pop_current()
    if found:
        _leave(found[-1])


def forget(context: Enterable) -> None:
    """Drops what was set on this thread, where the driver says that something else is there now."""
    last = len(here.standing) - 1
    was_set = last >= _first() and _is(last, context) and not here.standing[last][1]
    if was_set and context.driver.current() != context.handle:
        _leave(last)


def stands(context: Enterable) -> bool:
    """Whether this thread made it current without a block, and nothing was set there since."""
    return any(_is(index, context) for index in range(len(here.standing)))


def is_by_us(context: Enterable) -> bool:
    """Whether this thread is in a block of it, or made it current by one of its methods."""
    return here.ref in context.inside or stands(context)


def _stand(
    context: Enterable, make_current: Callable[[ContextHandle], None], *, pushed: bool
) -> None:
    if context.turn is not None:
        context.turn.take(context)
    try:
        make_current(context.handle)
    except BaseException:
        if context.turn is not None:
            context.turn.leave()
        raise
    here.standing.append((context, pushed))
    if _is_counted(context, pushed):
        context.inside.append(here.ref)


def _leave(index: int) -> None:
    context, pushed = here.standing.pop(index)
    if _is_counted(context, pushed):
        context.inside.remove(here.ref)
    if context.turn is not None:
        context.turn.leave()


def _is_counted(context: Enterable, pushed: bool) -> bool:
    """Whether the thread counts as inside: not where it once set what anybody may replace."""
    return pushed or context.turn is not None


def _is(index: int, context: Enterable) -> bool:
    return _matches(here.standing[index][0], context.driver, context.handle)


def _matches(context: Enterable, driver: Driver, handle: ContextHandle | None) -> bool:
    return context.driver is driver and context.handle == handle


def _first() -> int:
    """Where begins what was made current inside this thread's innermost block."""
    return here.blocks[-1]._standing if here.blocks else 0
