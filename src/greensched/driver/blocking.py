"""Marks of the port's verbs: what each may do to the thread that calls it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Blocking(enum.Enum):
    """What a verb may do to the thread that calls it."""

    NEVER = "returns at once"
    FIRST_USE = "may block once, where something is made lazily"
    MAY = "may block"


@dataclass(frozen=True, slots=True)
class Mark:
    """A verb's mark: may it block, and does it need a current context on its thread?"""

    blocks: Blocking
    needs_context: bool


#: Every verb of the port by name, for the simulated driver's checks and for the tests.
DRIVER_CALLS: dict[str, Mark] = {}


def driver_call(blocks: Blocking, *, needs_context: bool = False) -> Callable[[F], F]:
    """Marks an abstract method of `Driver` as a verb."""

    def register(function: F) -> F:
        DRIVER_CALLS[function.__name__] = Mark(blocks, needs_context)
        return function

    return register


NEVER, FIRST_USE, MAY = Blocking.NEVER, Blocking.FIRST_USE, Blocking.MAY
