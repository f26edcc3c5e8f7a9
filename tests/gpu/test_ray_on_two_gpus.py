"""Ray on two real GPUs of one host: a pool's process on each, by CUDA_VISIBLE_DEVICES alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from time import monotonic
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="ray is not installed: make test-integrations")
import ray
from ray.cluster_utils import Cluster

from greensched import ALL, LaunchConfig, Partition, Pool
from greensched import driver as drivers
from greensched.integrations.ray import Fleet
from greensched.kernels import saxpy
from helpers.backend import standin_library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.skipif(standin_library() is not None, reason="the stand-in has no UUIDs"),
]


def make(devices: list[int]) -> Pool:
    return Pool(devices, driver="cuda", prepare=[saxpy])


def device_count() -> int:
    """Return the number of GPUs that this process sees."""
    driver = drivers.open("cuda")
    driver.initialise()
    return driver.device_count()


async def where(p: Partition) -> tuple[int, str, int, float]:
    """Return the process, the GPU, the GPUs that the process sees, and a sum made on the GPU."""
    with await p.upload(np.ones(256, np.float32)) as x:
        p.launch(LaunchConfig(grid=1, block=256), saxpy, 1.0, x, x, x.size)
        total = float((await p.download(x)).sum())
    return os.getpid(), p.device.uuid, await p.run(device_count), total


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[None]:
    """Start a cluster on this host alone."""
    if device_count() < 2:
        pytest.skip("the test needs 2 devices")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    node = {"num_cpus": 2, "num_gpus": 2, "include_dashboard": False}
    host = Cluster(initialize_head=True, head_node_args=node)
    try:
        ray.init(address=host.address, log_to_driver=False, logging_level="error")
        yield
    finally:
        ray.shutdown()
        host.shutdown()


async def both(fleet: Fleet) -> dict[str, tuple[int, int, float]]:
    """Return what jobs found on each GPU."""
    jobs: list[Any] = [
        fleet.submit(where, sms=ALL, deadline=30, idempotent=True) for _ in range(12)
    ]
    return {gpu: (pid, seen, total) for pid, gpu, seen, total in await asyncio.gather(*jobs)}


def test_a_killed_actor_frees_its_gpu(two_gpus: None) -> None:
    """Each process sees one GPU of its own; one that is killed is back on the same GPU."""

    async def main() -> float:
        async with Fleet("two", make) as fleet:
            found = await both(fleet)
            assert len(found) == len({pid for pid, _, _ in found.values()}) == 2
            assert {(seen, total) for _, seen, total in found.values()} == {(1, 512.0)}
            (gpu, (victim, _, _)), (other, (survivor, _, _)) = found.items()
            os.kill(victim, signal.SIGKILL)
            killed = monotonic()
            async with asyncio.timeout(60):
                while len(now := await both(fleet)) < 2 or now[gpu][0] == victim:
                    pass
            took = monotonic() - killed
            assert now[other][0] == survivor
            assert now[gpu][0] != victim
            return took

    print(f"the GPU of a killed actor leased again after {asyncio.run(main()):.2f} s")
