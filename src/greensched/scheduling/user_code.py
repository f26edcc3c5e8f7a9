"""What the user's policies and duration curves raise inside decisions.

A decision has moved cells already when it calls one of them, and its caller holds a lock. So no
exception leaves such a call: `defer` keeps it, and the decision goes on with a default. It is not
logged there either, because a log handler is the user's code, too. `report` does both, once the
decision is complete and no lock is held.
"""

from __future__ import annotations

import logging
from _thread import get_ident
from collections import deque
from typing import Final

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
