"""`python -m benchmarks.micro.traffic [--trace FILE]`: the scheduler's bars, in simulated traffic.

Each bar has the figure, its 95 % interval over the seeds, and PASS or FAIL; exit code 1 if one
fails. Only the last two parts measure time and depend on the machine. `--parts` selects.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import process_time

from benchmarks import model
from benchmarks.lib.timing import MachineLoad, table
from benchmarks.micro import scheduler as deciding
from benchmarks.micro import shares
from benchmarks.model.scenarios import (
    beside,
    forever,
    pair,
    percentile,
    play,
    same,
    work,
)
from greensched.capacity import experiment, metrics, results, sweeps
from greensched.capacity.machine import Machine
from greensched.capacity.measured import WITHIN
from greensched.capacity.pool_strategies import Elastic
from greensched.capacity.results import Experiment
from greensched.capacity.run import Scenario, simulate
from greensched.capacity.strategies import Client, Split, Strategy
from greensched.capacity.workload import W2, services
from greensched.scheduling.policy import Fifo
from greensched.typing import ALL

#: Multiples of saturation; windows of so many seconds, and longer where at saturation fewer
#: requests than these come in one: of 60, one that is late is more than the one in a hundred.
RATES, SECONDS, REQUESTS = (0.25, 0.5, 0.75, 1.0, 1.25), 90.0, 400
#: Traffic other than a trace.
GENERATORS = ("azure-conv", "bursty", "gamma")
#: Absolute targets in seconds: those of MLPerf Inference for Llama-2-70B in the server scenario.
TARGETS = {"first": 2.0, "between": 0.2}
#: Of Mooncake's long prompts, which take ten seconds alone: the first token as its authors ask.
LONG_TARGETS = {"first": 30.0, "between": 0.2}
#: Our policy for prompts and tokens, and the arms that it is compared with; how finely every pool
#: splits there, also those of the fixed splits: a step of decoding needs a number of SMs between
#: two multiples of eight.
OURS, CUT = "sized", "fine"
CONTROL = sweeps.BEST_LATE
#: The seeds reserved for figures in documents. Development used only seeds 1 to 15.
EVALUATION_SEEDS = range(101, 106)
ARMS = ("streams", "priority", "mps", "gate", "chunked", "prefill-first")


@dataclass(frozen=True, slots=True)
class Bar:
    """One requirement: the figure (value, low, high), and whether it is met."""

    what: str
    found: metrics.Interval
    asked: str
    passed: bool | None

    def __str__(self) -> str:
        value, low, high = self.found
        verdict = {True: "PASS", False: "FAIL", None: ""}[self.passed]
        return f"{self.what:66} {value:8.3f} [{low:.3f}, {high:.3f}]  {self.asked:9} {verdict}"


def at_least(what: str, found: metrics.Interval, least: float) -> Bar:
    """Return a bar that passes if the lower end is at least a value; no figure does not pass."""
    return Bar(what, found, f">= {least:g}", found[1] >= least)


def at_least_times(what: str, ours: Sequence[float], theirs: Sequence[float], least: float) -> Bar:
    """Return a bar on a ratio; if theirs is always 0, it passes if ours is not."""
    bar = at_least(what, metrics.ratio(ours, theirs), least)
    return bar if any(theirs) else replace(bar, passed=any(ours))


def at_most(what: str, found: metrics.Interval, most: float) -> Bar:
    """Return a bar that passes if the upper end is at most a value."""
    return Bar(what, found, f"<= {most:g}", found[2] <= most)


# -- 1: published figures -----------------------------------------------------------------------


def known(seeds: Sequence[int]) -> Iterator[Bar]:
    """Compare each published figure with ours."""
    for found in zip(*(model.checks(seed) for seed in seeds), strict=True):
        over = metrics.interval([check.found / check.published for check in found])
        is_near = abs(over[0] - 1) <= WITHIN
        yield Bar(f"{found[0].what}, of {found[0].published:.2f}", over, "1 +- 0.25", is_near)


# -- 2: prefill and decode ----------------------------------------------------------------------


def prefill_and_decode(seeds: Sequence[int], traces: Sequence[Path]) -> Iterator[Bar]:
    """Compare ours with its control and each arm, on each traffic."""
    for traffic in (*traces, *GENERATORS):
        asked = Experiment(
            policies=(OURS, CONTROL, *ARMS),
            granularity=CUT,
            rates=RATES,
            slo=LONG_TARGETS if "mooncake" in str(traffic) else TARGETS,
            seed=seeds[0],
            repeats=len(seeds),
            until_late=True,
        )
        is_file = isinstance(traffic, Path)
        asked = replace(asked, trace=traffic) if is_file else replace(asked, generator=traffic)
        at_saturation = experiment._TrafficSource(asked, services(asked.services)).offered(1.0)
        asked = replace(asked, seconds=max(SECONDS, REQUESTS / at_saturation))
        named = f"{traffic.name if is_file else traffic}, {asked.seconds:.0f} s"
        yield from _against(named, experiment.run_experiment(asked))


def _against(traffic: str, answer: results.Results) -> Iterator[Bar]:
    good = results.goodputs(answer)
    for strategy, found in good.items():
        yield Bar(f"{traffic}: {strategy}, requests/s", metrics.interval(found), "", None)
    estimated = metrics.ratio(good["clairvoyant"], good[CONTROL])
    needed = 1.1 if estimated[0] >= 1.2 else 0.98
    said = f"{traffic}: x {CONTROL} (a clairvoyant: {estimated[0]:.2f} x)"
    yield at_least_times(said, good[OURS], good[CONTROL], needed)
    for strategy in ARMS:
        said = f"{traffic}: x {strategy}"
        yield at_least_times(said, good[OURS], good[strategy], 0.98)


# -- 3: small requests beside training ----------------------------------------------------------


def beside_training(seeds: Sequence[int]) -> Iterator[Bar]:
    """Run requests of 4 ms at a quarter and half of saturation, beside a training loop."""
    for rate in (0.25, 0.5):
        asked = Experiment(
            services="w2", generator="paced", policies=("elastic",), rates=(rate,), seconds=4.0,
            seed=seeds[0], repeats=len(seeds),
        )  # fmt: skip
        answer = experiment.run_experiment(asked)
        (cell,) = answer.groups
        alone = answer.alone_p99["inference"]
        curve, sms = W2[0].curve, W2[0].reserve
        p99 = [each["inference"].whole.percentile(0.99) for each in cell.latencies]
        kept = [each["training"].rate / answer.alone_rate["training"] for each in cell.latencies]
        device = metrics.interval([each / alone for each in p99])
        same_sms = metrics.interval([each / alone / curve.slowdown(sms) for each in p99])
        yield at_most(f"W2 at {rate:g}: p99, x alone on its SMs", same_sms, 1.15)
        yield at_most(f"W2 at {rate:g}: p99, x alone on the device", device, 1.3)
        yield at_least(f"W2 at {rate:g}: training keeps, of alone", metrics.interval(kept), 0.70)


# -- 4: lending ---------------------------------------------------------------------------------

#: Requests in a row, and rows. The lender may wait once, for its half of the SMs, for `BUDGET_S`.
AT_ONCE, TURNS, BUDGET_S = 200, 5, 0.005


@dataclass(frozen=True, slots=True)
class Loan:
    """A tenant with half of a device, mostly idle, and one that is always busy, in equal pieces."""

    what: str
    request_ns: int
    pause_s: float
    piece_ns: int


#: W1: a kernel of a thousand elements beside kernels on all there is. W6: requests of 0.5 ms, for a
#: tenth of the time.
LOANS = (
    *(Loan(f"W1, pieces of {ms:g} ms", 1_200, 0.05, round(1e6 * ms)) for ms in (0.04, 0.25, 2)),
    Loan("W6", 500_000, 1.8, 2_000_000),
)


def lending(seeds: Sequence[int]) -> Iterator[Bar]:
    """Compare lending with never lending: what the borrower gains, and what the lender pays."""
    for loan in LOANS:
        never = [_lent(loan, Split(52), seed) for seed in seeds]
        lent = [_lent(loan, Elastic(), seed) for seed in seeds]
        own_p99, _, own_done = zip(*never, strict=True)
        p99, longest, done = zip(*lent, strict=True)
        yield at_least(f"{loan.what}: the borrower gets, x", metrics.ratio(done, own_done), 1.8)
        yield at_most(f"{loan.what}: the lender's p99, x", metrics.ratio(p99, own_p99), 1.05)
        waited = metrics.interval([each / BUDGET_S for each in longest])
        yield at_most(f"{loan.what}: the lender's longest, of what it may wait", waited, 1.0)


def _lent(loan: Loan, strategy: Strategy, seed: int) -> tuple[float, float, float]:
    """Return the lender's p99 and longest latency in seconds, and the borrower's rate."""
    classes = pair(work(108), work(108))
    classes["critical"] = replace(
        classes["critical"], reserve=52, cap=52, max_wait_for_reserve=BUDGET_S
    )
    machine = Machine("a100", classes, {}, seed)
    rng = random.Random(f"lent {seed}")
    found: list[float] = []
    done: list[int] = []

    async def critical(client: Client) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(loan.pause_s * rng.uniform(0.9, 1.1))
            for _ in range(AT_ONCE):
                began = machine.now()
                await client.run((loan.request_ns,))
                found.append((machine.now() - began) / 1e9)

    async def drive(_: Machine, client: Callable[[str], Client]) -> None:
        await beside(
            critical(client("critical")), forever(client("other"), same(loan.piece_ns), done)
        )

    play(machine, strategy, drive)
    return percentile(found, 0.99), max(found), sum(done) / machine.now()


# -- 5: shares, and large requests --------------------------------------------------------------


def shared(seeds: Sequence[int]) -> Iterator[Bar]:
    """Check shares of 3:1 by weight, whatever leases take; and whole-device requests."""
    weights = {"gold": 3.0, "plain": 1.0}
    for lengths in ((0.010, 0.010), (0.005, 0.020), (0.020, 0.005)):
        means = dict(zip(weights, lengths, strict=True))
        took = [shares.saturate(weights, means, seed, 60.0).services() for seed in seeds]
        gold, plain = ([each[name].sm_seconds for each in took] for name in weights)
        parts = metrics.interval([abs(a / b / 3 - 1) for a, b in zip(gold, plain, strict=True)])
        done = [(a + b) / (8 * 16 * 60.0) for a, b in zip(gold, plain, strict=True)]
        said = " and ".join(f"{1e3 * each:g}" for each in lengths)
        yield at_most(f"3:1, leases of {said} ms: off by", parts, 0.03)
        yield at_least(f"3:1, leases of {said} ms: of the solo rate", metrics.interval(done), 0.95)
    aged = [shares.serve(shares.published(seed), Fifo(), known=True) for seed in seeds]
    strict = [shares.serve(shares.published(seed), Fifo(ageing=0.0)) for seed in seeds]
    served = metrics.interval([float(len(waits[ALL])) for waits in aged])
    yield at_least("whole-device requests served, of 40", served, 40)
    longest = metrics.interval([max(waits[ALL]) for waits in aged])
    bound = Fifo().ageing + shares.DRAIN_S
    yield at_most("the longest wait of one, s: the ageing and a drain", longest, bound)
    small = metrics.ratio(*([median(waits[16]) for waits in each] for each in (aged, strict)))
    yield at_most("median wait of small ones, x strict order's", small, 0.6)


# -- 7: how fast it is --------------------------------------------------------------------------


def hour(seeds: Sequence[int], traces: Sequence[Path]) -> Iterator[Bar]:
    """Simulate an hour of a language model's traffic under the strategy with the most decisions."""
    seed, seconds = seeds[0], 3600.0
    asked = Experiment(trace=traces[0] if traces else None, seconds=seconds)
    source = experiment._TrafficSource(asked, services("llm"))
    classes = {n: replace(s, latency=1.0) for n, s in services("llm").items()}
    scenario = Scenario(gpus="h200", services=classes, seconds=seconds)
    began = process_time()
    simulate(sweeps.all_strategies()[OURS], scenario, source.traffic(0.0, seed), seed)
    took = process_time() - began
    yield at_most("seconds of one core for an hour of traffic", (took, took, took), 60.0)
    printed = {_printed(order) for order in ("1", "2")}
    yield at_most("different bytes that two processes print of one seed", (len(printed),) * 3, 1.0)


def _printed(order: str) -> bytes:
    """Return what a new process prints of a short experiment, with this hash seed of strings."""
    program = (
        "from greensched.capacity import experiment, results, text_report; "
        f"asked = results.Experiment(policies=({OURS!r},), seconds=5.0, repeats=2); "
        "print(text_report.table(experiment.run_experiment(asked)))"
    )
    command, env = [sys.executable, "-c", program], os.environ | {"PYTHONHASHSEED": order}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout


# -- all of it ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.traffic",
        description="Check the scheduler's bars in simulated traffic.",
    )
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a trace file")
    parser.add_argument("--first-seed", type=int, default=EVALUATION_SEEDS[0])
    parser.add_argument(
        "--seeds", type=int, default=len(EVALUATION_SEEDS), help="how many (default: %(default)s)"
    )
    parser.add_argument(
        "--parts", default="1,2,3,4,5,6,7", help="their numbers (default: %(default)s)"
    )
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    parts: dict[str, Callable[[], Iterator[Bar]]] = {
        "1": lambda: known(seeds),
        "2": lambda: prefill_and_decode(seeds, options.trace),
        "3": lambda: beside_training(seeds),
        "4": lambda: lending(seeds),
        "5": lambda: shared(seeds),
        "7": lambda: hour(seeds, options.trace),
    }
    load = MachineLoad()
    print(f"seeds {', '.join(map(str, seeds))}")
    is_short = False
    for part in options.parts.split(","):
        print(f"\n{part}", flush=True)
        if part == "6":
            rows = deciding.measure()
            print(table(rows), flush=True)
            is_short = is_short or any(row.passed is False for row in rows)
            continue
        for bar in parts[part]():
            print(bar, flush=True)
            is_short = is_short or bar.passed is False
    print(f"\n{load}")
    return int(is_short)


if __name__ == "__main__":
    raise SystemExit(main())
