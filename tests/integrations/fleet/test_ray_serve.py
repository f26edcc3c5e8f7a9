"""The example of Ray Serve, on a real cluster, over HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve", reason="ray[serve] is not installed: make test-integrations")
import ray
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from greensched import Pool
from greensched.driver import simulated
from greensched.driver.simulated import Crash, Fault, Hang
from greensched.integrations import asgi
from greensched.kernels import reduce_sum

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::ResourceWarning")]

EXAMPLE = Path(__file__).parents[3] / "examples" / "10_ray_serve" / "app.py"
#: Seconds until Serve has replaced a replica that is not well.
REPLACED = 30.0
#: SMs of a GPU that has room for one request.
ONE = 16


def pool_maker(fault: Fault, sms: int) -> Callable[..., Pool]:
    """Make pools whose GPU fails in this way, in each process anew."""

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
    """Sums are right; behind a hanging kernel one request gets 504 and the others 429."""

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


def test_a_dead_gpu_leaves_with_its_process(
    example: ModuleType, address: str, tmp_path: Path
) -> None:
    """Of twelve at a time, at most three sent after the first failure fail; others are served."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(timeout=30) as client:
            died, late, served = math.inf, 0, Counter[int]()

            async def requests() -> None:
                nonlocal died, late
                while died == math.inf or served.total() < 200:
                    sent = loop.time()
                    reply = await client.post(address, json=[1])
                    if reply.status_code == 200:
                        served[reply.json()["process"]] += 1
                    else:
                        died = min(died, loop.time())
                        late += sent > died
                        served.clear()

            async with asyncio.TaskGroup() as together:
                for _ in range(12):
                    together.create_task(requests())
            assert late <= 3
            async with asyncio.timeout(REPLACED):
                while len(served) < 2:
                    reply = await client.post(address, json=[1])
                    assert reply.status_code == 200
                    served[reply.json()["process"]] += 1

    def make(devices: list[int]) -> Pool:
        with suppress(FileExistsError):  # only the first process's GPU fails
            (tmp_path / "failing").touch(exist_ok=False)
            return pool_maker(Crash("reduce_sum", 5), 132)(devices)
        return Pool(devices, prepare=[reduce_sum])

    serve.run(example.Sums.options(num_replicas=2).bind(make))
    asyncio.run(main())


def test_two_replicas_share_the_load(example: ModuleType, address: str) -> None:
    """Above one replica's capacity 98 % are answered, by both replicas within 20 %."""
    seconds, rate = 4.0, 27  # of 2 x 20 a second

    async def main() -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            for _ in range(10):  # both replicas have been met
                await client.get(address)
            loop = asyncio.get_running_loop()
            began, sent = loop.time(), []
            for n in range(int(seconds * rate)):
                await asyncio.sleep(began + n / rate - loop.time())
                sent.append(asyncio.create_task(client.get(address)))
            answers = await asyncio.gather(*sent)
            served = Counter(reply.text for reply in answers if reply.status_code == 200)
            assert served.total() >= 0.98 * len(sent), Counter(r.status_code for r in answers)
            assert len(served) == 2
            assert min(served.values()) >= 0.8 * max(served.values()), served

    serve.run(slow_replica().bind(small_pool))
    asyncio.run(main())


def small_pool(devices: list[int]) -> Pool:
    """Make a pool for two requests at once."""
    model = replace(simulated.PRESETS["h200"], gpcs=(2 * ONE,))
    return Pool(devices, driver=simulated.open([model]), max_waiting=8)


def slow_replica(**options: Any) -> Any:
    """Return a deployment in which each request holds SMs for a tenth of a second."""
    from greensched.integrations.ray.serve import PoolReplica, serve_options

    app = FastAPI()
    app.add_middleware(asgi.PoolErrors)

    @serve.deployment(**{"num_replicas": 2, **serve_options(slots=2, max_waiting=8), **options})
    @serve.ingress(app)
    class Slow(PoolReplica):
        @app.get("/sum")
        async def serve(self) -> int:
            async with self.pool.partition(ONE, deadline=5):
                await asyncio.sleep(0.1)
            return os.getpid()

    return Slow


def test_a_policy_sees_sms(example: ModuleType, address: str) -> None:
    """A replica reports to Serve's autoscaler what part of its SMs is in use."""
    from greensched.integrations.ray.serve import PoolReplica

    async def main() -> None:
        replica = PoolReplica.__new__(PoolReplica)
        async with Pool(driver="simulated:h200") as pool:
            replica.pool = pool
            idle = {"sms": 0.0, "waiting": 0.0, "sms_in_demand": 0.0}
            assert replica.record_autoscaling_stats() == idle
            async with pool.partition(64), pool.partition(64):
                waiting = asyncio.create_task(pool.partition(64).__aenter__())
                await asyncio.sleep(0)
                found = replica.record_autoscaling_stats()
                assert found == {"sms": 1.0, "waiting": 1.0, "sms_in_demand": 1.5}
                waiting.cancel()
            await replica.check_health()

    asyncio.run(main())


@pytest.mark.timeout(180)
def test_replicas_follow_the_sms_in_demand(example: ModuleType, address: str) -> None:
    """If requests wait for the SMs of one replica, Serve starts another one by `scale_by_sms`."""
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "upscale_delay_s": 0.5,
        "policy": {"policy_function": "greensched.integrations.ray.serve:scale_by_sms"},
    }

    async def main() -> None:
        async with httpx.AsyncClient(timeout=30) as client:

            async def served() -> set[str]:
                replies = await asyncio.gather(*(client.get(address) for _ in range(6)))
                return {reply.text for reply in replies if reply.status_code == 200}

            assert len(await served()) == 1
            async with asyncio.timeout(3 * REPLACED):  # replicas report every ten seconds
                while len(await served()) < 2:
                    pass

    serve.delete("default")  # otherwise as many replicas go on as another test had
    serve.run(slow_replica(num_replicas=None, autoscaling_config=scaling).bind(small_pool))
    asyncio.run(main())


def test_rays_metrics_have_the_pool(example: ModuleType, address: str) -> None:
    """The pool's metrics appear at the port that Ray exports to Prometheus."""
    serve.run(slow_replica(num_replicas=1).bind(small_pool))
    ports = {node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]}

    async def main() -> None:
        async with httpx.AsyncClient(timeout=30) as client, asyncio.timeout(REPLACED):
            assert (await client.get(address)).status_code == 200
            wanted = {"sms_total": 2.0 * ONE, "sms_leased": 0.0, "granted_total": 1.0}
            found: dict[str, dict[str, float]] = {}  # by pool: earlier replicas' stay
            while wanted not in found.values():
                await asyncio.sleep(0.2)
                pages = [await client.get(f"http://127.0.0.1:{port}/metrics") for port in ports]
                families = [
                    family for page in pages for family in text_string_to_metric_families(page.text)
                ]
                for sample in (sample for family in families for sample in family.samples):
                    name = sample.name.removeprefix("ray_greensched_")
                    if name in wanted:
                        found.setdefault(sample.labels["pool"], {})[name] = sample.value

    asyncio.run(main())
