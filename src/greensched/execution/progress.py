"""Progress of a copy, reported on the caller's loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from greensched._asynclib import is_coroutine_function
from greensched.errors import InvalidRequest
from greensched.execution.eventloop import LoopAdapter

#: Called with bytes done and bytes in all.
ProgressCallback = Callable[[int, int], object]


class ProgressReporter:
    """Calls a progress callback on the thread of the caller's loop.

    While the loop has no turn, a later report replaces the waiting one, so that none pile up.

    Args:
        callback: The caller's callback.
        nbytes: The bytes in all.
        loop: The caller's loop.
    """

    __slots__ = (
        "_callback",
        "_done",
        "_error",
        "_is_posted",
        "_loop",
        "_nbytes",
        "_reported",
        "_thread",
    )

    def __init__(self, callback: object, nbytes: int, loop: LoopAdapter) -> None:
        if not callable(callback) or is_coroutine_function(callback):
            raise InvalidRequest(
                f"progress={callback!r}: give a plain function of the bytes done and in all"
            )
        self._callback = callback
        self._nbytes = nbytes
        self._loop = loop
        self._thread = threading.get_ident()
        self._done = 0
        self._reported = -1
        self._is_posted = False
        self._error: Exception | None = None

    def advance(self, nbytes: int) -> None:
        """Report that more bytes are done. From any thread.

        Raises:
            Exception: An earlier call of the callback raised it.
        """
        self._done += nbytes
        if not self._is_posted:
            self._is_posted = True
            self._loop.call_threadsafe(self._report)
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Report that all bytes are done, before a task of the loop gets the job's value.

        Raises:
            Exception: As for `advance`.
        """
        self._done = self._nbytes
        if threading.get_ident() == self._thread:
            self._report()
        else:
            self._loop.call_threadsafe(self._report)
        if self._error is not None:
            raise self._error

    def _report(self) -> None:
        self._is_posted = False
        done = self._done
        if self._error is None and done > self._reported:
            self._reported = done
            try:
                self._callback(done, self._nbytes)
            except Exception as error:
                self._error = error
