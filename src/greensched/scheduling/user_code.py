"""Calls of the user's policies and duration curves inside decisions, and their exceptions.

When a decision calls one of them, it has already moved cells, and its caller holds a lock. So no
exception leaves such a call: `defer` keeps it, and the decision continues with a default. It is not
logged there either, because a log handler is the user's code, too. `report` raises or logs it once
the decision is complete and no lock is held.

While the user's code runs, the lock stays held and the state does not change. `call` notifies the
readers of the state, so that they read it without the lock: the user's code may wait for them.
"""

from __future__ import annotations

import logging
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

logger = logging.getLogger("greensched")


class Deferred:
    """An exception of the user's code, the thread of the decision, and what to log."""

    def __init__(
        self, thread: int, error: BaseException, message: str, args: tuple[object, ...]
    ) -> None:
        self.thread = thread
        self.error = error
        self.message = message
        self.args = args


#: For all pools, because a request does not know its pool; each thread reports after its decision.
deferred: Final[deque[Deferred]] = deque()


def defer(error: BaseException, message: str, *args: object) -> None:
    """Keep an exception for `report`, which logs an `Exception` and raises other exceptions."""
    deferred.append(Deferred(get_ident(), error, message, args))


def report() -> None:
    """Log what was deferred. Not for use under a lock.

    Raises:
        BaseException: The first `KeyboardInterrupt`, `SystemExit` or other exception that is not
            an `Exception`, from a decision of this thread.
    """
    interrupt: BaseException | None = None
    for _ in range(len(deferred)):
        try:
            entry = deferred.popleft()
        except IndexError:  # another thread has reported it
            break
        if isinstance(entry.error, Exception):
            logger.error(entry.message, *entry.args, exc_info=entry.error)
        elif entry.thread != get_ident():
            deferred.append(entry)
        elif interrupt is None:
            interrupt = entry.error
    if interrupt is not None:
        raise interrupt


class Reader(Protocol):
    """Reads the state of a scheduler that has a lock."""

    def user_code_began(self) -> None:
        """Notify that the user's code begins, perhaps in a decision of this reader's scheduler."""

    def user_code_ended(self) -> None:
        """Notify that it has ended. Return once no read outside the lock is in progress."""


#: The readers of all pools, by `id`, which are notified on the decision's thread.
_readers: Final[WeakValueDictionary[int, Reader]] = WeakValueDictionary()


def add_reader(reader: Reader) -> None:
    """Notify a reader, which is not kept alive, when the user's code begins and ends."""
    _readers[id(reader)] = reader


def call(function: Callable[[], T]) -> T:
    """Call the user's code inside a decision. It may raise anything."""
    # Not `values()`, because a pool made on another thread meanwhile would break the iteration.
    references = _readers.valuerefs()
    readers = [reader for reference in references if (reader := reference()) is not None]
    for reader in readers:
        reader.user_code_began()
    try:
        return function()
    finally:
        for reader in readers:
            reader.user_code_ended()
