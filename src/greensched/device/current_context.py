"""What is current on a thread: `with` blocks, and the ownership of green contexts.

Each block restores the context that the *driver* reported when the block began. Python keeps no
other copy of the driver's stack, so blocks nest with those of other libraries in any order.
Python does record which thread owns a green context, because it may be current on only one thread
at a time (cuda.h of CUDA 13.0 to 13.4, cuGreenCtxCreate), and no driver checks that.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Protocol

from greensched.device import await_guard
from greensched.driver.interface import Driver
from greensched.driver.types import ContextHandle, Mailbox
from greensched.errors import CurrentElsewhere, DeviceFault, GreenschedError, InvalidRequest

await_guard.skip_frames_of(__name__)


class _ThreadToken:
    """Represents a thread, as long as the thread lives."""

    def __init__(self) -> None:
        self.name = threading.current_thread().name


class _ThreadState(threading.local):
    """State of the calling thread.

    Attributes:
        blocks: The `with` blocks that the thread is inside, innermost last.
        unscoped: Contexts made current without a block, and whether each was pushed. A context
            that was not pushed replaced the top of the stack, and is current until the top is
            replaced again.
    """

    def __init__(self) -> None:
        self.token = _ThreadToken()
        self.ref = weakref.ref(self.token)
        self.blocks: list[UserContextScope] = []
        self.unscoped: list[tuple[Enterable, bool]] = []


here = _ThreadState()


class Enterable(Protocol):
    """What a block needs from its `Context`."""

    driver: Driver
    handle: ContextHandle
    ownership: ContextOwnership | None
    inside: list[weakref.ref[_ThreadToken]]


class ContextOwnership:
    """Allows a green context to be current on only one thread at a time. Reentrant."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        #: The thread on which it is current; it may have ended. One attribute for the hot paths.
        self.owner: weakref.ref[_ThreadToken] | None = None
        self._depth = 0
        self._waiting: deque[Mailbox[None]] = deque()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is the owner."""
        return self.owner is here.ref

    def acquire(self, context: object, *, wait: bool = False) -> None:
        """Make the calling thread the owner.

        Args:
            context: Named in the error.
            wait: Block until the owner has released it or its thread has ended.

        Raises:
            CurrentElsewhere: Another thread is the owner; names both threads.
        """
        while True:
            with self._lock:
                owner = None if self.owner is None else self.owner()
                if owner is None or owner is here.token:
                    self._depth = 1 if owner is None else self._depth + 1
                    self.owner = here.ref
                    return
                if not wait:
                    raise CurrentElsewhere(context, owner.name, here.token.name)
                mailbox: Mailbox[None] = self._driver.create_mailbox()
                self._waiting.append(mailbox)
                ended = weakref.finalize(owner, mailbox.put, None)
                ended.atexit = False
            del owner  # a reference here would hide the end of the owner's thread
            mailbox.get()
            ended.detach()

    def release(self) -> None:
        """Undo one `acquire`."""
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            self.owner = None
            waiting, self._waiting = self._waiting, deque()
        for mailbox in waiting:
            mailbox.put(None)


class ContextScope:
    """A synchronous block in which a context is current; restores the previous one."""

    __slots__ = ("_before", "_driver", "_wait", "context")

    #: Whether to set the context even if it is current already.
    always: ClassVar[bool] = False

    def __init__(self, context: Enterable, *, wait: bool = False) -> None:
        self.context = context
        self._driver = context.driver
        self._wait = wait

    def __enter__(self) -> None:
        ownership = self.context.ownership
        if ownership is not None:
            ownership.acquire(self.context, wait=self._wait)
        try:
            self._before = self._driver.current()
            if self.always or self._before != self.context.handle:
                self._set(self.context.handle)
        except BaseException:
            if ownership is not None:
                ownership.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        finally:
            if self.context.ownership is not None:
                self.context.ownership.release()

    def renew(self) -> None:
        """Make the context current again, if code inside the block left another one current."""
        if self._driver.current() != self.context.handle:
            self._set(self.context.handle)

    def _restore(self) -> None:
        """Restore the previous context. If that fails, at least remove this context."""
        before, driver = self._before, self._driver
        if before is None:  # setting NULL pops only once, but code inside may have pushed more
            self._set(None)
            while self._current(None) is not None:
                self._set(None)
        elif self.always or self._current(self.context.handle) != before:
            try:
                self._set(before)
            except DeviceFault:  # no call may follow on a lost device
                raise
            except GreenschedError:
                with suppress(GreenschedError):
                    if self._current(self.context.handle) == self.context.handle:
                        driver.set_current(None)
                raise

    def _current(self, otherwise: ContextHandle | None) -> ContextHandle | None:
        """Return the current context, or `otherwise` if the driver does not answer."""
        try:
            return self._driver.current()
        except DeviceFault:
            raise
        except GreenschedError:
            return otherwise

    def _set(self, context: ContextHandle | None) -> None:
        try:
            self._driver.set_current(context)
        except DeviceFault:  # a second, successful call would hide the loss of the device
            raise
        except GreenschedError:  # try again: a wrong current context would disturb later code
            self._driver.set_current(context)


class UserContextScope(ContextScope):
    """A user's `with context:` on one thread, checked for an `await` inside (`await_guard`).

    Like the runtime API the block sets the context, instead of pushing it, so that it nests with
    torch and CuPy. At its end the previous context is current, whatever code inside sets, pushes
    or pops. But code that pops more than it pushed inside also changes what lies *below* on the
    stack, which no driver shows.
    """

    __slots__ = ("_start", "_watch")

    always = True

    def __enter__(self) -> None:
        super().__enter__()
        here.blocks.append(self)
        self.context.inside.append(here.ref)
        self._start = len(here.unscoped)
        self._watch = await_guard.begin(self.context)

    def __exit__(self, *_: object) -> None:
        """End the block, and everything made current inside it.

        Raises:
            HeldAcrossAwait: The block was held across an await, and that is an error here.
            CUDAError: The previous context could not be restored.
        """
        problem = None if self._watch is None else await_guard.end(self._watch)
        here.blocks.remove(self)
        self.context.inside.remove(here.ref)
        try:
            self._pop_pushed()
            super().__exit__()
        except GreenschedError as error:
            if problem is not None:
                error.add_note(f"and: {problem}")
            raise
        finally:
            while len(here.unscoped) > self._start:
                _remove(len(here.unscoped) - 1)
        if problem is not None:
            raise problem

    def _pop_pushed(self) -> None:
        """Pop contexts that were pushed inside the block and are still there."""
        with suppress(GreenschedError):  # the previous context is restored in any case
            for context, pushed in reversed(here.unscoped[self._start :]):
                if pushed and context.driver.current() == context.handle:
                    context.driver.pop_current()

    @staticmethod
    def innermost(context: Enterable) -> UserContextScope | None:
        """Return this thread's innermost block of a context."""
        return next((block for block in reversed(here.blocks) if block.context is context), None)

    @staticmethod
    def ending(context: Enterable) -> UserContextScope | None:
        """Return the block that a `with` of a context ends now.

        Tasks that hold blocks of one context across awaits end them in any order. The first block
        to end must restore what the last block saw, so that the context stays current until all
        have ended. The report must name the task that held its own block, so the two swap their
        `OpenScope`s.
        """
        last = UserContextScope.innermost(context)
        if last is not None and last._watch is not None and len(here.blocks) > 1:
            frame = await_guard.awaiting()
            for block in reversed(here.blocks):
                watch = block._watch
                if block.context is context and watch is not None and watch.frame is frame:
                    last._watch, block._watch = watch, last._watch
                    break
        return last


# -- without a block ------------------------------------------------------------------------------


def replace(context: Enterable) -> None:
    """Replace the thread's current context by this one, until it is replaced itself."""
    before = context.driver.current()
    index = len(here.unscoped) - 1
    replaced, pushed = here.unscoped[index] if index >= _scope_start() else (None, False)
    is_there = replaced is not None and _matches(replaced, context.driver, before)
    _add(context, context.driver.set_current, pushed=pushed and is_there)
    if replaced is not None and (is_there or not pushed):
        _remove(index)


def push(context: Enterable) -> None:
    """Push a context on top of the present one, until it is popped."""
    _add(context, context.driver.push_current, pushed=True)


def pop(context: Enterable) -> None:
    """Pop a context off this thread's stack.

    Raises:
        InvalidRequest: The context is not the top, or a `with` block put it there.
    """
    driver = context.driver
    if driver.current() != context.handle:
        raise InvalidRequest(
            f"{context!r} is not the current context of thread {here.token.name!r}"
        )
    indices = [index for index in range(_scope_start(), len(here.unscoped)) if _is(index, context)]
    if indices:
        is_of_block = bool(here.blocks) and not here.unscoped[indices[-1]][1]
    else:
        is_of_block = UserContextScope.innermost(context) is not None
    if is_of_block:
        raise InvalidRequest(
            f"{context!r} was made current by a `with` block: leave it instead of calling pop()"
        )
    driver.pop_current()
    if indices:
        _remove(indices[-1])


def forget_replaced(context: Enterable) -> None:
    """Forget that a context was set on this thread if other code has replaced it."""
    last = len(here.unscoped) - 1
    was_set = last >= _scope_start() and _is(last, context) and not here.unscoped[last][1]
    if was_set and context.driver.current() != context.handle:
        _remove(last)


def is_unscoped(context: Enterable) -> bool:
    """Say whether this thread made it current without a block, and has not replaced it."""
    return any(_is(index, context) for index in range(len(here.unscoped)))


def _add(
    context: Enterable, make_current: Callable[[ContextHandle], None], *, pushed: bool
) -> None:
    if context.ownership is not None:
        context.ownership.acquire(context)
    try:
        make_current(context.handle)
    except BaseException:
        if context.ownership is not None:
            context.ownership.release()
        raise
    here.unscoped.append((context, pushed))
    if _is_counted(context, pushed):
        context.inside.append(here.ref)


def _remove(index: int) -> None:
    context, pushed = here.unscoped.pop(index)
    if _is_counted(context, pushed):
        context.inside.remove(here.ref)
    if context.ownership is not None:
        context.ownership.release()


def _is_counted(context: Enterable, pushed: bool) -> bool:
    """Say whether the thread counts as inside; not if other code may replace what it set."""
    return pushed or context.ownership is not None


def _is(index: int, context: Enterable) -> bool:
    return _matches(here.unscoped[index][0], context.driver, context.handle)


def _matches(context: Enterable, driver: Driver, handle: ContextHandle | None) -> bool:
    return context.driver is driver and context.handle == handle


def _scope_start() -> int:
    """Return the index of the first entry made inside this thread's innermost block."""
    return here.blocks[-1]._start if here.blocks else 0
