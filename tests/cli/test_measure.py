"""`greensched measure`: the file that it writes, and that `simulate` reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from greensched.cli import main as cli
from greensched.cli import measure as measuring

Capture = pytest.CaptureFixture[str]

MODEL = """
def decode(batch):
    def step():
        pass
    step.nbytes = 1000 * batch
    return step
"""


def short(patch: pytest.MonkeyPatch) -> None:
    """Repeat measurements as few times as possible."""
    for name in ("HOST_REPEATS", "PASS_REPEATS"):
        patch.setattr(measuring, name, 2)
    patch.setattr(measuring, "WARM", 0)
    patch.setattr(measuring, "SUSTAINED_S", 0.01)


def test_measure_writes_tables_and_host_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model file and --host give a table for each pass that it defines, and the host's costs."""
    short(monkeypatch)
    model, out = tmp_path / "model.py", tmp_path / "tables.json"
    model.write_text(MODEL)
    arguments = ["measure", str(model), "--host", "--out", str(out), "--batches", "4,1"]
    assert cli.main([*arguments, "--sms", "8", "--driver", "simulated:h200"]) == 0
    found = json.loads(out.read_text())
    assert set(found) == {"host", "decode"}
    table = found["decode"]
    assert table["sms"] == [8, 132]
    assert table["sizes"] == [1, 4]
    assert table["bytes"] == [1000, 4000]
    assert [len(row) for row in table["ms_by_size"]] == [2, 2]
    assert table["ms"] == table["ms_by_size"][-1]
    for name in ("submission", "wake", "hop", "lease", "checkpoint"):
        assert 0 < found["host"][name]["p50_us"] <= found["host"][name]["p99_us"]


def test_what_was_measured_is_shown_as_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --out and --json there is a table for the host and for each pass."""
    short(monkeypatch)
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    arguments = ["measure", str(model), "--host", "--batches", "4,1", "--sms", "8"]
    assert cli.main([*arguments, "--driver", "simulated:h200"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == [
        *("host:", "operation", "submission", "wake", "hop", "lease", "checkpoint"),
        *("decode:", "batch", "1", "4"),
    ]
    assert lines[8] == ["batch", "8", "SMs,", "ms", "132", "SMs,", "ms"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "give a model file, or --host"),
        (["missing.py"], "not a Python file that defines prefill or decode"),
        (["--host", "--sms", "0"], "'--sms': '0' is not a list of numbers of at least 1"),
        (["--host", "--batches", "x"], "'--batches': 'x' is not a list of numbers"),
    ],
)
def test_measure_says_what_is_wrong(
    arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that cannot measure anything says what to give, and exits with 2."""
    assert cli.main(["measure", *arguments, "--driver", "simulated:h200"]) == 2
    assert wanted in capsys.readouterr().err


def test_a_model_file_without_a_pass_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that defines neither pass is refused, with what it should define."""
    model = tmp_path / "model.py"
    model.write_text("pass\n")
    assert cli.main(["measure", str(model), "--driver", "simulated:h200"]) == 2
    assert "define prefill(tokens) or decode(batch)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x =\n", "model.py:1: SyntaxError: invalid syntax"),
        ("import nothing_of_this_name\n", "model.py:1: ModuleNotFoundError: No module named"),
        ("def decode(batch):\n    return 1 / 0\n", "model.py:2: ZeroDivisionError: division"),
        ("def decode(batch):\n    def step():\n        1 / 0\n    return step\n", "model.py:3: "),
        ("def decode(batch):\n    return batch\n", "decode(1) returned 1: return a function"),
    ],
)
def test_a_model_file_that_fails_is_told_by_its_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """One line on standard error says where and why; exit code 2."""
    short(monkeypatch)
    model = tmp_path / "model.py"
    model.write_text(text)
    assert cli.main(["measure", str(model), "--driver", "simulated:h200"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_what_was_measured_is_printed_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that cannot be written costs the exit code, not the measurement."""
    short(monkeypatch)
    out = tmp_path / "missing" / "tables.json"
    assert cli.main(["measure", "--host", "--out", str(out), "--driver", "simulated:h200"]) == 2
    printed = capsys.readouterr()
    assert set(json.loads(printed.out)) == {"host"}
    assert f"--out {out}: No such file or directory" in printed.err


def test_the_power_is_that_of_the_measured_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is named to nvidia-smi by its UUID; of one that it does not know there is no power."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *--id=GPU-b*) echo 295.5;; *--id=0*) echo 70;; *) exit 6;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert measuring.power("GPU-b") == 295.5
    assert measuring.power("GPU-simulated") == 0.0
