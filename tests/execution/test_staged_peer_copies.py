"""A staged copy between devices holds both until it is done, and frees everything if it fails."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from greensched import OutOfMemory, Pool
from greensched.device.staging import CHUNK
from greensched.driver import simulated
from greensched.driver.simulated import Fail
from helpers.gate import Gate

LARGE = np.arange(3 * CHUNK // 4, dtype=np.float32)


@pytest.mark.parametrize("pair", ["h20x2", "h20+h200"])
def test_a_pool_closed_over_a_copy_leaves_both_devices(pair: str) -> None:
    """Memory that another device still uses is not freed; both are reported."""
    driver = simulated.open(pair)

    async def main() -> None:
        pool = Pool(driver=driver)
        await pool.open()
        p = await pool.partition(8, device=1).__aenter__()
        async with pool.partition(8, device=0) as q:
            there = await q.upload(LARGE)
        with await p.upload(LARGE * 0) as here, there:
            with await Gate.closed(p) as gate:
                job = p.copy(here, there)
                p._granted_lease().end()
                report = await pool.aclose(grace=0)
                assert len(report.abandoned) == 2
                assert "device 1" in report.abandoned[1]
                assert "Device 0" in report.abandoned[0]
                assert not job._stream.reached(job._ticket)
                gate.open()

    anyio.run(main)
    driver.close()


@pytest.mark.parametrize(
    ("pair", "verb"),
    [
        ("h20x2", "can_access_peer"),
        ("h20x2", "share_memory_pool"),
        ("h20x2", "copy_peer"),
        ("h20+h200", "create_stream"),
        ("h20+h200", "create_event"),
        ("h20+h200", "copy_to_host"),
        ("h20+h200", "record_event"),
    ],
)
def test_a_failed_copy_leaves_nothing(pair: str, verb: str) -> None:
    """Whatever the driver refuses fails only that job, and everything is freed."""
    driver = simulated.open(pair)

    async def main() -> None:
        async with (
            Pool(driver=driver) as pool,
            pool.partition(8, device=0) as p,
            pool.partition(8, device=1) as q,
        ):
            with await p.upload(LARGE * 0) as here, await q.upload(LARGE) as there:
                driver.script.add(Fail(verb, nth=driver.script.calls[verb] + 1))
                with pytest.raises(Exception, match="INVALID_VALUE"):
                    await p.copy(here, there)
                made = driver.script.calls["allocate_host"]
                await p.copy(here, there)
                assert driver.script.calls["allocate_host"] == made, "what was lent had come back"
                np.testing.assert_array_equal(await p.download(here), LARGE)

    anyio.run(main)
    assert not driver.live()
    driver.close()


def test_staging_that_does_not_fit_says_how_much_there_is() -> None:
    """OutOfMemory has the requested, free and total pinned bytes; the partition goes on."""
    driver = simulated.open("h20")

    async def main() -> None:
        async with Pool(driver=driver) as pool, pool.partition(8) as p:
            failing = Fail(
                "allocate_host", driver.script.calls["allocate_host"] + 1, "OUT_OF_MEMORY"
            )
            driver.script.add(failing)
            with pytest.raises(OutOfMemory) as refused:
                await p.upload(LARGE)
            error = refused.value
            assert error.asked == CHUNK
            assert error.free is not None
            assert error.total is not None
            assert 0 < error.free <= error.total
            with await p.upload(LARGE) as buffer:
                np.testing.assert_array_equal(await p.download(buffer), LARGE)

    anyio.run(main)
    assert not driver.live()
    driver.close()
