"""Reports: attainment, goodput, intervals; whole experiments, and the command line."""

from __future__ import annotations

import builtins
import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from greensched.capacity import clairvoyant, experiment, plot, sweeps, text_report
from greensched.capacity.baselines import Batched
from greensched.capacity.experiment import run_experiment
from greensched.capacity.interference import PUBLISHED
from greensched.capacity.latency_tables import CURVES
from greensched.capacity.machine import Machine
from greensched.capacity.metrics import (
    Latencies,
    WeightedValues,
    goodput,
    interval,
    jain,
    of_outcome,
    ratio,
)
from greensched.capacity.results import Experiment, as_dict, attained, compare_policies
from greensched.capacity.run import Outcome, simulate
from greensched.capacity.servers import Samples
from greensched.capacity.strategies import Split, Strategy, pool_of
from greensched.capacity.traffic import Arrival
from greensched.capacity.workload import ServiceProfile, services
from greensched.cli import main as cli
from greensched.errors import InvalidRequest, MissingPackage, install_command
from greensched.typing import Granularity

PAGE = Path(__file__).parents[2] / "docs/how-to/capacity.md"
GRANULARITIES = get_args(Granularity)
SMALL = Experiment(policies=("streams", "sized"), rates=(0.5, 1.0), seconds=2.0)


def test_percentiles_have_weights() -> None:
    """A value that a hundred tokens had counts a hundred times."""
    found = WeightedValues.of([2.0, 1.0, 3.0], [1, 98, 1])
    assert [found.percentile(p) for p in (0.5, 0.98, 0.99, 1.0)] == [1.0, 1.0, 2.0, 3.0]
    assert [found.below(v) for v in (0.5, 1.0, 2.5, 3.0)] == [0, 98, 99, 100]
    assert math.isnan(WeightedValues.of([], []).percentile(0.5))


def test_an_unserved_request_is_late() -> None:
    """It is late once it has waited for longer than the target, unless it came in the warm-up."""
    samples = Samples([1.0, 1.0], [0.0, 0.0], [1, 1], [5.0, 6.0], left=[0.5, 3.0, 9.5])
    found = Latencies.of(samples, 10.0)
    assert found.attained(1.0) == pytest.approx(2 / 3)
    assert found.attained(5.0) == 1.0


def test_what_is_behind_the_traffic_does_not_count() -> None:
    """A drained run counts requests of the traffic, however late; rates are of the traffic."""
    samples = Samples([1.0, 8.0, 1.0], [0.0] * 3, [1] * 3, [0.5, 9.0, 12.0], [4.0, 7.5], done=5.0)
    found = Latencies.of(samples, 10.0, drained=6.0)
    assert (found.whole.values, found.left, found.rate) == ((8.0,), (7.5,), 0.5)


@pytest.mark.parametrize("target", [2.0, 8.0])
def test_each_request_is_known_to_be_late_or_not(target: float) -> None:
    """A run drains until that is so at its targets; the rest covers its traffic."""
    asked = replace(SMALL, generator="bursty", policies=("split-16", "sized"), rates=(5.0,))
    results = run_experiment(replace(asked, seconds=8.0, slo={"first": target}))
    split, sized = (group.latencies[0] for group in results.groups[:2])
    latest = target
    assert split["prefill"].left
    assert all(age >= latest for age in (*split["prefill"].left, *sized["prefill"].left))
    served = [found["prefill"].whole.total for found in (split, sized)]
    assert served[0] + len(split["prefill"].left) == served[1] + len(sized["prefill"].left)
    for outcome in (group.outcomes[0] for group in results.groups):
        assert outcome.busy <= 1
        assert 0 < outcome.drained <= latest
        assert sum(each.done for each in outcome.samples.values()) < 1.2 * outcome.seconds


def test_a_run_without_waiting_requests_ends_with_its_traffic() -> None:
    """That is so for any target, and beside any loop."""
    asked = Experiment(services="w2", generator="paced", policies=("gate",), rates=(0.25,))
    (group,) = run_experiment(replace(asked, seconds=0.5, multiple=1e9)).groups
    assert group.outcomes[0].drained < 0.1


def test_a_starved_request_does_not_hold_a_run_up(tmp_path: Path) -> None:
    """A run drains for at most as long as its traffic lasted."""
    best = {"role": "loop", "curve": "gemm", "priority": 10}
    last = {"role": "request", "curve": "gemm", "latency": 1e6}
    path, trace = tmp_path / "classes.json", tmp_path / "trace.csv"
    path.write_text(json.dumps({"classes": {"best": best, "last": last}}))
    trace.write_text("arrival,class,cost\n0,last,0.001\n0.05,last,0.001\n0.1,last,0.001\n")
    asked = Experiment(services=str(path), trace=trace, policies=("gate",), seconds=0.1)
    (group,) = run_experiment(asked).groups
    assert group.outcomes[0].drained == pytest.approx(0.1, abs=0.001)
    assert group.latencies[0]["last"].left


def test_traffic_is_what_comes_within_a_runs_seconds(tmp_path: Path) -> None:
    """For runs and the clairvoyant, a request that comes at the end is no part of the traffic."""
    path, trace = tmp_path / "classes.json", tmp_path / "trace.csv"
    decode = {"role": "decode", "curve": "moe", "latency": 0.2, "priority": 10}
    prefill = {"role": "prefill", "curve": "gemm", "latency": 0.3}
    path.write_text(json.dumps({"classes": {"decode": decode, "prefill": prefill}}))
    rows = [f"{second},500,10" for second in range(5)] + ["5,8000,10"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    asked = Experiment(services=str(path), trace=trace, policies=("streams",), seconds=5)
    results = run_experiment(asked)
    assert attained(results, results.groups[0]) == [1.0]
    assert results.clairvoyant[0.0] == [1.0]


def test_a_run_is_no_longer_than_its_trace(tmp_path: Path) -> None:
    """At the highest rate a run ends with its trace, and so do its rates."""
    trace = tmp_path / "trace.csv"
    rows = [f"{second},inference,0.004" for second in (*(i / 10 for i in range(21)), 2.05)]
    trace.write_text("\n".join(["arrival,class,cost", *rows]))
    asked = Experiment(services="w2", trace=trace, policies=("gate",), seconds=120.0)
    results = run_experiment(asked)
    assert results.experiment.seconds == pytest.approx(2.05)
    assert results.groups[0].latencies[0]["inference"].whole.total == 19, "all but the first tenth"
    assert results.groups[0].latencies[0]["training"].rate > 0.9
    rates = (0.1, 0.2)
    faster = run_experiment(replace(asked, rates=rates))
    assert faster.experiment.seconds == pytest.approx(2.05 / (0.2 * faster.saturation))
    empty = Latencies.of(Samples(), 10.0)
    assert math.isnan(empty.attained(1.0))


def test_a_class_without_requests_does_not_count(tmp_path: Path) -> None:
    """Neither its attainment nor a goodput of it is a number, and the report prints none."""
    samples = Samples([1.0], [0.0], [1], [5.0])
    assert math.isnan(Latencies.of(samples, 10.0).attained(math.nan))
    assert math.isnan(goodput({1.0: 1.0, 2.0: math.nan}))
    path, trace = tmp_path / "classes.json", tmp_path / "trace.csv"
    request = {"role": "request", "curve": "gemm", "latency": 1.0}
    path.write_text(json.dumps({"classes": {"a": request, "b": request}}))
    trace.write_text("arrival,class,cost\n0.02,a,0.001\n0.03,a,0.001\n")
    asked = Experiment(services=str(path), trace=trace, policies=("gate",), seconds=0.1)
    results = run_experiment(asked)
    assert attained(results, results.groups[0]) == [1.0]
    assert "nan" not in text_report.table(results)


def test_goodput_is_between_rates() -> None:
    """Linear from the last rate at which it held; nothing where it never held."""
    assert goodput({1.0: 1.0, 2.0: 0.98}) == pytest.approx(1.5)
    assert goodput({1.0: 0.5, 2.0: 1.0}) == 0.0
    assert goodput({1.0: 1.0, 2.0: 0.995}) == 2.0


def test_intervals_and_shares() -> None:
    """An interval holds its mean and is the same each time; Jain's index is 1 for equals."""
    mean, low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert low < mean == 3.0 < high
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == (mean, low, high)
    assert jain([2.0, 2.0]) == 1.0
    assert jain([1.0, 0.0]) == 0.5


def test_a_ratio_is_of_means_over_the_same_seeds() -> None:
    """Where there is nothing below, there is no number."""
    assert ratio([2.0, 4.0], [1.0, 2.0]) == (2.0, 2.0, 2.0)
    assert math.isnan(ratio([1.0], [0.0])[0])


def test_a_question_compares_with_doing_without() -> None:
    """At its targets it beats plain streams, and is nowhere worse where those suffice."""
    said = compare_policies(run_experiment(replace(SMALL, rates=(0.2, 0.4), multiple=40.0)))
    assert said["sized"]["streams"][0] >= 0.98
    assert said["sized"]["where streams do"][0] >= 0.98
    assert "clairvoyant" in said
    assert said["sized"]["best-split-late"][0] >= 0.98, "its control is always beside it"


def tried(needs: list[int], finest: int = 8) -> list[Outcome]:
    """The runs of a sweep of fixed splits over classes that need so many SMs to be in time."""
    found = {
        f"c{i}": ServiceProfile(
            name=f"c{i}", role="request", curve=CURVES["moe"], priority=-i, latency=1.0
        )
        for i in range(len(needs))
    }

    def run(strategy: Strategy) -> Outcome:
        assert isinstance(strategy, Split)
        sizes = [*strategy.sms, 132 - sum(strategy.sms)]
        samples = {
            name: Samples([need * k / 100 / sms for k in range(1, 101)], [0.0] * 100, [1] * 100)
            for name, need, sms in zip(found, needs, sizes, strict=True)
        }
        for each in samples.values():
            each.at = [0.5] * 100
        return Outcome(strategy.name, 1, 1.0, 0.0, samples, {}, 0.0)

    return sweeps.best_run("best-split", run, found, 132, finest)[1]


@pytest.mark.parametrize("needs", [[100, 40], [20, 90], [66, 70], [60, 12, 30, 9, 10, 9]])
@pytest.mark.parametrize("finest", [2, 8])
def test_fixed_splits_are_swept_for_any_number_of_classes(needs: list[int], finest: int) -> None:
    """SMs move between all classes until each has its share; no class is left without any."""
    runs = tried(needs, finest)
    splits = [tuple(map(int, run.strategy.split("-")[1:])) for run in runs]
    assert all(sum(split) <= 132 - finest and min(split) >= finest for split in splits)
    best = max(min(each.below(1.0) for each in _whole(run)) for run in runs)
    possible = min(100, 100 * (132 - finest * len(needs)) // sum(needs))
    assert best >= possible - 2


def _whole(run: Outcome) -> list[WeightedValues]:
    return [each.whole for each in of_outcome(run).values()]


def test_the_best_parameter_of_a_strategy_is_reported() -> None:
    """Every value of its parameter is tried, and no run is better than the one reported."""
    asked = replace(SMALL, policies=("chunked",), rates=(1.0,), slo={"between": 0.05})
    results = run_experiment(asked)
    (best,) = attained(results, results.groups[0])
    for budget in (256, 512, 1024, 2048):
        source = experiment._TrafficSource(asked, results.scenario.services)
        outcome = simulate(Batched(budget=budget), results.scenario, source.traffic(1.0, 1), 1)
        assert sweeps.score(of_outcome(outcome), results.scenario.services).worst <= best


@pytest.mark.parametrize(("granularity", "sms"), [("coscheduled", 16), ("fine", 10)])
def test_pools_cut_as_finely_as_was_asked(granularity: Granularity, sms: int) -> None:
    """So are the pools of every strategy, and the fixed splits that are tried; reports say so."""
    asked = replace(SMALL, granularity=granularity, policies=("split-64",), rates=(0.5,))
    results = run_experiment(replace(asked, seconds=0.5))
    finest = 2 if granularity == "fine" else 8
    firsts = {int(outcome.strategy.removeprefix("split-")) for outcome in tried([90, 70], finest)}
    assert any(first % 8 for first in firsts) is (granularity == "fine")
    assert as_dict(results)["granularity"] == granularity
    assert ("cut finely" in text_report.table(results)) is (granularity == "fine")
    machine = Machine("h200", services("llm"), PUBLISHED, granularity=granularity)

    async def granted() -> int:
        async with pool_of(machine) as pool, pool.partition(10) as p:
            return p.sm_count

    try:
        assert machine.clock.run(granted) == sms
    finally:
        machine.close()


def test_a_run_in_which_nothing_is_done_is_refused() -> None:
    """It says of which class, and what to do."""
    with pytest.raises(InvalidRequest, match="'decode' finished in its run without other"):
        run_experiment(replace(SMALL, seconds=0.02))


def bounded(prompts: list[Arrival], seconds: float = 10.0) -> float:
    """The part of prompts due after 0.2 s, on one device."""
    latency = {"prefill": 0.2, "decode": 0.2}
    return clairvoyant.attainment(prompts, services("llm"), [132], latency, PUBLISHED, seconds)


def test_the_clairvoyant_does_what_one_device_can() -> None:
    """Prompts that fit are in time, those that cannot are not, and the largest is given up."""
    assert bounded([Arrival(1.0 + i, 512, 1) for i in range(5)]) == 1.0
    assert bounded([Arrival(1.0, 2048, 1)] * 5) == pytest.approx(0.2)
    assert bounded([Arrival(1.0, 2048, 1), *[Arrival(1.01, 512, 1)] * 3]) == pytest.approx(0.75)
    assert bounded([Arrival(9.9, 2048, 1)] * 5) == pytest.approx(0.2), "due after the traffic"


def test_what_classes_do_side_by_side_is_the_hull_of_splits() -> None:
    """No point beside another is below the line of two splits, and none is far above the sum."""
    frontier = clairvoyant.Frontier(CURVES["moe"], CURVES["gemm"], [132], PUBLISHED)
    speeds = [frontier.beside(i / 50) for i in range(51)]
    assert (frontier.most, speeds[0], speeds[50]) == (1.0, 1.0, 0.0)
    assert all(i / 50 + speed < 1.1 for i, speed in enumerate(speeds))
    bends = (a + c - 2 * b for a, b, c in zip(speeds, speeds[1:], speeds[2:], strict=False))
    assert all(bend <= 1e-9 for bend in bends)
    two = clairvoyant.Frontier(CURVES["moe"], CURVES["gemm"], [132, 132], PUBLISHED)
    assert two.beside(0.8) == pytest.approx(2 * frontier.beside(0.4))


@pytest.mark.parametrize(
    ("strategy", "granularity"),
    [("streams", "coscheduled"), ("split-24", "coscheduled"), *product(["sized"], GRANULARITIES)],
)
def test_no_split_is_above_the_clairvoyant(
    strategy: str, granularity: Granularity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In no run with all tokens in time are more prompts in time than it estimates."""
    monkeypatch.setattr(sweeps, "MOST_SPLITS", 1)
    asked = replace(SMALL, seconds=20.0, generator="bursty", policies=(strategy,), rates=(1.0, 1.3))
    results = run_experiment(replace(asked, granularity=granularity))
    for group in results.groups:
        estimates = results.clairvoyant[group.rate]
        for mine, most in zip(attained(results, group), estimates, strict=True):
            assert mine <= most


def test_a_question_is_answered_the_same_each_time() -> None:
    """The same bytes, as text and as JSON; and the figures an operator needs are in them."""
    first, second = run_experiment(SMALL), run_experiment(SMALL)
    text = text_report.table(first)
    assert text == text_report.table(second)
    said = as_dict(first)
    assert json.dumps(said) == json.dumps(as_dict(second))
    assert {group["policy"] for group in said["runs"]} == {"streams", "sized", "best-split-late"}
    assert set(said["goodput"]) == {"streams", "sized", "best-split-late", "clairvoyant"}
    decode = said["runs"][0]["classes"]["decode"]
    assert set(decode) >= {"attained", "whole", "wait", "service", "p99_of_alone"}


def test_another_process_gives_the_same_bytes() -> None:
    """Results do not depend on the order of sets, that is on the hashes of strings."""
    program = (
        "from greensched.capacity import experiment, results, text_report\n"
        "asked = results.Experiment(policies=('streams', 'elastic'), seconds=1.0)\n"
        "print(text_report.table(experiment.run_experiment(asked)))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"policies": ("best",)},
        {"policies": ("split-0",)},
        {"policies": ("split-132",)},
        {"services": "lllm"},
        {"generator": "poison"},
        {"seconds": 0.0},
        {"rates": (-1.0,)},
        {"gpus": "h300"},
        {"generator": "requests"},
        {"seconds": math.inf},
        {"rates": (math.nan,)},
        {"multiple": math.nan},
        {"multiple": -1.0},
        {"slo": {"first": 0.0}},
        {"slo": {"last": 1.0}},
        {"policies": ("split-100-32",)},
        {"services": "w2", "generator": "requests", "policies": ("chunked",)},
    ],
)
def test_a_question_without_sense_is_refused(wrong: dict[str, Any]) -> None:
    """It is refused by an InvalidRequest before anything is simulated."""
    with pytest.raises(InvalidRequest):
        run_experiment(Experiment(**({"policies": ("streams",)} | wrong)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"reserve": "8"}, {"depth": 1.5}, {"segment": None}, {"latency": math.nan}, {"cap": -1},
        {"segment": 1e-12}, {"priority": True}, {"latency": math.inf},
    ],
)  # fmt: skip
def test_a_class_of_a_file_is_checked(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """What is no number of its kind is refused with its class, before anything is simulated."""
    path = tmp_path / "classes.json"
    path.write_text(json.dumps({"classes": {"a": {"role": "loop", "curve": "gemm"} | wrong}}))
    with pytest.raises(InvalidRequest, match="class 'a'"):
        services(str(path))


def test_a_file_that_holds_no_classes_is_shown_their_shape(tmp_path: Path) -> None:
    """It is refused with what it should look like."""
    path = tmp_path / "classes.json"
    path.write_text("{}")
    with pytest.raises(InvalidRequest, match=r'a file of \{"classes": \{name: \{"role"'):
        services(str(path))


def test_a_reserve_that_no_device_has_is_refused(tmp_path: Path) -> None:
    """By its class, before anything is simulated."""
    path = tmp_path / "classes.json"
    request = {"role": "request", "curve": "gemm", "reserve": 133}
    path.write_text(json.dumps({"classes": {"a": request}}))
    with pytest.raises(InvalidRequest, match="class 'a': reserve=133: a device has 132 SMs"):
        run_experiment(Experiment(services=str(path), generator="paced"))


def test_traffic_without_end_is_refused(tmp_path: Path) -> None:
    """Traffic that no load can be made of is refused; it had no saturation to print."""
    path = tmp_path / "trace.csv"
    path.write_text("arrival,class,cost\n0,inference,5e-324\n1e9,inference,5e-324\n")
    with pytest.raises(InvalidRequest, match="give traffic with some work"):
        run_experiment(Experiment(policies=("streams",), trace=path, services="w2"))


@pytest.mark.parametrize(("generator", "classes"), [("poisson", "w2"), ("requests", "llm")])
def test_traffic_without_its_classes_is_refused(generator: str, classes: str) -> None:
    """Tokens need classes for them, and requests of a class need that class: either is changed."""
    with pytest.raises(InvalidRequest, match=r"other --services.* another trace or generator"):
        run_experiment(Experiment(policies=("streams",), generator=generator, services=classes))


def test_a_plot_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without matplotlib it is a typed error with the command, before anything is simulated."""
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackage, match=r"pip install .*\[plot\]"):
        plot.save(run_experiment(replace(SMALL, rates=(0.5,))), tmp_path / "a.png")
    monkeypatch.setattr(experiment, "run_experiment", None)  # it would not get so far
    assert cli.main(["simulate", "--plot", str(tmp_path / "a.png")]) == 2
    assert install_command("plot") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [("a.doc", "give a file that ends in .png, .svg"), ("none/a.png", "there is no folder")],
)
def test_a_plot_that_cannot_be_written_is_refused_before_the_simulation(
    name: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its format and its folder are looked at first, because a simulation takes minutes."""
    canvas = SimpleNamespace(get_supported_filetypes=lambda: {"svg": "", "png": ""})
    monkeypatch.setattr(plot, "pyplot", lambda: SimpleNamespace(FigureCanvasBase=canvas))
    monkeypatch.setattr(experiment, "run_experiment", None)  # it would not get so far
    assert cli.main(["simulate", "--plot", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


def test_a_plot_has_the_distributions_at_the_highest_rate() -> None:
    """Of each strategy a line from the fastest to the slowest request of a class, in ms."""
    whole = WeightedValues.of([0.3, 0.1, 0.2], [1, 1, 2])
    latencies = [{"chat": SimpleNamespace(whole=whole)}]
    groups = [
        SimpleNamespace(strategy=strategy, rate=rate, latencies=latencies)
        for strategy, rate in (("streams", 0.5), ("streams", 1.0), ("sized", 1.0))
    ]
    drawn: dict[str, list[float]] = {}

    def line(values: list[float], parts: list[float], *, label: str) -> None:
        assert label not in drawn
        assert parts == plot.PARTS
        drawn[label] = values

    axis = SimpleNamespace(plot=line, set_xscale=lambda _scale: None)
    found: Any = SimpleNamespace(offered={0.5: 50.0, 1.0: 100.0}, groups=groups)
    plot.draw_distribution(axis, found, "chat")
    in_ms = [100.0] * 50 + [200.0] * 100 + [300.0] * 49
    assert drawn == {"streams": pytest.approx(in_ms), "sized": pytest.approx(in_ms)}


def test_every_command_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the page's own files; for half a second of traffic and one seed, not for minutes."""
    page = re.sub(r" \\\n +", " ", PAGE.read_text())
    monkeypatch.setattr(sweeps, "MOST_SPLITS", 1)
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"^```json (\S+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        Path(name).write_text(text)
    (csv,) = re.findall(r"^```csv\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    Path("requests.csv").write_text(csv)
    classes = json.loads(Path("classes.json").read_text())
    commands = re.findall(r"^    greensched (simulate .*)$", page, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        if "--tables" not in command:  # its curve is of the measured table
            mine = json.dumps(classes).replace('"mine"', '"moe"')
            Path("classes.json").write_text(mine)
        else:
            Path("classes.json").write_text(json.dumps(classes))
        short = re.sub(r"--plot \S+|--seconds \S+|--repeats \S+|--load-factors \S+", "", command)
        assert cli.main([*shlex.split(short), "--seconds", "0.5"]) == 0, command
        assert capsys.readouterr().out.startswith("model: ")


def test_a_bad_command_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    """The command says why."""
    assert cli.main(["simulate", "--load-factors", "fast"]) == 2
    assert "--load-factors" in capsys.readouterr().err
    assert cli.main(["simulate", "--slo", "first"]) == 2
    assert "--slo" in capsys.readouterr().err
