"""How much of a latency a plan may use, by what became of plans before."""

from __future__ import annotations

#: The part of a latency that a plan uses at most; the rest is for a start that is late. It begins
#: there: few are late where nobody waits for a lease.
MOST = 0.95
#: At least so much is planned with, whatever was late.
LEAST = 0.2
#: After so many latencies the part is looked at: a tenth less where more than four fifths of what
#: may be late (1 in 100) was, a twentieth more where less than half of it was.
LOOK = 500
MANY, FEW = 0.008, 0.005


class Pace:
    """The part of its latency that a class's plans use."""

    __slots__ = ("_late", "_seen", "part")

    def __init__(self) -> None:
        self.part = MOST
        self._late = self._seen = 0

    def saw(self, number: int, *, is_late: bool) -> None:
        """So many were in time, or late."""
        self._seen += number
        self._late += number if is_late else 0
        if self._seen < LOOK:
            return
        share = self._late / self._seen
        if share > MANY:
            self.part = max(LEAST, self.part * 0.9)
        elif share < FEW:
            self.part = min(MOST, self.part * 1.05)
        self._late = self._seen = 0
