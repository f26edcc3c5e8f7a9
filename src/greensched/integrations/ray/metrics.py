"""A pool's statistics as Ray metrics, for its dashboard and for Prometheus."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from greensched import Pool

GAUGES = {
    "sms_total": "SMs of the pool's GPUs",
    "sms_leased": "SMs that are leased",
    "sms_draining": "SMs of ended leases whose work is not done",
    "sms_free": "SMs that one request can get now",
    "waiting": "queued requests",
}
COUNTERS = {
    "granted": "requests that were granted",
    "refused": "requests that were refused: a full queue, or a deadline that cannot be met",
    "expired": "requests whose deadline passed in the queue",
    "cancelled": "requests that were cancelled in the queue",
}


class PoolMetrics:
    """Metrics named `greensched_...`, with the tag `pool`. For a process of Ray.

    Args:
        name: the value of the tag.
    """

    def __init__(self, name: str) -> None:
        tags = {"pool": name}
        self._gauges = {
            key: Gauge(f"greensched_{key}", text, ("pool",)) for key, text in GAUGES.items()
        }
        self._counters = {
            key: Counter(f"greensched_{key}", text, ("pool",)) for key, text in COUNTERS.items()
        }
        for metric in (*self._gauges.values(), *self._counters.values()):
            metric.set_default_tags(tags)
        self._counted = dict.fromkeys(COUNTERS, 0)

    def update(self, pool: Pool) -> None:
        """Record the current statistics."""
        statistics = pool.statistics()
        for key, gauge in self._gauges.items():
            gauge.set(getattr(statistics, key))
        for key, counter in self._counters.items():
            new = getattr(statistics, key) - self._counted[key]
            if new:
                counter.inc(new)
                self._counted[key] += new
