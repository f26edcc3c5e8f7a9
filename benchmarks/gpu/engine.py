"""Serve one model in every way, and search the highest rate at which each way is in time.

`python -m benchmarks.gpu.engine [--seconds 520] [--run 8] [--seeds 1] [--json FILE] [--plot FILE]`,
or `make bench-engine`. `--check` measures single passes first.

The model is that of `examples/09_inference_server`, and so are its loops: the same kernels, graphs,
slots and requests in every arm, in one process without HTTP. Only the order of the passes, and the
SMs on which they run, differ. Each arm's docstring says why it is fair.

A request is in time if its first token comes within 0.5 s and the 90th percentile of the times
between its tokens is within the target. The *knee* of an arm is the highest rate at which 99 % of
the requests are in time; it is searched on a grid of rates, and an arm with a parameter is given
the best of those that are tried. Requests arrive at random (Poisson): prompts log-normal with a
mean of 700 tokens, answers exponential with a mean of 60. Or by a trace (`--trace FILE`, in the
format of Azure's): its arrivals, prompts and answers, in a faster or slower time.

`--small` serves a small model on the simulated driver: that tests the program, and its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import functools
import gc
import math
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.lib.report import Report, clocks, smi
from greensched import ALL, REST, Pool

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "09_inference_server"))
from batch import AHEAD, Answer, Batch, Piece
from engine import (
    Engine,
    Place,
    Run,
    Sequence,
    Turn,
    fused,
    interleaved,
    leased,
    prepare,
    separate,
    sized,
    sized_classes,
)
from engine import (
    serve as serve,  # for two_models
)

#: Seconds within which the first token has to come.
FIRST = 0.5
#: The share of a request's times between tokens that has to be within the target, and the share of
#: requests that has to be in time at the knee.
GAPS, IN_TIME = 0.90, 0.99
#: Requests per second that are tried; the search starts at one of them.
RATES = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 33, 36, 40)
MAX_WAITING = 4096
#: What small models run on.
SIMULATED = "simulated:h100x2"
#: Tokens of a cached sequence while passes are measured.
CACHED = 700
#: Green contexts of torch: each ends with its object, also under its streams.
GREEN_CONTEXTS: list[Any] = []


# -- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: seconds from the start, tokens of its prompt, and tokens that it asks for."""

    at: float
    prompt: int
    tokens: int


def poisson(rate: float, seconds: float, seed: int, scale: float = 1.0) -> list[Arrival]:
    """Return random requests; `scale` multiplies their lengths."""
    rng, at, found = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        prompt = min(1280, max(64, int(rng.lognormvariate(6.43, 0.5))))
        tokens = min(240, max(4, int(rng.expovariate(1 / 60))))
        found.append(Arrival(at, max(1, int(prompt * scale)), max(2, int(tokens * scale))))
    return found


def replayed(path: Path, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Return the requests of a part of a trace, in a time in which they have this mean rate."""
    with path.open() as file:
        rows = [
            (datetime.fromisoformat(row["TIMESTAMP"][:26]), row) for row in csv.DictReader(file)
        ]
    wanted = max(2, int(rate * seconds))
    first = random.Random(seed).randrange(max(1, len(rows) - wanted))
    rows = rows[first : first + wanted]
    span = (rows[-1][0] - rows[0][0]).total_seconds() or 1.0
    return [
        Arrival(
            (when - rows[0][0]).total_seconds() / span * seconds,
            min(1280, max(16, int(row["ContextTokens"]))),
            min(240, max(4, int(row["GeneratedTokens"]))),
        )
        for when, row in rows
    ]


class Timed(Sequence):
    """A sequence that keeps the times of its tokens."""

    def __init__(self, prompt: list[int], tokens: int) -> None:
        super().__init__(prompt, tokens)
        self.wanted, self.came = tokens, time.perf_counter()
        self.times: list[float] = []

    def give(self, token: int) -> None:
        if self.left:
            self.times.append(time.perf_counter())
        super().give(token)

    @property
    def ttft(self) -> float:
        """Seconds to the first token; infinite without one."""
        return self.times[0] - self.came if self.times else float("inf")

    @property
    def gaps(self) -> list[float]:
        """Seconds between its tokens."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    def is_in_time(self, target: float) -> bool:
        """Say whether it is complete and within the target."""
        gaps = self.gaps
        return self.is_complete and self.ttft <= FIRST and quantile(gaps, GAPS) <= target

    @property
    def is_complete(self) -> bool:
        """Whether it received all its tokens."""
        return len(self.times) == self.wanted


def quantile(times: Iterable[float], fraction: float) -> float:
    """Return the time below which this fraction of all lies; 0 without any."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0


# -- places ---------------------------------------------------------------------------------------


class Streams:
    """Places by hand: a thread with a stream of torch, and the graphs captured there.

    A place keeps its graphs for all arms that use it.

    Args:
        device: the ordinal of the streams' device.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._made: dict[str, Place] = {}

    def place(self, name: str, make: Callable[[], Any], priority: int = 0) -> Place:
        """Return the place of this name; make it at the first use."""
        if name not in self._made:
            self._made[name] = Stream(lambda: use_stream(self._device, priority)).place(make)
        return self._made[name]

    def green(self, sms: int, make: Callable[[], Any]) -> Place:
        """Return a place on a green context of torch."""
        name = f"green {sms}"
        if name not in self._made:
            self._made[name] = green_stream(self._device, sms).place(make)
        return self._made[name]


def use_stream(device: int, priority: int) -> None:
    """Make a new stream this thread's; nothing without a GPU."""
    import torch

    if torch.cuda.is_available():
        use(torch.cuda.Stream(device, priority=priority))


def use(stream: Any) -> None:
    """Make a stream this thread's current one."""
    import torch

    torch.cuda.set_stream(stream)


class Stream:
    """A thread with a stream, on which passes run; another thread waits for them.

    Args:
        begin: makes the stream the thread's current one.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._thread, self._waits = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._thread.submit(begin).result()

    def place(self, make: Callable[[], Any], ahead: int = AHEAD) -> Place:
        """Return a place with the graphs that `make` captures here."""
        graphs = self._thread.submit(make).result()

        def wait(launched: Future[Answer]) -> Answer:
            answer = launched.result()
            answer.wait()
            return answer

        def run(batch: Batch) -> Awaitable[Answer]:
            launched = self._thread.submit(graphs.launch, batch)
            return asyncio.get_running_loop().run_in_executor(self._waits, wait, launched)

        return held(run, ahead)


def green_stream(device: int, sms: int) -> Stream:
    """Return a stream of a green context of torch."""
    from torch.cuda.green_contexts import GreenContext

    context = GreenContext.create(num_sms=sms, device_id=device)
    GREEN_CONTEXTS.append(context)
    return Stream(lambda: use(context.Stream()))


def held(run: Run, ahead: int = AHEAD) -> Place:
    """Return a place that stays entered."""

    @asynccontextmanager
    async def take() -> AsyncIterator[Turn]:
        yield Turn(run, ahead=ahead)

    return take


def for_each(place: Place) -> Place:
    """Return a place that is entered anew for each pass."""

    @asynccontextmanager
    async def take() -> AsyncIterator[Turn]:
        async with place() as turn:
            yield Turn(turn.run, lambda: False, 1)

    return take


# -- arms -----------------------------------------------------------------------------------------


Serve = Callable[[Engine], Awaitable[None]]
#: Compute a pass and wait for it.
Compute = Callable[[Batch], Awaitable[list[int]]]


class Bench:
    """A model on a device, and the arms that serve it.

    Args:
        model: the model.
        driver: of the pools.
        sms: of the device.
        device: its ordinal.
    """

    def __init__(self, model: Any, driver: str, sms: int, device: int = 0) -> None:
        self.model, self.driver, self.sms, self.device = model, driver, sms, device
        self._streams = Streams(device)

    @asynccontextmanager
    async def plain(self) -> AsyncIterator[Serve]:
        """Plain streams: a thread and a stream for decode steps, and for prompts.

        Fair: passes are whole graphs, so neither waits for the host of the other, and
        CUDA_DEVICE_MAX_CONNECTIONS=32 keeps the streams in different queues.
        """
        decode = self._streams.place("decode", self.model.decode_graphs)
        prefill = self._streams.place("prefill", self.model.prefill_graphs)
        yield lambda engine: separate(engine, decode, prefill)

    @asynccontextmanager
    async def priority(self) -> AsyncIterator[Serve]:
        """Priority streams: as plain streams, and decode steps have the highest priority.

        Fair: the graphs were captured on that stream, so each of their kernels has the priority.
        """
        decode = self._streams.place("decode, first", self.model.decode_graphs, priority=-5)
        prefill = self._streams.place("prefill", self.model.prefill_graphs)
        yield lambda engine: separate(engine, decode, prefill)

    @asynccontextmanager
    async def interval(self, steps: int) -> AsyncIterator[Serve]:
        """Prefill first, on all SMs, with an interval of decode steps between two prompts.

        Fair: a prompt that comes when nothing else is due is read at once, and the interval is
        swept. SGLang's `--prefill-decode-interval` is this.
        """
        place = self._streams.place("all", self.model.all_graphs)
        yield lambda engine: interleaved(engine, place, steps)

    @asynccontextmanager
    async def chunked(self, budget: int) -> AsyncIterator[Serve]:
        """Chunked prefill: a pass has all sequences' next tokens, and a chunk of prompts.

        Fair: the budget counts all tokens, as vLLM's does, and is swept for each target. A chunk
        has the end of a prompt and the begin of the next, so none is half empty. Attention is
        torch's FlashAttention for sequences of different lengths, over the keys in use alone, once
        for the decode rows (whose query heads it groups, and whose keys it splits) and once for
        the chunk. Without a prompt the pass is the decode step of all arms.
        """
        graphs = functools.partial(self.model.fused_graphs, budget)
        place = self._streams.place(f"fused {budget}", graphs)
        yield lambda engine: fused(engine, place, budget)

    @asynccontextmanager
    async def torch_green(self, sms: int) -> AsyncIterator[Serve]:
        """Torch's green contexts: `sms` for decode steps, the others for prompts.

        Fair: it is what torch's documentation shows. On driver 580 each context is a split of its
        own, so the two overlap.
        """
        decode = self._streams.green(sms, self.model.decode_graphs)
        prefill = self._streams.green(self.sms - sms, self.model.prefill_graphs)
        yield lambda engine: separate(engine, decode, prefill)

    @asynccontextmanager
    async def split(self, sms: int) -> AsyncIterator[Serve]:
        """Split the SMs once: `sms` for decode steps, all others for prompts, kept throughout.

        Fair: the partitions are disjoint, nothing is asked for or given back, and the size is
        swept for each target.
        """
        async with (
            Pool([self.device], driver=self.driver) as pool,
            pool.partitions(sms, REST) as (decode, prefill),
        ):
            places = []
            for p, make in (
                (decode, self.model.decode_graphs),
                (prefill, self.model.prefill_graphs),
            ):
                graphs = await p.local(make)
                places.append(held(functools.partial(p.run, graphs.launch)))
            yield lambda engine: separate(engine, *places)

    @asynccontextmanager
    async def leased(self, sms: int) -> AsyncIterator[Serve]:
        """greensched, held: decode keeps `sms` SMs, and each prompt has a lease of the others."""
        async with self._pool(sms) as pool, pool.partition(sms, service="decode") as p:
            graphs = await p.local(self.model.decode_graphs)
            decode = held(functools.partial(p.run, graphs.launch))
            rest = self.sms - sms
            prefill = for_each(leased(pool, "prefill", self.model.prefill_graphs, lambda: rest))
            yield lambda engine: separate(engine, decode, prefill)

    @asynccontextmanager
    async def sized(self, sms: int) -> AsyncIterator[Serve]:
        """greensched, sized: leases that change with the load.

        It is the server's default: a decode step of few sequences has `sms` SMs, of many all once
        no prompt has come for a while; a prompt has all while no sequence grows, else the others.
        """
        async with self._pool(sms) as pool:

            def serve(engine: Engine) -> Awaitable[None]:
                return separate(engine, *sized(pool, self.model, engine, sms, self.sms))

            yield serve

    @asynccontextmanager
    async def _pool(self, sms: int) -> AsyncIterator[Pool]:
        """Open a pool whose graphs are captured; raise if others were captured in traffic."""
        services = sized_classes(sms, self.sms)
        async with Pool([self.device], driver=self.driver, services=services) as pool:
            await prepare(pool, self.model)
            yield pool
            if made := pool.statistics().values_made:
                raise RuntimeError(f"graphs were captured in traffic, for {made} sets of SMs")

    def arm(self, name: str) -> Any:
        """Return the arm of a name such as `plain` or `split:24`, to be entered."""
        kind, _, parameter = name.partition(":")
        return getattr(self, kind)(*([int(parameter)] if parameter else []))


# -- a run ----------------------------------------------------------------------------------------


async def run(model: Any, serves: list[Serve], arrivals: list[Arrival]) -> dict[str, Any]:
    """Serve requests and return what their clients would have measured.

    Each way to serve has an engine; a request goes to the one with the fewest sequences.
    """
    engines = [Engine(model.shape, MAX_WAITING) for _ in serves]
    serving = [serve(engine) for serve, engine in zip(serves, engines, strict=True)]
    requests = [(arrival, lambda: min(engines, key=load_of)) for arrival in arrivals]
    sequences, seconds, late = await served(engines, serving, requests)
    return {**figures(sequences, seconds), "late_ms": 1e3 * late}


async def served(
    engines: list[Engine],
    loops: list[Awaitable[None]],
    requests: list[tuple[Arrival, Callable[[], Engine]]],
) -> tuple[list[Timed], float, float]:
    """Run the loops of engines while requests arrive, each at the engine that is chosen then.

    Requests that are late are given up after the last one came: they are not in time.

    Returns:
        The sequences of the requests, the seconds that they took, and how late one was submitted.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(500) for _ in range(arrival.prompt)] for arrival, _ in requests]
    gc.collect()
    gc.freeze()  # else a collection of all of torch's objects would delay some tokens by 20 ms
    serving = [asyncio.ensure_future(loop) for loop in loops]
    sequences: list[Timed] = []
    began, late = time.perf_counter(), 0.0
    for (arrival, engine), prompt in zip(requests, prompts, strict=True):
        await asyncio.sleep(max(0.0, began + arrival.at - time.perf_counter()))
        late = max(late, time.perf_counter() - began - arrival.at)
        sequences.append(Timed(prompt, arrival.tokens))
        engine().submit(sequences[-1])
    idle = asyncio.gather(*(engine.wait(lambda e=engine: e.is_idle) for engine in engines))
    either = functools.partial(asyncio.wait, (*serving, idle), return_when=asyncio.FIRST_COMPLETED)
    await either(timeout=FIRST + 2)
    seconds = time.perf_counter() - began
    for sequence in sequences:
        sequence.cancel()
    await either()
    for task in (*serving, idle):
        task.cancel()
    ends = await asyncio.gather(*serving, idle, return_exceptions=True)
    for ended in ends[:-1]:
        if not isinstance(ended, asyncio.CancelledError):
            raise RuntimeError("the loop of the engine ended") from ended
    return sequences, seconds, late


def figures(sequences: list[Timed], seconds: float) -> dict[str, Any]:
    """Return what the clients of sequences would have measured."""
    done = [s for s in sequences if s.is_complete]
    gaps = [gap for s in done for gap in s.gaps]
    return {
        "requests": len(sequences),
        "complete": len(done),
        **{f"in time at {t}": sum(s.is_in_time(t / 1e3) for s in done) for t in (12, 20)},
        "ttft": [1e3 * quantile([s.ttft for s in done], part) for part in (0.5, 0.99)],
        "between": [1e3 * quantile(gaps, part) for part in (0.5, 0.9, 0.99)],
        "tokens/s": sum(len(s.times) for s in sequences) / seconds,
    }


def load_of(engine: Engine) -> int:
    """Return how many sequences an engine has."""
    return len(engine.waiting) + len(engine.reading) + len(engine.growing)


def is_kept(found: dict[str, Any], target: int) -> bool:
    """Say whether enough of a run's requests are in time."""
    return bool(found[f"in time at {target}"] >= IN_TIME * found["requests"])


# -- passes alone ---------------------------------------------------------------------------------


async def fill(model: Any, read: Compute, sequences: int) -> None:
    """Read a prompt of `CACHED` tokens into each of the first slots."""
    rng = random.Random(1)
    most = model.shape.prefill_sizes[-1]
    for slot in range(sequences):
        tokens = [rng.randrange(500) for _ in range(min(CACHED, most))]
        await read(Batch(pieces=[Piece(slot, tokens, 0, is_last=True)]))


async def agreement(step: Compute, read: Compute) -> float:
    """Return the share of tokens that are the same when all is read anew for each.

    In 16 bits it is not 1 with random weights, whose best tokens are nearly equal.
    """
    rng, equal, tokens = random.Random(2), 0, 8
    prompts = [[rng.randrange(500) for _ in range(length)] for length in (20, 90, 120)]
    for slot, prompt in enumerate(prompts):
        found = await read(Batch(pieces=[Piece(slot, prompt, 0, is_last=True)]))
        for _ in range(tokens - 1):
            found = [*found, *await step(Batch([slot]))]
        for number, token in enumerate(found):
            again = Piece(len(prompts), prompt + found[:number], 0, is_last=True)
            equal += await read(Batch(pieces=[again])) == [token]
    return equal / tokens / len(prompts)


async def repeated(run: Compute, batch: Batch, times: int) -> list[float]:
    """Return the milliseconds of each repetition, one after another."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        await run(batch)
        found.append(1e3 * (time.perf_counter() - began))
    return found


def on_the_thread(graphs: Any, batch: Batch, times: int = 15) -> float:
    """Return the milliseconds of a pass where one follows another without the event loop."""
    began = time.perf_counter()
    for _ in range(times):
        graphs.compute(batch)
    return 1e3 * (time.perf_counter() - began) / times


async def passes(bench: Bench, sms: int, sequences: int = 16) -> dict[str, Any]:
    """Measure passes on a split: alone, and decode steps beside prompts; times in ms."""
    model, found = bench.model, dict[str, Any]()
    length = model.shape.prefill_sizes[-2]
    prompt = Batch(pieces=[Piece(sequences, [1] * length, 0, is_last=True)])
    async with AsyncExitStack() as entered:
        pool = await entered.enter_async_context(Pool([bench.device], driver=bench.driver))
        if sms < bench.sms:
            sizes = pool.partitions(sms, REST)
            decode, prefill = await entered.enter_async_context(sizes)
        else:
            decode = prefill = await entered.enter_async_context(pool.partition(ALL))
        began = time.perf_counter()
        steps = await decode.local(model.decode_graphs)
        reads = await prefill.local(model.prefill_graphs)
        found["captured in s"] = time.perf_counter() - began
        found["SMs"] = [decode.sm_count, prefill.sm_count]
        step, read = (
            functools.partial(decode.run, steps.compute),
            functools.partial(prefill.run, reads.compute),
        )
        await fill(model, read, sequences)
        for rows in (1, sequences, model.shape.slots):
            batch = Batch(list(range(rows)))
            found[f"decode of {rows}"] = quantile(await repeated(step, batch, 15), 0.5)
            if bench.driver == "cuda":
                thread = await decode.run(on_the_thread, steps, batch)
                found[f"decode of {rows}, on its thread"] = thread
                own = 1e3 * await decode.run(steps.seconds, batch, 15)
                found[f"decode of {rows}, graph alone"] = own
        for size in model.shape.prefill_sizes[1::2]:
            one = Batch(pieces=[Piece(sequences, [1] * size, 0, is_last=True)])
            found[f"prefill of {size}"] = quantile(await repeated(read, one, 5), 0.5)
        if sms < bench.sms:
            reading = asyncio.ensure_future(repeated(read, prompt, 6))
            beside = []
            while not reading.done():
                beside += await repeated(step, Batch(list(range(sequences))), 1)
            found["decode beside prefill, p50 and p90"] = [
                quantile(beside, 0.5), quantile(beside, 0.9)
            ]  # fmt: skip
            found[f"prefill of {length} beside decode"] = quantile(await reading, 0.5)
        else:
            found["agreement"] = await agreement(step, read)
    return found


async def overhead(bench: Bench, sequences: int = 16, tokens: int = 150) -> dict[str, Any]:
    """Measure the times between tokens of the engine without prompts, beside the graph's own."""
    found = {}
    for name in ("plain", "leased:48", "sized:48"):
        async with bench.arm(name) as serve:
            arrivals = [Arrival(0.0, 64, tokens) for _ in range(sequences)]
            kept = await run(bench.model, [serve], arrivals)
            found[name] = kept["between"][0]
    return found


# -- the search -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Search:
    """An arm, the target for which its knee is searched, and the rate at which that starts."""

    arm: str
    target: int
    start: float

    @classmethod
    def parse(cls, text: str) -> Search:
        """Read `arm@target=start`, such as `split:24@20=18`."""
        arm, _, rest = text.partition("@")
        target, _, start = rest.partition("=")
        return cls(arm, int(target), float(start or 12))


#: Arms on partitions of a pool. The others are on streams of torch.
POOL_ARMS = {"split", "leased", "sized"}
#: What is searched by default, the most important first.
DEFAULT = """
chunked:512@20=30 split:32@20=30 sized:32@20=28 chunked:160@12=18 split:64@12=18 sized:64@12=16
priority@20=20 chunked:448@20=30 chunked:384@20=30 chunked:192@12=16 chunked:128@12=14 plain@20=4
split:40@20=28 split:24@20=20 split:56@12=12 split:72@12=16 priority@12=2 plain@12=2
leased:32@20=28 leased:64@12=16 chunked:256@20=24 chunked:1024@20=2 torch_green:32@20=2
interval:8@20=3 interval:4@20=3 interval:1@20=2
"""


Arrivals = Callable[[float, int], list[Arrival]]


async def search(
    start: float, keeps: Callable[[float], Awaitable[bool]], rates: Iterable[float]
) -> float:
    """Return the highest rate that is kept, from the start upwards or downwards; 0: none is."""
    grid = sorted({*rates, start})
    at = grid.index(start)
    if not await keeps(grid[at]):
        while at > 0:
            at -= 1
            if await keeps(grid[at]):
                return grid[at]
        return 0.0
    while at + 1 < len(grid) and await keeps(grid[at + 1]):
        at += 1
    return grid[at]


class OutOfTime(Exception):
    """The time of the program does not suffice for another run."""


async def knees(
    benches: list[Bench],
    searches: list[Search],
    arrivals: Arrivals,
    seeds: int,
    report: Report,
    cost: float,
) -> None:
    """Search all knees, as far as the time suffices; report each run.

    With a bench on each of several devices the requests are shared out, and the rates are of all.
    """
    rates = [rate * len(benches) for rate in RATES]
    runs: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for what in searches:
        try:
            async with AsyncExitStack() as entered:
                serves = [await entered.enter_async_context(b.arm(what.arm)) for b in benches]

                async def keeps(
                    rate: float, what: Search = what, serves: list[Serve] = serves
                ) -> bool:
                    for kept in runs:
                        if (kept["arm"], kept["rate"]) == (what.arm, rate):
                            return is_kept(kept, what.target)
                    if report.left < cost * seeds:
                        raise OutOfTime
                    parts = [
                        await run(benches[0].model, serves, arrivals(rate, seed))
                        for seed in range(seeds)
                    ]
                    runs.append({"arm": what.arm, "rate": rate, **merged(parts)})
                    report.put("runs", runs)
                    print(line(runs[-1]), flush=True)
                    return is_kept(runs[-1], what.target)

                knee = await search(what.start, keeps, rates)
            found.append({"arm": what.arm, "target": what.target, "knee": knee})
            report.put("knees", found)
            print(f"{what.arm}, {what.target} ms: knee {knee:g}/s; {clocks()}", flush=True)
        except OutOfTime:
            print(f"no time is left for {what}", flush=True)
            return
        except Exception:
            report.fail(what.arm)


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the requests of several runs; other figures are those of the median run."""
    counts = ("requests", "complete", "in time at 12", "in time at 20")
    middle = sorted(parts, key=lambda part: part["ttft"][0])[len(parts) // 2]
    return {**middle, **{name: sum(part[name] for part in parts) for name in counts}}


def line(found: dict[str, Any]) -> str:
    """Return a line of the table of runs."""
    ttft = " / ".join(f"{ms:.0f}" for ms in found["ttft"])
    between = " / ".join(f"{ms:.1f}" for ms in found["between"])
    in_time = [f"{found[f'in time at {target}']}" for target in (12, 20)]
    return (
        f"{found['arm']:14}{found['rate']:>5g}/s {found['requests']:>5} requests; in time at 12: "
        f"{in_time[0]:>4}, at 20: {in_time[1]:>4}; TTFT {ttft:>12}; between {between:>20}; "
        f"{found['tokens/s']:.0f} tokens/s; late {found['late_ms']:.1f} ms"
    )


def interval(kept: int, requests: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, by Wilson's formula."""
    z, share = 1.96, kept / requests
    middle = share + z * z / (2 * requests)
    around = z * math.sqrt(share * (1 - share) / requests + (z / (2 * requests)) ** 2)
    whole = 1 + z * z / requests
    return min(share, (middle - around) / whole), max(share, (middle + around) / whole)


def draw_shares(axis: Any, arm: str, points: list[tuple[float, int, int]]) -> None:
    """Draw the share in time at each rate, of a rate, requests in time and requests."""
    points = sorted(points)
    shares = [kept / requests for _, kept, requests in points]
    ends = [interval(kept, requests) for _, kept, requests in points]
    around = [
        [share - low for share, (low, _) in zip(shares, ends, strict=True)],
        [high - share for share, (_, high) in zip(shares, ends, strict=True)],
    ]
    axis.errorbar([rate for rate, _, _ in points], shares, around, marker="o", label=arm)


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the share of requests in time against the rate, for each target, with its interval."""
    from greensched.capacity.plot import pyplot, write

    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, target in zip(axes, (20, 12), strict=True):
        for arm in dict.fromkeys(run["arm"] for run in found["runs"]):
            runs = [run for run in found["runs"] if run["arm"] == arm]
            points = [(r["rate"], r[f"in time at {target}"], r["requests"]) for r in runs]
            draw_shares(axis, arm, points)
        axis.axhline(IN_TIME, color="grey", linewidth=0.5)
        axis.set(title=f"{target} ms between tokens", xlabel="requests per second")
    axes[0].set_ylabel("requests in time")
    axes[1].legend(fontsize="small")
    write(figure, path)


# -- the program ----------------------------------------------------------------------------------


async def check(bench: Bench, report: Report) -> None:
    """Measure passes on several splits, and times between tokens without prompts."""
    for sms in (bench.sms, 24, 32, 48, 64, 80):
        try:
            report.put(f"passes, {sms} SMs", await passes(bench, sms))
            print(sms, report.found[f"passes, {sms} SMs"], flush=True)
        except Exception:
            report.fail(f"passes, {sms} SMs")
    try:
        report.put("overhead", await overhead(bench))
        print(report.found["overhead"], flush=True)
    except Exception:
        report.fail("overhead")


def require_torch(options: argparse.Namespace) -> None:
    """End the program with one line if it needs torch, which is not installed."""
    arms = {wanted.arm.partition(":")[0] for wanted in options.search}
    if find_spec("torch") is None and not (options.small and arms <= POOL_ARMS):
        sys.exit(
            "this needs torch: pip install torch; without it only --small with --search of the "
            "arms split and sized runs"
        )


def load(options: argparse.Namespace) -> list[Bench]:
    """Return the benchmark's model with its driver, once on each device."""
    if options.small:
        import small

        return [Bench(small.Small(), SIMULATED, 132, device) for device in range(options.devices)]
    import torch
    from model import load as load_model

    return [
        Bench(
            load_model(options.model, device=f"cuda:{device}"),
            "cuda",
            torch.cuda.get_device_properties(device).multi_processor_count,
            device,
        )
        for device in range(options.devices)
    ]


def parser(program: str, text: str, run: float, searched: str) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks of knees have in common.

    Args:
        program: the module.
        text: what it does.
        run: seconds of a run by default.
        searched: what is searched by default.
    """
    made = argparse.ArgumentParser(prog=f"python -m {program}", description=text)
    made.add_argument("--seconds", type=float, default=520, help="for everything")
    made.add_argument("--run", type=float, default=run, help="seconds of arrivals in a run")
    made.add_argument("--seeds", type=int, default=1, help="runs at each rate")
    made.add_argument(
        "--search", type=Search.parse, nargs="*", metavar="ARM@MS=RATE",
        default=[Search.parse(each) for each in searched.split()],
    )  # fmt: skip
    made.add_argument("--small", action="store_true", help="small models in numpy, simulated")
    made.add_argument("--json", type=Path, metavar="FILE")
    made.add_argument("--plot", type=Path, metavar="FILE")
    return made


#: What a benchmark of knees measures: its models with their arms.
Loaded = TypeVar("Loaded")


def measure(
    options: argparse.Namespace,
    load: Callable[[argparse.Namespace], Loaded],
    search: Callable[[Loaded, Report, float], Coroutine[Any, Any, None]],
    draw: Callable[[dict[str, Any], Path], None],
) -> int:
    """Load models, search knees, and write and draw what was found; return the exit status.

    `search` is given what `load` returns, the report, and by what lengths are multiplied.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    require_torch(options)
    report = Report(options.json, options.seconds)
    began = time.perf_counter()
    loaded = load(options)
    report.put("machine", smi("name,driver_version,power.limit,clocks.max.sm"))
    print(f"loaded in {time.perf_counter() - began:.1f} s; {report.found['machine']}", flush=True)
    asyncio.run(search(loaded, report, 0.1 if options.small else 1.0))
    if options.plot is not None and "runs" in report.found:
        draw(report.found, options.plot)
    report.close()
    return int(bool(report.found["errors"]))


def main() -> int:
    made = parser("benchmarks.gpu.engine", __doc__.split("\n")[0], 8, DEFAULT)
    made.add_argument("--trace", type=Path, help="a file of Azure's trace; default: at random")
    made.add_argument("--model", help="as of the inference server")
    made.add_argument(
        "--devices", type=int, default=1, metavar="N",
        help="serve a model on each of the first N devices, in one process; rates are of all",
    )  # fmt: skip
    made.add_argument("--check", action="store_true", help="measure passes first")
    options = made.parse_args()

    async def everything(benches: list[Bench], report: Report, scale: float) -> None:
        def arrivals(rate: float, seed: int) -> list[Arrival]:
            if options.trace is not None:
                return replayed(options.trace, rate, options.run, seed)
            return poisson(rate, options.run, seed, scale)

        if options.check:
            await check(benches[0], report)
        cost = options.run + FIRST + 3
        await knees(benches, options.search, arrivals, options.seeds, report, cost)

    return measure(options, load, everything, draw)


if __name__ == "__main__":
    raise SystemExit(main())
