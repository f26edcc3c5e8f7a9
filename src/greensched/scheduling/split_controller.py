"""Decide when devices are split: only if a class does not meet its latency otherwise.

Plain streams on all SMs beat every split while nothing saturates (A100, small kernels of a hybrid
model: 0.85 ms against 0.96 ms and more). Classes that allow it (`ServiceClass.shared`) get
*shared grants*: each has all SMs of a device, several at once, each with its own executor. As soon
as one of these classes is near its latency, devices are split: from then on they get cells, even
while shared grants on the device still drain. All other requests wait for the shared grants on a
device to end, and no shared grant is made while an exclusive one has cells there.
"""

from __future__ import annotations

import math

from greensched.scheduling.class_state import ClassState

#: A latency above this fraction of its target counts as near it. The remaining fifth is about what
#: the worst measured neighbour on disjoint SMs costs.
NEAR = 0.8
#: How many latencies of a class are judged together, and one in how many may be near: 1 in 100
#: may miss a target.
LOOK, ONE_IN = 500, 100
#: The least seconds for which devices stay split. Doubled, up to `LONGEST`, each time that they
#: must be split again within `LONGEST` seconds.
HOLD, LONGEST = 1.0, 64.0


class SplitController:
    """Decides from the latencies of classes whether devices are split, with hysteresis."""

    __slots__ = ("_hold", "_previous", "_seen", "_since", "is_split")

    def __init__(self) -> None:
        self.is_split = False
        self._since, self._hold = 0.0, HOLD
        #: For each class: the number of latencies, and how many of them were near the target.
        self._seen: dict[ClassState, tuple[int, int]] = {}
        #: For the last time split and the last time not split: when it ended, and the
        #: `_near_fraction` at that moment.
        self._previous: dict[bool, tuple[float, float]] = {}

    def record(self, state: ClassState, latency: float, number: int, now: float) -> bool:
        """Record that `number` requests had this latency; say whether that changes the state."""
        if state.latency is None:
            return False
        seen, near = self._seen.get(state, (0, 0))
        seen += number
        near += number if latency > NEAR * state.latency else 0
        self._seen[state] = seen, near
        if self.is_split:
            if now - self._since < self._hold:
                return False
            is_calm = all(near * ONE_IN <= seen for seen, near in self._seen.values())
            before = self._near_before(now)
            is_worse = before is not None and self._near_fraction() > before
            return self._decide(now, is_split=not (is_calm or is_worse))
        is_over = seen >= LOOK
        if near * ONE_IN >= LOOK:
            before = self._near_before(now)
            # If the split helped last time, split now; otherwise observe both equally long.
            if before is None or before * ONE_IN <= 1 or is_over:
                return self._decide(now, is_split=before is None or self._near_fraction() > before)
        if is_over:
            self._seen[state] = 0, 0
        return False

    def _near_fraction(self) -> float:
        """Sum the classes' fractions of latencies that are near their targets."""
        return sum(near / seen for seen, near in self._seen.values() if seen)

    def _near_before(self, now: float) -> float | None:
        """Return the fraction of the last time in the other state; None if it was too long ago."""
        until, fraction = self._previous.get(not self.is_split, (-math.inf, 0.0))
        return fraction if now - until <= LONGEST else None

    def _decide(self, now: float, *, is_split: bool) -> bool:
        """Set the state; say whether it changed."""
        self._previous[self.is_split] = now, self._near_fraction()
        is_changed = is_split is not self.is_split
        if is_changed and is_split:
            is_soon = now - self._since < LONGEST
            self._hold = min(LONGEST, 2 * self._hold) if is_soon else HOLD
        self.is_split, self._since = is_split, now
        self._seen.clear()
        return is_changed

    def forget(self) -> None:
        """Drop all observations, because the classes have changed."""
        self._seen.clear()
        self._previous.clear()
