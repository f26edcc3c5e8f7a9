"""The Prometheus metrics of pools: what a scrape shows, and that it agrees with the records."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from greensched import (
    ALL,
    Cancelled,
    DeadlineExceeded,
    DeviceLost,
    Drained,
    DriverUnavailable,
    Expired,
    Granted,
    LaunchConfig,
    Pool,
    Queued,
    QueueFull,
    Record,
    Refused,
    ServiceClass,
)
from greensched.driver.simulated import Crash, Fail
from greensched.errors import InvalidRequest
from greensched.integrations.prometheus import export
from greensched.integrations.testing import SimGPU
from greensched.kernels import spin

CONFIG = LaunchConfig(grid=1, block=1)
MS = 1_000_000
UUID = "GPU-51b00000-0000-0000-0000-000000000000"
CLASSES = (
    ServiceClass("critical", reserve=64, priority=1, max_wait_for_reserve=0.050),
    ServiceClass("batch", preemptible=True, checkpoint_interval=0.010, max_waiting=1),
)


@pytest.fixture
def gpu() -> Iterator[SimGPU]:
    made = SimGPU()
    yield made
    made.close()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


class Scrape:
    """The samples of one scrape, in the strict format."""

    def __init__(self, registry: CollectorRegistry) -> None:
        text = openmetrics(registry).decode()
        self.families = list(text_string_to_metric_families(text))
        self.samples = [one for family in self.families for one in family.samples]

    def __getitem__(self, name: str) -> dict[tuple[str, ...], float]:
        """Return a metric's values by its own labels, in order."""
        own = {"pool", "device"}
        return {
            tuple(
                value for label, value in sorted(one.labels.items()) if label not in own
            ): one.value
            for one in self.samples
            if one.name == f"greensched_{name}"
        }


async def lease(pool: Pool, sms: Any = 16, milliseconds: int = 1, **options: Any) -> None:
    async with pool.partition(sms, **options) as p:
        await p.launch(CONFIG, spin, milliseconds * MS)


async def traffic(pool: Pool) -> None:
    """Lease in two classes; some requests wait, are cancelled, expire or are refused."""
    await asyncio.gather(*(lease(pool, 64, 10, service="critical") for _ in range(5)))
    with pytest.raises(LookupError):
        async with pool.partition(32, service="batch") as p:
            p.launch(CONFIG, spin, 50 * MS)
            raise LookupError  # leaves work behind, so the lease drains
    async with pool.partition(ALL, service="critical"):
        waits = asyncio.ensure_future(lease(pool, service="batch"))
        await asyncio.sleep(0.001)
        with pytest.raises(QueueFull):
            await asyncio.create_task(lease(pool, service="batch"))
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        with pytest.raises(DeadlineExceeded):
            await asyncio.create_task(lease(pool, service="batch", deadline=0.01))


def test_metrics_agree_with_the_records(gpu: SimGPU, registry: CollectorRegistry) -> None:
    """SM-seconds, outcomes and histograms agree for each class."""
    seen = list[Record]()

    async def main() -> Scrape:
        async with gpu.pool(services=CLASSES) as pool:
            pool.watch(seen.append)
            export(pool, registry=registry)
            await traffic(pool)
            return Scrape(registry)

    found = gpu.run(main)
    sm_seconds, outcomes = Counter[str](), Counter[tuple[str, str]]()
    kinds = {Granted: "granted", Cancelled: "cancelled", Expired: "expired", Refused: "refused"}
    for record in seen:
        if isinstance(record, Drained):
            sm_seconds[record.service] += record.sm_seconds  # type: ignore[assignment]
        if type(record) in kinds:
            outcomes[kinds[type(record)], record.service] += 1  # type: ignore[attr-defined]
    for (service,), value in found["sm_seconds_total"].items():
        assert value == pytest.approx(sm_seconds[service], rel=0.01), service
    assert sm_seconds["critical"] > 64 * 0.050
    assert +Counter(found["requests_total"]) == outcomes
    assert {kind for kind, _ in outcomes} == {*kinds.values()}
    for name in ("wait", "use", "drain"):
        counts = found[f"lease_{name}_seconds_count"]
        assert counts["batch",] == outcomes["granted", "batch"]
        assert counts["critical",] == 6  # with the one of all SMs
    waits = [record.wait for record in seen if isinstance(record, Granted)]
    assert sum(found["lease_wait_seconds_sum"].values()) == pytest.approx(sum(waits))
    assert found["lease_drain_seconds_sum"]["batch",] == pytest.approx(0.050, rel=0.01)
    assert found["lease_drain_seconds_bucket"]["0.03125", "batch"] == 0
    assert found["lease_drain_seconds_bucket"]["0.0625", "batch"] == 1
    queued = sum(isinstance(record, Queued) for record in seen)
    assert found["wake_seconds_count"][()] == queued - 2  # one was cancelled, one expired


def test_a_simulated_driver_is_seen(gpu: SimGPU, registry: CollectorRegistry) -> None:
    """A service that was left on a simulated GPU by its environment can be found."""

    async def main() -> Scrape:
        async with gpu.pool() as pool:
            export(pool, registry=registry)
            return Scrape(registry)

    ((labels, value),) = gpu.run(main)["pool_info"].items()
    assert {"simulated", "fifo", "coscheduled"} <= set(labels)
    assert value == 1


def test_what_is_held_is_shown(gpu: SimGPU, registry: CollectorRegistry) -> None:
    """SMs and leases by state, the oldest lease, reserves, loans and waiting requests."""

    async def main() -> Scrape:
        async with gpu.pool(services=CLASSES) as pool:
            export(pool, registry=registry)
            async with pool.partition((8, ALL), service="batch"):
                waits = asyncio.ensure_future(lease(pool, 16, service="batch"))
                await asyncio.sleep(0.5)
                found = Scrape(registry)
            await waits
            return found

    found = gpu.run(main)
    assert {one.labels.get("device", UUID) for one in found.samples} == {UUID}
    assert found["sms_limit"][()] == sum(found["sms"].values()) == 132
    assert found["sms"]["leased",] == found["service_sms"]["batch",] > 68
    assert found["leases"] == {("batch", "used"): 1}
    assert found["oldest_lease_seconds"]["batch", "used"] == pytest.approx(0.5, abs=0.001)
    assert found["service_sms_reserved"]["critical",] == 64
    assert found["service_sms_lent"]["critical",] == found["service_sms"]["batch",] - 68
    assert found["requests_waiting"]["batch",] == 1
    assert found["pool_ready"] == {(): 1}


def test_shared_leases_count_their_sms_once(gpu: SimGPU, registry: CollectorRegistry) -> None:
    """Several leases of all SMs hold no more than the device has."""
    classes = [ServiceClass(name, shared=True, latency=1.0) for name in "ab"]

    async def main() -> Scrape:
        async with gpu.pool(services=classes) as pool:
            export(pool, registry=registry)
            async with pool.partition(16, service="a"):
                other = asyncio.ensure_future(lease(pool, 16, 100, service="b"))
                await asyncio.sleep(0.01)
                found = Scrape(registry)
            await other
            return found

    found = gpu.run(main)
    assert found["leases"] == {("a", "used"): 1, ("b", "used"): 1}
    assert found["sms"] == {("leased",): 132, ("draining",): 0, ("free",): 0}


def test_pools_of_one_registry_share_its_collector(
    gpu: SimGPU, registry: CollectorRegistry
) -> None:
    """Each metric has a sample for each open pool."""

    async def main() -> None:
        async with gpu.pool(16) as first:
            collector = export(first, registry=registry)
            assert export(first, registry=registry) is collector
            second = gpu.pool(32)
            with pytest.raises(InvalidRequest, match="another pool"):
                export(second, registry=registry)
            export(second, name="second", registry=registry)
            with pytest.raises(InvalidRequest, match="this pool"):
                export(second, name="third", registry=registry)
            async with second:
                found = Scrape(registry)
                names = [family.name for family in found.families]
                assert len({*names}) == len(names)
                assert {one.labels["pool"] for one in found.samples} == {"default", "second"}
            assert {one.labels["pool"] for one in Scrape(registry).samples} == {"default"}
        assert not Scrape(registry).samples
        async with gpu.pool(16) as again:
            export(again, registry=registry)
            assert Scrape(registry)["pool_ready"] == {(): 1}

    gpu.run(main)
    assert b"# TYPE greensched_sm_seconds_total counter" in generate_latest(registry)


def test_a_pool_that_cannot_open_says_why(gpu: SimGPU, registry: CollectorRegistry) -> None:
    """It is not ready, and the fault names the driver's status."""
    pool = gpu.pool(faults=[Fail("initialise", status="NO_DEVICE")])
    export(pool, registry=registry)
    assert Scrape(registry)["pool_ready"] == {(): 0}
    assert not Scrape(registry)["pool_fault"]

    async def main() -> None:
        with pytest.raises(DriverUnavailable):
            await pool.open()
        assert isinstance(pool.opening_error, DriverUnavailable)
        found = Scrape(registry)
        assert found["pool_ready"] == {(): 0}
        assert found["pool_fault"] == {("DriverUnavailable", "NO_DEVICE"): 1}
        async with pool:
            assert pool.opening_error is None
            assert not Scrape(registry)["pool_fault"]

    gpu.run(main)


def test_a_lost_device_is_down(gpu: SimGPU, registry: CollectorRegistry) -> None:
    """After a fault its GPU is down and the pool not ready; its counts stay."""

    async def main() -> Scrape:
        async with gpu.pool(faults=[Crash("spin")]) as pool:
            export(pool, registry=registry)
            with pytest.raises(DeviceLost):
                await lease(pool)
            return Scrape(registry)

    found = gpu.run(main)
    assert found["device_up"] == {(): 0}
    assert found["pool_ready"] == {(): 0}
    ((error, status),) = found["pool_fault"]
    assert (error, status) == ("DeviceFault", "ILLEGAL_ADDRESS")
    assert found["requests_total"]["granted", ""] == 1
