"""OpenTelemetry's metrics and spans of pools: names, parents, times and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from greensched import (
    ALL,
    DeadlineExceeded,
    DeviceHung,
    DeviceLost,
    LaunchConfig,
    Pool,
    QueueFull,
    ServiceClass,
)
from greensched.driver.simulated import Crash
from greensched.errors import InvalidRequest
from greensched.integrations.opentelemetry import instrument
from greensched.integrations.testing import SimGPU
from greensched.kernels import spin

CONFIG = LaunchConfig(grid=1, block=1)
MS = 1_000_000
UUID = "GPU-51b00000-0000-0000-0000-000000000000"
BATCH = ServiceClass("batch", preemptible=True, checkpoint_interval=0.01)


class Telemetry:
    """Providers in memory, and a pool in virtual time that reports to them."""

    def __init__(self) -> None:
        self.gpu = SimGPU()
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.tracers.get_tracer("test")
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)

    def instrument(self, pool: Pool, **options: Any) -> None:
        instrument(pool, meter_provider=self.meters, tracer_provider=self.tracers, **options)

    def run(self, test: Callable[[Pool], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            async with self.gpu.pool(**options) as pool:
                self.instrument(pool)
                await test(pool)

        self.gpu.run(main)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def parent(self, name: str) -> str:
        """Return the name of the parent of the only span with a name."""
        (span,) = self.spans(name)
        named = {one.context.span_id: one.name for one in self.exporter.get_finished_spans()}
        return named[span.parent.span_id] if span.parent else ""

    def points(self, name: str) -> dict[tuple[str, ...], Any]:
        """Return a metric's points by their attributes without the pool's."""
        data = self.reader.get_metrics_data()
        return {
            tuple(
                value for key, value in sorted(point.attributes.items()) if "pool" not in key
            ): point
            for of_resource in (data.resource_metrics if data is not None else ())
            for scope in of_resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        }

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        return {labels: point.value for labels, point in self.points(name).items()}


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry()
    yield made
    made.meters.shutdown()
    made.tracers.shutdown()
    made.gpu.close()


def seconds(span: ReadableSpan) -> float:
    return (span.end_time - span.start_time) / 1e9


def test_spans_are_children_of_what_was_current(telemetry: Telemetry) -> None:
    """A lease's parent is the span of its request, a job's that of its submission."""

    async def test(pool: Pool) -> None:
        with telemetry.tracer.start_as_current_span("request"):
            async with pool.partition(16) as p:
                with telemetry.tracer.start_as_current_span("step"):
                    job = p.launch(CONFIG, spin, 2 * MS)
                await job

    telemetry.run(test)
    assert telemetry.parent("greensched.lease.acquire") == "request"
    assert telemetry.parent("greensched.lease.use") == "request"
    assert telemetry.parent("launch spin") == "step"
    (use,), (launch,) = telemetry.spans("greensched.lease.use"), telemetry.spans("launch spin")
    assert seconds(use) == pytest.approx(0.002, rel=0.05)
    assert seconds(launch) == pytest.approx(0.002, rel=0.05)
    assert [link.context.span_id for link in launch.links] == [use.context.span_id]
    assert use.attributes is not None
    assert use.attributes["hw.id"] == UUID
    assert use.attributes["greensched.sms"] == 16
    assert use.attributes["greensched.sm_seconds"] == pytest.approx(16 * seconds(use), rel=0.01)


def test_a_span_of_another_task_is_no_parent(telemetry: Telemetry) -> None:
    """A grant by another task's release is a child of its own request's span."""

    async def wait(pool: Pool) -> None:
        with telemetry.tracer.start_as_current_span("second"):
            async with pool.partition(8):
                pass

    async def test(pool: Pool) -> None:
        with telemetry.tracer.start_as_current_span("first"):
            async with pool.partition(ALL):
                waiting = asyncio.ensure_future(wait(pool))
                await asyncio.sleep(0.010)
        await waiting
        async with pool.partition(8):
            pass

    telemetry.run(test)
    acquires = sorted(telemetry.spans("greensched.lease.acquire"), key=lambda one: one.start_time)
    (first,), (second,) = telemetry.spans("first"), telemetry.spans("second")
    assert [one.parent and one.parent.span_id for one in acquires] == [
        first.context.span_id, second.context.span_id, None,
    ]  # fmt: skip
    assert [event.name for event in acquires[1].events] == ["queued"]
    assert seconds(acquires[1]) == pytest.approx(0.010, rel=0.01)


def test_what_fails_says_so(telemetry: Telemetry) -> None:
    """Refused and expired requests, and lost jobs, have a status and the error's name."""

    async def ask(pool: Pool, **options: Any) -> None:
        async with pool.partition(8, **options):
            pass

    async def test(pool: Pool) -> None:
        async with pool.partition(16) as p:
            async with pool.partition(112):
                waits = asyncio.ensure_future(ask(pool, deadline=0.01))
                await asyncio.sleep(0.001)
                with pytest.raises(QueueFull):
                    await asyncio.create_task(ask(pool))
                with pytest.raises(DeadlineExceeded):
                    await waits
            with pytest.raises(DeviceLost):
                await p.launch(CONFIG, spin, MS)

    with pytest.raises(DeviceLost):
        telemetry.run(test, max_waiting=1, faults=[Crash("spin")])
    failed = {
        (span.name, span.status.description)
        for span in telemetry.exporter.get_finished_spans()
        if not span.status.is_ok and not span.status.is_unset
    }
    assert failed == {
        ("greensched.lease.acquire", "QueueFull"),
        ("greensched.lease.acquire", "DeadlineExceeded"),
        ("launch spin", "DeviceLost"),
    }


def test_a_lease_that_gave_way_has_a_span_for_each_time(telemetry: Telemetry) -> None:
    """Each wait and use has a span, below that of the checkpoint."""

    async def batch(pool: Pool) -> None:
        with telemetry.tracer.start_as_current_span("batch"):
            async with pool.partition((8, ALL), service="batch") as p:
                await asyncio.sleep(0.010)
                await p.checkpoint()

    async def test(pool: Pool) -> None:
        running = asyncio.ensure_future(batch(pool))
        await asyncio.sleep(0.001)
        async with pool.partition(ALL, service="urgent"):
            await asyncio.sleep(0.010)
        await running

    telemetry.run(test, services=[BATCH, ServiceClass("urgent", priority=1)])
    (root,) = telemetry.spans("batch")
    uses = telemetry.spans("greensched.lease.use")
    first, second = [one for one in uses if one.attributes["greensched.service"] == "batch"]
    assert first.parent.span_id == root.context.span_id
    assert second.parent.span_id == root.context.span_id
    assert len(telemetry.spans("greensched.lease.acquire")) == 3


def test_the_parts_of_a_request_have_one_parent(telemetry: Telemetry) -> None:
    """A joint request is one span, with a span of use for each lease."""

    async def test(pool: Pool) -> None:
        with telemetry.tracer.start_as_current_span("request"):
            async with pool.partitions(8, 16):
                pass

    telemetry.run(test)
    (root,) = telemetry.spans("request")
    uses = telemetry.spans("greensched.lease.use")
    assert [one.parent.span_id for one in uses] == [root.context.span_id] * 2
    assert len(telemetry.spans("greensched.lease.acquire")) == 1


def test_metrics_have_the_names_and_values_of_the_pool(telemetry: Telemetry) -> None:
    """SMs, leases and requests by state, SM-seconds, and histograms."""

    async def test(pool: Pool) -> None:
        async with pool.partition(16, service="batch"):
            await asyncio.sleep(0.010)
        async with pool.partition(32, service="batch"):
            assert telemetry.values("greensched.lease.count") == {("used", "batch", UUID): 1}
            assert telemetry.values("greensched.sm.usage") == {
                ("leased", UUID): 32, ("draining", UUID): 0, ("free", UUID): 100,
            }  # fmt: skip
        assert telemetry.values("greensched.sm.limit") == {(UUID,): 132}
        assert telemetry.values("greensched.sm.time")["batch",] == pytest.approx(0.16, rel=0.01)
        assert telemetry.values("greensched.lease.pending_requests") == {("",): 0, ("batch",): 0}
        assert telemetry.values("greensched.lease.requests")["granted", "batch"] == 2
        assert telemetry.values("hw.status") == {(UUID, "ok", "gpu"): 1, (UUID, "failed", "gpu"): 0}
        use = telemetry.points("greensched.lease.use_time")["batch",]
        assert (use.count, use.explicit_bounds[0]) == (2, 2.0**-17)
        assert use.sum == pytest.approx(0.010, rel=0.01)
        for name in ("wait_time", "drain_time"):
            assert telemetry.points(f"greensched.lease.{name}")["batch",].count == 2

    telemetry.run(test, services=[BATCH])
    assert not telemetry.values("greensched.sm.limit")


def test_what_alerts_need_is_reported(telemetry: Telemetry) -> None:
    """What a pool runs, its readiness and fault, the oldest lease, hung SMs, and late wake-ups."""

    async def test(pool: Pool) -> None:
        (info,) = telemetry.values("greensched.pool.info")
        assert {"simulated", "fair", "fine"} <= set(info)
        async with pool.partition(16, service="batch"):
            await asyncio.sleep(0.5)
            ((labels, oldest),) = telemetry.values("greensched.lease.oldest").items()
            assert labels == ("used", "batch", UUID)
            assert oldest == pytest.approx(0.5, rel=0.01)
        async with pool.partition(ALL):
            waiting = asyncio.ensure_future(pool.launch(CONFIG, spin, 1000, sms=8))
            await asyncio.sleep(0.001)
        await waiting
        wakes = telemetry.values("greensched.wake.count")
        assert wakes["+Inf",] == wakes["1.0",] == 1
        with pytest.raises(DeviceHung):
            async with pool.partition(16, service="batch") as p:
                p.launch(CONFIG, spin, 10_000_000_000)
                await asyncio.sleep(2)
                assert telemetry.values("greensched.sm.hung") == {("batch", UUID): 16}
                assert telemetry.values("greensched.pool.ready") == {(): 1}
        with pytest.raises(DeviceLost):
            await pool.launch(CONFIG, spin, 1000, sms=16)
        assert telemetry.values("greensched.pool.ready") == {(): 0}
        assert telemetry.values("greensched.pool.fault") == {("DeviceFault", "ILLEGAL_ADDRESS"): 1}

    options = {"policy": "fair", "granularity": "fine", "hang_after": 1}
    telemetry.run(test, services=[BATCH], faults=[Crash("spin", 3)], **options)


def test_pools_of_one_provider_have_names(telemetry: Telemetry) -> None:
    """Two pools share the instruments; a name in use is refused."""

    async def test(first: Pool) -> None:
        telemetry.instrument(first)
        async with telemetry.gpu.pool(32) as second:
            with pytest.raises(InvalidRequest, match="another pool"):
                telemetry.instrument(second)
            telemetry.instrument(second, name="second")
            points = telemetry.reader.get_metrics_data().resource_metrics[0].scope_metrics
            (limit,) = [m for m in points[0].metrics if m.name == "greensched.sm.limit"]
            limits = {
                point.attributes["greensched.pool.name"]: point.value
                for point in limit.data.data_points
            }
            assert limits == {"default": 132, "second": 32}
        async with first.partition(16):
            pass
        assert len(telemetry.spans("greensched.lease.use")) == 1

    telemetry.run(test)
