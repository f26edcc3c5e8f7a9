"""Waiting for a grant: what a queued request has on the loop of the task that waits."""

from __future__ import annotations

from greensched.execution.completion import CompletionPoller
from greensched.scheduling.requests import Request


class GrantWaiter:
    """One task's wait for its queued request. The request's `owner`.

    The thread that grants or refuses the request calls `notify` or `set_error`; the loop of the
    task wakes it.

    Args:
        request: queued, and not known to other threads yet.
        poller: of the running loop.
    """

    __slots__ = ("_error", "_poller", "_request", "_waiter")

    def __init__(self, request: Request, poller: CompletionPoller) -> None:
        self._poller = poller
        self._waiter = poller.loop.create_waiter()
        self._error: Exception | None = None
        self._request = request
        request.owner = self

    async def wait(self) -> None:
        """Wait until the request is granted. Raise the reason if it is refused."""
        self._poller.request_queued(self._request.deadline)
        try:
            await self._waiter
        finally:
            self._poller.waiting -= 1
        if self._error is not None:
            raise self._error

    def notify(self) -> bool:
        """Wake the task, from any thread; return False if its loop is closed."""
        return self._poller.loop.wake_threadsafe(self._waiter)

    def set_error(self, error: Exception) -> None:
        """Wake the task, from any thread, with the reason why it is not granted."""
        self._error = error
        self.notify()

    @property
    def is_orphaned(self) -> bool:
        """Whether its loop is closed, so that the task will never go on."""
        return self._poller.loop.is_closed

    def close(self) -> None:
        """Take the task off the request, which may stay in a queue for a while.

        The request would keep the task alive, and what it returned.
        """
        self._request.owner = self._request.holder = None


def notify(request: Request) -> bool:
    """Wake the task that waits for a granted request, if one does; False if its loop is closed."""
    waiter = request.owner
    return waiter.notify() if isinstance(waiter, GrantWaiter) else True


def refuse(request: Request, error: Exception) -> None:
    """Wake the task that waits for a request, if one does, with the reason of its refusal."""
    waiter = request.owner
    if isinstance(waiter, GrantWaiter):
        waiter.set_error(error)


def is_orphaned(request: Request) -> bool:
    """Whether the loop is closed on which a task waited for a request."""
    waiter = request.owner
    return isinstance(waiter, GrantWaiter) and waiter.is_orphaned
