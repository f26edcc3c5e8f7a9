"""The real Triton server with its Python backend, on a CPU, as pytriton's wheel has them."""

from __future__ import annotations

import asyncio
import importlib.util
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from helpers.hosts import RECIPES, Said, hosted

SPEC = importlib.util.find_spec("pytriton")
if SPEC is None:
    pytest.skip("pytriton is not installed: make test-embedding", allow_module_level=True)
assert SPEC.origin is not None
TRITON = Path(SPEC.origin).parent / "tritonserver"
LIBRARIES = TRITON.parents[1] / "nvidia_pytriton.libs"
VERSION = ".".join(platform.python_version_tuple()[:2])


@contextmanager
def triton(models: Path, folder: Path, port: int) -> Iterator[Said]:
    """A server of the models, whose Python is this one."""
    backend = folder / "backends" / "python"
    shutil.copytree(TRITON / "backends" / "python", backend)
    stub = TRITON / "python_backend_stubs" / VERSION / "triton_python_backend_stub"
    shutil.copy(stub, backend)
    libraries = f"{LIBRARIES}:{sysconfig.get_config_var('LIBDIR')}"
    command = [
        str(TRITON / "bin" / "tritonserver"),
        f"--model-repository={models}",
        f"--backend-directory={backend.parent}",
        "--http-address=127.0.0.1",
        f"--http-port={port}",
        "--allow-grpc=false",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--allow-metrics=false",
    ]
    paths = ":".join(path for path in sys.path if path)
    with hosted(
        command, "Started HTTPService", folder, LD_LIBRARY_PATH=libraries, PYTHONPATH=paths
    ) as said:
        yield said


def client_of(port: int) -> httpx.AsyncClient:
    """Triton says that it has started before its port is open: one tries again."""
    transport = httpx.AsyncHTTPTransport(retries=5)
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, transport=transport)


def asked(numbers: list[float]) -> dict[str, object]:
    tensor = {"name": "numbers", "shape": [1, len(numbers)], "datatype": "FP32", "data": numbers}
    return {"inputs": [tensor]}


def test_it_answers(port: int, tmp_path: Path) -> None:
    """Each of many requests gets its own sum, in batches, and the pool closes at the end."""

    async def main() -> None:
        async with client_of(port) as client:
            given = [[1.0, 2.0, float(n)] for n in range(40)]
            path = "/v2/models/sums/infer"
            posts = [client.post(path, json=asked(numbers)) for numbers in given]
            answers = await asyncio.gather(*posts)
            assert {one.status_code for one in answers} == {200}, [one.text for one in answers]
            sums = [one.json()["outputs"][0]["data"] for one in answers]
            assert sums == [[sum(numbers)] for numbers in given]
            assert (await client.get("/v2/health/ready")).status_code == 200

    with triton(RECIPES / "triton", tmp_path, port) as said:
        asyncio.run(main())
    assert "successfully unloaded 'sums'" in said.text
    assert "Traceback" not in said.text


def test_a_dead_gpu(port: int, tmp_path: Path) -> None:
    """After a device fault clients get 503, Triton's probes stay green, and a reload recovers."""
    models = tmp_path / "models"
    shutil.copytree(RECIPES / "triton", models)
    program = models / "sums" / "1" / "model.py"
    right = "Pool(prepare=[reduce_sum])"
    source = program.read_text()
    assert right in source
    crashing = "Pool(driver=open(faults=[Crash('reduce_sum', 2)]), prepare=[reduce_sum])"
    imports = "from greensched.driver.simulated import Crash, open\n\n#: Answered"
    program.write_text(source.replace(right, crashing).replace("#: Answered", imports))

    async def main() -> None:
        async with client_of(port) as client:

            async def status() -> int:
                answer = await client.post("/v2/models/sums/infer", json=asked([1.0]))
                said.append(answer.text)
                return answer.status_code

            said: list[str] = []
            assert await status() == 200
            assert await status() == 503
            assert "ILLEGAL_ADDRESS" in said[-1]
            for path in ("/v2/health/ready", "/v2/health/live", "/v2/models/sums/ready"):
                assert (await client.get(path)).status_code == 200  # so these cannot be used
            for verb in ("unload", "load"):
                path = f"/v2/repository/models/sums/{verb}"
                assert (await client.post(path)).status_code == 200
            with anyio.fail_after(30):
                while await status() != 200:  # noqa: ASYNC110  unloading does not wait for the old process
                    await anyio.sleep(0.1)

    with triton(models, tmp_path, port):
        asyncio.run(main())
