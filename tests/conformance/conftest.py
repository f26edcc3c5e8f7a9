"""The conformance suite: one suite, unchanged, on every driver and clock, and every version.

Modules that test loops and leases alone, `IS_VERSIONED = False`, run on the default driver only.
The other arguments of a test are not multiplied by the backends, because no code of the library
joins the two: each runs on the first backend and on another in turn, and each backend runs some.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

from helpers.backend import (
    CUDA,
    IS_NEWER_STANDIN,
    NEWER,
    SIMULATED,
    Backend,
    standin_library,
)

HERE = Path(__file__).parent


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        everything: tuple[tuple[str, ...], ...] = SIMULATED
        if _is_versioned(metafunc.module):
            everything += NEWER
        if metafunc.config.getoption("--driver") == "cuda":
            everything = CUDA
        if metafunc.definition.get_closest_marker("real_time"):
            everything = tuple(case for case in everything if case[0] != "virtual")
        # A GPU's machine may lack a kind of loop; `make test` has them all.
        chosen = [case for case in everything if find_spec(case[1]) is not None]
        ids = ["-".join(case) for case in chosen]
        metafunc.parametrize("backend", chosen, ids=ids, indirect=True)


@pytest.hookimpl(trylast=True)  # what -k leaves out is no backend
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out most combinations of a test's arguments with the backends."""
    tests: dict[object, dict[pytest.Function, tuple[int, str]]] = defaultdict(dict)
    for item in items:
        if item.path.parent == HERE and "backend" in getattr(item, "fixturenames", ()):
            spec = item.callspec
            others = spec.id.replace("-".join(spec.params["backend"]), "", 1)
            tests[item.parent, item.originalname][item] = spec.indices["backend"], others
    left_out = set[pytest.Function]()
    if IS_NEWER_STANDIN:  # as on the newer simulated drivers
        for item in chain(*tests.values()):
            if item.callspec.indices["backend"] or not _is_versioned(item.module):
                left_out.add(item)
    for each in tests.values():
        backends = sorted({backend for backend, _ in each.values()})
        # Mixed, or a backend might always have the same one of two arguments.
        arguments = sorted({others for _, others in each.values()}, key=_mixed)
        turns = max(1, min(len(arguments), len(backends) - 1))
        for item, (backend, others) in each.items():
            nth = backends.index(backend)
            if nth and (nth - 1 - arguments.index(others)) % turns:
                left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _is_versioned(module: ModuleType) -> bool:
    return getattr(module, "IS_VERSIONED", True)


def _mixed(arguments: str) -> tuple[int, str]:
    return zlib.crc32(arguments.encode()), arguments


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    kind, loop, *version = request.param
    device_code = request.node.get_closest_marker("runs_device_code") is not None
    if device_code and kind == "cuda" and standin_library() is not None:
        pytest.skip("needs a GPU, because the stand-in runs no device code: make test-gpu")
    backend = Backend(kind, loop, *version)
    yield backend
    backend.check_nothing_left()
