"""Reads of a pool's state that need not wait while a decision runs the user's code.

A decision holds the pool's lock, and its policy or duration curve may wait for a thread that reads
the pool: for example, for a log handler's lock, held by a thread that prints the pool. While the
user's code runs nothing changes, so the state can be read without the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from greensched.scheduling import user_code

#: Seconds between two checks of a read that waits for the lock: whether the user's code runs under
#: it.
LOOK_S: Final = 0.005


class DecisionReads:
    """The reads of one pool.

    Args:
        lock: The lock of the pool.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        #: Whether a thread that holds the lock runs the user's code.
        self._stands_still = False
        #: Held while a read without the lock is in progress.
        self._reading = threading.Lock()
        user_code.add_reader(self)

    def user_code_began(self) -> None:
        """Allow reads without the lock. See `user_code.Reader`."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # `Condition`'s
            self._stands_still = True

    def user_code_ended(self) -> None:
        """Wait for reads without the lock to end. See `user_code.Reader`."""
        if self._stands_still and self._lock._is_owned():  # type: ignore[attr-defined]  # as above
            with self._reading:
                self._stands_still = False

    @contextmanager
    def read(self) -> Generator[bool]:
        """Read while nothing changes. Yield whether the block may change something itself.

        The block may not change anything during a decision, on whatever thread.
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
