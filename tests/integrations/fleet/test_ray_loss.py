"""Pools, nodes and an owner that are lost under load: the benchmark with fewer jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed: make test-integrations")

ROOT = Path(__file__).parents[3]
JOBS = 3000
#: Seconds from a job's deadline until it is told, at most, on a machine with other tests.
LATE = 1.0


@pytest.mark.timeout(300)
def test_no_job_is_lost_by_a_fault(request: pytest.FixtureRequest) -> None:
    """Every job is answered, no idempotent job fails, and no other job runs twice."""
    if request.config.getoption("--driver") != "simulated":
        pytest.skip("the cluster has simulated GPUs: make test-integrations runs it")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.system.ray", "--faults", "--jobs", str(JOBS)],
        cwd=ROOT,
        env=os.environ | {"RAY_LOG_TO_DRIVER": "0"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    bars = [line for line in done.stdout.splitlines() if line.endswith((": PASS", ": FAIL"))]
    assert len(bars) == 30, done.stdout + done.stderr
    kept = [bar for bar in bars if "after the deadline" not in bar]  # judged by `LATE` below
    assert len(kept) == 24
    assert all(bar.endswith("PASS") for bar in kept), done.stdout
    told = re.findall(r"  (\d+) jobs told, latest ([-+.\d]+) s after the deadline", done.stdout)
    assert len(told) == 6
    assert all(int(jobs) > 0 and float(latest) < LATE for jobs, latest in told), done.stdout
