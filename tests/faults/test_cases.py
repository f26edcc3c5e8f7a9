"""The table of faults is complete: each id has tests, and each marker names an id."""

from __future__ import annotations

from faults.cases import ELSEWHERE, cases, marked


def test_each_case_has_a_test() -> None:
    """Every id of cases.toml is in the marker of some test."""
    assert set(cases()) <= set(marked())


def test_each_marker_names_a_case() -> None:
    """An id in a marker that no case has would show nothing."""
    assert set(marked()) <= set(cases())


def test_the_table_has_every_id() -> None:
    """Ninety cases from A1 to F14, and what an attack (I) and random schedules (S) found."""
    sizes = {"A": 15, "B": 14, "C": 19, "D": 18, "E": 10, "F": 14, "I": 16, "S": 5}
    assert set(cases()) == {
        f"{letter}{n + 1}" for letter, size in sizes.items() for n in range(size)
    }
    assert {case.layer for case in cases().values()} <= {"simulated", "process", *ELSEWHERE}
