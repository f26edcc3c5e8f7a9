"""Traits of the driver calls: what each call may do to the thread that makes it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Blocking(enum.Enum):
    """Whether a driver call may block its thread."""

    NEVER = "returns at once"
    FIRST_USE = "may block once, where something is made lazily"
    MAY = "may block"


@dataclass(frozen=True, slots=True)
class CallTraits:
    """Whether a driver call may block, and whether it needs a current context on its thread."""

    blocking: Blocking
    needs_context: bool


#: Every driver call by name, for the simulated driver's checks and for the tests.
DRIVER_CALLS: dict[str, CallTraits] = {}


def driver_call(blocking: Blocking, *, needs_context: bool = False) -> Callable[[F], F]:
    """Decorate an abstract method of `Driver` with its traits."""

    def register(function: F) -> F:
        DRIVER_CALLS[function.__name__] = CallTraits(blocking, needs_context)
        return function

    return register


NEVER, FIRST_USE, MAY = Blocking.NEVER, Blocking.FIRST_USE, Blocking.MAY
