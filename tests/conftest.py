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

#: Between those it need not look often: pools make much at once that stays until they end.
gc.set_threshold(100_000, 50, 50)
#: So many tests leave about as much in caches as one collection has to look at without them.
OFTEN = 20
_begun = itertools.count()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Has the collector pass over all that is imported or cached by now, between tests.

    It stays as long as the process, and most tests collect to see that nothing of theirs is left:
    without this the suite spends most of its time on looking at the same things again.
    """
    if next(_begun) % OFTEN == 0:
        gc.collect()
        gc.freeze()
