"""Without a GPU a pool raises an error that names both remedies; nothing falls back."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

import greensched
from greensched import driver as drivers

OPEN = """
import asyncio, sys
import greensched

async def main():
    async with greensched.Pool(**{options}) as pool, pool.partition(greensched.ALL) as p:
        print(len(pool.devices), pool.devices[0].name, p.sm_count)

try:
    asyncio.run(main())
except greensched.GreenschedError as error:
    print(type(error).__name__, error)
    sys.exit(2)
"""


def has_driver() -> bool:
    """Return whether this machine has a CUDA driver, real or stand-in."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


WITHOUT_DRIVER = pytest.mark.skipif(
    has_driver(), reason="this machine has a CUDA driver, and the test is of a machine without one"
)


def run(
    options: str = "{}", variable: str | None = None, program: str = OPEN
) -> subprocess.CompletedProcess[str]:
    """Open a pool in a fresh interpreter that finds only the system's driver."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("LD_LIBRARY_PATH", "LD_PRELOAD", drivers.VARIABLE)
    }
    if variable is not None:
        environment[drivers.VARIABLE] = variable
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program.replace("{options}", options)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@WITHOUT_DRIVER
@pytest.mark.parametrize(
    ("options", "variable"),
    [("{}", None), ("{}", ""), ("{}", "cuda"), ("{'driver': 'cuda'}", None)],
)
def test_without_a_gpu_both_ways_out_are_named(options: str, variable: str | None) -> None:
    """A pool on a machine without a driver fails, and says what to install or what to ask for."""
    done = run(options, variable)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("DriverUnavailable ")
    assert "install" in done.stdout
    assert 'Pool(driver="simulated:h200")' in done.stdout
    assert "GREENSCHED_DRIVER=simulated:h200" in done.stdout
    assert "Traceback" not in done.stderr


@WITHOUT_DRIVER
def test_the_argument_goes_before_the_environment() -> None:
    """The driver that the program names takes precedence over the environment's."""
    assert run("{'driver': 'cuda'}", "simulated:h200").stdout.startswith("DriverUnavailable")
    assert run("{'driver': 'simulated:a100'}", "cuda").stdout == "1 Simulated A100 SXM 108\n"


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("simulated:h200", "1 Simulated H200 132"),
        ("simulated:h200x2", "2 Simulated H200 132"),
        ("simulated:l40s+h200", "2 Simulated L40S 142"),
        ("simulated:H200@13.0", "1 Simulated H200 132"),
    ],
)
def test_the_environment_may_ask_for_a_simulation(variable: str, said: str) -> None:
    """GREENSCHED_DRIVER is the driver of a program that names none."""
    done = run(variable=variable)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, said, "")


def test_a_program_may_ask_for_a_simulation() -> None:
    """Pool(driver="simulated:h200x2") has two devices, all its own."""
    assert run("{'driver': 'simulated:h200x2'}").stdout == "2 Simulated H200 132\n"
    assert run("{'driver': 'simulated:h200x2', 'devices': [1]}").stdout == "1 Simulated H200 132\n"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nonsense", "no driver 'nonsense'"),
        ("simulated", "no driver 'simulated'"),
        ("simulated:", "no driver 'simulated:'"),
        ("cuda:0", "no driver 'cuda:0'"),
        ("Simulated:h200", "simulated:h200"),
        ("simulated:h300", "give one of h200"),
        ("simulated:h200@9.9", "no simulated CUDA 9.9"),
        (" ", "no driver ' '"),
    ],
)
@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_driver_that_is_none_is_refused(
    how: str, spec: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spec that names no driver is refused, and the error names one that works."""
    if how == "environment":
        monkeypatch.setenv(drivers.VARIABLE, spec)
    with pytest.raises(greensched.InvalidRequest) as refused:
        drivers.open(spec if how == "argument" else None)
    assert said in str(refused.value)
    assert "h200" in str(refused.value) or "13.4" in str(refused.value)


def test_a_simulation_is_opened_anew_each_time() -> None:
    """Two pools that name a simulated driver have separate machines."""
    assert drivers.open("simulated:h200") is not drivers.open("simulated:h200")


@WITHOUT_DRIVER
def test_nothing_is_left_after_a_failed_opening() -> None:
    """A pool that found no driver has not changed, and closing it raises nothing."""
    program = """
import asyncio
import greensched

async def main():
    pool = greensched.Pool()
    for _ in range(2):
        try:
            await pool.open()
        except greensched.DriverUnavailable:
            print(pool.state.value, pool.devices)
    print(await pool.aclose(), pool.state.value)

asyncio.run(main())
"""
    done = run(program=program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "not open ()\nnot open ()\nCloseReport(abandoned=()) closed\n"
