"""How finely a pool cuts, what clusters that leaves, and work queues of one's own."""

from __future__ import annotations

from typing import Any

import pytest

import greensched
from greensched import ALL, REST, LaunchConfig, Pool
from greensched.kernels import spin
from greensched.typing import Feature
from helpers.world import World

CONFIG = LaunchConfig(grid=4, block=64)


@pytest.mark.parametrize("granularity", ["fine", "coscheduled"])
def test_a_pool_cuts_as_finely_as_it_was_told(world: World, granularity: Any) -> None:
    """A fine pool grants pairs of SMs, the other whole co-scheduled sets; both run kernels."""

    async def main() -> None:
        async with world.pool(granularity=granularity) as pool:
            sm = pool.devices[0].resources.sm
            least = 2 if granularity == "fine" else sm.min_partition_size
            async with pool.partitions(1, 1, REST) as (a, b, rest):
                assert a.sm_count == b.sm_count == least
                assert rest.sm_count <= sm.sm_count - 2 * least
                for p in (a, b, rest):
                    await p.launch(spin, CONFIG, 1000)
            async with pool.partition(ALL) as p:
                assert p.sm_count == sm.sm_count

    world.run(main)


@pytest.mark.parametrize("spec", ["h200", "a100"])
def test_what_clusters_a_partition_has(world: World, spec: str) -> None:
    """Co-scheduled partitions have clusters of 8 from 9.0 on; fine ones have none that large.

    A driver below 13.0 does not say how the SMs of a context are aligned: nothing is sure there.
    """

    async def main() -> None:
        async with world.pool(spec) as pool:
            device = pool.devices[0]
            said = device.driver.version >= (13, 0)
            large = 8 if said and device.compute_capability >= (9, 0) else 1
            async with pool.partition(8) as p:
                assert p.max_cluster_size == large
            async with pool.partition(ALL) as p:
                assert p.max_cluster_size == large
            with pytest.raises(greensched.PartitionClosed):
                _ = p.max_cluster_size
        async with world.pool(spec, granularity="fine") as pool, pool.partition(8) as p:
            assert p.max_cluster_size == min(2, large)

    world.run(main)


def test_balanced_work_queues(world: World) -> None:
    """Every partition has a configuration of its own, where there is one; else NotSupported."""

    async def main() -> None:
        pool = world.pool(workqueues="balanced")
        driver = world.driver()
        if not driver.supports(Feature.WORKQUEUES):
            with pytest.raises(greensched.NotSupported, match=r"needs .*CUDA 13\.1; this is"):
                await pool.open()
            await pool.aclose()
            return
        async with pool, pool.partitions(8, REST) as both:
            for p in both:
                queue = p.context.resources.workqueue
                assert (queue.sharing_scope, queue.concurrency_limit) == ("green_ctx_balanced", 2)
                await p.launch(spin, CONFIG, 1000)
        async with world.pool() as pool, pool.partition(8) as p:
            assert p.context.resources.workqueue.sharing_scope == "device_ctx"

    world.run(main)


@pytest.mark.parametrize(
    "options",
    [
        {"granularity": "coarse"},
        {"granularity": None},
        {"granularity": ["fine"]},
        {"workqueues": "shared"},
        {"workqueues": True},
    ],
)
def test_a_pool_refuses_what_is_no_choice(options: dict[str, Any]) -> None:
    """The refusal names the argument and what may be given."""
    with pytest.raises(greensched.InvalidRequest, match=f"{next(iter(options))}=.*: give '"):
        Pool(**options)
