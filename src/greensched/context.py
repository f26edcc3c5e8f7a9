"""Contexts: primary, green, of their own, adopted; and closing in the right order.

Launches never depend on the current context: a stream knows its own. Calls that do need one (an
allocation, an event, a copy) are made inside one synchronous `with context.entered()`.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, Self, TypeVar

import greensched
from greensched import driver as drivers
from greensched._asynclib import is_coroutine_function
from greensched._cleanup import run_all
from greensched.device import await_guard, current_context
from greensched.device.current_context import (
    ContextOwnership,
    ContextScope,
    UserContextScope,
    _ThreadToken,
    here,
)
from greensched.device.health import DeviceHealth
from greensched.device.limits import ContextLimits
from greensched.device.resources import DeviceResources
from greensched.device.streams import Event, Stream
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
    from greensched import Device

T = TypeVar("T")

logger = logging.getLogger("greensched")
await_guard.skip_frames_of(__name__)

#: The answer of a driver that is not initialised yet. Source: cuda.h.
NOT_INITIALIZED = 3
#: The device's one context, some of its SMs, one that owns itself, another library's.
Kind = Literal["primary", "green", "own", "adopted"]
#: The ways to wait: a context has one of them.
_WAYS = (ContextFlags.SCHED_SPIN, ContextFlags.SCHED_YIELD, ContextFlags.SCHED_BLOCKING_SYNC)

#: Every open context, so that `Context.current` returns the same object again.
_contexts: weakref.WeakSet[Context] = weakref.WeakSet()
_contexts_lock = threading.Lock()


class Context(ContextLimits):
    """A device's primary context, a green one (some of its SMs), one that owns itself, or adopted.

    Made by `Device.primary`, `Device.create_context`, `Context.create` and `Context.current`.
    Streams and events made from it keep it alive; `close` ends what is left of them first. A green
    one, or one of its own, that was never closed warns: no destructor calls CUDA.

    It may be used from any thread, and moves between them: by `push` and `pop`, by `with`, by
    `set_current`. A green one is *current* on one thread at a time, and a second thread is
    refused; launching on its streams works from any.

    Attributes:
        handle: the driver's (a `CUcontext`).
        kind: `"primary"`, `"green"`, `"own"` or `"adopted"`.
        device: its `Device`; `device_id` is that one's ordinal.
        green: the driver's green context; None on any other.
        primary: its device's primary context on a green one, else itself.
    """

    #: Until there is a handle to close: `__del__` runs after a failed creation, too.
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
        kept_streams: dict[StreamHandle, int] | None = None,
    ) -> None:
        self.driver = driver
        self.facts = facts
        self.loader = loader
        self.handle = handle
        self.green = green
        self.primary: Context = self if primary is None else primary
        self.kind: Kind = kind or ("primary" if green is None else "green")
        #: The device's.
        self.health = DeviceHealth() if device is None else device.health
        #: None on a primary, which may be current on any number of threads.
        self.ownership = None if green is None else ContextOwnership(driver)
        #: Those in use, each with a mark of its user.
        self.streams: dict[StreamHandle, object] = {}
        #: Of a context that is kept: every stream, with its priority, the oldest first.
        self._kept_streams = kept_streams
        self.events: set[EventHandle] = set()
        #: Of a primary: what orders a stream (given by address) behind each ticketed stream of its
        #: device, by that one's address.
        self.order_before: dict[int, Callable[[int], None]] = {}
        #: The threads inside a block of it, or with it current without one, once for each time.
        self.inside: list[weakref.ref[_ThreadToken]] = []
        #: It is left as it is, because it still works or the device is lost: nothing warns of it.
        self.is_abandoned = False
        self._release = release
        self._device = device
        self.is_closed = False
        with _contexts_lock:
            _contexts.add(self)

    @classmethod
    def create(cls, device: Device, flags: ContextFlags = ContextFlags.SCHED_AUTO) -> Self:
        """Create a context of its own beside the primary one, current nowhere. May block.

        Pools never use such a context, its streams and events do not mix with those of other
        contexts, and its memory is another address space.

        Args:
            device: a `Device`, which must not be closed before the context.
            flags: how its threads wait, and more. `MAP_HOST` is always on from CUDA 11 on.

        Raises:
            InvalidRequest: unknown flags, or two ways to wait.
            NotSupported: the driver has dropped one of the flags.
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
        """Return the context that is current on the calling thread, None if there is none.

        A context of this library is returned as the object it is. Any other is adopted: closing
        that object ends only the streams and events made from it. Does not wait.

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
            self._device = greensched.Device(self.device_id, driver=self.driver)
        return self._device

    @property
    def device_id(self) -> int:
        """The ordinal of its device."""
        return self.facts.ordinal

    @property
    def is_green(self) -> bool:
        """Whether it has only some of the device's SMs."""
        return self.green is not None

    @property
    def resources(self) -> DeviceResources:
        """Its resources: `sm`, which can be split again, and `workqueue`."""
        return DeviceResources(self.driver, self.device_id, self.handle, self._check)

    @property
    def _base(self) -> Context:
        return self.primary

    # -- being current -----------------------------------------------------------------------------

    def entered(self, *, wait: bool = False) -> ContextScope:
        """Return a synchronous block in which it is current on this thread; no await inside.

        Args:
            wait: block while a green one is current on another thread, instead of raising
                `CurrentElsewhere`. Not for an event-loop thread.
        """
        return ContextScope(self, wait=wait)

    @property
    def is_current(self) -> bool:
        """Whether it is current on the calling thread."""
        return self.driver.current() == self.handle

    def set_current(self) -> None:
        """Make it current on this thread in the place of the present one, until another is.

        Unlike a `with` block it is not checked for an `await`: on a loop's thread it is current
        for every task.

        Raises:
            CurrentElsewhere: it is green, and current on another thread; names both.
        """
        self._check()
        current_context.replace(self)

    def push(self) -> None:
        """Make it current on this thread, on top of the present one, which `pop` restores.

        Raises:
            CurrentElsewhere: it is green, and current on another thread; names both.
        """
        self._check()
        current_context.push(self)

    def pop(self) -> None:
        """Take it off the top of this thread's stack, so that another thread may push it.

        Raises:
            InvalidRequest: it is not current here, or is so by a `with` block.
        """
        current_context.pop(self)

    def __enter__(self) -> Self:
        """Make it current on this thread. Reentrant, reusable; a green one on one at a time.

        No `await` inside: see `HeldAcrossAwait`.

        Raises:
            CurrentElsewhere: it is green, and current on another thread, such as in a `run`.
        """
        self._check()
        UserContextScope(self).__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        """Restore the context of before; never hides the body's own error.

        Raises:
            HeldAcrossAwait: it was held across an await, and that is an error here.
            CUDAError: the context of before could not be restored. Logged, too.
            WrongThread: it was entered on another thread.
        """
        block = UserContextScope.ending(self)
        try:
            if block is None:
                raise WrongThread(
                    f"a block of {self!r} ended on thread {here.token.name!r}, and began on "
                    "another: leave a block on the thread that entered it"
                )
            block.__exit__()
        except GreenschedError as error:
            logger.error("leaving a block of %r failed: %s", self, error)
            if isinstance(exc[1], BaseException):
                exc[1].add_note(f"and leaving a block of {self!r} failed: {error}")
            else:
                raise

    def scoped(self, function: Callable[[], T]) -> T:
        """Call a function with it current on this thread; return its value.

        Raises:
            InvalidRequest: a coroutine function, whose body would run later, without the context.
        """
        if is_coroutine_function(function):
            raise InvalidRequest(
                f"{function!r} is asynchronous: give a plain function, which runs at once"
            )
        with self:
            return function()

    def synchronize(self) -> None:
        """Block until all *its* work is done (a primary's green contexts' too).

        The current context does not matter, and stays. Not for an event-loop thread.
        """
        self._check()
        self.driver.synchronize_context(self.handle)

    # -- streams and events ------------------------------------------------------------------------

    def create_stream(self, *, priority: int = 0, nonblocking: bool = True) -> Stream:
        """Create a non-blocking stream on the SMs of a green context, or one of its own. May block.

        Args:
            priority: a hint for kernels; smaller is more urgent, and the driver clamps it.
            nonblocking: False is refused: a green context has no streams that wait for the legacy
                stream (cuda.h, cuGreenCtxStreamCreate).

        Raises:
            InvalidRequest: a blocking stream; a bad priority; or a primary context, whose streams
                `Device.create_stream` makes, because they run on every SM.
        """
        self._check()
        if self.kind == "primary":
            raise InvalidRequest(
                f"{self!r} has every SM: Device.create_stream makes streams that run on all of them"
            )
        if nonblocking is not True:
            raise InvalidRequest(
                f"nonblocking={nonblocking!r}: there are non-blocking streams only; leave it out"
            )
        return Stream(self, priority=priority)

    def create_event(self, *, timing: bool = False, blocking: bool = True) -> Event:
        """Create an event for its streams.

        Args:
            timing: allow `Event.elapsed_since`.
            blocking: `Event.sync` sleeps instead of spinning.
        """
        self._check()
        return Event(self, timing=timing, blocking=blocking)

    # -- closing -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Destroy its events, its streams, then itself. Idempotent. Blocks until its work is done.

        An adopted context stays: only the streams and events made from it here end. The driver's
        context and streams of a partition, which its pool closes, stay too: a later partition uses
        them.

        Raises:
            InvalidRequest: it is current on this thread, or a thread is inside a block of it.
            CUDAError: the first error of the driver; every step was tried.
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
        steps += [partial(self.close_stream, stream) for stream in tuple(self.streams)]
        run_all([*steps, self._release])

    # -- streams -----------------------------------------------------------------------------------

    def open_stream(self, priority: int) -> StreamHandle:
        """Return the handle of a stream for one `Stream`: a kept one, or created. May block."""
        with self.entered():
            handle = self._claim_kept_stream(priority)
            if handle is None:
                handle = self.driver.create_stream(self.green, priority)
                self.streams[handle] = self
                if self._kept_streams is not None:
                    self._kept_streams[handle] = priority
        return handle

    def close_stream(self, handle: StreamHandle) -> None:
        """Destroy a stream of `open_stream`; keep that of a context that is kept. May block."""
        self.streams.pop(handle, None)
        if self._kept_streams is None:
            self.driver.destroy_stream(handle)

    def _claim_kept_stream(self, priority: int) -> StreamHandle | None:
        """Return a stream without a user, on which no user has left work, or a capture."""
        driver, claim = self.driver, object()
        for handle, its_priority in tuple((self._kept_streams or {}).items()):
            if its_priority != priority or handle in self.streams or driver.is_capturing(handle):
                continue
            if driver.query_stream(handle) and self.streams.setdefault(handle, claim) is claim:
                return handle  # else another thread was first
        return None

    def refuse_while_used(self) -> None:
        """Raise InvalidRequest where `close` would; end nothing."""
        current_context.forget_replaced(self)
        # The primary may be current by another library, such as torch, which retains it, too.
        is_ours = self.kind in ("green", "own") or current_context.is_entered_here(self)
        if self.kind != "adopted" and is_ours and self.is_current:
            raise InvalidRequest(f"{self!r} is current on this thread: leave its block, then close")
        threads = [thread.name for ref in self.inside if (thread := ref()) is not None]
        if current_context.is_unscoped(self):  # below what was pushed or entered since
            threads.append(here.token.name)
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
        return f"<Context: {self.kind}, device {self.device_id}, {self.handle!r}{closed}>"


def check_flags(flags: object) -> None:
    """Check the flags of a context.

    Raises:
        InvalidRequest: not `ContextFlags`, unknown bits, or two ways to wait.
    """
    if not isinstance(flags, ContextFlags):
        raise InvalidRequest(
            f"flags={flags!r}: give ContextFlags, such as ContextFlags.SCHED_BLOCKING_SYNC"
        )
    unknown = int(flags) & ~int(~ContextFlags(0))  # the bits without a name
    if unknown:
        raise InvalidRequest(f"flags={flags!r}: the bits {unknown:#x} are unknown; leave them out")
    if sum(way in flags for way in _WAYS) > 1:
        raise InvalidRequest(f"flags={flags!r}: a context waits one way; give one SCHED_ flag")
