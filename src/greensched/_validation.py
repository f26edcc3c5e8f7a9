"""Turn numbers of callers, numpy's included, into Python's own; the caller raises the error."""

from __future__ import annotations

import math
from numbers import Integral, Real


def as_float(value: object) -> float:
    """Return a real number as a float; nan if the value is no number or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def as_int(value: object) -> int:
    """Return a whole number as an int; 0 if the value is not a whole number."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return 0
    return int(value)
