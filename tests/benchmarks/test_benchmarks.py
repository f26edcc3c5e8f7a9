"""The benchmarks run: a few samples of each, whatever the figures."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
from benchmarks.gpu import sharing
from benchmarks.lib import plot, timing
from benchmarks.lib.report import Report
from benchmarks.lib.timing import Comparison, Row
from benchmarks.micro import (
    call,
    launch,
    lease,
    partitions,
    profile,
    pytest_plugin,
    queue,
    scheduler,
    traces,
    traffic,
    watching,
)
from benchmarks.probes import gpu as probe
from benchmarks.system import client_disconnect, http, soak

from benchmarks import suites
from greensched.capacity import sweeps
from greensched.capacity.traffic import read
from greensched.driver import simulated
from greensched.driver.interface import Driver


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 2)
    monkeypatch.setattr(timing, "PER_ROUND", 2)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("benchmark", [lease, launch, call])
def test_both_sides_are_measured(benchmark: object) -> None:
    """Each row has a time of ours, one of the reference, and an interval of their ratio."""
    driver: Driver = simulated.open("h200")
    rows: list[Row] = asyncio.run(benchmark.measure(driver))  # type: ignore[attr-defined]  # a module
    driver.close()
    assert rows
    for row in rows:
        assert row.ours > 0
        assert row.theirs > 0
        assert row.interval is not None
        assert Row.from_dict(row.as_dict()) == row


def test_eight_partitions_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has two rows, with the others and with a ninth that hangs, beside it alone."""
    monkeypatch.setattr(partitions, "WINDOW_S", 0.0)
    monkeypatch.setattr(partitions, "ROUNDS", 2)
    rows = asyncio.run(partitions.measure("simulated:h200"))
    assert len(rows) == 2 * len(partitions.LENGTHS_MS)
    for row in rows:
        assert row.passed == (row.ours <= 1.2 * row.theirs)
        assert row.theirs > 0  # no job ends before its time
    assert len([row for row in rows if "a ninth hangs" in row.what]) == len(partitions.LENGTHS_MS)


def test_the_cost_of_the_pytest_plugin_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row has a suite's time with the plugin and with an empty one, and says what it adds."""
    monkeypatch.setattr(pytest_plugin, "NUMBER", 2)
    (row,) = pytest_plugin.measure()
    assert row.ours > 0 < row.theirs
    assert "+ 5 ms" in row.bar


def test_clients_that_hang_up_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delay until a client's SMs are free is measured, and judged by the longest."""
    monkeypatch.setattr(client_disconnect, "NUMBER", 3)
    median, worst = client_disconnect.measure()
    assert median.passed is None
    assert 0 <= median.ours <= worst.ours
    assert worst.passed == (worst.ours <= 50)


def test_a_service_under_load_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds at twice the capacity have both kinds of answers, and each bar a verdict."""
    monkeypatch.setattr(http, "SECONDS_EACH", 0.05)
    monkeypatch.setattr(http, "DRAIN_S", 0.3)
    rows = http.measure(2.0)
    judged = {row.what.split(":")[0].split("(")[0].strip(): row for row in rows if row.bar}
    assert len(judged) == 9
    answers = judged["answers"]
    assert " x 200, " in answers.what
    assert " x 429" in answers.what
    assert answers.ours == 0 < answers.theirs
    assert judged["streams of 4 slow readers"].ours >= judged["streams of 4 slow readers"].theirs
    assert "SIGTERM" in judged
    for row in judged.values():  # the times depend on the machine, what is left does not
        assert row.passed is not None
        assert row.passed or row.unit in ("ms", "s"), row


def test_what_is_still_open_is_named() -> None:
    """A row fails if more is open than before, and names it."""
    row = http._held("open", {"files": 5, "threads": 2, "tasks": 1}, {"files": 3, "threads": 4})
    assert not row.passed
    assert row.bar == "2 files more, 1 tasks more"


def test_what_watching_costs_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each operation has a row with Prometheus; a lease and a launch with `top` and records off.

    Without a watcher a lease runs no line for records, and a launch one of hundreds.
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name, few in [("LEASES", 2), ("LAUNCHES", 1), ("ANSWERS", 2)]:
        monkeypatch.setattr(watching, name, few)
    for name, few in [("BLOCKS", 2), ("PER_BLOCK", 2)]:
        monkeypatch.setattr(timing, name, few)
    rows = asyncio.run(watching.measure())
    assert [row.bar.split()[1] for row in rows] == ["1.05"] * 4 + ["1.02"] * 2 + ["1.01"] * 2
    for row in rows:
        assert row.ours > 0 < row.theirs
        assert row.interval is not None
    lease, launch = rows[-2:]
    assert lease.ours == lease.theirs > 100
    assert 0 < launch.ours - launch.theirs <= 0.01 * launch.theirs
    assert lease.passed is launch.passed is True


def test_a_bar_inside_the_interval_is_not_decided() -> None:
    """What may be chance neither passes nor fails."""
    row = Row("x", 1.0, 1.0, "us", (0.99, 1.01))
    assert [timing.judged(row, most).passed for most in (1.02, 1.0, 0.98)] == [True, None, False]


@pytest.mark.usefixtures("few")
def test_decisions_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bar on decisions has a row, and all that wait are cancelled."""
    monkeypatch.setattr(scheduler, "MANY", 300)
    rows = scheduler.measure()
    assert len([row for row in rows if row.bar]) == 6
    assert all(row.ours > 0 for row in rows)


@pytest.mark.usefixtures("few")
def test_a_queue_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the simulated driver: waiting, and cancelling or refusing those that wait."""
    for name, value in {"MANY": 40, "MASS": 60, "CANCELLED": 5, "ROUNDS": 2}.items():
        monkeypatch.setattr(queue, name, value)
    driver: Driver = simulated.open("h200")
    rows = asyncio.run(queue.measure(driver))
    driver.close()
    assert len([row for row in rows if row.bar]) == len(rows) == 6
    assert all(row.ours > 0 for row in rows)
    assert rows[0].bar.startswith("<= 2 x")


def test_a_bar_is_judged() -> None:
    """A ratio over its bar fails, one on it passes, and the table says which."""
    comparison = Comparison("a | b", [np.array([4.0, 4.0])], [np.array([1.0, 1.0])])
    met, missed = comparison.row(0.5, "s", most=4), comparison.row(0.5, "s", most=3.9)
    assert (met.passed, missed.passed) == (True, False)
    assert met.ratio == 4
    assert [line.split()[-1] for line in timing.table([met, missed]).splitlines()[2:]] == [
        "PASS",
        "FAIL",
    ]


@pytest.mark.parametrize(
    ("bar", "unit", "most"),
    [
        ("<= 1.3 x", "us", 1.3),
        ("flat: <= 1.2 x", "us", 1.2),
        ("<= 1.1 x (was 1.05 x)", "us", 1.1),
        ("<= 30 ms", "ms", 1.5),
        ("<= + 5 ms", "ms", 1.25),
        ("<= 30 ms", "us", None),
        ("== 0", "", None),
        ("", "us", None),
    ],
)
def test_a_bar_is_drawn_as_a_ratio(bar: str, unit: str, most: float | None) -> None:
    """A bar on the ratio, on a time, or on a difference of times is drawn as a ratio."""
    assert plot.most(Row("a | b", 10.0, 20.0, unit, None, bar)) == most


def test_what_has_no_ratio_is_not_drawn() -> None:
    """Zero has no place on a logarithmic scale."""
    rows = [Row("a", 1.0, 2.0, "us"), Row("b", 0.0, 2.0, ""), Row("c", 1.0, 0.0, "")]
    assert plot.drawable(rows) == rows[:1]


def test_what_was_written_as_json_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With matplotlib a file of figures becomes a picture; without it, the program says so."""
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
    """The stages of an operation end in its public call, and each has a line in the table."""
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
    """A stage is the difference of two medians over rounds; the raw calls are no stage."""
    rounds = np.array([[1.0, 3.0, 4.0, 9.0], [1.0, 3.0, 5.0, 9.0], [1.0, 3.0, 9.0, 9.0]])
    assert list(profile._steps(rounds)) == [2.0, 2.0]


def test_the_percentile_is_a_sample() -> None:
    """One of a thousand samples in two rounds lies beyond the p99.9."""
    samples = np.arange(1000.0)
    assert timing.percentile([samples[500:], samples[:500]], 0.999) == 998
    assert timing.name_of(0.999) == "p99.9"


@pytest.mark.parametrize(("name", "requests"), [("crowd", 6051), ("sessions", 5959)])
def test_a_trace_is_what_the_capacity_page_was_measured_with(
    name: str, requests: int, tmp_path: Path
) -> None:
    """The planner reads it; it has as many requests as then, and only `crowd` has crowds."""
    traces.main(name, tmp_path / "trace.csv")
    found = read(tmp_path / "trace.csv")
    assert len(found) == requests
    crowded = sum(each.at % 150 > 130 for each in found) / (traces.SECONDS * 20 / 150)
    other = sum(each.at % 150 <= 130 for each in found) / (traces.SECONDS * 130 / 150)
    assert (2.7 < crowded / other < 3.3) is (name == "crowd")


@pytest.mark.filterwarnings("ignore:<Partition:ResourceWarning")
def test_a_short_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of leases of every kind leave nothing on the device, and are counted."""
    monkeypatch.setattr(soak, "ROUND", 160)
    monkeypatch.setattr(soak, "ROUND_OF_OTHERS", 16)
    monkeypatch.setattr(soak, "WEIGHTS", [1] * len(soak.KINDS))
    earlier = set(threading.enumerate())  # those of earlier tests may end between the two rounds
    mine = types.SimpleNamespace(enumerate=lambda: {*threading.enumerate()} - earlier)
    monkeypatch.setattr(soak, "threading", mine)
    run = soak.SimulatedSoak(seed=1)
    rounds = run.rounds()
    samples = [next(rounds), next(rounds)]
    rounds.close()
    assert 320 <= samples[1].leases == run.kinds.total()
    assert 2 <= run.ends["closed"] <= 2 * len(soak.scripts(random.Random(1)))
    assert samples[0].threads == samples[1].threads


def test_growth_is_seen() -> None:
    """The line through the second half of the samples rises by what grows, not by its last one."""
    flat = [soak.Sample(1000 * n, n == 9, 2, 3, 4, 5) for n in range(20)]
    assert set(soak.rises(flat).values()) == {0.0}
    threads = [soak.Sample(1000 * n, 7, n // 5, 3, 4, n) for n in range(20)]
    risen = soak.rises(threads)
    assert risen["objects"] == pytest.approx(9)
    assert soak.MOST_RISE["threads"] < risen["threads"] < 2
    assert risen["resident"] == risen["files"] == risen["device_bytes"] == 0.0


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (["MainThread", "greensched 0:3 worker", "greensched 0:c worker"], 1),
        (["MainThread", "greensched 0:3 worker", "greensched 0:3 worker"], 2),
        (["MainThread", *(f"greensched 0:{n} worker" for n in range(4))], 3),
    ],
)
def test_threads_that_did_not_end_are_seen(names: list[str], count: int) -> None:
    """Threads of two executors are accounted for: a second of a name, or a third set, is not."""
    assert soak.unexplained(names, executors=2) == count


def test_two_users_are_measured_on_every_arm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A short W8 has a sweep, every strategy's samples, and rows against each way by hand."""
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
    assert set(sharing.BASELINES) < set(case["strategies"])
    assert all(
        strategy["critical_samples"]
        for name, strategy in case["strategies"].items()
        if "other" not in name
    )
    for hand in sharing.BASELINES:
        assert any(
            row["what"].startswith("W8") and f"| {hand}" in row["what"] for row in case["rows"]
        )


def test_the_best_split_is_the_one_that_serves_both() -> None:
    """The fastest for the other user that keeps the critical p95; else that with the best p95."""
    assert sharing._best({8: (1.1, 2.0), 16: (1.2, 1.0), 24: (1.4, 0.5)}, worse_of_both=False) == 16
    assert sharing._best({8: (3.0, 1.0), 16: (2.0, 9.0)}, worse_of_both=False) == 16
    assert sharing._best({8: (2.0, 1.0), 16: (1.2, 1.5)}, worse_of_both=True) == 16


def test_bars_of_traffic_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bar has a value within its interval, and says whether that is enough."""
    monkeypatch.setattr(traffic, "SECONDS", 2.0)
    monkeypatch.setattr(traffic, "REQUESTS", 10)
    monkeypatch.setattr(traffic, "RATES", (0.5, 1.0))
    monkeypatch.setattr(traffic, "GENERATORS", ("bursty",))
    monkeypatch.setattr(traffic, "ARMS", ("streams", "priority"))
    monkeypatch.setattr(sweeps, "MOST_SPLITS", 2)
    monkeypatch.setattr(traffic, "TURNS", 1)
    bars = [*traffic.prefill_and_decode([1], []), *traffic.lending([1])]
    judged = [bar for bar in bars if bar.asked]
    assert len(judged) == 3 + 3 * len(traffic.LOANS)
    assert all(bar.passed is not None for bar in judged)
    assert str(traffic.at_least("a", (1.0, 0.9, 1.1), 1.5)).endswith("FAIL")
    assert str(traffic.at_most("a", (1.0, 0.9, 1.1), 1.5)).endswith("PASS")
    assert not traffic.at_least_times("a", [0.0], [0.0], 0.98).passed
    assert traffic.at_least_times("a", [1.0], [0.0], 0.98).passed
    for bar in bars:
        value, low, high = bar.found
        assert not low > value
        assert not high < value


def test_both_builds_stand_in_one_table() -> None:
    """Each row of the plain build is followed by that of the compiled one, with the same bar."""
    plain = [Row("a | b, median", 2.0, 1.0, "us"), Row("c | d, median", 1.0, 1.0, "us")]
    compiled = [Row("a | b, median", 1.0, 1.0, "us"), Row("c | d, median", 0.5, 1.0, "us")]
    rows = [
        suites.judge(row, {"a | b": suites.Bar(1.5, "1.2 x")})
        for row in suites.interleave(plain, compiled)
    ]
    assert [row.what for row in rows] == [
        "a | b, median",
        "compiled: a | b, median",
        "c | d, median",
        "compiled: c | d, median",
    ]
    assert [row.passed for row in rows] == [False, True, None, None]
    assert rows[0].bar == "<= 1.5 x (was 1.2 x)"
    assert not suites.passed({"part": rows})
    assert suites.passed({"part": rows[1:]})
    assert not suites.passed({"part": []})  # it failed


def test_what_a_suite_found_is_read_again(tmp_path: Path) -> None:
    """The rows of each part, with their intervals; what is no part is left out."""
    found = {"part": [Row("a | b", 2.0, 1.0, "us", (1.9, 2.1), "<= 3 x", True)]}
    suites.save(tmp_path / "found.json", found, "some", **{"green contexts": {"contexts": 3}})
    assert suites.load(tmp_path / "found.json") == found


def test_what_a_gpu_answered_can_be_asked_again() -> None:
    """Each question of the probe has a kept answer, of an H200 or an H100."""
    folder = Path(__file__).parents[2] / "docs/measurements"
    names = "h200-580/probe.json", "h100-580/bandwidth.json", "h100-580/two-gpus.json"
    files = [folder / name for name in names]
    kept = {name for file in files for name in json.loads(file.read_text())}
    asked = {"device", "compile", "load", *(question.__name__ for question in probe.QUESTIONS)}
    assert asked <= kept
