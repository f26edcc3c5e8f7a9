"""No two partitions run on one SM at one time, by the stand-in's own trace."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import greensched
from driver_cuda.conftest import Standin
from greensched import ContextOptions, Device, LaunchConfig, Pool, SMResourceOptions, launch
from greensched.kernels import smids, spin

LEASES = 10_000
WORKERS = 14
SIZES = (1, 8, 8, 8, 16, 16, 16, 24, 32, (8, 48))
#: Longer than a busy host takes from a launch to the cancellation behind it.
KERNEL_US = 4000.0
SEED = 20261120
ONE = LaunchConfig(grid=1, block=1)

pytestmark = pytest.mark.standin


def kernels_in(trace: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    return [row | {"mask": int(row["sms"], 16)} for row in rows if row["op"] == "kernel"]


def overlaps(kernels: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return pairs of kernels of different green contexts that shared an SM at one time."""
    found, running = [], []
    for kernel in sorted(kernels, key=lambda k: k["start"]):
        running = [r for r in running if r["end"] > kernel["start"]]
        found += [
            (r, kernel)
            for r in running
            if r["mask"] & kernel["mask"] and r["green"] != kernel["green"]
        ]
        running.append(kernel)
    return found


def test_ten_thousand_random_leases_never_share_an_sm(
    standin: Standin, tmp_path: Path, record_property: Any
) -> None:
    """A third of the 10,000 leases is cancelled."""
    trace = tmp_path / "trace.jsonl"
    rng = random.Random(SEED)
    counts: Counter[str] = Counter()

    async def lease(pool: Pool) -> None:
        """Take a lease and use it; a third is cancelled with a kernel running."""
        async with pool.partition(rng.choice(SIZES)) as p:
            jobs = [p.launch(ONE, spin, 1) for _ in range(rng.choice((1, 1, 2)))]
            counts["leases"] += 1
            counts["at once"] = max(counts["at once"], pool.statistics().leases)
            if rng.random() < 0.4:
                counts["cancelled"] += 1
                counts["cancelled with a kernel running"] += not jobs[-1].done()
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            await jobs[-1]

    async def worker(pool: Pool) -> None:
        while counts["leases"] < LEASES:
            task = asyncio.create_task(lease(pool))
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    async def main() -> None:
        async with Pool(driver="cuda") as pool:
            standin.trace(trace)
            await asyncio.gather(*(worker(pool) for _ in range(WORKERS)))
            async with pool.partition(greensched.ALL):
                standin.trace(None)
            s = pool.statistics()
            assert (s.sms_free, s.waiting, s.leases) == (s.sms_total, 0, 0)

    standin.set("kernel_us", KERNEL_US)
    asyncio.run(main())
    kernels = kernels_in(trace)
    assert not overlaps(kernels)
    assert standin.overlaps() == 0
    # Counted, not timed: how much of the device is at work at a time depends on the host's load.
    print(f"seed {SEED}: {len(kernels)} kernels, 0 overlaps; " + str(dict(counts)))
    assert counts["leases"] >= LEASES
    assert counts["cancelled"] >= 0.3 * counts["leases"]
    assert counts["cancelled with a kernel running"]
    assert counts["at once"] >= 8
    assert len(kernels) >= counts["leases"]


def test_an_overlap_made_on_purpose_is_caught(standin: Standin, tmp_path: Path) -> None:
    """Two contexts of two splits share SMs, and both accounts report it."""
    trace = tmp_path / "trace.jsonl"
    device = Device(0, driver="cuda")
    contexts = [
        device.create_context(
            ContextOptions(resources=device.resources.sm.split(SMResourceOptions(count=8))[0])
        )
        for _ in range(2)
    ]
    streams = [context.create_stream() for context in contexts]
    standin.set("kernel_us", KERNEL_US)
    before = standin.overlaps()
    standin.trace(trace)
    for stream in streams:
        launch(stream, ONE, spin, 1)
    for stream in streams:
        stream.sync()
    standin.trace(None)
    caught = standin.overlaps() - before
    standin.clear()
    assert caught >= 1
    assert overlaps(kernels_in(trace))
    for thing in (*streams, *contexts, device):
        thing.close()
    assert smids.name  # the kernel that proves the same on a GPU: pool.verify()
