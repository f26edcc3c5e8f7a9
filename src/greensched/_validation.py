"""Checks of values that callers pass: numbers (also numpy's), named options, device ordinals.

Also `Uncopyable`, which refuses copies of objects that stand for something on a device.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, NoReturn

from greensched.errors import InvalidRequest, NotCopyable


def as_float(value: object) -> float:
    """Convert a number to a float; return nan for anything else, or a number too large."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def as_int(value: object) -> int:
    """Convert a whole number to an int; return 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return 0
    return int(value)


def is_count(value: object) -> bool:
    """Say whether a value is a whole number of at least 0; a bool is not."""
    return type(value) is int and value >= 0


def is_number(value: object) -> bool:
    """Say whether a value is a number other than nan."""
    return not math.isnan(as_float(value))


def reason(error: Exception) -> str:
    """Return in words why a file cannot be read or has wrong content."""
    if isinstance(error, KeyError):
        return f"no {error}"
    return getattr(error, "strerror", None) or str(error)


def as_tuple(value: Any) -> tuple[Any, ...] | None:
    """Return the elements of an iterable; None for anything else, such as a 0-d array."""
    try:
        elements = iter(value)
    except TypeError:
        return None
    return tuple(elements)


def one_of(name: str, value: object, known: tuple[object, ...]) -> object:
    """Return an option's value if it is allowed.

    Raises:
        InvalidRequest: The value is not allowed.
    """
    if not any(value is option or (isinstance(value, str) and value == option) for option in known):
        raise InvalidRequest(f"{name}={value!r}: give {' or '.join(map(repr, known))}")
    return value


def ordinals(devices: object) -> tuple[int, ...]:
    """Convert ordinals, or devices of other libraries, to distinct ordinals.

    Raises:
        InvalidRequest: There is no device, one appears twice, or a value is not an ordinal.
    """
    chosen = tuple(getattr(device, "device_id", device) for device in as_tuple(devices) or ())
    if not chosen or not all(map(is_count, chosen)) or len(set(chosen)) != len(chosen):
        raise InvalidRequest(
            f"devices={devices!r}: give ordinals, at least one and each once, such as [0, 1]"
        )
    return chosen


class Uncopyable:
    """An object that stands for something on a device, so that a copy would be wrong."""

    __slots__ = ()

    def __reduce_ex__(self, _: object) -> NoReturn:
        """Refuse `copy`, `pickle`, and their users: multiprocessing, Ray, joblib.

        Raises:
            NotCopyable: Always.
        """
        raise NotCopyable(type(self).__name__)
