"""Settings of the whole suite, and on which drivers the conformance suite runs."""

from __future__ import annotations

import gc
import itertools
import os
import tempfile

import pytest

from greensched.scheduling import scheduler

try:
    from hypothesis import settings
except ImportError:  # a GPU's machine may have none, and what runs there needs none
    pass
else:  # deterministic, so that a failure comes again
    settings.register_profile("greensched", derandomize=True, deadline=None, max_examples=60)
    settings.register_profile("deep", deadline=None, max_examples=1000)  # make fuzz-scheduler
    settings.load_profile("greensched")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--driver",
        choices=("simulated", "cuda"),
        default="simulated",
        help="what tests/conformance runs on: simulated (both clocks), or the CUDA driver found",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need another driver than the chosen one, or another build."""
    for item in items:
        for mark in item.iter_markers("fault"):  # for the reports that `make faults` reads
            item.user_properties += [("fault", name) for name in mark.args]
    if not scheduler.__file__.endswith(".py"):
        skip = pytest.mark.skip(
            reason="counts or replaces calls of modules that are compiled here: make test runs it"
        )
        for item in items:
            if "white_box" in item.keywords:
                item.add_marker(skip)
    if config.getoption("--driver") == "simulated":
        skip = pytest.mark.skip(reason="needs a GPU: make test-gpu")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


# Two threads of BLAS wait actively for a processor that another test has, which costs a product of
# 256 x 256 elements 18 times as much. For the processes of xdist and of tests: in this one a plugin
# has imported numpy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if "GREENSCHED_STANDIN_LIB" in os.environ:  # or its GPU would have one pool on this machine
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp()

#: Few automatic collections: a pool makes many objects at once, which live until its end.
gc.set_threshold(100_000, 50, 50)
#: Tests between two freezes: they leave about as many cached objects as one collection visits.
OFTEN = 20
_begun = itertools.count()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Exclude what is imported or cached by now from garbage collection.

    It lives as long as the process. Most tests collect garbage to check that nothing is left, and
    would look at the same objects again each time.
    """
    if next(_begun) % OFTEN == 0:
        gc.collect()
        gc.freeze()
