"""Leasing and launching on the CUDA driver, beside raw `cuda.bindings`.

`python -m benchmarks.hot_path [--json]` runs on the GPU of the machine; `measure` runs the same in
processes of their own, whose driver is a stand-in `libcuda.so.1`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.gpu import peers
from benchmarks.lib.timing import Row, table
from benchmarks.micro import call as calling
from benchmarks.micro import launch as launching
from benchmarks.micro import lease as leasing
from greensched import driver as drivers

#: The stand-in's settings. With a device that takes no time, and does its work within the call,
#: what is left is the host's part: the binding and us. With a kernel that takes some, submitting
#: measures how a thread of the stand-in wakes, so only what waits is worth a look.
_NO_TIME = {"STUBCUDA_KERNEL_US": "0", "STUBCUDA_INLINE": "1"}
_SOME_TIME = {"STUBCUDA_KERNEL_US": "20"}
#: What is asked of medians where the device takes no time, with cuda-bindings 13.5 and the best
#: that one writes by hand beside it: ours at most so many times theirs. 64 in flight have one job
#: behind them, as one synchronisation is behind the launches by hand. With a ticket for each there
#: is a row without a bar: the raw launch and mark alone take 1.7 times a raw launch here.
_BARS = {
    "bound launch | raw launch, packed once": 1.3,
    "bound launch, 4 arguments set | raw launch, packed once": 2.2,
    "bound.submit | raw launch + mark": 1.5,
    "launch | raw launch + mark": 2.2,
    "is_done | event query": 0.15,
    "bound.submit, await | raw launch + mark": 1.9,
    "launch, await | raw launch, event in to_thread": 0.15,
    "bound launches, a job behind 64 | raw launches": 1.25,
    "lease | semaphore": 3.0,
    "run | to_thread, 1 at once": 0.9,
    "run | to_thread, 8 at once": 0.4,
    "bound launch | cuda.core launch": 1.0,
}


#: Kernels shorter and longer than a loop looks for, and waits behind each busy loop, of which
#: `python -m benchmarks.micro.completion` makes more.
_WAITING = {"STUBCUDA_KERNEL_US": "20"}, {"STUBCUDA_KERNEL_US": "2000"}
_WAITS = "500"
#: A kernel that is beside the lanes for longer than a turn of `benchmarks.micro.executors`.
_HANGING = {"STUBCUDA_KERNEL_TABLE": "latch:600000"}


def measure(folder: str) -> list[Row]:
    """On the stand-in that a folder holds.

    Raises:
        CalledProcessError: a process failed; it has said why.
    """
    waiting = [row for row in _in_a_process(folder, _SOME_TIME) if "await" in row.what]
    judged = [judge(row, _BARS) for row in _in_a_process(folder, _NO_TIME)]
    return [
        *(replace(row, what=f"0 us: {row.what}") for row in judged),
        *(replace(row, what=f"20 us: {row.what}") for row in waiting),
        *(
            row
            for settings in _WAITING
            for row in _in_a_process(
                folder, settings, "benchmarks.micro.completion", "--waits", _WAITS
            )
        ),
        *_in_a_process(folder, _HANGING, "benchmarks.micro.executors"),
        *_in_a_process(folder, _NO_TIME, "benchmarks.micro.queue", "--driver", "cuda"),
    ]


def judge(row: Row, bars: Mapping[str, float]) -> Row:
    """The row with its bar, if its median has one."""
    most = bars.get(row.what.removesuffix(", median"))
    if most is None:
        return row
    return replace(row, bar=f"<= {most:g} x", passed=row.ratio <= most)


def _in_a_process(folder: str, settings: dict[str, str], *what: str) -> list[Row]:
    environment = os.environ | settings | {"LD_LIBRARY_PATH": folder}
    command = [sys.executable, "-m", *(what or ("benchmarks.hot_path",)), "--json"]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return [Row.from_dict(found) for found in json.loads(ran.stdout)]


async def _rows() -> list[Row]:
    driver = drivers.open("cuda")
    parts = leasing, launching, calling, peers
    return [row for part in parts for row in await part.measure(driver)]


if __name__ == "__main__":
    found = asyncio.run(_rows())
    print(json.dumps([row.as_dict() for row in found]) if "--json" in sys.argv else table(found))
