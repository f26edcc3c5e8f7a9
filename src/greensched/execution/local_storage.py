"""What a lane's users keep with it: made once for each lane, closed with it.

Handles of libraries, workspaces, communicators, graphs: one made for all partitions is shared by
work that runs at the same time, which corrupts some and deadlocks others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from greensched.errors import InvalidRequest

T = TypeVar("T")

logger = logging.getLogger("greensched")

#: Things of one lane at most: far more than anybody means to keep, and soon reached by whoever
#: gives a new function each time.
MOST = 64


class Disposable(Protocol):
    """What somebody owns, and may let go of before the lane ends."""

    @property
    def is_idle(self) -> bool: ...

    def close(self) -> None: ...


class ExecutorLocals:
    """Of one lane, by what made them. Changed on the lane's worker only, its context current."""

    def __init__(self) -> None:
        self._made: dict[Callable[[], Any], Any] = {}
        self._adopted: dict[Disposable, None] = {}
        #: Let go of, and not closed yet.
        self._released: deque[Disposable] = deque()

    def __bool__(self) -> bool:
        return bool(self._made or self._adopted)

    def has(self, factory: Callable[[], Any]) -> bool:
        """Whether a factory has been called, and well. From any thread."""
        return factory in self._made

    def get(self, factory: Callable[[], T]) -> T:
        """What a factory made; it is called if it was not yet, and kept only if it returns.

        Raises:
            InvalidRequest: there are `MOST` already.
        """
        if factory not in self._made:
            if len(self._made) >= MOST:
                raise InvalidRequest(
                    f"{MOST} factories have been given to `local` on these SMs: what is kept goes "
                    "by the function, so give the same one each time, not a lambda made anew"
                )
            self._made[factory] = factory()
        return self._made[factory]  # type: ignore[no-any-return]  # its own T

    def adopt(self, thing: Disposable) -> None:
        """Something that is closed with the lane, unless its owner lets go of it before."""
        self._adopted[thing] = None

    def release(self, thing: Disposable) -> None:
        """Have the next `close_released` that finds it idle close it. From any thread."""
        self._released.append(thing)

    def close_released(self) -> None:
        """Closes what was let go of, and is idle."""
        for _ in range(len(self._released)):
            thing = self._released.popleft()
            if not thing.is_idle:
                self._released.append(thing)
            elif thing in self._adopted:
                del self._adopted[thing]
                _close(thing, thing)

    def close(self) -> None:
        """Closes what has a `close`, the newest first; all of them: what one raises is logged.

        What was adopted goes before what was made, which it may use.
        """
        while self._adopted:
            thing, _ = self._adopted.popitem()
            _close(thing, thing)
        while self._made:
            _close(*self._made.popitem())


def _close(origin: object, value: Any) -> None:
    close = getattr(value, "close", None)
    try:
        if callable(close):
            close()
    except BaseException:  # also one that means to end the program: this is a thread of ours
        logger.exception("what %r made could not be closed", origin)
