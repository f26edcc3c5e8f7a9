"""In a feed, the next array is copied while the kernel on the current one runs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from greensched import LaunchConfig, Pool
from greensched.device.staging import CHUNK
from greensched.driver import simulated
from greensched.driver.simulated import Span
from greensched.kernels import smids

ONE = LaunchConfig(grid=1, block=1)
BATCHES = 6
KERNEL_NS = 2_000_000
SIZE = 2 * CHUNK // 4


@pytest.mark.parametrize("awaited", [True, False], ids=["awaited", "left"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_next_copy_runs_beside_the_kernel(backend: str, awaited: bool) -> None:
    """Copies have their own stream and use no SM, and kernels never wait for them."""
    clock = simulated.VirtualClock(seed=1)
    driver = simulated.open("h200", clock=clock)
    spans: list[Span] = []

    async def main() -> None:
        async with Pool(driver=driver, prepare=[smids]) as pool, pool.partition(8) as p:
            driver.on_span(spans.append)
            async for x in p.prefetch(np.zeros(SIZE, np.uint32) for _ in range(BATCHES)):
                job = p.launch(ONE, smids, x, KERNEL_NS)
                if awaited:
                    await job

    clock.run(main, backend=backend)  # type: ignore[arg-type]
    kernels = [span for span in spans if span.kind == "kernel"]
    copies = [span for span in spans if span.name == "to device"]
    assert len(kernels) == BATCHES
    assert len(copies) == 2 * BATCHES
    assert {span.green for span in copies} == {0}
    assert not {span.stream for span in copies} & {span.stream for span in kernels}
    for number, kernel in enumerate(kernels):
        later = copies[2 * number + 2 : 2 * number + 4]  # the next batch's two chunks
        assert all(copy.start < kernel.end and copy.end <= kernel.end for copy in later)
    gaps = [b.start - a.end for a, b in itertools.pairwise(kernels)]
    latency = driver.devices[0].model.launch_latency_ns
    assert all(gap <= (latency if awaited else 0) for gap in gaps), gaps
