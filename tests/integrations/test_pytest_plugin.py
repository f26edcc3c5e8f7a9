"""The pytest plugin, by pytest runs of its own: what a user's test suite sees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import trio  # noqa: F401  as what is said below

from greensched.integrations import testing  # noqa: F401

pytest_plugins = ["pytester"]

#: At the top of each suite.
HEAD = """
import asyncio
import anyio
import pytest
import greensched
from greensched import REST, LaunchConfig, Partition, Pool
from greensched.driver.simulated import Crash, Fail, Hang, cost
from greensched.kernels import fill, spin

CONFIG = LaunchConfig(grid=16, block=32)
MS = 1_000_000  # spin takes nanoseconds
"""

# What a suite inside this one imports is forgotten behind it; of these there must be one each.
anyio.run(anyio.sleep, 0)

#: Plugins of ours that a suite inside this one does without: what they set would last.
OTHERS = ("randomly", "timeout", "xdist", "cacheprovider", "hypothesispytest")


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """A user's test suite, with warnings as errors."""
    pytester.makeini(
        "[pytest]\nfilterwarnings = error\nasyncio_default_fixture_loop_scope = function\n"
    )
    return pytester


def run(
    suite: pytest.Pytester, source: str, *options: str, apart: bool = False, **outcomes: int
) -> pytest.RunResult:
    """Run a suite by a pytest of its own, and check how many tests ended how.

    `apart`: in a process of its own, because what it leaks is collected whenever it is.
    """
    suite.makepyfile(HEAD + source)
    without = [word for name in OTHERS for word in ("-p", f"no:{name}")]
    run_it = suite.runpytest_subprocess if apart else suite.runpytest_inprocess
    result = run_it(*without, *options)
    result.assert_outcomes(**outcomes)
    return result


# -- time -------------------------------------------------------------------------------------

HOUR = """
{mark}
async def test_an_hour(sim_gpu, sim_pool):
    async with sim_pool() as pool:
        await {sleep}(3600)
        async with pool.partition(16) as p:
            await p.launch(CONFIG, spin, 5 * MS)
    assert 3600.005 < sim_gpu.time < 3600.006
"""


@pytest.mark.parametrize("mark", ["", "@pytest.mark.asyncio", "@pytest.mark.anyio"])
def test_an_async_test_runs_on_virtual_time(suite: pytest.Pytester, mark: str) -> None:
    """An hour takes no time, whether or not the test is marked for an async plugin."""
    backends = 2 if "anyio" in mark else 1  # anyio's own: asyncio and trio
    run(suite, HOUR.format(mark=mark, sleep="anyio.sleep"), passed=backends)


def test_the_auto_modes_of_others_change_nothing(suite: pytest.Pytester) -> None:
    """If another plugin runs all async tests, ours still run on virtual time."""
    source = HOUR.format(mark="", sleep="asyncio.sleep")
    run(suite, source, "-o", "asyncio_mode=auto", passed=1)


def test_methods_and_parameters(suite: pytest.Pytester) -> None:
    """An async test may be a method, and have parameters and fixtures."""
    run(
        suite,
        """
@pytest.fixture
def pool(sim_pool):
    return sim_pool(sms=32)

class TestIt:
    SMS = 32

    @pytest.mark.parametrize("sms", [8, 16])
    async def test_it(self, pool, sms):
        async with pool, pool.partition(sms) as p:
            assert p.sm_count == sms
            assert pool.statistics().sms_total == self.SMS
""",
        passed=2,
    )


def test_async_fixtures_are_on_the_same_clock(suite: pytest.Pytester) -> None:
    """With `anyio_backend` from `sim_gpu`, an open pool can be an async fixture."""
    run(
        suite,
        """
@pytest.fixture
def anyio_backend(sim_gpu):
    return sim_gpu.anyio_backend

@pytest.fixture
async def pool(sim_pool):
    async with sim_pool() as pool:
        yield pool

@pytest.mark.anyio
async def test_it(sim_gpu, pool):
    await asyncio.sleep(100)
    await pool.launch(CONFIG, spin, MS, sms=8)
    assert 100 < sim_gpu.time < 101
""",
        passed=1,
    )


def test_a_plain_test_runs_a_program_on_either_loop(suite: pytest.Pytester) -> None:
    """`sim_gpu.run` runs an async function on asyncio or trio."""
    run(
        suite,
        """
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it(sim_gpu, sim_pool, backend):
    async def main(seconds):
        async with sim_pool() as pool:
            await pool.run(cost(seconds)(abs), -3, sms=16)
        return sim_gpu.time

    assert sim_gpu.run(main, 7.0, backend=backend) == pytest.approx(7.0, abs=0.01)
""",
        passed=2,
    )


# -- the machine ------------------------------------------------------------------------------


def test_the_gpu_is_as_large_as_was_asked(suite: pytest.Pytester) -> None:
    """`sms=` sets the number of SMs, split as on a real GPU; invalid numbers are refused."""
    run(
        suite,
        """
@pytest.mark.parametrize(("sms", "cells"), [(8, 1), (24, 3), (64, 8), (132, 15), (200, 25)])
async def test_it(sim_pool, sms, cells):
    async with sim_pool(sms=sms) as pool:
        assert pool.statistics().sms_total == sms
        leases = [pool.partition_nowait(8) for _ in range(cells)]
        for p in leases:
            async with p:
                assert p.sm_count == 8

@pytest.mark.parametrize("sms", [0, -8, 7, 1026, 10**6, "16", 16.0, True, None])
def test_nonsense(sim_pool, sms):
    with pytest.raises(greensched.InvalidRequest):
        sim_pool(sms=sms)
""",
        passed=14,
    )


def test_faults_and_options_arrive(suite: pytest.Pytester) -> None:
    """Requested faults happen, and other arguments reach the pool."""
    run(
        suite,
        """
async def test_no_memory(sim_pool):
    async with sim_pool(faults=[Fail("allocate", status="OUT_OF_MEMORY")]) as pool:
        with pytest.raises(greensched.OutOfMemory):
            async with pool.partition(8) as p:
                await p.empty(1000)

async def test_a_full_queue(sim_pool):
    async with sim_pool(sms=16, max_waiting=0) as pool, pool.partition(8):
        with pytest.raises(greensched.QueueFull):
            await asyncio.create_task(pool.run(abs, -1, sms=16))

async def test_a_service_with_a_driver(sim_gpu):
    async with Pool(driver=sim_gpu.driver) as pool:
        await pool.launch(CONFIG, spin, MS, sms=8)
    sim_gpu.assert_ran(spin, times=1)
""",
        passed=3,
    )


# -- what ran where ---------------------------------------------------------------------------

TWO = """
async def two(pool, gpu):
    async with pool, pool.partitions(16, REST) as (few, rest):
        rest.launch(CONFIG, spin, 10 * MS)
        with await few.empty(1000) as x:
            await few.launch(CONFIG, fill, x, 1.0, 1000)
        return gpu.sms_of(few), gpu.sms_of(rest)
"""


def test_what_ran_where_is_asserted(suite: pytest.Pytester) -> None:
    """Assertions see which kernel ran, how often, on which SMs, with what, and until when."""
    run(
        suite,
        TWO
        + """
async def test_it(sim_gpu, sim_pool):
    few, rest = await two(sim_pool(), sim_gpu)
    (one,) = sim_gpu.assert_ran(fill, times=1, sms=16, on=few, by=sim_gpu.time)
    sim_gpu.assert_ran("spin", on=rest)
    sim_gpu.assert_ran(spin, times=1)
    sim_gpu.assert_ran("no such kernel", times=0)
    sim_gpu.assert_apart(fill, spin)
    sim_gpu.assert_at_once(fill, "spin")
    assert one.sms == few and 0 <= one.submitted <= one.start < one.end
    assert sorted(launch.kernel for launch in sim_gpu.launches()) == ["fill", "spin"]
""",
        passed=1,
    )


WRONG = {
    "assert_ran(fill, times=2)": "fill ran 1 times, expected 2",
    "assert_ran('blur')": "blur ran 0 times, expected at least 1",
    "assert_ran(fill, times=1, sms=32)": "fill ran on 16 SMs, expected 32",
    "assert_ran(fill, on=rest)": "fill ran on SMs 0-*, expected *",
    "assert_ran(spin, by=0.005)": "spin ended at 0.01* s, expected by 0.005 s",
    "assert_apart(fill, 'fill2')": "fill and fill2 both ran on SMs 0-*",
    "assert_at_once(fill, 'fill2')": "fill and fill2 never ran at the same time",
}


def test_what_did_not_run_so_fails(suite: pytest.Pytester) -> None:
    """A false assertion fails, and lists what ran where, how often and when."""
    cases = "\n".join(
        f"""
async def test_{number}(sim_gpu, sim_pool):
    few, rest = await two(sim_pool(), sim_gpu)
    launched = sim_gpu.launches
    again = [replace(one, kernel="fill2", start=one.end, end=one.end + 1) for one in launched(fill)]
    sim_gpu.launches = lambda k=None: again if k == "fill2" else launched(k)
    sim_gpu.{call}
"""
        for number, call in enumerate(WRONG)
    )
    result = run(suite, "from dataclasses import replace\n" + TWO + cases, failed=len(WRONG))
    for said in WRONG.values():
        result.stdout.fnmatch_lines_random([f"E  *AssertionError: {said}"])
    result.stdout.fnmatch_lines_random(
        [
            "E  *what ran:",
            "E  *fill: 1 times on 16 SMs (0-*) of device 0, from 0.0* to 0.0* s",
            "E  *spin: 1 times on 116 SMs (*-131) of device 0, from 0.0* to 0.01* s",
        ]
    )


# -- what is left -----------------------------------------------------------------------------

LEAKS = {
    "a lease": (
        """
    pool = sim_pool()
    await pool.open()
    p = pool.partition(16)
    await p.__aenter__()
    sim_gpu.kept = p
""",
        "*16 leased*",
    ),
    "an open pool": ("    await sim_pool().open()", "*a pool that was not closed, <Pool: open*"),
    "a stream": (
        """
    device = await asyncio.to_thread(greensched.Device, 0, driver=sim_gpu.driver)
    sim_gpu.kept = device, await asyncio.to_thread(device.create_stream)
""",
        "*alive on the GPU: * stream*",
    ),
}


@pytest.mark.parametrize("kind", LEAKS)
def test_what_a_test_leaves_fails_it(suite: pytest.Pytester, kind: str) -> None:
    """A lease, pool or object that outlives its test is an error that names it."""
    body, said = LEAKS[kind]
    source = f"async def test_it(sim_gpu, sim_pool):\n{body}\n"
    result = run(suite, source, "-W", "ignore::ResourceWarning", apart=True, passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*the test left something behind: {said}"])


def test_a_failed_test_shows_what_held_which_sms(suite: pytest.Pytester) -> None:
    """Its report has the SMs by time with their holders, if there was a lease."""
    source = """
async def test_it(sim_pool):
    async with sim_pool(sms=32) as pool:
        asyncio.current_task().set_name("main")
        async with pool.partition(16) as p:
            await p.launch(CONFIG, spin, 8 * MS)
            async with pool.partition(8) as p:
                await p.launch(CONFIG, spin, 8 * MS)
                assert False

async def test_nothing(sim_pool):
    assert False
"""
    result = run(suite, source, failed=2)
    result.stdout.fnmatch_lines(
        [
            "* what held which SMs *",
            "SMs by time, 0.000000 to 0.016* s: A main; lower case: draining; '.': free",
            f"GPU 0 SM    0-15 |{'A' * 64}|",
            f"GPU 0 SM   16-23 |{'.' * 32}{'A' * 32}|",
            f"GPU 0 SM   24-31 |{'.' * 64}|",
        ],
        consecutive=True,
    )
    assert len([line for line in result.outlines if "what held which SMs" in line]) == 1


def test_a_failed_test_shows_the_kernels_of_a_programs_own_pool(suite: pytest.Pytester) -> None:
    """A pool that the program makes itself is not watched, but its machine is."""
    source = """
async def test_it(sim_gpu):
    async with Pool(driver=sim_gpu.driver) as pool, pool.partition(16) as p:
        await p.launch(CONFIG, spin, 8 * MS)
        await asyncio.sleep(0.008)
        assert False
"""
    result = run(suite, source, failed=1)
    result.stdout.fnmatch_lines(
        [
            "* what held which SMs *",
            "SMs by time, 0.000* to 0.016* s: A spin; lower case: draining; '.': free",
            f"GPU 0 SM * |{'A' * 32}{'.' * 32}|",
        ],
        consecutive=True,
    )


def test_a_failed_test_is_one_failure(suite: pytest.Pytester) -> None:
    """A failed test is not also blamed for what its traceback keeps alive."""
    run(
        suite,
        """
async def test_it(sim_pool):
    async with sim_pool() as pool, pool.partition(16) as p:
        x = await p.empty(1000)
        assert x is None
""",
        failed=1,
    )


def test_what_must_be_left_is_no_leak(suite: pytest.Pytester) -> None:
    """Objects that greensched may not end, after a fault or a hang, are not leaks."""
    run(
        suite,
        """
async def test_a_crash(sim_pool):
    async with sim_pool(faults=[Crash("spin")]) as pool:
        with pytest.raises(greensched.DeviceLost):
            await pool.launch(CONFIG, spin, MS, sms=8)

async def test_a_hang(sim_pool):
    pool = sim_pool(faults=[Hang("spin")])
    await pool.open()
    with anyio.move_on_after(1):
        await pool.launch(CONFIG, spin, MS, sms=8)
    assert (await pool.aclose(grace=1)).abandoned
""",
        passed=2,
    )


def test_one_tests_leak_is_no_other_tests(suite: pytest.Pytester) -> None:
    """The test after one with an open pool has its own GPU, and passes."""
    run(
        suite,
        """
async def test_leaves(sim_pool):
    await sim_pool().open()

async def test_next(sim_pool):
    async with sim_pool() as pool:
        await pool.launch(CONFIG, spin, MS, sms=8)
""",
        apart=True,
        passed=2,
        errors=1,
    )


# -- what it costs ----------------------------------------------------------------------------


def test_an_unused_plugin_loads_nothing(tmp_path: Path) -> None:
    """A suite without its fixtures loads only the plugin's module."""
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    program = """
import json, sys, pytest
code = pytest.main(["-q", "-p", "greensched", "-p", "no:cacheprovider", sys.argv[1]])
print(json.dumps([int(code), *sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    code, *loaded = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    assert {name for name in loaded if name.startswith("greensched")} == {
        "greensched",
        "greensched.errors",
        "greensched.integrations",
        "greensched.integrations.pytest_plugin",
    }
    assert not {name.split(".")[0] for name in loaded} & {"numpy", "anyio", "asyncio", "starlette"}
