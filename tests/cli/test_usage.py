"""Help, wrong usage, completion: the same for every command."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import click
import pytest

from greensched.cli import commands
from greensched.cli import main as cli
from greensched.driver.simulated import PRESETS

COMMANDS: dict[str, click.Command] = commands.greensched.commands

#: A wrong use of each command, and what the answer names.
WRONG = {
    "bench": (["lease"], "unexpected extra argument (lease)"),
    "demo": (["--seconds", "soon"], "'soon' is not a number above 0"),
    "doctor": (["now"], "unexpected extra argument (now)"),
    "info": (["--jsn"], "--jsn"),
    "measure": ([], "nothing to measure: give a model file, or --host"),
    "plan": ([], "Missing argument 'SIZES...'"),
    "trace": ([], "Missing argument 'FILE'"),
    "simulate": (["--slo", "first"], "gives no seconds by class, such as first=0.5,between=0.05"),
    "top": (["--interval", "0"], "'0' is not a number above 0"),
}
LOADED = """
import sys
from greensched.cli.main import main
main({arguments})
print(*sorted({{"anyio", "asyncio.base_events", "cuda", "numpy", "rich"}} & sys.modules.keys()))
"""


def test_every_command_has_a_wrong_use_here() -> None:
    """The table above has each command, and no other."""
    assert set(WRONG) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_usage_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what is wrong and where to read more, and exits with 2."""
    arguments, said = WRONG[name]
    assert cli.main([name, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"greensched {name}: ")
    assert said in line
    assert line.endswith((f". See greensched {name} --help", f"? See greensched {name} --help"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "greensched: No such command 'nonsense'. See greensched --help"),
        (["simulate", "--trace", "a.csv", "--generate", "code"], "give one of them"),
        (["demo", "--seconds", "0"], "'0' is not a number above 0"),
        (["demo", "--seconds", "nan"], "'nan' is not a number above 0"),
        (["top", "--interval", "inf"], "'inf' is not a number above 0 and up to 1000000"),
        (["plan", "1", "--jsn"], "? See greensched plan --help"),  # "Did you mean --json?"
        (["simulate", "--repeats", "0"], "'--repeats': 0 is not in the range x>=1"),
        (["simulate", "--load-factors", "0,1"], "is not a list of numbers above 0, such as"),
        (["trace", "a", "--plot", "a.gif"], "give a file that ends in .html, .png, .svg"),
        (["trace", "a", "--plot", "none/a.html"], "--plot none/a.html: there is no folder none"),
        (["trace", "a"], "greensched: a: No such file or directory"),
        (["plan", "16", "--driver", "nonsense"], "greensched: there is no driver 'nonsense'"),
    ],
)
def test_what_cannot_run_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command, options that exclude each other, an error of the library: exit code 2."""
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_without_a_command_there_is_the_list_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """It goes to standard error, since nothing was done: exit code 2."""
    assert cli.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(name in printed.err for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_is_taken_without_an_option(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each option has a sentence; one that has a value by default says which; all print JSON."""
    command = COMMANDS[name]
    assert cli.main([name, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert command.help is not None
    assert command.help.split("\n")[0] in text
    options: list[Any] = [each for each in command.params if isinstance(each, click.Option)]
    assert "as_json" in [option.name for option in options]
    for option in options:
        assert option.help.endswith(".")
    said = sum(
        isinstance(option.show_default, str)
        or (isinstance(option.default, (str, int, float)) and not option.is_flag)
        for option in options
    )
    assert text.count("[default: ") == said


@pytest.mark.parametrize("arguments", [["--help"], ["simulate", "--help"], ["plan", "x"]])
def test_help_loads_little(arguments: list[str]) -> None:
    """Help and wrong usage load neither numpy nor rich, CUDA or an event loop."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(arguments=arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("greensched pl", ["plan"]),
        ("greensched simulate --gran", ["--granularity"]),
        ("greensched plan --granularity f", ["fine"]),
        ("greensched info --driver simulated:h200", ["simulated:h200"]),
        ("greensched info --driver simulated : h20", ["h200", "h20"]),  # as bash splits it
        ("greensched info --driver simulated :", [*PRESETS]),
        ("greensched simulate --generate azure-con", ["azure-conv"]),
        ("greensched simulate --gpus h2", ["h200", "h20"]),
        ("greensched simulate --services w", ["w2", "w8"]),
        ("greensched simulate --policy streams,size", ["streams,sized"]),
    ],
)
def test_shells_complete(
    words: str,
    found: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Commands, options, and the values that an option takes."""
    monkeypatch.setenv("_GREENSCHED_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code in (0, None)
    assert [line.split(",", 1)[1] for line in capsys.readouterr().out.splitlines()] == found


def test_an_interrupt_ends_a_command_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C leaves a line and no traceback."""
    from greensched.leasing import preview

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(preview, "preview_devices", interrupt)
    assert cli.main(["plan", "16"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "greensched: interrupted"


def test_a_reader_that_ends_is_no_error() -> None:
    """`greensched plan | true` says nothing on standard error."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-u", "-m", "greensched", "plan", "16", "--driver", "simulated:h200"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "")
