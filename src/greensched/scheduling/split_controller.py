"""When to split at all: a device that is not split while everybody does well without.

Plain streams on all SMs beat every split while nothing saturates (A100, small kernels of a hybrid
model: 0.85 ms against 0.96 and more). So classes that say they may (`shared`) are granted *seats*
on a device, each of them all of its SMs, several at once. A seat is a lease like any other, with a
lane of its own. As soon as one of those classes is near the latency it should have, the device is
split: from then on they are granted cells, at once, for who said `shared` is not disturbed by
seats whose work still drains. Everybody else is: he is granted nothing on a device as long as there
is a seat, nor is a seat while he has cells there.
"""

from __future__ import annotations

import math

from greensched.scheduling.class_state import ClassState

#: What takes more than this part of its latency counts: who is near it shall never be late. The
#: fifth left over is about what the largest neighbour costs that was measured on disjoint SMs.
NEAR = 0.8
#: Latencies of a class that are looked at together, and how many of them may be near its bound:
#: one in a hundred is what goodput allows.
LOOK, ONE_IN = 500, 100
#: Seconds for which devices stay split at least. Doubled each time that they must be split again
#: before the longest of them has passed.
HOLD, LONGEST = 1.0, 64.0


class SplitController:
    """Whether devices are split, from the latencies that classes have. With hysteresis."""

    __slots__ = ("_hold", "_seen", "_since", "_was", "is_split")

    def __init__(self) -> None:
        self.is_split = False
        self._since, self._hold = 0.0, HOLD
        #: Of each class: how many were seen, and how many were near.
        self._seen: dict[ClassState, tuple[int, int]] = {}
        #: When devices were last split, and last were not: until when, and what `_trouble` was.
        self._was: dict[bool, tuple[float, float]] = {}

    def saw(self, flow: ClassState, latency: float, number: int, now: float) -> bool:
        """So many of a class had this latency. Returns whether that changes the verdict."""
        if flow.latency is None:
            return False
        seen, near = self._seen.get(flow, (0, 0))
        seen += number
        near += number if latency > NEAR * flow.latency else 0
        self._seen[flow] = seen, near
        if self.is_split:
            if now - self._since < self._hold:
                return False
            is_calm = all(near * ONE_IN <= seen for seen, near in self._seen.values())
            was = self._before(now)
            is_worse = was is not None and self._trouble() > was
            return self._decide(now, is_split=not (is_calm or is_worse))
        is_over = seen >= LOOK
        if near * ONE_IN >= LOOK:
            was = self._before(now)
            # Where the split was some help it is so at once; else both are looked at for as long.
            if was is None or was * ONE_IN <= 1 or is_over:
                return self._decide(now, is_split=was is None or self._trouble() > was)
        if is_over:
            self._seen[flow] = 0, 0
        return False

    def _trouble(self) -> float:
        """How many are near: the sum of the classes' parts."""
        return sum(near / seen for seen, near in self._seen.values() if seen)

    def _before(self, now: float) -> float | None:
        """The same when devices were split, or not, the last time; None: too long ago to count."""
        until, trouble = self._was.get(not self.is_split, (-math.inf, 0.0))
        return trouble if now - until <= LONGEST else None

    def _decide(self, now: float, *, is_split: bool) -> bool:
        """From now on they are split, or are not. Returns whether they were not, or were."""
        self._was[self.is_split] = now, self._trouble()
        is_changed = is_split is not self.is_split
        if is_changed and is_split:
            is_soon = now - self._since < LONGEST
            self._hold = min(LONGEST, 2 * self._hold) if is_soon else HOLD
        self.is_split, self._since = is_split, now
        self._seen.clear()
        return is_changed

    def forget(self) -> None:
        """The classes have changed: what was seen of them says nothing."""
        self._seen.clear()
        self._was.clear()
