"""Faults D to F that no other module shows: threads, interpreters, series, values, documents."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import anyio
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

import greensched
from greensched import LaunchConfig, Pool
from greensched.driver import simulated
from greensched.driver.simulated import Crash
from greensched.integrations.prometheus import export
from greensched.kernels import fill, saxpy, spin

ROOT = Path(__file__).parents[2]
ONE = LaunchConfig(grid=1, block=1)


@pytest.mark.fault("D13")
def test_the_thread_that_opened_a_pool_may_end() -> None:
    """What it opened and used is used, and closed, by another thread."""
    pool = Pool(driver="simulated:h20")

    async def use() -> None:
        await pool.open()
        async with pool.partition(8) as p:
            with await p.upload(np.ones(8, np.float32)) as b:
                await p.launch(ONE, fill, b, 2.0, 8)
                assert (await p.download(b)).tolist() == [2.0] * 8

    first = threading.Thread(target=anyio.run, args=(use,))
    first.start()
    first.join()

    async def go_on() -> None:
        await use()
        assert not (await pool.aclose()).abandoned

    anyio.run(go_on)


@pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="needs Python 3.11: in a sub-interpreter of 3.12.1 `import asyncio` aborts the process",
)
@pytest.mark.fault("D15")
def test_a_sub_interpreter_is_refused() -> None:
    """It has no threads, as Python says where a pool opens; the process does not crash."""
    inner = """
        import asyncio, warnings
        warnings.simplefilter("ignore")
        from greensched import Pool

        async def main():
            async with Pool(driver="simulated:h20") as pool, pool.partition(8):
                print("opened", flush=True)

        asyncio.run(main())
        """
    outer = f"""
        import _xxsubinterpreters as interpreters
        try:
            interpreters.run_string(interpreters.create(), {textwrap.dedent(inner)!r})
        except interpreters.RunFailedError as error:
            print(error)
        """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(outer)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "thread is not supported for isolated subinterpreters" in ended.stdout
    assert "opened" not in ended.stdout


@pytest.mark.fault("E9")
def test_requests_add_no_series() -> None:
    """Leases of many sizes, tasks and kernels are counted in the series that there were."""
    registry = CollectorRegistry()

    def series() -> set[str]:
        lines = generate_latest(registry).decode().splitlines()
        return {line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")}

    async def main() -> None:
        async with Pool(driver="simulated:h20") as pool:
            export(pool, registry=registry)

            async def use(sms: int) -> None:
                async with pool.partition(sms) as p:
                    await p.launch(ONE, spin, 1000)

            await use(8)
            before = series()
            async with anyio.create_task_group() as tasks:
                for number in range(60):
                    tasks.start_soon(use, number % 48 + 1, name=f"tenant {number}")
            assert series() == before

    anyio.run(main)


@pytest.mark.fault("F13")
def test_no_value_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Records, logs, statistics, `repr` and errors have no value of an argument or array."""
    secret, told = 8675309, list[str]()
    caplog.set_level(logging.DEBUG, "greensched")

    async def main() -> None:
        pool = Pool(driver=simulated.open("h20", faults=[Crash("spin", nth=2)]), prepare=[spin])
        await pool.open()
        pool.watch(lambda record: told.append(repr(record)))
        with pytest.raises(greensched.DeviceLost) as lost:
            async with pool.partition(8) as p:
                x = await p.upload(np.full(8, secret, np.float32))
                await p.launch(ONE, saxpy, float(secret), x, x, 8)
                with pytest.raises(greensched.GreenschedError) as refused:
                    p.launch(ONE, fill, x, f"{secret}", 8)
                with pytest.raises(greensched.GreenschedError) as beyond:
                    p.launch(ONE, saxpy, x, float(secret), x, 8)
                bound = p.bind(ONE, saxpy, float(secret), x, x, 8)
                told.extend(map(repr, (x, bound, p, pool, p.run(int, secret))))
                told.append(str(pool.statistics().as_dict()))
                await p.launch(ONE, spin, secret)
                await p.launch(ONE, spin, secret)
        told.extend(map(str, (lost.value, refused.value, beyond.value)))
        await pool.aclose()

    anyio.run(main)
    everything = "\n".join([*told, caplog.text])
    assert str(secret) not in everything
    assert f"{float(np.float32(secret)):g}" not in everything


@pytest.mark.fault("F8", "F9")
def test_the_documentation_says_what_a_partition_is_not() -> None:
    """README and the page on kernels say that it is no boundary, and to load no stranger's code."""
    for page in ("README.md", "docs/how-to/kernels.md"):
        assert re.search(r"no (fault or )?security boundary", (ROOT / page).read_text())
    assert "Never load a stranger's cubin." in (ROOT / "docs/how-to/kernels.md").read_text()


@pytest.mark.fault("F14")
def test_dependencies_are_pinned() -> None:
    """Each line of constraints.txt names one version, and each tool of the tests is there."""
    text = (ROOT / "constraints.txt").read_text()
    pinned = [line.split(";")[0].strip() for line in re.sub(r"#.*", "", text).split("\n")]
    pinned = [line for line in pinned if line]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line) for line in pinned)
    names = {line.split("==")[0].lower() for line in pinned}
    assert names >= {"pytest", "numpy", "anyio", "cuda-bindings", "mypy", "ruff"}


@pytest.mark.fault("I16")
def test_tests_of_grants_are_clean_in_development_mode() -> None:
    """Tests of grants, where tasks end and loops close, pass with every warning an error."""
    flags = ["-W", "error", "-X", "dev", "-m", "pytest", "-q", "-p", "no:randomly", "-k", "loop"]
    ended = subprocess.run(
        [sys.executable, *flags, "tests/leasing/test_grants.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
