"""The conformance suite: one suite, unchanged, on every driver and clock, and every version.

Modules that test loops and leases alone, `IS_VERSIONED = False`, run on the default driver only.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from helpers.backend import CUDA, NEWER, SIMULATED, Backend, standin_library


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        everything: tuple[tuple[str, ...], ...] = SIMULATED
        if getattr(metafunc.module, "IS_VERSIONED", True):
            everything += NEWER
        if metafunc.config.getoption("--driver") == "cuda":
            everything = CUDA
        if metafunc.definition.get_closest_marker("real_time"):
            everything = tuple(case for case in everything if case[0] != "virtual")
        # A GPU's machine may lack a kind of loop; `make test` has them all.
        chosen = [case for case in everything if find_spec(case[1]) is not None]
        ids = ["-".join(case) for case in chosen]
        metafunc.parametrize("backend", chosen, ids=ids, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    kind, loop, *version = request.param
    device_code = request.node.get_closest_marker("runs_device_code") is not None
    if device_code and kind == "cuda" and standin_library() is not None:
        pytest.skip("needs a GPU, because the stand-in runs no device code: make test-gpu")
    backend = Backend(kind, loop, *version)
    yield backend
    backend.check_nothing_left()
