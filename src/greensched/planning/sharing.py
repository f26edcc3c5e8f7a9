"""When to split at all: a device that is not split while everybody does well without.

Plain streams on all SMs beat every split while nothing saturates (A100, small kernels of a hybrid
model: 0.85 ms against 0.96 and more). So classes that say they may (`unsplit`) are granted *seats*
on a device, each of them all of its SMs, several at once. A seat is a lease like any other, with a
lane of its own. As soon as one of those classes is near the latency it should have, the device is
split: from then on they are granted cells, at once, for who said `unsplit` is not disturbed by
seats whose work still drains. Everybody else is: he is granted nothing on a device as long as there
is a seat, nor is a seat while he has cells there.
"""

from __future__ import annotations

from greensched.planning.services import Flow

#: What takes more than this part of its latency counts: who is near it shall never be late. The
#: fifth left over is about what the largest neighbour costs that was measured on disjoint SMs.
NEAR = 0.8
#: Latencies of a class that are looked at together, and how many of them may be near its bound:
#: one in a hundred is what goodput allows.
LOOK, ONE_IN = 500, 100
#: Seconds for which devices stay split at least. Doubled each time that they must be split again
#: before the longest of them has passed.
HOLD, LONGEST = 1.0, 64.0


class Verdict:
    """Whether devices are split, from the latencies that classes have. With hysteresis."""

    __slots__ = ("_hold", "_seen", "_since", "is_split")

    def __init__(self) -> None:
        self.is_split = False
        self._since, self._hold = 0.0, HOLD
        #: Of each class: how many were seen, and how many were near.
        self._seen: dict[Flow, tuple[int, int]] = {}

    def saw(self, flow: Flow, latency: float, number: int, now: float) -> bool:
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
            # Where not even a split is enough, nothing is won by having none.
            is_calm = all(near * ONE_IN <= seen for seen, near in self._seen.values())
            self._change(now, is_split=not is_calm)
            return is_calm
        if near * ONE_IN >= LOOK:
            is_soon = now - self._since < LONGEST
            self._hold = min(LONGEST, 2 * self._hold) if is_soon else HOLD
            self._change(now, is_split=True)
            return True
        if seen >= LOOK:
            self._seen[flow] = 0, 0
        return False

    def forget(self) -> None:
        """The classes have changed: what was seen of them says nothing."""
        self._seen.clear()

    def _change(self, now: float, *, is_split: bool) -> None:
        self.is_split, self._since = is_split, now
        self.forget()
