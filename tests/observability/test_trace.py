"""`Pool.trace`: a file that Perfetto's definitions parse, complete however its block ends."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
from prometheus_client import CollectorRegistry

from greensched import (
    ALL,
    DeadlineExceeded,
    DeviceLost,
    InvalidRequest,
    LaunchConfig,
    MissingPackage,
    Pool,
    PoolClosed,
    QueueFull,
    ServiceClass,
)
from greensched.driver.simulated import Crash
from greensched.integrations.prometheus import export
from greensched.integrations.testing import SimGPU
from greensched.kernels import spin
from greensched.observability import trace as tracing
from greensched.observability.trace_reader import read

CONFIG = LaunchConfig(grid=1, block=1)
MS = 1_000_000
CLASSES = (
    ServiceClass("chat", reserve=64, priority=1, max_wait_for_reserve=0.050),
    ServiceClass("batch", preemptible=True, checkpoint_interval=0.010),
)
Test = Callable[[Pool], Awaitable[object]]


def in_pool(test: Test, **options: Any) -> None:
    """Run a test with an open pool in virtual time."""
    gpu = SimGPU()
    faults, backend = options.pop("faults", ()), options.pop("backend", "asyncio")

    async def main() -> None:
        async with gpu.pool(faults=faults, **options) as pool:
            await test(pool)

    gpu.run(main, backend=backend)


async def lease(pool: Pool, sms: Any = 16, ms: float = 1, **options: Any) -> None:
    async with pool.partition(sms, **options) as p:
        await p.launch(CONFIG, spin, round(ms * MS))


def parsed(path: Path) -> list[TrackEvent]:
    """The events of a trace, by the definitions of the format, all of whose rules are checked.

    Times do not decrease; tracks are described before they are used, once, and so are their
    parents; slices nest and end; a flow ends where it began elsewhere; counters have values.
    Perfetto's trace processor nests the instants of a track that have one time, 512 deep at most.
    """
    trace = Trace.FromString(path.read_bytes())
    tracks: dict[int, Any] = {}
    open_slices = Counter[int]()
    instants = Counter[tuple[int, int]]()
    flows: set[int] = set()
    events, latest = [], 0
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id == 1
        if packet.HasField("track_descriptor"):
            described = packet.track_descriptor
            assert described.uuid not in tracks
            assert described.parent_uuid in {0, *tracks}
            tracks[described.uuid] = described
            continue
        event = packet.track_event
        assert packet.timestamp >= latest
        latest = packet.timestamp
        is_counter = tracks[event.track_uuid].HasField("counter")
        assert (
            is_counter == (event.type == TrackEvent.TYPE_COUNTER) == event.HasField("counter_value")
        )
        open_slices[event.track_uuid] += event.type == TrackEvent.TYPE_SLICE_BEGIN
        open_slices[event.track_uuid] -= event.type == TrackEvent.TYPE_SLICE_END
        assert open_slices[event.track_uuid] >= 0
        instants[event.track_uuid, latest] += event.type == TrackEvent.TYPE_INSTANT
        assert open_slices[event.track_uuid] + instants[event.track_uuid, latest] <= 512
        assert set(event.terminating_flow_ids) <= flows
        flows -= set(event.terminating_flow_ids)
        flows |= set(event.flow_ids)
        events.append(event)
    assert not +open_slices
    return events


def test_ten_seconds_of_a_service(tmp_path: Path) -> None:
    """SM-time by class and requests agree with statistics and Prometheus."""
    path = tmp_path / "t.perfetto-trace"

    async def batch(pool: Pool, end: float) -> None:
        async with pool.partition((8, 128), service="batch") as p:
            while asyncio.get_running_loop().time() < end:
                await asyncio.gather(*(p.launch(CONFIG, spin, 40 * MS) for _ in range(2)))
                await p.checkpoint()
            p.launch(CONFIG, spin, 5 * MS)  # the lease drains

    async def clients(pool: Pool, end: float) -> None:
        times, loop = random.Random(1), asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while loop.time() < end:
                await asyncio.sleep(times.expovariate(20))
                sms = times.choice([8, 16, 64])
                tasks.create_task(lease(pool, sms, times.uniform(5, 120), service="chat"))

    async def test(pool: Pool) -> None:
        registry = CollectorRegistry()
        export(pool, registry=registry)
        async with pool.trace(path):
            await asyncio.gather(batch(pool, 10), clients(pool, 10))
        trace, statistics = read(path), pool.statistics()
        assert trace.end - trace.start > 10
        assert (trace.dropped, trace.is_complete) == (0, True)
        assert set(trace.history.services) == {"chat", "batch"}
        for name, found in trace.history.services.items():
            of_pool = statistics.services[name]
            assert found.sm_seconds == pytest.approx(of_pool.sm_seconds, rel=0.001)
            labels = {"pool": "default", "service": name}
            scraped = registry.get_sample_value("greensched_sm_seconds_total", labels)
            assert found.sm_seconds == pytest.approx(scraped, rel=0.001)
            assert found.requests["requested"] == found.requests["granted"]
            assert found.leases == of_pool.granted
        chat, wait = trace.history.services["chat"], statistics.services["chat"].wait
        assert chat.requests["granted"] > 100
        assert wait is not None
        assert sum(chat.waits) == pytest.approx(wait.seconds, rel=0.001)
        assert any(span.lent for span in trace.history.spans)
        assert any(span.draining for span in trace.history.spans)
        for one in trace.history.spans:  # the cells of a lease are its alone
            for other in trace.history.spans:
                if one.lease != other.lease and one.start < other.end and other.start < one.end:
                    assert not one.cells & other.cells

    in_pool(test, services=CLASSES)
    kinds = Counter(event.type for event in parsed(path))
    assert kinds[TrackEvent.TYPE_SLICE_BEGIN] == kinds[TrackEvent.TYPE_SLICE_END] > 500
    assert kinds[TrackEvent.TYPE_COUNTER] > 500


def test_a_flow_leads_from_the_request_to_the_job(tmp_path: Path) -> None:
    """Flows link request, lease, submission and job."""
    path = tmp_path / "t.perfetto-trace"

    async def test(pool: Pool) -> None:
        async with pool.trace(path):
            first = asyncio.create_task(lease(pool, ALL))
            await asyncio.sleep(0)
            await lease(pool, 16)
            await first

    in_pool(test)
    events = parsed(path)
    of_flow: dict[int, list[str]] = {}
    for event in events:
        for flow in (*event.flow_ids, *event.terminating_flow_ids):
            of_flow.setdefault(flow, []).append(event.name)
    assert sorted(of_flow.values()) == [
        *[["no class", "no class"]] * 2,
        *[["no class", "submit spin"]] * 2,
        *[["submit spin", "spin"]] * 2,
    ]
    values: dict[int, list[int]] = {}
    for event in events:
        if event.type == TrackEvent.TYPE_COUNTER:
            values.setdefault(event.track_uuid, []).append(event.counter_value)
    assert [0, 132, 0, 16, 0] in values.values()  # SMs leased
    assert [1, 0] in values.values()  # requests that wait


def test_many_requests_are_refused_at_one_time(tmp_path: Path) -> None:
    """Each refusal of one moment is in the trace, and none is nested too deep to be shown."""
    path = tmp_path / "t.perfetto-trace"

    async def test(pool: Pool) -> None:
        async with pool.trace(path), pool.partition(ALL):
            answers = await asyncio.gather(
                *(lease(pool) for _ in range(600)), return_exceptions=True
            )
            assert all(isinstance(answer, QueueFull) for answer in answers)

    in_pool(test, max_waiting=0)
    assert sum(event.name.startswith("refused") for event in parsed(path)) == 600


def test_a_gang_and_the_other_answers(tmp_path: Path) -> None:
    """Each part of a joint request is a lease; all outcomes have events."""
    path = tmp_path / "t.perfetto-trace"

    async def test(pool: Pool) -> None:
        async with pool.trace(path):
            async with pool.partitions(16, 32) as (p, other):
                await asyncio.gather(p.launch(CONFIG, spin, MS), other.launch(CONFIG, spin, MS))
                waiting = asyncio.create_task(lease(pool, ALL))
                await asyncio.sleep(0.001)
                with pytest.raises(QueueFull):
                    await asyncio.create_task(lease(pool, ALL))
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                with pytest.raises(DeadlineExceeded):
                    await asyncio.create_task(lease(pool, ALL, deadline=0.010))

    in_pool(test, max_waiting=1)
    (service,) = read(path).history.services.values()
    assert service.leases == 2
    assert service.requests == {
        "requested": 4, "granted": 1, "refused": 1, "cancelled": 1, "expired": 1,
    }  # fmt: skip
    parsed(path)


@pytest.mark.parametrize("how", [LookupError, asyncio.CancelledError, GeneratorExit])
def test_it_is_complete_however_the_block_ends(how: type[BaseException], tmp_path: Path) -> None:
    """After an error or a cancellation every slice has an end."""
    path = tmp_path / "t.perfetto-trace"

    async def block(pool: Pool) -> AsyncIterator[None]:
        async with pool.trace(path), pool.partition(16) as p:
            p.launch(CONFIG, spin, 3 * MS)
            p.launch(CONFIG, spin, 3 * MS)
            asyncio.get_running_loop().create_task(lease(pool, ALL))
            await asyncio.sleep(0.001)
            yield
            raise how

    async def test(pool: Pool) -> None:
        started = block(pool)
        await anext(started)
        if how is GeneratorExit:
            await started.aclose()  # type: ignore[attr-defined]  # a generator
            await asyncio.sleep(0.001)  # its thread ends the file
        else:
            with pytest.raises(how):
                await anext(started)
        trace = read(path)
        assert trace.is_complete
        assert trace.history.all_spans(0.0)
        await asyncio.sleep(0.010)

    in_pool(test)
    assert len(parsed(path)) > 10


def test_it_is_complete_where_trio_cancels_the_block(tmp_path: Path) -> None:
    """The cancellation waits for the disk."""
    path = tmp_path / "t.perfetto-trace"

    async def test(pool: Pool) -> None:
        with trio.move_on_after(0.005):
            async with pool.trace(path), pool.partition(16) as p:
                await p.launch(CONFIG, spin, 3 * MS)
                await trio.sleep(1)
        trace = read(path)
        assert trace.is_complete
        (span,) = trace.history.spans
        assert span.end == pytest.approx(0.005, rel=0.001)

    in_pool(test, backend="trio")
    parsed(path)


def test_what_is_held_at_the_start_and_a_lost_device(tmp_path: Path) -> None:
    """An earlier lease begins with the trace; a lost job ends."""
    path = tmp_path / "t.perfetto-trace"

    async def test(pool: Pool) -> None:
        with pytest.raises(DeviceLost):
            async with pool.partition(16) as p:
                await asyncio.sleep(1)
                async with pool.trace(path):
                    await p.launch(CONFIG, spin, MS)

    in_pool(test, faults=[Crash("spin")])
    trace = read(path)
    assert trace.start == pytest.approx(1, rel=0.001)
    (span,) = trace.history.spans
    assert span.start == trace.start
    assert len(trace.history.lost) == 1
    parsed(path)


def test_a_slow_disk_loses_records_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer is bounded; the trace counts what it lacks."""
    path = tmp_path / "t.perfetto-trace"
    monkeypatch.setattr(tracing, "MOST_PENDING", 3)

    async def test(pool: Pool) -> None:
        async with pool.trace(path) as trace:
            for _ in range(5):
                async with pool.partition(16) as p:
                    for _ in range(3):
                        p.launch(CONFIG, spin, 1000)
            assert trace.dropped > 0
        assert read(path).dropped >= trace.dropped

    in_pool(test)
    parsed(path)


def test_a_full_disk_is_an_error_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """The block completes; then the error is raised or logged."""

    async def test(pool: Pool) -> None:
        with pytest.raises(InvalidRequest, match=r"/dev/full.*No space left"):
            async with pool.trace("/dev/full"):
                await lease(pool)
        assert not caplog.records
        with pytest.raises(LookupError):
            async with pool.trace("/dev/full"):
                raise LookupError
        assert "No space left" in caplog.text

    in_pool(test)


def test_what_cannot_be_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad path, a second block and a closed pool raise typed errors."""
    path = tmp_path / "t.perfetto-trace"

    async def test(pool: Pool) -> None:
        for bad in (tmp_path, tmp_path / "no" / "t", "a\0b"):
            with pytest.raises(InvalidRequest, match="cannot be written"):
                async with pool.trace(bad):
                    pytest.fail("the block was entered")
        trace = pool.trace(path)
        async with trace:
            pass
        with pytest.raises(InvalidRequest, match="was used already"):
            await trace.__aenter__()
        await pool.aclose()
        with pytest.raises(PoolClosed):
            await pool.trace(path).__aenter__()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(MissingPackage, match=r"perfetto.*\[trace\]"):
            pool.trace(path)

    in_pool(test)


def test_a_cancelled_entry_leaves_an_empty_file(tmp_path: Path) -> None:
    """Nothing is watched, and the thread ends."""
    path = tmp_path / "t.perfetto-trace"

    async def test(pool: Pool) -> None:
        entering = asyncio.create_task(pool.trace(path).__aenter__())
        await asyncio.sleep(0)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        await lease(pool)

    in_pool(test)
    assert [event for event in parsed(path) if event.type == TrackEvent.TYPE_SLICE_BEGIN] == []


def test_threads_without_a_loop_can_trace(tmp_path: Path) -> None:
    """`pool.sync.trace` works in a plain `with`."""
    path = tmp_path / "t.perfetto-trace"
    pool = Pool(driver="simulated:h200")
    with pool.sync, pool.sync.trace(path), pool.sync.partition(16) as p:
        p.launch(CONFIG, spin, 1000)
    (span,) = read(path).history.spans
    assert span.sms == 16


def test_reading_what_is_cut_off_or_no_trace(tmp_path: Path) -> None:
    """A cut-off trace has what was written; other files are refused."""
    path = tmp_path / "t.perfetto-trace"

    async def test(pool: Pool) -> None:
        async with pool.trace(path):
            await lease(pool)

    in_pool(test)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert not read(path).is_complete
    assert read(path).devices[0].sms == 132
    path.write_text("no trace")
    with pytest.raises(InvalidRequest, match="not a trace"):
        read(path)
    with pytest.raises(InvalidRequest, match="No such file"):
        read(tmp_path / "none")
