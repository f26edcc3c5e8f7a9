"""Primary contexts, contexts of `create_context`, the stacks of contexts, and their state."""

from __future__ import annotations

from greensched.driver.simulated.handles import Context
from greensched.driver.simulated.machine import OWN, Component, check_fault
from greensched.driver.simulated.timeline import DeviceState
from greensched.driver.status import from_status
from greensched.driver.types import ContextHandle
from greensched.errors import CUDAError, DriverMisuse, NotSupported
from greensched.typing import CacheConfig, ContextFlags, Limit

#: The limits of a new context, in bytes. Sources: CUDA programming guide, "Formatted Output" (1 MB)
#: and "Dynamic Global Memory Allocation" (8 MB); the stack's 1 KB as an H100 reports.
LIMITS = {
    Limit.STACK: 1 << 10,
    Limit.PRINTF_FIFO: 1 << 20,
    Limit.MALLOC_HEAP: 8 << 20,
}
#: The first compute capability with a persisting part of L2, and the largest fraction of L2 that it
#: can be. Sources: CUDA programming guide, "Device Memory L2 Access Management"; for the fraction,
#: 30 of the 40 MB of an A100 (best practices guide, "L2 Persisting Cache").
PERSISTING_SINCE = (8, 0)
PERSISTING_PART = 0.75
#: The persisting part is set in sixteenths of L2, and a new context has three of them, as an H200
#: reports (docs/measurements/h200-580/resources.txt).
PERSISTING_STEPS = 16
PERSISTING_AT_FIRST = 3
#: The least and the greatest priority, as an H200 reports (`device` of the probe).
PRIORITIES = (0, -5)


class Contexts(Component):
    """Driver calls for contexts that can be current."""

    # -- primary contexts ----------------------------------------------------------------------

    def retain_primary(self, device: int) -> ContextHandle:
        return ContextHandle(self.machine.retain_primary(device))

    def release_primary(self, device: int) -> None:
        """Remove a user. Refuse to remove the last one while its objects are alive."""
        self.machine.release_primary(device)

    def primary_state(self, device: int) -> tuple[int, bool]:
        machine = self.machine
        machine.device(device)
        return int(machine.primary_flags.get(device, 0)), bool(machine.primary_users.get(device))

    def set_primary_flags(self, device: int, flags: ContextFlags) -> None:
        self.machine.usable_device(device, "set_primary_flags")
        _check_flags(flags, "set_primary_flags")
        self.machine.primary_flags[device] = flags
        primary = self.machine.primaries.get(device)
        if primary is not None:
            primary.flags = flags | ContextFlags.MAP_HOST

    # -- contexts beside the primary -------------------------------------------------------------

    def create_context(self, device: int, flags: ContextFlags) -> ContextHandle:
        self.machine.usable_device(device, "create_context")
        _check_flags(flags, "create_context")
        context = Context(self.machine.register(OWN, "context"), device, own=True)
        context.flags = flags | ContextFlags.MAP_HOST  # always set from CUDA 11 on
        return ContextHandle(self.machine.own(context))

    def destroy_context(self, context: ContextHandle) -> None:
        """End a context of `create_context` that has no children and is current nowhere.

        A real driver ends its streams and events with it, which the interface forbids.
        """
        ended = self.machine.expect(context, Context, "destroy_context")
        if not ended.own:
            raise DriverMisuse(
                f"{ended!r} is not one of its own, made by create_context: release a primary "
                "context, or destroy the green one"
            )
        device = self.machine.devices[ended.device]
        if ended.threads:
            raise DriverMisuse(f"{ended!r} destroyed while current on {list(ended.threads)}")
        if ended.children and device.fault is None:
            raise DriverMisuse(f"{ended!r} ended with {ended.children} streams and events alive")
        ended.alive = False
        self.machine.unregister(OWN, "context")
        check_fault(device, "destroy_context")

    def context_device(self, context: ContextHandle) -> int:
        return self.machine.expect(context, Context, "context_device").device

    # -- the stack of each thread ------------------------------------------------------------------

    def current(self) -> ContextHandle | None:
        stack = self.machine.thread.stack
        return ContextHandle(stack[-1]) if stack else None

    def set_current(self, context: ContextHandle | None) -> None:
        new = None if context is None else self._check(context, "set_current")
        if self.machine.thread.stack:
            self._pop()
        if new is not None:
            self._push(new)

    def push_current(self, context: ContextHandle) -> None:
        self._push(self._check(context, "push_current"))

    def pop_current(self) -> ContextHandle:
        if not self.machine.thread.stack:
            raise from_status(201, "pop_current", detail="nothing is current on this thread")
        return ContextHandle(self._pop())

    def _check(self, context: ContextHandle, what: str) -> Context:
        new = self.machine.expect(context, Context, what)
        token = self.machine.thread.token
        # Test first whether the WeakSet is empty: iterating over one costs more than all the rest.
        if new.green is not None and new.threads and any(t is not token for t in new.threads):
            raise DriverMisuse(
                f"{new!r} is current on another thread: a green context is current on one at most"
            )
        return new

    def _push(self, context: Context) -> None:
        self.machine.thread.stack.append(context)
        context.threads.add(self.machine.thread.token)

    def _pop(self) -> Context:
        stack = self.machine.thread.stack
        old = stack.pop()
        if old not in stack:
            old.threads.discard(self.machine.thread.token)
        return old

    # -- state -----------------------------------------------------------------------------------

    def context_flags(self) -> ContextFlags:
        return self._owner("context_flags")[0].flags

    def limit(self, limit: Limit) -> int:
        context, device = self._owner("limit")
        self.machine.wait_for_code_changes(device, "limit")
        _check_limit(limit, device)
        if limit is Limit.PERSISTING_L2:
            step = device.model.l2_bytes // PERSISTING_STEPS
            return context.limits.get(limit, PERSISTING_AT_FIRST * step)
        return context.limits.get(limit, LIMITS[limit])

    def set_limit(self, limit: Limit, nbytes: int) -> None:
        """Set a limit of the current context. The persisting part of L2 is rounded up."""
        context, device = self._owner("set_limit")
        self.machine.wait_for_code_changes(device, "set_limit")
        _check_limit(limit, device)
        if limit is Limit.PERSISTING_L2:
            if nbytes > device.model.l2_bytes * PERSISTING_PART:
                raise from_status(1, "set_limit", detail=f"{limit.name}, {nbytes} bytes")
            step = device.model.l2_bytes // PERSISTING_STEPS
            nbytes = -(-nbytes // step) * step
        context.limits[limit] = nbytes

    def cache_config(self) -> CacheConfig:
        return self._owner("cache_config")[0].cache_config

    def set_cache_config(self, config: CacheConfig) -> None:
        """Set the cache preference, which has no effect on times."""
        self._owner("set_cache_config")[0].cache_config = config

    def synchronize_context(self, context: ContextHandle) -> None:
        target = self.machine.expect(context, Context, "synchronize_context")
        device = self.machine.devices[target.device]
        self.machine.refuse_during_capture("synchronize_context")
        work = self.machine.work_so_far(device, target)
        self.machine.wait_for(work, device, "synchronize_context")

    def priority_range(self) -> tuple[int, int]:
        self.machine.current_device("priority_range")
        return PRIORITIES

    def _owner(self, what: str) -> tuple[Context, DeviceState]:
        """Return the context with the current context's settings, and its device.

        A green context's settings are its primary's. NVIDIA does not document this, but green
        contexts are views of the primary in everything else.
        """
        context = self.machine.expect(self.machine.current, Context, what)
        device = self.machine.usable_device(context.device, what)
        return (context if context.green is None else context.green.primary), device


def _check_limit(limit: Limit, device: DeviceState) -> None:
    capability = device.model.compute_capability
    if limit is Limit.PERSISTING_L2 and capability < PERSISTING_SINCE:
        raise NotSupported(
            "a persisting part of L2",
            "compute capability {}.{}".format(*PERSISTING_SINCE),
            "one of {}.{}".format(*capability),
        )


def _check_flags(flags: ContextFlags, what: str) -> None:
    """Return INVALID_VALUE for two ways to wait.

    Source: cuda.h, cuCtxCreate and cuDevicePrimaryCtxSetFlags.
    """
    if (flags & 7).bit_count() > 1 or flags & ~31:
        raise CUDAError(1, "INVALID_VALUE", what, f"flags {int(flags):#x}")
