"""Measurements are kept in few files; each is cited, and names its commit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "docs/measurements"
FILES = sorted(path for path in KEPT.rglob("*") if path.is_file())
RECORDS = [path for path in FILES if path.name != "README.md"]
MOST_FILES = 20


def _pages() -> list[Path]:
    return [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def _cited() -> set[Path]:
    """Return the files that a page links to."""
    return {
        (page.parent / link).resolve()
        for page in _pages()
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    }


def _ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(KEPT)) for path in paths]


def test_few_files_are_kept() -> None:
    """Only the newest file of each kind is kept for each machine."""
    assert len(FILES) <= MOST_FILES


def test_each_file_is_cited() -> None:
    """Each file is linked from a page."""
    assert [str(path) for path in FILES if path.resolve() not in _cited()] == []


@pytest.mark.parametrize("record", RECORDS, ids=_ids(RECORDS))
def test_a_file_names_its_commit(record: Path) -> None:
    """Each file names its commit, in its first line or a JSON key, and is no log of tests."""
    text = record.read_text()
    if record.suffix == ".json":
        assert re.fullmatch("[0-9a-f]{7,}", json.loads(text)["commit"])
    else:
        assert re.match("commits? [0-9a-f]{7}", text)
    assert "::test_" not in text


def test_a_link_into_the_records_leads_to_one() -> None:
    """Each link into the measurements leads to a file."""
    links = (path for path in _cited() if KEPT in path.parents)
    assert [str(path) for path in links if not path.exists()] == []
