"""The records of a pool, its leases, and the times of its leases."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from greensched import (
    ALL,
    Cancelled,
    DeadlineExceeded,
    DeviceLost,
    Done,
    Drained,
    Expired,
    Granted,
    InvalidRequest,
    LaunchConfig,
    Lent,
    Lost,
    Pool,
    Queued,
    QueueFull,
    Reclaimed,
    Record,
    Refused,
    Released,
    Requested,
    Resized,
    ServiceClass,
    Submitted,
)
from greensched.driver.simulated import Crash
from greensched.integrations.testing import SimGPU
from greensched.kernels import fill, spin
from greensched.scheduling.histogram import Histogram, durations

CONFIG = LaunchConfig(grid=1, block=1)
MS = 1_000_000
#: The copy of so many floats takes a millisecond.
ITEMS = 1 << 24
CLASSES = (
    ServiceClass("critical", reserve=64, priority=1, max_wait_for_reserve=0.050),
    ServiceClass("batch", preemptible=True, checkpoint_interval=0.010),
)
Test = Callable[[Pool, list[Record]], Awaitable[None]]


def run(test: Test, *, backend: Any = "asyncio", **options: Any) -> list[Record]:
    """Run a test with a watched pool in virtual time, and return the records."""
    gpu, seen = SimGPU(), list[Record]()
    faults = options.pop("faults", ())

    async def main() -> None:
        async with gpu.pool(faults=faults, **options) as pool:
            stop = pool.watch(seen.append)
            try:
                await test(pool, seen)
            finally:
                stop()

    gpu.run(main, backend=backend)
    return seen


def kinds(seen: list[Record]) -> list[type[Record]]:
    return [type(record) for record in seen]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_lease_and_its_job_are_told_in_order(backend: str) -> None:
    """Every step from request to free cells has a record with the clock's time."""

    async def test(pool: Pool, seen: list[Record]) -> None:
        async with pool.partition(16) as p:
            await p.launch(CONFIG, spin, MS)

    seen = run(test, backend=backend)
    steps = [Requested, Granted, Submitted, Done, Released, Drained]
    assert kinds(seen) == steps
    requested, granted, _, done, _, drained = seen
    assert isinstance(granted, Granted)
    assert isinstance(done, Done)
    assert isinstance(drained, Drained)
    assert requested.request == granted.request  # type: ignore[attr-defined]
    assert {record.lease for record in seen[1:]} == {granted.lease}  # type: ignore[attr-defined]
    assert done.time - done.started == pytest.approx(0.001, rel=0.2)
    assert drained.sm_seconds == pytest.approx(16 * (drained.time - granted.time))
    assert granted.as_dict()["cells"].bit_count() * 8 == granted.sms == 16


def test_the_ways_out_of_the_queue() -> None:
    """A queued request has a record of its grant, cancellation, expiry or refusal."""

    async def test(pool: Pool, seen: list[Record]) -> None:
        async with pool.partition(ALL):
            waiting = asyncio.ensure_future(ask(pool))
            await asyncio.sleep(0.001)
            with pytest.raises(QueueFull):
                await asyncio.create_task(ask(pool))
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            with pytest.raises(DeadlineExceeded):
                await asyncio.create_task(ask(pool, deadline=0.010))

    async def ask(pool: Pool, **options: Any) -> None:
        async with pool.partition(8, **options):
            pass

    seen = run(test, max_waiting=1)
    assert kinds(seen)[2:-2] == [
        Requested, Queued, Requested, Refused, Cancelled, Requested, Queued, Expired,
    ]  # fmt: skip


def test_loans_and_checkpoints_are_told() -> None:
    """Loans have records, their return too, and a checkpoint a record of its resize."""

    async def test(pool: Pool, seen: list[Record]) -> None:
        async with pool.partition((8, 128), service="batch") as p:
            assert p.sm_count > 68
            other = asyncio.ensure_future(ask(pool))
            await asyncio.sleep(0.001)
            await p.checkpoint()
            await other

    async def ask(pool: Pool) -> None:
        async with pool.partition(64, service="critical"):
            pass

    seen = run(test, services=CLASSES)
    lent = [record for record in seen if isinstance(record, Lent)]
    back = [record for record in seen if isinstance(record, Reclaimed)]
    assert lent
    assert {record.owner for record in lent} == {"critical"}
    assert sum(record.sms for record in lent) == sum(record.sms for record in back)
    assert any(isinstance(record, Resized) for record in seen)


@pytest.mark.parametrize("way", ["checkpoint", "idle"])
def test_a_lease_that_asks_again_is_another_request(way: str) -> None:
    """A lease that gave way is a new request, as in statistics."""

    async def batch(pool: Pool) -> None:
        async with pool.partition((8, ALL), service="batch") as p:
            await asyncio.sleep(0.010)
            if way == "checkpoint":
                await p.checkpoint()
            else:
                async with p.idle():
                    await asyncio.sleep(0.001)
            (info,) = pool.leases()
            assert info.holder == "batch"

    async def test(pool: Pool, seen: list[Record]) -> None:
        running = asyncio.create_task(batch(pool), name="batch")
        await asyncio.sleep(0.001)
        async with pool.partition(ALL, service="urgent"):
            await asyncio.sleep(0.010)
        await running
        assert pool.statistics().requested == kinds(seen).count(Requested) == 3

    classes = [ServiceClass("batch", preemptible=True, checkpoint_interval=0.01)]
    seen = run(test, services=[*classes, ServiceClass("urgent", priority=1)])
    batch_only = [one for one in seen if getattr(one, "service", "") == "batch"]
    assert kinds(batch_only) == [
        Requested, Granted, Released, Drained, Requested, Queued, Granted, Released, Drained,
    ]  # fmt: skip
    first, again = (one for one in batch_only if isinstance(one, Requested))
    assert (again.sizes, again.holder) == (first.sizes, first.holder) == (("(8, ALL)",), "batch")
    assert again.time == pytest.approx(batch_only[3].time + (0.001 if way == "idle" else 0))
    granted = [one for one in batch_only if isinstance(one, Granted)]
    assert [one.request for one in granted] == [first.request, again.request]
    assert granted[1].wait == pytest.approx(granted[1].time - again.time)


def test_a_lost_device_is_reported() -> None:
    """The loss has a record, and so has the lost job."""

    async def test(pool: Pool, seen: list[Record]) -> None:
        with pytest.raises(DeviceLost):
            async with pool.partition(16) as p:
                await p.launch(CONFIG, spin, MS)

    seen = run(test, faults=[Crash("spin")])
    assert Lost in kinds(seen)
    (done,) = [record for record in seen if isinstance(record, Done)]
    assert done.error == "DeviceLost"


def test_bound_launches_and_calls_are_told() -> None:
    """A bound launch, which has no ticket otherwise, and a call have records."""

    async def test(pool: Pool, seen: list[Record]) -> None:
        async with pool.partition(16) as p:
            await p.prepare(CONFIG, spin)
            bound = p.bind(CONFIG, spin, MS)
            bound()
            bound()
            await p.run(threading.get_ident)
            await bound.submit()

    seen = run(test)
    done = [record for record in seen if isinstance(record, Done)]
    launches = [record for record in done if record.name == "spin"]
    assert [record.stream for record in launches] == ["launch"] * 3
    assert sum(one.time - one.started for one in launches) == pytest.approx(0.003, rel=0.2)
    assert [record.name for record in done if record.stream == "call"] == [
        "prepare spin",
        "get_ident",
    ]


def test_the_time_of_a_job_includes_its_wait_for_another_stream() -> None:
    """A short launch after another partition's copy to its buffer seems as long as the copy."""

    async def test(pool: Pool, seen: list[Record]) -> None:
        async with pool.partitions(16, 16) as (p, other):
            with await p.empty(ITEMS) as buffer, await p.empty_pinned(ITEMS) as source:
                copy = p.copy(buffer, source.array)
                await other.launch(CONFIG, fill, buffer, 1.0, 64)
                await copy
                await other.launch(CONFIG, fill, buffer, 1.0, 64)

    done = [record for record in run(test) if isinstance(record, Done)]
    copied = next(record.time for record in done if record.name == "copy")
    waited, alone = [one.time - one.started for one in done if one.name == "fill"]
    assert waited >= copied > 100 * alone


def test_a_watcher_that_begins_late_hears_what_is_held() -> None:
    """It first gets the present leases; a removed one gets nothing."""

    async def test(pool: Pool, seen: list[Record]) -> None:
        late = list[Record]()
        async with pool.partition(16):
            stop = pool.watch(late.append)
            assert kinds(late) == [Granted]
        stop()
        assert kinds(late) == [Granted, Released, Drained]
        async with pool.partition(16):
            pass
        assert len(late) == 3

    run(test)


@pytest.mark.fault("D12", "E10")
def test_a_watcher_that_raises_hurts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Its error is logged once; leases and other watchers go on."""

    def broken(record: Record) -> None:
        raise LookupError

    async def test(pool: Pool, seen: list[Record]) -> None:
        stop = pool.watch(broken)
        for _ in range(3):
            async with pool.partition(16):
                pass
        stop()

    assert len(run(test)) == 12
    assert len([line for line in caplog.records if "failed on" in line.message]) == 1


@pytest.mark.fault("D12")
def test_a_watcher_runs_under_no_lock() -> None:
    """It may use the pool, even for a record of a decision."""

    async def test(pool: Pool, seen: list[Record]) -> None:
        owned: list[bool] = []

        def ask(record: Record) -> None:
            owned.append(pool._manager.in_decision)
            pool.statistics()
            pool.leases()

        stop = pool.watch(ask)
        async with pool.partition(ALL):
            waiting = asyncio.ensure_future(one(pool))
            await asyncio.sleep(0.001)
        await waiting
        stop()
        assert owned
        assert not any(owned)

    async def one(pool: Pool) -> None:
        async with pool.partition(16):
            pass

    run(test)


def test_leases_says_what_holds_what() -> None:
    """It has holder, class, SMs and times of each lease that is held or drains."""
    gpu = SimGPU()

    async def main() -> None:
        async with gpu.pool(services=CLASSES) as pool:
            async with pool.partition(16):
                pass
            assert pool.leases() == []
            asyncio.current_task().set_name("main")  # type: ignore[union-attr]
            async with pool.partition((8, 32), service="batch"):
                (info,) = pool.leases()
                assert (info.holder, info.service, info.sms) == ("main", "batch", 32)
                assert info.draining_since is None
                assert "test_records.py" in info.place
            with pytest.raises(LookupError):
                async with pool.partition(16) as p:
                    p.launch(CONFIG, spin, MS)
                    raise LookupError
            (info,) = pool.leases()
            assert info.holder == "main"
            assert info.draining_since == pytest.approx(info.since, abs=0.001)

    gpu.run(main)


def test_times_of_leases_are_counted_in_doubling_buckets() -> None:
    """Waits, uses and drains of all leases are in the histograms."""
    gpu = SimGPU()

    async def main() -> None:
        async with gpu.pool() as pool:
            pool.time_leases()
            for _ in range(3):
                async with pool.partition(16):
                    await asyncio.sleep(0.010)
            async with pool.partition(ALL):
                waiting = asyncio.ensure_future(one(pool))
                await asyncio.sleep(0.100)
            await waiting
            found = pool.statistics().services[""]
            assert found.wait is not None
            assert found.use is not None
            assert found.drain is not None
            assert found.wait.count == found.use.count == found.drain.count == 5
            assert found.use.seconds == pytest.approx(3 * 0.010 + 0.100 + 0.001, rel=0.01)
            assert found.sm_seconds == pytest.approx(16 * 0.031 + 132 * 0.100, rel=0.01)
            assert dict(found.wait.buckets)[2**-17] == 4
            assert found.wait.quantile(1.0) == 0.125
            wake = pool.statistics().wake
            assert wake is not None
            assert wake.count == 1

    async def one(pool: Pool) -> None:
        async with pool.partition(16):
            await asyncio.sleep(0.001)

    gpu.run(main)


def test_a_lease_is_released_when_its_block_ends_and_drained_after_its_work() -> None:
    """Records and histograms separate both times."""

    async def test(pool: Pool, seen: list[Record]) -> None:
        pool.time_leases()
        with pytest.raises(ZeroDivisionError):
            async with pool.partition(16) as p:
                await p.prepare(CONFIG, spin)
                seen.clear()
                p.launch(CONFIG, spin, 100 * MS)
                raise ZeroDivisionError
        await asyncio.sleep(0.200)
        found = pool.statistics().services[""]
        assert found.use is not None
        assert found.drain is not None
        assert found.use.seconds < 0.050
        assert found.drain.seconds == pytest.approx(0.100, rel=0.2)

    seen = run(test)
    assert kinds(seen) == [Submitted, Released, Done, Drained]
    assert seen[3].time - seen[1].time == pytest.approx(0.100, rel=0.2)


def test_short_durations_are_counted_as_one_by_one() -> None:
    """Counting them together gives the same histogram as counting each."""
    found, expected = Histogram(), Histogram()
    for seconds in (0.0, 0.0, 1e-6, 7e-6):
        expected.add(seconds)
    found.add_shortest(4, 8e-6)
    assert durations(found) == durations(expected)


def test_a_histogram_is_printed_without_its_buckets() -> None:
    """The repr of statistics with histograms stays readable."""
    assert repr(durations(Histogram())) == "Durations(count=0, seconds=0.0)"


@pytest.mark.parametrize("classes", [(), CLASSES])
def test_leases_that_are_kept_are_counted(classes: tuple[ServiceClass, ...]) -> None:
    """Each of many successive leases is in the histogram, with its SM-time."""
    gpu = SimGPU()
    options = {"service": "critical"} if classes else {}

    async def main() -> None:
        # Not gpu.pool(), which watches: while a pool is watched, no lease is kept.
        async with Pool(driver=gpu.driver, services=classes) as pool:
            pool.time_leases()
            for number in range(600):
                async with pool.partition(16, **options):  # type: ignore[arg-type]  # typed
                    await asyncio.sleep(0.001 if number % 100 == 0 else 0)
            assert len(pool._lifecycle.cache) == 1
            found = pool.statistics().services[options.get("service", "")]
            assert found.use is not None
            assert found.use.count == found.granted == 600
            assert found.use.seconds == pytest.approx(0.006)
            assert found.sm_seconds == pytest.approx(16 * 0.006)
            assert found.use.quantile(0.98) == 2**-17

    gpu.run(main)


def test_rare_events_have_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    """Opening, refusing, expiring, changing and closing each log one line."""
    caplog.set_level(logging.DEBUG, "greensched")

    async def test(pool: Pool, seen: list[Record]) -> None:
        async with pool.partition(ALL):
            with pytest.raises(DeadlineExceeded):
                await asyncio.create_task(ask(pool))
        pool.reconfigure(services=[ServiceClass("chat"), ServiceClass("batch")], policy="fair")

    async def ask(pool: Pool) -> None:
        async with pool.partition(8, deadline=0.010):
            pass

    run(test)
    text = caplog.text
    assert "the pool's classes are now: chat, batch\n" in text
    assert "the pool's policy is now: Fair\n" in text
    assert "a pool is open over" in text
    assert "expired a queued request" in text
    assert "the pool is closed" in text


def test_a_watcher_is_a_function() -> None:
    """Another object is refused at once, not at the first record."""
    with pytest.raises(InvalidRequest, match="give a function of one record"):
        Pool(driver="simulated:h20").watch(3)  # type: ignore[arg-type]
