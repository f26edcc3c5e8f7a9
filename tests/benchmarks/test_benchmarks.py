"""The benchmarks run: a few samples of each, whatever the figures."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.gpu import sharing
from benchmarks.lib import plot
from benchmarks.lib import timing as measure
from benchmarks.lib.report import Report
from benchmarks.lib.timing import Comparison, Row
from benchmarks.micro import call as calling
from benchmarks.micro import executors as lanes
from benchmarks.micro import launch as launching
from benchmarks.micro import lease as leasing
from benchmarks.micro import profile, traffic
from benchmarks.micro import pytest_plugin as plugin
from benchmarks.micro import scheduler as deciding
from benchmarks.system import client_disconnect as leaving
from benchmarks.system import http, soak
from benchmarks.system.leases import KINDS

from greensched.driver import simulated
from greensched.driver.interface import Driver


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 2)
    monkeypatch.setattr(measure, "PER_ROUND", 2)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("benchmark", [leasing, launching, calling])
def test_both_sides_are_measured(benchmark: object) -> None:
    """Each row has a time of ours, one of theirs, and an interval around their ratio."""
    driver: Driver = simulated.open("h200")
    rows: list[Row] = asyncio.run(benchmark.measure(driver))  # type: ignore[attr-defined]  # a module
    driver.close()
    assert rows
    for row in rows:
        assert row.ours > 0
        assert row.theirs > 0
        assert row.interval is not None
        assert Row.from_dict(row.as_dict()) == row


def test_eight_lanes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane has a row at once and one beside a lane that hangs, with a bar beside it alone."""
    monkeypatch.setattr(lanes, "WINDOW_S", 0.0)
    monkeypatch.setattr(lanes, "ROUNDS", 2)
    rows = asyncio.run(lanes.measure("simulated:h200"))
    assert len(rows) == 2 * len(lanes.LENGTHS_MS)
    for row in rows:
        assert row.passed == (row.ours <= 1.2 * row.theirs)
        assert row.theirs > 0  # no job ends before its time
    assert len([row for row in rows if "a ninth hangs" in row.what]) == len(lanes.LENGTHS_MS)


def test_the_plugins_cost_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row has a suite's time with the plugin and with an empty one, and says what it adds."""
    monkeypatch.setattr(plugin, "NUMBER", 2)
    (row,) = plugin.measure()
    assert row.ours > 0 < row.theirs
    assert "+ 5 ms" in row.bar


def test_clients_that_hang_up_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few clients, their SMs' lateness is told, and judged by the worst."""
    monkeypatch.setattr(leaving, "NUMBER", 3)
    median, worst = leaving.measure()
    assert median.passed is None
    assert 0 <= median.ours <= worst.ours
    assert worst.passed == (worst.ours <= 50)


def test_a_service_under_load_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a second at twice the capacity: both kinds of answers, and each bar has a verdict."""
    monkeypatch.setattr(http, "SECONDS_EACH", 0.05)
    rows = http.measure(1.0)
    judged = {row.what.split(":")[0].split("(")[0].strip(): row for row in rows if row.bar}
    assert len(judged) == 6
    answers = judged["answers"]
    assert " x 200, " in answers.what
    assert " x 429)" in answers.what
    assert answers.ours == 0 < answers.theirs
    for row in judged.values():  # the times are the machine's affair, what is left is not
        assert row.passed is not None
        assert row.passed or row.unit == "ms", row


def test_what_is_left_is_named() -> None:
    """A row of what is open names what there is more of, and fails by it."""
    row = http._held("open", {"files": 5, "threads": 2, "tasks": 1}, {"files": 3, "threads": 4})
    assert not row.passed
    assert row.bar == "2 files more, 1 tasks more"


@pytest.mark.usefixtures("few")
def test_decisions_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bar on decisions has a row, and whatever waits is cancelled."""
    monkeypatch.setattr(deciding, "MANY", 300)
    rows = deciding.measure()
    assert len([row for row in rows if row.bar]) == 6
    assert all(row.ours > 0 for row in rows)


def test_a_bar_is_judged() -> None:
    """A ratio over its bar fails, one on it passes, and the table says which."""
    comparison = Comparison("a | b", [np.array([4.0, 4.0])], [np.array([1.0, 1.0])])
    met, missed = comparison.row(0.5, "s", most=4), comparison.row(0.5, "s", most=3.9)
    assert (met.passed, missed.passed) == (True, False)
    assert met.ratio == 4
    assert [line.split()[-1] for line in measure.table([met, missed]).splitlines()[2:]] == [
        "PASS",
        "FAIL",
    ]


@pytest.mark.parametrize(
    ("bar", "unit", "most"),
    [
        ("<= 1.3 x", "us", 1.3),
        ("flat: <= 1.2 x", "us", 1.2),
        ("<= 30 ms", "ms", 1.5),
        ("<= + 5 ms", "ms", 1.25),
        ("<= 30 ms", "us", None),
        ("== 0", "", None),
        ("", "us", None),
    ],
)
def test_a_bar_is_drawn_as_a_ratio(bar: str, unit: str, most: float | None) -> None:
    """A bar on the ratio, on a time, or on a time beyond theirs has a place beside the ratio."""
    assert plot.most(Row("a | b", 10.0, 20.0, unit, None, bar)) == most


def test_what_has_no_ratio_is_not_drawn() -> None:
    """Nothing of ours or theirs has no place on a logarithmic scale."""
    rows = [Row("a", 1.0, 2.0, "us"), Row("b", 0.0, 2.0, ""), Row("c", 1.0, 0.0, "")]
    assert plot.drawable(rows) == rows[:1]


def test_what_was_written_as_json_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where matplotlib is, the figures of another machine become a picture; else it says so."""
    rows = [Row("a | b", 1.0, 2.0, "us", (0.4, 0.6), "<= 1 x", True), Row("c | d", 3.0, 2.0, "us")]
    found = {"machine": "some", "hot": [row.as_dict() for row in rows], "green contexts": {}}
    (tmp_path / "found.json").write_text(json.dumps(found))
    file = tmp_path / "found.svg"
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "found.json"), str(file)])
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(SystemExit):
            plot.main()
    else:
        plot.main()
        assert "</svg>" in file.read_text()


@pytest.mark.usefixtures("few")
def test_the_hot_path_is_split_into_stages(tmp_path: Path) -> None:
    """Each operation's stages end in its public call, and the table has a line for each."""
    driver: Driver = simulated.open("h200")
    splits = asyncio.run(profile.measure_all(driver))
    driver.close()
    assert [one.name for one in splits] == [
        "bound()",
        "bound.submit()",
        "p.launch(...)",
        "lease, launch, await, return",
        "await p.run(f)",
    ]
    lines = profile.table(splits).splitlines()
    assert len(lines) == 2 + sum(len(one.stages) + 2 for one in splits)
    for one in splits:
        assert all(stage.interval[0] <= stage.interval[1] for stage in one.stages)
    if importlib.util.find_spec("matplotlib") is not None:
        profile.save(splits, "some", tmp_path / "found.svg")
        assert "await p.run(f)" in (tmp_path / "found.svg").read_text()


def test_a_stage_is_what_a_prefix_takes_more() -> None:
    """Of medians over rounds, less what comes before; the way by hand is no stage."""
    rounds = np.array([[1.0, 3.0, 4.0, 9.0], [1.0, 3.0, 5.0, 9.0], [1.0, 3.0, 9.0, 9.0]])
    assert list(profile._steps(rounds)) == [2.0, 2.0]


def test_the_percentile_is_a_sample() -> None:
    """Of a thousand samples in two rounds, one lies beyond the p99.9."""
    samples = np.arange(1000.0)
    assert measure.percentile([samples[500:], samples[:500]], 0.999) == 998
    assert measure.name_of(0.999) == "p99.9"


def test_a_short_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of leases of every kind leave nothing on the device, and are counted."""
    monkeypatch.setattr(soak, "ROUND", 160)
    monkeypatch.setattr(soak, "WEIGHTS", [1] * len(KINDS))
    run = soak.Soak(seed=1)
    looks = list(run.run(320))
    assert [look.leases for look in looks] == [160, 320]
    assert run.kinds.total() == 320


def test_growth_is_seen() -> None:
    """Whatever was more at any look after things had settled has grown."""
    looks = [soak.Look(10_000, 9, 9, 9), soak.Look(20_000, 1, 2, 3), soak.Look(30_000, 5, 2, 4)]
    looks.append(soak.Look(40_000, 1, 2, 3))
    assert soak.grown(looks) == {
        "memory (bytes)": (4, soak.MOST_BYTES),
        "threads": (0, 0),
        "files": (1, 0),
    }


def test_two_users_are_measured_on_every_arm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A short W8 has a sweep, every arm's samples, and rows against each way by hand."""
    monkeypatch.setattr(sharing, "ROUNDS", 1)
    monkeypatch.setattr(sharing, "LEAST", 0.05)
    monkeypatch.setattr(sharing, "SWEEP", 0.0)
    monkeypatch.setattr(sharing, "BESIDES", 60.0)  # so each slice is the least
    file, switching = tmp_path / "found.json", sys.getswitchinterval()
    report = Report(file, 60)
    try:
        sharing.run("simulated:h200", ["W8"], report)
    finally:
        report.close()
        sys.setswitchinterval(switching)
    found = json.loads(file.read_text())
    assert found["errors"] == []
    case = found["W8"]["cases"]["two small"]
    assert set(sharing.BY_HAND) < set(case["arms"])
    assert all(arm["critical_samples"] for name, arm in case["arms"].items() if "other" not in name)
    for hand in sharing.BY_HAND:
        assert any(
            row["what"].startswith("W8") and f"| {hand}" in row["what"] for row in case["rows"]
        )


def test_the_best_split_is_the_one_that_serves_both() -> None:
    """Of splits that the critical user can live with, the other one's fastest; else his own."""
    assert sharing._best({8: (1.1, 2.0), 16: (1.2, 1.0), 24: (1.4, 0.5)}, worse_of_both=False) == 16
    assert sharing._best({8: (3.0, 1.0), 16: (2.0, 9.0)}, worse_of_both=False) == 16
    assert sharing._best({8: (2.0, 1.0), 16: (1.2, 1.5)}, worse_of_both=True) == 16


def test_bars_of_traffic_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bar has a value within its interval, and says whether that is enough."""
    monkeypatch.setattr(traffic, "SECONDS", 2.0)
    monkeypatch.setattr(traffic, "REQUESTS", 10)
    monkeypatch.setattr(traffic, "RATES", (0.5, 1.0))
    monkeypatch.setattr(traffic, "UNSEEN", ("bursty",))
    monkeypatch.setattr(traffic, "TURNS", 1)
    bars = [*traffic.prefill_and_decode([1], []), *traffic.lending([1])]
    judged = [bar for bar in bars if bar.asked]
    assert len(judged) == 5 + 3 * len(traffic.LOANS)
    assert all(bar.passed is not None for bar in judged)
    assert str(traffic.at_least("a", (1.0, 0.9, 1.1), 1.5)).endswith("FAIL")
    assert str(traffic.at_most("a", (1.0, 0.9, 1.1), 1.5)).endswith("PASS")
    for bar in bars:
        value, low, high = bar.found
        assert not low > value
        assert not high < value
