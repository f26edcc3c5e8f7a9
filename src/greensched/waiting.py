"""Tasks that wait to be told something by the desk, each on its own loop."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from threading import get_ident

from greensched.channel import Channel
from greensched.completion import Completion
from greensched.loops import Waiter
from greensched.planning.requests import Request


class Queued:
    """A task that waits to be told something, on its own loop."""

    __slots__ = ("completion", "error", "handed", "thread", "waiter")

    def __init__(self, completion: Completion) -> None:
        self.completion = completion
        self.thread = get_ident()
        self.waiter: Waiter = completion.door.create_waiter()
        self.error: Exception | None = None
        #: What it is granted and has not claimed, if that is another's lease as it is.
        self.handed: Channel | None = None

    def tell(self, error: Exception | None = None) -> bool:
        """Wakes it, from whatever thread; False if its loop is closed."""
        self.error = error
        door = self.completion.door
        if get_ident() == self.thread and not door.is_closed:
            door.wake(self.waiter)
            return True
        return door.call_threadsafe(partial(door.wake, self.waiter))


def take_handed(request: Request) -> Channel | None:
    """What one that waited was handed; it is not kept, or lease and request would be a circle."""
    queued = request.owner
    if not isinstance(queued, Queued):
        return None
    handed, queued.handed = queued.handed, None
    return handed


def tell(request: Request, error: Exception) -> None:
    """Tells whoever waits for a request that it will not be granted."""
    if isinstance(request.owner, Queued):
        request.owner.tell(error)


def tell_all(refused: list[tuple[Request, Exception]]) -> None:
    """Tells each why he will not be granted, once, and empties the list."""
    while refused:
        with suppress(IndexError):  # another thread was first
            tell(*refused.pop())
