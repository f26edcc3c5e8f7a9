"""By the stand-in's own trace, a feed's next copy runs beside the kernel."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from driver_cuda.conftest import Standin
from greensched import LaunchConfig, Pool
from greensched.device.staging import CHUNK
from greensched.kernels import smids

ONE = LaunchConfig(grid=1, block=1)
BATCHES = 4
#: So long that a machine with other things to do does not matter: 0.2 s, and half of it.
KERNEL_US = 200_000.0
COPY_GBPS = CHUNK / 0.1e9
SIZE = CHUNK // 4

pytestmark = pytest.mark.standin


def test_the_next_copy_runs_beside_the_kernel(standin: Standin, tmp_path: Path) -> None:
    """Each batch's copy overlaps the kernel on the batch before it."""
    trace = tmp_path / "trace.jsonl"

    async def main() -> None:
        async with Pool(driver="cuda", prepare=[smids]) as pool, pool.partition(8) as p:
            standin.set("kernel_us", KERNEL_US)
            standin.set("copy_gbps", COPY_GBPS)
            standin.trace(trace)
            async for x in p.prefetch(np.zeros(SIZE, np.uint32) for _ in range(BATCHES)):
                await p.launch(ONE, smids, x, 1)
            standin.trace(None)
            standin.set("copy_gbps", 0)

    asyncio.run(main())
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    kernels = [row for row in rows if row["op"] == "kernel"]
    copies = [row for row in rows if row["bytes"] == CHUNK and row["op"] != "kernel"]
    assert (len(kernels), len(copies)) == (BATCHES, BATCHES)
    assert not {row["stream"] for row in copies} & {row["stream"] for row in kernels}
    assert {row["green"] for row in copies} == {0}
    for kernel, copy in zip(kernels, copies[1:], strict=False):
        assert copy["start"] < kernel["end"]
        assert kernel["start"] < copy["end"]
