"""Where a pool is in its life, what it has, and how it ended."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from greensched.planning.statistics import SchedulerStatistics, ServiceStatistics


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
class PoolStatistics(SchedulerStatistics):
    """What a pool has and did. SMs over all devices; counts since it was opened.

    Attributes:
        waiting, requested, granted, cancelled, expired, refused: requests.
        sms_free, sms_leased, sms_draining: of the `sms_total`.
        completion: `"word"`: streams write tickets to memory; `"event"`: they cannot here.
        services: of each class; "": of those who named none.
    """

    state: PoolState
    devices: int
    sms_total: int
    leases: int
    lanes: int
    lanes_made: int
    completion: str
    services: Mapping[str, ServiceStatistics]


@dataclass(frozen=True, slots=True)
class CloseReport:
    """How a pool ended: what it had to leave behind, leased or at work after the grace."""

    abandoned: tuple[str, ...] = ()
