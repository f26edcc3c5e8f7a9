"""NVTX ranges, as a tool that NVTX loads into the process sees them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = shutil.which("cc")
PROGRAM = """
import asyncio, threading
import greensched
from greensched.integrations.nvtx import annotate
from greensched.integrations.testing import SimGPU

gpu = SimGPU()

async def waiting(pool):
    async with pool.partition(greensched.ALL, service="batch"):
        pass

async def main():
    services = [greensched.ServiceClass("batch")]
    async with greensched.Pool(driver=gpu.driver, services=services) as pool:  # gpu.pool() watches
        annotate(pool)
        async with pool.partition(16) as p:
            other = asyncio.ensure_future(waiting(pool))
            await p.run(threading.get_ident)
        await other
        print("watched", pool._lifecycle.recorder.watched, flush=True)

gpu.run(main)
"""


def run(**environment: str) -> list[str]:
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.skipif(COMPILER is None, reason="the tool is built by a C compiler")
def test_a_tool_sees_waits_leases_and_calls(tmp_path: Path) -> None:
    """The ranges begin and end in their order, in one domain, with classes as categories."""
    assert COMPILER is not None
    tool, source = tmp_path / "tool.so", Path(__file__).with_name("nvtx_tool.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", tool, source], check=True)
    seen = run(NVTX_INJECTION64_PATH=str(tool))
    assert seen == [
        "greensched category 1: no class",
        "greensched start 1: wait: 16 SMs, category 1",
        "greensched end 1",
        "greensched start 2: lease: 16 SMs of device 0, category 1",
        "greensched push: call: 16 SMs",
        "greensched pop",
        "greensched category 2: batch",
        "greensched start 3: wait: ALL SMs, category 2",
        "greensched end 2",
        "greensched end 3",
        "greensched start 4: lease: 132 SMs of device 0, category 2",
        "greensched end 4",
        "watched True",
    ]


def test_without_a_tool_nothing_is_watched() -> None:
    """`annotate` costs nothing in a process that no tool is attached to."""
    assert run() == ["watched False"]
