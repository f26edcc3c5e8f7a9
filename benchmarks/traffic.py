"""`python -m benchmarks.traffic [--trace FILE]`: the scheduler's bars, in simulated traffic.

Each bar has what came out, its 95 % interval over the seeds, and PASS or FAIL; exit code 1 if one
fails. Nothing depends on the machine but the last two parts, which measure time. `--parts` picks.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks import deciding, shares
from benchmarks.measure import Bystanders, table
from greensched.planning.policy import Fifo
from greensched.simulation import answers, compare, report, validation
from greensched.simulation.answers import BEST_SPLIT, Question
from greensched.simulation.arms import Arm, Seat, Split
from greensched.simulation.machine import Machine
from greensched.simulation.run import Setting, simulate
from greensched.simulation.scenes import WITHIN, beside, forever, pair, percentile, play, same, work
from greensched.simulation.sizing import Elastic
from greensched.simulation.workload import W2, services
from greensched.typing import ALL

#: From half to twice saturation; windows of so many seconds.
RATES, SECONDS = (0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 2.0), 90.0
#: Traffic other than the trace: nothing was fitted to any of them.
UNSEEN = ("azure-conv", "azure-code", "bursty", "gamma", "mooncake")
#: Ours, where prompts are read and tokens written.
OURS = "sized"


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing that is asked for: what came out (value, low, high), and whether it is enough."""

    what: str
    found: report.Interval
    asked: str
    passed: bool | None

    def __str__(self) -> str:
        value, low, high = self.found
        verdict = {True: "PASS", False: "FAIL", None: ""}[self.passed]
        return f"{self.what:66} {value:8.3f} [{low:.3f}, {high:.3f}]  {self.asked:9} {verdict}"


def at_least(what: str, found: report.Interval, least: float) -> Bar:
    """Passed from there on; what there is nothing to hold against passes."""
    return Bar(what, found, f">= {least:g}", math.isnan(found[0]) or found[0] >= least)


def at_most(what: str, found: report.Interval, most: float) -> Bar:
    """Passed up to there."""
    return Bar(what, found, f"<= {most:g}", found[0] <= most)


# -- 1: what is known ---------------------------------------------------------------------------


def known(seeds: Sequence[int]) -> Iterator[Bar]:
    """Each published figure, over what comes out here."""
    for found in zip(*(validation.checks(seed) for seed in seeds), strict=True):
        over = report.interval([check.found / check.published for check in found])
        is_near = abs(over[0] - 1) <= WITHIN
        yield Bar(f"{found[0].what}, of {found[0].published:.2f}", over, "1 +- 0.25", is_near)


# -- 2: prefill and decode ----------------------------------------------------------------------


def prefill_and_decode(seeds: Sequence[int], traces: Sequence[Path]) -> Iterator[Bar]:
    """Ours against plain streams, the best fixed split and the bound, on each traffic."""
    for traffic in (*traces, *UNSEEN):
        asked = Question(
            policies=("streams", BEST_SPLIT, OURS),
            rates=RATES,
            seconds=SECONDS,
            seed=seeds[0],
            repeats=len(seeds),
            check=False,
        )
        is_file = isinstance(traffic, Path)
        asked = replace(asked, trace=traffic) if is_file else replace(asked, generator=traffic)
        yield from _against(str(traffic.name if is_file else traffic), compare.ask(asked))


def _against(traffic: str, answer: answers.Answer) -> Iterator[Bar]:
    good, told = answers.goodputs(answer, None), answers.against(answer)
    for arm, found in good.items():
        yield Bar(f"{traffic}: {arm}, requests/s", report.interval(found), "", None)
    ours = told[OURS]
    yield at_least(f"{traffic}: x plain streams", ours["streams"], 1.5)
    yield at_least(f"{traffic}: of the gap to the bound", ours["recovered"], 0.6)
    gap = report.ratio(good["bound"], good[BEST_SPLIT])
    needed = 1.15 if gap[0] >= 1.3 else 0.0
    said = f"{traffic}: x best split (the bound is {gap[0]:.2f} x)"
    yield at_least(said, ours[BEST_SPLIT], needed)
    said = f"{traffic}: attained, x streams' where those do"
    yield at_least(said, ours["where streams do"], 0.98)
    yield at_least(f"{traffic}: the bound, over the best arm of a run", _over_best(answer), 1.0)


def _over_best(answer: answers.Answer) -> report.Interval:
    """The least of the bound over an arm that has its tokens in time, of all runs of a seed."""
    decode = next(n for n, s in answer.setting.services.items() if s.role == "decode")
    latency = answers.targets(answer, None)[decode]
    least = [math.inf] * answer.question.repeats
    for cell in answer.cells:
        for i, worst in enumerate(answers.attained(answer, cell, None)):
            if worst and cell.latencies[i][decode].attained(latency) >= report.MUST_MEET:
                least[i] = min(least[i], answer.bounds[cell.rate][i][None] / worst)
    return min(least), min(least), max(least)


# -- 3: small requests beside training ----------------------------------------------------------


def beside_training(seeds: Sequence[int]) -> Iterator[Bar]:
    """4 ms in small kernels, at a quarter and half of saturation, beside a training loop."""
    for rate in (0.25, 0.5):
        asked = Question(
            services="w2", generator="paced", policies=("elastic",), rates=(rate,), seconds=4.0,
            seed=seeds[0], repeats=len(seeds), check=False,
        )  # fmt: skip
        answer = compare.ask(asked)
        (cell,) = answer.cells
        alone = answer.alone_p99["inference"]
        curve, sms = W2[0].curve, W2[0].reserve
        p99 = [each["inference"].whole.percentile(0.99) for each in cell.latencies]
        kept = [each["training"].rate / answer.alone_rate["training"] for each in cell.latencies]
        device = report.interval([each / alone for each in p99])
        same_sms = report.interval([each / alone / curve.slowdown(sms) for each in p99])
        yield at_most(f"W2 at {rate:g}: p99, x alone on its SMs", same_sms, 1.15)
        yield at_most(f"W2 at {rate:g}: p99, x alone on the device", device, 1.3)
        yield at_least(f"W2 at {rate:g}: training keeps, of alone", report.interval(kept), 0.70)


# -- 4: lending ---------------------------------------------------------------------------------

#: A tenant with half of the device, which works for a tenth of the time, 200 requests of 0.5 ms at
#: a stretch, and waits for its half for 5 ms at most; and one that always works, in pieces of 2 ms.
REQUEST_NS, PIECE_NS, AT_ONCE, PAUSE_S, TURNS = 500_000, 2_000_000, 200, 1.8, 5


def lending(seeds: Sequence[int]) -> Iterator[Bar]:
    """What a busy tenant gains of an idle one's half, and what that costs the other (W6)."""
    strict = [_lent(Split(52), seed) for seed in seeds]
    lent = [_lent(Elastic(), seed) for seed in seeds]
    gain = report.ratio([done for _, done in lent], [done for _, done in strict])
    p99 = report.ratio([p99 for p99, _ in lent], [p99 for p99, _ in strict])
    yield at_least("W6: what lending gives to the borrower, x", gain, 1.8)
    yield at_most("W6: the lender's p99, x never lending", p99, 1.05)


def _lent(arm: Arm, seed: int) -> tuple[float, float]:
    """p99 of the lender in seconds; what the other did in a second."""
    classes = pair(work(108), work(108))
    classes["critical"] = replace(classes["critical"], reserve=52, cap=52, budget=0.005)
    machine = Machine("a100", classes, {}, seed)
    rng = random.Random(f"W6 {seed}")
    found: list[float] = []
    done: list[int] = []

    async def critical(seat: Seat) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(PAUSE_S * rng.uniform(0.9, 1.1))
            for _ in range(AT_ONCE):
                began = machine.now()
                await seat.run((REQUEST_NS,))
                found.append((machine.now() - began) / 1e9)

    async def drive(_: Machine, seat: Callable[[str], Seat]) -> None:
        await beside(critical(seat("critical")), forever(seat("other"), same(PIECE_NS), done))

    play(machine, arm, drive)
    return percentile(found, 0.99), sum(done) / machine.now()


# -- 5: shares, and large requests --------------------------------------------------------------


def shared(seeds: Sequence[int]) -> Iterator[Bar]:
    """3:1 by weight, whatever leases take; and whole-device requests among small ones."""
    weights = {"gold": 3.0, "plain": 1.0}
    for lengths in ((0.010, 0.010), (0.005, 0.020), (0.020, 0.005)):
        means = dict(zip(weights, lengths, strict=True))
        took = [shares.saturate(weights, means, seed, 60.0).services() for seed in seeds]
        gold, plain = ([each[name].sm_seconds for each in took] for name in weights)
        parts = report.interval([abs(a / b / 3 - 1) for a, b in zip(gold, plain, strict=True)])
        done = [(a + b) / (8 * 16 * 60.0) for a, b in zip(gold, plain, strict=True)]
        said = " and ".join(f"{1e3 * each:g}" for each in lengths)
        yield at_most(f"3:1, leases of {said} ms: off by", parts, 0.03)
        yield at_least(f"3:1, leases of {said} ms: of the solo rate", report.interval(done), 0.95)
    aged = [shares.serve(shares.published(seed), Fifo(), known=True) for seed in seeds]
    strict = [shares.serve(shares.published(seed), Fifo(ageing=0.0)) for seed in seeds]
    served = report.interval([float(len(waits[ALL])) for waits in aged])
    yield at_least("whole-device requests served, of 40", served, 40)
    longest = report.interval([max(waits[ALL]) for waits in aged])
    bound = Fifo().ageing + shares.DRAIN_S
    yield at_most("the longest wait of one, s: the ageing and a drain", longest, bound)
    small = report.ratio(*([median(waits[16]) for waits in each] for each in (aged, strict)))
    yield at_most("median wait of small ones, x strict order's", small, 0.6)


# -- 7: how fast it is --------------------------------------------------------------------------


def hour(seeds: Sequence[int], traces: Sequence[Path]) -> Iterator[Bar]:
    """An hour of a language model's traffic, as fast as it is, under the arm that decides most."""
    seed, seconds = seeds[0], 3600.0
    asked = Question(trace=traces[0] if traces else None, seconds=seconds)
    source = compare._Source(asked, services("llm"))
    classes = {n: replace(s, latency=1.0) for n, s in services("llm").items()}
    setting = Setting(gpus="h200", services=classes, seconds=seconds)
    began = perf_counter()
    simulate(compare.arms()[OURS], setting, source.traffic(0.0, seed), seed)
    took = perf_counter() - began
    yield at_most("seconds of the host for an hour of traffic", (took, took, took), 60.0)
    short = Question(policies=(OURS,), seconds=5.0, repeats=2, check=False)
    same_bytes = answers.as_dict(compare.ask(short)) == answers.as_dict(compare.ask(short))
    yield at_least("the same seed gives the same answer", (float(same_bytes),) * 3, 1.0)


# -- all of it ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic", description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a file")
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 1 on")
    parser.add_argument("--parts", default="1,2,3,4,5,6,7", help="numbers with commas between")
    options = parser.parse_args()
    seeds = range(1, options.seeds + 1)
    parts: dict[str, Callable[[], Iterator[Bar]]] = {
        "1": lambda: known(seeds),
        "2": lambda: prefill_and_decode(seeds, options.trace),
        "3": lambda: beside_training(seeds),
        "4": lambda: lending(seeds),
        "5": lambda: shared(seeds),
        "7": lambda: hour(seeds, options.trace),
    }
    print(f"seeds {', '.join(map(str, seeds))}; {Bystanders()}")
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
    return int(is_short)


if __name__ == "__main__":
    raise SystemExit(main())
