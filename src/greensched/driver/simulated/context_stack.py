"""The context stack of each thread."""

from __future__ import annotations

from greensched.driver.simulated.handles import Context
from greensched.driver.simulated.machine import Component
from greensched.driver.status import from_status
from greensched.driver.types import ContextHandle
from greensched.errors import DriverMisuse


class ContextStack(Component):
    """Driver calls for the calling thread's stack of contexts."""

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
