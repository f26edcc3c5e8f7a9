"""Integrations with the real packages of others; skipped where a package is not installed.

`make test-integrations` installs them. Some run on the CUDA driver, a GPU's or the stand-in; tests
with device code are in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from greensched import Pool
from helpers.backend import standin_library


@pytest.fixture(scope="session")
def ray_cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A Ray cluster of three nodes, with two simulated GPUs, one, and one."""
    pytest.importorskip("ray", reason="ray is not installed: make test-integrations")
    from benchmarks.system import ray as bench

    if request.config.getoption("--driver") != "simulated":
        pytest.skip("the cluster has simulated GPUs: make test-integrations runs it")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GREENSCHED_DRIVER", "simulated:h200")  # what its processes inherit
        patched.setenv("RAY_metrics_report_interval_ms", "1000")
        with bench.cluster((2, 1, 1)) as made:
            yield made


@pytest.fixture
def cuda_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """A pool on the CUDA driver, not open yet; on the stand-in nothing may be misused."""
    if request.config.getoption("--driver") != "cuda":
        pytest.skip("needs the CUDA driver or the stand-in: make test-integrations STANDIN=folder")
    standin = standin_library()
    yield Pool(driver="cuda", devices=[0])
    if standin is not None:
        assert standin.stubcuda_misuse(None) == 0
