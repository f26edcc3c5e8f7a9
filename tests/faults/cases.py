"""The cases of cases.toml, and the tests that carry their ids."""

from __future__ import annotations

import ast
import os
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]

#: Of each layer that a machine without a GPU, a stand-in or Ray lacks: what runs it.
ELSEWHERE = {
    "standin": "make test-standin",
    "ray": "make test-integrations",
    "gpu": "make test-gpu",
}

#: Set by `make faults`: tests of a number of rounds run all of them.
ALL_ROUNDS = "GREENSCHED_ALL_FAULT_ROUNDS"


def rounds(number: int) -> int:
    """Return how many rounds of a test to run: all in `make faults`, a tenth in `make test`."""
    return number if os.environ.get(ALL_ROUNDS) else max(2, number // 10)


class Case(NamedTuple):
    """A case: the layer whose tests show it, and what is expected."""

    layer: str
    expected: str


def cases() -> dict[str, Case]:
    """Read the cases by id."""
    table = tomllib.loads((TESTS / "faults/cases.toml").read_text())
    return {name: Case(*row) for name, row in table.items()}


def marked() -> dict[str, list[str]]:
    """Return the tests with a marker `fault`, by each id in it, without importing any."""
    found = defaultdict(list)
    for path in TESTS.rglob("test_*.py"):
        source = path.read_text()
        if "mark.fault(" not in source:
            continue
        for test in ast.walk(ast.parse(source)):
            if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef):
                for mark in test.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                        for name in ast.literal_eval(ast.Tuple(mark.args, ast.Load())):
                            found[name].append(f"{path.relative_to(TESTS)}::{test.name}")
    return dict(found)
