"""The injection of failures into each driver call: its judge, and a sample of its runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from faults.every_call import Combination, Hung, Run, combinations, judge_error
from greensched import DeviceLost
from greensched.driver.status import from_status

LOST = DeviceLost(from_status(700, "launch"))
#: The scenarios of the sample.
SAMPLE = "right_answer or order_of_submission"


def ran(error: BaseException | None, told: str = "") -> Run:
    return Run(error, ["launch"], ["launch"], told, [], [[1]], [])


@pytest.mark.parametrize(
    ("status", "run"),
    [
        ("INVALID_VALUE", ran(None)),
        ("INVALID_VALUE", ran(from_status(1, "launch"))),
        ("ILLEGAL_ADDRESS", ran(ExceptionGroup("tasks", [LOST]))),
        ("INVALID_VALUE", ran(AssertionError("no result"), told="closing: launch: INVALID_VALUE")),
    ],
    ids=["passed", "its error", "a group", "a test that was told"],
)
def test_what_tells_the_first_cause_is_right(status: str, run: Run) -> None:
    """The scenario passed, or the injected status is in what it got or what was logged."""
    assert judge_error(run, Combination(1, False, status), uses_pool=True) is None


@pytest.mark.parametrize(
    "run",
    [
        ran(KeyError("handle")),
        ran(from_status(2, "allocate")),
        ran(AssertionError("no result")),
        ran(ExceptionGroup("tasks", [from_status(1, "launch"), TimeoutError()])),
        ran(Hung("hung in wait")),
        ran(None)._replace(unraisable=["KeyError()"]),
    ],
    ids=["no error of ours", "another cause", "no cause", "one of a group", "hung", "finaliser"],
)
def test_what_hides_the_first_cause_is_wrong(run: Run) -> None:
    """Another error, a lost cause, a hang, and an error of a finaliser are each found."""
    assert judge_error(run, Combination(1, False, "INVALID_VALUE"), uses_pool=True)


def test_every_combination_comes_once() -> None:
    """All of them, or so many, spread over the places of the library that make the calls."""
    places = [[1, 3], [2], [4, 5, 6]]
    every = combinations(places, 0, 0)
    assert len(set(every)) == len(every) == 6 * 2 * 6
    some = combinations(places, 10, 0)
    assert len(set(some)) == 10
    assert set(some) < set(every)
    assert {min(place) for it in some for place in places if it.nth in place} == {1, 2, 4}
    assert [Combination.parse(str(it)) for it in some] == some


@pytest.mark.fault("C1")
def test_a_sample_of_scenarios_survives() -> None:
    """In some scenarios some calls fail, once and from there on: nothing of it is wrong."""
    plugins = ["-p", "tests.faults.every_call", "-p", "no:randomly"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "tests/conformance/test_jobs.py"]
    chosen = ["--every-call", "8", "-k", f"virtual and ({SAMPLE})"]
    ended = subprocess.run([*command, *chosen], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert ", 0 wrong" in ended.stdout
