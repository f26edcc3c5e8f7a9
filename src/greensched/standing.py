"""Where a pool is in its life, what it has, and how it ended."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from greensched.planning.requests import ServiceStatistics


class PoolState(enum.Enum):
    """Where a pool is in its life."""

    NEW = "not open"
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    POISONED = "poisoned"
    FORKED = "forked"


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool has and did. SMs over all devices; counts since it was opened.

    Attributes:
        completion: `"word"`: streams write tickets to memory; `"event"`: they cannot here.
        services: of each class; "": of those who named none.
    """

    state: PoolState
    devices: int
    sms_total: int
    sms_free: int
    sms_leased: int
    sms_draining: int
    leases: int
    waiting: int
    requested: int
    granted: int
    cancelled: int
    expired: int
    refused: int
    lanes: int
    lanes_made: int
    completion: str
    services: Mapping[str, ServiceStatistics]


@dataclass(frozen=True, slots=True)
class CloseReport:
    """How a pool ended: what it had to leave behind, leased or at work after the grace."""

    abandoned: tuple[str, ...] = ()
