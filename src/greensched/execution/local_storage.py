"""Values that users keep with an executor, made once for each executor and closed with it.

Examples are library handles, workspaces, communicators and graphs. If all partitions shared one,
concurrent work would use it, which corrupts some kinds and deadlocks others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from greensched.errors import InvalidRequest
from greensched.typing import T

logger = logging.getLogger("greensched")

#: The most values of one executor: far more than a program needs, but soon reached by a program
#: that passes a new function each time.
MAX_VALUES = 64


class Disposable(Protocol):
    """An object that is closed with the executor, unless its owner releases it earlier."""

    @property
    def is_idle(self) -> bool: ...

    def close(self) -> None: ...


class ExecutorLocals:
    """Values of one executor, by the factories that made them.

    Changed only on the executor's worker thread, with its context current.
    """

    def __init__(self) -> None:
        self._values: dict[Callable[[], Any], Any] = {}
        self._adopted: dict[Disposable, None] = {}
        #: Released objects that are not closed yet.
        self._released: deque[Disposable] = deque()
        #: How many values and objects leases made; those of `prepare_local` do not count.
        self.made = 0
        self.is_prepared = False

    def __bool__(self) -> bool:
        return bool(self._values or self._adopted)

    def has(self, factory: Callable[[], Any]) -> bool:
        """Say whether a factory has made its value. From any thread."""
        return factory in self._values

    def get(self, factory: Callable[[], T]) -> T:
        """Return a factory's value. The first time, call the factory and keep the value.

        Raises:
            InvalidRequest: There are `MAX_VALUES` values already.
        """
        if factory not in self._values:
            if len(self._values) >= MAX_VALUES:
                raise InvalidRequest(
                    f"{MAX_VALUES} functions have been given to `local` on these SMs: a value is "
                    "kept under its function, so give the same function each time, not a new lambda"
                )
            self._values[factory] = factory()
            self.made += not self.is_prepared
        return self._values[factory]  # type: ignore[no-any-return]  # what this factory made, of type T

    def adopt(self, disposable: Disposable) -> None:
        """Close an object with the executor, unless it is released earlier."""
        self._adopted[disposable] = None
        self.made += not self.is_prepared

    def release(self, disposable: Disposable) -> None:
        """Let the first `close_released` that finds an object idle close it.

        From any thread. Takes no lock.
        """
        self._released.append(disposable)

    def close_released(self) -> None:
        """Close the released objects that are idle."""
        for _ in range(len(self._released)):
            disposable = self._released.popleft()
            if not disposable.is_idle:
                self._released.append(disposable)
            elif disposable in self._adopted:
                del self._adopted[disposable]
                _close(disposable, disposable)

    def close(self) -> None:
        """Close everything that has a `close`, newest first; log exceptions.

        Adopted objects are closed first, because they may use the values.
        """
        while self._adopted:
            disposable, _ = self._adopted.popitem()
            _close(disposable, disposable)
        while self._values:
            _close(*self._values.popitem())


def _close(origin: object, value: Any) -> None:
    close = getattr(value, "close", None)
    try:
        if callable(close):
            close()
    except BaseException:  # even SystemExit, because this is the executor's worker thread
        logger.exception("the value of %r could not be closed", origin)
