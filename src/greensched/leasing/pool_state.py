"""The states of a pool, and the report of its end."""

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
    """How a pool ended. `abandoned` names leases and work that were left after the grace."""

    abandoned: tuple[str, ...] = ()
