"""On a real GPU: libraries free what they used in a partition at any time, and nothing aborts.

Each case is a process of its own. `GREENSCHED_TEARDOWN_ROUNDS` is how often each runs; 10 make
200 processes where all the libraries are installed.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.gpu

#: How a process uses the partition's stream, and the module that it needs.
USES = {
    "torch pinned memory": "torch",
    "torch record_stream": "torch",
    "cupy pools": "cupy",
    "cuda.core buffers": "cuda.core",
    "driver events": "cuda.bindings",
}
#: How it ends: what the library holds is freed after the pool, in a second pool, or never.
ENDS = ("freed", "second pool", "exit", "exception", "signal")
ROUNDS = int(os.environ.get("GREENSCHED_TEARDOWN_ROUNDS", "2"))
#: Processes at once: each holds some 2 GiB of host memory and 1 GiB of the device.
AT_ONCE = 8

PROGRAM = """
import asyncio, os, signal, sys
import greensched
from greensched import Pool

use, end = sys.argv[1:]
held = []


class Interrupted(Exception):
    pass


def with_torch_pinned_memory(p):
    import torch

    def call():
        pinned = [torch.ones(2**20, pin_memory=True) for _ in range(4)]
        return pinned, [tensor.to("cuda", non_blocking=True) for tensor in pinned]

    return call


def with_torch_record_stream(p):
    import torch

    tensor = torch.ones(2**20, device="cuda")

    def call():
        tensor.record_stream(torch.cuda.current_stream())
        return tensor, tensor * 2

    return call


def with_cupy_pools(p):
    import cupy

    def call():
        arrays = [cupy.arange(2**20)]
        with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
            arrays.append(cupy.arange(2**20) * 2)
        return arrays

    return call


def with_cuda_core_buffers(p):
    try:
        from cuda.core import Device
    except ImportError:
        from cuda.core.experimental import Device

    def call():
        device = Device(0)
        device.set_current()
        stream = device.create_stream(greensched.current_call().stream)
        return device.allocate(2**20, stream=stream), stream

    return call


class Recording:
    def __init__(self, address):
        from cuda.bindings import driver

        self.driver, self.address, self.print, self.file = driver, address, print, sys.stderr

    def __del__(self):
        driver = self.driver
        driver.cuCtxPushCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
        event = driver.cuEventCreate(0)[1]
        if driver.cuEventRecord(event, self.address)[0]:
            self.print("terminate: no event can be recorded", file=self.file)
        driver.cuEventDestroy(event)
        driver.cuCtxPopCurrent()


def with_driver_events(p):
    return lambda: Recording(greensched.current_call().stream.address)


async def run():
    async with Pool(devices=[0]) as pool, pool.partition(16) as p:
        held.append(await p.run(globals()["with_" + use.replace(" ", "_").replace(".", "_")](p)))
        if end == "exception":
            raise Interrupted
        if end == "signal":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        if end == "second pool":
            held[:-1] = []


for library in ("torch", "cupy"):
    if use.startswith(library):
        __import__(f"greensched.integrations.{library}")
for _ in range(2 if end == "second pool" else 1):
    try:
        asyncio.run(run())
    except (Interrupted, KeyboardInterrupt):
        pass
if end == "freed":
    held.clear()
print("done")
"""


def finish(use: str, end: str) -> str:
    """Run one case in a process; return what is wrong with its end."""
    # A GPU has one process with a pool for each directory of temporary files.
    with tempfile.TemporaryDirectory() as own:
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, use, end],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | {"TMPDIR": own},
        )
    said = [word for word in ("Traceback", "terminate", "Error") if word in ran.stderr]
    if ran.returncode or said or ran.stdout != "done\n":
        return f"{use}, {end}: exit code {ran.returncode}, {ran.stderr[-2000:]}"
    return ""


@pytest.mark.parametrize("use", USES)
def test_no_process_aborts(use: str) -> None:
    """A library may free memory after its partition, at any time."""
    package, _, module = USES[use].partition(".")
    if find_spec(package) is None or (module and find_spec(USES[use]) is None):
        pytest.skip(f"{USES[use]} is not on this machine")
    cases = list(itertools.product([use], ENDS * ROUNDS))
    with ThreadPoolExecutor(AT_ONCE) as processes:
        wrong = list(filter(None, processes.map(finish, *zip(*cases, strict=True))))
    assert not wrong, "\n".join(wrong)
