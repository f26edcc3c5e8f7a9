"""The recipes of docs/how-to/ray.md, as they are printed there, on a real cluster."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="ray is not installed: make test-integrations")
serve = pytest.importorskip(
    "ray.serve", reason="ray[serve] is not installed: make test-integrations"
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::ResourceWarning")]

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "ray.md"
SOON = 60.0


@pytest.fixture(scope="module")
def page(ray_cluster: Any) -> Iterator[ModuleType]:
    """The programs of the page as one module, without the last line of the first, which runs it."""
    first, *recipes = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(recipes) == 4
    lines = first.replace("asyncio.run(main())", "")
    imports = (
        "from ray import serve\nimport torch\nfrom greensched.integrations.ray import own_gpus\n"
    )
    module = sys.modules["page_of_ray"] = ModuleType("page_of_ray")
    program = "\n".join([imports, lines, *recipes])
    exec(compile(program, PAGE.name, "exec"), module.__dict__)
    ray.cloudpickle.register_pickle_by_value(module)  # workers need not find it
    yield module
    ray.cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["page_of_ray"]


def test_models_share_a_pool(page: ModuleType) -> None:
    """Two deployments without a GPU send their jobs to one fleet, whose pool is one process."""
    serve.start(proxy_location="Disabled")
    try:
        x = np.ones(8, np.float32)
        for name, sms in (("small", 16), ("large", 64)):
            model = page.Model.bind(sms)
            handle = serve.run(model, name=name, route_prefix=None)
            np.testing.assert_array_equal(handle.remote(x).result(timeout_s=SOON), 2 * x)
        pools = [
            one["name"]
            for one in ray.util.list_named_actors(all_namespaces=True)
            if one["name"].startswith("models/")
        ]
        assert pools == ["models/0"]
    finally:
        serve.shutdown()


def test_a_lease_has_two_gpus(page: ModuleType) -> None:
    """A process with both GPUs of a node leases SMs of each."""
    two = {"env_vars": {"GREENSCHED_DRIVER": "simulated:h200x2"}}

    @ray.remote(num_gpus=2, max_calls=1, runtime_env=two)
    def run(x: np.ndarray) -> list[np.ndarray]:
        pool = page.Pool(page.own_gpus(), prepare=[page.saxpy])
        with pool.sync as opened:
            return opened.call(page.double_on_both, pool, x)

    x = np.ones(8, np.float32)
    for y in ray.get(run.remote(x), timeout=SOON):
        np.testing.assert_array_equal(y, 2 * x)


def test_batches_share_the_pool_of_a_process(page: ModuleType) -> None:
    """Calls from several threads of one process run on leases of one pool."""
    worker = ray.remote(page.Double).options(num_gpus=1, max_concurrency=4).remote()
    batches = [{"x": np.full(8, n, np.float32)} for n in range(8)]
    found = ray.get([worker.__call__.remote(batch) for batch in batches], timeout=SOON)
    assert [set(batch["x"]) for batch in found] == [{2.0 * n} for n in range(8)]
    ray.kill(worker)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ray_data_maps_batches(page: ModuleType) -> None:
    """Ray Data maps a data set with one process for each GPU."""
    rows = ray.data.from_numpy(np.arange(64, dtype=np.float32)).rename_columns({"data": "x"})
    found = page.doubled(rows, gpus=1).take_all()
    assert sorted(row["x"] for row in found) == [2 * n for n in range(64)]


def test_tensors_go_by_rays_own_transport(page: ModuleType) -> None:
    """A tensor goes from one pool's process to another by Gloo, and never through the driver."""
    torch = pytest.importorskip("torch", reason="torch is not installed: make test-integrations")
    from ray.experimental.collective import create_collective_group

    stages = [page.Stage.remote() for _ in range(2)]
    create_collective_group(stages, backend="gloo")
    first, second = (stage.run.options(tensor_transport="gloo") for stage in stages)
    tensor = first.remote(torch.ones, torch.tensor(4))
    doubled = second.remote(torch.add, tensor, tensor)
    assert ray.get(doubled, timeout=SOON, _use_object_store=True).tolist() == [2, 2, 2, 2]
    for stage in stages:
        ray.kill(stage)
