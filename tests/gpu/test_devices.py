"""On several real GPUs: leases of each device, and their results."""

from __future__ import annotations

import random

import anyio
import numpy as np
import pytest

import greensched
from greensched import ALL, REST, LaunchConfig, Pool
from greensched.kernels import saxpy
from greensched.typing import Size

pytestmark = pytest.mark.gpu

CONFIG = LaunchConfig(grid=64, block=256)
N = 4096
SIZES: tuple[Size, ...] = (8, 16, 16, 16, 32, (8, 64), ALL)


async def several(pool: Pool) -> None:
    """Open a pool on every device; skip if there are fewer than two."""
    await pool.open()
    if len(pool.devices) < 2:
        await pool.aclose()
        pytest.skip("the test is of several GPUs, and this machine has one")


def test_leases_of_several_devices() -> None:
    """Random leases, some cancelled, are served by all devices with right results."""
    served = dict[int, int]()
    rng = random.Random(20261120)

    async def client(pool: Pool) -> None:
        for number in range(25):
            device = rng.choice([None, None, 0, 1])
            with anyio.move_on_after(0.002 if number % 7 == 0 else 60):
                async with pool.partition(rng.choice(SIZES), device=device) as p:
                    assert device in (None, p.device_id)
                    x, y = np.arange(N, dtype=np.float32), np.ones(N, np.float32)
                    with await p.upload(x) as bx, await p.upload(y) as by:
                        await p.launch(CONFIG, saxpy, 2.0, bx, by, N)
                        assert np.array_equal(await p.download(by), 2 * x + y)
                    served[p.device_id] = served.get(p.device_id, 0) + 1

    async def main() -> None:
        pool = Pool()
        await several(pool)
        async with pool:
            await pool.verify()
            async with anyio.create_task_group() as group:
                for _ in range(24):
                    group.start_soon(client, pool)
            async with pool.partition(ALL) as p, pool.partition(ALL) as q:
                assert p.device_id != q.device_id
            s = pool.statistics()
            assert (s.sms_free, s.leases, s.waiting) == (s.sms_total, 0, 0)

    anyio.run(main)
    print(f"served, by device: {served}")
    assert all(served[device] > 50 for device in (0, 1))


def test_a_joint_lease_and_its_buffers_are_of_one_device() -> None:
    """Leases granted together are on one device, and another device's buffer is refused."""

    async def main() -> None:
        pool = Pool()
        await several(pool)
        async with pool, pool.partition(16, device=0) as p:
            async with pool.partitions(16, REST, device=1) as (q, rest):
                assert (q.device_id, rest.device_id) == (1, 1)
                with await p.upload(np.ones(8)) as buffer:
                    with pytest.raises(greensched.WrongDevice, match=r"device 0.*device 1"):
                        q.download(buffer)

    anyio.run(main)
