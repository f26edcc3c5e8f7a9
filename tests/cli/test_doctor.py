"""`greensched doctor` and `info`: on a machine as it is, without a GPU, and on a broken install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from greensched.cli import doctor, facts
from greensched.cli import main as cli
from greensched.cli.main import _without_click as without_click
from greensched.driver import simulated
from greensched.errors import DriverUnavailable
from greensched.leasing import process

ROOT = Path(__file__).parents[2]
SIMULATED = ["--driver", "simulated:h200+l40s@13.1"]


def statuses(findings: list[doctor.Finding]) -> dict[tuple[str, str], str]:
    return {(finding.section, finding.name): finding.status for finding in findings}


def test_a_simulated_machine_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Each device is listed with its cells and work queues; exit code 0."""
    assert cli.main(["doctor", *SIMULATED]) == 0
    said = capsys.readouterr().out
    assert "Simulated H200, 132 SMs" in said
    assert "15 cells of 8 SMs, 12 SMs over" in said
    assert "device 1" in said
    assert "device_ctx, 8 streams at once" in said
    assert said.endswith("A pool can be opened here.\n")


def test_older_drivers_say_what_they_lack(capsys: pytest.CaptureFixture[str]) -> None:
    """What CUDA 13.0 lacks is a note with what it needs, and prevents nothing."""
    assert cli.main(["doctor", "--json", "--driver", "simulated:h200@13.0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    lines = {each["name"]: each for each in found["findings"]}
    assert lines["not supported"]["status"] == "note"
    assert "work-queue resources (CUDA 13.1)" in lines["not supported"]["text"]
    assert lines["work queues"]["status"] == "note"


@pytest.mark.fault("C13")
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nonsense", "there is no driver 'nonsense'"),
        ("cuda", "-> to run without a GPU: GREENSCHED_DRIVER=simulated:h200"),
    ],
)
def test_no_driver_is_an_error_with_a_way_out(
    spec: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver that cannot start, or does not exist, is told with its remedy; exit code 1."""

    def no_driver() -> None:
        raise DriverUnavailable("no CUDA driver was found")

    monkeypatch.setattr("greensched.driver._cuda", no_driver)
    assert cli.main(["doctor", "--driver", spec]) == 1
    printed = capsys.readouterr().out
    assert said in printed
    assert printed.endswith("A pool cannot be opened here.\n")


@pytest.mark.parametrize("package", ["click", "numpy", "cuda"])
def test_a_broken_install_is_diagnosed(package: str, tmp_path: Path) -> None:
    """Whichever package cannot be imported, doctor ends well and says how to install it."""
    (tmp_path / f"{package}.py").write_text("raise ImportError('this package is broken')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "greensched", "doctor", "--json", "--driver", "simulated:h200"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)
    name = "cuda-bindings" if package == "cuda" else package
    (line,) = [each for each in found["findings"] if each["name"] == name]
    assert line["status"] in ("warning", "error")
    assert line["remedy"].startswith(f"pip install '{name}>=")
    assert done.returncode == (1 if package in ("anyio", "numpy") else 0)


def test_without_click_other_commands_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, which names doctor; exit code 2."""
    monkeypatch.delitem(sys.modules, "greensched.cli.commands", raising=False)
    monkeypatch.setitem(sys.modules, "click", None)
    import greensched.cli

    monkeypatch.delattr(greensched.cli, "commands", raising=False)
    assert cli.main(["plan", "16"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "greensched doctor says what is missing" in line


def test_a_command_that_lacks_a_package_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line instead of a traceback, which names doctor; exit code 2."""

    def broken() -> None:
        raise ModuleNotFoundError("No module named 'rich'")

    monkeypatch.setattr(facts, "software", broken)
    assert cli.main(["info", *SIMULATED]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "greensched: No module named 'rich': greensched doctor says what is missing"


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [("12.9.10", False), ("13", True), ("13.0.3", True), ("13.5.0rc1", True), ("14.0", False)],
)
def test_a_package_of_an_unsupported_version_is_a_warning(
    version: str, is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds are those of the requirement, which the remedy names."""
    monkeypatch.setattr(doctor, "PACKAGES", {"numpy": "numpy>=13,<14"})
    monkeypatch.setattr(doctor, "LIBRARIES", ())
    monkeypatch.setattr(doctor.metadata, "version", lambda _name: version)
    found, _ = doctor._packages()
    assert (found.status, found.remedy) == (
        ("ok", "") if is_supported else ("warning", "pip install 'numpy>=13,<14'")
    )


def test_doctor_names_the_requirements_of_the_package() -> None:
    """The list that doctor has without an installation is that of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert list(doctor.PACKAGES.values()) == project["dependencies"]


GPU = "0, 1200, 1980, 690.12, 700.00, 0x0000000000000024, Default, Enabled\n"
PROCESSES = "4242, /usr/bin/python3, 1024\n"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a program of that name that answers as the real one (`csv,noheader,nounits`)."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in *compute-apps*) printf "{PROCESSES}";; *) printf "{GPU}";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return program


@pytest.mark.fault("C16")
@pytest.mark.usefixtures("nvidia_smi")
def test_clocks_power_modes_and_processes_are_asked_of_nvidia_smi() -> None:
    """A clock that is held back, MIG, and another process are warnings."""
    found = list(doctor._gpus()) + list(doctor._processes())
    assert statuses(found) == {
        ("gpu 0", "clocks"): "warning",
        ("gpu 0", "power"): "ok",
        ("gpu 0", "compute mode"): "ok",
        ("gpu 0", "MIG"): "warning",
        ("gpu", "process 4242"): "warning",
    }
    assert found[0].text == "1200 of 1980 MHz, held back by: power limit, temperature"
    assert found[1].text == "690.12 of 700.00 W"


def test_a_pool_of_another_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It prevents another pool, unless a further device is free."""
    monkeypatch.setattr(process, "other_holder", {"GPU-1": 4242, "GPU-2": None}.get)
    (alone,) = doctor._pools(["GPU-1"]).values()
    assert (alone.section, alone.status) == ("device 0", "error")
    assert alone.text == "process 4242 has a pool on this device"
    (beside,) = doctor._pools(["GPU-1", "GPU-2"]).values()
    assert (beside.section, beside.status) == ("device 0", "warning")
    assert beside.remedy == "Pool([1]) has the free ones"


@pytest.mark.parametrize("driver", [["--driver", "simulated:t4"], ["--driver=simulated:t4"]])
def test_without_click_doctor_takes_a_driver(
    driver: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both forms of an option are understood, as click understands them."""
    assert without_click(["doctor", *driver], ImportError("no click")) == 0
    assert "Simulated T4" in capsys.readouterr().out


def test_without_nvidia_smi_clocks_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a note, once."""
    monkeypatch.setenv("PATH", "")
    (finding,) = [*doctor._gpus(), *doctor._processes()]
    assert finding.status == "note"
    assert "unknown" in finding.text


def test_a_variable_that_hides_the_gpus_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that are set are listed; one that hides every GPU says so."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    found = statuses(list(doctor._environment()))
    assert found["environment", "CUDA_VISIBLE_DEVICES"] == "warning"
    assert found["environment", "CUDA_DEVICE_MAX_CONNECTIONS"] == "note"


def test_what_a_device_is_costs_no_context() -> None:
    """The facts of a device are those that a pool uses, and nothing is left open."""
    machine = simulated.open("h200@13.1")
    machine.initialise()
    found = facts.of_device(machine, 0)
    assert found["coscheduled"] == {"cells": 15, "sms_each": 8, "sms_over": 12}
    assert found["fine"] == {"cells": 66, "sms_each": 2, "sms_over": 0}
    assert not machine.live()
    machine.close()


def test_info_is_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Both have each device, its SMs and its cells."""
    assert cli.main(["info", *SIMULATED]) == 0
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert "driver simulated (CUDA 13.1)" in first
    assert [row.split()[:4] for row in rows] == [
        ["0", "Simulated", "H200", "132"],
        ["1", "Simulated", "L40S", "142"],
    ]
    assert cli.main(["info", "--json", *SIMULATED]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["driver"]["features"]["workqueues"] is True
    assert [each["sms"] for each in found["devices"]] == [132, 142]
