"""What the scheduler remembers of a service class: what it has now, and has had."""

from __future__ import annotations

import math
from typing import Final

from greensched.scheduling.latency_margin import LatencyMargin
from greensched.scheduling.services import NO_CAP, ServiceClass
from greensched.typing import NamedSize

#: Weight of the newest sample in what a class is remembered by: the last ten or so count.
SMOOTHING: Final = 0.1

#: Seconds of its quota that a class may save up: two leases of middling length, so that a class
#: within its quota rarely waits because of it.
QUOTA_WINDOW = 1.0


class ClassState:
    """What the scheduler remembers of a class. Every user without one is in one flow together."""

    __slots__ = (
        "borrowed",
        "budget",
        "cap",
        "cells",
        "finish",
        "granted",
        "home",
        "interval",
        "is_told",
        "kept",
        "latency",
        "lent",
        "longest",
        "max_waiting",
        "mean",
        "moved",
        "need",
        "pace",
        "preemptible",
        "priority",
        "quota",
        "refilled",
        "rules",
        "segment",
        "shared",
        "short",
        "slip",
        "sm_time",
        "sms",
        "start",
        "tag",
        "tokens",
        "waiting",
        "weight",
        "work",
    )

    def __init__(self, rules: ServiceClass) -> None:
        #: SMs it holds, draining ones included.
        self.sms = 0
        #: Cells it holds on the device of its floor, and how many of them are on loan to it.
        self.cells = self.borrowed = 0
        #: Cells of its floor that others have on loan; and those that are free, and its own.
        self.lent = self.kept = 0
        #: Its elastic leases there that have less than they may have.
        self.short = 0
        #: Its requests that are queued, and the SM-seconds they are expected to take.
        self.waiting = 0
        self.work = 0.0
        #: Fair queueing: where its last grant started and ends in virtual time; and where its next
        #: one starts, as last looked at.
        self.start = self.finish = self.tag = 0.0
        #: SM-seconds it had, and leases.
        self.sm_time = 0.0
        self.granted = 0
        #: Seconds of a lease on average; of the longest of late; between checkpoints.
        self.mean = self.longest = self.segment = 0.0
        #: How much longer than their known duration its leases took, of late; at least 1.
        self.slip = 1.0
        #: When its queue last moved, and the mean time between its moves.
        self.moved = self.interval = 0.0
        #: SM-seconds left of its quota, and since when.
        self.tokens, self.refilled = math.inf, 0.0
        #: Its users say what latency they have; else that of its leases counts.
        self.is_told = False
        self.pace = LatencyMargin()
        #: Its floor in cells, and the device it is on; set by `lending`.
        self.need, self.home = 0, 0
        self.set_rules(rules)

    def set_rules(self, rules: ServiceClass) -> None:
        """What it is promised from now on; what it has, it keeps."""
        self.rules = rules
        self.priority = rules.priority
        self.weight = rules.weight
        self.preemptible = rules.preemptible
        self.shared = rules.shared
        self.budget = rules.blocking_budget
        self.cap = NO_CAP if isinstance(rules.cap, NamedSize) else rules.cap
        self.latency = rules.latency
        self.quota = rules.quota
        self.max_waiting = math.inf if rules.max_waiting is None else rules.max_waiting
        if rules.quota is None:
            self.tokens = math.inf
        elif self.tokens == math.inf:
            self.tokens = rules.quota * QUOTA_WINDOW

    @property
    def name(self) -> str:
        """The class's."""
        return self.rules.name

    def account(self, cells: int = 0, *, borrowed: int = 0, lent: int = 0) -> None:
        """It has so many more cells on the device of its floor, so many of them on loan.

        And others have so many more of its floor on loan; what is on loan to it is not of that.
        """
        self.cells += cells
        self.borrowed += borrowed
        self.lent += lent
        kept = self.need - self.cells + self.borrowed - self.lent
        self.kept = kept if kept > 0 else 0  # noqa: FURB136  counted at every grant

    # -- what is seen of it ----------------------------------------------------------------------

    # Rising at once and falling slowly: what is promised of a class goes by its longest of late.

    def saw_segment(self, seconds: float) -> None:
        """It went so long without a checkpoint."""
        old = self.segment
        self.segment = seconds if seconds > old else old + SMOOTHING * (seconds - old)

    def saw_lease(self, seconds: float, segment: float, duration: float | None) -> None:
        """Record a lease that took `seconds`; `segment` is its last part without a checkpoint."""
        self.saw_segment(segment)
        old = self.longest
        self.longest = seconds if seconds > old else old + SMOOTHING * (seconds - old)
        self.mean += (SMOOTHING if self.mean else 1.0) * (seconds - self.mean)
        if duration:
            over = seconds / duration
            self.slip = (
                over if over > self.slip else max(1.0, self.slip + SMOOTHING * (over - self.slip))
            )

    def saw_latency(self, latency: float, number: int) -> None:
        """So many of it had this latency."""
        if self.latency is not None:
            self.pace.saw(number, is_late=latency > self.latency)

    def longest_segment(self) -> float:
        """Seconds until it gives back a loan, as far as is known; infinite: nothing is."""
        return max(self.rules.checkpoint_interval or 0.0, self.segment) or math.inf

    def longest_lease(self, duration: float | None, *, is_elastic: bool) -> float:
        """Seconds until a lease of it has ended, as far as is known; infinite: nothing is.

        A lease of one size has nothing to give back before its end, so its end is its segment.
        """
        if duration is not None:
            return duration * self.slip
        declared = 0.0 if is_elastic else self.rules.checkpoint_interval or 0.0
        return max(declared, self.longest) or math.inf

    # -- its quota -------------------------------------------------------------------------------

    def is_within_quota(self, now: float) -> bool:
        """Whether it may be granted more now."""
        if self.quota is None:
            return True
        most = self.quota * QUOTA_WINDOW
        self.tokens = min(most, self.tokens + self.quota * (now - self.refilled))
        self.refilled = now
        return self.tokens > 0

    def refilled_at(self) -> float:
        """When it is within its quota again."""
        assert self.quota is not None
        return self.refilled + max(0.0, -self.tokens) / self.quota
