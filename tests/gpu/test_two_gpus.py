"""On two real GPUs: torch in partitions of both, a lost device, and a process for each."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any

import numpy as np
import pytest

from greensched import Device, Pool
from greensched import driver as drivers
from greensched.driver.cuda.driver import CudaDriver
from helpers.backend import standin_library

pytestmark = pytest.mark.gpu

NOT_ON_STANDIN = pytest.mark.skipif(
    standin_library() is not None, reason="the stand-in runs no device code, and has no UUIDs"
)


@pytest.fixture
def uuids() -> list[str]:
    """The UUIDs of the first two devices."""
    standin_library()
    driver = drivers.open("cuda")
    driver.initialise()
    if driver.device_count() < 2:
        pytest.skip("the test needs 2 devices")
    return [Device(ordinal, driver=driver).uuid for ordinal in range(2)]


def test_torch_has_the_device_of_each_partition(uuids: list[str]) -> None:
    """Concurrent calls have their own device, stream and results."""
    torch = pytest.importorskip("torch", reason="torch is not on this machine")
    import greensched.integrations.torch  # noqa: F401  calls have torch's stream by this

    def work(number: float) -> tuple[int, int, Any]:
        x = torch.full((512, 512), number, device="cuda")
        stream = torch.cuda.current_stream()
        return stream.device_index, torch.cuda.current_device(), (x @ x).sum()

    async def main() -> None:
        async with Pool([0, 1]) as pool:
            async with pool.partition(32, device=0) as p, pool.partition(32, device=1) as q:
                for _ in range(20):
                    found = await asyncio.gather(p.run(work, 1.0), q.run(work, 2.0))
                    assert [where[:2] for where in found] == [(0, 0), (1, 1)]
                    sums = [where[2] for where in found]
                    assert [sum_.device.index for sum_ in sums] == [0, 1]
                    assert [float(sum_) for sum_ in sums] == [512.0**3, 4 * 512.0**3]
                assert torch.cuda.current_device() == 0

    asyncio.run(main())


@pytest.mark.parametrize("way", ["peer", "staged"])
def test_large_copies_arrive(uuids: list[str], monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A quarter of a gigabyte goes to the other device and back."""
    if way == "staged":
        monkeypatch.setattr(CudaDriver, "can_access_peer", lambda *_: False)
    array = np.random.default_rng(1).integers(0, 256, 2**28, np.uint8)

    async def main() -> None:
        async with Pool([0, 1]) as pool:
            async with pool.partition(8, device=0) as p, pool.partition(8, device=1) as q:
                with await p.upload(array) as here, await q.empty_like(array) as there:
                    took = []
                    for _ in range(2):
                        began = time.perf_counter()
                        await p.copy(there, here)
                        took.append(time.perf_counter() - began)
                    print(f"{way}: {array.nbytes / 1e9 / min(took):.1f} GB/s")
                    await p.copy(here, np.zeros_like(array))
                    await q.copy(here, there)
                    np.testing.assert_array_equal(await p.download(here), array)

    asyncio.run(main())


# -- a device is lost -------------------------------------------------------------------------

LOST = """
import asyncio, json, sys, time
import numpy as np
import greensched
from greensched import ALL, LaunchConfig, Pool, Program
from greensched.kernels import fill, spin

ONE = LaunchConfig(grid=1, block=1)
SOURCE = 'extern "C" __global__ void wild() { *(volatile int *)0x10 = 1; }'
wild = Program(SOURCE, name="wild.cu").kernel("wild")
found = {}


async def work(name, pool, sms, launch):
    try:
        async with pool.partition(sms, device=1) as q:
            with await q.upload(np.ones(8, np.float32)) as y:
                await launch(q, y)
                found[name] = (await q.download(y)).tolist()
    except greensched.DeviceLost as error:
        found[name] = f"{type(error.cause).__name__} of device {error.cause.device}"


async def lose(pool):
    try:
        async with pool.partition(8, device=0) as p:
            await p.launch(ONE, wild)
    except greensched.DeviceLost as error:
        found["cause"] = error.cause.name


async def main():
    kernels = [fill, spin, wild]
    pools = [Pool([0, 1], prepare=kernels)]
    if sys.argv[1] == "two pools":
        pools = [Pool([0], prepare=kernels), Pool([1], prepare=kernels)]
    for pool in pools:
        await pool.open()
    held = asyncio.create_task(
        work("held", pools[-1], 16, lambda q, y: q.launch(ONE, spin, 1_000_000_000))
    )
    queued = asyncio.create_task(
        work("queued", pools[-1], ALL, lambda q, y: q.launch(ONE, fill, y, 2.0, 8))
    )
    await asyncio.sleep(0.3)
    began = time.perf_counter()
    await lose(pools[0])
    await asyncio.gather(held, queued)
    found["seconds"] = time.perf_counter() - began
    found["ready"] = [pool.is_ready for pool in pools]
    for pool in pools:
        await pool.aclose()
    print(json.dumps(found))


asyncio.run(main())
"""


def lost(pools: str) -> dict[str, Any]:
    """Lose device 0 in a process with work on device 1; return the consequences."""
    ran = subprocess.run(
        [sys.executable, "-c", LOST, pools], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, "Traceback" in ran.stderr) == (0, False), ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    print(pools, found)
    return found


@NOT_ON_STANDIN
def test_a_lost_device_ends_the_pool_over_both(uuids: list[str]) -> None:
    """After an illegal address, leases of the other device end at once."""
    found = lost("one pool")
    assert found["cause"] == "ILLEGAL_ADDRESS"
    assert found["held"] == found["queued"] == "DeviceFault of device 0"
    assert found["ready"] == [False]
    assert found["seconds"] < 5


@NOT_ON_STANDIN
def test_a_lost_device_ends_the_pool_of_the_other(uuids: list[str]) -> None:
    """With a pool on each device, the other pool ends as well."""
    found = lost("two pools")
    assert found["cause"] == "ILLEGAL_ADDRESS"
    assert found["held"] == found["queued"] == "DeviceFault of device 1"
    assert found["ready"] == [False, False]
    assert found["seconds"] < 5


# -- a process for each -----------------------------------------------------------------------

HOLDER = """
import asyncio, json, sys
import numpy as np
import greensched
from greensched import Pool


async def main():
    try:
        async with Pool([int(sys.argv[1])]) as pool, pool.partition(8) as p:
            with await p.upload(np.arange(8)) as x:
                values = (await p.download(x)).tolist()
            print(json.dumps([pool.devices[0].uuid, values]), flush=True)
            await asyncio.to_thread(sys.stdin.read)
    except greensched.DeviceTaken as error:
        print(json.dumps(["taken", error.process]), flush=True)


asyncio.run(main())
"""


class Holder:
    """A process with a pool on a device of those that it sees."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def says(self) -> list[Any]:
        """Return the UUID of its device and what it computed, or which process has the device."""
        out: IO[str] | None = self.process.stdout
        assert out is not None
        found: list[Any] = json.loads(out.readline())
        return found


@contextmanager
def holder(visible: str, ordinal: int = 0) -> Iterator[Holder]:
    """Start a process that sees these devices, and end it after the block."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(ordinal)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": visible},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Holder(process)
        finally:
            process.kill()


@NOT_ON_STANDIN
def test_each_device_may_have_a_process_of_its_own(uuids: list[str]) -> None:
    """As two pool actors of one host: the devices that a process sees are its own to lease.

    Whatever number a device has in a process, it has one process; a killed one frees it.
    """
    values = list(range(8))
    with ExitStack() as stack:
        first = stack.enter_context(holder("0"))
        second = stack.enter_context(holder(uuids[1]))
        assert [first.says(), second.says()] == [[uuids[0], values], [uuids[1], values]]
        for visible, ordinal, owner in (("1", 0, second), ("1,0", 0, second), ("1,0", 1, first)):
            with holder(visible, ordinal) as third:
                assert third.says() == ["taken", owner.process.pid]
        second.process.kill()
        began = time.monotonic()
        with holder("1") as third:
            assert third.says() == [uuids[1], values]
        print(f"a device was leased again {time.monotonic() - began:.1f} s after its process died")
