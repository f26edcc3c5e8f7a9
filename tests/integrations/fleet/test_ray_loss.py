"""A node that is killed and replaced under load: the benchmark with fewer jobs, as a program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed: make test-integrations")

ROOT = Path(__file__).parents[3]
JOBS = 3000


@pytest.mark.timeout(180)
def test_no_job_is_lost_with_a_node(request: pytest.FixtureRequest) -> None:
    """Each is answered or refused by its deadline, none but idempotent ones twice; none hangs."""
    if request.config.getoption("--driver") != "simulated":
        pytest.skip("the cluster has simulated GPUs: make test-integrations runs it")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.system.ray", "--loss", "--jobs", str(JOBS)],
        cwd=ROOT,
        env=os.environ | {"RAY_LOG_TO_DRIVER": "0"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    bars = [line for line in done.stdout.splitlines() if line.endswith((": PASS", ": FAIL"))]
    assert len(bars) == 5, done.stdout + done.stderr
    *kept, recovery = bars
    assert all(bar.endswith("PASS") for bar in kept), done.stdout
    assert " inf s" not in recovery  # how soon is for the benchmark to say
