"""How finely a pool splits, its cluster sizes, and work queues of its own."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import greensched
from greensched import ALL, REST, LaunchConfig, Pool, ServiceClass
from greensched.kernels import spin
from greensched.typing import Feature
from helpers.backend import Backend
from helpers.waiting import until

CONFIG = LaunchConfig(grid=4, block=64)


@pytest.mark.parametrize("granularity", ["fine", "coscheduled"])
def test_a_pool_cuts_as_finely_as_it_was_told(backend: Backend, granularity: Any) -> None:
    """A fine pool grants pairs of SMs, another whole co-scheduled sets; kernels run on both."""

    async def main() -> None:
        async with backend.pool(granularity=granularity) as pool:
            sm = pool.devices[0].resources.sm
            least = 2 if granularity == "fine" else sm.min_partition_size
            async with pool.partitions(1, 1, REST) as (a, b, rest):
                assert a.sm_count == b.sm_count == least
                assert rest.sm_count <= sm.sm_count - 2 * least
                for p in (a, b, rest):
                    await p.launch(CONFIG, spin, 1000)
            async with pool.partition(ALL) as p:
                assert p.sm_count == sm.sm_count

    backend.run(main)


class Work:
    """A piece's SM-seconds; it ignores observed durations."""

    def __init__(self, sm_seconds: float) -> None:
        self.sm_seconds = sm_seconds

    def at(self, sms: int) -> float:
        return self.sm_seconds / sms

    def observe(self, _sms: int, _seconds: float) -> None:
        pass


def test_two_leases_move_their_border_by_pairs(backend: Backend) -> None:
    """Each step gets the SMs that it needs, the other lease the rest, without new executors."""
    services = [ServiceClass("steps", priority=1, latency=10.0), ServiceClass("bulk")]

    async def main() -> None:
        async with (
            backend.pool("h200", services=services, policy="sized", granularity="fine") as pool,
            anyio.create_task_group() as tasks,
        ):
            total, made = pool.statistics().sms_total, pool.statistics().executors_made
            release, others = anyio.Event(), []

            async def hold() -> None:
                async with pool.partition((2, ALL), service="bulk") as p:
                    others.append(p)
                    await release.wait()

            async with pool.partition((2, ALL), service="steps", duration=Work(1.0)) as steps:
                tasks.start_soon(hold)
                await until(lambda: pool.statistics().waiting == 1)
                await steps.checkpoint(Work(4.0), deadline=1.0)
                await until(lambda: others)
                for sms in (6, 14, 10, 26, 8, 50, 12, total - 20, 16):
                    work = Work(0.94 * sms)  # of a second 0.95 are planned with
                    for _ in range(2):
                        await steps.checkpoint(work, deadline=1.0)
                        for p in (steps, *others):
                            p.launch(CONFIG, spin, 1000)
                        await others[0].checkpoint()
                    assert (steps.sm_count, others[0].sm_count) == (sms, total - sms)
            assert pool.statistics().executors_made == made
            release.set()

    backend.run(main)


@pytest.mark.parametrize("spec", ["h200", "a100"])
def test_what_clusters_a_partition_has(backend: Backend, spec: str) -> None:
    """Co-scheduled partitions have clusters of 8 from 9.0 on; fine ones have none that large.

    A driver below 13.0 does not say how the SMs of a context are aligned: nothing is sure there.
    """

    async def main() -> None:
        async with backend.pool(spec) as pool:
            device = pool.devices[0]
            said = device.driver.version >= (13, 0)
            large = 8 if said and device.compute_capability >= (9, 0) else 1
            async with pool.partition(8) as p:
                assert p.max_cluster_size == large
            async with pool.partition(ALL) as p:
                assert p.max_cluster_size == large
            with pytest.raises(greensched.PartitionClosed):
                _ = p.max_cluster_size
        async with backend.pool(spec, granularity="fine") as pool, pool.partition(8) as p:
            assert p.max_cluster_size == min(2, large)

    backend.run(main)


def test_balanced_work_queues(backend: Backend) -> None:
    """Each partition has its own work-queue configuration, or NotSupported is raised."""

    async def main() -> None:
        pool = backend.pool(workqueues="balanced")
        driver = backend.driver()
        if not driver.supports(Feature.WORKQUEUES):
            with pytest.raises(greensched.NotSupported, match=r"needs .*CUDA 13\.1; this is"):
                await pool.open()
            await pool.aclose()
            return
        async with pool, pool.partitions(8, REST) as both:
            for p in both:
                queue = p.context.resources.workqueue
                assert (queue.sharing_scope, queue.concurrency_limit) == ("green_ctx_balanced", 2)
                await p.launch(CONFIG, spin, 1000)
        async with backend.pool() as pool, pool.partition(8) as p:
            assert p.context.resources.workqueue.sharing_scope == "device_ctx"

    backend.run(main)


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
    """The error names the argument and its valid values."""
    with pytest.raises(greensched.InvalidRequest, match=f"{next(iter(options))}=.*: give '"):
        Pool(**options)
