"""`greensched trace`: its tables, its pictures, and the report as a browser shows it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from greensched import Drained, Granted, Lent, Lost, Queued, Released, Requested
from greensched.cli import main as cli
from greensched.cli import trace as command
from greensched.cli import trace_report
from greensched.observability import sm_map
from greensched.observability.lease_history import TracedDevice
from greensched.observability.perfetto_writer import PerfettoWriter
from greensched.observability.trace_reader import RecordedTrace, read

DEVICE = TracedDevice(0, "Some <GPU>", "GPU-0", sms=20, cell_count=2, cell_sms=8)
CONTEXT: Any = None
#: Eight seconds: `a` has all SMs for two and drains for one, `<b>` has 8 SMs for four, half of them
#: borrowed; the last 4 SMs are free from then on.
RECORDS = [
    Requested(1.0, 0, "a", ("ALL",), "main", CONTEXT),
    Granted(1.0, 0, 1, "a", 0, 0b111, 20, 0.0, "main"),
    Requested(1.5, 1, "<b>", ("8",), "task", CONTEXT),
    Queued(1.5, 1, "<b>", 1),
    Released(3.0, 1, "a"),
    Drained(4.0, 1, "a", 60.0),
    Granted(4.0, 1, 2, "<b>", 0, 0b010, 8, 2.5, "task"),
    Lent(4.0, 2, "<b>", 0, "a", 4),
    Lost(7.0, 0, "broken"),
    Drained(8.0, 2, "<b>", 32.0),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return the file of a trace of `RECORDS`."""
    path = tmp_path / "t.perfetto-trace"
    writer = PerfettoWriter([DEVICE], 0.0)
    for record in RECORDS:
        writer.add(record)
    writer.end(8.0, dropped=3)
    path.write_bytes(writer.take())
    return path


def test_a_summary_has_what_each_class_had(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SM-time, its share, requests and waits are exact; so is what was lost."""
    assert cli.main(["trace", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["seconds"], found["dropped"], found["lost"]) == (8.0, 3, ["broken"])
    b, a = found["services"]
    assert (a["service"], a["sm_seconds"], a["share"]) == ("a", 60.0, 60 / 160)
    assert (b["service"], b["sm_seconds"], b["share"]) == ("<b>", 32.0, 32 / 160)
    assert (b["requested"], b["granted"], b["leases"]) == (1, 1, 1)
    assert b["wait_p50"] == b["wait_p99"] == b["wait_max"] == 2.5


def test_the_map_is_text(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranges of SMs that were held alike are a line, with a letter for each class."""
    assert cli.main(["trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    assert "A <b>, B a" in printed
    rows = dict(re.findall(r"^GPU 0 SM +(\S+) \|(.*)\|$", printed, re.MULTILINE))
    assert list(rows) == ["0-7", "8-15", "16-19"]
    assert rows["0-7"] == "." * 8 + "B" * 16 + "b" * 8 + "." * 32
    assert rows["8-15"] == "." * 8 + "B" * 16 + "b" * 8 + "A" * 32
    assert rows["16-19"] == rows["0-7"]
    assert "3 records are missing" in printed
    assert "A device was lost: broken" in printed


# -- the report ---------------------------------------------------------------------------------


class Report(HTMLParser):
    """What a report holds: the rectangles of maps, text, attributes that load something, JSON."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.rectangles: list[dict[str, str]] = []
        self.loads: list[str] = []
        self.cells: list[str] = []
        self.json = ""
        self._in: list[str] = []
        self._is_map = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self._in = [tag]
        if tag == "svg":
            self._is_map = "data-device" in found
        if tag == "rect" and self._is_map:
            self.rectangles.append(found)
        self.loads += [found[name] for name in ("src", "href", "xlink:href") if name in found]

    def handle_data(self, data: str) -> None:
        if self._in == ["td"]:
            self.cells.append(data)
        if self._in == ["script"]:
            self.json += data

    def handle_endtag(self, tag: str) -> None:
        self._in = []


def test_the_report_holds_the_trace(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its areas are the SM-time of each class; it loads nothing, and names stand for themselves."""
    path = trace.with_suffix(".html")
    assert cli.main(["trace", str(trace), "--json", "--plot", str(path)]) == 0
    summary = json.loads(capsys.readouterr().out)
    report, page = Report(path), path.read_text()
    assert json.loads(report.json) == summary
    areas: defaultdict[str, float] = defaultdict(float)
    for one in report.rectangles:
        sms = (float(one["height"]) + 0.5) / 2
        areas[one["fill"]] += sms * float(one["width"].removesuffix("%")) / 100 * summary["seconds"]
    of_b, of_a = (each["sm_seconds"] for each in summary["services"])
    assert areas == pytest.approx(
        {command.COLOURS[0]: of_b, command.COLOURS[1]: of_a, "url(#draining)": 20.0}, rel=0.001
    )
    lent = [one for one in report.rectangles if one.get("class") == "lent"]
    assert [(one["y"], one["height"]) for one in lent] == [(str(12 * 2), "7.5")]
    assert report.loads == []
    assert not re.search(r"https?:|@import|url\((?!#)", page)
    assert "<b>" not in page
    assert "<b>" in report.cells


def test_waits_are_drawn_in_steps() -> None:
    """A line goes up where a request waited so long, and is level between."""
    trace = RecordedTrace()
    trace.history.services["a"].waits = [0.1, 0.0, 0.002]
    (points,) = re.findall('points="(.*?)"', trace_report._waits(trace, {"a": "red"}))
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    assert len(places) == 8
    assert all(one[0] == other[0] or one[1] == other[1] for one, other in pairwise(places))


BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")
MEASURE = """
<script>
const map = document.querySelector("svg[data-device]"), box = map.getBoundingClientRect();
const lent = document.querySelector(".plot .lent").getBoundingClientRect();
parent.document.title = JSON.stringify({
  page: document.documentElement.scrollWidth, width: innerWidth, map: box.width,
  start: (lent.left - box.left) / box.width, part: lent.width / box.width,
  colour: getComputedStyle(document.body).backgroundColor,
});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no headless browser: apt install chromium")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("is_dark", [False, True])
def test_a_browser_shows_the_report(width: int, is_dark: bool, trace: Path) -> None:
    """On a phone and a desktop, light and dark: nothing is wider than the page, and areas fit."""
    path = trace.with_suffix(".html")
    assert cli.main(["trace", str(trace), "--json", "--plot", str(path)]) == 0
    page = html.escape(path.read_text().replace("</body>", MEASURE + "</body>"))
    # In a frame, because a browser's window is at least 500 pixels wide.
    style = f"border: 0; width: {width}px; height: 900px"
    path.write_text(f'<title></title><iframe style="{style}" srcdoc="{page}"></iframe>')
    options = ["--no-sandbox", "--headless", "--disable-gpu", "--dump-dom"]
    options += [f"--blink-settings=preferredColorScheme={int(not is_dark)}"]
    done = subprocess.run(
        [str(BROWSER), *options, path.as_uri()], capture_output=True, text=True, check=True
    )
    found = json.loads(re.findall(r"<title>(.*?)</title>", done.stdout)[0])
    assert found["width"] == width
    assert found["page"] <= width
    assert width * 0.75 < found["map"] < width
    assert (found["start"], found["part"]) == pytest.approx((0.5, 0.5), abs=0.01)
    red = int(re.findall(r"\d+", found["colour"])[0])
    assert (red < 64) == is_dark


# -- pictures -----------------------------------------------------------------------------------


def test_a_picture_has_the_same_areas(trace: Path) -> None:
    """Of what matplotlib is told to draw, hatched is what drains, and pale what is borrowed."""
    drawn: list[dict[str, Any]] = []

    def broken_barh(spans: Any, sms: Any, **style: Any) -> None:
        drawn.extend({"area": length * sms[1], **style} for _, length in spans)

    recorded = read(trace)
    areas = sm_map.rectangles(recorded.history.spans, recorded.devices)
    colours = {"a": "red", "<b>": "blue"}
    command.draw(SimpleNamespace(broken_barh=broken_barh), areas, colours, recorded.start)
    totals: defaultdict[tuple[str, bool, bool], float] = defaultdict(float)
    for one in drawn:
        totals[one["facecolor"], one["hatch"] is not None, one["alpha"] < 0.5] += one["area"]
    assert totals == {
        ("red", False, False): 40.0,
        ("red", True, False): 20.0,
        ("blue", False, False): 16.0,
        ("blue", False, True): 16.0,
    }


def test_without_matplotlib_a_picture_says_what_to_install(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is one line, before the trace is read; a report needs no matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["trace", "none", "--plot", str(trace.with_suffix(".svg"))]) == 2
    assert re.search(r"a plot needs matplotlib: pip install .*\[plot\]", capsys.readouterr().err)
    assert cli.main(["trace", str(trace), "--plot", str(trace.with_suffix(".html"))]) == 0


def test_rectangles_with_a_gap_too_small_to_see_are_one() -> None:
    """Many short leases of the same SMs are drawn as one area; others stay apart."""
    ones = [sm_map.Rectangle(0, 0, 8, at, at + 0.5, "a", False, False) for at in range(4)]
    assert len(sm_map.merged(ones, 0.6)) == 1
    assert len(sm_map.merged(ones, 0.4)) == 4
