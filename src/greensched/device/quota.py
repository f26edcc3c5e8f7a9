"""`MemoryQuota`: how much device memory a service class may have at once."""

from __future__ import annotations

import threading
from collections import deque

from greensched.errors import OutOfMemory


class MemoryQuota:
    """A count of bytes in use, and their bound.

    Attributes:
        most: the bound; None: no bound.
    """

    def __init__(self, name: str, most: int | None) -> None:
        self._name = name
        self.most = most
        self._lock = threading.Lock()
        self._used = 0
        #: Returned, but not subtracted yet: a finaliser appends, perhaps while the lock is held.
        self._returned: deque[int] = deque()

    def take(self, nbytes: int) -> None:
        """Count more bytes.

        Raises:
            OutOfMemory: more than the bound, which is the error's `total`.
        """
        with self._lock:
            while self._returned:
                self._used -= self._returned.popleft()
            if self.most is not None and self._used + nbytes > self.most:
                what = f"memory_bytes of service {self._name!r}"
                raise OutOfMemory(what, nbytes, max(0, self.most - self._used), self.most)
            self._used += nbytes

    def give(self, nbytes: int) -> None:
        """Count bytes as returned. Takes no lock."""
        self._returned.append(nbytes)
