"""`greensched measure`: times of this host and GPU, as a file for `greensched simulate`.

The file is a JSON object. `"host"` has the host's microseconds for each operation
(`host_costs`). Every other name is a latency table (`capacity.latency_tables.load`): milliseconds
and bytes by SMs and by batch or prompt length.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import subprocess
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from greensched.cli import doctor
from greensched.cli.terminal import Progress, print_table
from greensched.device.launch import LaunchConfig
from greensched.driver.interface import Driver
from greensched.errors import GreenschedError, InvalidRequest
from greensched.execution.call_context import current_call
from greensched.kernels import spin
from greensched.leasing.latency import quantile
from greensched.leasing.partition import Partition
from greensched.pool import Pool
from greensched.typing import ALL

#: Repetitions of each host operation and each pass; the first `WARM` operations are not counted.
HOST_REPEATS, PASS_REPEATS, WARM = 400, 7, 20
#: How many passes are submitted together to time a pass, so that the host's time is hidden.
TOGETHER = 5
#: Nanoseconds of the kernel whose end is awaited for a wake-up; the event loop sleeps meanwhile.
KERNEL_NS = 100_000
#: Seconds of continuous passes after which power and clock are read.
SUSTAINED_S = 1.5
#: The functions that a model file may define, and what their arguments count.
WORK = {"prefill": "tokens", "decode": "batch"}

Table = dict[str, Any]
Work = Callable[[], object]


async def measure(
    driver: Driver,
    model: Path | None,
    *,
    host: bool,
    sms: Sequence[int],
    batches: Sequence[int],
    tokens: Sequence[int],
    progress: Progress,
) -> dict[str, Table]:
    """Measure host costs and the passes of a model file; return the content of the file.

    Args:
        driver: The driver of the device to measure.
        model: The model file, or None.
        host: Whether to measure host costs.
        sms: Numbers of SMs, besides all SMs.
        batches: Batches for `decode`.
        tokens: Prompt lengths for `prefill`.
        progress: Called with the fraction of a part that is done, from 0 to 1, and its name.

    Raises:
        InvalidRequest: The model file defines no pass, or fails.
    """
    work = {} if model is None else _load(model)
    sizes = {"prefill": tokens, "decode": batches}
    async with Pool([0], driver=driver, prepare=[spin]) as pool:
        device = pool.devices[0]
        idle = await asyncio.to_thread(power, device.uuid)
        where = source_of(device.name)
        tables: dict[str, Table] = {}
        if host:
            tables["host"] = {**await host_costs(pool, driver, progress), "source": where}
        for name, make in work.items():
            passes = _Passes(name, make, sms, sizes[name], idle, progress)
            with _naming_lines(model):
                tables[name] = {**await _table(pool, passes), "source": where}
        return tables


def source_of(device: str) -> str:
    """Return where and when a device's figures were measured."""
    return f"{device}, {datetime.now(UTC):%Y-%m-%d}"


def write(tables: dict[str, Table], path: Path) -> None:
    """Write the file that `greensched simulate --tables` reads."""
    path.write_text(json.dumps(tables, indent=1) + "\n")


def print_tables(tables: dict[str, Table]) -> None:
    """Print the content of the file as tables."""
    for name, table in tables.items():
        title = f"{name}: {table['source']}"
        if name == "host":
            rows = [(key, *row.values()) for key, row in table.items() if key != "source"]
            print_table(("operation", "p50 us", "p99 us"), rows, title)
            continue
        columns = (WORK[name], *(f"{count} SMs, ms" for count in table["sms"]))
        sized = zip(table["sizes"], table["ms_by_size"], strict=True)
        rows = [(size, *(f"{ms:.3f}" for ms in row)) for size, row in sized]
        print_table(columns, rows, title)


# -- the host -----------------------------------------------------------------------------------


async def host_costs(pool: Pool, driver: Driver, progress: Progress) -> Table:
    """Measure the host's time for each operation, in microseconds: medians and 99th percentiles.

    `submission`: the call that submits a bound launch. `wake`: from a kernel's end until its task
    resumes. `hop`: a call on the partition's thread and back. `lease`: acquiring and returning a
    lease. `checkpoint`: a checkpoint. `simulate` uses the last two.
    """
    config = LaunchConfig(grid=1, block=32)
    now = driver.time
    async with pool.partition(8) as p:
        bound = p.bind(config, spin, 0)
        submission, wake = [], []
        progress(0.0, "submission")
        for _ in range(HOST_REPEATS):
            bound.set(0, KERNEL_NS)
            began = now()
            job = bound.submit()
            submitted = now()
            await job
            wake.append(now() - submitted - KERNEL_NS / 1e9)
            submission.append(submitted - began)
        progress(0.4, "hop")
        hop = await times(now, lambda: p.run(nothing))

    async def lease() -> None:
        async with pool.partition(8):
            pass

    progress(0.6, "lease")
    leases = await times(now, lease)
    progress(0.8, "checkpoint")
    async with pool.partition((8, ALL)) as p:
        checkpoint = await times(now, p.checkpoint)
    rows = {
        "submission": submission,
        "wake": wake,
        "hop": hop,
        "lease": leases,
        "checkpoint": checkpoint,
    }
    return {name: percentiles(seconds) for name, seconds in rows.items()}


async def times(now: Callable[[], float], call: Callable[[], Awaitable[object]]) -> list[float]:
    """Return the seconds that each of several awaited calls took."""
    durations = []
    for _ in range(HOST_REPEATS):
        began = now()
        await call()
        durations.append(now() - began)
    return durations


def nothing() -> None:
    """Do nothing, so that only the way to the thread and back takes time."""


def percentiles(seconds: Sequence[float]) -> Table:
    """Return the median and the 99th percentile in microseconds, without the first operations."""
    counted = sorted(seconds[WARM:])
    return {
        "p50_us": round(1e6 * quantile(counted, 0.5), 2),
        "p99_us": round(1e6 * quantile(counted, 0.99), 2),
    }


# -- a model ------------------------------------------------------------------------------------


@contextmanager
def _naming_lines(path: Path | None) -> Iterator[None]:
    """Raise what a model file raises in the block as an InvalidRequest that names its line."""
    try:
        yield
    except GreenschedError:
        raise
    except Exception as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        if not lines:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InvalidRequest(f"{path}:{lines[-1]}: {reason}") from error


def _load(path: Path) -> dict[str, Callable[[int], Work]]:
    """Import a model file, and return the passes that it defines.

    Raises:
        InvalidRequest: It is not a Python file, fails, or has neither `prefill` nor `decode`.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InvalidRequest(f"{path}: not a Python file that defines {' or '.join(WORK)}")
    module = importlib.util.module_from_spec(spec)
    with _naming_lines(path):
        spec.loader.exec_module(module)
    defined = {name: make for name in WORK if callable(make := getattr(module, name, None))}
    if not defined:
        wanted = " or ".join(f"{name}({argument})" for name, argument in WORK.items())
        raise InvalidRequest(f"{path}: define {wanted}, which returns a function of no arguments")
    return defined


@dataclass(frozen=True, slots=True)
class _Passes:
    """One kind of pass, and how to measure it.

    `make(size)` is called on a partition's thread and returns a function that submits one pass to
    the current stream. That function may have an attribute `nbytes`, the bytes that a pass moves. A
    size is a batch or a prompt's tokens; `idle` is the watts of the idle GPU.
    """

    name: str
    make: Callable[[int], Work]
    sms: Sequence[int]
    sizes: Sequence[int]
    idle: float
    progress: Progress


async def _table(pool: Pool, passes: _Passes) -> Table:
    """Measure one kind of pass for each number of SMs and each size."""
    total = pool.devices[0].sm_count
    sizes = passes.sizes
    counts = [*(n for n in passes.sms if n < total), total]
    rows: dict[int, list[float]] = {size: [] for size in sizes}
    nbytes: list[float] = []
    watts = 0.0
    for row, count in enumerate(counts):
        async with pool.partition(ALL if count == total else count) as p:
            for column, size in enumerate(sizes):
                done = (row * len(sizes) + column) / (len(counts) * len(sizes))
                passes.progress(done, f"{passes.name}({size}) on {count} SMs")
                work = await p.run(passes.make, size)
                if not callable(work):
                    raise InvalidRequest(
                        f"{passes.name}({size}) returned {work!r}: return a function of no "
                        "arguments, which submits one pass"
                    )
                rows[size].append(1e3 * await _seconds(p, work))
                if count == total:
                    nbytes.append(float(getattr(work, "nbytes", 0)))
                    watts = max(watts, (await _sustained(p, work) - passes.idle) / total)
    return {
        "sms": counts,
        "ms": rows[sizes[-1]],
        "sizes": list(sizes),
        "ms_by_size": [rows[size] for size in sizes],
        "bytes": nbytes,
        "sm_watts": round(watts, 2),
    }


async def _seconds(p: Partition, work: Work) -> float:
    """Return the median seconds of a pass; several are submitted together."""
    await p.run(_timed, work)  # loads and compiles
    return statistics.median([await p.run(_timed, work) for _ in range(PASS_REPEATS)])


def _timed(work: Work) -> float:
    call = current_call()
    assert call is not None  # it runs in a partition's call
    began = time.perf_counter()
    for _ in range(TOGETHER):
        work()
    call.stream.sync()
    return (time.perf_counter() - began) / TOGETHER


async def _sustained(p: Partition, work: Work) -> float:
    """Return the watts that a GPU draws during continuous passes; 0 without nvidia-smi."""
    drawn = 0.0
    end = time.perf_counter() + SUSTAINED_S
    while time.perf_counter() < end:
        job = p.run(_repeat, work)
        if time.perf_counter() > end - SUSTAINED_S / 3:
            drawn = max(drawn, await asyncio.to_thread(power, p.device.uuid))
        await job
    return drawn


def _repeat(work: Work) -> None:
    end = time.perf_counter() + SUSTAINED_S / 3
    while time.perf_counter() < end:
        _timed(work)


def power(uuid: str) -> float:
    """Return the watts that a GPU draws, from nvidia-smi; 0 if it does not tell. Blocks."""
    try:
        (found,) = doctor.query("gpu", ("power.draw",), f"--id={uuid}")
        return float(found["power.draw"])
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0.0
