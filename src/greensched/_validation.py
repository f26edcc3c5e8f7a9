"""Numbers as users give them, numpy's too, as Python's own. What is none is told, not raised."""

from __future__ import annotations

import math
from numbers import Integral, Real


def real(value: object) -> float:
    """A number; nan: it is none, or beyond all floats."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def whole(value: object) -> int:
    """A whole number; 0: it is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return 0
    return int(value)
