"""The FastAPI example, as a program over a socket, and its own tests as a reader runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from helpers.programs import serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "07_fastapi"
#: With warnings as errors; pytest-asyncio, which the example does without, wants to be told this.
PYTEST = ("-m", "pytest", "-W", "error", "-o", "asyncio_default_fixture_loop_scope=function")

#: Where the example is made wrong, its tests must say so: what is replaced, and by what.
WRONG = {
    "no errors answered": ("app.add_middleware", "0 and app.add_middleware"),
    "no probes": ("app.router.routes.extend", "0 and app.router.routes.extend"),
    "another size": ("pool.partition(16", "pool.partition(32"),
    "another deadline": ("deadline=DEADLINE", "deadline=5"),
    "a wrong sum": ("values.size)\n", "values.size - 1)\n"),
}


def run_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *PYTEST, "-c", os.devnull, "-p", "no:cacheprovider", str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_its_tests_pass() -> None:
    """They pass with the plugin alone, warnings being errors."""
    done = run_tests(EXAMPLE)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


@pytest.mark.parametrize("kind", WRONG)
def test_its_tests_find_what_is_wrong(kind: str, tmp_path: Path) -> None:
    """They fail where the application is not what it should be."""
    right, wrong = WRONG[kind]
    source = (EXAMPLE / "app.py").read_text()
    assert right in source
    (tmp_path / "app.py").write_text(source.replace(right, wrong))
    (tmp_path / "test_app.py").write_text((EXAMPLE / "test_app.py").read_text())
    assert run_tests(tmp_path).returncode == 1


def test_it_runs_as_a_program() -> None:
    """It serves on its port on the GPU that was chosen, and ends by SIGTERM without a traceback."""
    command = [sys.executable, "-W", "error", str(EXAMPLE / "app.py"), "0"]
    environment = os.environ | {"GREENSCHED_DRIVER": "simulated:h200"}
    with serving(command, environment) as program:
        sums = f"{program.address}/sum"
        assert httpx.post(sums, json=[1, 2, 3.5], timeout=20).json() == {"sum": 6.5}
        assert httpx.post(sums, json=["x"], timeout=20).status_code == 422
        ready = httpx.get(f"{program.address}/readyz", timeout=20)
        assert "132 SMs" in ready.json()["detail"]
