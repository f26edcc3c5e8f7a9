"""One pool over two devices, and a pool on each: where leases are placed."""

from __future__ import annotations

from contextlib import AsyncExitStack

import numpy as np
import pytest

import greensched
from greensched import ALL, REST, LaunchConfig, Partition, Pool
from greensched.kernels import fill
from helpers.backend import Backend
from helpers.gate import Gate
from helpers.waiting import still_waits

IS_VERSIONED = False

#: Two devices that are alike, and two that differ in SMs and in how they are split.
UNLIKE = "h200+l40s"
ONE = LaunchConfig(grid=1, block=8)
ONES = np.ones(8, np.float32)


async def lease(stack: AsyncExitStack, p: Partition) -> int:
    """Take a lease until the stack ends; return its device."""
    return (await stack.enter_async_context(p)).device_id


def test_spread_takes_the_device_with_the_most_free(backend: Backend) -> None:
    """Leases of one size alternate between two equal devices."""

    async def main() -> None:
        async with backend.pair(placement="spread") as pool, AsyncExitStack() as stack:
            found = [await lease(stack, pool.partition(8)) for _ in range(6)]
            assert sorted(found[:2]) == sorted(found[2:4]) == sorted(found[4:]) == [0, 1]

    backend.run(main)


def test_pack_fills_a_device_before_the_other(backend: Backend) -> None:
    """Leases go to the fullest device where they fit, and otherwise to the other."""

    async def main() -> None:
        async with backend.pair("h20x2", placement="pack") as pool, AsyncExitStack() as stack:
            first = await lease(stack, pool.partition(8))
            assert [await lease(stack, pool.partition(8)) for _ in range(3)] == [first] * 3
            assert await lease(stack, pool.partition(ALL)) == 1 - first
            assert await lease(stack, pool.partition(16)) == first

    backend.run(main)


def test_near_prefers_the_device_of_a_buffer(backend: Backend) -> None:
    """`near` precedes the placement; a request that does not fit there goes elsewhere."""

    async def main() -> None:
        async with backend.pair() as pool, AsyncExitStack() as stack:
            for device in (0, 1):
                async with pool.partition(8, device=device) as p:
                    x = stack.enter_context(await p.upload(ONES))
                found = [await lease(stack, pool.partition(8, near=x)) for _ in range(3)]
                assert found == [device] * 3
            assert await lease(stack, pool.partition((8, ALL), near=x)) == 1
            assert await lease(stack, pool.partition(8, near=x)) == 0

    backend.run(main)


def test_a_joint_grant_and_rest_are_of_one_device(backend: Backend) -> None:
    """All parts are on one device, and REST is what they leave of it."""

    async def main() -> None:
        async with backend.pair(UNLIKE) as pool:
            totals = {device.ordinal: device.sm_count for device in pool.devices}
            for device in (0, 1):
                async with pool.partitions(16, 8, REST, device=device) as parts:
                    assert {p.device_id for p in parts} == {device}
                    assert sum(p.sm_count for p in parts) == totals[device]
                    async with pool.partition(ALL) as other:
                        assert other.device_id == 1 - device
            # Both devices have these SMs together, neither alone.
            with pytest.raises(greensched.TooManySMs):
                await pool.partitions(max(totals.values()), 16).__aenter__()
            async with pool.partition(8, device=0), pool.partition(8, device=1):
                with pytest.raises(greensched.WouldBlock):
                    pool.partition_nowait(ALL)

    backend.run(main)


def test_an_elastic_lease_stays_on_its_device(backend: Backend) -> None:
    """It has free SMs of one device only, also after a checkpoint."""

    async def main() -> None:
        async with backend.pair(UNLIKE) as pool, AsyncExitStack() as stack:
            totals = {device.ordinal: device.sm_count for device in pool.devices}
            for device in (0, 1):
                async with pool.partition(16, device=device) as beside:
                    p = await stack.enter_async_context(pool.partition((8, ALL), device=device))
                    assert p.sm_count == totals[device] - beside.sm_count
                assert await p.checkpoint() == totals[device] == p.sm_count
                assert p.device_id == device
            assert pool.statistics().sms_free == 0

    backend.run(main)


@pytest.mark.runs_device_code
def test_both_devices_are_verified(backend: Backend) -> None:
    """The proof covers each device; SM ids are per device and may be equal."""

    async def main() -> None:
        async with backend.pair(UNLIKE) as pool:
            seen = (await pool.verify()).seen
            for device in pool.devices:
                arrangements = [sets for ordinal, sets in seen if ordinal == device.ordinal]
                assert len(arrangements) == 2
                assert sum(len(sms) for sms in arrangements[1]) == device.sm_count

    backend.run(main)


def test_a_device_at_work_delays_nothing_on_the_other(backend: Backend) -> None:
    """While one device is blocked, jobs and leases of the other go on."""

    async def main() -> None:
        async with backend.pair() as pool, pool.partition(ALL, device=0) as p:
            with await p.upload(ONES) as x, await Gate.closed(p) as gate:
                held = p.download(x)
                for _ in range(3):
                    async with pool.partition(ALL) as q:
                        assert q.device_id == 1
                        with await q.upload(ONES) as y:
                            np.testing.assert_array_equal(await q.download(y), ONES)
                await still_waits(held)
                gate.open()
                np.testing.assert_array_equal(await held, ONES)

    backend.run(main)


def test_each_device_may_have_a_pool_of_its_own(backend: Backend) -> None:
    """Two pools of one process share nothing, and refuse each other's buffers."""

    async def main() -> None:
        driver = backend.two_devices()
        async with Pool([0], driver=driver) as one, Pool([1], driver=driver) as two:
            async with one.partition(ALL) as p, two.partition(ALL) as q:
                assert (p.device_id, q.device_id) == (0, 1)
                with pytest.raises(greensched.DeviceTaken, match="device 1 already has a pool"):
                    await Pool([1], driver=driver).open()
                with await p.upload(ONES) as x, await q.upload(ONES) as y:
                    for use in (
                        lambda: p.copy(x, y),
                        lambda: q.copy(y, x),
                        lambda: q.launch(ONE, fill, x, 1.0, 8),
                    ):
                        with pytest.raises(greensched.WrongDevice):
                            use()

    backend.run(main)
