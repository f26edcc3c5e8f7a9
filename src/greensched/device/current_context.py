"""What is current on a thread: `with` blocks, and the ownership of green contexts.

Each block restores the context that the *driver* reported when the block began. Python keeps no
other copy of the driver's stack, so blocks nest with those of other libraries in any order.
Python does record which thread owns a green context: it may be current on one thread at a time
(cuda.h of CUDA 13.0 to 13.4, cuGreenCtxCreate), and no driver checks that.
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
    """Stands for a thread, as long as it lives."""

    def __init__(self) -> None:
        self.name = threading.current_thread().name


class _ThreadState(threading.local):
    """State of the calling thread.

    Attributes:
        blocks: the `with` blocks that the thread is inside, the innermost last.
        unscoped: contexts made current without a block, and whether each was pushed. One that was
            not pushed replaced the top of the stack, and is current until the top is replaced
            again.
    """

    def __init__(self) -> None:
        self.token = _ThreadToken()
        self.ref = weakref.ref(self.token)
        self.blocks: list[UserContextScope] = []
        self.unscoped: list[tuple[Enterable, bool]] = []


here = _ThreadState()


class Enterable(Protocol):
    """The part of a `Context` that a block uses."""

    driver: Driver
    handle: ContextHandle
    ownership: ContextOwnership | None
    inside: list[weakref.ref[_ThreadToken]]


class ContextOwnership:
    """Lets one thread at a time have a green context current; reentrant."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        #: The thread that has it current; it may have ended. One attribute for the hot paths.
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
            context: named in the error.
            wait: block until the owner has released it, or its thread has ended.

        Raises:
            CurrentElsewhere: another thread is the owner; names both.
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
    """A synchronous block with a context current; restores what was current before."""

    __slots__ = ("_before", "_driver", "_wait", "context")

    #: Whether the context is set even where it is current already.
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
        """Make the context current again, where code inside the block left another one so."""
        if self._driver.current() != self.context.handle:
            self._set(self.context.handle)

    def _restore(self) -> None:
        """Make current what was; where that fails, at least do not leave this context current."""
        before, driver = self._before, self._driver
        if before is None:  # setting NULL pops once, and code inside may have pushed more
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
                    if driver.current() == self.context.handle:
                        driver.set_current(None)
                raise

    def _current(self, otherwise: ContextHandle | None) -> ContextHandle | None:
        """Ask what is current; where the driver does not say, what was made inside is not lost."""
        try:
            return self._driver.current()
        except DeviceFault:
            raise
        except GreenschedError:
            return otherwise

    def _set(self, context: ContextHandle | None) -> None:
        try:
            self._driver.set_current(context)
        except DeviceFault:  # a second call that succeeds would hide the loss of the device
            raise
        except GreenschedError:  # once more: a wrong current context would disturb later code
            self._driver.set_current(context)


class UserContextScope(ContextScope):
    """A user's `with context:` on one thread, checked for an `await` inside (`await_guard`).

    The block sets, as the runtime API does, and does not push: so it nests with torch and CuPy.
    Afterwards the context of before is current, whatever code inside sets, pushes or pops. Code
    that pops more than it pushed inside also changes what lies *below* on the stack, which no
    driver shows.
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
            HeldAcrossAwait: the block was held across an await, and that is an error here.
            CUDAError: the context of before could not be restored.
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
        """Pop what was pushed inside the block and is still there, so that the rest stays below."""
        with suppress(GreenschedError):  # what was current is restored all the same
            for context, pushed in reversed(here.unscoped[self._start :]):
                if pushed and context.driver.current() == context.handle:
                    context.driver.pop_current()

    @staticmethod
    def innermost(context: Enterable) -> UserContextScope | None:
        """Return the innermost block of a context that this thread is inside."""
        return next((block for block in reversed(here.blocks) if block.context is context), None)

    @staticmethod
    def ending(context: Enterable) -> UserContextScope | None:
        """Return the block that a `with` of a context ends now.

        Tasks that hold blocks of one context across awaits end them in any order. The first to
        end restores what the last block saw, so that the context stays current until all have
        ended. The report names the task that held its block, so the two swap their watches.
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
    """Make a context current in the place of the present one, until it is replaced itself."""
    before = context.driver.current()
    index = len(here.unscoped) - 1
    replaced, pushed = here.unscoped[index] if index >= _scope_start() else (None, False)
    is_there = replaced is not None and _matches(replaced, context.driver, before)
    _add(context, context.driver.set_current, pushed=pushed and is_there)
    if replaced is not None and (is_there or not pushed):
        _remove(index)


def push(context: Enterable) -> None:
    """Make a context current on top of the present one, until it is popped."""
    _add(context, context.driver.push_current, pushed=True)


def pop(context: Enterable) -> None:
    """Take a context off the top of this thread's stack.

    Raises:
        InvalidRequest: the context is not the top, or a `with` block put it there.
    """
    driver = context.driver
    if driver.current() != context.handle:
        raise InvalidRequest(
            f"{context!r} is not the current context of thread {here.token.name!r}"
        )
    found = [index for index in range(_scope_start(), len(here.unscoped)) if _is(index, context)]
    if found:
        is_of_block = bool(here.blocks) and not here.unscoped[found[-1]][1]
    else:
        is_of_block = UserContextScope.innermost(context) is not None
    if is_of_block:
        raise InvalidRequest(
            f"{context!r} is current by a `with` block: leave the block instead of calling pop()"
        )
    driver.pop_current()
    if found:
        _remove(found[-1])


def forget_replaced(context: Enterable) -> None:
    """Drop the record that a context was set on this thread if other code has replaced it."""
    last = len(here.unscoped) - 1
    was_set = last >= _scope_start() and _is(last, context) and not here.unscoped[last][1]
    if was_set and context.driver.current() != context.handle:
        _remove(last)


def is_unscoped(context: Enterable) -> bool:
    """Whether this thread made it current without a block, and has not replaced it since."""
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
    """Whether the thread counts as inside: not where other code may replace what it set."""
    return pushed or context.ownership is not None


def _is(index: int, context: Enterable) -> bool:
    return _matches(here.unscoped[index][0], context.driver, context.handle)


def _matches(context: Enterable, driver: Driver, handle: ContextHandle | None) -> bool:
    return context.driver is driver and context.handle == handle


def _scope_start() -> int:
    """Index of the first entry made inside this thread's innermost block."""
    return here.blocks[-1]._start if here.blocks else 0
