"""Simulation of the measured LLM engine: decode steps over all slots, prompts one by one.

The inputs are measured times, sizes, and arrival distributions: the time of a step and of a prompt
alone on all SMs, and of a prompt on 84 SMs (docs/measurements/h200-580/engine.txt); the
time of a prompt by its length (h100-580/tables.json); the bytes of the weights and of the cache.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from greensched.capacity.baselines import Streams
from greensched.capacity.latency_tables import SpeedupCurve
from greensched.capacity.machine import Machine
from greensched.capacity.strategies import Client, Pieces, pool_of
from greensched.capacity.validation.measured import Key
from greensched.capacity.validation.two_users import percentile
from greensched.capacity.workload import ServiceProfile
from greensched.device.launch import LaunchConfig
from greensched.driver.simulated.contention import clock
from greensched.driver.simulated.device_models import PRESETS, DeviceModel
from greensched.execution.bound_launch import BoundLaunch
from greensched.typing import Cost

#: Seconds of a run, the mean length of a prompt and of an output, and the standard deviation of the
#: logarithm of a prompt's length (an assumption, because only the mean was reported).
SECONDS, PROMPT, OUTPUT, SIGMA = 8.0, 700, 60, 0.5
#: The number of requests in a run, by GPU and rate.
NUMBERS = {("h200", 14): 128, ("h200", 20): 173, ("h100", 10): 93, ("h100", 18): 158}
#: The unit of the prompts' graph lengths, and the most multiples of it.
GRAPH, GRAPHS = 256, 5
#: Slots of the decode graph; and layers, each of which is one kernel here.
SLOTS, LAYERS = 32, 32
#: Seconds of a step, and of 1024 tokens of a prompt, alone on all SMs.
STEP_S = {"h200": 0.0077, "h100": 0.0098}
PROMPT_S = 0.025
#: Milliseconds of 1024 tokens by SMs, as measured there, and waves of a layer's products.
SMS, PROMPT_MS = (1, 84, 132), (84 * 42.0, 42.0, 25.0)
PROMPT_WAVES = 4
#: Seconds of a prompt by its length, as a fraction of those for 1024 tokens (same source).
BY_LENGTH = ((0, 0.0), (256, 1.02 / 3.16), (512, 1.64 / 3.16), (1024, 1.0), (1280, 1.25))
#: Bytes that a step reads: the weights, and the cache of 32 slots of 1536 tokens. Bytes of a prompt
#: of 1024 tokens, fitted to the gaps between tokens of the H100 at 10/s in partitions.
STEP_BYTES, PROMPT_BYTES = 22.4e9, 60e9
#: Watts of an SM in matrix products (docs/measurements/h100-580/bandwidth.json), and of an SM
#: that reads memory.
PRODUCT_W, READ_W = 9.8, 1.8
#: Targets in seconds for the first token and for the gaps of a good request.
FIRST_S, BETWEEN_S = 0.5, 0.020


@dataclass(frozen=True)
class PromptLayers(SpeedupCurve):
    """A prompt's kernels: products that fill the device in waves, measured at their own clock."""

    board: DeviceModel = PRESETS["h100"]

    def config(self, sms: int, threads: int = 2048, _waves: int = 1) -> LaunchConfig:
        """Return a grid of several waves."""
        return LaunchConfig(grid=PROMPT_WAVES * threads // 512 * sms, block=512)

    def cost(self, seconds: float, sms: int) -> Cost:
        """Return the cost of a layer that takes these seconds on all SMs."""
        own = clock(PRODUCT_W * sms, self.board.idle_watts, self.board.power_limit)
        return Cost(
            sm_ns=1e9 * seconds * self.slowdown(sms) * sms * own,
            dram_bytes=seconds / PROMPT_S * PROMPT_BYTES,
            sm_watts=PRODUCT_W,
        )


@dataclass(frozen=True)
class StepLayers(SpeedupCurve):
    """A step's kernels, which read weights and cache, and leave space on every SM."""

    board: DeviceModel = PRESETS["h100"]

    def config(self, sms: int, _threads: int = 2048, _waves: int = 1) -> LaunchConfig:
        """Return a block for each SM."""
        return LaunchConfig(grid=sms, block=512)

    def cost(self, seconds: float, _sms: int) -> Cost:
        """Return the cost of a layer that takes these seconds on all SMs."""
        nbytes = STEP_BYTES / LAYERS
        fixed = max(0.0, 1e9 * (seconds - nbytes / self.board.dram_bandwidth))
        return Cost(fixed_ns=fixed, sm_ns=1.0, dram_bytes=nbytes, sm_watts=READ_W)


@dataclass
class Request:
    """One request: its arrival, its length, its tokens, and the time of each token."""

    at: float
    prompt: int
    output: int
    tokens: list[float] = field(default_factory=list)


def requests(gpu: str, rate: int) -> list[Request]:
    """Return the requests of a run: the measured number, at times of a Poisson process."""
    rng, found = random.Random(f"engine {rate}"), []
    mean = math.log(PROMPT) - SIGMA**2 / 2
    for at in sorted(rng.uniform(0, SECONDS) for _ in range(NUMBERS[gpu, rate])):
        length = min(GRAPH * GRAPHS, rng.lognormvariate(mean, SIGMA))
        output = max(2, round(rng.expovariate(1 / OUTPUT)))
        found.append(Request(at, GRAPH * math.ceil(length / GRAPH), output))
    return found


def prompt_seconds(tokens: float) -> float:
    """Return the seconds of a prompt on all SMs, alone."""
    for (n0, s0), (n1, s1) in pairwise(BY_LENGTH):
        if tokens <= n1:
            return PROMPT_S * (s0 + (s1 - s0) * (tokens - n0) / (n1 - n0))
    return PROMPT_S * tokens / 1024


class Engine:
    """The engine's two loops: prompts one by one, and steps while slots are in use."""

    def __init__(self, gpu: str, rate: int) -> None:
        self.gpu = gpu
        self.step = STEP_S[gpu]
        self.requests = requests(gpu, rate)
        self._queue: deque[Request] = deque()
        self._active: list[Request] = []
        self._came = asyncio.Event()
        self._joined = asyncio.Event()

    async def serve(self, machine: Machine, prefill: Client, decode: Client) -> None:
        """Serve all requests on two clients."""
        tasks = [
            asyncio.ensure_future(each) for each in (self._arrive(machine), self._read(prefill))
        ]
        tasks.append(asyncio.ensure_future(self._write(machine, decode)))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.result()

    async def _arrive(self, machine: Machine) -> None:
        for request in self.requests:
            await asyncio.sleep(max(0.0, request.at - machine.now() / 1e9))
            self._queue.append(request)
            self._came.set()

    async def _read(self, client: Client) -> None:
        for _ in self.requests:
            while not self._queue or len(self._active) >= SLOTS:
                self._came.clear()
                await self._came.wait()
            request = self._queue.popleft()
            each = round(1e9 * prompt_seconds(request.prompt) / LAYERS)
            await client.run((each,) * LAYERS)
            self._active.append(request)  # the next step produces its first token
            self._joined.set()

    async def _write(self, machine: Machine, client: Client) -> None:
        each = round(1e9 * self.step / LAYERS)
        left = len(self.requests)
        while left:
            if not self._active:
                self._joined.clear()
                await self._joined.wait()
            batch = list(self._active)
            await client.run((each,) * LAYERS)
            for request in batch:
                request.tokens.append(machine.now() / 1e9)
                if len(request.tokens) >= request.output:
                    self._active.remove(request)
                    left -= 1
            self._came.set()

    def one_thread(self, chunk: int) -> None:
        """Serve all requests in one thread, with chunks fused with steps; 0 means prompts first."""
        now, waiting, read = 0.0, deque(self.requests), 0
        active: list[Request] = []
        while waiting or active:
            due = bool(waiting) and waiting[0].at <= now and len(active) < SLOTS
            if not due and not active:
                now = waiting[0].at
                continue
            step = self.step if active else 0.0
            done: Request | None = None
            if due:
                request = waiting[0]
                part = min(chunk or request.prompt, request.prompt - read)
                piece = prompt_seconds(part)
                now, read = (now + piece, read + part) if chunk else (now + piece, request.prompt)
                if not chunk:
                    step = 0.0
                if read >= request.prompt:
                    done, read = waiting.popleft(), 0
            if active and step:
                now += step
                for each in list(active):
                    each.tokens.append(now)
                    if len(each.tokens) >= each.output:
                        active.remove(each)
            if done is not None:
                if chunk:
                    done.tokens.append(now)
                active.append(done)

    def figures(self) -> Iterator[tuple[str, float]]:
        """Yield the percentiles of first tokens and gaps in microseconds, and of good requests."""
        first = [r.tokens[0] - r.at for r in self.requests]
        gaps = [_gaps(r) for r in self.requests]
        between = [gap for each in gaps for gap in each]
        yield "first p50", 1e6 * percentile(first, 0.5)
        yield "first p99", 1e6 * percentile(first, 0.99)
        yield "between p50", 1e6 * percentile(between, 0.5)
        yield "between p99", 1e6 * percentile(between, 0.99)
        good = [
            seconds <= FIRST_S and percentile(each, 0.9) <= BETWEEN_S
            for seconds, each in zip(first, gaps, strict=True)
        ]
        yield "good@20", float(sum(good))


def _gaps(request: Request) -> list[float]:
    return [b - a for a, b in pairwise(request.tokens)]


class _Bound:
    """A held partition, where layers are bound launches."""

    def __init__(self, bound: BoundLaunch) -> None:
        self._bound = bound

    async def run(self, pieces: Pieces) -> None:
        """Run layers one after another."""
        self._bound.set(0, pieces[0])
        for _ in pieces[1:]:
            self._bound()
        await self._bound.submit()


def predict(gpu: str, rate: int, arm: str) -> Iterator[tuple[Key, float]]:
    """Predict the figures of one arm at a rate."""
    engine = Engine(gpu, rate)
    kind, _, number = arm.partition(" ")
    if kind in ("chunked", "prefill"):
        engine.one_thread(int(number) if kind == "chunked" else 0)
    else:
        _on_device(engine, kind, int(number or 0))
    for figure, value in engine.figures():
        yield (gpu, "engine", f"{rate}/s", arm, figure), value


def _on_device(engine: Engine, kind: str, split: int) -> None:
    board, source = PRESETS[engine.gpu], "h200-580/engine.txt"
    step = StepLayers("engine-decode", (1,), (1.0,), False, source, board=board)
    prompt = PromptLayers("engine-prefill", SMS, PROMPT_MS, True, source, board=board)
    profiles = {
        "decode": ServiceProfile(name="decode", role="loop", curve=step, priority=1),
        "prefill": ServiceProfile(name="prefill", role="loop", curve=prompt),
    }
    machine = Machine(engine.gpu, profiles, {}, 1)
    strategy = Streams(name=kind, prioritised=kind == "priority")
    if not split:
        strategy.prepare(machine)

    async def main() -> None:
        end = machine.begin()
        async with _clients(machine, strategy, split) as (prefill, decode):
            await engine.serve(machine, prefill, decode)
        end()

    try:
        machine.clock.run(main)
    finally:
        machine.close()


@asynccontextmanager
async def _clients(
    machine: Machine, strategy: Streams, split: int
) -> AsyncIterator[tuple[Client, Client]]:
    services = machine.services
    if not split:
        async with strategy.open(machine) as clients:
            yield clients(0, services["prefill"]), clients(0, services["decode"])
        return
    async with pool_of(machine) as pool:
        rest = machine.sms[0] - split
        async with pool.partitions(split, rest) as (small, large):
            made = [
                _Bound(p.bind(machine.configs[name][0], machine.kernels[name], 0))
                for name, p in (("prefill", large), ("decode", small))
            ]
            yield made[0], made[1]
