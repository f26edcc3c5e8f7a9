"""Random devices and requests, small enough for the naive model."""

from __future__ import annotations

from hypothesis import strategies as st

from greensched.scheduling.cells import DeviceCells, SizeRange
from greensched.typing import REST


@st.composite
def devices(draw: st.DrawFn, most_cells: int = 5) -> DeviceCells:
    """Draw devices with or without a remainder, which may be larger than a cell and may join."""
    remainder = draw(st.integers(0, 6))
    return DeviceCells(
        size=draw(st.integers(1, 4)),
        count=draw(st.integers(1, most_cells)),
        remainder=remainder,
        joins=bool(remainder) and draw(st.booleans()),
    )


def plain_demands(most: int = 24) -> st.SearchStrategy[SizeRange]:
    """Draw a number of SMs, or a range."""
    pairs = st.tuples(st.integers(1, most), st.integers(0, most))
    return pairs.map(lambda pair: SizeRange(pair[0], pair[0] + pair[1])) | st.integers(1, most).map(
        lambda sms: SizeRange(sms, sms)
    )


@st.composite
def joint_demands(draw: st.DrawFn) -> tuple[SizeRange, ...]:
    """Draw two or three parts, of which one may be REST."""
    parts = draw(st.lists(plain_demands(12), min_size=1, max_size=3))
    if len(parts) == 1 or draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), SizeRange(0, 0, REST))
    return tuple(parts[:3])
