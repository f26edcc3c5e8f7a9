"""Contexts, primary and green: what is current on a thread, and closing in the right order.

Launches never depend on the current context: a stream knows its own. What does need one (an
allocation, an event, a copy) happens inside one synchronous `with context.entered()`, which
restores what the *driver* says was current before; nothing about it is remembered in Python but
whose turn it is with a green context. That is current on one thread at a time (cuda.h of CUDA 13.0
to 13.4, cuGreenCtxCreate), and no driver checks it: we do.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Self

from greensched.driver.base import Driver
from greensched.errors import Closed, GreenschedError, InvalidRequest, WrongThread, run_all
from greensched.kernels import Loader
from greensched.resources import DeviceResources
from greensched.stream import Event, Stream
from greensched.typing import (
    ContextHandle,
    DeviceFacts,
    EventHandle,
    GreenHandle,
    Mailbox,
    StreamHandle,
)

logger = logging.getLogger("greensched")


class Turn:
    """Whose turn it is with a green context: one thread's, which may take it several times."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._depth = 0
        self._waiting: deque[Mailbox[None]] = deque()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has it."""
        return self._thread == threading.get_ident()

    def take(self, *, wait: bool) -> bool:
        """Takes it; False if another thread has it. With `wait` blocks until that one has left."""
        me = threading.get_ident()
        while True:
            with self._lock:
                if self._thread is None or self._thread == me:
                    self._thread = me
                    self._depth += 1
                    return True
                if not wait:
                    return False
                mailbox: Mailbox[None] = self._driver.create_mailbox()
                self._waiting.append(mailbox)
            mailbox.get()

    def leave(self) -> None:
        """Gives up what one `take` took."""
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            self._thread = None
            waiting, self._waiting = self._waiting, deque()
        for mailbox in waiting:
            mailbox.put(None)


class Entered:
    """Makes a context current for a synchronous block, and restores what was current before."""

    __slots__ = ("_before", "_context", "_driver", "_wait")

    def __init__(self, context: Context, *, wait: bool) -> None:
        self._context = context
        self._driver = context.driver
        self._wait = wait

    def __enter__(self) -> None:
        turn = self._context.turn
        if turn is not None and not turn.take(wait=self._wait):
            raise WrongThread(
                f"{self._context!r} is current on another thread, and can be on one at a time: "
                "have this done there, by p.run, or once that has left it"
            )
        try:
            self._before = self._driver.current()
            self._make_current(self._context.handle)
        except BaseException:
            if turn is not None:
                turn.leave()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._make_current(self._before)
        finally:
            if self._context.turn is not None:
                self._context.turn.leave()

    def _make_current(self, context: ContextHandle | None) -> None:
        if self._driver.current() == context:
            return
        try:
            self._driver.set_current(context)
        except GreenschedError:  # once more: what is left current would be in everybody's way
            self._driver.set_current(context)


class Context:
    """A device's primary context, or a green one: some of its SMs.

    Made by `Device.primary` and `Device.create_context`. Streams and events made from it hold it;
    what is left of them when it closes is ended first.

    Attributes:
        device_ordinal: of its device.
        green: the driver's green context; None on a primary.
        primary: its device's primary context, or itself.
    """

    def __init__(
        self,
        driver: Driver,
        facts: DeviceFacts,
        loader: Loader,
        handle: ContextHandle,
        release: Callable[[], None],
        green: GreenHandle | None = None,
        primary: Context | None = None,
    ) -> None:
        self.driver = driver
        self.facts = facts
        self.loader = loader
        self.handle = handle
        self.green = green
        self.primary = self if primary is None else primary
        #: None on a primary, which may be current on any number of threads.
        self.turn = None if green is None else Turn(driver)
        self.streams: set[StreamHandle] = set()
        self.events: set[EventHandle] = set()
        self.is_closed = False
        #: Its end was given up, because it still works or the device is lost: nobody warns of it.
        self.is_abandoned = False
        self._release = release
        self._entered = _PerThread()

    @property
    def device_ordinal(self) -> int:
        """The ordinal of its device."""
        return self.facts.ordinal

    @property
    def is_green(self) -> bool:
        """Whether it has some of the device's SMs only."""
        return self.green is not None

    @property
    def resources(self) -> DeviceResources:
        """What it was given: `sm`, which can be split again, and `workqueue`."""
        return DeviceResources(self.driver, self.device_ordinal, self.handle, self._check)

    # -- being current -----------------------------------------------------------------------------

    def entered(self, *, wait: bool = False) -> Entered:
        """A synchronous block in which it is current on this thread; no await inside.

        Args:
            wait: block while a green one is current on another thread, instead of raising
                `WrongThread`. Not for an event-loop thread.
        """
        return Entered(self, wait=wait)

    @property
    def is_current(self) -> bool:
        """Whether it is current on the calling thread."""
        return self.driver.current() == self.handle

    @property
    def is_entered(self) -> bool:
        """Whether it is green, and the calling thread is inside a block of it."""
        return self.turn is not None and self.turn.is_mine

    def __enter__(self) -> Self:
        """Makes it current on this thread. Reentrant; a green one on one thread at a time.

        Raises:
            WrongThread: it is green, and current on another thread: in a `run`, perhaps.
        """
        self._check()
        block = self.entered()
        block.__enter__()
        self._entered.blocks.append(block)
        return self

    def __exit__(self, *exc: object) -> None:
        """Restores what was current; a failure of that is logged, and never hides the body's."""
        try:
            self._entered.blocks.pop().__exit__()
        except GreenschedError as error:
            logger.error("restoring the current context failed: %s", error)
            if isinstance(exc[1], BaseException):
                exc[1].add_note(f"and restoring the current context failed: {error}")
            else:
                raise

    def synchronize(self) -> None:
        """Blocks until all its work is done (a primary's green contexts' too)."""
        self._check()
        self.driver.synchronize_context(self.handle)

    # -- what it makes -----------------------------------------------------------------------------

    def create_stream(self, *, priority: int = 0, nonblocking: bool = True) -> Stream:
        """A non-blocking stream on its SMs, of a green context. May block.

        Args:
            priority: a hint for kernels; smaller is more urgent, and the driver clamps it.
            nonblocking: False is refused: a green context has no streams that wait for the legacy
                stream (cuda.h, cuGreenCtxStreamCreate).

        Raises:
            InvalidRequest: a blocking stream; or a primary context, whose streams
                `Device.create_stream` makes, because they run on every SM.
        """
        self._check()
        if not self.is_green:
            raise InvalidRequest(
                f"{self!r} is not green: Device.create_stream makes streams that run on every SM"
            )
        if nonblocking is not True:
            raise InvalidRequest(
                f"nonblocking={nonblocking!r}: a green context has non-blocking streams only"
            )
        return Stream(self, priority=priority)

    def create_event(self, *, timing: bool = False, blocking: bool = True) -> Event:
        """An event for its streams.

        Args:
            timing: it can be given to `Event.elapsed_since`.
            blocking: `Event.sync` sleeps instead of spinning.
        """
        self._check()
        return Event(self, timing=timing, blocking=blocking)

    # -- its end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends it: events, then streams, then itself. Idempotent. Blocks until its work is done.

        Raises:
            InvalidRequest: it is current on this thread: leave it first.
            CUDAError: what the driver answered first; everything was tried all the same.
        """
        if self.is_closed:
            return
        if self.is_current:
            raise InvalidRequest(f"{self!r} is current on this thread: leave its block, then close")
        self.is_closed = True
        driver = self.driver
        steps: list[Callable[[], None]] = []
        if self.is_green:
            steps.append(lambda: driver.synchronize_context(self.handle))
        steps += [partial(driver.destroy_event, event) for event in self.events]
        steps += [partial(driver.destroy_stream, stream) for stream in self.streams]
        run_all([*steps, self._release])

    def _check(self) -> None:
        if self.is_closed:
            raise Closed(repr(self))

    def __repr__(self) -> str:
        kind = "green" if self.is_green else "primary"
        closed = ", closed" if self.is_closed else ""
        return f"<Context: {kind}, device {self.device_ordinal}{closed}>"


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.blocks: list[Entered] = []
