"""What fraction of a latency target the scheduler may plan with, learned from late requests."""

from __future__ import annotations

#: The largest fraction of a latency that a plan uses. The rest allows for a late start, and for the
#: effects of neighbours on the device.
MOST = 0.95
#: The initial fraction, because a request that arrives just after a piece began waits for two
#: pieces. If a piece's deadline is known, no request waits for it, and twice the fraction is used.
SAFE = MOST / 2
#: The smallest fraction, however many requests were late.
LEAST = 0.2
#: The fewest latencies that can distinguish 1 in 100 late, which is allowed, from 1 in 200. After
#: this many latencies, the fraction rises if less than three fifths of the allowed number were
#: late, faster until it first falls. It falls as soon as more than four fifths were.
LOOK = 1000
MANY, FEW = 0.008, 0.006
FALL, RISE, RISE_FIRST = 0.9, 1.05, 1.2


class LatencyMargin:
    """The fraction of a class's latency target that the scheduler plans with."""

    __slots__ = ("_late", "_rise", "_seen", "fraction")

    def __init__(self) -> None:
        self.fraction = SAFE
        self._rise = RISE_FIRST
        self._late = self._seen = 0

    @property
    def of_deadline(self) -> float:
        """The fraction of a single piece's deadline."""
        return min(MOST, self.fraction * MOST / SAFE)

    def record(self, number: int, *, is_late: bool) -> None:
        """Record that `number` requests were in time, or late."""
        self._seen += number
        self._late += number if is_late else 0
        if self._late > MANY * max(LOOK, self._seen):
            self.fraction, self._rise = max(LEAST, self.fraction * FALL), RISE
        elif self._seen < LOOK:
            return
        elif self._late < FEW * self._seen:
            self.fraction = min(MOST, self.fraction * self._rise)
        self._late = self._seen = 0
