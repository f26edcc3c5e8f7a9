"""The example of Ray Serve, on a real cluster, over HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from greensched import Pool
from greensched.driver import simulated
from greensched.driver.simulated import Crash, Fault, Hang
from greensched.kernels import reduce_sum

ray = pytest.importorskip("ray", reason="ray is not installed: make test-integrations")
serve = pytest.importorskip(
    "ray.serve", reason="ray[serve] is not installed: make test-integrations"
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::ResourceWarning")]

EXAMPLE = Path(__file__).parents[3] / "examples" / "10_ray_serve" / "app.py"
#: Seconds until Serve has replaced a replica that is not well.
REPLACED = 30.0
#: SMs of a GPU that has room for one request.
ONE = 16


def pool_maker(fault: Fault, sms: int) -> Callable[..., Pool]:
    """Makes pools whose GPU fails in this way, in each process anew."""

    def make(devices: list[int]) -> Pool:
        model = simulated.PRESETS["h200"]
        small = replace(model, gpcs=(ONE,)) if sms == ONE else model
        driver = simulated.open([small], faults=[fault])
        return Pool(devices, driver=driver, max_waiting=1, prepare=[reduce_sum])

    return make


@pytest.fixture(scope="module")
def example(ray_cluster: Any) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_of_ray_serve", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for one in (module, sys.modules[__name__]):  # which replicas need not find
        ray.cloudpickle.register_pickle_by_value(one)
    return module


@pytest.fixture(scope="module")
def address(ray_cluster: Any) -> Iterator[str]:
    """Of Serve, on a port that was free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}/sum"
    serve.shutdown()


def test_it_sums_and_refuses(example: ModuleType, address: str) -> None:
    """Sums are right; over a kernel that hangs one request waits, and is 504; others are 429."""

    async def main() -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            first = await client.post(address, json=[1, 2, 3.5])
            assert first.json()["sum"] == 6.5
            # Serve's proxy does not keep their order: whichever comes first is the one that hangs.
            left = {asyncio.create_task(client.post(address, json=[1])) for _ in range(6)}
            answers = []
            while len(left) > 1:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                answers += [task.result() for task in done]
            left.pop().cancel()
            assert {reply.status_code for reply in answers} == {429, 504}
            for reply in answers:
                assert ("retry-after" in reply.headers) == (reply.status_code == 429)

    serve.run(example.Sums.bind(pool_maker(Hang("reduce_sum", 2), ONE)))
    asyncio.run(main())


def test_a_dead_gpu_is_replaced(example: ModuleType, address: str) -> None:
    """Its requests are 503 until its health has Serve replace the process, which serves again."""

    async def main() -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            first = await client.post(address, json=[1])
            assert first.status_code == 200
            assert (await client.post(address, json=[1])).status_code == 503
            async with asyncio.timeout(REPLACED):
                while (reply := await client.post(address, json=[2])).status_code != 200:
                    assert reply.status_code in (500, 503)  # Serve's own, or the pool's
                    await asyncio.sleep(0.05)
            assert reply.json()["sum"] == 2
            assert reply.json()["process"] != first.json()["process"]

    serve.run(example.Sums.bind(pool_maker(Crash("reduce_sum", 2), 132)))
    asyncio.run(main())


def test_a_policy_sees_sms(example: ModuleType, address: str) -> None:
    """What a replica reports to Serve's autoscaling is how much of its SMs is taken."""
    from greensched.integrations.ray.serve import PoolReplica

    async def main() -> None:
        replica = PoolReplica.__new__(PoolReplica)
        async with Pool(driver="simulated:h200") as pool:
            replica.pool = pool
            assert replica.record_autoscaling_stats() == {"sms": 0.0, "waiting": 0.0}
            async with pool.partition(64):
                found = replica.record_autoscaling_stats()
                assert found == {"sms": pytest.approx(64 / 132), "waiting": 0.0}
            await replica.check_health()

    asyncio.run(main())
