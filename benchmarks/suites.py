"""The suites behind `make bench` and `make bench-gpu`: their parts, their bars, and the table.

A part is a function, or a program in a process of its own. Each row is printed for the plain build,
which is what `pip install` gives, and with `--compiled FOLDER` for the compiled one, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.lib.timing import Row, table

Parts = dict[str, list[Row]]

#: Seconds that a part of the GPU suite may take: several times what one took on an H200.
LIMIT_S = 240
#: Put before the name of a row of the compiled build.
COMPILED = "compiled: "


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar on the ratio of medians; `was` says what it was before it was moved, and why."""

    most: float
    was: str = ""


_TIGHTER = "beside calls by lambdas and helpers"
#: On a GPU.
GPU_BARS = {
    "bound launch | raw launch, packed once": Bar(1.10, f"1.05 x {_TIGHTER}"),
    "bound.submit | raw launch + mark": Bar(1.15, f"1.1 x {_TIGHTER}"),
    "launch | raw launch + mark": Bar(2.2),
    "lease, launch, await | semaphore, launch, polled event": Bar(2.0),
    "lease, two sizes in turn | semaphore": Bar(5.0),
    "step, run | a thread": Bar(1.2),
    "step, checkpoint + run | a thread": Bar(1.35),
    "step, lease + run | a thread": Bar(1.4),
    "checkpoint behind a run | allowed": Bar(1.0),
}
#: On the stand-in driver, where the device takes no time and does its work within the call: what is
#: left is the host's part, the binding and the library. cuda-bindings 13.5. With a ticket for each
#: job there is no bar on jobs in flight.
STANDIN_BARS = {
    "bound launch | raw launch, packed once": Bar(1.3),
    "bound launch, 4 arguments set | raw launch, packed once": Bar(2.2),
    "bound.submit | raw launch + mark": Bar(1.5),
    "launch | raw launch + mark": Bar(2.2),
    "is_done | event query": Bar(0.15),
    "bound.submit, await | raw launch + mark": Bar(1.9),
    "launch, await | raw launch, event in to_thread": Bar(0.15),
    "bound launches, a job behind 64 | raw launches": Bar(1.25),
    "lease | semaphore": Bar(3.0),
    "lease, two sizes in turn | semaphore": Bar(5.0),
    "run | to_thread, 1 at once": Bar(0.9),
    "run | to_thread, 8 at once": Bar(0.4),
    "bound launch | cuda.core launch": Bar(1.0),
}

#: The stand-in's settings. With kernels that take time, submitting would measure how a thread of
#: the stand-in wakes: only what waits is measured there.
_NO_TIME = {"STUBCUDA_KERNEL_US": "0", "STUBCUDA_INLINE": "1"}
_SOME_TIME = {"STUBCUDA_KERNEL_US": "20"}
#: Kernels shorter and longer than a loop polls before it sleeps; and waits behind each busy loop,
#: of which `python -m benchmarks.micro.completion` makes more.
_WAITING = {"STUBCUDA_KERNEL_US": "20"}, {"STUBCUDA_KERNEL_US": "2000"}
_WAITS = "500"
#: A kernel that outlasts a turn of `benchmarks.micro.partitions`.
_HANGING = {"STUBCUDA_KERNEL_TABLE": "latch:600000"}

_HOT_PATH = "benchmarks.micro.hot_path"
GPU_PARTS = {
    "hot path and peers": (_HOT_PATH, GPU_BARS),
    "eight partitions": ("benchmarks.micro.partitions", {}),
    "isolation": ("benchmarks.gpu.isolation", {}),
}


def host(standin: str | None) -> Parts:
    """Measure what needs no GPU, and with a stand-in driver's folder what runs on that."""
    from benchmarks.micro import import_time, lease, pytest_plugin, scheduler, threads
    from benchmarks.system import client_disconnect, heartbeat

    simulated = ["--driver", "simulated:h200"]
    parts: dict[str, Callable[[], list[Row]]] = {
        "import": import_time.measure,
        "pytest plugin": pytest_plugin.measure,
        "client disconnects": client_disconnect.measure,
        "scheduler": scheduler.measure,
        "two devices": lambda: asyncio.run(lease.two_devices()),
        "event loop": heartbeat.measure,
        "threads without a loop": threads.measure,
        "simulated H200, real clock": lambda: [
            *run_program(_HOT_PATH, *simulated),
            *run_program("benchmarks.micro.queue", *simulated),
        ],
        "watching a pool": lambda: run_program("benchmarks.micro.watching"),
    }
    if standin is not None:
        parts["cuda.bindings on the stand-in driver"] = lambda: on_standin(standin)
    found: Parts = {}
    for name, measure in parts.items():
        print(f"measuring: {name}", file=sys.stderr)
        found[name] = measure()
    return found


def on_standin(folder: str) -> list[Row]:
    """Measure the CUDA driver on the stand-in `libcuda.so.1` that a folder holds.

    Raises:
        CalledProcessError: a program failed; it has said why on standard error.
    """

    def run(settings: Mapping[str, str], module: str, *options: str) -> list[Row]:
        return run_program(module, *options, env={**settings, "LD_LIBRARY_PATH": folder})

    hot_path = [judge(row, STANDIN_BARS) for row in run(_NO_TIME, _HOT_PATH)]
    waits = [row for row in run(_SOME_TIME, _HOT_PATH) if "await" in row.what]
    return [
        *(replace(row, what=f"0 us: {row.what}") for row in hot_path),
        *(replace(row, what=f"20 us: {row.what}") for row in waits),
        *(
            row
            for settings in _WAITING
            for row in run(settings, "benchmarks.micro.completion", "--waits", _WAITS)
        ),
        *run(_HANGING, "benchmarks.micro.partitions"),
        *run(_NO_TIME, "benchmarks.micro.queue", "--driver", "cuda"),
    ]


def gpu(compiled: str | None) -> tuple[Parts, Any]:
    """Measure what needs a GPU, each part in a process of its own: the rows, and green contexts.

    A part that fails, or spoils the device for its process, has no rows, and leaves the others
    theirs; green contexts are None where they failed.
    """
    found: Parts = {}
    for name, (module, bars) in GPU_PARTS.items():
        try:
            rows = run_program(module, limit=LIMIT_S)
            if compiled is not None:
                there = run_program(module, limit=LIMIT_S, env=_first_on_path(compiled))
                rows = interleave(rows, there)
        except (subprocess.SubprocessError, ValueError) as error:
            print(f"{module}: {error}", file=sys.stderr)
            rows = []
        found[name] = [judge(row, bars) for row in rows]
    try:
        contexts = _run("benchmarks.gpu.contexts", limit=LIMIT_S)
    except (subprocess.SubprocessError, ValueError) as error:
        print(f"benchmarks.gpu.contexts: {error}", file=sys.stderr)
        contexts = None
    return found, contexts


def host_compiled(folder: str, standin: str | None) -> Parts:
    """Measure the host suite with the compiled build in a folder, in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "found.json")
        options = ["host", "--json", str(file), *(["--standin", standin] if standin else [])]
        command = [sys.executable, "-m", "benchmarks", *options]
        env = os.environ | _first_on_path(folder)
        # A bar that is missed is no failure here: the exit code is for the whole of both builds.
        ran = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=False)
        if not file.is_file():
            raise subprocess.CalledProcessError(ran.returncode, command)
        return load(file)


def _first_on_path(folder: str) -> dict[str, str]:
    """Return the environment in which a build in a folder is imported before any other."""
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def run_program(
    module: str, *options: str, env: Mapping[str, str] | None = None, limit: float | None = None
) -> list[Row]:
    """Run a benchmark in a process of its own, and return its rows.

    Raises:
        CalledProcessError, TimeoutExpired: it failed; it has said why on standard error.
    """
    return [Row.from_dict(row) for row in _run(module, "--json", *options, env=env, limit=limit)]


def _run(
    module: str, *options: str, env: Mapping[str, str] | None = None, limit: float | None = None
) -> Any:
    command = [sys.executable, "-m", module, *options]
    environment = os.environ | (env or {})
    ran = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, timeout=limit
    )
    return json.loads(ran.stdout)


# -- rows -------------------------------------------------------------------------------------


def judge(row: Row, bars: Mapping[str, Bar]) -> Row:
    """Return the row with its bar, if its median has one."""
    bar = bars.get(row.what.removeprefix(COMPILED).removesuffix(", median"))
    if bar is None:
        return row
    was = f" (was {bar.was})" if bar.was else ""
    return replace(row, bar=f"<= {bar.most:g} x{was}", passed=row.ratio <= bar.most)


def interleave(plain: Sequence[Row], compiled: Sequence[Row]) -> list[Row]:
    """Return each row of the plain build with that of the compiled one behind it."""
    named = (replace(row, what=COMPILED + row.what) for row in compiled)
    return [row for pair in zip_longest(plain, named) for row in pair if row is not None]


def passed(found: Parts) -> bool:
    """Return whether each part has rows, and no row missed its bar."""
    return all(rows and all(row.passed is not False for row in rows) for rows in found.values())


def text(found: Parts, machine: str) -> str:
    """Return a table for each part, below what was measured on."""
    return "\n\n".join([machine, *(f"{name}\n{table(part)}" for name, part in found.items())])


def save(file: Path, found: Parts, machine: str, **more: Any) -> None:
    """Write the rows of each part as JSON."""
    rows = {name: [row.as_dict() for row in part] for name, part in found.items()}
    file.write_text(json.dumps({"machine": machine, **rows, **more}, indent=1) + "\n")


def load(file: Path) -> Parts:
    """Read what `save` wrote, or the rows of one program: the rows of each part."""
    found = json.loads(file.read_text())
    if isinstance(found, list):
        found = {"": found}
    return {
        name: [Row.from_dict(row) for row in part]
        for name, part in found.items()
        if isinstance(part, list)
    }
