"""How much of a latency a plan may use, by what became of plans before."""

from __future__ import annotations

#: The part of a latency that a plan uses at most: the rest is for a start that is late, and for
#: what a neighbour does.
MOST = 0.95
#: Where it begins: whoever comes just after a piece began waits for two of them. Where a piece's
#: own deadline is known, nobody does, and twice as much of it is planned with.
SAFE = MOST / 2
#: At least so much is planned with, whatever was late.
LEAST = 0.2
#: Fewer latencies than these do not tell 1 in 100, which may be late, from 1 in 200. Of so many the
#: part rises where less than three fifths of that was late, faster until it first fell; it falls as
#: soon as more than four fifths are.
LOOK = 1000
MANY, FEW = 0.008, 0.006
FALL, RISE, RISE_FIRST = 0.9, 1.05, 1.2


class LatencyMargin:
    """The part of its latency that a class's plans use."""

    __slots__ = ("_late", "_rise", "_seen", "part")

    def __init__(self) -> None:
        self.part = SAFE
        self._rise = RISE_FIRST
        self._late = self._seen = 0

    @property
    def of_deadline(self) -> float:
        """The part that is used of the deadline of one piece."""
        return min(MOST, self.part * MOST / SAFE)

    def saw(self, number: int, *, is_late: bool) -> None:
        """So many were in time, or late."""
        self._seen += number
        self._late += number if is_late else 0
        if self._late > MANY * max(LOOK, self._seen):
            self.part, self._rise = max(LEAST, self.part * FALL), RISE
        elif self._seen < LOOK:
            return
        elif self._late < FEW * self._seen:
            self.part = min(MOST, self.part * self._rise)
        self._late = self._seen = 0
