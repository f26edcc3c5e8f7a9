"""The user's policies and duration curves inside decisions, and what they raise.

A decision has moved cells already when it calls one of them, and its caller holds a lock. So no
exception leaves such a call: `defer` keeps it, and the decision goes on with a default. It is not
logged there either, because a log handler is the user's code, too. `report` does both, once the
decision is complete and no lock is held.

The caller's lock is held meanwhile, and nothing changes: `call` tells that to what reads the state,
so that a thread which the user's code waits for can have it.
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
    """An exception of the user's code, the thread that made the decision, and what to log."""

    def __init__(
        self, thread: int, error: BaseException, message: str, args: tuple[object, ...]
    ) -> None:
        self.thread = thread
        self.error = error
        self.message = message
        self.args = args


#: Of all pools: a request does not know its own, and each thread reports behind its decision.
deferred: Final[deque[Deferred]] = deque()


def defer(error: BaseException, message: str, *args: object) -> None:
    """Keep an exception for `report`: an `Exception` is logged, any other is raised there."""
    deferred.append(Deferred(get_ident(), error, message, args))


def report() -> None:
    """Log what was deferred. Not under a lock.

    Raises:
        BaseException: the first `KeyboardInterrupt`, `SystemExit` or other exception that is no
            `Exception`, of a decision of this thread.
    """
    interrupt: BaseException | None = None
    for _ in range(len(deferred)):
        try:
            one = deferred.popleft()
        except IndexError:  # another thread reports at the same time
            break
        if isinstance(one.error, Exception):
            logger.error(one.message, *one.args, exc_info=one.error)
        elif one.thread != get_ident():
            deferred.append(one)
        elif interrupt is None:
            interrupt = one.error
    if interrupt is not None:
        raise interrupt


class Reader(Protocol):
    """Reads the state of a scheduler that has a lock."""

    def user_code_began(self) -> None:
        """Be told that the user's code begins, perhaps in a decision of this reader's scheduler."""

    def user_code_ended(self) -> None:
        """Be told that it has ended; return once nothing is read beside the lock any more."""


#: Of all pools, by `id`, each told on the thread of the decision.
_readers: Final[WeakValueDictionary[int, Reader]] = WeakValueDictionary()


def add_reader(reader: Reader) -> None:
    """Tell a reader, which is not kept alive, when the user's code begins and ends."""
    _readers[id(reader)] = reader


def call(function: Callable[[], T]) -> T:
    """Call the user's code inside a decision. It may raise anything."""
    # Not `values()`: a pool that is made on another thread meanwhile would break the iteration.
    references = _readers.valuerefs()
    told = [reader for reference in references if (reader := reference()) is not None]
    for reader in told:
        reader.user_code_began()
    try:
        return function()
    finally:
        for reader in told:
            reader.user_code_ended()
