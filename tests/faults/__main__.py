"""Run the tests of all faults, and print each id with pass or why it was not run.

usage: python -m tests.faults [arguments of pytest]

The exit code is 1 if a case has no test, a test of it failed, or none ran here although its layer
needs no GPU, stand-in or Ray.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict

import pytest
from tests.faults.cases import ALL_ROUNDS, ELSEWHERE, TESTS, Case, cases, marked


class Outcomes:
    """The outcomes of the tests of each id, and why others were not run."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: defaultdict[str, list[str]] = defaultdict(list)
        self.reasons: dict[str, str] = {}
        #: How many rounds some tests ran.
        self.counts: defaultdict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        counts = [str(value) for kind, value in report.user_properties if kind == "count"]
        for kind, name in report.user_properties:
            if kind != "fault":
                continue
            if report.failed:
                self.failed[str(name)].append(report.nodeid)
            elif report.skipped:
                self.reasons[str(name)] = str(report.longrepr[-1]).removeprefix("Skipped: ")  # type: ignore[index]
            elif report.when == "call":
                self.passed.add(str(name))
                self.counts[str(name)] += counts

    def line(self, name: str, case: Case, tests: list[str]) -> tuple[bool, str]:
        """Say how a case fared, and whether that is all right."""
        if not tests:
            return False, "NO TEST"
        if name in self.failed:
            return False, "FAILED " + " ".join(sorted(set(self.failed[name])))
        if name in self.passed:
            return True, ", ".join(["pass", *self.counts[name]])
        reason = self.reasons.get(name, "not collected")
        if case.layer in ELSEWHERE:
            return True, f"not run: {reason} ({ELSEWHERE[case.layer]})"
        return False, f"NOT RUN: {reason}"


def main(arguments: list[str]) -> int:
    """Run the tests, and print the table."""
    os.environ[ALL_ROUNDS] = "1"
    outcomes, tests, wrong = Outcomes(), marked(), 0
    files = sorted({test.split("::")[0] for several in tests.values() for test in several})
    pytest.main(
        ["-q", "-m", "fault", *arguments, *(str(TESTS / file) for file in files)], [outcomes]
    )
    print()
    for name, case in cases().items():
        good, text = outcomes.line(name, case, tests.get(name, []))
        wrong += not good
        print(f"{name:4} {case.expected}: {text}")
    print(f"\n{len(cases())} cases, {len(outcomes.passed)} passed here, {wrong} wrong")
    return int(wrong > 0)


sys.exit(main(sys.argv[1:]))
