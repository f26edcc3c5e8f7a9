"""What a lane's users keep with it: made once for each lane, closed with it.

Handles of libraries, workspaces, communicators, graphs: one made for all partitions is shared by
work that runs at the same time, which corrupts some and deadlocks others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from greensched.errors import InvalidRequest

T = TypeVar("T")

logger = logging.getLogger("greensched")

#: Things of one lane at most: far more than anybody means to keep, and soon reached by whoever
#: gives a new function each time.
MOST = 64


class Belongings:
    """Of one lane, by what made them. Changed on the lane's worker only, its context current."""

    def __init__(self) -> None:
        self._made: dict[Callable[[], Any], Any] = {}

    def __bool__(self) -> bool:
        return bool(self._made)

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
        return self._made[factory]  # type: ignore[no-any-return]  # T

    def close(self) -> None:
        """Closes what has a `close`, the newest first; all of them: what one raises is logged."""
        while self._made:
            factory, value = self._made.popitem()
            close = getattr(value, "close", None)
            try:
                if callable(close):
                    close()
            except Exception:
                logger.exception("what %r made could not be closed", factory)
