"""The LLM engine that was measured: the planner's own strategies on its requests and its passes.

Given are the requests (the seeds of `benchmarks/gpu/engine.py` are repeated), the times of passes
by themselves on some numbers of SMs, and how much a step and a prompt on disjoint SMs slow each
other down, one of each (docs/measurements/h100-580/engine.json; prompts by SMs: tables.json).
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from itertools import pairwise

from greensched.capacity.baselines import Batched, Streams
from greensched.capacity.interference import Guard
from greensched.capacity.latency_tables import SpeedupCurve
from greensched.capacity.measured import Key
from greensched.capacity.metrics import WeightedValues
from greensched.capacity.run import Outcome, Scenario, simulate
from greensched.capacity.strategies import Split, Strategy
from greensched.capacity.traffic import Arrival
from greensched.capacity.workload import ServiceProfile

#: Seconds of a run, and for how long after it requests are waited for.
SECONDS, PATIENCE_S = 6.0, 2.5
#: Arms of which each rate had two runs; the others had one.
TWICE = ("chunked 128", "chunked 384", "chunked 512", "split 32", "split 64")
#: Slots, the sizes of the graphs of steps, and the tokens by which those of prompts differ.
SLOTS, STEP_GRAPHS, PROMPT_GRAPH = 64, (8, 16, 32, 64), 128
#: Milliseconds of steps of 1, 16 and 64 sequences by SMs, by `p.run` and by a thread of its own.
STEP_ROWS, STEP_SMS = (1, 16, 64), (24, 32, 48, 64, 80, 132)
STEP_BY_RUN = (
    (10.360, 8.705, 8.558, 8.228, 8.825, 8.761),
    (12.131, 10.028, 9.634, 8.735, 9.164, 9.293),
    (17.577, 15.373, 13.076, 12.242, 11.721, 10.140),
)
STEP_BY_THREAD = (
    (9.581, 8.153, 7.978, 7.800, 8.251, 8.108),
    (11.460, 9.523, 9.210, 8.394, 8.616, 8.605),
    (17.555, 15.017, 12.729, 11.839, 11.292, 9.620),
)
#: Milliseconds of prompts by tokens on all SMs.
PROMPT = ((256, 10.961), (512, 15.130), (768, 21.837), (1024, 26.385), (1280, 32.864))
#: Milliseconds of 1024 tokens by SMs, of four layers (tables.json); and of 32 layers of an older
#: commit, to which `split 24` belongs.
PROMPT_SMS, PROMPT_MS = (8, 16, 32, 64, 96, 132), (38.091, 19.268, 9.986, 5.380, 4.390, 3.159)
OLD_SMS, OLD_MS = (68, 84, 100, 108, 132), (63.245, 51.651, 45.474, 42.435, 26.385)
#: How much longer 32 layers take than those four on fewer SMs. Fitted (`measured.FITTED`): 46 ms of
#: 1024 tokens on 68 SMs (docs/how-to/llm-serving.md) would be 1.06.
SLOWER = 1.12
#: A step of 16 beside a prompt, by the step's SMs, and a prompt of 1152 tokens beside a step.
BESIDE: Guard = {
    ("decode", "prefill"): ((24, 32, 48, 64, 80), (1.335, 1.326, 1.343, 1.224, 1.188)),
    ("prefill", "decode"): ((52, 68, 84, 100, 108), (1.628, 1.463, 1.186, 1.237, 1.181)),
}
#: Bytes that a step of 64 and a prompt read: the weights, and the keys and values of 700 tokens.
WEIGHTS, CACHED = 15.0e9, 64 * 700 * 131_072
#: Targets of a first token, and of the times between tokens.
FIRST_S, BETWEEN_S = 0.5, (0.012, 0.020)


def requests(rate: float, seed: int) -> list[Arrival]:
    """Return the requests of a run, as the benchmark draws them."""
    rng, at, found = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate)) < SECONDS:
        prompt = min(1280, max(64, int(rng.lognormvariate(6.43, 0.5))))
        tokens = min(240, max(4, int(rng.expovariate(1 / 60))))
        found.append(Arrival(at, prompt, tokens))
    return found


def _between(points: tuple[tuple[int, float], ...], x: float) -> float:
    """Interpolate linearly; the first and the last segment continue."""
    (a, ya), (b, yb) = next((p for p in pairwise(points) if x <= p[1][0]), points[-2:])
    return ya + (yb - ya) * (x - a) / (b - a)


@functools.cache
def _steps(*, by_run: bool) -> SpeedupCurve:
    """Return the steps: a graph has room for so many sequences, and takes the time of all."""
    rows = STEP_BY_RUN if by_run else STEP_BY_THREAD
    least = (1, *(graph + 1 for graph in STEP_GRAPHS))
    sizes = [(first, graph) for first, graph in zip(least, STEP_GRAPHS, strict=False)]
    by_size = [
        tuple(
            _between(tuple(zip(STEP_ROWS, column, strict=True)), graph)
            for column in zip(*rows, strict=True)
        )
        for graph in STEP_GRAPHS
    ]
    seconds = [row[-1] / 1e3 for row in by_size]
    return SpeedupCurve(
        "decode",
        STEP_SMS,
        by_size[-1],
        sizes=tuple(size for pair in sizes for size in pair),
        seconds=tuple(each for each in seconds for _ in range(2)),
        by_size=tuple(row for row in by_size for _ in range(2)),
        bandwidth=(WEIGHTS + CACHED) / seconds[-1],
    )


@functools.cache
def _prompts(*, old: bool, budget: int) -> SpeedupCurve:
    """Return the prompts; a fused pass takes the time of its budget, however few tokens it has."""
    sizes, seconds = [], []
    for graph in range(PROMPT_GRAPH, PROMPT[-1][0] + 1, PROMPT_GRAPH):
        sizes += [graph - PROMPT_GRAPH + 1, graph]
        seconds += [_between(PROMPT, max(graph, budget)) / 1e3] * 2
    ms = OLD_MS if old else (*(SLOWER * ms for ms in PROMPT_MS[:-1]), PROMPT_MS[-1])
    return SpeedupCurve(
        "prefill",
        OLD_SMS if old else PROMPT_SMS,
        ms,
        sizes=tuple(sizes),
        seconds=tuple(seconds),
        bandwidth=WEIGHTS / seconds[-1],
    )


def _strategy(kind: str, number: int) -> Strategy:
    """Return the planner's strategy of an arm; all release first tokens between two steps."""
    if kind == "split":
        return Split(number, target_aware=True)
    if kind == "chunked":
        return Batched(budget=number)
    if kind == "prefill-first":
        return Batched(interval=number, together=False)
    return Streams(prioritised=kind == "priority", target_aware=True)


def _run(kind: str, number: int, rate: float, seed: int) -> Outcome:
    is_split = kind == "split"
    steps = _steps(by_run=is_split)
    prompts = _prompts(old=(kind, number) == ("split", 24), budget=number * (kind == "chunked"))
    services = {
        # No prompt is late, so they are read in the order of their arrival, as there.
        "prefill": ServiceProfile(name="prefill", role="prefill", curve=prompts, latency=math.inf),
        "decode": ServiceProfile(
            name="decode", role="decode", curve=steps, priority=1, latency=0.02, batch=SLOTS
        ),
    }
    scenario = Scenario(
        gpus="h100",
        services=services,
        seconds=SECONDS,
        guard=BESIDE if is_split else {},
        late_after=dict.fromkeys(services, PATIENCE_S),
    )
    return simulate(_strategy(kind, number), scenario, requests(rate, seed), 1)


def predict(rate: int, arm: str) -> Iterator[tuple[Key, float]]:
    """Predict the figures of one arm at a rate: counts of all runs, times of the median one."""
    kind, _, number = arm.partition(" ")
    found = []
    for seed in range(2 if arm in TWICE else 1):
        samples = _run(kind, int(number or 0), rate, seed).samples
        found.append(
            tuple(
                WeightedValues.of(samples[name].latency, samples[name].weight)
                for name in ("prefill", "decode")
            )
        )
    found.sort(key=lambda each: each[0].percentile(0.5))
    first, between = found[len(found) // 2]
    figures = {
        "first p50": 1e6 * first.percentile(0.5),
        "first p99": 1e6 * first.percentile(0.99),
        "between p50": 1e6 * between.percentile(0.5),
        "between p90": 1e6 * between.percentile(0.9),
        "between p99": 1e6 * between.percentile(0.99),
    }
    for target in BETWEEN_S:
        shares = [min(a.below(FIRST_S) / a.total, b.below(target) / b.total) for a, b in found]
        figures[f"in time at {1e3 * target:.0f}"] = sum(shares) / len(shares)
    for figure, value in figures.items():
        yield ("h100", "engine", f"{rate}/s", arm, figure), value
