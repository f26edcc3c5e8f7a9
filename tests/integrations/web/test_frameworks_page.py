"""The programs of the tutorial and of docs/how-to/fastapi.md, tested by their own tests."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from greensched import PoolState
from greensched.driver.simulated import cost
from greensched.integrations.testing import SimGPU, SimPool

DOCS = Path(__file__).parents[3] / "docs"


def block(page: str, kind: str, number: int = 0) -> str:
    """Return a code block of a kind."""
    text = (DOCS / page).read_text()
    found = re.findall(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return str(found[number])


@pytest.mark.parametrize(
    ("page", "app", "tests", "passed"),
    [
        ("how-to/fastapi.md", ("python", 0), ("py", 0), 2),
        ("tutorial.md", ("py", 0), ("py", 1), 2),
    ],
)
def test_the_pages_tests_pass_on_the_pages_application(
    page: str, app: tuple[str, int], tests: tuple[str, int], passed: int, tmp_path: Path
) -> None:
    """Copied into a folder, both pages' tests pass."""
    (tmp_path / "app.py").write_text(block(page, *app))
    (tmp_path / "test_app.py").write_text(block(page, *tests))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"{passed} passed" in done.stdout


async def test_the_job_of_the_page_gives_way(sim_gpu: SimGPU, sim_pool: SimPool) -> None:
    """It gets all free SMs and a borrowed reserve, returns them, and ends at once."""
    page: dict[str, Any] = {"__name__": "app"}
    exec(block("how-to/fastapi.md", "python", 1), page)
    page["step"] = cost(0.005)(page["step"])
    pool = sim_pool(services=page["CLASSES"], max_waiting=8)
    app = page["create_app"](pool)
    async with app.router.lifespan_context(app):
        await asyncio.sleep(0.1)
        assert pool.statistics().services["reindex"].sms == 132
        async with pool.partition(32, service="requests", deadline=0.006):
            assert 0 < pool.statistics().services["reindex"].sms <= 132 - 32
        await asyncio.sleep(0.1)
    assert pool.state is PoolState.CLOSED
    assert sim_gpu.time < 0.22
