"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from greensched import driver as drivers
from greensched.cli import demo
from greensched.cli import main as cli
from greensched.errors import InvalidRequest
from greensched.kernels import gaussian_blur, matmul
from greensched.observability.trace_reader import read

#: Short, and long enough that every arrangement has requests and batch jobs.
SHORT = ("demo", "--seconds", "0.15", "--driver", "simulated:h200")
ROW = {
    "arrangement": str,
    "critical_sms": int,
    "batch_sms": int,
    "requests": int,
    "latency_p50_ms": float,
    "latency_p99_ms": float,
    "batch_jobs_per_s": float,
    "verified": int,
    "results": int,
}


def program(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Return the command as a shell starts it."""
    environment = {key: value for key, value in os.environ.items() if key != drivers.VARIABLE}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "greensched", *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def rows(printed: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(printed)["rows"]
    return rows


def test_the_demo_prints_four_arrangements() -> None:
    """As a program it exits with 0, and its JSON has four rows, each with all results verified."""
    done = program("demo", "--seconds", "0.15", "--json", GREENSCHED_DRIVER="simulated:h200")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["device"] == "Simulated H200"
    assert said["simulated"] is True
    alone, apart_alone, shared, apart = said["rows"]
    for row in said["rows"]:
        assert set(row) == set(ROW)
        assert {k: type(v) for k, v in row.items()} == ROW
        assert row["verified"] == row["results"] > 0
        assert row["requests"] > 0
        assert 0 < row["latency_p50_ms"] <= row["latency_p99_ms"]
    assert (alone["critical_sms"], alone["batch_sms"]) == (132, 0)
    assert (apart_alone["critical_sms"], apart_alone["batch_sms"]) == (16, 0)
    assert (shared["critical_sms"], shared["batch_sms"]) == (132, 132)
    assert apart["critical_sms"] == 16
    assert 100 <= apart["batch_sms"] <= 116
    for row in (alone, apart_alone):
        assert row["batch_jobs_per_s"] == 0
    for row in (shared, apart):
        assert row["batch_jobs_per_s"] > 0
        assert row["results"] == row["requests"] + 1  # the product is checked, too


def test_the_demo_says_first_what_it_runs_on(tmp_path: Path) -> None:
    """The first line names the driver that was requested; --trace writes a trace."""
    path = tmp_path / "t.perfetto-trace"
    options = ("--seconds", "0.01", "--json", "--trace", str(path))
    done = program("demo", *options, GREENSCHED_DRIVER="simulated:h100")
    assert read(path).history.services[""].leases == 5
    assert done.stderr == "This demo runs on simulated:h100, as requested.\n"


@pytest.mark.skipif(
    shutil.which("nvidia-smi") is not None,
    reason="where there is a GPU, the demo runs on it: its fallback shows on other machines only",
)
def test_without_a_gpu_the_demo_says_that_its_gpu_is_simulated() -> None:
    """The first line says that the GPU is simulated, and why."""
    done = program("demo", "--seconds", "0.01", "--json", LD_LIBRARY_PATH="")
    assert done.returncode == 0
    assert done.stderr.startswith("This demo runs on a simulated GPU (simulated:h200), because ")
    assert len(done.stderr.splitlines()) == 1
    assert json.loads(done.stdout)["simulated"] is True


def test_the_table_has_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    """It has a row for each arrangement, and says that the latencies are the device's."""
    assert cli.main(SHORT) == 0
    printed = capsys.readouterr()
    lines = [line.rstrip() for line in printed.out.splitlines()]
    assert lines[0] == "Simulated H200: latencies on the device's timeline"
    for header in ("arrangement", "SMs", "p50 ms", "p99 ms", "batch SMs", "jobs/s"):
        assert header in lines[1]
    for name, line in zip(
        ("critical alone, all SMs", "critical alone, 16 SMs", "both on all SMs", "16 SMs + the"),
        lines[2:6],
        strict=True,
    ):
        assert name in line
    assert "The times of a simulated GPU are modelled." in printed.out
    verified, results = (int(lines[-1].split()[i]) for i in (1, 3))
    assert lines[-1] == f"verified {verified} of {results} results against numpy"
    assert verified == results > 0


def test_the_progress_bar_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file or a pipe gets no carriage returns; a terminal gets a bar, which is erased."""
    assert cli.main([*SHORT, "--json"]) == 0
    assert "\r" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main([*SHORT, "--json"]) == 0
    drawn = capsys.readouterr().err
    assert "critical alone" in drawn
    assert drawn.endswith("\x1b[2K")  # the line is erased


@pytest.mark.parametrize(("kernel", "buffers"), [(gaussian_blur, 2), (matmul, 3)], ids=["b", "m"])
def test_one_wrong_result_is_exit_code_1(
    kernel: Any, buffers: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that gives wrong results is found out: exit code 1, and the count says how many."""
    reference = kernel.spec.reference

    def spoilt(launch: Any, *arguments: Any) -> None:
        reference(launch, *arguments)
        arguments[buffers - 1][0] *= 2

    monkeypatch.setattr(kernel.spec, "reference", spoilt)
    assert cli.main([*SHORT, "--json"]) == 1
    wrong = [row["results"] - row["verified"] for row in rows(capsys.readouterr().out)]
    if kernel is gaussian_blur:
        assert all(wrong)
    else:
        assert wrong == [0, 0, 1, 1]


def test_a_driver_that_is_none_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A driver that does not exist is reported in one line."""
    assert cli.main(["demo", "--driver", "nonsense"]) == 2
    assert "no driver 'nonsense'" in capsys.readouterr().err


def test_an_error_of_a_task_group_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typed error that tasks of a group raise is printed without a traceback: exit code 2."""
    error = InvalidRequest("the first error")

    async def fail(*_: Any, **__: Any) -> None:
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", [error])])

    monkeypatch.setattr(demo, "run", fail)
    assert cli.main([*SHORT]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "greensched: the first error"


def test_the_version_is_reported() -> None:
    """--version prints the installed version, or that none is installed, and nothing else."""
    try:
        expected = version("greensched")
    except PackageNotFoundError:
        expected = "not installed"
    done = program("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, expected + "\n", "")


def test_the_command_is_installed() -> None:
    """The package installs the command `greensched`."""
    command = Path(sys.executable).with_name("greensched")
    if not command.exists():
        pytest.skip("there is no command: greensched is imported from its folder, not installed")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert "demo" in done.stdout


def test_the_demo_leaves_nothing_unclosed() -> None:
    """With warnings as errors, the demo prints one line to standard error: its driver."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "greensched", "demo", "--seconds", "0.05"],
        env=os.environ | {"GREENSCHED_DRIVER": "simulated:h200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1, done.stderr
