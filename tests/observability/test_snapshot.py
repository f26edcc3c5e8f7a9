"""Snapshots: which lease has which SMs, what each class has and waits for, and why."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from greensched import (
    ALL,
    DeadlineExceeded,
    DeviceHung,
    DeviceLost,
    InvalidRequest,
    LaunchConfig,
    Pool,
    ServiceClass,
    Snapshot,
)
from greensched.driver.simulated import Crash, Hang
from greensched.integrations.testing import SimGPU
from greensched.kernels import spin
from greensched.observability.waiting import WaitingRequest, describe
from greensched.scheduling.cells import DeviceCells, parse_sizes
from greensched.scheduling.policy import Fifo
from greensched.scheduling.requests import Request
from greensched.scheduling.scheduler import Scheduler

CONFIG = LaunchConfig(grid=1, block=1)
MS = 1_000_000
CRITICAL = ServiceClass("critical", reserve=64, priority=1, max_wait_for_reserve=0.050)
BATCH = ServiceClass("batch", preemptible=True, checkpoint_interval=0.010)


def run(test: Callable[[Pool], Awaitable[None]], **options: Any) -> None:
    """Run a test with a timed pool in virtual time."""
    gpu = SimGPU()

    async def main() -> None:
        async with gpu.pool(**options) as pool:
            pool.time_leases()
            await test(pool)

    gpu.run(main)


async def expires(ask: Callable[..., Awaitable[None]]) -> None:
    with pytest.raises(DeadlineExceeded):
        await ask(deadline=0.010)


def strip(snapshot: Snapshot) -> str:
    """Return the first device's cells: a letter of the class, small while it drains."""
    letters = []
    for cell in snapshot.devices[0].cells:
        letter = (cell.services or ".")[0][:1]
        letters.append(letter.lower() if cell.state == "draining" else letter.upper())
    return "".join(letters)


def test_the_strip_shows_leases_loans_and_reserves() -> None:
    """Each cell names its class, its lease, and its reserve's owner."""

    async def test(pool: Pool) -> None:
        async with pool.partition(96, service="batch", duration=0.02):
            seen = pool.snapshot()
            (device,) = seen.devices
            assert strip(seen) == "BBBBBBBBBBBB...."
            assert [cell.sms for cell in device.cells] == 15 * [8] + [12]
            lent = [cell for cell in device.cells if cell.owner and cell.state == "leased"]
            kept = [cell for cell in device.cells if cell.owner and cell.state == "free"]
            assert {cell.owner for cell in (*lent, *kept)} == {"critical"}
            batch = seen.services[2]
            assert len(lent) * 8 == batch.sms_borrowed == seen.services[1].sms_lent == 40
            assert len(kept) * 8 == 64 - 40
            (lease,) = device.leases
            assert {cell.leases for cell in device.cells[:12]} == {(0,)}
            assert (lease.service, lease.sms, lease.cells) == ("batch", 96, (1 << 12) - 1)

    run(test, services=[CRITICAL, BATCH])


def test_a_lease_that_drains_is_shown_so() -> None:
    """Its cells are not free until its work is done, and count for its class."""

    async def test(pool: Pool) -> None:
        with anyio.CancelScope() as scope:
            async with pool.partition(16, service="batch") as p:
                p.launch(CONFIG, spin, 5 * MS)
                scope.cancel()
        seen = pool.snapshot()
        assert strip(seen).startswith("bb.")
        assert seen.services[1].sms == seen.services[1].sms_draining == 16
        await anyio.sleep(0.010)
        after = pool.snapshot()
        assert strip(after).strip(".") == ""
        assert after.services[1].drain_p99 is not None
        assert after.services[1].sm_time == 1.0

    run(test, services=[BATCH])


def test_a_class_has_its_counts_and_times() -> None:
    """Requests by outcome, percentiles of waits and uses, and the first waiting one."""

    async def test(pool: Pool) -> None:
        async def ask(**options: Any) -> None:
            async with pool.partition(8, **options):
                pass

        async with anyio.create_task_group() as tasks, pool.partition(ALL):
            tasks.start_soon(expires, ask)
            await anyio.sleep(0.010)
            tasks.start_soon(ask, name="handler 7")
            await anyio.sleep(0.004)
            seen = pool.snapshot()
        (one,) = seen.services
        assert (one.name, one.granted, one.expired, one.waiting) == ("", 1, 1, 1)
        assert one.first is not None
        assert (one.first.holder, one.first.sms, one.first.reason) == ("handler 7", 8, "sms")
        assert one.first.waited == pytest.approx(0.004)
        assert (seen.waiting, seen.expired, seen.policy, seen.state) == (1, 1, "fifo", "open")
        assert "expired" in seen.events[-1].text
        (one,) = pool.snapshot().services
        assert one.wait_p50 is not None
        assert one.use_p99 is not None
        assert one.sm_seconds == pytest.approx(132 * 0.014, rel=0.01)
        json.dumps(seen.as_dict())

    run(test)


def test_a_pool_that_does_not_work_says_so() -> None:
    """A pool that is not open has its state, a lost device its fault."""
    gpu = SimGPU()

    async def main() -> None:
        pool = gpu.pool(faults=[Crash("spin")])
        assert pool.snapshot().state == "not open"
        async with pool:
            with pytest.raises(DeviceLost):
                async with pool.partition(8) as p:
                    await p.launch(CONFIG, spin, MS)
            lost = pool.snapshot()
            assert lost.state == "poisoned"
            assert lost.devices[0].failure
            assert "unusable" in lost.events[-1].text
        assert pool.snapshot().state == "poisoned"

    gpu.run(main)


def test_a_policy_takes_no_snapshot() -> None:
    """A policy runs inside a decision, where the account is incomplete."""
    raised = []

    class Curious(Fifo):
        def rank(self, request: Any) -> tuple[float, ...]:
            try:
                pool.snapshot()
            except InvalidRequest as error:
                raised.append(error)
            return ()

    gpu = SimGPU()
    pool = gpu.pool(policy=Curious())

    async def main() -> None:
        async def ask() -> None:
            async with pool.partition(8):
                pass

        async with pool, anyio.create_task_group() as tasks, pool.partition(ALL):
            tasks.start_soon(ask)
            await anyio.sleep(0.001)

    gpu.run(main)
    assert raised


def test_a_snapshot_waits_for_no_policy() -> None:
    """During a decision it lacks only the waiting reasons."""
    taken: list[Snapshot] = []

    class Slow(Fifo):
        def rank(self, request: Any) -> tuple[float, ...]:
            other = threading.Thread(target=lambda: taken.append(pool.snapshot()))
            other.start()
            other.join()
            return ()

    gpu = SimGPU()
    pool = gpu.pool(policy=Slow())

    async def main() -> None:
        async def ask() -> None:
            async with pool.partition(8):
                pass

        async with pool, anyio.create_task_group() as tasks, pool.partition(ALL):
            tasks.start_soon(ask)
            await anyio.sleep(0.001)

    gpu.run(main)
    (seen,) = taken
    assert {cell.state for cell in seen.devices[0].cells} == {"leased"}
    assert seen.services[0].first is None


def test_what_hangs_is_shown() -> None:
    """Its executor's cells, and a sentence with the task, the place and the time."""

    async def test(pool: Pool) -> None:
        with pytest.raises(DeviceHung):
            async with pool.partition(16, service="batch") as p:
                await p.launch(CONFIG, spin, MS)
        (device,) = pool.snapshot().devices
        assert [cell.state for cell in device.cells[:3]] == ["hung", "hung", "free"]
        (sentence,) = device.hung
        assert sentence.startswith("spin on device 0 has not ended 0.5 s after its turn")

    run(test, services=[BATCH], hang_after=0.5, faults=[Hang("spin")])


# -- why a request waits -----------------------------------------------------------------------


class Scene:
    """A scheduler with 15 cells of 8 SMs and a remainder of 12; `now` in seconds."""

    def __init__(self, *services: ServiceClass, is_made: Callable[..., bool] | None = None) -> None:
        self.cells = DeviceCells(8, 15, 12)
        made = is_made or (lambda device, mask: True)
        self.scheduler = Scheduler([self.cells], Fifo(), 100, made, services=services)
        self.now = 0.0

    def ask(self, sms: object, service: str = "", **options: Any) -> Request:
        parts = parse_sizes((sms,))
        return self.scheduler.request(self.now, parts, service=service, **options)

    def why(self, request: Request) -> WaitingRequest:
        assert not request.grants
        return describe(self.scheduler, [0], request, self.now)


def assert_says(found: WaitingRequest, reason: str, text: str) -> None:
    assert (found.reason, found.text) == (reason, text)


def test_too_few_sms_are_free() -> None:
    """The sentence says when SMs return, if known, or which lease is the oldest."""
    scene = Scene(BATCH)
    scene.ask(96, "batch")
    scene.now = 0.5
    waits = scene.ask(64)
    assert_says(
        scene.why(waits),
        "sms",
        "needs 64 SMs; 36 of 132 are free on device 0: no lease there is known to end, and the "
        "oldest, of class 'batch', has had 96 for 500 ms",
    )
    scene = Scene()
    scene.ask(96, duration=2.0)
    waits = scene.ask(64)
    scene.now = 0.5
    beginning = "needs 64 SMs; 36 of 132 are free on device 0: "
    assert_says(scene.why(waits), "sms", f"{beginning}the next 96 are expected back in 1.5 s")
    scene.now = 2.25
    found = scene.why(waits)
    assert_says(found, "sms", f"{beginning}the next lease should have ended 250 ms ago")
    assert found.waited == 2.25


def test_sms_drain() -> None:
    """The sentence names SMs whose lease has ended and whose work still runs."""
    scene = Scene()
    grant = scene.ask(96, duration=1.0).grants[0]
    scene.scheduler.release(grant)
    assert_says(
        scene.why(scene.ask(64)),
        "sms",
        "needs 64 SMs; 36 of 132 are free on device 0, 96 are draining: the next 96 are expected "
        "back in 1 s",
    )


def test_its_reserve_is_lent() -> None:
    """The sentence names the class that borrows it."""
    scene = Scene(CRITICAL, BATCH)
    scene.ask(96, "batch", duration=0.020)
    assert_says(
        scene.why(scene.ask(64, "critical")),
        "sms",
        "needs 64 SMs; 36 of 132 are free on device 0, 40 of its reserve are lent to class "
        "'batch': the next 96 are expected back in 20 ms",
    )


def test_free_sms_are_kept_for_a_reserve() -> None:
    """A class that cannot borrow waits although enough SMs are free."""
    scene = Scene(CRITICAL, ServiceClass("other"))
    scene.ask(40, "other")
    assert_says(
        scene.why(scene.ask(48, "other")),
        "reserve",
        "needs 48 SMs; 92 are free on device 0, of which reserves keep 64 for 'critical'",
    )


def test_free_sms_do_not_fit_together() -> None:
    """Cells and the remainder are free, but no partition has both."""
    scene = Scene()
    scene.ask(112)
    waits = scene.ask(16)
    assert_says(
        scene.why(waits),
        "fragmented",
        "needs 16 SMs in one partition; 20 are free on device 0, of which at most 12 fit into one",
    )


def test_a_class_is_at_its_cap() -> None:
    """The sentence names its own limit, not the device."""
    scene = Scene(ServiceClass("small", cap=16))
    scene.ask(16, "small")
    assert_says(
        scene.why(scene.ask(8, "small")),
        "cap",
        "needs 8 SMs; its class holds 16 of at most 16",
    )


def test_a_class_is_over_its_quota() -> None:
    """The sentence says for how long."""
    scene = Scene(ServiceClass("tenant", quota=8))
    grant = scene.ask(64, "tenant", duration=1.0).grants[0]
    scene.now = 1.0
    scene.scheduler.release(grant)
    scene.scheduler.drained(scene.now, grant)
    found = scene.why(scene.ask(8, "tenant"))
    assert found.reason == "quota"
    assert found.text.startswith("its class is over its quota of 8 SMs on average, for another ")


def test_a_device_is_kept_for_an_earlier_request() -> None:
    """The sentence has that request's size and wait."""
    scene = Scene(BATCH)
    scene.ask(96)
    first = scene.ask(ALL, "batch")
    scene.now = 5.0
    waits = scene.ask(8)
    assert_says(
        scene.why(waits),
        "kept",
        "needs 8 SMs; 36 are free on device 0, which is kept for an earlier request of class "
        "'batch' for 132 SMs, which has waited 5 s",
    )
    assert "device 0, the device is kept for it: " in scene.why(first).text


def test_an_executor_is_being_made() -> None:
    """The SMs are free, but their green context does not exist yet."""
    scene = Scene(is_made=lambda device, mask: False)
    assert_says(
        scene.why(scene.ask(16)),
        "executor",
        "needs 16 SMs, which are free: an executor over them is being made",
    )


def test_shared_leases_must_end() -> None:
    """An exclusive lease waits for all shared leases of the device."""
    scene = Scene(ServiceClass("web", shared=True))
    scene.ask(8, "web")
    scene.ask(8, "web")
    assert_says(
        scene.why(scene.ask(16)),
        "shared",
        "needs 16 SMs of device 0: 2 shared leases must end there",
    )
