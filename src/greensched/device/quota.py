"""`MemoryQuota`: how much device memory a service class may have at once."""

from __future__ import annotations

import threading
from collections import deque

from greensched.errors import OutOfMemory


class MemoryQuota:
    """A count of used bytes with a limit.

    Attributes:
        most: The limit. None: no limit.
    """

    def __init__(self, name: str, most: int | None) -> None:
        self._name = name
        self.most = most
        self._lock = threading.Lock()
        self._used = 0
        #: Returned bytes that are not subtracted yet; finalisers append, even while the lock is
        #: held.
        self._returned: deque[int] = deque()

    def take(self, nbytes: int) -> None:
        """Count further bytes.

        Raises:
            OutOfMemory: The limit would be exceeded; it is the error's `total`.
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
