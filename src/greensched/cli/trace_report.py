"""The HTML report of a trace: one self-contained file, for light and dark screens of any size.

Rectangles scale with the width only, in percent, so that text keeps its size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

from greensched.observability.lease_history import Span, TracedDevice
from greensched.observability.sm_map import Rectangle
from greensched.observability.trace_reader import RecordedTrace

#: The height of an SM, and of a chart, in pixels.
SM_PX: Final = 2
CHART_PX: Final = 140
#: The most points of a line.
POINTS: Final = 400
#: The most leases in the table.
LONGEST: Final = 10


def page(
    trace: RecordedTrace,
    summary: Mapping[str, Any],
    areas: Sequence[Rectangle],
    colours: Mapping[str, str],
    notes: Iterable[str],
    title: str,
) -> str:
    """Return the report as HTML."""
    devices = (
        f"<p>GPU {device.ordinal}: {escape(device.name)}, {device.sms} SMs, "
        f"{escape(device.uuid)}</p>"
        for device in trace.devices
    )
    seconds = f'<p class="soft">{summary["seconds"]:.3f} s. All times are of the host.</p>'
    template = Path(__file__).with_name("trace_report.html")
    return Template(template.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        facts="".join(devices) + seconds,
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in notes),
        legend=_legend(colours),
        maps="".join(_map(device, areas, colours, trace) for device in trace.devices),
        waiting=_waiting(trace, colours),
        waits=_waits(trace, colours),
        services=_services(summary),
        leases=_leases(trace),
        summary=json.dumps(summary).replace("<", "\\u003c"),
    )


# -- the map ------------------------------------------------------------------------------------


def _legend(colours: Mapping[str, str]) -> str:
    grey = "#8b949e"
    kinds = [(name or "no class", _swatch(colour)) for name, colour in colours.items()]
    kinds += [
        ("draining: the block has ended, its work has not", _swatch(grey, is_draining=True)),
        ("borrowed of another class's reserve", _swatch(grey, is_lent=True)),
    ]
    return "".join(f"<li>{swatch}{escape(name)}</li>" for name, swatch in kinds)


def _swatch(colour: str, *, is_draining: bool = False, is_lent: bool = False) -> str:
    drawn = _rect("0", "0", "14", "14", colour, is_draining=is_draining, is_lent=is_lent)
    return f'<svg width="14" height="14" aria-hidden="true">{drawn}</svg>'


def _rect(
    x: str, y: str, width: str, height: str, colour: str, *, is_draining: bool, is_lent: bool
) -> str:
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    kind = ' class="lent"' if is_lent else ""
    drawn = f'<rect {place} fill="{colour}"{kind}/>'
    return drawn + f'<rect {place} fill="url(#draining)"/>' * is_draining


def _map(
    device: TracedDevice,
    areas: Sequence[Rectangle],
    colours: Mapping[str, str],
    trace: RecordedTrace,
) -> str:
    span = max(trace.end - trace.start, 1e-9)
    height = device.sms * SM_PX
    drawn = []
    for area in areas:
        if area.device == device.ordinal:
            x, width = (
                (at / span) * 100 for at in (area.start - trace.start, area.end - area.start)
            )
            rect = _rect(
                f"{x:.3f}%",
                str(area.first * SM_PX),
                f"{width:.3f}%",
                str((area.end_sm - area.first) * SM_PX - 0.5),
                colours[area.service],
                is_draining=area.is_draining,
                is_lent=area.is_lent,
            )
            tooltip = (
                f"{area.service or 'no class'}, SMs {area.first}-{area.end_sm - 1}, "
                f"{area.start - trace.start:.6f} to {area.end - trace.start:.6f} s"
                f"{', draining' * area.is_draining}{', borrowed' * area.is_lent}"
            )
            drawn.append(f"<g><title>{escape(tooltip)}</title>{rect}</g>")
    svg = (
        f'<svg class="plot" height="{height}" role="img" data-device="{device.ordinal}" '
        f'aria-label="SMs of GPU {device.ordinal} by time">{"".join(drawn)}</svg>'
    )
    step = 2 ** math.ceil(math.log2(max(1, device.sms / 8)))
    marks = [(sm / device.sms, str(sm)) for sm in range(0, device.sms - step // 2, step)]
    return _chart(svg, height, marks, _time_ticks(span))


def _chart(
    svg: str, height: float, marks: Iterable[tuple[float, str]], ticks: Iterable[str]
) -> str:
    """Add scales to a picture: named marks at fractions of its height, and ticks below it."""
    scale = "".join(
        f'<span style="top:{at * height:.0f}px">{escape(name)}</span>' for at, name in marks
    )
    below = "".join(f"<span>{escape(tick)}</span>" for tick in ticks)
    return (
        f'<div class="chart"><div class="scale">{scale}</div>{svg}'
        f'<div class="ticks">{below}</div></div>'
    )


def _time_ticks(seconds: float) -> list[str]:
    unit, name = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return [f"{seconds * unit * part / 4:.3g} {name}" for part in range(5)]


# -- lines --------------------------------------------------------------------------------------


def _lines(lines: Mapping[str, Sequence[tuple[float, float]]], colours: Mapping[str, str]) -> str:
    """Draw lines through points, given as fractions of the width and of the height."""
    drawn = "".join(
        f'<polyline stroke="{colours[name]}" points="'
        + " ".join(f"{100 * x:.2f},{100 - 96 * y:.2f}" for x, y in points)
        + f'"><title>{escape(name or "no class")}</title></polyline>'
        for name, points in lines.items()
    )
    return (
        f'<svg class="plot" height="{CHART_PX}" viewBox="0 0 100 100" '
        f'preserveAspectRatio="none" role="img">{drawn}</svg>'
    )


def _waiting(trace: RecordedTrace, colours: Mapping[str, str]) -> str:
    steps = list(trace.history.waiting)
    if not steps:
        return '<p class="soft">Every request was granted at once.</p>'
    span = max(trace.end - trace.start, 1e-9)
    most = max(number for _, _, number in steps)
    lines: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys(name for _, name, _ in steps):
        highest: dict[int, tuple[int, int]] = {}  # in each column of time: the most, the last
        for time, service, number in steps:
            if service == name:
                column = int((time - trace.start) / span * POINTS)
                highest[column] = max(number, highest.get(column, (0, 0))[0]), number
        points, level = [(0.0, 0.0)], 0.0
        for column, (high, last) in sorted(highest.items()):
            points += [(column / POINTS, level / most), (column / POINTS, high / most)]
            level = last
            points.append((column / POINTS, level / most))
        lines[name] = [*points, (1.0, level / most)]
    svg = _lines(lines, colours)
    return _chart(svg, CHART_PX, [(0.04, str(most)), (1, "0")], _time_ticks(span))


def _waits(trace: RecordedTrace, colours: Mapping[str, str]) -> str:
    """Draw the fraction of requests that waited at most each time, on a log scale."""
    waits_by_class = {
        name: sorted(service.waits)
        for name, service in trace.history.services.items()
        if service.waits
    }
    longest = max((waits[-1] for waits in waits_by_class.values()), default=0.0)
    if not longest:
        return '<p class="soft">No request waited.</p>'
    least, most = -6, max(-5, math.ceil(math.log10(longest)))
    lines = {}
    for name, waits in waits_by_class.items():
        points, before = list[tuple[float, float]](), 0.0
        for at in range(0, len(waits), max(1, len(waits) // POINTS)):
            x = (math.log10(max(waits[at], 10.0**least)) - least) / (most - least)
            part = (at + 1) / len(waits)
            points += [(x, before), (x, part)]
            before = part
        lines[name] = [*points, (1.0, before), (1.0, 1.0)]
    decades = ("1 us", "10 us", "100 us", "1 ms", "10 ms", "100 ms", "1 s", "10 s", "100 s")
    ticks = [
        decades[at] if at < len(decades) else f"1e{at + least} s" for at in range(most - least + 1)
    ]
    svg = _lines(lines, colours)
    marks = [(0.04, "100 %"), (0.52, "50 %"), (1.0, "0")]
    return _chart(svg, CHART_PX, marks, ticks)


# -- tables -------------------------------------------------------------------------------------


def _table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = (
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _services(summary: Mapping[str, Any]) -> str:
    columns = ("class", "SM-s", "share", "leases", "requests", "refused", "expired", "cancelled")
    rows = [
        (
            service["service"] or "no class",
            f"{service['sm_seconds']:.3f}",
            f"{100 * service['share']:.1f} %",
            service["leases"],
            service["requested"],
            *(service[kind] for kind in ("refused", "expired", "cancelled")),
            *(_duration(service[kind]) for kind in ("wait_p50", "wait_p99", "wait_max")),
            service["jobs"],
            service["failed"],
        )
        for service in summary["services"]
    ]
    return _table((*columns, "wait p50", "p99", "most", "jobs", "failed"), rows)


def _leases(trace: RecordedTrace) -> str:
    leases: dict[int, list[Span]] = {}
    for span in trace.history.spans:
        leases.setdefault(span.lease, []).append(span)
    longest = sorted(leases.values(), key=lambda spans: spans[0].start - spans[-1].end)[:LONGEST]
    rows = [
        (
            spans[0].holder or "-",
            spans[0].service or "no class",
            spans[0].device,
            max(span.sms for span in spans),
            _duration(spans[0].start - trace.start),
            _duration(spans[-1].end - spans[0].start),
            _duration(sum(span.end - span.start for span in spans if span.draining)),
        )
        for spans in longest
    ]
    return _table(("holder", "class", "GPU", "most SMs", "began", "lasted", "drained"), rows)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"
