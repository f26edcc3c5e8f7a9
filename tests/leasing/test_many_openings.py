"""Opening and closing many pools leaves no object, thread or file."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from pathlib import Path

import anyio
import pytest

from greensched import LaunchConfig, Pool
from greensched.driver import simulated
from greensched.kernels import spin
from helpers.objects import library_objects
from helpers.waiting import turns

ONE = LaunchConfig(grid=1, block=1)


def library_threads(earlier: set[threading.Thread]) -> list[threading.Thread]:
    threads = [one for one in threading.enumerate() if one.name.startswith("greensched")]
    return [one for one in threads if not one.name.endswith("simulated-gpu") and one not in earlier]


def descriptors() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


@pytest.mark.fault("D14", "I12")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_opens_and_closes_leave_nothing(backend: str) -> None:
    """There are as many objects, threads and open files after 3 pools as after 9."""
    driver = simulated.open("h20")
    earlier = set(threading.enumerate())  # other tests' threads need not end while this one runs

    async def use(times: int) -> tuple[Counter[str], int, int]:
        for _ in range(times):
            async with Pool(driver=driver) as pool, pool.partition(8) as p:
                await p.launch(ONE, spin, 1000)
                await p.run(lambda: None)
        del pool, p
        for thread in library_threads(earlier):
            await anyio.to_thread.run_sync(thread.join, 5)
        gc.collect()
        await turns()  # what a collected object's task does behind that
        gc.collect()
        return library_objects(), len(library_threads(earlier)), descriptors()

    async def main() -> None:
        await use(2)
        before = await use(1)
        after = await use(6)
        assert not after[0] - before[0]  # fewer: what earlier tests left has ended meanwhile
        assert after[1:] <= before[1:]

    anyio.run(main, backend=backend)
    assert not driver.live()
