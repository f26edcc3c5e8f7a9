"""Contexts: primary, green, own or adopted; and closing them in the right order.

Launches never depend on the current context, because a stream knows its own. Calls that do need a
current context (an allocation, an event, a copy) run inside one `with context.entered()`.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

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
from greensched.typing import ContextFlags, DeviceFacts, T

if TYPE_CHECKING:
    from greensched import Device

logger = logging.getLogger("greensched")
await_guard.skip_frames_of(__name__)

#: The status of a driver that is not initialised yet. Source: cuda.h.
NOT_INITIALIZED = 3
#: The device's primary context; some of its SMs; `Context.create`'s; another library's.
Kind = Literal["primary", "green", "own", "adopted"]
#: The ways to wait. A context has exactly one of them.
_WAYS = (ContextFlags.SCHED_SPIN, ContextFlags.SCHED_YIELD, ContextFlags.SCHED_BLOCKING_SYNC)

#: The open contexts of each driver, so that `Context.current` returns the same object again.
_contexts: weakref.WeakKeyDictionary[Driver, weakref.WeakSet[Context]] = weakref.WeakKeyDictionary()
_contexts_lock = threading.Lock()


class Context(ContextLimits):
    """A CUDA context: a device's primary, a green one (some of its SMs), an own or an adopted one.

    Made by `Device.primary`, `Device.create_context`, `Context.create` and `Context.current`.
    Its streams and events keep it alive; `close` first ends those that are still open. A green or
    own context that is never closed causes a warning, because no destructor calls CUDA.

    Any thread may use it, and make it current by `with`, by `push` and `pop`, or by `set_current`.
    A green context is *current* on only one thread at a time, and a second thread is refused;
    launching on its streams works from any thread.

    Attributes:
        handle: The driver's handle (a `CUcontext`).
        kind: `"primary"`, `"green"`, `"own"` or `"adopted"`.
        device: Its `Device`; `device_id` is the device's ordinal.
        green: The driver's green context, or None.
        primary: For a green context, the device's primary context; otherwise the context itself.
    """

    #: True until there is a handle to close, because `__del__` also runs after a failed creation.
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
        #: Shared with the device.
        self.health = DeviceHealth() if device is None else device.health
        #: None for a primary context, which may be current on any number of threads.
        self.ownership = None if green is None else ContextOwnership(driver)
        #: The streams in use, each with a mark of its user.
        self.streams: dict[StreamHandle, object] = {}
        #: For a kept context: every stream with its priority, oldest first.
        self._kept_streams = kept_streams
        self.events: set[EventHandle] = set()
        #: For a primary context: by the address of each ticketed stream of the device, a function
        #: that orders another stream (by its address) after it.
        self.order_before: dict[int, Callable[[int], None]] = {}
        #: The threads on which this context is current or entered, one entry for each time.
        self.inside: list[weakref.ref[_ThreadToken]] = []
        #: Whether it is left open without a warning, because it has work or the device is lost.
        self.is_abandoned = False
        self._release = release
        self._device = device
        self.is_closed = False
        with _contexts_lock:
            _contexts.setdefault(driver, weakref.WeakSet()).add(self)

    @classmethod
    def create(cls, device: Device, flags: ContextFlags = ContextFlags.SCHED_AUTO) -> Self:
        """Create a context beside the primary one, current on no thread. May block.

        Pools never use such a context. Its streams and events cannot be combined with those of
        other contexts, and its memory is a separate address space.

        Args:
            device: A `Device`, which must not be closed before the context.
            flags: How its threads wait, and more. `MAP_HOST` is always on from CUDA 11 on.

        Raises:
            InvalidRequest: The flags are unknown, or name two ways to wait.
            NotSupported: The driver no longer has one of the flags.
            CUDAError: The driver refused the call.
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
        """Return the context that is current on the calling thread, or None.

        A context of this library is returned as the same object. Any other context is adopted:
        closing the adopted object ends only streams and events made from it. Does not wait.

        Args:
            driver: As for `Device`. A simulated driver is a separate machine, so pass that driver.
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
            for known in _contexts.get(driver, ()):
                if not known.is_closed and known.handle == handle:
                    return known
        facts = driver.device_facts(driver.context_device(handle))
        loader = Loader(driver, facts)
        return cls(driver, facts, loader, handle, release=loader.close, kind="adopted")

    @property
    def device(self) -> Device:
        """The `Device` of the context."""
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
        """Return a block, without an `await`, in which this context is current on the thread.

        Args:
            wait: While a green context is current on another thread, block instead of raising
                `CurrentElsewhere`. Not for an event-loop thread.
        """
        return ContextScope(self, wait=wait)

    @property
    def is_current(self) -> bool:
        """Whether it is current on the calling thread."""
        return self.driver.current() == self.handle

    def set_current(self) -> None:
        """Replace the thread's current context by this one.

        Unlike a `with` block, this is not checked for an `await`: on a loop's thread the context
        stays current for every task.

        Raises:
            CurrentElsewhere: It is green, and current on another thread; names both threads.
        """
        self._check()
        current_context.replace(self)

    def push(self) -> None:
        """Push this context on the thread's stack of contexts; `pop` restores the previous one.

        Raises:
            CurrentElsewhere: It is green, and current on another thread; names both threads.
        """
        self._check()
        current_context.push(self)

    def pop(self) -> None:
        """Pop this context off the thread's stack, so that another thread may push it.

        Raises:
            InvalidRequest: The context is not current on this thread, or a `with` block made it
                current.
        """
        current_context.pop(self)

    def __enter__(self) -> Self:
        """Make it current on this thread. Reentrant; a green context on one thread at a time.

        No `await` inside: see `HeldAcrossAwait`.

        Raises:
            CurrentElsewhere: It is green, and current on another thread, for example in a `run`.
        """
        self._check()
        UserContextScope(self).__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        """Restore the previous context; never hides the body's own error.

        Raises:
            HeldAcrossAwait: The block was held across an await, and that is an error here.
            CUDAError: The previous context could not be restored. Also logged.
            WrongThread: Another thread entered the block.
        """
        block = UserContextScope.ending(self)
        try:
            if block is None:
                raise WrongThread(
                    f"a block of {self!r} ended on thread {here.token.name!r}, but began on "
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
        """Call a function with this context current on the thread; return the function's value.

        Raises:
            InvalidRequest: A coroutine function; its body would run later, without the context.
        """
        if is_coroutine_function(function):
            raise InvalidRequest(
                f"{function!r} is asynchronous: give a plain function, which runs at once"
            )
        with self:
            return function()

    def synchronize(self) -> None:
        """Block until all work of the context is done; a primary's includes its green contexts'.

        The thread's current context is not changed. Not for an event-loop thread.
        """
        self._check()
        self.driver.synchronize_context(self.handle)

    # -- streams and events ------------------------------------------------------------------------

    def create_stream(self, *, priority: int = 0, nonblocking: bool = True) -> Stream:
        """Create a non-blocking CUDA stream of a green or own context. May block the thread.

        Args:
            priority: A hint for kernels. Smaller is more urgent, and the driver clamps it.
            nonblocking: False is refused: no stream of a green context waits for the legacy stream
                (cuda.h, cuGreenCtxStreamCreate).

        Raises:
            InvalidRequest: `nonblocking` is False, or the priority is invalid; or the context is
                primary: use `Device.create_stream`.
        """
        self._check()
        if self.kind == "primary":
            raise InvalidRequest(
                f"{self!r} is a primary context, which has every SM: use Device.create_stream"
            )
        if nonblocking is not True:
            raise InvalidRequest(
                f"nonblocking={nonblocking!r}: streams of a green context are always non-blocking; "
                "leave it out"
            )
        return Stream(self, priority=priority)

    def create_event(self, *, timing: bool = False, blocking: bool = True) -> Event:
        """Create an event for streams of this context.

        Args:
            timing: Whether `Event.elapsed_since` works.
            blocking: Whether `Event.sync` sleeps instead of spinning.
        """
        self._check()
        return Event(self, timing=timing, blocking=blocking)

    # -- closing -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Destroy its events and streams, then itself. Idempotent. Blocks until its work is done.

        An adopted context itself stays; only streams and events made from the object are destroyed.
        The driver's context and streams of a pool's partition stay, too: a later partition uses
        them.

        Raises:
            InvalidRequest: It is current on this thread, or a thread is inside a block of it.
            CUDAError: The first error of the driver. All further steps were tried.
        """
        if self.is_closed:
            return
        self.refuse_while_used()
        self.is_closed = True
        with _contexts_lock:
            _contexts[self.driver].discard(self)
        driver = self.driver
        steps: list[Callable[[], None]] = []
        if self.kind in ("green", "own"):
            steps.append(lambda: driver.synchronize_context(self.handle))
        steps += [partial(driver.destroy_event, event) for event in self.events]
        steps += [partial(self.close_stream, stream) for stream in tuple(self.streams)]
        run_all([*steps, self._release])

    # -- streams -----------------------------------------------------------------------------------

    def open_stream(self, priority: int) -> StreamHandle:
        """Return a stream handle for one `Stream`: a free kept one, or a new one. May block."""
        with self.entered():
            handle = self._claim_kept_stream(priority)
            if handle is None:
                handle = self.driver.create_stream(self.green, priority)
                self.streams[handle] = self
                if self._kept_streams is not None:
                    self._kept_streams[handle] = priority
        return handle

    def close_stream(self, handle: StreamHandle) -> None:
        """Destroy a stream of `open_stream`; a kept context keeps it. May block."""
        self.streams.pop(handle, None)
        if self._kept_streams is None:
            self.driver.destroy_stream(handle)

    def _claim_kept_stream(self, priority: int) -> StreamHandle | None:
        """Return a kept stream that has no user and on which no work or capture is left."""
        driver, claim = self.driver, object()
        for handle, its_priority in tuple((self._kept_streams or {}).items()):
            if its_priority != priority or handle in self.streams or driver.is_capturing(handle):
                continue
            if driver.query_stream(handle) and self.streams.setdefault(handle, claim) is claim:
                return handle  # otherwise another thread claimed it first
        return None

    def refuse_while_used(self) -> None:
        """Raise InvalidRequest if `close` would; change nothing."""
        current_context.forget_replaced(self)
        is_unscoped = current_context.is_unscoped(self)
        # Another library that retains the primary, such as torch, may have made it current.
        is_ours = self.kind in ("green", "own") or here.ref in self.inside or is_unscoped
        if self.kind != "adopted" and is_ours and self.is_current:
            raise InvalidRequest(f"{self!r} is current on this thread: leave its block, then close")
        threads = [thread.name for ref in self.inside if (thread := ref()) is not None]
        if is_unscoped:  # lower on the stack, to become current again
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
        InvalidRequest: Not `ContextFlags`, unknown bits, or two ways to wait.
    """
    if not isinstance(flags, ContextFlags):
        raise InvalidRequest(
            f"flags={flags!r}: give ContextFlags, such as ContextFlags.SCHED_BLOCKING_SYNC"
        )
    unknown = int(flags) & ~int(~ContextFlags(0))  # the bits without a name
    if unknown:
        raise InvalidRequest(f"flags={flags!r}: the bits {unknown:#x} are unknown; leave them out")
    if sum(way in flags for way in _WAYS) > 1:
        raise InvalidRequest(f"flags={flags!r}: give only one SCHED_ flag")
