"""Prometheus metrics of pools. Needs the extra `prometheus`.

    from greensched.integrations.prometheus import export

    export(pool)  # in prometheus_client's default registry, which its servers show

Each scrape reads `Pool.statistics` and `Pool.leases`; no thread runs. Only the durations of leases
are recorded as they happen, by `Pool.time_leases`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from greensched import Durations, Pool, ServiceStatistics
from greensched.errors import MissingPackage
from greensched.integrations.reading import (
    OUTCOMES,
    DeviceReading,
    ExportedPools,
    PoolReading,
    info,
    read,
)

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingPackage(__name__, "prometheus-client", "prometheus") from error

#: Each metric's kind, description, and labels beside `pool`, by its name without `greensched_`. A
#: device is a GPU's UUID. A service is a class; "" is for requests without a class.
METRICS: dict[str, tuple[Callable[..., Any], str, tuple[str, ...]]] = {
    "pool_info": (
        GaugeMetricFamily,
        "1: what a pool runs.",
        ("version", "driver", "policy", "granularity", "completion"),
    ),
    "pool_ready": (GaugeMetricFamily, "1 while the pool grants leases, else 0.", ()),
    "pool_fault": (
        GaugeMetricFamily,
        "1: why a pool did not open, or what ended it; status is the driver's.",
        ("error", "status"),
    ),
    "device_info": (GaugeMetricFamily, "1: what a GPU is.", ("device", "name", "ordinal")),
    "device_up": (GaugeMetricFamily, "1 while the GPU works, 0 once it is lost.", ("device",)),
    "sms_limit": (GaugeMetricFamily, "SMs of a GPU.", ("device",)),
    "sms": (
        GaugeMetricFamily,
        "SMs of a GPU: free, leased, or draining until the work of an ended lease is done.",
        ("device", "state"),
    ),
    "leases": (
        GaugeMetricFamily,
        "Leases by state: used or draining.",
        ("device", "service", "state"),
    ),
    "oldest_lease_seconds": (
        GaugeMetricFamily,
        "For how long the oldest lease has been in its state.",
        ("device", "service", "state"),
    ),
    "hung_sms": (
        GaugeMetricFamily,
        "SMs under work that has not ended within hang_after.",
        ("device", "service"),
    ),
    "service_sms": (GaugeMetricFamily, "SMs that a class holds.", ("service",)),
    "service_sms_lent": (
        GaugeMetricFamily,
        "SMs of the reserve of a class that others have borrowed.",
        ("service",),
    ),
    "service_sms_reserved": (GaugeMetricFamily, "SMs of the reserve of a class.", ("service",)),
    "sm_seconds": (
        CounterMetricFamily,
        "SM-seconds that the leases of a class took, running ones included.",
        ("service",),
    ),
    "requests_waiting": (GaugeMetricFamily, "Queued requests.", ("service",)),
    "requests": (
        CounterMetricFamily,
        "Requests by outcome: granted (each lease counts), cancelled, expired or refused.",
        ("service", "outcome"),
    ),
    "lease_wait_seconds": (
        HistogramMetricFamily,
        "From a request to its grant.",
        ("service",),
    ),
    "lease_use_seconds": (
        HistogramMetricFamily,
        "From a grant to the end of the block.",
        ("service",),
    ),
    "lease_drain_seconds": (
        HistogramMetricFamily,
        "From the end of the block until the work was done.",
        ("service",),
    ),
    "wake_seconds": (
        HistogramMetricFamily,
        "From the grant of a queued request until its task went on: the event loop's delay.",
        (),
    ),
}


def export(
    pool: Pool, *, name: str = "default", registry: CollectorRegistry = REGISTRY
) -> PoolCollector:
    """Export a pool's metrics until it is closed, and time its leases from now on.

    May be called before the pool is open. All pools of a registry share one collector. Never
    waits.

    Args:
        name: The label `pool`; no other open pool may have it.
        registry: The registry that collects the metrics.

    Returns:
        The registry's collector.

    Raises:
        InvalidRequest: Another pool has the name, or this pool has another name.
    """
    with _lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = PoolCollector()
            registry.register(collector)
            _collectors[registry] = collector
    collector.pools.add(pool, name)
    pool.time_leases()
    return collector


class PoolCollector(Collector):
    """Collects the metrics of all pools that were passed to `export`."""

    def __init__(self) -> None:
        self.pools = ExportedPools()

    def describe(self) -> Iterable[Metric]:
        """Return every metric without samples, because the registry needs their names."""
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        """Return every metric of every pool that is not closed."""
        families = _families()
        for name, pool in self.pools.live():
            _Samples(families, name).add_pool(read(pool))
        return families.values()


#: The collector of each registry.
_collectors: weakref.WeakKeyDictionary[CollectorRegistry, PoolCollector] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


def _families() -> dict[str, Any]:
    return {
        name: kind(f"greensched_{name}", text, labels=("pool", *labels))
        for name, (kind, text, labels) in METRICS.items()
    }


class _Samples:
    """Adds the samples of one pool to the families of one scrape."""

    def __init__(self, families: dict[str, Any], pool: str) -> None:
        self._families = families
        self._pool = pool

    def _add(self, name: str, value: float, *labels: str) -> None:
        self._families[name].add_metric((self._pool, *labels), value)

    def add_pool(self, reading: PoolReading) -> None:
        self._add("pool_ready", reading.is_ready)
        if reading.fault is not None:
            self._add("pool_fault", 1, type(reading.fault).__name__, reading.status)
        if reading.statistics is None:
            return
        self._add("pool_info", 1, *info(reading, reading.statistics).values())
        for device in reading.devices:
            self._add_device(device)
        for service, of_class in reading.statistics.services.items():
            self._add_service(service, of_class)
        self._add_durations("wake_seconds", reading.statistics.wake)

    def _add_device(self, reading: DeviceReading) -> None:
        device = reading.device
        self._add("device_info", 1, device.uuid, device.name, str(device.ordinal))
        self._add("device_up", reading.is_up, device.uuid)
        self._add("sms_limit", device.sm_count, device.uuid)
        for state, sms in reading.sms.items():
            self._add("sms", sms, device.uuid, state)
        for service, sms in reading.hung.items():
            self._add("hung_sms", sms, device.uuid, service)
        for (service, state), leases in reading.leases.items():
            self._add("leases", leases.count, device.uuid, service, state)
            self._add("oldest_lease_seconds", leases.oldest, device.uuid, service, state)

    def _add_service(self, service: str, statistics: ServiceStatistics) -> None:
        self._add("service_sms", statistics.sms, service)
        self._add("service_sms_lent", statistics.sms_lent, service)
        self._add("service_sms_reserved", statistics.reserve, service)
        self._add("sm_seconds", statistics.sm_seconds, service)
        self._add("requests_waiting", statistics.waiting, service)
        for outcome in OUTCOMES:
            self._add("requests", getattr(statistics, outcome), service, outcome)
        self._add_durations("lease_wait_seconds", statistics.wait, service)
        self._add_durations("lease_use_seconds", statistics.use, service)
        self._add_durations("lease_drain_seconds", statistics.drain, service)

    def _add_durations(self, name: str, durations: Durations | None, *labels: str) -> None:
        if durations is not None:
            buckets = [(str(bound), float(count)) for bound, count in durations.buckets]
            buckets.append(("+Inf", float(durations.count)))
            self._families[name].add_metric((self._pool, *labels), buckets, durations.seconds)
