"""`greensched top`: its screen at any width, and what it says when it cannot draw one."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from greensched import Snapshot
from greensched.cli import main as cli
from greensched.cli import top
from greensched.cli.top import Screen
from greensched.errors import SocketUnavailable
from helpers.screens import in_scene

ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a test's sockets."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "greensched"


@pytest.fixture(scope="module")
def taken() -> Snapshot:
    """Return the snapshot of a pool with leased, lent, draining and free SMs, and a queue."""
    found: list[Snapshot] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        in_scene(lambda pool: found.append(pool.snapshot()))
    return found[0]


def drawn(*snapshots: Snapshot, width: int = 80, in_ascii: bool = False, **options: Any) -> str:
    """Return what a console prints."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if in_ascii else "utf-8")
    before = [one.as_dict() for one in options.pop("before", ())]
    problems = options.pop("problems", ())
    console = Console(file=file, width=width, highlight=False, markup=False, **options)
    console.print(Screen([one.as_dict() for one in snapshots], problems, before))
    file.seek(0)
    return file.read()


# -- the screen --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 150, 200])
def test_a_screen_is_as_wide_as_the_console(width: int, taken: Snapshot) -> None:
    """No line is wider, and each cell has its letter, at whatever width."""
    text = drawn(taken, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "process" in text
    assert ("borrowed" in text) == (width >= 150)


@pytest.mark.parametrize("width", [40, 80, 150])
def test_a_long_name_leaves_the_figures_whole(width: int, taken: Snapshot) -> None:
    """The name of a class is cut, and no figure beside it; leases of removed classes are shown."""
    first, *_ = taken.services
    long = replace(
        first, name="a class with a very long name", granted=1, reserve=132, sms=132,
        wait_p99=0.0156, use_p99=0.99, sm_time=1.0,
    )  # fmt: skip
    (line,) = [
        line for line in drawn(replace(taken, services=(long,)), width=width).splitlines()
        if line.startswith("A a ")
    ]  # fmt: skip
    assert line.count("…") == 1
    assert {"132", "16ms", "990ms", "100%"} <= set(line.split("…")[1].split())


def test_hung_cells_are_in_the_legend(taken: Snapshot) -> None:
    """Where there are such; a screen without them has no word of them."""
    (device,) = taken.devices
    cells = (replace(device.cells[0], state="hung"), *device.cells[1:])
    hung = replace(taken, devices=(replace(device, cells=cells),))
    assert "× hung" in drawn(hung, width=200)  # noqa: RUF001  a cross
    assert "hung" not in drawn(taken)


def test_the_strip_shows_what_each_cell_does(taken: Snapshot) -> None:
    """Lent, leased, draining, kept and free cells differ without colours."""
    strip = drawn(taken).splitlines()[4]
    lent, leased, drain = 4 * "░░░░░", 4 * "█████", "╱╱╱╱"  # noqa: RUF001  a hatch
    assert strip == f"T{lent[1:]}{leased}E{9 * '█'}T{drain}c····C{9 * '█'}c····" + 5 * "·"
    assert drawn(taken, in_ascii=True).splitlines()[4].startswith("T-------------------####")


def test_many_cells_go_on_below(taken: Snapshot) -> None:
    """A device with more cells than columns for two each has several lines."""
    (device,) = taken.devices
    many = replace(taken, devices=(replace(device, cells=device.cells * 5),))
    lines = drawn(many, width=60).splitlines()
    assert sum(line[:1] in "TECc·█" and "█" in line and "leased" not in line for line in lines) > 2


def test_each_class_says_what_its_first_request_waits_for(taken: Snapshot) -> None:
    """The sentence follows the class, the task and the time."""
    words = " ".join(drawn(taken, width=200).split())
    assert "E embed embed queries 6ms needs 16 SMs; its class holds 16 of at most 24" in words
    assert "(3 times)" in words
    assert "T train train step 811 21ms 8 SMs, cell 10 draining 21ms" in words
    assert "screens.py:" in words


def test_a_second_screen_shows_what_happened_since(taken: Snapshot) -> None:
    """SM-time and the rate of grants are those between the two."""
    none, critical, *rest = taken.services
    more = replace(critical, sm_seconds=(critical.sm_seconds or 0) + 3, granted=critical.granted)
    later = replace(
        taken, time=taken.time + 2, granted=taken.granted + 3000, services=(none, more, *rest)
    )
    text = drawn(later, before=[taken])
    assert "(1,500/s)" in text
    (line,) = [line for line in text.splitlines() if line.startswith("C critical   ")][:1]
    assert "100%" in line
    assert "100%" not in drawn(later)


def test_what_is_wrong_stands_out(taken: Snapshot) -> None:
    """A lost device, a full queue, what the pool does without, and a pool that does not answer."""
    (device,) = taken.devices
    lost = replace(
        taken,
        state="poisoned",
        max_waiting=3,
        degraded=("device 0 does without a thing",),
        devices=(replace(device, failure="the device failed"),),
    )
    text = drawn(lost, problems=["/x.sock: no answer"], force_terminal=True, color_system="256")
    for said, colour in [
        ("poisoned", "1;31m"),
        ("3 of 3 waiting", "1;31m"),
        ("the device failed", "1;31m"),
        ("does without", "33m"),
        ("/x.sock: no answer", "33m"),
    ]:
        (line,) = [line for line in text.splitlines() if said in line]
        assert colour in line


def test_a_pool_that_opens_has_a_screen(taken: Snapshot) -> None:
    """Nothing is known of it yet but its state, and why it could not open before."""
    bare = Snapshot(taken.pid, 0.0, "opening")
    assert drawn(bare) == f"greensched process {taken.pid}: opening\n"
    assert drawn(replace(bare, opening_error="no GPU")).endswith("\nit could not open: no GPU\n")


def test_a_name_cannot_steer_the_terminal(taken: Snapshot) -> None:
    """Characters that do not print are replaced: names are what programs made them."""
    (device,) = taken.devices
    lease = replace(device.leases[0], holder=f"{ESCAPE}]0;title\x07")
    bad = replace(taken, devices=(replace(device, leases=(lease,)),))
    assert ESCAPE not in drawn(bad)
    assert "?]0;title?" in drawn(bad)


def test_classes_have_letters_of_their_own() -> None:
    """The first letter of the name, or another one; a star where none is left."""
    names = ["", "critical", "cache", "c", *(f"{n}" for n in range(26))]
    letters = top._letters(names)
    assert [letters[name] for name in names[:4]] == ["*", "C", "A", "B"]
    assert sorted(letters.values()).count("*") == 4


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (0, "0us"), (7.63e-6, "7.6us"), (0.000061, "61us"), (0.000996, "1ms"),
        (0.0156, "16ms"), (0.9949, "995ms"), (1.5, "1.5s"), (64, "64s"), (600, "10min"),
        (7200, "2h"),
    ],
)  # fmt: skip
def test_times_have_two_digits_and_a_unit(seconds: float | None, text: str) -> None:
    """As long as a column is wide."""
    assert top._seconds(seconds) == text


# -- which pools -------------------------------------------------------------------------------


def test_every_pool_is_found(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Without an argument, by process, and by path: the same pool, as JSON for scripts."""

    def look(_pool: Any) -> None:
        (path,) = folder.iterdir()
        for given in ([], [str(os.getpid())], [str(path)]):
            assert cli.main(["top", "--once", "--json", *given]) == 0
            (found,) = json.loads(capsys.readouterr().out)
            assert found["pid"] == os.getpid()
            assert [one["name"] for one in found["services"]] == ["", "critical", "train", "embed"]

    in_scene(look)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "no pool of this user has a socket: open it with Pool(socket=True)"),
        ([str(os.getpid())], "has no pool with a socket: open it with Pool(socket=True)"),
        (["999999999"], "there is no process 999999999"),
        (["/no/pool.sock"], "/no/pool.sock: no pool listens there"),
    ],
)
def test_no_pool_is_one_line(given: list[str], said: str, capsys: Any, folder: Path) -> None:
    """It says what is missing, and exits with 2, with a screen and with JSON."""
    for options in (["--once"], ["--json"], []):
        assert cli.main(["top", *options, *given]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith("greensched: ")
        assert line.endswith(said)


def test_a_pool_that_does_not_answer_is_named_beside_others(
    taken: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are shown; where there is no other, it is the error."""
    answers: dict[str, Any] = {"a": taken.as_dict()}

    def read(path: Path) -> Any:
        if str(path) in answers:
            return answers[str(path)]
        raise SocketUnavailable(path, "no answer within 5 s")

    monkeypatch.setattr(top, "find_sockets", lambda pid: [Path("a"), Path("b")])
    monkeypatch.setattr(top, "read_snapshot", read)
    found, problems = top.read(None)
    assert (len(found), problems) == (1, ["b: no answer within 5 s"])
    answers.clear()
    with pytest.raises(SocketUnavailable, match="a: no answer"):
        top.read(None)


# -- again and again ---------------------------------------------------------------------------


@pytest.fixture
def screens(monkeypatch: pytest.MonkeyPatch, taken: Snapshot) -> list[float]:
    """Return the screens of a pool until an interrupt at the third wait."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top, "read_snapshot", lambda path: taken.as_dict())
    monkeypatch.setattr(top.time, "sleep", sleep)
    return waits


def test_it_goes_on_until_interrupted(screens: list[float], capsys: Any) -> None:
    """In a pipe each screen is below the last one; Ctrl-C is no error."""
    assert cli.main(["top", "a.sock", "--interval", "0.5"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("greensched process") == 3
    assert ESCAPE not in printed.out
    assert printed.err == ""
    assert screens == [0.5, 0.5, 0.5]


def test_json_goes_on_in_lines(screens: list[float], capsys: Any, taken: Snapshot) -> None:
    """Each line is a list of snapshots, for a script that reads on."""
    assert cli.main(["top", "a.sock", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == 3 * [json.loads(json.dumps([taken.as_dict()]))]


def test_a_terminal_is_drawn_over(screens: list[float]) -> None:
    """On the alternate screen, which is left at the end, with the cursor shown again."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=50, color_system="256")
    with pytest.raises(KeyboardInterrupt):
        top.top("a.sock", interval=1.0, once=False, as_json=False, console=console)
    text = file.getvalue()
    assert text.count("process") == 3
    assert text.index(f"{ESCAPE}[?1049h") < text.index("process")
    assert text.rindex(f"{ESCAPE}[?1049l") > text.rindex("process")
    assert text.rindex(f"{ESCAPE}[?25h") > text.rindex("process")


def test_a_pool_that_ends_is_reported(
    screens: list[float], monkeypatch: pytest.MonkeyPatch, taken: Snapshot, capsys: Any
) -> None:
    """The last screen stays in a pipe, and one line says why there is no other."""
    answers = [taken.as_dict(), taken.as_dict()]

    def read(path: Path) -> Any:
        if answers:
            return answers.pop()
        raise SocketUnavailable(path, "no pool listens there")

    monkeypatch.setattr(top, "read_snapshot", read)
    assert cli.main(["top", "a.sock"]) == 2
    printed = capsys.readouterr()
    assert printed.out.count("greensched process") == 2
    assert printed.err == "greensched: a.sock: no pool listens there\n"
