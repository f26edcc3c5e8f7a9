"""The states of a pool, from its making to the report of its end."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PoolState(enum.Enum):
    """The state of a pool."""

    NEW = "not open"
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    POISONED = "poisoned"
    FORKED = "forked"


@dataclass(frozen=True, slots=True)
class CloseReport:
    """How a pool ended: `abandoned` names what was leased or had work after the grace."""

    abandoned: tuple[str, ...] = ()
