"""docs/reference/command-line.md: every command has an example, whose output is what it prints."""

from __future__ import annotations

import re
import shlex
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path

import pytest

from greensched import driver as drivers
from greensched.cli import commands, measure
from greensched.cli import main as cli
from helpers.screens import in_scene

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reference/command-line.md"
#: The program that writes the trace of the examples.
TRACED = re.findall(
    r"^```python\n(.*?)^```$", (DOCS / "how-to/trace.md").read_text(), re.DOTALL | re.MULTILINE
)
#: Commands whose numbers differ between machines or policies: they are compared as numbers.
TIMED = {"bench", "demo", "measure", "simulate", "trace"}
EXAMPLES: dict[str, str] = dict(
    re.findall(
        r"^```console\n\$ greensched ([^\n]+)\n(.*?)^```$",
        PAGE.read_text(),
        re.DOTALL | re.MULTILINE,
    )
)


def test_every_command_has_an_example() -> None:
    """The page has one for each command, under the command's name."""
    assert {line.split()[0] for line in EXAMPLES} == set(commands.greensched.commands)
    headings = re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE)
    assert set(commands.greensched.commands) <= set(headings)


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_prints_what_the_page_says(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Words and whole numbers are the same; so is every number of a command without times."""
    monkeypatch.setenv(drivers.VARIABLE, "simulated:h200")
    monkeypatch.setattr(measure, "HOST_REPEATS", 3)
    monkeypatch.setattr(measure, "WARM", 0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    codes = []

    def run(*_: object) -> None:
        codes.append(cli.main(shlex.split(line)))

    if line.startswith("top"):
        in_scene(run)  # it needs a pool
    else:
        if line.startswith("trace"):
            exec(*TRACED, {})
        run()
    assert codes == [0]
    wanted, found = EXAMPLES[line], capsys.readouterr().out
    if line.split()[0] in TIMED:
        wanted, found = (re.sub(r"\b\d+(\.\d+)?\b", "#", text) for text in (wanted, found))
    checker = OutputChecker()
    assert checker.check_output(wanted, found, ELLIPSIS | NORMALIZE_WHITESPACE), found
