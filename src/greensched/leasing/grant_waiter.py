"""Tasks that wait to be told something by the desk, each on its own loop.

Whoever asks is a request's `owner`, by his loop's view of the work, and awaits its `waiter`.
"""

from __future__ import annotations

from contextlib import suppress

from greensched.execution.completion import CompletionPoller
from greensched.execution.lease import Lease
from greensched.scheduling.requests import Request


def expect(request: Request, completion: CompletionPoller) -> None:
    """Somebody on the running loop is going to wait for a request."""
    request.owner = completion
    request.waiter = completion.loop.create_waiter()


def heard(request: Request) -> CompletionPoller:
    """His loop's view of the work, if he was not told an error: that is raised."""
    answer = request.answer
    if answer is not None and not isinstance(answer, Lease):
        assert isinstance(answer, Exception)
        raise answer
    assert isinstance(request.owner, CompletionPoller)
    return request.owner


def waits_no_more(request: Request) -> None:
    """Its loop tends one less, since he has claimed what he got, or does not want it any more.

    Counted once, however often it is said.
    """
    if isinstance(request.owner, CompletionPoller):
        request.owner.waiting -= 1
    request.owner = None


def let_go(request: Request) -> None:
    """The same, and forgets whose it was: what was claimed or left may stay in a queue for a while.

    His task would stay with it, and what that returned.
    """
    waits_no_more(request)
    request.waiter = request.answer = request.holder = None


def is_left(request: Request) -> bool:
    """Whether nobody is going to claim it any more, since his loop is closed."""
    return isinstance(request.owner, CompletionPoller) and request.owner.loop.is_closed


def tell(request: Request, error: Exception | None = None) -> bool:
    """Wakes who waits for a request, from whatever thread; False if his loop is closed.

    Args:
        request: granted, or with an `error` refused.
        error: why it is not granted.
    """
    completion, waiter = request.owner, request.waiter
    if not isinstance(completion, CompletionPoller) or waiter is None:  # nobody waits, or any more
        return True
    if error is not None:
        request.answer = error
    return completion.loop.wake_threadsafe(waiter)


def tell_all(refused: list[tuple[Request, Exception]]) -> None:
    """Tells each why he will not be granted, once, and empties the list."""
    while refused:
        with suppress(IndexError):  # another thread was first
            tell(*refused.pop())


def take_handed(request: Request) -> Lease | None:
    """What one that waited was handed; it is not kept, or lease and request would be a circle."""
    handed = request.answer
    if not isinstance(handed, Lease):
        return None
    request.answer = None
    return handed
