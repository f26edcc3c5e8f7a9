"""Contexts: primary, green, of their own, adopted; and closing in the right order.

Launches never depend on the current context: a stream knows its own. What does need one (an
allocation, an event, a copy) happens inside one synchronous `with context.entered()`.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from greensched import driver as drivers
from greensched._asynclib import is_coroutine_function
from greensched._cleanup import run_all
from greensched.device import current_context
from greensched.device.current_context import ContextOwnership, ContextScope, UserContextScope
from greensched.device.limits import ContextLimits
from greensched.device.resources import DeviceResources
from greensched.device.streams import Event, Stream, TicketedStream
from greensched.device.thread_state import _ThreadToken, here
from greensched.driver.interface import Driver
from greensched.driver.types import ContextHandle, EventHandle, GreenHandle, StreamHandle
from greensched.errors import (
    Closed,
    CUDAError,
    GreenschedError,
    InvalidRequest,
    WrongThread,
)
from greensched.kernels import Loader
from greensched.typing import ContextFlags, DeviceFacts

if TYPE_CHECKING:
    from greensched.device.device import Device

T = TypeVar("T")

logger = logging.getLogger("greensched")

#: What a driver answers that nobody has initialised. Source: cuda.h.
NOT_INITIALIZED = 3
#: What a context is: the device's one, some of its SMs, one that owns itself, somebody else's.
Kind = Literal["primary", "green", "own", "adopted"]
#: The ways to wait: a context has one of them.
_WAYS = (ContextFlags.SCHED_SPIN, ContextFlags.SCHED_YIELD, ContextFlags.SCHED_BLOCKING_SYNC)


#: Makes the device of an adopted context: `Device`, of the room above, which fills it in.
open_device: Callable[[int, Driver], Device] | None = None

#: Every context that is not closed, so that what is current is found again as what it is.
_contexts: weakref.WeakSet[Context] = weakref.WeakSet()
_contexts_lock = threading.Lock()


class Context(ContextLimits):
    """A device's primary context, a green one (some of its SMs), one that owns itself, or adopted.

    Made by `Device.primary`, `Device.create_context`, `Context.create` and `Context.current`.
    Streams and events made from it hold it; what is left of them when it closes is ended first.
    Whoever forgets to close a green one or one of its own is warned: no destructor calls CUDA.

    It may be used from any thread, and moves between them: by `push` and `pop`, by `with`, by
    `set_current`. A green one is *current* on one thread at a time, and the second is refused;
    launching on its streams is fine from any.

    Attributes:
        handle: the driver's (a `CUcontext`).
        kind: `"primary"`, `"green"`, `"own"` or `"adopted"`.
        device: its `Device`.
        device_ordinal: of its device.
        green: the driver's green context; None on any other.
        primary: its device's primary context on a green one, else itself.
    """

    #: Until there is something to close: its finaliser runs after a failed making, too.
    is_closed = True

    def __init__(
        self,
        driver: Driver,
        facts: DeviceFacts,
        loader: Loader,
        handle: ContextHandle,
        release: Callable[[], None],
        green: GreenHandle | None = None,
        primary: Context | None = None,
        *,
        device: Device | None = None,
        kind: Kind | None = None,
    ) -> None:
        self.driver = driver
        self.facts = facts
        self.loader = loader
        self.handle = handle
        self.green = green
        self.primary: Context = self if primary is None else primary
        self.kind: Kind = kind or ("primary" if green is None else "green")
        #: None on a primary, which may be current on any number of threads.
        self.turn = None if green is None else ContextOwnership(driver)
        self.streams: set[StreamHandle] = set()
        self.events: set[EventHandle] = set()
        #: Of a primary: the tracks of its device, by their streams' addresses.
        self.tracks: dict[int, TicketedStream] = {}
        #: The threads inside a block of it, or standing on it, once for each time.
        self.inside: list[weakref.ref[_ThreadToken]] = []
        #: Its end was given up, because it still works or the device is lost: nobody warns of it.
        self.is_abandoned = False
        self._release = release
        self._device = device
        self.is_closed = False
        with _contexts_lock:
            _contexts.add(self)

    @classmethod
    def create(cls, device: Device, flags: ContextFlags = ContextFlags.SCHED_AUTO) -> Self:
        """A context of its own beside the primary one, current nowhere. May block.

        For programs that want one: pools never use it, its streams and events do not mix with
        those of other contexts, and its memory is another address space.

        Args:
            device: a `Device`, which must not be closed before it.
            flags: how its threads wait, and what else. `MAP_HOST` is always on from CUDA 11 on.

        Raises:
            InvalidRequest: no such flags, or two ways to wait.
            NotSupported: the driver has one of the flags no more.
            CUDAError: the driver refused it.
        """
        check_flags(flags)
        driver, facts = device.driver, device.facts
        handle = driver.create_context(facts.ordinal, flags)
        return cls(
            driver,
            facts,
            device.loader,
            handle,
            release=lambda: driver.destroy_context(handle),
            device=device,
            kind="own",
        )

    @classmethod
    def current(cls, driver: str | Driver | None = None) -> Context | None:
        """The context that is current on the calling thread, None if there is none.

        One of ours is returned as the object it is. Any other is adopted: it stays somebody
        else's, closing it here ends only what was made of it here. Does not wait.

        Args:
            driver: as for `Device`; a simulated one is a machine of its own, so give the driver.
        """
        driver = drivers.open(driver)
        try:
            handle = driver.current()
        except CUDAError as error:
            if error.status != NOT_INITIALIZED:
                raise
            return None
        if handle is None:
            return None
        with _contexts_lock:
            for known in _contexts:
                if known.driver is driver and not known.is_closed and known.handle == handle:
                    return known
        facts = driver.device_facts(driver.context_device(handle))
        loader = Loader(driver, facts)
        return cls(driver, facts, loader, handle, release=loader.close, kind="adopted")

    @property
    def device(self) -> Device:
        """Its `Device`."""
        if self._device is None:
            assert open_device is not None, "whoever imports greensched.Context has Device's room"
            self._device = open_device(self.device_ordinal, self.driver)
        return self._device

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

    @property
    def _base(self) -> Context:
        return self.primary

    # -- being current -----------------------------------------------------------------------------

    def entered(self, *, wait: bool = False) -> ContextScope:
        """A synchronous block in which it is current on this thread; no await inside.

        Args:
            wait: block while a green one is current on another thread, instead of raising
                `CurrentElsewhere`. Not for an event-loop thread.
        """
        return ContextScope(self, wait=wait)

    @property
    def is_current(self) -> bool:
        """Whether it is current on the calling thread, by whatever way."""
        return self.driver.current() == self.handle

    def set_current(self) -> None:
        """Makes it current on this thread in the place of what is, until something else is.

        Like `Device.set_current` it is not looked after across an `await`: what a loop's thread
        has current so is every task's.

        Raises:
            CurrentElsewhere: it is green, and current on another thread; names both.
        """
        self._check()
        current_context.replace(self)

    def push(self) -> None:
        """Makes it current on this thread, on top of what is; `pop` brings that back.

        Raises:
            CurrentElsewhere: it is green, and current on another thread; names both.
        """
        self._check()
        current_context.push(self)

    def pop(self) -> None:
        """Takes it off the top of this thread's stack; then it floats, and any thread may have it.

        Raises:
            InvalidRequest: it is not what is current here, or is so by a `with` block.
        """
        current_context.pop(self)

    def __enter__(self) -> Self:
        """Makes it current on this thread. Reentrant, reusable; a green one on one at a time.

        No `await` inside: see `HeldAcrossAwait`.

        Raises:
            CurrentElsewhere: it is green, and current on another thread: in a `run`, perhaps.
        """
        self._check()
        UserContextScope(self).__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        """Restores what the driver said was current; never hides the body's own error.

        Raises:
            HeldAcrossAwait: it was held across an await, and that is an error here.
            CUDAError: what was current before could not be restored. Logged, too.
            WrongThread: it was entered on another thread.
        """
        block = UserContextScope.ending(self)
        try:
            if block is None:
                raise WrongThread(f"a block of {self!r} ended on a thread where it did not begin")
            block.__exit__()
        except GreenschedError as error:
            logger.error("leaving a block of %r failed: %s", self, error)
            if isinstance(exc[1], BaseException):
                exc[1].add_note(f"and leaving a block of {self!r} failed: {error}")
            else:
                raise

    def scoped(self, function: Callable[[], T]) -> T:
        """Calls a function with it current on this thread, and returns or raises what that does.

        Raises:
            InvalidRequest: the function is a coroutine's: its body would run later, without it.
        """
        if is_coroutine_function(function):
            raise InvalidRequest(f"{function!r} is asynchronous: give what runs at once, or p.run")
        with self:
            return function()

    def synchronize(self) -> None:
        """Blocks until all *its* work is done (a primary's green contexts' too).

        Whatever is current on this thread, and that stays so. Not for an event-loop thread.
        """
        self._check()
        self.driver.synchronize_context(self.handle)

    # -- what it makes -----------------------------------------------------------------------------

    def create_stream(self, *, priority: int = 0, nonblocking: bool = True) -> Stream:
        """A non-blocking stream on its SMs, of a green context or one of its own. May block.

        Args:
            priority: a hint for kernels; smaller is more urgent, and the driver clamps it.
            nonblocking: False is refused: a green context has no streams that wait for the legacy
                stream (cuda.h, cuGreenCtxStreamCreate).

        Raises:
            InvalidRequest: a blocking stream; what is no priority; or a primary context, whose
                streams `Device.create_stream` makes, because they run on every SM.
        """
        self._check()
        if self.kind == "primary":
            raise InvalidRequest(
                f"{self!r} has every SM: Device.create_stream makes streams that run on all of them"
            )
        if nonblocking is not True:
            raise InvalidRequest(
                f"nonblocking={nonblocking!r}: there are non-blocking streams only"
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

        An adopted one goes on living: only what was made of it here ends.

        Raises:
            InvalidRequest: it is current on this thread, or a thread is inside a block of it.
            CUDAError: what the driver answered first; everything was tried all the same.
        """
        if self.is_closed:
            return
        self.refuse_while_used()
        self.is_closed = True
        with _contexts_lock:
            _contexts.discard(self)
        driver = self.driver
        steps: list[Callable[[], None]] = []
        if self.kind in ("green", "own"):
            steps.append(lambda: driver.synchronize_context(self.handle))
        steps += [partial(driver.destroy_event, event) for event in self.events]
        steps += [partial(driver.destroy_stream, stream) for stream in self.streams]
        run_all([*steps, self._release])

    def refuse_while_used(self) -> None:
        """Raises InvalidRequest where `close` would, and ends nothing."""
        current_context.forget(self)
        # The primary may be current by others, torch say, who hold it, too: to them it stays.
        is_ours = self.kind in ("green", "own") or current_context.is_by_us(self)
        if self.kind != "adopted" and is_ours and self.is_current:
            raise InvalidRequest(f"{self!r} is current on this thread: leave its block, then close")
        threads = [thread.name for ref in self.inside if (thread := ref()) is not None]
        if current_context.stands(self):  # below what was pushed or entered since
            threads.append(here.me.name)
        if threads:
            raise InvalidRequest(
                f"{self!r} is current, or will be again, on thread {threads[-1]!r}: leave its "
                "block there, or pop it, then close"
            )

    def _check(self) -> None:
        if self.is_closed:
            raise Closed(repr(self))

    def __del__(self) -> None:
        if not self.is_closed and not self.is_abandoned and self.kind in ("green", "own"):
            warnings.warn(
                f"{self!r} was never closed; it stays until the process ends",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        closed = ", closed" if self.is_closed else ""
        return f"<Context: {self.kind}, device {self.device_ordinal}, {self.handle!r}{closed}>"


def check_flags(flags: object) -> None:
    """Refuses what are no flags of a context.

    Raises:
        InvalidRequest: says which there are.
    """
    if not isinstance(flags, ContextFlags):
        raise InvalidRequest(f"flags={flags!r} are no ContextFlags, such as SCHED_BLOCKING_SYNC")
    unknown = int(flags) & ~int(~ContextFlags(0))  # what no name stands for
    if unknown:
        raise InvalidRequest(f"flags={flags!r}: {unknown:#x} is nothing that is known")
    if sum(way in flags for way in _WAYS) > 1:
        raise InvalidRequest(f"flags={flags!r}: a context waits one way, so give one SCHED_ flag")
