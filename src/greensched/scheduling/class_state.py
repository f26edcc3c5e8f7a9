"""The scheduler's record of a service class: what it holds, and what was measured."""

from __future__ import annotations

import math
from typing import Final

from greensched.scheduling.histogram import Histogram
from greensched.scheduling.latency_margin import LatencyMargin
from greensched.scheduling.services import NO_CAP, ServiceClass
from greensched.typing import NamedSize

#: The weight of the newest sample in a smoothed value; about the last ten samples count.
SMOOTHING: Final = 0.1

#: After `PROBE_AFTER` requests of a class that would be late, one is admitted, to test the class's
#: durations. The number then doubles each time, up to `PROBE_MOST`, until a lease takes less than
#: `SHORTER` of its expected duration.
PROBE_AFTER, PROBE_MOST = 8, 1024
SHORTER = 0.8
#: The assumed seconds of a lease while nothing is known: about one job, as in `Fifo`.
UNKNOWN_LEASE: Final = 0.020
#: Seconds in which half of a class's overruns is forgotten: some hundred leases, so that a class
#: that was slow once may borrow again within a minute.
HALF_LIFE = 10.0

#: Seconds of its quota that a class may save up: two leases of medium length, so that a class
#: within its quota rarely waits because of it.
QUOTA_WINDOW = 1.0

#: Seconds that a class over its quota waits after its debt is paid: at that time it has exactly 0
#: SM-seconds, which allow no grant. Larger than the rounding error of a time.
QUOTA_STEP = 1e-6


class ClassState:
    """The state of one class. All requests without a class share one state, named ""."""

    def __init__(self, rules: ServiceClass) -> None:
        #: The SMs that it holds, including draining ones.
        self.sms = 0
        #: The cells that it holds on the device of its reserve, and how many of these are borrowed.
        self.cells = self.borrowed = 0
        #: The cells of its reserve that are lent, and the free ones that are kept for it.
        self.lent = self.reserved_free = 0
        #: Its elastic grants there that have less than they may have.
        self.short = 0
        #: The number of its queued requests.
        self.waiting = 0
        #: Fair queueing: where its last grant begins and ends in virtual time, and where its next
        #: one begins, as last computed.
        self.start = self.finish = self.tag = 0.0
        #: The SM-seconds of its ended leases, and the number of its leases.
        self.sm_time = 0.0
        self.granted = 0
        #: Its requests with other outcomes.
        self.cancelled = self.expired = self.refused = 0
        #: If leases are timed: how long its requests waited, its leases lasted, and its work took
        #: after the end of a lease. A lease on a suspended grant did not wait, and is not in
        #: `wait`; one whose grant is then suspended did not drain, and is not in `drain`.
        self.wait, self.use, self.drain = Histogram(), Histogram(), Histogram()
        #: The leases granted before leases were timed.
        self.untimed = 0
        #: In seconds: the mean duration of a lease, the recent longest, and the recent longest time
        #: between two checkpoints.
        self.mean_duration = self.longest_duration = self.checkpoint_interval = 0.0
        #: By what factor its recent leases exceeded their known durations, at least 1.
        self.overrun_factor = 1.0
        #: The duration of its leases as a fraction of what was expected, at most 1.
        self.duration_ratio = 1.0
        self._refusals, self._probe_after = 0, PROBE_AFTER
        self._overruns_since = 0.0
        #: The SM-seconds left of its quota, and when they were last computed.
        self.tokens, self.refilled = math.inf, 0.0
        #: Whether latencies come from `Pool.observe`; otherwise those of its leases count.
        self.reports_latency = False
        self.margin = LatencyMargin()
        #: The cells of its reserve, and their device; set by `place_reserves`.
        self.reserve_cells, self.home = 0, 0
        self.set_rules(rules)

    def set_rules(self, rules: ServiceClass) -> None:
        """Apply other rules from now on. The class keeps what it holds."""
        self.rules = rules
        self.priority = rules.priority
        self.weight = rules.weight
        self.preemptible = rules.preemptible
        self.shared = rules.shared
        self.max_wait = rules.reserve_wait
        self.sizes = rules.sizes
        self.cap = NO_CAP if isinstance(rules.cap, NamedSize) else rules.cap
        # Python's own numbers, because the compiled build accepts no others.
        self.latency = None if rules.latency is None else float(rules.latency)
        self.quota = None if rules.quota is None else float(rules.quota)
        self.max_waiting = math.inf if rules.max_waiting is None else rules.max_waiting
        if rules.quota is None:
            self.tokens = math.inf
        elif self.tokens == math.inf:
            self.tokens = float(rules.quota) * QUOTA_WINDOW

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.rules.name

    def account(self, cells: int = 0, *, borrowed: int = 0, lent: int = 0) -> None:
        """Add cells on the device of its reserve, with how many are borrowed and lent."""
        self.cells += cells
        self.borrowed += borrowed
        self.lent += lent
        free = self.reserve_cells - self.cells + self.borrowed - self.lent
        self.reserved_free = free if free > 0 else 0  # noqa: FURB136  `max` is slower, and each grant comes here

    # -- what is measured --------------------------------------------------------------------------

    # The longest values rise immediately and fall slowly, because waits are promised by them.

    def record_interval(self, seconds: float) -> None:
        """Record the time between two checkpoints."""
        old = self.checkpoint_interval
        self.checkpoint_interval = seconds if seconds > old else old + SMOOTHING * (seconds - old)

    def record_lease(self, seconds: float, last: float, duration: float | None) -> None:
        """Record a lease.

        Args:
            seconds: How long the lease took.
            last: How much of that came after its last checkpoint.
            duration: The expected duration. None: unknown.
        """
        self.record_interval(last)
        old = self.longest_duration
        self.longest_duration = seconds if seconds > old else old + SMOOTHING * (seconds - old)
        self.mean_duration += (SMOOTHING if self.mean_duration else 1.0) * (
            seconds - self.mean_duration
        )
        if duration:
            over, old = seconds / duration, self.overrun_factor
            self.overrun_factor = over if over > old else max(1.0, old + SMOOTHING * (over - old))
            is_first = self.duration_ratio == 1.0
            self.duration_ratio += (1.0 if is_first else SMOOTHING) * (over - self.duration_ratio)
            self.duration_ratio = min(1.0, self.duration_ratio)
            if over < SHORTER:
                self._probe_after = PROBE_AFTER

    def is_probe(self) -> bool:
        """Count a request that would be refused; say whether to admit it as a probe."""
        self._refusals += 1
        if self._refusals < self._probe_after:
            return False
        self._refusals, self._probe_after = 0, min(PROBE_MOST, 2 * self._probe_after)
        return True

    def forget_overruns(self, now: float) -> None:
        """Forget part of its overruns, according to the time that has passed."""
        kept = 0.5 ** max(0.0, (now - self._overruns_since) / HALF_LIFE)
        self._overruns_since = now
        self.overrun_factor = 1.0 + kept * (self.overrun_factor - 1.0)
        declared = self.rules.checkpoint_interval
        if declared is not None:
            over = max(0.0, self.checkpoint_interval - declared)
            self.checkpoint_interval -= (1.0 - kept) * over
            over = max(0.0, self.longest_duration - declared)
            self.longest_duration -= (1.0 - kept) * over

    def record_latency(self, latency: float, number: int) -> None:
        """Record that `number` requests had this latency."""
        if self.latency is not None:
            self.margin.record(number, is_late=latency > self.latency)

    def longest_interval(self) -> float:
        """Return the seconds until it returns a loan; infinite if unknown."""
        return max(self.rules.checkpoint_interval or 0.0, self.checkpoint_interval) or math.inf

    def longest_lease(self, duration: float | None, *, is_elastic: bool) -> float:
        """Return the seconds until one of its leases has ended; infinite if unknown.

        A lease of one size returns nothing before its end, so the declared interval bounds it.
        """
        if duration is not None:
            return duration * self.overrun_factor
        declared = self.mean_duration if is_elastic else self.rules.checkpoint_interval or 0.0
        return max(declared, self.longest_duration) or math.inf

    # -- its quota ---------------------------------------------------------------------------------

    def is_within_quota(self, now: float) -> bool:
        """Say whether its quota allows a grant now."""
        if self.quota is None:
            return True
        most = self.quota * QUOTA_WINDOW
        self.tokens = min(most, self.tokens + self.quota * (now - self.refilled))
        self.refilled = now
        return self.tokens > 0

    def refilled_at(self) -> float:
        """Return when its quota allows a grant again."""
        assert self.quota is not None
        return self.refilled + max(0.0, -self.tokens) / self.quota + QUOTA_STEP
