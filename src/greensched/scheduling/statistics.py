"""What the scheduler and its classes have done so far: figures, for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counts since the beginning, and what is the case now.

    Every request taken is `requested`, and then `waiting`, `granted`, `cancelled` (also by the
    end of the pool, or where it can never be granted any more) or `expired`; one that was refused
    because of what else waits is `refused`.
    """

    waiting: int
    requested: int
    granted: int
    cancelled: int
    expired: int
    refused: int
    sms_free: int
    sms_leased: int
    sms_draining: int


@dataclass(frozen=True, slots=True)
class ServiceStatistics:
    """What a class has and had.

    Attributes:
        sms: SMs it holds, also where their work still drains.
        sms_lent: of its floor, to others.
        waiting: its requests that are queued.
        granted: its leases since the beginning.
        sm_seconds: what they took, those that are over.
        is_shared: it is granted all SMs of a device, beside others that are.
    """

    sms: int
    sms_lent: int
    waiting: int
    granted: int
    sm_seconds: float
    is_shared: bool
