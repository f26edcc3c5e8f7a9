"""A torch model in a partition: its results, its SMs, and its latency beside training.

`python -m benchmarks.gpu.torch [--driver cuda|simulated:h200] [--seconds 120] [--json FILE]`

The model is a small transformer (random weights); a request is one forward pass, awaited on the
event loop. Beside it runs a training loop of large layers, in another partition or on another
stream, or a canary, a kernel that is bound by arithmetic. The baseline is torch's streams and one
thread for each user, as a program without partitions does it. Three questions:

1. *Results*: the output on 16 SMs, and on other sizes, is bit-equal on every partition of that
   size, each time, also beside training; and near that of the whole GPU, by the norm of the
   difference over the norm. The dtype's tolerance is the rtol of `torch.testing`.
2. *SMs*: the canary on the complement keeps 0.95 of the speed that it has there alone.
3. *Latency*: the p99 beside training is at most 1.15 times that alone on the same SMs. Training has
   all other SMs, or few: partitions share the board's power, so the clock of the SMs is read
   meanwhile, and the time of the pass on the GPU, by events around it.

With CUDA graphs of a forward pass and of a training step, and without. On a simulated GPU torch
runs on the CPU: that tests the program, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import greensched.integrations.torch  # noqa: F401  sets torch's current stream in p.run
from benchmarks.gpu.sharing import Measured, Slice
from benchmarks.gpu.strategies import Held, OnStream, Progress, RawStreams, blocking
from benchmarks.gpu.workloads import KERNELS, Launch
from benchmarks.lib.report import Report, clocks
from benchmarks.lib.timing import Comparison, MachineLoad, Row, Samples, table
from greensched import REST, Device, LaunchConfig, Partition, Pool
from greensched import driver as drivers
from greensched.driver.interface import Driver
from greensched.driver.simulated import SimulatedDriver
from greensched.kernels import matmul
from greensched.typing import Size

SMS = (16, 48)
#: The size of the second and third question; and that of a training that leaves power to others.
JUDGED, FEW = 48, 16
ROUNDS = 6
#: The most seconds that a wait may take.
PATIENCE = 60.0
#: The dtype of the second and third question.
USUAL = torch.bfloat16 if torch.cuda.is_available() else torch.float32
#: Source: torch.testing.assert_close, its table of rtol.
TOLERANCE = {torch.float32: 1.3e-6, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
ON_GPU = torch.cuda.is_available()
#: The model's tokens, width and layers; training's rows and width. Small on a CPU.
TOKENS, WIDTH, LAYERS = (1024, 1024, 6) if ON_GPU else (16, 32, 1)
HEAD = 64 if ON_GPU else 16
BATCH, WIDE = (8192, 4096) if ON_GPU else (32, 64)
#: The canary's size: some 2 ms on the whole GPU, so that it never waits for the host.
M, K, PASSES = (1536, 64, 96) if ON_GPU else (512, 64, 216)

#: Submits work on torch's current stream.
Submit = Callable[[], None]
#: Runs one forward pass, and waits for it.
Request = Callable[[], Awaitable[Any]]


def device() -> str:
    return "cuda" if ON_GPU else "cpu"


def settled() -> None:
    """Wait for torch's current stream: what it computes is used on other streams."""
    if ON_GPU:
        torch.cuda.current_stream().synchronize()


def captured(submit: Submit) -> Submit:
    """Capture a CUDA graph on torch's current stream; return its replay. Blocks."""
    for _ in range(3):
        submit()
    if not ON_GPU:
        return submit
    settled()
    graph = torch.cuda.CUDAGraph()
    # Threads of a pool call the driver meanwhile: a capture must not forbid that.
    current = torch.cuda.current_stream()
    with torch.cuda.graph(graph, stream=current, capture_error_mode="thread_local"):
        submit()
    settled()
    return graph.replay


class Layer(torch.nn.Module):
    """Attention and a perceptron, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        rows, tokens, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, tokens, 3, WIDTH // HEAD, HEAD)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, WIDTH))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class Model:
    """A transformer's forward pass, and its input. Creating one blocks."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(7)
        layers = torch.nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self._model = layers.to(device(), dtype).eval()
        self._x = torch.randn(4, TOKENS // 4, WIDTH, device=device(), dtype=dtype)
        settled()

    def forward(self) -> Any:
        """Run it on torch's current stream."""
        with torch.no_grad():
            return self._model(self._x)

    def submit(self) -> None:
        """Run it, and drop its output."""
        self.forward()


class Training:
    """Steps of a loop that fills the GPU: large layers, forward, backward, update. Blocks."""

    def __init__(self) -> None:
        torch.manual_seed(8)
        dtype = torch.bfloat16 if ON_GPU else torch.float32
        layers = [torch.nn.Linear(WIDE, WIDE, bias=False) for _ in range(4)]
        self._model = torch.nn.Sequential(*layers).to(device(), dtype)
        self._x = torch.randn(BATCH, WIDE, device=device(), dtype=dtype)
        settled()

    def step(self) -> None:
        """Run one step on torch's current stream."""
        self._model.zero_grad(set_to_none=True)
        self._model(self._x).square().mean().backward()
        with torch.no_grad():
            for weights in self._model.parameters():
                weights.add_(weights.grad, alpha=-1e-6)


class Timed:
    """A forward pass between two events on torch's current stream."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 if ON_GPU else 0)]

    def __call__(self) -> None:
        for event in self._events[:1]:
            event.record()
        self._submit()
        for event in self._events[1:]:
            event.record()

    def seconds(self) -> float:
        """Return the last pass's seconds on the GPU, once it is done; nan without a GPU."""
        if not self._events:
            return float("nan")
        first, last = self._events
        return float(first.elapsed_time(last)) / 1e3


class Thread:
    """The baseline: a thread with a torch stream of its own."""

    def __init__(self, priority: int = 0) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._stream = torch.cuda.Stream(priority=priority) if ON_GPU else None

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the stream, and wait for what it submitted there."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._call, function, args)

    def _call(self, function: Callable[..., Any], args: Any) -> Any:
        with torch.cuda.stream(self._stream):  # None without a GPU: nothing
            result = function(*args)
            settled()
        return result

    async def train(self, step: Submit, stop: Callable[[], bool], done: Progress) -> None:
        """Run steps without pause; two are in flight at once."""
        await self.run(self._steps, step, stop, done)

    def _steps(self, step: Submit, stop: Callable[[], bool], done: Progress) -> None:
        events = deque[Any]()
        while not stop():
            step()
            if ON_GPU:
                events.append(torch.cuda.current_stream().record_event())
                if len(events) > 1:
                    events.popleft().synchronize()
            done.at.append(time.perf_counter())

    def close(self) -> None:
        self._thread.shutdown(wait=False)


async def trained(p: Partition, step: Submit, stop: Callable[[], bool], done: Progress) -> None:
    """Run steps in a partition: two calls of `p.run` are in flight at once."""
    jobs = deque[Any]()
    while not stop():
        jobs.append(p.run(step))
        if len(jobs) > 1:
            await jobs.popleft()
            done.at.append(time.perf_counter())
    while jobs:
        await jobs.popleft()


async def timed(request: Request, seconds: float) -> AsyncIterator[float]:
    """Make requests one after another for so many seconds; yield what each took."""
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        await request()
        yield time.perf_counter() - began


@dataclass(slots=True)
class Paced:
    """A slice of the third question: seconds a request, of them on the GPU, steps a second."""

    took: Samples
    on_gpu: Samples
    rate: float
    clocks: str


@dataclass(slots=True)
class Verdict:
    """A question's answer that is no ratio."""

    what: str
    value: float
    bar: str
    passed: bool

    def __str__(self) -> str:
        return f"{self.what}: {self.value:.3g}, {self.bar}: {'PASS' if self.passed else 'FAIL'}"


class Bench:
    """The three questions, on one pool."""

    def __init__(self, pool: Pool, ours: Device, report: Report) -> None:
        self._pool = pool
        self._device = ours
        self._report = report
        self.rows: list[Row] = []
        self.verdicts: list[Verdict] = []

    def _save(self, name: str) -> None:
        self._report.put(
            name,
            {
                "rows": [row.as_dict() for row in self.rows],
                "verdicts": [str(each) for each in self.verdicts],
            },
        )

    # -- the same numbers ------------------------------------------------------------------------

    async def numbers(self) -> None:
        """Answer question 1."""
        baseline, training = Thread(), await blocking(Training)
        for dtype in TOLERANCE if ON_GPU else (torch.float32,):
            model = await blocking(Model, dtype)

            def output(given: Model = model) -> Any:
                return given.forward().float().cpu().numpy()

            whole = await baseline.run(output)
            for sms in SMS:
                async with self._pool.partitions(sms, sms, REST) as (p, q, rest):
                    found = [await one.run(output) for one in (p, q) * 3]
                    over = asyncio.Event()
                    async with asyncio.TaskGroup() as users:
                        users.create_task(trained(rest, training.step, over.is_set, Progress()))
                        try:
                            found += [await p.run(output) for _ in range(5)]
                        finally:
                            over.set()
                self._compare(f"{dtype}, {sms} SMs".removeprefix("torch."), dtype, whole, found)
        baseline.close()
        self._save("numbers")

    def _compare(self, name: str, dtype: torch.dtype, whole: Any, found: list[Any]) -> None:
        alike = sum(bool(np.array_equal(found[0], each)) for each in found)
        bits = f"bit-equal outputs of {len(found)}"
        bar = f"{len(found)}"
        self.verdicts.append(Verdict(f"{name}, {bits}", alike, bar, alike == len(found)))
        error = float(np.linalg.norm(found[0] - whole) / np.linalg.norm(whole))
        most = TOLERANCE[dtype]
        what = f"{name}, off the whole GPU's"
        self.verdicts.append(Verdict(what, error, f"<= {most:g}", error <= most))

    # -- its own SMs -----------------------------------------------------------------------------

    async def canary(self, seconds: float) -> None:
        """Answer question 2: the canary's speed, alone and beside the model; the baseline, too."""
        raw = await blocking(RawStreams, self._device)
        model, mine = await blocking(Model, USUAL), Thread()
        seen = {name: Measured() for name in ("alone", "beside", "plain alone", "plain beside")}
        grid = LaunchConfig(grid=(M // 32, M // 32), block=(16, 16))
        try:
            async with self._pool.partitions(JUDGED, REST) as (p, rest):
                rng = np.random.default_rng(1)
                a, b = [
                    await rest.upload(rng.random((M, K), np.float32).reshape(shape))
                    for shape in ((M, K), (K, M))
                ]
                c, word = await rest.empty((M, M)), await rest.empty_pinned(1, np.uint32)
                work = [Launch(matmul, grid, (a, b, c, M, M, K, PASSES))]
                plain = await blocking(OnStream, await blocking(raw.stream), work, word, None)
                held = Held(rest, work)
                graphs = [await run(captured, model.submit) for run in (p.run, mine.run)]
                users: dict[str, tuple[Any, Request | None]] = {
                    "alone": (held, None),
                    "beside": (held, lambda: _awaited(p.run(graphs[0]))),
                    "plain alone": (plain, None),
                    "plain beside": (plain, lambda: mine.run(graphs[1])),
                }
                each = seconds / ROUNDS / len(users)
                for number in range(ROUNDS + 1):
                    for name, (place, request) in users.items():
                        got = await self._both(place, request, each if number else 0.1)
                        if number:
                            seen[name].slices.append(got)
                graphs.clear()  # before the pool is closed
                for buffer in (a, b, c, word):
                    buffer.close()
        finally:
            await blocking(raw.close)
            mine.close()
        row = Comparison(f"canary beside the model, {JUDGED} SMs | alone there", *_pair(seen, ""))
        self.rows.append(row.row(0.5, "us", most=1 / 0.95))
        row = Comparison("canary beside the model, plain streams | alone", *_pair(seen, "plain "))
        self.rows.append(row.row(0.5, "us"))
        self._save("canary")

    async def _both(self, place: Any, request: Request | None, seconds: float) -> Slice:
        done, end = Progress(), time.perf_counter() + seconds
        async with asyncio.timeout(seconds + PATIENCE), asyncio.TaskGroup() as users:
            users.create_task(place.keep_busy(end, done))
            if request is not None:
                users.create_task(_drained(timed(request, seconds)))
        return Slice(rate=done.rate())

    # -- its own pace ----------------------------------------------------------------------------

    async def pace(self, seconds: float, *, eagerly: bool, others: Size = REST) -> None:
        """Answer question 3: the model's latency, alone and beside training; the baseline, too."""
        model, training = await blocking(Model, USUAL), await blocking(Training)
        mine, theirs, first, last = Thread(), Thread(), Thread(priority=-1), Thread()
        names = ("alone", "beside", "plain alone", "plain beside", "priority beside")
        if others is not REST:
            names = names[:2]
        took: dict[str, list[Samples]] = {name: [] for name in names}
        on_gpu: dict[str, list[Samples]] = {name: [] for name in names}
        steps: dict[str, list[float]] = {name: [] for name in names}
        drew: dict[str, list[str]] = {name: [] for name in names}
        async with self._pool.partitions(JUDGED, others) as (p, rest):

            async def made(run: Callable[..., Awaitable[Submit]], submit: Submit) -> Submit:
                return submit if eagerly else await run(captured, submit)

            ours, plain, high = 0, 1, 2
            forward = [Timed(await made(run, model.submit)) for run in (p.run, mine.run, first.run)]
            step = [await made(run, training.step) for run in (rest.run, theirs.run, last.run)]
            strategies: dict[str, tuple[Any, int, Any]] = {
                "alone": (p, ours, None),
                "beside": (p, ours, lambda *how: trained(rest, step[ours], *how)),
                "plain alone": (mine, plain, None),
                "plain beside": (mine, plain, lambda *how: theirs.train(step[plain], *how)),
                "priority beside": (first, high, lambda *how: last.train(step[high], *how)),
            }
            each = seconds / ROUNDS / len(names)
            for number in range(ROUNDS + 1):
                for name in names:
                    where, which, beside = strategies[name]
                    got = await self._paced(where, forward[which], beside, each if number else 0.3)
                    if number:
                        took[name].append(got.took)
                        on_gpu[name].append(got.on_gpu)
                        steps[name].append(got.rate)
                        drew[name].append(got.clocks)
                if self._report.left < 0:
                    break
            forward.clear()  # graphs must be freed before the pool is closed
            step.clear()
        for thread in (mine, theirs, first, last):
            thread.close()
        how = "eager" if eagerly else "graph"
        what = "training" if others is REST else f"training on {others} SMs"
        alone = f"{how}: alone, {JUDGED} SMs | plain alone"
        for part, most in ((0.5, None), (0.99, 1.15)):
            self._against_alone(f"{how}: beside {what} | alone", took, "beside", part, most)
            if ON_GPU:
                self._against_alone(f"{how}: the same, on the GPU", on_gpu, "beside", part)
            for name in names[3:]:
                self._against_alone(f"{how}: {name} {what} | plain alone", took, name, part)
            if others is REST:
                row = Comparison(alone, took["alone"], took["plain alone"])
                self.rows.append(row.row(part, "us"))
        self._report.put(f"{how}: steps of {what} a second", steps)
        self._report.put(f"{how}: clocks, {what}", drew)
        self._save(f"pace, {how}, {what}")

    def _against_alone(
        self,
        what: str,
        seen: dict[str, list[Samples]],
        name: str,
        part: float,
        most: float | None = None,
    ) -> None:
        alone = "alone" if name == "beside" else "plain alone"
        self.rows.append(Comparison(what, seen[name], seen[alone]).row(part, "us", most=most))

    async def _paced(self, where: Any, forward: Timed, beside: Any, seconds: float) -> Paced:
        """Run forward passes, one after another."""
        over, done = asyncio.Event(), Progress()
        took, on_gpu = [], []
        async with asyncio.timeout(seconds + PATIENCE), asyncio.TaskGroup() as users:
            if beside is not None:
                users.create_task(beside(over.is_set, done))
                while len(done.at) < 2:  # noqa: ASYNC110  the GPU is full from here on
                    await asyncio.sleep(0.001)
            try:
                async for second in timed(lambda: _awaited(where.run(forward)), seconds):
                    took.append(second)
                    on_gpu.append(forward.seconds())
                drew = await blocking(clocks)  # reading disturbs: after the last request
            finally:
                over.set()
        return Paced(np.array(took), np.array(on_gpu), done.rate(), drew)


async def _awaited(job: Any) -> Any:
    return await job


async def _drained(took: AsyncIterator[float]) -> None:
    async for _ in took:
        pass


def _pair(seen: dict[str, Measured], prefix: str) -> tuple[list[Samples], list[Samples]]:
    return seen[f"{prefix}beside"].other(), seen[f"{prefix}alone"].other()


async def _main(driver: Driver, ours: Device, report: Report) -> Bench:
    async with Pool([0], driver=driver, prepare=KERNELS) as pool:
        bench = Bench(pool, ours, report)
        questions: list[tuple[str, float, Callable[[float], Awaitable[None]]]] = [
            ("numbers", 0.0, lambda _: bench.numbers()),
            ("canary", 0.25, bench.canary),
            ("pace, graph", 0.4, lambda seconds: bench.pace(seconds, eagerly=False)),
            (
                f"pace, graph, training on {FEW} SMs",
                0.3,
                lambda seconds: bench.pace(seconds, eagerly=False, others=FEW),
            ),
            ("pace, eager", 0.9, lambda seconds: bench.pace(seconds, eagerly=True)),
        ]
        for name, part, ask in questions:
            report.put(f"clocks, {name}", await blocking(clocks))
            try:
                seconds = max(1.0, part * (report.left - 5))
                async with asyncio.timeout(1.3 * seconds + PATIENCE):
                    await ask(seconds)
            except Exception:
                report.fail(name)
            print(f"{name}: {report.left:.0f} s left", flush=True)
    return bench


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.torch", description="Measure a torch model in a partition."
    )
    parser.add_argument("--driver", help="cuda or simulated:h200 (default: GREENSCHED_DRIVER)")
    parser.add_argument("--seconds", type=float, default=120, help="for all (default: 120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each step")
    options = parser.parse_args()
    report = Report(options.json, options.seconds)
    machine = MachineLoad()
    driver = drivers.open(options.driver)
    if isinstance(driver, SimulatedDriver):
        sys.setswitchinterval(100e-6)  # the simulated GPU is a thread that others starve
    ours = Device(0, driver=driver)
    with ours:
        if ON_GPU:
            torch.cuda.init()
    report.put(
        "device", f"{ours.name}, {ours.sm_count} SMs, {driver.name}, torch {torch.__version__}"
    )
    bench = asyncio.run(_main(driver, ours, report))
    report.put("machine", str(machine))
    ours.close()
    driver.close()
    print(report.found["device"], machine, sep="\n")
    print(table(bench.rows) if bench.rows else "no rows")
    print(*bench.verdicts, sep="\n")
    passed = [row.passed for row in bench.rows] + [each.passed for each in bench.verdicts]
    errors = len(report.found["errors"])
    print(
        f"{passed.count(True)} bars met, {passed.count(False)} missed, {errors} errors", flush=True
    )
    return int(bool(passed.count(False) or errors))


if __name__ == "__main__":
    raise SystemExit(main())
