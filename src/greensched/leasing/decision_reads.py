"""Reads of a pool's state, also while a decision of another thread runs the user's code.

A decision holds the pool's lock, and its policy or duration curve may wait for a thread that reads:
for the lock of a log handler, which prints the pool on another thread. Nothing changes as long as
that code runs, so the state can be read without the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from greensched.scheduling import user_code

#: Seconds after which a read that waits for the lock looks whether the user's code runs under it.
LOOK_S: Final = 0.005


class DecisionReads:
    """The reads of one pool.

    Args:
        lock: the pool's.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        #: A thread that holds the lock runs the user's code.
        self._stands_still = False
        #: Held by what reads without the lock.
        self._reading = threading.Lock()
        user_code.add_reader(self)

    def user_code_began(self) -> None:
        """See `user_code.Reader`."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # `Condition`'s
            self._stands_still = True

    def user_code_ended(self) -> None:
        """See `user_code.Reader`."""
        if self._stands_still and self._lock._is_owned():  # type: ignore[attr-defined]  # as above
            with self._reading:
                self._stands_still = False

    @contextmanager
    def read(self) -> Generator[bool]:
        """Have nothing change meanwhile. Yield whether the block may change something itself.

        It may not inside a decision, of this thread or of another one.
        """
        in_decision: bool = self._lock._is_owned()  # type: ignore[attr-defined]  # as above
        while not self._lock.acquire(timeout=LOOK_S):
            with self._reading:
                if self._stands_still:
                    yield False
                    return
        try:
            yield not in_decision
        finally:
            self._lock.release()
