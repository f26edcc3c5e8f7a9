"""BentoML with a pool in its service, over HTTP."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest

from helpers.hosts import RECIPES, hosted, slowed

pytest.importorskip("bentoml", reason="BentoML is not installed: make test-embedding")

READY = "Completed async startup hook: open"


def command(port: int) -> list[str]:
    serve = [sys.executable, "-m", "bentoml", "serve", "bentoml_service:Sums"]
    return [*serve, "--host", "127.0.0.1", "--port", str(port)]


def test_it_answers(port: int, tmp_path: Path) -> None:
    """The service returns a sum from the GPU, its probes are green, and its pool closes."""
    home = {"BENTOML_HOME": str(tmp_path), "BENTOML_DO_NOT_TRACK": "1"}

    with hosted(command(port), READY, RECIPES, **home) as said:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            assert client.post("/total", json={"numbers": [1, 2, 3.5]}).json() == 6.5
            assert client.get("/readyz").status_code == 200
            assert client.get("/livez").status_code == 200
    assert "Completed async cleanup hook: close" in said.text
    assert "Traceback" not in said.text


def test_too_many(port: int, tmp_path: Path) -> None:
    """Of 14 concurrent requests 8 run and at most 2 wait; the others are refused with 429."""
    slowed(RECIPES / "bentoml_service.py", tmp_path)
    home = {"BENTOML_HOME": str(tmp_path), "BENTOML_DO_NOT_TRACK": "1"}

    async def main() -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            posts = [client.post("/total", json={"numbers": [1.0]}) for _ in range(14)]
            answers = await asyncio.gather(*posts)
            statuses = Counter(one.status_code for one in answers)
            assert 8 <= statuses[200] <= 10
            assert statuses[200] + statuses[429] == 14

    with hosted(command(port), READY, tmp_path, **home):
        asyncio.run(main())


def test_a_dead_gpu(port: int, tmp_path: Path) -> None:
    """After a device fault requests get 503 and both probes fail, for a supervisor to see."""
    source = (RECIPES / "bentoml_service.py").read_text()
    right = "Pool(max_waiting=2, prepare=[reduce_sum])"
    assert right in source
    crashing = "Pool(driver=open(faults=[Crash('reduce_sum')]), prepare=[reduce_sum])"
    imports = "from greensched.driver.simulated import Crash, open\n\n#: As"
    wrong = source.replace(right, crashing).replace("#: As", imports)
    (tmp_path / "bentoml_service.py").write_text(wrong)
    home = {"BENTOML_HOME": str(tmp_path), "BENTOML_DO_NOT_TRACK": "1"}
    with hosted(command(port), READY, tmp_path, **home):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            assert client.get("/readyz").status_code == 200
            assert client.post("/total", json={"numbers": [1]}).status_code == 503
            assert client.get("/readyz").status_code == 503
            assert client.get("/livez").status_code == 503
