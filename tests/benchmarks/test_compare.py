"""`benchmarks.compare`: rows are matched by their present names, and slower ones are marked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.lib.timing import Row

from benchmarks import compare


def _row(what: str, ours: float, width: float = 0.01, unit: str = "us") -> Row:
    return Row(what, ours, 1.0, unit, (ours * (1 - width), ours * (1 + width)))


def _file(path: Path, rows: list[Row]) -> Path:
    path.write_text(json.dumps({"machine": "some", "part": [row.as_dict() for row in rows]}))
    return path


@pytest.mark.parametrize(
    ("ratio", "width", "verdict"),
    [(1.04, 0.001, ""), (1.2, 0.01, "SLOWER"), (1.2, 0.3, "slower?"), (0.5, 0.3, "")],
)
def test_a_slower_row_is_marked(ratio: float, width: float, verdict: str) -> None:
    """More than 5 % slower is marked, with a question mark where that may be chance."""
    (change,) = compare.compare([[_row("a", 2.0, width)]], [[_row("a", 2.0 * ratio, width)]])
    assert change.ratio == pytest.approx(ratio)
    assert change.interval[0] <= change.ratio <= change.interval[1]
    assert change.verdict == verdict


def test_names_that_changed_are_matched() -> None:
    """A row of the old programs is compared with the row that it has become."""
    before = [
        _row("a job, 64 in flight | raw launches, median", 1.0),
        _row("wake of 1 ms jobs: eight leases at once | alone, median", 1.0),
        _row("0 us: lease of a class with a reserve | semaphore, p99", 1.0),
        _row("turns of 80 us: run of nothing | to_thread (12 of these), p99", 1.0),
    ]
    after = [
        _row("a job, 64 in flight | raw launch + mark, median", 2.0),
        _row("wake of 1 ms jobs: eight partitions at once | alone, median", 2.0),
        _row("0 us: lease of a class with a reserve | semaphore, p99", 2.0),
        _row("turns of 80 us: run of nothing | to_thread (20 of these), p99", 2.0),
        _row("a new row", 1.0),
    ]
    changes = compare.compare([before], [after])
    assert [change.ratio for change in changes] == pytest.approx([2.0] * 4)


def test_several_runs_are_sharper_than_one() -> None:
    """With runs that agree the interval is that of their mean, narrower than a row's own."""
    before = [[_row("a", 1.0 + n / 1e4, 0.2)] for n in range(4)]
    after = [[_row("a", 1.1 + n / 1e4, 0.2)] for n in range(4)]
    (one,) = compare.compare(before[:1], after[:1])
    (many,) = compare.compare(before, after)
    assert one.verdict == "slower?"
    assert many.verdict == "SLOWER"


def test_what_is_no_duration_is_left_out() -> None:
    """Rows of counts, of zero and of a single longest sample are not compared."""
    rows = [_row("count", 1.0, unit=""), _row("zero", 0.0), _row("a, max", 1.0), _row("b", 1.0)]
    assert [change.what for change in compare.compare([rows], [rows])] == ["b"]


def test_the_table_has_the_median_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two files become one table; exit code 1 if a row is slower."""
    before = _file(tmp_path / "before.json", [_row("a", 1.0), _row("b", 1.0), _row("c", 1.0)])
    after = _file(tmp_path / "after.json", [_row("a", 0.8), _row("b", 0.9), _row("c", 1.3)])
    out = tmp_path / "changes.json"
    monkeypatch.setattr(sys, "argv", ["", str(before), str(after), "--json", str(out)])
    assert compare.main() == 1
    assert "the median row: 0.900; more than 5 % slower: 1, of which 1" in capsys.readouterr().out
    assert [each["verdict"] for each in json.loads(out.read_text())] == ["", "", "SLOWER"]
    monkeypatch.setattr(sys, "argv", ["", "--before", str(before), "--after", str(before)])
    assert compare.main() == 0
    monkeypatch.setattr(sys, "argv", ["", str(before)])
    with pytest.raises(SystemExit):
        compare.main()
