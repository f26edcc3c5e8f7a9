"""The map of SMs by time: which leases held which SMs when, as rectangles or as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from greensched.observability.lease_history import Span, TracedDevice

#: Gaps and rectangles of one kind that last less than this fraction of the time are merged.
RESOLUTION: Final = 1 / 2000
#: The letters of classes in a text; lower case means that the lease drains.
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
#: The most holders that a text distinguishes.
_MOST_HOLDERS: Final = 8
#: The most columns and rows of a text.
_COLUMNS: Final = 64
_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class Rectangle:
    """SMs `first` to `end_sm` of a device, held by a class in one state for some seconds."""

    device: int
    first: int
    end_sm: int
    start: float
    end: float
    service: str
    is_draining: bool
    is_lent: bool

    @property
    def sm_seconds(self) -> float:
        """The rectangle's duration times its SMs."""
        return (self.end_sm - self.first) * (self.end - self.start)


def rectangles(spans: Iterable[Span], devices: Iterable[TracedDevice]) -> list[Rectangle]:
    """Return the rectangles of spans, ordered by time.

    A loan has a number of SMs, not particular ones; the last SMs of the lease represent it.
    """
    by_ordinal = {device.ordinal: device for device in devices}
    areas = []
    for span in spans:
        own = span.sms - span.lent
        for first, end in by_ordinal[span.device].sms_of(span.cells):
            between = min(end, first + max(0, own))
            own -= end - first
            for low, high, is_lent in ((first, between, False), (between, end, True)):
                if low < high:
                    when = span.start, span.end, span.service, span.draining
                    areas.append(Rectangle(span.device, low, high, *when, is_lent))
    return sorted(areas, key=lambda area: (area.start, area.first))


def merged(areas: Iterable[Rectangle], gap: float) -> list[Rectangle]:
    """Join rectangles of the same SMs and kind if they, or gaps between them, are short."""
    latest: dict[tuple[object, ...], Rectangle] = {}
    done = []
    for area in areas:
        key = (area.device, area.first, area.end_sm, area.service, area.is_draining, area.is_lent)
        before = latest.get(key)
        if before is not None and area.start - before.end < gap and _is_short(before, area, gap):
            latest[key] = replace(before, end=max(before.end, area.end))
            continue
        if before is not None:
            done.append(before)
        latest[key] = area
    return [*done, *latest.values()]


def _is_short(first: Rectangle, second: Rectangle, gap: float) -> bool:
    return min(first.end - first.start, second.end - second.start) < gap


def by_holder(spans: Sequence[Span]) -> list[Span]:
    """Return spans with their holders' names as classes; unchanged if there are many."""
    named = [replace(span, service=f"{span.holder} {span.service}".strip()) for span in spans]
    return named if len({span.service for span in named}) <= _MOST_HOLDERS else list(spans)


def text(
    spans: Sequence[Span],
    devices: Sequence[TracedDevice],
    start: float,
    end: float,
    origin: float = 0.0,
) -> list[str]:
    """Return the map as text: a row for each range of SMs; time runs to the right.

    Args:
        spans: The spans.
        devices: The devices of the spans.
        start: The time of the first column, in seconds.
        end: The time of the last column, in seconds.
        origin: The time that the scale shows as 0, in seconds.
    """
    areas = rectangles(spans, devices)
    if not areas:
        return []
    services = sorted({area.service for area in areas})
    letters = {name: _LETTERS[index % len(_LETTERS)] for index, name in enumerate(services)}
    classes = ", ".join(f"{letters[name]} {name or 'no class'}" for name in services)
    times = f"{start - origin:.6f} to {end - origin:.6f} s"
    lines = [f"SMs by time, {times}: {classes}; lower case: draining; '.': free"]
    for device in devices:
        of_device = [area for area in areas if area.device == device.ordinal]
        rows = _rows(of_device, device, letters, start, end)
        for first, last, row in rows[:_ROWS] if of_device else []:
            lines.append(f"GPU {device.ordinal} SM {f'{first}-{last - 1}':>7} |{row}|")
        if len(rows) > _ROWS and of_device:
            lines.append(f"... and {len(rows) - _ROWS} more rows")
    return lines


def _rows(
    areas: list[Rectangle],
    device: TracedDevice,
    letters: dict[str, str],
    start: float,
    end: float,
) -> list[tuple[int, int, str]]:
    """Return ranges of SMs with the same history, and their holder in each column of time."""
    edges = sorted(
        {0, device.sms, *(area.first for area in areas), *(area.end_sm for area in areas)}
    )
    numbers = {edge: number for number, edge in enumerate(edges)}
    held = [[defaultdict[str, float](float) for _ in range(_COLUMNS)] for _ in edges[1:]]
    column = (end - start) / _COLUMNS
    for area in areas:
        mark = letters[area.service].lower() if area.is_draining else letters[area.service]
        first_column, end_column = (int((time - start) / column) for time in (area.start, area.end))
        for index in range(first_column, min(end_column, _COLUMNS - 1) + 1):
            begin = start + index * column
            seconds = min(area.end, begin + column) - max(area.start, begin)
            if seconds <= 1e-9 * column:  # it ends where the column begins
                continue
            for row in held[numbers[area.first] : numbers[area.end_sm]]:
                row[index][mark] += seconds
    lines = [
        "".join(max(marks, key=marks.__getitem__, default=".") for marks in row) for row in held
    ]
    rows: list[tuple[int, int, str]] = []
    for low, high, line in zip(edges[:-1], edges[1:], lines, strict=True):
        since = rows.pop()[0] if rows and rows[-1][2] == line else low
        rows.append((since, high, line))
    return rows


def numbers(mask: int) -> list[int]:
    """Return the numbers of the SMs or cells in a mask."""
    return [number for number in range(mask.bit_length()) if mask >> number & 1]


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: `0-15, 32`."""
    ends: list[list[int]] = []
    for number in sorted(numbers):
        if ends and number == ends[-1][-1] + 1:
            ends[-1][1:] = [number]
        else:
            ends.append([number])
    return ", ".join("-".join(map(str, pair)) for pair in ends)
