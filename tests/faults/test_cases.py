"""The table of faults is complete: each id has tests, and each marker names an id."""

from __future__ import annotations

from faults.cases import ELSEWHERE, cases, marked

#: Not shown by any test yet. `make faults` fails as long as it is not empty.
MISSING = {
    *("A4", "A15", "B6", "B12", "B13", "B14"),
    *("C3", "C4", "C7", "C11", "C12", "C14", "C15", "C19"),
    *("D11", "D13", "D15", "D17", "E9"),
    *("F3", "F4", "F5", "F6", "F7", "F8", "F9", "F10", "F13", "F14", "I16"),
}


def test_each_case_has_a_test() -> None:
    """Every id of cases.toml is in the marker of some test, but for those known to be missing."""
    assert set(cases()) - set(marked()) == MISSING


def test_each_marker_names_a_case() -> None:
    """An id in a marker that no case has would show nothing."""
    assert set(marked()) <= set(cases())


def test_the_table_has_every_id() -> None:
    """Ninety cases from A1 to F14, and sixteen findings of an attack, I1 to I16."""
    sizes = {"A": 15, "B": 14, "C": 19, "D": 18, "E": 10, "F": 14, "I": 16}
    assert set(cases()) == {
        f"{letter}{n + 1}" for letter, size in sizes.items() for n in range(size)
    }
    assert {case.layer for case in cases().values()} <= {"simulated", "process", *ELSEWHERE}
