"""The stack of each thread of the simulated driver, contexts of their own, and their state."""

from __future__ import annotations

from greensched.driver.simulated.base import Core
from greensched.driver.simulated.handles import Context
from greensched.driver.status import from_status
from greensched.driver.types import ContextHandle
from greensched.errors import CUDAError, DriverMisuse, NotSupported
from greensched.typing import CacheConfig, ContextFlags, Limit

#: Stands for the device of what contexts of their own are and have: a primary may end before them.
OWN = -1
#: What a context begins with. Sources: CUDA programming guide, "Formatted Output" (1 MB) and
#: "Dynamic Global Memory Allocation" (8 MB); of the stack 1 KB, as an H100 answers.
LIMITS = {
    Limit.STACK: 1 << 10,
    Limit.PRINTF_FIFO: 1 << 20,
    Limit.MALLOC_HEAP: 8 << 20,
}
#: The first compute capability that has a persisting part of L2, and the most of L2 it can be.
#: Sources: CUDA programming guide, "Device Memory L2 Access Management"; of the part: 30 of the
#: 40 MB of an A100 (best practices guide, "L2 Persisting Cache").
PERSISTING_SINCE = (8, 0)
PERSISTING_PART = 0.75
#: It is given out in sixteenths of L2, and a context begins with three of them, as an H200 answers
#: (docs/measurements/h200-580/resources.txt).
PERSISTING_STEPS = 16
PERSISTING_AT_FIRST = 3


class Stacks(Core):
    """The verbs for the stack of each thread, for contexts of their own and for their state."""

    # -- the current context ---------------------------------------------------------------------

    def current(self) -> ContextHandle | None:
        """The top of the thread's stack."""
        stack = self._thread.stack
        return ContextHandle(stack[-1]) if stack else None

    def set_current(self, context: ContextHandle | None) -> None:
        """Replaces the top of the thread's stack; None pops it."""
        new = None if context is None else self._enterable(context, "set_current")
        if self._thread.stack:
            self._leave_top()
        if new is not None:
            self._put_on_top(new)

    def push_current(self, context: ContextHandle) -> None:
        """Puts a context on the thread's stack."""
        self._put_on_top(self._enterable(context, "push_current"))

    def pop_current(self) -> ContextHandle:
        """Takes the top off the thread's stack."""
        if not self._thread.stack:
            raise from_status(201, "pop_current", detail="nothing is current on this thread")
        return ContextHandle(self._leave_top())

    def _enterable(self, context: ContextHandle, what: str) -> Context:
        new = self._expect(context, Context, what)
        me = self._thread.me
        # Asked first whether there are any: to go through a WeakSet costs more than all the rest.
        if new.green is not None and new.threads and any(t is not me for t in new.threads):
            raise DriverMisuse(
                f"{new!r} is current on another thread: a green context is current on one at most"
            )
        return new

    def _put_on_top(self, context: Context) -> None:
        self._thread.stack.append(context)
        context.threads.add(self._thread.me)

    def _leave_top(self) -> Context:
        stack = self._thread.stack
        old: Context = stack.pop()
        if old not in stack:
            old.threads.discard(self._thread.me)
        return old

    # -- contexts of their own -------------------------------------------------------------------

    def create_context(self, device: int, flags: ContextFlags) -> ContextHandle:
        """A context of its own."""
        self._unfaulted(self._device(device), "create_context")
        one_way_to_wait(flags, "create_context")
        context = Context(self._born(OWN, "context"), device, own=True)
        context.flags = flags | ContextFlags.MAP_HOST  # from CUDA 11 on it always is
        return ContextHandle(self._own(context))

    def destroy_context(self, context: ContextHandle) -> None:
        """Ends a context of its own: what it made first, and nobody stands on it.

        A real driver ends its streams and events with it. The port forbids that.
        """
        gone = self._expect(context, Context, "destroy_context")
        if not gone.own:
            raise DriverMisuse(f"{gone!r} is not one of its own: release it, or end its green one")
        if gone.threads:
            raise DriverMisuse(f"{gone!r} destroyed while current on {list(gone.threads)}")
        if gone.children and self.devices[gone.device].fault is None:
            raise DriverMisuse(f"{gone!r} ended with {gone.children} streams and events alive")
        gone.alive = False
        self._died(OWN, "context")
        self._unfaulted(self.devices[gone.device], "destroy_context")

    def context_device(self, context: ContextHandle) -> int:
        """The device of any context."""
        return self._expect(context, Context, "context_device").device

    def _born_in(self, context: Context, kind: str) -> int:
        """Counts a stream or event with what it must not outlive: its own context, or the device.

        `OWN` keeps those of contexts of their own out of the device's account, which a primary's
        end looks at.
        """
        if not context.own:
            return self._born(context.device, kind)
        context.children += 1
        return self._born(OWN, kind)

    def _died_in(self, context: Context, kind: str) -> None:
        context.children -= context.own
        self._died(OWN if context.own else context.device, kind)

    # -- state -----------------------------------------------------------------------------------

    def context_flags(self) -> ContextFlags:
        """The flags of the current context."""
        return self._state("context_flags").flags

    def limit(self, limit: Limit) -> int:
        """A limit of the current context."""
        context = self._state("limit")
        self._behind_changes(self.devices[context.device], "limit")
        self._has(limit, context)
        if limit is Limit.PERSISTING_L2:
            step = self.devices[context.device].model.l2_bytes // PERSISTING_STEPS
            return context.limits.get(limit, PERSISTING_AT_FIRST * step)
        return context.limits.get(limit, LIMITS[limit])

    def set_limit(self, limit: Limit, nbytes: int) -> None:
        """Sets a limit of the current context; the persisting part of L2 is rounded up."""
        context = self._state("set_limit")
        self._behind_changes(self.devices[context.device], "set_limit")
        self._has(limit, context)
        if limit is Limit.PERSISTING_L2:
            l2_bytes = self.devices[context.device].model.l2_bytes
            if nbytes > l2_bytes * PERSISTING_PART:
                raise from_status(1, "set_limit", detail=f"{limit.name}, {nbytes} bytes")
            step = l2_bytes // PERSISTING_STEPS
            nbytes = -(-nbytes // step) * step
        context.limits[limit] = nbytes

    def cache_config(self) -> CacheConfig:
        """What kernels of the current context would rather have more of."""
        return self._state("cache_config").cache_config

    def set_cache_config(self, config: CacheConfig) -> None:
        """Sets that; it changes no time."""
        self._state("set_cache_config").cache_config = config

    def _state(self, what: str) -> Context:
        """What the current context's state is kept with: a green context's is its primary's.

        Of green contexts nothing is documented; they are views of the primary in all else.
        """
        context: Context = self._expect(self._thread.stack[-1], Context, what)
        self._unfaulted(self.devices[context.device], what)
        return context if context.green is None else context.green.primary

    def _has(self, limit: Limit, context: Context) -> None:
        model = self.devices[context.device].model
        if limit is Limit.PERSISTING_L2 and model.compute_capability < PERSISTING_SINCE:
            major, minor = model.compute_capability
            raise NotSupported(
                "a persisting part of L2",
                f"compute capability {PERSISTING_SINCE[0]}.{PERSISTING_SINCE[1]}",
                f"one of {major}.{minor}",
            )


def one_way_to_wait(flags: ContextFlags, what: str) -> None:
    """A real driver answers INVALID_VALUE to two ways at once.

    Source: cuda.h, cuCtxCreate and cuDevicePrimaryCtxSetFlags.
    """
    if (flags & 7).bit_count() > 1 or flags & ~31:
        raise CUDAError(1, "INVALID_VALUE", what, f"flags {int(flags):#x}")
