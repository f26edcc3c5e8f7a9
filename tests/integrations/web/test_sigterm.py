"""SIGTERM reaches a service behind uvicorn, in a process of its own, as Kubernetes sends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml

from greensched.integrations import asgi
from greensched.integrations.testing import SimPool
from greensched.pool import GRACE

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "fastapi.md"
#: A service on the real clock: a kernel of 1 ns for `/short`, and for `/long` a lease that prints
#: when it begins and ends with a line of input. Only a second SIGTERM ends the drain.
SERVICE = """
import asyncio
import sys

from fastapi import FastAPI

from greensched import LaunchConfig, Pool
from greensched.integrations import asgi
from greensched.kernels import spin

pool = Pool(driver="simulated:h200")
app = FastAPI(lifespan=asgi.lifespan(pool, drain=3600))
app.add_middleware(asgi.PoolErrors)
app.router.routes.extend(asgi.routes(pool))


@app.get("/short")
async def short() -> str:
    async with pool.partition(16) as p:
        await p.launch(LaunchConfig(grid=1, block=32), spin, 1)
    return "done"


@app.get("/long")
async def long() -> str:
    async with pool.partition(16):
        print("begun", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    return "done"
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Start uvicorn; provide its process and a client that keeps no connection."""
    (tmp_path / "service.py").write_text(SERVICE)
    command = [sys.executable, "-m", "uvicorn", "service:app", "--port", "0", "--no-access-log"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        address = next(found[0] for line in lines if (found := re.search(r"http://[\d.:]+", line)))
        try:
            limits = httpx.Limits(max_keepalive_connections=0)
            with httpx.Client(base_url=address, limits=limits, timeout=60) as client:
                yield process, client
        finally:
            process.kill()
            process.communicate()


def test_sigterm_drains_a_server_before_it_refuses_connections(
    server: tuple[subprocess.Popen[str], httpx.Client],
) -> None:
    """Readiness turns red, requests are served; then none is accepted, and accepted ones end."""
    process, client = server
    assert process.stdin is not None
    assert process.stdout is not None
    assert client.get("/readyz").status_code == 200
    with ThreadPoolExecutor(1) as other:
        long = other.submit(client.get, "/long")
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/readyz").status_code == 503)
        assert client.get("/healthz").status_code == 200
        assert client.get("/short").json() == "done"
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_refused(client))
        assert not long.done()
        process.stdin.write("\n")
        process.stdin.flush()
        assert long.result().json() == "done"
    assert process.wait() in (0, -signal.SIGTERM)


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask again and again; the test's own limit ends what never comes true."""
    while not condition():
        pass


def is_refused(client: httpx.Client) -> bool:
    """Say whether a request got no answer: none is accepted, or it came as the socket closed."""
    try:
        client.get("/short")
    except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
        return True
    return False


def test_the_manifest_of_the_page_fits_its_service(sim_pool: SimPool) -> None:
    """Its probes are routes of the service, and its grace period outlasts the page's drain."""
    text = PAGE.read_text()
    (given,) = re.findall("```yaml\n(.*?)```", text, re.DOTALL)
    (drain,) = map(float, re.findall(r"lifespan\(pool, drain=(\d+)\)", text))
    deployment = yaml.safe_load(given)["spec"]
    template, spec = deployment["template"], deployment["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["terminationGracePeriodSeconds"] > drain + GRACE
    probes = [value for key, value in container.items() if key.endswith("Probe")]
    routes = {route.path for route in asgi.routes(sim_pool())}
    assert {probe["httpGet"]["path"] for probe in probes} == routes
    # The load balancer has turned away before the drain ends.
    ready = container["readinessProbe"]
    assert ready["periodSeconds"] * ready["failureThreshold"] < drain
    assert deployment["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
